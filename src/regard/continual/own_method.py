"""A method of one's own, from a file of Python."""

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType

from regard.continual.method import Method
from regard.errors import UserError, describe_error

SEPARATOR = ".py:"
"""What a name has in it that says a file and a class: "method.py:Mine"."""
_MODULE = "regard_own_"
"""How the names of the modules begin that such files are run as."""


def load_own_method(name: str) -> type[Method]:
    """Return the class that a name as "method.py:Mine" says. The file is run, once for each content of it.

    Raises:
        UserError: There is no such file or class, or the file ends in an error.
    """
    path, _, class_name = name.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise UserError(f"method: expected a file and a class of it, as method.py:Mine, there is no file {path}")
    module = _run_file(str(file.resolve()), hashlib.sha256(file.read_bytes()).hexdigest())
    found = vars(module).get(class_name)
    if isinstance(found, type) and issubclass(found, Method):
        _check_signatures(found, path)
        found.source_sha256 = module.__name__.rpartition("_")[2]
        return found
    classes = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, Method)]
    own = ", ".join(key for key in classes if vars(module)[key].__module__ == module.__name__)
    raise UserError(f"method: expected one of the subclasses of Method in {path} ({own or 'none'}), got {class_name!r}")


@contextmanager
def naming_own_code() -> Iterator[None]:
    """Turn errors that come out of the code of a method of one's own into a UserError, which names file and line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        frames = [*traceback.walk_tb(error.__traceback__)]
        own = [(frame, line) for frame, line in frames if str(frame.f_globals.get("__name__")).startswith(_MODULE)]
        if not own:
            raise
        frame, line = own[-1]
        place = f"{frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name}"
        raise UserError(f"method: {place}: {type(error).__name__}: {describe_error(error)}") from error


def _check_signatures(own_class: type[Method], path: str) -> None:
    """Raise a UserError if a function of the class cannot be called as that of `Method` whose place it takes."""
    own = own_class.__mro__[: own_class.__mro__.index(Method)]
    for name, function in {name: value for part in reversed(own) for name, value in vars(part).items()}.items():
        expected = inspect.getattr_static(Method, name, None)
        if not (inspect.isfunction(function) and inspect.isfunction(expected)):
            continue
        parameters = inspect.signature(expected).parameters.values()
        by_name = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
        by_place = [None for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
        try:
            inspect.signature(function).bind(*by_place, **by_name)
        except TypeError as error:
            called = f"{name}{inspect.signature(expected)}".replace("'", "")
            raise UserError(f"method: {path}: {own_class.__name__}.{name} is called as {called}: {error}") from error


@cache
def _run_file(path: str, sha256: str) -> ModuleType:
    """Run a file as a module whose name has the hash of its content."""
    spec = importlib.util.spec_from_file_location(f"{_MODULE}{Path(path).stem}_{sha256[:16]}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their types
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise UserError(f"method: {path} ends in an error: {describe_error(error)}") from error
    return module
