"""Output projections by the names that libraries give them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import Wav2Vec2BertConfig, Wav2Vec2BertModel

from regard.errors import UserError
from regard.hooks import watching

WIDTH, HEADS, TOKENS = 32, 4, 10


class Attention(nn.Module):
    """Attention without weights but those of its output projection, which has some name."""

    def __init__(self, name: str, listed: Any = None) -> None:
        super().__init__()
        self.name = name
        projection = nn.Linear(WIDTH, WIDTH)
        setattr(self, name, projection if listed is None else listed([projection, nn.Dropout(0.0)]))

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        states = scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        projection = getattr(self, self.name)
        for layer in [projection] if isinstance(projection, nn.Linear) else projection:
            states = layer(states)
        return states


class Stack(nn.Module):
    def __init__(self, *given: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention(*given) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def values(model: nn.Module, given: Tensor) -> Tensor:
    with torch.no_grad(), watching(model.eval(), "head_output_norm") as watch:
        model(given)
    table = watch.frame("head_output_norm")
    rows = table[table["head"].notna() & table["position"].isna()].sort_values(["layer", "head"])
    return torch.tensor(rows["value"].to_numpy(float))


@pytest.mark.parametrize(
    "given",
    [("wo",), ("out",), ("to_out", nn.ModuleList), ("to_out", lambda parts: nn.Sequential(*parts))],
    ids=["wo", "out", "list", "sequence"],
)
def test_its_name_changes_nothing(given: tuple[Any, ...]) -> None:
    states = torch.randn(3, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    assert torch.equal(values(Stack(*given), states), values(Stack("proj"), states))


def test_a_name_that_says_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"cannot find the output projection of blocks\.0"):
        values(Stack("mixer"), torch.zeros(1, TOKENS, WIDTH))


@pytest.mark.parametrize("behind", [nn.GELU(), nn.Linear(WIDTH, WIDTH)], ids=["activation", "layer"])
def test_a_list_that_does_more_than_project_is_refused(behind: nn.Module) -> None:
    given = ("to_out", lambda parts: nn.Sequential(parts[0], behind))
    with pytest.raises(UserError, match=r"cannot find the output projection of blocks\.0"):
        values(Stack(*given), torch.zeros(1, TOKENS, WIDTH))


class Rearranged(Attention):
    """Attention that joins its heads in some way."""

    def __init__(self, join: Callable[[Tensor], Tensor]) -> None:
        super().__init__("proj")
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        projected: Tensor = self.proj(self.join(scaled_dot_product_attention(heads, heads, heads)))
        return projected


JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "interleaved": lambda output: output.permute(0, 2, 3, 1).flatten(2),
    "heads as tokens": lambda output: output.reshape(len(output), TOKENS, WIDTH),
    "reversed": lambda output: output.flip(1).transpose(1, 2).flatten(2),
    "gated": lambda output: (0.5 * output).transpose(1, 2).flatten(2),
    "in order": lambda output: output.transpose(1, 2).flatten(2),
}


@pytest.mark.parametrize("name", JOINED)
def test_heads_that_are_not_side_by_side_in_their_order_are_refused(name: str) -> None:
    model = Stack("proj")
    model.blocks = nn.ModuleList(Rearranged(JOINED[name]) for _ in range(2))
    states = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    if name in ("gated", "in order"):
        assert values(model, states).isfinite().all()
        return
    with pytest.raises(UserError, match="does not receive their outputs one beside the other"):
        values(model, states)


def test_one_head_of_values_does_not_hide_another_order() -> None:
    """The first query of a causal head sees one key: with one head of values that output is the same in all heads."""

    class OneValue(Rearranged):
        def forward(self, x: Tensor) -> Tensor:
            heads = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            values = heads[:, :1].expand_as(heads)
            output = scaled_dot_product_attention(heads, heads, values, is_causal=True)
            projected: Tensor = self.proj(self.join(output))
            return projected

    model = Stack("proj")
    states = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    model.blocks = nn.ModuleList(OneValue(JOINED["in order"]) for _ in range(2))
    assert values(model, states).isfinite().all()
    model.blocks = nn.ModuleList(OneValue(JOINED["reversed"]) for _ in range(2))
    with pytest.raises(UserError, match="does not receive their outputs one beside the other"):
        values(model, states)


def test_a_speech_encoder_equals_the_products_of_its_heads() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 48}
    config = Wav2Vec2BertConfig(**sizes, vocab_size=32, feature_projection_input_dim=16, conv_depthwise_kernel_size=5)
    model, expected = Wav2Vec2BertModel(config).eval(), []

    def add_norms(projection: nn.Linear, args: tuple[Tensor]) -> None:
        heads = args[0].unflatten(-1, (HEADS, -1))
        by_head = projection.weight.unflatten(-1, (HEADS, -1))
        expected.append(torch.einsum("bthd,ohd->bhto", heads, by_head).norm(dim=-1).mean((0, 2)))

    for layer in model.encoder.layers:
        layer.self_attn.linear_out.register_forward_pre_hook(add_norms)
    found = values(model, torch.randn(2, TOKENS, 16, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(found, torch.cat(expected[-2:]).double(), rtol=1e-4, atol=1e-5)
