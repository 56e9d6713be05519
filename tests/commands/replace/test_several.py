"""Several models and tasks in one `regard replace`: each pair a run, one result and one page."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from regard.cli import main
from regard.commands.replace import several
from regard.commands.replace.page import several_page
from regard.commands.replace.result import COST_COLUMNS, ReplaceResult
from regard.commands.replace.scores import ALL_TASKS, COLUMNS, Outcome, drops_by_original
from regard.commands.replace.words import describe_correlations, ledes, title
from regard.errors import UserError
from regard.runs.launchers import Job, Local

Tiny = Callable[[str], Path]
Regard = Callable[..., Any]
SMALL = (
    *("--length", 12, "--max-train-samples", 24, "--max-eval-samples", 8, "--num-epochs", 1, "--batch-size", 8),
    *("--num-seeds", 2, "--device", "cpu", "--dynamic-fractions", "1,0", "--rank-heads-by", "first-layers"),
)


@pytest.fixture
def tasks(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for shift, path in enumerate(paths):
        rows = [{"text": f"w{n % 7 + 2} w{n % 5 + shift} w3", "label": "xy"[n % 2]} for n in range(40)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return paths


def scores_of(originals: dict[tuple[str, str], tuple[float, float]]) -> pd.DataFrame:
    """Scores by (model, task): untouched, and with all heads constant; two seeds."""
    rows = []
    for (model, task), (original, constant) in originals.items():
        for seed in (0, 1):
            rows.append((model, task, "none", "none", 1.0, seed, "accuracy", original))
            rows.append((model, task, "average", "lambda", 0.0, seed, "accuracy", constant))
    return pd.DataFrame(rows, columns=list(COLUMNS))


# -- correlation -----------------------------------------------------------------------------------------------------


@pytest.mark.every_value
@pytest.mark.parametrize("models", [4, 5])
def test_the_correlation_of_one_task_is_that_of_scipy(models: int) -> None:
    original, drops = [0.5, 0.6, 0.7, 0.8, 0.9][:models], [0.02, 0.01, 0.05, 0.04, 0.09][:models]
    values = {(f"m{n}", "cola"): (x, x - y) for n, (x, y) in enumerate(zip(original, drops, strict=True))}
    (row,) = drops_by_original(Outcome(scores_of(values), {})).to_dict("records")
    expected = stats.pearsonr(original, [100 * y / x for x, y in zip(original, drops, strict=True)])
    interval = expected.confidence_interval()
    assert (row["task"], row["models"]) == ("cola", models)
    assert np.allclose([row["r"], row["ci_low"], row["ci_high"]], [expected.statistic, *interval], atol=1e-9)


def test_the_correlation_is_of_the_fewest_dynamic_heads() -> None:
    values = {(f"m{n}", "cola"): (0.5 + 0.1 * n, 0.45 + 0.09 * n - 0.02 * n**2) for n in range(4)}
    scores = scores_of(values)
    constant = scores[scores["dynamic_fraction"] == 0]
    some = constant.assign(dynamic_fraction=0.5, score=np.repeat([0.1, 0.55, 0.3, 0.78], 2))
    found = drops_by_original(Outcome(pd.concat([scores, some]), {}))
    pd.testing.assert_frame_equal(found, drops_by_original(Outcome(scores, {})))
    other = drops_by_original(Outcome(pd.concat([scores[scores["dynamic_fraction"] == 1], some]), {}))
    assert abs(other["r"][0] - found["r"][0]) > 0.1


def test_over_all_tasks_the_correlation_is_partial() -> None:
    draw = np.random.default_rng(0)
    original = {task: level + 0.05 * draw.standard_normal(4) for task, level in (("a", 0.3), ("b", 0.6), ("c", 0.9))}
    drops = {task: 5 + 20 * x + draw.standard_normal(4) for task, x in original.items()}  # per cent
    row = drops_by_original(Outcome(scores_of(values_of(original, drops)), {})).iloc[-1]

    def r_of(models: Sequence[int]) -> float:
        parts = (
            np.concatenate([part[models] - part[models].mean() for part in of.values()]) for of in (original, drops)
        )
        return float(np.corrcoef(*parts)[0, 1])

    r, left = r_of([0, 1, 2, 3]), np.arctanh([r_of([n for n in range(4) if n != out]) for out in range(4)])
    half = stats.t.ppf(0.975, 3) * np.sqrt(3 / 4 * ((left - left.mean()) ** 2).sum())  # four models, not twelve dots
    assert (row["task"], row["models"]) == (ALL_TASKS, 12)
    assert np.allclose(
        [row["r"], row["ci_low"], row["ci_high"]], [r, *np.tanh([np.arctanh(r) - half, np.arctanh(r) + half])]
    )


def test_a_correlation_of_rounding_errors_is_0() -> None:
    """Within one task the drop is the same, within the other the original."""
    original, drops = {"a": [0.1 + 0.2, 0.7], "b": [0.6, 0.6]}, {"a": [4.0, 4.0], "b": [0.1 + 0.2, 8.1]}
    row = drops_by_original(Outcome(scores_of(values_of(original, drops)), {})).iloc[-1]
    assert (row["task"], row["r"]) == (ALL_TASKS, 0)


def test_dots_of_one_model_are_no_independent_ones() -> None:
    """Original and drop are independent qualities of a model, alike in all tasks: the interval of r holds 0 in 95 %."""
    draw, held = np.random.default_rng(0), 0
    for _ in range(20):
        quality, loss = draw.standard_normal((2, 6))
        original = {task: 0.7 + 0.05 * quality + 0.01 * draw.standard_normal(6) for task in "abcdefgh"}
        drops = {task: 10 + loss + 0.2 * draw.standard_normal(6) for task in original}
        row = drops_by_original(Outcome(scores_of(values_of(original, drops)), {})).iloc[-1]
        held += row["ci_low"] <= 0 <= row["ci_high"]
    assert held >= 17  # 9 as of 48 independent dots


def values_of(
    original: dict[str, np.ndarray], drops: dict[str, np.ndarray]
) -> dict[tuple[str, str], tuple[float, float]]:
    """Untouched and constant scores by (model, task), from scores and drops in per cent."""
    return {
        (f"m{n}", task): (x, x * (1 - y / 100))
        for task in original
        for n, (x, y) in enumerate(zip(original[task], drops[task], strict=True))
    }


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "drops, told",
    [
        ((1, 2, 3.1, 3.9, 5), "lose more (r = 1.00"),
        ((5, 4, 3.1, 1.9, 1), "lose less (r = −1.00"),
        ((1, 5, 1, 5, 2), "cannot be told (r = 0.1"),
        ((1, 2, 4), "cannot be told from so few models"),
    ],
)
def test_the_page_says_whether_better_models_lose_more(drops: tuple[float, ...], told: str) -> None:
    values = {(f"m{n}", "cola"): (0.5 + 0.1 * n, (0.5 + 0.1 * n) * (1 - y / 100)) for n, y in enumerate(drops)}
    outcome = Outcome(scores_of(values), {})
    assert told in describe_correlations(drops_by_original(outcome))
    page = several_page(outcome.scores, pd.DataFrame(columns=list(COST_COLUMNS)), {"model": {"name": "m0, m1"}})
    assert told.split(" (")[0] in page
    assert "Do better models lose more?" in page


@pytest.mark.exhaustive
def test_models_are_no_tasks_and_weak_ones_are_named() -> None:
    values = {("b1", "t"): (0.9, 0.6), ("b2", "t"): (0.92, 0.62), ("b3", "t"): (0.69, 0.6)}
    records = [
        {
            "folder": name,
            "model": {"name": name},
            "config": {},
            "cost": {"seconds": 1.0},
            "data": {"task": "t", "majority": 0.69},
        }
        for name, _ in values
    ]
    metadata = {"model": {"name": "b1, b2, b3"}, "data": {"task": "t"}, "runs": records}
    frame = scores_of(values)
    said = " ".join(ledes(Outcome(frame, metadata), pd.DataFrame(columns=list(COST_COLUMNS)), metadata))
    assert "on average over 3 models, at most by 33.3 % (t, b1)" in said
    assert "in 1 of 3 cases, which cannot show what heads do: t, b3 (0.69)" in said
    page = several_page(frame, pd.DataFrame(columns=list(COST_COLUMNS)), metadata)
    assert "of 3 models" in page
    assert "of 3 tasks" not in page


def test_models_are_called_by_the_last_part_of_a_path() -> None:
    paths = ["/runs/one/my bert 1", "/runs/one/my bert 2", "example/tiny"]
    outcome = Outcome(scores_of({(path, "t"): (0.9, 0.6) for path in paths}), {})
    assert [title(outcome, path, "t") for path in paths] == ["t, my bert 1", "t, my bert 2", "t, example/tiny"]
    same = Outcome(scores_of({(path, "t"): (0.9, 0.6) for path in ("/a/b/bert", "/a/c/bert")}), {})
    assert title(same, "/a/c/bert", "t") == "t, /a/c/bert"


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """The jobs that were run: in this process, for tests of launchers have processes of their own."""
    made: list[Job] = []

    def run(jobs: Sequence[Job], engine: object, *, finished: Callable[[str], bool], **options: Any) -> dict[str, str]:
        made[:] = jobs
        codes = {job.key: main(list(job.command[2:])) for job in jobs}
        assert [finished(key) for key in codes] == [code == 0 for code in codes.values()]
        return {key: "what went wrong" for key, code in codes.items() if code}

    monkeypatch.setattr(several, "run_jobs", run)
    return made


@pytest.mark.exhaustive
def test_each_pair_is_a_run_and_the_scores_stand_together(
    regard: Regard, tiny: Tiny, tasks: list[Path], jobs: list[Job]
) -> None:
    out = tasks[0].parent / "out"
    ended = regard("replace", tiny("bert"), tiny("llama"), "--task", f"{tasks[0]},{tasks[1]}", *SMALL, "--out", out)
    assert ended.code == 0, ended.err
    result = ReplaceResult.load(out)
    assert result.scores.groupby(["model", "task"]).ngroups == len(jobs) == 4
    runs = [out / run["folder"] for run in result.metadata["runs"]]
    assert [path.name for path in runs] == ["bert-a", "bert-b", "llama-a", "llama-b"]
    for run in runs:
        part = ReplaceResult.load(run)
        keys = {name: part.scores[name].iloc[0] for name in ("model", "task")}
        same = result.frame(**keys).reset_index(drop=True)
        pd.testing.assert_frame_equal(same, part.scores)
        assert {"average", "zeros", "identity"} <= set(part.scores["constants"]), "as a run by default"
    assert not out.with_name("out.work").exists()


@pytest.mark.exhaustive
def test_what_failed_is_named_and_what_is_done_is_kept(
    regard: Regard, tiny: Tiny, tasks: list[Path], jobs: list[Job]
) -> None:
    out, broken = tasks[0].parent / "out", tasks[0].parent / "nothing"
    shutil.copytree(tiny("llama"), broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "hidden_size": 2 * config["hidden_size"]}))
    line = ("replace", tiny("bert"), broken, "--task", tasks[0], *SMALL, "--out", out)
    ended = regard(*line)
    assert (ended.code, out.exists()) == (2, False)
    last = ended.err.splitlines()[-1]
    assert all(told in last for told in ("1 of 2 runs failed", "nothing (what went wrong)", "--resume"))
    assert [job.key for job in jobs] == ["bert-a", "nothing-a"]
    assert regard(*line, "--resume").code == 2
    assert [job.key for job in jobs] == ["nothing-a"]
    tasks[0].write_text(tasks[0].read_text().replace("a", "b"))
    ended = regard(*line, "--resume")
    assert ended.code == 2
    assert "nothing (" not in ended.err, "over other rows no run goes on"


def test_a_model_that_there_is_not_is_refused_before_a_run(
    regard: Regard, tiny: Tiny, tasks: list[Path], jobs: list[Job]
) -> None:
    out = tasks[0].parent / "out"
    ended = regard("replace", tiny("bert"), "nothing", "--task", tasks[0], *SMALL, "--out", out)
    assert ended.code == 2
    assert "model: 'nothing' is no folder here" in ended.err
    assert jobs == []


def test_models_are_looked_for_where_they_are_run(
    regard: Regard, tiny: Tiny, tasks: list[Path], jobs: list[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not here for a cluster, nor where a run is finished."""
    out, passing = tasks[0].parent / "out", Path("passing")
    shutil.copytree(tiny("bert"), passing)
    line = ("replace", passing, "nothing", "--task", tasks[0], *SMALL, "--out", out)
    monkeypatch.setattr("regard.runs.launchers.make_launcher", lambda *_, **__: Local(workers=1))
    assert "1 of 2 runs failed" in regard(*line, "--launcher", "ray").err
    assert [job.key for job in jobs] == ["passing-a", "nothing-a"]
    shutil.rmtree(passing)
    assert "model: 'nothing' is no folder here" in regard(*line, "--resume").err


@pytest.mark.parametrize(
    "models, names, told",
    [
        (("m", "m"), ("a",), "model: expected each once, got m twice"),
        (("m",), ("a", "a"), "task: expected each once, got a twice"),
        (("m",), ("", ""), "task: expected names apart by commas, got an empty one"),
        (("m",), ("one/rows.jsonl", "two/rows.jsonl"), r"task: expected each once, got rows\.jsonl twice"),
    ],
)
def test_each_model_and_task_is_given_once(models: tuple[str, ...], names: tuple[str, ...], told: str) -> None:
    with pytest.raises(UserError, match=told):
        several.make_pairs(models, names)


def test_folders_of_the_same_name_are_told_apart() -> None:
    keys = [pair.key for pair in several.make_pairs(("x/m", "y/m", "x-m"), ("a",))]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    "options, told",
    [
        (("--adapter", "x"), "adapter: expected one model with it"),
        (("--launcher", "slurm"), "launcher: expected"),
        (("--workers", 0), "workers: expected at least 1"),
    ],
)
def test_mistakes_are_refused_before_a_run_begins(
    options: tuple[object, ...], told: str, regard: Regard, tiny: Tiny, tasks: list[Path]
) -> None:
    before = sorted(tasks[0].parent.rglob("*"))
    ended = regard("replace", tiny("bert"), "--task", f"{tasks[0]},{tasks[1]}", *SMALL, *options)
    assert (ended.code, told in ended.err) == (2, True)
    assert sorted(tasks[0].parent.rglob("*")) == before


def test_one_run_has_no_workers(regard: Regard, tiny: Tiny, tasks: list[Path]) -> None:
    for option, value in (("workers", 2), ("launcher", "ray")):
        ended = regard("replace", tiny("bert"), "--task", tasks[0], f"--{option}", value)
        assert f"{option}: expected several models or tasks" in ended.complaint
