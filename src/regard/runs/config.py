"""Configurations of commands: frozen records whose fields are options, checked when they are made."""

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Final, TypeVar, get_type_hints

from regard.errors import UserError, describe_value, warn_user
from regard.runs.idle_options import IdleOptions
from regard.runs.options import Option
from regard.runs.options import config_field as config_field
from regard.runs.output_dir import RESULTS

MAX_SEED = 2**63 - 1
C = TypeVar("C", bound="Config")
F = TypeVar("F", bound=Callable[..., Any])


class Unset:
    """The type of `UNSET`: an argument that was not given, where None is a value."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET: Final = Unset()
"""The value of an argument that was not given: the value of the configuration, the preset or the default holds."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that a run of a command depends on. Each field is an option, and is checked: UserError."""

    command: ClassVar[str]
    resumable: ClassVar[frozenset[str]] = frozenset()
    """Fields in which a resumed run may differ from the run that was interrupted: they change no number."""
    newer: ClassVar[frozenset[str]] = frozenset()
    """Fields that no dictionary names while they have their default: a run without them is the same run."""
    idle: ClassVar[tuple[IdleOptions, ...]] = ()
    """Fields that change nothing in some mode, of which `warn_of_idle` warns."""

    def __post_init__(self) -> None:
        for name, option in self.options().items():
            object.__setattr__(self, name, option.validate(getattr(self, name)))
        self.check()

    def check(self) -> None:
        """Check how the fields go together. Raises UserError."""

    def given_fields(self) -> frozenset[str]:
        """Return the names of the fields that have another value than by default."""
        return frozenset(name for name, option in self.options().items() if getattr(self, name) != option.default)

    def warn_of_idle(self, *modes: str) -> None:
        """Warn of given fields that change nothing in a run of these modes, which the rules in `idle` name."""
        given = self.given_fields()
        rules = [rule for rule in self.idle if (not rule.mode or rule.mode in modes) and rule.applies(self)]
        for name, reason in ((name, rule.reason) for rule in rules for name in rule.fields if name in given):
            value = describe_value(getattr(self, name)).strip("'")
            warn_user(f"{name.replace('_', '-')}: {value} changes nothing, {reason}")

    @classmethod
    @cache
    def options(cls) -> Mapping[str, Option]:
        hints = get_type_hints(cls)
        return {field.name: Option.of(field, hints[field.name]) for field in fields(cls)}

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(cls.options())

    @classmethod
    def check_names(cls, names: Collection[str]) -> None:
        """Check that all names are fields. Raises UserError, which lists the fields."""
        unknown = sorted(set(names) - set(cls.field_names()))
        if unknown:
            allowed = ", ".join(cls.field_names())
            raise UserError(f"{cls.command}: there is no option {unknown[0]}; allowed are {allowed}")

    @classmethod
    def parse_field(cls, name: str, text: str) -> Any:
        """Return the value of a field that a text states, as `--name TEXT` does. Raises UserError."""
        cls.check_names([name])
        return cls.options()[name].parse(text)

    @classmethod
    def from_dict(cls: type[C], values: Mapping[str, Any]) -> C:
        """Return the configuration with these fields. Raises UserError for unknown ones."""
        cls.check_names(values)
        return cls(**values)

    @classmethod
    def from_file(cls: type[C], path: str | Path) -> C:
        """Return the configuration of a run, from its folder or its `results.json`, or of a JSON object of fields.

        Raises UserError if the file cannot be read, or is of a run of another command.
        """
        metadata = read_results(path, cls.command)
        values = metadata.get("config", metadata)
        if not isinstance(values, dict):
            raise UserError(f"config: expected an object of fields in {path}, got {type(values).__name__}")
        return cls.from_dict(values)

    @classmethod
    def from_options(cls: type[C], path: str | Path | None, options: Mapping[str, Any]) -> C:
        """Return the configuration in a file, or the default one, with some fields changed. Raises UserError."""
        return (cls() if path is None else cls.from_file(path)).replace(**options)

    def to_dict(self) -> dict[str, Any]:
        """Return every field by its name, as JSON holds it, but for `newer` ones that have their default."""
        values = {name: (getattr(self, name), option.default) for name, option in self.options().items()}
        shown = {name: value for name, (value, default) in values.items() if name not in self.newer or value != default}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}

    def identity(self) -> dict[str, Any]:
        """Return the fields that a resumed run may not change."""
        return {name: value for name, value in self.to_dict().items() if name not in self.resumable}

    def replace(self: C, **changes: Any) -> C:
        """Return the configuration with some fields changed. Raises UserError for unknown ones."""
        self.check_names(changes)
        return dataclasses.replace(self, **changes)


def explicit_arguments(arguments: Mapping[str, Any], config: type[Config]) -> dict[str, Any]:
    """Return those of a function's `locals()` that are fields of a configuration and were given."""
    return {name: arguments[name] for name in config.field_names() if not isinstance(arguments.get(name, UNSET), Unset)}


def describe_options(config: type[Config]) -> Callable[[F], F]:
    """Add the help of a configuration's fields to the `Args` of the decorated function, as far as it lacks them."""

    def describe(function: F) -> F:
        names, text = inspect.signature(function).parameters, inspect.getdoc(function) or ""
        helps = {field.name: field.metadata["help"] for field in fields(config) if field.name in names}
        lines = [f"    {key}: {help[0].upper()}{help[1:]}." for key, help in helps.items() if f"    {key}:" not in text]
        function.__doc__ = text.replace("\n\nReturns:", "\n".join(["", *lines, "", "Returns:"]), 1)
        return function

    return describe


def read_results(path: str | Path, command: str) -> dict[str, Any]:
    """Read the metadata in a run's folder, or a file of JSON. Raises UserError if it is of another command."""
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
