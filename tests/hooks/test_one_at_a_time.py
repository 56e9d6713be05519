"""Locks of blocks on parts of one model, which several threads take, and processes that are forked meanwhile."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard.hooks import one_at_a_time
from regard.hooks.one_at_a_time import OneAtATime
from regard.hooks.patches import LOCK

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="a process of this system cannot be forked")


def parts(count: int) -> list[torch.nn.Module]:
    return [torch.nn.Linear(1, 1) for _ in range(count)]


def starts(call: Callable[[], Any]) -> threading.Thread:
    """Start a thread, and give it the time to come to what it waits for."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.1)
    return thread


def test_a_block_over_two_others_makes_one_lock_of_theirs_when_both_are_free() -> None:
    whole, first, second = parts(3)
    of_first, of_second, found = OneAtATime([first]), OneAtATime([second]), list[OneAtATime]()
    with of_second:
        thread = starts(lambda: found.append(OneAtATime([whole, first, second])))
        assert not found
    thread.join(60)
    with of_second:
        assert all(starts(one.__enter__).is_alive() for one in (of_first, *found))
    assert OneAtATime([second])._lock is OneAtATime([whole])._lock is of_first._lock


def test_who_waits_while_two_locks_become_one_takes_turns_with_all() -> None:
    whole, first, second = parts(3)
    of_first, of_second = OneAtATime([first]), OneAtATime([second])
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with of_second:
            is_held.set()
            go_on.wait(60)

    with of_second:
        joining = starts(lambda: OneAtATime([whole, first, second]))
        holding = starts(hold)
    joining.join(60)
    assert is_held.wait(60)
    assert starts(of_first.__enter__).is_alive()
    go_on.set()
    holding.join(60)
    assert not holding.is_alive()


def test_a_block_inside_two_others_of_its_thread_waits_for_nobody() -> None:
    first, second = parts(2)
    with OneAtATime([first]), OneAtATime([second]), OneAtATime([first, second]):
        pass


def test_a_block_inside_two_others_leaves_their_locks_to_become_one() -> None:
    first, second = parts(2)
    of_first, of_second = OneAtATime([first]), OneAtATime([second])
    with of_first, of_second, OneAtATime([first, second]):
        pass
    over_both = OneAtATime([first, second])
    assert over_both._lock.last() is of_first._lock.last() is of_second._lock.last()


def test_many_locks_that_took_the_place_of_others_are_passed_by_and_go() -> None:
    inner, *outer = parts(1501)
    lasting = OneAtATime([inner])
    for module in outer:
        before = OneAtATime([module])
        latest = OneAtATime([module, inner])
        assert latest._lock is before._lock
    first = one_at_a_time._LOCKS[outer[0]]
    assert first() is not None
    with lasting:
        assert lasting._lock.last() is latest._lock
    assert first() is None


def test_a_lock_is_not_given_to_threads_that_a_fork_has_ended() -> None:
    """Else the forked process waits for each of them in turn."""

    class Foreign(threading.Thread):
        def is_alive(self) -> bool:
            raise AssertionError

    lock, ended = one_at_a_time._Queue(), threading.Thread()
    turn = lock.acquire(is_block=True)
    for thread in (ended, Foreign()):
        gate = threading.Lock()
        gate.acquire()
        lock._waiting.append(one_at_a_time._Place(thread, gate, False))
    lock.release(turn, is_block=True)
    assert lock._owner is None
    assert not lock._waiting


@forks
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@torch.no_grad()
def test_a_forked_process_does_not_wait_for_the_forward_of_a_thread_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_at_a_time, "PATIENCE", 0.01)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "vocab_size": 40, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).eval()
    ids, reached, go_on = torch.randint(2, 40, (2, 6)), threading.Event(), threading.Event()
    here = threading.current_thread()

    def wait(*_arguments: Any) -> None:
        if threading.current_thread() is not here:
            reached.set()
            go_on.wait(60)

    model.model.layers[1].register_forward_pre_hook(wait)
    with regard.watching(model, ["first_mass"]):
        thread = threading.Thread(target=model, args=(ids,), daemon=True)
        thread.start()
        assert reached.wait(60)
        assert code_of_fork(lambda: model(ids)) == 0
        go_on.set()
        thread.join(60)


@forks
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_can_take_the_locks_that_another_thread_held_for_a_moment() -> None:
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK, one_at_a_time._GUARD:
            is_held.set()
            go_on.wait(0.1)

    def take() -> None:
        assert LOCK.acquire(timeout=10)
        assert one_at_a_time._GUARD.acquire(timeout=10)

    threading.Thread(target=hold, daemon=True).start()
    assert is_held.wait(60)
    assert code_of_fork(take) == 0


def code_of_fork(call: Callable[[], Any]) -> int:
    """Return the exit code of a forked process that makes a call."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(60)
            call()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
