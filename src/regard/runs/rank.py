"""Rank and number of processes, and whether a launcher started this one, without importing torch."""

import os
import sys
from typing import Any

from regard.errors import UserError

IN_JOB = "REGARD_JOB"
"""Environment variable of the processes of a launcher, which tries again what was interrupted or could not write."""


def is_main_process() -> bool:
    """Return whether this process, of rank 0, writes and prints; before the process group exists, by RANK.

    A process that is alone does, whatever RANK is: of launchers or not, as a variable of a script.
    """
    group = _process_group()
    if group is not None:
        return bool(group.get_rank() == 0)
    return _variable("WORLD_SIZE", "1") == "1" or _variable("RANK", "0") == "0"


def num_processes() -> int:
    """Return the number of processes; before the process group exists, by WORLD_SIZE.

    Raises UserError where that is no number of processes.
    """
    group = _process_group()
    if group is not None:
        return int(group.get_world_size())
    size = _variable("WORLD_SIZE", "1")
    if not size.isdecimal() or int(size) < 1:
        expected = "expected the number of processes, at least 1, which torchrun and accelerate launch set"
        raise UserError(f"environment variable WORLD_SIZE: {expected}, got {size!r}")
    return int(size)


def _variable(name: str, default: str) -> str:
    """Return a variable of the environment without blanks around it, which PyTorch reads as numbers, too."""
    return os.environ.get(name, default).strip()


def _process_group() -> Any:
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None
