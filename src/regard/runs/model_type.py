"""The type of a model, whatever Regard made of it."""

from typing import Any


def original_type(config: Any) -> str:
    """Return the type of a model by its config: of a replaced one that of its original; "" if there is none."""
    return str(getattr(config, "base_model_type", None) or getattr(config, "model_type", None) or "")
