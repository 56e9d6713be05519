"""Sizes that suit the kind of a device."""

from collections.abc import Mapping
from typing import TypeVar

import torch

Choice = TypeVar("Choice")


def choose_for(device: torch.device, values: Mapping[str, Choice]) -> Choice:
    """Return the value for a kind of device; that for CPUs where there is none of its own."""
    return values.get(device.type, values["cpu"])
