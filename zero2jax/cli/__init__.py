"""The command line: parse, load, call one public function, print. What it needs is the extra `cli`: rich and tyro.

In reading order:

    main      the commands and their arguments, errors as one line and exit code 2
    check     a configuration as tables
    info      versions, devices, memory
    doctor    what in the environment will go wrong, and its remedy
    plan      a program of the user's, planned, searched or tabulated
    launch    a script as several processes
    other_launchers  what options of torchrun, DeepSpeed and others are called here
    usage     the error of wrong use

Imports every room; no room imports it. `zero2jax/__main__.py` looks whether its packages are there.
"""
