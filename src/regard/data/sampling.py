"""Which rows a step of training sees, and what is changed in them: functions of the seed and the step alone."""

from __future__ import annotations

import hashlib

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.data.corpus import Corpus
from regard.errors import UserError

_CHUNK = 1 << 16


class BatchSampler:
    """The rows of each step: the domain of a row by weight, the blocks of a domain without replacement.

    Row i of training (`batch_size` to a step) is of a domain drawn with its weight. The n-th row of a domain is the
    n-th block of a permutation of its blocks, the next epoch's once these are used up. So what a step sees depends on
    `seed` and the step alone, whichever steps were asked for before, and the rows of training do not depend on
    `batch_size`. To begin in the middle costs a count of the domains drawn before it, a millisecond per 65,536 rows.
    """

    def __init__(self, corpus: Corpus, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise UserError(f"batch size: expected at least 1 row, got {batch_size}")
        self.corpus, self.batch_size, self.seed = corpus, batch_size, seed
        weights = torch.tensor([domain.weight for domain in corpus.domains], dtype=torch.float64)
        self._limits = (weights / weights.sum()).cumsum(0)[:-1]
        self._before = [torch.zeros(len(weights), dtype=torch.int64)]
        self._chunks: dict[int, Tensor] = {}
        self._orders: dict[tuple[int, int], Tensor] = {}

    def rows(self, step: int) -> Int64[Tensor, "batch length"]:
        """The token ids of a step, counted from 0."""
        domains, numbers = self.places(step)
        ids = torch.empty(self.batch_size, self.corpus.length, dtype=torch.int64)
        for number, domain in enumerate(self.corpus.domains):
            here = domains == number
            if here.any():
                ids[here] = domain.train.rows(numbers[here])
        return ids

    def places(self, step: int) -> tuple[Int64[Tensor, " batch"], Int64[Tensor, " batch"]]:
        """The domain of each row of a step, and the number of its block among the domain's."""
        drawn = self._drawn(step * self.batch_size, (step + 1) * self.batch_size)
        numbers = torch.empty_like(drawn)
        for domain, before in enumerate(self._count(step * self.batch_size).tolist()):
            here = drawn == domain
            numbers[here] = self._blocks(domain, before + torch.arange(int(here.sum())))
        return drawn, numbers

    def _drawn(self, start: int, stop: int) -> Tensor:
        """The domains of these rows of training."""
        chunks = range(start // _CHUNK, -(-stop // _CHUNK))
        return torch.cat([self._chunk(chunk) for chunk in chunks])[start - chunks[0] * _CHUNK :][: stop - start]

    def _chunk(self, chunk: int) -> Tensor:
        """The domains of one chunk of rows; those of the last two are kept."""
        if chunk not in self._chunks:
            self._chunks = {kept: drawn for kept, drawn in self._chunks.items() if kept == chunk - 1}
            self._chunks[chunk] = self._domains(chunk)
        return self._chunks[chunk]

    def _domains(self, chunk: int) -> Tensor:
        if not len(self._limits):
            return torch.zeros(_CHUNK, dtype=torch.int64)
        uniform = torch.rand(_CHUNK, dtype=torch.float64, generator=make_generator("domain", self.seed, chunk))
        return torch.searchsorted(self._limits, uniform, right=True)

    def _count(self, row: int) -> Tensor:
        """How many rows before this one are of each domain."""
        chunk, within = divmod(row, _CHUNK)
        while len(self._before) <= chunk:
            self._before.append(self._before[-1] + self._tally(self._chunk(len(self._before) - 1)))
        return self._before[chunk] + self._tally(self._chunk(chunk)[:within])

    def _tally(self, drawn: Tensor) -> Tensor:
        return torch.bincount(drawn, minlength=len(self.corpus.domains))

    def _blocks(self, domain: int, turns: Tensor) -> Tensor:
        """The numbers of the blocks that a domain gives at these turns, ascending."""
        count = len(self.corpus.domains[domain].train)
        epochs = turns // count
        found = [self._order(domain, int(epoch), count)[turns[epochs == epoch] % count] for epoch in epochs.unique()]
        return torch.cat(found) if found else turns

    def _order(self, domain: int, epoch: int, count: int) -> Tensor:
        """The order of a domain's blocks in an epoch; that of its last two epochs is kept."""
        if (domain, epoch) not in self._orders:
            for stale in [key for key in self._orders if key[0] == domain and key[1] != epoch - 1]:
                del self._orders[stale]
            order = torch.randperm(count, generator=make_generator("order", self.seed, domain, epoch))
            self._orders[domain, epoch] = order
        return self._orders[domain, epoch]


def insert_tokens(
    ids: Int64[Tensor, "batch length"],
    *,
    step: int,
    seed: int,
    vocabulary: Int64[Tensor, " token"],
    random_tokens: tuple[int, int] | None = None,
    fixed_token: tuple[int, int] | None = None,
) -> Int64[Tensor, "batch length"]:
    """The rows with random tokens at some positions and a fixed one at another; new where anything is changed.

    `random_tokens` (a, b): positions a … b−1 get ids drawn uniformly from `vocabulary` (`ordinary_tokens` of the
    tokenizer), from `seed` and `step` alone. `fixed_token` (position, id) is put in after them. Rows that no step
    stands for, those of validation, take a step of −1. The axes "random tokens" and "fixed token" of arXiv 2410.10781.

    Raises UserError for positions outside of the rows.
    """
    check_inserted_tokens(ids.shape[1], random_tokens=random_tokens, fixed_token=fixed_token)
    if random_tokens is None and fixed_token is None:
        return ids
    ids = ids.clone()
    if random_tokens is not None:
        first, end = random_tokens
        drawn = torch.randint(
            len(vocabulary), (len(ids), end - first), generator=make_generator("random tokens", seed, step)
        )
        ids[:, first:end] = vocabulary[drawn]
    if fixed_token is not None:
        position, token = fixed_token
        ids[:, position] = token
    return ids


def check_inserted_tokens(
    length: int,
    *,
    random_tokens: tuple[int, int] | None = None,
    fixed_token: tuple[int, int] | None = None,
    vocabulary: int | None = None,
) -> None:
    """Raises UserError for positions outside of rows of `length` tokens, and for ids outside of `vocabulary`."""
    if random_tokens is not None:
        first, end = random_tokens
        if not 0 <= first < end <= length:
            raise UserError(f"random tokens: expected positions a:b with 0 ≤ a < b ≤ {length}, got {first}:{end}")
    if fixed_token is not None:
        position, token = fixed_token
        if not 0 <= position < length:
            raise UserError(f"fixed token: expected a position from 0 to {length - 1}, got {position}")
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            most = "a positive id" if vocabulary is None else f"an id from 0 to {vocabulary - 1}"
            raise UserError(f"fixed token: expected {most}, got {token}")


def make_generator(*about: str | int) -> torch.Generator:
    """A generator of random numbers that depends on all that it is given."""
    digest = hashlib.sha256(repr(about).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
