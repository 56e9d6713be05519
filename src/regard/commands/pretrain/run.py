"""Pre-training of a small decoder, with sinks monitored during training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from accelerate import PartialState
from torch import Tensor

from regard import training
from regard.attention.spec import warn_of_idle
from regard.commands.pretrain.config import TRAIN_TOKENIZER, TRAINED_VOCAB_SIZE, PretrainConfig, preset_config
from regard.commands.pretrain.result import PretrainResult, final_metrics, make_history
from regard.data import tokenizers
from regard.data.corpus import BatchSampler, Corpus, insert_tokens, prepare_corpus
from regard.data.examples import IGNORE_INDEX
from regard.data.sources import Source, identify_source, sample_texts
from regard.errors import UserError, warn_user
from regard.models import RegardForCausalLM
from regard.runs.config import UNSET, Unset, describe_options, explicit_arguments
from regard.runs.distributed import join_processes, naming_lost_rank
from regard.runs.integrity import sha256_of_json
from regard.runs.output_dir import atomic_folder, cache_dir
from regard.runs.progress import OnProgress, ProgressEvent, report_packing, shown_in_notebook
from regard.runs.provenance import describe_cost, describe_run, sha256_of_weights
from regard.runs.rank import num_processes
from regard.runs.work_dir import WorkDir, find_log_dir, open_work_dir
from regard.training.placement import check_trackers
from regard.training.sink_monitor import SinkMonitor, ValidationLoss, find_emergence, sink_table

CHECKPOINTS = "checkpoints"
PARTS = (CHECKPOINTS,)
"""What a run makes in its work folder, beside the journal of its sinks."""


@shown_in_notebook()
@describe_options(PretrainConfig)
def pretrain(  # noqa: D417 - the options are described in the configuration
    config: str | PretrainConfig = "nano",
    *,
    work_dir: str | Path | None = None,
    resume: bool = False,
    keep_work_dir: bool = False,
    cache: str | Path | None = None,
    on_progress: OnProgress | None = None,
    attention: str | Unset = UNSET,
    positions: str | Unset = UNSET,
    window: int | Unset | None = UNSET,
    prefix: int | Unset = UNSET,
    backend: str | Unset = UNSET,
    ffn: Literal["swiglu", "relu", "gelu", "swish", "reglu", "geglu"] | Unset = UNSET,
    norm: Literal["pre", "post"] | Unset = UNSET,
    num_layers: int | Unset = UNSET,
    hidden_size: int | Unset = UNSET,
    num_heads: int | Unset = UNSET,
    num_kv_heads: int | Unset | None = UNSET,
    intermediate_size: int | Unset = UNSET,
    tie_word_embeddings: bool | Unset = UNSET,
    length: int | Unset = UNSET,
    tokenizer: str | Unset = UNSET,
    vocab_size: int | Unset | None = UNSET,
    data: str | Path | Sequence[str | Path] | Unset = UNSET,
    data_fraction: float | Unset = UNSET,
    random_tokens: tuple[int, int] | Unset | None = UNSET,
    fixed_token: int | Unset | None = UNSET,
    max_steps: int | Unset = UNSET,
    batch_size: int | Unset = UNSET,
    micro_batch_size: int | Unset | None = UNSET,
    learning_rate: float | Unset = UNSET,
    lr_scheduler_type: Literal["constant", "cosine"] | Unset = UNSET,
    warmup_steps: int | Unset = UNSET,
    weight_decay: float | Unset = UNSET,
    decay: Literal["all", "matrices"] | Unset = UNSET,
    max_grad_norm: float | Unset = UNSET,
    precision: Literal["float32", "bfloat16"] | Unset = UNSET,
    compile: bool | Unset = UNSET,
    seed: int | Unset = UNSET,
    eval_steps: int | Unset = UNSET,
    sink_samples: int | Unset = UNSET,
    sink_length: int | Unset = UNSET,
    epsilon: float | Unset = UNSET,
    eval_samples: int | Unset = UNSET,
    save_steps: int | Unset | None = UNSET,
    logging_steps: int | Unset = UNSET,
    trackers: str | Sequence[str] | Unset = UNSET,
) -> PretrainResult:
    """Train a decoder from scratch.

    Under `accelerate launch` all processes train together; each returns the same. The arguments after `on_progress` are
    the options of `regard pretrain`, fields of `PretrainConfig`, and change `config`.

    Args:
        config: A preset out of `regard.commands.pretrain.config.PRESETS`, or a configuration.
        work_dir: Folder of checkpoints, new or of an earlier run; None for a temporary one.
        resume: Resume the run interrupted in `work_dir`, if any, with the same results.
        keep_work_dir: Do not delete the checkpoints at the end.
        cache: Folder of packed text, for reuse. None for $REGARD_CACHE, else `~/.cache/regard`.
        on_progress: Called while text is packed and after each step.

    Returns:
        The model with its tokenizer, and its history.

    Raises:
        UserError: An argument is invalid, text is missing, or `work_dir` belongs to another run.
    """
    preset = preset_config(config)
    name = config if isinstance(config, str) else None
    config = preset_config(config, **explicit_arguments(locals(), PretrainConfig))
    config.warn_of_idle()
    plan = config.training_config()
    warn_of_idle(config.spec, config.attention)
    check_trackers(config.trackers, work_dir)
    join_processes()

    def report(step: int, steps: int, metrics: Mapping[str, float]) -> None:
        if on_progress is not None:
            on_progress(ProgressEvent(phase="training", step=step, steps=steps, metrics=metrics))

    options: dict[str, Any] = {"journal_alone": False, "resume": resume, "keep": keep_work_dir}
    with naming_lost_rank(), open_work_dir(work_dir, command="pretrain", parts=PARTS, **options) as work:
        text = prepare_text(config, cache_dir(cache), on_progress)
        model = _model(config, text.tokenizer)
        losses, sinks = _monitors(config, text, work)
        _warn_of_a_small_vocabulary(config, text.tokenizer)
        hashes = text.corpus.hashes()
        data_hashes = {"domains": hashes, "tokenizer": tokenizers.tokenizer_hash(text.tokenizer)}
        work.start({"config": config.identity(), "data": data_hashes})
        trained = training.train(
            model,
            plan,
            batch=text.batches(config),
            loss=_loss,
            count=_count,
            folder=work.folder / CHECKPOINTS,
            log_dir=find_log_dir(work_dir, resume=work.resume) if config.trackers else None,
            resume=work.resume,
            journal=work.journal,
            watchers=[losses, sinks],
            on_progress=report,
            unit="tokens",
        )
        origin = {"name": name, "config_defaults": preset.to_dict()}
        return _result(config, text, model, trained, sinks, origin)


def _loss(model: Any, rows: Mapping[str, Tensor]) -> Tensor:
    return model(**rows, num_items_in_batch=1).loss


def _count(rows: Mapping[str, Tensor]) -> int:
    return int((rows["labels"][:, 1:] != IGNORE_INDEX).sum())


def _model(config: PretrainConfig, tokenizer: Any) -> RegardForCausalLM:
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return RegardForCausalLM(config.model_config(vocab_size(config, tokenizer), **tokens))


class JournaledSinkMonitor(SinkMonitor):
    """A sink monitor whose rows are written to the journal at once, so that a resumed run has all of them."""

    def __init__(self, work: WorkDir, samples: Tensor, **options: Any) -> None:
        super().__init__(samples, **options)
        self.work = work

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        numbers = super().__call__(model, step)
        self.work.journal.add(str(step), [row for row in self.rows if row[0] == step])
        return numbers

    def table(self, steps: Iterable[int]) -> pd.DataFrame:
        journal, names = self.work.journal, map(str, steps)
        return sink_table([row for name in names if name in journal for row in journal[name]])


def _monitors(config: PretrainConfig, text: Text, work: WorkDir) -> tuple[ValidationLoss, JournaledSinkMonitor]:
    rows = text.held_out(config, config.eval_samples, config.length)
    losses = ValidationLoss(rows, every=config.eval_steps, uncounted=config.uncounted(training=False))
    of_each = -(-config.sink_samples // len(text.corpus.domains))
    samples = torch.cat(list(text.held_out(config, of_each, config.sink_length).values()))
    options = {"every": config.eval_steps, "epsilon": config.epsilon}
    return losses, JournaledSinkMonitor(work, samples[: config.sink_samples], **options)


def _result(
    config: PretrainConfig,
    text: Text,
    model: RegardForCausalLM,
    trained: training.TrainResult,
    sinks: JournaledSinkMonitor,
    origin: Mapping[str, Any],
) -> PretrainResult:
    """Return the tables, the metadata, and the whole model, even if it was sharded while it was trained."""
    device, model, tokenizer = model.device, _whole(model), text.tokenizer
    sha256, (num_samples, length) = tokenizers.tokenizer_hash(tokenizer), sinks.samples.shape
    history = make_history(trained.history)
    passes = BatchSampler(text.corpus, config.batch_size, config.seed).passes(int(history["step"].iloc[-1]))
    metadata = describe_run(
        config,
        **origin,
        model={
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "parameters_without_embeddings": model.parameters_without_embeddings,
            "vocabulary": model.config.vocab_size,
            "sha256": sha256_of_weights(model),
        },
        data={
            "domains": [
                domain.metadata() | {"passes": count} for domain, count in zip(text.corpus.domains, passes, strict=True)
            ],
            "tokenizer": {"name": config.tokenizer, "size": len(tokenizer), "sha256": sha256},
        },
        watch={
            "samples": num_samples,
            "length": length,
            "epsilon": config.epsilon,
            "uniform": float(history["alpha_uniform"].dropna().iloc[-1]),
        },
        final=final_metrics(history),
        emergence=vars(find_emergence(history)),
        cost=describe_cost(device, trained.seconds, tokens=int(history["tokens"].iloc[-1])),
    )
    return PretrainResult(history, sinks.table(history["step"]), metadata, model, tokenizer)


def _whole(model: RegardForCausalLM) -> RegardForCausalLM:
    """Return a model on the CPU with the weights of one that may be sharded; every process must take part."""
    whole = RegardForCausalLM(model.config)
    missing = whole.load_state_dict(training.full_weights(model), strict=False).missing_keys
    assert not missing or model.config.tie_word_embeddings, f"weights without a value: {missing}"
    whole.tie_weights()  # of tied weights one name is there
    return whole.eval()


@dataclass(frozen=True)
class Text:
    """What is trained on: the tokenizer, the packed text, and the tokens that replace others."""

    tokenizer: Any
    corpus: Corpus
    vocabulary: Tensor
    """Ids that random tokens are drawn from."""
    fixed: tuple[int, int] | None

    def batches(self, config: PretrainConfig) -> Callable[[int], dict[str, Tensor]]:
        draw = BatchSampler(self.corpus, config.batch_size, config.seed)

        def batch(step: int) -> dict[str, Tensor]:
            ids = self.altered(draw.rows(step), config, step, random=config.random_tokens)
            labels = ids.clone()
            labels[:, list(config.uncounted(training=True))] = IGNORE_INDEX
            return {"input_ids": ids, "labels": labels}

        return batch

    def held_out(self, config: PretrainConfig, samples: int, length: int) -> dict[str, Tensor]:
        """Return held-out sequences by domain, from all over it, cut to a length, with the fixed token."""
        rows_by_domain = {}
        for domain in self.corpus.domains:
            rows = domain.valid.evenly_spaced(min(samples, len(domain.valid)))
            rows_by_domain[domain.name] = self.altered(rows, config, -1, random=None)[:, :length]
        return rows_by_domain

    def altered(self, ids: Tensor, config: PretrainConfig, step: int, *, random: tuple[int, int] | None) -> Tensor:
        return insert_tokens(
            ids, step=step, seed=config.seed, vocabulary=self.vocabulary, random_tokens=random, fixed_token=self.fixed
        )


def prepare_text(config: PretrainConfig, cache: Path, on_progress: OnProgress | None = None) -> Text:
    """Return the packed text with its tokenizer. One process of each machine packs, the others find it done."""
    sources, report = [Source.parse(source) for source in config.data], partial(report_packing, on_progress)
    state = PartialState(cpu=not torch.accelerator.is_available()) if num_processes() > 1 else None
    with state.local_main_process_first() if state else contextlib.nullcontext():
        tokenizer = _tokenizer(config, sources, cache / "tokenizers")
        tokenizers.check_tokenizer(tokenizer, vocab_size(config, tokenizer))
        length, fraction, folder = config.length, config.data_fraction, cache / "text"
        corpus = prepare_corpus(sources, tokenizer, length=length, folder=folder, fraction=fraction, on_progress=report)
    fixed = None if config.fixed_token is None else (config.fixed_token, int(tokenizer.eos_token_id))
    return Text(tokenizer, corpus, tokenizers.ordinary_tokens(tokenizer), fixed)


def _tokenizer(config: PretrainConfig, sources: list[Source], cache: Path) -> Any:
    """Return the tokenizer: read, or trained on the text, once for the same text and size."""
    if config.tokenizer != TRAIN_TOKENIZER:
        return tokenizers.read_tokenizer(config.tokenizer)
    size = config.vocab_size or TRAINED_VOCAB_SIZE
    text = [[identify_source(source.where), source.weight, source.tokens] for source in sources]
    folder = cache / sha256_of_json([text, size])[:16]
    if not folder.is_dir():
        trained = tokenizers.train_tokenizer(sample_texts(sources), size)
        try:
            with atomic_folder(folder, overwrite=False, option="--cache") as place:
                trained.save_pretrained(place)
        except UserError:
            if not folder.is_dir():  # else another run was first
                raise
    return tokenizers.read_tokenizer(folder)


def _warn_of_a_small_vocabulary(config: PretrainConfig, tokenizer: Any) -> None:
    size, wanted = len(tokenizer), config.vocab_size or TRAINED_VOCAB_SIZE
    if config.tokenizer == TRAIN_TOKENIZER and size < wanted:
        warn_user(f"vocabulary: the text gives {size:,} tokens, not {wanted:,}; the model has {size:,}")


def vocab_size(config: PretrainConfig, tokenizer: Any) -> int:
    """Return the size of the model's vocabulary: that of a trained tokenizer; of others the configuration's, if any."""
    if config.tokenizer != TRAIN_TOKENIZER and config.vocab_size is not None:
        return config.vocab_size
    return tokenizers.largest_id(tokenizer) + 1
