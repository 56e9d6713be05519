"""Attention to compressed keys beside those of tokens (DeepSeek-V4), each made of several tokens.

Where statistics are measured they are, with the sink, one column beside the keys: no token has it.
"""

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from regard.attention.call import AttentionCall
from regard.attention.gradients import no_grad
from regard.attention.operator import reduce
from regard.attention.reduction import ReductionRequest
from regard.hooks.module_tree import is_of_transformers

_NUM_ENTRIES: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""How many keys each compressor has made for the call that follows; only of modules in a block."""


def find_compressor(module: nn.Module) -> nn.Module | None:
    """Return what makes the compressed keys of an attention module of Transformers; None if it has none."""
    compressor = module._modules.get("compressor")  # most have none, and getattr() makes an error of that
    return compressor if is_of_transformers(module) and isinstance(compressor, nn.Module) else None


def note_entries(compressor: nn.Module, _args: Any, output: Any) -> None:
    """Note how many keys (batch, 1, key, width) a compressor returns: they stand behind those of tokens."""
    keys = output[0] if isinstance(output, tuple) else output
    if isinstance(keys, Tensor) and keys.ndim == 4:
        _NUM_ENTRIES[compressor] = keys.shape[2]


@no_grad
def select_tokens(module: nn.Module, call: AttentionCall) -> AttentionCall:
    """Return the call without its compressed keys, which are in the sink of each query instead.

    Weights of tokens are the same. The output is not: compressed keys have values.
    """
    compressor = find_compressor(module)
    count = 0 if compressor is None else _NUM_ENTRIES.get(compressor, 0)
    if not count:
        return call
    rows, first = slice(0, call.query.shape[2]), call.key.shape[2] - count
    others = call.detach().select_tokens(rows, slice(first, call.key.shape[2]))
    sink = reduce(others, ReductionRequest(names=frozenset({"lse"})))["lse"]
    return replace(call.detach().select_tokens(rows, slice(0, first)), sink=sink)
