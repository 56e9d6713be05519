"""Export and import of adapters in the format of PEFT, one LoRA adapter a folder."""

import itertools
import json
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.adapters import saving
from regard.adapters.base_identity import BaseIdentity
from regard.adapters.discriminant import DiscriminantRouter
from regard.adapters.head import head_names, warn_of_trained_base
from regard.adapters.lora import LoraAdapters
from regard.adapters.merging import LoraFactors
from regard.adapters.model import AdapterModel
from regard.errors import UserError, warn_user
from regard.models.model_files import as_user_error
from regard.runs.integrity import sha256_of_file
from regard.runs.output_dir import atomic_folder

CONFIG, WEIGHTS, ROUTER = "adapter_config.json", "adapter_model.safetensors", "router.safetensors"
A = TypeVar("A", bound=AdapterModel)
_PREFIX = "base_model.model."
_FOLDER_SIGNS = r"\w+,;=()@ .-"
_MOST_BYTES, _MOST_SIGNS = 255, 60
"""Bytes of a folder's name, and characters of a name that is longer, or no name of a folder, in that of its folder."""
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


class PeftAdapter(NamedTuple):
    """An adapter as a folder of PEFT has it: its configuration, what it adds to layers, and its origin if known.

    `sha256` is that of the file with its tensors.
    """

    config: dict[str, Any]
    layers: dict[str, LoraFactors]
    origin: dict[str, Any]
    name: str
    sha256: str


def export_adapter(adapters: AdapterModel, name: str, folder: Path, *, router: bool, overwrite: bool) -> Path:
    """Write an adapter with its name, lineage and base, for PEFT; see `SharedAdapters.export_peft`."""
    adapters.layers("export")
    adapters.keep_in_memory()
    _warn_of_head(adapters)
    if adapters.merged:
        merged = ", ".join(adapter.name for adapter in adapters.merged)
        warn_user(f"export: {merged}, merged into the base, stays out of the folder; PEFT needs that base for the same")
    with atomic_folder(folder, marker=CONFIG, overwrite=overwrite, option=saving.OPTION) as target:
        _write_block(adapters, name, target, saving.base_of(adapters))
        if router:
            _write_router(adapters, target)
    return folder


def export_set(adapters: AdapterModel, folder: Path, *, overwrite: bool) -> Path:
    """Write all adapters, a folder each, and the router beside them; see `SharedAdapters.export_peft_set`."""
    adapters.layers("export")
    adapters.keep_in_memory()
    _warn_of_head(adapters)
    names = adapters.adapter_names
    if not names:
        raise UserError("adapters: expected at least one to export, got none; add one")
    if adapters.merged:
        merged = ", ".join(adapter.name for adapter in adapters.merged)
        raise UserError(f"adapters: expected none merged into the base, got {merged}; `save_pretrained` keeps them")
    base = saving.base_of(adapters)
    with atomic_folder(folder, marker=ROUTER, overwrite=overwrite, option=saving.OPTION) as target:
        for name, slug in zip(names, name_folders(names), strict=True):
            (target / slug).mkdir()
            _write_block(adapters, name, target / slug, base)
        _write_router(adapters, target)
    return folder


def name_folders(names: Sequence[str]) -> list[str]:
    """Return the folders of adapters in a set: their names, or like them where folders can have no such names.

    What a name of a folder can not have is a hyphen; one that is there already, in any case or Unicode form, gets a
    number: file systems of some machines take such names for one.
    """
    folders: list[str] = []
    taken = {ROUTER, *(_fold(name) for name in names if _fits_folder(name))}
    for number, name in enumerate(names):
        folder = name
        if not _fits_folder(name) or _fold(name) in map(_fold, names[:number]):
            stem = re.sub(rf"[^{_FOLDER_SIGNS}]", "-", name)[:_MOST_SIGNS].strip(". ") or "adapter"
            tried = (f"{stem}-{count}" if count > 1 else stem for count in itertools.count(1))
            folder = next(one for one in tried if _fold(one) not in taken)
            taken.add(_fold(folder))
        folders.append(folder)
    return folders


def _fold(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


def _fits_folder(name: str) -> bool:
    fits = re.fullmatch(f"[{_FOLDER_SIGNS}]+", name) is not None and len(name.encode()) <= _MOST_BYTES
    return fits and name.strip(". ") == name and name.lower() != ROUTER


def _warn_of_head(adapters: AdapterModel) -> None:
    """Warn that PEFT needs a base with what was trained beside the adapters."""
    warn_of_trained_base(adapters, "export")
    if head := [name for name, trains in head_names(adapters).items() if trains]:
        names = ", ".join(head)
        warn_user(f"export: the folder lacks the trained head {names}; give it to the base of PEFT")


def list_set(folder: Path) -> list[str]:
    """Return the names of the adapters that `export_set` wrote; `name_folders` has their folders."""
    header = saving.read_safetensors(folder / ROUTER)[1]
    with as_user_error(f"{folder}: expected adapters as `export_peft_set` leaves them, got", saving.MALFORMED):
        return [str(name) for name in json.loads(header["names"])]


def import_set(adapter_class: type[A], model: PreTrainedModel | str | Path, folder: Path, *, any_model: bool) -> A:
    """Load what `export_set` wrote into a model."""
    if not (folder / ROUTER).is_file():
        raise UserError(f"folder: expected adapters as `export_peft_set` writes them, with {ROUTER}, got {folder}")
    tensors, header = saving.read_safetensors(folder / ROUTER)
    with as_user_error(f"{folder}: expected adapters as `export_peft_set` leaves them, got", saving.MALFORMED):
        names, settings = list_set(folder), dict(json.loads(header["settings"]))
        folders = [folder / name for name in name_folders(names)]
        first = read_adapter(folders[0])
        if isinstance(model, (str, Path)):
            model = saving.load_model(model, first.origin["base"]["architecture"])
        adapters = adapter_class(model, **{**settings, "target_modules": list(first.layers)})
        adapters.settings = settings
        for name, place in zip(names, folders, strict=True):
            import_adapter(adapters, place, name, None, router=False, any_model=any_model)
        saving.copy_router(adapters, tensors)
        saving.copy_past_tasks(adapters, tensors)
        if any_model:
            adapters.base = BaseIdentity.from_record(first.origin["base"])
    return adapters


def _write_block(adapters: AdapterModel, name: str, folder: Path, base: Mapping[str, Any]) -> None:
    index, layers = adapters.index_of(name), adapters.layers("export")
    scale = adapters.settings["lora_alpha"] / adapters.settings["r"]
    factors = {
        layer: LoraFactors(mixed.adapters.A[index].detach(), mixed.adapters.B[index].detach(), scale)
        for layer, mixed in layers.items()
    }
    transposed = any(type(mixed.base_layer).__name__ == "Conv1D" for mixed in layers.values())
    origin = {"name": name, "lineage": saving.lineage_of(base, adapters.provenance[name]), "base": base}
    write_adapter(
        folder, factors, adapters.settings["lora_alpha"], fan_in_fan_out=transposed, base=base["name"], origin=origin
    )


def write_adapter(
    folder: Path,
    layers: Mapping[str, LoraFactors],
    alpha: float,
    *,
    fan_in_fan_out: bool,
    base: str | None,
    origin: Mapping[str, Any] | None,
) -> None:
    """Write the two files of an adapter, all layers of which have the rank of the largest and the scale α / rank."""
    rank = max(len(factors.down) for factors in layers.values())
    tensors = {}
    for layer, (down, up, _) in layers.items():
        padding = rank - len(down)
        tensors[f"{_PREFIX}{layer}.lora_A.weight"] = nn.functional.pad(down.cpu(), (0, 0, 0, padding))
        tensors[f"{_PREFIX}{layer}.lora_B.weight"] = nn.functional.pad(up.cpu(), (0, padding))
    tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
    config: dict[str, Any] = {"peft_type": "LORA", "task_type": None}
    config |= {"base_model_name_or_path": base, "inference_mode": True}
    config |= {"r": rank, "lora_alpha": alpha, "lora_dropout": 0.0}
    config |= {"target_modules": list(layers), "fan_in_fan_out": fan_in_fan_out, "bias": "none"}
    config |= {"use_rslora": False, "use_dora": False}
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    header = {} if origin is None else {_HEADER: json.dumps(origin)}
    save_file(tensors, folder / WEIGHTS, {"format": "pt", **header})


def _write_router(adapters: AdapterModel, folder: Path) -> None:
    contents = {"names": adapters.adapter_names, "settings": adapters.settings}
    metadata = {name: json.dumps(content) for name, content in contents.items()}
    tensors = saving.router_tensors(adapters) | saving.past_tensors(adapters)
    save_file(tensors, folder / ROUTER, {"format": "pt", **metadata})


def read_adapter(folder: Path) -> PeftAdapter:
    """Read the LoRA adapter of a folder in PEFT's format. Raises UserError if it is none, or more than one."""
    config = saving.read_json(folder / CONFIG, "an adapter of PEFT")
    _check_config(folder, config)
    if not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder}: expected {WEIGHTS}, got none; others than safetensors are not read")
    tensors, header = saving.read_safetensors(folder / WEIGHTS)
    layers = {
        layer: LoraFactors(down, up, _scale_of(config, layer, len(down)))
        for layer, (down, up) in _group_by_layer(folder, tensors).items()
    }
    origin = _read_origin(folder / WEIGHTS, header.get(_HEADER))
    name = origin.get("name") or folder.resolve().name
    return PeftAdapter(config, layers, origin, name, sha256_of_file(folder / WEIGHTS))


def import_adapter(
    adapters: AdapterModel, folder: Path, name: str, lineage: Mapping[str, Any] | None, *, router: bool, any_model: bool
) -> int:
    """Add the adapter of a folder; B absorbs another scale, and a lower rank and other layers are filled with zeros."""
    adapter = read_adapter(folder)
    pairs, origin = adapter.layers, adapter.origin
    layers = adapters.layers("import")
    unknown = [layer for layer in pairs if layer not in layers]
    if unknown:
        targets = ", ".join(dict.fromkeys(layer.rsplit(".", 1)[-1] for layer in layers))
        raise UserError(f"{folder}: expected an adapter of the layers {targets} of this model, got one of {unknown[0]}")
    matrices = {layer: _fit_matrices(layers[layer].adapters, folder, layer, pairs[layer]) for layer in pairs}
    if origin and not any_model:
        expected = BaseIdentity.from_record(origin["base"])
        saving.check_identity(
            origin["base"], adapters.base or adapters.known_identities.like(adapters.model, expected.of)
        )
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
    with as_user_error(f"{path}: expected what `export_peft` tells of an adapter, got", saving.MALFORMED):
        content = json.loads(text)
        lineage = {name: value for name, value in content["lineage"].items() if name != "order"}
        base = {name: content["base"][name] for name in ("name", "architecture", "sha256", "of")}
        return {"name": str(content["name"]), "lineage": lineage, "base": base}


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
            f"{folder / WEIGHTS}: expected the name of its adapter, got none; without router=True it is not needed"
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
        raise UserError(f"{path}: expected the maps of the adapters that are here, got others; {reason}")
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


def _scale_of(config: Mapping[str, Any], layer: str, rank: int) -> float:
    patterns = (config.get("alpha_pattern") or {}).items()  # regular expressions of a name or its end
    alphas = [value for pattern, value in patterns if re.match(rf"(.*\.)?({pattern})$", layer)]
    alpha = float([*alphas, config["lora_alpha"]][0])
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _fit_matrices(blocks: LoraAdapters, folder: Path, layer: str, factors: LoraFactors) -> tuple[Tensor, Tensor]:
    """Convert A and B of a layer to the rank and scale of the model's adapters."""
    down, up, scale = factors
    rank = down.shape[0]
    if down.shape != (rank, blocks.inputs) or up.shape != (blocks.outputs, rank):
        got = f"A {tuple(down.shape)} and B {tuple(up.shape)}"
        raise UserError(f"{folder}: expected {layer} of {blocks.inputs} inputs and {blocks.outputs} outputs, got {got}")
    if rank > blocks.rank:
        raise UserError(f"{folder}: expected a rank of at most {blocks.rank}, got {rank}")
    fitted_down, fitted_up = torch.zeros(blocks.rank, blocks.inputs), torch.zeros(blocks.outputs, blocks.rank)
    fitted_down[:rank] = down.float()
    fitted_up[:, :rank] = up.float() * (scale / blocks.scale)
    return fitted_down, fitted_up
