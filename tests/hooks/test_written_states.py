"""Hidden states that are written to after they were observed: by the next block, or by the caller after the forward."""

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import regard

NAMES = ["massive_activations", "matrix_entropy", "output_rank", "hidden_norm", "over_smoothing"]
BATCHES = torch.randint(0, 99, (3, 2, 12), generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.inner, self.in_place = nn.Linear(16, 48), in_place

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = self.inner(states).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        change = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return states.add_(change) if self.in_place else states + change


class Host(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(99, 16)
        self.blocks = nn.ModuleList([Block(in_place=in_place) for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embedding(ids)
        for block in self.blocks:
            states = block(states)
        return states


def measured(*, in_place: bool = False, writes: bool = False, dtype: torch.dtype) -> pd.DataFrame:
    """Return what is measured of a model, whose outputs are set to zero after the next forward if `writes`."""
    model, outputs = Host(in_place=in_place).to(dtype), []
    with regard.watching(model, NAMES) as watch, torch.no_grad():
        for ids in BATCHES:
            outputs.append(model(ids))
            if writes and len(outputs) > 1:
                outputs[-2].zero_()
    return watch.frame()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", ["in_place", "writes"])
def test_they_are_those_that_were_observed(case: str, dtype: torch.dtype) -> None:
    actual = measured(in_place=case == "in_place", writes=case == "writes", dtype=dtype)
    pd.testing.assert_frame_equal(actual, measured(dtype=dtype), rtol=1e-5, atol=1e-6)
