"""What the page's script reads: measures as nested arrays, written as JSON that is safe inside HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.report import labels
from regard.report.arrays import Block, Floats, Labels, Measure, nanmean

NUMBERS = 400_000
"""The most numbers by position that one page holds; beyond it positions are thinned."""
FIRST = 16
"""The first positions, where sinks stand, are never thinned."""
SHORT = {"layer": "l", "head": "h", "position": "p"}


def payload(runs: Mapping[str, Sequence[Measure]], record: Mapping[str, Any]) -> dict[str, Any]:
    """The page's data: run names, sites, and for each measure its labels and, run by run, its blocks.

    A run that lacks a measure has None for it. `record` labels the statistics. Numbers are rounded to 5 significant
    digits, standard errors to 2.
    """
    by_key = [{measure.key: measure for measure in measures} for measures in runs.values()]
    positions = thinned_length([measure for run in by_key for measure in run.values()])
    keys = list(dict.fromkeys(key for run in by_key for key in run))
    written = [
        {
            "statistic": statistic,
            "site": site,
            "epsilon": epsilon,
            "title": labels.title(statistic, record),
            "unit": labels.unit(statistic, record),
            "description": labels.description(statistic, record),
            "runs": [_blocks(run.get((statistic, site, epsilon)), positions) for run in by_key],
        }
        for statistic, site, epsilon in keys
    ]
    return {"runs": list(runs), "sites": {site: labels.site(site) for _, site, _ in keys}, "measures": written}


def thinned_length(measures: Sequence[Measure]) -> Labels | None:
    """The positions that the page keeps, None for all: the first ones and then evenly on a logarithmic scale."""
    blocks = [block for measure in measures for block in measure.blocks.values() if "position" in block.coordinates]
    size = sum(block.values.size for block in blocks)
    if size <= NUMBERS:
        return None
    positions = np.unique(np.concatenate([block.coordinates["position"] for block in blocks]))
    count = max(2 * FIRST, int(len(positions) * NUMBERS / size))
    steps = np.geomspace(FIRST, len(positions) - 1, count - FIRST).round().astype(np.int64)
    return np.asarray(positions[np.unique(np.concatenate([np.arange(FIRST), steps]))])


def rounded(values: Floats, digits: int) -> Any:
    """The values as nested lists, rounded to significant digits; None where not finite."""
    known = np.isfinite(values)
    size = np.abs(np.where(known & (values != 0), values, 1.0))
    power = digits - 1 - np.floor(np.log10(size))
    up, down = 10.0 ** np.maximum(power, 0), 10.0 ** np.maximum(-power, 0)
    short = np.round(np.where(known, values, 0.0) * up / down) / up * down
    whole = np.isfinite(short) & (short == np.round(short)) & (np.abs(short) < 2**53)
    mixed = np.empty(short.shape, dtype=object)
    mixed[known] = short[known]
    mixed[whole & known] = short[whole & known].astype(np.int64)
    return mixed.tolist()


def _blocks(measure: Measure | None, positions: NDArray[np.int64] | None) -> dict[str, Any] | None:
    if measure is None:
        return None
    written = {}
    for axes, block in measure.blocks.items():
        if positions is not None and "position" in axes:
            block = block.keep("position", np.isin(block.coordinates["position"], positions))
        written["".join(SHORT[axis] for axis in axes) or "model"] = _block(block)
    rest = _rest(measure)
    return written if rest is None else {**written, "rest": _block(rest)}


def _rest(measure: Measure) -> Block | None:
    """The mean over heads and all positions but the first, by layer; None where layers have a value."""
    if measure.block("layer") is not None or measure.block("layer", "head") is not None:
        return None
    by_head, by_position = measure.block("layer", "head", "position"), measure.block("layer", "position")
    block = by_position if by_position is not None else by_head and by_head.mean_over("head")
    if block is None or len(block.coordinates["position"]) < 2:
        return None
    values = nanmean(block.values[:, 1:], 1)
    return Block({"layer": block.coordinates["layer"]}, values, np.full_like(values, np.nan))


def _block(block: Block) -> dict[str, Any]:
    data: dict[str, Any] = {SHORT[axis]: places.tolist() for axis, places in block.coordinates.items()}
    errors = {"e": rounded(block.errors, 2)} if np.isfinite(block.errors).any() else {}
    return {**data, "v": rounded(block.values, 5), **errors}
