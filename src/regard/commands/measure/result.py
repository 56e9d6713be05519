"""Result of `regard measure`, its figures and its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import pandas as pd
import safetensors.torch
from torch import Tensor

from regard.commands.measure.page import page as measure_page
from regard.commands.measure.words import summary as measure_summary
from regard.errors import UserError
from regard.report import colors, labels
from regard.report.arrays import Block, Labels, Measure, heads, layers, measures
from regard.runs.result import RunResult
from regard.statistics.table import check_statistic, select_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from regard.commands.look.run import LookResult

TOKENS, MATRICES = "tokens.parquet", "mean_attention.safetensors"
Kind = Literal["map", "profile", "layers"]
KINDS: dict[Kind, tuple[str, ...]] = {"map": ("layer", "head"), "layers": ("layer",), "profile": ("position",)}
"""The kinds of figures, and the axes that each needs."""


@dataclass(frozen=True)
class MeasureResult(RunResult):
    """Result of a measurement; `docs/design.md` describes tables and metadata.

    Attributes:
        table: All values, with the columns `regard.statistics.table.COLUMNS`.
        metadata: Provenance of the results.
        tokens: Tokens with sinks (`TOKEN_COLUMNS`); None if `sink_tokens` was not measured.
        matrices: Mean attention of shape (head, query, key) by "site.layer", if `input_dependence` was measured.
    """

    command: ClassVar[str] = "measure"
    tables: ClassVar[Mapping[str, str]] = {"table": "statistics"}

    table: pd.DataFrame
    metadata: dict[str, Any]
    tokens: pd.DataFrame | None = None
    matrices: dict[str, Tensor] = field(default_factory=dict)

    def frame(self, statistic: str | None = None, **equal: Any) -> pd.DataFrame:
        """Return the rows of a statistic by column (None is null): `m.frame("sink_rate", layer=None, position=0)`."""
        return select_rows(self.table, statistic, equal)

    def plot(
        self,
        statistic: str,
        *,
        site: str | None = None,
        epsilon: float | None = None,
        position: int | None = None,
        kind: Kind | None = None,
    ) -> Figure:
        """Draw a statistic as a map (layers × heads), curves over layers, or a profile over positions.

        What is None is the first one possible; a position of None is the whole sequence if measured, else the first
        position. Raises UserError for what the table lacks.
        """
        check_statistic(self.table, statistic)
        measure = _choose(measures(self.table), statistic, site, epsilon)
        possible = [name for name, axes in KINDS.items() if any(set(axes) <= set(key) for key in measure.blocks)]
        if not possible:
            raise UserError(f"{measure.statistic} has one value for the whole model: there is nothing to draw")
        selected_kind = possible[0] if kind is None else kind
        if selected_kind not in possible:
            raise UserError(f"{statistic} cannot be drawn as {kind!r}: expected one of {', '.join(possible)}")
        if selected_kind == "profile":
            return _profile(measure, position)
        selected = heads(measure, position) if selected_kind == "map" else layers(measure, position)
        if selected is None:
            raise UserError(f"{measure.statistic} has no values by position: leave position out")
        suffix = "" if selected.position is None else f", position {selected.position}"
        return (_map if selected_kind == "map" else _layers)(measure, selected, suffix)

    def look(self, text: str, **options: Any) -> LookResult:
        """Return a look at a text by the model of these numbers, which is loaded by its name (`regard.look`).

        Raises UserError if its files are no longer those that were measured.
        """
        from regard import models
        from regard.commands.look.run import look

        model = self.metadata["model"]
        loaded = models.load(model["name"], adapter=model.get("adapter")) if model["sha256"] else None
        if loaded is None or loaded.sha256 != model["sha256"]:
            problem = "its files have changed" if loaded else "it was not loaded from files"
            raise UserError(f"model: expected {model['name']} as it was measured; {problem}. Use regard.look(model, …)")
        return look(loaded, None, text, **options)

    def summary(self) -> RenderableType:
        return measure_summary(self.table, self.metadata, self.tokens)

    def page(self) -> str:
        return measure_page(self.table, self.metadata, self.tokens)

    def write_artifacts(self, folder: Path) -> None:
        if self.tokens is not None:
            self.tokens.to_parquet(folder / TOKENS, index=False)
        if self.matrices:
            (folder / MATRICES).write_bytes(safetensors.torch.save(self.matrices))

    @classmethod
    def read_artifacts(cls, folder: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
        files = metadata["files"]
        return {
            "tokens": pd.read_parquet(folder / TOKENS) if TOKENS in files else None,
            "matrices": safetensors.torch.load_file(folder / MATRICES) if MATRICES in files else {},
        }


def _choose(measures: Sequence[Measure], statistic: str, site: str | None, epsilon: float | None) -> Measure:
    for name, requested in {"statistic": statistic, "site": site, "epsilon": epsilon}.items():
        matching = [measure for measure in measures if requested is None or getattr(measure, name) == requested]
        if not matching:
            available = ", ".join(dict.fromkeys(str(getattr(measure, name)) for measure in measures))
            raise UserError(f"{name} {requested!r} is not in the table: expected one of {available}")
        measures = matching
    return measures[0]


def _canvas(measure: Measure, width: float, height: float, suffix: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(width, height), layout="constrained")
    axes = canvas.add_subplot()
    axes.set_title(labels.name(measure, {}, with_site=True) + suffix, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return canvas, axes


def _map(measure: Measure, block: Block, suffix: str) -> Figure:
    layer, head = block.coordinates["layer"], block.coordinates["head"]
    size = min(0.32, 12 / max(len(layer), len(head)))
    canvas, axes = _canvas(measure, max(3.2, 1.6 + size * len(head)), max(2.2, 0.9 + size * len(layer)), suffix)
    image = axes.imshow(block.values, cmap=colors.ramp(), aspect="equal", interpolation="nearest")
    axes.set(xlabel="Head", ylabel="Layer")
    axes.set_xticks(*_ticks(head))
    axes.set_yticks(*_ticks(layer))
    axes.spines[:].set_visible(False)
    canvas.colorbar(image, ax=axes, shrink=0.8)
    return canvas


def _ticks(places: Labels) -> tuple[list[int], list[str]]:
    step = max(1, len(places) // 12)
    at = list(range(0, len(places), step))
    return at, [str(places[i]) for i in at]


def _layers(measure: Measure, block: Block, suffix: str) -> Figure:
    from matplotlib.ticker import MaxNLocator

    canvas, axes = _canvas(measure, 5.2, 3.0, suffix)
    _line(axes, block, "layer", colors.SERIES_LIGHT[0])
    axes.set(xlabel="Layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return canvas


def _profile(measure: Measure, position: int | None) -> Figure:
    if position is not None:
        raise UserError("a profile is over all positions: leave position out")
    canvas, axes = _canvas(measure, 5.2, 3.0, "")
    axes.set(xlabel="Position")
    whole = measure.block("position")
    if whole is not None:
        _line(axes, whole, "position", colors.SERIES_LIGHT[0])
        return canvas
    by_head = measure.block("layer", "head", "position")
    block = by_head.mean_over("head") if by_head is not None else measure.blocks["layer", "position"]
    shades = colors.ramp()(np.linspace(0.25, 1.0, len(block.coordinates["layer"])))
    for layer, shade in zip(block.coordinates["layer"], shades, strict=True):
        _line(axes, block.at("layer", int(layer)), "position", shade, f"layer {layer}")
    if len(block.coordinates["layer"]) <= 12:
        axes.legend(fontsize=7, frameon=False, ncols=2)
    return canvas


def _line(axes: Axes, block: Block, axis: str, color: object, label: str | None = None) -> None:
    across = block.coordinates[axis]
    axes.plot(across, block.values, color=color, linewidth=1.5, marker="o", markersize=2.5, label=label)
    if not np.isnan(block.errors).all():
        low, high = block.values - block.errors, block.values + block.errors
        axes.fill_between(across, low, high, color=color, alpha=0.16, linewidth=0)
