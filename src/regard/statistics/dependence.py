"""How much a head's attention depends on what it reads."""

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
    """The unbiased variance of the matrix over its mean square, Σ‖A − Ā‖²/(S − 1) : Σ‖A‖²/S, from ΣA and Σ‖A‖².

    0 if the matrix is always the same, 1 if no two samples look at the same pairs; at least two samples are needed.
    """
    assert samples > 1
    explained = weights.double().square().sum((-1, -2)) / samples / squares.double()
    return ((1 - explained) * (samples / (samples - 1))).clamp(0, 1)


class InputDependence(Statistic):
    """The distance of each head's matrix from its own average over samples, and that average.

    Only samples of one length count, in batches without padding: `length`, or that of the first such sample of a site.
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
            place, length = (layer.site, layer.layer), weights.shape[-1]
            whole = (layer.length == length) & (layer.keys == length)
            if length == (self.length or self._length(place) or length):
                self._add(place, weights, squares[whole].sum((0, 2)), int(whole.sum()))

    def _length(self, place: tuple[str, int]) -> int | None:
        return self.sums[place].shape[-1] if place in self.sums else None

    def _add(self, place: tuple[str, int], weights: Tensor, squares: Tensor, samples: int) -> None:
        if not samples:
            return
        weights, squares = weights.detach().to("cpu", torch.float64), squares.detach().to("cpu", torch.float64)
        self.sums[place] = self.sums.get(place, torch.zeros(weights.shape, dtype=torch.float64)) + weights
        self.squares[place] = self.squares.get(place, torch.zeros(squares.shape, dtype=torch.float64)) + squares
        self.samples[place] = self.samples.get(place, 0) + samples

    def merge(self, other: InputDependence) -> None:
        for place, weights in other.sums.items():
            assert self._length(place) in (None, weights.shape[-1]), "averages of different lengths cannot be merged"
            self._add(place, weights, other.squares[place], other.samples[place])

    def mean_attention(self) -> dict[tuple[str, int], Float[Tensor, "head query key"]]:
        """The average matrices by (site, layer), for replacing."""
        return {place: weights / self.samples[place] for place, weights in self.sums.items()}

    def result(self) -> list[StatisticRow]:
        rows = []
        for place in sorted(self.sums):
            site, layer = place
            n = self.samples[place]
            if n < 2:
                continue
            for head, value in enumerate(input_dependence(self.sums[place], self.squares[place], n).tolist()):
                rows.append(StatisticRow(self.name, layer, head, None, None, value, None, n, site))
        return rows

    def state(self) -> dict[str, Tensor]:
        state = {}
        for (site, layer), weights in self.sums.items():
            place = (site, layer)
            state[f"{site}|{layer}|sum"] = weights
            state[f"{site}|{layer}|square"] = self.squares[place]
            state[f"{site}|{layer}|samples"] = torch.tensor(self.samples[place])
        return state

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.sums, self.squares, self.samples = {}, {}, {}
        for name, tensor in state.items():
            site, layer, what = name.split("|")
            place = (site, int(layer))
            if what == "sum":
                self.sums[place] = tensor.clone()
            elif what == "square":
                self.squares[place] = tensor.clone()
            else:
                self.samples[place] = int(tensor)
