"""Adapters for many tasks in a Hugging Face model, mixed for each example by a router (after SAPT)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard.adapters import peft_format, saving
from regard.adapters.attention import SharedAttention
from regard.adapters.discriminant import DiscriminantRouter
from regard.adapters.head import check_frozen_base, warn_of_new_head
from regard.adapters.known_vectors import knowing_vectors
from regard.adapters.lora_pool import check_base_weight, tied_layers
from regard.adapters.model import AdapterModel, MergedAdapter
from regard.adapters.new_adapter import new_adapter
from regard.adapters.router_warmup import PastTask, learn_task
from regard.adapters.task_training import (
    BatchesOnDevice,
    TaskFit,
    TrainingOptions,
    check_batch,
    own_weight,
    refuse_share,
    train_adapter,
    train_mode,
)
from regard.adapters.whole_model import refuse_options
from regard.data.examples import IGNORE_INDEX
from regard.errors import UserError
from regard.hooks.layers import eval_no_grad
from regard.models.generator import is_language_model

Batches = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class PruneResult:
    """Result of pruning: removed adapters, mean weights of all adapters before, and mean losses."""

    removed: tuple[str, ...]
    usage: dict[str, float]
    loss_before: float
    loss_after: float


class SharedAdapters(AdapterModel):
    """A model with one adapter for each task, mixed by a router.

        adapters = regard.SharedAdapters(model)
        adapters.fit_task("sst2", batches)                # adds an adapter, tells the router of the task, and trains
        adapters.fit_task("agnews", other_batches)        # another; older ones are frozen
        adapters.save_pretrained("adapters")

    In a loop of one's own, or a `Trainer` with `regard.GateCallback`, these are `add_adapter`, `fit_router`, and
    training with `adapters(**batch).loss` as usual.

    The weights of an example come from its query vector, by default the mean states of the model without adapters after
    a quarter and half of its layers. Its tokens are those of the encoder's input, all of an encoder, or the prompt of a
    decoder-only model: where `prompt_mask` is true, else where `labels` are −100, else all. A row without such words
    counts whole, as with `labels = input_ids`: in training its weights depend on all of the text, in generation on the
    prompt. Weights are computed once, and hold in all layers, in the decoder, and for all generated tokens. Without
    adapters the model is unchanged.

    The router is a `DiscriminantRouter` by default: it trains nothing and knows of each task the mean of its rows, from
    `fit_router`. With several adapters a call is refused if one has no rows. SAPT's own are `router="attention"` with
    `query="embeddings"`, see `SharedAttention` for `router_hidden_size` (there `hidden_size`), `projection_order`
    and `temperature`, and `regard.adapters.router_warmup` for teaching it.

    With `above_query` only layers after those get adapters, so that a forward pass gives the query vector by itself and
    routing costs nothing; in training only without dropout and gradient checkpointing.

    The model is changed in place and its own weights are frozen. Calling it mixes adapters as calling this does. See
    `LoraAdapterPool` and `PromptAdapterPool` for the other arguments.

    Source:
        SAPT (arXiv 2401.08295); see `DiscriminantRouter` for what is not SAPT's.
    """

    # -- training ---------------------------------------------------------------------------------------

    def fit_task(
        self,
        name: str,
        batches: Any,
        *,
        epochs: int = 3,
        learning_rate: float = 1e-3,
        warmup_ratio: float = 0.06,
        weight_decay: float = 0.01,
        max_grad_norm: float = 1.0,
        check: Mapping[str, Batches] | None = None,
        loss: Callable[[Mapping[str, Any]], Any] | None = None,
    ) -> TaskFit:
        """Train the adapter of a task, a new one or one that is there, under the weights that the router gives it.

        The router is fitted to the rows first, unless `fit_router` was called. A learnt one is warmed up, reflecting on
        `past_tasks`, at most a hundred query vectors of each earlier task, and then kept as it is. AdamW trains all
        that requires gradients. At the end a warning tells of each task whose rows give their own adapter a mean weight
        below `LOW_OWN_WEIGHT`.

        Args:
            name: The adapter.
            batches: Inputs of the model, a list or a DataLoader with a length; they are read in each epoch.
            epochs: Number of passes over the batches.
            learning_rate: Highest learning rate.
            warmup_ratio: Share of the steps in which the rate rises; it then falls linearly to 0.
            weight_decay: Decoupled weight decay of all that is trained.
            max_grad_norm: Norm to which gradients are clipped.
            check: Batches by adapter whose weights are looked at in the end, of earlier tasks, and of rows that were
                held out; by default the task's own batches, whose weights are too good if they are few.
            loss: Returns the mean loss of a batch's rows; by default that of the model. Where several processes have a
                share of the rows each, it must be that of a `DistributedDataParallel`, and the router fitted before.

        Returns:
            Losses of the steps, mean weights of own adapters, and seconds.

        Raises:
            UserError: Batches have no length or no labels, or are a share alone, an option cannot be, a weight of the
                base requires gradients, or a loss or gradient is not finite.

        After an error, also an interruption, a new adapter is there if a step has trained it, and else is not.
        """
        start, device = time.monotonic(), self.router.count.device
        plan = TrainingOptions(
            epochs=epochs,
            learning_rate=learning_rate,
            warmup_ratio=warmup_ratio,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        moved = BatchesOnDevice(batches, device)
        checked = {name: moved} | {task: BatchesOnDevice(rows, device) for task, rows in (check or {}).items()}
        check_frozen_base(self)
        if loss is None:
            refuse_share(batches, ", or the loss of a DistributedDataParallel, which averages gradients")
            warn_of_new_head(self)
        for task in checked.keys() - {name}:
            self.index_of(task)
        with knowing_vectors(self._routing):
            with self._open(name):
                if isinstance(self.router, DiscriminantRouter):
                    if not self.knows(name):
                        self.fit_router(name, moved)
                else:
                    self._warm_up(self.router, name, moved)
                trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
                with train_mode(self):
                    count = partial(self._count_batch_losses, of_model=loss is None)
                    losses = train_adapter(trained, moved, partial(self._batch_loss, loss=loss), plan, count=count)
            used = {task: self.usage(rows) for task, rows in checked.items()}
        own_weights = {task: own_weight(task, self.adapter_names, weights) for task, weights in used.items()}
        return TaskFit(losses, own_weights, time.monotonic() - start)

    def _open(self, name: str) -> AbstractContextManager[None]:
        """Open an adapter; a new one is gone after an error before its first step."""
        if name not in self.adapter_names:
            return new_adapter(self, name)
        self.set_adapter(name)
        return nullcontext()

    def _count_batch_losses(self, batch: Mapping[str, Any], *, of_model: bool) -> int:
        """Return how many losses the mean of a batch is of: rows, with a loss of one's own."""
        labels = batch.get("labels") if of_model else None
        return _count_losses(self.model, labels, num_rows=len(next(iter(batch.values()))))

    def _batch_loss(self, batch: Mapping[str, Any], loss: Callable[..., Any] | None) -> Any:
        value = getattr(self(**batch), "loss", None) if loss is None else loss(batch)
        if value is None:
            raise UserError("loss: expected batches with labels, or a function of a batch, got neither")
        return value

    # -- routing ----------------------------------------------------------------------------------------

    def fit_router(self, name: str, batches: Batches) -> None:
        """Add the rows of batches to what the router knows of an adapter's task: all of them once, before training.

        Args:
            name: The adapter.
            batches: Inputs of the model, with labels or a `prompt_mask` where the model reads answers as well. Each of
                several processes must get the same.

        Raises:
            UserError: There is no such adapter or no batch, or the router is one that is trained.
        """
        _check_batches(batches)
        index, router = self.index_of(name), self.router
        if not isinstance(router, DiscriminantRouter):
            expected = "router: expected 'discriminant', which is fitted"
            raise UserError(f"{expected}, got 'attention'; `regard.adapters.router_warmup.warm_up_router` trains it")
        router.fit(index, self._all_vectors(name, batches))

    def _warm_up(self, router: SharedAttention, name: str, batches: Batches) -> None:
        """Teach a learnt router the rows of a task, if it does not know them, and freeze it."""
        if name not in self.past_tasks:
            vectors, earlier = self._all_vectors(name, batches), self.past_tasks.values()
            moved = [PastTask(*(values.to(vectors.device) for values in task)) for task in earlier]
            self.past_tasks[name] = learn_task(router, self.index_of(name), vectors, moved)
        router.set_trainable(None)

    def _all_vectors(self, name: str, batches: Batches) -> Tensor:
        vectors = []
        refuse_share(batches, " to tell the router of (fit_router)")
        for batch in batches:
            with torch.no_grad():
                vectors.append(self.query_vectors(**check_batch(batch)))
            self.note_prompt(name, batch)
        if not vectors:
            raise UserError("batches: expected at least one, got none")
        return torch.cat(vectors)

    def generate_batch(self, *args: Any, **inputs: Any) -> Any:
        """Generate by continuous batching, with the weights of `use_only`, or others that are the same for all rows."""
        self._routing.refuse_joined_rows()
        return self.model.generate_batch(*args, **inputs)

    # -- files ------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False, **options: Any) -> Path:
        """Write adapters, router, lineages and an open head to a folder, whole or not at all; return the folder.

        Raises:
            UserError: There is nothing to save, no place for it, or `options` of a library that saves whole models.
        """
        refuse_options(options)
        return saving.save(self, Path(folder), overwrite=overwrite)

    @classmethod
    def from_pretrained(
        cls, model: PreTrainedModel | str | Path, folder: str | Path, *, any_model: bool = False
    ) -> SharedAdapters:
        """Load adapters, all frozen, into a model, or into that of a name; raise UserError if it is another base.

        A head that was open when it was saved is loaded, and open again. With `any_model` the weights may be others, as
        of the same base in 4 bits; shapes are checked all the same, and files written from here belong to that base.
        """
        return saving.load(cls, model, Path(folder), any_model=any_model)

    def export_peft(self, name: str, folder: str | Path, *, router: bool = False, overwrite: bool = False) -> Path:
        """Write an adapter in PEFT's format, with its lineage and the hash of its base; return the folder.

        PEFT's model then computes what `use_only` gives. Adapters merged into this base are not in the files.

        With `router` what the router knows of all adapters is written as well; PEFT does not read it.
        """
        return peft_format.export_adapter(self, name, Path(folder), router=router, overwrite=overwrite)

    def import_peft(
        self,
        folder: str | Path,
        name: str,
        lineage: Mapping[str, Any] | None = None,
        *,
        router: bool = False,
        any_model: bool = False,
    ) -> int:
        """Add the LoRA adapter of a folder in PEFT's format, frozen, and return its index.

        Its lineage is by default that written by `export_peft`. With `router` what the router knew of the adapter is
        restored: its mean, and the covariance into a model that has none; or its key, and the shared maps, which must
        be those of this model unless it has no adapter. Without, a mean comes from `fit_router`, and a key is
        initialized as of any new adapter. With `any_model` the base may have other weights, as in 4 bits.

        Raises:
            UserError: The adapter, its base or its maps do not fit; nothing is changed then.
        """
        return peft_format.import_adapter(self, Path(folder), name, lineage, router=router, any_model=any_model)

    def export_peft_set(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write all adapters in PEFT's format, each in a folder of its name, with the router beside; return the folder.

        `PeftModel.from_pretrained(base, folder / name)` computes what `use_only(name)` gives.

        Raises:
            UserError: There is no adapter, one was merged into the base, or has a name that no folder can have.
        """
        return peft_format.export_set(self, Path(folder), overwrite=overwrite)

    @classmethod
    def from_peft_set(
        cls, model: PreTrainedModel | str | Path, folder: str | Path, *, any_model: bool = False
    ) -> SharedAdapters:
        """Load the adapters and the router of `export_peft_set`, all frozen, into a model, or into that of a name.

        With `any_model` the base may have other weights, as in 4 bits.
        """
        return peft_format.import_set(cls, model, Path(folder), any_model=any_model)

    # -- pruning ----------------------------------------------------------------------------------------

    def usage(self, batches: Batches) -> Tensor:
        """Return the mean weight of each adapter over the rows of batches, (adapter,)."""
        return self._weights(batches).mean(0)

    def merge(self, name: str, weight: float = 1.0) -> None:
        """Add an adapter, times `weight`, to the weights of the model, and remove it and its key.

        If every row gave the adapter that weight, outputs change only because the other weights sum to 1 again. The
        adapter is still saved by `save_pretrained`, whose files belong to the unchanged base.

        Raises:
            UserError: An adapted layer shares its weight with another, or its weight cannot be added to.
        """
        index = self.index_of(name)
        if tied := tied_layers(self.model, self.layers("merge")):
            expected = "expected adapted layers with weights of their own to merge into"
            raise UserError(f"model: {expected}, got one that other layers have too in {tied[0]}")
        for layer, mixed in self.layers("merge").items():
            check_base_weight(layer, mixed.base_layer)
        parts = {
            layer: (mixed.adapters.A[index].detach().cpu().clone(), mixed.adapters.B[index].detach().cpu().clone())
            for layer, mixed in self.layers("merge").items()
        }
        if self.base is None:
            self.base = self.known_identities.of_files(self.model)
        self.add_merged(MergedAdapter(name, float(weight), self.provenance[name], parts))
        self.delete_adapter(name)

    def prune(
        self,
        batches: Batches,
        loss: Callable[[Mapping[str, Any]], Any] | None = None,
        least: float = 0.01,
        *,
        merge: bool = False,
    ) -> PruneResult:
        """Remove adapters to which no row gives a weight of at least `least`; the active adapter stays.

        `loss` returns the mean loss of a batch's rows; by default it is that of the model. With `merge`, removed
        adapters are added to the weights of the model, times their mean weights.

        Raises:
            UserError: No adapter reaches `least`, or batches have no labels and there is no `loss`.
        """
        _check_batches(batches)
        batches = list(batches)
        if not 0 < least < 1:
            raise UserError(f"least: expected a number between 0 and 1, got {least}")
        weights, names = self._weights(batches), self.adapter_names
        loss_before = self._mean_loss(batches, loss)
        highest = weights.amax(0).tolist()
        unused = [name for name, weight in zip(names, highest, strict=True) if weight < least]
        removed = tuple(name for name in unused if name != self.active_adapter)
        if len(removed) == len(names):
            problem = f"got {least}; the highest is {max(highest):.4f}"
            raise UserError(f"least: expected a weight that an adapter reaches, {problem}")
        usage = dict(zip(names, weights.mean(0).tolist(), strict=True))
        for name in removed:
            if merge:
                self.merge(name, usage[name])
            else:
                self.delete_adapter(name)
        return PruneResult(removed, usage, loss_before, self._mean_loss(batches, loss) if removed else loss_before)

    def _weights(self, batches: Batches) -> Tensor:
        _check_batches(batches)
        with eval_no_grad(self):
            weights = [self.routing_weights(**check_batch(batch)).double().cpu() for batch in batches]
        if not weights:
            raise UserError("batches: expected at least one, got none")
        return torch.cat(weights)

    def _mean_loss(self, batches: Batches, loss: Callable[..., Any] | None) -> float:
        total, num_losses = 0.0, 0
        with eval_no_grad(self):
            for batch in batches:
                count = self._count_batch_losses(batch, of_model=loss is None)
                if count:
                    total, num_losses = total + float(self._batch_loss(batch, loss)) * count, num_losses + count
        if not num_losses:
            raise UserError("batches: expected at least one label, got none")
        return total / num_losses


_UNSHIFTED = ("cpmant", "flaubert", "xlm", "xlnet")
"""Types of models whose own loss scores each token against the label at its own place, the first as well."""


def _count_losses(model: Any, labels: Any, *, num_rows: int) -> int:
    """Return how many losses a model's own is the mean of: those of tokens with a label, or of rows."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return num_rows
    is_shifted = getattr(model.config, "model_type", "") not in _UNSHIFTED
    if labels.dim() == 2 and is_shifted and is_language_model(model) and not model.config.is_encoder_decoder:
        labels = labels[:, 1:]  # the first token is predicted from nothing
    return int((labels != IGNORE_INDEX).sum())


def _check_batches(batches: Any) -> None:
    if isinstance(batches, Mapping):
        raise UserError(f"batches: expected a list of them, got one alone, with {', '.join(map(str, batches))}")
