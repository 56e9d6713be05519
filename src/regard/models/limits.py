"""The maximum sequence length of a model."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from regard.errors import UserError
from regard.models.configuration import RegardConfig
from regard.models.inputs import text_configs

_POSITION_TABLES = {"position_embeddings", "position_embedding", "embed_positions", "wpe", "positions_embed"}
"""Last part of the names of learned absolute position embeddings in Transformers."""
_UNLIMITED = 10**9  # tokenizers without a limit state 10**30


def maximum_length(model: nn.Module, tokenizer: Any) -> int | None:
    """Return the maximum number of tokens of one sequence, with special tokens; None if nothing says.

    For learned absolute positions this is the size of the tables: RoBERTa and OPT keep rows for padding before position
    0, so a table of 514 rows takes 512 tokens. For rotary or relative positions it is `max_position_embeddings`:
    nothing breaks beyond it, but no such position was trained. Without that field (T5) it is the tokenizer's length.
    Tables of a tower that reads images or sounds say nothing of tokens.
    """
    tables = count_positions(model)
    config: Any = text_configs(model)[-1]
    trained: int | None = getattr(config, "max_position_embeddings", None)
    if tables and isinstance(config, RegardConfig):
        return min(*tables, config.max_position_embeddings)  # a sink token has a row of its own
    if tables:
        return min(tables)
    if trained is not None and trained > 0:
        return trained
    stated = int(tokenizer.model_max_length)
    return stated if stated < _UNLIMITED else None


def count_positions(model: nn.Module) -> list[int]:
    """Return how many tokens each table of learned positions has rows for; those of images and sounds are left out."""
    towers = find_towers(model)
    return [
        _count_positions(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in _POSITION_TABLES
        if not name.startswith(towers)
    ]


def check_prompt(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise a UserError if tokens beside images or sounds are more than the model has learned positions for."""
    lengths = [inputs[name].shape[-1] for name in ("input_ids", "decoder_input_ids") if name in inputs]
    limit = max(count_positions(model), default=None)
    if limit is not None and max(lengths, default=0) > limit:
        all_of_them = f"with those that are added to it, the most that {type(model).__name__} has positions for"
        raise UserError(f"prompt: expected at most {limit} tokens {all_of_them}; got {max(lengths)}")


def check_length(length: int, model: nn.Module, tokenizer: Any) -> None:
    """Raise a UserError if sequences of this length are longer than the model was made for."""
    limit = maximum_length(model, tokenizer)
    if limit is not None and length > limit:
        raise UserError(f"length: expected at most {limit} tokens, the most this model was made for; got {length}")


def find_towers(model: nn.Module) -> tuple[str, ...]:
    """Return with what the names of modules begin that are in parts which read images or sounds."""
    return tuple(f"{name}." for name, module in model.named_modules() if name and reads_no_tokens(module))


def reads_no_tokens(module: nn.Module) -> bool:
    """Return whether a part of a model reads images or sounds in the place of tokens."""
    if not isinstance(module, PreTrainedModel):
        return False
    taken = inspect.signature(module.forward).parameters
    is_open = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken.values())  # of whoever it wraps
    return module.main_input_name != "input_ids" or not (is_open or "input_ids" in taken)


def _count_positions(table: nn.Embedding) -> int:
    """Return the rows of a table without those before position 0: an offset (BART, OPT), or padding (RoBERTa)."""
    rows_of_padding = 0 if table.padding_idx is None else table.padding_idx + 1
    return table.num_embeddings - int(getattr(table, "offset", rows_of_padding))
