"""Texts as a tensor of bytes: what is kept beside a network, and told from process to process."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from regard.runs import distributed as processes
from regard.runs.rank import is_main_process


def pack(texts: Sequence[str]) -> Tensor:
    """Return the texts as bytes (uint8).

    So that what they take up is counted, and they are saved, as all that is kept.
    """
    return torch.frombuffer(bytearray(json.dumps(list(texts), ensure_ascii=False).encode()), dtype=torch.uint8)


def unpack(packed: Tensor) -> tuple[str, ...]:
    """Return the texts that `pack` was given."""
    return tuple(json.loads(packed.cpu().numpy().tobytes()))


def broadcast_from_main(texts: Sequence[str], device: torch.device) -> tuple[str, ...]:
    """Return the texts of the first process, in all of them."""
    if processes.world_size() == 1:
        return tuple(texts)
    packed = pack(texts).to(device)
    size = torch.tensor(len(packed), device=device)
    dist.broadcast(size, 0)
    if not is_main_process():
        packed = packed.new_empty(int(size))
    dist.broadcast(packed, 0)
    return unpack(packed)
