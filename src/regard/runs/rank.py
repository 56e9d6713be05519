"""Which of several processes this one is, without importing torch."""

from __future__ import annotations

import os
import sys
from typing import Any


def is_main_process() -> bool:
    """Return whether this process writes and prints: rank 0, or the only one.

    Before the process group exists, the environment that `accelerate launch` and `torchrun` set decides.
    """
    group = _process_group()
    return bool(group.get_rank() == 0) if group is not None else os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """Return how many processes work together; see `is_main_process`."""
    group = _process_group()
    return int(group.get_world_size()) if group is not None else int(os.environ.get("WORLD_SIZE", "1"))


def _process_group() -> Any:
    """Return `torch.distributed` if it is imported and initialized."""
    distributed = sys.modules.get("torch.distributed")
    return (
        distributed if distributed is not None and distributed.is_available() and distributed.is_initialized() else None
    )
