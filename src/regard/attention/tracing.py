"""What may be asked while a graph of a forward is made, by torch.compile, torch.export or torch.jit.trace."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def is_traced() -> bool:
    """Return whether a graph is being made: it serves other tensors, so that no value of these may decide anything."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()  # without the calls of torch.jit.is_tracing
        or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None  # make_fx
    )


def is_exported() -> bool:
    """Return whether a graph is being made that serves other sizes: by torch.export, ONNX or torch.jit.trace."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined]


def is_eager() -> bool:
    """Return whether what `torch.compile` returns runs as it was written, as while a block intercepts calls."""
    return not is_traced() and torch._dynamo.eval_frame._stance.stance == "force_eager"


def is_transformed(tensor: Tensor) -> bool:
    """Return whether a tensor stands for others, inside a transform of `torch.func`: vmap, grad, jvp."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def has_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor carries a tangent of forward-mode differentiation, of `torch.autograd.forward_ad`."""
    is_open = torch.autograd.forward_ad._current_level >= 0
    return is_open and torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None


def is_mapped(grad: Tensor) -> bool:
    """Return whether a gradient stands for several, inside vmap of `torch.func` or by `is_grads_batched`."""
    return is_transformed(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)


def has_transforms() -> bool:
    """Return whether a transform of `torch.func` is at work, of some tensors or of none that are at hand."""
    return bool(torch._C._are_functorch_transforms_active())


def cached_for(tensor: Tensor, function: Any) -> Callable[..., Tensor]:
    """Return a function of `lru_cache`; without its cache where what it makes may be of use to this tensor alone.

    That is inside a transform, and for subclasses, such as those of `FakeTensorMode`.
    """
    return function if type(tensor) is Tensor and not is_transformed(tensor) else function.__wrapped__


def break_graph(reason: str) -> None:
    """End a graph of `torch.compile` here, which says the reason where it must be of a whole forward."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=reason)


def always(condition: Any) -> bool:
    """Return whether a condition on sizes holds; in a graph, whether it holds for all sizes that the graph serves."""
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # loads sympy

    return bool(statically_known_true(condition))
