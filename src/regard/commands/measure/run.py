"""Measurement of a model's attention on text, images, sounds or videos."""

import copy
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard import data, models
from regard.commands.measure.config import MeasureConfig
from regard.commands.measure.media import (
    Media,
    check_shortest,
    describe_media,
    example_of,
    kind_of,
    load_for,
    media_inputs,
    naming_media,
    random_states,
    refuse_media,
    select_media,
    warn_of_chance,
)
from regard.commands.measure.perturbation import Perturbation
from regard.commands.measure.result import MeasureResult
from regard.commands.measure.statistics import (
    check_statistics,
    describe_statistics,
    make_statistics,
    mean_matrices,
    tabulate_sink_tokens,
)
from regard.data import Images, Sounds, Texts, Videos, Windows
from regard.data.conversations import MESSAGES, describe_template, read_template
from regard.data.texts import take_texts
from regard.errors import UserError, describe_error, warn_user
from regard.hooks import Watch, watching
from regard.hooks.layers import eval_no_grad
from regard.hooks.modalities import describe_one_modality
from regard.hooks.modules import LAYER_COUNT_FIELDS, find_outside, may_loop
from regard.hooks.off_loaded import first_device
from regard.hooks.perturbation import PairedSpread
from regard.hooks.split_weights import is_sharded
from regard.models.inputs import describe_decoder_start, find_first_token, text_inputs
from regard.models.processors import Kind, check_reads_text
from regard.runs.config import UNSET, Unset, describe_options, explicit_arguments
from regard.runs.distributed import all_gather_bytes, local_shard, raise_on_all_ranks, world_size
from regard.runs.progress import OnProgress, ProgressEvent, shown_in_notebook
from regard.runs.provenance import describe_cost, describe_model, describe_run
from regard.statistics import ALL, Statistic
from regard.statistics.columns import Columns, join_columns
from regard.statistics.modalities import ModalityMass


@shown_in_notebook()
@describe_options(MeasureConfig)
def measure(  # noqa: D417 - the options are described in the configuration
    model: PreTrainedModel | models.Loaded | str | Path,
    tokenizer: Any = None,
    texts: Texts | Sequence[Any] | None = None,
    *,
    images: Images | Sequence[Any] | None = None,
    audio: Sounds | Sequence[Any] | None = None,
    videos: Videos | Sequence[Any] | None = None,
    config: MeasureConfig | None = None,
    on_progress: OnProgress | None = None,
    statistics: str | Sequence[str | Statistic] | Unset = UNSET,
    input: Literal["natural", "random", "repeated"] | Unset = UNSET,
    bos: Literal["keep", "drop", "add"] | Unset = UNSET,
    chat_template: str | Unset | None = UNSET,
    prompt: str | Unset | None = UNSET,
    frames: int | Unset | None = UNSET,
    samples: int | Unset = UNSET,
    length: int | Unset = UNSET,
    epsilon: float | Sequence[float] | Unset = UNSET,
    minimum_queries: int | Unset = UNSET,
    perturb: Literal["middle", "first"] | Unset = UNSET,
    layer_ids: int | Sequence[int] | Unset | None = UNSET,
    part: str | Unset | None = UNSET,
    positions: Literal["all", "thin", "none"] | Unset = UNSET,
    batch_size: int | Unset | None = UNSET,
    skip_verification: bool | Unset = UNSET,
    seed: int | Unset = UNSET,
) -> MeasureResult:
    """Measure a model's attention on windows of text, on images, sounds or videos.

    An encoder–decoder reads each window on both sides, the decoder's shifted by one behind its start token. Under
    `torch.distributed`, as `accelerate launch` starts it, the processes share the samples, and each returns the same.
    The arguments after `on_progress` are the options of `regard measure`, fields of `MeasureConfig`.

    Args:
        model: A model, what `regard.models.load` returned, or a name it takes: a hub id, a folder, `minilm`.
        tokenizer: The model's tokenizer, if `model` is a model; with images, audio or videos its processor.
        texts: Documents, or conversations (lists of messages), for natural input only. None for Python's own
            documentation.
        images: Images of PIL, or paths of files, in the place of text; each is one sample.
        audio: Paths of .wav files, or `{"array": samples, "sampling_rate": Hz}`, in the place of text; one sample each.
        videos: Lists of images, arrays (frame, height, width, 3), or paths of folders of frames or of animations.
        config: Values of the options that are left out; None for the defaults of `MeasureConfig`.
        on_progress: Called after each batch.

    Returns:
        A table of all statistics, with metadata.

    Raises:
        UserError: An option is invalid, or does not go with the model or the texts.
    """
    with raise_on_all_ranks():
        explicit, is_default = explicit_arguments(locals(), MeasureConfig), config is None
        config = (config or MeasureConfig()).replace(**explicit)
        if "perturb" in explicit and is_default:
            config.check_perturb()
        config.warn_of_idle()
        media = select_media({"images": images, "audio": audio, "videos": videos}, texts, config)
        if media is None and config.prompt is not None:
            raise UserError("prompt: expected images, audio or videos, beside which it stands, got text")
        if media is not None and config.chat_template is not None:
            raise UserError(f"chat-template: expected conversations, which it writes; got {kind_of(media)}")
        template = None if config.chat_template is None else read_template(config.chat_template)
        texts = _check_texts(texts, template, config.input) if media is None else None
        loaded = load_for(model, tokenizer, media)
        started = time.perf_counter()
        sources, batch_size, num_samples = _choose_samples(loaded, media, texts, template, config)
        written = describe_template(loaded.tokenizer, template) if texts and texts.conversations else {}
        _check_shares(loaded.model, num_samples)
        selected, verify = make_statistics(config, loaded, media), not config.skip_verification
        options: dict[str, Any] = {"layers": config.layer_ids, "part": config.part, "verify": verify}
        example = None if media is None or config.part else partial(example_of, loaded, media, config)
        observing = watching(loaded.model, selected, **options, example_inputs=example)
        with naming_media(loaded.model, media), eval_no_grad(loaded.model), observing as observer:
            shard = local_shard(torch.arange(num_samples))
            indices = shard.split(batch_size) if len(shard) else ()  # no empty forward
            perturbation = _make_perturbation(loaded, sources, selected, config)
            batches = _make_batches(loaded, sources, indices, config)
            kind = None if media is None else kind_of(media)
            start, drawing = _run_batches(loaded.model, observer, batches, len(shard), perturbation, kind, on_progress)
        if drawing is not None:
            warn_of_chance(loaded.model, drawing)
    merge(observer.statistics.values())
    columns = _collect_columns(observer, config, media, type(loaded.model).__name__)
    num_tokens = sources.tokens if isinstance(sources, Windows) else None
    cost = describe_cost(loaded.model.device, time.perf_counter() - started, tokens=num_tokens)
    metadata = describe_run(
        config.replace(batch_size=batch_size),
        model=describe_model(loaded.model, loaded.name, loaded.sha256, loaded.adapter),
        data=_describe_data(sources, texts, config, loaded) | written | describe_decoder_start(start, loaded.tokenizer),
        cost={**cost, "batch_size": batch_size},
    )
    unread = {
        "prompt": media is None,
        "frames": not isinstance(media, Videos),
        "chat_template": texts is None or not texts.conversations,
    }
    for option, has_none in unread.items():
        if has_none:
            del metadata["config"][option]
    if media is not None and config.part is None and (outside := find_outside(loaded.model)):
        metadata["not_observed"] = outside
        warn_user(
            f"not observed: {', '.join(outside)}, attention in no stack of layers of {type(loaded.model).__name__}"
        )
    metadata["statistics"], metadata["verified"] = describe_statistics(observer, columns, config), observer.verified
    table = join_columns(columns)
    return MeasureResult(table, metadata, tabulate_sink_tokens(observer, loaded.tokenizer), mean_matrices(observer))


def _choose_samples(
    loaded: models.Loaded, media: Media | None, texts: Texts | None, template: str | None, config: MeasureConfig
) -> tuple[Windows | Media, int, int]:
    """Return what is read, how much of it in a forward, and how much in all. UserError for what the model refuses."""
    if media is None:
        _check_layers(config, range(_num_layers(loaded.model) or sys.maxsize))
        windows = _make_windows(loaded, texts, template, config)
        return windows, config.batch_rows, len(windows.input_ids)
    if config.prompt is not None:
        check_reads_text(loaded, kind_of(media), config.prompt)
    check_shortest(loaded, media, config)
    return media, config.batch_size or 1, len(media)


def _collect_columns(observer: Watch, config: MeasureConfig, media: Media | None, model: str) -> list[Columns]:
    """Return the rows of the table. UserError for layers that the model lacks, and for no rows."""
    columns = observer.columns(config.positions)
    _check_layers(config, {part.layer for part in columns})
    if ModalityMass.name in observer.left_out & observer.statistics.keys() and not {*ALL} <= observer.statistics.keys():
        warn_user(f"{ModalityMass.name} is left out: {describe_one_modality(model)}")
    check_statistics(observer, config, columns, media)
    columns = [part for part in columns if len(part.value)]
    if not columns:
        raise UserError("positions: all rows of these statistics are by position. Choose --positions all or thin.")
    return columns


def _describe_data(
    samples: Windows | Media, texts: Texts | None, config: MeasureConfig, loaded: models.Loaded
) -> dict[str, Any]:
    if not isinstance(samples, Windows):
        return describe_media(samples, config, loaded)
    return {
        "source": texts.source if texts is not None else f"{config.input} tokens",
        "sha256": texts.sha256 if texts is not None else None,
        "input": config.input,
        "bos": config.bos,
        "samples": len(samples.input_ids),
        "length": config.length,
        **{name: getattr(samples, name) for name in ("tokens", "documents", "too_short")},
    }


def _check_texts(texts: Texts | Sequence[Any] | None, template: str | None, input: str) -> Texts | None:
    """Return the documents; None for input that is no text. Raises UserError."""
    if input != "natural" and texts is not None:
        raise UserError(f"texts: expected none with input {input}, whose tokens are not taken from text")
    found = None
    if input == "natural":
        found = data.load_python_documentation() if texts is None else take_texts(texts)
    if template is not None and (found is None or not found.conversations):
        got = f"{input} tokens" if found is None else "texts"
        raise UserError(f"chat-template: expected conversations (a column {MESSAGES}), which it writes; got {got}")
    return found


def _make_windows(loaded: models.Loaded, texts: Texts | None, template: str | None, config: MeasureConfig) -> Windows:
    options: dict[str, Any] = {name: getattr(config, name) for name in ("length", "samples", "bos", "seed")}
    options["max_length"] = models.maximum_length(loaded.model, loaded.tokenizer)
    if texts is not None and texts.conversations:
        return data.make_conversation_windows(texts.conversations, loaded.tokenizer, template=template, **options)
    if texts is not None:
        return data.make_text_windows(texts.documents, loaded.tokenizer, **options)
    make = data.make_random_windows if config.input == "random" else data.make_repeated_windows
    return make(loaded.tokenizer, **options)


def _make_perturbation(
    loaded: models.Loaded, sources: Windows | Media, statistics: Iterable[Statistic], config: MeasureConfig
) -> Perturbation | None:
    """Return the second forward of each batch; None if no statistic needs it."""
    spread = next((statistic for statistic in statistics if isinstance(statistic, PairedSpread)), None)
    if spread is None:
        return None
    if not isinstance(sources, Windows):
        raise UserError(f"statistics: {spread.name} replaces a token of a text; expected texts, got {kind_of(sources)}")
    return Perturbation(loaded, sources, spread, config)


def _make_batches(
    loaded: models.Loaded, samples: Windows | Media, batches: Iterable[Tensor], config: MeasureConfig
) -> Iterator[tuple[dict[str, Any], Tensor]]:
    """Yield the arguments of each forward, and the indices of its samples."""
    for indices in batches:
        if not isinstance(samples, Windows):
            inputs = media_inputs(loaded, samples, indices.tolist(), config)
        else:
            inputs = text_inputs(loaded.model, samples.input_ids[indices].to(first_device(loaded.model)))
        yield inputs, indices


def _run_batches(
    model: Any,
    observer: Watch,
    batches: Iterable[tuple[dict[str, Any], Tensor]],
    num_samples: int,
    perturbation: Perturbation | None,
    read: Kind | None,
    on_progress: OnProgress | None,
) -> tuple[int | None, dict[str, Any] | None]:
    """Run all batches, of what is `read` in the place of text.

    Returns:
        The token with which a decoder behind an encoder begins, and the arguments of the first forward if it drew
        random numbers; None without.
    """
    done, start, drawing = 0, None, None
    for number, (inputs, indices) in enumerate(batches):
        try:
            start = find_first_token(inputs) if start is None else start
            states = random_states(model) if number == 0 else []
            output = model(**inputs)[0]
            if states and not all(map(torch.equal, states, random_states(model))):
                drawing = inputs
            if perturbation is not None:
                perturbation.run(observer, inputs, indices)
        except torch.OutOfMemoryError as error:
            kind = f"windows of {inputs['input_ids'].shape[1]} tokens" if "input_ids" in inputs else "samples"
            raise UserError(
                f"batch-size: {len(indices)} {kind} do not fit the memory of {model.device}. Reduce --batch-size or "
                "--length."
            ) from error
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            if read is None or isinstance(error, UserError):
                raise
            raise refuse_media(read, model, describe_error(error)[:300]) from error
        if isinstance(output, Tensor) and not bool(output.isfinite().all()):
            observer.close()  # which names the layer if the weights show it
            layer = f"output of the last layer in batch {number}"
            raise UserError(f"non-finite activations: {layer}; expected finite values")
        done += len(indices)
        if on_progress is not None:
            on_progress(ProgressEvent(phase="measuring", step=done, steps=num_samples))
    return start, drawing


def _num_layers(model: Any) -> int | None:
    """Return the number of layers of a model's longest stack; None if its configuration does not say it."""
    if may_loop(model):
        return None
    config = model.config.get_text_config()
    counts = [count for name in LAYER_COUNT_FIELDS if isinstance(count := getattr(config, name, None), int)]
    return max(counts, default=None)


def _check_layers(config: MeasureConfig, layers: range | set[int | None]) -> None:
    missing = [layer for layer in config.layer_ids or () if layer >= 0 and layer not in layers]
    if missing:
        names = ", ".join(map(str, missing))
        raise UserError(f"layer-ids: expected layers of this model, {_list_layers(layers)}; it has no {names}")


def _list_layers(layers: range | set[int | None]) -> str:
    """Return the numbers of layers as 0 to 5, or one by one if some between are missing."""
    numbers = layers if isinstance(layers, range) else sorted(layer for layer in layers if layer is not None)
    numbers = [layer for layer in numbers if layer >= 0] if isinstance(numbers, list) else numbers
    is_whole = len(numbers) > 1 and len(numbers) == numbers[-1] - numbers[0] + 1
    return f"{numbers[0]} to {numbers[-1]}" if is_whole else ", ".join(map(str, numbers))


def _check_shares(model: nn.Module, num_samples: int) -> None:
    """Raise a UserError if processes that gather a model's weights from each other would do so at different times."""
    if is_sharded(model) and num_samples % world_size():
        raise UserError(
            f"samples: with FSDP expected a multiple of {world_size()} processes, which compute together, got "
            f"{num_samples}"
        )


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
