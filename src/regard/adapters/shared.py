"""Adapters for many tasks in a Hugging Face model, mixed for each example by a router (after SAPT)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from regard.adapters import peft_format, saving
from regard.adapters.discriminant import DiscriminantRouter
from regard.adapters.model import AdapterModel, MergedAdapter, base_sha256
from regard.errors import UserError
from regard.hooks.layers import eval_mode

Batches = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class PruneResult:
    """Result of pruning: removed adapters, mean weights of all adapters before, and the mean loss of a row."""

    removed: tuple[str, ...]
    usage: dict[str, float]
    loss_before: float
    loss_after: float


class SharedAdapters(AdapterModel):
    """A model with one adapter for each task, mixed by a router.

        adapters = regard.SharedAdapters(model)
        adapters.add_adapter("sst2")
        adapters.fit_router("sst2", batches)              # what the task's texts are like; then train the adapter with
        adapters(**batch).loss.backward()                 # adapters(**batch).loss as usual
        adapters.add_adapter("agnews")                    # another; older ones are frozen
        adapters.save_pretrained("adapters")

    The weights of an example come from its query vector, by default the mean states of the model without adapters after
    a quarter and half of its layers. Its tokens are those of the encoder's input, all of an encoder, or the prompt of a
    decoder-only model: where `prompt_mask` is true, else where `labels` are −100, else all. A row without such words
    counts whole, as with `labels = input_ids`: in training its weights depend on all of the text, in generation on the
    prompt. Weights are computed once, and hold in all layers, in the decoder, and for all generated tokens. Without
    adapters the model is unchanged.

    The router is a `DiscriminantRouter` by default: it trains nothing and knows of each task the mean of its rows, from
    `fit_router`, or else from each call with gradients while the adapter is active. SAPT's own are `router="attention"`
    with `query="embeddings"`, see `SharedAttention` for `router_hidden_size` (there `hidden_size`), `projection_order`
    and `temperature`, and `regard.adapters.router_warmup` for teaching it.

    The model is changed in place and its own weights are frozen. Calling it mixes adapters as calling this does. See
    `LoraAdapterPool` and `PromptAdapterPool` for the other arguments.

    Source:
        SAPT (arXiv 2401.08295); see `DiscriminantRouter` for what is not SAPT's.
    """

    # -- routing ----------------------------------------------------------------------------------------

    def fit_router(self, name: str, batches: Batches) -> None:
        """Add the rows of batches to what the router knows of an adapter's task; training adds no more of them.

        Args:
            name: The adapter.
            batches: Inputs of the model, with labels or a `prompt_mask` where the model reads answers as well.

        Raises:
            UserError: There is no such adapter or no batch, or the router is one that is trained.
        """
        _check_batches(batches)
        index, router = self.index_of(name), self.router
        if not isinstance(router, DiscriminantRouter):
            expected = "router: expected 'discriminant', which is fitted"
            raise UserError(f"{expected}, got 'attention'; `regard.adapters.router_warmup.warm_up_router` trains it")
        with torch.no_grad():
            vectors = [self.query_vectors(**batch) for batch in batches]
        if not vectors:
            raise UserError("batches: expected at least one, got none")
        router.fit(index, torch.cat(vectors))
        self.fitted_names.add(name)
        self._follow_active_adapter()

    # -- files ------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write adapters, router and lineages to a folder, completely or not at all; return the folder."""
        return saving.save(self, Path(folder), overwrite=overwrite)

    @classmethod
    def from_pretrained(cls, model: PreTrainedModel | str | Path, folder: str | Path) -> SharedAdapters:
        """Load adapters, all frozen, into a model, or into that of a name; raise UserError if it is another base."""
        return saving.load(cls, model, Path(folder))

    def export_peft(self, name: str, folder: str | Path, *, router: bool = False, overwrite: bool = False) -> Path:
        """Write an adapter in PEFT's format, with its lineage and the hash of its base; return the folder.

        PEFT's model then computes what `use_only` gives. Adapters merged into this base are not in the files.

        With `router` what the router knows of all adapters is written as well; PEFT does not read it.
        """
        return peft_format.export_adapter(self, name, Path(folder), router=router, overwrite=overwrite)

    def import_peft(
        self, folder: str | Path, name: str, lineage: Mapping[str, Any] | None = None, *, router: bool = False
    ) -> int:
        """Add the LoRA adapter of a folder in PEFT's format, frozen, and return its index.

        Its lineage is by default that written by `export_peft`. With `router` what the router knew of the adapter is
        restored: its mean, and the covariance into a model that has none; or its key, and the shared maps, which must
        be those of this model unless it has no adapter. Without, a mean comes from `fit_router`, and a key is
        initialized as of any new adapter.

        Raises:
            UserError: The adapter, its base or its maps do not fit; nothing is changed then.
        """
        return peft_format.import_adapter(self, Path(folder), name, lineage, router=router)

    # -- pruning ----------------------------------------------------------------------------------------

    def usage(self, batches: Batches) -> Tensor:
        """Return the mean weight of each adapter over the rows of batches, (adapter,)."""
        return self._weights(batches).mean(0)

    def merge(self, name: str, weight: float = 1.0) -> None:
        """Add an adapter, times `weight`, to the weights of the model, and remove it and its key.

        If every row gave the adapter that weight, outputs change only because the other weights sum to 1 again. The
        adapter is still saved by `save_pretrained`, whose files belong to the unchanged base.
        """
        index = self.index_of(name)
        parts = {
            layer: (mixed.adapters.A[index].detach().cpu().clone(), mixed.adapters.B[index].detach().cpu().clone())
            for layer, mixed in self.layers("merge").items()
        }
        if self.base_sha256 is None:
            self.base_sha256 = base_sha256(self.model)
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
        with eval_mode(self):
            weights = [self.routing_weights(**batch).double().cpu() for batch in batches]
        if not weights:
            raise UserError("batches: expected at least one, got none")
        return torch.cat(weights)

    def _mean_loss(self, batches: Batches, loss: Callable[..., Any] | None) -> float:
        total, num_rows = 0.0, 0
        with eval_mode(self):
            for batch in batches:
                value = getattr(self(**batch), "loss", None) if loss is None else loss(batch)
                if value is None:
                    raise UserError("loss: expected batches with labels, or a function of a batch, got neither")
                count = len(next(iter(batch.values())))
                total, num_rows = total + float(value) * count, num_rows + count
        return total / num_rows


def _check_batches(batches: Any) -> None:
    if isinstance(batches, Mapping):
        raise UserError(f"batches: expected a list of them, got one alone, with {', '.join(map(str, batches))}")
