"""The training loop: for pre-training and for continual learning, on one device or many, resumed where it stopped."""

from __future__ import annotations

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
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regard.errors import UserError
from regard.runs.journal import Journal
from regard.runs.snapshots import Snapshots
from regard.training import checkpoint
from regard.training.placement import (
    Placement,
    Rows,
    check_same_start,
    isolated_rng,
    make_accelerator,
    micro_batches,
    prepare_model,
    seed_step,
    slice_batch,
    to_device,
)
from regard.training.plan import TrainingConfig
from regard.training.schedule import learning_rate, set_rate

Row = dict[str, float]
OnProgress = Callable[[int, int, Mapping[str, float]], None]
TransformGradients = Callable[[nn.Module, int], None]
_KEPT = ("step", "items", "seconds", "history", "numbers")
RECENT = 20
"""Steps over which the present speed is taken."""


class Monitor(Protocol):
    """Looks at the model between steps."""

    def due(self, step: int, last: bool) -> bool:
        """Whether it looks after this many steps; `last`: there are no more."""

    def __call__(self, model: nn.Module, step: int) -> Mapping[str, float]:
        """The numbers found: for the row of this step in the history."""


@dataclass(frozen=True)
class TrainResult:
    """What a run has become: a row of numbers every so many steps, seconds spent in steps, and how many there were."""

    history: list[Row]
    seconds: float
    steps: int


@dataclass(frozen=True, eq=False)
class _Run:
    """What stays as it is while a model is trained."""

    plan: TrainingConfig
    placed: Placement
    batch: Callable[[int], Rows]
    loss: Callable[[nn.Module, Rows], Tensor]
    count: Callable[[Rows], int]
    snapshots: Snapshots | None
    journal: Journal | None
    watchers: Sequence[Monitor]
    on_progress: OnProgress | None
    correct: TransformGradients | None
    accelerator: Accelerator


@dataclass(eq=False)
class _Progress:
    """All that a run knows besides its weights: steps finished, losses counted in them, seconds, rows.

    `numbers`: those of the last step; `saved`: the step of the last checkpoint; `recent`: count and seconds
    of the last few steps.
    """

    step: int = 0
    items: int = 0
    seconds: float = 0.0
    history: list[Row] = field(default_factory=list)
    numbers: Row = field(default_factory=dict)
    saved: int = 0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=RECENT))

    @property
    def state(self) -> dict[str, Any]:
        """What is kept with the weights."""
        return {name: getattr(self, name) for name in _KEPT}

    @property
    def recorded(self) -> bool:
        """Whether the last row of the history is of this step."""
        return bool(self.history) and self.history[-1]["step"] == self.step

    @property
    def items_per_second(self) -> float:
        """Over the last few steps, without what stood between them."""
        items, seconds = (sum(column) for column in zip(*self.recent, strict=True)) if self.recent else (0, 0.0)
        return items / seconds if seconds else 0.0

    def seconds_left(self, steps: int) -> float:
        """As long as the steps to come take, if each takes what the last few took."""
        return (steps - self.step) * sum(seconds for _, seconds in self.recent) / max(len(self.recent), 1)


def train(
    model: nn.Module,
    plan: TrainingConfig,
    *,
    batch: Callable[[int], Rows],
    loss: Callable[[nn.Module, Rows], Tensor],
    count: Callable[[Rows], int],
    folder: str | Path | None = None,
    resume: bool = False,
    journal: Journal | None = None,
    watchers: Sequence[Monitor] = (),
    on_progress: OnProgress | None = None,
    correct: TransformGradients | None = None,
    times: Mapping[str, float] | None = None,
    device: str | None = None,
) -> TrainResult:
    """The history of the run, having trained the model in place.

    `batch(step)`, counted from 0, gives the whole batch of a step, `plan.batch_size` rows along the first axis of each
    tensor; it is a function of the step alone, so that the place in the data is the step. `loss(model, rows)` is the
    sum of the losses of some rows, `count(rows)` of how many; the gradient of a step is Σ loss / Σ count over the whole
    batch, however it is split into micro-batches and processes. With dropout the split matters: a mask is drawn for
    each micro-batch, from a seed of (plan.seed, step, process).

    `watchers` are called before the first step, as step 0, and after step n, as n, with the module in evaluation; every
    process calls them, and the first one's numbers count. History: rows of `step` (finished), `items` (count so far),
    `loss` (mean over the batch of that step, before its update), `learning_rate`, `gradient_norm` (before clipping),
    `items_per_second`, `seconds` (in steps, so far) and what watchers found; every `log_every` steps, after the last,
    and whenever a watcher was due. `on_progress(step, steps, numbers)` follows each step, in the first process; its
    numbers have `seconds_left` as well. `correct(model, step)` may change the gradient of a step in place, that of the
    whole batch, before it is clipped; every process calls it with the same gradient and must leave the same.
    `times`: by how much a parameter's rate is multiplied, by name; all others have the plan's.

    `folder`: where checkpoints go, seen by every process; None keeps none. `resume`: go on from the last one, or start
    where there is none. On one CPU process a run that was killed and resumed is bit for bit the run that was not.
    `device`: "cpu", or None for the machine's accelerator.
    """
    snapshots = None if folder is None else Snapshots(Path(folder), keep=plan.save_total_limit)
    with make_accelerator(plan, device, folder=None if folder is None else str(folder)) as accelerator:
        placed = prepare_model(model, plan, accelerator, times)
        run = _Run(plan, placed, batch, loss, count, snapshots, journal, watchers, on_progress, correct, accelerator)
        progress = _started(run, resume)
        with isolated_rng(placed.device), _tracked(run):
            _take_steps(run, progress)
    return TrainResult(progress.history, progress.seconds, progress.step)


def _take_steps(run: _Run, progress: _Progress) -> None:
    """Every step that is left: an update, then its row, then a checkpoint."""
    run.placed.called.train()
    run.placed.optimizer.zero_grad(set_to_none=True)
    try:
        _record(run, progress)
        while progress.step < run.plan.max_steps:
            _take_step(run, progress)
            _report(run, progress)
            _record(run, progress)
            if _checkpoint_due(run, progress):
                _save(run, progress)
    except KeyboardInterrupt:
        # Processes are interrupted at different steps: those that hold parts of the weights cannot gather them.
        if progress.step > progress.saved and run.placed.first and not run.placed.sharded:
            _save(run, progress, alone=True)
        raise


# -- a step ---------------------------------------------------------------------------------------------


def _take_step(run: _Run, progress: _Progress) -> None:
    """One update: batch → share → micro-batches → loss and gradient → clipping → AdamW."""
    started, placed = time.perf_counter(), run.placed
    rows = run.batch(progress.step)
    counted = _checked_count(run, rows, progress.step)
    rate = learning_rate(run.plan, progress.step + 1)
    set_rate(placed.optimizer, rate)
    summed = _add_gradients(run, rows, counted, progress.step)
    if run.correct is not None:
        run.correct(placed.bare, progress.step)
    norm = torch.nn.utils.get_total_norm([one.grad for one in placed.trained if one.grad is not None])
    mean = float(placed.total(summed)) / counted
    length = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    _check_finite(run, rows, progress.step, mean, length)
    with _interrupts_held():
        if run.plan.max_grad_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(placed.trained, run.plan.max_grad_norm, norm)
        placed.optimizer.step()
        placed.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        progress.recent.append((counted, seconds))
        progress.step, progress.items = progress.step + 1, progress.items + counted
        progress.seconds += seconds
        progress.numbers = {"loss": mean, "learning_rate": rate, "gradient_norm": length}


def _checked_count(run: _Run, rows: Rows, step: int) -> int:
    """How many losses the whole batch has; a UserError if it is not a batch of the plan, or has none."""
    lengths = {name: len(value) for name, value in rows.items()}
    if set(lengths.values()) != {run.plan.batch_size}:
        raise UserError(f"batch of step {step}: expected {run.plan.batch_size} rows in each tensor, got {lengths}")
    counted = run.count(rows)
    if counted < 1:
        raise UserError(f"batch of step {step}: expected at least one loss, got {counted}")
    return counted


def _add_gradients(run: _Run, rows: Rows, counted: int, step: int) -> Tensor:
    """The sum of this process's losses, their gradients added up in the parameters.

    Each loss is divided by the count of the whole batch; several processes average their gradients where a sum is
    meant, hence the factor.
    """
    placed = run.placed
    summed = torch.zeros((), device=placed.device)
    pieces = micro_batches(placed.share(rows), run.plan.micro_batch_size)
    seed_step(placed.device, run.plan.seed, step, placed.rank)
    for piece in pieces:
        with placed.accumulating(last=piece == pieces[-1]):
            with placed.autocast():
                value = run.loss(placed.called, to_device(placed.device, slice_batch(rows, piece)))
            (value * (placed.processes / counted)).backward()
        summed = summed + value.detach()
    return summed


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """While it lasts Ctrl-C waits: what is half done would be of no step."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        signal.raise_signal(signal.SIGINT)


# -- what is not a number -------------------------------------------------------------------------------


def _check_finite(run: _Run, rows: Rows, step: int, mean: float, norm: float) -> None:
    """Nothing, or a UserError that names the step, the rows and the last good checkpoint."""
    if torch.tensor([mean, norm]).isfinite().all():
        return
    last = "there is no saved state" if run.snapshots is None else run.snapshots.describe_latest()
    if torch.tensor(mean).isfinite():
        raise UserError(f"gradient: expected finite numbers, its norm is {norm} at step {step} (loss {mean:g}); {last}")
    wrong = _rows_without_finite_loss(run, rows, step)
    told = "; ".join(_told_row(rows, row) for row in wrong[:3]) or "no single row alone"
    more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    raise UserError(
        f"loss: expected a finite number, got {mean} at step {step}; rows of its batch: {told}{more}; {last}"
    )


def _rows_without_finite_loss(run: _Run, rows: Rows, step: int) -> list[int]:
    """Which rows of the batch have no finite loss by themselves; every process looks at its share."""
    flags = torch.zeros(run.plan.batch_size, dtype=torch.bool)
    share = run.placed.share(rows)
    seed_step(run.placed.device, run.plan.seed, step, run.placed.rank)
    with torch.no_grad(), run.placed.autocast():
        for row in range(share.start, share.stop):
            value = run.loss(run.placed.bare, to_device(run.placed.device, slice_batch(rows, slice(row, row + 1))))
            flags[row] = not bool(value.isfinite())
    return run.placed.any(flags).nonzero().flatten().tolist()


def _told_row(rows: Rows, row: int) -> str:
    if "input_ids" not in rows:
        return str(row)
    tokens = rows["input_ids"][row].flatten().tolist()
    return f"{row} (tokens {' '.join(map(str, tokens[:8]))}{' …' if len(tokens) > 8 else ''})"


# -- rows of the history --------------------------------------------------------------------------------


def _record(run: _Run, progress: _Progress) -> None:
    """The row of this step, if one is due and it is not there yet, as it is after a run was resumed."""
    last = progress.step == run.plan.max_steps
    due = [watcher for watcher in run.watchers if watcher.due(progress.step, last)]
    logged = progress.step > 0 and (last or progress.step % run.plan.logging_steps == 0)
    if progress.recorded or not (due or logged):
        return
    row: Row = {"step": progress.step, "items": progress.items, **progress.numbers, "seconds": progress.seconds}
    if progress.recent:
        row["items_per_second"] = progress.items_per_second
    for watcher in due:
        row |= _watched(run, watcher, progress.step)
    progress.history.append(row)
    run.accelerator.log(row, step=progress.step)


def _watched(run: _Run, watcher: Monitor, step: int) -> dict[str, float]:
    """What a watcher finds in the module itself, in evaluation, with the same random numbers at the same step."""
    seed_step(run.placed.device, run.plan.seed, step, 0)
    run.placed.bare.eval()
    try:
        with torch.no_grad():
            return {name: float(value) for name, value in watcher(run.placed.bare, step).items()}
    finally:
        run.placed.called.train()


def _report(run: _Run, progress: _Progress) -> None:
    if run.on_progress is not None and run.placed.first:
        speed = {
            "items_per_second": progress.items_per_second,
            "seconds_left": progress.seconds_left(run.plan.max_steps),
        }
        run.on_progress(progress.step, run.plan.max_steps, {**progress.numbers, **speed})


@contextlib.contextmanager
def _tracked(run: _Run) -> Iterator[None]:
    """While it lasts the plan's trackers get each row of the history."""
    fields = {
        name: value if isinstance(value, (int, float, str)) else str(value) for name, value in vars(run.plan).items()
    }
    if run.plan.trackers:
        run.accelerator.init_trackers("regard", config=fields)
    try:
        yield
    finally:
        for tracker in run.accelerator.trackers:
            tracker.finish()


# -- checkpoints ----------------------------------------------------------------------------------------


def _checkpoint_due(run: _Run, progress: _Progress) -> bool:
    every = run.plan.save_steps
    return progress.step == run.plan.max_steps or (every is not None and progress.step % every == 0)


def _save(run: _Run, progress: _Progress, *, alone: bool = False) -> None:
    """Write a checkpoint from the first process; where it cannot, every process stops, unless that one is `alone`."""
    if run.snapshots is None:
        return
    placed, error = run.placed, None
    weights = checkpoint.gather(placed.bare, placed.optimizer, keep=placed.first)
    if placed.first:
        state = {**progress.state, "plan": run.plan.to_dict(), "processes": placed.processes}
        if run.journal is not None:
            state["journal"] = run.journal.head
        try:
            with _interrupts_held():
                checkpoint.save(run.snapshots, weights, state)
                progress.saved = progress.step
        except UserError as caught:
            error = caught
    failed = error is not None if alone else bool(placed.any(torch.tensor([error is not None])))
    if failed:
        raise error or UserError(f"the first process cannot write the checkpoint of step {progress.step}")


def _started(run: _Run, resume: bool) -> _Progress:
    """Where the run begins: at its start, or where the last checkpoint was made, with model and optimiser as then."""
    if run.snapshots is None:
        return _Progress()
    read, refused = None, None
    try:
        read = _read(run, run.snapshots, resume)
    except UserError as error:
        refused = error
    check_same_start(run.placed, run.snapshots.folder, 0 if read is None else read[1]["step"], refused)
    if read is None:
        return _Progress()
    path, state = read
    checkpoint.restore(path, run.placed.bare, run.placed.optimizer)
    return _Progress(**{name: state[name] for name in _KEPT}, saved=state["step"])


def _read(run: _Run, snapshots: Snapshots, resume: bool) -> tuple[Path, dict[str, Any]] | None:
    """Return the last good checkpoint of a run to resume, as this process sees the folder."""
    paths = snapshots.paths()
    if paths and not resume:
        raise UserError(
            f"{snapshots.folder}: expected no checkpoints, got {paths[-1].name}; resume, or name another folder"
        )
    if run.placed.first:
        snapshots.clear_unfinished()
    read = snapshots.latest()
    if read is not None:
        run.plan.check_resumes(read[1]["plan"], read[1]["step"])
        if run.journal is not None:
            run.journal.check_contains(read[1]["journal"])
    return read
