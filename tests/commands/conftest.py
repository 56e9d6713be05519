"""The command, in this process and in one of its own; a stream of three tasks, and a tiny model that can learn it."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.continual.small_tasks import loaded, stream
from tests.processes import run_python

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line it was refused with, having printed nothing else."""
        assert self.code == 2
        assert self.out == ""
        assert self.err.endswith("\n")
        assert self.err.count("\n") == 1
        return self.err.rstrip("\n")


@pytest.fixture
def regard(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Ended]:
    """`regard …` in this process, in an empty folder, on a terminal of 80 columns."""
    from regard.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: object) -> Ended:
        capfd.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return Ended(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """The environment of a process of its own: this Regard, no terminal."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def apart(environment: dict[str, str], tmp_path: Path) -> Callable[..., Ended]:
    """`python -m regard …` in a process of its own, in an empty folder."""

    def run(*arguments: object, given: str = "") -> Ended:
        command = ["-W", "error", "-m", "regard", *map(str, arguments)]
        ended = run_python(command, environment, tmp_path, given)
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `words.jsonl`, a stream of three tasks, and `model`, a BERT of two layers of 16."""
    folder = tmp_path_factory.mktemp("words")
    small = loaded()
    small.model.save_pretrained(folder / "model")
    small.tokenizer.save_pretrained(folder / "model")
    rows = [
        {"task": task.name, "split": split, "text": texts[0], "label": task.labels[label]}
        for task in stream().tasks
        for split in ("train", "dev", "test")
        for texts, label in zip(task.split(split).texts, task.split(split).labels, strict=True)
    ]
    (folder / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder
