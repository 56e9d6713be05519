"""Blocks to and from the adapter format of PEFT, one LoRA a folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.adapters import saving
from regard.adapters.lora import LoraAdapters
from regard.adapters.model import AdapterModel
from regard.errors import UserError
from regard.runs.output_dir import atomic_folder

CONFIG, WEIGHTS, ROUTER = "adapter_config.json", "adapter_model.safetensors", "shared_attention.safetensors"
_PREFIX = "base_model.model."
_OWN = "regard"
"""Where a block's name, lineage and base are told in the header of its tensors: PEFT does not read the header, and
warns of settings that it does not know."""
_REFUSED = {
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
"""Settings of PEFT under which an adapter is more than A and B beside linear layers."""
_CHANGING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""How blocks begin with which PEFT takes what they begin with out of the base model's weights."""


def export(adapters: AdapterModel, name: str, folder: Path, *, router: bool, overwrite: bool) -> Path:
    """Where a block was written: the folder, which PEFT loads onto the same base; alone it is what `forced` gives.

    The block's name, its lineage and its base are told with it. With `router` all keys and the shared maps are written.
    """
    number, layers = adapters.index_of(name), adapters.layers("export")
    tensors, turned = {}, False
    for layer, mixed in layers.items():
        for part, values in (("lora_A", mixed.blocks.A), ("lora_B", mixed.blocks.B)):
            tensors[f"{_PREFIX}{layer}.{part}.weight"] = values[number].detach().cpu().contiguous().clone()
        turned = turned or not isinstance(mixed.base_layer, nn.Linear)
    about = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": adapters.model.name_or_path or None,
        "inference_mode": True,
        "r": adapters.settings["rank"],
        "lora_alpha": adapters.settings["alpha"],
        "lora_dropout": 0.0,
        "target_modules": list(layers),
        "fan_in_fan_out": turned,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
    }
    base = saving.base_of(adapters)
    own = {"name": name, "lineage": saving.lineage_of(base, adapters.provenance[name]), "base": base}
    with atomic_folder(folder, marker=CONFIG, overwrite=overwrite, option=saving.OPTION) as place:
        (place / CONFIG).write_text(json.dumps(about, indent=2), encoding="utf-8")
        save_file(tensors, place / WEIGHTS, {"format": "pt", _OWN: json.dumps(own)})
        if router:
            told = {
                "format": "pt",
                "names": json.dumps(adapters.adapter_names),
                "settings": json.dumps(adapters.settings),
            }
            save_file(saving.attention_tensors(adapters), place / ROUTER, told)
    return folder


def bring(adapters: AdapterModel, folder: Path, name: str, lineage: Mapping[str, Any] | None, *, router: bool) -> int:
    """The number of a new block, frozen, which alone is what the adapter of a folder is.

    Another scale goes into B, a lower rank is filled up with zeros, a layer that the adapter leaves alone gets zeros.
    Its lineage is the one that is given, or else the one in the folder. With `router` it has the key that it had, and
    the first block brings the shared maps along. Raises UserError for what blocks cannot be, for a block of another
    base, and with `router` for a key of other maps; nothing is changed then.
    """
    about = saving.read_json(folder / CONFIG, "an adapter of PEFT")
    _check(folder, about)
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: expected {WEIGHTS}, got none; others than safetensors are not read")
    found = _layers(folder, saving.read_tensors(folder / WEIGHTS))
    layers = adapters.layers("import")
    unknown = [layer for layer in found if layer not in layers]
    if unknown:
        targets = ", ".join(dict.fromkeys(layer.rsplit(".", 1)[-1] for layer in layers))
        raise UserError(f"{folder}: expected an adapter of the layers {targets} of this model, got one of {unknown[0]}")
    parts = {layer: _fitted(layers[layer].blocks, folder, about, layer, *found[layer]) for layer in found}
    own = _own(folder / WEIGHTS)
    if own:
        saving.check_weights(own["base"], saving.base_of(adapters)["sha256"])
    key, maps = _routed(adapters, folder, own) if router else (None, {})
    before = adapters.active_adapter
    number = adapters.add_adapter(name, own.get("lineage") if lineage is None else lineage)
    with torch.no_grad():
        for place, value in maps.items():
            saving.maps(adapters)[place].copy_(value)
        if key is not None:
            adapters.attention.keys[number].copy_(key)
        for layer, mixed in layers.items():
            if layer in parts:
                mixed.blocks.A[number].copy_(parts[layer][0])
                mixed.blocks.B[number].copy_(parts[layer][1])
    if before is None:
        adapters.freeze()
    else:
        adapters.set_adapter(before)
    return number


def _check(folder: Path, about: Mapping[str, Any]) -> None:
    """Nothing, or a UserError: the adapter is none that blocks can be."""
    if about.get("peft_type") != "LORA":
        raise UserError(f"{folder}: expected a LoRA adapter, got one of the type {about.get('peft_type')!r}")
    for setting, what in _REFUSED.items():
        if about.get(setting):
            raise UserError(f"{folder}: expected a plain LoRA adapter, got one that is {what} ({setting})")
    begun = str(about.get("init_lora_weights", True))
    if begun.startswith(_CHANGING):
        raise UserError(
            f"{folder}: expected a plain LoRA adapter, got one for which peft changes the base model's own weights "
            f"(init_lora_weights={begun!r})"
        )
    if about.get("bias", "none") != "none":
        raise UserError(f"{folder}: expected a plain LoRA adapter, got one with biases (bias={about['bias']!r})")
    rank, alpha = about.get("r"), about.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)) or rank < 1:
        raise UserError(f"{folder}: expected a rank r and lora_alpha in {CONFIG}, got {rank!r} and {alpha!r}")


def _own(path: Path) -> dict[str, Any]:
    """The name, the lineage and the base of a block that was written here; nothing where PEFT wrote the adapter."""
    told = saving.read_metadata(path).get(_OWN)
    if told is None:
        return {}
    try:
        found = json.loads(told)
        lineage = {name: value for name, value in found["lineage"].items() if name != "order"}
        base = {name: found["base"][name] for name in ("name", "architecture", "sha256")}
        return {"name": str(found["name"]), "lineage": lineage, "base": {**base, "sha256": str(base["sha256"])}}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: expected what `export_peft` tells of a block, got {saving.line(error)}") from error


def _routed(adapters: AdapterModel, folder: Path, own: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The key (width,) of a folder's block, and the maps that it has a meaning under. Raises UserError for others."""
    path, attention = folder / ROUTER, adapters.attention
    if not path.is_file():
        raise UserError(
            f"{folder}: expected {ROUTER} beside the adapter, got none; `export_peft` writes it with router=True"
        )
    if not own:
        raise UserError(
            f"{folder / WEIGHTS}: expected the name of its block, got none; without router=True it is not needed"
        )
    there, keys, maps = _router(path)
    inner, width = attention.down.shape
    here = _kind(inner, width, attention.order, attention.temperature)
    reason = "a key means something only under its own maps"
    if here != there:
        raise UserError(f"{path}: expected maps of {here}, got {there}; {reason}")
    if own["name"] not in keys:
        raise UserError(f"{path}: expected the key of {own['name']}, got those of {', '.join(keys)}")
    mine = saving.maps(adapters)
    if adapters.adapter_names and not all(torch.equal(value, maps[name].to(value)) for name, value in mine.items()):
        raise UserError(f"{path}: expected the maps of the blocks that are here, got others; {reason}")
    return keys[own["name"]], maps


def _router(path: Path) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """The kind of attention that a file holds, the key (width,) of each block, and the maps, both by name."""
    tensors, told = saving.read_tensors(path), saving.read_metadata(path)
    try:
        names, settings = [str(name) for name in json.loads(told["names"])], json.loads(told["settings"])
        keys = tensors.pop("attention.keys")
        inner, width = int(settings["inner"]), keys.shape[1]
        shapes = {"down": (inner, width), "up": (width, inner), "norm.weight": (width,), "norm.bias": (width,)}
        maps = {f"attention.{name}": tensors[f"attention.{name}"] for name in shapes}
        if any(maps[f"attention.{name}"].shape != shape for name, shape in shapes.items()):
            raise ValueError(f"maps of other shapes than {shapes}")
        temperature = settings["temperature"] or math.sqrt(width)
        kind = _kind(inner, width, str(settings["order"]), temperature)
        return kind, dict(zip(names, keys, strict=True)), maps
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        got = saving.line(error)
        raise UserError(f"{path}: expected keys and maps as `export_peft` leaves them, got {got}") from error


def _kind(inner: int, width: int, order: str, temperature: float) -> str:
    """What maps and keys are those of, in words."""
    return f"inner={inner}, width={width}, order={order!r}, temperature={float(temperature)}"


def _layers(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """A and B of each layer that an adapter has."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        named = re.fullmatch(re.escape(_PREFIX) + r"(.+)\.lora_([AB])\.weight", key)
        if named is None:
            raise UserError(f"{folder}: expected A and B of layers in {WEIGHTS}, got {key}")
        found.setdefault(named[1], {})[named[2]] = value
    for layer, parts in found.items():
        if set(parts) != {"A", "B"}:
            raise UserError(f"{folder}: expected A and B of {layer}, got {next(iter(parts))} alone")
    if not found:
        raise UserError(f"{folder}: expected A and B of layers in {WEIGHTS}, got none")
    return {layer: (parts["A"], parts["B"]) for layer, parts in found.items()}


def _fitted(
    blocks: LoraAdapters, folder: Path, about: Mapping[str, Any], layer: str, down: Tensor, up: Tensor
) -> tuple[Tensor, Tensor]:
    """A and B of a layer with the rank and at the scale of the blocks here."""
    rank = down.shape[0]
    if down.shape != (rank, blocks.inputs) or up.shape != (blocks.outputs, rank):
        got = f"A {tuple(down.shape)} and B {tuple(up.shape)}"
        raise UserError(f"{folder}: expected {layer} of {blocks.inputs} inputs and {blocks.outputs} outputs, got {got}")
    if rank > blocks.rank:
        raise UserError(f"{folder}: expected a rank of at most {blocks.rank}, got {rank}")
    alpha = float(_pattern(about.get("alpha_pattern"), layer, about["lora_alpha"]))
    scale = alpha / (math.sqrt(rank) if about.get("use_rslora") else rank)
    fitted_down, fitted_up = torch.zeros(blocks.rank, blocks.inputs), torch.zeros(blocks.outputs, blocks.rank)
    fitted_down[:rank] = down.float()
    fitted_up[:, :rank] = up.float() * (scale / blocks.scale)
    return fitted_down, fitted_up


def _pattern(patterns: Any, layer: str, usual: Any) -> Any:
    """What PEFT's patterns say for a layer: a name or its end, as a regular expression."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", layer):
            return value
    return usual
