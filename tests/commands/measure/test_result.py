"""Measurements: to disk and back, whole or not at all; rows and figures of them; runs side by side."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import regard
from regard import UserError
from regard.commands.measure.compare import compare
from regard.commands.measure.result import MeasureResult
from regard.runs.output_dir import write_file
from regard.statistics.table import COLUMNS, TOKEN_COLUMNS, make_table

FILES = ["mean_attention.safetensors", "report.html", "results.json", "statistics.parquet", "tokens.parquet"]


@pytest.fixture(scope="module")
def run(tiny: Callable[[str], Path], documents: list[str]) -> MeasureResult:
    """A small run with everything that can be saved."""
    chosen = "sink_rate,column_mass,over_smoothing,hidden_norm,sink_tokens,input_dependence"
    return regard.measure(str(tiny("llama")), texts=documents, statistics=chosen, samples=2, length=20)


@pytest.fixture(scope="module")
def other(tiny: Callable[[str], Path], documents: list[str]) -> MeasureResult:
    """A run of the same model on other, longer windows, with fewer statistics."""
    chosen = "sink_rate,column_mass,over_smoothing"
    return regard.measure(str(tiny("llama")), texts=documents, statistics=chosen, samples=5, length=24)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- to disk and back


def test_what_is_saved_comes_back(run: MeasureResult, other: MeasureResult, tmp_path: Path) -> None:
    for name, saved in (("run", run), ("other", other)):
        folder = saved.save(tmp_path / "runs" / name)
        assert folder == tmp_path / "runs" / name
        found = MeasureResult.load(folder)
        pd.testing.assert_frame_equal(found.table, saved.table)
        assert found.metadata == saved.metadata
        assert found.matrices.keys() == saved.matrices.keys()
        assert all(torch.equal(found.matrices[key], saved.matrices[key]) for key in saved.matrices)
    assert sorted(contents(tmp_path / "runs" / "run")) == FILES
    assert sorted(contents(tmp_path / "runs" / "other")) == ["report.html", "results.json", "statistics.parquet"]
    assert sorted(os.listdir(tmp_path / "runs")) == ["other", "run"]
    found = MeasureResult.load(tmp_path / "runs" / "run")
    assert run.tokens is not None
    assert found.tokens is not None
    pd.testing.assert_frame_equal(found.tokens, run.tokens)
    assert tuple(found.tokens.columns) == TOKEN_COLUMNS
    assert MeasureResult.load(tmp_path / "runs" / "other").tokens is None


def test_what_is_absent_is_null_in_the_file(tiny: Callable[[str], Path], documents: list[str], tmp_path: Path) -> None:
    """One sample leaves every standard error open."""
    import pyarrow.parquet

    options = {"statistics": "sink_rate,column_mass", "samples": 1, "length": 20}
    single = regard.measure(str(tiny("llama")), texts=documents, **options)
    table = pyarrow.parquet.read_table(single.save(tmp_path / "run") / "statistics.parquet")
    assert tuple(table.column_names) == COLUMNS
    assert table.column("standard_error").null_count == table.num_rows
    assert [str(table.schema.field(c).type) for c in ("layer", "head", "position", "n")] == ["int64"] * 4
    model = [row for row in table.to_pylist() if row["statistic"] == "sink_rate" and row["layer"] is None]
    assert {(row["head"], row["epsilon"], row["n"]) for row in model} == {(None, 0.3, 1)}
    assert {row["epsilon"] for row in table.to_pylist() if row["statistic"] == "column_mass"} == {None}


def test_a_table_of_no_rows_has_its_columns_and_kinds() -> None:
    table = make_table([])
    assert tuple(table.columns) == COLUMNS
    assert str(table["layer"].dtype) == "Int64"


def test_the_page_holds_the_numbers(other: MeasureResult, tmp_path: Path) -> None:
    page = (other.save(tmp_path / "run") / "report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") or page.startswith("<!DOCTYPE html>")
    assert other.metadata["model"]["sha256"] in page
    assert "5 samples of 24 tokens" in page
    rate = other.frame("sink_rate", layer=None)
    best = rate.loc[rate["value"].idxmax()]
    assert f"{best['value']:.4g}" in page


def test_permissions_are_the_ordinary_ones(run: MeasureResult, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = run.save(tmp_path / "made" / "run")
        write_file(tmp_path / "page.html", "page")
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o750
    assert {path.stat().st_mode & 0o777 for path in (*folder.iterdir(), tmp_path / "page.html")} == {0o640}


# -- whole or not at all

FAILURES = {
    "interrupted": KeyboardInterrupt(),
    "our mistake": RuntimeError("a bug"),
    "full disk": OSError(errno.ENOSPC, "No space left on device"),
}
PLACES = {
    "the table": "pandas.DataFrame.to_parquet",
    "the matrices": "safetensors.torch.save",
    "the page": "regard.commands.measure.result.measure_page",
    "the name": "pathlib.Path.rename",
}


@pytest.fixture(params=list(PLACES))
def place(request: pytest.FixtureRequest) -> str:
    return str(PLACES[request.param])


@pytest.fixture(params=list(FAILURES))
def failure(request: pytest.FixtureRequest) -> BaseException:
    return FAILURES[request.param]


@pytest.fixture
def failing(place: str, failure: BaseException, monkeypatch: pytest.MonkeyPatch) -> type[BaseException]:
    """Makes one step of saving fail; what the caller then sees."""

    def fail(*_: Any, **__: Any) -> None:
        raise failure

    monkeypatch.setattr(place, fail)
    return UserError if isinstance(failure, OSError) else type(failure)


def test_a_failure_leaves_nothing(run: MeasureResult, failing: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(failing) as caught:
        run.save(tmp_path / "above" / "run")
    assert list(tmp_path.iterdir()) == []
    if failing is UserError:
        expected = f"cannot write {tmp_path / 'above' / 'run'}: No space left on device; nothing was written"
        assert str(caught.value) == expected


@pytest.fixture
def saved(other: MeasureResult, tmp_path: Path) -> Iterator[dict[str, bytes]]:
    """What an earlier run left in `run`; it is there at the end as it was."""
    before = contents(other.save(tmp_path / "run"))
    yield before
    assert os.listdir(tmp_path) == ["run"]
    assert contents(tmp_path / "run") == before


@pytest.mark.usefixtures("saved")
def test_a_failure_keeps_the_earlier_run(run: MeasureResult, failing: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(failing):
        run.save(tmp_path / "run", overwrite=True)


@pytest.mark.parametrize("error", FAILURES.values(), ids=FAILURES)
@pytest.mark.usefixtures("saved")
def test_a_failure_between_the_two_renames_puts_the_earlier_run_back(
    run: MeasureResult, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail_for_the_new(path: Path, target: Path) -> Path:
        if "-new-" in path.name:
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(UserError if isinstance(error, OSError) else type(error)):
        run.save(tmp_path / "run", overwrite=True)


@pytest.mark.usefixtures("saved")
def test_an_interruption_just_after_the_earlier_run_gave_its_name(
    run: MeasureResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def interrupted_after(path: Path, target: Path) -> Path:
        moved = rename(path, target)
        if path == tmp_path / "run":
            raise KeyboardInterrupt
        return moved

    monkeypatch.setattr(Path, "rename", interrupted_after)
    with pytest.raises(KeyboardInterrupt):
        run.save(tmp_path / "run", overwrite=True)


@pytest.mark.usefixtures("saved")
def test_a_run_that_is_there_is_not_written_over_unasked(run: MeasureResult, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run exists; choose another folder, or give overwrite=True"):
        run.save(tmp_path / "run")


def test_overwriting_replaces_the_whole_run(run: MeasureResult, other: MeasureResult, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    other.save(tmp_path / "run", overwrite=True)
    assert sorted(contents(tmp_path / "run")) == ["report.html", "results.json", "statistics.parquet"]
    assert os.listdir(tmp_path) == ["run"]
    assert MeasureResult.load(tmp_path / "run").metadata == other.metadata


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_run_of_another_verb_is_not_written_over(overwrite: bool, run: MeasureResult, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "results.json").write_text('{"command": "learn"}')
    (tmp_path / "run" / "matrix.parquet").write_text("days of work")
    with pytest.raises(UserError, match=r"^folder: expected a new folder or a run of `regard measure`, .*run is"):
        run.save(tmp_path / "run", overwrite=overwrite)
    assert sorted(os.listdir(tmp_path / "run")) == ["matrix.parquet", "results.json"]


def test_numbers_of_a_block_are_saved_as_a_run(run: MeasureResult, tmp_path: Path) -> None:
    """Which no command has made: they are loaded, compared and replaced like others."""
    watched = MeasureResult(run.table, metadata={"model": {"name": "mine"}})
    watched.save(tmp_path / "watched")
    watched.save(tmp_path / "watched", overwrite=True)
    pd.testing.assert_frame_equal(MeasureResult.load(tmp_path / "watched").table, run.table)


def test_an_empty_folder_is_free(run: MeasureResult, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run.save(tmp_path / "run")
    assert sorted(contents(tmp_path / "run")) == FILES
    assert os.listdir(tmp_path) == ["run"]


def test_a_link_to_a_folder_stays_a_link(run: MeasureResult, other: MeasureResult, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    other.save(tmp_path / "latest", overwrite=True)
    assert (tmp_path / "latest").is_symlink()
    assert MeasureResult.load(tmp_path / "run").metadata == other.metadata


@pytest.mark.parametrize("overwrite", [True, False])
def test_only_runs_are_written_over(overwrite: bool, run: MeasureResult, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    with pytest.raises(UserError, match="holds something else than a run"):
        run.save(tmp_path / "thesis", overwrite=overwrite)
    with pytest.raises(UserError, match="file is a file"):
        run.save(tmp_path / "file", overwrite=overwrite)
    with pytest.raises(UserError, match=r"cannot write .*, .*file is a file"):
        run.save(tmp_path / "file" / "below" / "run", overwrite=overwrite)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"
    assert sorted(os.listdir(tmp_path)) == ["file", "thesis"]


def test_a_folder_without_permission(run: MeasureResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    with pytest.raises(UserError, match="no permission to write in"):
        run.save(tmp_path / "above" / "run")
    with pytest.raises(UserError, match=r"cannot write .*: File name too long"):
        run.save(tmp_path / ("long" * 100))
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_file(tmp_path / "page.html", "first")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(UserError, match="No space left on device; nothing was written"):
            write_file(tmp_path / "page.html", "second")
    assert contents(tmp_path) == {"page.html": b"first"}


# -- loading what is broken


def test_no_run_to_load(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(UserError, match=r"no run in .*: expected a folder with results.json"):
            MeasureResult.load(folder)


def gone(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 8)


def a_list(path: Path) -> None:
    path.write_text("[]")


@pytest.mark.parametrize(
    "name,damage",
    [
        ("statistics.parquet", gone),
        *((name, damage) for name in FILES if name != "report.html" for damage in (cut, emptied, noise)),
        ("results.json", a_list),
    ],
)
def test_a_broken_run(name: str, damage: Callable[[Path], None], run: MeasureResult, tmp_path: Path) -> None:
    folder = run.save(tmp_path / "run")
    damage(folder / name)
    with pytest.raises(UserError, match=r"the run in .*run (cannot be read: .|is damaged: .|has no command)") as caught:
        MeasureResult.load(folder)
    assert "\n" not in str(caught.value)


def test_a_table_of_something_else(run: MeasureResult, tmp_path: Path) -> None:
    folder = run.save(tmp_path / "run")
    pd.DataFrame({"value": [1.0]}).to_parquet(folder / "statistics.parquet")
    with pytest.raises(UserError, match=r"is damaged: statistics\.parquet missing, or not as written"):
        MeasureResult.load(folder)


# -- rows and figures


def test_rows_by_what_they_are_of(run: MeasureResult) -> None:
    model = run.frame("sink_rate", layer=None)
    assert model["layer"].isna().all()
    assert model["position"].tolist() == list(range(13))
    assert len(run.frame("column_mass", layer=1, head=3)) == 20
    assert len(run.frame("column_mass", layer=1, head=3, position=4)) == 1
    assert set(run.frame(layer=-1)["statistic"]) >= {"hidden_norm"}
    pd.testing.assert_frame_equal(run.frame(), run.table)


@pytest.mark.parametrize(
    "equal, message",
    [
        ({"layer": 7}, r"frame\('column_mass', layer=7\) is empty: layer was measured for 0, 1, 2"),
        ({"layer": 1, "site": "encoder"}, "layer=1, site='encoder'.* is empty: site was measured for decoder"),
        ({"head": None}, "is empty: head was measured for 0, 1, 2, 3"),
        ({"position": [40, 41]}, "is empty: position was measured for 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"),
    ],
)
def test_an_empty_selection_says_what_was_measured(run: MeasureResult, equal: dict[str, Any], message: str) -> None:
    with pytest.warns(UserWarning, match=message) as warned:
        assert run.frame("column_mass", **equal).empty
    assert len(warned) == 1
    assert warned[0].filename == __file__


def test_heads_that_pass_a_threshold() -> None:
    values = {("a", 0, 0): 1.0, ("a", 0, 1): 3.0, ("a", 1, 0): 20.0, ("a", 1, 1): 20.0, ("b", 0, 0): float("nan")}
    rows = [["norm", layer, head, None, None, value, 0.0, 1, site] for (site, layer, head), value in values.items()]
    rows += [["norm", 0, 0, 2, None, 9.0, 0.0, 1, "a"], ["norm", 0, None, None, None, 2.0, 0.0, 1, "a"]]
    result = MeasureResult(table=make_table(rows), metadata={})
    assert result.heads("norm", below=3.0) == {("a", 0, 0)}
    assert result.heads("norm", above=2.0, below=20.0) == {("a", 0, 1)}
    assert result.heads("norm", below=0.6, relative=True) == {("a", 0, 0)}
    assert result.heads("norm", above=0.99, relative=True) == {("a", 0, 1), ("a", 1, 0), ("a", 1, 1)}
    assert result.heads("norm", above=1.0, position=2) == {("a", 0, 0)}
    with pytest.raises(UserError, match="heads: expected a threshold, below= or above="):
        result.heads("norm")
    with pytest.raises(UserError, match="heads: expected one value of norm a head where position=7"):
        result.heads("norm", below=1.0, position=7)
    twice = MeasureResult(table=make_table(rows + rows), metadata={})
    with pytest.raises(UserError, match="heads: expected one value of norm a head where position=None"):
        twice.heads("norm", below=1.0)


def test_an_epsilon_that_was_not_measured_is_refused(run: MeasureResult) -> None:
    with pytest.raises(UserError, match=r"epsilon: 0\.5 was not measured; the table has: 0\.3"):
        run.frame("sink_rate", epsilon=0.5)


def test_unknown_names_are_told_what_there_is(run: MeasureResult) -> None:
    with pytest.raises(UserError, match=r"unknown statistic 'entropy'; the table has: .*column_mass"):
        run.frame("entropy")
    with pytest.raises(UserError, match=r"unknown statistic 'entropy'; the table has: .*column_mass"):
        run.plot("entropy")
    with pytest.raises(UserError, match="unknown column 'key'; the table has: statistic, layer"):
        run.frame(key=3)
    with pytest.raises(UserError, match="epsilon"):
        run.plot("sink_rate", epsilon=0.9)


@pytest.mark.parametrize("kind", ["map", "profile", "layers"])
def test_figures(kind: Any, run: MeasureResult) -> None:
    figure = run.plot("column_mass", kind=kind)
    assert isinstance(figure, Figure)
    assert "column mass" in figure.axes[0].get_title(loc="left").lower()
    assert figure.axes[0].has_data()


def test_the_map_shows_the_numbers_of_its_position(run: MeasureResult) -> None:
    image = run.plot("column_mass", kind="map", position=2).axes[0].images[0].get_array()
    assert image is not None
    expected = run.frame("column_mass", position=2)["value"].to_numpy().reshape(3, 4)
    assert image.tolist() == pytest.approx(expected) if image.ndim == 1 else (image == expected).all()


# -- side by side


def test_runs_side_by_side(run: MeasureResult, other: MeasureResult) -> None:
    table, page = compare({"short": run, "long": other})
    rate = table[table["statistic"] == "sink_rate"].iloc[0]
    first, second = (m.frame("sink_rate", layer=None, position=0)["value"].item() for m in (run, other))
    assert (rate["short"], rate["long"], rate["difference"]) == (first, second, second - first)
    assert table.attrs["notes"][0].startswith("The runs differ in sequence length (short: 20, long: 24)")
    assert any("number of samples (short: 2, long: 5)" in note for note in table.attrs["notes"])
    assert "short against long" in page
    assert "The runs differ in sequence length" in page


def test_a_number_that_is_none_is_not_written_into_the_record(run: MeasureResult, tmp_path: Path) -> None:
    """NaN is no JSON: a record that holds one is a mistake of ours, and nothing is left of it."""
    broken = MeasureResult(run.table, {**run.metadata, "cost": {"seconds": float("nan")}})
    with pytest.raises(ValueError, match="Out of range float"):
        broken.save(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
    json.loads((run.save(tmp_path / "run") / "results.json").read_text(), parse_constant=pytest.fail)
