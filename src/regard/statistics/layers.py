"""Statistics of the hidden states of a layer."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.statistics.statistic import Observation, PerLayer, SampleValues, StatisticInfo

TOP = 3


def over_smoothing(
    direction: Float[Tensor, "sample width"], length: Int[Tensor, " sample"]
) -> Float[Tensor, " sample"]:
    """Return the mean of cos(h_i, h_j) over i ≠ j, from the sum of unit vectors: (‖Σu‖² − n) / (n(n − 1))."""
    n = length.double()
    return (direction.double().square().sum(-1) - n) / (n * (n - 1)).clamp(min=1)


def matrix_entropy(hidden: Float[Tensor, "token width"]) -> Float[Tensor, ""]:
    """Return −Σ λ log λ in nats, over the eigenvalues of the Gram matrix of unit hidden states, scaled to trace 1."""
    unit = torch.nn.functional.normalize(hidden.double(), dim=-1)
    values = torch.linalg.svdvals(unit).square()
    values = values / values.sum().clamp(min=torch.finfo(torch.float64).tiny)
    return torch.special.entr(values).sum().clamp(min=0)


class OverSmoothing(PerLayer):
    """The similarity of the tokens of a sample."""

    name = "over_smoothing"
    info = StatisticInfo(
        title="Over-smoothing",
        description="Mean cosine between the hidden states of different tokens of a sample.",
        source="Bai et al. 2024 (arXiv 2410.05648), over-smoothing",
    )
    needs = frozenset({"direction"})

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        yield SampleValues(self.key(layer), over_smoothing(layer.tensors["direction"], layer.length), layer.length > 1)


class MatrixEntropy(PerLayer):
    """The spread of the tokens of a sample over directions."""

    name = "matrix_entropy"
    info = StatisticInfo(
        title="Matrix entropy",
        unit="nats",
        description="Von Neumann entropy of the trace-normalised Gram matrix of a sample's unit hidden states.",
        source="Skean et al. 2025 (arXiv 2502.02013)",
    )
    needs = frozenset({"hidden"})

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        hidden = layer.tensors["hidden"]
        values = [matrix_entropy(states[:n]) for states, n in zip(hidden, layer.length.tolist(), strict=True)]
        yield SampleValues(self.key(layer), torch.stack(values), layer.length > 0)


class MassiveActivations(PerLayer):
    """The largest magnitudes of a layer's activations, and their median."""

    name = "massive_activations"
    info = StatisticInfo(
        title="Massive activations",
        description="The three largest |activations| of a sample's hidden states, and the median.",
        source="Sun et al. 2024 (arXiv 2402.17762)",
    )
    needs = frozenset({"hidden"})

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        hidden = layer.tensors["hidden"].abs()
        flat = [states[:n].flatten() for states, n in zip(hidden, layer.length.tolist(), strict=True)]
        samples = [values for values in flat if len(values) >= TOP]
        if not samples:
            return
        tops = torch.stack([values.topk(TOP).values for values in samples])
        medians = torch.stack([values.median() for values in samples])
        for rank in range(TOP):
            yield SampleValues(self.key(layer, suffix=f"_top{rank + 1}"), tops[:, rank])
        yield SampleValues(self.key(layer, suffix="_median"), medians)


class SpectralBound(PerLayer):
    """A bound of how much of the differences between tokens a head preserves."""

    name = "spectral_bound"
    info = StatisticInfo(
        title="Spectral bound",
        description="λ_max of Aᵀ(I − 11ᵀ/n)A: dist(AH) ≤ √λ_max · dist(H).",
        source="Bai et al. 2024 (arXiv 2410.05648), spectral bound",
    )
    needs = frozenset({"spectral_bound"})

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        yield SampleValues(self.key(layer, "head"), layer.tensors["spectral_bound"], layer.length > 0)
