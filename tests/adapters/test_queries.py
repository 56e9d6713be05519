"""Models whose mean states cannot be read are refused, in words."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from regard.adapters.queries import StateReader
from regard.errors import UserError
from tests.adapters.model_families import made, rows


@pytest.mark.parametrize("family", ["Perceiver", "Blt"])
def test_a_model_that_does_not_say_its_layers_and_width_is_refused(family: str) -> None:
    reader: Any = nn.Module()
    reader.config = getattr(transformers, f"{family}Config")()
    lacking = f"{family}Config without num_hidden_layers and hidden_size; query='embeddings' is possible"
    with pytest.raises(UserError, match=f"query: expected a model that says its layers and width, got {lacking}"):
        StateReader(reader)


def test_states_of_several_streams_are_refused() -> None:
    """HYV4 has four states of each token (row, token, stream, width)."""
    model, batch = made("bert").bert, rows("bert")

    def with_streams(_: nn.Module, __: Any, output: Any) -> Tensor:
        states: Tensor = output if isinstance(output, Tensor) else output[0]
        return states[:, :, None].expand(-1, -1, 4, -1)

    model.encoder.layer[0].register_forward_hook(with_streams)
    with pytest.raises(UserError, match=r"query: expected states of 7 tokens, got \(3, 7, 4, 16\); query='embeddings'"):
        StateReader(model)(batch, torch.ones(3, 7, dtype=torch.bool))
