"""What the arguments of a call say of its rows: how many there are, and whether each has one text and one image."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard.attention.tracing import break_graph, is_exported
from regard.errors import UserError
from regard.hooks.forward_pass import text_positions
from regard.hooks.modalities import TokenModalities

_READ = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
"""Arguments that have a row for each text."""
PACKED = (
    "position_ids: expected a row for each text, since rows have weights of their own, got several texts packed into "
    "one; leave packing out (packing=False, padding_free=False), or set weights by `use_only`"
)
WHOLE_GRAPH = (
    "regard.SharedAdapters weighs adapters for each row by what the row has, which no graph of a whole forward does; "
    "compile without fullgraph=True, or set one weight for all rows by use_only"
)
"""What `torch.compile(fullgraph=True)` says."""


def are_packed(inputs: Mapping[str, Any]) -> Tensor | None:
    """Return whether positions of a row are not consecutive: Transformers' masks then keep its parts apart.

    None where positions do not say it: there are none, or a mask beside them.
    """
    tokens = next((inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None), None)
    positions = text_positions(inputs.get("position_ids"), tokens)
    if inputs.get("attention_mask") is not None or positions is None:
        return None
    return (positions.diff() != 1).any()


def refuse_packed(packed: Tensor | None) -> None:
    """Raise a UserError if the answer of `are_packed` is that they are, which waits for the device."""
    if packed is not None and bool(packed):
        raise UserError(PACKED)


def count_rows(module: Any, inputs: Mapping[str, Any]) -> int | None:
    """Return how many rows a call reads; None if nothing that it is passed says so."""
    names = (*_READ, getattr(module, "main_input_name", ""))
    given = (inputs.get(name) for name in names)
    return next((len(value) for value in given if isinstance(value, Tensor) and value.dim() > 1), None)


def has_one_each(modalities: TokenModalities | None, ids: Tensor | None) -> bool | None:
    """Return whether of images, sounds and videos as many as there are rows are one of each, by the tokens of them.

    They are if each row has tokens of them. Without tokens, and in a graph for other ones, nothing says so (None);
    `torch.compile` breaks its graph here.
    """
    if modalities is None or (ids is not None and ids.dim() != 2):
        return True
    if ids is None or is_exported():
        return None
    break_graph(WHOLE_GRAPH)
    has_any = [torch.isin(ids, torch.tensor(sorted(tokens)).to(ids)).any(1) for tokens in modalities.ids.values()]
    return all(bool(rows.all() | ~rows.any()) for rows in has_any)


def special_tokens(model: PreTrainedModel) -> list[int]:
    """Return the ids of begin and end of text and of padding, as far as the model has them."""
    config = model.config.get_text_config()
    entries = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    ids = [number for entry in entries for number in (entry if isinstance(entry, list) else [entry])]
    return [number for number in ids if number is not None]
