"""Where a model is trained: its device, its share among several processes, and what the random numbers start from."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator, tracking
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.tracking import get_available_trackers
from accelerate.utils import DistributedType, LoggerType
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from regard.errors import UserError
from regard.training.plan import TrainingConfig
from regard.training.schedule import adamw

Rows = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Placement:
    """A model on its device, among the processes that train it.

    `bare`: the module as it was given, on its device; `wrapped`: for several processes, where there are several;
    `called`: that compiled, where the plan says so, which is what a loss is computed with. `trained`: the parameters
    that require gradients; `sharded`: whether each process holds only a part of them.
    """

    bare: nn.Module
    wrapped: nn.Module
    called: nn.Module
    optimizer: torch.optim.Optimizer
    trained: tuple[nn.Parameter, ...]
    sharded: bool
    device: torch.device
    processes: int
    rank: int
    precision: str

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and reports."""
        return self.rank == 0

    def share(self, rows: Rows) -> slice:
        """The rows of a batch that are this process's: as many as the others', or one more."""
        count = len(next(iter(rows.values())))
        bounds = torch.arange(count).tensor_split(self.processes)[self.rank]
        return slice(int(bounds[0]), int(bounds[-1]) + 1)

    def autocast(self) -> AbstractContextManager[object]:
        """While it lasts the model computes in bfloat16 if that is the plan's precision."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bfloat16" else nullcontext()

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """While it lasts gradients are added up here alone; of the `last` micro-batch they go to every process."""
        if self.sharded:
            self.bare.set_requires_gradient_sync(last)  # type: ignore[operator]  # an FSDPModule
            yield
        elif isinstance(self.wrapped, DistributedDataParallel) and not last:
            with self.wrapped.no_sync():
                yield
        else:
            yield

    def total(self, value: Tensor) -> Tensor:
        """The sum over the processes."""
        return self._reduced(value, dist.ReduceOp.SUM)

    def any(self, flags: Tensor) -> Tensor:
        """Which flags are set in any process; it is told to all."""
        return self._reduced(flags.to(self.device, torch.int32), dist.ReduceOp.MAX).bool().cpu()

    def least_and_most(self, number: int) -> tuple[int, int]:
        """The least and the most of what each process has as that number; it is told to all."""
        both = torch.tensor([-number, number], device=self.device)
        least, most = self._reduced(both, dist.ReduceOp.MAX).tolist()
        return -least, most

    def _reduced(self, value: Tensor, by: dist.ReduceOp.RedOpType) -> Tensor:
        if self.processes > 1:
            dist.all_reduce(value, by)
        return value


def _sharded(model: nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


# -- placing --------------------------------------------------------------------------------------------


@contextmanager
def make_accelerator(plan: TrainingConfig, device: str | None, folder: str | None) -> Iterator[Accelerator]:
    """An Accelerator; what it keeps for the whole process is as it was before when the block ends.

    Precision and accumulation are not left to it, so that it can be the same for every plan, whatever a Trainer before
    has asked for.
    """
    if device not in (None, "cpu"):
        raise UserError(f"device: expected cpu or none for the machine's accelerator, got {device!r}")
    _check_trackers(plan.trackers, folder)
    known = bool(PartialState._shared_state)
    before = {state: dict(state._shared_state) for state in (AcceleratorState, GradientState)}
    for state in before:
        state._shared_state.clear()
    on_cpu = device == "cpu" or not torch.accelerator.is_available()
    try:
        accelerator = _accelerator(on_cpu, plan.trackers, folder)
        _check_processes(accelerator)
        yield accelerator
    finally:
        AcceleratorState._reset_state(reset_partial_state=not known)
        for state, kept in before.items():
            state._shared_state.clear()
            state._shared_state.update(kept)


def _accelerator(on_cpu: bool, trackers: Sequence[str], folder: str | None) -> Accelerator:
    try:
        with warnings.catch_warnings():  # of the number of threads that it sets
            warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset", category=UserWarning)
            return Accelerator(cpu=on_cpu, mixed_precision="no", log_with=list(trackers) or None, project_dir=folder)
    except ValueError as error:
        raise UserError(f"accelerate: {' '.join(str(error).split())}") from error


def _check_trackers(trackers: Sequence[str], folder: str | None) -> None:
    """Nothing, or a UserError: a tracker is not known to Accelerate, its package is not there, or it needs a folder."""
    known = [str(name) for name in get_available_trackers()]
    known += [name for name in tracking.LOGGER_TYPE_TO_CLASS if name not in LoggerType.list()]
    for name in trackers:
        if name not in known:
            raise UserError(f"trackers: expected some of {', '.join(known) or 'none (none is installed)'}, got {name}")
        if folder is None and tracking.LOGGER_TYPE_TO_CLASS[name].requires_logging_directory:
            raise UserError(f"trackers: {name} writes to the run's folder; expected a folder, got none")


def _check_processes(accelerator: Accelerator) -> None:
    """Nothing, or a UserError: the processes would not train together."""
    started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise UserError(
            f"processes: expected {started} to train together, Accelerate sees {accelerator.num_processes}; "
            "start them with torchrun or accelerate launch"
        )
    asked = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if asked and accelerator.distributed_type != DistributedType.FSDP:
        raise UserError(
            "FSDP: expected several GPUs, for which Accelerate shards a model; elsewhere give a model that "
            "torch.distributed.fsdp.fully_shard has sharded"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("FSDP: expected version 2 (accelerate launch --fsdp_version 2), got version 1")


def prepare_model(
    model: nn.Module, plan: TrainingConfig, accelerator: Accelerator, times: Mapping[str, float] | None = None
) -> Placement:
    """The model on its device with its optimiser (`adamw`), for the processes that there are."""
    _check_model(model)
    _check_shares(plan, accelerator.num_processes, equal=accelerator.is_fsdp2 or _sharded(model))
    if _sharded(model):  # as it was given
        wrapped, optimizer = model, adamw(model, plan, times)
    else:
        if not accelerator.is_fsdp2:
            model.to(accelerator.device)
        wrapped, prepared = accelerator.prepare(model, adamw(model, plan, times))
        optimizer = prepared.optimizer
    return Placement(
        bare=model,
        wrapped=wrapped,
        called=cast(nn.Module, torch.compile(wrapped)) if plan.compile else wrapped,
        optimizer=optimizer,
        trained=tuple(one for one in model.parameters() if one.requires_grad),
        sharded=_sharded(model),
        device=accelerator.device,
        processes=accelerator.num_processes,
        rank=accelerator.process_index,
        precision=plan.precision,
    )


def _check_model(model: nn.Module) -> None:
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    if not trained:
        raise UserError("model: expected parameters that require gradients, got none")
    for name, parameter in trained:
        if parameter.dtype not in (torch.float32, torch.float64):
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise UserError(
                f"model: expected weights in float32, {name} is {dtype}; load it in float32, and set the plan's "
                "precision to bfloat16 to compute in that"
            )


def _check_shares(plan: TrainingConfig, processes: int, *, equal: bool) -> None:
    if plan.batch_size < processes:
        raise UserError(f"batch_size: expected at least a row for each of {processes} processes, got {plan.batch_size}")
    if equal and plan.batch_size % processes:
        raise UserError(f"batch_size: with FSDP expected a multiple of {processes} processes, got {plan.batch_size}")


# -- rows -----------------------------------------------------------------------------------------------


def check_same_start(placed: Placement, folder: Path, step: int, refused: UserError | None) -> None:
    """Nothing, if every process begins at this step; else a UserError in each, so that none waits for another."""
    least, most = placed.least_and_most(-1 if refused else step)
    if refused or least < 0:
        raise refused or UserError(f"{folder}: another process cannot start from what it sees there")
    if least != most:
        raise UserError(
            f"{folder}: expected every process to see the same checkpoints, got step {least} as the last of one and "
            f"step {most} of another (0: none); name a folder that all of them share"
        )


def slice_batch(rows: Rows, part: slice) -> Rows:
    """Those rows of a batch."""
    return {name: value[part] for name, value in rows.items()}


def micro_batches(share: slice, size: int | None) -> list[slice]:
    """The share in pieces of at most `size` rows, as equal as can be."""
    count = share.stop - share.start
    pieces = torch.arange(share.start, share.stop).tensor_split(-(-count // (size or count)))
    return [slice(int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


def to_device(device: torch.device, rows: Mapping[str, Tensor]) -> Rows:
    """The rows on the device."""
    return {name: value.to(device, non_blocking=True) for name, value in rows.items()}


# -- random numbers -------------------------------------------------------------------------------------


@contextmanager
def isolated_rng(device: torch.device) -> Iterator[None]:
    """While it lasts random numbers may be seeded; afterwards they go on where they were."""
    others = [device] if device.type not in ("cpu", "mps") else []
    with torch.random.fork_rng(others, device_type=device.type if others else "cuda"):
        yield


def seed_step(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Start the random numbers of a step, which are thus those of the step whatever was drawn before it.

    Those of the CPU and of the device: `torch.manual_seed` would note a call, with its stack, for each device that is
    not in use, which is slower than a small step is.
    """
    state = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(state)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(state)
