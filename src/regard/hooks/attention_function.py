"""The attention function that Transformers calls: reads the host into an `AttentionCall` that observers see."""

import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.attention.call import AttentionCall, kept_pairs
from regard.attention.operator import attend, compute_output, reduce
from regard.attention.reduction import ReductionRequest
from regard.attention.registered_names import EAGER_NAME
from regard.attention.tracing import has_tangent, is_traced, is_transformed
from regard.errors import UserError
from regard.hooks import compressed, registration
from regard.hooks.added_masks import check_batch, check_mask
from regard.hooks.constant_heads import NAME, ConstantHeadsByCall
from regard.hooks.modules import weighs_depth


class Observer:
    """Told of every attention call of the modules it observes."""

    def before_attention(self, module: nn.Module, call: AttentionCall) -> tuple[AttentionCall, ReductionRequest] | None:
        """Return the call with what is known of its queries, and the reductions to compute; None to skip it."""
        return None

    def after_attention(
        self, module: nn.Module, call: AttentionCall, output: Tensor, reductions: dict[str, Tensor]
    ) -> None:
        """See a call that was not skipped, its output (batch, head, query, width) and reductions by name."""

    def attend_step(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor | None:
        """Return the output of a token that sees all keys, and observe it; None: it takes the way of all calls.

        That is a shorter way for the next step of a generation, whose every operation counts.
        """
        return None


Present = tuple[Observer, Callable[[], bool]]
"""An observer, and whether it sees what this thread computes."""
OBSERVERS: WeakKeyDictionary[nn.Module, list[Present]] = WeakKeyDictionary()
"""Observers by module, in the order in which they were added; empty outside of `observing`."""
OVERRIDE = "_regard_override"
"""Attribute of a module with its `LayerOperation`; only inside `replacing`, and in copies made there."""
EXCLUSIVE: ContextVar[Observer | None] = ContextVar("EXCLUSIVE", default=None)
"""The only observer that is told of calls, if there is one."""

HIDING = -1e3
"""A number that is added to a score like this or lower leaves no weight beside a score that is as it was."""
IN_INTERFACE: ContextVar[bool] = ContextVar("IN_INTERFACE", default=False)
"""Whether a call that came through `AttentionInterface` is being computed."""
UNROUNDED: ContextVar[AttentionCall | None] = ContextVar("UNROUNDED", default=None)
"""Under autocast, the call that the host made, while observers are shown a copy of it that is rounded."""

_LACKS_SDPA: dict[type, bool] = {}
"""What `_lacks_sdpa` has found, by class; torch.compile does not see a `functools.cache`."""

OBEYED = frozenset({"cache", "described", "indices", "position_bias", "s_aux", "sinks", "softcap"})
"""Options of a host that say what its attention computes."""
IGNORED = (
    "assistant_masks", "attention_mask", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "decoder_input_ids",
    "deterministic", "input_features", "input_ids", "labels", "max_length_k", "max_length_q", "mm_token_type_ids",
    "num_items_in_batch", "position_ids", "seq_idx", "special_tokens_mask", "token_type_ids",
)  # fmt: skip
"""Options that do not: the mask says it already, or they are meant for other parts of the model."""
_KNOWN = OBEYED.union(IGNORED)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    is_eager_host: bool = False,
    is_unmasked: bool = False,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return the output (batch, query, head, width) and no weights, as `AttentionInterface` has it.

    A module that knows what it computes passes the whole `AttentionCall` as the option `described`. A host without
    SDPA passes no mask where every query sees every key; others leave it out where attention is merely causal, and
    those of an attention that was registered without a mask function (`is_unmasked`) always. What weighs the states of
    earlier blocks is computed and not observed.

    Raises:
        UserError: The host passes a tensor of which nobody knows what it does to the weights.
    """
    if unknown := [name for name in options if name not in _KNOWN and isinstance(options[name], Tensor)]:
        raise UserError(f"cannot observe {type(module).__name__}: its attention has the unknown option {unknown[0]}")
    if weighs_depth(type(module)):
        over_depth = _read_call(query, key, value, attention_mask, scaling, False, options)
        over_depth = replace(over_depth, dropout=dropout)
        return attend(over_depth, ReductionRequest())[0].transpose(1, 2).contiguous(), None
    if is_unmasked and options.get("described") is None:
        _check_unmasked(module, query, key, attention_mask, options)
    decoded = None
    if not is_traced() and attention_mask is None and not dropout and query.shape[2] == 1:
        decoded = _decode(module, query, key, value, scaling, options)
    if decoded is not None:
        return decoded, None
    call = options.get("described")
    reads_keys = call is not None
    if call is None:
        is_eager_host = is_eager_host or (not is_unmasked and registration.lacks_sdpa(getattr(module, "config", None)))
        if attention_mask is None and not (is_eager_host or is_unmasked):
            _check_takes_masks(type(module))
        if attention_mask is not None:
            check_mask(attention_mask, is_added=is_eager_host)
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        causal = bool(causal) and attention_mask is None and not is_eager_host
        call = _read_call(query, key, value, attention_mask, scaling, causal, options)
    if dropout:
        call = replace(call, dropout=dropout)
    if is_traced():  # nobody intercepts calls of a graph
        run = _dispatch_outside_graphs if module in OBSERVERS else dispatch
        return run(module, call, reads_keys=reads_keys).transpose(1, 2).contiguous(), None
    token = IN_INTERFACE.set(True)
    try:
        return dispatch(module, call, reads_keys=reads_keys).transpose(1, 2).contiguous(), None
    finally:
        IN_INTERFACE.reset(token)


def _check_takes_masks(module_class: type) -> None:
    """Raise a UserError for a module that is passed no mask, if its model means all keys by that."""
    if _lacks_sdpa(module_class):
        name, option = module_class.__name__, f"attn_implementation='{EAGER_NAME}'"
        raise UserError(f"cannot tell the mask of {name}, which does not support SDPA; load its model with {option}")


def _check_unmasked(module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, options: Any) -> None:
    """Refuse a call without a mask that an attention of the user's own may compute in more than one way."""
    if mask is not None or is_traced():
        return
    queries, keys = query.shape[2], key.shape[2]
    window, positions = options.get("sliding_window"), options.get("position_ids")
    problem = None
    if 1 < queries < keys:
        problem = f"{queries} tokens follow {keys - queries} in a cache"
    elif isinstance(window, int) and keys > window:
        problem = f"{keys} keys are more than the window of {window}"
    elif isinstance(positions, Tensor) and len(positions) == 1 and bool((positions.diff(dim=-1) <= 0).any()):
        problem = "several sequences are packed into a row"
    if problem is not None:
        raise registration.without_masks(type(module).__name__, problem)


def _decode(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, options: dict[str, Any]
) -> Tensor | None:
    """Return the output of one token without mask in a module with constant heads, or one that an observer follows.

    None: it takes `dispatch`.
    """
    constants, present = module._modules.get(NAME), OBSERVERS.get(module, ())
    if len(present) > 1 or (constants is None) != bool(present):
        return None
    if any(options[name] is not None for name in OBEYED.intersection(options)):
        return None
    if OVERRIDE in vars(module) or "compressor" in module._modules or _lacks_sdpa(type(module)):
        return None
    scale, token = _read_scale(query, scaling), IN_INTERFACE.set(True)
    try:
        if isinstance(constants, ConstantHeadsByCall):
            return constants.decode(module, query, key, value, scale)
        for observer, sees in present:
            if EXCLUSIVE.get() in (None, observer) and sees() and not torch.is_autocast_enabled(query.device.type):
                output = observer.attend_step(module, query, key, value, scale)
                return None if output is None else output.transpose(1, 2).contiguous()
        return None
    finally:
        IN_INTERFACE.reset(token)


def _lacks_sdpa(module_class: type) -> bool:
    """Return whether the models in the file of a module do not support SDPA, and mean all keys by a missing mask."""
    if module_class in _LACKS_SDPA:
        return _LACKS_SDPA[module_class]
    defined = vars(sys.modules.get(module_class.__module__, object)).values()
    hosts = [value for value in defined if isinstance(value, type) and issubclass(value, PreTrainedModel)]
    own = [host for host in hosts if host.__module__ == module_class.__module__]
    _LACKS_SDPA[module_class] = bool(own) and not any(host._supports_sdpa for host in own)
    return _LACKS_SDPA[module_class]


def dispatch(module: nn.Module, call: AttentionCall, *, reads_keys: bool = True) -> Tensor:
    """Return the output of a call (batch, head, query, width), and show it to the observers of the module.

    The module's constants and its other operation are put into the call first, if it has any. `reads_keys`: the host
    may read what its cache returns before the call.
    """
    constants, override = module._modules.get(NAME), vars(module).get(OVERRIDE)
    if (constants is not None or override is not None) and compressed.find_compressor(module) is not None:
        raise UserError(
            f"cannot replace heads of {type(module).__name__}: it attends to compressed keys as well, which are no "
            "tokens; leave out this layer"
        )
    if isinstance(constants, ConstantHeadsByCall):
        call = constants.apply_to(call, module, reads_keys=reads_keys)
    present = OBSERVERS.get(module, ())
    if override is not None or present:
        call = call.expand_keys()
    if override is not None:
        call = override.apply_to(call)
    if not present:
        return attend(call, ReductionRequest())[0] if is_traced() else _attend(module, call)
    device = call.query.device.type
    if not torch.is_autocast_enabled(device):
        return _show(module, call, present)
    output = _attend(module, call)
    with torch.autocast(device, enabled=False):
        is_plain = call.operation is None and call.constant is None
        if is_plain and call.query.dtype != torch.float64:  # what PyTorch's attention has computed with
            unrounded, call = call, call.to_dtype(torch.get_autocast_dtype(device))
            token = UNROUNDED.set(unrounded)
            try:
                return _show(module, call, present, output)
            finally:
                UNROUNDED.reset(token)
        return _show(module, call, present, output)


def _check_transform(error: RuntimeError, module: nn.Module, call: AttentionCall, action: str) -> None:
    """Raise a UserError for an error of a transform of `torch.func` that does not know what is computed.

    PyTorch's fused attention has no tangents, those of forward-mode differentiation, either.
    """
    if isinstance(error, NotImplementedError) and any(map(has_tangent, (call.query, call.key, call.value))):
        raise UserError(
            f"cannot {action} {type(module).__name__} with tangents of torch.autograd.forward_ad; expected a forward "
            "of plain tensors, and derivatives outside of the block with attn_implementation='eager'"
        ) from error
    if not isinstance(error, torch.OutOfMemoryError) and is_transformed(call.query):
        raise UserError(
            f"cannot {action} {type(module).__name__} inside this transform of torch.func: expected a forward of plain "
            "tensors, with a batch in the place of vmap, and backward() in that of grad"
        ) from error


def _attend(module: nn.Module, call: AttentionCall) -> Tensor:
    try:
        return attend(call, ReductionRequest())[0]
    except RuntimeError as error:
        _check_transform(error, module, call, "compute the attention of")
        raise


def _show(module: nn.Module, call: AttentionCall, present: Sequence[Present], output: Tensor | None = None) -> Tensor:
    """Return the output of a call, computed if it is None, and show both to the observers.

    Raises:
        UserError: It is inside a transform of `torch.func` that does not know what is computed for them.
    """
    try:
        return _show_plain(module, call, present, output)
    except RuntimeError as error:
        _check_transform(error, module, call, "observe")
        raise


def _show_plain(module: nn.Module, call: AttentionCall, present: Sequence[Present], output: Tensor | None) -> Tensor:
    whole, call = call, compressed.select_tokens(module, call)
    is_whole = call is whole
    observers: list[Observer] = []
    request = None
    for observer, sees in present:
        if EXCLUSIVE.get() not in (None, observer) or not sees():
            continue
        answer = observer.before_attention(module, call)
        if answer is not None:
            call, wanted = answer
            request = wanted if request is None else request.join(wanted)
            observers.append(observer)
    request = request or ReductionRequest()
    computed, reductions = attend(call, request) if is_whole else (compute_output(whole), reduce(call, request))
    output = computed if output is None else output
    for observer in observers:
        observer.after_attention(module, call, output, reductions)
    return output


_dispatch_outside_graphs = torch.compiler.disable(dispatch)
"""Of modules that are observed: what observers keep is no part of a graph."""


def _read_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    is_causal: bool,
    options: dict[str, Any],
) -> AttentionCall:
    """Read the host's arguments into a call."""
    if options.get("cache") is not None:
        raise UserError("cannot observe attention over a paged cache; generate without continuous batching")
    queries, keys = query.shape[2], key.shape[2]
    causal = is_causal and queries > 1
    if causal and keys > queries:
        key, value = key[:, :, :queries], value[:, :, :queries]
        keys = queries
    masks = read_mask(mask, keys)
    if masks.get("key_mask") is not None:
        check_batch(masks["key_mask"], len(query))
    if options.get("indices") is not None:  # of the keys that each query (batch, query) selects
        selected = torch.zeros(len(query), queries, keys, dtype=torch.bool, device=query.device)
        selected = selected.scatter(-1, options["indices"].long(), True)[:, None]
        masks["keep"] = selected & masks["keep"] if "keep" in masks else selected
    bias = options.get("position_bias")
    if bias is not None:
        bias = bias[..., :keys]
        mask_bias = masks.pop("bias", None)
        masks["bias"] = bias if mask_bias is None else bias + mask_bias
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=_read_scale(query, scaling),
        softcap=options.get("softcap"),
        sink=options.get("s_aux"),
        **{"causal": causal, **masks},
    )
    return call if options.get("sinks") is None else _with_sinks_of_queries(call, options["sinks"])


def _read_scale(query: Tensor, scaling: float | None) -> float:
    """Return the factor of the products, which a host may leave out."""
    return float(query.shape[-1] ** -0.5 if scaling is None else scaling)


def _with_sinks_of_queries(call: AttentionCall, sinks: Tensor) -> AttentionCall:
    """Return the call with a logit of each query (batch, head, query, 1) beside its keys; UserError for others."""
    shape = (*call.query.shape[:3], 1)
    if sinks.shape != shape or call.sink is not None:
        raise UserError(f"sinks: expected logits of shape {shape} and no others, got {tuple(sinks.shape)}")
    return replace(call, sink=sinks[..., 0])


def read_mask(mask: Tensor | None, keys: int) -> dict[str, Any]:
    """Return a mask as fields of a call: in short if our mask function left a hint, else entry by entry."""
    if mask is None:
        return {}
    fields = registration.hint(mask)
    if fields is not None and mask.shape[-1] == keys:
        return fields
    mask = mask.expand(*mask.shape[:-1], keys) if mask.shape[-1] == 1 else mask[..., :keys]
    if mask.dtype == torch.bool:
        return {"keep": mask}
    keep = kept_pairs(mask)
    bias = mask.masked_fill(~keep, 0.0)
    if is_traced():
        return {"keep": keep, "bias": bias}
    if not bool(bias.any()):
        return {"keep": keep}
    return {"keep": mask == 0} if _hides_by_a_number(mask) else {"keep": keep, "bias": bias}


def _hides_by_a_number(mask: Tensor) -> bool:
    """Return whether a mask that is added has two values, 0 and one whose exponential is none, as −10⁹ or −10⁴."""
    lowest, seen = mask.amin(), mask == 0
    if float(lowest) > HIDING:
        return False
    return bool((seen | (mask == lowest)).all()) and bool(seen.any(-1).all())
