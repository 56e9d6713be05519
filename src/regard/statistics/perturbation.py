"""How far the replacement of one token spreads: changes of hidden states between two forwards of a text."""

from collections.abc import Iterator

from jaxtyping import Bool, Float
from torch import Tensor

from regard.statistics.observation import Observation
from regard.statistics.statistic import PerLayer, SampleValues, StatisticInfo


def relative_change(
    original: Float[Tensor, "*sample token width"], perturbed: Float[Tensor, "*sample token width"]
) -> Float[Tensor, "*sample token"]:
    """Return ‖h′_i − h_i‖ / ‖h_i‖ of each token; not finite where h_i is 0."""
    original = original.double()
    return (perturbed.double() - original).norm(dim=-1) / original.norm(dim=-1)


def replaced_tokens(layer: Observation) -> Bool[Tensor, "sample token"]:
    """Return which tokens of each sample were replaced."""
    replaced = layer.tensors["replaced"] > 0
    return replaced & layer.query_mask(replaced.shape[-1])


def tokens_before(layer: Observation) -> Bool[Tensor, "sample token"]:
    """Return the tokens of a causal layer that stand before the replaced one, and do not see it; else none."""
    replaced = replaced_tokens(layer)
    before = (replaced.cumsum(-1) == 0) & replaced.any(-1, keepdim=True)
    return before if layer.causal else before & False


class PerturbationSpread(PerLayer):
    """The mean relative change of the other tokens if one is replaced: in a causal layer of those after it.

    Where no token of a layer's own text was replaced, as in the decoder of an encoder–decoder, all tokens count. It is
    computed from two forwards of each text, which `regard.measure` runs.
    """

    name = "perturbation_spread"
    info = StatisticInfo(
        title="Perturbation spread",
        description="‖h′_i − h_i‖/‖h_i‖ of hidden states if one token of the text is replaced: mean over the other "
        "tokens, in a causal model over those after it; own: of the replaced token itself.",
        source="over-mixing (Barbero et al. 2025, arXiv 2504.02732), perturbation of one token",
    )
    needs = frozenset({"relative_change", "replaced"})

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        change, replaced = layer.tensors["relative_change"].double(), replaced_tokens(layer)
        known = change.isfinite() & layer.query_mask(change.shape[-1])
        others, own = known & ~replaced & ~tokens_before(layer), known & replaced
        yield SampleValues(self.key(layer), _mean(change, others), others.any(-1))
        yield SampleValues(self.key(layer, "position"), change, others)
        yield SampleValues(self.key(layer, suffix="_own"), _mean(change, own), own.any(-1))


def _mean(values: Float[Tensor, "sample token"], mask: Bool[Tensor, "sample token"]) -> Float[Tensor, " sample"]:
    return values.masked_fill(~mask, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
