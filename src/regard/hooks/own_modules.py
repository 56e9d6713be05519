"""What is asked of modules that are no models of Transformers: no argument of theirs says what their keys are."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.attention.call import AttentionCall
from regard.attention.tracing import is_traced, is_transformed
from regard.errors import UserError, warn_user
from regard.hooks.by_thread import is_in_backward
from regard.hooks.direct_calls import is_in_call
from regard.hooks.direction import is_causal_layer
from regard.hooks.forward_pass import seen_keys
from regard.hooks.modules import find_outside


def warn_of_outside(model: nn.Module, part: str | None) -> None:
    """Warn of attention around a model of Transformers, which is not observed, unless one part is chosen."""
    if part is None and not isinstance(model, PreTrainedModel) and (paths := find_outside(model)):
        warn_user(f"{type(model).__name__}: not observed, since in no stack of layers: {', '.join(paths)}")


def warn_of_silent_blocks(name: str, blocks: Sequence[int]) -> None:
    """Warn of blocks that are like others, and in which no attention was seen, if there are any."""
    if blocks:
        warn_user(
            f"{name}: not observed, unlike the attention of other blocks: block {', '.join(map(str, blocks))}; what a "
            "scripted function, an operator of torch.ops or log_softmax computes is not seen"
        )


def check_inside(model: nn.Module, entries: Collection[nn.Module]) -> None:
    """Raise a UserError for attention outside of forwards of some modules, unless a backward pass computes it again."""
    if not is_in_backward() and not is_in_call(entries):
        raise UserError(
            f"cannot observe {type(model).__name__}: it attends outside of its forward, as in another method of it; "
            "call the module itself, or watch the part of it that is called"
        )


def check_keys(name: str, call: AttentionCall, *, may_have_room: bool) -> None:
    """Raise a UserError unless the keys of self-attention are those of its queries, with room behind that is hidden."""
    queries, keys = call.query.shape[2], call.key.shape[2]
    if queries == keys:
        if call.is_of_memory or _are_of_no_sample(call):
            raise UserError(
                f"cannot observe {name}: its values are those of a memory, of another input or of one sample, and not "
                "of its tokens; expected of cross-attention an attribute is_cross_attention = True"
            )
        return
    if may_have_room and keys > queries:
        seen = seen_keys(call)
        if seen is not None and not bool(seen[:, queries:].any()):
            return
    raise UserError(
        f"cannot observe {name}: {queries} tokens attend to {keys} keys that are not these tokens; expected those of a "
        "whole sequence, without a cache of its own, and of cross-attention an attribute is_cross_attention = True"
    )


@torch.no_grad()
def _are_of_no_sample(call: AttentionCall) -> bool:
    """Return whether samples of other queries have the same keys and values; their first entries are compared first."""
    if len(call.query) == 1 or not call.query.numel() or is_traced() or is_transformed(call.query):
        return False
    if not (_are_the_same(call.key[:, :1, :1]) and _are_the_same(call.value[:, :1, :1])):
        return False
    return not _are_the_same(call.query) and _are_the_same(call.key) and _are_the_same(call.value)


def _are_the_same(tensor: Tensor) -> bool:
    """Return whether all samples have the same entries, as in an axis that is expanded."""
    return tensor.stride(0) == 0 or bool((tensor[1:] == tensor[:1]).all())


def check_direction(name: str, module: nn.Module, call: AttentionCall, sees_ahead: bool | None) -> bool | None:
    """Return whether the layers of a forward see later keys, which the first of several tokens says (None before).

    Raises:
        UserError: This layer does and earlier ones do not, or the other way round.
    """
    queries = call.query.shape[2]
    if queries == 1 or queries != call.key.shape[2]:
        return sees_ahead
    is_open = call.keep is None and call.key_mask is None
    own = not call.causal if is_open else not is_causal_layer(module, call)
    if sees_ahead is not None and own is not sees_ahead:
        raise UserError(
            f"cannot observe {name}: {type(module).__name__} {'sees' if own else 'does not see'} later tokens, other "
            "layers before it do the opposite; cross-attention must say so by an attribute is_cross_attention = True"
        )
    return own
