"""Where the rows of a batch are in what layers read: found in one small forward of a model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.attention.float64 import to_float64
from regard.hooks.attention_function import EXCLUSIVE, Observer
from regard.hooks.layers import evaluation_mode, smallest_input
from regard.hooks.off_loaded import execution_device
from regard.models.limits import find_towers
from regard.runs.model_type import input_embeddings

Layout = Literal["rows", "tokens", "other"]
"""Rows one after the other, or tokens on the first axis and rows on the second, or neither."""
ROWS = 3
TOLERANCE = 0.1
"""Largest ‖a − b‖/‖a‖ of rows that are the same: half precision may send a token to another expert."""


def find_layouts(model: nn.Module, names: Sequence[str]) -> dict[str, Layout]:
    """Return where rows are in what each of these layers reads, as far as a few tokens reach it.

    The model reads three rows, the first and the last of which are the same: so are their parts of what a layer reads.
    Experts read the tokens that are sent to them, and towers images and sounds: neither are rows.
    """
    towers = find_towers(model)
    layouts: dict[str, Layout] = {}

    def note(name: str, args: tuple[Any, ...]) -> None:
        layout = layout_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if layout is not None and name not in apart:
            layouts[name] = layout if layouts.get(name, layout) == layout else "other"

    apart = {name for name in names if name.startswith(towers) or "experts" in name.split(".")}
    inputs = three_rows(model)
    if inputs is None:
        return layouts
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: note(name, args))
        for name in names
    ]
    takes_tokens = False
    try:
        with evaluation_mode(model), unobserved():
            model(**inputs)
        takes_tokens = True
    except Exception:  # as a model that takes other inputs raises it; what was read before it holds
        pass
    finally:
        for handle in handles:
            handle.remove()
    return layouts | dict.fromkeys(apart, "other") if layouts or takes_tokens else layouts


@contextmanager
def unobserved() -> Iterator[None]:
    """Show nothing of the forwards inside to open blocks of `regard.watching`."""
    token = EXCLUSIVE.set(Observer())
    try:
        yield
    finally:
        EXCLUSIVE.reset(token)


def three_rows(model: Any) -> dict[str, Any] | None:
    """Return three rows of a few tokens, of which only the second is another; None if a model takes no tokens."""
    table: Any = input_embeddings(model) if isinstance(model, PreTrainedModel) else None
    device = execution_device(table) if isinstance(getattr(table, "weight", None), Tensor) else None
    try:
        inputs = smallest_input(model)
    except Exception:  # as that of a config which lacks what it asks for
        return None
    if device is None or device.type == "meta" or "input_ids" not in inputs:
        return None
    ids = torch.arange(ROWS, ROWS + inputs["input_ids"].shape[1], device=device)
    rows = torch.stack([ids, ids + len(ids), ids]) % model.config.get_text_config().vocab_size
    return {name: rows if isinstance(value, Tensor) else value for name, value in inputs.items()}


def layout_of(states: Tensor) -> Layout | None:
    """Return where rows are in states of `three_rows`; None if nothing says."""
    if states.dim() < 2 or not (states.numel() and states.is_floating_point()) or states.is_meta:
        return None
    sizes = states.shape[:-1]
    if len(sizes) > 1 and (sizes[0] == ROWS) != (sizes[1] == ROWS):
        return "rows" if sizes[0] == ROWS else "tokens"
    if sizes[0] % ROWS:
        return "other"
    first, _, last = to_float64(states.detach()).reshape(ROWS, -1)
    return "rows" if float((first - last).norm()) <= TOLERANCE * float(first.norm()) else "other"
