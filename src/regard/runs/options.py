"""Options: fields of configurations, declared once and checked alike from Python, files and the command line."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from regard.errors import UserError, describe_value

_NOUNS = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers"), str: ("a name", "names")}
_LIMITS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "minimum": ("of at least", operator.ge),
    "exclusive_minimum": ("over", operator.gt),
    "maximum": ("of at most", operator.le),
    "exclusive_maximum": ("below", operator.lt),
}
"""How messages call the limits of a number, and when it is within."""
Parser = Callable[[str], Any]


def config_field(
    default: Any,
    help: str,
    *,
    choices: Collection[str] | Callable[[], Collection[str]] | None = None,
    minimum: float | None = None,
    exclusive_minimum: float | None = None,
    maximum: float | None = None,
    exclusive_maximum: float | None = None,
    min_items: int = 0,
    repeated: bool = False,
    commas: bool = False,
    parser: Parser | None = None,
    syntax: str | None = None,
    none_word: str = "none",
    metavar: str | None = None,
    blank: bool = False,
) -> Any:
    """Declare a field of a configuration.

    The type of the field may be `bool`, `int`, `float`, `str` or a `Literal`, a tuple of one of them, or `None` beside.
    Whole numbers without bounds are at least 1. `help` is one line.

    `choices` are the allowed values, or a function that looks them up; those of a `Literal` need not be repeated. The
    option of a tuple takes values with commas between, or if `repeated` words of their own; `min_items` is the fewest.
    `commas` says that a text may name several with commas, too.
    `parser` reads a text in a way of its own, or raises ValueError; `syntax` says in messages what it reads, as
    "numbers and ranges such as 0,3,8-11". `none_word` is the text that stands for None; empty if no text does.
    `metavar` stands for the value in the help; None: N, X or NAME, by the type. `blank`: a text may be empty.
    """
    known = {name: value for name, value in locals().items() if name != "default"}
    return dataclasses.field(default=default, metadata=known)


def _is_table(value: Any) -> bool:
    """Return whether a value holds columns by name, over which it iterates, or rows, as of datasets."""
    return isinstance(value, Mapping) or hasattr(value, "columns") or hasattr(value, "column_names")


@dataclass(frozen=True)
class Option:
    """A field of a configuration with its declaration; see `config_field`."""

    name: str
    default: Any
    kind: Any  # type of its value, or of a tuple's elements
    optional: bool  # it may be None
    size: int | None  # number of a tuple's elements; None for any, 0 for a field that is no tuple
    declared: dict[str, Any]  # arguments of `config_field`, by name

    @classmethod
    def of(cls, field: dataclasses.Field[Any], hint: Any) -> Option:
        types = [part for part in get_args(hint) if part is not type(None)]
        optional = type(None) in get_args(hint)
        kind, declared = types[0] if optional else hint, dict(field.metadata)
        size: int | None = 0
        if get_origin(kind) is tuple:
            elements = get_args(kind)
            kind, size = elements[0], None if elements[-1] is Ellipsis else len(elements)
        if get_origin(kind) is Literal:
            kind, declared["choices"] = str, get_args(kind)
        return cls(field.name, field.default, kind, optional, size, declared)

    @property
    def label(self) -> str:
        """The name as the command line spells it, without the dashes before it."""
        return self.name.replace("_", "-")

    @property
    def help(self) -> str:
        return str(self.declared["help"])

    @property
    def is_tuple(self) -> bool:
        return self.size != 0

    @property
    def choices(self) -> tuple[str, ...] | None:
        """The allowed values; None if there is no list of them."""
        choices = self.declared["choices"]
        return None if choices is None else tuple(choices() if callable(choices) else choices)

    @property
    def expected(self) -> str:
        none_word = self.declared["none_word"] if self.optional else ""
        return f"{self._values()} or {none_word}" if none_word else self._values()

    def _values(self) -> str:
        if self.declared["syntax"]:
            return str(self.declared["syntax"])
        if self.choices is not None:
            return f"{'some' if self.is_tuple else 'one'} of {', '.join(self.choices)}"
        if self.kind is bool:
            return "true or false"
        if self.kind not in _NOUNS:
            return "values"
        noun = _NOUNS[self.kind][self.is_tuple]
        return " ".join(part for part in (str(self.size or ""), noun, self._bounds()) if part)

    def _bounds(self) -> str:
        limits = self._limits()
        if {"minimum", "maximum"} <= limits.keys() and limits["maximum"] < 2**53:
            return f"from {limits['minimum']:g} to {limits['maximum']:g}"
        return " and ".join(f"{_LIMITS[name][0]} {limit:g}" for name, limit in limits.items() if limit < 2**53)

    def _limits(self) -> dict[str, float]:
        """Return the limits of a number by name; without a lower one, whole numbers are at least 1."""
        limits = {name: self.declared[name] for name in _LIMITS if self.declared[name] is not None}
        has_lower = "minimum" in limits or "exclusive_minimum" in limits
        return limits if has_lower or self.kind is not int else {"minimum": 1, **limits}

    def error(self, shown: object) -> UserError:
        return UserError(f"{self.label}: expected {self.expected}, got {shown}")

    def validate(self, value: Any) -> Any:
        if value is None and self.optional:
            return None
        if isinstance(value, str) and self.declared["parser"] is not None and self.size is not None:
            value = self.parse(value)
        if not self.is_tuple:
            return self._validate_element(value)
        values = tuple(self._validate_element(part) for part in self._split(value))
        if self.size is None and self.kind is not Any and not self.declared["repeated"]:
            values = tuple(dict.fromkeys(values))
        if len(values) < self.declared["min_items"] or (self.size is not None and len(values) != self.size):
            raise self.error(", ".join(map(str, values)) or "none")
        return values

    def _split(self, value: Any) -> Iterable[Any]:
        """Return the elements of a tuple's value, which may be a text with commas, or one element alone."""
        if isinstance(value, str) and self.kind in (str, Any) and not self.declared["repeated"]:
            return [part.strip() for part in value.split(",")]
        if isinstance(value, str) or not isinstance(value, Iterable):
            return (value,)
        if self.kind is str and _is_table(value):
            raise self.error(type(value).__name__)
        return value

    def _validate_element(self, value: Any) -> Any:
        number = {int: numbers.Integral, float: numbers.Real}.get(self.kind)
        is_bool = isinstance(value, bool)
        if number is not None and not is_bool and isinstance(value, number):
            value = self.kind(value)
        if self.kind is Any:
            return value
        if self.kind is str and isinstance(value, os.PathLike):
            value = os.fspath(value)
        if type(value) is not self.kind:
            raise self.error(describe_value(value))
        if isinstance(value, str) and not value.strip() and not self.declared["blank"] and value != self.default:
            raise self.error(describe_value(value))  # of a shell's variable that is not set; a path would be "."
        if number is not None:
            in_limits = (_LIMITS[name][1](value, limit) for name, limit in self._limits().items())
            if not ((isinstance(value, int) or math.isfinite(value)) and all(in_limits)):
                most = self.declared["maximum"]
                if most is not None and value > most >= 2**53:  # which `expected` does not say
                    raise UserError(f"{self.label}: expected at most {most}, got {value}")
                raise self.error(value)
        if self.choices is not None and value not in self.choices:
            raise self.error(describe_value(value))
        return value

    def parse(self, text: str) -> Any:
        """Return the value that a text states, as `--name TEXT` does. Raises UserError."""
        if self.optional and text and text.lower() == self.declared["none_word"]:
            return None
        try:
            if self.declared["parser"] is not None:
                return self.declared["parser"](text)
            if not self.is_tuple:
                return self._parse_element(text)
            parts = [text] if self.declared["repeated"] else text.split(",")
            return tuple(self._parse_element(part.strip()) for part in parts)
        except (ValueError, KeyError, ArithmeticError):
            raise self.error(repr(text)) from None

    def _parse_element(self, text: str) -> Any:
        if self.kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return text if self.kind is Any else self.kind(text)
