"""Merges of LoRA adapters of a layer: the combination types of PEFT, through PEFT's own functions."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from regard.errors import UserError, check_choice, check_int

Combination = Literal[
    "cat",
    "svd",
    "linear",
    "ties",
    "ties_svd",
    "dare_linear",
    "dare_linear_svd",
    "dare_ties",
    "dare_ties_svd",
    "magnitude_prune",
    "magnitude_prune_svd",
]
COMBINATIONS: tuple[str, ...] = get_args(Combination)
DENSITIES = {"ties": 0.2, "dare_linear": 0.1, "dare_ties": 0.1, "magnitude_prune": 0.2}
"""Shares of entries to keep by default: 20 % in TIES (arXiv 2306.01708), 10 % in DARE (arXiv 2311.03099)."""


class LoraFactors(NamedTuple):
    """The adapter of a layer, which adds scale · up @ down: A (rank, inputs) and B (outputs, rank)."""

    down: Tensor
    up: Tensor
    scale: float = 1.0

    def delta(self) -> Tensor:
        return self.scale * self.up @ self.down


class Merge(NamedTuple):
    """How adapters are merged; `make_merge` checks it and fills in what is not given."""

    combination: str
    weights: tuple[float, ...]
    density: float | None
    rank: int | None


def make_merge(
    combination: str, adapters: int, weights: Sequence[float] | None, density: float | None, rank: int | None
) -> Merge:
    """Return how so many adapters are merged; by default with equal weights, which sum to 1 where they are summed.

    TIES averages by itself, over the adapters that keep an entry, so each weighs 1 there.

    Raises:
        UserError: An option is not one that this combination reads, or has another value than it may.
    """
    check_choice("method", combination, COMBINATIONS)
    kind = combination.removesuffix("_svd")
    if weights is None:
        weights = [1.0 if kind.endswith("ties") else 1 / adapters] * adapters
    if len(weights) != adapters or not all(abs(weight) < float("inf") for weight in weights):
        raise UserError(f"weights: expected a number for each of {adapters} adapters, got {list(weights)}")
    if density is not None and kind not in DENSITIES:
        raise UserError(f"density: expected none with {combination}, which keeps all entries, got {density}")
    if density is not None and not 0 < density <= 1:
        raise UserError(f"density: expected a number above 0, at most 1, got {density}")
    if rank is not None:
        check_int("rank", rank, least=1)
        if not combination.endswith("svd"):
            raise UserError(f"rank: expected none with {combination}, only the kinds with svd choose one; got {rank}")
    density = DENSITIES.get(kind) if density is None else density
    return Merge(combination, tuple(float(weight) for weight in weights), density, rank)


def merge_deltas(deltas: Sequence[Tensor], weights: Sequence[float], kind: str, density: float | None) -> Tensor:
    """Return tensors merged by a function of PEFT: "linear", "ties", "dare_linear", "dare_ties", "magnitude_prune".

    Entries that DARE keeps are drawn from torch's generator of the tensors' device.
    """
    functions, first = _import_functions(), deltas[0]
    scales = torch.tensor(list(weights), dtype=first.dtype, device=first.device)
    if kind == "linear":
        return functions.task_arithmetic(list(deltas), scales)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The density 1")  # of PEFT, where all entries are kept
        return getattr(functions, kind)(list(deltas), scales, density)


def merge_layer(adapters: Sequence[LoraFactors], weights: Sequence[float], merge: Merge) -> tuple[LoraFactors, float]:
    """Return the adapters of a layer merged into one of scale 1, and the share of its squared norm that a rank cut off.

    `cat` and `svd` are of Σ w_i s_i B_i A_i, exactly and at a chosen rank. The other kinds with svd merge the products
    s_i B_i A_i and cut the result to that rank. The kinds without merge A and B, each for itself, as PEFT has it: what
    they add is not the merge of what the adapters add, since Σ B_i · Σ A_i has all pairs of different adapters in it.
    """
    kind = merge.combination.removesuffix("_svd")
    scales = [weight * adapter.scale for weight, adapter in zip(weights, adapters, strict=True)]
    if merge.combination in ("cat", "svd"):
        down = torch.cat([scale * adapter.down for scale, adapter in zip(scales, adapters, strict=True)])
        up = torch.cat([adapter.up for adapter in adapters], 1)
        if kind == "cat":
            return LoraFactors(down, up), 0.0
        return _truncate_product(down, up, _choose_rank(adapters, merge))
    if merge.combination.endswith("_svd"):
        delta = merge_deltas([adapter.delta() for adapter in adapters], weights, kind, merge.density)
        return _truncate(delta, _choose_rank(adapters, merge))
    ranks = sorted({len(adapter.down) for adapter in adapters})
    if len(ranks) > 1:
        expected = f"adapters of one rank with {merge.combination}, which merges A and B entry by entry"
        raise UserError(f"adapters: expected {expected}, got {', '.join(map(str, ranks))}; cat and svd take any")
    roots = [abs(scale) ** 0.5 for scale in scales]
    signed = [root if scale >= 0 else -root for root, scale in zip(roots, scales, strict=True)]
    down = merge_deltas([adapter.down for adapter in adapters], signed, kind, merge.density)
    return LoraFactors(down, merge_deltas([adapter.up for adapter in adapters], roots, kind, merge.density)), 0.0


def _choose_rank(adapters: Sequence[LoraFactors], merge: Merge) -> int:
    (outputs, _), inputs = adapters[0].up.shape, adapters[0].down.shape[1]
    rank = merge.rank or max(len(adapter.down) for adapter in adapters)
    if rank > min(outputs, inputs):
        raise UserError(f"rank: expected at most {min(outputs, inputs)}, which a layer has, got {rank}")
    return rank


def _truncate(delta: Tensor, rank: int) -> tuple[LoraFactors, float]:
    """Return the nearest matrix of a rank, as factors, and the share of the squared norm that it lacks."""
    left, values, right = torch.linalg.svd(delta, full_matrices=False)
    factors = LoraFactors(right[:rank].contiguous(), (left[:, :rank] * values[:rank]).contiguous())
    squares = values.double().square()
    return factors, float(squares[rank:].sum() / squares.sum()) if squares.any() else 0.0


def _truncate_product(down: Tensor, up: Tensor, rank: int) -> tuple[LoraFactors, float]:
    """Return the same of `up @ down`, without computing the product."""
    left, upper = torch.linalg.qr(up)
    right, lower = torch.linalg.qr(down.T)
    core, lost = _truncate(upper @ lower.T, rank)
    return LoraFactors((core.down @ right.T).contiguous(), (left @ core.up).contiguous()), lost


def _import_functions() -> Any:
    try:
        from peft.utils import merge_utils
    except ImportError as error:
        raise UserError("merges need the package peft: pip install 'regard[learn]'") from error
    return merge_utils
