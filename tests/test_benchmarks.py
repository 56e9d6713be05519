"""The benchmarks run, all contestants compute the same, and the docs' tables are made from the committed results."""

import gc
import importlib
import json
from pathlib import Path

import pytest
import torch
from benchmarks import tables
from benchmarks.timing import RESULTS, extra_memory, race


@pytest.mark.parametrize(
    "name, reference",
    [
        ("attention_function", "sdpa"),
        ("whole_model", "plain"),
        ("long_sequences", "sdpa"),
        ("constant_attention", "sdpa"),
        ("structured_constants", "sdpa"),
        ("cached_probe", "recomputed"),
        ("operators", "sdpa"),
        ("learning", "regard"),
        ("adapters", "regard"),
        ("gathering", "masked"),
    ],
)
def test_a_benchmark_runs_and_says_what_it_measured(
    name: str, reference: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each checks by itself that its contestants agree before it takes their time."""
    out = tmp_path / "result.json"
    threads = torch.get_num_threads()
    try:
        importlib.import_module(f"benchmarks.{name}").main(["--quick", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
    assert f"{reference} ×1.00" in capsys.readouterr().out
    told = json.loads(out.read_text())
    assert {"date", "cpu", "threads", "torch", "transformers"} <= told["machine"].keys()
    for line in told["rows"]:
        figures = line["figures"]
        assert figures[reference]["time_ratio"] == 1
        for one in figures.values():
            assert one["fastest"] <= one["seconds"] <= one["slowest"]
            assert one["time_ratio"] == pytest.approx(one["seconds"] / figures[reference]["seconds"])


def test_the_page_is_made_from_the_results() -> None:
    assert tables.PAGE.read_text(encoding="utf-8") == tables.page()


def test_the_committed_results_are_whole_runs() -> None:
    for name in ("attention_function", "whole_model", "long_sequences"):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        assert max(line["case"]["length"] for line in rows) >= 2048
    rows = json.loads((RESULTS / "constant_attention.json").read_text())["rows"]
    assert {(line["case"]["batch"], line["case"]["length"]) for line in rows} >= {(8, 64), (32, 512)}


def test_memory_is_that_of_the_run() -> None:
    if extra_memory(lambda: None) is None:
        pytest.skip("this system does not tell the peak of resident memory")
    gc.collect()
    grown = extra_memory(lambda: torch.ones(64 * 2**20 // 4).sum())
    assert grown is not None
    assert 60 <= grown <= 90


def test_contestants_take_turns() -> None:
    order: list[str] = []
    figures = race({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, least=2, most=2)
    assert order == ["a", "b"] * 3 + ["a", "b"]
    assert figures["a"].runs == 2
