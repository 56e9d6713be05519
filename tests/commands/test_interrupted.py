"""A run that is interrupted ends with code 2 and one line, and leaves nothing half-written."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands.sweep.sweeping import until
from tests.processes import started

# Stops, saying so, at a place in the middle; whoever runs the tests may have SIGINT ignored, which is inherited.
STOPPING = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
import regard.commands.measure.result, regard.runs.command_line
from contextlib import contextmanager

def stop(*_):
    open("there", "x").close()
    time.sleep(300)

@contextmanager
def stopping_after_a_batch():
    yield stop

if sys.argv[1] == "measuring":
    regard.runs.command_line.show_progress = stopping_after_a_batch
else:
    regard.commands.measure.result.measure_page = stop
from regard.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("place,number", [("measuring", signal.SIGINT), ("writing", signal.SIGTERM)])
def test_an_interrupted_run(
    place: str,
    number: signal.Signals,
    tiny: Callable[[str], Path],
    text_file: Path,
    environment: dict[str, str],
    tmp_path: Path,
) -> None:
    arguments = ["measure", str(tiny("llama")), "--text", str(text_file), "--samples", "4", "--length", "16"]
    command = ["-c", STOPPING, place, *arguments, "--batch-size", "1", "--device", "cpu"]
    with started(command, environment, tmp_path) as process:
        until((tmp_path / "there").exists)
        half = [path.name for path in (tmp_path / "runs").iterdir()] if place == "writing" else []
        for _ in range(3):
            process.send_signal(number)
        ended = process.end()
    said = "regard measure: interrupted; nothing was written\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", said)
    assert [name[0] for name in half] == ([] if place == "measuring" else ["."])
    assert os.listdir(tmp_path) == ["there"]


SWALLOWING = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)
import regard.commands.measure.cli as measure

def run(args):
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except KeyboardInterrupt:
        pass
    raise ValueError("could not determine the shape")

measure.run = run
from regard.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_an_interruption_of_which_a_library_makes_another_error(environment: dict[str, str], tmp_path: Path) -> None:
    """As of safetensors, which was interrupted while it read a checkpoint: it ended in a traceback."""
    with started(["-c", SWALLOWING, "measure", "minilm"], environment, tmp_path) as process:
        ended = process.end()
    said = "regard: interrupted; what was kept before is kept\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", said)


@contextmanager
def handlers_put_back() -> Iterator[None]:
    """Put handlers of signals back, and let a test fail where it is interrupted, which would end all tests."""
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except KeyboardInterrupt:
        pytest.fail("interrupted")
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


# Is interrupted as the command line is imported.
IMPORTING = """
import runpy, signal, sys
number = signal.Signals[sys.argv.pop()]
signal.signal(signal.SIGTERM, signal.SIG_DFL)

class Interrupting:
    def find_spec(self, name, *_):
        if name == "regard.cli":
            signal.raise_signal(number)

sys.meta_path.insert(0, Interrupting())
runpy.run_module("regard", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_command_that_is_interrupted_before_it_begins(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    """It printed where in its imports it was."""
    with started(["-c", IMPORTING, name], environment, tmp_path) as process:
        ended = process.end()
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "regard: interrupted; nothing was written\n")


def test_a_command_that_is_interrupted_as_it_tunes_its_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback."""
    from regard import __main__
    from regard.runs import freed_memory

    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(freed_memory, "keep_freed_memory", interrupt)
    with handlers_put_back():
        assert __main__.main() == 2
    assert capsys.readouterr() == ("", "regard: interrupted; nothing was written\n")


def test_handlers_are_as_they_were(tmp_path: Path) -> None:
    from regard.cli import main

    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    assert main(["compare", str(tmp_path)]) == 2
    assert {name: signal.getsignal(name) for name in before} == before


def test_a_signal_that_is_ignored_stays_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As under nohup."""
    from regard.cli import main
    from regard.commands.compare import cli as compare

    seen: list[object] = []
    monkeypatch.setattr(compare, "run", lambda _: seen.extend(map(signal.getsignal, (signal.SIGHUP, signal.SIGTERM))))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["compare", str(tmp_path)]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen[0] == signal.SIG_IGN
    assert callable(seen[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_key_that_is_held_interrupts_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What the first one has begun to save is saved, and the command ends with its line; a later press counts again."""
    from regard import cli
    from regard.commands.compare import cli as compare

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(cli, "_ONE_PRESS", 60.0)
    saved: list[str] = []
    said: list[str] = []

    def run(_: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)
            saved.append("whole")
            if len(saved) == 2:
                monkeypatch.setattr(cli, "_ONE_PRESS", 0.0)
                signal.raise_signal(number)
                saved.append("not here")

    def say(line: str) -> None:
        if len(saved) == 1:
            signal.raise_signal(number)
        said.append(line)

    monkeypatch.setattr(compare, "run", run)
    monkeypatch.setattr(cli, "_print_error", say)
    try:
        assert [cli.main(["compare", str(tmp_path)]) for _ in range(2)] == [2, 2]
    finally:
        signal.signal(signal.SIGINT, before)
    assert saved == ["whole", "whole"]
    assert said == ["regard compare: interrupted; nothing was written"] * 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_has_ended_is_not_interrupted(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page was written, and the command ended in a traceback.

    Signals are ignored, which holds to the end of the process: Python takes handlers away before.
    """
    from regard import cli
    from regard.commands.compare import cli as compare

    monkeypatch.setattr(compare, "run", lambda _: None)
    monkeypatch.setattr("sys.argv", ["regard", "compare", "runs"])
    with handlers_put_back():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        assert cli.main() == 0
        assert signal.getsignal(number) == signal.SIG_IGN
        signal.raise_signal(number)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("has_run", [False, True])
def test_a_command_that_is_interrupted_at_its_edges(
    has_run: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its handlers were set, but nobody caught what they raise."""
    from regard import cli

    @contextmanager
    def interrupted(*, restore: bool) -> Iterator[None]:
        assert restore
        if not has_run:
            raise KeyboardInterrupt
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_interruptible", interrupted)
    monkeypatch.setattr(cli, "_run", lambda _: 3)
    assert cli.main(["compare", "runs"]) == (3 if has_run else 2)
    assert capsys.readouterr().err == ("" if has_run else "regard: interrupted; nothing was written\n")


def test_a_run_that_is_interrupted_as_it_is_summed_up(
    tiny: Callable[[str], Path],
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The folder was whole, and the command said that nothing was written."""
    from regard.cli import main

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("regard.runs.command_line.print_summary", interrupt)
    line = ["measure", str(tiny("llama")), "--text", str(text_file), "--samples", "2", "--length", "16"]
    assert main([*line, "--statistics", "entropy", "--device", "cpu", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"regard measure: interrupted after the run had ended: {tmp_path / 'run'} has all of it"
    assert (tmp_path / "run" / "results.json").is_file()
