"""Constants that need no data (PAPA, section 5.2), in the shape of those they replace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from regard.constants.constants import Constants
from regard.errors import check_choice


def identity(queries: int, keys: int) -> Float[Tensor, "query key"]:
    """Every token attends to itself."""
    return torch.eye(queries, keys)


def toeplitz(queries: int, keys: int) -> Float[Tensor, "query key"]:
    """1 / (1 + |i − j|): to each token the less, the further it is (harmonic)."""
    return 1 / (1 + (torch.arange(queries)[:, None] - torch.arange(keys)).abs())


def zeros(queries: int, keys: int) -> Float[Tensor, "query key"]:
    """No token attends to any: the head is pruned."""
    return torch.zeros(queries, keys)


SOURCES: dict[str, Callable[[int, int], Tensor]] = {"identity": identity, "toeplitz": toeplitz, "zeros": zeros}


def make_data_free(source: str, like: Constants) -> Constants:
    """Constants of a data-free source for the model, the length and the layout of others."""
    check_choice("constants", source, SOURCES)
    matrices = {}
    for place, matrix in like.matrices.items():
        heads, queries, keys = matrix.shape
        matrices[place] = SOURCES[source](queries, keys).expand(heads, queries, keys).contiguous()
    model = {name: value for name, value in like.origin.model.items() if name != "digest"}  # of any weights
    origin = replace(like.origin, source=source, model=model, data={}, tokenizer=None, notes=())
    return Constants(matrices=matrices, origin=origin)
