"""Constants that need no data (PAPA, section 5.2)."""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.constants.constants import Constants
from regard.errors import check_choice


def identity(queries: int, keys: int) -> Float[Tensor, "query key"]:
    """Return the matrix of tokens that attend to themselves alone."""
    return torch.eye(queries, keys)


def toeplitz(queries: int, keys: int) -> Float[Tensor, "query key"]:
    """Return weights that fall with the distance: 1 / (1 + |i − j|)."""
    return 1 / (1 + (torch.arange(queries)[:, None] - torch.arange(keys)).abs())


def zeros(queries: int, keys: int) -> Float[Tensor, "query key"]:
    """Return the matrix of a pruned head, which attends to nothing."""
    return torch.zeros(queries, keys)


SOURCES: dict[str, Callable[[int, int], Tensor]] = {"identity": identity, "toeplitz": toeplitz, "zeros": zeros}


def make_data_free(source: str, like: Constants) -> Constants:
    """Return constants of a data-free source in `SOURCES`, with the model, length and layout of others."""
    check_choice("constants", source, SOURCES)
    matrices = {}
    for key, matrix in like.matrices.items():
        heads, queries, keys = matrix.shape
        matrices[key] = SOURCES[source](queries, keys).expand(heads, queries, keys).contiguous()
    model = {name: value for name, value in like.origin.model.items() if name != "digest"}
    origin = replace(like.origin, source=source, model=model, data={}, tokenizer=None, notes=())
    return Constants(matrices=matrices, origin=origin)
