"""Padding that `attention_mask` does not say, or says of some tokens alone: it is no part of a sample."""

from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from experiments.hosts.shrink import make_config, make_model, sharpen
from regard.attention.call import AttentionCall
from regard.constants import Constants, Origin
from regard.errors import UserError
from regard.hooks import find_attention_layers, replacing, watching
from regard.hooks.forward_pass import find_tokens
from regard.hooks.layers import model_fingerprint

REAL = 5
"""Real tokens of the second sample."""


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def ids(tokens: int = 8) -> Tensor:
    return torch.randint(5, 90, (2, tokens), generator=torch.Generator().manual_seed(2))


def told(tokens: int, real: int = REAL) -> Tensor:
    """Return a mask (batch, token) that is 0 behind the first tokens of the second sample."""
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, real:] = 0
    return mask


def of_lengths() -> dict[str, Any]:
    return {"input_ids": ids(), "lengths": torch.tensor([8, REAL])}


def of_ids_alone() -> dict[str, Any]:
    return {"input_ids": ids().masked_fill(told(8) == 0, 0)}


def of_mask() -> dict[str, Any]:
    return {"input_ids": ids(), "attention_mask": told(8)}


def of_inverse() -> dict[str, Any]:
    return {"input_ids": ids(), "input_mask": 1.0 - told(8)}


def of_regions() -> dict[str, Any]:
    return {"input_ids": ids(6), "attention_mask": told(6, 4), "visual_embeds": noise(2, 2, 32),
            "visual_attention_mask": told(2, 1)}  # fmt: skip


def of_image() -> dict[str, Any]:
    boxes = torch.zeros(2, 6, 4, dtype=torch.long)
    return {"input_ids": ids(6), "bbox": boxes, "attention_mask": told(6), "pixel_values": noise(2, 3, 32, 32)}


def of_series() -> dict[str, Any]:
    padding = torch.zeros(2, 8 * 32)
    padding[1, : 3 * 32] = 1
    return {
        "past_values": noise(2, 8 * 32),
        "past_values_padding": padding,
        "freq": torch.zeros(2, 1, dtype=torch.long),
    }


def of_frames() -> dict[str, Any]:
    return {"input_features": noise(2, 16, 128), "input_features_mask": told(128, 2 * REAL)}


def first(tokens: int, count: int = REAL) -> Tensor:
    return torch.arange(tokens) < count


HOSTS: dict[str, tuple[str, str, Any, Tensor]] = {
    "lengths": ("xlm", "XLMModel", of_lengths, first(8)),
    "no mask": ("flaubert", "FlaubertModel", of_ids_alone, first(8)),
    "sees itself": ("xlnet", "XLNetModel", of_mask, first(8)),
    "inverse": ("xlnet", "XLNetModel", of_inverse, first(8)),
    "regions": ("visual_bert", "VisualBertModel", of_regions, torch.tensor([1, 1, 1, 1, 0, 0, 1, 0]) > 0),
    "image": ("layoutlmv3", "LayoutLMv3Model", of_image, torch.arange(6 + 17) != REAL),
    "series": ("timesfm", "TimesFmModel", of_series, torch.arange(8) >= 3),
    "frames": ("audioflamingo3_encoder", "AudioFlamingo3Encoder", of_frames, first(64, REAL)),
}
"""Type, class, inputs, and the real tokens of the second sample."""


@pytest.mark.every_value
@pytest.mark.parametrize("name", HOSTS)
@torch.no_grad()
def test_padding_is_in_no_sample(name: str) -> None:
    kind, class_name, make_inputs, real = HOSTS[name]
    model, inputs = make_model(class_name, make_config(kind)), make_inputs()
    sharpen(model, 1.0)
    weights = model(**inputs, output_attentions=True).attentions[1].double()
    assert weights.shape[2:] == (len(real), len(real))
    expected = torch.zeros(weights.shape[1], len(real), dtype=torch.float64)
    counts = torch.zeros(len(real))
    for row, seen in zip(weights, (torch.ones_like(real), real), strict=True):
        mass = row[:, seen][:, :, seen].mean(1)
        expected[:, : mass.shape[1]] += mass
        counts[: mass.shape[1]] += 1
    with watching(model, ["column_mass", "hidden_norm"]) as watch:
        model(**inputs)
    assert set(watch.frame()["site"]) == {"decoder" if name == "series" else "encoder"}
    actual = torch.tensor(watch.frame("column_mass", layer=1)["value"].to_numpy()).reshape(expected.shape)
    torch.testing.assert_close(actual, expected / counts, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sees_ahead", [True, False])
@pytest.mark.parametrize(
    "hidden, is_padding",
    [([0, 1], (True, True)), ([6, 7], (True, False)), ([3], (False, False)), (list(range(8)), (False, False))],
)
def test_tokens_that_a_mask_leaves_out_elsewhere_are_no_padding(
    hidden: list[int], is_padding: tuple[bool, bool], sees_ahead: bool
) -> None:
    """A sparse mask may hide a token between others from all, and from itself; a whole row is no padding."""
    real = torch.ones(8, dtype=torch.bool)
    real[hidden] = False
    keep = (real[:, None] & real).tril(0 if not sees_ahead else 8)[None, None]
    call = AttentionCall(**dict.fromkeys(("query", "key", "value"), noise(1, 2, 8, 4)), scale=1.0, keep=keep)
    tokens = find_tokens(call, None, sees_ahead=sees_ahead)
    assert (tokens is not None) == is_padding[not sees_ahead]
    assert tokens is None or torch.equal(tokens, real[None])


@torch.no_grad()
def test_constants_take_no_padding_of_a_text_beside_an_image() -> None:
    """Uniform ones: each token then reads the mean of all that are real, wherever padding stands."""
    kind, class_name, make_inputs, real = HOSTS["image"]
    model, inputs = make_model(class_name, make_config(kind)), make_inputs()
    sharpen(model, 1.0)
    layers = find_attention_layers(model)
    matrices = {layer.key: torch.ones(layer.heads, len(real), len(real)) for layer in layers}
    constants = Constants(matrices=matrices, origin=Origin(source="test", model=model_fingerprint(model, layers)))
    alone = {name: value[1:] if name == "pixel_values" else value[1:, :REAL] for name, value in inputs.items()}
    with replacing(model, constants):
        padded, expected = model(**inputs)[0][1], model(**alone)[0][0]
    torch.testing.assert_close(padded[real], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "imagegpt"])
@torch.no_grad()
def test_choices_are_rows_with_the_padding_of_each(name: str) -> None:
    """GPT-2 takes ids and mask of (batch, choice, token), as its head of two tasks documents."""
    model = make_model({"gpt2": "GPT2DoubleHeadsModel", "imagegpt": "ImageGPTModel"}[name], make_config(name))
    sharpen(model)
    rows, mask = torch.cat([ids(), ids().flip(1)]), torch.cat([told(8), told(8, 3)])
    with watching(model, ["column_mass", "sink_tokens"]) as expected:
        model(input_ids=rows, attention_mask=mask)
    with watching(model, ["column_mass", "sink_tokens"]) as watch:
        model(input_ids=rows.reshape(2, 2, 8), attention_mask=mask.reshape(2, 2, 8))
    assert watch.samples == 4
    pd.testing.assert_frame_equal(watch.frame(), expected.frame(), rtol=1e-5, atol=1e-6)
    counts = watch.frame("column_mass", layer=0, head=0).sort_values("position")["n"]
    assert counts.tolist() == [4, 4, 4, 3, 3, 2, 2, 2]
    assert watch["sink_tokens"].tokens() == expected["sink_tokens"].tokens()


class Chooser(nn.Module):
    """A layer in which a query sees the keys of its largest scores, of tokens that an argument may hide."""

    def __init__(self, heads: int, largest: int, window: int = 99) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.blocks = nn.Embedding(90, 8), nn.ModuleList([Choice(heads, largest, window)])

    def forward(self, ids: Tensor, real: Tensor | None = None, attention_mask: Tensor | None = None) -> Tensor:
        states: Tensor = self.blocks[0](self.table(ids), real)
        return states


class Choice(nn.Module):
    def __init__(self, heads: int, largest: int, window: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.num_heads, self.largest, self.window = heads, largest, window

    def weigh(self, states: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights and values."""
        q, k, v = (part(states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.maps)
        distance = torch.arange(states.shape[1])[:, None] - torch.arange(states.shape[1])
        is_near = (distance >= 0) & (distance < self.window * torch.arange(1, self.num_heads + 1)[:, None, None])
        scores = (q @ k.mT).masked_fill(~is_near, -torch.inf)
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None].bool(), -torch.inf)
        least = scores.topk(self.largest, -1).values[..., -1:]
        return scores.masked_fill(scores < least, -torch.inf).softmax(-1), v

    def forward(self, states: Tensor, real: Tensor | None) -> Tensor:
        weights, v = self.weigh(states, real)
        return states + (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("heads", [1, 2])
@torch.no_grad()
def test_keys_that_no_query_chooses_are_no_padding(heads: int) -> None:
    """The last tokens were left out of their samples, which nothing told."""
    model = Chooser(heads, largest=1)
    weights, _ = model.blocks[0].weigh(model.table(ids()), None)
    assert not bool((weights > 0).any((1, 2)).all())
    problem = r"its queries may choose keys, as the largest scores, .* argument attention_mask"
    with pytest.raises(UserError, match=problem), watching(model, "column_mass"):
        model(ids())
    with watching(model, "column_mass") as watch:
        model(ids(), attention_mask=torch.ones(2, 8))
    values = torch.tensor(watch.frame("column_mass")["value"].to_numpy()).reshape(heads, 8)
    torch.testing.assert_close(values, weights.double().mean(2).mean(0))


@torch.no_grad()
def test_padding_beside_windows_of_heads_is_in_no_sample() -> None:
    """Heads hide different pairs, by their distance alone."""
    model = Chooser(2, largest=8, window=3)
    real = told(8)
    with watching(model, "column_mass") as watch:
        model(ids(), real=real)
    weights, _ = model.blocks[0].weigh(model.table(ids()), real)
    alone = [weights[0].mean(1), weights[1, :, :REAL, :REAL].mean(1)]
    values = torch.tensor(watch.frame("column_mass")["value"].to_numpy()).reshape(2, 8)
    torch.testing.assert_close(values[:, :REAL], ((alone[0][:, :REAL] + alone[1]) / 2).double())
    torch.testing.assert_close(values[:, REAL:], alone[0][:, REAL:].double())


class Masked(Choice):
    """A layer that takes a mask of pairs which all heads share, as most functions of attention do."""

    def forward(self, states: Tensor, pairs: Tensor | None) -> Tensor:
        q, k, v = (part(states).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.maps)
        return states + nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs).transpose(1, 2).flatten(2)


@torch.no_grad()
def test_padding_beside_a_mask_of_pairs_that_heads_share_is_in_no_sample() -> None:
    """A prefix that sees itself whole: its padding was taken for keys that no query chooses."""
    model = Chooser(2, largest=1)
    model.blocks[0] = block = Masked(2, largest=1, window=1)
    pairs = torch.ones(8, 8, dtype=torch.bool).tril()
    pairs[:3, :3] = True
    with watching(model, "column_mass") as watch:
        model(ids(), real=pairs & told(8)[:, None, None].bool())
    q, k, _ = (part(model.table(ids())).unflatten(-1, (2, -1)).transpose(1, 2) for part in block.maps)
    scores = (q @ k.mT).double() * 4**-0.5
    alone = [
        scores[row, :, :n, :n].masked_fill(~pairs[:n, :n], -torch.inf).softmax(-1) for row, n in ((0, 8), (1, REAL))
    ]
    sums = torch.stack([nn.functional.pad(part.mean(1), (0, 8 - part.shape[-1])) for part in alone]).sum(0)
    counts = torch.tensor([2] * REAL + [1] * (8 - REAL))
    values = torch.tensor(watch.frame("column_mass")["value"].to_numpy()).reshape(2, 8)
    torch.testing.assert_close(values, sums / counts, atol=1e-6, rtol=1e-5)
