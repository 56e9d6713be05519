"""Blocks, their attention and what is told of them, to and from a folder: safetensors and JSON, nothing of training."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from regard.adapters import pruning
from regard.adapters.base import base_sha256
from regard.adapters.lora import MixedLayer
from regard.adapters.model import AdapterModel, MergedAdapter
from regard.adapters.pool import LoraAdapterPool
from regard.adapters.prompts import PromptAdapterPool
from regard.errors import UserError
from regard.models.sources import folder_of, weight_files
from regard.runs.output_dir import atomic_folder

TENSORS, ABOUT, FORMAT = "adapters.safetensors", "adapters.json", "regard shared adapters 1"
OPTION = "folder"
"""The argument that names the folder, for messages."""
A = TypeVar("A", bound="AdapterModel")


def save(adapters: AdapterModel, folder: Path, *, overwrite: bool) -> Path:
    """Where everything was written: the folder."""
    if not adapters.adapter_names and not adapters.merged:
        raise UserError("adapters: expected at least one block to save, got none; add one")
    base = base_of(adapters)
    with atomic_folder(folder, marker=ABOUT, overwrite=overwrite, option=OPTION) as place:
        save_file(_tensors(adapters), place / TENSORS, {"format": "pt"})
        about = {
            "format": FORMAT,
            "settings": adapters.settings,
            "base": base,
            "layers": list(_layers(adapters)),
            "blocks": [{"name": name, "lineage": lineage_of(base, told)} for name, told in adapters.provenance.items()],
            "merged": [
                {"name": one.name, "weight": one.weight, "lineage": lineage_of(base, one.lineage)}
                for one in adapters.merged
            ],
            "added": adapters.added,
            "sha256": _sha256(place / TENSORS),
        }
        (place / ABOUT).write_text(json.dumps(about, indent=2), encoding="utf-8")
    return folder


def load(cls: type[A], model: PreTrainedModel | str | Path, folder: Path) -> A:
    """The blocks of a folder in a model."""
    about, tensors = _read(folder)
    try:
        base = about["base"]
        layers = [str(name) for name in about["layers"]]
        settings = {**about["settings"], **({"targets": layers} if layers else {})}
        blocks = [(str(one["name"]), dict(one["lineage"])) for one in about["blocks"]]
        merged = [(str(one["name"]), float(one["weight"]), dict(one["lineage"])) for one in about["merged"]]
        added = int(about["added"])
        if isinstance(model, (str, Path)):
            model = _model(model, str(base["architecture"]))
        _check_base(model, base, layers, tensors)
        if len(dict(blocks)) != len(blocks):
            raise ValueError("two blocks of one name")
        adapters = cls(model, **settings)
        adapters.settings = dict(about["settings"])
        adapters.restore(blocks, added)
        _fill(adapters, tensors)
        if merged:
            adapters.base_sha256 = base["sha256"]
        for number, (name, weight, told) in enumerate(merged):
            parts = {
                layer: (tensors[f"merged.{number}.{layer}.A"], tensors[f"merged.{number}.{layer}.B"])
                for layer in layers
            }
            pruning.fold(adapters, MergedAdapter(name, weight, told, parts))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder}: expected blocks as `save_pretrained` leaves them, got {line(error)}") from error
    return adapters


def attention_tensors(adapters: AdapterModel) -> dict[str, Tensor]:
    """The keys of the blocks, (block, width), and the shared maps, as a file holds them."""
    found = {f"attention.{name}": value for name, value in adapters.attention.state_dict().items()}
    kept = {name: value for name, value in found.items() if ".keys." not in name and not name.endswith(".count")}
    if adapters.adapter_names:
        kept["attention.keys"] = torch.stack([key.detach() for key in adapters.attention.keys])
    return {name: value.detach().cpu().contiguous().clone() for name, value in kept.items()}


def maps(adapters: AdapterModel) -> dict[str, Tensor]:
    """The maps that all blocks share, by the names in a file: the attention's own memory, to be filled."""
    own = adapters.attention.state_dict()
    return {f"attention.{name}": value for name, value in own.items() if name in ("down", "up") or "norm" in name}


def base_of(adapters: AdapterModel) -> dict[str, Any]:
    """The model that blocks belong to, as it was before any was merged into it: name, architecture, sha256."""
    model = adapters.model
    told = {"name": model.name_or_path or None, "architecture": type(model).__name__}
    return {**told, "sha256": adapters.base_sha256 or base_sha256(model)}


def lineage_of(base: Mapping[str, Any], lineage: Mapping[str, Any]) -> dict[str, Any]:
    """A lineage with the base that a block belongs to."""
    return {**lineage, "base": {"name": base["name"], "sha256": base["sha256"]}}


def check_weights(base: Mapping[str, Any], found: str) -> None:
    """Nothing, or a UserError: the sha256 of a model is not that of the base of the blocks."""
    if found != base["sha256"]:
        raise UserError(
            f"model: expected {_wanted(base)} with the weights {base['sha256'][:12]}, got the weights {found[:12]}"
        )


def read_json(path: Path, what: str) -> dict[str, Any]:
    """What a file of JSON holds. Raises UserError if there is none, or not by name."""
    if not path.is_file():
        raise UserError(f"folder: expected {what}, a folder with {path.name}, got {path.parent}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected {what}, got a file that cannot be read: {line(error)}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: expected {what}, got {type(found).__name__}")
    return found


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What a file of safetensors holds, by name. Raises UserError."""
    try:
        found: dict[str, Tensor] = load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: expected a whole file of safetensors, got {line(error)}") from error
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """What the header of a file of safetensors tells beside its tensors, by name. Raises UserError."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            found: dict[str, str] = file.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path}: expected a whole file of safetensors, got {line(error)}") from error
    return found


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is told, and the tensors, both whole."""
    about = read_json(folder / ABOUT, "blocks as `save_pretrained` leaves them")
    if about.get("format") != FORMAT:
        raise UserError(f"{folder / ABOUT}: expected the format {FORMAT!r}, got {about.get('format')!r}")
    if not (folder / TENSORS).is_file() or _sha256(folder / TENSORS) != about.get("sha256"):
        raise UserError(f"{folder / TENSORS}: expected the file that {ABOUT} tells of, got another, or none")
    return about, read_tensors(folder / TENSORS)


def _tensors(adapters: AdapterModel) -> dict[str, Tensor]:
    """All that a file holds: A (block, rank, inputs) and B (block, outputs, rank) of each layer, and the attention."""
    found = attention_tensors(adapters)
    for name, layer in _layers(adapters).items() if adapters.adapter_names else ():
        for part, values in (("A", layer.blocks.A), ("B", layer.blocks.B)):
            found[f"layers.{name}.{part}"] = torch.stack([value.detach() for value in values]).cpu().contiguous()
    if isinstance(adapters.pool, PromptAdapterPool):
        prompts = [adapters.pool.prompts.prompt(number).detach() for number in range(len(adapters.adapter_names))]
        found["prompts"] = torch.stack(prompts).cpu().contiguous()
    for number, one in enumerate(adapters.merged):
        for name, (down, up) in one.parts.items():
            found |= {f"merged.{number}.{name}.A": down.contiguous(), f"merged.{number}.{name}.B": up.contiguous()}
    return found


def _layers(adapters: AdapterModel) -> dict[str, MixedLayer]:
    """The layers that have blocks beside them, by name; none where blocks are prompts."""
    return adapters.pool.layers if isinstance(adapters.pool, LoraAdapterPool) else {}


def _fill(adapters: AdapterModel, tensors: Mapping[str, Tensor]) -> None:
    """Put what a file holds into blocks and attention."""
    stacks: dict[str, list[Tensor]] = {"attention.keys": list(adapters.attention.keys)}
    if isinstance(adapters.pool, PromptAdapterPool):
        stacks["prompts"] = list(adapters.pool.prompts.P)
    for name, layer in _layers(adapters).items():
        stacks |= {f"layers.{name}.A": list(layer.blocks.A), f"layers.{name}.B": list(layer.blocks.B)}
    for name, place in maps(adapters).items():
        _put(tensors[name], place, name)
    for name, places in stacks.items() if adapters.adapter_names else ():
        if len(tensors[name]) != len(places):
            raise ValueError(f"{len(tensors[name])} of {name} for {len(places)} blocks")
        for value, place in zip(tensors[name], places, strict=True):
            _put(value, place, name)


@torch.no_grad()
def _put(value: Tensor, place: Tensor, name: str) -> None:
    """Put a tensor where one of its shape is."""
    if value.shape != place.shape:
        raise ValueError(f"{name} of the shape {tuple(value.shape)} in the place of {tuple(place.shape)}")
    place.copy_(value)


def _check_base(
    model: PreTrainedModel, base: Mapping[str, Any], layers: list[str], tensors: Mapping[str, Tensor]
) -> None:
    """Nothing, or a UserError: the blocks are of another base."""
    wanted = _wanted(base)
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model: expected {wanted}, got {type(model).__name__}")
    modules = dict(model.named_modules())
    missing = [name for name in layers if name not in modules]
    if missing:
        raise UserError(f"model: expected {wanted}, got {type(model).__name__}, which has no layer {missing[0]}")
    for name in layers:
        shape = tensors[f"layers.{name}.B"].shape[1] * tensors[f"layers.{name}.A"].shape[2] if _in(tensors, name) else 0
        weight: Any = modules[name].weight
        if shape and weight.numel() != shape:
            raise UserError(f"model: expected {wanted}, got a {type(model).__name__} with {name} of another shape")
    check_weights(base, base_sha256(model))


def _wanted(base: Mapping[str, Any]) -> str:
    """The base of blocks, in words."""
    return f"the base of the blocks, {base['architecture']} {base['name'] or 'without a name'}"


def _in(tensors: Mapping[str, Tensor], layer: str) -> bool:
    return f"layers.{layer}.A" in tensors


def _model(name: str | Path, architecture: str) -> PreTrainedModel:
    """The model of a name, `minilm` among them, of the class that the blocks were made in."""
    known: Any = getattr(transformers, architecture, None)
    if known is None:
        raise UserError(f"model: expected the {architecture} itself, which Transformers does not have, got {name}")
    place = folder_of(str(name))
    weight_files(place, str(name))
    try:
        found: PreTrainedModel = known.from_pretrained(place, use_safetensors=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"model: expected a {architecture}, got {name}: {line(error)}") from error
    return found.eval()


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def line(error: BaseException) -> str:
    """What went wrong, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
