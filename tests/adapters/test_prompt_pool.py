"""Soft prompts before what models read, against models that are given the embeddings themselves."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MambaConfig,
    MambaModel,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5ForConditionalGeneration,
    XLNetConfig,
    XLNetModel,
)

from regard.adapters.prompt_pool import PromptAdapterPool
from regard.errors import UserError
from regard.models.configuration import RegardConfig
from regard.models.decoder import RegardForCausalLM
from tests.named_cache import behind

WIDTH, LENGTH, WORDS = 8, 3, 20
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "pad_token_id": 0,
}
ENCODERS, DECODERS, PAIRS = ("bert", "roberta"), ("llama", "gpt2", "regard"), ("t5", "bart")
IDS = torch.tensor([[5, 7, 9, 11, 4], [6, 8, 10, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
LEFT = torch.tensor([[5, 7, 9, 11, 4], [0, 0, 6, 8, 10]])
ANSWERS = torch.tensor([[3, 12, 13], [3, 14, 15]])


def model(kind: str) -> Any:
    """A tiny one in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return _made(kind).double().eval()


def _made(kind: str) -> Any:
    if kind == "bert":
        return BertModel(BertConfig(**SIZES, max_position_embeddings=12))
    if kind == "roberta":
        return RobertaModel(RobertaConfig(**SIZES, max_position_embeddings=13))
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=1, eos_token_id=2))
    if kind == "gpt2":
        sizes: dict[str, Any] = {"n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 24}
        return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, pad_token_id=0, eos_token_id=2, bos_token_id=2))
    if kind == "regard":
        return RegardForCausalLM(RegardConfig(**SIZES, max_position_embeddings=24, eos_token_id=2))
    if kind == "t5":
        sizes = {"d_model": WIDTH, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
        return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, **sizes, pad_token_id=0, eos_token_id=2))
    layers: dict[str, Any] = {
        f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")
    }
    layers |= {f"{part}_ffn_dim": 16 for part in ("encoder", "decoder")}
    named: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 2, "decoder_start_token_id": 2}
    named["forced_eos_token_id"] = None
    return BartForConditionalGeneration(
        BartConfig(vocab_size=WORDS, d_model=WIDTH, max_position_embeddings=24, **layers, **named)
    )


def pooled(kind: str, blocks: int = 2, **options: Any) -> tuple[Any, PromptAdapterPool]:
    """A model with prompts."""
    found = model(kind)
    pool = PromptAdapterPool(found, num_virtual_tokens=LENGTH, encoder_hidden_size=6, seed=1, **options)
    pool.reserve(blocks)
    pool.set_trainable(0)
    return found, pool


def logits(found: Any, **given: Any) -> Tensor:
    """What a model of any kind gives."""
    if getattr(found.config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = ANSWERS[: len(given["attention_mask"])]
    out = found(**given)
    states: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return states


def embedded(found: Any, prompts: Tensor, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """A text behind prompts (row, token, width) as embeddings, as a user would give it."""
    ones = mask.new_ones(prompts.shape[:2])
    return {
        "inputs_embeds": torch.cat([prompts, found.get_input_embeddings()(ids)], 1).detach(),
        "attention_mask": torch.cat([ones, mask], 1),
    }


# -- before what a model reads ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS, *PAIRS])
def test_a_prompt_is_the_embeddings_of_words_before_the_text(kind: str) -> None:
    found, pool = pooled(kind)
    plain = model(kind)
    prompt = pool.prompts.prompt(0).detach()[None].expand(2, -1, -1)
    expected = logits(plain, **embedded(plain, prompt, IDS, MASK))
    with pool.use_weights(torch.ones(1)):
        given = logits(found, input_ids=IDS, attention_mask=MASK)
    cut = expected if kind in PAIRS else expected[:, LENGTH:]
    real = torch.ones_like(ANSWERS).bool() if kind in PAIRS else MASK.bool()
    assert given.shape == cut.shape
    torch.testing.assert_close(given[real], cut[real])
    without = logits(found, input_ids=IDS, attention_mask=MASK)
    torch.testing.assert_close(without, logits(plain, input_ids=IDS, attention_mask=MASK))
    assert not torch.allclose(given[real], without[real])


@pytest.mark.parametrize("kind", [*ENCODERS, *DECODERS, *PAIRS])
def test_no_row_depends_on_the_others_or_on_padding(kind: str) -> None:
    found, pool = pooled(kind)
    weights = torch.tensor([[0.3, 0.7], [0.9, -0.4]], dtype=torch.float64)
    sides = [(IDS, MASK)] + ([(LEFT, MASK.flip(1))] if kind in DECODERS else [])
    for ids, mask in sides:
        with pool.use_weights(weights):
            together = logits(found, input_ids=ids, attention_mask=mask)
        for row in range(2):
            real = mask[row].bool()
            with pool.use_weights(weights[row : row + 1]):
                alone = _alone(found, kind, ids[row][real], row)
            expected = together[row] if kind in PAIRS else together[row][real]
            torch.testing.assert_close(alone, expected)


def _alone(found: Any, kind: str, ids: Tensor, row: int) -> Tensor:
    more = {"decoder_input_ids": ANSWERS[row : row + 1]} if kind in PAIRS else {}
    out = found(input_ids=ids[None], **more)
    states: Tensor = out.logits if hasattr(out, "logits") else out.last_hidden_state
    return states[0]


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("kind", [*DECODERS, *PAIRS])
def test_what_is_written_behind_a_prompt(kind: str, beams: int) -> None:
    found, pool = pooled(kind)
    plain = model(kind)
    weights = torch.tensor([[1.0, 0.5], [-0.6, 1.2]], dtype=torch.float64)
    ids, mask = (IDS, MASK) if kind in PAIRS else (LEFT, MASK.flip(1))
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    with pool.use_weights(weights), torch.no_grad():
        given = found.generate(input_ids=ids, attention_mask=mask, **options)
    for row in range(2):
        real = mask[row].bool()
        prompt = pool.prompts.mix(weights[row : row + 1])
        alone = embedded(plain, prompt, ids[row][real][None], mask[row][real][None])
        expected = plain.generate(**alone, **options, use_cache=False)
        ours = given[row] if kind in PAIRS else given[row, ids.shape[1] :]
        assert torch.equal(ours, expected[0])
    before = found.generate(input_ids=ids, attention_mask=mask, **options)
    assert torch.equal(before, plain.generate(input_ids=ids, attention_mask=mask, **options))


@pytest.mark.parametrize("kind", DECODERS)
def test_a_cache_goes_on_behind_its_prompt(kind: str) -> None:
    found, pool = pooled(kind)
    ids, mask, cache = LEFT, MASK.flip(1), DynamicCache(config=model(kind).config)
    with pool.use_weights(torch.ones(2)), torch.no_grad():
        whole = found(input_ids=ids, attention_mask=mask).logits
        found(input_ids=ids[:, :3], attention_mask=mask[:, :3], **behind(cache), use_cache=True)
        last = found(input_ids=ids[:, 3:], attention_mask=mask, **behind(cache), use_cache=True).logits
        torch.testing.assert_close(last, whole[:, 3:])
        bare = DynamicCache(config=found.config)
        with pool.use_weights(None):
            found(input_ids=ids[:, :3], attention_mask=mask[:, :3], **behind(bare), use_cache=True)
        with pytest.raises(
            UserError, match=r"(past_key_values|cache): expected that of a text behind the same soft prompts"
        ):
            found(input_ids=ids[:, 3:], attention_mask=mask, **behind(bare), use_cache=True)


@pytest.mark.parametrize("kind", ["bert", "roberta", "llama", "t5"])
def test_prompts_of_which_some_are_padding(kind: str) -> None:
    found, pool = pooled(kind)
    both = pool.prompts.concatenate([1, 0])[None].expand(2, -1, -1)
    real = torch.ones(2, 2 * LENGTH, dtype=torch.bool)
    real[1, :LENGTH] = False
    with pool.prepend(both, real):
        given = logits(found, input_ids=IDS, attention_mask=MASK)
    for row, own in ((0, [1, 0]), (1, [0])):
        with pool.prepend(pool.prompts.concatenate(own)[None]):
            alone = _alone(found, kind, IDS[row][MASK[row].bool()], row)
        expected = given[row] if kind in PAIRS else given[row][MASK[row].bool()]
        torch.testing.assert_close(alone, expected)


def test_a_cache_goes_on_behind_prompts_of_which_some_are_padding() -> None:
    found, pool = pooled("llama")
    both, real = pool.prompts.concatenate([1, 0])[None].expand(2, -1, -1), torch.ones(2, 2 * LENGTH, dtype=torch.bool)
    real[1, :LENGTH] = False
    cache = DynamicCache(config=found.config)
    with pool.prepend(both, real), torch.no_grad():
        whole = found(input_ids=IDS).logits
        found(input_ids=IDS[:, :3], **behind(cache), use_cache=True)
        last = found(input_ids=IDS[:, 3:], **behind(cache), use_cache=True).logits
    torch.testing.assert_close(last, whole[:, 3:])


def test_only_what_is_open_gets_a_gradient() -> None:
    found, pool = pooled("bert")
    with pool.use_weights(torch.ones(2)):
        logits(found, input_ids=IDS, attention_mask=MASK)[:, 0].square().sum().backward()
    named = {name for name, one in found.named_parameters() if one.grad is not None and bool(one.grad.any())}
    assert "soft_prompts.P.0" in named
    assert all(name.startswith(("soft_prompts.P.0", "soft_prompts.mlp.")) for name in named)
    assert set(map(id, pool.parameters_of(0))) == {id(one) for one in found.parameters() if one.requires_grad}
    assert [id(one) for one in pool.parameters_of(1)] == [id(pool.prompts.P[1])]


def test_all_states_are_those_of_the_text() -> None:
    found, pool = pooled("bert")
    types = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])
    with pool.use_weights(torch.ones(1)):
        out = found(IDS, MASK, types, output_hidden_states=True)
        plain = found(IDS, MASK, types, return_dict=False)
    assert all(states.shape == (2, 5, WIDTH) for states in out.hidden_states)
    torch.testing.assert_close(out.hidden_states[-1], out.last_hidden_state)
    torch.testing.assert_close(plain[0], out.last_hidden_state)
    torch.testing.assert_close(out.pooler_output, found.pooler(out.last_hidden_state))


def test_a_model_is_left_as_it_was_found() -> None:
    found, pool = pooled("llama")
    with pytest.raises(UserError, match="model: expected one without soft prompts"):
        PromptAdapterPool(found)
    names, plain = model("llama").state_dict().keys(), model("llama")
    assert found.state_dict().keys() > names
    pool.remove()
    assert found.state_dict().keys() == names
    with pool.use_weights(torch.ones(1)):
        given = logits(found, input_ids=IDS, attention_mask=MASK)
    assert torch.equal(given, logits(plain, input_ids=IDS, attention_mask=MASK))


def test_a_pool_does_what_its_blocks_do() -> None:
    _, pool = pooled("bert", blocks=3)
    assert len(pool) == 3
    assert pool.adapters == (pool.prompts,)
    pool.set_trainable(2)
    pool.delete(0)
    trained = [pool.prompts.trained]
    pool.prompts.fold()
    assert [*trained, pool.prompts.trained] == [(1,), ()]
    assert len(pool) == 2


def test_a_model_in_low_precision_has_exact_prompts() -> None:
    found = model("llama").to(torch.bfloat16)
    pool = PromptAdapterPool(found, num_virtual_tokens=LENGTH, encoder_hidden_size=6)
    pool.reserve(1)
    pool.set_trainable(0)
    assert {one.dtype for one in pool.prompts.parameters()} == {torch.float32}
    with pool.use_weights(torch.ones(1)):
        low = logits(found, input_ids=IDS, attention_mask=MASK)
    assert low.dtype == torch.bfloat16
    assert bool(low.isfinite().all())


def test_autocast_changes_little() -> None:
    found, pool = pooled("bert")
    found.float()
    pool.set_trainable(1)
    weights = torch.tensor([[0.5, 0.5], [1.0, -0.2]])
    with pool.use_weights(weights):
        exact = logits(found, input_ids=IDS, attention_mask=MASK)
        with torch.autocast("cpu", torch.bfloat16):
            low = logits(found, input_ids=IDS, attention_mask=MASK)
    torch.testing.assert_close(low.float(), exact, rtol=0, atol=0.1)


# -- what cannot be ---------------------------------------------------------------------------------------


class Reads(nn.Module):
    """A model in which tokens matter beside their embeddings."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.inner.get_input_embeddings()
        return found

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **given: Any) -> Any:
        out = self.inner(input_ids=input_ids, inputs_embeds=inputs_embeds, **given)
        out.last_hidden_state = out.last_hidden_state + (0 if input_ids is None else 1)
        return out


class Blind(Reads):
    """A model that reads nothing but tokens."""

    def forward(self, input_ids: Any = None, **given: Any) -> Any:  # type: ignore[override]
        return self.inner(input_ids=input_ids, **given)


@pytest.mark.parametrize("kind", [Reads, Blind])
def test_models_that_do_not_read_embeddings_as_tokens(kind: type[Reads]) -> None:
    found = kind(model("bert")).train()
    with pytest.raises(UserError, match=f"model: expected one that reads embeddings .* got {kind.__name__}"):
        PromptAdapterPool(found)
    assert found.inner.training


def test_texts_that_prompts_cannot_stand_before() -> None:
    found, pool = pooled("bert")
    with pool.use_weights(torch.ones(1)):
        with pytest.raises(UserError, match="length: expected texts of at most 9 tokens behind 3 of prompts, got 10"):
            found(torch.ones(1, 10, dtype=torch.long))
        assert found(torch.ones(1, 9, dtype=torch.long)).last_hidden_state.shape == (1, 9, WIDTH)
        with pytest.raises(UserError, match=r"attention_mask: expected \(row, token\)"):
            found(IDS, MASK[:, None, None].double())
    with pool.use_weights(torch.ones(3, 1)), pytest.raises(UserError, match="prompts: expected one for each of 2 rows"):
        found(IDS, MASK)
    found, pool = pooled("t5")
    with (
        pool.use_weights(torch.ones(1)),
        pytest.raises(UserError, match="attention_mask: expected padding on the right"),
    ):
        logits(found, input_ids=LEFT, attention_mask=MASK.flip(1))
    found, pool = pooled("bart")
    some = pool.prompts.concatenate([0])[None], torch.tensor([[False, True, True]])
    with pool.prepend(*some), pytest.raises(UserError, match="prompts: expected as many for each row"):
        logits(found, input_ids=IDS, attention_mask=MASK)


def test_a_decoder_alone_is_read_like_its_language_model() -> None:
    whole, pool = pooled("llama")
    base: Any = LlamaModel(whole.config).double().eval()
    base.load_state_dict(whole.model.state_dict(), strict=False)
    other = PromptAdapterPool(base, num_virtual_tokens=LENGTH, encoder_hidden_size=6, seed=1)
    other.reserve(2)
    other.set_trainable(0)
    with pool.use_weights(torch.ones(1)), other.use_weights(torch.ones(1)):
        expected = whole(IDS, MASK, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(base(IDS, MASK).last_hidden_state, expected)


def test_an_encoder_without_its_decoder_gives_the_states_of_the_text_alone() -> None:
    for kind in PAIRS:
        found = deepcopy(model(kind).get_encoder())
        pool = PromptAdapterPool(found, num_virtual_tokens=LENGTH, encoder_hidden_size=0)
        pool.reserve(1)
        with pool.use_weights(torch.ones(1)):
            states = found(input_ids=IDS, attention_mask=MASK).last_hidden_state
        given = embedded(found, pool.prompts.mix(torch.ones(2, 1)), IDS, MASK)
        pool.remove()
        torch.testing.assert_close(states, found(**given).last_hidden_state[:, LENGTH:])


@pytest.mark.parametrize("kind", ["xlnet", "mamba"])
def test_other_kinds_of_models_are_read_as_well(kind: str) -> None:
    if kind == "xlnet":
        found: Any = XLNetModel(XLNetConfig(vocab_size=WORDS, d_model=WIDTH, n_layer=1, n_head=2, d_inner=16))
    else:
        found = MambaModel(MambaConfig(vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=1, state_size=2))
    pool = PromptAdapterPool(found.eval(), num_virtual_tokens=LENGTH, encoder_hidden_size=0)
    pool.reserve(1)
    with pool.use_weights(torch.ones(1)), torch.no_grad():
        states = found(input_ids=IDS[:1]).last_hidden_state
    given = embedded(found, pool.prompts.mix(torch.ones(1, 1)), IDS[:1], MASK[:1])
    pool.remove()
    with torch.no_grad():
        torch.testing.assert_close(states, found(inputs_embeds=given["inputs_embeds"]).last_hidden_state[:, LENGTH:])


def test_a_cache_of_states_cannot_be_gone_on_with() -> None:
    found = MambaModel(MambaConfig(vocab_size=WORDS, hidden_size=WIDTH, num_hidden_layers=1, state_size=2)).eval()
    pool = PromptAdapterPool(found, num_virtual_tokens=LENGTH, encoder_hidden_size=0)
    pool.reserve(1)
    with (
        torch.no_grad(),
        pool.use_weights(torch.ones(1)),
        pytest.raises(UserError, match="and a usual cache, got Mamba"),
    ):
        found(input_ids=IDS[:1], cache_params=object())


@pytest.mark.parametrize("count", [24, 10**12])
def test_prompts_that_leave_a_text_no_room_are_refused_before_they_are_made(count: int) -> None:
    config = BertConfig(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=24,
    )
    PromptAdapterPool(BertModel(config), num_virtual_tokens=23, encoder_hidden_size=0)
    with pytest.raises(UserError, match=f"prompts: expected fewer than 24 tokens together, got {count}"):
        PromptAdapterPool(BertModel(config), num_virtual_tokens=count)
