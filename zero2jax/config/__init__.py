"""A DeepSpeed JSON becomes an engine. No DeepSpeed word is known outside of this room.

In reading order, from the file to the engine:

    reading            a file, a text or a dict becomes a `Config`; all errors of a file at once
    source, auto       what is read, as one JSON object; values for keys left at "auto"
    schema, params     `Config` as frozen dataclasses, named as DeepSpeed names its keys; parameters of optimizers
    blocks, values     how one block is read; what a single value may be
    suggestions        what an unknown key may have meant
    keys               the table: what becomes of every key
    rules              rules that join several keys; what the engine does not have yet
    translate          `Config` -> `EngineSettings`, once
    optimizers, schedules, compiler_options    the blocks that are not settings: optax, learning rates, XLA
    observing          who is told of each step
    initialize         the engine
    check              the same settings in words, for `zero2jax check`

Imports base, zero, activations, offload, monitors, processes and engine. Other rooms import initialize, reading, check
and values.
"""
