"""Frozen records whose fields are options: how a value is checked, and how a text or a file states it."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from regard.errors import UserError

LARGEST_SEED = 2**63 - 1
_WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}


def config_field(default: Any, said: str, **more: Any) -> Any:
    """A field with the line that explains it, and its bounds: `least`, `above`, `most`."""
    return dataclasses.field(default=default, metadata={"help": said, **more})


@cache
def _hints(record: type) -> dict[str, Any]:
    return get_type_hints(record)


def allowed_types(record: type, name: str) -> tuple[Any, ...]:
    """The types that a field may have."""
    hint = _hints(record)[name]
    return get_args(hint) if type(None) in get_args(hint) else (hint,)


def validate_field(record: type, one: dataclasses.Field[Any], value: Any) -> Any:
    """The value as its field wants it. Raises UserError."""
    types, told = allowed_types(record, one.name), one.name.replace("_", "-")
    if value is None and type(None) in types:
        return None
    kind = types[0]
    if get_args(kind):
        return _parts(one, kind, value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"{told}: expected {_WANTED[kind]}, got {value!r}")
    if kind in (int, float):
        _check_bounds(one, value)
    return value


def _parts(one: dataclasses.Field[Any], kind: Any, value: Any) -> tuple[Any, ...]:
    """The value of a field that is a tuple."""
    parts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else None
    inner = get_args(kind)
    fits = parts is not None and (inner[-1] is Ellipsis or len(parts) == len(inner))
    if parts is None or not fits or not all(type(part) is inner[0] for part in parts):
        raise UserError(f"{one.name.replace('_', '-')}: {one.metadata['help']}; got {value!r}")
    return parts


def _check_bounds(one: dataclasses.Field[Any], value: float) -> None:
    """Nothing, or a UserError: the number lies outside of what its field allows."""
    said, told = one.metadata, one.name.replace("_", "-")
    above, least, most = said.get("above"), said.get("least", 1), said.get("most", float("inf"))
    fits = value > above if above is not None else value >= least
    if not fits or value > most or value == float("inf"):
        low = f"over {above}" if above is not None else f"of at least {least}"
        high = "" if most == float("inf") else f" and at most {most}"
        raise UserError(f"{told}: expected a number {low}{high}, got {value}")


def parse_field(record: type, name: str, text: str, told: str) -> Any:
    """The value of a field that a text states, as `--name TEXT` does; `told` names the record. Raises UserError."""
    names = [one.name for one in dataclasses.fields(record)]
    if name not in names:
        raise UserError(f"{told}: there is no field {name}; allowed are {', '.join(names)}")
    types = allowed_types(record, name)
    if type(None) in types and text.lower() == "none":
        return None
    kind = types[0]
    try:
        if get_args(kind):
            return (text,)
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise UserError(f"{name.replace('_', '-')}: expected {_WANTED[kind]}, got {text!r}") from None


def read_file(path: str | Path, *, verb: str, field: str) -> dict[str, Any]:
    """The fields that a run's folder holds, or the file it has written there (its `field`), or a JSON object of them.

    Raises UserError for what cannot be read, and for a run of another verb.
    """
    whole = read_object(path, verb=verb)
    said = whole.get(field, whole)
    if not isinstance(said, dict):
        raise UserError(f"config: expected an object of fields in {path}, got {type(said).__name__}")
    return said


def read_object(path: str | Path, *, verb: str) -> dict[str, Any]:
    """What a run's folder holds as its record, or a file of JSON. Raises UserError as `read_file`."""
    path = Path(path) / "results.json" if Path(path).is_dir() else Path(path)
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"config: expected JSON in {path}: {error}") from error
    if not isinstance(said, dict):
        raise UserError(f"config: expected an object of fields in {path}, got {type(said).__name__}")
    if said.get("verb", verb) != verb:
        raise UserError(f"config: expected a run of {verb} in {path}, got one of {said['verb']}")
    return said
