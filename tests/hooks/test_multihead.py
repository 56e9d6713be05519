"""WavLM calls the function of `nn.MultiheadAttention`: its heads are told apart, which its own weights are not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward

from regard.errors import UserError
from regard.hooks import watching

HEADS = 4


@pytest.fixture(scope="module")
def wavlm() -> Any:
    torch.manual_seed(0)
    config = transformers.WavLMConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=48, conv_dim=(16, 16),
        conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
        num_buckets=8, max_bucket_distance=20, initializer_range=0.5, feat_extract_norm="layer",
    )  # fmt: skip
    return transformers.WavLMModel(config).eval()


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """The weights of each head, in every call of the function."""
    weights: list[Tensor] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        output, by_head = multi_head_attention_forward(*args, **kwargs, average_attn_weights=False)
        weights.append(by_head)
        return output, by_head.mean(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "multi_head_attention_forward", record)
        yield weights


@pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask")  # WavLM's own
@pytest.mark.parametrize("is_padded", [False, True])
@torch.no_grad()
def test_heads_with_gated_positions_are_those_of_the_function(wavlm: Any, is_padded: bool) -> None:
    sounds, mask = torch.randn(2, 400, generator=torch.Generator().manual_seed(1)), torch.ones(2, 400)
    if is_padded:
        mask[1, 250:] = 0
    with recorded() as weights:
        expected = wavlm(sounds, attention_mask=mask).last_hidden_state
    frames = [weights[0].shape[-1], int((weights[0][1, 0, 0] > 0).sum())]
    assert (frames[1] < frames[0]) == is_padded
    names = ["column_mass", "head_output_norm", "hidden_norm"]
    with watching(wavlm, names) as watch:
        actual = wavlm(sounds, attention_mask=mask).last_hidden_state
    for row, length in enumerate(frames):
        torch.testing.assert_close(actual[row, :length], expected[row, :length], rtol=1e-4, atol=1e-5)
    for layer, matrices in enumerate(weights):
        total, count = torch.zeros(HEADS, frames[0], dtype=torch.float64), torch.zeros(frames[0])
        for matrix, length in zip(matrices, frames, strict=True):
            total[:, :length] += matrix[:, :length, :length].double().mean(1)
            count[:length] += 1
        rows = watch.frame("column_mass", layer=layer).sort_values(["head", "position"])
        mass = torch.tensor(rows["value"].to_numpy()).reshape(HEADS, -1)
        torch.testing.assert_close(mass, total / count, rtol=1e-4, atol=1e-6)
    assert not torch.allclose(weights[0][:, 0], weights[0][:, 1], atol=1e-2)
    assert not watch.frame("head_output_norm").empty


class Caller(nn.Module):
    """Calls the function as it is told to; keeps the weights of its heads, if it gets any."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.in_proj, self.out, self.options = nn.Linear(32, 96), nn.Linear(32, 32), options
        self.weights: Tensor | None = None

    def forward(self, states: Tensor) -> Tensor:
        steps = states.transpose(0, 1) if states.ndim == 3 else states
        output, self.weights = multi_head_attention_forward(
            steps, steps, steps, 32, HEADS, self.in_proj.weight, self.in_proj.bias, dropout_p=0.0,
            out_proj_weight=self.out.weight, out_proj_bias=self.out.bias, training=False, average_attn_weights=False,
            **{"bias_k": None, "bias_v": None, "add_zero_attn": False, **self.options},
        )  # fmt: skip
        return output.transpose(0, 1) if states.ndim == 3 else output


class Plain(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(Caller(**options)) for _ in range(2))

    def forward(self, states: Tensor) -> Tensor:
        for block in self.blocks:
            states = block(states)
        return states


PADDING = torch.arange(9) >= torch.tensor([9, 6])[:, None]
FUTURE = torch.ones(9, 9, dtype=torch.bool).triu(1)
MASKS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "pairs": {"attn_mask": FUTURE},
    "numbers": {"attn_mask": torch.zeros(9, 9).masked_fill(FUTURE, -torch.inf), "is_causal": True},
    "padding": {"key_padding_mask": PADDING},
    "both": {
        "key_padding_mask": torch.zeros(2, 9).masked_fill(PADDING, -torch.inf),
        "attn_mask": torch.linspace(-3, 3, 2 * HEADS * 81).reshape(2 * HEADS, 9, 9),
    },
}


@pytest.mark.parametrize("needs_weights", [True, False])
@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_masks_of_the_function_are_read(name: str, needs_weights: bool) -> None:
    """Padding, which is neither a query nor a key, is what no query sees."""
    torch.manual_seed(0)
    model, states = Plain(**MASKS[name]).eval(), torch.randn(2, 9, 32)
    real = torch.ones(2, 9) if "key_padding_mask" not in MASKS[name] else (~PADDING).double()
    expected = model(states)
    weights = [block[0].weights for block in model.blocks]
    for block in model.blocks:
        block[0].options["need_weights"] = needs_weights
    with watching(model, "column_mass") as watch:
        torch.testing.assert_close(model(states), expected, rtol=1e-4, atol=1e-5)
    for layer, matrices in enumerate(weights):
        rows = watch.frame("column_mass", layer=layer).sort_values(["head", "position"])
        mass = torch.tensor(rows["value"].to_numpy()).reshape(HEADS, -1)
        by_sample = torch.einsum("bhqk,bq->bhk", matrices.double(), real.double()) / real.sum(-1)[:, None, None]
        torch.testing.assert_close(mass, by_sample.sum(0) / real.sum(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"add_zero_attn": True}, "keys or values beside those of its tokens"),
        ({"bias_k": torch.zeros(1, 1, 32), "bias_v": torch.zeros(1, 1, 32)}, "beside those of its tokens"),
        ({}, "2 dimensions; expected"),
    ],
)
@torch.no_grad()
def test_other_forms_are_refused(options: dict[str, Any], message: str) -> None:
    model = Plain(**options)
    with watching(model, "column_mass"), pytest.raises(UserError, match=message):
        model(torch.randn(2, 9, 32) if options else torch.randn(9, 32))
