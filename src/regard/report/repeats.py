"""The sentence on held-out text that was also trained on."""

from collections.abc import Mapping
from typing import Any

from regard.report import labels

WORTH_TELLING = 0.01
"""Least share of a held-out text; a heading or a licence is in every text twice."""


def describe_repeats(metadata: Mapping[str, Any]) -> str:
    """Say how much of the held-out text of each domain is also training text; "" if next to nothing is."""
    domains = [domain for domain in labels.section(metadata, "data").get("domains") or [] if "repeated" in domain]
    shares = {str(domain["name"]): domain["repeated"] or 0.0 for domain in domains}
    told = {name: f"{labels.number(100 * share, 2)} %" for name, share in shares.items() if share >= WORTH_TELLING}
    if not told:
        return ""
    listed = next(iter(told.values())) if len(domains) == 1 else ", ".join(f"{told[name]} of {name}" for name in told)
    return f"Of the held-out text, {listed} is also in the training text, word for word."
