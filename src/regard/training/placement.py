"""Device, processes and random state of a training run."""

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
from torch.nn.parallel import DistributedDataParallel

from regard.errors import UserError, describe_error
from regard.hooks.split_weights import is_sharded
from regard.runs.distributed import check_launcher
from regard.runs.rank import num_processes
from regard.training.plan import TrainingConfig, adamw

Rows = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Placement:
    """A model on its device, and the processes that train it."""

    bare: nn.Module
    wrapped: nn.Module  # for several processes
    called: nn.Module  # `wrapped`, compiled if the plan says so; losses are computed with it
    optimizer: torch.optim.Optimizer
    trained: tuple[nn.Parameter, ...]
    sharded: bool  # a process holds only a part of them
    device: torch.device
    accelerator: Accelerator
    precision: str

    def share(self, rows: Rows) -> slice:
        """Return the rows of a batch that this process computes."""
        count = len(next(iter(rows.values())))
        return process_share(count, self.accelerator.process_index, self.accelerator.num_processes)

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16) if self.precision == "bfloat16" else nullcontext()

    @contextmanager
    def accumulating(self, *, last: bool) -> Iterator[None]:
        """Accumulate gradients in this process; synchronize them with the `last` micro-batch."""
        if self.sharded:
            self.bare.set_requires_gradient_sync(last)  # type: ignore[operator]  # an FSDPModule
            yield
        elif isinstance(self.wrapped, DistributedDataParallel) and not last:
            with self.wrapped.no_sync():
                yield
        else:
            yield

    def total(self, value: Tensor) -> Tensor:
        return self._reduced(value, dist.ReduceOp.SUM)

    def any(self, flags: Tensor) -> Tensor:
        """Return the flags that are set in any process, in all processes."""
        return self._reduced(flags.to(self.device, torch.int32), dist.ReduceOp.MAX).bool().cpu()

    def least_and_most(self, number: int) -> tuple[int, int]:
        """Return minimum and maximum of a number over processes, in all processes."""
        values = torch.tensor([-number, number], device=self.device)
        negated, maximum = self._reduced(values, dist.ReduceOp.MAX).tolist()
        return -negated, maximum

    def _reduced(self, value: Tensor, by: dist.ReduceOp.RedOpType) -> Tensor:
        if self.accelerator.num_processes > 1:
            dist.all_reduce(value, by)
        return value


@contextmanager
def make_accelerator(trackers: Sequence[str], device: str | None, folder: str | None) -> Iterator[Accelerator]:
    """Make an Accelerator that neither casts, accumulates nor compiles, and restore its global state afterwards.

    `folder` is where trackers write files.
    """
    if device not in (None, "cpu"):
        raise UserError(f"device: expected cpu or none for the machine's accelerator, got {device!r}")
    check_trackers(trackers, folder)
    check_launcher()
    was_initialized = bool(PartialState._shared_state)
    previous = {state: dict(state._shared_state) for state in (AcceleratorState, GradientState)}
    for state in previous:
        state._shared_state.clear()
    on_cpu = device == "cpu" or not torch.accelerator.is_available()
    try:
        accelerator = _accelerator(on_cpu, trackers, folder)
        _check_processes(accelerator)
        yield accelerator
    finally:
        AcceleratorState._reset_state(reset_partial_state=not was_initialized)
        for state, shared_state in previous.items():
            state._shared_state.clear()
            state._shared_state.update(shared_state)


def _accelerator(on_cpu: bool, trackers: Sequence[str], folder: str | None) -> Accelerator:
    try:
        with warnings.catch_warnings():  # about the number of threads it sets
            warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset", category=UserWarning)
            return Accelerator(
                cpu=on_cpu,
                mixed_precision="no",
                dynamo_backend="no",
                log_with=list(trackers) or None,
                project_dir=folder,
            )
    except ValueError as error:
        raise UserError(f"accelerate: {describe_error(error)}") from error


def check_trackers(trackers: Sequence[str], folder: str | Path | None) -> None:
    """Raise UserError unless trackers are available, and those that write files have a folder for them or beside."""
    available = [str(name) for name in get_available_trackers()]
    available += [name for name in tracking.LOGGER_TYPE_TO_CLASS if name not in LoggerType.list()]
    for name in trackers:
        if name not in available:
            allowed = f"some of {', '.join(available)}" if available else "none, for none is installed"
            raise UserError(f"trackers: expected {allowed}; got {name}")
        if folder is None and tracking.LOGGER_TYPE_TO_CLASS[name].requires_logging_directory:
            raise UserError(f"trackers: {name} writes files; expected a folder to keep them (work_dir=…), got none")


def _check_processes(accelerator: Accelerator) -> None:
    expected, available = num_processes(), accelerator.num_processes
    if available != expected:
        advice = "start them with torchrun or accelerate launch"
        raise UserError(f"processes: expected {expected} to train together, Accelerate sees {available}; {advice}")
    wants_fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if wants_fsdp and accelerator.distributed_type != DistributedType.FSDP:
        advice = "elsewhere give a model that torch.distributed.fsdp.fully_shard has sharded"
        raise UserError(f"FSDP: expected several GPUs, for which Accelerate shards a model; {advice}")
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise UserError("FSDP: expected version 2 (accelerate launch --fsdp_version 2), got version 1")


def prepare_model(
    model: nn.Module, plan: TrainingConfig, accelerator: Accelerator, times: Mapping[str, float] | None = None
) -> Placement:
    """Put a model on its device, with its optimizer (`adamw`), for all processes."""
    _check_model(model)
    processes, rows = accelerator.num_processes, plan.batch_size
    if rows < processes:
        raise UserError(f"batch_size: expected at least a row for each of {processes} processes, got {rows}")
    if (accelerator.is_fsdp2 or is_sharded(model)) and rows % processes:
        raise UserError(f"batch_size: with FSDP expected a multiple of {processes} processes, got {rows}")
    if is_sharded(model):  # by the caller
        wrapped, optimizer = model, adamw(model, plan, times)
    else:
        if not accelerator.is_fsdp2:
            model.to(accelerator.device)
        wrapped, prepared = accelerator.prepare(model, adamw(model, plan, times))
        optimizer = prepared.optimizer
    called = cast(nn.Module, torch.compile(wrapped)) if plan.compile else wrapped
    trained = tuple(parameter for parameter in model.parameters() if parameter.requires_grad)
    device, sharded = accelerator.device, is_sharded(model)
    return Placement(model, wrapped, called, optimizer, trained, sharded, device, accelerator, plan.precision)


def _check_model(model: nn.Module) -> None:
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise UserError("model: expected parameters that require gradients, got none")
    for name, parameter in trainable:
        if parameter.dtype not in (torch.float32, torch.float64):
            dtype = str(parameter.dtype).removeprefix("torch.")
            advice = "load it in float32, and set the plan's precision to bfloat16 to compute in that"
            raise UserError(f"model: expected weights in float32, {name} is {dtype}; {advice}")


def check_same_start(placed: Placement, folder: Path, step: int) -> None:
    """Check that all processes begin at the same step; otherwise all raise UserError, so that none waits."""
    minimum, maximum = placed.least_and_most(step)
    if minimum != maximum:
        steps = f"step {minimum} as the last of one and step {maximum} of another (0: none)"
        advice = "name a folder that all of them share"
        raise UserError(f"{folder}: expected every process to see the same checkpoints, got {steps}; {advice}")


def process_share(count: int, rank: int, processes: int) -> slice:
    """Return which of `count` rows a process computes."""
    bounds = np.array_split(np.arange(count), processes)[rank]
    return slice(int(bounds[0]), int(bounds[-1]) + 1)


def micro_batches(share: slice, size: int | None) -> list[slice]:
    """Split rows into micro-batches of at most `size` rows and about equal sizes."""
    count = share.stop - share.start
    chunks = np.array_split(np.arange(share.start, share.stop), -(-count // (size or count)))
    return [slice(int(chunk[0]), int(chunk[-1]) + 1) for chunk in chunks]


@contextmanager
def isolated_rng(device: torch.device) -> Iterator[None]:
    """Restore the global random state afterwards."""
    devices = [device] if device.type not in ("cpu", "mps") else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield


def seed_step(device: torch.device, seed: int, step: int, rank: int) -> None:
    """Seed the random numbers of a step on the CPU and the device, independently of earlier steps.

    `torch.manual_seed` would record a call for each unused device, which takes longer than a small step.
    """
    state = int(np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0])
    torch.default_generator.manual_seed(state)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(state)
