"""What becomes of an encoder while it learns: its sinks, and how alike its tokens are (arXiv 2410.05648)."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard.errors import UserError
from regard.hooks import watching
from regard.hooks.layers import evaluation_mode
from regard.statistics import (
    Average,
    ColumnMass,
    Observation,
    PerLayer,
    SampleValues,
    SinkDeviation,
    Statistic,
    StatisticKey,
    StatisticRow,
)
from regard.statistics.layers import LAYER_STATISTICS
from regard.statistics.sink_tokens import CommonSinkRatio
from regard.statistics.sinks import at_keys, topk_keys
from regard.statistics.table import make_table

DIAGNOSTICS = ("sink_deviation", "common_sink_ratio", "over_smoothing", "spectral_bound")
"""What is diagnosed unless the caller chooses, named as in `regard.statistics`."""
COLUMNS = ("statistic", "layer", "value", "standard_error")
"""The columns of what `diagnose` gives."""
TOP = 5
"""How many sinks of a head the summaries over all layers are also taken of."""
Batch = Mapping[str, Tensor]


def diagnose(
    encoder: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    common: frozenset[int],
    statistics: Sequence[str] = DIAGNOSTICS,
) -> pd.DataFrame:
    """Return the diagnostics of an encoder on some samples: a row for each layer, and one for all of them (layer null).

    Each value is a mean over heads and samples, in the unit of `regard.statistics`, of the hidden states that a layer
    gives; the row of all layers is their mean. The sink is the strongest column of each head; the names with `_top5`
    have the five strongest as sinks. The standard error is over samples, null of fewer than two.

    `batches` are inputs of the encoder, padded on either side; `common` the ids of common tokens
    (`regard.data.common_tokens`); `statistics` some of `DIAGNOSTICS`, and `sink_degree`, the sinks' outer degree.
    """
    unknown = [name for name in statistics if name not in _STATISTICS]
    if unknown or not statistics:
        names = ", ".join(map(repr, unknown)) or "none"
        raise UserError(f"statistics: expected some of {', '.join(_STATISTICS)}, got {names}")
    requested: list[Statistic] = []
    for name in dict.fromkeys(statistics):
        requested.append(_Means(name, _STATISTICS[name](1, common)))
        if name in _SINK_STATISTICS:
            requested.append(_Means(f"{name}_top{TOP}", _STATISTICS[name](TOP, common), by_layer=False))
    rows = _measure_rows(encoder, batches, requested)
    return make_table([(row.statistic, row.layer, row.value, row.standard_error) for row in rows], COLUMNS)


def _measure_rows(
    encoder: PreTrainedModel, batches: Iterable[Batch], requested: Sequence[Statistic]
) -> list[StatisticRow]:
    accepted = inspect.signature(encoder.forward).parameters
    if "decoder_input_ids" in accepted:
        raise UserError(f"encoder: expected an encoder alone, got {type(encoder).__name__}; give its get_encoder()")
    device = next(encoder.parameters()).device
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    with evaluation_mode(encoder, device), watching(encoder, requested) as observer:
        for batch in batches:
            encoder(**{name: value.to(device) for name, value in batch.items()}, **options)
    if not observer.samples:
        raise UserError("batches: expected at least one sample, got none")
    rows = observer.rows()
    missing = [statistic.name for statistic in requested if not any(row.statistic == statistic.name for row in rows)]
    if missing:
        raise UserError(f"batches: expected input_ids without packing, got none that tell {', '.join(missing)}")
    sites = {row.site for row in rows}
    if len(sites) > 1:
        raise UserError(f"encoder: expected one stack of layers, got {', '.join(sorted(sites))}")
    return rows


class _Means(Average):
    """What a statistic knows of each sample, its mean over heads: of every layer, and the mean over all layers."""

    def __init__(self, name: str, statistic: PerLayer, *, by_layer: bool = True) -> None:
        super().__init__()
        self.name, self.statistic, self.by_layer = name, statistic, by_layer
        self.info, self.needs = statistic.info, statistic.needs

    def sample_values(self, layers: Sequence[Observation]) -> Iterator[SampleValues]:
        by_site: dict[str, list[SampleValues]] = {}
        without_embeddings = [layer for layer in layers if layer.layer >= 0]
        for key, values, present, alpha in self.statistic.sample_values(without_embeddings):
            assert present is not None
            mean = values.double().flatten(1).mean(1) if key.axes else values.double()
            mean_key = StatisticKey(self.name, key.site, key.layer, None, ())
            by_site.setdefault(key.site, []).append(SampleValues(mean_key, mean, present, alpha))
        for site, layer_values in by_site.items():
            if self.by_layer:
                yield from layer_values
            is_present = torch.stack([layer.present for layer in layer_values if layer.present is not None])
            layer_means = torch.stack([layer.values for layer in layer_values]).masked_fill(~is_present, 0.0)
            mean = layer_means.sum(0) / is_present.sum(0).clamp(min=1)
            yield SampleValues(StatisticKey(self.name, site, None, None, ()), mean, is_present.any(0))


class _SinkDegree(ColumnMass):
    """d of the strongest columns of each head, from that of all columns."""

    name = "sink_degree"

    def __init__(self, top: int) -> None:
        super().__init__()
        self.top = top

    def layer_values(self, layer: Observation) -> Iterator[SampleValues]:
        for _, degree, present, _ in super().layer_values(layer):
            assert present is not None
            index = topk_keys(degree, present, self.top)
            valid_mask = at_keys(present, index)
            sums = degree.gather(-1, index).masked_fill(~valid_mask, 0.0).sum(-1)
            yield SampleValues(self.key(layer, "head"), sums / valid_mask.sum(-1).clamp(min=1), present.any(-1))


_STATISTICS: dict[str, Callable[[int, frozenset[int]], PerLayer]] = {
    "sink_deviation": lambda top, common: SinkDeviation(top),
    "common_sink_ratio": lambda top, common: CommonSinkRatio(common, top=top),
    "over_smoothing": lambda top, common: LAYER_STATISTICS["over_smoothing"](),
    "spectral_bound": lambda top, common: LAYER_STATISTICS["spectral_bound"](),
    "sink_degree": lambda top, common: _SinkDegree(top),
}
_SINK_STATISTICS = ("sink_deviation", "common_sink_ratio", "sink_degree")
