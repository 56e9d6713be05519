"""What the runs of a comparison depend on."""

from typing import Any

from regard.commands.learn.config import LearnConfig
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
    merged = {} if loaded.adapter is None else {BASE_OF_ADAPTER: "trained"}  # it was frozen once
    return {"config": {**fields, "metric": config.metric, **side}, "model": loaded.sha256, "tasks": tasks, **merged}
