"""Documentation of functions and classes of Python's standard library, by module, as a stream of tasks."""

import importlib
import inspect
import pkgutil
import platform
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from regard.data.rows import LabeledRow, RawTask, hash_text
from regard.data.splits import divide_rows
from regard.data.stream_catalog import StreamSpec
from regard.errors import UserError

MIN_WORDS = 6
"""Documentation of fewer words is dropped."""
_DEV_AND_TEST_FRACTIONS = (0.15, 0.25)
_SEED = 0
"""Dev and test rows do not depend on the seed of a stream."""
_SKIPPED_MODULES = re.compile(r"(^|\.)(__main__|test|tests|_.*)(\.|$)")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def read_stdlib_tasks(spec: StreamSpec) -> list[RawTask]:
    """Read tasks whose classes are modules of the standard library."""
    texts = read_documentation(tuple(label for task in spec.tasks for label in task.labels))
    source = f"documentation of the standard library of Python {platform.python_version()}"
    tasks = []
    for task in spec.tasks:
        rows = tuple(LabeledRow.of((text,), label) for label in task.labels for text in texts[label])
        train, dev, test = divide_rows(rows, _DEV_AND_TEST_FRACTIONS, _SEED, task.name)
        tasks.append(RawTask(name=task.name, labels=task.labels, train=train, dev=dev, test=test, source=source))
    return tasks


def read_documentation(modules: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Read the documentation of functions, classes and methods by module, sorted by their qualified names.

    A text is an object's own name and its docstring. A package includes its public submodules that can be imported.
    Dotted names that begin with the module's own lose it (email.message.Message becomes Message), so that the class is
    not in the text. Dropped are repeated docstrings within a module, docstrings that two modules share, those with
    fewer than `MIN_WORDS` words, and those with a memory address.
    """
    by_module = {module: _read_module(module) for module in modules}
    uses = Counter(key for texts in by_module.values() for key in texts)
    result = {
        module: tuple(text for key, text in texts.items() if uses[key] == 1) for module, texts in by_module.items()
    }
    if empty := [module for module, module_texts in result.items() if not module_texts]:
        raise UserError(f"stream: expected docstrings in Python's module {empty[0]}, found none (python -OO has none)")
    return result


def _read_module(name: str) -> dict[str, str]:
    """Read the texts of a module by the hash of their docstrings."""
    texts: dict[str, str] = {}
    own_name = re.compile(rf"\b{re.escape(name)}\.(?:\w+\.)*(?=\w)")
    for module in _iterate_modules(name):
        for object_name, value in _iterate_objects(module, name):
            docstring = getattr(value, "__doc__", None)
            if not isinstance(docstring, str) or _ADDRESS.search(docstring):
                continue
            docstring = own_name.sub("", inspect.cleandoc(docstring)).strip()
            if len(re.findall(r"\w+", docstring)) >= MIN_WORDS:
                texts.setdefault(hash_text((docstring,)), f"{object_name}: {docstring}")
    return texts


def _iterate_modules(name: str) -> Iterator[ModuleType]:
    """Iterate over a module and its public submodules, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"stream: expected the module {name} in this Python: {error}") from None
        yield module
        for below in sorted(info.name for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}.")):
            if _SKIPPED_MODULES.search(below):
                continue
            try:
                importlib.import_module(below)
            except ImportError:
                continue
            yield from _iterate_modules(below)


def _iterate_objects(module: ModuleType, owner: str) -> Iterator[tuple[str, Any]]:
    """Iterate over names and objects of functions and classes that a module defines, and of methods."""
    for name, value in sorted(vars(module).items()):
        if not (inspect.isclass(value) or inspect.isroutine(value)) or not _is_defined_in(value, owner):
            continue
        yield name, value
        if inspect.isclass(value):
            for method, attribute in sorted(vars(value).items()):
                function = attribute.__func__ if isinstance(attribute, (classmethod, staticmethod)) else attribute
                if method != "__doc__" and (inspect.isroutine(function) or isinstance(function, property)):
                    yield method, function


def _is_defined_in(value: Any, owner: str) -> bool:
    """Whether an object is defined in a module, or below it."""
    module = getattr(value, "__module__", None)
    return isinstance(module, str) and f"{module.lstrip('_')}.".startswith(f"{owner}.")
