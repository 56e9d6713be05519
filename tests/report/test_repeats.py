"""The sentence on held-out text that is trained on."""

from typing import Any

import pytest

from regard.report.repeats import describe_repeats

END = "is also in the training text, word for word."


@pytest.mark.parametrize(
    "repeated, told",
    [
        ({"a": 0.5}, f"Of the held-out text, 50 % {END}"),
        ({"a": 0.012, "b": None, "c": 1.0, "d": 0.0099}, f"Of the held-out text, 1.2 % of a, 100 % of c {END}"),
        ({"a": 0.0099, "b": None}, ""),
        ({}, ""),
    ],
)
def test_what_is_trained_on_is_told_by_domain(repeated: dict[str, Any], told: str) -> None:
    domains = [{"name": name, "repeated": share} for name, share in repeated.items()]
    assert describe_repeats({"data": {"domains": domains}}) == told


def test_records_of_earlier_runs_say_nothing() -> None:
    assert describe_repeats({"data": {"domains": [{"name": "a"}]}}) == describe_repeats({}) == ""
