"""Pre-scaling against other methods (arXiv 2410.05648, tables 1 to 3), at the scale of a laptop: a run for each row.

    python -m experiments.prescale.run STREAM [--data DIR] [--rows finetune,prescale] [--seeds 508,39] [--work DIR]

STREAM is db-split, news-series or stdlib-split. MiniLM-L6, 60 training rows a class, at most 100 test rows a task,
texts of 32 tokens (64 for news-series, whose texts are pairs), batches of 16, 3 epochs of probing at 1e-2 and 3 of
everything at 1e-4, computing in bfloat16. The seed draws rows and order. These are fewer rows and larger rates than the
paper's, so that a run takes one to three minutes on one core, and a stream with all rows and five seeds a few hours;
the rows of the paper's own methods about one. Finished runs are kept in `--work` and never made twice.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common.runs import Case, make_missing
from regard.continual.diagnostics import diagnose
from regard.continual.learner import Learner
from regard.continual.methods import method_named
from regard.continual.network import INPUTS
from regard.continual.run import make_learner, run_stream
from regard.continual.training_phase import TrainingBudget
from regard.data.streams import read_stream
from regard.data.tokenizers import common_tokens
from regard.models.pretrained import Loaded, load
from regard.runs.provenance import library_versions, regard_version

ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "finetune": ("finetune", {}),
    "probe": ("probe", {}),
    "probe-finetune": ("probe-finetune", {}),
    "prescale": ("prescale", {}),
    "prescale uniform": ("prescale", {"scaling": "uniform"}),
    "prescale sink": ("prescale", {"scaling": "sink"}),
    "separate": ("separate", {}),
    "joint": ("joint", {}),
    "replay": ("replay", {}),
    "agem": ("agem", {}),
    "ewc": ("ewc", {}),
    "lwf": ("lwf", {}),
    "der++": ("der++", {}),
    "mbpa++": (
        "mbpa++",
        {"replay_interval": 10, "adaptation_scope": "head", "num_neighbors": 8, "adaptation_steps": 10},
    ),
    "idbr": ("idbr", {}),
    "idbr without replay": ("idbr", {"replay": False}),
    "l2p": ("l2p", {}),
    "ctr": ("ctr", {}),
}
"""What each row runs: a method, and what its settings differ in from their defaults."""
STREAMS = ("db-split", "news-series", "stdlib-split")
SEEDS = (508, 39, 123, 4536, 67)
TRAIN, EVALUATED, DIAGNOSED = 60, 100, 32


def budget(stream: str) -> TrainingBudget:
    """What each task is trained with."""
    return TrainingBudget(
        num_epochs=3,
        learning_rate=1e-4,
        num_probing_epochs=3,
        probing_learning_rate=1e-2,
        batch_size=16,
        length=64 if stream == "news-series" else 32,
        precision="bfloat16",
    )


def made(stream: str, row: str, seed: int, loaded: Loaded, data: str | None) -> dict[str, Any]:
    """What one run gave, as JSON holds it."""
    began = time.perf_counter()
    name, settings = ROWS[row]
    kind = method_named(name)
    method = kind(kind.Config.parse(settings))
    tasks = read_stream(stream, data, samples_per_class=TRAIN, max_eval_samples=EVALUATED, order="random", seed=seed)
    learner = make_learner(tasks, method, loaded, budget(stream), seed=seed)
    common = common_tokens(loaded.tokenizer)

    def look(learner: Learner, task: int) -> list[dict[str, Any]]:
        rows = learner.iterate_batches(learner.items(task)[:DIAGNOSED], size=DIAGNOSED)
        seen = [{name: value for name, value in batch.items() if name in INPUTS} for batch in rows]
        found = diagnose(learner.network.classifier.encoder, seen, common=common)
        return [dict(one) for one in json.loads(found.to_json(orient="records"))]

    ran = run_stream(learner, method, diagnose=look if row in LOOKED_AT else None)
    return {
        "stream": {"name": stream, "order": list(tasks.order), "record": dict(tasks.metadata)},
        "row": row,
        "seed": seed,
        **ran.rows,
        "regard": regard_version(),
        "versions": library_versions(),
        "seconds": round(time.perf_counter() - began, 1),
    }


LOOKED_AT = ("finetune", "probe-finetune", "prescale", "prescale uniform", "prescale sink")


def kept(work: Path, stream: str, row: str, seed: int) -> Path:
    """Where a run is kept."""
    return work / stream / f"{row.replace(' ', '-')}-{seed}.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the runs that are not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stream", choices=STREAMS)
    parser.add_argument("--data", help="folder of published files (default: the hub)")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--work", type=Path, default=Path("runs") / "prescale")
    given = parser.parse_args(arguments)

    def cases() -> Iterator[Case]:
        loaded = load("minilm")
        for seed in map(int, given.seeds.split(",")):
            for row in given.rows.split(","):
                name = f"{given.stream} {row} {seed}"
                yield Case(
                    kept(given.work, given.stream, row, seed),
                    partial(made, given.stream, row, seed, loaded, given.data),
                    partial(_said, name),
                )

    make_missing(cases)


def _said(name: str, found: Mapping[str, Any]) -> str:
    return f"{name}: {found['seconds']} s, {_final(found['matrix'])}"


def _final(matrix: Sequence[Mapping[str, Any]]) -> str:
    """The mean score at the end."""
    last = max(row["after_task"] for row in matrix)
    scores = [row["score"] for row in matrix if row["after_task"] == last and row["scenario"] == "til"]
    return f"{sum(scores) / len(scores):.1f}"


if __name__ == "__main__":
    main()
