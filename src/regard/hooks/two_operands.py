"""Products of two tensors, which may be those of queries and keys, or of weights and values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

Axes = tuple[int, int]
Layout = list[tuple[int, int]]
FOLLOWED = 16
"""Tensors made of a product of which it is known where its last two axes stand."""
EXCHANGING = (
    "__get__", "adjoint", "einsum", "moveaxis", "movedim", "permute", "swapaxes", "swapaxes_", "swapdims", "swapdims_",
    "transpose", "transpose_",
)  # fmt: skip
"""Functions that may exchange them; `__get__` is that of `mT`."""
PARTING = ("chunk", "split", "tensor_split", "unbind")
"""Functions that make several tensors of one, whose last axes stand as before."""
CUTTING = (*PARTING, "__getitem__", "cat", "concat", "concatenate", "index_select", "narrow", "pad", "stack")
"""Functions that make a tensor of more or fewer entries, whose last axes stand as before."""


@dataclass(frozen=True)
class Product:
    """A product of two tensors.

    Attributes:
        left: The first of them.
        right: The other one.
        letters: Those of both and of the output, as in `torch.einsum`.
        size: Entries of the output.
        results: The output and what was made of it, the axes of its rows and columns, counted from the last one, and
            its sizes and strides.
    """

    left: Tensor
    right: Tensor
    letters: tuple[str, str, str] | None
    size: int = 0
    results: deque[tuple[ReferenceType[Tensor], Axes, Layout]] = field(default_factory=lambda: deque(maxlen=FOLLOWED))

    @classmethod
    def of(cls, left: Tensor, right: Tensor, letters: tuple[str, str, str] | None, output: Tensor) -> Product:
        """Return the product of two tensors that has this output."""
        product = cls(left, right, letters, output.numel())
        product._note(output, (-2, -1))
        return product

    def _note(self, tensor: Tensor, axes: Axes) -> None:
        self.results.append((ref(tensor), axes, list(zip(tensor.shape, tensor.stride(), strict=True))))

    def follow(self, name: str, operands: Sequence[Any], result: Any) -> None:
        """Note what a function has made of the output, or of what was made of it; no masks."""
        made = [result] if isinstance(result, Tensor) else list(result) if name in PARTING else []
        if not made or not made[0].is_floating_point() or (made[0].numel() != self.size and name not in CUTTING):
            return
        read = [part for one in operands for part in (one if isinstance(one, (list, tuple)) else (one,))]
        for before, axes, layout in reversed(self.results):
            tensor = before()
            if tensor is not None and any(operand is tensor for operand in read):
                for part in made:
                    self._note(part, _move(name, axes, layout, part))
                return

    def read_scores(self, scores: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Return queries and keys (batch, head, token, width), if they may have made scores.

        `shape` is theirs as (batch, head, query, key).
        """
        axes = next((axes for read, axes, _ in reversed(self.results) if read() is scores), (-2, -1))
        if axes != (-1, -2):
            return self._read_factors(*shape)
        batch, heads, queries, keys = shape
        pair = self._read_factors(batch, heads, keys, queries)
        return None if pair is None else pair[::-1]

    def _read_factors(self, batch: int, heads: int, queries: int, keys: int) -> tuple[Tensor, Tensor] | None:
        """Return queries and keys of scores whose axes stand as in the product."""
        if self.letters is None:
            query, key = (_split_heads(tensor, batch, heads) for tensor in (self.left, self.right.mT))
        else:
            left, right, output = self.letters
            shared = set(left) & set(right) - set(output)
            if len(output) not in (3, 4) or len(shared) != 1:
                return None
            rows, columns = (output[:-2] + token + min(shared) for token in output[-2:])
            if sorted(left) != sorted(rows):
                rows, columns = columns, rows
            operands = _permute(self.left, left, rows), _permute(self.right, right, columns)
            query, key = (None if part is None else _split_heads(part, batch, heads) for part in operands)
            if rows[-2] != output[-2]:
                query, key = key, query
        if query is None or key is None or query.shape[2] != queries or key.shape[2] != keys:
            return None
        return query, key

    def read_values(self, weights: Tensor, shape: Sequence[int]) -> tuple[Tensor, Callable[[Tensor], Tensor]] | None:
        """Return values (batch, head, token, width), and what makes the product's shape of an output."""
        batch, heads = shape[:2]
        if self.letters is None:
            value = _split_heads(self.right, batch, heads)
            return None if value is None else (value, Tensor.contiguous if weights.ndim == 4 else _join_heads)
        own, letters, output = self.letters
        other = self.right
        if weights is not self.left:
            own, letters, other = letters, own, self.left
        width = set(letters) - set(own)
        if len(own) not in (3, 4) or len(width) != 1:
            return None
        whole = _permute(other, letters, own[:-2] + own[-1] + min(width))
        value = None if whole is None else _split_heads(whole, batch, heads)
        canonical = own[:-1] + min(width)
        if value is None or sorted(output) != sorted(canonical):
            return None
        order = [canonical.index(letter) for letter in output]
        return value, lambda tensor: (_join_heads(tensor) if len(own) == 3 else tensor).permute(order)


def _split_heads(tensor: Tensor, batch: int, heads: int) -> Tensor | None:
    if tensor.ndim == 3 and len(tensor) == batch * heads:
        return tensor.unflatten(0, (batch, heads))
    is_split = tensor.ndim == 4 and tensor.shape[0] in (1, batch) and tensor.shape[1] in (1, heads)
    return tensor.expand(batch, heads, -1, -1) if is_split else None


def _join_heads(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1)


def _permute(tensor: Tensor, letters: str, to: str) -> Tensor | None:
    """Return a tensor with its axes in another order; None if it has others."""
    if sorted(letters) != sorted(to):
        return None
    return tensor.permute([letters.index(letter) for letter in to])


def _move(name: str, axes: Axes, layout: Layout, result: Tensor) -> Axes:
    """Return where two axes of a tensor of this layout stand in what a function has made of it."""
    after: Layout = list(zip(result.shape, result.stride(), strict=True))
    if name not in EXCHANGING or any(after.count(layout[axis]) != 1 for axis in axes):
        return axes  # no view with these axes, or one in which they cannot be told
    rows, columns = (after.index(layout[axis]) - len(after) for axis in axes)
    return rows, columns
