"""Methods of continual learning side by side: means over seeds and orders, and differences paired by them."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from regard.continual.metrics import check_unique
from regard.errors import UserError
from regard.report.arrays import check_columns
from regard.runs.intervals import difference_interval, holm, signed_rank_test, t_interval, t_test

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


def summarize(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each stream, method, scenario and metric: `n` runs, `mean`, `std`, `ci_low` and `ci_high`.

    The interval is Student's of 95 %, mean ± t · s/√n. Values that are not defined are left out.
    """
    check_metrics(metrics)
    keys = ["stream", "method", "scenario", "metric"]
    rows = [
        {**dict(zip(keys, key, strict=True)), **asdict(t_interval(group["value"].dropna().to_numpy()))}
        for key, group in metrics.groupby(keys, sort=False)
    ]
    return pd.DataFrame(rows, columns=[*SUMMARY]).astype(dict.fromkeys(SUMMARY[5:], "float64"))


def compare_methods(metrics: pd.DataFrame, against: str | None = None) -> pd.DataFrame:
    """Return one row for each stream, scenario, metric and two methods: how much more `method` has than `against`.

    Against one method, or, if it is None, each against all before it. Runs are paired by seed and order; without one in
    common there is no row. `overlaps`: whether the Student t interval holds 0; null for one run and for equal
    differences other than 0, which have none. `t_test` and `signed_rank` are the p of the paired tests, `…_holm` the
    same corrected for the comparisons of one metric, scenario and stream; null for one run or equal differences, and of
    `signed_rank` for fewer than 6 that are not 0.
    """
    check_metrics(metrics)
    methods = list(metrics["method"].unique())
    if against is not None and against not in methods:
        raise UserError(f"against: expected a method of the table ({', '.join(map(str, methods))}), got {against}")
    rows = []
    for key, group in metrics.groupby([*PLACE], sort=False):
        rows += _compare_pairs(key, group, against)
    types = {**dict.fromkeys(DIFFERENCES[6:], "float64"), "overlaps": "boolean"}
    return pd.DataFrame(rows, columns=[*DIFFERENCES]).astype(types)


def check_metrics(metrics: pd.DataFrame) -> None:
    """Raise UserError if this is no table of metrics, or a run has a metric twice."""
    check_columns("metrics", metrics, COLUMNS)
    check_unique("metrics: expected one value for each run", metrics, (*PLACE, "method", *PAIR))


def _compare_pairs(key: tuple[Any, ...], group: pd.DataFrame, against: str | None) -> list[dict[str, Any]]:
    if group["method"].nunique() < 2:
        return []
    values = {method: rows.set_index([*PAIR])["value"] for method, rows in group.groupby("method", sort=False)}
    names = list(values)
    pairs = [(name, other) for i, name in enumerate(names) for other in names[:i]]
    if against is not None:
        pairs = [(name, against) for name in names if name != against and against in values]
    rows = []
    for method, other in pairs:
        paired = (values[method] - values[other]).dropna().to_numpy(dtype=np.float64)
        if len(paired):
            interval = difference_interval(paired)
            row = {**dict(zip(PLACE, key, strict=True)), "method": method, "against": other, **asdict(interval)}
            row |= {"difference": interval.mean, "overlaps": interval.overlaps}
            rows.append(row | {"t_test": t_test(paired), "signed_rank": signed_rank_test(paired)})
    for test in ("t_test", "signed_rank"):
        for row, p_value in zip(rows, holm([row[test] for row in rows]), strict=True):
            row[f"{test}_holm"] = p_value
    return rows
