"""Metadata of runs: configuration, versions, model, and cost."""

from __future__ import annotations

import datetime
import hashlib
import platform
import sys
from typing import TYPE_CHECKING, Any

from regard.runs.integrity import tensor_bytes
from regard.runs.posix import resource
from regard.runs.rank import num_processes
from regard.runs.version import VERSION

if TYPE_CHECKING:
    import torch

    from regard.runs.config import Config

SCHEMA_VERSION = 1
"""The version of what a run leaves: its files, the columns of its tables, the keys of its metadata."""


def describe_run(config: Config, **sections: Any) -> dict[str, Any]:
    """Return the metadata of a run with this configuration, and the sections that its command adds."""
    return describe_output(config.command, config=config.to_dict(), **sections)


def describe_output(command: str, **sections: Any) -> dict[str, Any]:
    """Return the metadata of what a command wrote: when, by which versions, and the sections that it adds."""
    return {
        "command": command,
        "schema_version": SCHEMA_VERSION,
        "version": VERSION,
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        **sections,
        "versions": library_versions(),
    }


def describe_model(model: Any, name: str, sha256: str | None, adapter: str | None = None) -> dict[str, Any]:
    """Return the metadata of a model of Hugging Face, loaded by a name; `sha256` is that of its weight files."""
    config = model.config
    return {
        "name": name,
        **({} if adapter is None else {"adapter": adapter}),
        "class": type(model).__name__,
        "type": config.model_type,
        "sha256": sha256,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": getattr(config, "num_hidden_layers", None),
        "heads": getattr(config, "num_attention_heads", None),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
    }


def describe_cost(device: torch.device, seconds: float, *, tokens: int | None = None) -> dict[str, Any]:
    """Return what a run cost, with its speed if `tokens` went through the model."""
    speed = {} if tokens is None else {"tokens_per_second": round(tokens / seconds, 1) if seconds else None}
    return {
        "seconds": round(seconds, 3),
        **speed,
        "peak_memory_mib": round(peak_memory(device), 1),
        "device": str(device),
        "processes": num_processes(),
    }


def library_versions() -> dict[str, str]:
    """Return the versions of Python, PyTorch, Transformers, and the platform."""
    import torch
    import transformers

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": platform.platform(),
    }


def reset_peak(device: torch.device) -> None:
    """Reset `peak_memory` of a GPU; that of a process cannot be reset."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> float:
    """Return the largest memory in MiB: of the GPU since `reset_peak`, else of this process since it began."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def sha256_of_weights(model: Any) -> str:
    """Return the SHA-256 over a model's weights and their names, for a model without files."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()
