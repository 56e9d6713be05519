"""The rows that stand for many: those nearest to the centers of k-means."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ROUNDS = 100


def kmeans(points: Tensor, count: int, *, seed: int, rounds: int = ROUNDS) -> tuple[Tensor, Tensor]:
    """The centers (center, width) of points (point, width), float64, and the number of each point's center (point,).

    Lloyd's rounds from centers drawn as k-means++ draws them (Arthur and Vassilvitskii 2007), until no point changes
    its center. A center that has lost its points stays where it is. There are fewer than `count` centers where there
    are fewer different points.
    """
    points = points.double().cpu()
    centers = _init_centers(points, count, np.random.default_rng(seed))
    assignment = squared_distances(points, centers).argmin(1)
    for _ in range(rounds):
        members = torch.nn.functional.one_hot(assignment, len(centers)).double()
        sizes = members.sum(0)[:, None]
        centers = torch.where(sizes > 0, members.T @ points / sizes.clamp_min(1), centers)
        new_assignment = squared_distances(points, centers).argmin(1)
        if torch.equal(new_assignment, assignment):
            break
        assignment = new_assignment
    return centers, assignment


def select_representatives(points: Tensor, count: int, *, seed: int) -> list[int]:
    """Return the numbers of at most `count` points, ascending: of each center's points the one nearest to it."""
    centers, assignment = kmeans(points, count, seed=seed)
    far_distances = squared_distances(points.double().cpu(), centers)
    far_distances[assignment[:, None] != torch.arange(len(centers))] = torch.inf
    return sorted(far_distances.argmin(0)[assignment.unique()].tolist())


def squared_distances(points: Tensor, centers: Tensor) -> Tensor:
    """Return the squared distance of each point to each center, (point, center)."""
    return torch.cdist(points, centers, compute_mode="donot_use_mm_for_euclid_dist").square()


def _init_centers(points: Tensor, count: int, random: np.random.Generator) -> Tensor:
    """Return points as first centers, each drawn with a chance proportional to its squared distance to the others."""
    indices = [int(random.integers(len(points)))]
    while len(indices) < count:
        nearest = squared_distances(points, points[indices]).amin(1).numpy()
        if not nearest.any():
            break
        indices.append(int(random.choice(len(points), p=nearest / nearest.sum())))
    return points[indices]
