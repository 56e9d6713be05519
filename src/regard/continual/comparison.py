"""Methods of continual learning side by side: means over seeds and orders, and differences paired by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from regard.errors import UserError
from regard.runs.intervals import Interval, check_confidence, holm, signed_rank_test, t_interval, t_test

COLUMNS = ("stream", "method", "seed", "order", "scenario", "metric", "value")
"""The columns of a table of metrics."""
PLACE = ("stream", "scenario", "metric")
"""What numbers must share to be held against each other."""
PAIR = ("seed", "order")
"""What pairs the runs of two methods."""
SUMMARY = ("stream", "method", "scenario", "metric", "n", "mean", "std", "ci_low", "ci_high")
DIFFERENCES = (
    *("stream", "scenario", "metric", "method", "against", "n", "difference", "std", "ci_low", "ci_high", "overlaps"),
    *("t_test", "t_test_holm", "signed_rank", "signed_rank_holm"),
)


def summarize(metrics: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """Return one row for each stream, method, scenario and metric: `n` runs, `mean`, `std`, `ci_low` and `ci_high`.

    `metrics` is as `metrics_table` gives it. The interval is mean ± t · s/√n with Student's t for n − 1 degrees of
    freedom; a seed with an order is one run. Values that are not defined are left out: `n` is 0 where all are, and what
    `n` does not give is null.
    """
    check_metrics(metrics)
    check_confidence(confidence)
    rows = []
    for key, group in metrics.groupby(["stream", "method", "scenario", "metric"], sort=False):
        interval = t_interval(group["value"].dropna().to_numpy(), confidence)
        rows.append((*key, interval.n, interval.mean, interval.std, interval.ci_low, interval.ci_high))
    return _as_floats(pd.DataFrame(rows, columns=[*SUMMARY]), "mean", "std", "ci_low", "ci_high")


def compare_methods(metrics: pd.DataFrame, against: str | None = None, confidence: float = 0.95) -> pd.DataFrame:
    """Return one row for each stream, scenario, metric and two methods: how much more `method` has than `against`.

    Against one method, or, if it is None, each method against all that come before it. `n` runs of both, paired by seed
    and order; `difference`, its `sd`, the Student t interval from `low` to `high`, and `overlaps`: whether that holds
    0 (null where there is none). `t_test` and `signed_rank` are the p of the paired tests, `…_holm` the same corrected
    for the comparisons of one metric, scenario and stream; null where a test is not defined: `t_test` for one run or
    when all differences are the same, `signed_rank` for fewer than 6 that are not 0. Two methods without a run in
    common that defines the metric have no row. A UserError says that `against` is no method of the table.
    """
    check_metrics(metrics)
    check_confidence(confidence)
    methods = list(metrics["method"].unique())
    if against is not None and against not in methods:
        raise UserError(f"against: expected a method of the table ({', '.join(map(str, methods))}), got {against}")
    rows = []
    for key, group in metrics.groupby([*PLACE], sort=False):
        rows += _compare_pairs(key, group, against, confidence)
    table = pd.DataFrame(rows, columns=[*DIFFERENCES]).astype({"overlaps": "boolean"})
    return _as_floats(
        table, "difference", "std", "ci_low", "ci_high", "t_test", "t_test_holm", "signed_rank", "signed_rank_holm"
    )


def check_metrics(metrics: pd.DataFrame) -> None:
    """Raise UserError if this is no table of metrics, or a run has a metric twice."""
    missing = [name for name in COLUMNS if name not in metrics]
    if missing:
        raise UserError(f"metrics: expected the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
    twice = metrics[metrics.duplicated([*PLACE, "method", *PAIR])]
    if len(twice):
        description = ", ".join(f"{name} {twice.iloc[0][name]}" for name in (*PLACE, "method", *PAIR))
        raise UserError(f"metrics: expected one value for each run, several are of {description}")


def _compare_pairs(key: tuple[Any, ...], group: pd.DataFrame, against: str | None, confidence: float) -> list[tuple]:
    """Return the rows of one metric: each two methods, with what their tests say, alone and together."""
    values = {method: rows.set_index([*PAIR])["value"] for method, rows in group.groupby("method", sort=False)}
    names = list(values)
    pairs = [(name, other) for i, name in enumerate(names) for other in names[:i]]
    if against is not None:
        pairs = [(name, against) for name in names if name != against and against in values]
    comparisons: list[tuple[str, str, Interval, float | None, float | None]] = []
    for method, other in pairs:
        paired = (values[method] - values[other]).dropna().to_numpy(dtype=np.float64)
        if len(paired):
            comparisons.append(
                (method, other, t_interval(paired, confidence), t_test(paired), signed_rank_test(paired))
            )
    corrected = zip(
        holm([comparison[3] for comparison in comparisons]),
        holm([comparison[4] for comparison in comparisons]),
        strict=True,
    )
    return [
        (
            *key,
            method,
            other,
            interval.n,
            interval.mean,
            interval.std,
            interval.ci_low,
            interval.ci_high,
            interval.overlaps,
            t,
            t_holm,
            rank,
            rank_holm,
        )
        for (method, other, interval, t, rank), (t_holm, rank_holm) in zip(comparisons, corrected, strict=True)
    ]


def _as_floats(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    return table.astype(dict.fromkeys(columns, "float64"))
