"""The bar of a notebook."""

import inspect
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import regard
from regard.runs.progress import OnProgress, ProgressEvent, shown_in_notebook


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the shell of IPython: that of a kernel has one."""

    def start(**shell: Any) -> None:
        fake = SimpleNamespace(get_ipython=lambda: SimpleNamespace(config={}, **shell))
        monkeypatch.setitem(sys.modules, "IPython", fake)  # type: ignore[arg-type]

    return start


@shown_in_notebook()
def count(number: int, *, on_progress: OnProgress | None = None) -> int:
    for step in range(1, number + 1):
        if on_progress is not None:
            on_progress(ProgressEvent(phase="counting", step=step, steps=number, note="a note"))
    return number


@shown_in_notebook(lambda show: lambda name: show(ProgressEvent(phase=name)))
def greet(*, on_progress: Callable[[str], None] | None = None) -> None:
    if on_progress is not None:
        on_progress("hello")


def test_a_notebook_gets_a_bar_and_each_note_once(
    notebook: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook(kernel=object())
    assert count(3) == 3
    shown = capsys.readouterr()
    assert "counting" in shown.err
    assert "3/3" in shown.err
    assert (shown.out + shown.err).count("a note") == 1


@shown_in_notebook()
def count_then_end(*, on_progress: OnProgress | None = None) -> None:
    if on_progress is not None:
        on_progress(ProgressEvent(phase="counting", step=4, steps=4))
        on_progress(ProgressEvent(phase="ending"))


def test_a_part_without_a_count_does_not_keep_that_of_the_part_before(
    notebook: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook(kernel=object())
    count_then_end()
    assert "0/?" in capsys.readouterr().err.rpartition("ending")[2]


def test_events_of_a_commands_own_are_adapted(
    notebook: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook(kernel=object())
    greet()
    assert "hello" in capsys.readouterr().err


@pytest.mark.parametrize("shell", [None, {}])
def test_elsewhere_nothing_is_shown(
    shell: dict[str, Any] | None, notebook: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    if shell is not None:  # IPython in a terminal
        notebook(**shell)
    assert count(3) == 3
    assert capsys.readouterr() == ("", "")


def test_a_callback_of_ones_own_stays(notebook: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    notebook(kernel=object())
    seen: list[ProgressEvent] = []
    count(2, on_progress=seen.append)
    assert [event.step for event in seen] == [1, 2]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["measure", "replace", "pretrain", "learn", "sweep"])
def test_every_verb_shows_its_progress_and_completes_its_options(name: str) -> None:
    verb = getattr(regard, name)
    plain = inspect.unwrap(verb)
    assert plain is not verb
    assert plain.__globals__["shown_in_notebook"] is shown_in_notebook
    assert "on_progress" in inspect.signature(verb).parameters
    assert inspect.signature(verb) == inspect.signature(plain)
    assert verb.__doc__ == plain.__doc__
    assert name in dir(regard)
