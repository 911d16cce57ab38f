"""Activation checkpointing: what backward keeps of a model's layers, and where. No parameter is sharded here.

Read in this order: `policies` (words for what `jax.checkpoint` saves), `remat` (by hand: a function, or a mark on a
block), `settings` and `layers` (the layers of a model that was not written for it), then what `layers` is made of:
`layer_search` (where the layers are), `boundary` (what is saved where a segment begins), `rewriter` (the loss evaluated
again), and `profile` (time and bytes of a segment).

Works on loss functions before `zero` shards their parameters. May import `base` alone.
"""
