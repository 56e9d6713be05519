"""Measurement of a model's attention on text."""

import copy
import sys
import time
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, Literal

import pandas as pd
import safetensors.torch
import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard import data, models
from regard.commands.measure.config import MeasureConfig
from regard.commands.measure.result import MeasureResult
from regard.data import Texts, Windows
from regard.errors import UserError
from regard.hooks import ReplacedModel, Watch, watching
from regard.hooks.layers import eval_mode
from regard.hooks.modules import LAYER_COUNT_FIELDS
from regard.models.pretrained import resolve_model
from regard.runs.config import UNSET, Unset, describe_options, explicit_arguments
from regard.runs.distributed import all_gather_bytes, local_shard, raise_on_all_ranks, world_size
from regard.runs.progress import OnProgress, ProgressEvent
from regard.runs.provenance import describe_cost, describe_model, describe_run
from regard.statistics import STATISTICS, Statistic
from regard.statistics.columns import Columns, join_columns
from regard.statistics.dependence import InputDependence
from regard.statistics.sink_tokens import CommonSinkRatio, SinksByTokenClass, SinkTokens
from regard.statistics.sinks import SecondarySinks, SinkRate
from regard.statistics.table import TOKEN_COLUMNS, is_of_statistic, make_table

AXES = ("layer", "head", "position", "epsilon")
"""Columns of the table that say where a value is of."""


@describe_options(MeasureConfig)
def measure(  # noqa: D417 - the options are described in the configuration
    model: PreTrainedModel | models.Loaded | str,
    tokenizer: Any = None,
    texts: Texts | Sequence[str] | None = None,
    *,
    config: MeasureConfig | None = None,
    on_progress: OnProgress | None = None,
    statistics: str | Sequence[str | Statistic] | Unset = UNSET,
    input: Literal["natural", "random", "repeated"] | Unset = UNSET,
    bos: Literal["keep", "drop", "add"] | Unset = UNSET,
    samples: int | Unset = UNSET,
    length: int | Unset = UNSET,
    epsilon: float | Sequence[float] | Unset = UNSET,
    minimum_queries: int | Unset = UNSET,
    layer_ids: int | Sequence[int] | Unset | None = UNSET,
    positions: Literal["all", "thin", "none"] | Unset = UNSET,
    batch_size: int | Unset | None = UNSET,
    skip_verification: bool | Unset = UNSET,
    seed: int | Unset = UNSET,
) -> MeasureResult:
    """Measure a model's attention on windows of text.

    An encoder–decoder reads each window on both sides, the decoder's shifted by one behind its start token. Under
    `torch.distributed`, as `accelerate launch` starts it, the processes share the samples, and each returns the same.
    The arguments after `on_progress` are the options of `regard measure`, fields of `MeasureConfig`.

    Args:
        model: A model, what `regard.models.load` returned, or a name it takes: a hub id, a folder, `minilm`.
        tokenizer: The model's tokenizer, if `model` is a model.
        texts: Documents, for natural input only. None for Python's own documentation.
        config: Values of the options that are left out; None for the defaults of `MeasureConfig`.
        on_progress: Called after each batch.

    Returns:
        A table of all statistics, with metadata.

    Raises:
        UserError: An option is invalid, or does not go with the model or the texts.
    """
    with raise_on_all_ranks():
        config = (config or MeasureConfig()).replace(**explicit_arguments(locals(), MeasureConfig))
        texts = _check_texts(texts, config.input)
        ReplacedModel.register()
        call = "measure(model, tokenizer, texts)"
        loaded = resolve_model(model, tokenizer, to="observe", call=call, merge=False)
        started = time.perf_counter()
        _check_layers(config, range(_num_layers(loaded.model) or sys.maxsize))
        windows = _make_windows(loaded, texts, config)
        selected, verify = _make_statistics(config, loaded), not config.skip_verification
        observing = watching(loaded.model, selected, layers=config.layer_ids, verify=verify)
        with eval_mode(loaded.model), observing as observer:
            _run_batches(loaded.model, observer, local_shard(windows.input_ids), config.batch_rows, on_progress)
    merge(observer.statistics.values())
    columns = observer.columns(config.positions)
    _check_layers(config, {part.layer for part in columns})
    _check_statistics(observer, config, columns)
    columns = [part for part in columns if len(part.value)]
    if not columns:
        raise UserError("positions: all rows of these statistics are by position. Choose --positions all or thin.")
    cost = describe_cost(loaded.model.device, time.perf_counter() - started, tokens=windows.tokens)
    metadata = describe_run(
        config.replace(batch_size=config.batch_rows),
        model=describe_model(loaded.model, loaded.name, loaded.sha256, loaded.adapter),
        data={
            "source": texts.source if texts is not None else f"{config.input} tokens",
            "sha256": texts.sha256 if texts is not None else None,
            "input": config.input,
            "bos": config.bos,
            "samples": len(windows.input_ids),
            "length": config.length,
            **{name: getattr(windows, name) for name in ("tokens", "documents", "too_short")},
        },
        cost={**cost, "batch_size": config.batch_rows},
    )
    metadata["statistics"] = {}
    for name, statistic in observer.statistics.items():
        parts = [part for part in columns if is_of_statistic(part.statistic, name)]
        if name in observer.left_out or not parts:
            continue
        axes = [axis for axis in AXES if any(getattr(part, axis) is not None for part in parts)]
        metadata["statistics"][name] = {"axes": axes, **vars(statistic.info)}
    table = join_columns(columns)
    return MeasureResult(table, metadata, _sink_tokens(observer, loaded.tokenizer), _mean_matrices(observer))


def _check_texts(texts: Texts | Sequence[str] | None, input: str) -> Texts | None:
    """Return the documents; None for input that is no text. Raises UserError."""
    if input != "natural":
        if texts is not None:
            raise UserError(f"texts: expected none with input {input}, whose tokens are not taken from text")
        return None
    if texts is None:
        return data.load_python_documentation()
    if isinstance(texts, Texts):
        return texts
    documents = () if isinstance(texts, str) else tuple(texts)
    if not documents or not all(isinstance(document, str) for document in documents):
        types = sorted({type(document).__name__ for document in documents} - {"str"})
        got = "one string" if isinstance(texts, str) else ", ".join(types) or "none"
        raise UserError(f"texts: expected a list of at least one document, each a string; got {got}")
    return Texts.of(documents, "given in Python")


def _make_windows(loaded: models.Loaded, texts: Texts | None, config: MeasureConfig) -> Windows:
    options: dict[str, Any] = {name: getattr(config, name) for name in ("length", "samples", "bos", "seed")}
    options["max_length"] = models.maximum_length(loaded.model, loaded.tokenizer)
    if texts is not None:
        return data.make_text_windows(texts.documents, loaded.tokenizer, **options)
    make = data.make_random_windows if config.input == "random" else data.make_repeated_windows
    return make(loaded.tokenizer, **options)


def _make_statistics(config: MeasureConfig, loaded: models.Loaded) -> list[Statistic]:
    configured: dict[str, Callable[[], Statistic]] = {
        "sink_rate": lambda: SinkRate(config.epsilon, config.minimum_queries),
        "secondary_sinks": lambda: SecondarySinks(config.epsilon, config.minimum_queries),
        "common_sink_ratio": lambda: CommonSinkRatio(data.common_tokens(loaded.tokenizer)),
        "sinks_by_token_class": lambda: _make_sinks_by_token_class(config, loaded.tokenizer),
        "input_dependence": lambda: InputDependence(config.length),
    }
    return [
        copy.deepcopy(name) if isinstance(name, Statistic) else configured.get(name, STATISTICS[name])()
        for name in config.statistics
    ]


def _make_sinks_by_token_class(config: MeasureConfig, tokenizer: Any) -> SinksByTokenClass:
    special = tokenizer.all_special_ids
    delimiters = data.common_tokens(tokenizer).union(data.line_breaks(tokenizer)).difference(special)
    return SinksByTokenClass(special, delimiters, config.epsilon, config.minimum_queries)


def _run_batches(model: Any, observer: Watch, ids: Tensor, batch_size: int, on_progress: OnProgress | None) -> None:
    for start in range(0, len(ids), batch_size):
        batch = ids[start : start + batch_size].to(model.device)
        try:
            output = model(**_model_inputs(model, batch))[0]
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"batch-size: {len(batch)} windows of {batch.shape[1]} tokens do not fit the memory of {model.device}. "
                "Reduce --batch-size or --length."
            ) from error
        if not bool(output.isfinite().all()):
            observer.close()  # which names the layer if the weights show it
            layer = f"output of the last layer in batch {start // batch_size}"
            raise UserError(f"non-finite activations: {layer}; expected finite values")
        if on_progress is not None:
            done = min(start + batch_size, len(ids))
            on_progress(ProgressEvent(phase="measuring", step=done, steps=len(ids)))


def _model_inputs(model: Any, input_ids: Tensor) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    if model.config.is_encoder_decoder:
        start = input_ids.new_full((len(input_ids), 1), _decoder_start(model))
        inputs["decoder_input_ids"] = torch.cat([start, input_ids[:, :-1]], dim=1)
    if hasattr(model.config, "use_cache"):
        inputs["use_cache"] = False
    return inputs


def _decoder_start(model: Any) -> int:
    """Return the decoder's start token, else the padding token, as in T5."""
    generation_config = getattr(model, "generation_config", None)
    candidates = [getattr(config, "decoder_start_token_id", None) for config in (model.config, generation_config)]
    for token in (*candidates, getattr(model.config, "pad_token_id", None)):
        if token is not None:
            return int(token)
    raise UserError(f"cannot measure {type(model).__name__}: its configuration has no decoder_start_token_id")


def _num_layers(model: Any) -> int | None:
    """Return the number of layers of a model's longest stack; None if its configuration does not have it."""
    config = model.config.get_text_config()
    counts = [count for name in LAYER_COUNT_FIELDS if isinstance(count := getattr(config, name, None), int)]
    return max(counts, default=None)


def _check_layers(config: MeasureConfig, layers: Container[int | None]) -> None:
    missing = [layer for layer in config.layer_ids or () if layer >= 0 and layer not in layers]
    if missing:
        names = ", ".join(map(str, missing))
        raise UserError(f"layer-ids: expected layers of this model, counted from 0; it has no {names}")


def _check_statistics(observer: Watch, config: MeasureConfig, columns: Sequence[Columns]) -> None:
    names = [name for name in observer.statistics if name not in observer.left_out]
    empty = ", ".join(name for name in names if not any(is_of_statistic(part.statistic, name) for part in columns))
    if empty:
        raise UserError(
            f"statistics: {empty} has no data: {config.samples} windows of {config.length} tokens are too few or too "
            "short for this model. Increase --samples or --length, or remove it from --statistics."
        )


def _sink_tokens(observer: Watch, tokenizer: Any) -> pd.DataFrame | None:
    statistic = observer.statistics.get("sink_tokens")
    if not isinstance(statistic, SinkTokens):
        return None
    rows = statistic.tokens()
    texts = {token: tokenizer.convert_ids_to_tokens(token) for token in {row[4] for row in rows} if token >= 0}
    return make_table([(*row[:4], texts.get(row[4]), *row[5:]) for row in rows], TOKEN_COLUMNS)


def _mean_matrices(observer: Watch) -> dict[str, Tensor]:
    statistic = observer.statistics.get("input_dependence")
    if not isinstance(statistic, InputDependence):
        return {}
    return {f"{site}.{layer}": mean.float() for (site, layer), mean in statistic.mean_attention().items()}


def merge(statistics: Iterable[Statistic]) -> None:
    """Merge the statistics of all processes, in each of them."""
    if world_size() == 1:
        return
    for statistic in statistics:
        state = {name: tensor.contiguous() for name, tensor in statistic.state().items()}
        states = [safetensors.torch.load(raw) for raw in all_gather_bytes(safetensors.torch.save(state))]
        other = copy.deepcopy(statistic)
        statistic.load(states[0])
        for state in states[1:]:
            other.load(state)
            statistic.merge(other)
