"""A tiny encoder in front of padded samples: padding before, behind and between, as the layouts of tasks have it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from regard.training import States, encode_states

SAMPLES, LENGTH, WIDTH, LAYERS, WORDS = 18, 9, 16, 3, 40


@dataclass(frozen=True)
class Inputs:
    """Token ids and which of them are real."""

    ids: Tensor
    mask: Tensor

    def batches(self, size: int = 5) -> Iterator[dict[str, Tensor]]:
        for rows in torch.arange(len(self.ids)).split(size):
            yield self.batch(rows)

    def batch(self, rows: Tensor) -> dict[str, Tensor]:
        return {"input_ids": self.ids[rows], "attention_mask": self.mask[rows]}


@pytest.fixture
def inputs() -> Inputs:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(5, WORDS, (SAMPLES, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SAMPLES, 1), generator=generator)
    mask[::3] = mask[::3].flip(1)
    mask[1::3, LENGTH // 2] = False
    return Inputs(ids, mask)


@pytest.fixture
def model() -> Any:
    """A BERT with a head for words, two layers and dropout, in training mode."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": LAYERS - 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    config = BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, initializer_range=0.4, **sizes)
    return BertForMaskedLM(config).train()


@pytest.fixture
def dense(model: Any, inputs: Inputs) -> Tensor:
    """The states (sample, layer, position, width) of one forward of all, straight from the model."""
    with torch.no_grad():
        found = model.eval()(**inputs.batch(torch.arange(SAMPLES)), output_hidden_states=True)
    model.train()
    return torch.stack(found.hidden_states, dim=1)


@pytest.fixture
def states(dense: Tensor, inputs: Inputs) -> States:
    return States.of(dense, inputs.mask)


@pytest.fixture
def encode(model: Any, inputs: Inputs, tmp_path: Any) -> Callable[..., States]:
    """One pass of the model over the inputs into the test's folder; options of `encode_states` may be given."""

    def run(**options: Any) -> States:
        given = {"mask": inputs.mask, "key": "k", **options}
        return encode_states(given.pop("model", model), given.pop("batches", inputs.batches()), tmp_path, **given)

    return run
