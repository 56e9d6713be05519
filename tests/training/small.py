"""A small model and its rows, of which some places count and others do not: for tests of the training loop."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

WIDTH = 6


class Net(nn.Module):
    """Two layers, with or without dropout; rows of numbers, of which some count."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh())
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        return values + self.out(self.norm(self.dropout(self.inner(values))))


def net(dropout: float = 0.0, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net(dropout).to(dtype)


def batch(step: int, rows: int = 8, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Rows with unequal numbers of places that count, none in some."""
    generator = torch.Generator().manual_seed(step)
    values = torch.randn(rows, 4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    counted = torch.rand(rows, 4, generator=generator) < torch.arange(rows)[:, None] / rows
    counted[-1, 0] = True
    return {"values": values, "counted": counted}


def loss(model: nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
    wrong = (model(rows["values"]) - rows["values"].roll(1, -1)).square().mean(-1)
    return (wrong * rows["counted"]).sum()


def count(rows: Mapping[str, Tensor]) -> int:
    return int(rows["counted"].sum())
