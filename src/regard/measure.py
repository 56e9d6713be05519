"""The first verb: what a model's attention does on some text."""

from __future__ import annotations

import datetime
import hashlib
import platform
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from regard import __version__, data, models, processes
from regard.data import Texts, Windows
from regard.errors import UserError
from regard.results import TOKEN_COLUMNS, Measurements, table_of
from regard.slot import Watch, watching
from regard.statistics import STATISTICS, Statistic, names
from regard.statistics.dependence import InputDependence
from regard.statistics.sinks import CommonSinkRatio, SinkRate, SinkTokens

Input = Literal["natural", "random", "repeated"]
INPUTS: tuple[Input, ...] = ("natural", "random", "repeated")
TOKENS_A_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure. `epsilon`: thresholds of the sink rate; `layers`: None for all; `batch_size`: None to choose."""

    statistics: tuple[str, ...] = field(default_factory=lambda: names("default"))
    input: Input = "natural"
    bos: data.Bos = "keep"
    samples: int = 100
    length: int = 64
    epsilon: tuple[float, ...] = (0.3,)
    layers: tuple[int, ...] | None = None
    batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what can be checked without model and text."""
        names(self.statistics)
        if self.input not in INPUTS:
            raise UserError(f"input: expected one of {', '.join(INPUTS)}, got {self.input!r}")
        if self.bos not in data.BOS:
            raise UserError(f"bos: expected one of {', '.join(data.BOS)}, got {self.bos!r}")
        for name in ("samples", "length", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name.replace('_', '-')}: expected at least 1, got {value}")

    @property
    def rows(self) -> int:
        """Samples a forward."""
        return self.batch_size or max(1, min(self.samples, TOKENS_A_BATCH // self.length))


def measure(
    model: PreTrainedModel | models.Loaded | str,
    tokenizer: Any = None,
    texts: Texts | Sequence[str] | None = None,
    *,
    statistics: str | Sequence[str] = "default",
    on_batch: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> Measurements:
    """What the model's attention does on windows of the texts.

    `model` is a model with its `tokenizer`, or what `regard.models.load` gave, or a name it takes (a hub id, a folder,
    `minilm`). `texts` are documents; None is Python's own documentation. `settings` are those of `Settings`. An
    encoder–decoder reads each window on both sides, the decoder's moved by one behind its start token.

    Under `torch.distributed` (as `accelerate launch` starts it) the processes share the samples, and each gets the
    numbers of all. `on_batch(done, all)` is called after each batch. Raises UserError for every mistake of the user.
    """
    chosen = Settings(statistics=names(statistics), **settings)
    loaded = _loaded(model, tokenizer)
    began = time.perf_counter()
    texts = _texts(texts)
    windows = _windows(loaded, texts, chosen)
    with torch.no_grad(), watching(loaded.model, _statistics(chosen, loaded), layers=chosen.layers) as seen:
        _run(loaded.model, processes.mine(windows.input_ids), chosen.rows, on_batch)
    processes.merge(seen.statistics.values())
    _check_layers(chosen, seen)
    record = _record(loaded, texts, windows, chosen, time.perf_counter() - began)
    return _measurements(seen, record, loaded.tokenizer)


def _loaded(model: PreTrainedModel | models.Loaded | str, tokenizer: Any) -> models.Loaded:
    if isinstance(model, str):
        return models.load(model)
    if isinstance(model, models.Loaded):
        return model
    if tokenizer is None:
        raise UserError("a model needs its tokenizer: measure(model, tokenizer, texts)")
    name = getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__
    return models.Loaded(model, tokenizer, name, None)


def _texts(texts: Texts | Sequence[str] | None) -> Texts:
    if texts is None:
        return data.python_documentation()
    if isinstance(texts, Texts):
        return texts
    if isinstance(texts, str) or not texts:
        raise UserError(f"texts: expected a list of at least one document, got {type(texts).__name__}")
    digest = hashlib.sha256()
    for document in texts:
        digest.update(document.encode("utf-8") + b"\0")
    return Texts(tuple(texts), "given in Python", digest.hexdigest())


def _windows(loaded: models.Loaded, texts: Texts, chosen: Settings) -> Windows:
    options: dict[str, Any] = {
        "length": chosen.length,
        "samples": chosen.samples,
        "bos": chosen.bos,
        "seed": chosen.seed,
        "maximum": models.maximum_length(loaded.model, loaded.tokenizer),
    }
    if chosen.input == "random":
        return data.random_windows(loaded.tokenizer, **options)
    if chosen.input == "repeated":
        return data.repeated_windows(loaded.tokenizer, **options)
    return data.windows(texts.documents, loaded.tokenizer, **options)


def _statistics(chosen: Settings, loaded: models.Loaded) -> list[Statistic]:
    """The statistics by name, set up with what is known of this run."""
    special: dict[str, Callable[[], Statistic]] = {
        "sink_rate": lambda: SinkRate(chosen.epsilon),
        "common_sink_ratio": lambda: CommonSinkRatio(data.common_tokens(loaded.tokenizer)),
        "input_dependence": lambda: InputDependence(chosen.length),
    }
    return [special.get(name, STATISTICS[name])() for name in chosen.statistics]


def _run(model: Any, ids: Tensor, rows: int, on_batch: Callable[[int, int], None] | None) -> None:
    """Every window once through the model, some at a time."""
    start = getattr(model.config, "decoder_start_token_id", None)
    for done in range(0, len(ids), rows):
        batch = ids[done : done + rows].to(model.device)
        arguments: dict[str, Any] = {"input_ids": batch, "attention_mask": torch.ones_like(batch)}
        if model.config.is_encoder_decoder:
            first = batch.new_full((len(batch), 1), start if start is not None else 0)
            arguments["decoder_input_ids"] = torch.cat([first, batch[:, :-1]], dim=1)
        elif hasattr(model.config, "use_cache"):
            arguments["use_cache"] = False
        model(**arguments)
        if on_batch is not None:
            on_batch(min(done + rows, len(ids)), len(ids))


def _check_layers(chosen: Settings, seen: Watch) -> None:
    layers = {row.layer for row in seen.rows() if row.layer is not None and row.layer >= 0}
    missing = sorted(set(chosen.layers or ()) - layers)
    if missing and chosen.layers is not None:
        raise UserError(f"layers: expected layers of this model (counted from 0), it has no {missing}")


def _record(loaded: models.Loaded, texts: Texts, windows: Windows, chosen: Settings, seconds: float) -> dict[str, Any]:
    """Where the numbers come from."""
    model, config = loaded.model, loaded.model.config
    natural = chosen.input == "natural"
    return {
        "regard": __version__,
        "verb": "measure",
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "model": {
            "name": loaded.name,
            "class": type(model).__name__,
            "type": config.model_type,
            "sha256": loaded.sha256,
            "parameters": sum(p.numel() for p in model.parameters()),
            "layers": getattr(config, "num_hidden_layers", None),
            "heads": getattr(config, "num_attention_heads", None),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        },
        "data": {
            "source": texts.source if natural else f"{chosen.input} tokens",
            "sha256": texts.sha256 if natural else None,
            "input": chosen.input,
            "bos": chosen.bos,
            "samples": len(windows.input_ids),
            "length": chosen.length,
            "tokens": windows.tokens,
            "documents": windows.documents,
            "too_short": windows.too_short,
        },
        "settings": {
            **{name: getattr(chosen, name) for name in Settings.__dataclass_fields__},
            "batch_size": chosen.rows,
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "platform": platform.platform(),
        },
        "cost": {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(windows.tokens / seconds, 1),
            "peak_memory_mib": round(_peak_memory(), 1),
            "batch_size": chosen.rows,
            "device": str(model.device),
            "processes": processes.count(),
        },
        "statistics": {name: {"axes": [], **vars(STATISTICS[name]().about)} for name in chosen.statistics},
    }


def _peak_memory() -> float:
    """MiB at the most: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def _measurements(seen: Watch, record: dict[str, Any], tokenizer: Any) -> Measurements:
    table = table_of(seen.rows())
    for name, about in record["statistics"].items():
        mine = table[table["statistic"] == name]
        about["axes"] = [axis for axis in ("layer", "head", "position", "epsilon") if mine[axis].notna().any()]
    return Measurements(table, record, _tokens(seen, tokenizer), _matrices(seen))


def _tokens(seen: Watch, tokenizer: Any) -> Any:
    statistic = seen.statistics.get("sink_tokens")
    if not isinstance(statistic, SinkTokens):
        return None
    rows = statistic.tokens()
    texts = {number: tokenizer.convert_ids_to_tokens(number) for number in {row[4] for row in rows} if number >= 0}
    return table_of([(*row[:4], texts.get(row[4]), *row[5:]) for row in rows], TOKEN_COLUMNS)


def _matrices(seen: Watch) -> dict[str, Tensor]:
    statistic = seen.statistics.get("input_dependence")
    if not isinstance(statistic, InputDependence):
        return {}
    return {f"{site}.{layer}": mean.float() for (site, layer), mean in statistic.mean_attention().items()}
