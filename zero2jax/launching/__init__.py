"""Starting a program as several processes: here, on other hosts through ssh, or by a scheduler.

In reading order:

    local        processes on this host: their environment, logs and restarts
    supervise    commands run as one: the first failure ends all, and nothing stays behind
    hosts        one launcher per host, through ssh
    hostfile     DeepSpeed's hostfile and filters
    scripts      what Slurm, mpirun and Kubernetes are given instead, as text

No jax of its own: the launcher needs no device. Imports processes, for the names of variables, addresses and exit
codes. Other rooms leave supervise alone.
"""
