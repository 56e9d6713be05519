"""How numbers and amounts are written for people."""

import math

import pytest

from regard.report import labels


@pytest.mark.parametrize(
    "value, text",
    [(-0.5, "−0.5"), (-1234.5, "−1,234"), (-2.5e-5, "−2.500e−05"), (0.0, "0"), (-math.inf, "−∞"), (math.nan, "–")],
)
def test_a_number_has_a_true_minus(value: float, text: str) -> None:
    assert labels.number(value) == text


def test_a_missing_share_has_no_unit() -> None:
    assert labels.with_unit(math.nan, "%") == "–"
    assert labels.with_unit(12.5, "%") == "12.50 %"


@pytest.mark.parametrize(
    "count, size, samples",
    [
        (1, "1 layer × 1 head", "1 sample of 1 token from a.txt"),
        (12, "12 layers × 12 heads", "12 samples of 12 tokens from a.txt"),
    ],
)
def test_one_is_singular(count: int, size: str, samples: str) -> None:
    record = {"model": {"layers": count, "heads": count}, "data": {"samples": count, "length": count}}
    record["data"] |= {"source": "a.txt"}
    assert (labels.model_size(record), labels.samples(record)) == (size, samples)
    assert labels.samples({"data": {"samples": count, "length": None}}) == samples.partition(" of")[0]
