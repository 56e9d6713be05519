"""Several processes that share the samples, and merge what each has seen."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import UserError

PIECE = 2**20
"""Bytes that the store is given at a time; it takes no more than 8 MiB."""


@contextmanager
def process_group() -> Iterator[None]:
    """While it lasts this process is one of those that `accelerate launch` or `torchrun` started, if any did."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group("gloo")
    except (ValueError, dist.DistError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the processes do not meet: {reason}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_shard(samples: Tensor) -> Tensor:
    """The share of this process of the samples: every n-th."""
    return samples[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else samples


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """A block that fails in every process where it fails in one, so that none waits for another in vain.

    A process raises what went wrong in it; one in which nothing did raises UserError with the first mistake of the
    others. Every process must come to the end of the block.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if world_size() > 1:
        told = [json.loads(raw) for raw in all_gather_bytes(json.dumps(_told(error)).encode())]
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


def all_gather_bytes(raw: bytes) -> list[bytes]:
    """The bytes of every process, in their order.

    They go through the key–value store by which the processes met, in pieces that it takes. Collectives would do, but
    Gloo's threads may let go of their tensors only while Python shuts down, which ends the process with an abort.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    me, everyone = dist.get_rank(), range(world_size())
    call = f"regard/{store.add(f'regard/calls/{me}', 1)}"
    for start in range(0, len(raw), PIECE):
        store.set(f"{call}/{me}/{start}", raw[start : start + PIECE])
    store.set(f"{call}/{me}/size", str(len(raw)))
    found, keys = [], []
    for rank in everyone:
        size = int(store.get(f"{call}/{rank}/size"))
        pieces = [f"{call}/{rank}/{start}" for start in range(0, size, PIECE)]
        found.append(b"".join(map(store.get, pieces)))
        keys += [*pieces, f"{call}/{rank}/size", f"{call}/{rank}/read"]
    store.set(f"{call}/{me}/read", "yes")
    if me == 0:  # which keeps the store: it may not go before the others have read
        store.wait([f"{call}/{rank}/read" for rank in everyone])
        for key in keys:
            store.delete_key(key)
    return found
