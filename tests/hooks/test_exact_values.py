"""Statistics of small models, some of whose weights are set so that their attention is known."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard.hooks import watching
from regard.statistics import SinkDeviation

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}  # fmt: skip


def ids(rows: int = 2, tokens: int = 20) -> Tensor:
    return torch.randint(5, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


def model_of(config: Any, model_class: Any) -> Any:
    torch.manual_seed(0)
    return model_class._from_config(config, attn_implementation="eager").eval()


# -- sink deviation --------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_sink_deviation_of_uniform_attention_is_zero() -> None:
    model = model_of(transformers.BertConfig(**SMALL), transformers.BertModel)
    for layer in model.encoder.layer:
        layer.attention.self.query.weight.zero_()
        layer.attention.self.query.bias.zero_()
    with watching(model, [SinkDeviation(top=5)]) as watch:
        model(ids(tokens=200))
    assert watch.frame("sink_deviation")["value"].abs().max() < 1e-8


@torch.no_grad()
@pytest.mark.parametrize("steps", [(200,), (150, 1, 49)], ids=["whole", "cached"])
def test_the_sink_deviation_of_a_decoder_is_that_of_its_matrix(steps: tuple[int, ...]) -> None:
    """Keys of zero give the matrix 1/(i + 1) below the diagonal."""
    model = model_of(transformers.LlamaConfig(**SMALL), transformers.LlamaModel)
    for layer in model.layers:
        layer.self_attn.k_proj.weight.zero_()
    with watching(model, "sink_deviation") as watch:
        cache = None
        for tokens in ids(tokens=200).split(steps, dim=1):
            cache = model(tokens, past_key_values=cache, use_cache=True).past_key_values
    column = 1 / torch.arange(1, 201, dtype=torch.float64)
    expected = (column - column.mean()).square().sum().sqrt() / column.sum()
    values = torch.tensor(watch.frame("sink_deviation")["value"].to_numpy())
    torch.testing.assert_close(values, expected.expand(8), rtol=1e-6, atol=0)
