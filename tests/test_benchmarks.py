"""The benchmarks run, all contestants compute the same, and the docs' tables are made from the committed results."""

import gc
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import adapters, operators, result_table, summary, tables, training_section, training_step
from benchmarks.markdown import ResultTable
from benchmarks.timing import RESULTS, extra_memory, race
from regard.adapters.discriminant import DiscriminantRouter
from regard.attention.spec import ATTENTIONS


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name, reference",
    [
        pytest.param("attention_function", "sdpa", marks=pytest.mark.exhaustive),
        pytest.param("whole_model", "plain", marks=pytest.mark.exhaustive),
        ("long_sequences", "sdpa"),
        ("statistics_cost", "plain"),
        pytest.param("constant_attention", "sdpa", marks=pytest.mark.exhaustive),
        pytest.param("structured_constants", "sdpa", marks=pytest.mark.exhaustive),
        ("decoding", "sdpa"),
        pytest.param("cached_probe", "recomputed", marks=pytest.mark.exhaustive),
        pytest.param("operators", "sdpa", marks=pytest.mark.exhaustive),
        pytest.param("learning", "regard", marks=pytest.mark.exhaustive),
        pytest.param("adapters", "regard", marks=pytest.mark.exhaustive),
        ("adapter_step", "regard"),
        ("gathering", "masked"),
        pytest.param("freed_memory", "default", marks=pytest.mark.exhaustive),
        pytest.param("look", "plain", marks=pytest.mark.exhaustive),
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
        assert figures[line["reference"]]["time_ratio"] == 1
        for one in figures.values():
            assert one["fastest"] <= one["seconds"] <= one["slowest"]
            assert one["time_ratio"] == pytest.approx(one["seconds"] / figures[line["reference"]]["seconds"])


def test_the_contestants_of_every_attention_compute_the_same() -> None:
    """A quick run leaves most of them out, and a whole one would stop at the first that differs."""
    for spec in (*(ATTENTIONS[name] for name in operators.NAMES), *operators.MORE.values()):
        operators.check(operators.training(spec, 1, 40))


def test_the_page_is_made_from_the_results() -> None:
    assert all(path.read_text(encoding="utf-8") == text for path, text in tables.files().items())


def test_the_first_table_spans_all_cases_of_a_section() -> None:
    rows = json.loads((RESULTS / "decoding.json").read_text())["rows"]
    figures = [line["figures"] for line in rows]
    times = sorted(one["all"]["seconds"] / one["sdpa"]["seconds"] for one in figures)
    span = f"{times[0]:.2f} to {times[-1]:.2f} | [{len(rows)} cases](#decoding)"
    assert f"| a token with a cache, all heads constant | with attention | {span} |" in summary.in_short()


def test_the_first_table_compares_with_what_would_run_anyway() -> None:
    """Models that have SDPA were compared with eager attention: Llama had 0.30 of its time, and has that of SDPA."""
    rows = [row["figures"] for row in json.loads((RESULTS / "attention_backend.json").read_text())["rows"]]
    seconds = [{name: one["seconds"] for name, one in figures.items()} for figures in rows]
    over_eager = sorted(one["regard"] / one["eager"] for one in seconds if "sdpa" not in one)
    over_sdpa = sorted(one["regard"] / one["sdpa"] for one in seconds if "sdpa" in one)
    text = summary.in_short()
    for over, ratios in (("eager attention", over_eager), ("SDPA", over_sdpa)):
        span = f"{ratios[0]:.2f} to {ratios[-1]:.2f} | [{len(ratios)} cases](#regard-as-the-attention-of-a-model)"
        assert f" | {over} | {span} |" in text


def test_the_committed_results_are_whole_runs() -> None:
    for name in ("attention_function", "whole_model", "long_sequences"):
        rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
        assert max(line["case"]["length"] for line in rows) >= 2048
    rows = json.loads((RESULTS / "constant_attention.json").read_text())["rows"]
    assert {(line["case"]["batch"], line["case"]["length"]) for line in rows} >= {(8, 64), (32, 512)}


@pytest.mark.exhaustive
def test_a_training_step_is_taken_in_every_setting(tmp_path: Path) -> None:
    """The quick run leaves compilation out; every row is of one setting, and the table has a line for it."""
    threads = torch.get_num_threads()
    try:
        training_step.main(["--quick", "--parts", "settings", "--out", str(tmp_path / "result.json")])
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    cases = [{"size": "tiny", "length": 256, "part": "settings", "precision": p} for p in ("float32", "bfloat16")]
    assert [row["case"] for row in rows] == [case | {"compiled": False} for case in cases]
    assert all(set(row["figures"]) == {"regard", "minimal", "llama", "trainer"} for row in rows)
    assert {str(setting) for setting in training_step.SETTINGS} == {
        *("float32", "float32 compiled", "bfloat16", "bfloat16 compiled")
    }
    for row, cells in zip(rows, training_section.settings_table(rows).cells, strict=True):
        milliseconds = f"{row['figures']['regard']['seconds'] * 1e3:.1f}"
        assert [str(cell) for cell in cells[:5]] == ["tiny", "256", row["case"]["precision"], "no", milliseconds]


def test_steps_are_compared_in_the_best_setting_of_each() -> None:
    """Of each size and length: the fastest of one may be compiled, that of another not."""

    def timed(compiled: bool, *seconds: float) -> dict[str, Any]:
        case = {"size": "1M", "length": 256, "part": "settings", "precision": "bfloat16", "compiled": compiled}
        names = ("regard", "minimal", "llama", "trainer")
        figures = {
            name: {"seconds": value, "time_ratio": value / seconds[0]}
            for name, value in zip(names, seconds, strict=True)
        }
        return {"case": case, "figures": figures}

    text = training_section.steps([timed(False, 0.4, 0.5, 0.6, 0.8), timed(True, 0.5, 0.3, 0.7, 0.9)])
    speeds = "5120 (bfloat16) | 6827 (bfloat16 compiled) | 3413 (bfloat16) | 2560 (bfloat16)"
    assert f"| 1M | 256 | {speeds} | 0.75 | 1.50 | 2.00 |" in text
    assert "Met: time: 0 of 1 cases (not 1M 256)." in text


@pytest.mark.exhaustive
def test_memory_is_that_of_the_run() -> None:
    if extra_memory(lambda: None) is None:
        pytest.skip("this system does not tell the peak of resident memory")
    gc.collect()
    grown = extra_memory(lambda: torch.ones(64 * 2**20 // 4).sum())
    assert grown is not None
    assert 60 <= grown <= 90


@pytest.mark.exhaustive
def test_contestants_take_turns() -> None:
    order: list[str] = []
    figures = race({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, least=2, most=2)
    assert order == ["a", "b"] * 3 + ["a", "b"]
    assert figures["a"].runs == 2


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_the_router_that_weighs_blocks_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once each time that texts are written by it, and never for weights that are given; each row gets its own."""
    seen: dict[int, list[torch.Tensor]] = {}
    forward = DiscriminantRouter.forward

    def watched(self: DiscriminantRouter, vectors: torch.Tensor) -> torch.Tensor:
        seen.setdefault(id(self), []).append(forward(self, vectors))
        return seen[id(self)][-1]

    monkeypatch.setattr(DiscriminantRouter, "forward", watched)
    with torch.no_grad():
        line = adapters.writing(2, small=True, budget=0.0)
    figures = line["figures"]
    assert figures.keys() == {"regard", "routed", "above", "above_routed", "one", "peft", "base"}
    assert len(seen) == 2
    for name, given in zip(("routed", "above_routed"), seen.values(), strict=True):
        runs = figures[name]["runs"]
        assert len(given) == 1 + 1 + (1 + runs + 1)  # the given ones, the check; for warmth, on the clock, for memory
        assert all(torch.equal(one, given[0]) for one in given)
        assert given[0].shape == (8, adapters.WRITING)
        assert len(given[0].unique(dim=0)) == 8


@pytest.mark.exhaustive
def test_the_results_of_a_large_model_are_measured(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    threads = torch.get_num_threads()
    try:
        result_table.main(["--quick", "--out", str(out)])
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(True)
    rows = json.loads(out.read_text())["rows"]
    assert [row["positions"] for row in rows] == ["all", "thin", "none"]
    assert rows[0]["rows"] > rows[1]["rows"] > rows[2]["rows"] > 0


def test_a_page_links_to_the_rows_and_columns_that_it_leaves_out() -> None:
    rows: list[tuple[object, ...]] = [(1, 2, 3), (4, 5, 6)]
    whole = ResultTable("made", ("a", "b", "c"), rows, [True, True])
    assert whole.is_whole
    assert whole.to_markdown() == "| a | b | c |\n|---|---|---|\n| 1 | 2 | 3 |\n| 4 | 5 | 6 |"
    part = ResultTable("made", ("a", "b", "c"), rows, [True, False], frozenset({"b"}))
    assert not part.is_whole
    assert part.to_markdown() == (
        "| a | c |\n|---|---|\n| 1 | 3 |\n\nAll 2 cases and all 3 columns: [made.csv](results/made.csv)."
    )
    assert part.to_csv() == "a,b,c\n1,2,3\n4,5,6\n"
