"""What a model is: its type, whatever Regard made of it, and its table of tokens."""

from typing import Any


def original_type(config: Any) -> str:
    """Return the type of a model by its config: of a replaced one that of its original; "" if there is none."""
    return str(getattr(config, "base_model_type", None) or getattr(config, "model_type", None) or "")


def input_embeddings(model: Any) -> Any:
    """Return what a model embeds its tokens with, or its images; None of two towers, each with its own."""
    try:
        return model.get_input_embeddings()
    except NotImplementedError:
        return None
