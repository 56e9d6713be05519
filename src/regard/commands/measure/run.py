"""The first verb: what a model's attention does on some text."""

from __future__ import annotations

import copy
import operator
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields
from typing import Any, Literal

import pandas as pd
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard import data, models
from regard.commands.measure.result import MeasureResult
from regard.data import Texts, Windows
from regard.errors import UserError, check_choice, check_int
from regard.hooks import ReplacedModel, Watch, watching
from regard.hooks.layers import eval_mode
from regard.hooks.modules import LAYER_COUNT_FIELDS
from regard.hooks.observe import EMBEDDING_LAYER
from regard.runs import distributed as processes
from regard.runs.distributed import all_gather_bytes
from regard.runs.provenance import now, peak_memory, regard_version, versions
from regard.statistics import STATISTICS, Statistic, statistic_factories, statistic_names
from regard.statistics.dependence import InputDependence
from regard.statistics.sinks import CommonSinkRatio, SinkRate, SinkTokens
from regard.statistics.table import TOKEN_COLUMNS, filter_statistic, make_table

Input = Literal["natural", "random", "repeated"]
INPUTS: tuple[Input, ...] = ("natural", "random", "repeated")
TOKENS_A_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """How to measure. `epsilon`: thresholds of the sink rate; `layer_ids`: None for all; `batch_size`: None to choose.

    `statistics` are names, "default", "all", or statistics of your own, of which a copy is used. `layer_ids` count from
    0; −1 are the embeddings. Sequences may be given for tuples; what is named twice counts once.
    """

    statistics: str | Sequence[str | Statistic] = "default"
    input: Input = "natural"
    bos: data.Bos = "keep"
    samples: int = 100
    length: int = 64
    epsilon: tuple[float, ...] = (0.3,)
    layer_ids: tuple[int, ...] | None = None
    batch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Check what can be checked without model and text."""
        wanted = self.statistics
        if isinstance(wanted, Sequence) and all(isinstance(statistic, str) for statistic in wanted):
            wanted = statistic_names(wanted)  # type: ignore[arg-type]
        statistic_factories(wanted)
        object.__setattr__(self, "statistics", tuple(wanted))
        object.__setattr__(self, "epsilon", _each("epsilon", self.epsilon, float))
        if self.layer_ids is not None:
            object.__setattr__(self, "layer_ids", _each("layer-ids", self.layer_ids, operator.index))
        check_choice("input", self.input, INPUTS)
        check_choice("bos", self.bos, data.BOS)
        for name in ("samples", "length", "batch_size"):
            value = getattr(self, name)
            if value is not None or name != "batch_size":
                check_int(name.replace("_", "-"), value, least=1)
        if not self.epsilon or not all(0 < threshold < 1 for threshold in self.epsilon):
            raise UserError(f"epsilon: expected numbers between 0 and 1, got {_listed(self.epsilon)}")
        if self.layer_ids is not None and not (self.layer_ids and min(self.layer_ids) >= -1):
            raise UserError(
                f"layer-ids: expected layers counted from 0 (-1: the embeddings), got {_listed(self.layer_ids)}"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise UserError(f"seed: expected a number from 0 to 2**63 - 1, got {self.seed!r}")

    @property
    def batch_rows(self) -> int:
        """Samples a forward."""
        return self.batch_size or max(1, min(self.samples, TOKENS_A_BATCH // self.length))


def _each(name: str, values: Any, kind: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The numbers, or the one number, each once. Raises UserError for what is none."""
    several = (values,) if isinstance(values, str) or not isinstance(values, Iterable) else tuple(values)
    try:
        return tuple(dict.fromkeys(map(kind, several)))
    except (TypeError, ValueError):
        raise UserError(f"{name}: expected a number or several, got {_listed([*map(repr, several)])}") from None


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values)) or "none"


def measure(
    model: PreTrainedModel | models.Loaded | str,
    tokenizer: Any = None,
    texts: Texts | Sequence[str] | None = None,
    *,
    statistics: str | Sequence[str | Statistic] = "default",
    on_batch: Callable[[int, int], None] | None = None,
    **settings: Any,
) -> MeasureResult:
    """What the model's attention does on windows of the texts.

    `model` is a model with its `tokenizer`, or what `regard.models.load` gave, or a name it takes (a hub id, a folder,
    `minilm`). `texts` are documents, which natural `input` alone takes; None is Python's own documentation. `settings`
    are those of `MeasureConfig`. An encoder–decoder reads each window on both sides, the decoder's moved by one behind
    its start token.

    Under `torch.distributed` (as `accelerate launch` starts it) the processes share the samples, and each gets the
    numbers of all. `on_batch(done, all)` is called after each batch. Raises UserError for every mistake of the user.
    """
    with processes.raise_on_all_ranks():
        chosen = _settings(statistics=statistics, **settings)
        texts = _texts(texts, chosen.input)
        loaded = _loaded(model, tokenizer)
        began = time.perf_counter()
        _check_layers(chosen, range(_layers(loaded.model) or sys.maxsize))
        windows = _windows(loaded, texts, chosen)
        with (
            eval_mode(loaded.model),
            watching(loaded.model, _statistics(chosen, loaded), layers=chosen.layer_ids) as seen,
        ):
            _run(loaded.model, seen, processes.local_shard(windows.input_ids), chosen.batch_rows, on_batch)
    merge(seen.statistics.values())
    table = make_table(seen.rows())
    _check_layers(chosen, set(table["layer"].dropna()))
    _check_statistics(seen, chosen, table)
    record = _record(loaded, texts, windows, chosen, time.perf_counter() - began)
    record["statistics"] = {name: _told(statistic, table) for name, statistic in seen.statistics.items()}
    return MeasureResult(table, record, _tokens(seen, loaded.tokenizer), _matrices(seen))


def _settings(**given: Any) -> MeasureConfig:
    known = [option.name for option in fields(MeasureConfig)]
    unknown = [name for name in given if name not in known]
    if unknown:
        raise UserError(f"unknown setting {_listed(unknown)}; expected some of: {_listed(known)}")
    return MeasureConfig(**given)


def _loaded(model: PreTrainedModel | models.Loaded | str, tokenizer: Any) -> models.Loaded:
    """The model with its tokenizer, checked to read texts and to belong together."""
    if isinstance(model, str):
        ReplacedModel.register()
    if tokenizer is not None and not callable(getattr(tokenizer, "get_vocab", None)):
        raise UserError(
            f"tokenizer: expected one as AutoTokenizer loads it, or none beside the name of a model; got "
            f"{type(tokenizer).__name__}; texts are given as measure(model, tokenizer, texts) or texts="
        )
    if isinstance(model, str):
        model = models.load(model)
    return models.as_loaded(model, tokenizer, to="observe", call="measure(model, tokenizer, texts)")


def _texts(texts: Texts | Sequence[str] | None, kind: str) -> Texts | None:
    """The documents; None for tokens that are of none. Raises UserError."""
    if kind != "natural":
        if texts is not None:
            raise UserError(f"texts: expected input natural beside them, for {kind} tokens are of no text; got {kind}")
        return None
    if texts is None:
        return data.load_python_documentation()
    if isinstance(texts, Texts):
        return texts
    documents = () if isinstance(texts, str) else tuple(texts)
    if not documents or not all(isinstance(document, str) for document in documents):
        kinds = sorted({type(document).__name__ for document in documents} - {"str"})
        came = "one string" if isinstance(texts, str) else ", ".join(kinds) or "none"
        raise UserError(f"texts: expected a list of at least one document, each a string; got {came}")
    return Texts.of(documents, "given in Python")


def _windows(loaded: models.Loaded, texts: Texts | None, chosen: MeasureConfig) -> Windows:
    options: dict[str, Any] = {
        "length": chosen.length,
        "samples": chosen.samples,
        "bos": chosen.bos,
        "seed": chosen.seed,
        "max_length": models.maximum_length(loaded.model, loaded.tokenizer),
    }
    if chosen.input == "random":
        return data.make_random_windows(loaded.tokenizer, **options)
    if chosen.input == "repeated":
        return data.make_repeated_windows(loaded.tokenizer, **options)
    assert texts is not None, "natural input is of texts"
    return data.make_text_windows(texts.documents, loaded.tokenizer, **options)


def _statistics(chosen: MeasureConfig, loaded: models.Loaded) -> list[Statistic]:
    """The statistics by name, set up with what is known of this run."""
    special: dict[str, Callable[[], Statistic]] = {
        "sink_rate": lambda: SinkRate(chosen.epsilon),
        "common_sink_ratio": lambda: CommonSinkRatio(data.common_tokens(loaded.tokenizer)),
        "input_dependence": lambda: InputDependence(chosen.length),
    }
    return [deepcopy(s) if isinstance(s, Statistic) else special.get(s, STATISTICS[s])() for s in chosen.statistics]


def _run(model: Any, seen: Watch, ids: Tensor, rows: int, on_batch: Callable[[int, int], None] | None) -> None:
    """Every window once through the model, some at a time."""
    for done in range(0, len(ids), rows):
        batch = ids[done : done + rows].to(model.device)
        arguments: dict[str, Any] = {"input_ids": batch, "attention_mask": torch.ones_like(batch)}
        if model.config.is_encoder_decoder:
            first = batch.new_full((len(batch), 1), _decoder_start(model))
            arguments["decoder_input_ids"] = torch.cat([first, batch[:, :-1]], dim=1)
        if hasattr(model.config, "use_cache"):
            arguments["use_cache"] = False
        try:
            output = model(**arguments)[0]
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"batch-size: {len(batch)} windows of {batch.shape[1]} tokens do not fit the memory of {model.device}; "
                "choose fewer at a time, or shorter ones"
            ) from error
        if not bool(output.isfinite().all()):
            seen.close()  # which names the layer if the weights show it
            raise UserError(
                f"non-finite activations: output of the last layer in batch {done // rows}; expected finite values"
            )
        if on_batch is not None:
            on_batch(min(done + rows, len(ids)), len(ids))


def _decoder_start(model: Any) -> int:
    """The token that a decoder begins with: where none is named the one for padding, as in T5."""
    of_generation = getattr(model, "generation_config", None)
    for config, name in (
        (model.config, "decoder_start_token_id"),
        (of_generation, "decoder_start_token_id"),
        (model.config, "pad_token_id"),
    ):
        number = getattr(config, name, None)
        if number is not None:
            return int(number)
    raise UserError(f"cannot measure {type(model).__name__}: its configuration has no decoder_start_token_id")


def _layers(model: Any) -> int | None:
    """How many layers the longest stack of a model has, if its configuration says so."""
    config = model.config.get_text_config()
    found = [count for name in LAYER_COUNT_FIELDS if isinstance(count := getattr(config, name, None), int)]
    return max(found, default=None)


def _check_layers(chosen: MeasureConfig, layers: Container[int]) -> None:
    missing = [layer for layer in chosen.layer_ids or () if layer >= 0 and layer not in layers]
    if missing:
        raise UserError(f"layer-ids: expected layers of this model, counted from 0; it has no {_listed(missing)}")


def _check_statistics(seen: Watch, chosen: MeasureConfig, table: pd.DataFrame) -> None:
    empty = [name for name in seen.statistics if not filter_statistic(table, name).any()]
    if empty:
        if chosen.layer_ids == (EMBEDDING_LAYER,):
            raise UserError(
                f"statistics: nothing to tell of {_listed(empty)} from layer {EMBEDDING_LAYER}: the embeddings have no "
                "attention; expected statistics of hidden states, or other layers as well"
            )
        raise UserError(
            f"statistics: nothing to tell of {_listed(empty)} from {chosen.samples} windows of {chosen.length} "
            "tokens in this model; choose longer windows or more of them, or leave it out"
        )


def _record(
    loaded: models.Loaded, texts: Texts | None, windows: Windows, chosen: MeasureConfig, seconds: float
) -> dict[str, Any]:
    """Where the numbers come from."""
    model, config = loaded.model, loaded.model.config
    return {
        "regard": regard_version(),
        "verb": "measure",
        "created": now(),
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
            "source": texts.source if texts is not None else f"{chosen.input} tokens",
            "sha256": texts.sha256 if texts is not None else None,
            "input": chosen.input,
            "bos": chosen.bos,
            "samples": len(windows.input_ids),
            "length": chosen.length,
            "tokens": windows.tokens,
            "documents": windows.documents,
            "too_short": windows.too_short,
        },
        "settings": {
            **{name: list(value) if isinstance(value, tuple) else value for name, value in vars(chosen).items()},
            "statistics": list(statistic_factories(chosen.statistics)),
            "batch_size": chosen.batch_rows,
        },
        "versions": versions(),
        "cost": {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(windows.tokens / seconds, 1),
            "peak_memory_mib": round(peak_memory(model.device), 1),
            "batch_size": chosen.batch_rows,
            "device": str(model.device),
            "processes": processes.world_size(),
        },
    }


def _told(statistic: Statistic, table: pd.DataFrame) -> dict[str, Any]:
    """What a reader needs to know of a statistic: which axes its rows have, and what it says of itself."""
    rows = table[filter_statistic(table, statistic.name)]
    axes = [axis for axis in ("layer", "head", "position", "epsilon") if rows[axis].notna().any()]
    return {"axes": axes, **vars(statistic.info)}


def _tokens(seen: Watch, tokenizer: Any) -> Any:
    statistic = seen.statistics.get("sink_tokens")
    if not isinstance(statistic, SinkTokens):
        return None
    rows = statistic.tokens()
    texts = {number: tokenizer.convert_ids_to_tokens(number) for number in {row[4] for row in rows} if number >= 0}
    return make_table([(*row[:4], texts.get(row[4]), *row[5:]) for row in rows], TOKEN_COLUMNS)


def _matrices(seen: Watch) -> dict[str, Tensor]:
    statistic = seen.statistics.get("input_dependence")
    if not isinstance(statistic, InputDependence):
        return {}
    return {f"{site}.{layer}": mean.float() for (site, layer), mean in statistic.mean_attention().items()}


def merge(statistics: Iterable[Statistic]) -> None:
    """Give every process what all have seen."""
    if processes.world_size() == 1:
        return
    for statistic in statistics:
        states = [safetensors.torch.load(raw) for raw in all_gather_bytes(_bytes(statistic.state()))]
        other = copy.deepcopy(statistic)
        statistic.load(states[0])
        for state in states[1:]:
            other.load(state)
            statistic.merge(other)


def _bytes(state: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in state.items()})
