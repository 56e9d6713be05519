"""The adapters that a run of SAPT has learnt, as a pool of their own: to be mixed, pruned, or used with peft."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.adapters.prompt_pool import PromptAdapterPool
from regard.adapters.routers import Router
from regard.adapters.shared import SharedAdapters
from regard.continual.adapter_network import AdapterPool
from regard.continual.methods.sapt import SaptNetwork
from regard.continual.methods.sapt_config import parse_layers
from regard.continual.models import load_network
from regard.errors import UserError
from regard.models.generator import Generator
from regard.models.pretrained import load


def load_adapters(model: PreTrainedModel | str | Path, folder: str | Path) -> SharedAdapters:
    """Return the adapters of a network of SAPT that `regard rollback` wrote, in the model that its run began with.

    `model`, or its name, is changed in place. An adapter is named after its tasks, joined by "+".
    """
    network = load_network(folder)
    if not isinstance(network, SaptNetwork):
        raise UserError(f"folder: expected a model of sapt, whose blocks share one attention; {folder} is none")
    if not isinstance(model, PreTrainedModel):
        model = load(str(model), dtype="float32", language_model=isinstance(network.classifier, Generator)).model
    pool = network.pool
    pool.remove()
    within = _check_base(model, network)
    used, tasks = int(network.count), network.classifier.config.lineage["tasks"]
    owners: list[list[dict[str, Any]]] = [[] for _ in range(used)]
    for number, task in enumerate(tasks):
        owners[network.adapter_of(number)].append(task)
    adapters = SharedAdapters(model, **_pool_options(network.config, pool, within))
    adapters.restore([("+".join(task["name"] for task in shared), {"tasks": shared}) for shared in owners], used)
    for source, target in zip(_adapter_tensors(pool, used), _adapter_tensors(adapters.pool, used), strict=True):
        target.data.copy_(source)
    _copy_router(network.router, adapters.router)
    return adapters


def _pool_options(config: Any, pool: AdapterPool, within: str) -> dict[str, Any]:
    """Return what a pool in a model is made with to be like one in a part of it, whose names begin with `within`."""
    names: tuple[str, ...] = ("adapter_type", "router", "query")
    names += ("router_hidden_size", "projection_order") if config.learns_router else ()
    layers = {"query_layers": parse_layers(config.query_layers)}
    if isinstance(pool, PromptAdapterPool):
        names += ("num_virtual_tokens", "encoder_hidden_size")
        return {name: getattr(config, name) for name in names} | layers
    options = {name: getattr(config, name) for name in (*names, "r", "lora_alpha", "detach_old")} | layers
    return options | {"target_modules": [f"{within}{name}" for name in pool.layers], "top_k": config.top_k or None}


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


def _check_base(model: PreTrainedModel, network: SaptNetwork) -> str:
    encoder: nn.Module = network.classifier.encoder
    candidates = [(name, module) for name, module in model.named_modules() if type(module) is type(encoder)]
    name, base = candidates[0] if candidates else ("", model)
    weights, base_name = base.state_dict(), network.classifier.config.lineage["base"]
    for key, value in encoder.state_dict().items():
        if key not in weights or not torch.equal(weights[key].to(value), value):
            raise UserError(f"model: expected the one that the run began with, {base_name}; got one with other {key}")
    return f"{name}." if name else ""
