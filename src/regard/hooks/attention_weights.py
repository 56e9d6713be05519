"""The attention weights of a model's forward, with their gradient: for losses that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from regard.attention import reference
from regard.attention.call import AttentionCall, ReductionRequest
from regard.hooks import deberta
from regard.hooks.attention_function import add_observer, attention_function, remove_observer
from regard.hooks.layers import AttentionLayer
from regard.hooks.registration import attention_installed, register

_OF_SAMPLES = ("query", "key", "value", "keep", "bias", "query_mask", "key_mask")


@dataclass(frozen=True, eq=False)
class CapturedWeights:
    """What one attention layer was asked for in a forward, and its output (batch, head, query, width), in the graph."""

    call: AttentionCall
    output: Tensor

    def weights(self, samples: Tensor | None = None) -> Tensor:
        """The weights (batch, head, query, key) of some samples, or all, before dropout; in the graph of the forward.

        Those of the model's dtype; a query that sees no key has none.
        """
        return reference.weights(self.call if samples is None else _of(self.call, samples))

    def slopes(self, gradient: Tensor) -> Tensor:
        """The gradient in the weights, (batch, head, query, key), of what has this gradient in the output."""
        return gradient @ self.call.value.detach().repeat_interleave(self.call.num_key_value_groups, dim=1).mT


@contextmanager
def capture_weights(model: nn.Module, here: Sequence[AttentionLayer]) -> Iterator[list[CapturedWeights]]:
    """While it lasts one forward of the model may be computed; the list then has what each of its layers was asked for.

    `here` are the model's `places`, in whose order they come.
    """
    found: list[CapturedWeights] = []
    reader, modules = _Reader(found), list(dict.fromkeys(place.module for place in here))
    register(attention_function)
    with ExitStack() as stack:
        stack.enter_context(attention_installed(model))
        stack.enter_context(deberta.patch_deberta(model))
        stack.callback(remove_observer, modules, reader)
        add_observer(modules, reader)
        yield found


@dataclass(frozen=True)
class _Reader:
    """Notes each call of a forward."""

    found: list[CapturedWeights]

    def before(
        self, module: nn.Module, call: AttentionCall, causal_site: bool
    ) -> tuple[AttentionCall, ReductionRequest]:
        """The call as it is, of which nothing is to be reduced."""
        return call, ReductionRequest()

    def after(self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: dict[str, Tensor]) -> None:
        """Note the call."""
        self.found.append(CapturedWeights(call, output))


def _of(call: AttentionCall, samples: Tensor) -> AttentionCall:
    """The call of some samples, by their numbers."""
    parts: dict[str, Any] = {}
    for name in _OF_SAMPLES:
        tensor = getattr(call, name)
        if tensor is not None and (len(tensor) > 1 or name in ("query", "key", "value")):
            parts[name] = tensor[samples]
    return replace(call, **parts)
