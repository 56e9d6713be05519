"""Under autocast a model computes with rounded queries, keys and values; what is measured of them is not rounded."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from regard.hooks import average_attention, watching

HEADS, TOKENS, WIDTH = 4, 40, 32


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        projected: Tensor = self.proj(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return projected


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention(), Attention()])

    def forward(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv
        output: Tensor = self.blocks[0](q, k, v) + self.blocks[1](q, k, v)
        return output


@torch.no_grad()
def test_statistics_are_those_of_what_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    model, qkv = Stack().eval(), 2 * torch.randn(3, 2, HEADS, TOKENS, WIDTH // HEADS, generator=generator)
    names = ["column_mass", "value_weighted_mass", "key_norm"]
    with torch.autocast("cpu", torch.bfloat16):
        output = model(qkv)
        with watching(model, names) as watch:
            assert torch.equal(model(qkv), output)
    q, k = (part.bfloat16().double() for part in qkv[:2])
    hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()
    weights = (q @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    mass = weights.mean(-2)
    found = watch.frame("column_mass").query("layer == 0 and position == 0").set_index("head")["value"]
    assert torch.tensor(found.to_list()).allclose(mass[..., 0].mean(0).float(), rtol=1e-5)
    norms = watch.frame("key_norm").query("layer == 1 and position == 3").set_index("head")["value"]
    assert len(watch.frame("value_weighted_mass"))
    assert torch.tensor(norms.to_list()).allclose(k[:, :, 3].norm(dim=-1).mean(0).float(), rtol=1e-5)


SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize(
    "build",
    [
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
        lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SIZES, **LATENT)),
    ],
    ids=["llama", "deepseek"],
)
def test_queries_of_another_type_than_values_are_observed(build: Any, use_cache: bool) -> None:
    """Rotated queries are float32 there, and values that a product gives bfloat16."""
    torch.manual_seed(0)
    model = build().eval()
    ids = torch.randint(1, 99, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids, use_cache=use_cache).logits
        with watching(model, "default") as watch:
            assert torch.equal(model(ids, use_cache=use_cache).logits, expected)
    assert watch.frame()["value"].notna().all()


@torch.no_grad()
def test_two_calls_of_one_attention_are_one_where_autocast_rounds_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """DiffLlama passes the same queries and keys twice, with other values; copies in bfloat16 are two tensors."""
    torch.manual_seed(0)
    model = DiffLlamaForCausalLM(DiffLlamaConfig(**SIZES, initializer_range=0.3)).eval()
    ids = torch.randint(5, 99, (2, 20), generator=torch.Generator().manual_seed(0))
    seen: list[tuple[Tensor, Tensor]] = []

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append((query.bfloat16().double(), key.bfloat16().double()))
        return scaled_dot_product_attention(query, key, value, **options)

    with torch.autocast("cpu", torch.bfloat16):
        with monkeypatch.context() as patched:
            patched.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
            expected = model(ids).logits
        with watching(model, ["column_mass", "entropy"]) as watch:
            assert_close(model(ids).logits, expected, rtol=0.02, atol=0.02)
        constants = average_attention(model, [ids], 20)
    hidden = torch.ones(20, 20).triu(1).bool()
    assert len(seen) == 4
    for layer, (query, key) in enumerate(seen[::2]):
        weights = (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1).mean(0)
        mass = torch.tensor(watch.frame("column_mass", layer=layer)["value"].to_numpy()).reshape(4, -1)
        assert_close(mass, weights.mean(-2), rtol=1e-5, atol=1e-6)
        assert_close(constants.matrices["decoder", layer].double(), weights, rtol=1e-5, atol=1e-6)
