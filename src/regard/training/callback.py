"""Sinks watched under the Hugging Face `Trainer`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jaxtyping import Int
from torch import Tensor
from transformers import TrainerCallback

from regard.data import make_text_windows
from regard.errors import UserError
from regard.training.sink_monitor import Emergence, SinkMonitor, find_emergence

HISTORY, SINKS = "history.parquet", "sinks.parquet"
LOGGED = {
    "num_input_tokens_seen": "tokens",
    "loss": "loss",
    "learning_rate": "learning_rate",
    "grad_norm": "gradient_norm",
    "eval_loss": "valid_loss",
}
"""What the Trainer logs of training, and the column it goes to."""
WATCHED = (
    "sink_rate",
    "sink_rate_max",
    "sink_position",
    "alpha_first",
    "alpha_uniform",
    "virtual_sink_rate",
    "norm_ratio",
)


class SinkCallback(TrainerCallback):
    """Watches the sinks of the model that a `Trainer` trains, on held-out text, and changes nothing of its training.

    `rows` are the token ids of held-out sequences of one length, (sample, length); or `texts` and `tokenizer` give
    them: `samples` windows of `length` tokens. It measures before the first step, after every `every` steps, and after
    the last. The numbers (see `regard.training.sink_monitor.SinkMonitor`) go into `trainer.state.log_history`; after
    `callback.attach(trainer)` they go through `trainer.log`, and so to its trackers and to whoever else listens, too.
    With a `folder`, `history.parquet` and `sinks.parquet` are written there at every checkpoint and at the end; a
    training that is resumed from a checkpoint goes on with what was found up to it.
    """

    def __init__(
        self,
        rows: Int[Tensor, "sample length"] | None = None,
        *,
        texts: Sequence[str] | None = None,
        tokenizer: Any = None,
        every: int = 100,
        epsilon: float = 0.3,
        length: int = 64,
        samples: int = 100,
        batch_size: int = 32,
        folder: str | Path | None = None,
    ) -> None:
        given = _rows(rows, texts, tokenizer, length=length, samples=samples)
        self.watch = SinkMonitor(given, every=every, epsilon=epsilon, batch_size=batch_size)
        self.folder = None if folder is None else Path(folder)
        self._trainer: Any = None
        self._log: list[dict[str, Any]] = []

    def attach(self, trainer: Any) -> SinkCallback:
        """The callback itself, from now on one of the Trainer's, through which it logs what it finds."""
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer
        return self

    def frame(self) -> pd.DataFrame:
        """What was found by layer, head and position at each step, as a tidy table."""
        return self.watch.frame()

    def history(self) -> pd.DataFrame:
        """What was logged, one row a step: loss, learning rate, and the numbers of sinks, null where not measured."""
        names = LOGGED | {name: name for name in WATCHED}
        by_step: dict[int, dict[str, float]] = {}
        for entry in self._log:
            known = {names[name]: float(value) for name, value in entry.items() if name in names and value is not None}
            if known:
                by_step.setdefault(int(entry["step"]), {}).update(known)
        table = pd.DataFrame([{"step": step, **by_step[step]} for step in sorted(by_step)])
        return table.reindex(columns=["step", *(name for name in names.values() if name in table)])

    def emergence(self, rate: float = 5.0) -> Emergence:
        """When sinks emerged, so far; see `regard.training.sink_monitor.find_emergence`."""
        return find_emergence(self.history(), rate)

    # -- what the Trainer calls --------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take up what was found up to a resumed step; where that is nothing, measure before the next one."""
        self._log = state.log_history
        self.watch.load(row for row in self._before(state.global_step) if row[0] <= state.global_step)
        if not any("sink_rate" in entry for entry in self._log):
            self._measure(state, control, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure every so many steps, and at the last one."""
        last = state.global_step >= state.max_steps or control.should_training_stop
        if self.watch.due(state.global_step, last):
            self._measure(state, control, kwargs["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure where training was stopped early."""
        if control.should_training_stop:
            self._measure(state, control, kwargs["model"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what was found, for a training that is resumed from this checkpoint."""
        self._write(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the tables."""
        self._write(state)

    # ----------------------------------------------------------------------------------------------------------------

    def _before(self, step: int) -> list[list[Any]]:
        """What was found up to a step: nothing at the first; else in this process, or by what stands in the folder."""
        if not step:
            return []
        if self.watch.rows or self.folder is None or not (self.folder / SINKS).is_file():
            return self.watch.rows
        table = pd.read_parquet(self.folder / SINKS).astype(object)
        return table.where(table.notna(), None).values.tolist()

    def _measure(self, state: Any, control: Any, model: Any) -> None:
        """Measure, but no step twice, and log it."""
        if any(entry["step"] == state.global_step and "sink_rate" in entry for entry in self._log):
            return
        numbers = self.watch(model, state.global_step)
        if self._trainer is None:
            epoch = {} if state.epoch is None else {"epoch": state.epoch}
            self._log.append({**numbers, **epoch, "step": state.global_step})
            return
        # Whoever logs is taken to have logged what was due, but the loss of this step is logged only after us.
        due = control.should_log
        self._trainer.log(dict(numbers))
        control.should_log = due

    def _write(self, state: Any) -> None:
        if self.folder is not None and state.is_world_process_zero:
            _write_tables(self.folder, {HISTORY: self.history(), SINKS: self.frame()})


def _rows(
    rows: Tensor | None, texts: Sequence[str] | None, tokenizer: Any, *, length: int, samples: int
) -> Int[Tensor, "sample length"]:
    """The rows that were given, or windows of the texts."""
    if (rows is None) == (texts is None):
        raise UserError(f"SinkCallback: expected either rows or texts, got {'neither' if rows is None else 'both'}")
    if rows is not None:
        return rows
    if tokenizer is None or isinstance(texts, str) or texts is None:
        raise UserError("SinkCallback: expected a list of texts together with a tokenizer")
    return make_text_windows(texts, tokenizer, length=length, samples=samples).input_ids


def _write_tables(folder: Path, tables: Mapping[str, pd.DataFrame]) -> None:
    """Write each table whole or not at all."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, table in tables.items():
            with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as place:
                table.to_parquet(Path(place) / name, index=False)
                os.replace(Path(place) / name, folder / name)
    except OSError as error:
        raise UserError(f"cannot write {folder}: {error.strerror or error}") from error
