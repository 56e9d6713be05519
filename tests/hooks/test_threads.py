"""Models with replaced heads that several threads call at once, as those of a server do."""

import copy
import pickle
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from pandas.testing import assert_frame_equal
from torch import Tensor
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

import regard
from regard.errors import UserError
from regard.hooks.by_thread import ByThread
from regard.hooks.intercepted import _RUNNING
from regard.hooks.one_at_a_time import OneAtATime

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


@pytest.mark.exhaustive
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


@torch.no_grad()
def test_a_forward_that_was_under_way_before_the_block_is_not_shown() -> None:
    model, ids = make_model(), torch.randint(2, 40, (2, LENGTH))
    statistics = ["first_mass", "hidden_norm", "head_output_norm"]
    with regard.watching(model, statistics) as expected:
        model(ids)

    def watch_here() -> Any:
        with regard.watching(model, statistics) as watch:
            model(ids)
        return watch

    _, watch = call_amid(model, watch_here, lambda: model(torch.randint(2, 40, (3, 7))))
    assert watch.samples == 2
    assert_frame_equal(watch.frame(), expected.frame())


@torch.no_grad()
def test_constants_are_averages_of_the_forwards_of_one_thread() -> None:
    """Averaging and finding the layers each run forwards, amid which another thread runs its own."""
    model, ids, others = make_model(), torch.randint(2, 40, (2, LENGTH)), torch.randint(2, 40, (3, LENGTH))
    expected = regard.average_attention(model, [ids], length=LENGTH)
    main, done = threading.current_thread(), []

    def run() -> None:
        with torch.no_grad():
            done.append(model(others))

    def call_other(*_arguments: Any) -> None:
        if threading.current_thread() is main:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join(60)

    handle = model.model.layers[1].register_forward_pre_hook(call_other)
    found = regard.average_attention(model, [ids], length=LENGTH)
    handle.remove()
    assert len(done) >= 2
    assert found.counts["decoder"].equal(expected.counts["decoder"])
    for key, matrix in expected.matrices.items():
        torch.testing.assert_close(found.matrices[key], matrix)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_threads_go_on_while_blocks_begin_and_end(name: str) -> None:
    """BLOOM's products are intercepted, by a mode of each thread, which must be off behind a forward."""
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(hidden_size=16, vocab_size=40, n_layer=2, n_head=4)).eval()
    model, ids, whole = make_model() if name == "llama" else bloom, torch.randint(2, 40, (2, LENGTH)), threading.Event()
    failures: list[BaseException] = []
    with torch.no_grad():
        expected = model(ids).logits

    def run() -> None:
        try:
            while not whole.is_set():
                with torch.no_grad():
                    torch.testing.assert_close(model(ids).logits, expected)
            assert not _RUNNING.modules
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    watches = []
    for _ in range(4):
        with regard.watching(model, ["first_mass"], verify=False) as watch, torch.no_grad():
            model(ids)
        watches.append(watch)
    whole.set()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert all(watch.samples % 2 == 0 and watch.samples >= 2 for watch in watches)


def call_in_thread(function: Callable[[], Any]) -> bool:
    """Return whether another thread comes to the end of a function."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    thread.join(60)
    return not thread.is_alive()


def test_a_forward_that_waited_for_the_end_of_a_block_keeps_nobody_out() -> None:
    module, before, seen = torch.nn.Linear(2, 2), threading.Event(), list[bool]()
    turns = OneAtATime([module])
    with ExitStack() as stack:
        register_end = turns.register([module], stack)
        register_end()
        module.register_forward_pre_hook(lambda *_: before.set(), prepend=True)
        module.register_forward_pre_hook(lambda *_: seen.append(turns.is_mine))
        turns.end_block()
        thread = threading.Thread(target=module, args=(torch.zeros(2),), daemon=True)
        thread.start()
        assert before.wait(60)
    turns.let_go()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [False]
    assert call_in_thread(turns.__enter__)


def test_blocks_that_overlap_on_a_module_share_one_lock() -> None:
    """With two, a thread that holds one would wait for the other, which waits for it."""
    whole, part, other = (torch.nn.Linear(1, 1) for _ in range(3))
    turns = [OneAtATime(modules) for modules in ([whole, part], [part], [other])]
    assert turns[0]._lock is turns[1]._lock
    assert turns[0]._lock is not turns[2]._lock


@torch.no_grad()
def test_a_forward_that_was_interrupted_lets_others_go_on_behind_the_block() -> None:
    model, ids = make_model(), torch.randint(2, 40, (2, LENGTH))

    def interrupt(*_arguments: Any) -> None:
        raise KeyboardInterrupt

    with regard.watching(model, ["first_mass"]) as watch:
        handle = model.model.layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids)
        handle.remove()
        model(ids)
        turns = watch.turns
    assert watch.samples == 2
    assert call_in_thread(turns.__enter__)


def test_copies_for_several_devices_are_refused() -> None:
    """`DataParallel` calls them in threads for which it waits."""
    model = make_model()
    with regard.watching(model, ["first_mass"]), pytest.raises(UserError, match="observe a model inside DataParallel"):
        model._replicate_for_data_parallel()(torch.zeros(1, 2, dtype=torch.long))


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


@pytest.mark.parametrize("name", ["begins", "fails"])
def test_a_forward_that_comes_while_a_block_begins_keeps_nobody_out(name: str, monkeypatch: Any) -> None:
    """Its hook behind the forward may not be there yet, or no longer: it would never leave."""
    model, ids, register = make_model(), torch.randint(2, 40, (2, LENGTH)), OneAtATime.register
    thread, keeps_out = threading.Thread(target=model, args=(ids,), daemon=True), list[bool]()

    def register_amid(turns: OneAtATime, *arguments: Any) -> Callable[[], None]:
        register_end = register(turns, *arguments)
        keeps_out.append(turns._lock.is_mine)
        thread.start()
        thread.join(0.2)  # it waits for the block
        if name == "fails":
            raise RuntimeError("the block does not begin")
        return register_end

    def watch() -> None:
        with suppress(RuntimeError), regard.watching(model, ["first_mass"], verify=False):
            pass

    with monkeypatch.context() as patches:
        patches.setattr(OneAtATime, "register", register_amid)
        assert call_in_thread(watch)
    thread.join(60)
    assert not thread.is_alive()
    assert keeps_out == [True]
    assert call_in_thread(watch)


@torch.no_grad()
def test_small_forwards_of_a_refused_thread_are_not_in_the_block_of_another(monkeypatch: Any) -> None:
    model, errors = make_model(), list[UserError]()
    monkeypatch.setattr("regard.hooks.fidelity._key", lambda _model: "of a thread that comes just before the block")

    def watch() -> None:
        try:
            with regard.watching(model, ["first_mass"]):
                pass
        except UserError as error:
            errors.append(error)

    with regard.watching(model, ["first_mass"], verify=False) as seen:
        model(torch.randint(2, 40, (2, LENGTH)))
        assert call_in_thread(watch)
    assert "another thread is inside" in str(errors[0])
    assert seen.samples == 2
