"""What was measured so far: as rows, columns, a table, and figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import Tensor

from regard.errors import UserError
from regard.report.drawing import Kind, draw_statistic, statistic_overview
from regard.report.labels import pluralize
from regard.runs.display import Display
from regard.runs.selection import select_rows
from regard.statistics import Statistic, StatisticRow
from regard.statistics.columns import Columns, Positions, join_columns, select_positions
from regard.statistics.table import filter_statistic, select_statistic

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Readings(Display):
    """The values of statistics by name, over samples that are finished."""

    def __init__(self, model_name: str, statistics: dict[str, Statistic]) -> None:
        self.statistics, self.seconds = statistics, dict.fromkeys(statistics, 0.0)
        self.verified: bool | None = None
        """Whether the attention of the model was compared with its own: False if it takes neither tokens nor an image
        alone, and no `example_inputs` were given; None if nothing was to be compared (`verify=False`, another block
        around it, no Hugging Face model)."""
        self.turns: AbstractContextManager[Any] = nullcontext()
        """Keeps the forwards of other threads out, where these are observed as well."""
        self._counted: dict[int, Tensor] = {}
        """Finished samples by the place of the stack that has read them."""
        self._decoders: set[int] = set()
        """Stacks that read on what encoders and towers for images have read, whose samples are those of the model."""
        self._model_name = model_name

    @property
    def samples(self) -> int:
        """The number of samples that are finished; rows of padding alone are none."""
        last = max(self._counted, key=lambda stack: (stack in self._decoders, stack), default=None)
        return 0 if last is None else int(self._counted[last])

    def _count(self, stack: int, length: Tensor, *, is_decoder: bool) -> None:
        """Count the samples of these lengths in a stack, without waiting for their device."""
        if is_decoder:
            self._decoders.add(stack)
        count = (length > 0).sum()
        self._counted[stack] = self._counted[stack].to(count.device) + count if stack in self._counted else count

    def _take(self, name: str, step: Callable[[], None]) -> None:
        """Take a step of a statistic, and its time."""
        started = time.perf_counter()
        step()
        self.seconds[name] += time.perf_counter() - started

    def __getitem__(self, name: str) -> Statistic:
        return self.statistics[name]

    def rows(self) -> list[StatisticRow]:
        """Return all results so far, as rows of the table.

        Raises:
            UserError: A row is of no sample.
        """
        return [row for part in self.columns() for row in part.rows()]

    def columns(self, positions: Positions = "all") -> list[Columns]:
        """Return the results so far as columns with some positions, cheaper than `rows`; raise as it does."""
        with self.turns:
            statistics = self.statistics.values()
            columns = [part for statistic in statistics for part in select_positions(statistic.columns(), positions)]
        if empty := [part for part in columns if (part.n < 1).any()]:
            name, site, layer = empty[0][:3]
            raise UserError(f"statistic {name}: layer {layer} ({site}) has a value of no sample; please report it")
        return columns

    def frame(self, statistic: str | None = None, **equal: Any) -> pd.DataFrame:
        """Return the results so far as a tidy table, or some rows of it, as `regard.MeasureResult.frame` does."""
        return select_rows(self._select(statistic), equal, statistic)

    def _select(self, statistic: str | None) -> pd.DataFrame:
        """Return the rows of a statistic (None: all). UserError if the table lacks it, or no sample gave it a value."""
        table = join_columns(self.columns())
        if statistic in self.statistics and not filter_statistic(table, statistic).any():
            samples = pluralize(self.samples, "finished sample")
            raise UserError(
                f"statistic {statistic}: no value comes of {samples}; docs/statistics.md says what it needs"
            )
        return select_statistic(table, statistic)

    def plot(
        self,
        statistic: str | None = None,
        *,
        site: str | None = None,
        epsilon: float | None = None,
        position: int | None = None,
        kind: Kind | None = None,
    ) -> Figure:
        """Draw a statistic so far, as `regard.MeasureResult.plot` does."""
        table = self._select(statistic)
        return draw_statistic(table, site=site, epsilon=epsilon, position=position, kind=kind)

    def headline(self) -> str:
        about = f"{pluralize(len(self.statistics), 'statistic')}, {pluralize(self.samples, 'finished sample')}"
        return f"{self._model_name}: {about}"

    def overview(self) -> pd.DataFrame:
        """Return the mean, smallest and largest value of each statistic so far."""
        return statistic_overview(join_columns(self.columns()))
