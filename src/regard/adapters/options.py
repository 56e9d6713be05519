"""Checks of the arguments of `regard.SharedAdapters` that do not depend on the model."""

import json
from collections.abc import Mapping
from typing import Any

from regard.errors import UserError

LORA = {"target_modules": "auto", "above_query": False, "detach_old": False, "top_k": None, "dropout": 0.0}
LEARNT = {"router_hidden_size": 100, "projection_order": "published", "temperature": None}
"""Defaults of options that are read with LoRA adapters, and with a learnt router, alone."""


def check_defaults(options: Mapping[str, Any], defaults: Mapping[str, Any], condition: str) -> None:
    """Check that options have their defaults where they are not read."""
    for name, value in options.items():
        if value != defaults[name]:
            raise UserError(f"{name}: expected {defaults[name]!r} with {condition}, got {value!r}")


def check_numbers(lora_alpha: Any, temperature: Any, dropout: Any) -> None:
    """Check the options that are numbers."""
    for name, value in (("lora_alpha", lora_alpha), ("temperature", 1 if temperature is None else temperature)):
        if not (_is_number(value) and 0 < value < float("inf")):
            raise UserError(f"{name}: expected a number above 0, got {value!r}")
    if not (_is_number(dropout) and 0 <= dropout < 1):
        raise UserError(f"dropout: expected a number from 0 to below 1, got {dropout!r}")


def as_json(lineage: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what is known of an adapter, as JSON gives it back."""
    try:
        entries = json.loads(json.dumps(dict(lineage or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"lineage: expected names with values that JSON holds, got one it does not ({error})"
        ) from error
    return dict(entries)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
