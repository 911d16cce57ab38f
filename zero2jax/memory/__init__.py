"""Device memory as a whole: how the client allocates it, and what is said of it.

    configure    `configure_memory`: the one module that writes the environment, before a backend starts

Imports `base`, `zero` and `programs`.
"""
