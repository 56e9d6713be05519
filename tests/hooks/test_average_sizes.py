"""Layers of one site share the counts of an average, so they have the same queries and keys."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard
from regard.errors import UserError

SIZES = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}


def bart() -> Any:
    torch.manual_seed(0)
    config = transformers.BartConfig(**SIZES, **HEADS, d_model=16, vocab_size=40, max_position_embeddings=32)
    return transformers.BartModel(config).eval()


def every_second(name: str, module: nn.Module) -> Any:
    """Let a module see every second of the tokens that it is passed as an argument of this name."""

    def halve(_: Any, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name in given:
            return args, given | {name: given[name][:, ::2]}
        return (args[0][:, ::2], *args[1:]), given

    return module.register_forward_pre_hook(halve, with_kwargs=True)


def ids(tokens: int) -> Tensor:
    return torch.randint(5, 40, (2, tokens), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("part", ["queries", "keys"])
@torch.no_grad()
def test_layers_of_other_sizes_have_no_average(part: str) -> None:
    """Their positions are others, and they would be divided by the counts of the first layer."""
    model, batch = bart(), {"input_ids": ids(8), "decoder_input_ids": ids(6)}
    if part == "queries":
        handle = every_second("hidden_states", model.encoder.layers[1])
        expected = r"8 queries attend to 8 keys in its first layer, 4 to 4 in layer 1 \(encoder\), so positions differ"
    else:
        handle = every_second("key_value_states", model.decoder.layers[1].encoder_attn)
        expected = r"6 queries attend to 8 keys in its first layer, 6 to 4 in layer 1 \(cross\), so positions differ"
    with pytest.raises(UserError, match=expected):
        regard.average_attention(model, [batch], length=8)
    handle.remove()
    longer = {name: torch.cat([given, given[:, :1]], dim=1) for name, given in batch.items()}
    assert regard.average_attention(model, [batch, longer], length=9).length == 9  # each batch has sizes of its own
