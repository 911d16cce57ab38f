"""Device memory as a whole: how the client allocates it, and what is said of it.

    configure    `configure_memory`: the one module that writes the environment, before a backend starts
    step_options XLA's options of one step: presets, and options checked against the compiler that is installed

Imports `base`, `zero` and `programs`.
"""
