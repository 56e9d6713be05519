"""Rows of tasks from text to text: what a model is given, and what its loss is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard.continual.costs import count_examples, trim_padding
from regard.continual.methods import METHODS
from regard.continual.run import make_learner
from regard.continual.text_learner import TextLearner, encode_pairs, encode_prompts
from regard.continual.training_phase import ExampleRef
from regard.data.stream import Stream, TextPairs
from regard.errors import UserError
from tests.continual.small_text_tasks import BUDGET, WORDS, lively, loaded, stream, task, tokenizer

TEXTS = {"finetune", "replay", "agem", "ewc", "separate", "joint"}


def learner(kind: Any = "t5", of: Stream | None = None, **changes: Any) -> TextLearner:
    made = make_learner(of or stream(), METHODS["finetune"](), lively(kind), replace(BUDGET, **changes), seed=1)
    return cast(TextLearner, made)


def said(ids: Tensor | list[int]) -> str:
    return " ".join(WORDS[number] for number in ids if number >= 0)


PAIRS = TextPairs(inputs=("say the cat", "say"), targets=(("a cat", "cat"), ("it is slow",)))


@pytest.mark.parametrize(
    "kind, prompt, answer",
    [
        ("t5", "say the cat [EOS]", "a cat [EOS]"),
        ("bart", "[BOS] say the cat [EOS]", "[BOS] a cat [EOS]"),
        ("llama", "[BOS] say the cat", "a cat [EOS]"),
        ("gpt2", "say the cat", "a cat [EOS]"),
    ],
)
def test_prompts_and_answers(kind: Any, prompt: str, answer: str) -> None:
    found = encode_pairs(PAIRS, tokenizer(kind), BUDGET, encoder_decoder=kind in ("t5", "bart"))
    assert said(found.input_ids[0][found.attention_mask[0]].tolist()) == prompt
    assert said(found.answers[0].tolist()) == answer
    assert found.labels.tolist() == [0, 1]
    assert (len(found), found.truncated) == (2, 0)
    assert found.lengths().tolist()[0] == len(prompt.split()) + len(answer.split())


def test_a_prompt_of_a_chat_template_has_bos_once() -> None:
    pairs = TextPairs(inputs=("[BOS] say the cat",), targets=(("a cat",),))
    found = encode_pairs(pairs, tokenizer("llama"), BUDGET, encoder_decoder=False)
    assert said(found.input_ids[0].tolist()) == "[BOS] say the cat"


def test_a_prompt_that_is_to_go_on_has_no_end() -> None:
    found = encode_pairs(PAIRS, tokenizer("t5"), BUDGET, encoder_decoder=False)
    assert said(found.input_ids[0].tolist()) == "say the cat"


@pytest.mark.parametrize("apart, prompt", [(True, "say the [EOS]"), (False, "say the cat")])
def test_what_does_not_fit_is_cut_and_counted(apart: bool, prompt: str) -> None:
    tight = replace(BUDGET, length=3, target_length=3)
    found = encode_pairs(PAIRS, tokenizer("t5" if apart else "gpt2"), tight, encoder_decoder=apart)
    assert said(found.input_ids[0].tolist()) == prompt
    assert said(found.answers[0].tolist()) == "a cat [EOS]"
    assert said(found.answers[1].tolist()) == "it is [EOS]"
    assert found.truncated == (2 if apart else 1)


@pytest.mark.parametrize(
    "kind, side, length, prompt",
    [
        ("t5", "left", 3, "the cat [EOS]"),
        ("llama", "left", 3, "[BOS] the cat"),
        ("llama", "left", 1, "cat"),
        ("gpt2", "left", 2, "the cat"),
        ("t5", "middle", 3, "say the [EOS]"),
        ("llama", "middle", 3, "[BOS] say cat"),
        ("llama", "middle", 2, "[BOS] cat"),
        ("gpt2", "middle", 2, "say cat"),
        ("gpt2", "middle", 3, "say the cat"),
        ("gpt2", "right", 2, "say the"),
    ],
)
def test_a_prompt_loses_what_the_budget_says(kind: Any, side: Any, length: int, prompt: str) -> None:
    """What a decoder goes on from may stay, as the turn of an assistant; special tokens before all as well."""
    apart, words = kind == "t5", tokenizer(kind)
    budget = replace(BUDGET, length=length, truncation_side=side)
    found = encode_pairs(PAIRS, words, budget, encoder_decoder=apart)
    assert said(found.input_ids[0].tolist()) == prompt
    assert said(encode_prompts(["say the cat"], words, length, side, encoder_decoder=apart)[0]) == prompt
    assert said(found.answers[0].tolist()) == "a cat [EOS]"


def test_rows_are_padded_to_the_longest() -> None:
    here = learner()
    items = [ExampleRef(0, 0), ExampleRef(2, 3), ExampleRef(1, 5)]
    rows = here.rows(items, size=4)
    longest = max(int(here.encoded_split(*(item.task, "train")).attention_mask[item.row].sum()) for item in items)
    assert rows["input_ids"].shape == rows["attention_mask"].shape == (4, longest)
    assert rows["labels"].shape == (4, 4)
    assert rows["tasks"].tolist() == [0, 2, 1, 0]
    assert rows["rows"].tolist() == [0, 3, 5, 0]
    for at, item in enumerate(items):
        pairs = here.stream.tasks[item.task].train
        prompt = said(rows["input_ids"][at][rows["attention_mask"][at]].tolist())
        assert prompt == f"{cast(TextPairs, pairs).inputs[item.row]} [EOS]"
        assert said(rows["labels"][at].tolist()) == f"{cast(TextPairs, pairs).targets[item.row][0]} [EOS]"
    assert set(rows["labels"][3].tolist()) == {-100}
    assert here.length(items[0]) == int(rows["attention_mask"][0].sum() + (rows["labels"][0] != -100).sum())


def test_the_loss_is_summed_over_the_tokens_of_answers() -> None:
    here = learner()
    rows = here.rows([ExampleRef(0, 0), ExampleRef(2, 3)], size=3)
    logits = here.network(rows).detach()
    assert count_examples(rows) == 3 + 4
    expected = sum(
        -float(logits[row, at].log_softmax(-1)[word])
        for row in range(2)
        for at, word in enumerate(rows["labels"][row].tolist())
        if word != -100
    )
    assert float(here.cross_entropy(logits, rows)) == pytest.approx(expected, rel=1e-12)


def test_columns_of_padding_are_left_out() -> None:
    here = learner("gpt2")
    rows = here.rows([ExampleRef(0, 0), ExampleRef(2, 3), ExampleRef(0, 1)])
    part = trim_padding({name: value[2:] for name, value in rows.items()})
    assert part["labels"].shape == (1, 3)
    assert part["attention_mask"].all()
    torch.testing.assert_close(
        here.cross_entropy(here.network(part), part),
        here.cross_entropy(here.network(rows)[2:], {name: value[2:] for name, value in rows.items()}),
    )
    none = trim_padding({**rows, "labels": torch.full_like(rows["labels"], -100)})
    assert none["labels"].shape == (3, 1)
    assert float(here.cross_entropy(here.network(none), none).detach()) == 0.0


def test_which_methods_learn_them() -> None:
    assert {name for name, kind in METHODS.items() if kind.supports_text} >= TEXTS
    refused = [name for name, kind in METHODS.items() if not kind.supports_text]
    assert {"lwf", "l2p", "der++", "mbpa++", "idbr", "ctr", "prescale", "probe"} <= set(refused)
    for name in refused:
        with pytest.raises(UserError, match="method: expected one for tasks from text to text, "):
            make_learner(stream(), METHODS[name](), loaded(), BUDGET, seed=1)


def test_streams_that_cannot_be_learnt() -> None:
    empty = replace(task("animals"), test=TextPairs(inputs=(), targets=()))
    with pytest.raises(UserError, match="stream: expected rows in each split, animals test has none"):
        learner(of=Stream(name="s", tasks=(empty,), order=(0,), seed=0))
    blank = replace(task("animals"), train=TextPairs(inputs=("",), targets=(("a",),)))
    with pytest.raises(UserError, match="stream: expected prompts with words, '' has no token"):
        learner("gpt2", of=Stream(name="s", tasks=(blank,), order=(0,), seed=0))


def test_prompts_that_a_model_does_not_take() -> None:
    with pytest.raises(
        UserError, match=r"length: expected at most 40 tokens, .* got a prompt of 10 and 38 of an answer"
    ):
        make_learner(
            stream(), METHODS["finetune"](), loaded("gpt2"), replace(BUDGET, length=10, target_length=38), seed=1
        )
    make_learner(stream(), METHODS["finetune"](), loaded("bart"), replace(BUDGET, length=10, target_length=38), seed=1)
    with pytest.raises(UserError, match=r"target-length: expected at most 40 tokens, which this model takes, got 41"):
        make_learner(
            stream(), METHODS["finetune"](), loaded("bart"), replace(BUDGET, length=10, target_length=41), seed=1
        )
