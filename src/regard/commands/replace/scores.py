"""Scores of models with constant heads: means with intervals, relative drops, curves."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas as pd

from regard.errors import UserError
from regard.report import labels
from regard.report.arrays import check_table
from regard.runs.intervals import ROUNDING, Interval, difference_interval, t_half_width, t_interval
from regard.runs.model_card import public_name

COLUMNS = ("model", "task", "constants", "rank_heads_by", "dynamic_fraction", "seed", "metric", "score")
TEXT_PARTS = "text parts"
"""What intervals are over where there is one score whatever the seed."""
WIDTHS = ("half_width", "drop_half_width")
"""Half of the 95 % intervals of a score and of its drop over parts of a text; null where they are over seeds."""
NONE = "none"
"""Constants and ranking in rows of the original model, whose fraction of dynamic heads is 1."""
ZEROS = "zeros"
"""Constants without any attention, which every run scores beside its own."""
ATTENTION = "attention"
"""Ranking in rows of a model whose heads compute another operation, named as constants."""
IN_NATS = ("negative_log_perplexity",)
"""Metrics without a meaningful zero: their drop is a difference."""
ALL_TASKS = "all tasks"
FEWEST_MODELS = 4
"""Fewest models of which a correlation has an interval."""
GROUP = ["model", "task", "metric"]
KEYS = [*GROUP, "constants", "rank_heads_by", "dynamic_fraction"]


def constant_rows(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the original model and of constant heads."""
    return scores[scores["rank_heads_by"] != ATTENTION]


def intervals(scores: pd.DataFrame) -> pd.DataFrame:
    """Return `n`, `mean` and its 95 % interval `ci_low`, `ci_high` (Student's t) over seeds for each `KEYS`.

    The interval of one seed is that over parts of a text where it is known, else null. Null scores are left out.
    """
    check_table("scores", scores, COLUMNS)
    duplicates = scores[scores.duplicated([*KEYS, "seed"])]
    if len(duplicates):
        values = ", ".join(f"{column} {duplicates.iloc[0][column]}" for column in (*KEYS, "seed"))
        raise UserError(f"scores: expected one row for each run, several are of {values}")
    known = scores.assign(width=_widths(scores, "half_width")).dropna(subset="score")
    columns = {
        "n": ("score", "count"),
        "mean": ("score", "mean"),
        "deviation": ("score", "std"),
        "width": ("width", "first"),
    }
    means = known.groupby(KEYS, sort=False).agg(**columns).reset_index()
    over_seeds = [t_half_width(int(n), float(s)) for n, s in zip(means["n"], means["deviation"], strict=True)]
    margins = np.where(means["n"] > 1, over_seeds, means["width"])
    means["ci_low"], means["ci_high"] = means["mean"] - margins, means["mean"] + margins
    return means.drop(columns=["deviation", "width"]).astype({"ci_low": "float64", "ci_high": "float64"})


def _widths(scores: pd.DataFrame, name: str) -> pd.Series:
    """Return one of `WIDTHS`; null in tables without."""
    return scores[name].astype("float64") if name in scores else pd.Series(math.nan, scores.index)


def relative_drop(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the drop for each `KEYS` with constant heads: mean `score`, `original`, `drop` and its `unit`.

    The drop is 100 · (original − score) / |original| in "%" (null if that is 0), or original − score in "nats".
    """
    means = intervals(scores).rename(columns={"mean": "score"})
    is_original = means["dynamic_fraction"] == 1
    original = means[is_original].drop_duplicates(GROUP)[[*GROUP, "score"]].rename(columns={"score": "original"})
    drops = means[~is_original][[*KEYS, "score"]].merge(original, on=GROUP, how="left")
    in_nats = drops["metric"].isin(IN_NATS)
    size = drops["original"].abs().where(drops["original"] != 0)
    difference = drops["original"] - drops["score"]
    drops["drop"] = difference.where(in_nats, 100 * difference / size)
    drops["unit"] = np.where(in_nats, "nats", "%")
    return drops


def drop_interval(scores: pd.DataFrame, rows: pd.DataFrame) -> Interval:
    """Return the interval of the mean drop of rows of `relative_drop` in one unit, over the seeds that all have.

    The original model and the replaced one are paired by seed; the drops are in the rows' unit. With one seed the
    interval is over parts of a text, where that is known. Of a mean over rows it is as if they went together: models
    that read one text lose at the same parts. Rows without a drop are left out; without any row all is NaN.
    """
    by_row, over_parts = [], []
    rows = rows[rows["drop"].notna()]
    if rows.empty:
        return t_interval([])
    by_seed, widths = scores.set_index("seed")["score"], _widths(scores, "drop_half_width").to_numpy()
    places, is_original = scores.groupby(KEYS, sort=False).indices, scores["dynamic_fraction"].to_numpy() == 1
    originals, places_of_originals = by_seed[is_original], scores[is_original].groupby(GROUP, sort=False).indices
    for row in rows.to_dict("records"):
        of_row = places.get(tuple(row[key] for key in KEYS), [])
        original = originals.iloc[places_of_originals.get(tuple(row[key] for key in GROUP), [])]
        size = 1.0 if row["metric"] in IN_NATS else abs(float(row["original"])) / 100
        by_row.append((original - by_seed.iloc[of_row]) / size)
        over_parts.append(float(widths[of_row[0]]) / size if len(of_row) == 1 else math.nan)
    interval = difference_interval(pd.concat(by_row, axis=1).dropna().mean(axis=1).to_numpy())
    width = sum(over_parts) / len(over_parts)
    if math.isnan(width):
        return interval
    return dataclasses.replace(interval, ci_low=interval.mean - width, ci_high=interval.mean + width)


def drops_by_original(outcome: "Outcome") -> pd.DataFrame:
    """Return how drops in percent go with the original scores of models, by task and within all tasks.

    Of the main constants with the fewest dynamic heads: `task` (the last row: all), the number of `models` (of all
    tasks: of dots), Pearson's `r`, and its 95 % interval (null for fewer than four models): by Fisher's z of one task.
    Over all tasks r is of the deviations from each task's means; a model's dots go together, so the interval is of z by
    the jackknife over models (`_jackknife`). Source: PAPA, figure 3.
    """
    drops = fewest_dynamic(outcome.main)
    drops = drops[(drops["unit"] == "%") & drops["drop"].notna()]
    groups = [(str(task), rows) for task, rows in drops.groupby("task", sort=False) if len(rows) > 1]
    rows = [(task, len(dots), *_fisher(_correlation(dots), len(dots))) for task, dots in groups]
    if len(groups) > 1:
        every = pd.concat([dots for _, dots in groups])
        rows.append((ALL_TASKS, len(every), *_jackknife(every)))
    return pd.DataFrame(rows, columns=["task", "models", "r", "ci_low", "ci_high"])


def _correlation(dots: pd.DataFrame) -> float:
    """Return r of drop and original score, of the deviations from each task's means; NaN if one is constant."""
    values = dots[["original", "drop"]]
    x, y = (values - values.groupby(dots["task"]).transform("mean")).to_numpy().T
    size = math.sqrt(float(x @ x) * float(y @ y))
    if size <= ROUNDING:
        return math.nan
    r = max(-1.0, min(1.0, float(x @ y) / size))
    return 0.0 if abs(r) <= ROUNDING else r


def _fisher(r: float, n: int) -> tuple[float, float, float]:
    """Return r of `n` independent dots, and its 95 % interval by Fisher's z."""
    if n < FEWEST_MODELS or not abs(r) < 1:
        return r, math.nan, math.nan
    z, half = math.atanh(r), NormalDist().inv_cdf(0.975) / math.sqrt(n - 3)
    return r, math.tanh(z - half), math.tanh(z + half)


def _jackknife(dots: pd.DataFrame) -> tuple[float, float, float]:
    """Return r of dots of which several are of one model, and its 95 % interval: z ± t · its error over the models.

    Source: Efron and Stein 1981, Annals of Statistics 9, 586 (the jackknife's variance), leaving one model out.
    """
    r, models = _correlation(dots), dots["model"].unique()
    left = np.array([_correlation(dots[dots["model"] != model]) for model in models])
    if len(models) < FEWEST_MODELS or not abs(r) < 1 or not (np.abs(left) < 1).all():
        return r, math.nan, math.nan
    z, n = math.atanh(r), len(models)
    half = t_half_width(n, (n - 1) * float(np.arctanh(left).std(ddof=1)))
    return r, math.tanh(z - half), math.tanh(z + half)


def fewest_dynamic(drops: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the smallest fraction of dynamic heads."""
    return drops[drops["dynamic_fraction"] == drops["dynamic_fraction"].min()]


def curves(scores: pd.DataFrame) -> pd.DataFrame:
    """Return the `intervals` as curves by model, task, constants and ranking, from the original model on.

    Without dynamic heads the ranking is irrelevant: one not run there ends at the value of another.
    """
    points = intervals(scores)
    original = points[points["dynamic_fraction"] == 1].drop_duplicates(GROUP)
    rest = points[points["dynamic_fraction"] != 1]
    all_curves = []
    starts, no_rows = dict(list(original.groupby(GROUP, sort=False))), points.iloc[:0]
    ends = dict(list(rest[rest["dynamic_fraction"] == 0].groupby([*GROUP, "constants"], sort=False)))
    for key, group in rest.groupby([*GROUP, "constants", "rank_heads_by"], sort=False):
        pieces = [starts.get(key[:3], no_rows), group]
        if not (group["dynamic_fraction"] == 0).any():
            pieces.append(ends.get(key[:4], no_rows).head(1))
        curve = pd.concat([piece for piece in pieces if len(piece)]).assign(constants=key[3], rank_heads_by=key[4])
        all_curves.append(curve.sort_values("dynamic_fraction", ascending=False))
    return pd.concat(all_curves, ignore_index=True) if all_curves else rest.reset_index(drop=True)


def shown_constants(scores: pd.DataFrame, metadata: Mapping[str, Any]) -> tuple[str, str]:
    """Return the main constants and ranking: configured, else the first in the table; "none" without any."""
    config = labels.section(metadata, "config")
    rows = constant_rows(scores)
    rows = rows[rows["dynamic_fraction"] != 1]
    constants = _first(rows["constants"], config.get("constants"))
    ranking = _first(rows["rank_heads_by"][rows["constants"] == constants], config.get("rank_heads_by"))
    return constants, ranking


def _first(column: pd.Series, requested: Any) -> str:
    names = [str(name) for name in column.unique()]
    candidates = [requested] if isinstance(requested, str) else requested or []
    return next((name for name in candidates if name in names), names[0] if names else NONE)


class Outcome:
    """The scores of a run, its main constants and ranking, and the drops: all, with these, and by other operations."""

    def __init__(self, scores: pd.DataFrame, metadata: Mapping[str, Any]) -> None:
        self.scores, self.drops = scores, relative_drop(scores)
        self.constants, self.ranking = shown_constants(scores, metadata)
        is_main = (self.drops["constants"] == self.constants) & (self.drops["rank_heads_by"] == self.ranking)
        self.main = self.drops[is_main]
        self.operations = self.drops[self.drops["rank_heads_by"] == ATTENTION]
        self.multiple_models = scores["model"].nunique() > 1
        self.model_names = _shorten(list(map(str, scores["model"].unique())))
        """What models are called: of a path its last part, where that tells them apart."""
        over_parts = _widths(scores, "half_width").notna()
        self.units = TEXT_PARTS if over_parts.all() else f"seeds or {TEXT_PARTS}" if over_parts.any() else "seeds"
        """What intervals are over."""


def _shorten(models: Sequence[str]) -> dict[str, str]:
    """Return the ids of a hub and the last parts of paths; whole paths where that does not tell them apart."""
    short = {model: public_name(model) for model in models}
    return short if len(set(short.values())) == len(short) else {model: model for model in models}


def fraction_name(fraction: float) -> str:
    """Format a fraction as 1, 1/2, 3/4, 1/16 or 0; else as a decimal."""
    simple = Fraction(fraction).limit_denominator(64)
    return str(simple) if math.isclose(float(simple), fraction, abs_tol=1e-9) else f"{fraction:.3g}"


def axis_places(fractions: Sequence[float]) -> dict[float, float]:
    """Return each fraction's position on an axis of powers of two from 1 to 0, which has a position of its own."""
    sorted_fractions = sorted({float(fraction) for fraction in fractions}, reverse=True)
    positions = {fraction: round(-math.log2(fraction), 4) for fraction in sorted_fractions if fraction > 0}
    if 0.0 in sorted_fractions:
        positions[0.0] = max(positions.values(), default=0.0) + 1.5
    return positions


def pattern_counts(heads: pd.DataFrame) -> list[tuple[str, int, float]]:
    """Count heads by pattern, with fractions, most frequent first."""
    named = heads["pattern"].dropna()
    counts = named[named != ""].value_counts()
    return [(str(name), int(count), float(count / counts.sum())) for name, count in counts.items()]
