"""Key figures of a measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from regard.commands.measure.tokens import top_tokens
from regard.report import labels
from regard.report.arrays import Block, Measure, mean_over_heads, nanmean
from regard.report.key_figure import KeyFigure

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
    return [*_models(all_measures, metadata), *_tokens(tokens), *_extremes(all_measures, metadata)]


def several_sites(all_measures: Sequence[Measure]) -> bool:
    """Return whether the measures have several sites."""
    return len({measure.site for measure in all_measures}) > 1


def strongest(block: Block) -> tuple[int, float, float]:
    """Return position, value and standard error of the largest value of a block over positions."""
    if np.isnan(block.values).all():
        return int(block.coordinates["position"][0]), float("nan"), float("nan")
    at = int(np.nanargmax(block.values))
    return int(block.coordinates["position"][at]), float(block.values[at]), float(block.errors[at])


def over_layers_and_heads(block: Block) -> Block:
    """The mean over layers and heads, by position; without errors."""
    by_layer = mean_over_heads(block)
    values = nanmean(by_layer.values, 0)
    return Block({"position": block.coordinates["position"]}, values, np.full_like(values, np.nan))


def _models(all_measures: Sequence[Measure], metadata: Mapping[str, Any]) -> list[KeyFigure]:
    multiple_sites, figures = several_sites(all_measures), []
    for measure in all_measures:
        label = labels.name(measure, metadata, with_site=False)
        unit = labels.unit(measure.statistic, metadata)
        whole, by_position = measure.block(), measure.block("position")
        if whole is not None:
            value, error, note = float(whole.values), float(whole.errors), "whole model"
        elif by_position is not None:
            position, value, error = strongest(by_position)
            note = f"position {position}"
        elif measure.statistic == "sink_rate" and (by_head := measure.block("layer", "head", "position")) is not None:
            position, value, error = strongest(over_layers_and_heads(by_head))
            note = f"position {position}, mean over heads"
        else:
            continue
        sure = "" if np.isnan(error) else f"± {labels.number(error, 2)} (SE), "
        figures.append(
            KeyFigure(label, labels.with_unit(value, unit), sure + note, _site(measure.site, multiple_sites))
        )
    return figures


def _tokens(tokens: pd.DataFrame | None) -> list[KeyFigure]:
    best = top_tokens(tokens, 1)
    multiple_sites = len(best) > 1
    return [
        KeyFigure(
            "Top sink token",
            labels.visible(str(row.token)),
            f"position {row.position}, strongest in {labels.number(100 * row.share, 3)} % of samples × heads",
            _site(str(row.site), multiple_sites),
        )
        for row in best.itertuples(index=False)
    ]


def _extremes(all_measures: Sequence[Measure], metadata: Mapping[str, Any]) -> list[KeyFigure]:
    multiple_sites, figures = several_sites(all_measures), []
    for measure in all_measures:
        extreme, block = EXTREMES.get(measure.statistic), measure.block("layer")
        if extreme is None or block is None or np.isnan(block.values).all():
            continue
        index = int(np.nanargmax(block.values) if extreme == "max" else np.nanargmin(block.values))
        value = labels.with_unit(float(block.values[index]), labels.unit(measure.statistic, metadata))
        error = block.errors[index]
        margin = "" if np.isnan(error) else f"± {labels.number(float(error), 2)} (SE), "
        label = f"{labels.name(measure, metadata, with_site=False)}, {extreme}."
        figures.append(
            KeyFigure(
                label, value, f"{margin}layer {block.coordinates['layer'][index]}", _site(measure.site, multiple_sites)
            )
        )
    return figures


def _site(code: str, multiple_sites: bool) -> str:
    return labels.site(code) if multiple_sites else ""
