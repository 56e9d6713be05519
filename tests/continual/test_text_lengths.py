"""A length that fits the texts of a stream, and what is lost where it does not."""

from dataclasses import replace
from typing import Any

import pytest

from regard.continual.methods import METHODS
from regard.continual.run import make_learner
from regard.continual.text_lengths import MAX_FITTED_LENGTH, fit_length, measure_truncation
from regard.data.examples import Examples
from regard.data.stream import ClassificationTask, Stream, TextPairs, TextTask
from regard.errors import UserError
from regard.models.pretrained import Loaded
from tests.continual import small_tasks, small_text_tasks


def classified(*counts: list[int], second: str = "") -> Stream:
    """A task for each list, of texts with so many words."""
    tasks = []
    for number, words in enumerate(counts):
        texts = tuple((" ".join(["the"] * count), *([second] if second else [])) for count in words)
        rows = Examples(texts=texts, labels=tuple(at % 2 for at in range(len(texts))))
        tasks.append(ClassificationTask(name=f"t{number}", labels=("x", "y"), train=rows, dev=rows, test=rows))
    return Stream(name="s", tasks=tuple(tasks), order=tuple(range(len(tasks))), seed=0)


def answered(*counts: int, words: int = 1) -> Stream:
    """A task of prompts with so many words, and answers of others."""
    pairs = TextPairs(
        inputs=tuple(" ".join(["the"] * count) for count in counts), targets=((" ".join(["a"] * words),),) * len(counts)
    )
    task = TextTask(name="said", train=pairs, dev=pairs, test=pairs, metric="rouge-l")
    return Stream(name="s", tasks=(task,), order=(0,), seed=0)


def roomy() -> Loaded:
    """A model that takes 500 tokens, as far as anything says."""
    found = small_tasks.loaded()
    found.model.config.max_position_embeddings = 500
    found.model.embeddings.position_embeddings = type(found.model.embeddings.position_embeddings)(500, 16)
    return found


def test_a_fitted_length_leaves_room_for_prompts_and_says_so() -> None:
    """Prompts of l2p by default take 25 of the positions: every model of 64 was refused for texts that fill it."""
    with pytest.warns(
        UserWarning, match=r"^length: texts have 9 tokens at most, which 7 of prompts leave in this model"
    ):
        assert fit_length(classified([60] * 20), small_tasks.loaded(), 16, 7) == 16 - 7
    assert fit_length(classified([6] * 20), small_tasks.loaded(), 16, 8) == 8, "they fit as they are"
    assert fit_length(classified([60] * 20), small_tasks.loaded(), 16, 13) == 16, "of which the method says more"


@pytest.mark.parametrize(
    "counts, length",
    [
        ([[3] * 20], 8),
        ([[6] * 20], 8),
        ([[7] * 20], 16),
        ([[3] * 19 + [60]], 8),
        ([[3] * 18 + [60] * 2], 64),
        ([[3] * 100, [30] * 20], 32),
        ([[300] * 20], MAX_FITTED_LENGTH),
    ],
)
def test_a_length_holds_nineteen_of_twenty_texts_of_each_task(counts: list[list[int]], length: int) -> None:
    """With the two special tokens of a text, rounded up to a multiple of eight."""
    assert fit_length(classified(*counts), roomy(), 16) == length


def test_a_pair_is_as_long_as_both_of_its_texts() -> None:
    assert fit_length(classified([10] * 20, second="a cat sat on it"), roomy(), 16) == 24


def test_a_length_is_what_the_model_takes_at_most() -> None:
    assert fit_length(classified([60] * 20), small_tasks.loaded(), 16) == 16
    assert fit_length(answered(*[60] * 20), small_text_tasks.loaded("gpt2"), 5) == 40 - 5, "a decoder writes its answer"
    assert fit_length(answered(*[60] * 20), small_text_tasks.loaded("bart"), 5) == 40


def test_an_answer_leaves_room_for_a_prompt() -> None:
    """Of 40 tokens; with 40 of an answer prompts had no token, and the run went on with empty ones."""
    assert fit_length(answered(*[60] * 20), small_text_tasks.loaded("gpt2"), 36) == 4
    for length in (37, 40, 41, 10**12):
        with pytest.raises(UserError, match=f"target-length: expected at most 36 tokens, .* got {length}; give"):
            fit_length(answered(*[60] * 20), small_text_tasks.loaded("gpt2"), length)


def learner(stream: Stream, loaded: Loaded, **limits: int) -> Any:
    budget = replace(small_text_tasks.BUDGET, **limits)
    return make_learner(stream, METHODS["finetune"](), loaded, budget, seed=0)


def test_what_is_cut_is_counted_by_task() -> None:
    """Over all splits: two of four texts have five and three tokens too many; the other task loses none."""
    found = measure_truncation(learner(classified([3, 13, 11, 4], [2, 2]), small_tasks.loaded(), length=10))
    assert found == [
        {"option": "length", "task": "t0", "rows": 6, "num_rows": 12, "tokens": 24, "num_tokens": 117, "longest": 15},
        {"option": "length", "task": "t1", "rows": 0, "num_rows": 6, "tokens": 0, "num_tokens": 24, "longest": 4},
    ]
    assert measure_truncation(learner(classified([3, 3], [2, 8]), small_tasks.loaded(), length=10)) == []


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_prompts_and_answers_are_cut_apart(kind: small_text_tasks.Kind) -> None:
    """An answer has its end, and T5's prompt one as well."""
    loaded = small_text_tasks.loaded(kind)
    (found,) = measure_truncation(learner(answered(4, 4, words=6), loaded, length=10, target_length=5))
    assert found == {
        **{"option": "target_length", "task": "said", "rows": 6, "num_rows": 6},
        **{"tokens": 12, "num_tokens": 42, "longest": 7},
    }
    (found,) = measure_truncation(learner(answered(4, 14), loaded, length=10, target_length=5))
    assert (found["option"], found["rows"], found["tokens"]) == ("length", 3, 3 * (4 + (kind == "t5")))
