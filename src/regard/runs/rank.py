"""Which of several processes this one is, without importing torch."""

from __future__ import annotations

import os
import sys


def is_main_process() -> bool:
    """Return whether this process writes and prints: rank 0, or the only one.

    Before the process group exists, the environment that `accelerate launch` and `torchrun` set decides.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return bool(distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"
