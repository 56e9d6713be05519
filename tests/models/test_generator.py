"""Answers: the same for any batch and padding, with and without a cache, and those of Transformers' own forward."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BertConfig, BertLMHeadModel

from regard.errors import UserError
from regard.models.generator import Generator, is_language_model, load_generator
from regard.models.pretrained import load
from tests.continual.small_text_tasks import KINDS, WORDS, Kind, lively, loaded

LENGTHS = (7, 3, 1, 5, 2)
NEW = 6
TARGETS: dict[str, list[str] | None] = {"gpt2": ["c_attn"], "t5": ["q", "v"], "regard": None}


def prompts() -> tuple[Tensor, Tensor]:
    """Prompts of several lengths, padded on the right, and which of their tokens are real."""
    ids = torch.randint(4, len(WORDS), (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(1))
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    return ids.masked_fill(~real, 0), real


def answers() -> Tensor:
    """An answer to each prompt, with its end."""
    return torch.tensor([[5, 6, 2], [7, 2, -100], [8, 9, 2], [2, -100, -100], [11, 12, 13]])


def by_hand(model: Any, prompt: Tensor, many: int) -> list[int]:
    """What the model says to one prompt: the likeliest token, each time of the whole sequence anew."""
    said: list[int] = []
    for _ in range(many):
        so_far = torch.tensor([said], dtype=torch.long)
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                first = torch.tensor([[model.config.decoder_start_token_id]])
                logits = model(input_ids=prompt[None], decoder_input_ids=torch.cat([first, so_far], 1)).logits
            else:
                logits = model(input_ids=torch.cat([prompt[None], so_far], 1)).logits
        said.append(int(logits[0, -1].argmax()))
        if said[-1] == model.config.eos_token_id:
            break
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_each_prompt_alone_and_without_a_cache(kind: Kind) -> None:
    given, (ids, real) = lively(kind), prompts()
    expected = [by_hand(given.model, row[mask], NEW) for row, mask in zip(ids, real, strict=True)]
    assert len({tuple(one) for one in expected}) >= 3
    generator = Generator.from_loaded(given)
    found = generator.generate(ids, real, NEW)
    assert [row[: len(one)] for row, one in zip(found.tolist(), expected, strict=True)] == expected
    assert all(set(row[len(one) :]) <= {0} for row, one in zip(found.tolist(), expected, strict=True))
    wider = torch.cat([ids, torch.zeros(len(ids), 4, dtype=torch.long)], 1)
    more = torch.cat([real, torch.zeros(len(ids), 4, dtype=torch.bool)], 1)
    assert torch.equal(generator.generate(wider, more, NEW), found)
    left, before = ids[:, :0], torch.zeros(len(ids), 2, dtype=torch.bool)
    if not generator.is_encoder_decoder:
        left = torch.cat([torch.zeros(len(ids), 2, dtype=torch.long), ids], 1)
        assert torch.equal(generator.generate(left, torch.cat([before, real], 1), NEW), found)


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_ends_where_it_is_said_to(kind: Kind) -> None:
    generator, (ids, real) = Generator.from_loaded(lively(kind)), prompts()
    generator.encoder.generation_config.eos_token_id = [len(WORDS)]
    free = generator.generate(ids, real, NEW)
    assert free.shape == (len(LENGTHS), NEW)
    end = int(free[0, 2])
    generator.encoder.generation_config.eos_token_id = [end]
    many = [whole.index(end) + 1 if end in whole else NEW for whole in free.tolist()]
    expected = [whole[:count] + [0] * (max(many) - count) for whole, count in zip(free.tolist(), many, strict=True)]
    assert generator.generate(ids, real, NEW).tolist() == expected
    assert min(many) < NEW


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_an_answer_is_that_of_transformers(kind: Kind) -> None:
    given, (ids, real), labels = lively(kind), prompts(), answers()
    logits = Generator.from_loaded(given)(ids, real, labels).logits
    for row in range(len(ids)):
        prompt, answer = ids[row][real[row]], labels[row][labels[row] >= 0]
        found = torch.nn.functional.cross_entropy(logits[row], labels[row], ignore_index=-100)
        with torch.no_grad():
            if given.model.config.is_encoder_decoder:
                expected = given.model(input_ids=prompt[None], labels=answer[None]).loss
            else:
                known = torch.cat([torch.full_like(prompt, -100), answer])
                expected = given.model(input_ids=torch.cat([prompt, answer])[None], labels=known[None]).loss
        torch.testing.assert_close(found.float(), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_rows_alone(kind: Kind) -> None:
    """With padding on the left no token sees nothing but padding and spoils what is learnt."""
    generator, (ids, real), labels = Generator.from_loaded(lively(kind)), prompts(), answers()

    def gradients(rows: list[slice]) -> list[Tensor]:
        generator.zero_grad()
        for part in rows:
            width = int(real[part].sum(1).max())
            logits = generator(ids[part, :width], real[part, :width], labels[part]).logits
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[part].flatten(), reduction="sum").backward()
        return [one.grad.clone() for one in generator.parameters() if one.grad is not None]

    whole = gradients([slice(0, len(ids))])
    alone = gradients([slice(row, row + 1) for row in range(len(ids))])
    assert whole
    for one, other in zip(whole, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_what_a_decoder_reads() -> None:
    generator = Generator.from_loaded(loaded("gpt2"))
    joined = generator.join(
        torch.tensor([[5, 6, 7], [8, 0, 0]]),
        torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(),
        torch.tensor([[9, -100], [9, 2]]),
    )
    assert joined.input_ids.tolist() == [[5, 6, 7, 9, 0], [0, 0, 8, 9, 2]]
    assert joined.attention_mask.int().tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert joined.position_ids.tolist() == [[0, 1, 2, 3, 3], [0, 0, 0, 1, 2]]


def test_nothing_of_how_its_makers_let_it_write_is_kept() -> None:
    given, (ids, real) = lively("llama"), prompts()
    plain = Generator.from_loaded(given).generate(ids, real, NEW)
    given.model.generation_config.update(repetition_penalty=5.0, do_sample=True, num_beams=3, min_new_tokens=4)
    assert torch.equal(Generator.from_loaded(given).generate(ids, real, NEW), plain)
    given.model.generation_config.eos_token_id = [2, int(plain[0, 0])]
    assert Generator.from_loaded(given).end_token_ids == tuple(sorted({2, int(plain[0, 0])}))


@pytest.mark.parametrize("kind", ["t5", "gpt2", "regard"])
def test_adapters_alone_are_trained_and_are_added_to_the_weights(kind: Kind, tmp_path: Path) -> None:
    given, (ids, real) = lively(kind), prompts()
    options = {"rank": 2, "targets": TARGETS[kind]}
    generator = Generator.from_loaded(given, lora=options, seed=1).eval()
    other = Generator.from_loaded(given, lora=options, seed=2)
    trained = {name: one for name, one in generator.named_parameters() if one.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert any(not torch.equal(one, dict(other.named_parameters())[name]) for name, one in trained.items())
    torch.testing.assert_close(
        generator(ids, real, answers()).logits, Generator.from_loaded(given)(ids, real, answers()).logits
    )
    with torch.no_grad():
        for one in trained.values():
            one.normal_(0, 0.3, generator=torch.Generator().manual_seed(5))
    expected = generator(ids, real, answers()).logits
    assert not torch.allclose(expected, Generator.from_loaded(given)(ids, real, answers()).logits)
    generator.save_pretrained(tmp_path)
    torch.testing.assert_close(Generator.from_pretrained(tmp_path)(ids, real, answers()).logits, expected)
    torch.testing.assert_close(generator(ids, real, answers()).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_as_the_language_model_that_it_is(kind: Kind, tmp_path: Path) -> None:
    generator, (ids, real) = Generator.from_loaded(lively(kind)), prompts()
    generator.config.lineage["tasks"] = [{"name": "one"}]
    generator.save_pretrained(tmp_path)
    assert not hasattr(generator.encoder.config, "lineage")
    kind_of = AutoModelForSeq2SeqLM if generator.is_encoder_decoder else AutoModelForCausalLM
    model = kind_of.from_pretrained(tmp_path, dtype="auto")
    assert type(model) is type(generator.encoder)
    assert model.config.lineage == {"base": f"tiny-{kind}", "sha256": None, "tasks": [{"name": "one"}]}
    back = Generator.from_pretrained(tmp_path)
    assert back.config.lineage == generator.config.lineage
    assert torch.equal(back.generate(ids, real, NEW), generator.generate(ids, real, NEW))
    expected = generator(ids, real, answers()).logits
    torch.testing.assert_close(back(ids, real, answers()).logits, expected, rtol=0, atol=1e-12)


def test_a_part_of_a_network_is_not_loaded(tmp_path: Path) -> None:
    generator = Generator.from_loaded(loaded("t5"))
    generator.config.part_of = "sapt"
    generator.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(UserError, match=r"model: expected a language model, .* is the network of sapt; "):
        Generator.from_pretrained(tmp_path)


@pytest.mark.parametrize("kind", ["t5", "bart", "gpt2"])
def test_it_is_loaded_with_its_head(kind: Kind, tmp_path: Path) -> None:
    given, (ids, real) = lively(kind), prompts()
    given.model.save_pretrained(tmp_path)
    given.tokenizer.save_pretrained(tmp_path)
    found = load_generator(str(tmp_path), device="cpu", dtype="float64")
    assert is_language_model(found.model)
    assert found.sha256 is not None
    assert torch.equal(
        Generator.from_loaded(found).generate(ids, real, NEW), Generator.from_loaded(given).generate(ids, real, NEW)
    )
    without = load(str(tmp_path), device="cpu")
    assert not is_language_model(without.model)
    with pytest.raises(UserError, match=r"model: expected a language model with its head, got .*load_generator\('"):
        Generator.from_loaded(without)


def test_models_that_cannot_answer() -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    both_ways = BertLMHeadModel(BertConfig(vocab_size=len(WORDS), **sizes, is_decoder=True))
    assert is_language_model(both_ways)
    both_ways.config.is_decoder = False
    assert not is_language_model(both_ways)
    endless = loaded("gpt2")
    endless.tokenizer.eos_token = None
    with pytest.raises(UserError, match="model: expected a tokenizer with a token that ends a text"):
        Generator.from_loaded(endless)
    unstarted = loaded("t5")
    for config in (unstarted.model.config, unstarted.model.generation_config):
        config.decoder_start_token_id = config.bos_token_id = None
    with pytest.raises(UserError, match="model: expected a decoder_start_token_id, the configuration of tiny-t5"):
        Generator.from_loaded(unstarted)


def test_the_model_that_is_given_stays_as_it_is(tmp_path: Path) -> None:
    given = loaded("t5")
    before = json.dumps(given.model.generation_config.to_dict(), default=str)
    generator = Generator.from_loaded(replace(given, name="its name"), lora={"rank": 2})
    with torch.no_grad():
        for one in generator.parameters():
            one.zero_()
    assert json.dumps(given.model.generation_config.to_dict(), default=str) == before
    assert all(one.requires_grad and bool(one.any()) for one in given.model.parameters())
    assert generator.config.lineage["base"] == "its name"


def test_answers_are_written_without_dropout() -> None:
    generator, (ids, real) = Generator.from_loaded(lively("gpt2")), prompts()
    for module in generator.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.9
    expected = generator.eval().generate(ids, real, NEW)
    assert generator.train().generate(ids, real, NEW).equal(expected)
    assert generator.encoder.training
