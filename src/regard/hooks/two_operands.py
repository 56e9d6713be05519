"""Products of two tensors, which may be those of queries and keys, or of weights and values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from weakref import ReferenceType, ref

import numpy as np
import torch
from torch import Tensor

from regard.attention.call import is_same_view
from regard.attention.tracing import is_transformed
from regard.hooks.data_flow import FLOW
from regard.hooks.einsum_letters import read_letters

Axes = tuple[int, int]
Layout = list[tuple[int, int]]
Shares = tuple[tuple[Any, ...], ...]
Result = tuple[ReferenceType[Tensor], Axes | None, Layout, Shares]
FOLLOWED = 16
"""Tensors made of a product of which it is known where its last two axes stand."""
EXCHANGING = (
    "__get__", "adjoint", "einsum", "moveaxis", "movedim", "permute", "swapaxes", "swapaxes_", "swapdims", "swapdims_",
    "transpose", "transpose_",
)  # fmt: skip
"""Functions that may exchange them; `__get__` is that of `mT`."""
COPYING = ("permute_copy", "transpose_copy")
"""Functions that may, and whose result is a copy, which does not show it."""
MOVING = (
    "flip", "fliplr", "flipud", "gather", "index_select", "msort", "roll", "rot90", "sort", "take", "take_along_dim",
)  # fmt: skip
"""Functions behind which entries may stand in other places of their axes; indices may, too."""
ADDING = ("__add__", "__iadd__", "__radd__", "add", "add_")
"""Functions that add two tensors."""
PARTING = ("chunk", "split", "tensor_split", "unbind")
"""Functions that make several tensors of one, whose last axes stand as before."""
CUTTING = (*PARTING, "__getitem__", "cat", "concat", "concatenate", "narrow", "pad", "stack")
"""Functions that make a tensor of more or fewer entries, whose last axes stand as before."""


@dataclass(frozen=True)
class Step:
    """A function that was called, what it read, and what it has made of that."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @cached_property
    def key(self) -> object:
        """Tells it from other calls, without a reference to their tensors."""
        return object()

    @property
    def name(self) -> str:
        """The name of the function."""
        return getattr(self.function, "__name__", "")

    def reads(self, tensor: Tensor) -> bool:
        """Return whether a tensor is among its arguments."""
        return any(one is tensor for one in self.operands())

    def move(self, tensor: Tensor, axes: Axes | None, layout: Layout, part: Tensor) -> Axes | None:
        """Return where two axes of a tensor, of this layout before the call, stand in what was made; None: unknown."""
        if axes is None or self.name in COPYING or self.moves_entries:
            return None
        if self.name not in EXCHANGING:
            return axes
        if self.name == "einsum" and sum(isinstance(one, Tensor) for one in self.operands()) > 1:
            return self._move_letters(tensor, axes, part)
        sizes = [size for size, _ in layout]
        strides = list(range(len(sizes), 0, -1))  # another one each, also of axes of one entry
        probe = torch.empty_strided(sizes, strides, device="meta")
        args = [_put(probe, tensor, value) for value in self.args]
        made = self.function(*args, **{name: _put(probe, tensor, value) for name, value in self.kwargs.items()})
        after = list(made.stride()) if isinstance(made, Tensor) and made.shape == part.shape else []
        if any(after.count(strides[axis]) != 1 for axis in axes):
            return None
        rows, columns = (after.index(strides[axis]) - len(after) for axis in axes)
        return rows, columns

    def share(self, tensor: Tensor) -> Shares:
        """Return what tells how a tensor enters what was made: nothing where it is added as it is."""
        if self.name in ADDING and not self.kwargs:
            return ()
        places = (
            None if one is tensor else self.key if isinstance(one, Tensor) else str(one) for one in self.operands()
        )
        return ((self.name, *places),)

    @property
    def moves_entries(self) -> bool:
        """Whether what it made may have its entries in other places of their axes."""
        if self.name != "__getitem__":
            return self.name in MOVING
        index = self.args[1] if isinstance(self.args[1], tuple) else (self.args[1],)
        return any(isinstance(one, (Tensor, np.ndarray, list, range)) for one in index)

    @property
    def made(self) -> list[Tensor]:
        """The tensors that it made of those that it read, if these are numbers; no indices."""
        if isinstance(self.result, Tensor):
            made = [self.result]
        else:
            made = list(self.result)[: 1 if self.name == "sort" else None] if self.name in (*PARTING, "sort") else []
        return made if made and made[0].is_floating_point() else []

    def operands(self) -> Iterator[Any]:
        """Iterate over its arguments, and over what stands in lists among them."""
        for value in (*self.args, *self.kwargs.values()):
            yield from value if isinstance(value, (list, tuple)) else (value,)

    def _move_letters(self, tensor: Tensor, axes: Axes, part: Tensor) -> Axes | None:
        """Return where two axes of an operand of einsum stand in its output; None where that does not have them."""
        operands = [one for one in self.operands() if isinstance(one, Tensor)]
        letters = read_letters(str(self.args[0]), operands)
        if letters is None:
            return None
        own, output = letters[0 if operands[0] is tensor else 1], letters[2]
        if any(own[axis] not in output for axis in axes):
            return None
        rows, columns = (output.index(own[axis]) - len(output) for axis in axes)
        return rows, columns


@dataclass(frozen=True)
class Product:
    """A product of two tensors.

    Attributes:
        left: The first of them.
        right: The other one.
        letters: Those of both and of the output, as in `torch.einsum`.
        size: Entries of the output.
        results: The output and what was made of it, the axes of its rows and columns, counted from the last one (None
            if they are not known), its sizes and strides, and how the output enters it.
    """

    left: Tensor
    right: Tensor
    letters: tuple[str, str, str] | None
    size: int = 0
    results: deque[Result] = field(default_factory=lambda: deque(maxlen=FOLLOWED))

    @classmethod
    def of(cls, left: Tensor, right: Tensor, letters: tuple[str, str, str] | None, output: Tensor) -> Product:
        """Return the product of two tensors that has this output."""
        product = cls(left, right, letters, output.numel())
        product._note(output, (-2, -1), ())
        _ = product.is_of_positions, product.is_of_inputs  # before the operands are written to
        return product

    def _note(self, tensor: Tensor, axes: Axes | None, shares: Shares) -> None:
        self.results.append((ref(tensor), axes, list(zip(tensor.shape, tensor.stride(), strict=True)), shares))

    def follow(self, step: Step) -> None:
        """Note what a function has made of the output, or of what was made of it; no masks."""
        made = step.made
        if not made or (made[0].numel() != self.size and step.name not in CUTTING and not step.moves_entries):
            return
        for before, axes, layout, shares in reversed(self.results):
            tensor = before()
            if tensor is not None and step.reads(tensor):
                for part in made:
                    self._note(part, step.move(tensor, axes, layout, part), shares + step.share(tensor))
                return

    def made(self, scores: Tensor) -> bool:
        """Return whether scores are known to be made of the output."""
        return self.shares_in(scores) is not None

    def shares_in(self, scores: Tensor) -> Shares | None:
        """Return how the output enters scores; None if they are not known to be made of it."""
        return next((shares for read, _, _, shares in reversed(self.results) if read() is scores), None)

    def read_scores(self, scores: Tensor, shape: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Return queries and keys (batch, head, token, width), if they may have made scores.

        `shape` is theirs as (batch, head, query, key).
        """
        axes = next((axes for read, axes, *_ in reversed(self.results) if read() is scores), (-2, -1))
        if axes is None or not _are_last(axes):
            return None
        if axes == (-2, -1):
            return self._read_factors(*shape)
        batch, heads, queries, keys = shape
        pair = self._read_factors(batch, heads, keys, queries)
        return None if pair is None else pair[::-1]

    def read_any(self, shape: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """Return operands of the same shapes as queries and keys, whichever they are."""
        batch, heads, queries, keys = shape
        pair = self._read_factors(batch, heads, queries, keys)
        if pair is None and (pair := self._read_factors(batch, heads, keys, queries)) is not None:
            pair = pair[::-1]
        return pair

    @cached_property
    def is_of_positions(self) -> bool:
        """Whether one operand is made of weights and constants alone, as of positions, and the other one is not."""
        return FLOW.is_constant(self.left) is not FLOW.is_constant(self.right)

    @cached_property
    def is_of_inputs(self) -> bool:
        """Whether both operands are known to be made of inputs of the forward, as queries and keys of tokens are."""
        return FLOW.is_of_inputs(self.left) and FLOW.is_of_inputs(self.right)

    def is_of_pairs(self, scores: Tensor) -> bool:
        """Return whether an operand has entries of its own for each query and key of scores, so that it is no keys."""
        axes = next((axes for read, axes, *_ in reversed(self.results) if read() is scores), None)
        if axes is None:
            return False
        if self.letters is not None:
            *both, output = self.letters
            pairs = [output[-2:]] if _are_last(axes) else [one + output[-1] for one in output[:-2]]
            return all(any({*pair} <= {*letters} for letters in both) for pair in pairs)
        sizes = self.left.shape[:-2]  # rows stand elsewhere: one of these is that of queries, in both operands
        return axes[1] == -1 and axes[0] < -2 and sizes == self.right.shape[:-2] and scores.shape[-2] > 1

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
            if rows[-2] not in left:
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


def find_factors(
    products: Sequence[Product], scores: Tensor, shape: Sequence[int]
) -> tuple[Tensor, Tensor, bool, tuple[Tensor, ...]] | None:
    """Return the queries and keys of scores, whether they are told, and the operands of the product that made them.

    Scores may be a sum of several products, from the first to the last. Those of positions, or of pairs of tokens, say
    nothing of keys. Queries of the same keys are summed, others stand beside each other, as in multi-head latent
    attention. They are not told where they do not enter in the same way, as in a difference, nor where the scores are
    not known to be made of a product, or only with entries in other places: then the latest product that has their
    shape stands for it. `shape` is as `read_scores` takes it.
    """
    known = sorted((one for one in products if one.made(scores)), key=_precedence, reverse=True)
    read = [(one, pair) for one in known if (pair := one.read_scores(scores, shape)) is not None]
    if not read:
        any_pairs = (one.read_any(shape) for one in (*known, *reversed(products)))
        return next(((*pair, False, ()) for pair in any_pairs if pair is not None), None)
    first, pairs, used = read[0][0], list[list[Tensor]](), list[Product]()
    for one, (query, key) in read:
        same = next((pair for pair in pairs if _is_same(pair[1], key)), None)
        if same is not None:
            same[0] = same[0] + query
        elif not used or (one.is_of_inputs and first.is_of_inputs):
            pairs.append([query, key])
        else:
            continue
        used.append(one)
    rest = [one for one in known if not any(one is other for other in used)]
    is_whole = all(one.is_of_positions or one.is_of_pairs(scores) for one in rest)
    is_sum = len({one.shares_in(scores) for one in used}) == 1
    query, key = pairs[0] if len(pairs) == 1 else (torch.cat(parts, -1) for parts in zip(*pairs, strict=True))
    return query, key, is_whole and is_sum, (first.left, first.right)


def _are_last(axes: Axes) -> bool:
    """Return whether rows and columns stand last, in whichever order."""
    return {*axes} == {-2, -1}


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Return whether tensors are the same view; those of a transform of torch.func do not tell."""
    return not any(map(is_transformed, (tensor, other))) and is_same_view(tensor, other)


def _precedence(product: Product) -> tuple[bool, tuple[int, int]]:
    """Return whether a product is of no positions, and axes and entries of the smaller operand."""
    return not product.is_of_positions, min((one.ndim, one.numel()) for one in (product.left, product.right))


def _split_heads(tensor: Tensor, batch: int, heads: int) -> Tensor | None:
    if tensor.ndim == 3 and len(tensor) == batch * heads:
        return tensor.unflatten(0, (batch, heads))
    is_split = tensor.ndim == 4 and tensor.shape[0] in (1, batch) and tensor.shape[1] in (1, heads)
    return tensor.expand(batch, heads, -1, -1) if is_split else None


def _join_heads(tensor: Tensor) -> Tensor:
    return tensor.flatten(0, 1)


def _permute(tensor: Tensor, letters: str, to: str) -> Tensor | None:
    """Return a tensor with its axes in another order, and one head where it has no axis of heads; None for others."""
    missing = "".join(letter for letter in to[1:-2] if letter not in letters)
    if sorted(letters + missing) != sorted(to):
        return None
    tensor, letters = tensor[(..., *(None for _ in missing))], letters + missing
    return tensor.permute([letters.index(letter) for letter in to])


def _put(probe: Tensor, tensor: Tensor, value: Any) -> Any:
    """Return an argument with one tensor in the place of another."""
    if isinstance(value, (list, tuple)):
        return [_put(probe, tensor, one) for one in value]
    return probe if value is tensor else value
