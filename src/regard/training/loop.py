"""Training loop of pretraining and continual learning, on one device or several processes, resumable."""

import contextlib
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regard.attention.gradients import enable_gradients
from regard.errors import UserError
from regard.models.loss import check_loss
from regard.models.model_files import restore_modes
from regard.runs.distributed import raise_on_all_ranks
from regard.runs.journal import Journal
from regard.runs.signals import INTERRUPTING
from regard.runs.snapshots import Snapshots
from regard.training import checkpoint, placement
from regard.training.batches import Batch, BatchLoader
from regard.training.placement import Placement, Rows, seed_step
from regard.training.plan import TrainingConfig, learning_rate, set_rate
from regard.training.trackers import run_trackers

Row = dict[str, float]
OnProgress = Callable[[int, int, Mapping[str, float]], None]
TransformGradients = Callable[[nn.Module, int], None]
ITEMS = "items"
_STATE_FIELDS = ("step", "items", "seconds", "history", "numbers")
RECENT = 20  # number of steps over which speed is averaged


class Monitor(Protocol):
    """Measures a model between steps, where it is due, and returns metrics for the row of the step in the history."""

    def due(self, step: int, last: bool) -> bool: ...

    def __call__(self, model: nn.Module, step: int) -> Mapping[str, float]: ...


@dataclass(frozen=True)
class TrainResult:
    """Result of a run: rows of metrics, seconds spent in steps, and number of steps."""

    history: list[Row]
    seconds: float
    steps: int


@dataclass(frozen=True, eq=False)
class _Run:
    """Constants of a run."""

    plan: TrainingConfig
    placed: Placement
    batches: BatchLoader
    loss: Callable[[nn.Module, Rows], Tensor]
    count: Callable[[Rows], int]
    snapshots: Snapshots | None
    journal: Journal | None
    watchers: Sequence[Monitor]
    on_progress: OnProgress | None
    correct: TransformGradients | None
    unit: str


@dataclass(eq=False)
class _Progress:
    """State of a run besides its weights; `items` counts losses, `recent` has count and seconds of recent steps."""

    step: int = 0
    items: int = 0
    seconds: float = 0.0
    history: list[Row] = field(default_factory=list)
    numbers: Row = field(default_factory=dict)
    saved: int = 0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def items_per_second(self) -> float:
        """Speed of recent steps, without time between them."""
        items, seconds = (sum(column) for column in zip(*self.recent, strict=True)) if self.recent else (0, 0.0)
        return items / seconds if seconds else 0.0


def train(
    model: nn.Module,
    plan: TrainingConfig,
    *,
    batch: Callable[[int], Rows],
    loss: Callable[[nn.Module, Rows], Tensor],
    count: Callable[[Rows], int],
    folder: str | Path | None = None,
    log_dir: str | Path | None = None,
    resume: bool = False,
    journal: Journal | None = None,
    watchers: Sequence[Monitor] = (),
    on_progress: OnProgress | None = None,
    correct: TransformGradients | None = None,
    times: Mapping[str, float] | None = None,
    trim: Callable[[Rows], Rows] | None = None,
    device: str | None = None,
    unit: str = ITEMS,
) -> TrainResult:
    """Train a model in place, in training mode; afterwards its modules have the modes that they had.

    The gradient of a step is Σ loss / Σ count over the batch, however it is split; only dropout depends on the split.
    On one CPU process, a run that was killed and resumed is bit for bit the run that was not.

    Args:
        model: The model.
        plan: The configuration.
        batch: Returns the `plan.batch_size` rows of a step, counted from 0. It must depend on the step alone: on a GPU
            it is called for the next step while the GPU computes this one, behind `correct`.
        loss: Returns the sum of the losses of some rows.
        count: Returns the number of losses of some rows.
        folder: Folder of checkpoints that all processes see, or None.
        log_dir: Folder of the trackers that write files.
        resume: Continue from the last checkpoint, if there is one.
        journal: Journal of the monitors; a checkpoint keeps its head, and a resumed run checks it.
        watchers: Monitors, called in evaluation mode in all processes before the first step (0) and after steps.
        on_progress: Called in the main process after each step with step, all steps and metrics, also `seconds_left`.
        correct: Changes the gradient of the batch in place before clipping, in all processes alike.
        times: Multipliers of the learning rates of parameters, by name.
        trim: Returns the rows of a micro-batch without what is padding in all of them, before they go to the device.
        device: "cpu", or None for the machine's accelerator.
        unit: Name of what `count` counts, in the history, in trackers and of the speed.

    Returns:
        Result with a history: a row every `plan.logging_steps` steps, after the last, and if a monitor was due, of
        `step`, `items` (losses), `loss` (before the update), `learning_rate`, `gradient_norm` (before clipping),
        `items_per_second`, `seconds` (in steps), and metrics of monitors.
    """
    snapshots = None if folder is None else Snapshots(Path(folder), keep=plan.save_total_limit)
    with placement.make_accelerator(
        plan.trackers, device, folder=None if log_dir is None else str(log_dir)
    ) as accelerator:
        placed = placement.prepare_model(model, plan, accelerator, times)
        batches = BatchLoader(batch, placed, plan, trim)
        run = _Run(plan, placed, batches, loss, count, snapshots, journal, watchers, on_progress, correct, unit)
        progress = _restore_progress(run, resume)
        with (
            placement.isolated_rng(placed.device),
            run_trackers(accelerator, vars(plan)),
            restore_modes(model),
            enable_gradients(),
        ):
            _take_steps(run, progress)
    return TrainResult([_named(row, unit) for row in progress.history], progress.seconds, progress.step)


def _take_steps(run: _Run, progress: _Progress) -> None:
    """Take the remaining steps: an update, its row, and a checkpoint."""
    run.placed.called.train()
    run.placed.optimizer.zero_grad(set_to_none=True)
    try:
        _record_row(run, progress)
        while progress.step < run.plan.max_steps:
            _take_step(run, progress)
            _report(run, progress)
            _record_row(run, progress)
            if progress.step % (run.plan.save_steps or run.plan.max_steps) == 0 or progress.step == run.plan.max_steps:
                _save(run, progress)
    except KeyboardInterrupt:
        # Processes are interrupted at different steps, so sharded weights cannot be gathered.
        if progress.step > progress.saved and run.placed.accelerator.is_main_process and not run.placed.sharded:
            _save(run, progress, alone=True)
        raise


def _take_step(run: _Run, progress: _Progress) -> None:
    """Take one step: micro-batches → loss and gradient → clipping → AdamW."""
    started, placed = time.perf_counter(), run.placed
    batch = run.batches.at(progress.step)
    count = _count_losses(run, batch.rows, progress.step)
    rate = learning_rate(run.plan, progress.step + 1)
    set_rate(placed.optimizer, rate)
    summed = _add_gradients(run, batch, count, progress.step)
    if run.correct is not None:
        run.correct(placed.bare, progress.step)
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in placed.trained if parameter.grad is not None])
    if progress.step + 1 < run.plan.max_steps:
        run.batches.prepare(progress.step + 1)  # before the first read of a result, which waits for the device
    mean = float(placed.total(summed)) / count
    gradient_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not bool(torch.tensor([mean, gradient_norm]).isfinite().all()):
        raise _non_finite_error(run, batch.rows, progress.step, mean, gradient_norm)
    with _delay_interrupts():
        if run.plan.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(placed.trained, run.plan.max_grad_norm, norm)
        placed.optimizer.step()
        placed.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        progress.recent.append((count, seconds))
        progress.step, progress.items = progress.step + 1, progress.items + count
        progress.seconds += seconds
        progress.numbers = {"loss": mean, "learning_rate": rate, "gradient_norm": gradient_norm}


def _non_finite_error(run: _Run, rows: Rows, step: int, mean: float, norm: float) -> UserError:
    """Return the error of a mean loss or gradient norm that is not finite, which names the rows at fault."""
    last = "there is no saved state" if run.snapshots is None else run.snapshots.describe_latest()
    if torch.tensor(mean).isfinite():
        state = f"its norm is {norm} at step {step} (loss {mean:g})"
        return UserError(f"gradient: expected finite numbers, {state}; {last}")
    rows_at_fault = _rows_without_finite_loss(run, rows, step)
    description = "; ".join(_describe_row(rows, row) for row in rows_at_fault[:3]) or "no single row alone"
    description += f" and {len(rows_at_fault) - 3} more" if len(rows_at_fault) > 3 else ""
    state = f"got {mean} at step {step}; rows of its batch: {description}"
    return UserError(f"loss: expected a finite number, {state}; {last}")


def _rows_without_finite_loss(run: _Run, rows: Rows, step: int) -> list[int]:
    """Return the rows of the batch whose loss alone is not finite; each process checks its own."""
    placed = run.placed
    flags = torch.zeros(len(next(iter(rows.values()))), dtype=torch.bool)
    share = placed.share(rows)
    seed_step(placed.device, run.plan.seed, step, placed.accelerator.process_index)
    with torch.no_grad(), placed.autocast():
        for row in range(share.start, share.stop):
            value = run.loss(placed.bare, run.batches.row(rows, row))
            flags[row] = not bool(value.isfinite())
    return placed.any(flags).nonzero().flatten().tolist()


def _describe_row(rows: Rows, row: int) -> str:
    if "input_ids" not in rows:
        return str(row)
    tokens = rows["input_ids"][row].flatten().tolist()
    return f"{row} (tokens {' '.join(map(str, tokens[:8]))}{' …' if len(tokens) > 8 else ''})"


def _count_losses(run: _Run, rows: Rows, step: int) -> int:
    count = run.count(rows)
    if count < 1:
        raise UserError(f"batch of step {step}: expected at least one loss, got {count}")
    return count


def _add_gradients(run: _Run, batch: Batch, count: int, step: int) -> Tensor:
    """Accumulate the gradients of Σ loss / count, and return the sum of this process's losses."""
    placed = run.placed
    summed = torch.zeros((), device=placed.device)
    seed_step(placed.device, run.plan.seed, step, placed.accelerator.process_index)
    for number, piece in enumerate(batch.pieces, start=1):
        with placed.accumulating(last=number == len(batch.pieces)):
            with placed.autocast():
                check_loss(value := run.loss(placed.called, piece))
            (value * (placed.accelerator.num_processes / count)).backward()  # processes average gradients
        summed = summed + value.detach()
    return summed


@contextlib.contextmanager
def _delay_interrupts() -> Iterator[None]:
    """Delay Ctrl-C, and what the command line lets interrupt as it does, so that no step is left incomplete."""
    handlers = {number: handler for number in INTERRUPTING if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals, is_within = list[int](), True

    def collect(number: int, frame: Any) -> None:
        if is_within:
            signals.append(number)
        else:  # one came while the others' handlers were put back, and this one was left
            handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, collect)
    try:
        yield
    finally:
        is_within = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for number in dict.fromkeys(signals):  # the first that interrupts is the last
        signal.raise_signal(number)


def _record_row(run: _Run, progress: _Progress) -> None:
    """Add the row of this step if one is due, unless a resumed run has it."""
    last = progress.step == run.plan.max_steps
    due = [watcher for watcher in run.watchers if watcher.due(progress.step, last)]
    logged = progress.step > 0 and (last or progress.step % run.plan.logging_steps == 0)
    is_recorded = bool(progress.history) and progress.history[-1]["step"] == progress.step
    if is_recorded or not (due or logged):
        return
    row: Row = {"step": progress.step, ITEMS: progress.items, **progress.numbers, "seconds": progress.seconds}
    if progress.recent:
        row[f"{ITEMS}_per_second"] = progress.items_per_second
    for watcher in due:
        row |= _run_monitor(run, watcher, progress.step)
    progress.history.append(row)
    run.placed.accelerator.log(_named(row, run.unit), step=progress.step)


def _named(row: Row, unit: str) -> Row:
    """Return a row with its items called by their name; checkpoints have the same names whatever is counted."""
    return {unit + name.removeprefix(ITEMS) if name.startswith(ITEMS) else name: value for name, value in row.items()}


def _run_monitor(run: _Run, watcher: Monitor, step: int) -> dict[str, float]:
    """Run a monitor in evaluation mode, with random numbers that depend on the step alone."""
    seed_step(run.placed.device, run.plan.seed, step, 0)
    run.placed.bare.eval()
    try:
        with torch.no_grad():
            return {name: float(value) for name, value in watcher(run.placed.bare, step).items()}
    finally:
        run.placed.called.train()


def _report(run: _Run, progress: _Progress) -> None:
    if run.on_progress is not None and run.placed.accelerator.is_main_process:
        seconds = sum(seconds for _, seconds in progress.recent)
        left = (run.plan.max_steps - progress.step) * seconds / max(len(progress.recent), 1)
        speed = {f"{run.unit}_per_second": progress.items_per_second, "seconds_left": left}
        run.on_progress(progress.step, run.plan.max_steps, {**progress.numbers, **speed})


def _save(run: _Run, progress: _Progress, *, alone: bool = False) -> None:
    """Write a checkpoint from the main process; if that fails all processes stop, unless it is `alone`."""
    if run.snapshots is None:
        return
    placed = run.placed
    weights = checkpoint.gather(placed.bare, placed.optimizer, keep=placed.accelerator.is_main_process)
    with contextlib.nullcontext() if alone else raise_on_all_ranks():
        if placed.accelerator.is_main_process:
            state = {name: getattr(progress, name) for name in _STATE_FIELDS}
            state |= {"plan": run.plan.to_dict(), "processes": placed.accelerator.num_processes}
            if run.journal is not None:
                state["journal"] = run.journal.head
            with _delay_interrupts():
                checkpoint.save(run.snapshots, weights, state)
                progress.saved = progress.step


def _restore_progress(run: _Run, resume: bool) -> _Progress:
    if run.snapshots is None:
        return _Progress()
    with raise_on_all_ranks():
        latest = _read_checkpoint(run, run.snapshots, resume)
    placement.check_same_start(run.placed, run.snapshots.folder, 0 if latest is None else latest[1]["step"])
    if latest is None:
        return _Progress()
    path, state = latest
    checkpoint.restore(path, run.placed.bare, run.placed.optimizer)
    return _Progress(**{name: state[name] for name in _STATE_FIELDS}, saved=state["step"])


def _read_checkpoint(run: _Run, snapshots: Snapshots, resume: bool) -> tuple[Path, dict[str, Any]] | None:
    """Return the last good checkpoint of a run to resume, as this process sees the folder."""
    paths = snapshots.paths()
    if paths and not resume:
        advice = "resume, or name another folder"
        raise UserError(f"{snapshots.folder}: expected no checkpoints, got {paths[-1].name}; {advice}")
    if run.placed.accelerator.is_main_process:
        snapshots.clear_unfinished()
    read = snapshots.latest()
    if read is not None:
        run.plan.check_resumes(read[1]["plan"], read[1]["step"])
        if run.journal is not None:
            run.journal.check_contains(read[1]["journal"])
    return read
