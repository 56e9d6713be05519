"""Tokens or samples that a module of nobody's library puts in another order, as where they are sorted."""

from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from regard.attention.tracing import is_traced, is_transformed
from regard.hooks.head_order import COMPARED, are_moved
from regard.hooks.module_tree import cannot_observe
from regard.hooks.two_operands import Step

JOINING = ("cat", "concat", "concatenate")
"""Functions that may put parts of a tensor together in another order."""
MAKING = ("empty", "full", "new_", "ones", "rand", "zeros")
"""How names of functions begin that make a tensor of another one's shape alone."""


class MovedTokens:
    """Follows what is made of hidden states whose tokens were moved, or samples, before the blocks or in them.

    A second move is taken to put them back, and so is what is written to a new tensor. A function of moved and other
    tokens, as of a token and the one before it, is taken to be about the others.
    """

    def __init__(self) -> None:
        self._moved: dict[int, ReferenceType[Tensor]] = {}

    def forget(self) -> None:
        """Follow nothing any more."""
        self._moved.clear()

    def follow(self, step: Step) -> None:
        """Note what a function has made."""
        is_move = step.moves_entries or step.name in JOINING
        if not self._moved and not is_move:
            return
        made = step.made
        read = [one for one in step.operands() if isinstance(one, Tensor) and one.is_floating_point()]
        if not made or not read or is_traced() or is_transformed(made[0]) or step.name.startswith(MAKING):
            return
        is_moved = any(map(self.holds, read))
        whole = _find_whole(read[0], made[0]) if step.name in JOINING else read[0]
        if is_move and _moves_tokens(whole, made[0]):
            is_moved = not is_moved
        elif step.moves_entries:
            is_moved = False
        elif is_moved:
            others = [one for one in read if not self.holds(one) and not isinstance(one, nn.Parameter)]
            tokens = (read[0].shape[:-1], made[0].shape[:-1])
            is_moved = not any(one.shape[:-1] in tokens and one.shape[-1] > 1 for one in others)
        for one in made if is_moved else ():
            self._moved[id(one)] = ref(one)

    def holds(self, tensor: Any) -> bool:
        """Return whether a tensor is made of moved tokens."""
        note = self._moved.get(id(tensor))
        return note is not None and note() is tensor

    def check(self, module: nn.Module, *tensors: Any) -> None:
        """Raise a UserError if the values of a module are among these, and are those of moved tokens."""
        if self._moved and any(map(self.holds, tensors)):
            raise cannot_observe(
                module,
                "its tokens, or its samples, stand in another order than outside of it; expected the order of the "
                "sequence",
            )


@torch.no_grad()
def _find_whole(part: Tensor, joined: Tensor) -> Tensor:
    """Return the tensor that a part was cut from, if it has as many entries as what such parts were joined to."""
    size = part.untyped_storage().nbytes() // part.element_size()
    return part.as_strided(joined.shape, joined.stride(), 0) if size == joined.numel() else part


@torch.no_grad()
def _moves_tokens(before: Tensor, after: Tensor) -> bool:
    """Return whether tokens or samples of (batch, token, width), or (token, batch, width), stand in another order."""
    if before.ndim != 3 or before.shape != after.shape or not before.numel():
        return False
    rows = ((before[0], after[0]), (before[:, 0], after[:, 0]))
    return any(are_moved(moved[:, :COMPARED], row) for row, moved in rows if len(row) > 1)
