"""Losses and gradients that are not finite, traced to the rows of their batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch
from torch import Tensor, nn

from regard.errors import UserError
from regard.training.placement import Placement, Rows, seed_step, slice_batch, to_device


def raise_non_finite(
    placed: Placement,
    loss: Callable[[nn.Module, Rows], Tensor],
    rows: Rows,
    seed: int,
    step: int,
    mean: float,
    norm: float,
    last: str,
) -> NoReturn:
    """Raise the UserError of a mean loss or gradient norm that is not finite; `last` describes the last checkpoint."""
    if torch.tensor(mean).isfinite():
        raise UserError(f"gradient: expected finite numbers, its norm is {norm} at step {step} (loss {mean:g}); {last}")
    rows_at_fault = _rows_without_finite_loss(placed, loss, rows, seed, step)
    description = "; ".join(_describe_row(rows, row) for row in rows_at_fault[:3]) or "no single row alone"
    more = f" and {len(rows_at_fault) - 3} more" if len(rows_at_fault) > 3 else ""
    raise UserError(
        f"loss: expected a finite number, got {mean} at step {step}; rows of its batch: {description}{more}; {last}"
    )


def _rows_without_finite_loss(
    placed: Placement, loss: Callable[[nn.Module, Rows], Tensor], rows: Rows, seed: int, step: int
) -> list[int]:
    """Return the rows of the batch whose loss alone is not finite; each process checks its own."""
    flags = torch.zeros(len(next(iter(rows.values()))), dtype=torch.bool)
    share = placed.share(rows)
    seed_step(placed.device, seed, step, placed.rank)
    with torch.no_grad(), placed.autocast():
        for row in range(share.start, share.stop):
            value = loss(placed.bare, to_device(placed.device, slice_batch(rows, slice(row, row + 1))))
            flags[row] = not bool(value.isfinite())
    return placed.any(flags).nonzero().flatten().tolist()


def _describe_row(rows: Rows, row: int) -> str:
    if "input_ids" not in rows:
        return str(row)
    tokens = rows["input_ids"][row].flatten().tolist()
    return f"{row} (tokens {' '.join(map(str, tokens[:8]))}{' …' if len(tokens) > 8 else ''})"
