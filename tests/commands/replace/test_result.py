"""Runs with replaced heads: to disk and back, whole or not at all; rows, figures and summary of them."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from matplotlib.figure import Figure
from rich.console import Console

from regard import UserError
from regard.commands.replace.result import COST_COLUMNS, HEAD_COLUMNS, ReplaceResult
from regard.commands.replace.scores import COLUMNS as SCORE_COLUMNS
from tests.commands.replace import replaced_run

FILES = ["constants.safetensors", "cost.parquet", "heads.json", "report.html", "results.json", "scores.parquet"]


def made() -> ReplaceResult:
    matrices = replaced_run.matrices()
    tensors = {f"{place}.matrix": matrix for place, matrix in matrices.items()}
    tensors["encoder.count"] = torch.ones(8, 8, dtype=torch.int64)
    return ReplaceResult(
        replaced_run.scores(),
        replaced_run.heads(),
        replaced_run.cost(),
        replaced_run.record(),
        matrices,
        safetensors.torch.save(tensors, {"regard": "1"}),
    )


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made().save(tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run"))


# -- to disk and back


def test_what_is_saved_comes_back(saved: Path) -> None:
    assert sorted(path.name for path in saved.iterdir()) == FILES
    run, found = made(), ReplaceResult.load(saved)
    pd.testing.assert_frame_equal(found.scores, run.scores)
    pd.testing.assert_frame_equal(found.heads, run.heads)
    pd.testing.assert_frame_equal(found.cost, run.cost)
    assert found.metadata == run.metadata
    assert found.constants == run.constants
    assert found.matrices.keys() == run.matrices.keys()
    assert all(torch.equal(found.matrices[place], run.matrices[place]) for place in run.matrices)


def test_the_columns_are_those_of_the_design(saved: Path) -> None:
    found = ReplaceResult.load(saved)
    assert tuple(found.scores.columns) == SCORE_COLUMNS
    assert tuple(found.heads.columns) == HEAD_COLUMNS
    assert tuple(found.cost.columns) == COST_COLUMNS


def test_the_order_is_written_most_dynamic_first(tmp_path: Path) -> None:
    run = made()
    shuffled = run.heads.sample(frac=1, random_state=0).assign(value=[np.nan, *range(5)], pattern=None)
    folder = ReplaceResult(run.scores, shuffled, run.cost, run.metadata).save(tmp_path / "run")
    told = json.loads((folder / "heads.json").read_text(encoding="utf-8"))
    assert told["rank_heads_by"] == "lambda"
    ordered = shuffled.sort_values("rank")
    assert told["order"] == [["encoder", row.layer, row.head] for row in ordered.itertuples()]
    assert told["value"] == [None if np.isnan(value) else value for value in ordered["value"]]
    assert told["pattern"] == [None] * 6
    assert not (folder / "constants.safetensors").exists()
    found = ReplaceResult.load(folder)
    assert found.constants is None
    assert found.matrices == {}
    assert found.heads["value"].isna().sum() == 1


def test_the_page_holds_the_numbers(saved: Path) -> None:
    page = (saved / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert made().metadata["model"]["sha256"] in page


# -- whole or not at all


@pytest.mark.parametrize(
    "place", ["pandas.DataFrame.to_parquet", "regard.commands.replace.result.replace_page", "pathlib.Path.rename"]
)
def test_a_failure_leaves_what_was_there(saved: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, fail)
    with pytest.raises(KeyboardInterrupt):
        made().save(saved, overwrite=True)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["run"]


def test_a_folder_in_use_is_kept(saved: Path) -> None:
    with pytest.raises(UserError, match="exists"):
        made().save(saved)
    assert made().save(saved, overwrite=True) == saved


def test_a_record_that_json_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    run = made()
    result = ReplaceResult(run.scores, run.heads, run.cost, {**run.metadata, "cost": float("nan")})
    with pytest.raises(ValueError, match="JSON"):
        result.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


# -- broken and foreign folders

SPOILING: dict[str, tuple[Callable[[Path], object], str]] = {
    "no metadata": (lambda run: (run / "results.json").unlink(), "no run in .*results.json"),
    "cut metadata": (lambda run: (run / "results.json").write_text('{"version'), "cannot be read"),
    "a list for metadata": (lambda run: (run / "results.json").write_text("[]"), "has no command in its results.json"),
    "changed metadata": (
        lambda run: (run / "results.json").write_text((run / "results.json").read_text().replace("tiny", "huge", 1)),
        "is damaged: results.json is not as written",
    ),
    "no scores": (lambda run: (run / "scores.parquet").unlink(), "is damaged: scores.parquet missing"),
    "no order": (lambda run: (run / "heads.json").unlink(), "is damaged: heads.json missing"),
    "changed order": (lambda run: (run / "heads.json").write_text("[]"), "is damaged: heads.json missing, or not as"),
    "cut scores": (lambda run: (run / "scores.parquet").write_bytes(b"PAR1"), "is damaged: scores.parquet"),
    "cut constants": (lambda run: (run / "constants.safetensors").write_bytes(b"0" * 9), "is damaged: constants.saf"),
}


@pytest.mark.parametrize("name", SPOILING)
def test_a_broken_run_is_refused_in_one_line(name: str, saved: Path) -> None:
    spoil, message = SPOILING[name]
    spoil(saved)
    with pytest.raises(UserError, match=message) as caught:
        ReplaceResult.load(saved)
    assert len(str(caught.value).splitlines()) == 1
    assert str(saved) in str(caught.value)


def test_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run in"):
        ReplaceResult.load(tmp_path / "nothing")


# -- rows, figures, summary


def test_frame_takes_rows() -> None:
    run = made()
    found = run.frame(task="sst2", dynamic_fraction=0, constants="average", rank_heads_by=["lambda"])
    assert found["seed"].tolist() == [0, 1, 2]
    assert len(run.frame()) == len(run.scores)
    with pytest.raises(UserError, match="unknown column 'tasks'; the table has: model, task"):
        run.frame(tasks="sst2")


@pytest.mark.parametrize("kind, panels", [("fractions", 3), ("orders", 3), ("constants", 6)])
def test_plot_draws(kind: str, panels: int) -> None:
    drawn = made().plot(kind)  # type: ignore[arg-type]
    assert isinstance(drawn, Figure)
    assert len(drawn.axes) == panels


def test_summary_is_for_the_terminal() -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(made().summary())
    assert "example/tiny" in out.getvalue()
    assert "Constants average, ranking lambda" in out.getvalue()


@pytest.mark.parametrize(
    "replaced, said",
    [
        ([0.80, 0.82], "m: t loses 11.0 % with average, all heads constant"),
        ([0.78, 0.90], "m: t loses nothing that is shown with average (7.7 %), all heads constant"),
        ([0.80], "m: t loses 11.1 % with average, all heads constant"),
        ([0.95, 0.97], "m: t gains 5.5 % with average, all heads constant"),
    ],
)
def test_a_headline_tells_a_loss_that_is_shown(replaced: list[float], said: str) -> None:
    """Paired by seed: of 10 points twice the interval has no width, of 12 and 2 it is far wider than their mean."""
    rows = [("m", "t", "none", "none", 1.0, seed, "accuracy", (0.9, 0.92)[seed]) for seed in range(len(replaced))]
    rows += [("m", "t", "average", "lambda", 0.0, seed, "accuracy", score) for seed, score in enumerate(replaced)]
    columns = ["model", "task", "constants", "rank_heads_by", "dynamic_fraction", "seed", "metric", "score"]
    empty = pd.DataFrame(columns=list(COST_COLUMNS))
    result = ReplaceResult(pd.DataFrame(rows, columns=columns), replaced_run.heads(), empty, {"model": {"name": "m"}})
    assert result.headline() == said
