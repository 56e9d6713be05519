"""What is measured is computed in the types that it is given, also where the model runs under autocast."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")
_NOTHING = nullcontext()


def without_autocast() -> AbstractContextManager[None]:
    """Return a block in which no product is computed in a lower precision than its operands."""
    if not any(map(torch.is_autocast_enabled, DEVICE_TYPES)):  # as in most layers, of which each asks
        return _NOTHING
    enabled = [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]
    return _switched_off(enabled)


@contextmanager
def _switched_off(devices: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
