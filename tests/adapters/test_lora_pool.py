"""Blocks put into models: which layers, what the model then gives, and what is left of them when they are taken out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    BertConfig,
    BertModel,
    BigBirdPegasusConfig,
    DebertaV2Config,
    DebertaV2Model,
    DeepseekV3Config,
    GitConfig,
    GPT2Config,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
    ModernBertConfig,
    Phi3Config,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
)

from regard.adapters.lora import MixedLayer
from regard.adapters.lora_pool import LoraAdapterPool, target_layers
from regard.errors import UserError
from regard.models.classifier import add_lora
from tests.adapters import reference

IDS = torch.tensor([[5, 7, 9, 11, 4], [3, 8, 6, 2, 10]])
SIZES: dict[str, Any] = {"vocab_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama() -> Any:
    """Two heads of queries, one of values; heads that are wider than the model divided by their number."""
    return LlamaForCausalLM(
        LlamaConfig(**SIZES, hidden_size=12, intermediate_size=16, num_key_value_heads=1, head_dim=8, pad_token_id=0)
    )


def bert() -> Any:
    return BertModel(BertConfig(**SIZES, hidden_size=12, intermediate_size=16))


def gpt2() -> Any:
    return GPT2Model(GPT2Config(vocab_size=20, n_embd=12, n_layer=2, n_head=2))


def t5() -> Any:
    return T5ForConditionalGeneration(
        T5Config(vocab_size=20, d_model=12, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    )


MODELS = {"llama": llama, "bert": bert, "gpt2": gpt2, "t5": t5}


def model(name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return MODELS[name]().eval().double()


def given(name: str) -> dict[str, Tensor]:
    return {"input_ids": IDS} | ({"decoder_input_ids": IDS[:, :3]} if name == "t5" else {})


def make_pool(found: nn.Module, blocks: int = 4, *trained: int, **options: Any) -> LoraAdapterPool:
    """A pool in float64 whose blocks all add something."""
    pool = LoraAdapterPool(found, r=2, lora_alpha=4, **options)
    pool.reserve(blocks)
    found.double()
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for one in pool.adapters:
            for part in one.B:
                part.copy_(torch.randn(part.shape, generator=random))
    pool.set_trainable(*trained)
    return pool


def states(found: nn.Module, name: str) -> Tensor:
    outputs: Any = found(**given(name))
    told: Tensor = outputs[0]
    return told


def shares(rows: int = 2, blocks: int = 4) -> Tensor:
    return torch.randn(rows, blocks, generator=torch.Generator().manual_seed(5), dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("llama", {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"}),
        ("bert", {"encoder.layer.0.attention.self.query", "encoder.layer.1.attention.self.value"}),
        ("gpt2", {"h.0.attn.c_attn", "h.1.attn.c_attn"}),
        ("t5", {"encoder.block.0.layer.0.SelfAttention.q", "decoder.block.0.layer.1.EncDecAttention.v"}),
    ],
)
def test_auto_names_queries_and_values(name: str, expected: set[str]) -> None:
    found = model(name)
    names = target_layers(found, "auto")
    assert expected <= set(names)
    assert len(names) == {"llama": 4, "bert": 4, "gpt2": 2, "t5": 6}[name]


TINY = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    "config, expected",
    [
        (ModernBertConfig(**TINY), {"Wqkv"}),
        (Phi3Config(**TINY), {"qkv_proj"}),
        (DeepseekV3Config(**TINY, moe_intermediate_size=8, q_lora_rank=8), {"q_b_proj", "kv_b_proj"}),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_auto_names_layers_that_join_queries_and_values(config: Any, expected: set[str]) -> None:
    found = AutoModel.from_config(config)
    names = {name.rsplit(".", 1)[-1] for name in target_layers(found, "auto")}
    assert names == expected
    add_lora(found, rank=2)
    adapted = {name.rsplit(".lora_A", 1)[0].rsplit(".", 1)[-1] for name, _ in found.named_modules() if "lora_A" in name}
    assert adapted == expected


def test_auto_takes_every_family_of_a_model_and_no_tower_that_reads_no_tokens() -> None:
    """GIT's text has `query` beside the `q_proj` of its vision tower; BigBird-Pegasus' encoder beside its decoder."""
    git = AutoModel.from_config(GitConfig(**TINY, vision_config={**TINY, "image_size": 8, "patch_size": 4}))
    found = target_layers(git, "auto")
    assert len(found) == 4
    assert {name.partition(".")[0] for name in found} == {"encoder"}
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    both = AutoModel.from_config(BigBirdPegasusConfig(vocab_size=40, d_model=16, max_position_embeddings=32, **sizes))
    names = target_layers(both, "auto")
    assert {name.partition(".")[0] for name in names} == {"encoder", "decoder"}
    assert {name.rpartition(".")[2] for name in names} == {"query", "value", "q_proj", "v_proj"}
    vision = AutoModel.from_config(ViTConfig(**TINY, image_size=8, patch_size=4))
    assert {name.rpartition(".")[2] for name in target_layers(vision, "auto")} <= {"query", "value", "q_proj", "v_proj"}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("top_k", [None, 2])
def test_a_model_with_a_pool_gives_what_its_changed_matrices_would(name: str, top_k: int | None) -> None:
    """Row by row, with the blocks that the row uses added to the matrices of a model without a pool; in evaluation."""
    found = model(name)
    weights = shares()
    pool = make_pool(found, 4, 3, top_k=top_k)
    with pool.use_weights(weights), torch.no_grad():
        mixed = states(found, name)
    for row in range(2):
        other = model(name)
        for place, layer in pool.layers.items():
            for block in reference.chosen(weights[row].tolist(), range(4), top_k):
                matrix = other.get_submodule(place).weight
                delta = weights[row, block] * layer.adapters.delta(block)
                with torch.no_grad():
                    matrix.add_(delta if isinstance(other.get_submodule(place), nn.Linear) else delta.T)
        with torch.no_grad():
            torch.testing.assert_close(mixed[row], states(other, name)[row], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", MODELS)
def test_without_weights_and_without_a_pool_a_model_is_as_it_was(name: str) -> None:
    found = model(name)
    names = set(found.state_dict())
    with torch.no_grad():
        before = states(found, name)
        pool = make_pool(found)
        assert torch.equal(states(found, name), before)
        with pool.use_weights(None):
            assert torch.equal(states(found, name), before)
        with pool.use_weights(shares()):
            assert not torch.equal(states(found, name), before)
        assert torch.equal(states(found, name), before)
        pool.remove()
        assert torch.equal(states(found, name), before)
    assert set(found.state_dict()) == names
    assert not any(isinstance(module, MixedLayer) for module in found.modules())


def test_new_blocks_add_nothing() -> None:
    found = model("bert")
    with torch.no_grad():
        before = states(found, "bert")
        pool = LoraAdapterPool(found, r=2, lora_alpha=4)
        pool.reserve(3)
        with pool.use_weights(torch.ones(3)):
            torch.testing.assert_close(states(found, "bert"), before, rtol=0, atol=0)


def test_beams_and_steps_of_writing_use_their_rows_weights() -> None:
    """Beam search, with a cache, gives for each row what it gives for that row alone."""
    found = model("llama")
    pool = make_pool(found, 4)
    told: dict[str, Any] = {"max_new_tokens": 5, "num_beams": 3, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(IDS)
    with pool.use_weights(shares()):
        together = found.generate(input_ids=IDS, attention_mask=mask, min_new_tokens=5, **told)
    for row in range(2):
        with pool.use_weights(shares()[row : row + 1]):
            one = slice(row, row + 1)
            alone = found.generate(input_ids=IDS[one], attention_mask=mask[one], min_new_tokens=5, **told)
        assert torch.equal(together[one], alone)


def test_only_the_open_block_trains_and_every_layer_has_its_gradient() -> None:
    found = model("llama")
    pool = make_pool(found, 3, 1)
    trained = {id(part) for part in found.parameters() if part.requires_grad}
    assert trained == {id(part) for part in pool.parameters_of(1)}
    weights = shares(2, 3).requires_grad_()
    with pool.use_weights(weights):
        states(found, "llama").square().sum().backward()
    assert weights.grad is not None
    assert (weights.grad.abs() > 0).all()
    for part in pool.parameters_of(1):
        assert part.grad is not None
        assert part.grad.abs().max() > 0


def test_weights_that_were_made_for_a_forward_are_not_used_in_another() -> None:
    """What layers share of the weights is made anew for others, with gradients or without, and after a change."""
    found = model("llama")
    pool = make_pool(found, 3)
    weights = shares(2, 3)
    with torch.no_grad():
        with pool.use_weights(weights):
            first = states(found, "llama")
            weights.mul_(2)
            doubled = states(found, "llama")
        with pool.use_weights(shares(2, 3) * 2):
            torch.testing.assert_close(states(found, "llama"), doubled, rtol=0, atol=0)
        assert not torch.equal(first, doubled)
    asked = shares(2, 3).requires_grad_()
    with pool.use_weights(asked):
        with torch.inference_mode():
            states(found, "llama")
        with torch.no_grad():
            states(found, "llama")
        for _ in range(2):
            states(found, "llama").sum().backward()
    assert asked.grad is not None
    assert asked.grad.abs().max() > 0
    fixed = shares(2, 3)
    pool.set_trainable(2)
    with pool.use_weights(fixed):
        with torch.inference_mode():
            states(found, "llama")
        states(found, "llama").square().sum().backward()
    assert pool.parameters_of(2)[0].grad is not None


def test_checkpointed_layers_have_the_same_gradients() -> None:
    def gradients(checkpointing: bool) -> list[Tensor]:
        found = model("llama").train()
        pool = make_pool(found, 3, 2)
        if checkpointing:
            getattr(found, "activation_checkpointing_enable", found.gradient_checkpointing_enable)()
        weights = shares(2, 3).requires_grad_()
        own = [getattr(part, "_gradient_checkpointing_func", None) for part in found.modules()]
        with pool.use_weights(weights):
            found(IDS, use_cache=False).logits.square().sum().backward()
        assert own == [getattr(part, "_gradient_checkpointing_func", None) for part in found.modules()]
        return [part.grad for part in (weights, *pool.parameters_of(2)) if part.grad is not None]

    plainly, again = gradients(False), gradients(True)
    assert len(plainly) == 9
    for one, other in zip(plainly, again, strict=True):
        torch.testing.assert_close(one, other)


def test_a_block_that_is_dropped_is_gone_from_every_layer() -> None:
    found = model("bert")
    pool = make_pool(found, 4, 3)
    weights = shares()
    without = weights.clone()
    without[:, 1] = 0
    with torch.no_grad():
        with pool.use_weights(without):
            expected = states(found, "bert")
        pool.delete(1)
        with pool.use_weights(weights[:, [0, 2, 3]]):
            torch.testing.assert_close(states(found, "bert"), expected)
    assert len(pool) == 3


def test_layers_are_drawn_each_by_its_name() -> None:
    one, other = make_pool(model("bert")), make_pool(model("bert"), seed=1)
    first = [blocks.A[0] for blocks in one.adapters]
    assert not any(torch.equal(first[0], part) for part in first[1:])
    assert not torch.equal(first[0], other.adapters[0].A[0])
    assert all(torch.equal(a, b.A[0]) for a, b in zip(first, make_pool(model("bert")).adapters, strict=True))


@pytest.mark.parametrize(
    "options, told",
    [
        (
            {"target_modules": ["query", "nothing"]},
            "target_modules: expected names of linear layers, got 'nothing'; the model has",
        ),
        (
            {"target_modules": []},
            "target_modules: expected at least one name, got none; the model has query, key, value",
        ),
        ({"r": 0}, "r: expected a whole number of at least 1, got 0"),
        ({"r": True}, "r: expected a whole number of at least 1, got True"),
        ({"top_k": 0}, "top_k: expected a whole number of at least 1, got 0"),
        ({"target_modules": "uery"}, "target_modules: expected names of linear layers, got 'uery'"),
    ],
)
def test_what_cannot_be_is_refused_and_the_model_is_as_it_was(options: dict[str, Any], told: str) -> None:
    found = model("bert")
    with pytest.raises(UserError, match=told):
        LoraAdapterPool(found, **options)
    assert all(part.requires_grad for part in found.parameters())
    assert not any(isinstance(module, MixedLayer) for module in found.modules())


def test_layers_that_read_more_than_tokens_are_refused() -> None:
    """DeBERTa's table of relative positions has no rows that could be weighed."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 4, "vocab_size": 30}
    found = DebertaV2Model(DebertaV2Config(**sizes, **relative, share_att_key=True)).eval()
    with pytest.raises(
        UserError, match=r"target_modules: expected none of query_proj, .* target_modules=value_proj is possible"
    ):
        LoraAdapterPool(found, target_modules="query_proj,value_proj", by_row=True)
    pool = LoraAdapterPool(found, r=2, by_row=True)
    assert list(pool.layers) == ["encoder.layer.0.attention.self.value_proj"]
    pool.reserve(2)
    with pool.use_weights(torch.full((3, 2), 0.5)), torch.no_grad():
        assert found(torch.randint(30, (3, 5))).last_hidden_state.shape == (3, 5, 16)
    pool.remove()
    within = ["attention.self.value_proj", "attention.output.dense", "intermediate.dense", "output.dense"]
    assert target_layers(found, "all-linear", by_row=True) == [f"encoder.layer.0.{name}" for name in within]
    pool = LoraAdapterPool(found, r=2)
    assert len(pool.layers) == 2
    pool.reserve(2)
    with pool.use_weights(torch.full((2,), 0.5)), torch.no_grad():  # the same for all rows: there it is possible
        assert found(torch.randint(30, (3, 5))).last_hidden_state.shape == (3, 5, 16)


def test_a_model_without_queries_is_refused() -> None:
    with pytest.raises(
        UserError, match="target_modules: expected names, since no layer makes queries and values by name"
    ):
        LoraAdapterPool(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(UserError, match="target_modules: expected a model with linear layers, got none"):
        LoraAdapterPool(nn.Sequential(nn.Embedding(2, 2)), target_modules="all-linear")


def test_all_linear_layers_are_those_of_the_layers_without_the_head() -> None:
    """Llama's seven a layer; BERT's six and that of its pooler, with the sum of what the adapters add by hand."""
    parts = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    every = [f"model.layers.{layer}.{part}" for layer in range(2) for part in parts]
    assert target_layers(llama(), "all-linear") == every
    found, weights = model("bert"), shares(2, 3)
    pool = make_pool(found, 3, target_modules="all-linear", by_row=True)
    assert len(pool.layers) == 2 * 6 + 1
    with pool.use_weights(weights), torch.no_grad():
        outputs = found(IDS)
    for row, own in enumerate(weights):
        plain = model("bert")
        with torch.no_grad():
            for name, blocks in zip(pool.layers, pool.adapters, strict=True):
                added = sum(w * B @ A for w, A, B in zip(own, blocks.A, blocks.B, strict=True))
                plain.get_submodule(name).weight.add_(4 / 2 * added)
            expected = plain(IDS[row : row + 1])
        torch.testing.assert_close(outputs.last_hidden_state[row : row + 1], expected.last_hidden_state)
        torch.testing.assert_close(outputs.pooler_output[row : row + 1], expected.pooler_output)


@pytest.mark.parametrize("block", [4, -1])
def test_blocks_that_are_not_there(block: int) -> None:
    pool = make_pool(model("bert"), 4, 1)
    with pytest.raises(UserError, match=f"adapter: expected a number from 0 to 3, got {block}"):
        pool.set_trainable(block)
    with pytest.raises(UserError, match=f"adapter: expected a number from 0 to 3, got {block}"):
        pool.delete(block)
    assert (len(pool), pool.adapters[0].trained) == (4, (1,))


def test_targets_of_one_layer() -> None:
    pool = make_pool(model("bert"), target_modules="layer.0.attention.self.query")
    assert list(pool.layers) == ["encoder.layer.0.attention.self.query"]
