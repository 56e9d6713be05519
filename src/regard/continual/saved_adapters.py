"""The adapters that a run has learnt, as a pool of their own: to be mixed, pruned, merged, or used with PEFT."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.adapters.lora_pool import LoraAdapterPool
from regard.adapters.prompt_pool import PromptAdapterPool
from regard.adapters.routers import Router
from regard.adapters.shared import SharedAdapters
from regard.continual.adapter_network import AdapterNetwork, AdapterPool
from regard.continual.methods import METHODS
from regard.continual.methods.sapt import SaptNetwork
from regard.continual.methods.sapt_config import parse_layers
from regard.continual.models import LINEAGE, load_network
from regard.errors import UserError
from regard.models.generator import Generator
from regard.models.pretrained import load


def load_adapters(model: PreTrainedModel | str | Path, folder: str | Path) -> SharedAdapters:
    """Return the adapters of a network that `regard rollback` wrote, in the model that its run began with.

    The methods are those with an adapter for each task that works alone: SAPT, EPI and merges. `model`, or its name, is
    changed in place. An adapter is named after its tasks, joined by "+". The router knows tasks only if it was SAPT's.
    """
    if not (Path(folder) / LINEAGE).is_file():
        raise UserError(f"folder: expected one with {LINEAGE}, as `regard rollback` writes it, got {folder}")
    network = load_network(folder)
    _check_separable(network, f"folder: expected a model with an adapter for each task, {folder} is none")
    if not isinstance(model, PreTrainedModel):
        is_text = isinstance(network.classifier, Generator)
        model = load(str(model), dtype="float32", language_model=is_text).model
    return extract_adapters(model, network)


def extract_adapters(model: PreTrainedModel, network: nn.Module) -> SharedAdapters:
    """Return the adapters of a network, in the model that its run began with, as `load_adapters` does."""
    _check_separable(network, "method: expected one with an adapter for each task, the run's has none")
    assert isinstance(network, AdapterNetwork)
    pool = network.pool
    pool.remove()
    within = _check_base(model, network)
    used, tasks = int(network.count), network.classifier.config.lineage["tasks"]
    owners: list[list[dict[str, Any]]] = [[] for _ in range(used)]
    for number, task in enumerate(tasks):
        owners[network.adapter_of(number)].append(task)
    adapters = SharedAdapters(model, **_pool_options(network, within))
    adapters.restore([("+".join(task["name"] for task in shared), {"tasks": shared}) for shared in owners], used)
    for source, target in zip(_adapter_tensors(pool, used), _adapter_tensors(adapters.pool, used), strict=True):
        target.data.copy_(source)
    if isinstance(network, SaptNetwork):
        _copy_router(network.router, adapters.router)
    return adapters


def _check_separable(network: nn.Module, problem: str) -> None:
    if not (isinstance(network, AdapterNetwork) and network.separable):
        names = ", ".join(name for name, method in METHODS.items() if getattr(method.Network, "separable", False))
        raise UserError(f"{problem}; these have: {names}")


def _pool_options(network: AdapterNetwork, within: str) -> dict[str, Any]:
    """Return what a pool in a model is made with to be like one in a part of it, whose names begin with `within`."""
    pool, options = network.pool, dict[str, Any]()
    if isinstance(network, SaptNetwork):
        config = network.config
        names: tuple[str, ...] = ("router", "query")
        names += ("router_hidden_size", "projection_order") if config.learns_router else ()
        options = {name: getattr(config, name) for name in names} | {"query_layers": parse_layers(config.query_layers)}
        if isinstance(pool, PromptAdapterPool):
            names = ("adapter_type", "num_virtual_tokens", "encoder_hidden_size")
            return {name: getattr(config, name) for name in names} | options
        options |= {"detach_old": config.detach_old, "top_k": config.top_k or None}
    assert isinstance(pool, LoraAdapterPool)
    options |= {"r": pool.rank, "lora_alpha": pool.alpha}
    return options | {"target_modules": [f"{within}{name}" for name in pool.layers]}


def _copy_router(source: Router, target: Router) -> None:
    """Copy what a router knows of as many adapters as the other one has."""
    for name, value in target.shared_tensors().items():
        value.copy_(source.shared_tensors()[name])
    for name, values in target.adapter_tensors().items():
        for value, known in zip(values, source.adapter_tensors()[name], strict=False):
            value.data.copy_(known)


def _adapter_tensors(pool: AdapterPool, blocks: int) -> list[Tensor]:
    """Return what the first so many adapters are made of; soft prompts as they are read."""
    if isinstance(pool, PromptAdapterPool):
        pool.prompts.fold()
        return [pool.prompts.P[index] for index in range(blocks)]
    return [parameter for index in range(blocks) for parameter in pool.parameters_of(index)]


def _check_base(model: PreTrainedModel, network: AdapterNetwork) -> str:
    encoder: nn.Module = network.classifier.encoder
    candidates = [(name, module) for name, module in model.named_modules() if type(module) is type(encoder)]
    name, base = candidates[0] if candidates else ("", model)
    weights, base_name = base.state_dict(), network.classifier.config.lineage["base"]
    for key, value in encoder.state_dict().items():
        if key not in weights or not torch.equal(weights[key].to(value), value):
            raise UserError(f"model: expected the one that the run began with, {base_name}; got one with other {key}")
    return f"{name}." if name else ""
