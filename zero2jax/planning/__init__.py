"""Will it fit? A step compiled for devices that need not be here, and read.

The files, in reading order:

  estimate      the formulas of the ZeRO paper for a number of parameters; nothing is compiled
  targets       what can be planned for: five cards, the devices here, simulated CPU devices
  planner       shapes -> engine -> lowered -> compiled step -> report
  report        what a plan says: memory by class, collectives, overlap
  balance       whether a step computes for as long as it communicates, or what would change that
  offload_plan  bytes in host memory and over the bus
  picture       the same as a PNG
  search        many settings of one program, the frontier and the cheapest that fits
  policy_table  the remat policies side by side

Imports base, programs, zero, activations, offload, processes, engine and config. `picture` is private to the room.
"""
