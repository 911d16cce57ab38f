"""What watches a run and changes none of its numbers: metrics written elsewhere, lines of progress, times.

In reading order:

  monitors     `Monitors`: metrics to TensorBoard, CSV files, Weights & Biases, Comet, or writers of your own
  writers      a thin adapter per library
  outlets      one writer until it fails: a failure is warned of once, and ends no run
  background   the thread that all of this happens in
  observers    what an engine tells of each step, and to whom
  progress     lines every so many steps: metrics, throughput, where the time goes
  reports      texts printed once, before a step
  profiler     one step's operations by scope and loop, its bytes and its time

Nothing here waits for a device in the training loop: metrics are read in the background once their step is done.
Imports base and programs.
"""
