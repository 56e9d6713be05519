"""What Python says of its own standard library: the documentation of functions and classes, by module."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import platform
import re
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from regard.data.splits import hash_text
from regard.errors import UserError

MIN_WORDS = 6
"""Documentation of fewer words is left out."""
_PASSED_OVER = re.compile(r"(^|\.)(__main__|test|tests|_.*)(\.|$)")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe_source() -> str:
    """What the texts are, with the version of the interpreter that they were read from."""
    return f"documentation of the standard library of Python {platform.python_version()}"


def read_documentation(modules: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """For each module the documentation of its functions, classes and methods, sorted by where they are.

    A text is the object's own name and what its docstring says. A package has that of its public submodules too,
    those left out that this machine cannot import. Names that begin with the module's own, dotted, lose it
    (email.message.Message becomes Message), so that the class does not stand in the text. What is said twice, in one
    module or in two, is there once or not at all; so is what has less than six words or an address of this process.

    Raises UserError for a module that cannot be imported, and for a Python without docstrings (-OO).
    """
    found = {module: _texts_of(module) for module in modules}
    ambiguous = _in_two(found)
    texts = {module: tuple(text for key, text in of.items() if key not in ambiguous) for module, of in found.items()}
    empty = [module for module, of in texts.items() if not of]
    if empty:
        raise UserError(f"stream: expected docstrings in Python's module {empty[0]}, found none (python -OO has none)")
    return texts


def _in_two(found: dict[str, dict[str, str]]) -> set[str]:
    """The keys that two modules have."""
    seen: set[str] = set()
    twice: set[str] = set()
    for of in found.values():
        twice |= seen & of.keys()
        seen |= of.keys()
    return twice


def _texts_of(name: str) -> dict[str, str]:
    """The texts of a module by the key of the documentation in them."""
    texts: dict[str, str] = {}
    own_name = re.compile(rf"\b{re.escape(name)}\.(?:\w+\.)*(?=\w)")
    for module in _modules(name):
        for called, thing in _objects(module, name):
            said = getattr(thing, "__doc__", None)
            if not isinstance(said, str) or _ADDRESS.search(said):
                continue
            said = own_name.sub("", inspect.cleandoc(said)).strip()
            if len(re.findall(r"\w+", said)) >= MIN_WORDS:
                texts.setdefault(hash_text((said,)), f"{called}: {said}")
    return texts


def _modules(name: str) -> Iterator[ModuleType]:
    """A module and its public submodules, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise UserError(f"stream: expected the module {name} in this Python: {error}") from None
        yield module
        for below in sorted(info.name for info in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}.")):
            if _PASSED_OVER.search(below):
                continue
            try:
                importlib.import_module(below)
            except ImportError:
                continue
            yield from _modules(below)


def _objects(module: ModuleType, owner: str) -> Iterator[tuple[str, Any]]:
    """Names and objects of functions and classes that a module defines, and of the methods of the latter."""
    for name, thing in sorted(vars(module).items()):
        if not (inspect.isclass(thing) or inspect.isroutine(thing)) or not _is_own(thing, owner):
            continue
        yield name, thing
        if inspect.isclass(thing):
            for method, value in sorted(vars(thing).items()):
                inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
                if method != "__doc__" and (inspect.isroutine(inner) or isinstance(inner, property)):
                    yield method, inner


def _is_own(thing: Any, owner: str) -> bool:
    """Whether something was defined in a module, or in what is below it."""
    place = getattr(thing, "__module__", None)
    return isinstance(place, str) and f"{place.lstrip('_')}.".startswith(f"{owner}.")
