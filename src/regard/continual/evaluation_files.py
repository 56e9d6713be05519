"""The files that tasks of lm-evaluation-harness of a user's own are made of."""

import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

YAML = (".yaml", ".yml")
"""How the names of a user's own files of tasks end."""
_FUNCTION, _INCLUDE = "!function", "include"
_DATA = ("dataset_path", "dataset_kwargs")
"""Keys of a task whose texts may name files or folders of data, which are looked for where the run is started."""
_CACHE = "cache_dir"
"""Key of a folder among them that reading them fills."""


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
    if path in found or not os.path.isfile(path):  # as that of Path does not, it says so of a text that is too long
        return
    found.add(path)
    for key, text in _find_texts(_read(path), ""):
        if key == _FUNCTION:
            module = path.parent / f"{text.rpartition('.')[0].replace('.', '/')}.py"
            found |= {module} if module.is_file() else set()
        elif key == _INCLUDE or text.endswith(YAML):
            _add(Path(text) if key == _INCLUDE and os.path.isfile(text) else path.parent / text, found)
        elif key in _DATA:
            found |= {Path(text)} if os.path.exists(text) else set(map(Path, filter(os.path.isfile, _expand(text))))


def _expand(pattern: str) -> list[str]:
    """Return what a pattern such as data/*.jsonl stands for, which loaders of data expand."""
    return glob.glob(pattern, recursive=True) if glob.has_magic(pattern) else []


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
            if key in _DATA and name == _CACHE:
                continue
            yield from _find_texts(part, key if key in _DATA else str(name))
    elif isinstance(value, list):
        for part in value:
            yield from _find_texts(part, key)
