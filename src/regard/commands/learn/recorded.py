"""Settings that a recorded run had by default, where the defaults are others by now."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from regard.errors import UserError, warn_user
from regard.runs.config import read_results


def parse_setting(item: str) -> tuple[str, str]:
    """Return name and value of an item of `set`. Raises UserError."""
    name, equal, value = item.partition("=")
    if not (name and equal and value):
        raise UserError(f"set: expected NAME=VALUE, got {item!r}")
    return name.strip().replace("-", "_"), value.strip()


def write_setting(name: str, value: Any) -> str:
    """Return an item of `set`, as it is typed."""
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def recorded_settings(path: str | Path, methods: Iterable[str], given: Iterable[str]) -> tuple[str, ...]:
    """Return the settings, as items of `set`, that methods had in a recorded run and have no more by default.

    A warning names them. What the run was given itself is not among them, nor what the run did not record.

    Args:
        path: The run, or a file of options alone, which records no runs.
        methods: Names of methods; those that the run had not are left as they are.
        given: Items of `set` that hold in place of recorded ones.

    Raises:
        UserError: Two methods had another value each, which one item cannot say.
    """
    from regard.continual.methods import method_named

    metadata, names = read_results(path, "learn"), {parse_setting(item)[0] for item in given}
    runs, had = metadata.get("runs") or (), dict[str, dict[str, Any]]()
    for method in map(str.strip, methods):
        before = next((run["settings"] for run in runs if f"{run['method']} ".startswith(f"{method} ")), None)
        if before is None:
            continue
        known = method_named(method).Config
        items = dict(map(parse_setting, metadata["config"].get("set") or ()))
        own = {setting.name: items[setting.name] for setting in fields(known) if setting.name in items}
        unread = known.unread(own)
        now = known.parse({name: value for name, value in own.items() if name not in unread}).as_recorded()
        then = {name: value for name, value in known.completed(before).items() if name in now}
        for name in then.keys() - known.unread({**now, **then}) - names:
            if then[name] != now[name]:
                had.setdefault(name, {})[method] = then[name]
    for name, values in had.items():
        if len(set(map(str, values.values()))) > 1:
            found = " and ".join(f"{value} with {method}" for method, value in values.items())
            raise UserError(f"config: {name} was {found} in {path}, by defaults of then; give --set {name}=VALUE")
    kept = tuple(write_setting(name, next(iter(had[name].values()))) for name in sorted(had))
    if kept:
        few = list(dict.fromkeys(method for values in had.values() for method in values))
        warn_user(
            f"config: {', '.join(few)} had {' '.join(kept)} in {path}, by defaults that are others now; this run has "
            "them, too; --set NAME=VALUE changes them"
        )
    return kept
