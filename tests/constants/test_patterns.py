"""The patterns of constant matrices, on matrices made by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.constants.patterns import (
    PATTERNS,
    Pattern,
    classify_pattern,
    classify_patterns,
    has_diagonal,
    is_on_special_tokens,
    mass_shares,
    pattern_fractions,
)
from regard.errors import UserError

T = 32


def shifted(offset: int, size: int = T) -> Tensor:
    """All mass at one offset; rows whose key would stand outside are zero."""
    return torch.diag(torch.ones(size - abs(offset)), offset)


def columns(*places: int, size: int = T) -> Tensor:
    matrix = torch.zeros(size, size)
    matrix[:, list(places)] = 1 / len(places)
    return matrix


def even(size: int = T) -> Tensor:
    return torch.full((size, size), 1 / size)


def harmonic(size: int = T) -> Tensor:
    at = torch.arange(size)
    return 1 / (1 + (at - at[:, None]).abs())


CLEAR_CASES: dict[Pattern, Tensor] = {
    "diagonal": torch.eye(T),
    "previous token": shifted(-1),
    "next token": shifted(1),
    "special tokens": columns(0, T - 1),
    "broad": even(),
    "zero": torch.zeros(T, T),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pure_pattern_has_its_name(name: Pattern) -> None:
    assert classify_pattern(CLEAR_CASES[name], [T - 1]) == name


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("size", [4, 64, 200])
def test_the_name_does_not_hang_on_the_length(name: Pattern, size: int) -> None:
    made = {"diagonal": torch.eye(size), "previous token": shifted(-1, size), "next token": shifted(1, size)}
    made |= {"special tokens": columns(0, -1, size=size), "broad": even(size), "zero": torch.zeros(size, size)}
    assert classify_pattern(made[name], [-1]) == name


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["diagonal", "previous token", "next token", "special tokens", "broad"]),
    seed=st.integers(0, 2**31),
    power=st.integers(-30, 30),
)
def test_neither_scaled_rows_nor_noise_change_the_name(name: Pattern, seed: int, power: int) -> None:
    random = torch.Generator().manual_seed(seed)
    noise = torch.rand(T, T, generator=random) / T
    scale = (torch.rand(T, 1, generator=random) + 0.1) * 10.0**power
    assert classify_pattern((CLEAR_CASES[name] + 0.5 * noise).double() * scale, [T - 1]) == name


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(1, 20), keys=st.integers(1, 20))
def test_shares_are_those_of_a_plain_sum(seed: int, size: int, keys: int) -> None:
    random = torch.Generator().manual_seed(seed)
    matrix = torch.rand(size, keys, generator=random) * (torch.rand(size, 1, generator=random) > 0.3)
    special = {0, keys - 1}
    expected = dict.fromkeys(("diagonal", "previous token", "next token", "band", "special tokens", "elsewhere"), 0.0)
    rows = [row for row in range(size) if matrix[row].sum() > 0]
    for row in rows:
        total = sum(float(weight) for weight in matrix[row])
        for key in range(keys):
            share = float(matrix[row, key]) / total / len(rows)
            for name, offset in (("diagonal", 0), ("previous token", -1), ("next token", 1)):
                expected[name] += share * (key - row == offset)
            expected["band"] += share * (abs(key - row) <= 1)
            expected["special tokens"] += share * (key in special)
            expected["elsewhere"] += share * (key not in special and abs(key - row) > 1)
    found = mass_shares(matrix, [-1])
    assert found.keys() == expected.keys()
    for name, share in expected.items():
        if rows:
            assert math.isclose(float(found[name]), share, abs_tol=1e-6), name
        else:
            assert found[name].isnan()


def test_the_stronger_of_two_names_the_pattern_and_both_are_told() -> None:
    both = torch.stack([0.7 * columns(0, T - 1) + 0.3 * torch.eye(T), 0.3 * columns(0, T - 1) + 0.7 * torch.eye(T)])
    assert classify_patterns(both, [-1]) == ["special tokens", "diagonal"]
    assert has_diagonal(both, [-1]).tolist() == [True, True]
    assert is_on_special_tokens(both, [-1]).tolist() == [True, False]


def test_a_band_without_a_strongest_offset_is_diagonal() -> None:
    assert classify_pattern(shifted(-1) + torch.eye(T) + shifted(1)) == "diagonal"
    assert classify_pattern(0.8 * shifted(-1) + 0.2 * torch.eye(T)) == "previous token"


def test_half_of_the_mass_is_no_majority() -> None:
    """Of three rows one is on the diagonal, one before it, and one on both alike."""
    assert classify_pattern(torch.tensor([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])) == "diagonal"
    assert not is_on_special_tokens(torch.ones(2, 2))


def test_columns_that_are_all_special_tell_nothing() -> None:
    """A uniform row has all its mass in them, so that they have no excess."""
    assert classify_pattern(torch.eye(4), [1, 2, 3]) == "diagonal"
    assert classify_pattern(torch.ones(1, 1)) == "broad"


def test_separators_have_to_be_named() -> None:
    assert classify_pattern(columns(T // 2)) == "broad"
    assert classify_pattern(columns(T // 2), [T // 2]) == "special tokens"


def test_a_bright_diagonal_in_little_mass_is_seen() -> None:
    """As the paper's pictures show them: most mass spread out, and a line along the middle."""
    faint = even() + 3 * torch.eye(T) / T
    assert classify_pattern(faint) == "broad"
    assert bool(has_diagonal(faint))
    assert not bool(has_diagonal(even()))
    assert not bool(has_diagonal(columns(0, T - 1), [-1]))
    assert bool(has_diagonal(harmonic()))
    assert not bool(has_diagonal(torch.zeros(T, T)))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.integers(4, 9), causal=st.booleans(), faint=st.floats(0.5, 4.0))
def test_a_diagonal_is_bright_by_plain_sums(seed: int, size: int, causal: bool, faint: float) -> None:
    """The neighborhood is the visible offsets 2 to 5 on both sides, without columns 0 and −1 and rows of zeros."""
    random = torch.Generator().manual_seed(seed)
    weights = torch.rand(size, size, generator=random, dtype=torch.float64) ** 3
    weights = weights + faint * torch.rand(1, generator=random) * torch.eye(size)
    weights = (weights.tril() if causal else weights) * (torch.rand(size, 1, generator=random) > 0.2)
    places: dict[int, list[float]] = {}
    for query in range(size):
        total = float(weights[query].sum())
        for key in range(1, size - 1 if total else 0):
            if key <= query or bool(weights.triu(1).any()):
                places.setdefault(key - query, []).append(float(weights[query, key]) / total)
    around = [value for offset, values in places.items() if 2 <= abs(offset) <= 5 for value in values]
    band = [sum(places[offset]) / len(places[offset]) for offset in (-1, 0, 1) if offset in places]
    expected = bool(around) and max(band, default=0.0) > 2 * sum(around) / len(around)
    assert bool(has_diagonal(weights, [-1])) == expected


def test_causal_rows_are_measured_against_causal_rows() -> None:
    """The first rows of an even causal matrix have much mass in the band because there is nowhere else."""
    causal = even(6).tril()
    assert classify_pattern(causal) == "broad"
    assert not bool(has_diagonal(even().tril()))
    first = torch.zeros(T, T)
    first[:, 0] = 1
    assert classify_pattern(first) == "special tokens"
    assert classify_pattern(shifted(-1)) == "previous token"


def test_rows_never_seen_are_left_out() -> None:
    """Padding before the text leaves rows and columns of zeros."""
    matrix = torch.eye(T)
    matrix[: T // 2] = 0
    assert float(mass_shares(matrix)["diagonal"]) == 1
    assert classify_pattern(matrix) == "diagonal"


def test_negative_entries_count_by_size() -> None:
    assert classify_pattern(-torch.eye(T)) == "diagonal"


def test_heads_are_answered_one_by_one() -> None:
    stack = torch.stack([CLEAR_CASES[name] for name in PATTERNS])
    assert classify_patterns(stack.view(2, 3, T, T), [-1]) == list(PATTERNS)
    assert mass_shares(stack.view(2, 3, T, T))["band"].shape == (2, 3)
    for one, matrix in zip(has_diagonal(stack, [-1]), stack, strict=True):
        assert bool(one) == bool(has_diagonal(matrix, [-1]))


def test_the_shares_over_all_heads() -> None:
    layers = {"encoder.0": torch.stack([torch.eye(T), even()]), "encoder.1": torch.stack([columns(0), shifted(-1)])}
    assert pattern_fractions(layers) == {"has_diagonal": 0.5, "on_special": 0.25}
    assert pattern_fractions({"encoder.0": columns(5)[None]}, [5]) == {"has_diagonal": 0.0, "on_special": 1.0}
    assert pattern_fractions({"encoder.0": columns(5)[None]})["on_special"] == 0.0


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match=r"one matrix.*\(2, 3, 3\)"):
        classify_pattern(torch.zeros(2, 3, 3))
    with pytest.raises(UserError, match="not finite"):
        classify_patterns(torch.full((3, 3), torch.nan))
    with pytest.raises(UserError, match="shape"):
        mass_shares(torch.ones(3))
    with pytest.raises(UserError, match="a matrix with 3, got 3"):
        mass_shares(torch.ones(3, 3), [3])
    with pytest.raises(UserError, match="none"):
        pattern_fractions({})


def test_both_ends_of_the_neighborhood_count() -> None:
    """At ±5 keys weigh four times as much as on the diagonal, so that the mean over the offsets 2 to 5 is as large."""
    distance = (torch.arange(12)[:, None] - torch.arange(12)).abs()
    assert not bool(has_diagonal((distance == 0) + 4.0 * (distance == 2)))
    assert not bool(has_diagonal((distance == 0) + 4.0 * (distance == 5)))
    assert bool(has_diagonal((distance == 0) + 4.0 * (distance == 6)))
