"""What weighs the blocks: the rows that are read, whatever is beside them, until the call ends and not longer."""

from typing import Any

import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers.modeling_outputs import BaseModelOutput

from regard.adapters.lora import MixedLayer
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import (
    DECODERS,
    FAMILIES,
    LEARNT,
    TWO_PARTS,
    filled,
    logits,
    made,
    merged,
    padded,
    plain_vectors,
    rows,
)
from tests.named_cache import behind, cache_of

# -- mixing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_read_as_by_a_model_with_its_own_mix_merged(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    weights = adapters.routing_weights(**batch).detach()
    assert weights.shape == (3, 3)
    assert not torch.allclose(weights[0], weights[1])
    found = logits(adapters, batch)
    assert not torch.allclose(found, logits(made(family), batch), atol=1e-3)
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        assert_close(found[row : row + 1], logits(merged(family, adapters, weights[row]), alone), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_weights_are_the_attentions_over_the_highest_embeddings(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    e = plain_vectors(made(family), batch, batch["attention_mask"])
    assert_close(adapters.query_vectors(**batch), e)
    assert_close(adapters.routing_weights(**batch), adapters.router(e))
    with adapters.use_weights(adapters.router(e)):
        forced = logits(adapters, batch)
    assert_close(logits(adapters.model, batch), forced)


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_the_batch_change_nothing(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    expected = logits(adapters, batch)
    one = {name: value[1:2] for name, value in batch.items()}
    assert_close(logits(adapters, one), expected[1:2], atol=1e-5, rtol=1e-4)
    for left, right in ((0, 5), (4, 0)):
        wide = padded(batch, left, right)
        assert_close(adapters.routing_weights(**wide), adapters.routing_weights(**batch))
        if left and family in ("bert", "bart", "gpt2"):
            continue  # these count positions with the padding: the model itself answers otherwise
        found = logits(adapters, wide)
        if family in DECODERS:
            found = found[:, left : found.shape[1] - right]
        assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_before_a_block_is_added_the_model_answers_as_it_did() -> None:
    batch = rows("llama")
    expected = logits(made("llama"), batch)
    adapters = SharedAdapters(made("llama"))
    assert torch.equal(logits(adapters, batch), expected)
    adapters.add_adapter("one")
    assert_close(logits(adapters, batch), expected)


def test_with_no_block_given_the_model_answers_as_it_did() -> None:
    adapters, batch = filled("t5"), rows("t5")
    with adapters.use_weights(None):
        assert_close(logits(adapters, batch), logits(made("t5"), batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_forced_is_one_block_alone(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    with adapters.use_only("task1"):
        found = logits(adapters, batch)
    assert_close(found, logits(merged(family, adapters, torch.tensor([0.0, 1.0, 0.0])), batch), atol=1e-4, rtol=1e-3)


def test_weights_hold_again_after_an_inner_block() -> None:
    """Also for a layer that is called alone, outside of a call of the model."""
    adapters = filled("llama")
    mixed = next(module for module in adapters.model.modules() if isinstance(module, MixedLayer))
    states = torch.randn(1, 4, mixed.adapters.inputs)
    with adapters.use_weights(torch.tensor([0.0, 1.0, 0.0])):
        expected = mixed(states)
        with adapters.use_weights(None):
            assert torch.equal(mixed(states), mixed.base_layer(states))
        assert torch.equal(mixed(states), expected)
    assert not torch.allclose(expected, mixed.base_layer(states))


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_is_weighed_by_its_prompt_not_by_its_answer(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    labels = batch["input_ids"].clone()
    labels[:, :4] = -100
    prompt = labels == -100
    expected = adapters.routing_weights(input_ids=batch["input_ids"][:, :4])
    assert_close(adapters.routing_weights(**batch, labels=labels), expected)
    assert_close(adapters.routing_weights(**batch, prompt_mask=prompt), expected)
    assert not torch.allclose(adapters.routing_weights(**batch), expected, atol=1e-3)
    cut = torch.ones_like(prompt)
    cut[:, 2:4] = False
    shorter = adapters.routing_weights(input_ids=batch["input_ids"][:, :2])
    assert_close(adapters.routing_weights(**{**batch, "attention_mask": cut.long()}, prompt_mask=prompt), shorter)
    with adapters.use_weights(expected.detach()):
        right = logits(adapters, batch)
    assert_close(logits(adapters, batch, labels=labels), right)
    assert_close(logits(adapters.model, batch, labels=labels), right)
    assert_close(logits(adapters, batch, prompt_mask=prompt), right)
    other = {**batch, "input_ids": torch.where(prompt, batch["input_ids"], 3)}
    assert_close(adapters.routing_weights(**other, labels=labels), expected)


def test_the_tokens_whose_logits_are_asked_for_are_no_prompt() -> None:
    """GRPO of TRL passes no labels: weights depended on the answer that is scored, and in generation on the prompt."""
    adapters, batch = filled("llama"), rows("llama")
    answers = batch["input_ids"].shape[1] - 4
    expected = adapters.routing_weights(input_ids=batch["input_ids"][:, :4])
    assert_close(adapters.routing_weights(**batch, logits_to_keep=answers + 1), expected)
    with adapters.use_weights(expected.detach()):
        right = logits(adapters, batch, logits_to_keep=answers + 1)
    for called in (adapters, adapters.model):
        assert_close(logits(called, batch, logits_to_keep=answers + 1), right)
    whole = adapters.routing_weights(**batch)
    assert_close(adapters.routing_weights(**batch, logits_to_keep=1), whole)
    assert not torch.allclose(whole, expected, atol=1e-3)
    adapters.note_prompt(adapters.active_adapter or "", {**batch, "labels": batch["input_ids"].clone()})
    adapters._routing.expects_prompt = True  # as of a task whose rows have answers
    assert_close(adapters.train()(**batch, logits_to_keep=answers + 1).logits, right)


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_labels_of_others_say_nothing_of_a_prompt(family: str) -> None:
    adapters, batch = filled(family), rows(family, tokens=4)
    labels = torch.zeros(3, dtype=torch.long) if family == "bert" else batch["decoder_input_ids"]
    assert_close(adapters.routing_weights(**batch, labels=labels), adapters.routing_weights(**batch))
    given = {name: value for name, value in batch.items() if name != "decoder_input_ids"}
    with adapters.use_weights(adapters.routing_weights(**batch).detach()):
        expected = logits(adapters, given, labels=labels)
    assert_close(logits(adapters, given, labels=labels), expected)


def test_masked_language_modelling_is_weighed_by_all_words() -> None:
    config = made("bert").config
    adapters = SharedAdapters(transformers.BertForMaskedLM(config).eval(), **LEARNT, r=2)
    adapters.add_adapter("one")
    batch = rows("bert")
    labels = torch.full_like(batch["input_ids"], -100)
    labels[:, 1] = 5
    assert_close(adapters.query_vectors(**batch, labels=labels), adapters.query_vectors(**batch))


def test_embeddings_may_be_given_in_place_of_tokens() -> None:
    adapters, batch = filled("bert"), rows("bert")
    embedded = adapters.model.get_input_embeddings()(batch["input_ids"])
    found = logits(adapters, {"inputs_embeds": embedded, "attention_mask": batch["attention_mask"]})
    assert_close(found, logits(adapters, batch))


def test_the_base_model_and_the_model_called_by_place_mix_too() -> None:
    adapters, batch = filled("bert"), rows("bert")
    with torch.no_grad():
        whole = adapters.model.bert(**batch).last_hidden_state
        placed = adapters.model(batch["input_ids"], batch["attention_mask"]).logits
    with adapters.use_weights(adapters.routing_weights(**batch)), torch.no_grad():
        assert_close(adapters.model.bert(**batch).last_hidden_state, whole)
    assert_close(placed, logits(adapters, batch))


# -- weights that hold, and that do not -----------------------------------------------------------------------


@pytest.mark.parametrize("family", [*TWO_PARTS, *DECODERS])
@pytest.mark.parametrize("search", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"use_cache": False}])
def test_generating_keeps_the_weights_of_the_prompt(family: str, search: dict[str, Any]) -> None:
    adapters, batch = filled(family), rows(family)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, **search}
    found = adapters.generate(**given, **options)
    returned = search.get("num_return_sequences", 1)
    for row in range(3):
        weights = adapters.routing_weights(**given)[row].detach()
        alone = {name: value[row : row + 1] for name, value in given.items()}
        expected = merged(family, adapters, weights).generate(**alone, **options)
        mine = found[row * returned : (row + 1) * returned]
        width = min(mine.shape[1], expected.shape[1])
        assert torch.equal(mine[:, :width], expected[:, :width])
        assert not mine[:, width:].any()
    if search.get("use_cache", True) or family in TWO_PARTS:
        assert torch.equal(adapters.model.generate(**given, **options), found)


@pytest.mark.parametrize("family", ["llama", "pythia", "t5"])
def test_left_padding_changes_no_word_that_is_generated(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    wide = padded(given, 3, 0)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected = adapters.generate(**given, **options)
    found = adapters.generate(**wide, **options)
    assert torch.equal(found[:, 3:] if family in DECODERS else found, expected)
    without_mask = adapters.generate(wide["input_ids"], **options)
    assert torch.equal(without_mask, found)


@pytest.mark.parametrize("family", DECODERS)
def test_with_a_cache_the_next_words_keep_the_weights(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    ids = batch["input_ids"]
    with torch.no_grad():
        first = adapters(input_ids=ids[:, :4], use_cache=True)
        adapters(**rows(family, many=2, seed=9))  # another batch in between
        second = adapters(input_ids=ids[:, 4:], **behind(cache_of(first)))
    with adapters.use_weights(adapters.routing_weights(input_ids=ids[:, :4])):
        expected = logits(adapters, batch)
    assert_close(torch.cat([first.logits, second.logits], 1), expected, atol=1e-5, rtol=1e-4)


def test_tuples_carry_the_weights_as_well() -> None:
    adapters, batch = filled("llama"), rows("llama")
    ids = batch["input_ids"]
    with torch.no_grad():
        scores, cache = adapters(input_ids=ids[:, :4], use_cache=True, return_dict=False)[:2]
        second = adapters(input_ids=ids[:, 4:], **behind(cache), return_dict=False)[0]
    with adapters.use_weights(adapters.routing_weights(input_ids=ids[:, :4])):
        assert_close(torch.cat([scores, second], 1), logits(adapters, batch), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", TWO_PARTS)
def test_the_encoders_output_brings_its_weights_to_the_decoder(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    expected = logits(adapters, batch)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    rest = {name: batch[name] for name in ("decoder_input_ids", "attention_mask")}
    with torch.no_grad():
        read = adapters.model.get_encoder()(**given)
        adapters(**rows(family, many=2, seed=9))
    for output in (read, (read.last_hidden_state,)):
        assert_close(logits(adapters, rest, encoder_outputs=output), expected)


def test_a_cache_that_was_not_filled_here_is_refused() -> None:
    adapters, batch = filled("llama"), rows("llama")
    other = cache_of(made("llama")(**batch, use_cache=True))
    with pytest.raises(
        UserError, match=r"(past_key_values|cache): expected what this model computed with its current adapters"
    ):
        adapters(input_ids=batch["input_ids"][:, :1], **behind(other))
    kept = cache_of(adapters(**batch, use_cache=True))
    adapters.delete_adapter("task0")
    adapters.add_adapter("another")
    with pytest.raises(UserError, match=r"got states of other adapters"):
        adapters(input_ids=batch["input_ids"][:, :1], **behind(kept))
    adapters(**batch)


def test_states_that_were_not_read_here_are_refused() -> None:
    adapters, batch = filled("t5"), rows("t5")
    strange = BaseModelOutput(last_hidden_state=torch.randn(3, 7, 16))
    decoded = {"decoder_input_ids": batch["decoder_input_ids"]}
    with pytest.raises(UserError, match=r"encoder_outputs: expected what this model computed"):
        adapters(encoder_outputs=strange, **decoded)
    with pytest.raises(UserError, match=r"encoder_hidden_states: expected what this model computed"):
        adapters.model.get_decoder()(input_ids=batch["decoder_input_ids"], encoder_hidden_states=torch.randn(3, 7, 16))
    with adapters.use_only("task0"):
        logits(adapters, decoded, encoder_outputs=strange)


@pytest.mark.parametrize("family", ["bert", "llama", "t5"])
def test_no_weights_are_left_when_a_call_ends_well_or_not(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    adapters(**batch)
    assert adapters.pool.mixture.weights is None
    broken = {**batch, "input_ids": torch.full((3, 7), 1000)}
    with pytest.raises(IndexError):
        adapters(**broken)
    assert adapters.pool.mixture.weights is None
    late = next(iter(adapters.layers("look").values()))
    handle = late.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        adapters(**batch)
    handle.remove()
    assert adapters.pool.mixture.weights is None
    expected = logits(filled(family), batch)
    assert_close(logits(adapters, batch), expected)


def test_a_call_that_was_broken_off_leaves_nothing() -> None:
    adapters, batch = filled("llama"), rows("llama")

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = next(iter(adapters.layers("look").values())).register_forward_pre_hook(stop)
    labels = torch.where(torch.arange(7) < 2, -100, batch["input_ids"])
    with pytest.raises(KeyboardInterrupt):
        adapters(**batch, labels=labels)
    handle.remove()
    assert_close(logits(adapters, batch), logits(filled("llama"), batch))
    assert adapters.pool.mixture.weights is None


def test_given_weights_end_with_their_block_and_nest() -> None:
    adapters, batch = filled("bert"), rows("bert")
    expected = logits(adapters, batch)
    with adapters.use_only("task0"):
        alone = logits(adapters, batch)
        with adapters.use_weights(None):
            assert_close(logits(adapters, batch), logits(made("bert"), batch))
        assert_close(logits(adapters, batch), alone)
    assert_close(logits(adapters, batch), expected)
