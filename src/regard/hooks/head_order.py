"""Whether the axes of values are samples and heads, told by the linear layer that they come from."""

from collections import deque
from collections.abc import Iterable
from weakref import WeakSet

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention.tracing import is_traced, is_transformed
from regard.hooks.module_tree import cannot_observe

RECENT_OUTPUTS = 4
"""Outputs of linear layers among which values are looked for: behind those of values may be those of gates."""
COMPARED = 4
"""Entries of a head that are looked for."""
COMPARED_TOKENS = 16
"""Tokens that are looked for, of which some differ."""
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads")
"""Names by which a module, or its config, says how many heads it has."""
_EXPECTED = "expected (batch, head, token, width)"


class HeadOrder:
    """Follows the outputs of linear layers, and refuses values that are not (batch, head, token, width)."""

    def __init__(self) -> None:
        self._outputs: deque[Tensor] = deque(maxlen=RECENT_OUTPUTS)
        self._in_order: WeakSet[nn.Module] = WeakSet()

    def note(self, output: Tensor) -> None:
        """Note the output of a linear layer."""
        if output.ndim == 3 and output.numel():
            self._outputs.append(output.detach())

    def forget(self) -> None:
        """Hold no output any more."""
        self._outputs.clear()

    @torch.no_grad()
    def check(
        self, module: nn.Module, value: Float[Tensor, "batch head key width"], *, is_folded: bool = False
    ) -> None:
        """Raise a UserError if the heads of a module stand before its samples, count as samples, or are the tokens.

        Where both are one axis, `is_folded`, also if nothing shows that they do not.
        """
        if module in self._in_order or not value.numel() or is_traced() or is_transformed(value):
            return
        batch, heads, keys, _ = value.shape
        for output in self._outputs:
            _check_tokens(module, value.detach(), output)
        _check_order(module, value.detach(), self._outputs)
        first = value.detach()[:, :, 0, :COMPARED].flatten(0, 1)
        for output in reversed(self._outputs):
            for tokens_second in (output, output.transpose(0, 1)):
                times, rest = divmod(len(first), len(tokens_second))
                if tokens_second.shape[1] != keys or rest or batch == len(tokens_second) == 1:
                    continue
                rows = tokens_second[:, 0].to(first.dtype)
                if not _are_in(first[:1], rows[:1]):  # first in both orders, and much less to compare
                    continue
                samples_first = _are_in(first, rows.repeat_interleave(times, dim=0))
                heads_first = batch * heads > times and _are_in(first, rows.repeat(times, 1))
                if samples_first and batch != len(rows) and count_heads(module) != heads:
                    _check_axes(module, first, len(rows), batch, heads)
                if samples_first and not heads_first and batch == len(rows) > 1 and heads > 1:
                    self._in_order.add(module)
                if heads_first and not samples_first:
                    raise cannot_observe(module, f"its heads stand before its samples; {_EXPECTED}")
                if samples_first:
                    return
        if is_folded and self._may_mix(module, batch, heads, keys):
            raise cannot_observe(
                module, f"its samples and heads are one axis, in an order that its values do not show; {_EXPECTED}"
            )

    def _may_mix(self, module: nn.Module, batch: int, heads: int, keys: int) -> bool:
        """Return whether heads may stand before samples, or, where their number is not known, count as samples."""
        if heads > 1 or count_heads(module) is not None:
            return batch > 1 < heads
        rows = [output.shape[axis] for output in self._outputs for axis in (0, 1) if output.shape[1 - axis] == keys]
        return any(batch > count and batch % count == 0 for count in rows)


def _check_tokens(module: nn.Module, value: Tensor, output: Tensor) -> None:
    """Refuse values whose tokens, as a linear layer has returned them, stand on the axis of heads or of widths."""
    for tokens_second in (output, output.transpose(0, 1)):
        samples, tokens = tokens_second.shape[:2]
        rows = tokens_second[0, :COMPARED_TOKENS].to(value.dtype)
        is_second = tokens > 1 and value.shape[:2] == (samples, tokens)
        if is_second and _are_in_turn(value[0, :COMPARED_TOKENS, 0, :COMPARED], rows):
            raise cannot_observe(module, f"its heads attend to each other in each token; {_EXPECTED}")
        is_last = tokens > 1 and (value.shape[0], value.shape[3]) == (samples, tokens)
        if is_last and _are_in_turn(value[0, 0, 0, :COMPARED_TOKENS, None], rows):
            raise cannot_observe(module, f"its keys are channels, and not tokens; {_EXPECTED}")


def _check_order(module: nn.Module, value: Tensor, outputs: Iterable[Tensor]) -> None:
    """Refuse values that a linear layer has returned in another order of their tokens, as where keys are sorted."""
    firsts = [rows for output in outputs for rows in (output[0], output[:, 0])]  # the tokens of the first sample
    firsts = [rows.to(value.dtype) for rows in firsts if len(rows) == value.shape[2] > 1]
    ends = value[0, 0, :: value.shape[2] - 1, :COMPARED] if firsts else value
    for rows in firsts:
        if _are_in(ends, rows[:: len(rows) - 1]):
            return
    for rows in firsts:
        if are_moved(value[0, 0, :, :COMPARED], rows):
            raise cannot_observe(module, f"its keys stand in another order than its tokens; {_EXPECTED}")


def are_moved(entries: Float[Tensor, "row entry"], rows: Float[Tensor, "row width"]) -> bool:
    """Return whether columns of rows are those of all entries in another order of the rows.

    One row does not tell: half precision has so few numbers that wide rows have nearly all of them.
    """
    in_place = True
    for column in entries.T:
        like = rows[:, (rows.amax(0) == column.max()) & (rows.amin(0) == column.min())]
        if not _has_column(like.sort(0).values, column.sort().values):
            return False
        in_place = in_place and _has_column(like, column)
    return not in_place


def _are_in_turn(entries: Float[Tensor, "row entry"], rows: Float[Tensor, "row width"]) -> bool:
    """Return whether each row has its entries, in the same columns, and rows differ in them; no zeros."""
    is_told = bool((entries != 0).all()) and not bool((entries == entries[:1]).all())
    return is_told and all(_has_column(rows, column) for column in entries.T)


def _has_column(rows: Float[Tensor, "row width"], column: Float[Tensor, " row"]) -> bool:
    return bool((rows == column[:, None]).all(0).any())


def _check_axes(module: nn.Module, first: Tensor, samples: int, batch: int, heads: int) -> None:
    """Refuse samples that stand on the axis of heads, or on one with heads of which nothing says how many there are."""
    if batch == 1:
        raise cannot_observe(module, f"its {samples} samples stand on the axis of heads; {_EXPECTED}")
    times = len(first) // samples
    if heads == 1 and not bool((first.unflatten(0, (-1, times)) == first[::times, None]).all()):
        raise cannot_observe(
            module,
            f"its {samples} samples and {times} heads are one axis, and it does not say how many heads it has; "
            "expected an attribute num_heads",
        )


def count_heads(module: nn.Module) -> int | None:
    """Return how many heads a module says to have."""
    values = (getattr(part, name, None) for part in (module, getattr(module, "config", None)) for name in HEAD_COUNTS)
    return next((value for value in values if isinstance(value, int)), None)


def _are_in(entries: Float[Tensor, "row entry"], rows: Float[Tensor, "row width"]) -> bool:
    """Return whether each row has these entries, wherever they stand; zeros, which may be anywhere, do not count."""
    return bool(((entries[:, :, None] == rows[:, None]).any(-1) & (entries != 0)).all())
