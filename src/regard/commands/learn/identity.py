"""What the runs of a comparison depend on."""

from pathlib import Path
from typing import Any

from regard.commands.learn.config import LearnConfig
from regard.data.files import hash_path
from regard.data.sources import PYTHON
from regard.data.stream import Stream
from regard.models.pretrained import Loaded

BASE_OF_ADAPTER = "base_of_adapter"
REASONS = {
    BASE_OF_ADAPTER: "the run began in a version of Regard that froze the model which --adapter is merged into, and "
    "this version trains it"
}
"""What is said of a run that differs in such a name alone."""


def run_identity(config: LearnConfig, loaded: Loaded, stream: Stream) -> dict[str, Any]:
    """Return what every run of a comparison depends on, without methods and seeds, which may be added later."""
    untold = ("seed", "method", "set", "truncation_side")
    fields = {name: value for name, value in config.identity().items() if name not in untold}
    side = {"truncation_side": config.side} if stream.text else {}  # texts of classes are cut at their ends
    tasks = sorted(task.name for task in stream.tasks)
    parts = {"config": {**fields, "metric": config.metric, **side}, "model": loaded.sha256, "tasks": tasks}
    merged = {} if loaded.adapter is None else {BASE_OF_ADAPTER: "trained"}  # it was frozen once
    return {**parts, **merged, **_identify_held_out(config.held_out)}


def _identify_held_out(text: str | None) -> dict[str, str]:
    """Return the hash of the held-out text, of which the config has the path alone."""
    if text is None or text == PYTHON or not Path(text).exists():
        return {}
    return {"held_out_text": hash_path(Path(text))}
