"""Functions that compute no gradients, or those of first order alone; gradients where they were turned off."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

from regard.errors import UserError

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

    Without the refusal they are refused in words of PyTorch, or are silently constants where the gradient that comes in
    is one.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def run(*args: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise UserError(
                "attention: expected no gradient of its gradient (create_graph=True), which is not computed here; "
                "attn_implementation='eager' of the model has it outside of watching and replacing, and "
                "backend='materialised' of other operations than softmax"
            )
        return once(*args)

    return run


@contextmanager
def enable_gradients() -> Iterator[None]:
    """Turn gradients on for a while, which notebooks may turn off once for all. Raises UserError in inference mode."""
    if torch.is_inference_mode_enabled():
        raise UserError("training: expected to run outside of torch.inference_mode(), whose tensors have no gradients")
    with torch.enable_grad():
        yield
