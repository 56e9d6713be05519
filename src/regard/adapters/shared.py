"""Adapters for many tasks in a Hugging Face model, mixed for each example by a shared attention (SAPT)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from regard.adapters import peft_format, pruning, saving
from regard.adapters.model import AdapterModel


class SharedAdapters(AdapterModel):
    """A model with one adapter for each task, mixed by a shared attention.

        adapters = regard.SharedAdapters(model)
        adapters.add_adapter("sst2")                      # an adapter and a key; train adapters(**batch).loss as usual
        adapters.add_adapter("agnews")                    # another; older ones are frozen
        adapters.save_pretrained("adapters")

    The weights of an example come from its query vector, the maximum over tokens of the input embeddings. The tokens
    are those of the encoder's input, all of an encoder, or the prompt of a decoder-only model: where `prompt_mask` is
    true, else where `labels` are −100, else all. Weights are computed once, and hold in all layers, in the decoder, and
    for all generated tokens. Without adapters the model is unchanged.

    The model is changed in place and its own weights are frozen. Calling it mixes adapters as calling this does. See
    `SharedAttention` for `router_hidden_size` (there `hidden_size`), `projection_order` and `temperature`, and
    `LoraAdapterPool` and `PromptAdapterPool` for the other arguments.

    Source:
        SAPT (arXiv 2401.08295).
    """

    # -- files ------------------------------------------------------------------------------------------

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write adapters, attention and lineages to a folder, completely or not at all; return the folder."""
        return saving.save(self, Path(folder), overwrite=overwrite)

    @classmethod
    def from_pretrained(cls, model: PreTrainedModel | str | Path, folder: str | Path) -> SharedAdapters:
        """Load adapters, all frozen, into a model or into the model of a name.

        Raises:
            UserError: The adapters belong to another base.
        """
        return saving.load(cls, model, Path(folder))

    def export_peft(self, name: str, folder: str | Path, *, router: bool = False, overwrite: bool = False) -> Path:
        """Write an adapter in PEFT's format, with its lineage and the hash of its base.

        PEFT's model then computes what `use_only` gives. Adapters merged into this base are not in the files.

        Args:
            name: Name of the adapter.
            folder: Folder to write.
            router: Write the keys and the shared maps as well; PEFT does not read them.
            overwrite: Replace an existing folder.

        Returns:
            The folder.
        """
        return peft_format.export_adapter(self, name, Path(folder), router=router, overwrite=overwrite)

    def import_peft(
        self, folder: str | Path, name: str, lineage: Mapping[str, Any] | None = None, *, router: bool = False
    ) -> int:
        """Add the LoRA adapter of a folder in PEFT's format, frozen, and return its index.

        Args:
            folder: Folder of the adapter.
            name: Name of the new adapter.
            lineage: Its lineage; by default that written by `export_peft`.
            router: Restore the key written by `export_peft`. Its shared maps must be those of this model, which takes
                them over if it has no adapter yet. By default the key is initialized as of any new adapter.

        Raises:
            UserError: The adapter, its base or its maps do not fit; nothing is changed then.
        """
        return peft_format.import_adapter(self, Path(folder), name, lineage, router=router)

    # -- pruning ----------------------------------------------------------------------------------------

    def usage(self, batches: Iterable[Mapping[str, Any]]) -> Tensor:
        """Return the mean weight of each adapter over the rows of batches, (adapter,)."""
        return pruning.adapter_usage(self, batches).mean

    def merge(self, name: str, weight: float = 1.0) -> None:
        """Add an adapter, times `weight`, to the weights of the model, and remove it from the attention."""
        pruning.merge_adapter(self, name, weight)

    def prune(
        self,
        batches: Iterable[Mapping[str, Any]],
        loss: Callable[[Mapping[str, Any]], Any] | None = None,
        least: float = 0.01,
        *,
        merge: bool = False,
    ) -> pruning.PruneResult:
        """Remove adapters to which no row gives a weight of at least `least`; see `pruning.prune`."""
        return pruning.prune(self, batches, loss, least, merge=merge)
