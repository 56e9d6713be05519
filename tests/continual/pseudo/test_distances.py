"""Distances between sets of vectors against plain references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.adapters.reflection import Density
from regard.continual.pseudo.quality import (
    frechet_distance,
    measure_privacy,
    nearest_distances,
    probability_less,
    split_frechet_distance,
)


def drawn(seed: int, rows: int, width: int = 4) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    mixed = torch.randn(width, width, generator=made, dtype=torch.float64)
    return torch.randn(rows, width, generator=made, dtype=torch.float64) @ mixed + seed


def test_the_frechet_distance_is_that_with_roots_of_matrices() -> None:
    one, other = drawn(1, 30), drawn(2, 50)
    first, second = np.cov(one.numpy().T), np.cov(other.numpy().T)
    roots = np.sqrt(np.real(np.linalg.eigvals(first @ second))).sum()
    expected = ((one.mean(0) - other.mean(0)) ** 2).sum() + np.trace(first + second) - 2 * roots
    assert frechet_distance(one, other) == pytest.approx(float(expected), rel=1e-8)
    assert frechet_distance(one, other) == pytest.approx(frechet_distance(other, one), rel=1e-10)


def test_the_frechet_distance_of_sets_that_are_known() -> None:
    one = drawn(1, 20)
    assert frechet_distance(one, one) == pytest.approx(0, abs=1e-9)
    assert frechet_distance(one, one + 3) == pytest.approx(4 * 9)
    line = torch.tensor([[-1.0], [1.0]])  # of variance 2
    assert frechet_distance(line, 3 * line) == pytest.approx((np.sqrt(2) - np.sqrt(18)) ** 2)
    assert frechet_distance(drawn(1, 3, 50), drawn(2, 4, 50)) > 0  # fewer rows than features


def test_chance_alone_is_less_than_a_difference() -> None:
    one = drawn(1, 40)
    alone = split_frechet_distance(one, 10, 0)
    assert alone is not None
    assert 0 < alone < frechet_distance(one, drawn(2, 10))
    assert split_frechet_distance(one, 39, 0) is None
    assert split_frechet_distance(one, 1, 0) is None


def test_the_nearest_is_the_least_of_all_distances() -> None:
    one, other = drawn(1, 300), drawn(2, 7)
    expected = [min(float((row - each).norm()) for each in other) for row in one]
    assert nearest_distances(one, other).tolist() == pytest.approx(expected)


def test_likelier_less_counts_pairs_and_half_of_ties() -> None:
    one, other = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([2.0, 0.0, 3.0, 2.0])
    pairs = [(a < b) + 0.5 * (a == b) for a in one.tolist() for b in other.tolist()]
    assert probability_less(one, other) == pytest.approx(sum(pairs) / len(pairs))


def test_training_rows_are_found_out_and_what_is_drawn_as_they_were_is_not() -> None:
    every = drawn(1, 400)
    trained, held_out, third = every[:150], every[150:300], every[300:]
    copies = measure_privacy(trained[:20], trained, held_out)
    assert (copies.nearest, copies.closer) == (0, 1)
    all_of_them = measure_privacy(trained, trained, held_out)
    assert all_of_them.membership == 1
    apart = measure_privacy(third, trained, held_out)
    assert apart.nearest == pytest.approx(1, abs=0.3)
    assert apart.closer == pytest.approx(0.5, abs=0.1)
    assert apart.membership == pytest.approx(0.5, abs=0.1)
    assert measure_privacy(third, trained, trained).nearest is None


def test_of_an_even_number_the_median_is_between_the_two_in_the_middle() -> None:
    trained, held_out, stand_ins = (
        torch.tensor(places)[:, None] for places in ([0.0], [1, 3, 9, 2.0], [2, 4, 30, 3.0])
    )
    assert measure_privacy(stand_ins, trained, held_out).nearest == pytest.approx(3.5 / 2.5)


def test_a_density_with_more_directions_than_its_rows_tell_of_tells_of_the_rows() -> None:
    """Directions that are fitted to few rows are those rows'."""
    every = torch.randn(200, 384, generator=torch.Generator().manual_seed(1))
    found = [
        measure_privacy(Density.of(every[:100], directions).draw(40, 3), every[:100], every[100:]).membership
        for directions in (0, 16)
    ]
    assert found[0] < 0.7 < found[1]
