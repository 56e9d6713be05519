"""Monitoring sinks with the Hugging Face `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jaxtyping import Int
from torch import Tensor
from transformers import TrainerCallback

from regard.data import make_text_windows
from regard.errors import UserError
from regard.runs.output_dir import write_file
from regard.training.sink_monitor import Emergence, SinkMonitor, find_emergence

HISTORY, SINKS = "history.parquet", "sinks.parquet"
LOGGED = {"num_input_tokens_seen": "tokens", "loss": "loss", "learning_rate": "learning_rate"}
LOGGED |= {"grad_norm": "gradient_norm", "eval_loss": "valid_loss"}
"""Metrics that the Trainer logs, and their columns."""
METRICS = (
    *("sink_rate", "sink_rate_max", "sink_position"),
    *("alpha_first", "alpha_uniform", "virtual_sink_rate", "norm_ratio"),
)


class SinkCallback(TrainerCallback):
    """Measures sinks on held-out text while a `Trainer` trains a model, without changing its training.

    It measures before the first step, every `every` steps, and after the last. Metrics (see `SinkMonitor`) go to
    `trainer.state.log_history`. After `callback.attach(trainer)` they go through `trainer.log`, to its trackers as
    well. Training that is resumed from a checkpoint continues the tables.

    Args:
        rows: Token ids (sample, length) of held-out sequences.
        texts: Texts from which rows are made instead: `samples` windows of `length` tokens, by the `tokenizer`.
        folder: Folder to which `history.parquet` and `sinks.parquet` are written at each checkpoint and at the end.

    Raises:
        UserError: Neither or both of `rows` and `texts` are given, or texts come without a tokenizer.
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
        if (rows is None) == (texts is None):
            raise UserError(f"SinkCallback: expected either rows or texts, got {'neither' if rows is None else 'both'}")
        if rows is None:
            if tokenizer is None or isinstance(texts, str) or texts is None:
                raise UserError("SinkCallback: expected a list of texts together with a tokenizer")
            rows = make_text_windows(texts, tokenizer, length=length, samples=samples).input_ids
        self.watch = SinkMonitor(rows, every=every, epsilon=epsilon, batch_size=batch_size)
        self.folder = None if folder is None else Path(folder)
        self._trainer: Any = None
        self._log: list[dict[str, Any]] = []

    def attach(self, trainer: Any) -> SinkCallback:
        """Add the callback to a Trainer, through which it then logs, and return it."""
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        self._trainer = trainer
        return self

    def frame(self) -> pd.DataFrame:
        """Return the measurements by step, layer, head and position."""
        return self.watch.frame()

    def history(self) -> pd.DataFrame:
        """Return what was logged, one row per step: loss, learning rate, and sink metrics where measured."""
        names = LOGGED | {name: name for name in METRICS}
        by_step: dict[int, dict[str, float]] = {}
        for entry in self._log:
            metrics = {names[key]: float(value) for key, value in entry.items() if key in names and value is not None}
            if metrics:
                by_step.setdefault(int(entry["step"]), {}).update(metrics)
        table = pd.DataFrame([{"step": step, **by_step[step]} for step in sorted(by_step)])
        return table.reindex(columns=["step", *(name for name in names.values() if name in table)])

    def emergence(self, rate: float = 5.0) -> Emergence:
        """Return the steps at which sinks emerged; see `regard.training.sink_monitor.find_emergence`."""
        return find_emergence(self.history(), rate)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._log = state.log_history
        self.watch.load(row for row in self._saved_rows(state.global_step) if row[0] <= state.global_step)
        if not any("sink_rate" in entry for entry in self._log):
            self._measure(state, control, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        last = state.global_step >= state.max_steps or control.should_training_stop
        if self.watch.due(state.global_step, last):
            self._measure(state, control, kwargs["model"])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop:
            self._measure(state, control, kwargs["model"])

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.folder is not None and state.is_world_process_zero:
            for name, table in {HISTORY: self.history(), SINKS: self.frame()}.items():
                write_file(self.folder / name, table.to_parquet(index=False))

    on_train_end = on_save

    def _saved_rows(self, step: int) -> list[list[Any]]:
        """Return earlier rows of a resumed run, from this process or from the folder."""
        if not step:
            return []
        if self.watch.rows or self.folder is None or not (self.folder / SINKS).is_file():
            return self.watch.rows
        table = pd.read_parquet(self.folder / SINKS).astype(object)
        return table.where(table.notna(), None).values.tolist()

    def _measure(self, state: Any, control: Any, model: Any) -> None:
        if any(entry["step"] == state.global_step and "sink_rate" in entry for entry in self._log):
            return
        metrics = self.watch(model, state.global_step)
        if self._trainer is None:
            epoch = {} if state.epoch is None else {"epoch": state.epoch}
            self._log.append({**metrics, **epoch, "step": state.global_step})
            return
        # `log` resets this flag, but the Trainer logs the loss of this step only after its callbacks.
        should_log = control.should_log
        self._trainer.log(dict(metrics))
        control.should_log = should_log
