"""Which layers of a frozen model have adapters by default."""
