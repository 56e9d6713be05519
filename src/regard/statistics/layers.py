"""Statistics of one layer: of the weights of each query, of keys and values by position, and of hidden states."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.statistics.observation import Observation
from regard.statistics.statistic import BAI, GU, PerLayer, SampleValues, StatisticInfo

TOP = 3
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
"""Least magnitude of a massive activation, and least ratio of it to the median magnitude (Sun et al. 2024)."""
LayerFunction = Callable[[PerLayer, Observation, Tensor], Iterator[SampleValues]]


class LayerStatistic(PerLayer):
    """A statistic by a function of a layer and of the first reduction that it needs."""

    joins_layers = joins_batches = True

    def __init__(self, name: str, function: LayerFunction, needs: tuple[str, ...], info: StatisticInfo) -> None:
        super().__init__()
        self.name, self.function, self.info = name, function, info
        self.reduction, self.needs = needs[0], frozenset(needs)

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        return self.function(self, layer, layer.tensors[self.reduction])


def _define(function: LayerFunction, *needs: str, **info: str) -> Callable[[str], LayerStatistic]:
    """Return what makes a statistic of a name, which needs the reduction of this name unless it names others."""
    return lambda name: LayerStatistic(name, function, needs or (name,), StatisticInfo(**info))


# -- queries --------------------------------------------------------------------------------------------


def mean_over_queries(
    values: Float[Tensor, "sample head query"], real: Bool[Tensor, "sample query"]
) -> Float[Tensor, "sample head"]:
    """Return the mean over the real queries of each sample."""
    return values.double().masked_fill(~real[:, None], 0.0).sum(-1) / real.sum(-1)[:, None].clamp(min=1)


def _per_query(statistic: PerLayer, layer: Observation, values: Tensor) -> Iterator[SampleValues]:
    """Yield the mean over the queries of a sample, and the profile over query positions."""
    real = layer.query_mask(values.shape[-1])
    yield SampleValues(statistic.key(layer, "head"), mean_over_queries(values, real), layer.length > 0)
    yield SampleValues(statistic.key(layer, "head", "position"), values, real)


def _distance(statistic: PerLayer, layer: Observation, values: Tensor) -> Iterator[SampleValues]:
    if not layer.site.startswith("cross"):
        yield from _per_query(statistic, layer, values)


# -- positions ------------------------------------------------------------------------------------------


def _norm(statistic: PerLayer, layer: Observation, norms: Tensor) -> Iterator[SampleValues]:
    """Yield a norm at each position, and the ratio of the first to the mean of the others; by head if it has heads."""
    real, axes = layer.key_mask(norms.shape[-1]), ("head",) * (norms.ndim - 2)
    yield SampleValues(statistic.key(layer, *axes, "position"), norms, real)
    mask = real.reshape(real.shape[0], *[1] * (norms.ndim - 2), real.shape[1])
    others = norms.double().masked_fill(~mask, 0.0)[..., 1:].sum(-1) / (mask.sum(-1) - 1).clamp(min=1)
    ratio = norms[..., 0].double() / others  # not finite if there are no others, or all are zero
    yield SampleValues(statistic.key(layer, *axes, suffix="_sink_ratio"), ratio, ratio.isfinite())


def _per_pair(statistic: PerLayer, layer: Observation, sums: Tensor) -> Iterator[SampleValues]:
    """Yield the mean of a value of pairs over the queries that see each key."""
    pairs = layer.tensors["pair_count"]
    present = layer.attended_keys(sums.shape[-1])[:, None] & (pairs > 0)
    yield SampleValues(statistic.key(layer, "head", "position"), sums / pairs.clamp(min=1), present)


def per_key(statistic: PerLayer, layer: Observation, sums: Tensor) -> Iterator[SampleValues]:
    """Yield sums of each key over the queries as means over all queries."""
    mean = sums / layer.length[:, None, None].clamp(min=1)
    yield SampleValues(statistic.key(layer, "head", "position"), mean, layer.attended_keys(sums.shape[-1]))


# -- hidden states --------------------------------------------------------------------------------------


def over_smoothing(
    direction: Float[Tensor, "sample width"], length: Int[Tensor, " sample"], units: Int[Tensor, " sample"]
) -> Float[Tensor, " sample"]:
    """Return the mean of cos(h_i, h_j) over i ≠ j, from the sum of unit vectors: (‖Σu‖² − u) / (n(n − 1)).

    `units` is the number u of states that are not zero: the cosine with a state of zeros is 0.
    """
    n = length.double()
    return (direction.double().square().sum(-1) - units) / (n * (n - 1)).clamp(min=1)


def matrix_entropy(hidden: Float[Tensor, "token width"]) -> Float[Tensor, ""]:
    """Return −Σ λ log λ in nats, over the eigenvalues of the Gram matrix of unit hidden states, scaled to trace 1."""
    rows = _tall(torch.nn.functional.normalize(hidden.double(), dim=-1))
    return _entropy(torch.linalg.eigvalsh(rows.mT @ rows).clamp(min=0))


def effective_rank(hidden: Float[Tensor, "token width"]) -> Float[Tensor, ""]:
    """Return exp(−Σ p log p), p = σ / Σσ, over the singular values σ (Roy and Vetterli 2007, definition 1).

    Of states in less than float64 they are roots of the eigenvalues of the Gram matrix in float64, in half the time:
    exact to 1e-8 of the largest, and the rank to some 1e-5, above 1 for states of rank one (4e-5 at 2,048 tokens).
    """
    rows = _tall(hidden.double())
    if hidden.dtype == torch.float64:
        values = torch.linalg.svdvals(rows)
    else:
        values = torch.linalg.eigvalsh(rows.mT @ rows).clamp(min=0).sqrt()
    return _entropy(values).exp()


def _entropy(values: Float[Tensor, " value"]) -> Float[Tensor, ""]:
    """Return −Σ p log p, p = v / Σv."""
    shares = values / values.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return torch.special.entr(shares).sum().clamp(min=0)


def _tall(matrix: Float[Tensor, "row column"]) -> Float[Tensor, "long short"]:
    """Return a matrix or its transpose, whichever has more rows: decompositions of it cost a third."""
    return matrix if matrix.shape[0] >= matrix.shape[1] else matrix.mT


def lower_median(values: Float[Tensor, " value"]) -> Float[Tensor, ""]:
    """Return the median, of an even number of values the lower of the two in the middle."""
    if values.device.type != "cpu":
        return values.median()
    middle = (len(values) - 1) // 2
    return torch.from_numpy(np.partition(values.numpy(), middle)[middle : middle + 1])[0]  # a tenth of the time


def rank_one_residual(hidden: Float[Tensor, "token width"]) -> Float[Tensor, ""]:
    """Return ‖X − 1xᵀ‖ / ‖X‖ in the Frobenius norm, in which the best x is the mean token."""
    hidden = hidden.double()
    norm = hidden.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return (hidden - hidden.mean(0)).norm() / norm


def _output_rank(statistic: PerLayer, layer: Observation, hidden: Tensor) -> Iterator[SampleValues]:
    samples = [states[:n] for states, n in zip(hidden, layer.length.tolist(), strict=True) if n]
    for suffix, function in (("", effective_rank), ("_residual", rank_one_residual)) if samples else ():
        yield SampleValues(statistic.key(layer, suffix=suffix), torch.stack([function(states) for states in samples]))


def _over_smoothing(statistic: PerLayer, layer: Observation, direction: Tensor) -> Iterator[SampleValues]:
    norms = layer.tensors["hidden_norm"]
    units = (layer.query_mask(norms.shape[-1]) & (norms > 0)).sum(-1)
    yield SampleValues(statistic.key(layer), over_smoothing(direction, layer.length, units), layer.length > 1)


def _matrix_entropy(statistic: PerLayer, layer: Observation, hidden: Tensor) -> Iterator[SampleValues]:
    values = [matrix_entropy(states[:n]) for states, n in zip(hidden, layer.length.tolist(), strict=True)]
    yield SampleValues(statistic.key(layer), torch.stack(values), layer.length > 0)


def _massive_activations(statistic: PerLayer, layer: Observation, hidden: Tensor) -> Iterator[SampleValues]:
    flat = [states[:n].flatten() for states, n in zip(hidden.abs(), layer.length.tolist(), strict=True)]
    samples = [values for values in flat if len(values) >= TOP]
    if not samples:
        return
    tops = torch.stack([values.topk(TOP).values for values in samples])
    medians = torch.stack([lower_median(values) for values in samples])
    for rank in range(TOP):
        yield SampleValues(statistic.key(layer, suffix=f"_top{rank + 1}"), tops[:, rank])
    yield SampleValues(statistic.key(layer, suffix="_median"), medians)
    ratio = tops[:, 0].double() / medians
    yield SampleValues(statistic.key(layer, suffix="_ratio"), ratio, ratio.isfinite())
    is_massive = (tops[:, 0] > MASSIVE) & (ratio >= MASSIVE_RATIO)
    yield SampleValues(statistic.key(layer, suffix="_rate"), is_massive.double() * 100)
    index, width = torch.stack([values.argmax() for values in samples]), hidden.shape[-1]
    for suffix, indices, size in (("position", index // width, hidden.shape[1]), ("channel", index % width, width)):
        indicator = torch.nn.functional.one_hot(indices, size).double()
        yield SampleValues(statistic.key(layer, "mode", suffix=f"_{suffix}"), indicator, is_massive)


def _spectral_bound(statistic: PerLayer, layer: Observation, bound: Tensor) -> Iterator[SampleValues]:
    yield SampleValues(statistic.key(layer, "head"), bound, layer.length > 0)


_TABLE: dict[str, Callable[[str], LayerStatistic]] = {
    "entropy": _define(
        _per_query,
        title="Entropy",
        unit="nats",
        description="−Σ_j A_ij log A_ij of a query's weights; log n if they are uniform over n keys. A virtual sink "
        "is not a term of the sum.",
        source="Shannon entropy of a row",
    ),
    "distance": _define(
        _distance,
        title="Attended distance",
        unit="tokens",
        description="Σ_j A_ij |i − j|: mean distance of the attended keys from the query.",
        source="mean attention distance (Vig and Belinkov 2019)",
    ),
    "row_sum": _define(
        _per_query,
        title="Row sum",
        description="Σ_j A_ij over the tokens: 1 for a softmax, less where a virtual sink takes part of it.",
        source=f"{GU}, attention operations",
    ),
    "virtual_sink_mass": _define(
        _per_query,
        title="Virtual-sink mass",
        description="1 − Σ_j A_ij: what a learned sink logit, an off-by-one softmax or a K/V bias takes.",
        source=f"{GU}, K/V biases",
    ),
    "over_smoothing": _define(
        _over_smoothing,
        "direction",
        "hidden_norm",
        title="Over-smoothing",
        description="Mean cosine between the hidden states of different tokens of a sample.",
        source=f"{BAI}, over-smoothing",
    ),
    "spectral_bound": _define(
        _spectral_bound,
        title="Spectral bound",
        description="λ_max of Aᵀ(I − 11ᵀ/n)A: dist(AH) ≤ √λ_max · dist(H).",
        source=f"{BAI}, spectral bound",
    ),
    "hidden_norm": _define(
        _norm,
        title="Hidden norm",
        description="L2 norm of hidden states by position; ratio: first token over the mean of the rest.",
        source=f"{GU}, activations (|h_1|/|h_t|)",
    ),
    "massive_activations": _define(
        _massive_activations,
        "hidden",
        title="Massive activations",
        description="The three largest |activations| of a sample's hidden states, their lower median, and the ratio of "
        "the largest to it; rate: share of samples (%) whose largest is over 100 and at least 1,000 times the median, "
        "with its most frequent position and channel.",
        source="Sun et al. 2024 (arXiv 2402.17762), definition in section 2",
    ),
    "key_norm": _define(
        _norm,
        title="Key norm",
        description="L2 norm of keys (after RoPE) by position and key/value head; "
        "ratio: first token over the mean of the rest.",
        source=f"{GU}, activations",
    ),
    "value_norm": _define(
        _norm,
        title="Value norm",
        description="L2 norm of values by position and key/value head; ratio: first token over the mean of the rest.",
        source=f"{GU}, activations",
    ),
    "qk_cosine": _define(
        _per_pair,
        "cosine_sum",
        "pair_count",
        title="Query–key cosine",
        description="cos(q_i, k_j), mean over the queries that may see key j.",
        source=f"{GU}, split of q·k",
    ),
    "qk_norm": _define(
        _per_pair,
        "norm_sum",
        "pair_count",
        title="Query–key norm product",
        description="|q_i||k_j|, mean over the queries that may see key j.",
        source=f"{GU}, split of q·k",
    ),
    "value_weighted_mass": _define(
        per_key,
        "value_weighted_sum",
        title="Value-weighted mass",
        description="d_j·‖W_O v_j‖: attention a position receives, times the norm of its value through W_O; with a "
        "gate g_i of the outputs (1/n) Σ_i A_ij‖W_O (g_i∘v_j)‖.",
        source="Kobayashi et al. 2020 (arXiv 2004.10102)",
    ),
    "head_output_norm": _define(
        _per_query,
        "output_norm",
        title="Head output norm",
        description="‖W_O o_i‖ of each head's output, gated if the model gates it; mean over queries.",
        source="dormant heads (Guo et al. 2024, arXiv 2410.13835)",
    ),
    "matrix_entropy": _define(
        _matrix_entropy,
        "hidden",
        title="Matrix entropy",
        unit="nats",
        description="Von Neumann entropy of the trace-normalised Gram matrix of a sample's unit hidden states.",
        source="Skean et al. 2025 (arXiv 2502.02013)",
    ),
    "output_rank": _define(
        _output_rank,
        "hidden",
        title="Output rank",
        description="Effective rank of a sample's hidden states: exp of the entropy of their singular values, scaled "
        "to sum 1; residual: ‖X − 1xᵀ‖/‖X‖, the relative distance (Frobenius) to all tokens being equal.",
        source="Roy and Vetterli 2007 (EUSIPCO), definition 1; Dong et al. 2021 (arXiv 2103.03404), res(X)",
    ),
}
LAYER_STATISTICS: dict[str, Callable[[], LayerStatistic]] = {name: partial(make, name) for name, make in _TABLE.items()}
"""What makes each statistic of one layer, by name."""
