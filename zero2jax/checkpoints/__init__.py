"""The room `checkpoints`."""
