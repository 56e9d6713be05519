"""Texts in two halves, as they were written and exchanged: for predicting which of the two they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import UserError
from regard.training.placement import Rows


@dataclass(frozen=True)
class HalvesMaker:
    """How rows are cut in two.

    `special`: ids of tokens that stand around texts; `separator`: the one put between the halves; `length`: tokens that
    a row may have; `pad`: the id in padding.
    """

    special: frozenset[int]
    separator: int
    length: int
    pad: int

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, *, length: int, pad: int) -> HalvesMaker:
        """As a tokenizer marks texts. Raises UserError where it has nothing to put between two."""
        candidates = (tokenizer.sep_token_id, tokenizer.eos_token_id)
        separator = next((token for token in candidates if token is not None), None)
        if separator is None:
            raise UserError("tokenizer: expected a separator or an end of text to put between two halves, it has none")
        special = frozenset(tokenizer.all_special_ids) - {tokenizer.unk_token_id}
        return cls(special | {separator}, separator, length, pad)

    def split_rows(self, rows: Rows, random: np.random.Generator) -> Rows:
        """Return the rows of a batch with their texts in halves, and `halves` (row, token), the same exchanged.

        Each text is cut at a place that is drawn. A row has as many tokens in both orders. With token types what
        follows the first separator is of the second type, `halves_types` for those exchanged.
        """
        real_mask = rows["attention_mask"].bool()
        orders = [
            self.cut(ids[row_mask].tolist(), random) for ids, row_mask in zip(rows["input_ids"], real_mask, strict=True)
        ]
        width = max(len(original) for original, _ in orders)
        original, exchanged = (self._padded([halves[order] for halves in orders], width) for order in range(2))
        mask = torch.arange(width) < torch.tensor([len(halves[0]) for halves in orders])[:, None]
        batch = {**rows, "input_ids": original, "attention_mask": mask, "halves": exchanged}
        if "token_type_ids" in rows:
            types = (self._types(ids, mask) for ids in (original, exchanged))
            batch |= dict(zip(("token_type_ids", "halves_types"), types, strict=True))
        return batch

    def cut(self, ids: Sequence[int], random: np.random.Generator) -> tuple[list[int], list[int]]:
        """Return the tokens of a row in halves, as they were written, and exchanged.

        What special tokens stood before and after all texts stay there; those in between go. A text that leaves no room
        for the separator loses its last token.
        """
        text = [index for index, token in enumerate(ids) if token not in self.special]
        if not text:
            return list(ids), list(ids)
        before, after = list(ids[: text[0]]), list(ids[text[-1] + 1 :])
        tokens = [ids[index] for index in text][: self.length - len(before) - len(after) - 1]
        position = int(random.integers(1, max(len(tokens), 2)))
        first, second = tokens[:position], tokens[position:]
        return (
            [*before, *first, self.separator, *second, *after],
            [*before, *second, self.separator, *first, *after],
        )

    def _padded(self, rows: Sequence[Sequence[int]], width: int) -> Tensor:
        return torch.tensor([[*row, *[self.pad] * (width - len(row))] for row in rows])

    def _types(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return (row, token): 1 behind the first separator."""
        here = (ids == self.separator).long()
        return ((here.cumsum(1) - here > 0) & mask).long()
