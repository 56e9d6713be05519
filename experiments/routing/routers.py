"""Routers alone: which share of each task's texts they send to it once they know all tasks; no adapter is trained.

    python -m experiments.routing.routers --data DIR [--streams long,mixed,instructed,answers,fifty] [--routers "A;B"]
        [--seeds 42,1,2] [--work DIR]

A router gets the training rows of one task after another, as in a run; then all test rows are routed. The learnt one is
taught each task in 300 steps, as `sapt` does before an adapter is trained, beside kept vectors of the earlier tasks;
what the training of the adapters adds to that, or spoils, is left out. A seed takes five minutes on one core, most of
them for the learnt routers of fifty tasks.
"""

import functools
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.common.runs import Case, file_name, make_missing, origin
from experiments.routing.run import BUDGET, BUDGETS, load_named
from experiments.routing.streams import ALONE, describe_stream, read_named
from experiments.sapt.run import SEEDS
from regard.adapters.attention import SharedAttention
from regard.adapters.discriminant import DiscriminantRouter
from regard.adapters.prompt_pool import embedding_reader
from regard.adapters.queries import QueryReader
from regard.adapters.reflection import mean_weights, sample_rows
from regard.adapters.router_warmup import PastTask, warm_up_router
from regard.adapters.routers import QueryName, Router, make_query_reader, make_router
from regard.continual.methods.sapt_config import SaptConfig
from regard.continual.text_learner import encode_pairs
from regard.data.encoding import encode
from regard.data.examples import Examples
from regard.data.stream import Stream, TextPairs
from regard.models.pretrained import Loaded

DEFAULT = "closed form, states of a quarter and half"


class RouterCase(NamedTuple):
    """A router with its query: closed form if no vectors are kept, else learnt with so many of each task."""

    query: QueryName
    halves_only: bool = False
    stored: int = 0


CASES: Mapping[str, RouterCase] = {
    DEFAULT: RouterCase("states"),
    "closed form, states of half": RouterCase("states", halves_only=True),
    "closed form, embeddings": RouterCase("embeddings"),
    "learnt, 3 vectors, embeddings": RouterCase("embeddings", stored=3),
    "learnt, 100 vectors, embeddings": RouterCase("embeddings", stored=100),
    "learnt, 3 vectors, states of a quarter and half": RouterCase("states", stored=3),
}
Vectors = Sequence[tuple[Tensor, Tensor]]
"""Query vectors of the training and the test rows of each task."""


def make_reader(case: RouterCase, loaded: Loaded) -> QueryReader:
    """Return what reads the query vectors of a case."""
    half = max(1, loaded.model.config.num_hidden_layers // 2)
    return make_query_reader(embedding_reader(loaded.model)[0], case.query, [half] if case.halves_only else None)


def encode_rows(rows: Examples | TextPairs, loaded: Loaded, length: int = BUDGET.length) -> dict[str, Tensor]:
    """Return what a model reads of texts, cut to `length`, or of prompts, cut to the length of `answers`."""
    if isinstance(rows, TextPairs):
        pairs = encode_pairs(rows, loaded.tokenizer, BUDGETS["answers"], encoder_decoder=False)
        return {"input_ids": pairs.input_ids, "attention_mask": pairs.attention_mask.long()}
    encoded = encode("sequence", rows, loaded.tokenizer, length, "natural")
    (inputs,) = encoded.batches(len(encoded))
    return {**inputs, "attention_mask": inputs["attention_mask"].long()}


def read_vectors(tasks: Stream, loaded: Loaded, reader: QueryReader, length: int = BUDGET.length) -> Vectors:
    """Return the query vectors of all tasks."""

    def read(rows: Any) -> Tensor:
        inputs = encode_rows(rows, loaded, length)
        parts = zip(*(values.split(64) for values in inputs.values()), strict=True)
        with torch.no_grad():
            batches = (dict(zip(inputs, part, strict=True)) for part in parts)
            return torch.cat([reader(batch, batch["attention_mask"].bool()).float() for batch in batches])

    return [(read(task.train), read(task.test)) for task in tasks.tasks]


def teach(case: RouterCase, vectors: Vectors, seed: int) -> tuple[Router, list[float]]:
    """Return a router that knows all tasks, and the seconds that each of them took."""
    width, seconds, past = vectors[0][0].shape[1], [], list[PastTask]()
    router = make_router("attention" if case.stored else "discriminant", width, seed=seed)
    random = torch.Generator().manual_seed(seed)
    for task, (rows, _) in enumerate(vectors):
        router.use(task + 1)
        start = time.perf_counter()
        if isinstance(router, DiscriminantRouter):
            router.fit(task, rows)
            router.scores(rows[:1])
        else:
            _open(router, rows, past, task, seed)
        seconds.append(time.perf_counter() - start)
        if isinstance(router, SharedAttention):
            past.append(PastTask(mean_weights(router(rows)), sample_rows(rows, case.stored, random)))
    return router, seconds


def _open(attention: SharedAttention, rows: Tensor, past: Sequence[PastTask], task: int, seed: int) -> None:
    config = SaptConfig()
    attention.set_trainable(task)
    if past:
        schedule: dict[str, Any] = {"steps": config.router_warmup_steps, "rate": config.router_warmup_lr}
        warm_up_router(attention, rows, past, **schedule, seed=seed + task, own=task)


def score(router: Router, vectors: Vectors, tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the mean weight of each task and of all tasks of its source, and the share of its test rows sent to it."""
    with torch.no_grad():
        return score_weights([router.scores(test).softmax(-1) for _, test in vectors], tasks)


def score_weights(weights: Sequence[Tensor], tasks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the same from the weights (row, task) of the test rows of each task."""
    rows = []
    for index, (task, of_task) in enumerate(zip(tasks, weights, strict=True)):
        same = [number for number, other in enumerate(tasks) if other.source == task.source]
        means = of_task.mean(0)
        line = {"task": task.name, "own_weight": float(means[index]), "same_source": float(means[same].sum())}
        rows.append({**line, "own_largest": float((of_task.argmax(1) == index).float().mean())})
    return rows


def make_case(stream: str, name: str, seed: int, tasks: Stream, loaded: Loaded) -> dict[str, Any]:
    """Measure a router and return the content of its file."""
    case = CASES[name]
    vectors = read_vectors(tasks, loaded, make_reader(case, loaded))
    router, seconds = teach(case, vectors, seed)
    return {
        "stream": stream,
        "router": name,
        "seed": seed,
        "tasks": describe_stream(tasks),
        "routing": score(router, vectors, tasks.tasks),
        "seconds": seconds,
        **origin(),
    }


def case_path(work: Path, stream: str, name: str, seed: int) -> Path:
    """Return the file of a router."""
    return work / f"routers-{stream}" / file_name(name, seed)


def _cases(options: Namespace) -> Iterator[Case]:
    load_model = functools.cache(partial(load_named, work=options.work))
    for seed, stream in product(options.seeds, options.streams):
        tasks, loaded = read_named(stream, seed, options.data), load_model(stream)
        for name in options.routers:
            make: Callable[[], Mapping[str, Any]] = partial(make_case, stream, name, seed, tasks, loaded)
            path = case_path(options.work, stream, name, seed)
            yield Case(path, make, partial(_describe_case, f"{stream}, {name}, {seed}"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the missing routers."""
    make_missing(__doc__, arguments, _cases, work="routing", streams=ALONE, routers=CASES, seeds=SEEDS)


def _describe_case(name: str, case: Mapping[str, Any]) -> str:
    shares = [task["own_largest"] for task in case["routing"]]
    return f"{name}: {100 * sum(shares) / len(shares):.1f} % routed right, last task {case['seconds'][-1]:.3f} s"


if __name__ == "__main__":
    main()
