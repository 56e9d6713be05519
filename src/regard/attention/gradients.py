"""Functions that compute no gradients, or those of first order alone; gradients where they were turned off."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.attention.tracing import is_mapped, is_traced, is_transformed
from regard.errors import UserError

_REFUSAL = (
    "attention: expected no gradient of its gradient (create_graph=True), which is not computed here; "
    "attn_implementation='eager' of the model has it outside of watching and replacing, and "
    "backend='materialised' of other operations than softmax"
)
_SEVERAL = (
    "attention: expected one gradient at a time, got several at once (is_grads_batched=True), which are not computed "
    "here; backend='blockwise' of an operation has them"
)
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def no_grad(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return a function that computes no gradients, and takes no time for that where none are computed anyway.

    `torch.no_grad` as a decorator takes as long as a small operation, and more behind a large one. What observers do in
    each layer begins there.
    """

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward pass of a function whose gradients have none themselves, which refuses to be asked for such.

    With `create_graph=True` they are there, and whoever asks for gradients of them is refused; gradients of several at
    once (`is_grads_batched=True`) are refused with it. PyTorch's own decorator refuses in words of its own, and makes
    them constants in silence where the gradient that comes in is one.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def run(ctx: Any, *incoming: Any) -> Any:
        if torch.compiler.is_compiling():
            return once(ctx, *incoming)
        are_several = any(is_mapped(grad) for grad in incoming if grad is not None)
        if not torch.is_grad_enabled():
            try:
                return once(ctx, *incoming)
            except RuntimeError as error:  # what is written in place, or has no rule for several
                if not are_several:
                    raise
                raise UserError(_SEVERAL) from error
        if are_several:
            raise UserError(_REFUSAL)  # they would be constants
        kept = _ReadOnce(ctx)
        with torch.no_grad():
            gradients = backward(kept, *incoming)
        known = [gradient for gradient in gradients if gradient is not None]
        origins = [tensor for tensor in (*incoming, *kept.saved_tensors) if tensor is not None]
        marked = iter(_FirstOrderOnly.apply(len(known), *known, *origins))
        return tuple(None if gradient is None else next(marked) for gradient in gradients)

    return run


def refuse_second_order(output: Tensor) -> Tensor:
    """Return the output of PyTorch's attention, whose gradients refuse to have gradients if its kernel gives none.

    PyTorch refuses them in words of its own.
    """
    if is_traced() or is_transformed(output) or output.grad_fn is None or _KERNELS not in output.grad_fn.name():
        return output
    output.grad_fn.register_hook(_mark_first_order)
    return output


_KERNELS = "ScaledDotProduct"
"""In the names of the gradients of kernels; PyTorch's plain products have gradients of any order."""


def _mark_first_order(grads: Sequence[Tensor | None], incoming: Sequence[Tensor | None]) -> Any:
    """Return the gradients of a kernel so that they refuse to have any, where a graph of them is made."""
    if not torch.is_grad_enabled():
        return None
    known = [one for one in grads if one is not None]
    marked = iter(_FirstOrderOnly.apply(len(known), *known, *(one for one in incoming if one is not None)))
    return tuple(None if one is None else next(marked) for one in grads)


class _ReadOnce:
    """The context of a function whose saved tensors are read once: a checkpoint computes them when they are."""

    def __init__(self, ctx: Any) -> None:
        self._ctx, self.saved_tensors = ctx, ctx.saved_tensors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)


class _FirstOrderOnly(torch.autograd.Function):
    """Gradients as they are, of which a gradient in what they come from is refused."""

    @staticmethod
    def forward(ctx: Any, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.detach() for tensor in tensors[:number])  # which may be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UserError(_REFUSAL)


@contextmanager
def enable_gradients() -> Iterator[None]:
    """Turn gradients on for a while, which notebooks may turn off once for all. Raises UserError in inference mode."""
    if torch.is_inference_mode_enabled():
        raise UserError("training: expected to run outside of torch.inference_mode(), whose tensors have no gradients")
    with torch.enable_grad():
        yield
