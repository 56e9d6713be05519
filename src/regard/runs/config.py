"""Configurations of commands: frozen records whose fields are options, checked when they are made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, get_args, get_type_hints

from regard.errors import UserError, check_choice
from regard.runs.output_dir import RESULTS

LARGEST_SEED = 2**63 - 1
_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a name"}


class Unset:
    """The type of `UNSET`: an argument that was not given, where None is a value."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()
"""The value of an argument that was not given: the preset's value, or the field's default."""


def explicit_arguments(arguments: Mapping[str, Any], config: type[Config]) -> dict[str, Any]:
    """Return those of a function's arguments that are fields of a configuration and were given.

    Args:
        arguments: What `locals()` is at the beginning of the function.
        config: The configuration.
    """
    return {name: arguments[name] for name in config.field_names() if not isinstance(arguments.get(name, UNSET), Unset)}


def config_field(
    default: Any,
    help: str,
    *,
    choices: Collection[str] | None = None,
    minimum: float | None = None,
    exclusive_minimum: float | None = None,
    maximum: float | None = None,
    metavar: str | None = None,
) -> Any:
    """Declare a field of a configuration.

    Args:
        default: Its default.
        help: One line that explains it, as `--help` shows it.
        choices: The values that it may have.
        minimum: The smallest number allowed. Whole numbers and numbers without bounds are at least 1.
        exclusive_minimum: A number that it must exceed.
        maximum: The largest number allowed.
        metavar: What stands for its value in `--help`.
    """
    bounds = {"minimum": minimum, "exclusive_minimum": exclusive_minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices, "metavar": metavar, **bounds})


C = TypeVar("C", bound="Config")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run of a command depends on. Each field is an option of the command line.

    Raises:
        UserError: A value is of the wrong type, out of its bounds, or does not go with the others.
    """

    command: ClassVar[str]
    """The command that this configures."""

    def __post_init__(self) -> None:
        """Check each field by its type, choices and bounds, and then how they go together."""
        for field in fields(self):
            object.__setattr__(self, field.name, validate_field(type(self), field, getattr(self, field.name)))
        self.check()

    def check(self) -> None:
        """Check how the fields go together. Raises UserError."""

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Return the names of the fields."""
        return tuple(field.name for field in fields(cls))

    @classmethod
    def check_names(cls, names: Collection[str]) -> None:
        """Check that all names are fields. Raises UserError, which lists the fields."""
        unknown = sorted(set(names) - set(cls.field_names()))
        if unknown:
            raise UserError(
                f"{cls.command}: there is no option {unknown[0]}; allowed are {', '.join(cls.field_names())}"
            )

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """Return the configuration with these fields. Raises UserError for unknown ones."""
        cls.check_names(values)
        return cls(**values)

    @classmethod
    def from_file(cls: type[C], path: str | Path) -> C:
        """Return the configuration of a run, from its folder or its `results.json`, or of a JSON object of fields.

        Raises:
            UserError: The file cannot be read, or is of a run of another command.
        """
        metadata = read_results(path, cls.command)
        values = metadata.get("config", metadata)
        if not isinstance(values, dict):
            raise UserError(f"config: expected an object of fields in {path}, got {type(values).__name__}")
        return cls.from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        """Return every field by its name, as JSON holds it."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def replace(self: C, **changes: Any) -> C:
        """Return the configuration with some fields changed. Raises UserError for unknown ones."""
        self.check_names(changes)
        return dataclasses.replace(self, **changes)

    @classmethod
    def parse_field(cls, name: str, text: str) -> Any:
        """Return the value of a field that a text states, as `--name TEXT` does. Raises UserError."""
        cls.check_names([name])
        types = allowed_types(cls, name)
        if type(None) in types and text.lower() == "none":
            return None
        kind = types[0]
        try:
            if get_args(kind):
                element = get_args(kind)[0]
                return tuple(element(part.strip()) for part in text.split(",")) if element is not str else (text,)
            return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            raise UserError(f"{option_name(name)}: expected {_TYPE_NAMES.get(kind, 'numbers')}, got {text!r}") from None


def option_name(field: str) -> str:
    """Return a field's name as the command line spells it, without the dashes before it."""
    return field.replace("_", "-")


@cache
def _type_hints(config: type) -> dict[str, Any]:
    return get_type_hints(config)


def allowed_types(config: type, name: str) -> tuple[Any, ...]:
    """Return the types that a field may have: one, or two where it may be None."""
    hint = _type_hints(config)[name]
    return get_args(hint) if type(None) in get_args(hint) else (hint,)


def validate_field(config: type, field: dataclasses.Field[Any], value: Any) -> Any:
    """Return a value as its field wants it. Raises UserError for one that it cannot have."""
    types, option = allowed_types(config, field.name), option_name(field.name)
    if value is None and type(None) in types:
        return None
    kind = types[0]
    if get_args(kind):
        return _validate_tuple(field, kind, value)
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise UserError(f"{option}: expected {_TYPE_NAMES[kind]}, got {value!r}")
    if kind in (int, float):
        _check_bounds(field, value)
    if field.metadata.get("choices") is not None:
        check_choice(option, value, field.metadata["choices"])
    return value


def _validate_tuple(field: dataclasses.Field[Any], kind: Any, value: Any) -> tuple[Any, ...]:
    parts = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    elements = get_args(kind)
    if elements[0] is float:
        parts = tuple(float(part) if type(part) is int else part for part in parts)
    fits = elements[-1] is Ellipsis or len(parts) == len(elements)
    if not fits or not all(type(part) is elements[0] for part in parts):
        raise UserError(f"{option_name(field.name)}: {field.metadata['help']}; got {value!r}")
    return parts


def _check_bounds(field: dataclasses.Field[Any], value: float) -> None:
    metadata = field.metadata
    above, least, most = metadata.get("exclusive_minimum"), metadata.get("minimum"), metadata.get("maximum")
    least = 1 if least is None else least
    fits = value > above if above is not None else value >= least
    if not fits or (most is not None and value > most) or value == float("inf"):
        low = f"over {above}" if above is not None else f"of at least {least}"
        high = "" if most is None else f" and at most {most}"
        raise UserError(f"{option_name(field.name)}: expected a number {low}{high}, got {value}")


def read_results(path: str | Path, command: str) -> dict[str, Any]:
    """Read the metadata in a run's folder, or a file of JSON.

    Raises:
        UserError: It cannot be read, or is of a run of another command.
    """
    path = Path(path) / RESULTS if Path(path).is_dir() else Path(path)
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config: cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"config: expected JSON in {path}: {error}") from error
    if not isinstance(metadata, dict):
        raise UserError(f"config: expected an object of fields in {path}, got {type(metadata).__name__}")
    if metadata.get("command", command) != command:
        raise UserError(f"config: expected a run of {command} in {path}, got one of {metadata['command']}")
    return metadata
