"""What every command says of wrong use."""


class UsageError(ValueError):
    """Something on the command line cannot be used; says what, and what can."""
