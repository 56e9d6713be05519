"""Sinks watched while a model trains, and the step at which they emerge (Gu et al. 2025, arXiv 2410.10781)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.attention.call import AttentionCall
from regard.attention.reduction import ReductionRequest
from regard.errors import UserError
from regard.hooks.attention_function import Observer
from regard.hooks.layers import evaluation_mode
from regard.hooks.observe import watching
from regard.hooks.routing import observing
from regard.statistics import SinkRate, StatisticRow
from regard.statistics.first import FirstAlpha, TokenFirst, VirtualSink
from regard.statistics.keys import HiddenNorm
from regard.statistics.table import make_table

COLUMNS = ("step", "statistic", "layer", "head", "position", "epsilon", "value")
"""The columns of sinks.parquet."""
FEWEST = 8
"""Queries that the sink rate of a position is told from at the least."""
SITE = "decoder"
LOGITS = 1 << 26
"""Logits made at once, unless those of one row are more."""
SLICE = 1 << 22
"""Logits turned into float32 at once."""


class SinkMonitor:
    """Measures the sinks of a causal model on the same held-out rows, every so many steps of its training.

    Called with the model and the step it gives the numbers of that step by name: `sink_rate` (Sink_1^ε in percent),
    `sink_rate_max` and `sink_position` (the largest Sink_k^ε, and at which k, from 0, of those k that at least
    `strongest_queries` queries see: half of all if None), `alpha_first` (mean of α_1 over heads), `alpha_uniform` (what
    uniform attention gives: H_T/T), `norm_ratio` (the largest |h_1| / mean |h_t| of a layer), and, of a model that has
    a sink beside the tokens (a learned logit, a column of its own, a sink token in front), `virtual_sink_rate`: in how
    many heads × samples it takes more than ε of the mean query, in percent. Positions count the given tokens; Sink_k^ε
    is kept of every k that at least `minimum_queries` queries see. The model is as it was before: its mode, its
    weights, and the state of chance.
    """

    def __init__(
        self,
        rows: Int[Tensor, "sample length"],
        *,
        every: int,
        epsilon: float = 0.3,
        batch_size: int = 32,
        minimum_queries: int = FEWEST,
        strongest_queries: int | None = None,
    ) -> None:
        _check_rows("rows", rows)
        if strongest_queries is None:
            strongest_queries = max(minimum_queries, rows.shape[1] // 2)
        _check_positive(every=every, batch_size=batch_size, strongest_queries=strongest_queries)
        SinkRate([epsilon], minimum_queries)
        if rows.shape[1] < minimum_queries:
            raise UserError(
                f"rows: expected at least {minimum_queries} tokens a row, the fewest queries that a sink is told "
                f"from, got {rows.shape[1]}"
            )
        if not minimum_queries <= strongest_queries <= rows.shape[1]:
            raise UserError(
                f"strongest_queries: expected a number from {minimum_queries}, the minimum_queries, to the "
                f"{rows.shape[1]} tokens of a row, got {strongest_queries}"
            )
        self.samples = rows
        self.every, self.epsilon, self.batch_size = every, float(epsilon), batch_size
        self.minimum_queries, self.strongest_queries = minimum_queries, strongest_queries
        self.rows: list[list[Any]] = []
        """What was found so far, as rows of `COLUMNS`: plain values, which JSON can hold."""

    @property
    def uniform(self) -> float:
        """α_1 of uniform causal attention: H_T / T."""
        length = self.samples.shape[1]
        return math.fsum(1 / n for n in range(1, length + 1)) / length

    def due(self, step: int, last: bool) -> bool:
        """Whether to measure after this step."""
        return last or step % self.every == 0

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """The numbers of a step. Rows kept of it, or of later ones, are of a run that was taken up again: they go."""
        found, virtual = self._measure(model)
        by_name: dict[str, list[StatisticRow]] = {}
        for row in found:
            by_name.setdefault(row.statistic, []).append(row)
        if not by_name.get("sink_rate"):
            raise UserError(f"cannot watch the sinks of {type(model).__name__}: expected a causal language model")
        kept = _kept(by_name, virtual)
        self.rows = [row for row in self.rows if row[0] < step]
        self.rows += [[step, row.statistic, row.layer, row.head, row.position, row.epsilon, row.value] for row in kept]
        return self._numbers(by_name, virtual)

    def load(self, rows: Iterable[Sequence[Any]]) -> None:
        """Take over `rows` that were kept over a break."""
        self.rows = [list(row) for row in rows]

    def frame(self) -> pd.DataFrame:
        """All rows so far, as sinks.parquet has them."""
        return sink_table(self.rows)

    def _measure(self, model: nn.Module) -> tuple[list[StatisticRow], bool]:
        """Rows of all statistics, and whether the model has a sink beside its keys."""
        device = next(model.parameters()).device
        length = self.samples.shape[1]
        columns = _Columns(length)
        first = (SinkRate([self.epsilon], self.minimum_queries), FirstAlpha(), HiddenNorm())
        wanted = [*(TokenFirst(each, length) for each in first), VirtualSink(self.epsilon, length)]
        with evaluation_mode(model, device), watching(model, wanted) as watch, observing(model, columns):
            for batch in self.samples.split(self.batch_size):
                model(input_ids=batch.to(device), use_cache=False, **_few_logits(model))
        return [row for row in watch.rows() if row.site == SITE], columns.found

    def _numbers(self, found: Mapping[str, Sequence[StatisticRow]], virtual: bool) -> dict[str, float]:
        overall = [row for row in found["sink_rate"] if row.layer is None]
        last = self.samples.shape[1] - self.strongest_queries
        strongest = max((row for row in overall if (row.position or 0) <= last), key=lambda row: row.value)
        numbers = {
            "sink_rate": next(row.value for row in overall if row.position == 0),
            "sink_rate_max": strongest.value,
            "sink_position": float(strongest.position or 0),
            "alpha_first": _mean(found["alpha"]),
            "alpha_uniform": self.uniform,
            "norm_ratio": max(row.value for row in found["hidden_norm_sink_ratio"]),
        }
        if virtual:
            numbers["virtual_sink_rate"] = _mean(found["virtual_alpha_rate"])
        return numbers


def sink_table(rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """Rows of a watch as the table of sinks.parquet."""
    return make_table(rows, COLUMNS).astype({"step": "int64", "statistic": "str"})


def _few_logits(model: nn.Module) -> dict[str, int]:
    """What keeps a model from making logits for all tokens, which would be most of its work, if it has that option."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _kept(found: Mapping[str, Sequence[StatisticRow]], virtual: bool) -> Iterator[StatisticRow]:
    """The rows that sinks.parquet keeps, by the names it has for them."""
    yield from (row for row in found["sink_rate"] if row.layer is None or row.position == 0)
    yield from (row._replace(position=0) for row in found["alpha"])
    yield from (row._replace(statistic="norm_ratio") for row in found["hidden_norm_sink_ratio"])
    if virtual:
        yield from found["virtual_alpha"]


def _mean(rows: Sequence[StatisticRow]) -> float:
    return math.fsum(row.value for row in rows) / len(rows)


class _Columns(Observer):
    """Notes whether any call has a sink beside its keys, or a token more than the sequences, the sink in front."""

    def __init__(self, length: int) -> None:
        self.length, self.found = length, False

    def before_attention(
        self, module: nn.Module, call: AttentionCall, causal_site: bool
    ) -> tuple[AttentionCall, ReductionRequest] | None:
        """Look at a call, of which nothing is wanted."""
        column = call.operation is not None and call.operation.has_extra_column
        longer = call.query.shape[2] > self.length
        self.found = self.found or column or longer or call.sink is not None
        return None


class ValidationLoss:
    """Measures the mean negative log likelihood of held-out rows of each domain, every so many steps of training.

    Called with the model and the step it gives `valid_loss.<domain>`, in nats a token, and `valid_loss`, the mean over
    the tokens of all domains. Tokens at the positions `uncounted`, from 0, are no targets; nor is the first of a row.
    `batch_size` is the most rows at once: fewer where their logits would be many.
    """

    def __init__(
        self,
        domains: Mapping[str, Int[Tensor, "row length"]],
        *,
        every: int,
        batch_size: int = 32,
        uncounted: Iterable[int] = (),
    ) -> None:
        _check_positive(every=every, batch_size=batch_size)
        if not domains:
            raise UserError("domains: expected at least one, got none")
        self.uncounted = frozenset(uncounted)
        for name, rows in domains.items():
            _check_rows(f"rows of {name}", rows)
            if not bool(self._targets(rows).any()):
                raise UserError(f"rows of {name}: expected targets that count, got {rows.shape[1]} tokens a row")
        self.domains = dict(domains)
        self.every, self.batch_size = every, batch_size

    def due(self, step: int, last: bool) -> bool:
        """Whether to measure after this step."""
        return last or step % self.every == 0

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """The losses after a step."""
        device = next(model.parameters()).device
        with evaluation_mode(model, device):
            sums = {name: self._sum(model, rows, device) for name, rows in self.domains.items()}
        counts = {name: len(rows) * int(self._targets(rows).sum()) for name, rows in self.domains.items()}
        losses = {"valid_loss": math.fsum(sums.values()) / sum(counts.values())}
        return losses | {f"valid_loss.{name}": sums[name] / counts[name] for name in self.domains}

    def _sum(self, model: nn.Module, rows: Tensor, device: torch.device) -> float:
        """The sum of the losses of all targets that count."""
        counted = self._targets(rows).to(device)
        config: Any = model.config
        vocabulary = config.get_text_config().vocab_size
        together = max(1, min(self.batch_size, LOGITS // (rows.shape[1] * vocabulary)))
        total = torch.zeros((), dtype=torch.float64, device=device)
        for batch in rows.split(together):
            ids = batch.to(device)
            logits = model(input_ids=ids, use_cache=False).logits
            for row, targets in zip(logits, ids, strict=True):
                total += sum_nll(row[:-1], targets[1:], counted)
            del logits, row
        return float(total)

    def _targets(self, rows: Int[Tensor, "row length"]) -> Bool[Tensor, " target"]:
        """Which of the targets of a row, its second token to its last, count."""
        return torch.tensor([at not in self.uncounted for at in range(1, rows.shape[1])], dtype=torch.bool)


def sum_nll(
    logits: Float[Tensor, "token vocabulary"], targets: Int[Tensor, " token"], counted: Bool[Tensor, " token"]
) -> Float[Tensor, ""]:
    """−Σ log p(target) over the targets that count, in float64, from logits of any precision.

    Beside the logits there is one slice of them in float32 (float64 of float64), `SLICE` numbers, and no copy.
    """
    total = torch.zeros((), dtype=torch.float64, device=logits.device)
    exact = torch.promote_types(logits.dtype, torch.float32)
    rows = max(1, SLICE // logits.shape[-1])
    for some, wanted, count in zip(logits.split(rows), targets.split(rows), counted.split(rows), strict=True):
        chances = some.log_softmax(-1, dtype=exact).gather(-1, wanted.long()[:, None])[:, 0]
        total -= chances[count].double().sum()
    return total


@dataclass(frozen=True, kw_only=True)
class Emergence:
    """When sinks emerged: steps, None where they did not."""

    step: int | None
    """Of the sink rate."""
    virtual_step: int | None
    """Of the rate of the sink beside the keys."""
    alpha_step: int | None
    """Of the mean α_1."""
    rate: float
    """What a sink rate must reach, in percent."""


UNEVEN = 1.5
"""How many times the uniform value a mean α_1 must be above."""


def find_emergence(history: pd.DataFrame | Iterable[Mapping[str, Any]], rate: float = 5.0) -> Emergence:
    """When sinks emerged, from the rows of a history, in any order; of rows of the same step the last counts.

    `step` is the first measured step from which on every measured `sink_rate_max` is at least `rate`, up to the end of
    the history; `virtual_step` the same of `virtual_sink_rate`; `alpha_step` the first from which on every measured
    `alpha_first` is more than 1.5 × its `alpha_uniform`. So a sink that went away has not emerged, and one that is
    seen in the last measurement alone emerged there. Steps without the number are passed over. Raises UserError for a
    rate that is no percentage above 0, and for rows without a step.
    """
    if not 0 < rate <= 100:
        raise UserError(f"rate: expected a percentage above 0, at most 100, got {rate}")
    given = history.to_dict("records") if isinstance(history, pd.DataFrame) else history
    rows: dict[int, dict[str, Any]] = {}
    for row in given:
        if not _known(row.get("step")):
            raise UserError("history: expected a step in every row")
        rows[int(row["step"])] = dict(row)
    ordered = [rows[step] for step in sorted(rows)]

    def strong(name: str) -> Callable[[Mapping[str, Any]], bool]:
        return lambda row: row[name] >= rate

    return Emergence(
        step=_since(ordered, ("sink_rate_max",), strong("sink_rate_max")),
        virtual_step=_since(ordered, ("virtual_sink_rate",), strong("virtual_sink_rate")),
        alpha_step=_since(
            ordered,
            ("alpha_first", "alpha_uniform"),
            lambda row: row["alpha_first"] > UNEVEN * row["alpha_uniform"],
        ),
        rate=float(rate),
    )


def _since(
    rows: Iterable[Mapping[str, Any]], needs: Sequence[str], holds: Callable[[Mapping[str, Any]], bool]
) -> int | None:
    """The first step from which on something holds, of the rows that tell."""
    since = None
    for row in rows:
        if all(_known(row.get(name)) for name in needs):
            since = (int(row["step"]) if since is None else since) if holds(row) else None
    return since


def _known(value: Any) -> bool:
    return value is not None and not pd.isna(value)


def _check_rows(what: str, rows: Tensor) -> None:
    if not isinstance(rows, Tensor) or rows.ndim != 2 or not rows.numel() or rows.is_floating_point():
        came = f"{rows.dtype} of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise UserError(f"{what}: expected token ids of shape (row, token), at least one of each, got {came}")


def _check_positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name}: expected a whole number of at least 1, got {value!r}")
