"""The attention matrices of one sample, read layer by layer of a forward: what is wanted of each, never all at once."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import reference
from regard.attention.blockwise import blocks
from regard.attention.call import AttentionCall
from regard.attention.onepass import one_pass
from regard.attention.operator import expand_bias, simplify
from regard.attention.reduction import ReductionRequest
from regard.errors import UserError
from regard.hooks.attention_function import Observer
from regard.hooks.modules import attention_kind
from regard.hooks.numbering import CallPosition
from regard.hooks.observe import Watch
from regard.hooks.sequences import find_site

Block = tuple[slice, slice, Float[Tensor, "head query key"]]
"""Rows and columns of a layer's matrices, and the weights that stand there."""
Read = Callable[[str, int, AttentionCall], None]
"""What is done with a layer: its site, its number, and its call of the first sample, whose values mean nothing."""


class MatrixReader(Observer):
    """Shows the call of each layer of a forward to `read`, while the model runs.

    It is opened inside of a block of `watching` that has seen a whole forward, from which sites are known:

        with watching(model) as watch:
            model(**inputs)
            with observing(model, MatrixReader(watch, read), list(watch.locations)):
                model(**inputs)

    Of a batch it reads the first sample. Raises UserError for layers that attend several times in a forward.
    """

    def __init__(self, watch: Watch, read: Read) -> None:
        self._watch, self._read = watch, read

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        sequences, _ = self._watch.locations[module]
        position = self._watch.latest
        if sequences.forward is not None and not position.is_repeat:
            _show(self._watch, self._read, module, position, call)
        return None


class CallRecorder(Observer):
    """Records the calls of a forward without their values, to read them when it is over instead of in another one.

    It is opened like a `MatrixReader`, for the forward from which sites are known.

    Attributes:
        is_complete: Whether all calls were recorded, as their operands take no more than `limit` bytes together.
    """

    def __init__(self, watch: Watch, limit: int) -> None:
        self._watch, self._limit = watch, limit
        self._calls: list[tuple[nn.Module, CallPosition, AttentionCall]] = []
        self._bytes: dict[int, int] = {}
        self.is_complete = True

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        sequences, _ = self._watch.locations[module]
        position = self._watch.latest
        if not self.is_complete or sequences.forward is None or position.is_repeat:
            return None
        call = replace(call.detach(), value=call.key.detach())
        for tensor in (getattr(call, part.name) for part in fields(call)):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._bytes[storage.data_ptr()] = storage.nbytes()
        self._calls.append((module, position, call))
        if sum(self._bytes.values()) > self._limit:
            self.is_complete = False
            self._calls.clear()
        return None

    def replay(self, read: Read) -> None:
        """Show all calls to `read`, as a `MatrixReader` would. Raises UserError like it."""
        assert self.is_complete
        for module, position, call in self._calls:
            _show(self._watch, read, module, position, call)


def _show(watch: Watch, read: Read, module: nn.Module, position: CallPosition, call: AttentionCall) -> None:
    if position.part:
        name = type(module).__name__
        raise UserError(f"cannot show the matrices of {name}: it attends several times in a forward")
    sequences, path = watch.locations[module]
    site = find_site(sequences, watch.stacks.values(), attention_kind(path, module))
    read(site, position.layer, call.select_samples(slice(0, 1)))


def weight_blocks(call: AttentionCall) -> Iterator[Block]:
    """Yield the weights of a call's only sample by blocks of rows, as statistics measure them."""
    call = call.detach().to_acc_dtype()
    whole, row = slice(0, call.key.shape[2]), 0
    for block, columns in blocks(call) if call.constant is None else [(expand_bias(call), whole)]:
        weights = (reference.weights(block) if block.operation is None else reference.distribution(block)[0])[0]
        rows = slice(row, row + weights.shape[1])
        yield rows, columns, weights
        row = rows.stop


def head_blocks(call: AttentionCall, heads: list[int]) -> Iterator[Block]:
    """Yield the same of some heads."""
    if call.constant is None and call.operation is None:
        yield from weight_blocks(call.select_heads(heads))
    else:  # whose weights may depend on all heads
        yield from ((rows, columns, weights[heads]) for rows, columns, weights in weight_blocks(call))


def tile_means(call: AttentionCall, tall: int, wide: int) -> Float[Tensor, "head {tall} {wide}"]:
    """Return the matrices of a call's only sample in tiles: what a tile's queries give to its keys together, on average.

    Sums over keys are the output for values that say in which tile a key is, so that softmax needs no matrix.
    """
    call = simplify(call.detach().to_acc_dtype())[0]
    (batch, heads, queries, _), (_, groups, keys, _) = call.query.shape, call.key.shape
    assert batch == 1
    device = call.query.device
    of_query, of_key = (torch.arange(n, device=device) * count // n for n, count in ((queries, tall), (keys, wide)))
    if call.operation is None and call.constant is None:
        value = torch.nn.functional.one_hot(of_key, wide).to(call.query).expand(1, groups, keys, wide)
        sums, _ = one_pass(replace(call, value=value), ReductionRequest(), output=True)
        assert sums is not None
        by_row = sums[0]
    else:
        by_row = call.query.new_zeros(heads, queries, wide)
        for rows, columns, weights in weight_blocks(call):
            by_row[:, rows].index_add_(2, of_key[columns], weights)
    tiles = by_row.new_zeros(heads, tall, wide).index_add_(1, of_query, by_row)
    return tiles / of_query.bincount(minlength=tall)[:, None]
