"""A model with adapters that several threads call at once, as those of a server do."""

import copy
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertLMHeadModel, BertModel, EncoderDecoderModel

import regard
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from regard.hooks import one_at_a_time
from tests.adapters.model_families import filled

OPTIONS: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
CALLS: dict[str, Callable[[SharedAdapters, dict[str, Tensor]], Tensor]] = {
    "forward": lambda adapters, given: adapters(**given).logits,
    "model": lambda adapters, given: adapters.model(**given).logits,
    "generate": lambda adapters, given: adapters.generate(**given, **OPTIONS, return_dict_in_generate=True).sequences,
    "weights": lambda adapters, given: adapters.routing_weights(**given),
}


def some_rows(seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    ids = torch.randint(3, 40, (2, 6 + 3 * seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_adapters(kind: str) -> SharedAdapters:
    adapters = filled("llama", router="discriminant", query="states")
    for index, name in enumerate(adapters.adapter_names):
        adapters.fit_router(name, [some_rows(index)])
    adapters.freeze()
    return copy.deepcopy(adapters).eval() if kind == "copy" else adapters.eval()


def run_second_amid_first(threads: list[threading.Thread], reached: threading.Event, go_on: threading.Event) -> None:
    """Start the second thread while the first, which sets `reached`, waits inside a call; and wait for both."""
    threads[0].start()
    assert reached.wait(60)
    threads[1].start()
    threads[1].join(0.1)
    go_on.set()
    for thread in threads:
        thread.join(60)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["discriminant", "copy"])
@pytest.mark.parametrize("name", CALLS)
def test_calls_of_two_threads_are_as_if_alone(kind: str, name: str) -> None:
    adapters = make_adapters(kind)
    given, call, found = [some_rows(0), some_rows(1)], CALLS[name], dict[int, Tensor]()
    alone = [call(adapters, one) for one in given]
    reached, go_on = threading.Event(), threading.Event()

    def wait(*_arguments: Any) -> None:
        if threading.current_thread() is threads[0] and not reached.is_set():
            reached.set()
            go_on.wait(60)

    @torch.no_grad()
    def run(number: int) -> None:
        found[number] = call(adapters, given[number])

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(2)]
    adapters.model.model.layers[0].register_forward_pre_hook(wait)
    run_second_amid_first(threads, reached, go_on)
    torch.testing.assert_close([found[0], found[1]], alone)


@torch.no_grad()
def test_weights_are_chosen_in_one_thread_at_a_time() -> None:
    """They hold for all threads: a streamer's thread generates with those that were chosen outside of it."""
    adapters, errors, found = filled("llama"), list[UserError](), list[Tensor]()
    given = some_rows(0)

    def choose() -> None:
        found.append(adapters(**given).logits)
        try:
            with adapters.use_only("task1"):
                pass
        except UserError as error:
            errors.append(error)

    with adapters.use_only("task0"):
        expected = adapters(**given).logits
        thread = threading.Thread(target=choose, daemon=True)
        thread.start()
        thread.join(60)
    assert torch.equal(found[0], expected)
    assert "one thread at a time" in str(errors[0])
    choose()
    assert len(errors) == 1
    assert not torch.equal(found[1], expected)


def test_an_interrupted_call_lets_other_threads_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_at_a_time, "PATIENCE", 0.01)
    adapters, given, found = filled("llama"), some_rows(0), list[Any]()
    layer = adapters.model.model.layers[1]

    def interrupt(*_arguments: Any) -> None:
        handle.remove()
        raise KeyboardInterrupt

    for call in (adapters, partial(adapters.generate, **OPTIONS), adapters.model):
        handle = layer.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(**given)
        thread = threading.Thread(target=lambda: found.append(adapters(**given)), daemon=True)
        thread.start()
        thread.join(60)
        assert torch.equal(found.pop().logits, adapters(**given).logits)


def test_what_a_backward_pass_computes_again_waits_for_calls_of_other_threads() -> None:
    adapters = make_adapters("discriminant").train()
    model = adapters.model
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    adapters.pool.set_trainable(0)
    trained = list(adapters.pool.parameters_of(0))
    given, is_paused, go_on = some_rows(0), threading.Event(), threading.Event()
    found, found_beside = list[Tensor](), list[Tensor]()  # the call may end between two layers of the backward pass

    def gradients(*, pauses: bool = False) -> list[Tensor]:
        loss = adapters(**given).logits.square().sum()

        def wait(*_arguments: Any) -> None:
            if not is_paused.is_set():
                is_paused.set()
                go_on.wait(60)

        handle = model.model.layers[0].mlp.register_forward_pre_hook(wait) if pauses else None
        try:
            return list(torch.autograd.grad(loss, trained))
        finally:
            if handle is not None:
                handle.remove()

    expected = [*gradients(), adapters(**some_rows(1)).logits.detach()]
    backward = threading.Thread(target=lambda: found.extend(gradients(pauses=True)), daemon=True)
    other = threading.Thread(target=lambda: found_beside.append(adapters(**some_rows(1)).logits.detach()), daemon=True)
    backward.start()
    assert is_paused.wait(60)
    other.start()
    other.join(0.1)
    go_on.set()
    backward.join(60)
    other.join(60)
    torch.testing.assert_close([*found, *found_beside], expected)


@torch.no_grad()
def test_a_watch_of_a_model_with_two_pools_lets_threads_call_its_parts() -> None:
    """Of two locks one thread took the second, and waited for the first, whose thread waited for the second."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(**sizes, vocab_size=40, is_decoder=True, add_cross_attention=True)
    encoder = BertModel(BertConfig(**sizes, vocab_size=40), add_pooling_layer=False)
    model = EncoderDecoderModel(encoder=encoder, decoder=BertLMHeadModel(config)).eval()
    pools = [SharedAdapters(part, router="discriminant", query="states") for part in (model.encoder, model.decoder)]
    for pool in pools:
        for seed, name in enumerate(("task0", "task1")):
            pool.add_adapter(name)
            pool.fit_router(name, [some_rows(seed)])
        pool.freeze()
    given, reached, go_on = some_rows(0), threading.Event(), threading.Event()
    call = partial(model, **given, decoder_input_ids=given["input_ids"])
    calls = (lambda: call().logits, lambda: pools[1].routing_weights(**given))
    expected, found = {index: one() for index, one in enumerate(calls)}, dict[int, Tensor]()

    def wait(*_arguments: Any) -> None:
        if threading.current_thread() is threads[0]:
            reached.set()
            go_on.wait(60)

    def run(index: int) -> None:
        found[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(calls))]
    with regard.watching(model, ["key_norm"]):
        model.encoder.encoder.layer[0].register_forward_pre_hook(wait)
        run_second_amid_first(threads, reached, go_on)
    torch.testing.assert_close(dict(sorted(found.items())), expected)


def test_a_removed_pool_keeps_nobody_out() -> None:
    adapters, given = filled("llama"), some_rows(0)
    model = adapters.unload()
    for _ in range(2):
        thread = threading.Thread(target=model, kwargs=given, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


class Cancelled(BaseException):
    """What ends a thread inside a forward; hooks behind the forward are left out."""


@torch.no_grad()
def test_a_thread_that_ended_inside_a_call_keeps_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_at_a_time, "PATIENCE", 0.01)
    adapters, given, found = filled("llama"), some_rows(0), list[Any]()

    def cancel(*_arguments: Any) -> None:
        handle.remove()
        raise Cancelled

    def run() -> None:
        with suppress(Cancelled):
            adapters.model(**given)

    handle = adapters.model.model.layers[1].register_forward_pre_hook(cancel)
    ended = threading.Thread(target=run, daemon=True)
    ended.start()
    ended.join(60)
    thread = threading.Thread(target=lambda: found.append(adapters.model(**given).logits), daemon=True)
    thread.start()
    thread.join(60)
    torch.testing.assert_close(found[0], adapters.model(**given).logits)  # a thread has gradients


@torch.no_grad()
def test_threads_that_waited_to_choose_weights_do_so_one_at_a_time() -> None:
    """Both came while a call of another thread was under way: the second one knew nothing of the first one's choice."""
    adapters, given, names = filled("llama"), some_rows(0), ("task0", "task1")
    alone, found = dict[str, Tensor](), dict[str, Any]()
    for name in names:
        with adapters.use_only(name):
            alone[name] = adapters(**given).logits
    reached, go_on, over = threading.Event(), threading.Event(), threading.Barrier(2)

    def wait(*_arguments: Any) -> None:
        if threading.current_thread() is first:
            reached.set()
            go_on.wait(60)

    @torch.no_grad()
    def choose(name: str) -> None:
        try:
            with adapters.use_only(name):
                over.wait(60)
                found[name] = adapters(**given).logits
        except UserError as error:
            found[name] = error
            over.wait(60)

    first = threading.Thread(target=adapters, kwargs=given, daemon=True)
    adapters.model.model.layers[0].register_forward_pre_hook(wait)
    first.start()
    assert reached.wait(60)
    threads = [threading.Thread(target=choose, args=(name,), daemon=True) for name in names]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    go_on.set()
    for thread in threads:
        thread.join(60)
    chosen = [name for name in names if isinstance(found[name], Tensor)]
    assert len(chosen) == 1
    assert torch.equal(found[chosen[0]], alone[chosen[0]])
