"""What the page's script reads: measures as nested arrays, written as JSON that is safe inside HTML."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regard.report import labels
from regard.report.arrays import Block, Floats, Measure, mean_over_heads, nanmean

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
    found = {name: {measure.key: measure for measure in of_run} for name, of_run in runs.items()}
    keys = list(dict.fromkeys(key for of_run in found.values() for key in of_run))
    kept = thinned_length([measure for of_run in found.values() for measure in of_run.values()])
    written = []
    for statistic, site, epsilon in keys:
        of_runs = [of_run.get((statistic, site, epsilon)) for of_run in found.values()]
        written.append(
            {
                "statistic": statistic,
                "site": site,
                "epsilon": epsilon,
                "title": labels.title(statistic, record),
                "unit": labels.unit(statistic, record),
                "description": labels.description(statistic, record),
                "runs": [None if measure is None else _blocks(measure, kept) for measure in of_runs],
            }
        )
    sites = {site: labels.site(site) for _, site, _ in keys}
    return {"runs": list(found), "sites": sites, "measures": written}


def thinned_length(every: Sequence[Measure]) -> NDArray[np.int64] | None:
    """The positions that the page keeps, None for all: the first ones and then evenly on a logarithmic scale."""
    blocks = [block for measure in every for block in measure.blocks.values() if "position" in block.axes]
    size = sum(block.values.size for block in blocks)
    if size <= NUMBERS:
        return None
    positions = np.unique(np.concatenate([block.coordinates["position"] for block in blocks]))
    wanted = max(2 * FIRST, int(len(positions) * NUMBERS / size))
    steps = np.geomspace(FIRST, len(positions) - 1, wanted - FIRST).round().astype(np.int64)
    kept = np.unique(np.concatenate([np.arange(FIRST), steps]))
    return np.asarray(positions[kept])


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


def _blocks(measure: Measure, kept: NDArray[np.int64] | None) -> dict[str, Any]:
    written = {}
    for axes, block in measure.blocks.items():
        if kept is not None and "position" in axes:
            block = block.keep("position", np.isin(block.coordinates["position"], kept))
        written["".join(SHORT[axis] for axis in axes) or "model"] = _block(block)
    rest = _rest(measure)
    if rest is not None:
        written["rest"] = {"l": rest[0].tolist(), "v": rounded(rest[1], 5)}
    return written


def _rest(measure: Measure) -> tuple[NDArray[np.int64], Floats] | None:
    """Layers and, by layer, the mean over heads and all positions but the first; None where layers have a value."""
    if measure.block("layer") is not None or measure.block("layer", "head") is not None:
        return None
    by_head, by_position = measure.block("layer", "head", "position"), measure.block("layer", "position")
    block = by_position if by_position is not None else by_head and mean_over_heads(by_head)
    if block is None or len(block.coordinates["position"]) < 2:
        return None
    return block.coordinates["layer"], nanmean(block.values[:, 1:], 1)


def _block(block: Block) -> dict[str, Any]:
    data: dict[str, Any] = {SHORT[axis]: places.tolist() for axis, places in block.coordinates.items()}
    data["v"] = rounded(block.values, 5)
    if np.isfinite(block.errors).any():
        data["e"] = rounded(block.errors, 2)
    return data
