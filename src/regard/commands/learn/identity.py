"""What the runs of a comparison depend on."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import tokenizers

from regard.commands.learn.config import LearnConfig
from regard.continual.evaluation_files import find_task_files
from regard.data.files import hash_path
from regard.data.sources import PYTHON
from regard.data.stream import Stream
from regard.errors import warn_user
from regard.models.pretrained import Loaded
from regard.runs.journal import Journal

BEYOND = "beyond_stream"
"""Key in the metadata: the hashes of what is measured beyond the stream."""
EVALUATED = "evaluated_files"
TOKENIZER, MODEL_CONFIG = "tokenizer", "model_config"
NEWER = (EVALUATED, TOKENIZER, MODEL_CONFIG)
"""Names that earlier versions did not know: their runs go on without them."""
_WRITTEN = ("architectures", "dtype", "torch_dtype", "transformers_version")
"""Fields of a configuration that say how and by what it was written."""
BASE_OF_ADAPTER = "base_of_adapter"
REASONS = {
    BASE_OF_ADAPTER: "the run began in a version of Regard that froze the model which --adapter is merged into, and "
    "this version trains it",
    TOKENIZER: "the tokenizer is another than the run began with, or the package tokenizers, now "
    f"{tokenizers.__version__}, was another; go on with that one, for texts may have other tokens",
}
"""What is said of a run that differs in such a name alone."""


def run_identity(
    config: LearnConfig, loaded: Loaded, stream: Stream, beyond: Mapping[str, str], tokenizer: str
) -> dict[str, Any]:
    """Return what every run of a comparison depends on, without methods and seeds, which may be added later.

    `beyond` are the hashes of `hash_beyond`, `tokenizer` is that of `tokenizer_hash`, which takes a second where a
    vocabulary is large.
    """
    untold = ("seed", "method", "set", "truncation_side")
    fields = {name: value for name, value in config.identity().items() if name not in untold}
    side = {"truncation_side": config.side} if stream.text else {}  # texts of classes are cut at their ends
    tasks = sorted(task.name for task in stream.tasks)
    parts = {"config": {**fields, "metric": config.metric, **side}, "model": loaded.sha256, "tasks": tasks}
    merged = {} if loaded.adapter is None else {BASE_OF_ADAPTER: "trained"}  # it was frozen once
    text = config.held_out
    held_out = {"held_out_text": beyond[text]} if text is not None and text in beyond else {}
    evaluated = {path: sha256 for path, sha256 in beyond.items() if path != text}
    parts |= {TOKENIZER: tokenizer, MODEL_CONFIG: _describe_config(loaded)}
    return {**parts, **merged, **held_out, **({EVALUATED: evaluated} if evaluated else {})}


def describe_model(loaded: Loaded, tokenizer: str) -> dict[str, Any]:
    """Return which model it is, with the hash of its tokenizer, for the record of a run."""
    adapter = {} if loaded.adapter is None else {"adapter": loaded.adapter}
    return {"name": loaded.name, **adapter, "sha256": loaded.sha256, TOKENIZER: tokenizer}


def _describe_config(loaded: Loaded) -> dict[str, Any]:
    """Return what the model's configuration has beside the defaults of its class, to which versions add."""
    config: Any = loaded.model.config
    try:
        defaults = type(config)().to_dict()
    except Exception:  # a class of the user's own may need arguments
        defaults = {}
    found = {"model_type": config.model_type} | _without(config.to_diff_dict(), defaults)
    return cast("dict[str, Any]", json.loads(json.dumps(found, default=str)))


def _without(config: Mapping[Any, Any], defaults: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a configuration without defaults, and without how and by what it was written; its parts as well."""
    found = {}
    for name, value in config.items():
        default = defaults.get(name)
        if name in _WRITTEN or str(name).startswith("_") or (name in defaults and value == default):
            continue
        found[name] = (
            _without(value, default if isinstance(default, dict) else {}) if isinstance(value, dict) else value
        )
    return found


def hash_beyond(config: LearnConfig) -> dict[str, str]:
    """Return the hash of each file or folder that is read for what is measured beyond the stream, by path."""
    text = config.held_out
    texts = [] if text is None or text == PYTHON or not Path(text).exists() else [text]
    return {path: hash_path(Path(path)) for path in [*texts, *map(str, find_task_files(config.evaluated))]}


def warn_of_interrupted(keys: Collection[str], states: Path, finished: Journal) -> None:
    """Warn of states of runs that have not finished and have none of these keys, which are those asked for."""
    others = {path.name for path in states.glob("*") if path.is_dir() and path.name not in finished} - set(keys)
    if others:
        warn_user(
            f"resume: {', '.join(sorted(others))} was interrupted and is not gone on with: {', '.join(keys)} is asked "
            "for; name its method, --set and --seeds to go on with it"
        )
