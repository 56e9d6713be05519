"""Saving and loading adapters, their router and metadata: safetensors and JSON, without training state."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from regard.adapters.base_identity import BaseIdentity, KnownIdentities
from regard.adapters.head import head_names, read_head, warn_of_trained_base
from regard.adapters.lora import MixedLayer, weight_shape
from regard.adapters.lora_pool import LoraAdapterPool, check_base_weight
from regard.adapters.model import AdapterModel, MergedAdapter
from regard.adapters.prompt_pool import PromptAdapterPool
from regard.adapters.router_warmup import PastTask
from regard.errors import UserError, warn_user
from regard.models.model_files import as_user_error, find_model_folder, find_weight_files
from regard.models.pretrained import count_lacks, read_weights
from regard.runs.integrity import sha256_of_file
from regard.runs.output_dir import atomic_folder
from regard.runs.quiet import suppress_logging

_HEAD, _FROZEN_HEAD = "head.", "frozen_head."
"""Beginnings of the names of the head's weights in a file: of those that train, and of the others."""
TENSORS, METADATA, FORMAT = "adapters.safetensors", "adapters.json", "regard shared adapters 3"
MALFORMED = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)
OPTION = "folder"
"""Name of the argument of the folder, for messages."""
A = TypeVar("A", bound="AdapterModel")


def save(adapters: AdapterModel, folder: Path, *, overwrite: bool) -> Path:
    """Write adapters to a folder, and return it."""
    if not adapters.adapter_names and not adapters.merged:
        raise UserError("adapters: expected at least one to save, got none; add one")
    adapters.keep_in_memory()
    warn_of_trained_base(adapters, OPTION)
    base = base_of(adapters)
    blocks = [{"name": name, "lineage": lineage_of(base, lineage)} for name, lineage in adapters.provenance.items()]
    merged = [
        {"name": adapter.name, "weight": adapter.weight, "lineage": lineage_of(base, adapter.lineage)}
        for adapter in adapters.merged
    ]
    with atomic_folder(folder, marker=METADATA, overwrite=overwrite, option=OPTION) as target:
        save_file(_collect_tensors(adapters), target / TENSORS, {"format": "pt"})
        metadata: dict[str, Any] = {"format": FORMAT, "settings": adapters.settings, "base": base}
        metadata |= {"layers": list(_layers(adapters)), "blocks": blocks, "merged": merged, "added": adapters.added}
        metadata["sha256"] = sha256_of_file(target / TENSORS)
        (target / METADATA).write_text(json.dumps(metadata, indent=2), encoding="utf-8")
    return folder


def load(cls: type[A], model: PreTrainedModel | str | Path, folder: Path, *, any_model: bool) -> A:
    """Load the adapters of a folder into a model; with `any_model` of other weights, whose files stay the base's."""
    metadata, tensors = _read_folder(folder)
    with as_user_error(f"{folder}: expected adapters as `save_pretrained` leaves them, got", MALFORMED):
        base = metadata["base"]
        layers = [str(name) for name in metadata["layers"]]
        settings = {**metadata["settings"], **({"target_modules": layers} if layers else {})}
        blocks = [(str(entry["name"]), dict(entry["lineage"])) for entry in metadata["blocks"]]
        merged = [(str(entry["name"]), float(entry["weight"]), dict(entry["lineage"])) for entry in metadata["merged"]]
        added = int(metadata["added"])
        if isinstance(model, (str, Path)):
            model = load_model(model, str(base["architecture"]))
        known = KnownIdentities()
        _check_base(model, base, layers, tensors, None if any_model else known)
        if len(dict(blocks)) != len(blocks):
            raise ValueError("two adapters of one name")
        adapters = cls(model, **settings)
        adapters.settings, adapters.known_identities = dict(metadata["settings"]), known
        adapters.restore(blocks, added)
        copy_router(adapters, tensors)
        _copy_stacks(_stacks(adapters), tensors)
        _copy_head(adapters, tensors)
        copy_past_tasks(adapters, tensors)
        if merged or any_model:
            adapters.base = BaseIdentity.from_record(base)
        for layer, mixed in adapters.layers("merge").items() if merged else ():
            check_base_weight(layer, mixed.base_layer)
        for index, (name, weight, lineage) in enumerate(merged):
            paths = {layer: f"merged.{index}.{layer}" for layer in layers}
            parts = {layer: (tensors[f"{path}.A"], tensors[f"{path}.B"]) for layer, path in paths.items()}
            adapters.add_merged(MergedAdapter(name, weight, lineage, parts))
    return adapters


def router_tensors(adapters: AdapterModel) -> dict[str, Tensor]:
    """Return copies of what the router has of all adapters, and of each, stacked, by the names in a file."""
    tensors = adapters.router.shared_tensors()
    if adapters.adapter_names:
        stacks = adapters.router.adapter_tensors().items()
        tensors |= {name: torch.stack([value.detach() for value in values]) for name, values in stacks}
    return {f"router.{name}": value.detach().cpu().contiguous().clone() for name, value in tensors.items()}


def past_tensors(adapters: AdapterModel) -> dict[str, Tensor]:
    """Return what a learnt router reflects on, by the names in a file."""
    return {
        f"past.{task}.{name}": value.cpu().contiguous()
        for task, past in adapters.past_tasks.items()
        for name, value in past._asdict().items()
    }


def copy_past_tasks(adapters: AdapterModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a model what `past_tensors` returned."""
    for name in adapters.adapter_names:
        if f"past.{name}.target" in tensors:
            adapters.past_tasks[name] = PastTask(*(tensors[f"past.{name}.{part}"] for part in PastTask._fields))


def base_of(adapters: AdapterModel) -> dict[str, Any]:
    """Return name, architecture and identity of the base, as it was before adapters were merged into it."""
    model = adapters.model
    identity = {"name": model.name_or_path or None, "architecture": type(model).__name__}
    return {**identity, **(adapters.base or adapters.known_identities.of_files(model))._asdict()}


def lineage_of(base: Mapping[str, Any], lineage: Mapping[str, Any]) -> dict[str, Any]:
    """Return a lineage with the base of the adapter."""
    return {**lineage, "base": {"name": base["name"], "sha256": base["sha256"], "of": base["of"]}}


def check_identity(base: Mapping[str, Any], actual: BaseIdentity) -> None:
    """Check that a model has the identity of the adapters' base."""
    expected = BaseIdentity.from_record(base)
    if actual != expected:
        raise UserError(
            f"model: expected {_describe_base(base)} with the {expected.of} {expected.sha256[:12]}, "
            f"got the {actual.of} {actual.sha256[:12]}; any_model=True takes other weights, such as "
            "this base in another precision"
        )


def read_json(path: Path, expected: str) -> dict[str, Any]:
    """Read a JSON object."""
    if not path.is_file():
        raise UserError(f"folder: expected {expected}, a folder with {path.name}, got {path.parent}")
    with as_user_error(f"{path}: expected {expected}, got a file that cannot be read:"):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected {expected}, got {type(content).__name__}")
    return content


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the tensors of a safetensors file and the metadata in its header, both by name."""
    with (
        as_user_error(f"{path}: expected a whole file of safetensors, got", (OSError, SafetensorError)),
        safe_open(path, framework="pt") as file,
    ):
        return load_file(path), file.metadata() or {}


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    metadata = read_json(folder / METADATA, "adapters as `save_pretrained` leaves them")
    if metadata.get("format") != FORMAT:
        raise UserError(f"{folder / METADATA}: expected the format {FORMAT!r}, got {metadata.get('format')!r}")
    if not (folder / TENSORS).is_file() or sha256_of_file(folder / TENSORS) != metadata.get("sha256"):
        raise UserError(f"{folder / TENSORS}: expected the file that {METADATA} tells of, got another, or none")
    return metadata, read_safetensors(folder / TENSORS)[0]


def _collect_tensors(adapters: AdapterModel) -> dict[str, Tensor]:
    """Collect A (adapter, rank, inputs), B (adapter, outputs, rank), prompts, router, head, merged adapters."""
    tensors = router_tensors(adapters)
    for name, values in _stacks(adapters).items():
        tensors[name] = torch.stack([value.detach() for value in values]).cpu().contiguous()
    tensors |= past_tensors(adapters)
    for name, trains in head_names(adapters).items():
        tensors[f"{_HEAD if trains else _FROZEN_HEAD}{name}"] = read_head(adapters, name).cpu().contiguous()
    for index, merged in enumerate(adapters.merged):
        for name, (down, up) in merged.parts.items():
            tensors |= {f"merged.{index}.{name}.A": down.contiguous(), f"merged.{index}.{name}.B": up.contiguous()}
    return tensors


def _layers(adapters: AdapterModel) -> dict[str, MixedLayer]:
    """Return the adapted layers by name; none with prompts."""
    return adapters.pool.layers if isinstance(adapters.pool, LoraAdapterPool) else {}


def _stacks(adapters: AdapterModel) -> dict[str, list[Tensor]]:
    """Return the tensors of each adapter by the names of their stacks in a file; none without adapters."""
    if not adapters.adapter_names:
        return {}
    if isinstance(adapters.pool, PromptAdapterPool):
        prompts = adapters.pool.prompts
        return {"prompts": [prompts.prompt(i) if prompts.live[i] else prompts.P[i] for i in range(len(prompts))]}
    layers = _layers(adapters).items()
    return {f"layers.{name}.A": list(layer.adapters.A) for name, layer in layers} | {
        f"layers.{name}.B": list(layer.adapters.B) for name, layer in layers
    }


def _copy_head(adapters: AdapterModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a model the head of the saved one; it may have another in the place of what did not train."""
    parameters, others = dict(adapters.model.named_parameters()), []
    for name, value in tensors.items():
        if name.startswith(_HEAD):
            target = adapters.model.get_parameter(name.removeprefix(_HEAD)).requires_grad_(True)
            _copy_into(value, target, name)
        elif name.startswith(_FROZEN_HEAD) and (own := name.removeprefix(_FROZEN_HEAD)) in parameters:
            if parameters[own].shape == value.shape:
                _copy_into(value, parameters[own], name)
            else:
                others.append(own)
    if others:
        warn_user(f"the model keeps its own {', '.join(sorted(others))}, of another shape than in the folder")


def copy_router(adapters: AdapterModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a model what `router_tensors` returned of one with the same adapters."""
    for name, target in adapters.router.shared_tensors().items():
        _copy_into(tensors[f"router.{name}"], target, name)
    if adapters.adapter_names:
        _copy_stacks({f"router.{name}": values for name, values in adapters.router.adapter_tensors().items()}, tensors)


def _copy_stacks(stacks: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    for name, targets in stacks.items():
        if len(tensors[name]) != len(targets):
            raise ValueError(f"{len(tensors[name])} of {name} for {len(targets)} adapters")
        for value, target in zip(tensors[name], targets, strict=True):
            _copy_into(value, target, name)


@torch.no_grad()
def _copy_into(value: Tensor, target: Tensor, name: str) -> None:
    if value.shape != target.shape:
        raise ValueError(f"{name} of the shape {tuple(value.shape)} in the place of {tuple(target.shape)}")
    target.copy_(value)


def _check_base(
    model: PreTrainedModel,
    base: Mapping[str, Any],
    layers: list[str],
    tensors: Mapping[str, Tensor],
    known: KnownIdentities | None,
) -> None:
    expected = _describe_base(base)
    if not isinstance(model, PreTrainedModel):
        raise UserError(f"model: expected {expected}, got {type(model).__name__}")
    modules = dict(model.named_modules())
    missing = [name for name in layers if name not in modules]
    if missing:
        raise UserError(f"model: expected {expected}, got {type(model).__name__}, which has no layer {missing[0]}")
    for name in layers:
        down, up = tensors.get(f"layers.{name}.A"), tensors.get(f"layers.{name}.B")
        if down is None or up is None:
            continue
        if math.prod(weight_shape(modules[name])) != up.shape[1] * down.shape[2]:
            raise UserError(f"model: expected {expected}, got a {type(model).__name__} with {name} of another shape")
    if known is not None:
        check_identity(base, known.like(model, BaseIdentity.from_record(base).of))


def _describe_base(base: Mapping[str, Any]) -> str:
    return f"the base of these adapters, {base['architecture']} {base['name'] or 'without a name'}"


def load_model(name: str | Path, architecture: str) -> PreTrainedModel:
    """Load a model of a class of Transformers by its name or folder."""
    model_class: Any = getattr(transformers, architecture, None)
    if model_class is None:
        raise UserError(f"model: expected the {architecture} itself, which Transformers does not have, got {name}")
    folder = find_model_folder(str(name))
    find_weight_files(folder, str(name))
    with (
        suppress_logging(),
        as_user_error(f"model: expected a {architecture}, got {name}:", (OSError, ValueError, RuntimeError)),
    ):
        model, *lacks = read_weights(model_class, folder, None, needs_head=False)
    if any(lacks):
        raise UserError(f"model: expected the weights of a {architecture}, got '{name}': {count_lacks(*lacks)}")
    return model.eval()
