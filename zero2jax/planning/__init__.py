"""The room `planning`."""
