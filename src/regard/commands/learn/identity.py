"""What the runs of a comparison depend on, and what those of earlier versions were without saying it."""

from typing import Any

from regard.commands.learn.config import LearnConfig
from regard.data.stream import Stream
from regard.models.pretrained import Loaded


def run_identity(config: LearnConfig, loaded: Loaded, stream: Stream) -> dict[str, Any]:
    """Return what every run of a comparison depends on, without methods and seeds, which may be added later."""
    untold = ("seed", "method", "set", "truncation_side")
    fields = {name: value for name, value in config.identity().items() if name not in untold}
    side = {"truncation_side": config.side} if stream.text else {}  # texts of classes are cut at their ends
    tasks = sorted(task.name for task in stream.tasks)
    return {"config": {**fields, "metric": config.metric, **side}, "model": loaded.sha256, "tasks": tasks}


def untold_identity(stream: Stream, loaded: Loaded) -> dict[str, Any]:
    """Return what runs were that do not say it: their metric, and the side on which prompts were cut.

    Answers of a user's own had another metric then. The side was that of the tokenizer.
    """
    is_own = stream.text and stream.metadata.get("published", "") is None
    metric = {} if is_own else {"config.metric": LearnConfig.options()["metric"].default}
    return metric | ({"config.truncation_side": loaded.tokenizer.truncation_side} if stream.text else {})
