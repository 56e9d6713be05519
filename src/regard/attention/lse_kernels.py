"""PyTorch's fused kernels that return the log-normalizer of each query beside the output, and which call each takes.

Those for GPUs are called as `scaled_dot_product_attention` calls them, and for what it calls them.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from regard.attention import kernels
from regard.attention.call import AttentionCall
from regard.attention.tracing import is_traced

LseKernel = Callable[[AttentionCall], tuple[Tensor, Tensor]]
"""Returns output and log-normalizer of a call; that of a query that sees no key may be any number."""
GPU_ALIGNMENT = 8
"""Width and length in memory that the kernels for GPUs take without padding are multiples of this."""


def find_operator(name: str, arguments: tuple[str, ...], lse: str) -> Any | None:
    """Return an operator of PyTorch, or None if this release has none that takes these arguments and returns `lse`."""
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        return None
    schema = operator.default._schema
    needed = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    names = tuple(argument.name for argument in schema.arguments)
    positional, by_name = tuple(n for n in arguments if n not in _BY_NAME), set(arguments) & _BY_NAME
    takes = names[: len(positional)] == positional and by_name <= set(names) and needed <= set(arguments)
    return operator if takes and [value.name for value in schema.returns[:2]] == ["output", lse] else None


_QKV, _BY_NAME = ("query", "key", "value"), {"attn_mask", "scale"}
FLASH_FORWARD = find_operator(
    "_scaled_dot_product_flash_attention_for_cpu", (*_QKV, "dropout_p", "is_causal", "attn_mask", "scale"), "logsumexp"
)
"""Flash attention for CPUs; None if this release has none."""
GPU_FLASH_FORWARD = find_operator(
    "_scaled_dot_product_flash_attention", (*_QKV, "dropout_p", "is_causal", "scale"), "logsumexp"
)
"""Flash attention for GPUs, in half precision."""
GPU_EFFICIENT_FORWARD = find_operator(
    "_scaled_dot_product_efficient_attention",
    (*_QKV, "attn_bias", "compute_log_sumexp", "dropout_p", "is_causal", "scale"),
    "log_sumexp",
)
"""Memory-efficient attention for GPUs, also in float32 and with a bias."""


def select_kernel(call: AttentionCall) -> LseKernel | None:
    """Return the kernel that takes a call without gradient and dropout, or None."""
    if not call.is_plain or call.constant is not None or call.value.shape[-1] != call.query.shape[-1]:
        return None
    if kernels.is_on_gpu(call.query):
        return _select_gpu_kernel(call)
    takes = (
        FLASH_FORWARD is not None
        and call.query.device.type == "cpu"
        and all(tensor.stride(-1) == 1 for tensor in (call.query, call.key, call.value))
        and call.query.dtype in (torch.float32, torch.float64)
        and (not call.causal or call.offset == 0)
    )
    return _flash_on_cpu if takes else None


def _select_gpu_kernel(call: AttentionCall) -> LseKernel | None:
    is_square = call.offset == 0 and call.query.shape[2] == call.key.shape[2]
    device = call.query.device.type
    is_cast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != call.query.dtype
    if (
        is_traced()
        or is_cast
        or (call.causal and (not is_square or call.key_mask is not None))
        or call.query.shape[-1] % GPU_ALIGNMENT
        or call.query.dtype not in kernels.DTYPES
    ):
        return None
    if GPU_FLASH_FORWARD is not None and call.query.dtype != torch.float32 and can_use_flash(call):
        return _flash_on_gpu
    return _efficient_on_gpu if GPU_EFFICIENT_FORWARD is not None and can_use_efficient(call) else None


def can_use_flash(call: AttentionCall) -> bool:
    """Return whether flash attention takes a call on its GPU, as PyTorch says; never with a mask."""
    if call.key_mask is not None:
        return False
    has_groups = call.num_key_value_groups > 1
    return can_use_flash_attention(SDPAParams(call.query, call.key, call.value, None, 0.0, call.causal, has_groups))


def can_use_efficient(call: AttentionCall) -> bool:
    """Return whether memory-efficient attention takes a call on its GPU, its groups expanded, as PyTorch says."""
    heads = call.query.shape[1]
    key, value = (tensor[:, :1].expand(-1, heads, -1, -1) for tensor in (call.key, call.value))  # it reads sizes alone
    return can_use_efficient_attention(SDPAParams(call.query, key, value, _padding(call), 0.0, call.causal, False))


def _flash_on_cpu(call: AttentionCall) -> tuple[Tensor, Tensor]:
    assert FLASH_FORWARD is not None
    padding = None
    if call.key_mask is not None:
        padding = call.query.new_zeros(call.key_mask.shape).masked_fill_(~call.key_mask, -torch.inf)[:, None, None, :]
    output, lse = FLASH_FORWARD(call.query, call.key, call.value, 0.0, call.causal, attn_mask=padding, scale=call.scale)
    return output, lse


def _flash_on_gpu(call: AttentionCall) -> tuple[Tensor, Tensor]:
    assert GPU_FLASH_FORWARD is not None
    output, lse, *_ = GPU_FLASH_FORWARD(call.query, call.key, call.value, 0.0, call.causal, scale=call.scale)
    return output, lse


def _efficient_on_gpu(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return output and log-normalizer; the kernel appends queries to the latter, to a multiple of 32."""
    assert GPU_EFFICIENT_FORWARD is not None
    has_groups = call.num_key_value_groups > 1
    key, value = (call.expand_groups(t) if has_groups else t for t in (call.key, call.value))
    options = (_padding(call), True, 0.0, call.causal)
    output, lse, *_ = GPU_EFFICIENT_FORWARD(call.query, key, value, *options, scale=call.scale)
    return output, lse[..., : call.query.shape[2]]


def _padding(call: AttentionCall) -> Tensor | None:
    """Return 0 or −inf for each pair of an encoder's padded samples, rows of memory aligned, each for all queries."""
    if call.key_mask is None:
        return None
    samples, keys = call.key_mask.shape
    aligned = -(-keys // GPU_ALIGNMENT) * GPU_ALIGNMENT
    bias = call.query.new_zeros(samples, 1, 1, aligned)[..., :keys]
    bias.masked_fill_(~call.key_mask[:, None, None], -torch.inf)
    return bias.expand(samples, call.query.shape[1], call.query.shape[2], keys)


def sees_no_key(call: AttentionCall, key_mask: Tensor) -> Bool[Tensor, "batch 1 #query"]:
    """Return which queries see no real key, whose log-normalizer by a fused kernel is not −∞."""
    has_key = key_mask.cumsum(-1) > 0
    if not call.causal:
        return ~has_key[:, None, -1:]
    last = torch.arange(call.query.shape[2], device=key_mask.device).clamp(max=key_mask.shape[1] - 1)
    return ~has_key[:, None, last]
