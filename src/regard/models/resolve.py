"""A model as users name it or hold it: loaded, with its tokenizer, checked to belong together."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from regard.errors import UserError
from regard.models.pretrained import Loaded, as_loaded, load


def resolve_model(
    model: PreTrainedModel | Loaded | str, tokenizer: Any, *, to: str, call: str, language_model: bool = False
) -> Loaded:
    """Return a model with its tokenizer.

    Args:
        model: A name that `load` takes, what `load` returned, or a model.
        tokenizer: The tokenizer of a model; beside a name it takes the place of the model's own.
        to: What is to be done with the model, for messages.
        call: How the caller is to be called, for messages.
        language_model: Whether a name is loaded with the head of a language model.

    Raises:
        UserError: The model cannot be loaded, or the tokenizer does not belong to it.
    """
    if tokenizer is not None and not callable(getattr(tokenizer, "get_vocab", None)):
        raise UserError(
            f"tokenizer: expected one as AutoTokenizer loads it, or none beside the name of a model; got "
            f"{type(tokenizer).__name__}. The call is {call}."
        )
    if isinstance(model, str):
        model = load(model, language_model=language_model)
    return as_loaded(model, tokenizer, to=to, call=call)
