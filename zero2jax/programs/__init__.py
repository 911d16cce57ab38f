"""The room `programs`."""
