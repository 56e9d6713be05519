"""Replacement of attention by constants (PAPA, arXiv 2211.03495) or another operation."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace as changed
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from transformers import PreTrainedModel

from regard import models
from regard.commands.replace import config as replace_config
from regard.commands.replace.config import LANGUAGE_MODEL, ReplaceConfig
from regard.commands.replace.evaluation import HeadEvaluation, Scored
from regard.commands.replace.evaluators import EVALUATION_TOKENS, PerplexityEvaluator, ProbeEvaluator
from regard.commands.replace.ranking import list_heads, warn_of_few_heads
from regard.commands.replace.result import COST_COLUMNS, HEAD_COLUMNS, ReplaceResult
from regard.commands.replace.scores import ATTENTION, COLUMNS, NONE, WIDTHS, ZEROS
from regard.constants import SOURCES, Constants, make_data_free, pattern_fractions, to_length
from regard.data import TASKS, Encoded, Task, encode, mask_tokens, read_task
from regard.data.examples import IGNORE_INDEX
from regard.data.files import without_hash
from regard.data.missing_values import LEFT_OUT
from regard.data.task_catalog import TaskPreset
from regard.data.tokenizers import warn_of_unknown, warn_of_written
from regard.errors import UserError, warn_user
from regard.hooks import find_attention_layers, model_fingerprint, replacing
from regard.hooks.average import vocabulary_digest
from regard.hooks.operation import parse_attention
from regard.hooks.replaced_model import check_original
from regard.models.limits import check_length
from regard.models.pretrained import resolve_model
from regard.runs.config import UNSET, Unset, describe_options, explicit_arguments
from regard.runs.progress import OnProgress, ProgressEvent, shown_in_notebook
from regard.runs.provenance import describe_cost, describe_model, describe_run, sha256_of_weights
from regard.runs.rank import num_processes
from regard.runs.work_dir import open_work_dir
from regard.training import ProbeConfig, check_metric, score
from regard.training.states import get_encoder

STATES, CONSTANTS = "states", "constants"
From = str | Path | Constants | None
PARTS = (STATES, CONSTANTS)
"""What a run makes in its work folder, beside the journal of its scores."""
BASELINES = (ZEROS, "identity")
"""Constants that stand beside the averages with all heads constant, if none are asked for."""


@shown_in_notebook()
@describe_options(ReplaceConfig)
def replace(  # noqa: D417 - the options are described in the configuration
    model: PreTrainedModel | models.Loaded | str | Path,
    task: str | Path | Task,
    *others: Any,
    tokenizer: Any = None,
    data: str | Path | None = None,
    constants_from: From = None,
    config: ReplaceConfig | None = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    keep_work_dir: bool = False,
    on_progress: OnProgress | None = None,
    constants: str | Sequence[str] | Unset | None = UNSET,
    attention: str | Sequence[str] | Unset = UNSET,
    rank_heads_by: str | Sequence[str] | Unset | None = UNSET,
    dynamic_fractions: float | Sequence[float] | Unset | None = UNSET,
    num_seeds: int | Unset = UNSET,
    scale: Literal["paper", "laptop"] | Unset = UNSET,
    special_token_layout: Literal["paper", "natural"] | Unset = UNSET,
    length: int | Unset | None = UNSET,
    max_train_samples: int | Unset | None = UNSET,
    max_eval_samples: int | Unset | None = UNSET,
    num_epochs: int | Unset | None = UNSET,
    batch_size: int | Unset | None = UNSET,
    learning_rate: float | Unset | None = UNSET,
    text: str | Unset | None = UNSET,
    label: str | Unset | None = UNSET,
    validation: str | Unset | None = UNSET,
    metric: str | Unset | None = UNSET,
    missing_values: Literal["skip", "skip-minus-one", "refuse"] | Unset = UNSET,
) -> ReplaceResult:
    """Score a frozen model on a task with constant heads, or with another operation in all heads.

    An encoder–decoder's encoder is probed. The arguments after `on_progress` are the options of `regard replace`,
    fields of `ReplaceConfig`.

    Args:
        model: A model, a `regard.models.Loaded`, or a name.
        task: One of `regard.data.TASKS`, a file of your own, or a `regard.data.Task`.
        others: Not used; refused with a hint.
        tokenizer: The model's tokenizer, if `model` is a model.
        data: Folder with the task's files; None for the hub.
        constants_from: Source of the averages, if not the task's inputs: another task, a file, or constants.
        config: Values of the options that are left out; None for the defaults of `ReplaceConfig`.
        work_dir: Folder of hidden states and scores so far; None for a temporary one.
        resume: Resume the run interrupted in `work_dir`, if any, with the same results.
        keep_work_dir: Keep the contents of `work_dir` at the end.
        on_progress: Called before each part of the run.

    Returns:
        Scores, head ranking, and cost of a forward pass.

    Raises:
        UserError: An argument is invalid for the model or the task, or `work_dir` belongs to another run.
    """
    config = (config or ReplaceConfig()).replace(**explicit_arguments(locals(), ReplaceConfig))
    if num_processes() > 1:
        raise UserError(f"replace: expected one process, got {num_processes()}; several runs side by side: --launcher")
    task = _named(task, others)
    if constants_from is not None:
        config.check_constants_from()
    start = time.perf_counter()

    report = _Report(on_progress)
    with open_work_dir(work_dir, command="replace", parts=PARTS, resume=resume, keep=keep_work_dir) as work:
        language_model = (task.name if isinstance(task, Task) else task) == LANGUAGE_MODEL
        modes = {LANGUAGE_MODEL: language_model, "published": isinstance(task, Task) or task in TASKS}
        config.warn_of_idle(*(mode for mode, holds in modes.items() if holds))
        loaded = _load_model(model, tokenizer, language_model)
        encoder = loaded.model if language_model else get_encoder(loaded.model)
        report("reading the task")
        preset, read = _task(task, data, config)
        train, valid = _encoded(read, loaded, config, preset)
        elsewhere = read_other_source(constants_from, data, encoder, loaded.tokenizer, train, preset)
        averages = elsewhere if isinstance(elsewhere, Constants) else None
        if averages is not None and "input-dependence" in config.rankings:
            averages.input_dependence()  # refuses constants without it
        metadata = _describe(loaded, encoder, read, (train, valid), config, constants_from, averages)
        evaluator = _make_evaluator(encoder, read, train, valid, preset, config.scale, work.folder / STATES)
        identity = {name: value for name, value in metadata.items() if name != "created"}
        # Its rows have a hash of their own.
        identity["data"] = {**metadata["data"], "source": without_hash(read.source)}
        for name in config.attention:
            with replacing(evaluator.model, parse_attention(name)):  # refused before anything is computed
                pass
        work.start(identity)
        preparing = time.perf_counter() - start
        evaluation = HeadEvaluation(
            evaluator=evaluator,
            gate_rate=replace_config.GATE_RATE[config.scale],
            constants_rate=replace_config.CONSTANTS_RATE[config.scale],
            journal=work.journal,
            folder=work.folder / CONSTANTS,
            step=report,
            count=report.count,
        )
        if config.sources and not isinstance(elsewhere, Constants):
            inputs, source = elsewhere or (train, read.source)
            averages = evaluation.averages(inputs, source, loaded.tokenizer)
        if averages is not None and not {*config.sources}.isdisjoint(replace_config.AVERAGED):
            _warn_of_unreached_tokens(averages, valid)
        if averages is not None:
            warn_of_few_heads(config.shares, len(averages.heads))
        scores = _scores(evaluation, averages, config, loaded.name, read.name)
        heads, costs, matrices, artifact = [], [], {}, None
        if averages is not None:
            ranking = evaluation.rank_heads(averages, config.rankings[0], 0)
            matrices = {f"{site}.{layer}": matrix for (site, layer), matrix in averages.matrices.items()}
            heads, costs = list_heads(averages, ranking), evaluation.cost(averages, ranking, config.shares)
            artifact = averages.to_bytes()
            metadata["constants"] = {name: value for name, value in vars(averages.origin).items() if name != "model"}
            metadata["patterns"] = pattern_fractions(matrices, averages.origin.separators)
        seconds = preparing + work.journal.seconds
    metadata["cost"] = {
        **describe_cost(encoder.device, seconds),
        "batch_size": max(1, EVALUATION_TOKENS // valid.length),
        "length": valid.length,
    }
    head_table = pd.DataFrame(heads, columns=list(HEAD_COLUMNS))
    cost_table = pd.DataFrame(costs, columns=list(COST_COLUMNS))
    return ReplaceResult(scores, head_table, cost_table, metadata, matrices, artifact)


class _Report:
    """Reports each part of a run, and how much of the latest is done."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._on_progress, self._phase = on_progress, ""

    def __call__(self, phase: str) -> None:
        self._phase = phase
        if self._on_progress is not None:
            self._on_progress(ProgressEvent(phase=phase))

    def count(self, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(ProgressEvent(phase=self._phase, step=done, steps=total))


def _named(task: Any, others: Sequence[Any]) -> str | Task:
    if others or not isinstance(task, (str, Path, Task)):
        got = ", ".join(type(argument).__name__ for argument in (task, *others))
        raise UserError(
            f"task: expected one of {', '.join(TASKS)}, a file of your own, or a regard.data.Task, as in "
            f"replace(model, task, tokenizer=tokenizer); got {got}"
        )
    return task if isinstance(task, Task) else str(task)


def _load_model(
    model: PreTrainedModel | models.Loaded | str | Path, tokenizer: Any, language_model: bool
) -> models.Loaded:
    call = "replace(model, task, tokenizer=tokenizer)"
    loaded = resolve_model(model, tokenizer, to="replace", call=call, language_model=language_model)
    config = loaded.model.config
    check_original(loaded.model, loaded.name)
    if language_model and (loaded.model.get_output_embeddings() is None or config.is_encoder_decoder):
        raise UserError(f"task lm: expected a causal language model with its head, got {type(loaded.model).__name__}")
    return loaded


def _task(task: str | Task, folder: str | Path | None, config: ReplaceConfig) -> tuple[TaskPreset, Task]:
    name = task.name if isinstance(task, Task) else task
    scale: TaskPreset = getattr(TASKS.get(name, TASKS["sst2"]), config.scale)
    train_rows, eval_rows = scale.rows or (None, None)
    rows = (config.max_train_samples or train_rows, config.max_eval_samples or eval_rows)
    overrides: dict[str, Any] = {n: getattr(config, n) for n in ("length", "batch_size", "learning_rate")}
    overrides |= {"epochs": config.num_epochs, "rows": None if rows == (None, None) else rows}
    scale = changed(scale, **{n: value for n, value in overrides.items() if value is not None})
    read = task if isinstance(task, Task) else None
    if read is None:
        read = read_task(name, None if name not in TASKS else folder, rows=scale.rows, **config.columns)
    check_metric(read.metric)
    return scale, read


def _encoded(read: Task, loaded: models.Loaded, config: ReplaceConfig, scale: TaskPreset) -> tuple[Encoded, Encoded]:
    tokenizer, length = loaded.tokenizer, scale.length
    check_length(length, loaded.model, tokenizer)
    examples, layout = (read.train, read.validation), config.special_token_layout
    warn_of_written((text for split in examples for texts in split.texts for text in texts), tokenizer)
    train, validation = (encode(read.kind, split, tokenizer, length, layout) for split in examples)
    warn_of_unknown({"": (ids for split in (train, validation) for ids in split.token_lists())}, tokenizer)
    if read.kind == "mlm" and read.name != LANGUAGE_MODEL:
        return mask_tokens(train, tokenizer, 0), mask_tokens(validation, tokenizer, 1)
    return train, validation


def _make_evaluator(
    encoder: Any, read: Task, train: Encoded, valid: Encoded, preset: TaskPreset, scale: str, folder: Path
) -> PerplexityEvaluator | ProbeEvaluator:
    """Return what scores heads: perplexity of a language model, else a probe, whose hidden states go to a folder."""
    probe = ProbeConfig(learning_rate=preset.learning_rate, batch_size=preset.batch_size, epochs=preset.epochs)
    through = changed(probe, epochs=min(replace_config.THROUGH_EPOCHS[scale] or probe.epochs, probe.epochs))
    if read.name == LANGUAGE_MODEL:
        return PerplexityEvaluator(encoder, train, valid, through)
    return ProbeEvaluator(encoder, read, train, valid, probe, through, folder)


def read_other_source(
    origin: From, data: str | Path | None, encoder: Any, tokenizer: Any, train: Encoded, scale: TaskPreset
) -> Constants | tuple[Encoded, str] | None:
    """Read what the averages come from, if not the task's inputs: constants, or other inputs and their source."""
    if origin is None or isinstance(origin, Constants):
        return None if origin is None else _fit_constants(origin, encoder, tokenizer, train)
    if str(origin) in TASKS:
        other = read_task(str(origin), data, rows=scale.rows)
        return encode(other.kind, other.train, tokenizer, scale.length, train.layout), other.source
    check_origin(origin)
    return _fit_constants(Constants.load(origin), encoder, tokenizer, train)


def check_origin(origin: str | Path) -> None:
    """Check that the source is a task or a file. Raises UserError."""
    if str(origin) not in TASKS and not Path(origin).is_file():
        raise UserError(f"constants-from: expected one of {', '.join(TASKS)}, or a file of constants; got '{origin}'")


def _fit_constants(constants: Constants, encoder: Any, tokenizer: Any, train: Encoded) -> Constants:
    """Check that constants fit model, length and layout, and cut them to length."""
    if constants.origin.layout != train.layout:
        raise UserError(
            f"constants: expected averages in layout {train.layout}, got {constants.origin.layout}; choose that "
            "layout, or compute new averages"
        )
    layers = find_attention_layers(encoder)
    constants.check_model(model_fingerprint(encoder, layers))
    vocabulary = vocabulary_digest(tokenizer)
    if constants.origin.tokenizer not in (None, vocabulary):
        raise UserError("constants: expected averages over inputs of this tokenizer, got those of another vocabulary")
    if constants.length < train.length:
        raise UserError(
            f"constants: expected some for {train.length} tokens, got {constants.length}; choose --length "
            f"{constants.length}, or fit them with regard.constants.to_length"
        )
    return to_length(constants.note_row_sums(layer.key for layer in layers if layer.open_rows), train.length)


def _describe(
    loaded: models.Loaded,
    encoder: Any,
    read: Task,
    splits: tuple[Encoded, Encoded],
    config: ReplaceConfig,
    origin: From,
    constants: Constants | None,
) -> dict[str, Any]:
    train, validation = splits
    model = describe_model(encoder, loaded.name, loaded.sha256 or sha256_of_weights(encoder), loaded.adapter)
    return describe_run(
        config.replace(length=train.length),
        model={**model, "type": model_fingerprint(encoder)["type"]},
        data={
            "task": read.name,
            "metric": read.metric,
            "source": read.source,
            **({LEFT_OUT: read.left_out} if read.left_out else {}),
            "sha256": read.sha256,
            "train": len(train),
            "validation": len(validation),
            "truncated": train.truncated + validation.truncated,
            "inputs_sha256": train.sha256,
            "labels": len(read.labels),
            "majority": _majority(read, validation),
            "separators": list(train.separators),
            "constants_from": origin.origin.source if isinstance(origin, Constants) else origin and str(origin),
            "constants_sha256": constants.sha256 if constants is not None else None,
        },
    )


def _warn_of_unreached_tokens(averages: Constants, valid: Encoded) -> None:
    """Warn of evaluated tokens that stand where no text of the averages has one: their rows are zeros."""
    if not averages.counts:
        return
    reached = next(iter(averages.counts.values())).diagonal() > 0
    if num_texts := int((valid.attention_mask & ~reached).any(1).sum()):
        warn_user(
            f"constants: the averages are of {int(reached.sum())} tokens of a text at most; {num_texts} of "
            f"{len(valid)} evaluated texts are longer, and get no attention behind them"
        )


def _majority(read: Task, validation: Encoded) -> float | None:
    """Return the score of the best single label on the validation rows; None where labels are words or entities.

    It is the most frequent one, but for the F1 of a class, which that class alone has.
    """
    if read.kind == "mlm" or read.name == LANGUAGE_MODEL or read.metric == "entity_f1":
        return None
    labels = validation.labels
    best = labels.new_tensor(1) if read.metric == "f1" else labels[labels != IGNORE_INDEX].mode().values
    return score(read.metric, labels, best.expand_as(labels), read.labels)


def _scores(
    evaluation: HeadEvaluation, averages: Constants | None, config: ReplaceConfig, model: str, task: str
) -> pd.DataFrame:
    """Score each source, ranking, fraction and seed, and each operation and seed."""
    seeds = range(config.num_seeds if isinstance(evaluation.evaluator, ProbeEvaluator) else 1)
    metric = evaluation.evaluator.metric
    rows: list[tuple[Any, ...]] = []

    def add(constants: str, ranking: str, fraction: float, scored: Scored) -> None:
        names, widths = (model, task, constants, ranking, fraction), (scored.half_width, scored.drop_half_width)
        rows.extend((*names, seed, metric, value, *widths) for seed, value in scored.by_seed.items())

    if 1.0 in config.shares:
        evaluation.step("scoring the model as it is")
        add(NONE, NONE, 1.0, evaluation.scores(None, (), seeds))
    for name in config.attention:
        evaluation.step(f"scoring {name}")
        add(name, ATTENTION, 0.0, evaluation.attention_scores(name, seeds))
    for name in config.sources:
        assert averages is not None, "constants are asked for"
        constants = _find_constants(evaluation, averages, name)
        for ranking, fraction in itertools.product(config.rankings, (f for f in config.shares if f < 1)):
            evaluation.step(f"scoring {name}, {ranking}, {fraction:g} dynamic")
            # random rankings differ by seed: others share their constant heads
            for group in [[seed] for seed in seeds] if ranking == "random" and fraction else [list(seeds)]:
                heads = averages.heads
                if fraction:
                    heads = evaluation.rank_heads(averages, ranking, group[0]).constant(fraction)
                add(name, ranking, fraction, evaluation.scores(constants, heads, group))
    if averages is not None and config.constants is None and 0.0 in config.shares:
        for name in BASELINES:
            evaluation.step(f"scoring {name}, for comparison")
            constants = make_data_free(name, averages)
            add(name, config.rankings[0], 0.0, evaluation.scores(constants, averages.heads, seeds))
    return pd.DataFrame(rows, columns=[*COLUMNS, *WIDTHS])


def _find_constants(evaluation: HeadEvaluation, averages: Constants, name: str) -> Constants:
    """Return the averages, or constants made or trained from them, by their name."""
    start = replace_config.TRAINED.get(name, name)
    constants = make_data_free(start, averages) if start in SOURCES else averages
    return evaluation.train_constants(constants, name) if name in replace_config.TRAINED else constants
