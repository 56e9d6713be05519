"""Key figures of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.report import labels
from regard.report.arrays import Block, Measure, check_table
from regard.report.page import KeyFigure

TOKEN_COLUMNS = ("site", "layer", "head", "position", "token", "share")
EXTREMES = {
    "common_sink_ratio": "max",
    "over_smoothing": "max",
    "hidden_norm_sink_ratio": "max",
    "matrix_entropy": "min",
}


def key_figures(
    all_measures: Sequence[Measure], metadata: Mapping[str, Any], tokens: pd.DataFrame | None
) -> list[KeyFigure]:
    """Make the key figures: whole-model values, then sink tokens, then extremes over layers."""
    multiple_sites, best = several_sites(all_measures), top_tokens(tokens, 1)

    def make_figure(measure: Measure, value: float, error: float, note: str, extreme: str = "") -> KeyFigure:
        label = labels.name(measure, metadata, with_site=False) + (f", {extreme}." if extreme else "")
        margin = "" if np.isnan(error) else f"± {labels.number(error, 2)} (SE), "
        text = labels.with_unit(value, labels.unit(measure.statistic, metadata))
        return KeyFigure(label, text, margin + note, labels.site(measure.site) if multiple_sites else "")

    token_figures = [
        KeyFigure(
            "Top sink token",
            labels.visible(str(row.token)),
            f"position {row.position}, strongest in {labels.number(100 * row.share, 3)} % of samples × heads",
            labels.site(str(row.site)) if len(best) > 1 else "",
        )
        for row in best.itertuples(index=False)
    ]
    models = [make_figure(measure, *whole) for measure in all_measures if (whole := _of_model(measure))]
    extremes = [make_figure(measure, *extreme) for measure in all_measures if (extreme := _extreme(measure))]
    return [*models, *token_figures, *extremes]


def top_tokens(tokens: pd.DataFrame | None, max_tokens: int = 10) -> pd.DataFrame:
    """Return the strongest sinks of each site: site, position, token, share (a fraction, mean over heads).

    Rows of a whole site (layer and head null) are used if there are any; otherwise heads are averaged, and a head
    without a row for a token counts as 0. Empty if `tokens` is None or empty.
    """
    kept = ["site", "position", "token", "share"]
    if tokens is None or tokens.empty:
        return pd.DataFrame(columns=kept)
    check_table("tokens", tokens, TOKEN_COLUMNS)
    sites = [_of_site(rows) for _, rows in tokens.groupby("site", sort=False, dropna=False)]
    best = [rows.sort_values("share", ascending=False, kind="stable").head(max_tokens) for rows in sites]
    return pd.concat(best, ignore_index=True)[kept]


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


def strongest(block: Block) -> tuple[int, float, float]:
    """Return position, value and standard error of the largest value of a block over positions."""
    if np.isnan(block.values).all():
        return int(block.coordinates["position"][0]), float("nan"), float("nan")
    at = int(np.nanargmax(block.values))
    return int(block.coordinates["position"][at]), float(block.values[at]), float(block.errors[at])


def _of_model(measure: Measure) -> tuple[float, float, str] | None:
    """Return value, standard error and note of a whole-model value; None if there is none."""
    whole, block, note = measure.block(), measure.block("position"), ""
    if whole is not None:
        return float(whole.values), float(whole.errors), "whole model"
    by_head = measure.block("layer", "head", "position")
    if block is None and measure.statistic == "sink_rate" and by_head is not None:
        block, note = by_head.mean_over("head").mean_over("layer"), ", mean over heads"
    if block is None:
        return None
    position, value, error = strongest(block)
    return value, error, f"position {position}{note}"


def _extreme(measure: Measure) -> tuple[float, float, str, str] | None:
    """Return value, standard error, note and kind of the extreme over layers; None if there is none."""
    extreme, block = EXTREMES.get(measure.statistic), measure.block("layer")
    if extreme is None or block is None or np.isnan(block.values).all():
        return None
    index = int(np.nanargmax(block.values) if extreme == "max" else np.nanargmin(block.values))
    note = f"layer {block.coordinates['layer'][index]}"
    return float(block.values[index]), float(block.errors[index]), note, extreme
