"""Made-up runs of continual learning that follow the schema of their run folder."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

TASKS = ("Politics", "Science", "Sports", "Health")
METHODS = ("finetune", "prescale", "joint")
SEEDS = (39, 123, 508)
ORDER = "2-0-1-3"
DROP = {"finetune": 8.0, "prescale": 1.0, "joint": 0.0}
"""How many points a task loses with each task that is learnt after it."""

QUANTILE = 4.302653
"""The 0.975 quantile of Student's t for two degrees of freedom."""

LAYERS = 3
_INDEX = ["method", "seed", "order"]


def matrix(
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = SEEDS,
    tasks: Sequence[str] = TASKS,
    settings: Sequence[str] = ("til", "cil"),
    *,
    orders: bool = False,
) -> pd.DataFrame:
    """Scores by formula: 96 + a tenth for each seed, less `DROP` for each later task; CIL is 20 points lower.

    `joint` is scored at its end only. With `orders` every seed turns the order of the tasks by one more.
    """
    rows = []
    for method, (index, seed), setting in itertools.product(methods, enumerate(seeds), settings):
        turn = index if orders else 0
        names = [*tasks[turn:], *tasks[:turn]]
        order = "-".join(str(tasks.index(name)) for name in names) if orders else ORDER
        for after, place in itertools.product(range(len(tasks) + 1), range(1, len(tasks) + 1)):
            ahead = place == after + 1
            if method == "joint" and after < len(tasks):
                continue
            if place <= after or (ahead and setting == "til"):
                lost = DROP.get(method, 3.0) * (after - place)
                score = 50.0 if ahead else 96 + index / 10 - lost - (20 if setting == "cil" else 0)
                rows.append(("yahoo-split", method, seed, order, after, place, names[place - 1], setting, score, 100))
    names = ["stream", *_INDEX, "after_task", "task_index", "task", "scenario", "score", "n"]
    return pd.DataFrame(rows, columns=names)


def metrics(scores: pd.DataFrame) -> pd.DataFrame:
    """AP, FGT and learning accuracy of every run, from the scores."""
    rows = []
    for (stream, method, seed, order, setting), run in scores.groupby(["stream", *_INDEX, "scenario"], sort=False):
        square = run.pivot(index="after_task", columns="task_index", values="score")
        count = len(square.columns)
        final, found = square.loc[count].to_numpy(), dict.fromkeys(("forgetting", "learning_accuracy"), np.nan)
        if method != "joint":
            first = np.array([square.loc[k, k] for k in range(1, count + 1)])
            found = {
                "forgetting": (first - final)[:-1].mean() if count > 1 else np.nan,
                "learning_accuracy": first.mean(),
            }
        found = {"average_performance": final.mean(), **found}
        rows += [(stream, method, seed, order, setting, name, value) for name, value in found.items()]
    return pd.DataFrame(rows, columns=["stream", *_INDEX, "scenario", "metric", "value"])


def summary(of_runs: pd.DataFrame) -> pd.DataFrame:
    """Means with 95 % intervals, for three runs or for one."""
    rows = []
    for (method, setting, metric), run in of_runs.groupby(["method", "scenario", "metric"], sort=False):
        values = run["value"].dropna().to_numpy()
        if not len(values):
            rows.append((method, setting, metric, 0, np.nan, np.nan, np.nan, np.nan))
            continue
        deviation = values.std(ddof=1) if len(values) > 1 else np.nan
        half = QUANTILE * deviation / np.sqrt(len(values))
        mean = values.mean()
        rows.append((method, setting, metric, len(values), mean, deviation, mean - half, mean + half))
    return pd.DataFrame(rows, columns=["method", "scenario", "metric", "n", "mean", "std", "ci_low", "ci_high"])


def differences(of_runs: pd.DataFrame, against: str = "finetune", half: float = 0.5) -> pd.DataFrame:
    """Mean differences to a method, ± `half`; p is a hundredth where the interval leaves 0 out, else a half."""
    means = of_runs.groupby(["method", "scenario", "metric"], sort=False)["value"].mean()
    rows = []
    for (method, setting, metric), mean in means.items():
        if method != against and np.isfinite(mean):
            value = mean - means[against, setting, metric]
            zero = abs(value) <= half
            p = 0.5 if zero else 0.01
            rows.append((method, against, setting, metric, 3, value, value - half, value + half, p, zero))
    names = ["method", "against", "scenario", "metric", "n", "difference", "ci_low", "ci_high"]
    return pd.DataFrame(rows, columns=[*names, "t_test_holm", "overlaps"])


def cost(scores: pd.DataFrame) -> pd.DataFrame:
    """Each task took 10 s of training, 20 with the second method, a fifth of that around it, and 2e12 FLOPs."""
    tasks = scores[["stream", *_INDEX, "task_index", "task"]].drop_duplicates().sort_values([*_INDEX, "task_index"])
    names = list(scores["method"].unique())
    slow = tasks["method"].map({name: 1 + (index == 1) for index, name in enumerate(names)})
    return tasks.assign(
        seconds=10.0 * slow,
        hook_seconds=2.0 * slow,
        scoring_seconds=1.0,
        diagnostics_seconds=0.5,
        saving_seconds=0.25,
        flops=2e12,
        peak_memory_mib=800.0 + 10 * tasks["task_index"],
        memory_bytes=np.where(slow > 1, 2**20, 0) * tasks["task_index"],
        memory_examples=0,
        steps=100,
        examples_per_second=64.0 / slow,
    )


def diagnostics(scores: pd.DataFrame) -> pd.DataFrame:
    """Before 1 + layer, after three times that, and for the whole model what the task will have lost, + 1."""
    keys = ["stream", *_INDEX, "task_index", "task"]
    rows: list[tuple[Any, ...]] = []
    last = scores["task_index"].max()
    for row in scores[keys].drop_duplicates().itertuples(index=False):
        for statistic, ahead in itertools.product(("sink_deviation", "over_smoothing"), (1, 0)):
            run = (row.stream, row.method, row.seed, row.order)
            place = (*run, row.task_index - ahead, row.task_index, row.task, statistic)
            rows += [(*place, layer, (1.0 + layer) * (1 if ahead else 3), 0.1) for layer in range(LAYERS)]
            rows.append((*place, None, 1 + DROP.get(row.method, 3.0) * (last - row.task_index) * (1 - ahead), 0.1))
    names = ["stream", "method", "seed", "order", "after_task", "task_index", "task", "statistic", "layer", "value"]
    return pd.DataFrame(rows, columns=[*names, "standard_error"]).astype({"layer": "Int64"})


def interference(scores: pd.DataFrame) -> pd.DataFrame:
    """For the pairs a ≤ b after the last task: a cosine of 1 with itself, else minus a tenth of the distance."""
    names = scores.drop_duplicates("task_index").set_index("task_index")["task"].to_dict()
    last, rows = max(names), []
    for (stream, method, seed, _), _ in scores.groupby(["stream", *_INDEX], sort=False):
        for a, b in itertools.combinations_with_replacement(range(1, last + 1), 2):
            cosine = 1.0 if a == b else -(b - a) / 10
            rows.append((stream, method, seed, last, a, names[a], b, names[b], 7 * cosine, cosine))
    columns = ["stream", "method", "seed", "after_task", "task_index_a", "task_a", "task_index_b", "task_b"]
    return pd.DataFrame(rows, columns=[*columns, "dot", "cosine"])


def gate(scores: pd.DataFrame, methods: Sequence[str] = ("prescale",), given: Sequence[int] = ()) -> pd.DataFrame:
    """Rows give half of their weight to their own block, a tenth less with each later task, and share the rest out.

    `given`: the block of each task; without, each has one of its own. Another block alone is right 60 times of 100 at
    the end, 55 when a task was learnt.
    """
    names = scores.drop_duplicates("task_index").set_index("task_index")["task"].to_dict()
    last, rows = max(names), []
    blocks = list(given or range(1, last + 1))
    runs = scores[scores["method"].isin(methods)].groupby(["stream", *_INDEX], sort=False)
    for key, after in itertools.product([key for key, _ in runs], range(1, last + 1)):
        used = sorted(set(blocks[:after]))
        for place in range(1, after + 1):
            mine = blocks[place - 1]
            own = 1.0 if len(used) == 1 else 0.5 - 0.1 * (after - place)
            rest = (1 - own) / max(1, len(used) - 1)
            told = [("weight", block, own if block == mine else rest) for block in used]
            told += [
                ("own_adapter_weight", mine, own),
                ("entropy", None, 0.1 * after),
                ("reflection", None, 0.01 * after),
            ]
            if after in (place, last):
                told += [("routed_score", None, 80.0), ("own_adapter_score", mine, 90.0)]
                others = [block for block in reversed(blocks[:after]) if block != mine]
                told += [("last_adapter_score", block, 60.0 if after == last else 55.0) for block in others[:1]]
            rows += [(*key, after, place, names[place], *one) for one in told]
    columns = ["stream", *_INDEX, "after_task", "task_index", "task", "statistic", "adapter", "value"]
    return pd.DataFrame(rows, columns=columns).astype({"adapter": "Int64"})


def pseudo(scores: pd.DataFrame, methods: Sequence[str] = ("prescale",)) -> pd.DataFrame:
    """Samples of all tasks but the last, those of later tasks easier to tell apart and farther from real ones."""
    names = scores.drop_duplicates("task_index").set_index("task_index")["task"].to_dict()
    rows = []
    for key, _ in scores[scores["method"].isin(methods)].groupby(["stream", *_INDEX], sort=False):
        for place in range(1, max(names)):
            told = {"kept": 100.0, "two_sample_accuracy": 0.5 + place / 10, "frechet": place / 100}
            told |= {"real membership": 0.75, "two_sample_p": np.nan}
            rows += [(*key, place, names[place], *one) for one in told.items()]
    return pd.DataFrame(rows, columns=["stream", *_INDEX, "task_index", "task", "statistic", "value"])


def tables(scores: pd.DataFrame | None = None) -> dict[str, pd.DataFrame]:
    """All tables of a run folder, made from its scores."""
    known = matrix() if scores is None else scores
    of_runs = metrics(known)
    found = {"matrix": known, "metrics": of_runs, "summary": summary(of_runs), "cost": cost(known)}
    first = str(known["method"].iloc[0])
    found |= {"differences": differences(of_runs, first), "diagnostics": diagnostics(known)}
    return {**found, "interference": interference(known), "gate": gate(known), "pseudo": pseudo(known)}


def record(**changed: Any) -> dict[str, Any]:
    """The record of such runs; `changed` overrides its parts."""
    tasks = [
        {
            **{"name": name, "labels": [f"{name} {i}" for i in range(2)], "source": "published files"},
            **{"rows": {"train": 2490, "dev": 200, "test": 1000}},
            **{"sha256": {split: f"{split}{index}" + "ab" * 30 for split in ("train", "dev", "test")}},
        }
        for index, name in enumerate(TASKS)
    ]
    return {
        "command": "learn",
        "schema_version": 1,
        "version": "0.4.0",
        "created": "2025-11-21T12:00:00Z",
        "config": {"num_epochs": 3, "batch_size": 32, "learning_rate": 2e-5, "max_length": 128},
        "runs": [
            {
                **{"method": method, "seed": seed, "order": ORDER, "key": f"{method}-{seed}"},
                "metrics": {},
            }
            for method, seed in itertools.product(METHODS, SEEDS)
        ],
        "stream": {"name": "yahoo-split", "protocol": "clean", "tasks": tasks, "overlaps": {"train, test": 17}},
        "model": {"name": "minilm", "sha256": "cd" * 32, "parameters": 22_713_216},
        "versions": {"python": "3.11.2", "torch": "2.9.0", "transformers": "5.0.0"},
        "cost": {"seconds": 252.4, "peak_memory_mib": 812.3, "device": "cpu", "processes": 1},
        **changed,
    }
