"""Two processes that train together come to what one comes to, whether each has all weights or a part."""

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from regard.training import TrainingConfig, train
from tests.processes import run_python
from tests.training.small import batch, count, loss, net

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PLAN = TrainingConfig(max_steps=9, batch_size=8, learning_rate=0.02, warmup_steps=2, logging_steps=1, max_grad_norm=0.5)
CLOCK = ("seconds", "items_per_second")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder, and what each of the two processes found; made once, whichever workers of pytest ask for it."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "training-together"
    with FileLock(f"{out}.lock"):
        if not (out / "found-1.json").exists():
            out.mkdir(exist_ok=True)
            train_together(out)
    return out, [json.loads((out / f"found-{rank}.json").read_text()) for rank in (0, 1)]


def train_together(out: Path) -> None:
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ended = run_python(["-W", "error", str(Path(__file__).with_name("together.py")), str(out)], shared)
    assert ended.returncode == 0, ended.stderr


def alone(rows: int) -> tuple[dict[str, torch.Tensor], list[dict[str, float]]]:
    model = net()
    plan = replace(PLAN, batch_size=rows)
    result = train(model, plan, batch=lambda step: batch(step, rows), loss=loss, count=count, device="cpu")
    return {name: one.detach() for name, one in model.named_parameters()}, result.history


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name, rows",
    [
        ("whole", 8),
        ("micro-batches", 8),
        ("uneven", 5),
        ("sharded", 8),
        ("sharded in micro-batches", 8),
        ("resumed whole", 8),
        ("resumed sharded", 8),
    ],
)
def test_two_processes_come_to_what_one_comes_to(name: str, rows: int, together: Any) -> None:
    out, found = together
    weights, history = alone(rows)
    theirs = load_file(out / f"{name}.safetensors")
    assert theirs.keys() == weights.keys()
    for parameter, expected in weights.items():
        torch.testing.assert_close(theirs[parameter], expected, rtol=0, atol=1e-12)
    for one in found:
        rows_found = one[name]["history"]
        assert [row["step"] for row in rows_found] == list(range(1, 10))
        for row, expected_row in zip(rows_found, history, strict=True):
            for number in ("loss", "learning_rate", "gradient_norm", "items"):
                assert row[number] == pytest.approx(expected_row[number], rel=1e-10), number


def test_every_process_watches(together: Any) -> None:
    _, found = together
    for name in ("whole", "sharded"):
        first, second = (one[name]["history"][-1]["out"] for one in found)
        assert first == second
        assert [one[name]["watched"] for one in found] == [1, 1]


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_a_checkpoint_is_of_whole_tensors(name: str, together: Any) -> None:
    out, found = together
    assert [one[f"resumed {name}"]["stopped"] for one in found] == ["stopped", "stopped"]
    assert sorted(path.name for path in (out / f"resumed {name}").iterdir()) == ["step-00000008", "step-00000009"]
    last = out / f"resumed {name}" / "step-00000009"
    assert all(
        torch.equal(one, load_file(out / f"resumed {name}.safetensors")[key])
        for key, one in load_file(last / "model.safetensors").items()
    )
    moments = load_file(last / "optimizer.safetensors")
    assert {key: tuple(one.shape) for key, one in moments.items() if key.startswith("inner.0.weight")} == {
        "inner.0.weight/exp_avg": (8, 6),
        "inner.0.weight/exp_avg_sq": (8, 6),
        "inner.0.weight/step": (),
    }


def test_a_mistake_of_one_is_told_by_all(together: Any) -> None:
    first, second = (one["mistakes"] for one in together[1])
    assert first["row"] == second["row"]
    assert first["row"].startswith("loss: expected a finite number, got nan at step 2; rows of its batch: 6; ")
    assert first["row of the shards"] == second["row of the shards"]
    assert "at step 2; rows of its batch: 1; there is no saved state" in first["row of the shards"]
    assert first["few rows"] == "batch_size: expected at least a row for each of 2 processes, got 1"
    assert first["uneven shards"] == "batch_size: with FSDP expected a multiple of 2 processes, got 5"
    for one, own in ((first, "resumed whole"), (second, "seen by one")):
        told = f"{together[0] / own}: expected every process to see the same checkpoints, got step 0 as the last of one"
        assert one["own folders"].startswith(f"{told} and step 9 of another")
    assert "expected no checkpoints, got step-00000009" in first["own folders, not resumed"]
    assert second["own folders, not resumed"] == first["own folders, not resumed"]
    assert "No space left on device; there is no saved state" in first["disk"]
    assert second["disk"] == first["disk"]
