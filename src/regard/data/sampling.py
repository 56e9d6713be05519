"""Training rows of each step, and tokens inserted into them: functions of the seed and the step alone."""

import hashlib
from functools import lru_cache

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.data.corpus import Corpus
from regard.errors import UserError

_CHUNK_ROWS = 1 << 16


class BatchSampler:
    """Samples the domain of a row by weight, and the blocks of a domain without replacement.

    The n-th row of a domain is the n-th block of a permutation of its blocks; every epoch has its own permutation. The
    rows of a step depend on the seed and the step, not on which steps came before, and the sequence of training rows
    does not depend on `batch_size`. Starting at a late step costs counting the domains before it, a millisecond per
    65,536 rows.
    """

    def __init__(self, corpus: Corpus, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise UserError(f"batch size: expected at least 1 row, got {batch_size}")
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

    def _domains(self, start: int, stop: int) -> Tensor:
        """Return the domains of the training rows `start` to `stop` − 1."""
        chunks = range(start // _CHUNK_ROWS, -(-stop // _CHUNK_ROWS))
        return torch.cat([self._chunk(chunk) for chunk in chunks])[start - chunks[0] * _CHUNK_ROWS :][: stop - start]

    def _sample_domains(self, chunk: int) -> Tensor:
        """Sample the domains of one chunk of rows."""
        if not len(self._limits):
            return torch.zeros(_CHUNK_ROWS, dtype=torch.int64)
        uniform = torch.rand(_CHUNK_ROWS, dtype=torch.float64, generator=make_generator("domain", self.seed, chunk))
        return torch.searchsorted(self._limits, uniform, right=True)

    def _count_rows(self, row: int) -> Tensor:
        """Count the rows of each domain before a training row."""
        chunk, offset = divmod(row, _CHUNK_ROWS)
        while len(self._rows_before_chunk) <= chunk:
            previous = len(self._rows_before_chunk) - 1
            self._rows_before_chunk.append(self._rows_before_chunk[-1] + self._count_domains(self._chunk(previous)))
        return self._rows_before_chunk[chunk] + self._count_domains(self._chunk(chunk)[:offset])

    def _count_domains(self, domains: Tensor) -> Tensor:
        return torch.bincount(domains, minlength=len(self.corpus.domains))

    def _blocks(self, domain: int, turns: Tensor) -> Tensor:
        """Return the blocks of a domain's n-th rows, for ascending n."""
        count = len(self.corpus.domains[domain].train)
        epochs = turns // count
        blocks = [self._permutation(domain, int(epoch))[turns[epochs == epoch] % count] for epoch in epochs.unique()]
        return torch.cat(blocks) if blocks else turns

    def _sample_order(self, domain: int, epoch: int) -> Tensor:
        """Sample the order of a domain's blocks in an epoch."""
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
    for validation rows). `fixed_token` is a position and a token id.

    Source:
        "Random tokens" and "fixed token" of Gu et al. 2025 (arXiv 2410.10781).
    """
    length = ids.shape[1]
    if random_tokens is None and fixed_token is None:
        return ids
    ids = ids.clone()
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
