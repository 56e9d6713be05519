"""Code beside the weights of a decoder, for readers who do not have Regard and choose to trust it."""

import shutil
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from regard.models import modeling_regard

CODE = Path(modeling_regard.__file__)
"""The file that is copied: plain PyTorch, without an import of Regard."""
AUTO_MAP = {
    "AutoConfig": f"{CODE.stem}.RegardConfig",
    "AutoModel": f"{CODE.stem}.RegardModel",
    "AutoModelForCausalLM": f"{CODE.stem}.RegardForCausalLM",
}
"""The entry of a config by which Transformers finds the code, where `trust_remote_code=True` allows it."""


def find_unsupported(attention: Mapping[str, Any]) -> list[str]:
    """Return the fields of an attention, with their values, that the code does not compute."""
    known = {name: modeling_regard.CHOICES.get(name, ()) for name in attention}
    return [
        f"{name}={attention[name]}"
        for name, choices in known.items()
        if choices is not None and attention[name] not in choices
    ]


def remove_code(folder: str | PathLike[Any]) -> None:
    """Remove the code from a folder in which a decoder that needs it was saved before."""
    path = Path(folder) / CODE.name
    if path.is_file() and path.read_bytes() == CODE.read_bytes():
        path.unlink()


def write_code(folder: str | PathLike[Any]) -> None:
    """Copy the code into a folder."""
    shutil.copyfile(CODE, Path(folder) / CODE.name)
