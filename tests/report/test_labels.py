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


@pytest.mark.parametrize(
    "value, margin, text",
    [
        (45.9, 1.04, "45.9 ± 1.0 %"),
        (45.9, 0.104, "45.90 ± 0.10 %"),
        (-4.861, 9.8, "−4.9 ± 9.8 %"),
        (1234.5, 120.0, "1,234 ± 120 %"),
        (50.0, 0.0, "50.00 ± 0 %"),
        (-0.0, 0.0, "0 ± 0 %"),
        (-0.004, 0.5, "0.00 ± 0.50 %"),
        (1234.5, 0.001, "1,234.5 ± 0.001 %"),
        (12345.6, 0.3, "12,346 ± 0.3 %"),
        (3e-4, 1e-10, "0.000300 ± 1.0e−10 %"),
        (5.0, math.inf, "5.000 ± ∞ %"),
        (2e-5, 3e-6, "2.000e−05 ± 3.0e−06 %"),
        (45.9, math.nan, "45.90 %"),
        (math.nan, math.nan, "–"),
    ],
)
def test_a_number_has_the_decimals_of_its_margin(value: float, margin: float, text: str) -> None:
    assert labels.with_margin(value, margin, "%") == text
