"""What each head adds through the output projection, read from the input of that projection.

Some hosts gate or normalize the output of attention before they project it. So the output of a call is not enough.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import reference
from regard.attention.blockwise import blocks
from regard.attention.call import AttentionCall
from regard.attention.operator import expand_bias
from regard.attention.reduction import Reduction
from regard.errors import UserError
from regard.hooks.vector_reductions import projected_norm, to_acc_dtype

MAX_GATE = 1000.0
"""Largest factor between an entry of an output and what is projected of it, over that of their root mean squares."""


@dataclass(frozen=True)
class HeadOutputs:
    """One attention call, its output, and what the output projection receives of it.

    Attributes:
        path: Path of the attention module.
        received: What stands in the place of `output` in the input of the projection.
        weight: W_O.
        column_mass: The reduction of this name.
    """

    path: str
    call: AttentionCall
    output: Float[Tensor, "batch head query value_width"]
    received: Float[Tensor, "batch head query value_width"]
    weight: Float[Tensor, "width heads_times_value_width"]
    column_mass: Float[Tensor, "batch head key"] | None

    @property
    def is_changed(self) -> bool:
        """Whether the host does something to the output before it is projected."""
        return not torch.equal(self.received, self.output.to(self.received.dtype))

    @cached_property
    def gate(self) -> Float[Tensor, "batch head query value_width"]:
        """The factor of each entry of the output, zero at padded queries. UserError if no factor explains a change."""
        output, received = to_acc_dtype(self.output), to_acc_dtype(self.received)
        if self.call.query_mask is not None:
            output, received = (values * self.call.query_mask[:, None, :, None] for values in (output, received))
        gate = torch.where(output == 0, 0.0, received / output)
        scale = received.norm() / output.norm().clamp(min=torch.finfo(output.dtype).tiny)
        if bool(((output == 0) & (received != 0)).any() | (gate.abs() > MAX_GATE * scale).any()):
            raise UserError(
                f"cannot weigh the values of {self.path}: what its output projection receives is not the output of "
                "attention times a gate; leave out value_weighted_mass"
            )
        return gate


def _value_weighted_sum(outputs: HeadOutputs) -> Float[Tensor, "batch head key"]:
    """Compute Σ_i A_ij ‖W_O (g_i ∘ v_j)‖; with a gate query by query, of the matrix block by block."""
    if not outputs.is_changed:
        assert outputs.column_mass is not None
        values = outputs.call.expand_groups(outputs.call.value)
        return outputs.column_mass * projected_norm(values, outputs.weight)
    call, gate = outputs.call.detach().to_acc_dtype(), outputs.gate
    batch, heads, _, width = gate.shape
    parts = to_acc_dtype(outputs.weight).unflatten(1, (heads, width)).transpose(0, 1)
    factor = torch.linalg.qr(parts, mode="r").R
    values = call.expand_groups(call.value)
    total = gate.new_zeros(batch, heads, call.key.shape[2])
    row = 0
    whole = slice(0, call.key.shape[2])
    for block, columns in blocks(call) if call.constant is None else [(expand_bias(call), whole)]:
        for weights in reference.distribution(block)[0].unbind(2):
            gated = factor * gate[:, :, row, None]
            total[..., columns] += weights * (gated @ values[:, :, columns].mT).norm(dim=-2)
            row += 1
    return total


_REDUCTIONS = (
    Reduction(
        name="output_norm",
        source="projection",
        axis="query",
        steps="concat",
        compute=lambda outputs: projected_norm(outputs.received, outputs.weight),
    ),
    Reduction(
        name="value_weighted_sum",
        source="projection",
        axis="key",
        steps="add",
        requires=("column_mass",),
        compute=_value_weighted_sum,
    ),
)
PROJECTION_REDUCTIONS: dict[str, Reduction] = {reduction.name: reduction for reduction in _REDUCTIONS}
"""Reductions of `HeadOutputs`, by name.

* `output_norm`: ‖W_O x_i‖ through the part of W_O of each head, where x_i is the head's part of what is projected.
* `value_weighted_sum`: Σ_i A_ij ‖W_O (g_i ∘ v_j)‖ over real queries, where x_i = g_i ∘ o_i; g_i is 1 without a gate.
"""


@dataclass(frozen=True)
class _Call:
    """A call whose output has not been projected yet."""

    path: str
    shape: tuple[int, int, int, int]
    read: Callable[[Tensor], None]


class ProjectionInputs:
    """Waits for output projections to receive what attention calls return."""

    def __init__(self) -> None:
        self._calls: dict[nn.Module, list[_Call]] = {}
        self._handles: dict[nn.Module, Any] = {}

    def expect(
        self,
        projection: nn.Module,
        make: Callable[[Tensor], HeadOutputs],
        add: Callable[[HeadOutputs], None],
        *,
        path: str,
        output: Float[Tensor, "batch head query value_width"],
    ) -> None:
        """Give `add` what `make` returns for the part of the next input of a projection that an output has become."""
        batch, heads, queries, width = output.shape
        if projection not in self._handles:
            self._handles[projection] = projection.register_forward_pre_hook(self._receive, with_kwargs=True)
        call = _Call(path, (batch, queries, heads, width), lambda received: add(make(received)))
        self._calls.setdefault(projection, []).append(call)

    @torch.no_grad()
    def _receive(self, projection: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._handles.pop(projection).remove()
        calls = self._calls.pop(projection)
        hidden = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(hidden, Tensor) or not _fits(hidden, [call.shape for call in calls]):
            raise _not_recognized(calls[0].path)
        rows = hidden.detach().reshape(-1, hidden.shape[-1])
        for call, part in zip(calls, rows.split([math.prod(call.shape[:2]) for call in calls]), strict=True):
            call.read(part.reshape(call.shape).transpose(1, 2))

    def check(self) -> None:
        """Raise a UserError if an output has not been projected."""
        if self._calls:
            path = next(iter(self._calls.values()))[0].path
            self.clear()
            raise _not_recognized(path)

    def clear(self) -> None:
        """Wait no longer."""
        for handle in self._handles.values():
            handle.remove()
        self._handles, self._calls = {}, {}


def _fits(hidden: Tensor, shapes: list[tuple[int, int, int, int]]) -> bool:
    """Return whether an input of a projection has the heads and tokens of calls, one behind the other."""
    tokens = sum(batch * queries for batch, queries, _, _ in shapes)
    batch, queries, heads, width = shapes[0]
    is_in_order = hidden.ndim != 3 or len(shapes) > 1 or hidden.shape[:2] == (batch, queries)
    return hidden.shape[-1] == heads * width and hidden.numel() == tokens * heads * width and is_in_order


def _not_recognized(path: str) -> UserError:
    return UserError(
        f"cannot tell what the heads of {path} add: its output projection does not receive their outputs one beside "
        "the other; leave out value_weighted_mass and head_output_norm"
    )
