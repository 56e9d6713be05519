"""What is measured is computed in the types that it is given, also where the model runs under autocast."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch

DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu")


def is_autocast_on() -> bool:
    """Return whether products are computed in a lower precision than their operands on some device."""
    return any(map(torch.is_autocast_enabled, DEVICE_TYPES))


def without_autocast() -> AbstractContextManager[None]:
    """Return a block in which no product is computed in a lower precision than its operands."""
    enabled = [device for device in DEVICE_TYPES if torch.is_autocast_enabled(device)]
    return _switched_off(enabled) if enabled else nullcontext()


@contextmanager
def _switched_off(devices: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
