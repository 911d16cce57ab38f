"""The state on disk, for any number of devices, any stage and any mesh; and parameters out of it and into it.

Read in this order: `format` (what lies on disk, and its reader), `state_leaves` (shards to named leaves and back),
`matching` (which leaf goes where), `checkpointer` (save and restore), `saver` (one save, alike in all processes),
`orbax_handler` (what Orbax commits), `export` (safetensors files for other programs). Beside them `safetensors_file`,
`extra` (what a user saves beside the state), `directory` (what may lie in one) and `reopen` (what a run that offloads
to a local disk left there).

May import the core and `engine`; knows nothing of configurations. Only `saver` and `orbax_handler` import Orbax.
"""
