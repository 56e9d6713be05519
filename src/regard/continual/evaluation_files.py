"""The files that tasks of lm-evaluation-harness of a user's own are made of."""

import glob
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

YAML = (".yaml", ".yml")
"""How the names of a user's own files of tasks end."""
_FUNCTION, _INCLUDE = "!function", "include"
_DATA = ("dataset_path", "dataset_kwargs")
"""Keys of a task whose texts may name files or folders of data, which are looked for where the run is started."""
_FOLDER, _FILES = "data_dir", "data_files"
"""Keys of a folder among them, and of the files or patterns that are read there, of which others are no part."""
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
            found |= _find_module(path.parent, text)
        elif key == _INCLUDE or text.endswith(YAML):
            _add(Path(text) if key == _INCLUDE and os.path.isfile(text) else path.parent / text, found)
        elif key in _DATA:
            found |= {Path(text)} if os.path.exists(text) else set(map(Path, filter(os.path.isfile, _expand(text))))


def _find_module(folder: Path, function: str) -> set[Path]:
    """Return the Python file of `a.b.f`: a/b.py beside the task, once a.b.py, or of a module of the user's own.

    Modules of installed packages are none of a task's files.
    """
    name = function.rpartition(".")[0]
    file = f"{name.replace('.', os.sep)}.py"
    for beside in (folder / file, folder / f"{name}.py"):
        if beside.is_file():
            return {beside}
    installed = {Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)}
    found = (path for place in sys.path if (path := Path(place, file).resolve()).is_file())
    return {path for path in [next(found, None)] if path is not None and installed.isdisjoint(path.parents)}


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


def _join_folder(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the options of a data set with its files in their folder, in place of all that is there."""
    folder, files = options.get(_FOLDER), options.get(_FILES)
    if not isinstance(folder, str) or files is None:
        return options
    others = {name: part for name, part in options.items() if name not in (_FOLDER, _FILES)}
    return {**others, _FILES: [os.path.join(folder, text) for _, text in _find_texts(files, "")]}


def _find_texts(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Iterate over the texts in what a YAML file holds, each with the nearest key that says what it names."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, part in (_join_folder(value) if key in _DATA else value).items():
            if key in _DATA and name == _CACHE:
                continue
            yield from _find_texts(part, key if key in _DATA else str(name))
    elif isinstance(value, list):
        for part in value:
            yield from _find_texts(part, key)
