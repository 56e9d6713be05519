"""Key figures of a measurement."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.report import labels
from regard.report.arrays import Block, Measure
from regard.report.page import KeyFigure

MAXIMA = ("common_sink_ratio", "over_smoothing", "hidden_norm_sink_ratio", "perturbation_spread")
MINIMA = ("matrix_entropy",)
"""Statistics whose largest, or smallest, value over the layers is a key figure."""
NO_TOKEN = "–"
"""The token of a position without one, such as a patch of an image."""
NORMS = ("hidden_norm", "key_norm", "value_norm")
SINKS = "sink_rate"


def key_figures(
    all_measures: Sequence[Measure], metadata: Mapping[str, Any], tokens: pd.DataFrame | None
) -> list[KeyFigure]:
    """Make the key figures: whole-model values, then sink tokens, then extremes over layers."""
    multiple_sites, best = several_sites(all_measures), top_tokens(tokens, 1)

    def make_figure(measure: Measure, value: float, error: float, note: str, extreme: str = "") -> KeyFigure:
        label = labels.name(measure, metadata, with_site=False) + (f", {extreme}." if extreme else "")
        text, margin = labels.number_and_margin(value, error)
        percent = " %" if labels.unit(measure.statistic, metadata) == "%" and not np.isnan(value) else ""
        margin = f"± {margin} (SE), " if margin else ""
        return KeyFigure(label, text + percent, margin + note, labels.site(measure.site) if multiple_sites else "")

    token_figures = [
        _token_figure(row, labels.site(str(row.site)) if len(best) > 1 else "") for row in best.itertuples(index=False)
    ]
    models = [make_figure(measure, *whole) for measure in all_measures if (whole := _whole_model(measure, metadata))]
    extremes = [make_figure(measure, *extreme) for measure in all_measures if (extreme := _extreme(measure))]
    return [*models, *token_figures, *extremes]


def _token_figure(row: Any, site: str) -> KeyFigure:
    share = f"strongest in {labels.number(100 * row.share, 3)} % of samples × heads"
    if row.token == NO_TOKEN:
        return KeyFigure("Top sink position", str(row.position), share, site)
    return KeyFigure("Top sink token", labels.visible(str(row.token)), f"position {row.position}, {share}", site)


def top_tokens(tokens: pd.DataFrame | None, max_tokens: int = 10) -> pd.DataFrame:
    """Return the strongest sinks of each site: site, position, token, share (a fraction, mean over heads).

    Rows of a whole site are used if there are any; else a head without a row for a token counts as 0.
    """
    kept = ["site", "position", "token", "share"]
    if tokens is None or tokens.empty:
        return pd.DataFrame(columns=kept)
    sites = [_of_site(rows) for _, rows in tokens.groupby("site", sort=False, dropna=False)]
    best = [rows.sort_values("share", ascending=False, kind="stable").head(max_tokens) for rows in sites]
    rows = pd.concat(best, ignore_index=True)[kept]
    return rows.assign(token=rows["token"].astype(object).where(rows["token"].notna(), NO_TOKEN))


def _of_site(rows: pd.DataFrame) -> pd.DataFrame:
    whole = rows[rows["layer"].isna() & rows["head"].isna()]
    if not whole.empty:
        return whole
    heads = len(rows[["layer", "head"]].drop_duplicates())
    keys = ["site", "position", "token"]
    summed = rows.groupby(keys, sort=False, dropna=False)["share"].sum()
    return (summed / heads).reset_index()


def several_sites(all_measures: Sequence[Measure]) -> bool:
    """Return whether the measures have several sites."""
    return len({measure.site for measure in all_measures}) > 1


def strongest(block: Block, measure: Measure, metadata: Mapping[str, Any]) -> tuple[int, float, float]:
    """Return position, value and standard error of the largest value of a block of a measure over positions.

    In a causal site these are positions that at least half of the queries see: later ones are averages of few rows, and
    the largest of them would be a sink by chance, or because heads attend to what is near. Norms are no averages.
    """
    positions, values = np.asarray(block.coordinates["position"]), block.values
    if measure.site.startswith("decoder") and measure.statistic not in NORMS and len(positions):
        counted = labels.metadata_number(metadata, "config", "minimum_queries") if measure.statistic == SINKS else None
        queries = positions.max() + int(counted or 1)  # that see the last position of those with a value
        values = np.where(positions <= queries // 2, values, np.nan)
    if np.isnan(values).all():
        return int(positions[0]), float("nan"), float("nan")
    at = int(np.nanargmax(values))
    return int(positions[at]), float(values[at]), float(block.errors[at])


def _whole_model(measure: Measure, metadata: Mapping[str, Any]) -> tuple[float, float, str] | None:
    """Return value, standard error and note of a whole-model value; None if there is none."""
    whole, block, note = measure.block(), measure.block("position"), ""
    if whole is not None:
        return float(whole.values), float(whole.errors), "whole model"
    by_head = measure.block("layer", "head", "position")
    if block is None and measure.statistic == SINKS and by_head is not None:
        block, note = by_head.mean_over("head").mean_over("layer"), ", mean over heads"
    if block is None:
        return None
    position, value, error = strongest(block, measure, metadata)
    return value, error, f"position {position}{note}"


def _extreme(measure: Measure) -> tuple[float, float, str, str] | None:
    """Return value, standard error, note and kind of the extreme over layers; None if there is none."""
    block, is_maximum = measure.block("layer"), measure.statistic in MAXIMA
    if measure.statistic not in MAXIMA + MINIMA or block is None or np.isnan(block.values).all():
        return None
    index = int(np.nanargmax(block.values) if is_maximum else np.nanargmin(block.values))
    note = f"layer {block.coordinates['layer'][index]}".replace("-", "−")  # the embeddings are layer −1
    return float(block.values[index]), float(block.errors[index]), note, "max" if is_maximum else "min"
