"""Checkpoints: a killed run goes on as if nothing had been, and what is damaged, full or of another run is told."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("resumed.py")
CLOCK = ("seconds", "items_per_second")


KILLS = {"twice": ["6", "11"], "before the first checkpoint": ["2"], "while one is written": ["write:8"]}


def without_clock(out: Path) -> list[dict[str, Any]]:
    rows = json.loads((out / "history.json").read_text())
    return [{name: value for name, value in row.items() if name not in CLOCK} for row in rows]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[dict[str, Any]]]]:
    """Where they are, and how each of them ended: one unbroken, and others killed and resumed."""
    place = tmp_path_factory.mktemp("runs")
    jobs = [(name, when) for name, kills in {"unbroken": [], **KILLS}.items() for when in (*kills, "")]
    arguments = [[str(place / name), str(place / f"{name} out"), when] for name, when in jobs]
    ended = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), json.dumps(arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        timeout=240,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    found: dict[str, list[dict[str, Any]]] = {}
    for (name, _), how in zip(jobs, json.loads(ended.stdout), strict=True):
        found.setdefault(name, []).append(how)
    return place, found


@pytest.mark.parametrize(
    "name, left",
    [
        ("twice", ["step-00000004", "step-00000008"]),
        ("before the first checkpoint", []),
        ("while one is written", ["step-00000004"]),
    ],
)
def test_a_killed_run_is_the_unbroken_one(name: str, left: list[str], runs: Any) -> None:
    place, ended = runs
    *killed, resumed = ended[name]
    assert [one["code"] for one in killed] == [-signal.SIGKILL] * len(KILLS[name])
    unfinished = [one for one in killed[-1]["left"] if one.startswith(".")]
    assert killed[-1]["left"] == [*unfinished, *left]
    assert len(unfinished) == (name == "while one is written")
    assert resumed == {"code": 0, "left": ["step-00000012", "step-00000014"]}
    rows = without_clock(place / f"{name} out")
    assert rows == without_clock(place / "unbroken out")
    assert [row["step"] for row in rows] == list(range(15))
    assert [row["step"] for row in rows if "norm" in row] == [0, 3, 6, 9, 12, 14]
    assert {row["training"] for row in rows if "norm" in row} == {0.0}
    weights, expected = (load_file(place / f"{one} out" / "weights.safetensors") for one in (name, "unbroken"))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
