"""Domains of text as token blocks, split for training and validation, and the training rows of each step."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.data.blocks import BLOCKS, BlockPacker, BlocksMetadata, TokenBlocks, check_num_blocks, is_packed, pack
from regard.data.repeats import repeated_shares
from regard.data.sources import Source, identify_source, read_source
from regard.data.texts import Document
from regard.data.tokenizers import LOOKED_AT, tokenizer_hash, warn_of_unknown
from regard.errors import UserError, check_int

TRAIN, VALID = "train", "valid"
OWN = "own"  # how `Domain.split` calls validation text of another place
_PURPOSES = {TRAIN: "train", VALID: "validate"}
FEW_DOCUMENTS = 200
READING = 2  # how text is read of files: tokens of another way are not used again
OnProgress = Callable[[str, int], None]  # called with the name of a domain and its number of packed tokens


@dataclass(frozen=True, eq=False)
class Domain:
    """Training and validation blocks of one source."""

    name: str
    weight: float  # those of a corpus sum to 1
    train: TokenBlocks
    valid: TokenBlocks
    source: str = ""
    split: str = ""  # validation text: "documents" by their hash, "end" (last blocks), "own" location
    repeated: float | None = None  # share of the validation text that is in the training text of a domain, too

    def metadata(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "weight": self.weight,
            "source": self.source,
            "split": self.split,
            "sha256": self.train.sha256,
            "valid_sha256": self.valid.sha256,
            "train_tokens": self.train.tokens,
            "valid_tokens": self.valid.tokens,
            "repeated": self.repeated,
        }


@dataclass(frozen=True, eq=False)
class Corpus:
    """Domains with blocks of one length."""

    domains: tuple[Domain, ...]

    @property
    def length(self) -> int:
        return self.domains[0].train.length

    def hashes(self) -> dict[str, str]:
        """Return the hashes by which a resumed run knows its text: by domain, and of validation text of its own."""
        own = {f"{domain.name} (validation)": domain.valid.sha256 for domain in self.domains if domain.split == OWN}
        return {domain.name: domain.train.sha256 for domain in self.domains} | own


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
    """Pack sources of different names into blocks of `length` tokens under `folder`, or reuse those that are there.

    A source without validation text of its own is split: from 200 documents on by the hash of each document, so that
    the same text is always on the same side; with fewer documents its last blocks are for validation. How much of the
    validation text the training text has as well, word for word, is counted (`Domain.repeated`).

    Every combination of text, length and tokenizer has its own folder, so runs may share `folder`. With several
    processes let one go first: `with accelerator.local_main_process_first(): corpus = prepare_corpus(…)`. Packing that
    takes longer than processes wait for each other (half an hour or less) is better done before the run.

    `fraction` is that of the training blocks to use, the same for every seed; a smaller one is a subset.
    `valid_fraction` is that of a source for validation.
    """
    _check_sources(sources)
    if not 0 < fraction <= 1:
        raise UserError(f"data fraction: expected a number over 0 and at most 1, got {fraction}")
    if not 0 < valid_fraction < 1:
        raise UserError(f"validation fraction: expected a number between 0 and 1, got {valid_fraction}")
    total = sum(source.weight for source in sources)
    domains = []
    for source in sources:
        report = None if on_progress is None else partial(on_progress, source.name)
        domain = _SourcePacker(source, tokenizer, length, Path(folder), report).make_domain(valid_fraction)
        domains.append(replace(domain, weight=domain.weight / total, train=_select_fraction(domain.train, fraction)))
    train, valid = [domain.train for domain in domains], [domain.valid for domain in domains]
    looked_at = {
        domain.name: domain.train.evenly_spaced(min(LOOKED_AT, len(domain.train))).tolist() for domain in domains
    }
    warn_of_unknown(looked_at, tokenizer)
    shares = repeated_shares(train, valid, Path(folder))
    return Corpus(tuple(replace(domain, repeated=share) for domain, share in zip(domains, shares, strict=True)))


def _check_sources(sources: Sequence[Source]) -> None:
    if not sources:
        raise UserError("data: expected at least one source, got none")
    names = [source.name for source in sources]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise UserError(f"data: expected domains of different names, '{duplicate}' is there twice; write NAME=WHERE")
    for source in sources:
        if not 0 < source.weight < math.inf:
            raise UserError(f"data: expected a positive weight of '{source.name}', got {source.weight}")


@dataclass(frozen=True, eq=False)
class _SourcePacker:
    source: Source
    tokenizer: Any
    length: int
    folder: Path
    on_progress: Callable[[int], None] | None

    def make_domain(self, valid_fraction: float) -> Domain:
        source = self.source
        fingerprint = identify_source(source.where)
        if source.tokens is not None:
            fingerprint += f", {source.tokens} tokens"
        if source.valid is None:
            train, valid, split = self._pack_splits(fingerprint, valid_fraction)
        else:
            train = self._pack_all(source.where, fingerprint, source.tokens)
            valid, split = self._pack_all(source.valid, identify_source(source.valid), None), OWN
        return Domain(source.name, source.weight, train, valid, str(source), split)

    def _pack_all(self, where: str, fingerprint: str, max_tokens: int | None) -> TokenBlocks:
        options: dict[str, Any] = {"source": where, "fingerprint": fingerprint, "max_tokens": max_tokens}
        folder = self._find_folder(fingerprint)
        return pack(read_source(where), self.tokenizer, self.length, folder, **options, on_progress=self.on_progress)

    def _pack_splits(self, fingerprint: str, valid_fraction: float) -> tuple[TokenBlocks, TokenBlocks, str]:
        """Return training blocks, validation blocks, and how they were split."""
        where, length = self.source.where, self.length
        folder = self._find_folder(f"{fingerprint}, {valid_fraction} to validate")
        expected = {"length": length, "fingerprint": fingerprint, "tokenizer": tokenizer_hash(self.tokenizer)}
        if not is_packed(folder, [BLOCKS], expected) and not is_packed(folder, [TRAIN, VALID], expected):
            documents = read_source(where)
            head = list(islice(documents, FEW_DOCUMENTS))
            few, documents = len(head) < FEW_DOCUMENTS, chain(head, documents)
            metadata = self._pack_by_split(folder, fingerprint, documents, None if few else valid_fraction)
            lacks_split = not few and not all(split in metadata and metadata[split].rows for split in (TRAIN, VALID))
            if lacks_split and self.source.tokens is not None:  # as many tokens as are wanted are few documents
                few = True
                metadata = self._pack_by_split(folder, fingerprint, read_source(where), None)
            for split in [BLOCKS] if few else [TRAIN, VALID]:
                name = where if few else f"the part of {where} to {_PURPOSES[split]} on"
                check_num_blocks(metadata.get(split), length, name, min_rows=2 if few else 1)
        if is_packed(folder, [TRAIN, VALID], expected):
            return TokenBlocks.load(folder, TRAIN), TokenBlocks.load(folder, VALID), "documents"
        blocks = TokenBlocks.load(folder)
        check_num_blocks(blocks.metadata, length, where, min_rows=2)  # those of another call may be one
        num_train = len(blocks) - min(max(1, round(valid_fraction * len(blocks))), len(blocks) - 1)
        indices = torch.arange(len(blocks))
        return blocks.select(indices[:num_train]), blocks.select(indices[num_train:]), "end"

    def _pack_by_split(
        self, folder: Path, fingerprint: str, documents: Iterable[Document], valid_fraction: float | None
    ) -> dict[str, BlocksMetadata]:
        """Pack documents into two splits, or if there is no fraction to validate into one."""
        choose_split = (
            (lambda _: BLOCKS) if valid_fraction is None else partial(_choose_split, valid_fraction=valid_fraction)
        )
        max_tokens, where = self.source.tokens, self.source.where
        with BlockPacker(folder, self.tokenizer, self.length, source=where, fingerprint=fingerprint) as packer:
            packer.add(documents, choose_split, max_tokens=max_tokens, on_progress=self.on_progress)
            return packer.finish()

    def _find_folder(self, fingerprint: str) -> Path:
        key = json.dumps([READING, fingerprint, self.length, tokenizer_hash(self.tokenizer)])
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", self.source.name)
        return self.folder / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def _choose_split(section: str, valid_fraction: float) -> str:
    """Choose the split of a document by the hash of its first section."""
    digest = hashlib.sha256(section.encode("utf-8", "surrogatepass")).digest()
    return VALID if int.from_bytes(digest[:8], "big") / 2**64 < valid_fraction else TRAIN


def _select_fraction(blocks: TokenBlocks, fraction: float) -> TokenBlocks:
    """Select the first blocks of a fixed shuffled order, at least one."""
    if fraction == 1:
        return blocks
    order = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(0))
    return blocks.select(order[: max(1, round(fraction * len(blocks)))].sort().values)


_CHUNK_ROWS = 1 << 16


class BatchSampler:
    """Samples the domain of a row by weight, and the blocks of a domain without replacement.

    The n-th row of a domain is the n-th block of a permutation of its blocks; every epoch has its own permutation. The
    rows of a step depend on the seed and the step alone, and their sequence does not depend on `batch_size`.
    """

    def __init__(self, corpus: Corpus, batch_size: int, seed: int) -> None:
        check_int("batch size", batch_size, least=1)
        self.corpus, self.batch_size, self.seed = corpus, batch_size, seed
        weights = torch.tensor([domain.weight for domain in corpus.domains], dtype=torch.float64)
        self._limits = (weights / weights.sum()).cumsum(0)[:-1]
        self._rows_before_chunk = [torch.zeros(len(weights), dtype=torch.int64)]
        self._chunk = lru_cache(2)(self._sample_domains)
        self._permutation = lru_cache(2 * len(weights))(self._sample_order)

    def rows(self, step: int) -> Int64[Tensor, "batch length"]:
        """Return the token ids of a step, counted from 0."""
        domains, blocks = self.block_indices(step)
        ids = torch.empty(self.batch_size, self.corpus.length, dtype=torch.int64)
        for index, domain in enumerate(self.corpus.domains):
            is_domain = domains == index
            if is_domain.any():
                ids[is_domain] = domain.train.rows(blocks[is_domain])
        return ids

    def block_indices(self, step: int) -> tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]]:
        """Return the domain of each row of a step, and its block within the domain."""
        start = step * self.batch_size
        domains = self._domains(start, start + self.batch_size)
        blocks = torch.empty_like(domains)
        for domain, rows_before in enumerate(self._count_rows(start).tolist()):
            is_domain = domains == domain
            blocks[is_domain] = self._blocks(domain, rows_before + torch.arange(int(is_domain.sum())))
        return domains, blocks

    def passes(self, steps: int) -> list[float]:
        """Return how often the steps read the training text of each domain."""
        rows = self._count_rows(steps * self.batch_size).tolist()
        return [count / len(domain.train) for count, domain in zip(rows, self.corpus.domains, strict=True)]

    def _domains(self, start: int, stop: int) -> Tensor:
        chunks = range(start // _CHUNK_ROWS, -(-stop // _CHUNK_ROWS))
        return torch.cat([self._chunk(chunk) for chunk in chunks])[start - chunks[0] * _CHUNK_ROWS :][: stop - start]

    def _sample_domains(self, chunk: int) -> Tensor:
        if not len(self._limits):
            return torch.zeros(_CHUNK_ROWS, dtype=torch.int64)
        uniform = torch.rand(_CHUNK_ROWS, dtype=torch.float64, generator=make_generator("domain", self.seed, chunk))
        return torch.searchsorted(self._limits, uniform, right=True)

    def _count_rows(self, row: int) -> Tensor:
        chunk, offset = divmod(row, _CHUNK_ROWS)
        while len(self._rows_before_chunk) <= chunk:
            previous = len(self._rows_before_chunk) - 1
            self._rows_before_chunk.append(self._rows_before_chunk[-1] + self._count_domains(self._chunk(previous)))
        return self._rows_before_chunk[chunk] + self._count_domains(self._chunk(chunk)[:offset])

    def _count_domains(self, domains: Tensor) -> Tensor:
        return torch.bincount(domains, minlength=len(self.corpus.domains))

    def _blocks(self, domain: int, turns: Tensor) -> Tensor:
        count = len(self.corpus.domains[domain].train)
        epochs = turns // count
        blocks = [self._permutation(domain, int(epoch))[turns[epochs == epoch] % count] for epoch in epochs.unique()]
        return torch.cat(blocks) if blocks else turns

    def _sample_order(self, domain: int, epoch: int) -> Tensor:
        generator = make_generator("order", self.seed, domain, epoch)
        return torch.randperm(len(self.corpus.domains[domain].train), generator=generator)


def insert_tokens(
    ids: Int64[Tensor, "batch length"],
    *,
    step: int,
    seed: int,
    vocabulary: Int64[Tensor, " token"],
    random_tokens: tuple[int, int] | None = None,
    fixed_token: tuple[int, int] | None = None,
) -> Int64[Tensor, "batch length"]:
    """Replace tokens by random ones, then one by a fixed token; `ids` is not changed.

    `random_tokens` are the positions a … b − 1 as (a, b), sampled uniformly from `vocabulary` by `seed` and `step` (−1
    for validation rows). `fixed_token` is a position and a token id. Source: Gu et al. 2025 (arXiv 2410.10781).
    """
    ids, length = ids.clone(), ids.shape[1]
    if random_tokens is not None:
        first, end = random_tokens
        if not 0 <= first < end <= length:
            raise UserError(f"random tokens: expected positions a:b with 0 ≤ a < b ≤ {length}, got {first}:{end}")
        generator = make_generator("random tokens", seed, step)
        ids[:, first:end] = vocabulary[torch.randint(len(vocabulary), (len(ids), end - first), generator=generator)]
    if fixed_token is not None:
        position, token = fixed_token
        if not 0 <= position < length:
            raise UserError(f"fixed token: expected a position from 0 to {length - 1}, got {position}")
        if token < 0:
            raise UserError(f"fixed token: expected a positive id, got {token}")
        ids[:, position] = token
    return ids


def make_generator(*key: str | int) -> torch.Generator:
    """Return a generator seeded by a key."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
