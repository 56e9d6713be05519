"""Models that call `scaled_dot_product_attention` themselves are watched as those of Transformers' interface."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from regard.errors import UserError
from regard.hooks import Watch, average_attention, find_attention_layers, replaced, replacing, watching
from regard.hooks.intercepted import _RUNNING

FALCONS = {
    "new": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "multi-query": {"multi_query": True, "new_decoder_architecture": False},
    "ALiBi": {"multi_query": False, "new_decoder_architecture": False, "alibi": True},
}


class Attention(nn.Module):
    """As in nanoGPT; keeps its weights by the definition."""

    def __init__(self, width: int, heads: int, **options: Any) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.options = heads, options
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q.double() @ k.double().mT * self.options.get("scale", q.shape[-1] ** -0.5)
        if self.options.get("is_causal"):
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
        mask = self.options.get("attn_mask")
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        self.weights = scores.softmax(-1)
        output: Tensor = self.proj(scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2))
        return output


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attn, self.norm = Attention(32, 4, **options), nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Plain(nn.Module):
    """A model of nobody's library."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(99, 32), nn.ModuleList(Block(**options) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x


def ids(rows: int = 2, tokens: int = 12) -> Tensor:
    return torch.randint(5, 99, (rows, tokens), generator=torch.Generator().manual_seed(1))


def plain(**options: Any) -> Any:
    torch.manual_seed(0)
    return Plain(**options).eval()


def falcon(kind: str, implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.FalconConfig(**sizes, **FALCONS[kind], initializer_range=0.3)
    return transformers.FalconForCausalLM._from_config(config, attn_implementation=implementation).eval()


def assert_mass(watch: Watch, layer: int, weights: Tensor) -> None:
    mass = torch.tensor(watch.frame("column_mass", layer=layer)["value"].to_numpy()).reshape(weights.shape[1], -1)
    torch.testing.assert_close(mass, weights.mean((0, 2)).double(), rtol=1e-4, atol=1e-6)


@pytest.mark.every_value
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {},
        {"attn_mask": torch.ones(12, 12, dtype=torch.bool).tril(2)},
        {"attn_mask": torch.arange(12.0).expand(1, 1, 12, 12) / 5},
        {"is_causal": True, "scale": 0.7},
    ],
    ids=["causal", "full", "a mask of pairs", "a bias", "a scale"],
)
@torch.no_grad()
def test_a_plain_module_is_watched(options: dict[str, Any]) -> None:
    model = plain(**options)
    expected = model(ids())
    with watching(model) as watch:
        output = model(ids())
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    assert watch.samples == 2
    for layer, block in enumerate(model.blocks):
        assert_mass(watch, layer, block.attn.weights)
    is_one_way = options.get("is_causal") or getattr(options.get("attn_mask"), "dtype", None) == torch.bool
    role = "decoder" if is_one_way else "encoder"
    assert set(watch.frame()["site"]) == {role}
    assert not model._forward_hooks
    assert not _RUNNING.modules


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", FALCONS)
@torch.no_grad()
def test_falcon_is_watched(kind: str, implementation: str) -> None:
    model = falcon(kind, implementation)
    model.config._attn_implementation = "eager"
    weights = model(ids(), output_attentions=True).attentions
    model.config._attn_implementation = implementation
    expected = model(ids()).logits
    with watching(model, "all") as watch:
        output = model(ids()).logits
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=5e-6)
    assert model.config._attn_implementation == implementation
    if kind != "ALiBi" or implementation == "eager":  # whose own two attentions differ
        for layer, layer_weights in enumerate(weights):
            assert_mass(watch, layer, layer_weights)


@torch.no_grad()
def test_falcon_generates_and_takes_padding() -> None:
    model = falcon("new")
    mask = torch.ones_like(ids())
    mask[0, :4] = 0
    expected = model(ids(), attention_mask=mask).logits
    tokens = model.generate(ids(), attention_mask=torch.ones_like(ids()), max_new_tokens=5, do_sample=False)
    with watching(model, "column_mass") as watch:
        output = model(ids(), attention_mask=mask).logits
        generated = model.generate(ids(), attention_mask=torch.ones_like(ids()), max_new_tokens=5, do_sample=False)
    torch.testing.assert_close(output[mask.bool()], expected[mask.bool()], rtol=1e-4, atol=5e-6)
    assert torch.equal(generated, tokens)
    assert watch.samples == 4


@torch.no_grad()
def test_blocks_overlap_and_end_in_any_order() -> None:
    model = plain(is_causal=True)
    first, second = watching(model, "column_mass"), watching(model, "column_mass")
    watches = [first.__enter__(), second.__enter__()]
    model(ids())
    first.__exit__(None, None, None)
    model(ids())
    second.__exit__(None, None, None)
    assert [watch.samples for watch in watches] == [2, 4]
    expected = model(ids())
    with watching(model, "column_mass") as watch:
        torch.testing.assert_close(model(ids()), expected)
    assert_mass(watch, 1, model.blocks[1].attn.weights)


@torch.no_grad()
def test_a_failed_forward_leaves_nothing() -> None:
    model = plain(is_causal=True)
    with watching(model, "column_mass") as watch:
        with pytest.raises(IndexError):
            model(torch.full((1, 3), 200))
        assert not _RUNNING.modules
        model(ids())
    assert watch.samples == 2


@pytest.mark.every_value
@pytest.mark.parametrize("kind", ["no mask", "a mask", "a mask of the batch", "a bias"])
@torch.no_grad()
def test_queries_fewer_than_keys_see_the_first_of_them(kind: str) -> None:
    """`is_causal` is aligned at the top left, whatever the cache, and holds beside a mask."""
    hidden = torch.zeros(2, 1, 3, 12, dtype=torch.bool)
    hidden[0, :, 1:, 1] = hidden[1, :, 2, 0] = True
    masks = {
        "no mask": None,
        "a mask": ~hidden[:1],
        "a mask of the batch": ~hidden,
        "a bias": torch.arange(36.0).reshape(3, 12).cos(),
    }
    mask, lower = masks[kind], torch.ones(3, 12, dtype=torch.bool).tril()
    if mask is not None:
        try:
            scaled_dot_product_attention(*torch.zeros(3, 1, 1, 2, 8), torch.zeros(2, 2), is_causal=True)
        except RuntimeError:
            pytest.skip("PyTorch from 2.14 on takes a mask or is_causal, not both")

    class Last(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            output = scaled_dot_product_attention(q[:, :, -3:], k, v, mask, is_causal=True)
            return x[:, -3:] + self.proj(output.transpose(1, 2).flatten(2))

    model = Plain().eval()
    model.blocks = nn.ModuleList([Last(32, 4)])
    x = model.embedding(ids())
    q, k, v = (part.double().unflatten(-1, (4, -1)).transpose(1, 2) for part in model.blocks[0].qkv(x).chunk(3, -1))
    scores = q[:, :, -3:] @ k.mT * 8**-0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    read = (scores.masked_fill(~lower, -torch.inf).softmax(-1) @ v).float().transpose(1, 2).flatten(2)
    expected = x[:, -3:] + model.blocks[0].proj(read)
    torch.testing.assert_close(model(ids()), expected, rtol=1e-5, atol=1e-6)
    with watching(model, "column_mass"):
        torch.testing.assert_close(model(ids()), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.every_value
@pytest.mark.parametrize("one", ["queries", "keys and values", "head of queries"])
@torch.no_grad()
def test_one_row_of_queries_or_of_keys_is_that_of_all_samples_and_one_head_that_of_all(one: str) -> None:
    """As learned queries are, which `scaled_dot_product_attention` broadcasts."""

    class One(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            parts = {
                "queries": (q[:1], k, v),
                "keys and values": (q, k[:1], v[:1]),
                "head of queries": (q[:, :1], k, v),
            }
            q, k, v = parts[one]
            self.weights = (q.double() @ k.double().mT * 8**-0.5).softmax(-1).expand(len(x), -1, -1, -1)
            output: Tensor = self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return output

    model = plain()
    for block in model.blocks:
        block.attn.__class__ = One
    expected = model(ids(3))
    if one == "keys and values":  # are those of a memory as well, of which no slot is a token
        with (
            pytest.raises(UserError, match="its values are those of a memory, of another input or of one sample"),
            watching(model),
        ):
            model(ids(3))
        return
    with watching(model, "column_mass") as watch:
        torch.testing.assert_close(model(ids(3)), expected, rtol=1e-5, atol=1e-6)
    assert watch.samples == 3
    for layer, block in enumerate(model.blocks):
        assert_mass(watch, layer, block.attn.weights)


def test_what_cannot_be_watched_is_refused() -> None:
    class Flat(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return scaled_dot_product_attention(q, k, v)

    class ByHand(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return x

    for attention, message in ((Flat, r"3 dimensions; expected \(batch, head"), (ByHand, "neither through")):
        model = Plain()
        model.blocks = nn.ModuleList([attention(32, 4)])
        with pytest.raises(UserError, match=message), watching(model, "column_mass"):
            model(ids())
        assert not _RUNNING.modules
    with pytest.raises(UserError, match="it is no Hugging Face model"):
        find_attention_layers(plain())


def test_heads_are_replaced_in_a_block_but_not_for_good() -> None:
    model = falcon("new")
    constants = average_attention(model, [{"input_ids": ids()}], length=12)
    with torch.no_grad():
        expected = model(ids()).logits
        with replacing(model, constants):
            changed = model(ids()).logits
            with watching(model, "column_mass") as watch:
                model(ids())
        torch.testing.assert_close(model(ids()).logits, expected)
    assert not torch.allclose(changed, expected, atol=1e-3)
    assert_mass(watch, 0, torch.as_tensor(constants.matrices["decoder", 0])[None].double())
    with pytest.raises(UserError, match=r"of this model for good: .* only while a block lasts; use regard.replacing$"):
        replaced(model, constants, heads=0.5)


class CrossAttention(Attention):
    """As in diffusers, which names both attentions of a block alike, and says what they are by an attribute."""

    is_cross_attention = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        k, v = k[:, :, :5], v[:, :, :5]
        output: Tensor = self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return output


@torch.no_grad()
def test_cross_attention_is_told_by_its_attribute_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = plain()
    for block in model.blocks:
        block.add_module("attn2", CrossAttention(32, 4))
        monkeypatch.setattr(block, "forward", lambda x, block=block: block.attn2(Block.forward(block, x)))
    with watching(model, "column_mass") as watch:
        model(ids())
    frame = watch.frame("column_mass")
    assert set(zip(frame["site"], frame["layer"], strict=True)) == {
        (site, layer) for site in ("encoder", "cross@encoder") for layer in range(3)
    }
    monkeypatch.setattr(CrossAttention, "is_cross_attention", False)
    message = "several attention layers"
    with pytest.raises(UserError, match=message), watching(model, "first_mass"):
        model(ids())


@torch.no_grad()
def test_a_stack_of_which_cross_attention_alone_is_reached_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Sana's, whose self-attention is linear: there was no sample, and nothing said so before one asked for it."""
    model = plain()
    for block in model.blocks:
        block.add_module("attn2", CrossAttention(32, 4))
        monkeypatch.setattr(block, "forward", lambda x, block=block: x + block.attn2(x))
    with pytest.raises(UserError, match="its cross-attention alone is reached"), watching(model, "column_mass"):
        model(ids())


def test_a_mask_of_one_column_is_one_for_all_keys() -> None:
    torch.manual_seed(0)
    mask = torch.randn(1, 1, 7, 1)
    block = Block(attn_mask=mask)
    with torch.no_grad(), watching(block, ["column_mass"]) as watch:
        block(torch.randn(2, 7, 32))
    frame = watch.frame("column_mass", layer=0, head=1)
    values = frame[frame["position"].notna()].sort_values("position")["value"].tolist()
    assert values == pytest.approx(block.attn.weights[:, 1].mean((0, 1)).tolist(), rel=1e-5)


class Wrapped(transformers.PreTrainedModel):
    """As Transformers' wrapper of timm: blocks in a sequence of PyTorch, without an attention interface."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config: transformers.PretrainedConfig) -> None:
        super().__init__(config)
        self.blocks, self.head = nn.Sequential(*(Block() for _ in range(3))), nn.Linear(32, 2)
        self.post_init()

    def forward(self, pixel_values: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(pixel_values))
        return output


def test_blocks_in_a_sequence_of_a_model_of_transformers_are_its_layers() -> None:
    torch.manual_seed(0)
    model = Wrapped(transformers.PretrainedConfig()).eval()
    with torch.no_grad(), watching(model, ["column_mass"]) as watch:
        model(pixel_values=torch.randn(2, 7, 32))
    frame = watch.frame("column_mass", position=3)
    rows = frame[frame["head"].notna()].sort_values(["layer", "head"])
    expected = torch.cat([block.attn.weights.mean((0, 2))[:, 3] for block in model.blocks])  # type: ignore[union-attr]
    assert rows["value"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert set(frame["n"]) == {2}


@pytest.mark.filterwarnings("ignore")
def test_models_of_timm_in_their_wrapper_are_measured_as_themselves() -> None:
    pytest.importorskip("timm", reason="the package timm is not installed")
    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 3}
    config = transformers.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=sizes)
    model: Any = transformers.TimmWrapperModel(config).eval()
    images, frames = torch.randn(2, 3, 32, 32), []
    for host, name in ((model, "pixel_values"), (model.timm_model, "x")):
        with torch.no_grad(), watching(host) as watch:
            host(**{name: images})
        frames.append(watch.frame())
    assert frames[0].equals(frames[1])
    assert set(frames[0]["layer"].dropna()) == {-1, 0, 1, 2}
