"""One of several processes that run a program of this folder: `program.py INDEX COUNT PORT [ARGUMENT ...]`.

Importing it joins the others and gives what such programs use. Each prints its result as JSON on its last line.
"""

import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
index, count, port = map(int, sys.argv[1:4])
arguments = sys.argv[4:]
if count > 1:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, index)


def values(state):
    """The shards of a state that this process holds."""
    import numpy as np

    return [np.asarray(s.data) for x in jax.tree.leaves(state) for s in x.addressable_shards]


def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


def peak_above_now(act):
    """(bytes by which the memory of this process rises above what it is now while `act()` runs, its result)."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the high-water mark starts again
    before = memory("VmRSS")
    result = act()
    return memory("VmHWM") - before, result
