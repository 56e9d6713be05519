"""`nn.MultiheadAttention`, and models that call its function (WavLM): one attention call between two projections."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear, multi_head_attention_forward

from regard.attention.call import AttentionCall
from regard.attention.tracing import is_traced
from regard.errors import UserError
from regard.hooks.attention_function import read_mask
from regard.hooks.module_tree import cannot_observe

_SIGNATURE = inspect.signature(multi_head_attention_forward)
BESIDE = ("bias_k", "bias_v", "static_k", "static_v")
"""Arguments with keys or values that are not projected from those of tokens."""


def attend_multihead(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dispatch: Callable[[nn.Module, AttentionCall], Tensor],
) -> tuple[Tensor, None]:
    """Return what `multi_head_attention_forward` returns, with the attention computed by `dispatch`, and no weights.

    Raises:
        UserError: It has keys or values beside those of tokens, or no axis for samples. A `nn.MultiheadAttention` has
            tokens on the first axis, returns weights, or reads keys of another input and does not say what they are.
    """
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    options = bound.arguments
    if isinstance(module, nn.MultiheadAttention):
        _check_module(module, options)
    if options["add_zero_attn"] or any(options[name] is not None for name in BESIDE):
        raise _refusal(module, "keys or values beside those of its tokens")
    if options["query"].ndim != 3:
        raise _refusal(module, f"{options['query'].ndim} dimensions; expected (token, batch, width)")
    query, key, value = _project(options)
    scores, keep = _mask(options, query @ key.mT * query.shape[-1] ** -0.5)
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=0.0,  # the module's projections are read as tensors, and stay whole
        keep=keep,
        bias=scores.masked_fill(~keep, 0.0),
        dropout=options["dropout_p"] if options["training"] else 0.0,
    )
    output = dispatch(module, call).transpose(1, 2).flatten(2)
    projection = getattr(module, "out_proj", None)
    if isinstance(projection, nn.Linear) and projection.weight is options["out_proj_weight"]:
        return projection(output).transpose(0, 1), None  # hooks on it see what the heads add
    return linear(output, options["out_proj_weight"], options["out_proj_bias"]).transpose(0, 1), None


def _check_module(module: nn.MultiheadAttention, options: dict[str, Any]) -> None:
    if options["need_weights"]:
        raise _refusal(module, "weights to return; expected need_weights=False")
    if not module.batch_first:
        raise _refusal(module, "tokens on the first axis; expected batch_first=True")
    query, key = options["query"], options["key"]
    is_declared = hasattr(module, "is_cross_attention") or is_traced()
    if not is_declared and (query.shape != key.shape or query.data_ptr() != key.data_ptr()):
        raise _refusal(
            module,
            "queries and keys of two inputs; expected one, or an attribute is_cross_attention, which says whether the "
            "keys are of other tokens",
        )


def _project(options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values (batch, head, token, width)."""
    bias = options["in_proj_bias"]
    biases = (None,) * 3 if bias is None else bias.chunk(3)
    weights = [options[f"{name}_proj_weight"] for name in ("q", "k", "v")]
    if not options["use_separate_proj_weight"]:
        weights = options["in_proj_weight"].chunk(3)
    tokens = (options[name] for name in ("query", "key", "value"))
    query, key, value = (
        linear(states, weight, bias).unflatten(-1, (options["num_heads"], -1)).permute(1, 2, 0, 3)
        for states, weight, bias in zip(tokens, weights, biases, strict=True)
    )
    return query, key, value


def _mask(options: dict[str, Any], scores: Float[Tensor, "batch head query key"]) -> tuple[Tensor, Tensor]:
    """Return the scores with their biases, and which of them count. In masks of booleans True hides a score."""
    keep = torch.ones_like(scores, dtype=torch.bool)
    pairs, padding = options["attn_mask"], options["key_padding_mask"]
    if pairs is not None:
        pairs = pairs.unflatten(0, scores.shape[:2]) if pairs.ndim == 3 else pairs[None, None]
    for mask in (pairs, None if padding is None else padding[:, None, None]):
        if mask is None:
            continue
        fields = read_mask(~mask if mask.dtype == torch.bool else mask, scores.shape[-1])
        keep = keep & fields["keep"]
        scores = scores + fields.get("bias", 0.0)
    return scores, keep


def _refusal(module: nn.Module, reason: str) -> UserError:
    return cannot_observe(module, f"its multi-head attention has {reason}")
