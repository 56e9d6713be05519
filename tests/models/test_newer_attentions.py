"""Attentions that change what stands around the weights: differential, value residual, gates by head, StableMask."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention.positions import rotary_angles, rotate
from regard.attention.spec import ATTENTIONS
from regard.errors import UserError
from regard.hooks import watching
from regard.models import RegardConfig, RegardForCausalLM

pytestmark = pytest.mark.every_value

WIDTH, HEADS, GROUPS, LENGTH = 16, 4, 2, 7
SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": WIDTH,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "max_position_embeddings": 24,
}


def model_of(attention: str, **changes: Any) -> RegardForCausalLM:
    torch.manual_seed(0)
    model = RegardForCausalLM(RegardConfig(**SIZES | changes, attention=attention)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return model


def ids() -> Tensor:
    return torch.randint(0, 31, (2, LENGTH), generator=torch.Generator().manual_seed(1))


def seen(model: RegardForCausalLM) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """Every attention module with what it received and returned."""
    calls: list[tuple[Any, Tensor, Tensor]] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda module, args, output: calls.append((module, args[0], output)))
    model(ids())
    yield from calls


def heads(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight.T).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)


def matrices(module: Any, x: Tensor) -> Tensor:
    """Causal softmax of rotated queries and keys, (batch, head, query, key)."""
    angles = rotary_angles(torch.arange(LENGTH)[None], WIDTH // HEADS, 10_000.0)
    turn = [angle.double() for angle in angles]
    query, key = (rotate(heads(x, layer.weight), *turn) for layer in (module.q_proj, module.k_proj))
    scores = query @ key.repeat_interleave(HEADS // GROUPS, 1).mT / math.sqrt(WIDTH // HEADS)
    return scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf).softmax(-1)


def project(module: Any, outputs: Tensor) -> Tensor:
    return outputs.transpose(1, 2).flatten(2) @ module.o_proj.weight.T


@torch.no_grad()
def test_differential_attention_is_the_difference_of_two_softmaxes() -> None:
    """As Ye et al. 2025 write it, pair by pair; their λ₀ of layer l, counted from 1, is 0.8 − 0.6 exp(−0.3 (l − 1))."""
    for number, (module, x, output) in enumerate(seen(model_of("differential"))):
        weights, values = matrices(module, x), heads(x, module.v_proj.weight)
        q1, k1, q2, k2 = module.difference.vectors
        start = 0.8 - 0.6 * math.exp(-0.3 * number)
        share = math.exp(float(q1 @ k1)) - math.exp(float(q2 @ k2)) + start
        both = torch.cat([values[:, 0], values[:, 1]], -1)  # the two groups are one pair
        pairs = []
        for first in (0, 2):
            mixed = (weights[:, first] - share * weights[:, first + 1]) @ both
            mean = mixed.square().mean(-1, keepdim=True)
            pairs.append(mixed / (mean + 1e-5).sqrt() * module.difference.norm.weight * (1 - start))
        expected = torch.cat(pairs, -1) @ module.o_proj.weight.T
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_later_layers_mix_in_the_values_of_the_first() -> None:
    first: Tensor | None = None
    for number, (module, x, output) in enumerate(seen(model_of("value-residual"))):
        values = heads(x, module.v_proj.weight)
        if first is None:
            assert number == 0
            assert module.value_shares is None
            first = values
        else:
            values = module.value_shares[0] * first + module.value_shares[1] * values
        expected = matrices(module, x) @ values.repeat_interleave(HEADS // GROUPS, 1)
        torch.testing.assert_close(output, project(module, expected), rtol=1e-9, atol=1e-9)


@torch.no_grad()
def test_a_gate_by_head_is_one_number_a_head() -> None:
    for module, x, output in seen(model_of("gated-per-head")):
        assert module.gate_proj.weight.shape == (HEADS, WIDTH)
        values = heads(x, module.v_proj.weight).repeat_interleave(HEADS // GROUPS, 1)
        gates = (x @ module.gate_proj.weight.T).sigmoid().transpose(1, 2)[..., None]
        torch.testing.assert_close(output, project(module, matrices(module, x) @ values * gates), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["differential", "value-residual", "gated-per-head", "top-8"])
def test_gradients_are_the_same_when_layers_are_computed_again(name: str) -> None:
    model, gradients = model_of(name).train(), []
    for recompute in (False, True):
        if recompute:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        model(ids(), labels=ids()).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(gradient is not None and bool(gradient.any()) for gradient in gradients[0])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, rtol=1e-9, atol=1e-12)


def test_shares_of_values_and_of_heads_begin_as_published() -> None:
    model = RegardForCausalLM(RegardConfig(**SIZES, attention="value-residual"))
    assert model.model.layers[1].self_attn.value_shares.tolist() == [0.5, 0.5]
    sizes = SIZES | {"hidden_size": 512, "num_key_value_heads": 4}
    vectors = RegardForCausalLM(RegardConfig(**sizes, attention="differential")).model.layers[0].self_attn.difference
    assert abs(vectors.vectors.std().item() - 0.1) < 0.02
    assert vectors.norm.weight.eq(1).all()


def test_pairs_need_an_even_number_of_keys_and_values() -> None:
    with pytest.raises(UserError, match="expected an even number for differential attention, got 1"):
        RegardConfig(**SIZES | {"num_key_value_heads": 1}, attention="differential")


@torch.no_grad()
@pytest.mark.parametrize("name", ["differential", "value-residual", "gated-per-head", "top-8"])
def test_default_statistics_are_measured(name: str) -> None:
    assert ATTENTIONS[name].resolved in ("fused", "sparse")
    model = model_of(name)
    with watching(model) as watch:
        model(ids())
    assert set(watch.frame("column_mass")["layer"]) == {0, 1, 2}
