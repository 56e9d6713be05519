"""A second forward of each text with one token replaced, beside the first one that others observe as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn

from regard.attention.float64 import to_float64
from regard.errors import UserError
from regard.hooks.fidelity import HALF_TOLERANCE, TOLERANCE
from regard.hooks.routing import observing
from regard.hooks.watch import Watch
from regard.statistics import Observation, SampleValues
from regard.statistics.perturbation import PerturbationSpread, relative_change, tokens_before


class PairedSpread(PerturbationSpread):
    """The perturbation spread in a `Watch`: hidden states of a forward wait there for those of the second forward."""

    needs = frozenset({"hidden"})

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Observation] = []

    def update(self, layers: Sequence[Observation]) -> None:
        """Hold the hidden states of some samples until `take`."""
        self._waiting += [layer for layer in layers if "hidden" in layer.tensors]

    def take(self) -> list[Observation]:
        """Return the layers of the latest forward, and forget them."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def add(self, pairs: Sequence[Observation]) -> None:
        """Add layers with the reductions of `PerturbationSpread`."""
        super().update(pairs)

    def sample_values(self, layers: Sequence[Observation]) -> Iterator[SampleValues]:
        for layer in layers:
            yield from self.layer_values(layer)


class PerturbedForward:
    """The second forward of each batch, which no other observer sees.

    Args:
        model: The model, inside a block that measures `spread`.
        spread: The statistic, which gets the samples of both forwards.
        layers: As in `watching`.
        num_prepended: Tokens that the model itself puts before each text, such as a sink token.
        part: As in `watching`.
    """

    def __init__(
        self,
        model: nn.Module,
        spread: PairedSpread,
        layers: int | Sequence[int] | None = None,
        num_prepended: int = 0,
        part: str | None = None,
    ) -> None:
        self._model, self._spread, self._num_prepended = model, spread, num_prepended
        self._perturbed = PairedSpread()
        self._watch = Watch(model, [self._perturbed], layers, part)

    @torch.no_grad()
    def run(self, inputs: dict[str, Any], input_ids: Int64[Tensor, "row token"]) -> None:
        """Read the batch with other ids, after the block's forward of `inputs` has been closed, and add its samples.

        Raises:
            UserError: A token before the replaced one changes in a causal layer; or a layer works on others than the
                tokens, so that nobody knows which of them was replaced.
        """
        watch, original = self._watch, self._spread.take()
        with observing(self._model, watch, list(watch.locations), hooks=watch.hooks(), exclusive=True):
            self._model(**{**inputs, "input_ids": input_ids})
        watch.close()
        replaced = inputs["input_ids"] != input_ids
        pairs = [self._pair(*pair, replaced) for pair in zip(original, self._perturbed.take(), strict=True)]
        self._check_causal(pairs)
        self._spread.add(pairs)

    def _pair(self, original: Observation, perturbed: Observation, replaced: Tensor) -> Observation:
        assert (original.site, original.layer) == (perturbed.site, perturbed.layer)
        assert torch.equal(original.length, perturbed.length)
        change = relative_change(original.tensors["hidden"], perturbed.tensors["hidden"])
        tensors = {"relative_change": change, "replaced": self._find_replaced(original, perturbed, replaced)}
        return replace(original, tensors=tensors)

    def _find_replaced(self, original: Observation, perturbed: Observation, replaced: Tensor) -> Tensor:
        """Return 1 at replaced tokens (sample, token), from their ids, which are unknown where there are others."""
        if original.token_ids is not None and perturbed.token_ids is not None:
            return to_float64(original.token_ids != perturbed.token_ids)
        tokens = replaced.shape[1] + self._num_prepended
        if self._num_prepended and bool((original.length == tokens).all()):
            return to_float64(torch.nn.functional.pad(replaced, (self._num_prepended, 0)))
        raise UserError(
            f"{PerturbationSpread.name}: layer {original.layer} ({original.site}) of {type(self._model).__name__} has "
            "others than the tokens of the text, of which one is replaced; leave it out"
        )

    def _check_causal(self, pairs: Iterable[Observation]) -> None:
        """Raise a UserError if a token before the replaced one changes by more than rounding in a causal layer."""
        dtype = next((part.dtype for part in self._model.parameters() if part.is_floating_point()), torch.float32)
        tolerance = TOLERANCE.get(dtype, HALF_TOLERANCE)
        for pair in pairs:
            change = pair.tensors["relative_change"][tokens_before(pair)]
            if bool((change > tolerance).any()):
                raise UserError(
                    f"{PerturbationSpread.name}: {type(self._model).__name__} is not causal: a replaced token changes "
                    f"tokens before it by up to {float(change.nan_to_num(0.0).max()):.2g} of their norm in layer "
                    f"{pair.layer} ({pair.site}), whose attention does not see ahead; leave it out"
                )
