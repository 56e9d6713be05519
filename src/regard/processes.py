"""Several processes that share the samples, and merge what each has seen."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import UserError
from regard.statistics import Statistic


@contextmanager
def joined() -> Iterator[None]:
    """While it lasts this process is one of those that `accelerate launch` or `torchrun` started, if any did."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group("gloo")  # what is merged lies in main memory
    except (ValueError, dist.DistError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the processes do not meet: {reason}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def count() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def first() -> bool:
    """Whether this is the process that writes and prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def mine(samples: Tensor) -> Tensor:
    """The share of this process of the samples: every n-th."""
    return samples[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else samples


@contextmanager
def together() -> Iterator[None]:
    """A block that fails in every process where it fails in one, so that none waits for another in vain.

    A process raises what went wrong in it; one in which nothing did raises UserError with the first mistake of the
    others. Every process must come to the end of the block.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if count() > 1:
        told = [json.loads(raw) for raw in _gathered(json.dumps(_told(error)).encode())]
        others = [line for line in told if line is not None]
        if error is None and others:
            raise UserError(others[0])
    if error is not None:
        raise error


def _told(error: Exception | None) -> str | None:
    """What the other processes hear of an error."""
    if error is None or isinstance(error, UserError):
        return None if error is None else str(error)
    return f"another process failed with {type(error).__name__}: {' '.join(str(error).split())}"


def merge(statistics: Iterable[Statistic]) -> None:
    """Give every process what all have seen."""
    if count() == 1:
        return
    for statistic in statistics:
        states = [safetensors.torch.load(raw) for raw in _gathered(_bytes(statistic.state()))]
        other = copy.deepcopy(statistic)
        statistic.load(states[0])
        for state in states[1:]:
            other.load(state)
            statistic.merge(other)


def _bytes(state: dict[str, Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in state.items()})


def _gathered(raw: bytes) -> list[bytes]:
    """The bytes of every process, in their order."""
    device = torch.device("cuda") if dist.get_backend() == "nccl" else torch.device("cpu")
    mine = torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device)
    sizes = [torch.zeros(1, dtype=torch.long, device=device) for _ in range(count())]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
    everyone = [torch.empty_like(padded) for _ in range(count())]
    dist.all_gather(everyone, padded)
    return [bytes(part[: int(size)].cpu().numpy()) for part, size in zip(everyone, sizes, strict=True)]
