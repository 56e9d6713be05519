"""How long a text a model takes."""

from typing import Any

from torch import nn

# The last part of the name under which Transformers keeps a learned table of absolute positions.
_TABLES = {"position_embeddings", "position_embedding", "embed_positions", "wpe", "positions_embed"}
# Tokenizers without a limit state 10**30.
_UNLIMITED = 10**9


def maximum_length(model: nn.Module, tokenizer: Any) -> int | None:
    """The most tokens the model was made for in one sequence, special tokens included; None where nothing says.

    With learned absolute positions this is what the tables hold, as built and not as configured: RoBERTa and OPT keep
    rows for padding before position 0, so that a table of 514 rows takes 512 tokens. With rotary or relative positions
    nothing breaks beyond the limit, yet no such position was ever trained; `max_position_embeddings` is the limit then,
    and where the configuration has none (T5), the length the tokenizer was made for.
    """
    tables = [
        _rows(module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rsplit(".", 1)[-1] in _TABLES
    ]
    if tables:
        return min(tables)
    trained: int | None = getattr(model.config, "max_position_embeddings", None)
    if trained is not None and trained > 0:
        return trained
    stated = int(tokenizer.model_max_length)
    return stated if stated < _UNLIMITED else None


def _rows(table: nn.Embedding) -> int:
    """The positions a table holds: its rows, without those before position 0.

    BART and OPT keep their offset beside the table; RoBERTa and its kin count on from the row of padding.
    """
    offset: int | None = getattr(table, "offset", None)
    if offset is not None:
        return table.num_embeddings - int(offset)
    padding = table.padding_idx
    return table.num_embeddings - (0 if padding is None else padding + 1)
