"""The text of a pre-training run: tokenized, packed, and with the tokens that replace others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from regard.commands.pretrain.config import TRAIN_TOKENIZER, TRAINED_VOCAB_SIZE, PretrainConfig
from regard.data.corpus import BatchSampler, Corpus, insert_tokens, prepare_corpus
from regard.data.examples import IGNORE_INDEX
from regard.data.texts import Source, identify_source, sample_texts
from regard.data.tokenizers import check_tokenizer, ordinary_tokens, read_tokenizer, train_tokenizer
from regard.errors import UserError
from regard.runs.output_dir import atomic_folder
from regard.runs.progress import OnProgress, ProgressEvent
from regard.runs.rank import num_processes


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
            rows = domain.valid.evenly_spaced(min(samples, len(domain.valid)))[:, :length]
            rows_by_domain[domain.name] = self.altered(rows, config, -1, random=None)
        return rows_by_domain

    def altered(self, ids: Tensor, config: PretrainConfig, step: int, *, random: tuple[int, int] | None) -> Tensor:
        return insert_tokens(
            ids,
            step=step,
            seed=config.seed,
            vocabulary=self.vocabulary,
            random_tokens=random,
            fixed_token=self.fixed,
        )


def cache_dir(folder: str | Path | None) -> Path:
    """Return where packed text is kept."""
    return Path(folder or os.environ.get("REGARD_CACHE") or Path.home() / ".cache" / "regard")


def prepare_text(config: PretrainConfig, cache: Path, on_progress: OnProgress | None = None) -> Text:
    """Return the packed text with its tokenizer. One process of each machine packs, the others find it done."""

    def report(domain: str, tokens: int) -> None:
        if on_progress is not None:
            on_progress(ProgressEvent(phase=f"packing {domain}", step=tokens))

    sources = [Source.parse(source) for source in config.data]
    state = PartialState(cpu=not torch.accelerator.is_available()) if num_processes() > 1 else None
    with state.local_main_process_first() if state else contextlib.nullcontext():
        tokenizer = _tokenizer(config, sources, cache / "tokenizers")
        check_tokenizer(tokenizer, vocab_size(config, tokenizer))
        corpus = prepare_corpus(
            sources,
            tokenizer,
            length=config.length,
            folder=cache / "text",
            fraction=config.data_fraction,
            on_progress=report,
        )
    fixed = None if config.fixed_token is None else (config.fixed_token, int(tokenizer.eos_token_id))
    return Text(tokenizer, corpus, ordinary_tokens(tokenizer), fixed)


def _tokenizer(config: PretrainConfig, sources: list[Source], cache: Path) -> Any:
    """Return the tokenizer: read, or trained on the text, once for the same text and size."""
    if config.tokenizer != TRAIN_TOKENIZER:
        return read_tokenizer(config.tokenizer)
    size = config.vocab_size or TRAINED_VOCAB_SIZE
    about = json.dumps([[[identify_source(s.where), s.weight, s.tokens] for s in sources], size])
    folder = cache / hashlib.sha256(about.encode()).hexdigest()[:16]
    if not folder.is_dir():
        trained = train_tokenizer(sample_texts(sources), size)
        try:
            with atomic_folder(folder, overwrite=False) as place:
                trained.save_pretrained(place)
        except UserError:
            if not folder.is_dir():  # else another run was first
                raise
    return read_tokenizer(folder)


def vocab_size(config: PretrainConfig, tokenizer: Any) -> int:
    """Return the size of the model's vocabulary: the configuration's, else the tokenizer's."""
    return config.vocab_size or max(tokenizer.get_vocab().values()) + 1
