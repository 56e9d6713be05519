"""Which base adapters belong to: the one in certain files, or the one with certain weights."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from regard.adapters.lora import LoraAdapters, MixedLayer
from regard.adapters.prompt_adapters import PromptAdapters
from regard.attention.call import num_writes
from regard.attention.quantized import is_packed, stored_part
from regard.hooks.off_loaded import stored_tensor
from regard.models.base_files import BaseFiles, checksum_of, describe_files, find_base_files, tensor_shapes
from regard.runs.integrity import sha256_of_json, tensor_bytes

Kind = Literal["files", "weights"]
SAMPLES = 64
"""Entries of each weight that are compared before an identity is used again."""


class BaseIdentity(NamedTuple):
    """A hash of the base, and what it is of: of all tensors in its files, or of the weights in memory."""

    sha256: str
    of: Kind

    @classmethod
    def from_record(cls, base: Mapping[str, Any]) -> "BaseIdentity":
        """Read what adapters tell of their base."""
        return cls(str(base["sha256"]), "files" if base["of"] == "files" else "weights")


class BaseWeight(NamedTuple):
    """A weight of the base, all names that files may have for it, and where it is."""

    names: list[str]
    value: Tensor
    module: nn.Module
    name: str

    def read(self) -> Tensor:
        """Return the weight, also if it is off-loaded."""
        return stored_tensor(self.module, self.name)


class KnownIdentities:
    """The identities of a model's base, each computed once and again after the base has changed.

    Unchanged is a base whose weights are where they were and have their counters of changes in place (`_version`) and
    `SAMPLES` of their entries. Of off-loaded weights nobody can tell that.
    """

    def __init__(self) -> None:
        self._known: dict[Kind, tuple[Any, BaseIdentity]] = {}

    def of_files(self, model: PreTrainedModel) -> BaseIdentity:
        """Return the identity by files if the weights are those in the files that the model names, else by weights."""
        return self._recall("files", model)

    def of_weights(self, model: PreTrainedModel) -> BaseIdentity:
        return self._recall("weights", model)

    def like(self, model: PreTrainedModel, kind: Kind) -> BaseIdentity:
        """Return the identity to be compared with one of a kind."""
        return self.of_files(model) if kind == "files" else self.of_weights(model)

    def _recall(self, kind: Kind, model: PreTrainedModel) -> BaseIdentity:
        state = _state(model)
        known = self._known.get(kind)
        if known is None or state is None or known[0] != state:
            self._known[kind] = known = state, _identify(model, kind)
        return known[1]


def _state(model: PreTrainedModel) -> list[Any] | None:
    """Return where each weight of the base is, how often it was changed in place, and some entries of it.

    None if one is off-loaded.
    """
    state: list[Any] = [model.name_or_path]
    samples = []
    for names, whole, _, _ in _weights(model):
        if whole.is_meta:
            return None
        value = stored_part(whole)
        state.append((names[0], value.data_ptr(), num_writes(value), tuple(value.shape), value.dtype, value.device))
        if value.numel():
            places = torch.linspace(0, value.numel() - 1, min(SAMPLES, value.numel()), dtype=torch.float64)
            index = torch.unravel_index(places.long().to(value.device), value.shape)
            samples.append(value.detach()[index].reshape(-1).double())
    return [*state, torch.cat([entries.cpu() for entries in samples]).tolist() if samples else None]


def _identify(model: PreTrainedModel, kind: Kind) -> BaseIdentity:
    if kind == "files" and (files := find_base_files(model)):
        fresh = {id(value) for value in fresh_pooler(model, files)}
        weights = [weight for weight in _weights(model) if id(weight.value) not in fresh]
        halves = any(weight.value.dtype == torch.float16 for weight in weights)
        described = describe_files(files, "float16" if halves else "bfloat16")
        if _are_of(weights, described, is_quantized=bool(getattr(model, "is_quantized", False))):
            names = sorted(name for name in described.tensors if any(name in weight.names for weight in weights))
            return BaseIdentity(sha256_of_json([described.sha256, names]), "files")  # a part is another base
    return BaseIdentity(base_sha256(model), "weights")


def fresh_pooler(model: PreTrainedModel, files: Sequence[Path]) -> list[nn.Parameter]:
    """Return the parameters of a pooler that the files of a classifier's base lack: they belong to its head.

    Such a base was saved without it, as a masked language model is: each load makes another.
    """
    pooler = getattr(model.base_model, "pooler", None)
    if model.base_model is model or not isinstance(pooler, nn.Module):
        return []
    parameters = list(pooler.named_parameters())
    stored = tensor_shapes(files).keys() if parameters else set()
    prefix = f"{model.base_model_prefix}."
    own = {full for name, _ in parameters for full in (f"pooler.{name}", f"{prefix}pooler.{name}")}
    return [value for _, value in parameters] if stored and not stored & own else []


def _weights(model: PreTrainedModel) -> Iterator[BaseWeight]:
    """Iterate over the base's parameters and persistent buffers, without head and adapters, each once."""
    weights: dict[int, BaseWeight] = {}
    prefix = f"{model.base_model_prefix}."
    for path, module in _base_modules(model):
        persistent = {name: value for name, value in module._buffers.items() if value is not None}
        for name in module._non_persistent_buffers_set:
            persistent.pop(name, None)
        for name, value in (module._parameters | persistent).items():
            if value is not None:
                full = f"{path}.{name}" if path else name
                weight = weights.setdefault(id(value), BaseWeight([], value, module, name))
                weight.names.extend(dict.fromkeys([full, f"{prefix}{full}", full.removeprefix(prefix)]))
    yield from weights.values()


def _base_modules(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the base's modules by the names that they have without adapters."""
    modules = dict(model.base_model.named_modules(remove_duplicate=False))
    adapters = tuple(name for name, module in modules.items() if isinstance(module, (LoraAdapters, PromptAdapters)))
    layers = {name for name, module in modules.items() if isinstance(module, MixedLayer)}
    for name, module in modules.items():
        if not any(name == one or name.startswith(f"{one}.") for one in adapters):
            owner, _, last = name.rpartition(".")
            yield (owner if last == "base_layer" and owner in layers else name), module


def _are_of(weights: Sequence[BaseWeight], files: BaseFiles, *, is_quantized: bool) -> bool:
    """Return whether all weights are in the files, with the same numbers.

    Whole numbers in the place of floating point, and tensors that pack them, cannot be compared in a model that
    Transformers has quantized.
    """
    pairs = []
    for weight in weights:
        stored = [files.tensors[name] for name in weight.names if name in files.tensors]
        if not stored:
            return False
        is_float, shape = weight.value.is_floating_point() and not is_packed(weight.value), tuple(weight.value.shape)
        if is_quantized and not is_float and all(tensor.is_float for tensor in stored):
            continue
        if any(tensor.shape != shape or tensor.is_float != is_float for tensor in stored):
            return False
        actual = checksum_of(weight.read())
        pairs += [(tensor.checksum, actual) for tensor in stored]
    return [expected for expected, _ in pairs] == _read_sums([actual for _, actual in pairs])


def _read_sums(sums: list[Tensor]) -> list[int]:
    """Read numbers from their devices, from each at once."""
    values: dict[int, int] = {}
    for device in {one.device for one in sums}:
        places = [place for place, one in enumerate(sums) if one.device == device]
        values |= dict(zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True))
    return [values[place] for place in range(len(sums))]


def base_sha256(model: PreTrainedModel) -> str:
    """Return the sha256 of the base model's weights without head and adapters, by name, rounded to bfloat16."""
    digest = hashlib.sha256()
    modules = dict(_base_modules(model))
    for name, value in sorted(_base_weights(model).items()):
        digest.update(f"{name} {tuple(value.shape)}".encode())
        owner, _, last = name.rpartition(".")
        whole: Any = stored_tensor(modules[owner], last) if value.is_meta else value
        whole = whole.dequantize() if is_packed(whole) else whole
        digest.update(tensor_bytes(whole.to("cpu", torch.bfloat16) if whole.is_floating_point() else whole))
    return digest.hexdigest()


def _base_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the base model's weights by the names they have without adapters."""
    modules = dict(model.base_model.named_modules())
    kinds = (LoraAdapters, PromptAdapters)
    adapters = tuple(f"{name}." for name, module in modules.items() if isinstance(module, kinds))
    layers = {name for name, module in modules.items() if isinstance(module, MixedLayer)}
    weights = model.base_model.state_dict(keep_vars=True).items()
    return {_original_name(name, layers): value for name, value in weights if not name.startswith(adapters)}


def _original_name(name: str, layers: set[str]) -> str:
    layer, separator, weight = name.rpartition(".base_layer.")
    return f"{layer}.{weight}" if separator and layer in layers else name
