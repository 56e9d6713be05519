"""Conversion of a language model: replace its attention, match it layer by layer, train it end to end."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard import training
from regard.attention.quantized import is_quantized
from regard.commands.convert.config import AVERAGE, TRAINED_AVERAGE, ConvertConfig, Stage
from regard.commands.convert.held_out import HeldOutLoss, count_targets, row_losses
from regard.commands.convert.matching import LayerMatch
from regard.commands.convert.result import ConvertResult
from regard.commands.convert.sequences import Sequences
from regard.data import tokenizers
from regard.data.corpus import prepare_corpus
from regard.data.sources import Source, check_source
from regard.data.tokenizers import tokens_before
from regard.errors import UserError, naming_option
from regard.hooks import average_attention, replaced
from regard.hooks.replaced_model import check_original
from regard.hooks.trained_constants import begin_training_constants, end_training_constants
from regard.models.decoder import next_tokens
from regard.models.generator import add_model_hash
from regard.models.limits import check_length, maximum_length
from regard.models.loss import logits_cross_entropy
from regard.models.model_files import Loaded, eval_mode
from regard.models.pretrained import load, resolve_model
from regard.runs.config import UNSET, Unset, describe_options, explicit_arguments
from regard.runs.intervals import strata_half_width
from regard.runs.output_dir import cache_dir
from regard.runs.progress import OnProgress, ProgressEvent, report_packing, shown_in_notebook
from regard.runs.provenance import describe_cost, describe_model, describe_run
from regard.runs.rank import num_processes
from regard.runs.work_dir import open_work_dir

PARTS = ("layers", "model")
"""What a run makes in its work folder: the checkpoints of each stage."""
Rows = Mapping[str, Tensor]


@shown_in_notebook()
@describe_options(ConvertConfig)
def convert(  # noqa: D417 - the options are described in the configuration
    model: str | Path | PreTrainedModel | Loaded,
    tokenizer: Any = None,
    *,
    config: ConvertConfig | None = None,
    work_dir: str | Path | None = None,
    resume: bool = False,
    keep_work_dir: bool = False,
    cache: str | Path | None = None,
    on_progress: OnProgress | None = None,
    attention: str | Unset | None = UNSET,
    layers: tuple[int, ...] | Unset | None = UNSET,
    average_samples: int | Unset = UNSET,
    text: str | Path | Sequence[str | Path] | Unset = UNSET,
    length: int | Unset = UNSET,
    layer_steps: int | Unset = UNSET,
    model_steps: int | Unset = UNSET,
    layer_learning_rate: float | Unset = UNSET,
    model_learning_rate: float | Unset = UNSET,
    trained: Literal["all", "attention"] | Unset = UNSET,
    batch_size: int | Unset = UNSET,
    micro_batch_size: int | Unset | None = UNSET,
    weight_decay: float | Unset = UNSET,
    max_grad_norm: float | Unset = UNSET,
    precision: Literal["float32", "bfloat16"] | Unset = UNSET,
    seed: int | Unset = UNSET,
    eval_steps: int | Unset = UNSET,
    eval_samples: int | Unset = UNSET,
    save_steps: int | Unset | None = UNSET,
    logging_steps: int | Unset = UNSET,
) -> ConvertResult:
    """Give a trained causal language model another attention, and train it until it works again.

    First each layer's attention is trained to give the output of the untouched layer, on the untouched model's hidden
    states; then the model is trained end to end as a language model.

    Args:
        model: Folder, hub id, or a model; it stays as it is.
        tokenizer: The tokenizer of a model; None for one that is named.
        config: A configuration, which the options change.
        work_dir: Folder of checkpoints, new or of an earlier run; None for a temporary one.
        resume: Resume the run interrupted in `work_dir`, if any, with the same results.
        keep_work_dir: Do not delete the checkpoints at the end.
        cache: Folder of packed text, for reuse. None for $REGARD_CACHE, else `~/.cache/regard`.
        on_progress: Called while text is packed and after each step.

    Returns:
        The converted model with its tokenizer, and the loss on held-out text before and after each stage.

    Raises:
        UserError: The attention does not fit the model, text is missing, or `work_dir` belongs to another run.

    Source:
        LoLCATs (Zhang et al. 2024, arXiv 2410.10254): attention transfer, then fine-tuning.
    """
    config = (config or ConvertConfig()).replace(**explicit_arguments(locals(), ConvertConfig))
    if num_processes() > 1:
        raise UserError(f"convert: expected one process, got {num_processes()}")
    config.warn_of_idle()
    config.check_attention()
    sources = _parse_sources(config.text)
    loaded = _load(model, tokenizer)
    config = config.for_model(maximum_length(loaded.model, loaded.tokenizer))
    check_length(config.num_tokens, loaded.model, loaded.tokenizer)
    folder, report = cache_dir(cache) / "text", partial(report_packing, on_progress)
    with open_work_dir(work_dir, command="convert", parts=PARTS, resume=resume, keep=keep_work_dir) as work:
        has_constants = config.attention in (AVERAGE, TRAINED_AVERAGE)
        student = None if has_constants else replaced(loaded.model, config.chosen_attention, layers=config.layers)
        length = config.num_tokens - len(tokens_before(loaded.tokenizer))
        with naming_option("text", instead_of="data", others=False):
            corpus = prepare_corpus(sources, loaded.tokenizer, length=length, folder=folder, on_progress=report)
        hashes = corpus.hashes()
        model_id = {"name": loaded.name, "sha256": loaded.sha256}
        sequences = Sequences.of(corpus, loaded.tokenizer, batch_size=config.batch_size, seed=config.seed)
        work.start({"config": config.identity(), "model": model_id, "data": hashes, **sequences.identity()})
        student = student or _with_averages(loaded, config, sequences)
        with eval_mode(loaded.model):
            conversion = _Conversion(config, loaded, student, sequences, work.folder, work.resume, on_progress)
            conversion.run()
    return conversion.result(hashes)


def _parse_sources(texts: Sequence[str]) -> list[Source]:
    """Return the sources of `--text`, whose files are there."""
    with naming_option("text", instead_of="data"):
        sources = [Source.parse(text) for text in texts]
        for source in sources:
            check_source(source)
    return sources


def _load(model: Any, tokenizer: Any) -> Loaded:
    """Return a causal language model with float32 weights, and its tokenizer."""
    if isinstance(model, (str, Path)):
        model = load(model, language_model=True, dtype="float32")
    loaded = resolve_model(model, tokenizer, to="convert", call="regard.convert(model, tokenizer)", language_model=True)
    name, host = loaded.name, loaded.model
    check_original(host, name)
    if getattr(host.config, "is_encoder_decoder", False):
        raise UserError(f"model: expected a causal language model, {name} is an encoder–decoder")
    if not hasattr(host, "lm_head") and host.get_output_embeddings() is None:
        raise UserError(f"model: expected a causal language model, {type(host).__name__} has no head")
    if any(is_quantized(parameter) for parameter in host.parameters()):
        raise UserError(
            "model: expected weights to be trained, got quantized ones; load the model that they were made of"
        )
    if any(parameter.dtype != torch.float32 for parameter in host.parameters()):
        raise UserError("model: expected weights in float32, to be trained; load the model with dtype=torch.float32")
    return add_model_hash(loaded)


def _with_averages(loaded: Loaded, config: ConvertConfig, sequences: Sequences) -> Any:
    """Return the model with the average attention over rows of the text in the place of its heads, to learn or not."""
    samples = min(config.average_samples, sum(len(domain.train) for domain in sequences.corpus.domains))
    num_batches = math.ceil(samples / config.batch_size)
    rows = torch.cat([sequences.of_step(step) for step in range(num_batches)])[:samples]
    batches = rows.to(loaded.model.device).split(config.batch_size)
    constants = average_attention(loaded.model, batches, config.num_tokens, tokenizer=loaded.tokenizer, source="text")
    heads = [head for head in constants.heads if config.layers is None or head[1] in config.layers]
    if missing := sorted({*(config.layers or ())} - {head[1] for head in heads}):
        raise UserError(f"layers: expected some of {sorted({head[1] for head in constants.heads})}, got {missing[0]}")
    student = replaced(loaded.model, constants, heads)
    if config.attention == TRAINED_AVERAGE:
        begin_training_constants(student)
    return student


class _Conversion:
    """The stages of one run, and what is measured after each."""

    def __init__(
        self,
        config: ConvertConfig,
        loaded: Loaded,
        student: Any,
        sequences: Sequences,
        folder: Path,
        resume: bool,
        on_progress: OnProgress | None,
    ) -> None:
        self.config, self.loaded, self.student, self.sequences = config, loaded, student, sequences
        self.folder, self.resume, self.on_progress = folder, resume, on_progress
        self.teacher = loaded.model
        self.held_out = sequences.held_out(config.eval_samples)
        self.rows = torch.cat(list(self.held_out.values()))
        if len(self.rows) < 2:
            wanted = f"at least 2 held-out sequences of {config.num_tokens} tokens"
            raise UserError(f"text: expected {wanted}, got {len(self.rows)}; give more text or a smaller length")
        entry = student.config.constant_heads
        constant = {(site, layer) for site, layer, _ in entry["heads"]}
        places = [p for p in entry["places"] if not constant or (p["site"], p["layer"]) in constant]
        self.layers = {place["path"]: place["layer"] for place in places}
        self.match = LayerMatch(self.teacher, list(self.layers))
        self.stages: list[dict[str, Any]] = []
        self.history: list[dict[str, Any]] = []
        self.layer_errors: list[dict[str, Any]] = []
        self.losses: list[float] = []
        self.untouched: list[float] = []

    def run(self) -> None:
        """Measure, train and measure again."""
        config, all_trained = self.config, [p for p in self.student.parameters() if p.requires_grad]
        of_attention = {p for name in self.match.names for p in self.student.get_submodule(name).parameters()}
        with self.match.installed(self.student):
            with eval_mode(self.teacher):
                self.match.measure_scales(self.evaluated_batches())
            self.add_stage("untouched", self.teacher, 0, 0.0)
            self.add_stage("replaced", self.student, 0, 0.0)
            if config.layer_steps:
                self.train_only([p for p in all_trained if p in of_attention])
                self.train("layers", 0, self.match.loss, lambda rows: rows["input_ids"].numel())
        if config.model_steps:
            chosen = all_trained if config.trained == "all" else [p for p in all_trained if p in of_attention]
            self.train_only(chosen)
            count = partial(count_targets, self.student)
            self.train("model", config.layer_steps, _language_model_loss, lambda rows: count(rows["input_ids"]))
        for parameter in all_trained:
            parameter.requires_grad_(True)
        if config.attention == TRAINED_AVERAGE:
            end_training_constants(self.student)
        self.student.eval()

    def train_only(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        chosen = set(parameters)
        for parameter in self.student.parameters():
            parameter.requires_grad_(parameter in chosen)

    def train(
        self, stage: Stage, first: int, loss: Callable[[Any, Rows], Tensor], count: Callable[[Rows], int]
    ) -> None:
        """Train a stage, whose text goes on behind the `first` batches."""

        def report(step: int, steps: int, metrics: Mapping[str, float]) -> None:
            if self.on_progress is not None:
                phase = "matching layers" if stage == "layers" else "training the model"
                self.on_progress(ProgressEvent(phase=phase, step=step, steps=steps, metrics=_name_loss(stage, metrics)))

        held_out = HeldOutLoss(self.held_out, self.config.eval_steps, self.losses)
        trained = training.train(
            self.student,
            self.config.training_config(stage),
            batch=lambda step: {"input_ids": self.sequences.of_step(first + step)},
            loss=loss,
            count=count,
            folder=self.folder / stage,
            resume=self.resume,
            watchers=[held_out],
            on_progress=report,
            device="cpu" if self.teacher.device.type == "cpu" else None,
            unit="tokens",
        )
        self.history += [{"stage": stage, **_name_loss(stage, row)} for row in trained.history]
        self.add_stage(stage, self.student, trained.steps, trained.seconds, held_out.losses_at(trained.steps))

    def add_stage(self, stage: str, model: Any, steps: int, seconds: float, losses: list[float] | None = None) -> None:
        """Measure the loss of each held-out row, unless it is known, and the error of each layer."""
        losses = losses or row_losses(model, self.rows)
        self.losses, self.untouched = losses, self.untouched or losses
        changes = [after - before for after, before in zip(losses, self.untouched, strict=True)]
        loss, change = fmean(losses), fmean(changes)
        sizes = [len(rows) for rows in self.held_out.values()]
        of_loss, of_change = (strata_half_width(values, sizes) for values in (losses, changes))
        self.stages.append(
            {
                **{"stage": stage, "steps": steps, "seconds": seconds, "loss": loss},
                **{"loss_low": loss - of_loss, "loss_high": loss + of_loss, "perplexity": math.exp(min(loss, 700.0))},
                **{"change": change, "change_low": change - of_change, "change_high": change + of_change},
                "rows": len(losses),
            }
        )
        if stage in ("replaced", "layers"):
            self.add_layer_errors(stage, model)

    def evaluated_batches(self) -> Iterator[Tensor]:
        for rows in self.rows.split(self.config.batch_size):
            yield rows.to(self.teacher.device)

    @torch.no_grad()
    def add_layer_errors(self, stage: str, model: Any) -> None:
        sums = dict.fromkeys(self.match.names, 0.0)
        with eval_mode(model):
            for rows in self.evaluated_batches():
                self.match.loss(model, {"input_ids": rows})
                for name, error in self.match.errors.items():
                    sums[name] += float(error)
        for name, total in sums.items():
            row = {"stage": stage, "layer": self.layers[name], "relative_error": total / self.rows.numel()}
            self.layer_errors.append(row)

    def result(self, hashes: Mapping[str, Any]) -> ConvertResult:
        seconds = sum(row["seconds"] for row in self.stages)
        loaded, entry = self.loaded, self.student.config.constant_heads
        tokens = self.config.batch_size * self.config.num_tokens * (self.config.layer_steps + self.config.model_steps)
        metadata = describe_run(
            self.config,
            model=describe_model(loaded.model, loaded.name, loaded.sha256, loaded.adapter),
            attention=entry["operation"] or {"constants": entry["origin"]},
            data={
                "domains": [domain.metadata() for domain in self.sequences.corpus.domains],
                "sha256": dict(hashes),
                "tokenizer": {"size": len(loaded.tokenizer), "sha256": tokenizers.tokenizer_hash(loaded.tokenizer)},
            },
            final=copy.copy(self.stages[-1]),
            cost=describe_cost(self.student.device, seconds, tokens=tokens),
        )
        tables = (pd.DataFrame(self.stages), pd.DataFrame(self.layer_errors), pd.DataFrame(self.history))
        return ConvertResult(*tables, metadata, self.student, loaded.tokenizer)


def _name_loss(stage: Stage, row: Mapping[str, float]) -> dict[str, float]:
    """Return a row of training whose loss has the name of what it is: in the first stage the error of layers."""
    return {"relative_error" if stage == "layers" and name == "loss" else name: row[name] for name in row}


def _language_model_loss(model: Any, rows: Rows) -> Tensor:
    ids = rows["input_ids"]
    return logits_cross_entropy(model(input_ids=ids, use_cache=False).logits[:, :-1], next_tokens(model, ids))
