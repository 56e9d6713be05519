"""Functions that compute no gradients."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

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
