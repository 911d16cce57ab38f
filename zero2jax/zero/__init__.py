"""ZeRO: training state lives in shards, and a full parameter exists only where the loss uses it.

One step at stage 2 or 3, on one of N devices. `w` stands for every parameter, P of them in all:

    at rest       shard of w, fp32                      shards of Adam's moments
                  4 P/N bytes                           8 P/N bytes
                      │                                         │
   ┌─ shard_map ──────┼───────────────────────────────────┐     │
   │  stand-in   (shard, port)                            │     │
   │  at its use      ├── all_gather ──▶ w, bf16 ──┐      │     │
   │                  │                            ▼      │     │
   │                  │              loss(params, batch)  │     │
   │                  │                            │      │     │
   │  in backward   port ◀── psum_scatter ── dw ◀──┘      │     │
   └──────────────────┼───────────────────────────────────┘     │
                 shard of dw                                    │
                      └─────▶ optax, on global arrays ◀─────────┘
                                         │
    at rest       shard of w  ◀──────────┴────────▶  shards of the moments

The loss is the user's own function, not a line of it changed. The trick is in the two arrows: a gradient is reduced and
sharded at the place in the backward pass where it is made, so the full gradient of a model never exists; nor, at stage
3, does a full copy of its parameters. `jax.grad` is taken with respect to the ports. The optimizer is plain optax,
outside of the `shard_map`, on global arrays that happen to be sharded: any transformation of optax is right.

Three terms are used throughout:

  at rest   how an array is stored between steps: sharded over the data axis, padded where it does not divide.
  stand-in  what the loss function is given in the place of a parameter: its shard and its port.
  port      zeros of the shard's shape that nobody reads: the gradient leaves through them.

The files, in reading order. The first five are the idea:

  1 shard_plan    which dim of each leaf is sharded, or why none
    metadata      where Flax's metadata places it on other mesh axes
  2 exchange      one leaf: all_gather forward, psum_scatter backward
  3 point_of_use  the loss evaluated with stand-ins: each parameter is gathered where it is used
  4 gradients     the four stages
  5 step          one training step; plain optax on global arrays
    microbatches  the loop that adds their gradients
    prepare       the mean gradient's norm, verdict and clipping, and the update
    rounding      masters and moments in 16 bits: rounded after each update, to nearest or at random
    loss_scale    float16: the scale of backward, and steps that overflow
    collectives   all_gather and psum_scatter themselves, beside other mesh axes; sums in a fixed order
    quantized     the same in 8 or 4 bits: blocks with a scale each
    layer_picks   layers taken out of a stack, or put into one: done to shards
    regather      operations with a body of their own, and loops' constants, at stage 3
    tracing       the loss as a jaxpr, without the mesh
    state, placement    what is at rest, and how it gets there without a full copy
    state_checks  whether a state is one that a program may take
    blueprint     what an engine is told of the layout and the step, and both from shapes
    schedule      options of the compiler that hide communication
    compiled      the step, evaluations and full parameters of one layout, jitted; donation
    running       the mesh and the errors around a program; simulated devices share threads
    layer_dims    which leading dims are layers: read from the loss, or guessed
    precision, settings, gradient_settings   dtypes; everything that is fixed about a step
    shard_optimizer       the other way in: an optax wrapper for a step of your own

Imports `base` alone. Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
arXiv:1910.02054: stages 1 to 3 are its P_os, P_os+g and P_os+g+p.
"""
