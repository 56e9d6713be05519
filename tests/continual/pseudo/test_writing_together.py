"""A generator that two processes train writes the same in both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.test_loop_processes import free_port

ROOT = Path(__file__).parents[3]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_two_processes_have_the_same_pseudo_samples(tmp_path: Path) -> None:
    shared = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    script = str(Path(__file__).with_name("together.py"))
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", script, str(tmp_path)],
            stderr=subprocess.PIPE,
            text=True,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in (0, 1)
    ]
    try:
        ended = [(process.communicate(timeout=900)[1], process.returncode) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [code for _, code in ended] == [0, 0], "\n".join(said for said, _ in ended)
    first, second = (json.loads((tmp_path / f"found-{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["told"] == ["0 says é"]
    assert 1 <= len(first["written"][0]) <= 4
