"""A model with blocks for many tasks, mixed for each example by one attention that they share (SAPT)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.adapters.attention import ProjectionOrder, SharedAttention
from regard.adapters.lora import MixedLayer
from regard.adapters.lora_pool import LoraAdapterPool
from regard.adapters.prompt_pool import PromptAdapterPool
from regard.adapters.routing import Routing
from regard.errors import UserError, check_choice, check_int

BLOCKS = ("lora", "prompt")


@dataclass(frozen=True)
class MergedAdapter:
    """A block that was added to the model's own weights: its weight, its lineage, A and B of each layer."""

    name: str
    weight: float
    lineage: dict[str, Any]
    parts: dict[str, tuple[Tensor, Tensor]]


class AdapterModel(nn.Module):
    """A Transformers model with a pool of blocks beside its layers, and the attention that weighs them.

    The state and the forward pass of `regard.SharedAdapters`, which adds files, PEFT's format and pruning.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        adapter_type: str = "lora",
        r: int = 8,
        lora_alpha: float = 32,
        target_modules: str | Sequence[str] = "auto",
        *,
        router_hidden_size: int = 100,
        projection_order: ProjectionOrder = "published",
        temperature: float | None = None,
        detach_old: bool = False,
        top_k: int | None = None,
        dropout: float = 0.0,
        num_virtual_tokens: int = 10,
        encoder_hidden_size: int = 800,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _check(model, adapter_type)
        _check_numbers(
            lora_alpha=lora_alpha, router_hidden_size=router_hidden_size, temperature=temperature, dropout=dropout
        )
        named = target_modules if isinstance(target_modules, str) else list(target_modules)
        self.settings: dict[str, Any] = {
            "adapter_type": adapter_type,
            "router_hidden_size": router_hidden_size,
            "projection_order": projection_order,
            "temperature": temperature,
        }
        mixed: dict[str, Any]
        own: dict[str, Any]
        if adapter_type == "lora":
            mixed = {"r": r, "lora_alpha": lora_alpha, "target_modules": named}
            mixed |= {"detach_old": detach_old, "top_k": top_k, "dropout": dropout}
            own = {"by_row": True}
        else:
            _check_prompts(target_modules=named, detach_old=detach_old, top_k=top_k, dropout=dropout)
            mixed, own = {"num_virtual_tokens": num_virtual_tokens, "encoder_hidden_size": encoder_hidden_size}, {}
        self.settings |= {**mixed, "seed": seed}
        embedded: Any = model.get_input_embeddings().weight
        attention = SharedAttention(
            embedded.shape[1],
            hidden_size=router_hidden_size,
            projection_order=projection_order,
            temperature=temperature,
            seed=seed,
        )
        self.pool = (LoraAdapterPool if adapter_type == "lora" else PromptAdapterPool)(model, **mixed, **own, seed=seed)
        self.model: Any = model
        self.attention = attention.to(embedded.device)
        self.attention.open(None)
        self.active_adapter: str | None = None
        self.merged: list[MergedAdapter] = []
        self.added = 0
        self.base_sha256: str | None = None
        self._lineages: dict[str, dict[str, Any]] = {}
        self._routing = Routing(model, self.pool.mixture, self.attention)

    # -- blocks -----------------------------------------------------------------------------------------

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the blocks, in the order of the weights."""
        return tuple(self._lineages)

    @property
    def provenance(self) -> dict[str, dict[str, Any]]:
        """What is told of each block: what it was given with `add`, and `order`, its number among all ever added."""
        return {name: dict(told) for name, told in self._lineages.items()}

    def add_adapter(self, name: str, lineage: Mapping[str, Any] | None = None) -> int:
        """The number of a new block. It, its key and the shared projection are trained, all that is older is frozen.

        The block adds nothing yet. `lineage`: what is to be told of it (task, data and their hashes), kept with it.
        """
        if not isinstance(name, str) or not name:
            raise UserError(f"name: expected a text, got {name!r}")
        if name in self._lineages:
            raise UserError(f"name: expected a new one, got {name!r}; the blocks are {', '.join(self.adapter_names)}")
        told = {"order": self.added, **_told(lineage)}
        number = len(self.adapter_names)
        self.pool.reserve(number + 1)
        self.attention.use(number + 1)
        self._lineages[name] = told
        self.added += 1
        self._routing.changed()
        self.set_adapter(name)
        return number

    def index_of(self, name: str) -> int:
        """The place of a block among the weights. Raises UserError for an unknown name."""
        if name not in self._lineages:
            raise UserError(f"name: expected one of {', '.join(self.adapter_names) or 'no block yet'}, got {name!r}")
        return self.adapter_names.index(name)

    def delete_adapter(self, name: str) -> None:
        """Take a block and its key away: the others are mixed as if it had never been there."""
        number = self.index_of(name)
        if self.active_adapter == name:
            self.freeze()
        self.pool.drop(number)
        self.attention.drop(number)
        self._reseed(1)
        del self._lineages[name]
        self._routing.changed()

    def layers(self, what: str) -> dict[str, MixedLayer]:
        """The layers that have blocks beside them, by name, for what only low-rank blocks can do. Raises UserError."""
        if not isinstance(self.pool, LoraAdapterPool):
            raise UserError(f"adapter_type: expected 'lora' to {what}, got {self.settings['adapter_type']!r}")
        return self.pool.layers

    def restore(self, blocks: Sequence[tuple[str, Mapping[str, Any]]], added: int) -> None:
        """Have blocks of these names and lineages, all frozen, the last of so many ever added; what they hold is drawn.

        For what reads a file: it fills them.
        """
        self.pool.reserve(len(blocks))
        self.attention.use(len(blocks))
        self._lineages = {name: dict(told) for name, told in blocks}
        self.added = added
        self._reseed(added - len(blocks))
        self._routing.changed()
        self.freeze()
        if isinstance(self.pool, PromptAdapterPool):
            self.pool.prompts.folded.fill_(True)

    def _reseed(self, removed: int) -> None:
        """Draw other blocks and keys than those that had the numbers which come again after so many are removed."""
        for one in (*self.pool.blocks, self.attention):
            one.seed += 1_000_003 * removed

    def set_adapter(self, name: str) -> None:
        """Let a block be trained, with its key and the shared projection, and no other."""
        number = self.index_of(name)
        self.pool.open(number)
        self.attention.open(number)
        self.active_adapter = name

    def freeze(self) -> None:
        """Freeze everything."""
        self.pool.open()
        self.attention.open(None)
        self.active_adapter = None

    def unload(self) -> PreTrainedModel:
        """The model, still frozen, with its own layers (blocks that were merged are in them), and without any block."""
        self._routing.remove()
        self.pool.remove()
        return self.model

    # -- running ----------------------------------------------------------------------------------------

    def forward(self, *args: Any, prompt_mask: Tensor | None = None, **inputs: Any) -> Any:
        """What the model gives, with its blocks mixed. `prompt_mask` (row, token): what the weights are made of."""
        with self._routing.prompting(prompt_mask):
            return self.model(*args, **inputs)

    def generate(self, input_ids: Tensor | None = None, *, prompt_mask: Tensor | None = None, **inputs: Any) -> Any:
        """What the model's `generate` gives, with the weights made once, of the prompt.

        The model's own `generate` gives the same as long as it reads the prompt at once and keeps a cache. A
        decoder-only model without one would be weighed anew at each word, by the answer too: use this then.
        """
        if input_ids is not None:
            inputs["input_ids"] = input_ids
            inputs.setdefault("attention_mask", self._padding(input_ids))
        if not self.adapter_names or (self._routing.two_parts and inputs.get("encoder_outputs") is not None):
            return self.model.generate(**inputs)
        with torch.no_grad():
            weights = self.routing_weights(prompt_mask=prompt_mask, **inputs)
        with self.use_weights(weights):
            return self.model.generate(**inputs)

    def _padding(self, tokens: Tensor) -> Tensor:
        """The mask that the model's `generate` makes of tokens which come without one."""
        found = self.model.generation_config
        ends = found.eos_token_id if isinstance(found.eos_token_id, list) else [found.eos_token_id]
        pad = None if found.pad_token_id in ends else found.pad_token_id
        return torch.ones_like(tokens) if pad is None else tokens.ne(pad).long()

    def routing_weights(self, *, prompt_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """How much of each block a batch gets, (row, block), from the attention; they sum to 1."""
        return self._routing.weights(inputs, prompt_mask)

    def query_vectors(self, *, prompt_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """The query vectors e of a batch, (row, width)."""
        return self._routing.vectors(inputs, prompt_mask)

    def use_weights(self, weights: Tensor | None) -> AbstractContextManager[None]:
        """While it lasts the blocks are mixed with these weights, (row, block) or (block,); None: with no block."""
        if weights is not None and (weights.dim() not in (1, 2) or weights.shape[-1] != len(self.adapter_names)):
            shape = f"(row, {len(self.adapter_names)}) or ({len(self.adapter_names)},)"
            raise UserError(f"weights: expected a shape {shape}, got {tuple(weights.shape)}")
        return self._routing.forcing(None if weights is None else weights.to(self.attention.down.device))

    def use_only(self, name: str) -> AbstractContextManager[None]:
        """While it lasts one block is used alone, with the weight 1."""
        number = self.index_of(name)
        alone = torch.zeros(len(self.adapter_names), device=self.attention.down.device)
        alone[number] = 1
        return self.use_weights(alone)


def _told(lineage: Mapping[str, Any] | None) -> dict[str, Any]:
    """A lineage as it will be read from a file."""
    try:
        found = json.loads(json.dumps(dict(lineage or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"lineage: expected names with values that JSON holds, got one it does not ({error})"
        ) from error
    return dict(found)


def _check(model: Any, adapter_type: Any) -> None:
    """Nothing, or a UserError."""
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model: expected a PreTrainedModel of Transformers, got {type(model).__name__}")
    if any(isinstance(module, MixedLayer) for module in model.modules()):
        raise UserError("model: expected one without blocks, got one that has some already")
    check_choice("adapter_type", adapter_type, BLOCKS)


def _check_prompts(**options: Any) -> None:
    """Nothing, or a UserError: what prompts have no use for."""
    usual = {"target_modules": "auto", "detach_old": False, "top_k": None, "dropout": 0.0}
    for name, value in options.items():
        if value != usual[name]:
            raise UserError(f"{name}: expected {usual[name]!r} with adapter_type='prompt', got {value!r}")


def _check_numbers(*, lora_alpha: Any, router_hidden_size: Any, temperature: Any, dropout: Any) -> None:
    """Nothing, or a UserError."""
    numbers = {"lora_alpha": lora_alpha, "router_hidden_size": router_hidden_size, "dropout": dropout}
    if temperature is not None:
        numbers["temperature"] = temperature
    for name, value in numbers.items():
        whole = isinstance(value, int) and not isinstance(value, bool)
        right = value == value and value < float("inf") if whole or isinstance(value, float) else False
        if name == "dropout" and not (right and 0 <= value < 1):
            raise UserError(f"dropout: expected a number from 0 to below 1, got {value!r}")
        if name == "router_hidden_size":
            check_int(name, value, least=1)
        if name != "dropout" and not (right and value > 0):
            raise UserError(f"{name}: expected a number above 0, got {value!r}")
