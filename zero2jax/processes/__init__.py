"""The room `processes`."""
