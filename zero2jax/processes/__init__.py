"""Several processes as one program: how they start, what they ask each other, and how they end.

In reading order:

    start          `init_distributed`: from the environment to `jax.distributed`
    cluster_env    where a process learns of the others: the variables of launchers and schedulers
    launcher_variables   their names, as tables
    addresses      the coordinator's address
    roll_call      before anything can hang: who is missing, and who runs other code
    signed_lines   what is said there, and by whom
    agreement      questions between running processes: do all agree, do all have the same value
    progress       which process has stopped stepping, while the others wait for it
    step_clock     which process is slow
    preemption     ending on request, after a step that was saved

The first six run before any device is used, the others after. Imports base. Other rooms leave roll_call alone.
"""
