"""Statistics of the weights of each query."""

from collections.abc import Iterator

from jaxtyping import Bool, Float
from torch import Tensor

from regard.statistics.statistic import Observation, PerLayer, SampleValues, StatisticInfo


def mean_over_queries(
    values: Float[Tensor, "sample head query"], real: Bool[Tensor, "sample query"]
) -> Float[Tensor, "sample head"]:
    """Return the mean over the real queries of each sample."""
    return values.double().masked_fill(~real[:, None], 0.0).sum(-1) / real.sum(-1)[:, None].clamp(min=1)


class PerQuery(PerLayer):
    """The mean of a reduction over the queries of a sample, and its profile over query positions."""

    reduction: str

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        values = layer.tensors[self.reduction]
        real = layer.query_mask(values.shape[-1])
        yield SampleValues(self.key(layer, "head"), mean_over_queries(values, real), layer.length > 0)
        yield SampleValues(self.key(layer, "head", "position"), values, real)


class Entropy(PerQuery):
    """The entropy of a query's weights, in nats."""

    name = reduction = "entropy"
    info = StatisticInfo(
        title="Entropy",
        unit="nats",
        description="−Σ_j A_ij log A_ij of a query's weights; log n if they are uniform over n keys. A virtual sink "
        "is not a term of the sum.",
        source="Shannon entropy of a row",
    )
    needs = frozenset({"entropy"})


class Distance(PerQuery):
    """The mean distance between a query and the keys it attends to, in tokens."""

    name = reduction = "distance"
    info = StatisticInfo(
        title="Attended distance",
        unit="tokens",
        description="Σ_j A_ij |i − j|: mean distance of the attended keys from the query.",
        source="mean attention distance (Vig and Belinkov 2019)",
    )
    needs = frozenset({"distance"})

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        if not layer.site.startswith("cross"):
            yield from super().layer_values(layer)


class RowSum(PerQuery):
    """The attention of a query to all tokens."""

    name = reduction = "row_sum"
    info = StatisticInfo(
        title="Row sum",
        description="Σ_j A_ij over the tokens: 1 for a softmax, less where a virtual sink takes part of it.",
        source="Gu et al. 2025 (arXiv 2410.10781), attention operations",
    )
    needs = frozenset({"row_sum"})


class VirtualSinkMass(PerQuery):
    """The attention of a query to no token."""

    name = reduction = "virtual_sink_mass"
    info = StatisticInfo(
        title="Virtual-sink mass",
        description="1 − Σ_j A_ij: what a learned sink logit, an off-by-one softmax or a K/V bias takes.",
        source="Gu et al. 2025 (arXiv 2410.10781), K/V biases",
    )
    needs = frozenset({"virtual_sink_mass"})


class HeadOutputNorm(PerQuery):
    """The norm of what a head adds to the residual stream; near zero for a dormant head."""

    name = "head_output_norm"
    reduction = "output_norm"
    info = StatisticInfo(
        title="Head output norm",
        description="‖W_O o_i‖ of each head's output, gated if the model gates it; mean over queries.",
        source="dormant heads (Guo et al. 2024, arXiv 2410.13835)",
    )
    needs = frozenset({"output_norm"})
