"""Where numbers come from: the versions they were made with, when, and what they cost in memory."""

from __future__ import annotations

import datetime
import hashlib
import platform
import resource
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def regard_version() -> str:
    """Return the version of the installed package."""
    return metadata.version("regard")


def versions() -> dict[str, str]:
    """The versions of what took part."""
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
    }


def now() -> str:
    """The time, in UTC, to the second."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def reset_peak(device: torch.device) -> None:
    """Count `peak_memory` of a GPU anew from here on; that of a process goes on."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float:
    """MiB at the most: on the GPU since `reset_peak`, or of this process since it began where it runs on none."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def sha256_of_weights(model: Any) -> str:
    """The sha256 over the weights as they are, by name, for a model that no file tells of."""
    import torch

    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
