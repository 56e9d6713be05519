"""Numbers in float64 where a device has none: they are computed on the CPU."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})
"""Types of devices that have no float64."""
Part = TypeVar("Part")


def has_float64(tensor: Tensor) -> bool:
    """Return whether the device of a tensor has float64."""
    return tensor.device.type not in WITHOUT_FLOAT64


def to_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has none."""
    return (tensor if has_float64(tensor) else tensor.cpu()).double()


def to_cpu(part: Part) -> Part:
    """Return a tensor, or a record or a dictionary of some, on the CPU; all else as it is."""
    moved: Any = part
    if isinstance(part, Tensor):
        moved = part.cpu()
    elif isinstance(part, dict):
        moved = {name: to_cpu(value) for name, value in part.items()}
    elif is_dataclass(part) and not isinstance(part, type):
        moved = replace(part, **{field.name: to_cpu(getattr(part, field.name)) for field in fields(part) if field.init})
    return moved
