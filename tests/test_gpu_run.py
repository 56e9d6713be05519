"""`make gpu` without a GPU: its parts, its limits, its summary, its section of the page, its environment."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_environment, gpu_section
from benchmarks.timing import parser, prepared


def result(*lengths: int, **figures: float) -> dict[str, Any]:
    times = {"seconds": 1.0, "fastest": 1.0, "slowest": 1.0, "runs": 1}
    told = {name: times | {"time_ratio": ratio, "memory": 2.0} for name, ratio in figures.items()}
    machine = {"date": "2026-01-02", "card": "H200", "driver": "570", "cuda": "13.0", "torch": "2.13.0"}
    rows = [{"case": {"length": length}, "reference": "sdpa", "figures": told} for length in lengths]
    return {"machine": machine | {"transformers": "5.0.0"}, "rows": rows, "complete": True}


def test_every_benchmark_has_a_limit_and_all_take_at_most_40_minutes() -> None:
    assert {gpu.TESTS, *gpu_section.TITLES} == gpu.LIMITS.keys()
    assert sum(gpu.LIMITS.values()) <= gpu.MINUTES * 60
    assert all(Path(gpu.ROOT, path).exists() for path in gpu.TEST_PATHS)
    sources = (gpu.ROOT / "benchmarks").glob("*.py")
    timed = {path.stem for path in sources if "prepared(" in path.read_text()} - {"timing", "freed_memory"}
    assert timed == gpu_section.TITLES.keys()  # memory that the C library frees is none of a GPU


def test_without_a_gpu_it_says_so_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    message = capsys.readouterr().err
    assert message.startswith("no GPU: ")
    assert message.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        prepared(parser(None), ["--device", "cuda"])
    assert capsys.readouterr().err.count("\n") == 1


def test_a_part_that_fails_stops_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = json.dumps(result(8, sdpa=1.0, regard=1.25))
    scripts = {
        "tests": "raise SystemExit(3)",
        "operators": "import time; time.sleep(600)",
        "learning": "import time; time.sleep(600)",
        "gathering": "",
    }

    def command(name: str, device: torch.device, *, quick: bool, out: Path) -> list[str]:
        if name in ("operators", "gathering"):
            (out / f"gpu-{name}.json").write_text(written)
        return [sys.executable, "-c", scripts[name]]

    monkeypatch.setattr(gpu, "command", command)
    monkeypatch.setattr(gpu, "LIMITS", {**dict.fromkeys(scripts, 1), "tests": 120, "gathering": 120, "operators": 2})
    arguments = ["--device", "cpu", "--quick", "--minutes", "20", "--out", str(tmp_path), "--parts", ",".join(scripts)]
    assert gpu.main(arguments) == 1
    summary = capsys.readouterr().out
    assert "tests: failed with exit code 3" in summary
    assert "operators: stopped at its limit of 1 s" in summary
    assert "gathering: passed" in summary
    assert summary.rstrip().endswith("failed: tests, learning")
    assert not json.loads((tmp_path / "gpu-operators.json").read_text())["complete"]
    page = (tmp_path / "gpu.md").read_text()
    assert page.count("Its time was up") == 1
    assert "| 8 | 1000.0 | 1.25 | 2 | 2 |" in page


def test_commands_name_device_and_result(tmp_path: Path) -> None:
    command = gpu.command("training_step", torch.device("cuda"), quick=False, out=tmp_path)
    assert command[command.index("--device") + 1] == "cuda"
    assert command[command.index("--out") + 1] == str(tmp_path / "gpu-training_step.json")
    assert "--sizes" in command
    quick = gpu.command("training_step", torch.device("cpu"), quick=True, out=tmp_path)
    assert quick[-1] == "--quick"


# -- the page --------------------------------------------------------------------------------------------------------


def test_the_section_is_made_from_the_results_there_are(tmp_path: Path) -> None:
    assert gpu_section.section(gpu_section.read_results(tmp_path)) == (gpu_section.NONE, [])
    lengths = [length for length in (128, 256) for _ in range(10)]
    (tmp_path / "gpu-operators.json").write_text(json.dumps(result(*lengths, sdpa=1.0, regard=0.5)))
    text, tables = gpu_section.section(gpu_section.read_results(tmp_path))
    assert "2026-01-02, H200, driver 570, CUDA 13.0, torch 2.13.0" in text
    assert text.count("| 256 | 1000.0 | 0.50 | 2 | 2 |") == gpu_section.MOST_ROWS == 3
    assert "| 128 |" not in text
    assert "[gpu-operators.csv](results/gpu-operators.csv)" in text
    assert [table.name for table in tables] == ["gpu-operators"]
    assert len(tables[0].cells) == 20


# -- the environment -------------------------------------------------------------------------------------------------


def test_the_pins_of_a_borrowed_torch() -> None:
    pins = "# a comment\nnumpy==2.0\ntorch==2.13.0\ntriton==3.7.1 ; python_version >= '3.11'\n"
    assert gpu_environment.without_torch(pins, "2.9.1+cu128") == "# a comment\nnumpy==2.0\ntorch==2.9.1+cu128\n"


def test_no_environment_is_made_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_environment, "find_torch", lambda: (None, None))
    monkeypatch.setattr(gpu_environment, "has_driver", lambda: False)
    assert gpu_environment.main([str(tmp_path / "venv")]) == 2
    assert not (tmp_path / "venv").exists()
    assert capsys.readouterr().err.startswith("no GPU: this machine has no NVIDIA driver")


def test_an_environment_borrows_a_torch_that_finds_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "torch.py").write_text("__version__ = '9.9+cu999'\n")
    commands: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(gpu_environment, "find_torch", lambda: ("9.9+cu999", site))
    monkeypatch.setattr(gpu_environment.subprocess, "run", run)
    monkeypatch.setattr(gpu_environment.venv, "create", lambda folder, **_: _make_venv(folder))
    folder = tmp_path / "venv"
    assert gpu_environment.main([str(folder)]) == 0
    assert (gpu_environment.site_packages(folder) / "borrowed_torch.pth").read_text() == f"{site}\n"
    assert commands[0][-1] == "torch==9.9+cu999"
    assert "torch==9.9+cu999" in (folder / "constraints.txt").read_text()


def _make_venv(folder: Path) -> None:
    gpu_environment.site_packages(folder).mkdir(parents=True)
