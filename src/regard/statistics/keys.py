"""Statistics of keys, values and hidden states by position."""

from collections.abc import Iterator

from jaxtyping import Bool, Float
from torch import Tensor

from regard.statistics.statistic import GU, Observation, PerLayer, SampleValues, StatisticInfo


def first_to_rest_ratio(
    norms: Float[Tensor, "sample ... token"], real: Bool[Tensor, "sample token"]
) -> Float[Tensor, "sample ..."]:
    """Return the norm at position 0 over the mean of the others; not finite if there are none, or all are zero."""
    mask = real.reshape(real.shape[0], *[1] * (norms.ndim - 2), real.shape[1])
    others = norms.double().masked_fill(~mask, 0.0)[..., 1:].sum(-1) / (mask.sum(-1) - 1).clamp(min=1)
    return norms[..., 0].double() / others


class Norm(PerLayer):
    """A norm at each position, and the ratio of the first to the mean of the others."""

    reduction: str
    axes: tuple[str, ...] = ("head", "position")

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        norms = layer.tensors[self.reduction]
        real = layer.key_mask(norms.shape[-1])
        yield SampleValues(self.key(layer, *self.axes), norms, real)
        ratio = first_to_rest_ratio(norms, real)
        yield SampleValues(self.key(layer, *self.axes[:-1], suffix="_sink_ratio"), ratio, ratio.isfinite())


class KeyNorm(Norm):
    """‖k‖ of each key/value head, with positions applied."""

    name = reduction = "key_norm"
    info = StatisticInfo(
        title="Key norm",
        description="L2 norm of keys (after RoPE) by position and key/value head; "
        "ratio: first token over the mean of the rest.",
        source=f"{GU}, activations",
    )
    needs = frozenset({"key_norm"})


class ValueNorm(Norm):
    """‖v‖ of each key/value head."""

    name = reduction = "value_norm"
    info = StatisticInfo(
        title="Value norm",
        description="L2 norm of values by position and key/value head; ratio: first token over the mean of the rest.",
        source=f"{GU}, activations",
    )
    needs = frozenset({"value_norm"})


class HiddenNorm(Norm):
    """‖h‖ of the hidden states; layer −1 are the embeddings."""

    name = reduction = "hidden_norm"
    axes = ("position",)
    info = StatisticInfo(
        title="Hidden norm",
        description="L2 norm of hidden states by position; ratio: first token over the mean of the rest.",
        source=f"{GU}, activations (|h_1|/|h_t|)",
    )
    needs = frozenset({"hidden_norm"})


class PerPair(PerLayer):
    """The mean of a value of pairs over the queries that see each key."""

    reduction: str

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        sums = layer.tensors[self.reduction]
        pairs = layer.tensors["pair_count"]
        present = layer.attended_keys(sums.shape[-1])[:, None] & (pairs > 0)
        yield SampleValues(self.key(layer, "head", "position"), sums / pairs.clamp(min=1), present)


class QKCosine(PerPair):
    """The angle between queries and a key."""

    name = "qk_cosine"
    reduction = "cosine_sum"
    info = StatisticInfo(
        title="Query–key cosine",
        description="cos(q_i, k_j), mean over the queries that may see key j.",
        source=f"{GU}, split of q·k",
    )
    needs = frozenset({"cosine_sum", "pair_count"})


class QKNorm(PerPair):
    """The norms of queries and a key."""

    name = "qk_norm"
    reduction = "norm_sum"
    info = StatisticInfo(
        title="Query–key norm product",
        description="|q_i||k_j|, mean over the queries that may see key j.",
        source=f"{GU}, split of q·k",
    )
    needs = frozenset({"norm_sum", "pair_count"})


class ValueWeightedMass(PerLayer):
    """Attention times the norm of the value as it is projected; near zero for a sink with empty values."""

    name = "value_weighted_mass"
    info = StatisticInfo(
        title="Value-weighted mass",
        description="d_j·‖W_O v_j‖: attention a position receives, times the norm of its value through W_O; with a "
        "gate g_i of the outputs (1/n) Σ_i A_ij‖W_O (g_i∘v_j)‖.",
        source="Kobayashi et al. 2020 (arXiv 2004.10102)",
    )
    needs = frozenset({"value_weighted_sum"})

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        mass = layer.tensors["value_weighted_sum"]
        degree = mass / layer.length[:, None, None].clamp(min=1)
        yield SampleValues(self.key(layer, "head", "position"), degree, layer.attended_keys(mass.shape[-1]))
