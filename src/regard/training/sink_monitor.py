"""Sinks of a model during training, and the step at which they emerge (Gu et al. 2025, arXiv 2410.10781)."""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.attention.call import AttentionCall, visible_mask
from regard.attention.float64 import to_float64
from regard.attention.reduction import ReductionRequest
from regard.errors import UserError, check_int
from regard.hooks.attention_function import Observer
from regard.hooks.layers import evaluation_mode
from regard.hooks.observe import watching
from regard.hooks.routing import observing
from regard.statistics import SinkRate, StatisticRow
from regard.statistics.first import FirstAlpha, TokenFirst, VirtualSink
from regard.statistics.layers import LAYER_STATISTICS
from regard.statistics.table import make_table

COLUMNS = ("step", "statistic", "layer", "head", "position", "epsilon", "value")  # columns of sinks.parquet
MIN_QUERIES = 8  # minimum number of queries for the sink rate of a position
SITE = "decoder"
BATCH_SIZE = 32  # maximum rows of a forward pass for a validation loss; fewer if they have too many logits
MAX_LOGITS = 1 << 26  # maximum number of logits in memory, unless one row has more
MAX_SLICE = 1 << 22  # maximum number of logits converted to float32 at a time


class PeriodicMonitor:
    """Measures every so many steps, and after the last."""

    every: int

    def due(self, step: int, last: bool) -> bool:
        return last or step % self.every == 0


class SinkMonitor(PeriodicMonitor):
    """Measures the sinks of a causal model on held-out rows during training.

    Calling it with the model and the step returns metrics by name:

    * `sink_rate`: Sink_1^ε in percent.
    * `sink_rate_max`, `sink_position`: Largest Sink_k^ε, and its position k from 0.
    * `alpha_first`: Mean of α_0 over heads.
    * `alpha_uniform`: α_0 of attention that is uniform over what each query sees: its window, the prefix, and a sink
      beside the tokens as one more key; H_T / T of plain causal attention.
    * `norm_ratio`: Largest |h_1| / mean |h_t| of a layer, of −1, the embeddings, too.
    * `virtual_sink_rate`: Percentage of heads × samples in which a sink beside the tokens (a learned logit, a column,
      or a sink token in front) gets more than ε of the mean query. Only of models that have one.

    Mode, weights and random state of the model do not change.

    Args:
        rows: Token ids (sample, length).
        minimum_queries: Positions seen by fewer queries have no Sink_k^ε.
        strongest_queries: Positions seen by fewer queries do not count for `sink_rate_max`; half of all by default.
    """

    def __init__(
        self,
        rows: Int[Tensor, "sample length"],
        *,
        every: int,
        epsilon: float = 0.3,
        batch_size: int = 32,
        minimum_queries: int = MIN_QUERIES,
        strongest_queries: int | None = None,
    ) -> None:
        _check_rows("rows", rows)
        if strongest_queries is None:
            strongest_queries = max(minimum_queries, rows.shape[1] // 2)
        for name, value in (("every", every), ("batch_size", batch_size), ("strongest_queries", strongest_queries)):
            check_int(name, value, least=1)
        SinkRate([epsilon], minimum_queries)
        length = rows.shape[1]
        if length < minimum_queries:
            expected = f"at least {minimum_queries} tokens a row, the minimum_queries"
            raise UserError(f"rows: expected {expected}, got {length}")
        if not minimum_queries <= strongest_queries <= length:
            expected = f"a number from {minimum_queries}, the minimum_queries, to the {length} tokens of a row"
            raise UserError(f"strongest_queries: expected {expected}, got {strongest_queries}")
        self.samples = rows
        self.every, self.epsilon, self.batch_size = every, float(epsilon), batch_size
        self.minimum_queries, self.strongest_queries = minimum_queries, strongest_queries
        self.rows: list[list[Any]] = []
        """Measurements so far, as rows of `COLUMNS` that JSON can hold."""

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """Return the metrics of a step; its rows replace those of this and later steps."""
        rows, virtual, uniform = self._measure(model)
        by_name: dict[str, list[StatisticRow]] = {}
        for row in rows:
            by_name.setdefault(row.statistic, []).append(row)
        if not by_name.get("sink_rate"):
            raise UserError(f"cannot watch the sinks of {type(model).__name__}: expected a causal language model")
        saved = _select_rows(by_name, virtual)
        self.rows = [row for row in self.rows if row[0] < step]
        self.rows += [[step, row.statistic, row.layer, row.head, row.position, row.epsilon, row.value] for row in saved]
        return self._metrics(by_name, virtual) | {"alpha_uniform": uniform}

    def load(self, rows: Iterable[Sequence[Any]]) -> None:
        self.rows = [list(row) for row in rows]

    def frame(self) -> pd.DataFrame:
        return sink_table(self.rows)

    def _measure(self, model: nn.Module) -> tuple[list[StatisticRow], bool, float]:
        """Return rows of all statistics, whether there is a sink beside the tokens, and α_0 of uniform attention."""
        device = next(model.parameters()).device
        length = self.samples.shape[1]
        observer = _VirtualSinkObserver(length)
        first_token = (SinkRate([self.epsilon], self.minimum_queries), FirstAlpha(), LAYER_STATISTICS["hidden_norm"]())
        statistics = [*(TokenFirst(statistic, length) for statistic in first_token), VirtualSink(self.epsilon, length)]
        one_logit = "logits_to_keep" in inspect.signature(model.forward).parameters
        options = {"logits_to_keep": 1} if one_logit else {}
        with (
            evaluation_mode(model, device),
            watching(model, statistics, verify=False) as watch,
            observing(model, observer),
        ):
            for batch in self.samples.split(self.batch_size):
                model(input_ids=batch.to(device), use_cache=False, **options)
        return [row for row in watch.rows() if row.site == SITE], observer.has_virtual_sink, observer.uniform

    def _metrics(self, by_name: Mapping[str, Sequence[StatisticRow]], virtual: bool) -> dict[str, float]:
        overall = [row for row in by_name["sink_rate"] if row.layer is None]
        last = self.samples.shape[1] - self.strongest_queries
        strongest = max((row for row in overall if (row.position or 0) <= last), key=lambda row: row.value)
        metrics = {
            "sink_rate": next(row.value for row in overall if row.position == 0),
            "sink_rate_max": strongest.value,
            "sink_position": float(strongest.position or 0),
            "alpha_first": _mean(by_name["alpha"]),
            "norm_ratio": max(row.value for row in by_name["hidden_norm_sink_ratio"]),
        }
        if virtual:
            metrics["virtual_sink_rate"] = _mean(by_name["virtual_alpha_rate"])
        return metrics


def sink_table(rows: Sequence[Sequence[Any]]) -> pd.DataFrame:
    """Convert rows of a monitor to the table of sinks.parquet."""
    return make_table(rows, COLUMNS).astype({"step": "int64", "statistic": "str"})


def _select_rows(by_name: Mapping[str, Sequence[StatisticRow]], virtual: bool) -> Iterator[StatisticRow]:
    """Select and rename the rows of sinks.parquet."""
    yield from (row for row in by_name["sink_rate"] if row.layer is None or row.position == 0)
    yield from (row._replace(position=0) for row in by_name["alpha"])
    yield from (row._replace(statistic="norm_ratio") for row in by_name["hidden_norm_sink_ratio"])
    if virtual:
        yield from by_name["virtual_alpha"]


def _mean(rows: Sequence[StatisticRow]) -> float:
    return math.fsum(row.value for row in rows) / len(rows)


class _VirtualSinkObserver(Observer):
    """Records whether a call has a sink beside its keys, or one more token than the sequences, and uniform α_0."""

    def __init__(self, length: int) -> None:
        self.length, self.has_virtual_sink = length, False
        self._uniform: dict[nn.Module, tuple[float, int]] = {}

    @property
    def uniform(self) -> float:
        """Mean over heads of α_0 of attention that is uniform over the visible keys and a column beside them."""
        heads = math.fsum(count for _, count in self._uniform.values())
        return math.fsum(alpha * count for alpha, count in self._uniform.values()) / heads

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        column = call.operation is not None and call.operation.has_extra_column
        longer = call.query.shape[2] > self.length
        column = column or call.sink is not None
        self.has_virtual_sink = self.has_virtual_sink or column or longer
        if module not in self._uniform and call.query.shape[2] >= self.length:
            self._uniform[module] = self._uniform_alpha(call, column), call.query.shape[1]
        return None

    def _uniform_alpha(self, call: AttentionCall, column: bool) -> float:
        visible = to_float64(visible_mask(call)[0])
        first = call.key.shape[2] - self.length
        weights = visible / (visible.sum(-1, keepdim=True) + column).clamp(min=1)
        before = visible[:, :first, first].sum(-1)  # of a sink token, which sees the first tokens of a prefix
        return float((weights[:, :, first].sum(-1) / (self.length + before)).mean())


class ValidationLoss(PeriodicMonitor):
    """Measures the mean negative log-likelihood of held-out rows during training, in nats per token.

    Calling it with the model and the step returns `valid_loss.<domain>`, and `valid_loss` over all domains together.

    Args:
        domains: Token ids (row, length) by domain.
        uncounted: Positions, from 0, of tokens that are no targets, as the first token of a row.
    """

    def __init__(
        self, domains: Mapping[str, Int[Tensor, "row length"]], *, every: int, uncounted: Iterable[int] = ()
    ) -> None:
        check_int("every", every, least=1)
        if not domains:
            raise UserError("domains: expected at least one, got none")
        self.uncounted = frozenset(uncounted)
        for name, rows in domains.items():
            _check_rows(f"rows of {name}", rows)
            if not bool(self._targets(rows).any()):
                raise UserError(f"rows of {name}: expected targets that count, got {rows.shape[1]} tokens a row")
        self.domains = dict(domains)
        self.every = every

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        device = next(model.parameters()).device
        with evaluation_mode(model, device):
            sums = {name: self._sum(model, rows, device) for name, rows in self.domains.items()}
        counts = {name: len(rows) * int(self._targets(rows).sum()) for name, rows in self.domains.items()}
        losses = {"valid_loss": math.fsum(sums.values()) / sum(counts.values())}
        return losses | {f"valid_loss.{name}": sums[name] / counts[name] for name in self.domains}

    def _sum(self, model: nn.Module, rows: Tensor, device: torch.device) -> float:
        target_mask = self._targets(rows).to(device)
        total = to_float64(torch.zeros((), device=device))
        for batch in split_by_logits(model, rows, BATCH_SIZE, MAX_LOGITS):
            ids = batch.to(device)
            logits = model(input_ids=ids, use_cache=False).logits
            for row, targets in zip(logits, ids, strict=True):
                total += sum_nll(row[:-1], targets[1:], target_mask)
            del logits, row
        return float(total)

    def _targets(self, rows: Int[Tensor, "row length"]) -> Bool[Tensor, " target"]:
        return torch.tensor([position not in self.uncounted for position in range(1, rows.shape[1])], dtype=torch.bool)


def split_by_logits(
    model: Any, rows: Int[Tensor, "row length"], batch_size: int, max_logits: int
) -> tuple[Int[Tensor, "_ length"], ...]:
    """Split rows of tokens into batches of at most so many rows and logits, unless one row has more logits."""
    vocab_size = model.config.get_text_config().vocab_size
    return rows.split(max(1, min(batch_size, max_logits // (rows.shape[1] * vocab_size))))


def sum_nll(
    logits: Float[Tensor, "token vocabulary"], targets: Int[Tensor, " token"], target_mask: Bool[Tensor, " token"]
) -> Float[Tensor, ""]:
    """Return −Σ log p(target) over the targets in a mask, in float64, without a full float32 copy of the logits."""
    total = to_float64(logits.new_zeros(()))
    acc_dtype = torch.promote_types(logits.dtype, torch.float32)
    rows = max(1, MAX_SLICE // logits.shape[-1])
    for chunk, labels, mask in zip(logits.split(rows), targets.split(rows), target_mask.split(rows), strict=True):
        log_probs = chunk.log_softmax(-1, dtype=acc_dtype).gather(-1, labels.long()[:, None])[:, 0]
        total -= to_float64(log_probs[mask]).sum()
    return total


ALPHA_FACTOR = 1.5  # threshold of the mean α_0, in multiples of its uniform value


@dataclass(frozen=True, kw_only=True)
class Emergence:
    """Steps at which sinks emerged, None if they did not: by sink rate, rate of the sink beside the tokens, mean α_0.

    `rate` is the threshold of both rates, in percent.
    """

    step: int | None
    virtual_step: int | None
    alpha_step: int | None
    rate: float


def find_emergence(history: pd.DataFrame | Iterable[Mapping[str, Any]], rate: float = 5.0) -> Emergence:
    """Find the steps at which sinks emerged.

    A sink emerged at the first step from which on all measurements reach the threshold, to the end of the history:
    `sink_rate_max` or `virtual_sink_rate` of at least `rate`, or `alpha_first` above 1.5 × `alpha_uniform`. So a sink
    that disappeared has not emerged, nor has one that a single measurement, the last, has seen. Rows may have any
    order; the last of a step counts, steps without metric do not.
    """
    if not 0 < rate <= 100:
        raise UserError(f"rate: expected a percentage above 0, at most 100, got {rate}")
    rows = history if isinstance(history, pd.DataFrame) else pd.DataFrame(list(history))
    table = rows.reindex(columns=["step", "sink_rate_max", "virtual_sink_rate", "alpha_first", "alpha_uniform"])
    if table["step"].isna().any():
        raise UserError("history: expected a step in every row")
    table = table.astype(float).drop_duplicates("step", keep="last").set_index("step").sort_index()
    alpha, uniform = table["alpha_first"], table["alpha_uniform"]
    return Emergence(
        step=_first_lasting(table["sink_rate_max"] >= rate, table["sink_rate_max"]),
        virtual_step=_first_lasting(table["virtual_sink_rate"] >= rate, table["virtual_sink_rate"]),
        alpha_step=_first_lasting(alpha > ALPHA_FACTOR * uniform, alpha + uniform),
        rate=float(rate),
    )


def _first_lasting(reached: pd.Series, values: pd.Series) -> int | None:
    """Return the first step from which on a threshold is reached in all rows that have a value, two at least."""
    measured = reached[values.notna()]
    lasting = measured[measured[::-1].cummin()[::-1]]
    return int(lasting.index[0]) if len(lasting) > 1 else None


def _check_rows(name: str, rows: Tensor) -> None:
    if not isinstance(rows, Tensor) or rows.ndim != 2 or not rows.numel() or rows.is_floating_point():
        actual = f"{rows.dtype} of shape {tuple(rows.shape)}" if isinstance(rows, Tensor) else type(rows).__name__
        raise UserError(f"{name}: expected token ids of shape (row, token), at least one of each, got {actual}")
