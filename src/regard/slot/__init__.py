"""Where an operator meets a model."""

from regard.slot.watching import Watch, watching

__all__ = ["Watch", "watching"]
