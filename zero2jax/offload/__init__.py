"""ZeRO-Offload: fp32 masters and optimizer state in host memory, updated there or on the devices. Global arrays.

One step at any stage, P parameters over N devices, mixed-precision Adam:

    device                                        host memory, a CPU device for each device
    parameters, 16 bit   2 P, or 2 P/N            fp32 masters 4 P/N, Adam's moments 8 P/N
      │                                                             │
      ▼                                                             │
    gradients, reduced as the stage says                            │
      └── gradient shards, 2 P/N bytes down ──▶ optax, compiled by XLA for the CPU
                                                                    │
    parameters, 16 bit  ◀── shards, 2 P/N bytes up ◀── masters, moments, 16-bit copies

Or the devices update what lies in the pinned host memory of their own: a chunk of masters and moments comes up, is
updated and goes down again, 24 P/N bytes over the bus, and the host computes nothing. At stage 3 the 16-bit shards may
lie there, too, between their uses.

The state is a `TrainState` like any other: the same leaves, shapes and dtypes, stored on another mesh. So a checkpoint
is read into either. The mesh of the host has a CPU device in the place of each device, and the same axes: the update
is the program that the device would run, with true shapes and global arrays, and any transformation of optax is right.

The files, in reading order:

  settings      what an engine is told
  host_mesh     the CPU devices that stand beside the devices
  host_memory   what they store, and whether their host has room for it
  host_step     gradients on the devices, the update on the host: two pure functions
  parts         which leaves can be updated apart from the others
  chunks        the host's half, a chunk of leaves at a time
  residents     which leaves stay on the devices, if not all go to the host
  auto_ratio    how much the host must take, from a budget
  offloaded     both jitted, and what moves between them; stands in for `zero.compiled.Compiled`
  blocks        an update done to some rows of a stack at a time
  streams       an update on the devices of what lies in host memory, a chunk or a block at a time
  streamed      that step, jitted; stands in for `offloaded`
  delayed       the update beside the next step, which uses parameters one update older
  rates         measured bandwidths, and what offloading adds to a step
  disk_buffers  the memory that files are read into
  disk_files    files that are written once and checksummed, in a locked folder of the process
  disk_arrays   what stands for a leaf whose shards are files
  disk_state    the files of a state, and the record of its last complete step
  disk_space    whether disks and hosts have room for it
  disk_offloaded        chunks read ahead and written behind the update
  functions     which of them an engine has
  between       a state in host memory between two phases, of any engine

Imports `base`, `zero` and `memory`; `zero` never imports it. Ren et al., ZeRO-Offload: Democratizing Billion-Scale
Model Training, arXiv:2101.06840, sections 3 and 4.
"""
