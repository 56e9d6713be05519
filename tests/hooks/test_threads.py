"""Models with replaced heads that several threads call at once, as those of a server do."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pandas.testing import assert_frame_equal
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard.hooks.by_thread import ByThread

LENGTH = 12
ONES = [1] * LENGTH
PADDED = [0] * 5 + [1] * (LENGTH - 5)


def make_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 40, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).eval()


def make_constants(model: Any) -> Any:
    return regard.average_attention(model, [torch.randint(2, 40, (6, LENGTH))], length=LENGTH)


REPLACED: dict[str, Callable[[Any], Any]] = {
    "constants": lambda model: regard.replaced(model, make_constants(model)),
    "half": lambda model: regard.replaced(model, make_constants(model), heads=0.5),
    "window": lambda model: regard.replaced(model, "softmax+window=3+prefix=2"),
}


def call_amid(model: Any, amid: Callable[[], Any], first: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what `first` computes in another thread, and `amid` here while that is between the model's two blocks."""
    reached, go_on, found = threading.Event(), threading.Event(), []

    def wait(*_arguments: Any) -> None:
        if threading.current_thread() is thread and not reached.is_set():
            reached.set()
            go_on.wait(60)

    def run() -> None:
        try:
            found.append(first())
        finally:
            reached.set()

    thread = threading.Thread(target=run)
    handle = model.model.layers[1].register_forward_pre_hook(wait)
    try:
        thread.start()
        assert reached.wait(60)
        here = amid()
    finally:
        go_on.set()
        thread.join(60)
        handle.remove()
    return found[0], here


@torch.no_grad()
@pytest.mark.parametrize("name", REPLACED)
@pytest.mark.parametrize("lengths", [(LENGTH, LENGTH), (LENGTH, 7)])
def test_a_forward_amid_another_of_another_thread_changes_neither(name: str, lengths: tuple[int, int]) -> None:
    model = REPLACED[name](make_model())
    inputs = [
        {"input_ids": torch.randint(2, 40, (2, length)), "attention_mask": torch.tensor([ONES, mask])[:, -length:]}
        for length, mask in zip(lengths, (PADDED, ONES), strict=True)
    ]
    alone = [model(**one).logits for one in inputs]
    padded, whole = call_amid(model, lambda: model(**inputs[1]).logits, lambda: model(**inputs[0]).logits)
    real = inputs[0]["attention_mask"].bool()
    torch.testing.assert_close(padded[real], alone[0][real])
    torch.testing.assert_close(whole, alone[1])


@torch.no_grad()
@pytest.mark.parametrize("name", REPLACED)
def test_tokens_are_generated_in_two_threads_at_once(name: str) -> None:
    model = REPLACED[name](make_model())

    def generate(ids: Tensor) -> Any:
        options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
        return model.generate(ids, **options).tolist()

    prompts = [torch.randint(2, 40, (1, length)) for length in (6, 4)]
    alone = [generate(prompt) for prompt in prompts]
    assert call_amid(model, lambda: generate(prompts[1]), lambda: generate(prompts[0])) == (alone[0], alone[1])


@torch.no_grad()
def test_operations_of_heads_keep_the_forwards_of_threads_apart() -> None:
    model = make_model()
    padded = {"input_ids": torch.randint(2, 40, (2, LENGTH)), "attention_mask": torch.tensor([ONES, PADDED])}
    whole = torch.randint(2, 40, (2, LENGTH))
    with regard.replacing(model, torch.rand(LENGTH, LENGTH), heads={(0, 1), (1, 2)}):
        expected = model(**padded).logits, model(whole).logits
        found = call_amid(model, lambda: model(whole).logits, lambda: model(**padded).logits)
    real = padded["attention_mask"].bool()
    torch.testing.assert_close(found[0][real], expected[0][real])
    torch.testing.assert_close(found[1], expected[1])


@torch.no_grad()
def test_an_observed_forward_waits_for_that_of_another_thread() -> None:
    model, started = make_model(), threading.Event()
    padded = {"input_ids": torch.randint(2, 40, (2, LENGTH)), "attention_mask": torch.tensor([ONES, PADDED])}
    whole = torch.randint(2, 40, (3, 7))
    with regard.watching(model, ["first_mass", "hidden_norm"]) as expected:
        model(**padded)
        model(whole)
    second: list[threading.Thread] = []

    def run() -> None:
        started.set()
        with torch.no_grad():
            model(whole)

    def begin_second() -> None:
        second.append(threading.Thread(target=run))
        second[0].start()
        assert started.wait(60)
        second[0].join(0.3)  # it would be done by then, if it did not wait

    with regard.watching(model, ["first_mass", "hidden_norm"]) as watch:
        call_amid(model, begin_second, lambda: model(**padded))
        second[0].join(60)
    assert watch.samples == 5
    assert_frame_equal(watch.frame(), expected.frame())


@torch.no_grad()
def test_a_forward_that_fails_lets_others_go_on() -> None:
    model, ids = make_model(), torch.randint(2, 40, (2, LENGTH))
    failures: list[Exception] = []

    def fail() -> None:
        try:
            model(ids + 100)  # beyond the vocabulary
        except IndexError as error:
            failures.append(error)

    with regard.watching(model, ["first_mass"]) as watch:
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join(60)
        model(ids)
    assert len(failures) == 1
    assert watch.samples == 2


def test_a_thread_that_has_begun_no_forward_is_in_the_latest() -> None:
    state, seen = ByThread(0), []
    state.begin(1)

    def run() -> None:
        seen.append(state.state)  # as of a backward pass, which a GPU computes in threads of its own
        state.begin(2)
        seen.append(state.state)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert (seen, state.state) == ([1, 2], 1)


def test_copies_have_forwards_of_their_own() -> None:
    state = ByThread([0])
    state.begin([1])
    for copied in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):  # noqa: S301 - ours
        copied.begin([2])
        assert state.state == [1]
