"""The cache among the arguments of a forward, and in what it returns, whatever the release of Transformers calls it.

What was `past_key_values` is `cache` from 5.24 on, where a forward also takes the old name and hands on the new one.
Both names may thus meet in one pass, and models of others keep the old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers.cache_utils import Cache, EncoderDecoderCache

_NEW, _OLD = "cache", "past_key_values"
CACHE_NAMES = (_NEW, _OLD)
"""The names of a cache, among arguments and in outputs."""


def read_cache(values: Any) -> Any:
    """Return the cache among arguments by name, or in an output; None without one."""
    name = cache_name(values)
    return None if name is None else values[name] if isinstance(values, Mapping) else getattr(values, name)


def cache_name(values: Any) -> str | None:
    """Return the name that the cache has among arguments or in an output; None without one.

    Models of their own ways call other things `cache`, as Flaubert does a dictionary, which are no cache here.
    """
    named = values if isinstance(values, Mapping) else {name: getattr(values, name, None) for name in CACHE_NAMES}
    passed = {name: value for name, value in named.items() if name in CACHE_NAMES and value is not None}
    if isinstance(passed.get(_NEW), Cache):
        return _NEW
    return _OLD if _OLD in passed else None


def rename_cache(kwargs: dict[str, Any], parameters: Iterable[str]) -> dict[str, Any]:
    """Return keyword arguments under the name of the cache that a forward of these parameters has, if it has one."""
    if _OLD not in kwargs or _OLD in parameters or _NEW not in parameters:
        return kwargs
    return {_NEW: kwargs[_OLD]} | {name: value for name, value in kwargs.items() if name != _OLD}


def holds_states_alone(cache: Any) -> bool:
    """Return whether a cache has states in place of keys in all layers, as Mamba's, and so no number of tokens."""
    return bool(getattr(cache, "layers", ())) and all(getattr(cache, "is_linear", (False,)))


def is_filled(cache: Any) -> bool:
    """Return whether tokens were read into a cache."""
    if not isinstance(cache, Cache):
        return bool(cache)
    return bool(cache.has_previous_state() if holds_states_alone(cache) else count_tokens(cache))


def count_tokens(cache: Any) -> int:
    """Return how many tokens were read into a cache that keeps keys.

    A hybrid of Transformers 5.20 may keep states in its modules: the first layer, which the cache asks, stays empty.
    """
    layers = [layer for layer in getattr(cache, "layers", ()) if getattr(layer, "keys", None) is not None]
    return max(int(one.get_seq_length()) for one in (cache, *layers))


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the cache of self-attention among the arguments of an attention module; None without one."""
    for value in (*kwargs.values(), *args):
        if isinstance(value, Cache):
            return value.self_attention_cache if isinstance(value, EncoderDecoderCache) else value
    return None
