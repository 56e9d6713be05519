"""The router's part in a Hugging Face `Trainer`: it is fitted before the first step, and checked at the end."""

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset
from transformers import TrainerCallback

from regard.adapters.discriminant import DiscriminantRouter
from regard.adapters.head import warn_of_new_head
from regard.adapters.shared import SharedAdapters
from regard.adapters.task_training import BatchesOnDevice, own_weight
from regard.errors import UserError, check_int

OWN_WEIGHT = "own_adapter_weight"
"""Name of the mean weight of the task's own adapter in `trainer.state.log_history`."""


class GateCallback(TrainerCallback):
    """Fits the router to the training rows before a `Trainer` trains the open adapter of `SharedAdapters`.

        adapters.add_adapter("sport")
        Trainer(model=adapters, …, callbacks=[regard.GateCallback()]).train()

    At the end the mean weight of the adapter over these rows goes to `trainer.state.log_history`, as
    `own_adapter_weight`; a low one is told in a warning. It is too good if the rows are few: `adapters.usage` tells of
    others. Every process reads the same rows. Rows that `fit_router` was given, or that a checkpoint knows of, are not
    added again. A learnt router is not fitted, but checked.

    Args:
        max_rows: Number of rows to read at most, evenly from the data set.

    Raises:
        UserError: The Trainer has no `SharedAdapters`, none of them is open, its data set has no length, its
            batches are no inputs of the model, or it smooths the labels of a decoder-only model.
    """

    def __init__(self, max_rows: int = 10_000) -> None:
        check_int("max_rows", max_rows, least=1)
        self.max_rows = max_rows

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        adapters, name = _open_adapter(kwargs["model"])
        _check_smoothing(args, adapters)
        warn_of_new_head(adapters)
        with torch.random.fork_rng(devices=[]):
            batches = self._batches(args, adapters, kwargs["train_dataloader"])
            if isinstance(adapters.router, DiscriminantRouter) and not adapters.knows(name):
                adapters.fit_router(name, batches)
            else:
                adapters.note_prompt(name, next(iter(batches)))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        adapters, name = _open_adapter(kwargs["model"])
        with torch.random.fork_rng(devices=[]):
            usage = adapters.usage(self._batches(args, adapters, kwargs["train_dataloader"]))
        weight = own_weight(name, adapters.adapter_names, usage)
        state.log_history.append({OWN_WEIGHT: weight, "step": state.global_step})

    def _batches(self, args: Any, adapters: SharedAdapters, loader: Any) -> BatchesOnDevice:
        """Return rows of the data set in order, whatever the Trainer's sampler and processes."""
        dataset = loader.dataset
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            expected = "GateCallback: expected a data set with a length, or rows given to `fit_router` before"
            raise UserError(f"{expected}, got {type(dataset).__name__}")
        if not isinstance(batch := loader.collate_fn([dataset[0]]), Mapping):
            expected = "GateCallback: expected a Trainer whose batches are the model's inputs by name"
            raise UserError(
                f"{expected}, got {type(batch).__name__}, as of texts in GRPO; leave the callback out, and give "
                "`fit_router` the tokens of the prompts before"
            )
        rows = Subset(dataset, range(0, len(dataset), ceil(len(dataset) / self.max_rows)))
        batches: Any = DataLoader(rows, batch_size=args.eval_batch_size, collate_fn=loader.collate_fn)
        return BatchesOnDevice(batches, adapters.router.count.device)


def _check_smoothing(args: Any, adapters: SharedAdapters) -> None:
    """Refuse label smoothing where labels tell prompts from answers: the Trainer takes them away before the model.

    It would not shift them either, since it knows a causal model by its class.
    """
    is_decoder = adapters.model.can_generate() and not adapters.model.config.is_encoder_decoder
    if args.label_smoothing_factor and is_decoder:
        expected = "label_smoothing_factor: expected 0 with a decoder-only model, whose labels mark the prompt"
        raise UserError(f"{expected}, got {args.label_smoothing_factor:g}")


def _open_adapter(model: Any) -> tuple[SharedAdapters, str]:
    if not isinstance(model, SharedAdapters):
        raise UserError(f"GateCallback: expected a Trainer of SharedAdapters, got one of {type(model).__name__}")
    if model.active_adapter is None:
        raise UserError("GateCallback: expected an open adapter, got none; `add_adapter` and `set_adapter` open one")
    return model, model.active_adapter
