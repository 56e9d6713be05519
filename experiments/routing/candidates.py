"""Which router in closed form is the best: candidates on one stream to choose by, then on those of the page.

    python -m experiments.routing.candidates --data DIR [--streams development,long,mixed,fifty,long-480,mixed-480]
        [--seeds 42,1,2] [--work DIR]

All candidates train nothing, keep no rows and read no layer behind half of the frozen model. Rule, fixed before any
candidate met a stream of the page: `development`, whose tasks no other stream has, chooses the candidate with the
largest own weight there (mean over three seeds); of those within .005 of it the one that keeps least, and of these the
first in `CANDIDATES`. It becomes the default if in each of `long`, `mixed` and `fifty` the whole 95 % interval of its
own weight minus that of the present router, paired by seed, is above 0. A stream and seed takes two minutes on a core.

`long-480` and `mixed-480` have four times as many training rows of a task. They were added after seed 42 of `long` and
`mixed` had been seen, to learn whether rows are missing; they decide nothing.

Everything is float64 and written out; the routers of the package are tested against their own definitions.
"""

import math
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from experiments.common.runs import Case, make_missing, origin
from experiments.routing.development import read_development
from experiments.routing.run import BUDGET
from experiments.routing.streams import describe_stream, read_long, read_mixed, read_named
from experiments.sapt.run import SEEDS
from regard.adapters.queries import StateReader, mean_states
from regard.data.encoding import encode
from regard.data.examples import Examples
from regard.data.stream import ClassificationTask, Stream
from regard.models.pretrained import Loaded, load

DEVELOPMENT = "development"
REPORTED = ("long", "mixed", "fifty")
MORE_ROWS = {"long-480": (read_long, 480), "mixed-480": (read_mixed, 480)}
"""Streams with more training rows of a task."""
PRESENT = "means"
MARGIN = 0.005
"""Own weights that are no further apart count as equal in the choice."""
POOLS = ("mean", "deviation", "maximum")


class Candidate(NamedTuple):
    """A router: what it reads of which layers, how it shrinks, and what it knows of a task.

    Args:
        pools: Of `POOLS`, each of each layer.
        all_layers: Read every layer up to half, in the place of a quarter and half.
        shrinkage: Of the covariance towards its diagonal; None: the closed form of OAS (Chen et al. 2010).
        by_class: A key for each class of a task, in the place of one.
        rank: Main directions of a task's own covariance, which is mixed with the common one by a third.
        random: Random features max(0, xW) that take the place of what is read (RanPAC: arXiv 2307.02251).
    """

    pools: tuple[str, ...] = ("mean",)
    all_layers: bool = False
    shrinkage: float | None = 0.1
    by_class: bool = False
    rank: int = 0
    random: int = 0


BOTH = ("mean", "deviation")
CANDIDATES: Mapping[str, Candidate] = {
    PRESENT: Candidate(),
    "means, shrinkage of OAS": Candidate(shrinkage=None),
    "means of all layers to half": Candidate(all_layers=True),
    "means, keys of classes": Candidate(by_class=True),
    "means, covariances of tasks": Candidate(rank=32),
    "means, random features": Candidate(random=2000),
    "means and maxima": Candidate(("mean", "maximum")),
    "means and deviations": Candidate(BOTH),
    "means and deviations, shrinkage of OAS": Candidate(BOTH, shrinkage=None),
    "means and deviations, covariances of tasks": Candidate(BOTH, rank=32),
    "means and deviations, keys of classes": Candidate(BOTH, by_class=True),
    "means and deviations, keys of classes, shrinkage .2": Candidate(BOTH, by_class=True, shrinkage=0.2),
}


class Rows(NamedTuple):
    """Pools (row, layer, pool, width) of all layers up to half, and the class of each row."""

    pools: Tensor
    classes: Tensor


class PoolReader(StateReader):
    """Reads means, standard deviations over tokens, and maxima of states, as (row, layer × pool × width)."""

    def _pool(self, states: Mapping[int, Tensor], valid: Tensor) -> Tensor:
        return torch.cat([torch.cat(_pools(states[layer], valid), -1) for layer in self.layers], -1)


def _pools(states: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = mean_states(states, valid)
    variance = mean_states((states.float() - mean[:, None]).square(), valid)
    return mean, variance.sqrt(), states.masked_fill(~valid[..., None], -torch.inf).amax(1)


def read_rows(tasks: Stream, loaded: Loaded, length: int = BUDGET.length) -> list[tuple[Rows, Rows]]:
    """Return training and test rows of all tasks."""
    half = max(1, loaded.model.config.num_hidden_layers // 2)
    reader = PoolReader(loaded.model, list(range(1, half + 1)))

    def read(examples: Examples) -> Rows:
        encoded = encode("sequence", examples, loaded.tokenizer, length, "natural")
        with torch.no_grad():
            batches = ({**batch, "attention_mask": batch["attention_mask"].long()} for batch in encoded.batches(64))
            pools = torch.cat([reader(batch, batch["attention_mask"].bool()) for batch in batches])
        return Rows(pools.reshape(len(pools), half, len(POOLS), -1), encoded.labels)

    return [(read(task.train), read(task.test)) for task in cast(Sequence[ClassificationTask], tasks.tasks)]


class Discriminant:
    """A candidate that knows tasks by their training features: common covariance, keys with their tasks and priors."""

    def __init__(self, candidate: Candidate, tasks: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.candidate, self.num_tasks = candidate, len(tasks)
        rows = [features for features, _ in tasks]
        within = sum(_scatter(task) for task in rows) / sum(len(task) - 1 for task in rows)
        assert isinstance(within, Tensor)
        self.scales = within.diagonal().clamp_min(1e-12).sqrt()
        correlations = within / self.scales / self.scales[:, None]
        shrinkage = candidate.shrinkage
        if shrinkage is None:
            shrinkage = oas_shrinkage(correlations, sum(len(task) - 1 for task in rows))
        correlations = (1 - shrinkage) * correlations + shrinkage * torch.eye(len(correlations), dtype=torch.float64)
        self.root = torch.linalg.cholesky(correlations)
        groups = [_groups(*task, by_class=candidate.by_class) for task in tasks]
        self.keys = self.whiten(torch.stack([group.mean(0) for task in groups for group in task]))
        self.owners = torch.tensor([index for index, task in enumerate(groups) for _ in task])
        self.log_priors = torch.tensor(
            [math.log(len(group) / sum(map(len, task))) for task in groups for group in task], dtype=torch.float64
        )
        self.own = [self._own_covariance(task) for task in rows] if candidate.rank else []
        size = len(self.scales)
        self.numbers = size * size + len(self.keys) * (size + 1) + self.num_tasks * candidate.rank * size

    def whiten(self, features: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.root, (features / self.scales).T, upper=False).T

    def _own_covariance(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return whitened main directions (rank, width) of a task, and variances there."""
        deviations = rows - rows.mean(0)
        own_scales = deviations.std(0).clamp_min(1e-12)
        _, values, directions = torch.linalg.svd(deviations / own_scales, full_matrices=False)
        rank = self.candidate.rank
        kept = directions[:rank] * values[:rank, None] * own_scales / math.sqrt(len(rows) - 1)
        _, lengths, directions = torch.linalg.svd(self.whiten(kept), full_matrices=False)
        return directions, lengths.square()

    def scores(self, features: Tensor) -> Tensor:
        """Return log weights (row, task), up to a number of each row."""
        rows, result = self.whiten(features), []
        for task in range(self.num_tasks):
            own = self.owners == task
            gaps = rows[:, None] - self.keys[own]
            logs = self.log_priors[own] - gaps.square().sum(-1) / 2
            if self.own:
                directions, variances = self.own[task]
                mixed = 2 / 3 + variances / 3
                logs = logs - ((gaps @ directions.T).square() * (1 / mixed - 1)).sum(-1) / 2 - mixed.log().sum() / 2
            result.append(logs.logsumexp(1))
        return torch.stack(result, 1)


def oas_shrinkage(covariance: Tensor, degrees: int) -> float:
    """Return the oracle-approximating shrinkage towards a multiple of the identity (Chen et al., arXiv 0907.4698)."""
    size, square, trace = len(covariance), float(covariance.square().sum()), float(covariance.trace())
    distance = square - trace**2 / size
    if distance <= 0:
        return 1.0
    return min(1.0, ((1 - 2 / size) * square + trace**2) / ((degrees + 1 - 2 / size) * distance))


def _scatter(rows: Tensor) -> Tensor:
    deviations = rows - rows.mean(0)
    return deviations.T @ deviations


def _groups(features: Tensor, classes: Tensor, *, by_class: bool) -> list[Tensor]:
    return [features[classes == label] for label in classes.unique()] if by_class else [features]


def select_features(candidate: Candidate, rows: Rows) -> Tensor:
    """Return what a candidate reads of rows, (row, width)."""
    half = rows.pools.shape[1]
    layers = range(1, half + 1) if candidate.all_layers else sorted({max(1, half // 2), half})
    pools = [POOLS.index(pool) for pool in candidate.pools]
    return rows.pools[:, [layer - 1 for layer in layers]][:, :, pools].flatten(1).double()


def measure(candidate: Candidate, tasks: Sequence[tuple[Rows, Rows]]) -> dict[str, Any]:
    """Return own weights, rows sent to their own task, the mean negative log weight, and the numbers kept."""
    features = [[select_features(candidate, rows) for rows in pair] for pair in tasks]
    if candidate.random:
        features = _random_features(features, candidate.random)
    model = Discriminant(
        candidate, [(train, pair[0].classes) for (train, _), pair in zip(features, tasks, strict=True)]
    )
    own, largest, logs = [], [], []
    for index, (_, test) in enumerate(features):
        weights = model.scores(test).log_softmax(1)
        own.append(float(weights[:, index].exp().mean()))
        largest.append(float((weights.argmax(1) == index).double().mean()))
        logs.append(-float(weights[:, index].mean()))
    return {"own_weight": own, "own_largest": largest, "negative_log": logs, "kept_numbers": model.numbers}


def _random_features(features: Sequence[Sequence[Tensor]], count: int) -> list[list[Tensor]]:
    """Return rectified random combinations of features, in units of the first task's deviations."""
    first = features[0][0]
    center, scales, width = first.mean(0), first.std(0).clamp_min(1e-12), first.shape[1]
    mix = torch.randn(width, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / math.sqrt(width)
    return [[((rows - center) / scales @ mix).relu() for rows in pair] for pair in features]


def read_stream_named(name: str, seed: int, data: str) -> Stream:
    """Read `development`, a stream of the page, or one with more rows."""
    if name in MORE_ROWS:
        read, rows = MORE_ROWS[name]
        return read(seed, data, rows)
    return read_development(seed, data) if name == DEVELOPMENT else read_named(name, seed, data)


def make_case(stream: str, seed: int, data: str, loaded: Loaded) -> dict[str, Any]:
    """Measure all candidates on a stream, and return the content of its file."""
    tasks = read_stream_named(stream, seed, data)
    rows = read_rows(tasks, loaded)
    return {
        "stream": stream,
        "seed": seed,
        "tasks": describe_stream(tasks),
        "candidates": {name: measure(candidate, rows) for name, candidate in CANDIDATES.items()},
        **origin(),
    }


def _cases(options: Namespace) -> Iterator[Case]:
    loaded = load("minilm")
    for seed, stream in product(options.seeds, options.streams):
        path = options.work / "candidates" / f"{stream}-{seed}.json"
        make = partial(make_case, stream, seed, options.data, loaded)
        yield Case(path, make, partial(_describe_case, f"{stream}, {seed}"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing."""
    streams = (DEVELOPMENT, *REPORTED, *MORE_ROWS)
    make_missing(__doc__, arguments, _cases, work="routing", streams=streams, seeds=SEEDS)


def _describe_case(name: str, case: Mapping[str, Any]) -> str:
    measured = case["candidates"].items()
    weights = {label: sum(row["own_weight"]) / len(row["own_weight"]) for label, row in measured}
    return f"{name}: " + ", ".join(f"{label} {weight:.3f}" for label, weight in weights.items())


if __name__ == "__main__":
    main()
