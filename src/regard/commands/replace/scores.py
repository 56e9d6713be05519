"""Scores of models with constant heads: means with intervals, relative drops, and the curves they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd

from regard.errors import UserError
from regard.report import labels
from regard.runs.intervals import t_half_width

COLUMNS = ("model", "task", "constants", "rank_heads_by", "dynamic_fraction", "seed", "metric", "score")
NONE = "none"
"""What stands for constants and order in the rows of the untouched model, whose fraction of dynamic heads is 1."""

ATTENTION = "attention"
"""What stands for the order in the rows of a model whose heads all compute another operation, named as constants."""

IN_NATS = ("negative_log_perplexity",)
"""Metrics whose zero means nothing: not a ratio but a difference is told of them."""

KEYS = ["model", "task", "metric", "constants", "rank_heads_by", "dynamic_fraction"]
GROUP = ["model", "task", "metric"]


def check_scores(scores: pd.DataFrame) -> None:
    """Nothing, or a UserError: the scores are empty or lack a column, or a score is told twice."""
    missing = [column for column in COLUMNS if column not in scores]
    if missing:
        raise UserError(f"scores: expected the columns {', '.join(COLUMNS)}; missing: {', '.join(missing)}")
    if scores.empty:
        raise UserError("scores: expected at least one row, the table is empty")
    twice = scores[scores.duplicated([*KEYS, "seed"])]
    if len(twice):
        told = ", ".join(f"{column} {twice.iloc[0][column]}" for column in (*KEYS, "seed"))
        raise UserError(f"scores: expected one row for each run, several are of {told}")


def constant_rows(scores: pd.DataFrame) -> pd.DataFrame:
    """The rows of the untouched model, and of constant heads."""
    return scores[scores["rank_heads_by"] != ATTENTION]


def intervals(scores: pd.DataFrame) -> pd.DataFrame:
    """One row for each `KEYS`: `n` seeds, their `mean`, and its 95 % interval `ci_low`, `ci_high`, null for one seed.

    The interval is mean ± t · s/√n with Student's t for n − 1 degrees of freedom and the sample's standard deviation s.
    Null scores are left out.
    """
    check_scores(scores)
    grouped = scores.dropna(subset="score").groupby(KEYS, sort=False)["score"]
    found = grouped.agg(n="count", mean="mean", deviation="std").reset_index()
    half = [t_half_width(int(n), float(s)) for n, s in zip(found["n"], found["deviation"], strict=True)]
    found["ci_low"], found["ci_high"] = found["mean"] - half, found["mean"] + half
    return found.drop(columns="deviation").astype({"ci_low": "float64", "ci_high": "float64"})


def relative_drop(scores: pd.DataFrame) -> pd.DataFrame:
    """One row for each `KEYS` with constant heads: mean `score`, the `original`'s, the `drop`, and its `unit`.

    The drop is 100 · (original − score) / |original| in "%", and original − score in "nats" for the negative log
    perplexity; null where the original has no score or, in "%", scores 0.
    """
    means = intervals(scores).rename(columns={"mean": "score"})
    whole = means["dynamic_fraction"] == 1
    original = means[whole].drop_duplicates(GROUP)[[*GROUP, "score"]].rename(columns={"score": "original"})
    found = means[~whole][[*KEYS, "score"]].merge(original, on=GROUP, how="left")
    nats = found["metric"].isin(IN_NATS)
    size = found["original"].abs().where(found["original"] != 0)
    less = found["original"] - found["score"]
    found["drop"] = less.where(nats, 100 * less / size)
    found["unit"] = np.where(nats, "nats", "%")
    return found


def curves(scores: pd.DataFrame) -> pd.DataFrame:
    """The `intervals` as curves, one for each model, task, constants and order, from all heads dynamic to none.

    The untouched model begins every curve of its task. With no head dynamic the order does not matter: an order that
    was not run there ends at what another one of the same constants gave.
    """
    points = intervals(scores)
    whole = points[points["dynamic_fraction"] == 1].drop_duplicates(GROUP)
    rest = points[points["dynamic_fraction"] != 1]
    parts = []
    for key, group in rest.groupby([*GROUP, "constants", "rank_heads_by"], sort=False):
        begin = _of(whole, dict(zip(GROUP, key, strict=False)))
        end = _of(rest, dict(zip([*GROUP, "constants"], key, strict=False)) | {"dynamic_fraction": 0}).head(1)
        drawn = [begin, group, *([] if (group["dynamic_fraction"] == 0).any() else [end])]
        curve = pd.concat([part for part in drawn if len(part)]).assign(constants=key[3], rank_heads_by=key[4])
        parts.append(curve.sort_values("dynamic_fraction", ascending=False))
    return pd.concat(parts, ignore_index=True) if parts else rest.reset_index(drop=True)


def _of(points: pd.DataFrame, equal: Mapping[str, Any]) -> pd.DataFrame:
    for column, value in equal.items():
        points = points[points[column] == value]
    return points


def shown_constants(scores: pd.DataFrame, record: Mapping[str, Any]) -> tuple[str, str]:
    """The constants and the order that the run is about: those of the configuration, else the first in the table.

    Both are "none" where no head was replaced.
    """
    settings = labels.section(record, "config")
    there = constant_rows(scores)
    there = there[there["dynamic_fraction"] != 1]
    constants = _first(there["constants"], settings.get("constants"))
    select = _first(there["rank_heads_by"][there["constants"] == constants], settings.get("rank_heads_by"))
    return constants, select


def _first(column: pd.Series, wanted: Any) -> str:
    names = [str(name) for name in column.unique()]
    told = [wanted] if isinstance(wanted, str) else list(wanted) if isinstance(wanted, (list, tuple)) else []
    return next((name for name in told if name in names), names[0] if names else NONE)


def fraction_name(fraction: float) -> str:
    """The fraction as people write it: 1, 1/2, 3/4, 1/16, 0; else a decimal number."""
    simple = Fraction(fraction).limit_denominator(64)
    return str(simple) if math.isclose(float(simple), fraction, abs_tol=1e-9) else f"{fraction:.3g}"


def axis_places(fractions: Sequence[float]) -> dict[float, float]:
    """Where each fraction stands on an axis of powers of two, from 1 on the left to 0, which has its own place."""
    known = sorted({float(fraction) for fraction in fractions}, reverse=True)
    found = {fraction: round(-math.log2(fraction), 4) for fraction in known if fraction > 0}
    if 0.0 in known:
        found[0.0] = max(found.values(), default=0.0) + 1.5
    return found
