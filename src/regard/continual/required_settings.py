"""Settings that are read only where others are as they are said to be, and the error for one without effect."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from regard.errors import UserError

EMPTY = "none"
"""What a text that is not set is called."""


class RequiredSetting(NamedTuple):
    """That a setting is one of some values; without values, that it is a number above 0."""

    name: str
    values: tuple[str, ...] = ()

    def holds(self, value: Any) -> bool:
        """Return whether a value of that setting is as it is to be."""
        return _format_value(value) in self.values if self.values else value > 0

    def __str__(self) -> str:
        """As a user would write it."""
        return f"{self.name}={' or '.join(self.values)}" if self.values else f"{self.name} above 0"


def check_required(config: Any, conditions: Mapping[str, Sequence[RequiredSetting]]) -> None:
    """Raise UserError if a field of a record is not as by default, and nothing will read it."""
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in (name for name in conditions if getattr(config, name) != defaults[name]):
        for requirement in conditions[name]:
            value = getattr(config, requirement.name)
            if not requirement.holds(value):
                raise UserError(
                    f"{name}: expected {requirement}, which reads it, got {requirement.name}={_format_value(value)}"
                )


def _format_value(value: Any) -> str:
    return EMPTY if value == "" else str(value).lower() if isinstance(value, bool) else str(value)
