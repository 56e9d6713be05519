"""The cache of a forward, by the name that this release of Transformers has for it."""

from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

NAME = "cache" if "cache" in BaseModelOutputWithPast.__dataclass_fields__ else "past_key_values"


def behind(cache: Any) -> dict[str, Any]:
    """Return the argument of a forward that goes on behind a cache."""
    return {NAME: cache}


def cache_of(output: Any) -> Any:
    """Return the cache in an output; None without one."""
    return getattr(output, NAME)
