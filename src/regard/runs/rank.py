"""Rank and number of processes, and whether a launcher started this one, without importing torch."""

import os
import sys
from typing import Any

IN_JOB = "REGARD_JOB"
"""Environment variable of the processes of a launcher, which tries again what was interrupted or could not write."""


def is_main_process() -> bool:
    """Return whether this process, of rank 0, writes and prints; before the process group exists, by RANK."""
    group = _process_group()
    return bool(group.get_rank() == 0) if group is not None else os.environ.get("RANK", "0") == "0"


def num_processes() -> int:
    """Return the number of processes; before the process group exists, by WORLD_SIZE."""
    group = _process_group()
    return int(group.get_world_size()) if group is not None else int(os.environ.get("WORLD_SIZE", "1"))


def _process_group() -> Any:
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
