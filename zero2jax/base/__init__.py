"""What everything else stands on. Knows neither ZeRO nor a configuration, a checkpoint or the command line.

The files, in reading order:

  pytrees         names, shapes and choices of the leaves of a tree
  mesh            device meshes, and which of their axes hold different examples
  memories        the memory of a device, and the pinned memory of its host
  batches         batches: checked, placed over the devices, ordered over epochs
  losses          what a loss function returns, and its exact mean over devices and microbatches
  transformation  what is asked of an optax transformation
  jaxprs          everything that knows the insides of a jaxpr
  wide_sums       sums in bf16 over devices, in fp32 where a compiler cannot have them
  peaks           operations per second that accelerators can do, and their memory
  tables          aligned text, readable bytes
  names           near names, for messages
  checks          what a caller passed in, for messages
  notices         warnings that point at the user's line
  compiler        which options the installed compiler takes
  versions        installed versions

Imports no other room.
"""
