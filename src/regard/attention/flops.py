"""FLOPs as PyTorch counts them, with its fused attention for CPUs."""

from typing import Any

from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from regard.attention.fused import FLASH_BACKWARD
from regard.attention.lse_kernels import FLASH_FORWARD


class _NoModules:
    """In the place of what tells PyTorch's counter where it is: its hooks fail in a gradient of chosen weights."""

    parents = frozenset({"Global"})

    def __enter__(self) -> None:
        """Track nothing."""

    def __exit__(self, *_: object) -> None:
        """Track nothing."""


def flop_counter() -> FlopCounterMode:
    """Return a block that counts the FLOPs inside it, also those of fused attention for CPUs, unknown to PyTorch."""
    mapping: dict[Any, Any] = {}
    if FLASH_FORWARD is not None:
        mapping[FLASH_FORWARD] = lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    if FLASH_BACKWARD is not None:
        mapping[FLASH_BACKWARD] = lambda grad, query, key, value, *_, **__: sdpa_backward_flop_count(
            grad, query, key, value
        )
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter
