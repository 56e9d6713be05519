"""What the runs of a comparison depend on, and what those of earlier versions were without saying it."""

from typing import Any

from regard.commands.learn.config import LearnConfig
from regard.data.stream import Stream
from regard.models.pretrained import Loaded

UNTOLD_SIDE = "right"
"""What prompts that were too long lost in runs that do not say it."""


def run_identity(config: LearnConfig, loaded: Loaded, stream: Stream) -> dict[str, Any]:
    """Return what every run of a comparison depends on, without methods and seeds, which may be added later."""
    unused = ["seed", "method", "set", *([] if stream.text else ["truncation_side"])]
    fields = {name: value for name, value in config.identity().items() if name not in unused}
    tasks = sorted(task.name for task in stream.tasks)
    return {"config": {**fields, "metric": config.metric}, "model": loaded.sha256, "tasks": tasks}


def untold_identity(stream: Stream) -> dict[str, Any]:
    """Return what runs were that do not say it: their metric, but for answers of a user's own, which had another."""
    is_own = stream.text and stream.metadata.get("published", "") is None
    metric = {} if is_own else {"config.metric": LearnConfig.options()["metric"].default}
    return metric | ({"config.truncation_side": UNTOLD_SIDE} if stream.text else {})
