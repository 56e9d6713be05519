"""Domains of text as blocks of tokens, each with a part to train on and one to validate on."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.data.blocks import BLOCKS, TokenBlocks, check_num_blocks, is_packed
from regard.data.corpus_sources import Source, identify_source, read_documents
from regard.data.packing import Packing, pack
from regard.data.tokenizers import tokenizer_hash
from regard.errors import UserError

TRAIN, VALID = "train", "valid"
_PURPOSES = {TRAIN: "train", VALID: "validate"}
FEW_DOCUMENTS = 200
Progress = Callable[[str, int], None]
"""Told the name of a domain and how many of its tokens are packed."""


@dataclass(frozen=True, eq=False)
class Domain:
    """A domain: its share of the rows of training, the blocks to train on, and those to validate on.

    `weight` is over the sum of all. `split` says how the two parts were told apart: 'documents' (by the digest of
    each), 'end' (the last blocks of all), 'own' (text of its own to validate on).
    """

    name: str
    weight: float
    train: TokenBlocks
    valid: TokenBlocks
    source: str = ""
    split: str = ""

    def record(self) -> dict[str, Any]:
        """What to keep of it beside results; `sha256` and `valid_sha256` are of the tokens."""
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
        """How many tokens a block has."""
        return self.domains[0].train.length


def prepare_corpus(
    sources: Sequence[Source],
    tokenizer: Any,
    *,
    length: int,
    folder: str | Path,
    amount: float = 1.0,
    valid_share: float = 0.05,
    on_progress: Progress | None = None,
) -> Corpus:
    """The sources as domains of blocks of `length` tokens, packed under `folder` once and used again.

    A source without text of its own to validate on gives `valid_share` of itself: of 200 documents or more those whose
    digest says so, so that the same text is always on the same side; of fewer the last blocks of all. `amount`: the
    share of the blocks to train on that is used, drawn without regard to the seed of a run; a smaller one is part of a
    larger one. Neither changes what is packed but for `valid_share` with many documents. Each text, length and
    tokenizer has a folder of its own, so runs may share `folder`.

    Of several processes let one go first and the others find it packed:
    `with accelerator.local_main_process_first(): corpus = prepare(…)`. What takes longer to pack than processes wait
    for one another, half an hour or less, is better prepared by one process alone before.

    Raises UserError for sources of one name, weights and shares out of range, and text too little for a block of either
    part.
    """
    _check(sources, amount, valid_share)
    total = sum(source.weight for source in sources)
    domains = [_domain(source, tokenizer, length, Path(folder), valid_share, on_progress) for source in sources]
    return Corpus(
        tuple(replace(domain, weight=domain.weight / total, train=_share(domain.train, amount)) for domain in domains)
    )


def _check(sources: Sequence[Source], amount: float, valid_share: float) -> None:
    if not sources:
        raise UserError("data: expected at least one source, got none")
    names = [source.name for source in sources]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"data: expected domains of different names, '{twice}' is there twice; write NAME=WHERE")
    light = next((source for source in sources if not 0 < source.weight < math.inf), None)
    if light is not None:
        raise UserError(f"data: expected a positive weight of '{light.name}', got {light.weight}")
    if not 0 < amount <= 1:
        raise UserError(f"data amount: expected a share over 0 and at most 1, got {amount}")
    if not 0 < valid_share < 1:
        raise UserError(f"validation share: expected a share between 0 and 1, got {valid_share}")


def _domain(
    source: Source, tokenizer: Any, length: int, folder: Path, valid_share: float, on_progress: Progress | None
) -> Domain:
    """The domain of one source, packed or found packed."""
    told = None if on_progress is None else partial(on_progress, source.name)
    identity = identify_source(source.where) + ("" if source.tokens is None else f", {source.tokens} tokens")
    text = _Text(source.where, identity, source.tokens)
    if source.valid is None:
        place = _place(folder, source, f"{identity}, {valid_share} to validate", length, tokenizer)
        train, valid, split = _split(text, tokenizer, length, place, valid_share, told)
    else:
        own = _Text(source.valid, identify_source(source.valid), None)
        train = _whole(text, tokenizer, length, _place(folder, source, identity, length, tokenizer), told)
        valid = _whole(own, tokenizer, length, _place(folder, source, own.identity, length, tokenizer), told)
        split = "own"
    return Domain(source.name, source.weight, train, valid, str(source), split)


class _Text(NamedTuple):
    """Where text is, what tells whether it is the same, and after how many tokens to stop."""

    where: str
    identity: str
    tokens: int | None


def _place(folder: Path, source: Source, identity: str, length: int, tokenizer: Any) -> Path:
    """The folder for blocks of this text, length and tokenizer."""
    key = hashlib.sha256(json.dumps([identity, length, tokenizer_hash(tokenizer)]).encode()).hexdigest()
    return folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', source.name)}-{key[:16]}"


def _whole(text: _Text, tokenizer: Any, length: int, place: Path, told: Callable[[int], None] | None) -> TokenBlocks:
    """All blocks of a text."""
    return pack(
        read_documents(text.where),
        tokenizer,
        length,
        place,
        source=text.where,
        identity=text.identity,
        most=text.tokens,
        on_progress=told,
    )


def _split(
    text: _Text, tokenizer: Any, length: int, place: Path, share: float, told: Callable[[int], None] | None
) -> tuple[TokenBlocks, TokenBlocks, str]:
    """The blocks to train on, those to validate on, and how they were told apart."""
    wanted = {"length": length, "identity": text.identity, "tokenizer": tokenizer_hash(tokenizer)}
    if not is_packed(place, [BLOCKS], wanted) and not is_packed(place, [TRAIN, VALID], wanted):
        documents = read_documents(text.where)
        first = list(islice(documents, FEW_DOCUMENTS))
        part_of = _one_part if len(first) < FEW_DOCUMENTS else partial(_part_of, share=share)
        with Packing(place, tokenizer, length, source=text.where, identity=text.identity) as packing:
            packing.add(chain(first, documents), part_of, most=text.tokens, on_progress=told)
            counted = packing.finish()
        for part in [BLOCKS] if part_of is _one_part else [TRAIN, VALID]:
            name = text.where if part == BLOCKS else f"the part of {text.where} to {_PURPOSES[part]} on"
            check_num_blocks(counted.get(part), length, name, least=2 if part == BLOCKS else 1)
    if is_packed(place, [TRAIN, VALID], wanted):
        return TokenBlocks.load(place, TRAIN), TokenBlocks.load(place, VALID), "documents"
    return *_cut(TokenBlocks.load(place), share), "end"


def _cut(blocks: TokenBlocks, share: float) -> tuple[TokenBlocks, TokenBlocks]:
    """The first blocks, to train on, and the last, to validate on."""
    held = min(max(1, round(share * len(blocks))), len(blocks) - 1)
    numbers = torch.arange(len(blocks))
    return blocks.only(numbers[: len(blocks) - held]), blocks.only(numbers[len(blocks) - held :])


def _one_part(section: str) -> str:
    return BLOCKS


def _part_of(section: str, share: float) -> str:
    """The part that a document with this first section is in: a share of all digests is for validation."""
    drawn = int.from_bytes(hashlib.sha256(section.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64
    return VALID if drawn < share else TRAIN


def _share(blocks: TokenBlocks, amount: float) -> TokenBlocks:
    """The first blocks of one shuffled order, as many as `amount` says, at least one."""
    if amount == 1:
        return blocks
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    return blocks.only(order[: max(1, round(amount * len(blocks)))].sort().values)
