"""A compiled step, read: what it holds in memory, what it communicates, what its schedule hides.

The files, in reading order:

  formulas   the classes of memory by name, and ZeRO's bytes of each
  hlo        the text of a compiled program as instructions, loops and collectives
  trips      how often a loop runs whose count the compiler has dropped
  groups     which devices take part in a collective, along which mesh axes
  audit      memory as the compiler allocates it, and the collectives; an assertion for tests
  buffers    which instructions share memory (union-find)
  liveness   live bytes at each instruction of the schedule, by class
  tensors    the largest tensors of a moment, and the operations that made them
  products   matrix products, and the dtype in which they are multiplied
  scopes     matrix products by named scope, phase and loop
  flops      matrix products of a loss function, counted in its trace
  reductions parameters whose gradients stage 3 reduces more than once
  traffic    bytes of memory that each instruction reads and writes
  overlap    what the schedule waits for, by two clocks
  memory     a running engine's bytes, measured beside the formulas

All but `formulas` and `memory` read text and nothing else: they need no device, and no engine. Imports base and zero.
"""
