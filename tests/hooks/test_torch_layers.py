"""`nn.MultiheadAttention` in modules that are not of Transformers: `nn.TransformerEncoder` and the like."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention

from regard.errors import UserError
from regard.hooks import watching

WIDTH, HEADS, TOKENS = 32, 4, 10
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TOKENS)
PADDING = torch.arange(TOKENS).expand(2, -1) >= torch.tensor([[TOKENS], [6]])


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, dropout=0.0, **{"batch_first": True, **options})
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    for weight in stack.parameters():
        nn.init.normal_(weight, std=0.3)
    return stack.eval()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, dropout=0.0, batch_first=True)
        self.stack = nn.TransformerDecoder(layer, 2)

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> Tensor:
        memory = -x[:, :7]
        return self.stack(x, memory, CAUSAL, memory_key_padding_mask=hidden, tgt_is_causal=True)


@pytest.fixture
def states() -> Tensor:
    return torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """The weights of each head, in every call of the function, which is called by the layers in training only."""
    weights: list[Tensor] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        asked = {**kwargs, "need_weights": True, "average_attn_weights": False}
        output, by_head = multi_head_attention_forward(*args, **asked)
        weights.append(by_head)
        return output, None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "multi_head_attention_forward", record)
        yield weights


def column_mass(weights: Tensor, padding: Tensor | None) -> Tensor:
    """The mean weight (head, key) of the real queries of a sample, averaged over the samples that have the key."""
    real = torch.ones(len(weights), weights.shape[-1]) if padding is None else (~padding).float()
    means = (weights * real[:, None, :, None]).sum(-2) / real.sum(-1)[:, None, None]
    return means.sum(0) / real.sum(0)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"bias": False}], ids=str)
@pytest.mark.parametrize(
    "site, inputs",
    [
        ("encoder", {}),
        ("encoder", {"src_key_padding_mask": PADDING}),
        ("decoder", {"mask": CAUSAL, "is_causal": True}),
        ("decoder", {"mask": CAUSAL.isinf()}),
    ],
)
@torch.no_grad()
def test_an_encoder_of_torch(
    states: Tensor, site: str, inputs: dict[str, Any], options: dict[str, Any], is_training: bool
) -> None:
    """The fast path of layers, which calls none of their modules, is not taken."""
    model, padding = encoder(**options), inputs.get("src_key_padding_mask")
    with recorded() as weights:
        expected = model.train()(states, **inputs)
    with watching(model.train(is_training), ["column_mass", "hidden_norm"]) as watch:
        actual = model(states, **inputs)
    real = slice(None) if padding is None else ~padding
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)
    table = watch.frame("column_mass")
    assert set(table["site"]) == {site}
    assert len(weights) == 2
    for layer, by_head in enumerate(weights):
        rows = table[table["layer"] == layer].sort_values(["head", "position"])
        measured = torch.tensor(rows["value"].to_numpy()).view(HEADS, TOKENS).float()
        torch.testing.assert_close(measured, column_mass(by_head, padding))


@torch.no_grad()
def test_what_heads_add_is_projected_by_the_modules_own_weight(states: Tensor) -> None:
    model = encoder()
    with recorded() as weights:
        model.train()(states)
    with watching(model.eval(), "head_output_norm") as watch:
        model(states)
    layer = model.layers[0].self_attn
    value = (states @ layer.in_proj_weight[-WIDTH:].T + layer.in_proj_bias[-WIDTH:]).unflatten(-1, (HEADS, -1))
    output = (weights[0] @ value.transpose(1, 2)).unflatten(1, (HEADS,))
    by_head = layer.out_proj.weight.unflatten(1, (HEADS, -1)).permute(1, 2, 0)
    expected = (output @ by_head[None]).norm(dim=-1).mean((0, 2))
    table = watch.frame("head_output_norm")
    rows = table[(table["layer"] == 0) & table["head"].notna() & table["position"].isna()]
    measured = rows.sort_values("head")["value"].to_numpy()
    torch.testing.assert_close(torch.tensor(measured).float(), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_cross_attention_says_that_it_is(states: Tensor) -> None:
    model = Decoder().eval()
    with pytest.raises(UserError, match=r"queries and keys of two inputs; .* is_cross_attention"), watching(model):
        model(states)
    expected = model(states)
    for layer in model.stack.layers:
        layer.multihead_attn.is_cross_attention = True
    with watching(model, "column_mass") as watch:
        torch.testing.assert_close(model(states), expected, rtol=1e-4, atol=1e-5)
    table = watch.frame("column_mass")
    sizes = table.groupby("site")["position"].nunique().to_dict()
    assert sizes == {"decoder": TOKENS, "cross": 7}


@torch.no_grad()
def test_keys_that_nobody_sees_are_padding_whatever_says_so(states: Tensor) -> None:
    model, hidden = Decoder().eval(), torch.arange(7) >= torch.tensor([[7], [4]])
    for layer in model.stack.layers:
        layer.multihead_attn.is_cross_attention = True
    with recorded() as weights:
        model.train()(states, hidden)
    with watching(model.eval(), "column_mass") as watch:
        model(states, hidden)
    table = watch.frame("column_mass")
    rows = table[(table["site"] == "cross") & (table["layer"] == 1)].sort_values(["head", "position"])
    measured = torch.tensor(rows["value"].to_numpy()).view(HEADS, 7).float()
    torch.testing.assert_close(measured, weights[3].mean(-2).sum(0) / (~hidden).sum(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        output = scaled_dot_product_attention(heads, heads, heads, attn_mask=visible[:, None, None])
        return x + self.proj(output.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, visible: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, visible)
        return x


@torch.no_grad()
def test_a_padded_text_measures_as_alone(states: Tensor) -> None:
    model = Stack()
    names = ["column_mass", "matrix_entropy", "hidden_norm", "over_smoothing"]
    with watching(model, names) as padded:
        model(states, ~PADDING)
    with watching(model, names) as alone:
        model(states[:1], ~PADDING[:1])
        model(states[1:, :6], ~PADDING[1:, :6])
    for name in names:
        pd.testing.assert_frame_equal(padded.frame(name), alone.frame(name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("second", [torch.ones_like(PADDING), PADDING.flip(0)], ids=["none", "other"])
@torch.no_grad()
def test_layers_that_hide_different_keys_say_nothing_about_padding(states: Tensor, second: Tensor) -> None:
    class Strided(Stack):
        def forward(self, x: Tensor, visible: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x, visible), second)

    model = Strided()
    with pytest.raises(UserError, match="its layers hide different keys"), watching(model, "column_mass"):
        model(states, ~PADDING)


class WithWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


@pytest.mark.parametrize("is_training", [False, True])
@torch.no_grad()
def test_what_cannot_be_observed_is_refused(states: Tensor, is_training: bool) -> None:
    model = WithWeights().train(is_training)
    with pytest.raises(UserError, match="weights to return; expected need_weights=False"), watching(model):
        model(states)
    late = encoder(batch_first=False).train(is_training)
    with pytest.raises(UserError, match="tokens on the first axis; expected batch_first=True"), watching(late):
        late(states)


class TwoValues(nn.Module):
    """Cross-attention with one matrix for two sets of values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        split = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q(x), *self.kv(memory).chunk(3, -1))]
        query, key, *values = split
        outputs = [nn.functional.scaled_dot_product_attention(query, key, value) for value in values]
        return self.o(torch.cat([output.transpose(1, 2).flatten(2) for output in outputs], -1))  # type: ignore[no-any-return]


class WithMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.cross_attn = TwoValues(), TwoValues()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = x + self.self_attn(x, x)
        return x + self.cross_attn(x, memory)


@torch.no_grad()
def test_one_matrix_for_two_values_counts_once_in_cross_attention_too() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([WithMemory(), WithMemory()])})
    model.forward = lambda x, memory: model["layers"][1](model["layers"][0](x, memory), memory)  # type: ignore[method-assign]
    with watching(model, "column_mass") as watch:
        model(torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH))
    for site, keys in (("encoder", 5), ("cross@encoder", 7)):
        assert watch.frame("column_mass", site=site)["value"].mean() == pytest.approx(1 / keys, abs=1e-6)
