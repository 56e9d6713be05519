"""How large the tensors of a computation become."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Largest(TorchDispatchMode):
    """Remembers the largest number of entries that any tensor had that an operator has returned."""

    entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                size = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.entries = max(self.entries, size)
        return result


def largest(run: Callable[[], torch.Tensor]) -> int:
    """The most entries that a tensor has in a computation and in its backward pass."""
    with Largest() as watch:
        run().sum().backward()
    return watch.entries
