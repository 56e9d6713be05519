"""Trackers of Accelerate, to which a run sends its numbers as well."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from regard.training import placement

PROJECT = "regard"


@contextmanager
def open_trackers(
    names: Sequence[str], fields: Mapping[str, Any], *, device: str | None, folder: str | Path | None
) -> Iterator[Callable[[Mapping[str, float], int], None]]:
    """Open trackers for a while; the function that is yielded sends them numbers of a step.

    Args:
        names: Names that Accelerate knows: tensorboard, wandb, ….
        fields: The configuration, for the record.
        device: "cpu", or None for the machine's accelerator.
        folder: Where trackers write that write files.

    Raises:
        UserError: A tracker is not installed, or has no folder to write to.
    """
    if not names:
        yield lambda numbers, step: None
        return
    folder_name = None if folder is None else str(folder)
    with placement.make_accelerator(names, device, folder_name) as accelerator, run_trackers(accelerator, fields):
        yield lambda numbers, step: accelerator.log(dict(numbers), step=step)


@contextmanager
def run_trackers(accelerator: Accelerator, fields: Mapping[str, Any]) -> Iterator[None]:
    """Start the trackers of an Accelerator, and finish them at the end."""
    if accelerator.log_with:
        values = {name: value if isinstance(value, (int, float, str)) else str(value) for name, value in fields.items()}
        accelerator.init_trackers(PROJECT, config=values)
    try:
        yield
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
