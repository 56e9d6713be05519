"""A router in closed form: the linear discriminant analysis of the query vectors of the adapters' tasks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UserError

SHRINKAGE = 0.1
"""Fraction of the covariances that is dropped: the others are poorly known from the few rows of a task."""
_FLOOR = 1e-6


class DiscriminantRouter(nn.Module):
    """Weighs adapters by how likely a row's query vector is among the rows of each adapter's task.

    The weights are a = softmax_i(−½ (e − μ_i)ᵀ C⁻¹ (e − μ_i)): μ_i is the mean query vector of the rows of adapter i,
    and C = (1 − s) Σ + s diag(Σ) comes from the covariance Σ of all rows about the mean of their own adapter. Nothing
    is trained and no row is kept; the order of the tasks changes nothing. Of several adapters each must have rows.
    Means and covariance stay in float32 when the module is cast.

    Args:
        width: Number of features of a query vector.
        shrinkage: s, from 0 to 1.

    Source:
        Linear discriminant analysis with one prior for all classes (Hastie, Tibshirani and Friedman, The Elements of
        Statistical Learning, section 4.3), in the place of SAPT's learnt keys and queries (arXiv 2401.08295, eq. 5).
    """

    count: Tensor
    means: Tensor
    num_rows: Tensor
    scatter: Tensor
    degrees: Tensor

    def __init__(self, width: int, *, shrinkage: float = SHRINKAGE) -> None:
        super().__init__()
        self.width, self.shrinkage = width, shrinkage
        with torch.inference_mode(False):
            self.register_buffer("count", torch.tensor(0))
            self.register_buffer("means", torch.zeros(0, width))
            self.register_buffer("num_rows", torch.zeros(0))
            self.register_buffer("scatter", torch.zeros(width, width))
            self.register_buffer("degrees", torch.tensor(0.0))
        self.names: tuple[str, ...] = ()  # of the adapters, for messages
        self._solved: tuple[Any, tuple[Tensor, Tensor, Tensor]] | None = None

    def reserve(self, blocks: int) -> None:
        """Make room for `blocks` adapters."""
        missing = blocks - len(self.means)
        if missing > 0:
            with torch.inference_mode(False):
                self.means = torch.cat([self.means, self.means.new_zeros(missing, self.width)])
                self.num_rows = torch.cat([self.num_rows, self.num_rows.new_zeros(missing)])

    def use(self, blocks: int) -> None:
        self.reserve(blocks)
        self.count.fill_(blocks)

    def set_trainable(self, block: int | None) -> None:
        """Do nothing: nothing is trained."""

    def delete(self, block: int) -> None:
        """Forget the mean of an adapter; later ones move up. What its rows said of the covariance stays."""
        with torch.inference_mode(False):
            others = [index for index in range(len(self.means)) if index != block]
            self.means, self.num_rows = self.means[others], self.num_rows[others]
            self.count -= (self.count > block).to(self.count.dtype)

    @torch.no_grad()
    def fit(self, block: int, vectors: Tensor) -> None:
        """Add the query vectors (row, width) of more rows of an adapter's task.

        Raises:
            UserError: There is no row, or one with numbers that are not finite.
        """
        if vectors.dim() != 2 or vectors.shape[1] != self.width or not len(vectors):
            expected = f"expected rows of {self.width} features"
            raise UserError(f"vectors: {expected}, got the shape {tuple(vectors.shape)}")
        if not bool(vectors.isfinite().all()):
            raise UserError("vectors: expected finite numbers, got others: does the model overflow in its precision?")
        with torch.inference_mode(False):
            rows = _precise(vectors.detach().to(self.means.device).clone())
            mean, old_mean, old_rows = rows.mean(0), _precise(self.means[block]), float(self.num_rows[block])
            deviations, shift = rows - mean, mean - old_mean
            total = len(rows) + old_rows
            scatter = deviations.T @ deviations + torch.outer(shift, shift) * (len(rows) * old_rows / total)
            self.means[block] += (shift * (len(rows) / total)).to(self.means)
            self.scatter += scatter.to(self.scatter)
            self.num_rows[block] = total
            self.degrees += len(rows) - (old_rows == 0)

    def scores(self, vectors: Tensor, blocks: Sequence[int] | None = None) -> Tensor:
        """Return log a (row, adapter), up to a number of each row, of the adapters in use or of `blocks`.

        Raises:
            UserError: There is no adapter, or one of several has no rows.
        """
        with torch.autocast(vectors.device.type, enabled=False):
            center, directions, offsets = self._solution()
            scores = (vectors.to(center) - center) @ directions + offsets
        return scores if blocks is None else scores[:, list(blocks)]

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the weights a (row, adapter) of the adapters in use; they sum to 1."""
        return self.scores(vectors).softmax(-1)

    def shared_tensors(self) -> dict[str, Tensor]:
        return {"scatter": self.scatter, "degrees": self.degrees}

    def adapter_tensors(self) -> dict[str, list[Tensor]]:
        """Return the tensors of each adapter, by name, as views."""
        return {"means": list(self.means), "num_rows": list(self.num_rows)}

    def _solution(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return c (width,), D (width, adapter) and b (adapter,) with scores (e − c) D + b; kept until rows come."""
        state = (self.count, self.means, self.num_rows, self.scatter, self.degrees)
        version = [(id(buffer), buffer._version) for buffer in state]
        if self._solved is None or self._solved[0] != version:
            with torch.inference_mode(False), torch.no_grad():
                self._solved = version, self._solve()
        return self._solved[1]

    def _solve(self) -> tuple[Tensor, Tensor, Tensor]:
        used = int(self.count)
        if not used:
            raise UserError("adapters: expected at least one that is in use, got none; add one")
        means, unknown = _precise(self.means[:used]), (self.num_rows[:used] == 0).nonzero().flatten().tolist()
        if used > 1 and unknown:
            name = self.names[unknown[0]] if unknown[0] < len(self.names) else f"adapter {unknown[0] + 1} of {used}"
            raise UserError(
                f"router: expected rows of every adapter's task, got none for {name}; call fit_router(name, batches)"
            )
        center = means.mean(0)
        within = _precise(self.scatter) / self.degrees.clamp_min(1).to(means)
        variances = within.diagonal()
        between = (means - center).square().mean(0)
        floor = _FLOOR * (variances + between)
        scales = variances.clamp_min(floor.clamp_min(_FLOOR * floor.mean())).sqrt()
        scales = torch.where(scales > 0, scales, 1.0)
        correlations = (1 - self.shrinkage) * within / scales / scales[:, None]
        correlations.diagonal().fill_(1.0)
        root = torch.linalg.cholesky(correlations)
        keys = torch.linalg.solve_triangular(root, ((means - center) / scales).T, upper=False)
        directions = torch.linalg.solve_triangular(root.T, keys, upper=True) / scales[:, None]
        offsets = -keys.square().sum(0) / 2
        return center.to(self.means), directions.to(self.means), offsets.to(self.means)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move buffers, but keep their precision."""
        with torch.inference_mode(False):
            for name, buffer in self._buffers.items():
                assert buffer is not None
                moved = fn(buffer)
                keeps = moved.dtype == buffer.dtype or buffer.is_meta
                self._buffers[name] = moved.to(buffer.dtype) if keeps else buffer.to(moved.device)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_solved": None}


def _precise(values: Tensor) -> Tensor:
    """Return the values in float64, where the device has it."""
    return values.to(torch.float32 if values.device.type == "mps" else torch.float64)
