"""The attention weights of a model's forward with their gradient, for losses that are made of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention import reference
from regard.attention.call import AttentionCall
from regard.attention.reduction import ReductionRequest
from regard.hooks.attention_function import Observer
from regard.hooks.modules import AttentionLayer
from regard.hooks.routing import observing


@dataclass(frozen=True, eq=False)
class CapturedWeights:
    """The attention call of one layer in a forward, and its output, in the graph."""

    call: AttentionCall
    output: Float[Tensor, "batch head query width"]

    def weights(self, samples: Int[Tensor, " sample"] | None = None) -> Float[Tensor, "sample head query key"]:
        """Return the weights of some or all samples before dropout, in the graph of the forward and its dtype."""
        return reference.weights(self.call if samples is None else self.call.select_samples(samples))

    def weights_grad(
        self, output_grad: Float[Tensor, "batch head query width"]
    ) -> Float[Tensor, "batch head query key"]:
        """Return the gradient in the weights of what has this gradient in the output."""
        return output_grad @ self.call.expand_groups(self.call.value.detach()).mT


@contextmanager
def capture_weights(model: nn.Module, layers: Sequence[AttentionLayer]) -> Iterator[list[CapturedWeights]]:
    """Capture the weights of one forward of the model inside the block.

    Yields:
        A list that the forward fills with one entry a layer, in the order of `layers`, the model's attention layers.
    """
    reader = _Reader()
    with observing(model, reader, list(dict.fromkeys(layer.module for layer in layers))):
        yield reader.captured


class _Reader(Observer):
    """Captures each call of a forward."""

    def __init__(self) -> None:
        self.captured: list[CapturedWeights] = []

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest]:
        return call, ReductionRequest()

    def after_attention(
        self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: dict[str, Tensor]
    ) -> None:
        self.captured.append(CapturedWeights(call, output))
