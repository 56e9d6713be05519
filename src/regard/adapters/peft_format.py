"""Blocks to and from the adapter format of PEFT, one LoRA a folder."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from regard.adapters import saving
from regard.adapters.lora import LoraBlocks
from regard.errors import UserError
from regard.writing import writing

if TYPE_CHECKING:
    from regard.adapters.shared import SharedAdapters

CONFIG, WEIGHTS, ROUTER = "adapter_config.json", "adapter_model.safetensors", "shared_attention.safetensors"
_PREFIX = "base_model.model."
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


def export(adapters: SharedAdapters, name: str, folder: Path, *, router: bool, overwrite: bool) -> Path:
    """Where a block was written: the folder, which PEFT loads onto the same base; alone it is what `forced` gives."""
    number, layers = adapters.number(name), adapters.layers("export")
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
    with writing(folder, sign=CONFIG, overwrite=overwrite, asked=saving.ASKED) as place:
        (place / CONFIG).write_text(json.dumps(about, indent=2), encoding="utf-8")
        save_file(tensors, place / WEIGHTS, {"format": "pt"})
        if router:
            told = {"format": "pt", "names": json.dumps(adapters.names), "settings": json.dumps(adapters.settings)}
            save_file(saving.attention_tensors(adapters), place / ROUTER, told)
    return folder


def bring(adapters: SharedAdapters, folder: Path, name: str, lineage: Mapping[str, Any] | None) -> int:
    """The number of a new block, frozen, which alone is what the adapter of a folder is.

    Another scale goes into B, a lower rank is filled up with zeros, a layer that the adapter leaves alone gets zeros.
    Raises UserError for what blocks cannot be.
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
    before = adapters.opened
    number = adapters.add(name, lineage)
    with torch.no_grad():
        for layer, mixed in layers.items():
            if layer in parts:
                mixed.blocks.A[number].copy_(parts[layer][0])
                mixed.blocks.B[number].copy_(parts[layer][1])
    if before is None:
        adapters.close()
    else:
        adapters.open(before)
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
    blocks: LoraBlocks, folder: Path, about: Mapping[str, Any], layer: str, down: Tensor, up: Tensor
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
