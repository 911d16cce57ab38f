"""The room `zero`."""
