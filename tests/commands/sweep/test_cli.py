"""`regard sweep`: what is read from the line, what is said, and with which code it ends."""

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from regard.cli import Parser
from regard.commands.sweep import cli as command
from regard.commands.sweep import run as sweeps
from regard.errors import UserError
from regard.runs.arguments import parse_config_options
from regard.runs.launchers import JobEvent
from tests.commands.sweep.sweeping import FAKE, counted, until

ROOT = Path(__file__).parents[3]


def summary(table: pd.DataFrame, record: dict[str, Any]) -> str:
    return f"{len(table)} rows, best {table['valid_loss'].min() if len(table) else None}"


@pytest.fixture
def regard_sweep(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[str, str]]:
    """`regard sweep fake …` in an empty folder: what it says on standard output and error; raises its UserError."""
    monkeypatch.setitem(sweeps.COMMANDS, "fake", lambda: FAKE)
    monkeypatch.setattr("regard.commands.sweep.terminal.sweep_summary", summary)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[str, str]:
        parser = Parser()
        command.add_arguments(parser)
        capfd.readouterr()
        command.run(parser.parse_args([*arguments]))
        return capfd.readouterr()

    return run


@pytest.mark.parametrize(
    "said,meant",
    [
        (["rate=0,0.5"], {"rate": [0.0, 0.5]}),
        (["rate=0, 0.5,0,0.0"], {"rate": [0.0, 0.5]}),
        (["name=softmax", "width=none,4", "name=elu,softmax"], {"name": ["softmax", "elu"], "width": [None, 4]}),
        (["--rate=1"], {"rate": [1.0]}),
    ],
)
def test_values_are_read_by_the_type_of_their_field(said: list[str], meant: dict[str, list[object]]) -> None:
    found = command.parse_vary(FAKE, said)
    assert found == meant
    assert [list(map(type, one)) for one in found.values()] == [list(map(type, one)) for one in meant.values()]


@pytest.mark.parametrize(
    "said,complaint",
    [
        ("rate", "expected FIELD=VALUE,VALUE, got 'rate'"),
        ("colour=red", "no field colour; allowed are deaf, failures"),
        ("seed=1,2", "seeds are given by --seeds"),
        ("rate=1,,2", "expected values with commas between them for rate, got '1,,2'"),
        ("rate=", "expected values with commas between them for rate"),
        ("rate=fast", "expected a number, got 'fast'"),
    ],
)
def test_values_that_cannot_be(said: str, complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        command.parse_vary(FAKE, [said])


@pytest.mark.parametrize("said,meant", [("3", [3]), ("0,7", [0, 7]), ("7, 9", [7, 9])])
def test_seeds(said: str, meant: object) -> None:
    assert command.parse_seeds(said) == meant


def test_seeds_that_are_none() -> None:
    with pytest.raises(UserError, match="--seeds: expected a number, got 'few'"):
        command.parse_seeds("few")


def test_a_sweep_from_the_line(regard_sweep: Callable[..., tuple[str, str]], tmp_path: Path) -> None:
    options = ["high", "--vary", "name=softmax,elu", "--seeds", "0,2", "--width", "4", "--workers", "2", "--out", "o"]
    out, err = regard_sweep("fake", *options)
    assert out.splitlines()[0] == "4 rows, best 2.0"
    assert out.splitlines()[-1] == "Written to o: report.html, sweep.json, trials, trials.parquet"
    assert err == ""
    record = json.loads((tmp_path / "o" / "sweep.json").read_text())
    assert record["command_line"] == "regard sweep fake " + " ".join(options)
    assert (record["settings"]["rate"], record["settings"]["width"], record["seeds"]) == (2.0, 4, [0, 2])


def test_options_of_the_verb_reach_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    asked = command.make_parser(FAKE).parse_args(["--vary", "rate=1", "--out", "o", "--store", "x", "--no-deaf"])
    assert command.folder_arguments(FAKE, asked) == ["--store", str(tmp_path / "x")]
    assert parse_config_options(asked, FAKE.config) == {"deaf": False}


@pytest.mark.parametrize(
    "arguments,complaint",
    [
        (["paint"], "sweep: expected one of pretrain, learn, fake, got 'paint'"),
        (["fake", "--out", "o"], "--vary; see regard sweep fake --help"),
        (["fake", "--vary", "rate=1"], "--out; see regard sweep fake --help"),
        (["fake", "--vary", "rate=1", "--out", "o", "--colour=red"], "unrecognized arguments: --colour=red; see"),
        (
            ["fake", "--vary", "rate=1", "--out", "o", "--worker", "2"],
            r"unrecognized arguments: --worker \(did you mean --workers\?\); see regard sweep fake --help",
        ),
        (["fake", "--vary", "raet=1", "--out", "o"], r"no field raet, did you mean 'rate'\?; allowed are deaf,"),
        (["fake", "--vary", "rate=1", "--out", "o", "--rate", "2"], "rate is also given as an option"),
        (["fake", "low", "--config", "f", "--vary", "name=elu", "--out", "o"], "got both 'low' and f"),
        (["fake", "--vary", "rate=1", "--out", "o", "--launcher", "slurm"], "expected one of local, ray"),
        (
            ["fake", "--vary", "rate=1", "--out", "o", "--seeds", "1", "--num-seeds", "2"],
            "none beside --seeds",
        ),
        (["fake", "--vary", "rate=1", "--out", "o", "--address", "auto"], "local trials need none"),
        (
            ["fake", "--vary", "rate=1, name=elu", "--out", "o"],
            "expected a space before each field, as --vary rate=… name=…, .* got 'rate=1, name=elu'",
        ),
    ],
)
def test_lines_that_are_refused(
    arguments: list[str], complaint: str, regard_sweep: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=complaint):
        regard_sweep(*arguments)
    assert os.listdir(tmp_path) == []


@pytest.mark.exhaustive
def test_failed_trials_are_named_and_the_others_compared(
    regard_sweep: Callable[..., tuple[str, str]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(UserError) as raised:
        regard_sweep("fake", "--vary", "failures=0,9", "--num-seeds", "1", "--retries", "1", "--out", "o")
    assert str(raised.value) == "1 trial failed: failures=9 seed=0 (the disk is full); the same command tries again"
    out, err = capfd.readouterr()
    assert out.startswith("1 rows, best 0.0\n")
    assert [line.partition("] ")[2] for line in err.splitlines()] == [
        "failures=9 seed=0: failed, tried again (the disk is full)",
        "failures=9 seed=0: failed (the disk is full)",
    ]
    assert (tmp_path / "o" / "report.html").exists()


@pytest.mark.exhaustive
def test_many_failures_are_counted(regard_sweep: Callable[..., tuple[str, str]]) -> None:
    options = ("--num-seeds", "7", "--retries", "0", "--workers", "1", "--out", "o")
    with pytest.raises(UserError, match=r"^7 trials failed: .*seed=4 and 2 more \(the disk is full\); the same"):
        regard_sweep("fake", "--vary", "failures=9", *options)


def test_each_finished_trial_is_told_on_a_terminal(
    regard_sweep: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    _, err = regard_sweep("fake", "--vary", "rate=1,2", "--num-seeds", "1", "--workers", "1", "--out", "o")
    assert [line.partition(":")[0] for line in err.splitlines()] == ["[1/2] rate=1.0 seed=0", "[2/2] rate=2.0 seed=0"]


def test_help_lists_the_settings_of_a_verb(
    regard_sweep: Callable[..., tuple[str, str]], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        regard_sweep("fake", "--help")
    assert {"--vary", "--width", "--store"} <= set(capfd.readouterr().out.replace(",", " ").split())


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from regard import cli
from regard.commands.sweep import cli as sweep, run as sweeps
from tests.commands.sweep.sweeping import FAKE
sweeps.COMMANDS["fake"] = lambda: FAKE
cli.COMMANDS["sweep"] = sweep
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.exhaustive
def test_an_interrupted_sweep_says_how_to_go_on(environment: dict[str, str], tmp_path: Path) -> None:
    arguments = ["sweep", "fake", "--vary", "rate=1", "--gate", "never", "--num-seeds", "1", "--out", "o"]
    environment = {**environment, "PYTHONPATH": f"{environment['PYTHONPATH']}:{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *arguments],
        env=environment,
        cwd=tmp_path,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    until(lambda: len(counted(tmp_path / "o", "begun")) == 1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (2, "")
    assert err == "regard sweep: interrupted; what is done is kept in o: the same command goes on\n"


def test_what_a_sweep_of_pretraining_needs_is_what_its_command_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options that each trial is begun with, and a setting for each field of a recipe."""
    from regard.commands.pretrain import cli as pretrain
    from regard.commands.pretrain.config import PretrainConfig

    verb = sweeps.COMMANDS["pretrain"]()
    parser = argparse.ArgumentParser()
    pretrain.add_arguments(parser)
    arguments = verb.arguments(Path("settings.json"), Path("folder"))
    assert arguments[:3] == ["-m", "regard", "pretrain"]
    given = parser.parse_args([*arguments[3:], "--cache", "c"])
    assert (given.config, given.out) == (Path("settings.json"), Path("folder"))
    assert (given.resume, given.overwrite) == (True, True)
    assert set(verb.config.field_names()) == set(PretrainConfig.field_names())
    line = ["pico", "--vary", "attention=softmax,sigmoid", "--out", "o", "--data", "a.txt", "b.txt"]
    asked = command.make_parser(verb).parse_args([*line, "--tie-word-embeddings"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"there is no a\.txt"):
        verb.complete(verb.initial_fields(asked.name, None, parse_config_options(asked, verb.config)))
    for name in ("a.txt", "b.txt"):
        Path(name).touch()
    whole = verb.complete(verb.initial_fields(asked.name, None, parse_config_options(asked, verb.config)))
    assert (whole["data"], whole["tie_word_embeddings"], whole["hidden_size"]) == (["a.txt", "b.txt"], True, 64)


def test_the_vocabulary_of_a_preset_is_that_of_its_own_tokenizer() -> None:
    verb = sweeps.COMMANDS["pretrain"]()
    sizes = [
        verb.initial_fields("pico", None, given)["vocab_size"]
        for given in ({}, {"tokenizer": "folder"}, {"tokenizer": "folder", "vocab_size": 300})
    ]
    assert sizes == [1024, None, 300]


def test_what_a_sweep_of_learning_needs_is_what_its_command_has() -> None:
    """The options that each trial is begun with, and a setting for each field of a course."""
    from regard.commands.learn import cli as learn
    from regard.commands.learn.config import LearnConfig

    verb = sweeps.COMMANDS["learn"]()
    parser = argparse.ArgumentParser()
    learn.add_arguments(parser)
    arguments = verb.arguments(Path("settings.json"), Path("folder"))
    assert arguments[:3] == ["-m", "regard", "learn"]
    given = parser.parse_args(arguments[3:])
    assert (given.config, given.out) == (Path("settings.json"), Path("folder"))
    assert (given.resume, given.overwrite, given.no_save_models) == (True, True, True)
    assert set(verb.config.field_names()) == set(LearnConfig.field_names())
    line = ["ag-split", "--vary", "method=finetune,der++", "--out", "o", "--set", "size=50", "--scale", "paper"]
    asked = command.make_parser(verb).parse_args(line)
    assert command.parse_vary(verb, asked.vary) == {"method": ["finetune", "der++"]}
    chosen = verb.initial_fields(asked.name, None, parse_config_options(asked, verb.config))
    assert chosen == {"stream": "ag-split", "set": ("size=50",), "scale": "paper"}
    whole = verb.complete(chosen | {"method": "replay", "set": []})
    assert (whole["stream"], whole["length"], whole["set"]) == ("ag-split", 128, [])


def test_a_log_is_told_how_many_trials_are_at_work(capsys: pytest.CaptureFixture[str]) -> None:
    watch = command._SweepWatch()
    watch.beat()
    trial = sweeps.Trial("a", {"x": 1}, 0, {}, Path())
    events = (JobEvent("started", "a", 1), JobEvent("started", "b", 1), JobEvent("finished", "a", 1))
    for event, finished in zip(events, (0, 0, 1), strict=True):
        watch(sweeps.SweepProgress(event, trial, finished, 3))
        watch.beat()
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
    assert lines == [
        "starting",
        *(f"0 of 3 trials finished, {count} at work" for count in (1, 2)),
        "1 of 3 trials finished, 1 at work",
    ]
