"""Models that multiply queries, keys, weights and values by themselves are watched as others are."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import dropout, softmax

from regard.errors import UserError
from regard.hooks import Watch, average_attention, find_attention_layers, replacing, watching
from regard.hooks.intercepted import _RUNNING
from tests.named_cache import behind, cache_of

HEADS, TOKENS = 4, 12
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": HEADS}
HIDDEN = {"finfo": torch.finfo(torch.float32).min, "infinite": -torch.inf, "lowered": -1e4}


def by_matmul(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = softmax(q @ k.mT / q.shape[-1] ** 0.5 + mask, dim=-1)
    return weights, torch.matmul(dropout(weights, 0.5, training=False).to(v.dtype), v)


def by_bmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.bmm(q.flatten(0, 1) * q.shape[-1] ** -0.5, k.flatten(0, 1).mT)
    weights = (scores.unflatten(0, (-1, HEADS)) + mask).flatten(0, 1).softmax(-1)
    return weights.unflatten(0, (-1, HEADS)), torch.bmm(weights, v.flatten(0, 1)).unflatten(0, (-1, HEADS))


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    positions = torch.linspace(0, 1, q.shape[2]).expand(len(q) * HEADS, 1, -1)
    scores = positions.baddbmm(q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, alpha=q.shape[-1] ** -0.5)
    weights = torch.softmax(scores.view(-1, HEADS, *scores.shape[1:]) + mask, -1)
    return weights, weights @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = (part.permute(2, 0, 1, 3) for part in (q, k, v))
    positions = torch.einsum("jbnd,ind->bnij", k, torch.ones_like(q[:, 0]))
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) * q.shape[-1] ** -0.5 + 0.1 * positions
    weights = torch.nn.functional.softmax(scores + mask, dim=3)
    return weights, torch.einsum("jbnd,bnij->ibnd", v, weights).permute(1, 2, 0, 3)


def by_masking_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1).masked_fill(mask < -1e3, 0)
    return weights, weights @ v


def by_masking_weights_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    weights.masked_fill_(mask < -1e3, 0)
    return weights, weights @ v


def beside_other_masks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """What another tensor is named by, in a call between weights and values, is nothing of theirs."""
    weights = (q @ k.mT + mask).softmax(-1)
    v = torch.masked_fill(input=v, mask=v > 1e3, value=0)
    return weights, weights @ v


WAYS = [
    *(by_matmul, by_bmm, by_baddbmm, by_einsum, by_masking_weights, by_masking_weights_in_place, beside_other_masks),
]


class Attention(nn.Module):
    """Keeps its weights."""

    def __init__(self, way: Callable[..., tuple[Tensor, Tensor]], hidden: float) -> None:
        super().__init__()
        self.qkv, self.proj, self.way = nn.Linear(32, 96), nn.Linear(32, 32), way
        self.hidden, self.num_heads = hidden, HEADS
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.full((x.shape[1], x.shape[1]), self.hidden).triu(1)
        self.weights, output = self.way(q, k, v, mask)
        projected: Tensor = self.proj(output.transpose(1, 2).flatten(2))
        return projected


class Block(nn.Module):
    def __init__(self, way: Callable[..., tuple[Tensor, Tensor]], hidden: float) -> None:
        super().__init__()
        self.attn, self.norm = Attention(way, hidden), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Plain(nn.Module):
    """A model of nobody's library."""

    def __init__(self, way: Callable[..., tuple[Tensor, Tensor]], hidden: float = -torch.inf) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(99, 32)
        self.blocks = nn.ModuleList(Block(way, hidden) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


def ids(rows: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(5, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


def gptj(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": HEADS, "rotary_dim": 4, "n_positions": 64}
    config = transformers.GPTJConfig(**sizes, initializer_range=0.3, bos_token_id=1, eos_token_id=2, **options)
    return transformers.GPTJForCausalLM(config).eval()


def assert_mass(watch: Watch, layer: int, weights: Tensor) -> None:
    mass = torch.tensor(watch.frame("column_mass", layer=layer)["value"].to_numpy()).reshape(weights.shape[1], -1)
    torch.testing.assert_close(mass, weights.mean((0, 2)).double(), rtol=1e-4, atol=1e-6)


@pytest.mark.every_value
@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_masses_are_those_of_the_models_own_weights(way: Callable[..., Any], hidden: str) -> None:
    model = Plain(way, HIDDEN[hidden]).eval()
    expected = model(ids())
    with watching(model) as watch:
        actual = model(ids())
    torch.testing.assert_close(actual, expected)
    assert set(watch.frame()["site"]) == {"decoder"}  # the scores tell of the causal mask
    for layer, block in enumerate(model.blocks):
        assert_mass(watch, layer, block.attn.weights)


@torch.no_grad()
def test_a_model_that_computes_scores_can_be_replaced_and_watched_with_a_cache() -> None:
    model = gptj()
    expected = model(ids()).logits
    layers = find_attention_layers(model)
    assert [(layer.site, layer.layer, layer.heads, layer.causal) for layer in layers] == [
        ("decoder", 0, HEADS, True),
        ("decoder", 1, HEADS, True),
    ]
    with replacing(model, "softmax"):
        torch.testing.assert_close(model(ids()).logits, expected)
    with replacing(model, "sigmoid"):
        assert not torch.allclose(model(ids()).logits, expected, atol=1e-2)
    if not hasattr(sys.modules[type(model).__module__], "eager_attention_forward"):  # it has one from 5.24 on
        with pytest.raises(UserError, match="without a feature map"), replacing(model, "elu-kernel"):
            model(ids())
    constants = average_attention(model, [{"input_ids": ids()}], TOKENS)
    with replacing(model, constants), watching(model, ["column_mass"]) as watch:
        model(ids())
    assert len(watch.frame("column_mass"))
    with watching(model, ["column_mass"]) as whole:
        model(ids(tokens=8))
    with watching(model, ["column_mass"]) as steps:
        cache = cache_of(model(ids(tokens=8)[:, :5], use_cache=True))
        for step in range(5, 8):
            cache = cache_of(model(ids(tokens=8)[:, step : step + 1], **behind(cache)))
    torch.testing.assert_close(
        torch.tensor(steps.frame("column_mass")["value"].to_numpy()),
        torch.tensor(whole.frame("column_mass")["value"].to_numpy()),
    )


def by_changing_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1) * 0.5
    return weights, weights @ v


def by_masking_seen_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT).softmax(-1).masked_fill(mask < 0, 0)
    return weights, weights @ v


def by_masking_seen_keys_in_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT).softmax(-1)
    weights.masked_fill_(mask < 0, 0)
    return weights, weights @ v


def by_masking_changed_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    torch.mul(weights, 0.5, out=weights)
    weights.masked_fill_(mask < 0, 0)
    return weights, weights @ v


def by_filling_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1).masked_fill(mask < 0, 1)
    return weights, weights @ v


def by_changing_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Nothing of it is in the weights, and all in what would be read of the scores."""
    scores = q @ k.mT + mask
    weights = scores.softmax(-1)
    scores *= 2
    return weights, weights @ v


def by_softmax_into_a_tensor(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.mT + mask
    weights = torch.empty_like(scores)
    torch.softmax(scores, -1, out=weights)
    return weights, weights @ v


def by_summing_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    return weights, torch.einsum("bhij,bhjd->bid", weights, v)[:, None].expand_as(v)


def by_softmax_over_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(2)
    return weights, weights @ v


def by_multiplying_twice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    return weights, weights @ v + weights @ torch.ones_like(v)


def by_summing_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    return weights, weights @ v + weights.square().sum(-1, keepdim=True)


def by_five_dimensions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q[:, :, None] @ k[:, :, None].mT + mask).softmax(-1)
    return weights[:, :, 0], (weights @ v[:, :, None])[:, :, 0]


def by_transposed_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    return weights, (v.mT @ weights.mT).mT


def by_a_power_of_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """They were measured as weights of one step, and as values themselves."""
    weights = (q @ k.mT + mask).softmax(-1)
    return weights, (weights @ weights) @ v


def by_weights_and_their_transpose(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    return weights, (weights @ weights.mT) @ v


def by_multiplying_their_transpose_as_well(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Keys read queries, too: it was measured as if they did not."""
    weights = (q @ k.mT + mask).softmax(-1)
    return weights, weights @ v + weights.mT @ v


def by_multiplying_their_transpose_before(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    turned = weights.transpose(-1, -2).contiguous()
    output = weights @ v
    return weights, output + turned @ v


def by_multiplying_a_gated_copy(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    gated = 0.5 * weights
    output = weights @ v
    return weights, output + gated @ v


def by_multiplying_folded_weights(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT + mask).softmax(-1)
    output = weights @ v
    return weights, output + torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view_as(v)


@pytest.mark.every_value
@pytest.mark.parametrize(
    "way, reason",
    [
        (by_multiplying_their_transpose_as_well, "its weights are used for more than"),
        (by_multiplying_their_transpose_before, "its weights are used for more than"),
        (by_multiplying_a_gated_copy, "its weights are used for more than"),
        (by_multiplying_folded_weights, "its weights are used for more than"),
        (by_changing_weights, "its weights are changed"),
        (by_masking_seen_keys, "its weights are changed"),
        (by_masking_seen_keys_in_place, "changed in place"),
        (by_masking_changed_weights, "changed in place"),
        (by_transposed_weights, "its weights are changed"),
        (by_multiplying_twice, "its weights are used for more than"),
        (by_summing_weights, "its weights are used for more than"),
        (by_five_dimensions, "its softmax over 5 dimensions"),
        (by_filling_weights, "its weights are changed"),
        (by_changing_scores, "changed in place"),
        (by_softmax_into_a_tensor, "changed in place"),
        (by_summing_heads, "in no known layout"),
        (by_a_power_of_weights, "multiplied with themselves"),
        (by_weights_and_their_transpose, "multiplied with themselves"),
        (by_softmax_over_queries, "its softmax over 4 dimensions is not of one product"),
    ],
)
@torch.no_grad()
def test_what_is_no_known_form_is_refused(way: Callable[..., Any], reason: str) -> None:
    model = Plain(way).eval()
    expected = model(ids())
    with pytest.raises(UserError, match=reason), watching(model, "column_mass"):
        model(ids())
    assert torch.equal(model(ids()), expected)
    assert not _RUNNING.modules


def test_dropped_weights_are_measured_as_before_dropout_and_have_gradients() -> None:
    model = gptj(attn_pdrop=0.5).train()
    with watching(model, "column_mass") as watch:
        loss = model(ids(), labels=ids()).loss
        loss.backward()
    assert float(watch.frame("column_mass")["value"].sum()) == pytest.approx(2 * HEADS, rel=1e-5)  # rows sum to one
    assert all(layer.attn.q_proj.weight.grad.abs().sum() > 0 for layer in model.transformer.h)


@torch.no_grad()
def test_block_sparse_attention_is_refused_before_a_short_text_turns_it_off() -> None:
    config = transformers.BigBirdConfig(**SIZES, intermediate_size=48, max_position_embeddings=128, block_size=4)
    model = transformers.BigBirdModel(config).eval()
    with pytest.raises(UserError, match="attention_type to original_full"), watching(model):
        pass
    assert model.attention_type == "block_sparse"


@torch.no_grad()
def test_tokens_of_images_beside_the_ids_have_no_names() -> None:
    sizes = SIZES | {"intermediate_size": 48, "image_size": 16, "patch_size": 8, "max_position_embeddings": 32}
    model = transformers.ViltModel(transformers.ViltConfig(**sizes)).eval()
    with watching(model, ["column_mass", "sink_tokens"]) as watch:
        model(ids(), pixel_values=torch.rand(2, 3, 16, 16))
    assert watch.samples == 2


@torch.no_grad()
def test_patches_folded_into_the_batch_are_refused() -> None:
    sizes = {
        "image_size": 64,
        "hidden_sizes": [32, 32, 32],
        "neck_hidden_sizes": [16] * 7,
        "num_attention_heads": HEADS,
    }
    model = transformers.MobileViTModel(transformers.MobileViTConfig(**sizes)).eval()
    with pytest.raises(UserError, match="windows or groups of tokens"), watching(model, "column_mass"):
        model(torch.rand(2, 3, 64, 64))


@pytest.mark.parametrize(
    "name, sizes",
    [
        ("GPTJForCausalLM", {"rotary_dim": 4, "n_embd": 32, "n_head": HEADS, "n_layer": 2, "n_positions": 64}),
        ("BloomForCausalLM", {"n_head": HEADS, "n_layer": 2}),
        ("ConvBertForMaskedLM", {"num_attention_heads": HEADS, "intermediate_size": 48, "embedding_size": 32}),
        ("SqueezeBertForMaskedLM", {"num_attention_heads": HEADS, "intermediate_size": 48, "embedding_size": 32}),
    ],
)
@pytest.mark.parametrize("every", [1, 2])
@torch.no_grad()
def test_constants_of_a_text_are_its_attention(name: str, sizes: dict[str, Any], every: int) -> None:
    """ConvBERT uses its queries for more than scores; SqueezeBERT has convolutions instead of linear layers."""
    torch.manual_seed(0)
    config = getattr(transformers, name.partition("For")[0] + "Config")(
        **{"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2, **sizes}
    )
    model = getattr(transformers, name)(config).eval()
    expected, other = model(input_ids=ids(rows=1)).logits, model(input_ids=ids(rows=1).flip(1)).logits
    constants = average_attention(model, [{"input_ids": ids(rows=1)}], TOKENS)
    with replacing(model, constants, constants.heads[::every] if every > 1 else 1.0):
        torch.testing.assert_close(model(input_ids=ids(rows=1)).logits, expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(model(input_ids=ids(rows=1).flip(1)).logits, other, atol=1e-1)
    assert torch.equal(model(input_ids=ids(rows=1)).logits, expected)


@pytest.mark.parametrize("model_type", ["bloom", "rembert"])
def test_training_with_dropout_is_as_without_the_block(model_type: str) -> None:
    """The weights that the model drops are dropped again by the same random numbers, and gradients are the same."""
    torch.manual_seed(0)
    rates = {"attention_dropout": 0.2, "hidden_dropout": 0.2} if model_type == "bloom" else {}
    heads = {} if model_type == "bloom" else {"attention_probs_dropout_prob": 0.2, "hidden_dropout_prob": 0.2}
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **rates, **heads)
    model: Any = transformers.AutoModel.from_config(config).double().train()
    ids = torch.randint(5, 99, (2, TOKENS), generator=torch.Generator().manual_seed(1))

    def step() -> list[Tensor]:
        model.zero_grad()
        torch.manual_seed(2)
        hidden = model(ids)[0]
        hidden.sin().sum().backward()
        return [hidden.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]

    expected = step()
    with watching(model, "column_mass", verify=False):
        watched = step()
    torch.testing.assert_close(watched, expected, rtol=0, atol=1e-6)  # BLOOM computes weights in float32
