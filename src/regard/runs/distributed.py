"""Several processes that share the samples and merge their results."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import UserError, describe_error
from regard.runs.rank import num_processes

_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "a parallelism config",
}
"""What `accelerate launch` may ask for that would train the model in a way of its own, by the variable it sets."""
CHUNK_BYTES = 2**20  # bytes per value of the store, which takes at most 8 MiB


@contextmanager
def process_group() -> Iterator[None]:
    """Join the processes of `accelerate launch` or `torchrun` while the block lasts; do nothing for a single one."""
    if dist.is_initialized() or num_processes() == 1:
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    try:
        dist.init_process_group("gloo")
    except (ValueError, dist.DistError) as error:
        reason = describe_error(error)
        raise UserError(f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but the processes do not meet: {reason}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_launcher() -> None:
    """Raise UserError if `accelerate launch`, or its configuration, asks for another engine of training."""
    for variable, engine in _ENGINES.items():
        if os.environ.get(variable, "false").lower() in ("1", "true", "yes", "on"):
            advice = "choose another in accelerate config, or start the processes by torchrun"
            raise UserError(f"accelerate: expected DDP, FSDP 2 or one process, got {engine} ({variable}); {advice}")


def join_processes() -> None:
    """Join the process group of training, if there is one, before a process waits for another."""
    from accelerate import PartialState

    check_launcher()
    if num_processes() > 1 and not dist.is_initialized():
        PartialState(cpu=not torch.accelerator.is_available())


@contextmanager
def naming_lost_rank() -> Iterator[None]:
    """Name the process that failed where another one loses it, instead of the broken connection.

    Processes that are stopped by the launcher, which has seen one end, name it if the user made a mistake there. Errors
    of their own they raise as they are. Who has lost a process that was killed, and left no word, is not named for it.
    """
    if world_size() > 1:
        _take_back_word()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if world_size() == 1:
            raise
        is_stopped, is_lost = isinstance(error, KeyboardInterrupt), _is_lost_connection(error)
        word = _read_word() if is_stopped or is_lost else None
        if word is not None and (word["is_mistake"] or is_lost):
            raise UserError(f"process {word['rank']} failed: {word['message']}") from error
        if not is_stopped and not is_lost:
            is_mistake = isinstance(error, UserError)
            kind = "" if is_mistake else f"{type(error).__name__}: "
            _leave_word({"is_mistake": is_mistake, "message": f"{kind}{describe_error(error)}"})
        raise


def _is_lost_connection(error: BaseException) -> bool:
    """Return whether an error is of the connection to other processes; Gloo's have a type of their own nowhere."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _take_back_word() -> None:
    """Delete what an earlier run of these processes has left."""
    with suppress(RuntimeError):
        _store().delete_key(_word_key(dist.get_rank()))


def _leave_word(word: dict[str, Any]) -> None:
    """Tell the other processes what has ended this one, unless their store is gone."""
    with suppress(RuntimeError):
        _store().set(_word_key(dist.get_rank()), json.dumps({"rank": dist.get_rank(), **word}))


def _read_word() -> dict[str, Any] | None:
    """Return what another process has left; None if none has, or the store is gone with it."""
    with suppress(RuntimeError):
        store = _store()
        for key in (_word_key(rank) for rank in range(world_size()) if rank != dist.get_rank()):
            if store.check([key]):
                return dict(json.loads(store.get(key)))
    return None


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _word_key(rank: int) -> str:
    return f"regard/failed/{rank}"


def world_size() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def local_shard(samples: Tensor) -> Tensor:
    """Return the samples of this process: every n-th of all."""
    return samples[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else samples


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Fail in every process if the block fails in one, so that none waits for another. All must reach its end.

    Processes in which nothing failed raise the UserError of the first that did.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if world_size() > 1:
        message = None if error is None else str(error)
        if error is not None and not isinstance(error, UserError):
            message = f"another process failed with {type(error).__name__}: {describe_error(error)}"
        messages = [json.loads(raw) for raw in all_gather_bytes(json.dumps(message).encode())]
        first_message = next((message for message in messages if message is not None), None)
        if error is None and first_message is not None:
            raise UserError(first_message)
    if error is not None:
        raise error


def all_gather_bytes(raw: bytes) -> list[bytes]:
    """Return the bytes of every process by rank.

    They go through the key–value store of the group in chunks. Collectives would do, but Gloo's threads may release
    their tensors only while Python shuts down, which aborts the process.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), range(world_size())
    call = f"regard/{store.add(f'regard/calls/{rank}', 1)}"
    for start in range(0, len(raw), CHUNK_BYTES):
        store.set(f"{call}/{rank}/{start}", raw[start : start + CHUNK_BYTES])
    store.set(f"{call}/{rank}/size", str(len(raw)))
    gathered, keys = [], []
    for sender in ranks:
        size = int(store.get(f"{call}/{sender}/size"))
        chunks = [f"{call}/{sender}/{start}" for start in range(0, size, CHUNK_BYTES)]
        gathered.append(b"".join(map(store.get, chunks)))
        keys += [*chunks, f"{call}/{sender}/size", f"{call}/{sender}/read"]
    store.set(f"{call}/{rank}/read", "yes")
    if rank == 0:  # which keeps the store, and may not leave before the others have read
        store.wait([f"{call}/{sender}/read" for sender in ranks])
        for key in keys:
            store.delete_key(key)
    return gathered
