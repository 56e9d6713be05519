"""The second verb: what a model can do with constants (PAPA, arXiv 2211.03495) or another operation as attention."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pandas as pd
from transformers import PreTrainedModel

from regard import models
from regard.commands.replace.config import (
    CONSTANTS_RATE,
    GATE_RATE,
    LANGUAGE_MODEL,
    OTHER_OPERATION,
    THROUGH_EPOCHS,
    TRAINED,
    UNTOUCHED,
    ReplaceConfig,
)
from regard.commands.replace.evaluation import HeadEvaluation
from regard.commands.replace.evaluators import EVALUATION_TOKENS, Evaluator, PerplexityEvaluator, ProbeEvaluator
from regard.commands.replace.ranking import HeadRanking
from regard.commands.replace.result import COST_COLUMNS, HEAD_COLUMNS, SCORE_COLUMNS, ReplaceResult
from regard.constants import SOURCES, Constants, classify_patterns, make_data_free, pattern_fractions, to_length
from regard.data import TASKS, Encoded, Task, encode, mask_tokens, read_task
from regard.data.tasks import TaskPreset
from regard.errors import UserError
from regard.hooks import model_fingerprint
from regard.hooks.average import vocabulary_digest
from regard.hooks.operation import parse_attention
from regard.hooks.replaced_model import ReplacedConfig
from regard.runs.journal import ABOUT, Journal, has_entries
from regard.runs.provenance import now, regard_version, sha256_of_weights, versions
from regard.training import ProbeConfig, check_metric
from regard.training.states import get_encoder

From = str | Path | Constants | None
Elsewhere = Constants | tuple[Encoded, str] | None


def replace(
    model: PreTrainedModel | models.Loaded | str,
    task: str | Path | Task,
    *others: Any,
    tokenizer: Any = None,
    data: str | Path | None = None,
    constants_from: From = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    keep_work_dir: bool = False,
    on_step: Callable[[str], None] = lambda step: None,
    **settings: Any,
) -> ReplaceResult:
    """What probes behind the frozen model score on a task, with heads constant, or with another operation in all.

    `model` is a model with its `tokenizer`, or what `regard.models.load` gave, or a name it takes. `task` is one of
    `regard.data.TASKS`, a file of your own, or a `regard.data.Task`; `data` the folder with its files, None for the
    hub. `constants_from` takes the averages from elsewhere: another task's name, a file that `Constants.save` wrote, or
    constants. Other `settings` are those of `regard.commands.replace.config.ReplaceConfig`. `work_dir` is a folder for
    hidden states and for scores found so far, None for a temporary one: with `resume` a run that was broken off goes on
    there, to the same scores; it is deleted at the end, unless `keep_work_dir`. `on_step` is told what is done. An
    encoder–decoder's encoder is probed. Raises UserError for every mistake of the user.
    """
    chosen = _settings(**settings)
    task = _named(task, others)
    if constants_from is not None:
        chosen.check_constants_from()
    if work_dir is None:
        if resume:
            raise UserError("resume: expected the folder of the run that was broken off, work_dir=…; got none")
        given: dict[str, Any] = {"tokenizer": tokenizer, "data": data, "constants_from": constants_from}
        with tempfile.TemporaryDirectory(prefix="regard-replace-") as folder:
            return replace(model, task, work_dir=Path(folder) / "work", on_step=on_step, **given, **settings)
    began = time.perf_counter()
    language_model = (task.name if isinstance(task, Task) else task) == LANGUAGE_MODEL
    loaded = _loaded(model, tokenizer, language_model)
    encoder = loaded.model if language_model else get_encoder(loaded.model)
    on_step("reading the task")
    scale, read = _task(task, data, chosen)
    train, validation = _encoded(read, loaded, chosen, scale)
    elsewhere = _elsewhere(constants_from, data, encoder, loaded.tokenizer, train, scale)
    constants = elsewhere if isinstance(elsewhere, Constants) else None
    _check_order(chosen, constants)
    about = _about(loaded, encoder, read, (train, validation), chosen, constants_from, constants)
    with _journal(Path(work_dir), about, resume=resume) as journal:
        trials = HeadEvaluation(
            model=encoder,
            judge=_judge(encoder, read, (train, validation), chosen, scale, journal),
            train=train,
            validation=validation,
            gate_rate=GATE_RATE[chosen.scale],
            constants_rate=CONSTANTS_RATE[chosen.scale],
            journal=journal,
            step=on_step,
        )
        averages = _averages(trials, read, loaded.tokenizer, elsewhere) if chosen.sources else None
        table = _scores(trials, averages, chosen, loaded.name, read.name)
        tables, told = ({}, {}) if averages is None else _of_constants(trials, averages, chosen)
    record = about | {"created": now()} | told
    record["cost"] = {
        "seconds": round(time.perf_counter() - began, 3),
        "device": str(encoder.device),
        "batch_size": max(1, EVALUATION_TOKENS // validation.length),
        "length": validation.length,
    }
    if not keep_work_dir:
        journal.remove()
    return ReplaceResult(scores=table, metadata=record, **(_no_constants() | tables))


def _settings(**given: Any) -> ReplaceConfig:
    known = [option.name for option in fields(ReplaceConfig)]
    if unknown := [name for name in given if name not in known]:
        raise UserError(f"unknown setting {', '.join(unknown)}; expected some of: {', '.join(known)}")
    chosen = ReplaceConfig(**given)
    for name in chosen.attention:
        parse_attention(name)
    return chosen


def _named(task: Any, others: Sequence[Any]) -> str | Task:
    """The task, or its name. Raises UserError for what is none, as a tokenizer in its place."""
    if others or not isinstance(task, (str, Path, Task)):
        got = ", ".join(type(one).__name__ for one in (task, *others))
        raise UserError(
            f"task: expected one of {', '.join(TASKS)}, a file of your own, or a regard.data.Task, as in "
            f"replace(model, task, tokenizer=tokenizer); got {got}"
        )
    return task if isinstance(task, Task) else str(task)


def _loaded(model: PreTrainedModel | models.Loaded | str, tokenizer: Any, language_model: bool) -> models.Loaded:
    """The model with its tokenizer, checked to be one for the task, and to belong together."""
    if isinstance(model, str):
        model = models.load(model, language_model=language_model)
    if tokenizer is not None and not callable(getattr(tokenizer, "get_vocab", None)):
        raise UserError(f"tokenizer: expected one as AutoTokenizer loads it, got {type(tokenizer).__name__}")
    found = models.as_loaded(model, tokenizer, to="replace", call="replace(model, task, tokenizer=tokenizer)")
    config = found.model.config
    if isinstance(config, ReplacedConfig):
        raise UserError(f"model: expected one whose heads all attend, those of {found.name} are constant already")
    if language_model and (found.model.get_output_embeddings() is None or config.is_encoder_decoder):
        raise UserError(f"task lm: expected a causal language model with its head, got {type(found.model).__name__}")
    return found


def _task(task: str | Task, folder: str | Path | None, chosen: ReplaceConfig) -> tuple[TaskPreset, Task]:
    """The task, and its settings with those of the user in their place."""
    name = task.name if isinstance(task, Task) else task
    scale: TaskPreset = getattr(TASKS.get(name, TASKS["sst2"]), chosen.scale)
    train_rows, eval_rows = scale.rows or (None, None)
    rows = (chosen.max_train_samples or train_rows, chosen.max_eval_samples or eval_rows)
    own: dict[str, Any] = {n: getattr(chosen, n) for n in ("length", "batch_size", "learning_rate")}
    own |= {"epochs": chosen.num_epochs, "rows": None if rows == (None, None) else rows}
    scale = changed(scale, **{n: value for n, value in own.items() if value is not None})
    user: dict[str, Any] = {n: getattr(chosen, n) for n in ("text", "label", "validation", "metric")}
    read = task if isinstance(task, Task) else None
    if read is None:
        read = read_task(name, None if name not in TASKS else folder, rows=scale.rows, **user)
    check_metric(read.metric)
    return scale, read


def _encoded(read: Task, loaded: models.Loaded, chosen: ReplaceConfig, scale: TaskPreset) -> tuple[Encoded, Encoded]:
    tokenizer, length = loaded.tokenizer, scale.length
    most = models.maximum_length(loaded.model, tokenizer)
    if most is not None and length > most:
        raise UserError(f"length: expected at most {most} tokens, the most this model was made for; got {length}")
    parts = [
        encode(read.kind, part, tokenizer, length, chosen.special_token_layout)
        for part in (read.train, read.validation)
    ]
    if read.kind == "mlm" and read.name != LANGUAGE_MODEL:
        parts = [mask_tokens(part, tokenizer, seed) for seed, part in enumerate(parts)]
    return parts[0], parts[1]


def _judge(
    encoder: Any, read: Task, parts: tuple[Encoded, Encoded], chosen: ReplaceConfig, scale: TaskPreset, journal: Journal
) -> Evaluator:
    train, validation = parts
    through = _probe(scale, THROUGH_EPOCHS[chosen.scale])
    if read.name == LANGUAGE_MODEL:
        return PerplexityEvaluator(model=encoder, train_rows=train, validation_rows=validation, settings=through)
    return ProbeEvaluator(
        model=encoder,
        task=read,
        train_rows=train,
        validation_rows=validation,
        settings=_probe(scale, None),
        through=through,
        folder=journal.folder,
    )


def _probe(scale: TaskPreset, epochs: int | None) -> ProbeConfig:
    return ProbeConfig(
        learning_rate=scale.learning_rate, batch_size=scale.batch_size, epochs=min(epochs or scale.epochs, scale.epochs)
    )


def _about(
    loaded: models.Loaded,
    encoder: Any,
    read: Task,
    parts: tuple[Encoded, Encoded],
    chosen: ReplaceConfig,
    origin: From,
    given: Constants | None,
) -> dict[str, Any]:
    """Everything the scores depend on."""
    known = model_fingerprint(encoder)
    config = encoder.config
    train, validation = parts
    return {
        "regard": regard_version(),
        "verb": "replace",
        "model": {
            "name": loaded.name,
            "class": type(encoder).__name__,
            "type": known["type"],
            "sha256": loaded.sha256 or sha256_of_weights(encoder),
            "parameters": sum(p.numel() for p in encoder.parameters()),
            "layers": getattr(config, "num_hidden_layers", None),
            "heads": getattr(config, "num_attention_heads", None),
            "dtype": str(next(encoder.parameters()).dtype).removeprefix("torch."),
        },
        "data": {
            "task": read.name,
            "metric": read.metric,
            "source": read.source,
            "sha256": read.sha256,
            "train": len(train),
            "validation": len(validation),
            "truncated": train.truncated + validation.truncated,
            "inputs_sha256": train.sha256,
            "labels": len(read.labels),
        },
        "settings": {
            **{name: list(v) if isinstance(v, tuple) else v for name, v in asdict(chosen).items()},
            "constants_from": origin.origin.source if isinstance(origin, Constants) else origin and str(origin),
            "constants_sha256": given.sha256 if given is not None else None,
            "length": train.length,
            "separators": list(train.separators),
        },
        "versions": versions(),
    }


def _check_order(chosen: ReplaceConfig, given: Constants | None) -> None:
    """Nothing, or a UserError: an order asks for what the given constants do not tell."""
    if given is not None and "input-dependence" in chosen.rankings:
        given.input_dependence()


def can_resume(work: Path) -> bool:
    """Whether a run that was broken off has left something there to go on with: an entry, or hidden states.

    Raises UserError if the folder holds what no run has left there, and what must not be deleted.
    """
    if work.is_dir() and any(work.iterdir()) and not (work / ABOUT).is_file():
        raise UserError(f"work-dir: expected a new folder, or that of an earlier run; {work} holds other files")
    return has_entries(work) or any(work.glob("states-*.json"))


@contextmanager
def _journal(work: Path, about: dict[str, Any], *, resume: bool) -> Iterator[Journal]:
    """The journal of a run; its folder is deleted if the run is refused, or broken off, with nothing found."""
    goes_on = can_resume(work) and resume
    made = [parent for parent in work.absolute().parents if not parent.exists()]
    journal = Journal(work, about, resume=goes_on)
    try:
        yield journal
    except BaseException as error:
        if not (has_entries(work) if isinstance(error, UserError) else can_resume(work)):
            journal.remove()
            with suppress(OSError):
                for parent in made:
                    parent.rmdir()  # which fails where something else stands in it by now
        raise


def _elsewhere(
    origin: From, data: str | Path | None, encoder: Any, tokenizer: Any, train: Encoded, scale: TaskPreset
) -> Elsewhere:
    """What the averages come from, if not from the task's inputs: constants, or other inputs and their source."""
    if origin is None or isinstance(origin, Constants):
        return None if origin is None else _fitting(origin, encoder, tokenizer, train)
    if str(origin) in TASKS:
        other = read_task(str(origin), data, rows=scale.rows)
        return encode(other.kind, other.train, tokenizer, scale.length, train.layout), other.source
    if not Path(origin).is_file():
        raise UserError(f"constants-from: expected one of {', '.join(TASKS)}, or a file of constants; got '{origin}'")
    return _fitting(Constants.load(origin), encoder, tokenizer, train)


def _averages(trials: HeadEvaluation, read: Task, tokenizer: Any, elsewhere: Elsewhere) -> Constants:
    """The averages over the task's training inputs, or from elsewhere."""
    if isinstance(elsewhere, Constants):
        return elsewhere
    inputs, source = elsewhere or (trials.train, read.source)
    return trials.averages(inputs, source, tokenizer)


def _fitting(given: Constants, encoder: Any, tokenizer: Any, train: Encoded) -> Constants:
    """Constants from elsewhere, if they fit model, length and layout."""
    if given.origin.layout != train.layout:
        raise UserError(
            f"constants: expected averages in layout {train.layout}, got {given.origin.layout}; choose that layout, "
            "or average anew"
        )
    given.check_model(model_fingerprint(encoder))
    own = vocabulary_digest(tokenizer)
    if given.origin.tokenizer not in (None, own):
        raise UserError("constants: expected averages over inputs of this tokenizer, got those of another vocabulary")
    if given.length < train.length:
        raise UserError(
            f"constants: expected some for {train.length} tokens, got {given.length}; choose --length "
            f"{given.length}, or fit them with regard.constants.to_length"
        )
    return to_length(given, train.length)


def _source(trials: HeadEvaluation, averages: Constants, name: str) -> Constants:
    if name in SOURCES:
        return make_data_free(name, averages)
    if name in TRAINED:
        start = averages if TRAINED[name] == "average" else make_data_free(TRAINED[name], averages)
        return trials.trained(start, 0, name)
    return averages


def _scores(
    trials: HeadEvaluation, averages: Constants | None, chosen: ReplaceConfig, model: str, task: str
) -> pd.DataFrame:
    """One row for each source, order, fraction and seed; for each operation and seed."""
    seeds, metric = trials.judge.seeds(chosen.num_seeds), trials.judge.metric
    rows: list[tuple[Any, ...]] = []

    def add(constants: str, select: str, fraction: float, found: dict[int, float]) -> None:
        rows.extend((model, task, constants, select, fraction, seed, metric, value) for seed, value in found.items())

    if 1.0 in chosen.shares:
        trials.step("scoring the model as it is")
        add(UNTOUCHED, UNTOUCHED, 1.0, trials.scores(None, (), seeds))
    for name in chosen.attention:
        trials.step(f"scoring {name}")
        add(name, OTHER_OPERATION, 0.0, trials.swapped(name, seeds))
    for name in chosen.sources:
        assert averages is not None, "constants are asked for"
        constants = _source(trials, averages, name)
        for select in chosen.rankings:
            for fraction in (f for f in chosen.shares if f < 1):
                trials.step(f"scoring {name}, {select}, {fraction:g} dynamic")
                for group in _same_order(select, seeds, fraction):
                    heads = averages.heads
                    if fraction:
                        heads = trials.order(averages, select, group[0]).constant(fraction)
                    add(name, select, fraction, trials.scores(constants, heads, group))
    return pd.DataFrame(rows, columns=list(SCORE_COLUMNS))


def _same_order(select: str, seeds: Sequence[int], fraction: float) -> Iterable[Sequence[int]]:
    """The seeds in groups for which the same heads are constant: a random order is drawn for each."""
    return [[seed] for seed in seeds] if select == "random" and fraction > 0 else [list(seeds)]


def _no_constants() -> dict[str, Any]:
    """The tables of a run that makes no head constant."""
    return {"heads": pd.DataFrame(columns=list(HEAD_COLUMNS)), "cost": pd.DataFrame(columns=list(COST_COLUMNS))}


def _of_constants(
    trials: HeadEvaluation, averages: Constants, chosen: ReplaceConfig
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables that are of constants, and what the record says of these."""
    first = trials.order(averages, chosen.rankings[0], 0)
    matrices = {f"{site}.{layer}": matrix for (site, layer), matrix in averages.matrices.items()}
    cost = trials.cost(averages, first, chosen.shares)
    tables = {"heads": _heads(averages, first), "cost": pd.DataFrame(cost, columns=list(COST_COLUMNS))}
    told = {
        "constants": {name: value for name, value in vars(averages.origin).items() if name != "model"},
        "patterns": pattern_fractions(matrices, averages.origin.separators),
    }
    return {**tables, "matrices": matrices, "constants": averages.to_bytes()}, told


def _heads(averages: Constants, first: HeadRanking) -> pd.DataFrame:
    """One row a head: its rank, the value it was ranked by, and the pattern of its average."""
    found = {}
    for (site, layer), matrix in averages.matrices.items():
        for head, pattern in enumerate(classify_patterns(matrix, averages.origin.separators)):
            found[site, layer, head] = str(pattern)
    rows = [
        (*head, rank, value, found[head]) for rank, (head, value) in enumerate(zip(*vars(first).values(), strict=True))
    ]
    return pd.DataFrame(rows, columns=list(HEAD_COLUMNS))
