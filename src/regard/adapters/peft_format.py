"""Export and import of adapters in the format of PEFT, one LoRA adapter a folder."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.adapters import saving
from regard.adapters.discriminant import DiscriminantRouter
from regard.adapters.lora import LoraAdapters
from regard.adapters.model import AdapterModel
from regard.errors import UserError
from regard.models.model_files import as_user_error
from regard.runs.output_dir import atomic_folder

CONFIG, WEIGHTS, ROUTER = "adapter_config.json", "adapter_model.safetensors", "router.safetensors"
_PREFIX = "base_model.model."
_HEADER = "regard"
"""Key of the adapter's name, lineage and base in the header of the tensors: PEFT does not read the header, and warns of
unknown fields in its configuration."""
_UNSUPPORTED = {
    "use_dora": "weight-decomposed (DoRA)",
    "use_qalora": "quantised (QALoRA)",
    "use_bdlora": "block-diagonal",
    "lora_bias": "with biases",
    "modules_to_save": "with whole modules",
    "layer_replication": "with layers repeated",
    "alora_invocation_tokens": "invoked by tokens",
    "trainable_token_indices": "with embeddings",
    "kasa_config": "with base weights that are cut down (KaSA)",
    "target_parameters": "with targets that are no layers",
}
"""Options of PEFT with which an adapter is more than A and B beside linear layers."""
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initializations for which PEFT changes the weights of the base model."""


def export_adapter(adapters: AdapterModel, name: str, folder: Path, *, router: bool, overwrite: bool) -> Path:
    """Write an adapter with its name, lineage and base, for PEFT; see `SharedAdapters.export_peft`."""
    index, layers = adapters.index_of(name), adapters.layers("export")
    tensors, transposed = {}, False
    for layer, mixed in layers.items():
        for matrix, values in (("lora_A", mixed.adapters.A), ("lora_B", mixed.adapters.B)):
            tensors[f"{_PREFIX}{layer}.{matrix}.weight"] = values[index].detach().cpu().contiguous().clone()
        transposed = transposed or not isinstance(mixed.base_layer, nn.Linear)
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": None}
    config |= {"base_model_name_or_path": adapters.model.name_or_path or None, "inference_mode": True}
    config |= {name: adapters.settings[name] for name in ("r", "lora_alpha")} | {"lora_dropout": 0.0}
    config |= {"target_modules": list(layers), "fan_in_fan_out": transposed, "bias": "none"}
    config |= {"use_rslora": False, "use_dora": False}
    base = saving.base_of(adapters)
    origin = {"name": name, "lineage": saving.lineage_of(base, adapters.provenance[name]), "base": base}
    with atomic_folder(folder, marker=CONFIG, overwrite=overwrite, option=saving.OPTION) as target:
        (target / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
        save_file(tensors, target / WEIGHTS, {"format": "pt", _HEADER: json.dumps(origin)})
        if router:
            contents = {"names": adapters.adapter_names, "settings": adapters.settings}
            metadata = {name: json.dumps(content) for name, content in contents.items()}
            save_file(saving.router_tensors(adapters), target / ROUTER, {"format": "pt", **metadata})
    return folder


def import_adapter(
    adapters: AdapterModel, folder: Path, name: str, lineage: Mapping[str, Any] | None, *, router: bool
) -> int:
    """Add the adapter of a folder; B absorbs another scale, and a lower rank and other layers are filled with zeros."""
    config = saving.read_json(folder / CONFIG, "an adapter of PEFT")
    _check_config(folder, config)
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: expected {WEIGHTS}, got none; others than safetensors are not read")
    tensors, header = saving.read_safetensors(folder / WEIGHTS)
    pairs = _group_by_layer(folder, tensors)
    layers = adapters.layers("import")
    unknown = [layer for layer in pairs if layer not in layers]
    if unknown:
        targets = ", ".join(dict.fromkeys(layer.rsplit(".", 1)[-1] for layer in layers))
        raise UserError(f"{folder}: expected an adapter of the layers {targets} of this model, got one of {unknown[0]}")
    matrices = {layer: _fit_matrices(layers[layer].adapters, folder, config, layer, *pairs[layer]) for layer in pairs}
    origin = _read_origin(folder / WEIGHTS, header.get(_HEADER))
    if origin:
        saving.check_weights(origin["base"], saving.base_of(adapters)["sha256"])
    route = _read_route(adapters, folder, origin) if router else _Route({}, {})
    active = adapters.active_adapter
    index = adapters.add_adapter(name, origin.get("lineage") if lineage is None else lineage)
    with torch.no_grad():
        for tensor_name, value in route.shared.items():
            adapters.router.shared_tensors()[tensor_name].copy_(value)
        for tensor_name, value in route.own.items():
            adapters.router.adapter_tensors()[tensor_name][index].copy_(value)
        for layer, mixed in layers.items():
            if layer in matrices:
                mixed.adapters.A[index].copy_(matrices[layer][0])
                mixed.adapters.B[index].copy_(matrices[layer][1])
    if active is None:
        adapters.freeze()
    else:
        adapters.set_adapter(active)
    return index


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise UserError(f"{folder}: expected a LoRA adapter, got one of the type {config.get('peft_type')!r}")
    extras = [f"that is {words} ({option})" for option, words in _UNSUPPORTED.items() if config.get(option)]
    initialization, bias = str(config.get("init_lora_weights", True)), config.get("bias", "none")
    if initialization.startswith(_CHANGES_BASE):
        extras.append(f"for which peft changes the base model's own weights (init_lora_weights={initialization!r})")
    if bias != "none":
        extras.append(f"with biases (bias={bias!r})")
    if extras:
        raise UserError(f"{folder}: expected a plain LoRA adapter, got one {extras[0]}")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)) or rank < 1:
        raise UserError(f"{folder}: expected a rank r and lora_alpha in {CONFIG}, got {rank!r} and {alpha!r}")


def _read_origin(path: Path, text: str | None) -> dict[str, Any]:
    """Return name, lineage and base as written by `export_peft`; nothing if PEFT wrote the adapter."""
    if text is None:
        return {}
    with as_user_error(f"{path}: expected what `export_peft` tells of a block, got", saving.MALFORMED):
        content = json.loads(text)
        lineage = {name: value for name, value in content["lineage"].items() if name != "order"}
        base = {name: content["base"][name] for name in ("name", "architecture", "sha256")}
        return {"name": str(content["name"]), "lineage": lineage, "base": {**base, "sha256": str(base["sha256"])}}


class _Route(NamedTuple):
    """What the router of a model gets with an adapter, by name: tensors of all adapters, and of this one."""

    shared: dict[str, Tensor]
    own: dict[str, Tensor]


def _read_route(adapters: AdapterModel, folder: Path, origin: Mapping[str, Any]) -> _Route:
    """Return what the router of a model takes over from the file beside an adapter.

    The maps of a learnt router must be those of the adapters that are there. A covariance is taken over by a model that
    has none.
    """
    path, router = folder / ROUTER, adapters.router
    if not path.is_file():
        raise UserError(
            f"{folder}: expected {ROUTER} beside the adapter, got none; `export_peft` writes it with router=True"
        )
    if not origin:
        raise UserError(
            f"{folder / WEIGHTS}: expected the name of its block, got none; without router=True it is not needed"
        )
    tensors, header = saving.read_safetensors(path)
    with as_user_error(f"{path}: expected a router as `export_peft` leaves it, got", saving.MALFORMED):
        names, settings = [str(name) for name in json.loads(header["names"])], json.loads(header["settings"])
        stacks = {name: tensors[f"router.{name}"] for name in router.adapter_tensors() if f"router.{name}" in tensors}
        if any(len(values) != len(names) for values in stacks.values()):
            raise ValueError(f"{len(names)} names for other numbers of adapters")
        kinds = [_describe_router(content, router.width) for content in (adapters.settings, settings)]
    if kinds[0] != kinds[1]:
        raise UserError(f"{path}: expected a router of {kinds[0]}, got {kinds[1]}; each means something else by a task")
    if origin["name"] not in names:
        raise UserError(f"{path}: expected the key of {origin['name']}, got those of {', '.join(names)}")
    with as_user_error(f"{path}: expected a router as `export_peft` leaves it, got", saving.MALFORMED):
        own = {name: values[names.index(origin["name"])] for name, values in stacks.items()}
        shared = {name: tensors[f"router.{name}"] for name in router.shared_tensors()}
        _check_tensors(adapters, shared, own)
    if not adapters.adapter_names:
        return _Route(shared, own)
    if isinstance(router, DiscriminantRouter):
        return _Route({} if float(router.degrees) else shared, own)
    here = router.shared_tensors()
    if not all(torch.equal(value, shared[name].to(value)) for name, value in here.items()):
        reason = "a key means something only under its own maps"
        raise UserError(f"{path}: expected the maps of the blocks that are here, got others; {reason}")
    return _Route({}, own)


def _describe_router(settings: Mapping[str, Any], width: int) -> str:
    """Describe what must be equal in two models for what their routers know of an adapter to mean the same."""
    values = {name: settings[name] for name in ("router", "query", "query_layers")}
    if settings["router"] == "attention":
        values |= {name: settings[name] for name in ("router_hidden_size", "projection_order")}
        values["temperature"] = float(settings["temperature"] or math.sqrt(width))
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def _check_tensors(adapters: AdapterModel, shared: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError if tensors have other shapes than those of the model's router, or other numbers than finite."""
    router = adapters.router
    width = {"keys": (router.width,), "means": (router.width,), "num_rows": ()}
    shapes = {name: tuple(value.shape) for name, value in router.shared_tensors().items()}
    for name, value in {**shared, **{name: own[name] for name in router.adapter_tensors()}}.items():
        expected = shapes.get(name, width.get(name))
        if tuple(value.shape) != expected:
            raise ValueError(f"{name} of the shape {tuple(value.shape)} in the place of {expected}")
        if not bool(value.isfinite().all()):
            raise ValueError(f"{name} with numbers that are not finite")


def _group_by_layer(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    matrices: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        match = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight", key)
        if match is None:
            raise UserError(f"{folder}: expected A and B of layers in {WEIGHTS}, got {key}")
        matrices.setdefault(match[1], {})[match[2]] = value
    for layer, pair in matrices.items():
        if set(pair) != {"A", "B"}:
            raise UserError(f"{folder}: expected A and B of {layer}, got {next(iter(pair))} alone")
    if not matrices:
        raise UserError(f"{folder}: expected A and B of layers in {WEIGHTS}, got none")
    return {layer: (pair["A"], pair["B"]) for layer, pair in matrices.items()}


def _fit_matrices(
    blocks: LoraAdapters, folder: Path, config: Mapping[str, Any], layer: str, down: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """Convert A and B of a layer to the rank and scale of the model's adapters."""
    rank = down.shape[0]
    if down.shape != (rank, blocks.inputs) or up.shape != (blocks.outputs, rank):
        got = f"A {tuple(down.shape)} and B {tuple(up.shape)}"
        raise UserError(f"{folder}: expected {layer} of {blocks.inputs} inputs and {blocks.outputs} outputs, got {got}")
    if rank > blocks.rank:
        raise UserError(f"{folder}: expected a rank of at most {blocks.rank}, got {rank}")
    patterns = (config.get("alpha_pattern") or {}).items()  # regular expressions of a name or its end
    alphas = [value for pattern, value in patterns if re.match(rf"(.*\.)?({pattern})$", layer)]
    alpha = float([*alphas, config["lora_alpha"]][0])
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    fitted_down, fitted_up = torch.zeros(blocks.rank, blocks.inputs), torch.zeros(blocks.outputs, blocks.rank)
    fitted_down[:rank] = down.float()
    fitted_up[:, :rank] = up.float() * (scale / blocks.scale)
    return fitted_down, fitted_up
