"""Statistics of the first token, and of the sink beside the tokens, of sequences of known length."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from regard.statistics.layers import mean_over_queries
from regard.statistics.observation import Observation
from regard.statistics.sinks import alpha_of_keys, sink_rate
from regard.statistics.statistic import GU, Average, PerLayer, SampleValues, StatisticInfo


def num_prepended_tokens(layer: Observation, tokens: int) -> int:
    """Return how many tokens a model prepends to sequences of `tokens` tokens: one if it has a sink token."""
    return int(layer.length.max()) - tokens


class TokenFirst(Average):
    """A statistic without prepended tokens: position 0 is the first of the `tokens` tokens of each sequence."""

    def __init__(self, statistic: Average, tokens: int) -> None:
        super().__init__()
        self.statistic, self.tokens = statistic, tokens
        self.name, self.info, self.needs = statistic.name, statistic.info, statistic.needs
        self.joins_layers, self.joins_batches = statistic.joins_layers, statistic.joins_batches

    def sample_values(self, layers: Sequence[Observation]) -> Iterable[SampleValues]:
        return self.statistic.sample_values([self._without_prepended(layer) for layer in layers])

    def _without_prepended(self, layer: Observation) -> Observation:
        front = num_prepended_tokens(layer, self.tokens)
        if not front:
            return layer
        slices = {"hidden_norm": lambda tensor: tensor[:, front:]}
        slices |= dict.fromkeys(("column_mass", "early_query_count"), lambda tensor: tensor[..., front:])
        tensors = {name: slices[name](tensor) for name, tensor in layer.tensors.items() if name in slices}
        return replace(layer, length=layer.length - front, keys=layer.keys - front, token_ids=None, tensors=tensors)


class FirstAlpha(PerLayer):
    """α_0 of each head (α_1 in the paper, which counts from 1), from the column mass of the sink rate."""

    name = "alpha"
    info = StatisticInfo(
        title="α_0", description="Attention to the first token, averaged over all queries.", source=f"{GU}, α_1"
    )
    needs = frozenset({"column_mass"})
    joins_layers = joins_batches = True

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        alpha = alpha_of_keys(layer, layer.tensors["column_mass"])
        yield SampleValues(self.key(layer, "head"), alpha[..., 0], layer.attended_keys(1)[:, 0], alpha)


class VirtualSink(PerLayer):
    """Attention of each head to no given token, and the share of samples in which it is more than ε (Sink_*).

    * To a learned logit, the zero of off-by-one softmax, or pseudo-scores: the mean over the T queries.
    * To a learned key: (1 + Σ_i A_i*) / (T + 1). It is column 0 of a (T+1)×(T+1) matrix, and its own query sees
      itself alone (Gu et al. 2025, K/V biases).
    * To a sink token: the column of this token, whose own query counts in the same way.
    """

    name = "virtual_alpha"
    info = StatisticInfo(
        title="Virtual sink",
        description="Attention that goes to no given token, averaged over queries; and how often it is more than ε.",
        source=f"{GU}, Sink_*",
    )
    needs = frozenset({"virtual_sink_mass", "column_mass"})
    joins_layers = joins_batches = True

    def __init__(self, epsilon: float, tokens: int) -> None:
        super().__init__()
        self.epsilon, self.tokens = epsilon, tokens

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        missing, present = layer.tensors["virtual_sink_mass"], layer.length > 0
        mean = mean_over_queries(missing, layer.query_mask(missing.shape[-1]))
        front = layer.tensors["column_mass"][..., : num_prepended_tokens(layer, self.tokens)].double().sum(-1)
        length = layer.length[:, None]
        alpha = mean + front / length
        alpha = (1 + alpha * length) / (length + 1) if layer.virtual_key else alpha
        yield SampleValues(self.key(layer, "head"), alpha, present)
        rate = sink_rate(alpha[..., None], self.epsilon)[..., 0]
        yield SampleValues(self.key(layer, "head", epsilon=self.epsilon, suffix="_rate"), rate, present)
