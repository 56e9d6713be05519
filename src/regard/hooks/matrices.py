"""The attention matrices of one sample, read while the model runs: of each layer what is wanted of it, never all."""

from collections.abc import Callable, Iterator

from jaxtyping import Float
from torch import Tensor, nn

from regard.attention import reference
from regard.attention.blockwise import blocks
from regard.attention.call import AttentionCall
from regard.attention.operator import expand_bias
from regard.attention.reduction import ReductionRequest
from regard.errors import UserError
from regard.hooks.attention_function import Observer
from regard.hooks.modules import attention_kind
from regard.hooks.observe import Watch
from regard.hooks.sequences import find_site

Block = tuple[slice, slice, Float[Tensor, "head query key"]]
"""Rows and columns of a layer's matrices, and the weights that stand there."""


class MatrixReader(Observer):
    """Shows each matrix of a forward, block by block, to `read(site, layer, blocks)`.

    It is opened inside of a block of `watching` that has seen a whole forward, from which sites are known:

        with watching(model) as watch:
            model(**inputs)
            with observing(model, MatrixReader(watch, read), list(watch.locations)):
                model(**inputs)

    Of a batch it reads the first sample. Raises UserError for layers that attend several times in a forward.
    """

    def __init__(self, watch: Watch, read: Callable[[str, int, Iterator[Block]], None]) -> None:
        self._watch, self._read = watch, read

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        sequences, path = self._watch.locations[module]
        position = self._watch.latest
        if sequences.forward is None or position.is_repeat:
            return None
        if position.part:
            name = type(module).__name__
            raise UserError(f"cannot show the matrices of {name}: it attends several times in a forward")
        site = find_site(sequences, self._watch.stacks.values(), attention_kind(path, module))
        self._read(site, position.layer, weight_blocks(call.select_samples(slice(0, 1))))
        return None


def weight_blocks(call: AttentionCall) -> Iterator[Block]:
    """Yield the weights of a call's only sample by blocks of rows, as statistics measure them."""
    call = call.detach().to_acc_dtype()
    whole, row = slice(0, call.key.shape[2]), 0
    for block, columns in blocks(call) if call.constant is None else [(expand_bias(call), whole)]:
        weights = (reference.weights(block) if block.operation is None else reference.distribution(block)[0])[0]
        rows = slice(row, row + weights.shape[1])
        yield rows, columns, weights
        row = rows.stop
