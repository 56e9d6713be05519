"""Several processes that share the samples, and merge what each has seen."""

from __future__ import annotations

import os
from collections.abc import Iterable

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from regard.statistics import Statistic


def start() -> None:
    """Join the processes that `accelerate launch` or `torchrun` started, if any did."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        from accelerate import PartialState

        PartialState(cpu=not torch.cuda.is_available())


def finish() -> None:
    """Leave them."""
    if dist.is_initialized():
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


def merge(statistics: Iterable[Statistic]) -> None:
    """Give every process what all have seen."""
    if count() == 1:
        return
    for statistic in statistics:
        states = [safetensors.torch.load(raw) for raw in _gathered(_bytes(statistic.state()))]
        other = type(statistic).__new__(type(statistic))
        other.__dict__.update(statistic.__dict__)
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
