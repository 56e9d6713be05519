"""The rows that stand for many: those nearest to the centres of k-means."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ROUNDS = 100


def kmeans(points: Tensor, count: int, *, seed: int, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """The centres (centre, width) of points (point, width), float64, and the number of each point's centre (point,).

    Lloyd's rounds from centres drawn as k-means++ draws them (Arthur and Vassilvitskii 2007), until no point changes
    its centre. A centre that has lost its points stays where it is. There are fewer than `count` centres where there
    are fewer different points.
    """
    points = points.double().cpu()
    centres = _init_centers(points, count, np.random.default_rng(seed))
    assignment = squared_distances(points, centres).argmin(1)
    for _ in range(rounds):
        members = torch.nn.functional.one_hot(assignment, len(centres)).double()
        sizes = members.sum(0)[:, None]
        centres = torch.where(sizes > 0, members.T @ points / sizes.clamp_min(1), centres)
        new_assignment = squared_distances(points, centres).argmin(1)
        if torch.equal(new_assignment, assignment):
            break
        assignment = new_assignment
    return centres, assignment


def select_representatives(points: Tensor, count: int, *, seed: int) -> list[int]:
    """The numbers of at most `count` points, ascending: of each centre's points the one nearest to it."""
    centres, assignment = kmeans(points, count, seed=seed)
    far_distances = squared_distances(points.double().cpu(), centres)
    far_distances[assignment[:, None] != torch.arange(len(centres))] = torch.inf
    return sorted(far_distances.argmin(0)[assignment.unique()].tolist())


def squared_distances(points: Tensor, centres: Tensor) -> Tensor:
    """The squared distance of each point to each centre, (point, centre)."""
    return torch.cdist(points, centres, compute_mode="donot_use_mm_for_euclid_dist").square()


def _init_centers(points: Tensor, count: int, random: np.random.Generator) -> Tensor:
    """Points as first centres, each drawn with a chance that grows with its squared distance to those before it."""
    indices = [int(random.integers(len(points)))]
    while len(indices) < count:
        nearest = squared_distances(points, points[indices]).amin(1).numpy()
        if not nearest.any():
            break
        indices.append(int(random.choice(len(points), p=nearest / nearest.sum())))
    return points[indices]
