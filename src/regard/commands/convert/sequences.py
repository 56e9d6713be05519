"""The sequences that a conversion reads, which begin as the tokenizer begins a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from regard.data.corpus import BatchSampler, Corpus
from regard.data.tokenizers import tokens_before


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of text, each behind the special tokens that the tokenizer puts before a text, as BOS.

    So is each text that begins within one, behind the end of another; what does not fit then is cut off.
    """

    draw: BatchSampler
    start: tuple[int, ...]
    eos: int

    @classmethod
    def of(cls, corpus: Corpus, tokenizer: Any, *, batch_size: int, seed: int) -> Sequences:
        """Return the sequences of a corpus."""
        draw = BatchSampler(corpus, batch_size, seed)
        return cls(draw, tokens_before(tokenizer), int(tokenizer.eos_token_id))

    @property
    def corpus(self) -> Corpus:
        return self.draw.corpus

    @property
    def _begins_within(self) -> bool:
        return bool(self.start) and self.start != (self.eos,)

    def identity(self) -> dict[str, list[int]]:
        """Return what tells these sequences from those of the same text with its tokens alone; nothing if they are."""
        return {"texts_begin_with": list(self.start)} if self._begins_within else {}

    def of_step(self, step: int) -> Int64[Tensor, "batch length"]:
        """Return the sequences of a step of training."""
        return self.begin(self.draw.rows(step))

    def held_out(self, most: int) -> dict[str, Int64[Tensor, "row length"]]:
        """Return at most so many sequences of each domain, evenly spaced."""
        domains = self.corpus.domains
        return {one.name: self.begin(one.valid.evenly_spaced(min(most, len(one.valid)))) for one in domains}

    def begin(self, rows: Int64[Tensor, "row text"]) -> Int64[Tensor, "row length"]:
        """Return rows of joined texts with the tokens before each text.

        Where a text begins with what ended the one before (OPT), one such token stands between the two.
        """
        rows = torch.cat([torch.tensor(self.start, dtype=rows.dtype).expand(len(rows), -1), rows], dim=1)
        if self._begins_within:
            for row in rows:
                ids = list(self.start)
                for token in row[len(self.start) :].tolist():
                    ids += [token, *self.start] if token == self.eos else [token]
                row.copy_(torch.tensor(ids[: len(row)]))
        return rows
