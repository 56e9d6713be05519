"""Blocks for many tasks in a Hugging Face model, mixed for each example by one attention that they share (SAPT)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from regard.adapters import peft_format, pruning, saving
from regard.adapters.model import AdapterModel


class SharedAdapters(AdapterModel):
    """A model with a block of low-rank adapters for each task, mixed by one shared attention (arXiv 2401.08295).

        adapters = regard.SharedAdapters(model)
        adapters.add_adapter("sst2")                      # a block and a key; train adapters(**batch).loss as usual
        adapters.add_adapter("agnews")                    # another; what is older is frozen
        adapters.save_pretrained("blocks")

    Each example's weights a come of its query vector e, the maximum over tokens of the input embeddings: of the
    encoder's input, of the prompt of a decoder-only model (tokens whose `labels` are −100, or where `prompt_mask` is
    true, else all), of all real tokens of an encoder. They are computed once, where the tokens are read, and hold in
    all layers, in the decoder, and for all tokens that are generated. Before a block is added the model is as it was.

    The model is changed in place and its own weights are frozen: calling it mixes as calling this does.
    `target_modules`: "auto" (what makes queries and values) or names of layers; `router_hidden_size`,
    `projection_order`, `temperature`: of `SharedAttention`; `detach_old`, `top_k`, `dropout`: of `LoraPool`. Raises
    UserError for what the model does not have.
    """

    # -- files ------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Where the blocks, the attention and what is told of them were written; whole or not at all."""
        return saving.save(self, Path(folder), overwrite=overwrite)

    @classmethod
    def from_pretrained(cls, model: PreTrainedModel | str | Path, folder: str | Path) -> SharedAdapters:
        """The blocks of a folder in a model, or in the one of a name, all frozen. Raises UserError for another base."""
        return saving.load(cls, model, Path(folder))

    def export_peft(self, name: str, folder: str | Path, *, router: bool = False, overwrite: bool = False) -> Path:
        """Where a block was written in PEFT's format, with its lineage and the hash of its base.

        PEFT's model is then what `forced` gives, on the base that is here: what was merged into it is not in the file.
        With `router` the keys and the shared maps lie beside it, of which PEFT reads nothing. Raises UserError.
        """
        return peft_format.export(self, name, Path(folder), router=router, overwrite=overwrite)

    def import_peft(
        self, folder: str | Path, name: str, lineage: Mapping[str, Any] | None = None, *, router: bool = False
    ) -> int:
        """The number of a new block, frozen, with the LoRA adapter of a folder in PEFT's format.

        What `export_peft` wrote brings its lineage along, unless one is given, and is refused on another base; of an
        adapter that PEFT wrote nothing is known. Its key is a draw, and the shared maps stay. With `router` it has the
        key that it had when it was exported: the maps that were written with it have to be those that are here, and are
        taken over where there is no block yet. Raises UserError, and changes nothing then.
        """
        return peft_format.bring(self, Path(folder), name, lineage, router=router)

    # -- pruning ----------------------------------------------------------------------------------------

    def usage(self, batches: Iterable[Mapping[str, Any]]) -> Tensor:
        """The mean weight of each block over the rows of batches, (block,)."""
        return pruning.adapter_usage(self, batches).mean

    def merge(self, name: str, weight: float = 1.0) -> None:
        """Add a block, weighed, to the model's own weights, and take it out of the attention."""
        pruning.merge_block(self, name, weight)

    def prune(
        self,
        batches: Iterable[Mapping[str, Any]],
        loss: Callable[[Mapping[str, Any]], Any] | None = None,
        least: float = 0.01,
        *,
        merge: bool = False,
    ) -> pruning.Pruned:
        """Take out the blocks to which no row of the batches gives at least `least`; see `pruning.prune`."""
        return pruning.prune(self, batches, loss, least, merge=merge)
