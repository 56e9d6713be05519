"""Progress without a terminal: a line every interval, also while nothing is reported."""

import time
from io import StringIO

import pytest
from rich.console import Console

from regard.runs import progress
from regard.runs.progress import PlainProgress, ProgressEvent, show_progress


def test_a_log_gets_lines_while_nothing_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "PLAIN_INTERVAL", 0.02)
    with show_progress() as on_progress:
        until = time.monotonic() + 20
        lines: list[str] = []
        while not any("starting" in line for line in lines) and time.monotonic() < until:
            time.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
        on_progress(ProgressEvent(phase="averaging attention", step=3, steps=9))
        lines = []
        while not any("so far" in line and "averaging" in line for line in lines) and time.monotonic() < until:
            time.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
    assert any(line.startswith("averaging attention (3 of 9), 0:00:0") for line in lines)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""  # nothing after the end


def test_a_beat_says_nothing_shortly_after_a_line() -> None:
    lines: list[str] = []
    shown = PlainProgress(lines.append)
    shown(ProgressEvent(phase="training", milestone=True))
    shown.beat()
    assert lines == ["training"]


def test_names_with_line_breaks_are_shown_in_one_line() -> None:
    lines: list[str] = []
    shown = PlainProgress(lines.append)
    shown(ProgressEvent(phase="task 1 of 2, good\nnews\r\nof old, training", milestone=True))
    assert lines == ["task 1 of 2, good news of old, training"]


def test_names_with_brackets_are_shown_as_they_are() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with progress._bar(console) as show:
        show(ProgressEvent(phase="task [/b] of [red]", step=1, steps=2))
    assert "task [/b] of [red]" in file.getvalue()


def test_a_part_without_a_count_does_not_keep_that_of_the_part_before() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with progress._bar(console) as show:
        show(ProgressEvent(phase="scoring", step=4, steps=4))
        show(ProgressEvent(phase="timing"))
    assert "timing" in file.getvalue()
    assert "0/?" in file.getvalue().rpartition("timing")[2]
