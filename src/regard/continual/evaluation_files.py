"""The files that tasks of lm-evaluation-harness of a user's own are made of."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

YAML = (".yaml", ".yml")
"""How the names of a user's own files of tasks end."""
_FUNCTION = "!function"
_DATA = ("dataset_path", "dataset_kwargs")
"""Keys of a task whose texts may name files or folders of data, which are looked for where the run is started."""


def find_task_files(names: Sequence[str]) -> list[Path]:
    """Return the files of a user's own tasks, and files and folders of their data, sorted.

    They are the YAML files among the names, those that these include or name as tasks, the Python files of their
    functions, and their local data. What does not exist is left out, and so is what cannot be read as YAML: whoever
    reads the tasks says so.
    """
    found: set[Path] = set()
    for name in names:
        if name.endswith(YAML):
            _add(Path(name), found)
    return sorted(found)


def _add(path: Path, found: set[Path]) -> None:
    """Add a YAML file and what it names."""
    path = Path(os.path.normpath(path))
    if path in found or not path.is_file():
        return
    found.add(path)
    for key, text in _find_texts(_read(path), ""):
        if key == _FUNCTION:
            module = path.parent / f"{text.rpartition('.')[0].replace('.', '/')}.py"
            found |= {module} if module.is_file() else set()
        elif text.endswith(YAML):
            _add(path.parent / text, found)
        elif key in _DATA:
            found |= {Path(text)} if text and Path(text).exists() else _expand(text)


def _expand(pattern: str) -> set[Path]:
    """Return the files of a pattern such as data/*.jsonl, which loaders of data expand."""
    if not set("*?[") & set(pattern) or "://" in pattern:
        return set()
    place = Path(pattern)
    folder = Path(place.anchor) if place.is_absolute() else Path()
    return {file for file in folder.glob(str(place.relative_to(place.anchor))) if file.is_file()}


def _read(path: Path) -> Any:
    """Read a YAML file; a function is a mapping with its name."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Reads what lm_eval adds to YAML."""

    Loader.add_constructor("!function", lambda loader, node: {_FUNCTION: loader.construct_scalar(node)})
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
    except (yaml.YAMLError, UnicodeDecodeError):
        return None


def _find_texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Iterate over the texts in what a YAML file holds, each with the nearest key that says what it names."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in value.items():
            yield from _find_texts(part, key if key in _DATA else str(name))
    elif isinstance(value, list):
        for part in value:
            yield from _find_texts(part, key)
