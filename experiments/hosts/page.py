"""docs/models.md: the table of hosts, from docs/results/hosts.json."""

from __future__ import annotations

from collections import Counter
from typing import Any

from experiments.hosts.check import CRASHED, EXACT, REFUSED, SILENT, UNBUILT

STATES = (EXACT, REFUSED, SILENT, CRASHED, UNBUILT)
INTRODUCTION = """\
# Models

Every model type of Transformers {transformers}, as a tiny random model in float32 (torch {torch}): what Regard computes
against the model's own eager attention. Made by `make hosts`.

* **{exact}**: outputs are equal to rounding, and so are the mean masses of keys where the model returns its weights.
  Models of text are also checked with padding, causal ones with a cache. The number is the largest difference.
* **{refused}**: Regard says in one line that it does not observe this model.
* **{silent}**: outputs or masses are wrong. Do not measure these models.
* **{crashed}**: an error that is not Regard's own, or no end.
* **{unbuilt}**: no tiny model or no inputs for it; nothing is known.
"""


def make_page(results: dict[str, Any]) -> str:
    """Return the page: counts, then a table of every kind."""
    names = dict(zip(("exact", "refused", "silent", "crashed", "unbuilt"), STATES, strict=True))
    versions = {name: results[name] for name in ("transformers", "torch")}
    hosts = results["hosts"]
    kinds = list(dict.fromkeys(host["kind"] for host in hosts))
    lines = [INTRODUCTION.format(**names, **versions), _row(["kind", *STATES]), "|---" * (len(STATES) + 1) + "|"]
    for kind in kinds:
        counts = Counter(host["state"] for host in hosts if host["kind"] == kind)
        lines.append(_row([kind, *(str(counts[state]) for state in STATES)]))
    for kind in kinds:
        lines += ["", f"## {kind.capitalize()}", "", "| type | result | |", "|---|---|---|"]
        rows = sorted((host for host in hosts if host["kind"] == kind), key=lambda host: host["type"])
        lines += [_row([f"`{host['type']}`", host["state"], _detail(host)]) for host in rows]
    return "\n".join(lines) + "\n"


def _detail(host: dict[str, Any]) -> str:
    """Return the largest difference with what was compared, or the reason."""
    if host["state"] == EXACT:
        return f"{host['difference']:.0e}; {', '.join(host['checks'])}"
    return host["why"].replace("|", "\\|").replace("<", "&lt;").replace("`", "'").replace("[", "\\[")


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
