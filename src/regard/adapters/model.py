"""A model with adapters for many tasks, mixed for each example by a router (after SAPT)."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.adapters import training_state
from regard.adapters.attention import ProjectionOrder, SharedAttention
from regard.adapters.base_identity import BaseIdentity, KnownIdentities
from regard.adapters.generation import default_mask
from regard.adapters.head import written
from regard.adapters.lora import MixedLayer
from regard.adapters.lora_pool import LoraAdapterPool
from regard.adapters.mixture import hold
from regard.adapters.off_loading import bring_back, check_off_loading
from regard.adapters.options import LEARNT, LORA, as_json, check_defaults, check_numbers
from regard.adapters.prompt_pool import PromptAdapterPool
from regard.adapters.queries import StateReader
from regard.adapters.reflection import without
from regard.adapters.router_warmup import PastTask
from regard.adapters.routers import QueryName, RouterName, are_above, layers_above, make_query_reader_of, make_router
from regard.adapters.routing import Routing
from regard.adapters.whole_model import refuse_to_save, save_again
from regard.errors import UserError, check_choice, check_int
from regard.hooks.off_loaded import execution_device
from regard.hooks.split_weights import check_heads_are_whole
from regard.runs.model_type import input_embeddings

BLOCKS = ("lora", "prompt")


@dataclass(frozen=True)
class MergedAdapter:
    """An adapter added to the weights of the model: its weight, its lineage, A and B of each layer."""

    name: str
    weight: float
    lineage: dict[str, Any]
    parts: dict[str, tuple[Tensor, Tensor]]


class AdapterModel(nn.Module):
    """State and forward pass of `regard.SharedAdapters`, which adds files, PEFT's format and pruning.

    Attributes that it lacks are those of the model, as `Trainer` expects them.
    """

    _hf_peft_config_loaded = True  # asked by `Trainer`: a quantized base is trained with adapters

    def __init__(
        self,
        model: PreTrainedModel,
        adapter_type: str = "lora",
        r: int = 8,
        lora_alpha: float = 32,
        target_modules: str | Sequence[str] = "auto",
        *,
        router: RouterName = "discriminant",
        query: QueryName = "states",
        query_layers: Sequence[int] | None = None,
        above_query: bool = False,
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
        _check_model(model, adapter_type)
        check_off_loading(model)
        check_heads_are_whole(model)
        check_int("router_hidden_size", router_hidden_size, least=1)
        learnt: dict[str, Any] = {"router_hidden_size": router_hidden_size, "projection_order": projection_order}
        learnt["temperature"] = temperature
        if router == "discriminant":
            check_defaults(learnt, LEARNT, "router='discriminant'")
        check_numbers(lora_alpha, temperature, dropout)
        layers = target_modules if isinstance(target_modules, str) else list(target_modules)
        lora = {"target_modules": layers, "detach_old": detach_old, "top_k": top_k, "dropout": dropout}
        options: dict[str, Any]
        if adapter_type == "lora":
            options = {"r": r, "lora_alpha": lora_alpha, **lora}
        else:
            check_defaults({**lora, "above_query": above_query}, LORA, "adapter_type='prompt'")
            options = {"num_virtual_tokens": num_virtual_tokens, "encoder_hidden_size": encoder_hidden_size}
        query_reader = make_query_reader_of(model, query, query_layers)
        self.router = make_router(
            router,
            query_reader.width,
            hidden_size=router_hidden_size,
            projection_order=projection_order,
            temperature=temperature,
            seed=seed,
        )
        self.settings: dict[str, Any] = {
            **{"adapter_type": adapter_type, "router": router, "query": query},
            "query_layers": list(query_reader.layers) if isinstance(query_reader, StateReader) else None,
            **learnt,
            **{"seed": seed, "above_query": above_query},
            **options,
        }
        if above_query:
            options["target_modules"] = layers_above(model, query_reader, layers)
        self.pool = (
            LoraAdapterPool(model, **options, by_row=True, seed=seed)
            if adapter_type == "lora"
            else PromptAdapterPool(model, **options, seed=seed)
        )
        self.model: Any = model
        self.router.to(execution_device(model.get_input_embeddings())).set_trainable(None)
        self.active_adapter: str | None = None
        self.merged: list[MergedAdapter] = []
        self.added = 0
        self.base: BaseIdentity | None = None  # of a base that is not in memory: adapters were merged into it, …
        self.known_identities = KnownIdentities()
        self._lineages: dict[str, dict[str, Any]] = {}
        self.past_tasks: dict[str, PastTask] = {}
        self.head_versions = written(self)
        along = isinstance(self.pool, LoraAdapterPool) and are_above(query_reader, self.pool.layers.values())
        self._routing = Routing(
            model, self.pool.mixture, self.router, query_reader, reads_along=along, prepare=self.keep_in_memory
        )
        self.forward = training_state.like_forward_of(model, self)  # type: ignore[method-assign]
        refuse_to_save(model)
        self.register_state_dict_post_hook(training_state.keep_trained)
        self.register_load_state_dict_post_hook(training_state.expect_trained)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if getattr(self.forward, "__func__", None) is AdapterModel.forward:  # pickled: a method is known by its name
            self.forward = training_state.like_forward_of(self.model, self)  # type: ignore[method-assign]

    # -- blocks -----------------------------------------------------------------------------------------

    def keep_in_memory(self) -> None:
        """Take adapters back that accelerate has off-loaded with the model.

        Raises:
            UserError: It moves whole blocks, or all of this with the model, or values are lost.
        """
        if "_hf_hook" in self.__dict__:
            check_off_loading(self)
        if any(value.is_meta for part in self.pool.adapters for value in part.parameters()):
            check_off_loading(self.model)
            bring_back(self.pool.adapters)
            self.pool.check_in_memory()

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters, in the order of the weights."""
        return tuple(self._lineages)

    @property
    def provenance(self) -> dict[str, dict[str, Any]]:
        """Lineage of each adapter, as passed to `add_adapter`, and `order`, its index among all ever added."""
        return {name: dict(lineage) for name, lineage in self._lineages.items()}

    def add_adapter(self, name: str, lineage: Mapping[str, Any] | None = None) -> int:
        """Add an adapter and return its index.

        Only it is trained, with its key and the shared maps of a learnt router. It changes no output yet. `lineage` has
        facts to save with it (task, data and their hashes), which JSON can hold.
        """
        if not isinstance(name, str) or not name:
            raise UserError(f"name: expected a text, got {name!r}")
        if name in self._lineages:
            raise UserError(f"name: expected a new one, got {name!r}; the adapters are {', '.join(self.adapter_names)}")
        entry = {"order": self.added, **as_json(lineage)}
        self.keep_in_memory()
        index = len(self.adapter_names)
        with torch.inference_mode(False):  # parameters made in inference mode can never be trained
            self.pool.reserve(index + 1)
            self.router.use(index + 1)
        self._lineages[name] = entry
        self.added += 1
        self._changed()
        self.set_adapter(name)
        return index

    def index_of(self, name: str) -> int:
        if name not in self._lineages:
            raise UserError(f"name: expected one of {', '.join(self.adapter_names) or 'no adapter yet'}, got {name!r}")
        return self.adapter_names.index(name)

    def delete_adapter(self, name: str) -> None:
        """Remove an adapter and its key or mean; the others are mixed on. The covariance of their rows stays."""
        self.keep_in_memory()
        index = self.index_of(name)
        others = {task: past for task, past in self.past_tasks.items() if task != name}
        self.past_tasks = {task: PastTask(without(past.target, index), past.vectors) for task, past in others.items()}
        if self.active_adapter == name:
            self.freeze()
        self.pool.delete(index)
        self.router.delete(index)
        self.reseed(1)
        self._routing.prompted.pop(name, None)
        del self._lineages[name]
        self._changed()

    def knows(self, name: str) -> bool:
        """Return whether the router was given rows of an adapter's task."""
        index, router = self.index_of(name), self.router
        return name in self.past_tasks if isinstance(router, SharedAttention) else bool(router.num_rows[index] > 0)

    def note_prompt(self, name: str, batch: Mapping[str, Any]) -> None:
        """Take note of whether an adapter's rows have answers, which the router does not see."""
        inputs, prompted = dict(batch), self._routing.prompted
        if not prompted.get(name):
            prompted[name] = self._routing.marks_answer(inputs, inputs.pop("prompt_mask", None))
            self._routing.expects_prompt = prompted.get(self.active_adapter or "", False)

    def layers(self, action: str) -> dict[str, MixedLayer]:
        """Return the adapted layers by name, for an action that only LoRA adapters support."""
        if not isinstance(self.pool, LoraAdapterPool):
            raise UserError(f"adapter_type: expected 'lora' to {action}, got {self.settings['adapter_type']!r}")
        return self.pool.layers

    def restore(self, blocks: Sequence[tuple[str, Mapping[str, Any]]], added: int) -> None:
        """Create frozen adapters of these names and lineages, the last of `added`; the caller fills in tensors."""
        self.pool.reserve(len(blocks))
        self.router.use(len(blocks))
        self._lineages = {name: dict(lineage) for name, lineage in blocks}
        self.added = added
        self.reseed(added - len(blocks))
        self._changed()
        self.freeze()
        if isinstance(self.pool, PromptAdapterPool):
            self.pool.prompts.folded.fill_(True)

    def add_merged(self, merged: MergedAdapter) -> None:
        """Add an adapter to the weights; those that query vectors are read with are kept as they were."""
        query_reader = self._routing.query_reader
        if not self.merged and isinstance(query_reader, StateReader):
            layers = [layer for layer in self.layers("merge").values() if query_reader.reads(layer)]
            self._routing.unmerged = [(layer, layer.weight.detach().clone()) for layer in layers]
        for name, layer in self.layers("merge").items():
            down, up = (matrix.to(layer.weight.device) for matrix in merged.parts[name])
            delta = merged.weight * layer.adapters.scale * up @ down
            with torch.no_grad():
                delta = delta if isinstance(layer.base_layer, nn.Linear) else delta.T
                layer.weight.add_(delta.to(layer.weight.dtype))
        self.merged.append(merged)

    def reseed(self, removed: int) -> None:
        """Change seeds, so that adapters at indices free again after a removal get new initial weights."""
        seeded = [self.router] if isinstance(self.router, SharedAttention) else []
        for part in (*self.pool.adapters, *seeded):
            part.seed += 1_000_003 * removed

    def _changed(self) -> None:
        """Take note of adapters that were added or removed."""
        self._routing.changed(len(self._lineages))
        if not isinstance(self.router, SharedAttention):
            self.router.names = self.adapter_names

    def set_adapter(self, name: str) -> None:
        """Train only this adapter, with its key and the shared maps of a learnt router."""
        self.keep_in_memory()
        index = self.index_of(name)
        self.pool.set_trainable(index)
        self.router.set_trainable(index)
        self.active_adapter = name
        self._routing.expects_prompt = self._routing.prompted.get(name, False)

    def freeze(self) -> None:
        self.keep_in_memory()
        self.pool.set_trainable()
        self.router.set_trainable(None)
        self.active_adapter, self._routing.expects_prompt = None, False

    def unload(self) -> PreTrainedModel:
        """Remove all adapters and return the model, still frozen; merged adapters stay in its weights."""
        self._routing.remove()
        self.pool.remove()
        save_again(self.model)
        return self.model

    # -- training ---------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Return what is the model's, such as `config`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)

    @property
    def generation_config(self) -> Any:
        """The model's, which `Seq2SeqTrainer` sets."""
        return self.model.generation_config

    @generation_config.setter
    def generation_config(self, config: Any) -> None:
        self.model.generation_config = config

    def get_extra_state(self) -> Tensor:
        """Return the names of the adapters as bytes for `state_dict`."""
        return training_state.as_bytes({"names": self.adapter_names})

    def set_extra_state(self, state: Tensor) -> None:
        """Take the names in a `state_dict`; raise UserError if it is that of other adapters."""
        content = training_state.from_bytes(state)
        if content["names"] != list(self.adapter_names):
            expected = f"the state of the adapters {', '.join(self.adapter_names) or '(none)'}"
            raise UserError(f"checkpoint: expected {expected}, got that of {', '.join(content['names']) or '(none)'}")

    def _replicate_for_data_parallel(self) -> Any:
        raise UserError("devices: expected a process for each (`torchrun`, `accelerate launch`), got DataParallel")

    # -- running ----------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Call with the labels known to the router, also where a trainer has put a `forward` of its own here.

        That of TRL calls the base model, without labels.
        """
        with self._routing.alone(), hold(self._routing, labels=inputs.get("labels")):
            return nn.Module.__call__(self, *args, **inputs)  # torch.compile has no super() in a block

    def forward(
        self, *args: Any, labels: Tensor | None = None, prompt_mask: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Return the outputs of the model; `prompt_mask` (row, token) marks the tokens that route."""
        if labels is not None:
            inputs["labels"] = labels
        with self._routing.alone(), hold(self._routing, prompt=prompt_mask):
            return self.model(*args, **inputs)

    def generate(self, input_ids: Tensor | None = None, *, prompt_mask: Tensor | None = None, **inputs: Any) -> Any:
        """Generate with weights computed once, from the prompt, unless `use_only` or `use_weights` set some.

        The model's own `generate` gives the same if it reads the prompt at once and keeps a cache. Without a cache, a
        decoder-only model would compute new weights for each token, from the answer as well.
        """
        if input_ids is not None:
            inputs["input_ids"] = input_ids
            if inputs.get("attention_mask") is None:
                inputs["attention_mask"] = default_mask(input_ids, inputs, self.model.generation_config)
        with self._routing.alone():
            if not self._routing.is_active or (self._routing.two_parts and inputs.get("encoder_outputs") is not None):
                return self.model.generate(**inputs)
            plain = prompt_mask is None and not {"use_cache", "generation_config", "prefill_chunk_size"} & inputs.keys()
            if plain and self._routing.reads_along and self.model.generation_config.use_cache:
                return self.model.generate(**inputs)
            with torch.no_grad():
                weights = self.routing_weights(prompt_mask=prompt_mask, **inputs)
            with self.use_weights(weights):
                return self.model.generate(**inputs)

    def routing_weights(self, *, prompt_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the weights (row, adapter) that the router gives a batch; they sum to 1."""
        return self._routing.weights(inputs, prompt_mask)

    def query_vectors(self, *, prompt_mask: Tensor | None = None, **inputs: Any) -> Tensor:
        """Return the query vectors (row, width) of a batch."""
        return self._routing.vectors(inputs, prompt_mask)

    def use_weights(self, weights: Tensor | None) -> AbstractContextManager[None]:
        """Mix with these weights for a while, (row, adapter) or (adapter,); None leaves the adapters out."""
        if weights is not None and (weights.dim() not in (1, 2) or weights.shape[-1] != len(self.adapter_names)):
            shape = f"(row, {len(self.adapter_names)}) or ({len(self.adapter_names)},)"
            raise UserError(f"weights: expected a shape {shape}, got {tuple(weights.shape)}")
        return self._routing.use_weights(None if weights is None else weights.to(self.router.count.device))

    def use_only(self, name: str) -> AbstractContextManager[None]:
        """Use only this adapter for a while, with weight 1."""
        index = self.index_of(name)
        weights = torch.zeros(len(self.adapter_names), device=self.router.count.device)
        weights[index] = 1
        return self.use_weights(weights)


def _check_model(model: Any, adapter_type: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model: expected a PreTrainedModel of Transformers, got {type(model).__name__}")
    if any(isinstance(module, MixedLayer) for module in model.modules()):
        raise UserError("model: expected one without adapters, got one that has some already")
    check_choice("adapter_type", adapter_type, BLOCKS)
    table = getattr(input_embeddings(model), "weight", None)
    if not isinstance(table, Tensor):
        raise UserError(f"model: expected one with a table of input embeddings, got {type(model).__name__}")
    if adapter_type == "prompt" and table.is_meta:
        raise UserError("adapter_type: expected 'lora' with input embeddings that are off-loaded, got 'prompt'")
