"""What watching costs with the statistics that users get: the default ones, all but the dear ones, and all.

BERT-base (padded) and a Llama of its shape (causal), random weights, float32; four forwards in a row (plain, the
reference) against the same inside `regard.watching`, its beginning and end included. Dear are `spectral_bound`,
`matrix_entropy`, `output_rank` and `input_dependence`. The last case writes 32 tokens with a cache. On a GPU a Llama of
a billion parameters (16 layers of 32 heads) comes first, in bfloat16, all statistics up to 2,048 tokens a batch.

    python -m benchmarks.statistics_cost [--quick] [--threads N] [--out FILE]     about 4 minutes on one core
"""

from collections.abc import Callable
from typing import Any

import torch

import regard
from benchmarks.timing import device, keep, on_gpu, parser, prepared, race, row
from benchmarks.whole_model import Case
from regard.hooks.caches import cache_name
from regard.statistics import ALL

DEAR = ("spectral_bound", "matrix_entropy", "output_rank", "input_dependence")
SELECTIONS: dict[str, Any] = {
    "default": "default",
    "cheap": [name for name in ALL if name not in DEAR and name != "modality_mass"],
    "all": "all",
}
CASES = [(1, 64), (1, 128), (8, 128), (1, 512)]
QUICK = [(2, 32)]
GPU_CASES = [(1, 512), (4, 512), (1, 2048), (8, 2048), (1, 8192), (1, 32768)]
MOST_FOR_ALL = 2048
"""Tokens of a batch up to which all statistics are raced on a GPU: decompositions of hidden states take seconds."""
NEW_TOKENS, FORWARDS = 32, 4


def repeated(run: Callable[[], object]) -> Callable[[], object]:
    """Return some runs in a row, as of a corpus that is read in batches."""

    def several() -> object:
        return [run() for _ in range(FORWARDS)][-1]

    return several


def watched(model: Any, statistics: Any, run: Callable[[], object]) -> Callable[[], object]:
    """Return a run inside a block, with new statistics each time."""

    def inside() -> object:
        with regard.watching(model, statistics) as watch:
            run()
        return watch

    return inside


def contestants(model: Any, run: Callable[[], object], names: tuple[str, ...]) -> dict[str, Callable[[], object]]:
    """Return the run alone, and inside blocks with selections of statistics."""
    return {"plain": run} | {name: watched(model, SELECTIONS[name], run) for name in names}


def writing(case: Case, tokens: int) -> Callable[[], object]:
    """Return a run that reads a prompt and goes on for some tokens with a cache."""

    def run() -> object:
        output = case.model(case.inputs["input_ids"], use_cache=True)
        token = case.inputs["input_ids"][:, :1]
        for _ in range(tokens):
            name = cache_name(output)
            output = case.model(token, use_cache=True, **{name: output[name]})
        return output

    return run


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    given = prepared(parser(__doc__), arguments)
    rows: list[dict[str, Any]] = []

    def add(model: str, batch: int, length: int, work: str, runs: dict[str, Callable[[], object]]) -> None:
        figures = race(runs, least=2, most=3 if given.quick else 11, budget=20)
        keep(
            row({"model": model, "batch": batch, "length": length, "work": work}, figures, "plain"),
            rows,
            "statistics_cost",
            given.out,
        )

    torch.manual_seed(0)
    for batch, length in QUICK if given.quick else GPU_CASES if on_gpu() else ():
        with device():
            case = Case("llama", batch, length, size="small" if given.quick else "billion")
        case.model.to(torch.bfloat16)
        names = tuple(name for name in SELECTIONS if name == "default" or batch * length <= MOST_FOR_ALL)
        add(
            "llama 1B, bfloat16",
            batch,
            length,
            f"{FORWARDS} forwards",
            contestants(case.model, repeated(case.plain), names),
        )
    for kind in ("llama", "bert"):
        for batch, length in QUICK if given.quick else CASES:
            with device():
                case = Case(kind, batch, length, size="small" if given.quick else "base")
            add(
                kind,
                batch,
                length,
                f"{FORWARDS} forwards",
                contestants(case.model, repeated(case.plain), tuple(SELECTIONS)),
            )
    with device():
        case = Case("llama", 1, 32 if given.quick else 64, size="small" if given.quick else "base")
    tokens = 2 if given.quick else NEW_TOKENS
    add("llama", 1, case.length, f"{tokens} tokens", contestants(case.model, writing(case, tokens), ("default",)))


if __name__ == "__main__":
    main()
