"""Device memory as a whole: how the client allocates it, and what is said of it.

    configure    `configure_memory`: the one module that writes the environment, before a backend starts
    step_options XLA's options of one step: presets, and options checked against the compiler that is installed
    arena_plan   where each leaf of the state lies in a few large buffers
    arena        the state in those buffers, and the step on it
    host_arena   one buffer of host memory for arrays that come and go: best fit, merging, defragmentation
    report       what devices and host hold now, by class, and how fragmented the pool is
    out_of_memory  RESOURCE_EXHAUSTED explained: who holds what, and the cheapest ways out
    picture      measured memory as a PNG
    breakdown    memory in the metrics of each step

Imports `base`, `zero` and `programs`.
"""
