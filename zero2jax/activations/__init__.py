"""The room `activations`."""
