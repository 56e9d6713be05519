"""Domains of text as token blocks, split for training and validation."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from regard.data.blocks import BLOCKS, BlockPacker, TokenBlocks, check_num_blocks, is_packed, pack
from regard.data.corpus_sources import Source, identify_source, read_source
from regard.data.tokenizers import tokenizer_hash
from regard.errors import UserError

TRAIN, VALID = "train", "valid"
_PURPOSES = {TRAIN: "train", VALID: "validate"}
FEW_DOCUMENTS = 200
OnProgress = Callable[[str, int], None]
"""Called with the name of a domain and its number of packed tokens."""


@dataclass(frozen=True, eq=False)
class Domain:
    """Training and validation blocks of one source; the weights of a corpus sum to 1.

    `split` says how validation text was separated: "documents" (by the hash of each document), "end" (the last blocks),
    or "own" (from a location of its own).
    """

    name: str
    weight: float
    train: TokenBlocks
    valid: TokenBlocks
    source: str = ""
    split: str = ""

    def metadata(self) -> dict[str, Any]:
        """Return what is saved with results."""
        return {
            "name": self.name,
            "weight": self.weight,
            "source": self.source,
            "split": self.split,
            "sha256": self.train.sha256,
            "valid_sha256": self.valid.sha256,
            "train_tokens": self.train.tokens,
            "valid_tokens": self.valid.tokens,
        }


@dataclass(frozen=True, eq=False)
class Corpus:
    """Domains with blocks of one length."""

    domains: tuple[Domain, ...]

    @property
    def length(self) -> int:
        """Tokens per block."""
        return self.domains[0].train.length


def prepare_corpus(
    sources: Sequence[Source],
    tokenizer: Any,
    *,
    length: int,
    folder: str | Path,
    fraction: float = 1.0,
    valid_fraction: float = 0.05,
    on_progress: OnProgress | None = None,
) -> Corpus:
    """Pack sources into blocks of `length` tokens under `folder`, or reuse those that are there.

    A source without validation text of its own is split: from 200 documents on by the hash of each document, so that
    the same text is always on the same side; with fewer documents its last blocks are for validation.

    Every combination of text, length and tokenizer has its own folder, so runs may share `folder`. With several
    processes let one go first: `with accelerator.local_main_process_first(): corpus = prepare_corpus(…)`. Packing that
    takes longer than processes wait for each other (half an hour or less) is better done before the run.

    Args:
        sources: Sources with different names.
        tokenizer: Tokenizer with an EOS token.
        length: Tokens per block.
        folder: Where to keep the blocks.
        fraction: Fraction of the training blocks to use, the same for every seed; a smaller one is a subset.
        valid_fraction: Fraction of a source for validation.
        on_progress: Called with the name of a domain and its number of packed tokens.

    Raises:
        UserError: Duplicate names, weights or fractions out of range, or too little text for a block of either split.
    """
    _check_arguments(sources, fraction, valid_fraction)
    total = sum(source.weight for source in sources)
    domains = []
    for source in sources:
        report = None if on_progress is None else partial(on_progress, source.name)
        domain = _SourcePacker(source, tokenizer, length, Path(folder), report).make_domain(valid_fraction)
        domains.append(replace(domain, weight=domain.weight / total, train=_select_fraction(domain.train, fraction)))
    return Corpus(tuple(domains))


def _check_arguments(sources: Sequence[Source], fraction: float, valid_fraction: float) -> None:
    if not sources:
        raise UserError("data: expected at least one source, got none")
    names = [source.name for source in sources]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise UserError(f"data: expected domains of different names, '{duplicate}' is there twice; write NAME=WHERE")
    for source in sources:
        if not 0 < source.weight < math.inf:
            raise UserError(f"data: expected a positive weight of '{source.name}', got {source.weight}")
    if not 0 < fraction <= 1:
        raise UserError(f"data fraction: expected a number over 0 and at most 1, got {fraction}")
    if not 0 < valid_fraction < 1:
        raise UserError(f"validation fraction: expected a number between 0 and 1, got {valid_fraction}")


@dataclass(frozen=True, eq=False)
class _SourcePacker:
    """Packs the text of one source."""

    source: Source
    tokenizer: Any
    length: int
    folder: Path
    on_progress: Callable[[int], None] | None

    def make_domain(self, valid_fraction: float) -> Domain:
        """Return the domain, packed now or before."""
        source = self.source
        fingerprint = identify_source(source.where)
        if source.tokens is not None:
            fingerprint += f", {source.tokens} tokens"
        if source.valid is None:
            train, valid, split = self._pack_splits(fingerprint, valid_fraction)
        else:
            train = self._pack_all(source.where, fingerprint, source.tokens)
            valid, split = self._pack_all(source.valid, identify_source(source.valid), None), "own"
        return Domain(source.name, source.weight, train, valid, str(source), split)

    def _pack_all(self, where: str, fingerprint: str, max_tokens: int | None) -> TokenBlocks:
        """Pack a text without splitting it."""
        return pack(
            read_source(where),
            self.tokenizer,
            self.length,
            self._find_folder(fingerprint),
            source=where,
            fingerprint=fingerprint,
            max_tokens=max_tokens,
            on_progress=self.on_progress,
        )

    def _pack_splits(self, fingerprint: str, valid_fraction: float) -> tuple[TokenBlocks, TokenBlocks, str]:
        """Return training blocks, validation blocks, and how they were split."""
        where, length, tokenizer = self.source.where, self.length, self.tokenizer
        folder = self._find_folder(f"{fingerprint}, {valid_fraction} to validate")
        expected = {"length": length, "fingerprint": fingerprint, "tokenizer": tokenizer_hash(tokenizer)}
        if not is_packed(folder, [BLOCKS], expected) and not is_packed(folder, [TRAIN, VALID], expected):
            documents = read_source(where)
            head = list(islice(documents, FEW_DOCUMENTS))
            few = len(head) < FEW_DOCUMENTS
            choose_split = partial(_choose_split, valid_fraction=None if few else valid_fraction)
            with BlockPacker(folder, tokenizer, length, source=where, fingerprint=fingerprint) as packer:
                packer.add(
                    chain(head, documents), choose_split, max_tokens=self.source.tokens, on_progress=self.on_progress
                )
                metadata = packer.finish()
            for split in [BLOCKS] if few else [TRAIN, VALID]:
                name = where if few else f"the part of {where} to {_PURPOSES[split]} on"
                check_num_blocks(metadata.get(split), length, name, min_rows=2 if few else 1)
        if is_packed(folder, [TRAIN, VALID], expected):
            return TokenBlocks.load(folder, TRAIN), TokenBlocks.load(folder, VALID), "documents"
        return *_split_at_end(TokenBlocks.load(folder), valid_fraction), "end"

    def _find_folder(self, fingerprint: str) -> Path:
        """Return the folder for blocks of this text, length and tokenizer."""
        key = json.dumps([fingerprint, self.length, tokenizer_hash(self.tokenizer)])
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", self.source.name)
        return self.folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _choose_split(section: str, valid_fraction: float | None) -> str:
    """Choose the split of a document by the hash of its first section; without a fraction there is one split."""
    if valid_fraction is None:
        return BLOCKS
    digest = hashlib.sha256(section.encode("utf-8", "surrogatepass")).digest()
    return VALID if int.from_bytes(digest[:8], "big") / 2**64 < valid_fraction else TRAIN


def _split_at_end(blocks: TokenBlocks, valid_fraction: float) -> tuple[TokenBlocks, TokenBlocks]:
    """Split off the last blocks for validation."""
    count = min(max(1, round(valid_fraction * len(blocks))), len(blocks) - 1)
    indices = torch.arange(len(blocks))
    return blocks.select(indices[: len(blocks) - count]), blocks.select(indices[len(blocks) - count :])


def _select_fraction(blocks: TokenBlocks, fraction: float) -> TokenBlocks:
    """Select the first blocks of a fixed shuffled order, at least one."""
    if fraction == 1:
        return blocks
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    return blocks.select(order[: max(1, round(fraction * len(blocks)))].sort().values)
