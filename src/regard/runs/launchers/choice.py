"""The launcher that options name."""

import os

from regard.errors import UserError, check_choice
from regard.runs.launchers.jobs import Launcher, Local
from regard.runs.launchers.ray import Ray

LAUNCHERS = ("local", "ray")


def make_launcher(
    launcher: str, *, address: str | None = None, workers: int | None = None, gpus: int | None = None
) -> Launcher:
    """Return what runs the trials. Raises UserError."""
    check_choice("launcher", launcher, LAUNCHERS)
    if gpus is not None and gpus < 0:
        raise UserError(f"gpus: expected at least 0, got {gpus}")
    if launcher == "ray":
        return Ray(address=address, workers=workers, gpus=gpus or 0)
    if address is not None:
        raise UserError("address: local trials need none; choose ray")
    if gpus is not None and gpus > 1:
        raise UserError(f"gpus: expected 0 or 1 for local trials, got {gpus}")
    devices = () if gpus == 0 else _list_gpus()
    if gpus and not devices:
        raise UserError("gpus: there is none on this machine")
    return Local(workers=workers, devices=devices)


def _list_gpus() -> tuple[str, ...]:
    """Return the GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    return tuple(visible.split(",")[:count] if visible else map(str, range(count)))
