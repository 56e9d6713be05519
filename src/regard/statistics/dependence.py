"""The input dependence of attention heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from regard.statistics.columns import StatisticRow
from regard.statistics.observation import Observation
from regard.statistics.statistic import Statistic, StatisticInfo


def input_dependence(
    weights: Float[Tensor, "head query key"], squares: Float[Tensor, " head"], samples: int
) -> Float[Tensor, " head"]:
    """Return the unbiased variance of matrices over their mean square, (Σ‖A − Ā‖² / (S − 1)) / (Σ‖A‖² / S).

    It is 0 if the matrix is always the same, and 1 if no two samples attend to the same pairs. `weights` are ΣA,
    `squares` Σ‖A‖², `samples` S.
    """
    assert samples > 1
    explained = weights.double().square().sum((-1, -2)) / samples / squares.double()
    return ((1 - explained) * (samples / (samples - 1))).clamp(0, 1)


class _Sums(NamedTuple):
    """ΣA (head, query, key), Σ‖A‖² (head) and the number of samples, as a state names them."""

    sum: Tensor
    square: Tensor
    samples: int


class InputDependence(Statistic):
    """The distance of each head's matrix from its average over samples, and that average.

    Only samples without padding and of one `length` count, by default that of the first sample of a layer.
    """

    name = "input_dependence"
    info = StatisticInfo(
        title="Input dependence",
        description="Share of a head's squared weights that its average over samples does not explain.",
        source="after PAPA (Hassid et al. 2022, arXiv 2211.03495)",
    )
    needs = frozenset({"weights", "column_square"})

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.sums: dict[tuple[str, int], _Sums] = {}

    def update(self, layers: Sequence[Observation]) -> None:
        for layer in layers:
            if "weights" not in layer.tensors or layer.site.startswith("cross"):
                continue
            weights, squares = layer.tensors["weights"], layer.tensors["column_square"]
            key, length = (layer.site, layer.layer), weights.shape[-1]
            is_unpadded = (layer.length == length) & (layer.keys == length)
            samples = int(is_unpadded.sum())
            if samples and length == (self.length or self._length(key) or length):
                self._add(key, weights.detach(), squares[is_unpadded].sum((0, 2)).detach(), samples)

    def _length(self, key: tuple[str, int]) -> int | None:
        return self.sums[key].sum.shape[-1] if key in self.sums else None

    @torch.inference_mode(mode=False)  # tensors of that mode may not be added to outside of it
    def _add(self, key: tuple[str, int], weights: Tensor, squares: Tensor, samples: int) -> None:
        """Add to the sums of a layer in place: as large as they are, new ones would take longer than their numbers."""
        squares = squares.to("cpu", torch.float64)
        if key in self.sums:
            old = self.sums[key]
            total = old.sum.clone() if old.sum.is_inference() else old.sum  # as where a state was loaded in it
            self.sums[key] = _Sums(total.add_(weights.cpu()), old.square + squares, old.samples + samples)
        else:
            self.sums[key] = _Sums(weights.to("cpu", torch.float64, copy=True), squares, samples)

    def merge(self, other: InputDependence) -> None:
        for key, sums in other.sums.items():
            if self._length(key) in (None, sums.sum.shape[-1]):
                self._add(key, *sums)

    def mean_attention(self) -> dict[tuple[str, int], Float[Tensor, "head query key"]]:
        """Return the average matrices by site and layer."""
        return {key: sums.sum / sums.samples for key, sums in self.sums.items()}

    def single_lengths(self) -> dict[str, int]:
        """Return the length of the only sample by site, where there is no second one of it to compare with."""
        lengths = {site: sums.sum.shape[-1] for (site, _), sums in self.sums.items() if sums.samples == 1}
        return {site: lengths[site] for site in sorted(lengths)}

    def result(self) -> list[StatisticRow]:
        rows = []
        for (site, layer), sums in sorted(self.sums.items(), key=lambda item: item[0]):
            for head, value in enumerate(input_dependence(*sums).tolist() if sums.samples > 1 else ()):
                rows.append(StatisticRow(self.name, layer, head, None, None, value, None, sums.samples, site))
        return rows

    def state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for (site, layer), sums in self.sums.items():
            parts = sums._replace(sum=sums.sum.clone())  # later samples are added to the sum in place
            state |= {f"{site}|{layer}|{part}": torch.as_tensor(value) for part, value in parts._asdict().items()}
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.sums = {}
        for name in dict.fromkeys(name.rpartition("|")[0] for name in state):
            site, layer = name.split("|")
            weights, squares, samples = (state[f"{name}|{part}"].clone() for part in _Sums._fields)
            self.sums[site, int(layer)] = _Sums(weights, squares, int(samples))
