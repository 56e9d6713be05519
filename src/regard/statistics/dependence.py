"""The input dependence of attention heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from regard.statistics.observation import Observation
from regard.statistics.statistic import Statistic, StatisticInfo, StatisticRow


def input_dependence(
    weights: Float[Tensor, "head query key"], squares: Float[Tensor, " head"], samples: int
) -> Float[Tensor, " head"]:
    """Return the unbiased variance of matrices over their mean square, (Σ‖A − Ā‖² / (S − 1)) / (Σ‖A‖² / S).

    It is 0 if the matrix is always the same, and 1 if no two samples attend to the same pairs.

    Args:
        weights: ΣA.
        squares: Σ‖A‖².
        samples: S, at least 2.
    """
    assert samples > 1
    explained = weights.double().square().sum((-1, -2)) / samples / squares.double()
    return ((1 - explained) * (samples / (samples - 1))).clamp(0, 1)


class InputDependence(Statistic):
    """The distance of each head's matrix from its average over samples, and that average.

    Only samples without padding and of one length count.

    Args:
        length: Their length; None: that of the first sample of a layer.
    """

    name = "input_dependence"
    info = StatisticInfo(
        title="Input dependence",
        unit="",
        description="Share of a head's squared weights that its average over samples does not explain.",
        source="after PAPA (Hassid et al. 2022, arXiv 2211.03495)",
    )
    needs = frozenset({"weights", "column_square"})

    def __init__(self, length: int | None = None) -> None:
        self.length = length
        self.sums: dict[tuple[str, int], Tensor] = {}
        self.squares: dict[tuple[str, int], Tensor] = {}
        self.samples: dict[tuple[str, int], int] = {}

    def update(self, layers: Sequence[Observation]) -> None:
        for layer in layers:
            if "weights" not in layer.tensors or layer.site.startswith("cross"):
                continue
            weights, squares = layer.tensors["weights"], layer.tensors["column_square"]
            key, length = (layer.site, layer.layer), weights.shape[-1]
            is_unpadded = (layer.length == length) & (layer.keys == length)
            if length == (self.length or self._length(key) or length):
                self._add(key, weights, squares[is_unpadded].sum((0, 2)), int(is_unpadded.sum()))

    def _length(self, key: tuple[str, int]) -> int | None:
        return self.sums[key].shape[-1] if key in self.sums else None

    def _add(self, key: tuple[str, int], weights: Tensor, squares: Tensor, samples: int) -> None:
        if not samples:
            return
        weights, squares = weights.detach().to("cpu", torch.float64), squares.detach().to("cpu", torch.float64)
        self.sums[key] = self.sums.get(key, torch.zeros(weights.shape, dtype=torch.float64)) + weights
        self.squares[key] = self.squares.get(key, torch.zeros(squares.shape, dtype=torch.float64)) + squares
        self.samples[key] = self.samples.get(key, 0) + samples

    def merge(self, other: InputDependence) -> None:
        for key, weights in other.sums.items():
            assert self._length(key) in (None, weights.shape[-1]), "averages of different lengths cannot be merged"
            self._add(key, weights, other.squares[key], other.samples[key])

    def mean_attention(self) -> dict[tuple[str, int], Float[Tensor, "head query key"]]:
        """Return the average matrices by site and layer."""
        return {key: weights / self.samples[key] for key, weights in self.sums.items()}

    def result(self) -> list[StatisticRow]:
        rows = []
        for site, layer in sorted(self.sums):
            n = self.samples[site, layer]
            if n < 2:
                continue
            values = input_dependence(self.sums[site, layer], self.squares[site, layer], n).tolist()
            for head, value in enumerate(values):
                rows.append(StatisticRow(self.name, layer, head, None, None, value, None, n, site))
        return rows

    def state(self) -> dict[str, Tensor]:
        state = {}
        for (site, layer), weights in self.sums.items():
            state[f"{site}|{layer}|sum"] = weights
            state[f"{site}|{layer}|square"] = self.squares[site, layer]
            state[f"{site}|{layer}|samples"] = torch.tensor(self.samples[site, layer])
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.sums, self.squares, self.samples = {}, {}, {}
        for name, tensor in state.items():
            site, layer, kind = name.split("|")
            key = (site, int(layer))
            if kind == "sum":
                self.sums[key] = tensor.clone()
            elif kind == "square":
                self.squares[key] = tensor.clone()
            else:
                self.samples[key] = int(tensor)
