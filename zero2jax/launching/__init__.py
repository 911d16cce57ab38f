"""The room `launching`."""
