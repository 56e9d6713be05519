"""The third verb: train a small decoder from nothing, and watch sinks while they emerge."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from accelerate import PartialState
from torch import Tensor

from regard import training
from regard.commands.pretrain.config import (
    RESUMABLE_FIELDS,
    TRAIN_TOKENIZER,
    TRAINED_VOCAB_SIZE,
    PretrainConfig,
    preset_config,
)
from regard.commands.pretrain.result import VERB, PretrainResult, final_metrics, make_history
from regard.data.corpus import Corpus, prepare_corpus
from regard.data.corpus_sources import Source, identify_source, sample_texts
from regard.data.examples import IGNORE_INDEX
from regard.data.sampling import BatchSampler, insert_tokens
from regard.data.tokenizers import check_tokenizer, ordinary_tokens, read_tokenizer, tokenizer_hash, train_tokenizer
from regard.errors import UserError
from regard.models import RegardForCausalLM
from regard.runs.folder import atomic_folder
from regard.runs.journal import Journal
from regard.runs.provenance import now, peak_memory, regard_version, sha256_of_weights, versions
from regard.training.sink_monitor import SinkMonitor, ValidationLoss, find_emergence, sink_table

CHECKPOINTS, WATCHED = "checkpoints", "watched"


def pretrain(
    name: str | PretrainConfig = "nano",
    *,
    work_dir: str | Path | None = None,
    resume: bool = False,
    keep_work_dir: bool = False,
    cache: str | Path | None = None,
    on_text: Callable[[str, int], None] | None = None,
    on_progress: Callable[[int, int, Mapping[str, float]], None] | None = None,
    **changes: Any,
) -> PretrainResult:
    """A model trained by a recipe, with its history.

    `name` is one of `regard.commands.pretrain.config.PRESETS`, or a recipe; `changes` are fields of it. `work_dir` is
    the folder of checkpoints: with `resume` a run that was broken off goes on there, to the same numbers; it is deleted
    at the end unless `keep_work_dir`. Packed text is kept in `cache` (default: REGARD_CACHE, else `~/.cache/regard`)
    and used again. `on_text(domain, tokens)` is told of packing, `on_progress(step, steps, numbers)` of training.

    Under `accelerate launch` all processes train together; each returns the same. Raises UserError.
    """
    base, chosen = preset_config(name), preset_config(name, **changes)
    named = name if isinstance(name, str) else None
    with _folder(work_dir, keep=keep_work_dir) as place:
        journal = _begin(place, chosen, resume=resume)
        text = _text(chosen, _cache(cache), on_text)
        model = _model(chosen, text.tokenizer)
        watches = _watches(chosen, text, journal)
        trained = training.train(
            model,
            chosen.training_config(),
            batch=text.batches(chosen),
            loss=_loss,
            count=_count,
            folder=place / CHECKPOINTS,
            resume=resume,
            watchers=watches,
            on_progress=on_progress,
        )
        found = _result(chosen, text, model, trained, watches[-1])
    return replace(found, metadata={"name": named, **found.metadata, "recipe_defaults": base.to_dict()})


@dataclass(frozen=True)
class Text:
    """What is trained on: the tokenizer, the packed text, and the tokens that a recipe puts in the place of others."""

    tokenizer: Any
    corpus: Corpus
    vocabulary: Tensor
    """Ids that random tokens are drawn from."""
    fixed: tuple[int, int] | None

    def batches(self, chosen: PretrainConfig) -> Callable[[int], dict[str, Tensor]]:
        """The batch of each step: tokens, and which of them are predicted."""
        draw = BatchSampler(self.corpus, chosen.batch_size, chosen.seed)

        def batch(step: int) -> dict[str, Tensor]:
            ids = self.altered(draw.rows(step), chosen, step, random=chosen.random_tokens)
            labels = ids.clone()
            labels[:, list(chosen.uncounted(training=True))] = IGNORE_INDEX
            return {"input_ids": ids, "labels": labels}

        return batch

    def held_out(self, chosen: PretrainConfig, samples: int, length: int) -> dict[str, Tensor]:
        """Held-out sequences of each domain, from all over it, cut to a length, with the fixed token."""
        found = {}
        for domain in self.corpus.domains:
            rows = domain.valid.evenly_spaced(min(samples, len(domain.valid)))[:, :length]
            found[domain.name] = self.altered(rows, chosen, -1, random=None)
        return found

    def altered(self, ids: Tensor, chosen: PretrainConfig, step: int, *, random: tuple[int, int] | None) -> Tensor:
        """Tokens with those of the recipe in the place of others."""
        return insert_tokens(
            ids,
            step=step,
            seed=chosen.seed,
            vocabulary=self.vocabulary,
            random_tokens=random,
            fixed_token=self.fixed,
        )


def _loss(model: Any, rows: Mapping[str, Tensor]) -> Tensor:
    """The sum of the losses of some rows."""
    loss: Tensor = model(**rows, num_items_in_batch=1).loss
    return loss


def _count(rows: Mapping[str, Tensor]) -> int:
    """How many tokens of some rows are predicted."""
    return int((rows["labels"][:, 1:] != IGNORE_INDEX).sum())


@contextlib.contextmanager
def _folder(work: str | Path | None, *, keep: bool) -> Iterator[Path]:
    """The folder of a run's checkpoints; without a name a temporary one. What is broken off stays if it can go on."""
    if work is None:
        with tempfile.TemporaryDirectory(prefix="regard-") as temporary:
            yield Path(temporary)
        return
    place = Path(work)
    try:
        yield place
    except BaseException:
        if _is_first() and not can_resume(place):
            shutil.rmtree(place, ignore_errors=True)
        raise
    if not keep and _is_first():
        shutil.rmtree(place, ignore_errors=True)


def can_resume(place: Path) -> bool:
    """Whether a folder holds a checkpoint."""
    return any((place / CHECKPOINTS).glob("step-*"))


def _begin(place: Path, chosen: PretrainConfig, *, resume: bool) -> Journal | None:
    """What the first process keeps of a run beside its checkpoints. Raises UserError if another recipe began it."""
    if not _is_first():
        return None
    if not resume:
        shutil.rmtree(place, ignore_errors=True)
    return Journal(place / WATCHED, _binding(chosen), resume=resume)


def _binding(chosen: PretrainConfig) -> dict[str, Any]:
    """The fields in which a run that goes on may not differ."""
    return {name: value for name, value in chosen.to_dict().items() if name not in RESUMABLE_FIELDS}


def _is_first() -> bool:
    """Whether this is the process that writes."""
    return os.environ.get("RANK", "0") == "0"


def _processes() -> int:
    """How many processes train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _one_by_one() -> contextlib.AbstractContextManager[None]:
    """While it lasts, the first process of each machine goes before its others."""
    state = PartialState(cpu=not torch.accelerator.is_available())
    return state.local_main_process_first()


def _cache(given: str | Path | None) -> Path:
    """Where packed text is kept."""
    return Path(given or os.environ.get("REGARD_CACHE") or Path.home() / ".cache" / "regard")


def _text(chosen: PretrainConfig, cache: Path, on_text: Callable[[str, int], None] | None = None) -> Text:
    """The recipe's text, with its tokenizer, packed: by one process of each machine, the others find it done."""
    sources = [Source.parse(said) for said in chosen.data]
    first = _one_by_one() if _processes() > 1 else contextlib.nullcontext()
    with first:
        tokenizer = _tokenizer(chosen, sources, cache / "tokenizers")
        check_tokenizer(tokenizer, _vocabulary(chosen, tokenizer))
        corpus = prepare_corpus(
            sources,
            tokenizer,
            length=chosen.length,
            folder=cache / "text",
            fraction=chosen.data_fraction,
            on_progress=on_text,
        )
    fixed = None if chosen.fixed_token is None else (chosen.fixed_token, int(tokenizer.eos_token_id))
    return Text(tokenizer, corpus, ordinary_tokens(tokenizer), fixed)


def _tokenizer(chosen: PretrainConfig, sources: list[Source], cache: Path) -> Any:
    """The recipe's tokenizer: read, or trained on the text, once for the same text and size."""
    if chosen.tokenizer != TRAIN_TOKENIZER:
        return read_tokenizer(chosen.tokenizer)
    about = json.dumps(
        [[[identify_source(s.where), s.weight, s.tokens] for s in sources], chosen.vocab_size or TRAINED_VOCAB_SIZE]
    )
    folder = cache / hashlib.sha256(about.encode()).hexdigest()[:16]
    if not folder.is_dir():
        trained = train_tokenizer(sample_texts(sources), chosen.vocab_size or TRAINED_VOCAB_SIZE)
        try:
            with atomic_folder(folder, overwrite=False) as place:
                trained.save_pretrained(place)
        except UserError:
            if not folder.is_dir():  # else another run was first
                raise
    return read_tokenizer(folder)


def _vocabulary(chosen: PretrainConfig, tokenizer: Any) -> int:
    """Tokens of the model: the recipe's, else the tokenizer's."""
    return chosen.vocab_size or max(tokenizer.get_vocab().values()) + 1


def _model(chosen: PretrainConfig, tokenizer: Any) -> RegardForCausalLM:
    """The decoder with the weights of the recipe's seed."""
    tokens = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(chosen.seed)
        return RegardForCausalLM(chosen.config(_vocabulary(chosen, tokenizer), **tokens))


def _watches(chosen: PretrainConfig, text: Text, journal: Journal | None) -> list[Any]:
    """What looks at the model while it is trained: its validation losses, and its sinks."""
    rows = text.held_out(chosen, chosen.eval_samples, chosen.length)
    losses = ValidationLoss(rows, every=chosen.eval_steps, uncounted=chosen.uncounted(training=False))
    probes = text.held_out(chosen, chosen.sink_samples, chosen.sink_length)
    mixed = torch.cat([ids[: -(-chosen.sink_samples // len(probes))] for ids in probes.values()])
    sinks = SinkMonitor(mixed[: chosen.sink_samples], every=chosen.eval_steps, epsilon=chosen.epsilon)
    return [losses, JournaledSinkMonitor(sinks, journal)]


class JournaledSinkMonitor:
    """A watch of sinks whose rows are kept as they come, by the process that writes, so that a resumed run has all."""

    def __init__(self, watch: SinkMonitor, journal: Journal | None) -> None:
        self.watch, self.journal = watch, journal

    def due(self, step: int, last: bool) -> bool:
        """Whether the watch looks at this step."""
        return self.watch.due(step, last)

    def __call__(self, model: Any, step: int) -> Mapping[str, float]:
        """The numbers of the watch, its rows kept."""
        numbers = self.watch(model, step)
        if self.journal is not None:
            self.journal.add(str(step), [row for row in self.watch.rows if row[0] == step])
        return numbers

    def frame(self, steps: Iterable[int]) -> pd.DataFrame:
        """The tidy table of what was seen at these steps."""
        kept = self.journal
        if kept is None:
            return self.watch.frame()
        return sink_table([row for step in steps if str(step) in kept for row in kept[str(step)]])


def _result(
    chosen: PretrainConfig,
    text: Text,
    model: RegardForCausalLM,
    trained: training.TrainResult,
    sinks: JournaledSinkMonitor,
) -> PretrainResult:
    """The run's tables, record and model: whole, whatever was sharded while it was trained."""
    device, model = model.device, _whole(model)
    history = make_history([_named(row) for row in trained.history])
    parameters = sum(p.numel() for p in model.parameters())
    tokens = int(history["tokens"].iloc[-1])
    record = {
        "regard": regard_version(),
        "verb": VERB,
        "created": now(),
        "recipe": chosen.to_dict(),
        "model": {
            "parameters": parameters,
            "parameters_without_embeddings": model.parameters_without_embeddings,
            "vocabulary": model.config.vocab_size,
            "sha256": sha256_of_weights(model),
        },
        "data": {
            "domains": [domain.metadata() for domain in text.corpus.domains],
            "tokenizer": {
                "name": chosen.tokenizer,
                "size": len(text.tokenizer),
                "sha256": tokenizer_hash(text.tokenizer),
            },
        },
        "watch": {
            "samples": len(sinks.watch.samples),
            "length": sinks.watch.samples.shape[1],
            "epsilon": chosen.epsilon,
            "uniform": sinks.watch.uniform,
        },
        "final": final_metrics(history),
        "emergence": vars(find_emergence(history)),
        "versions": versions(),
        "cost": {
            "seconds": round(trained.seconds, 3),
            "tokens_per_second": round(tokens / trained.seconds, 1) if trained.seconds else None,
            "peak_memory_mib": round(peak_memory(device), 1),
            "device": str(device),
            "processes": _processes(),
        },
    }
    return PretrainResult(history, sinks.frame(history["step"]), record, model, text.tokenizer)


def _whole(model: RegardForCausalLM) -> RegardForCausalLM:
    """A model on the CPU with the weights of one that may be sharded; every process must take part."""
    whole = RegardForCausalLM(model.config)
    missing = whole.load_state_dict(training.full_weights(model), strict=False).missing_keys
    assert not missing or model.config.tie_word_embeddings, f"weights without a value: {missing}"
    whole.tie_weights()  # of tied weights one name is there
    return whole.eval()


def _named(row: Mapping[str, float]) -> dict[str, float]:
    """A row of the loop in the words of this verb: what it counts are tokens."""
    return {name.replace("items", "tokens"): value for name, value in row.items()}
