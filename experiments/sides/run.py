"""What a prompt that is too long should lose, its end, its middle or its beginning: runs that differ in this alone.

    python -m experiments.sides.run --data DIR [--seeds 42,1,2] [--methods joint,sapt] [--work DIR]

The tasks of Long Sequence as text to text, instruction first and `Output: ` last, of which more than half of the
prompts have more than 128 tokens; a decoder that is pre-trained here on Python's documentation, and 64 tokens a prompt.
Finished runs are kept in `--work` and not made again; all take an hour on one core.

Rule, fixed before the runs: the default of the scale `laptop` is the middle, which leaves instruction and `Output: `,
if its mean AP, over methods and seeds, is at most one point below that of each other side; else it is
the side with the highest mean.
"""

import dataclasses
import functools
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, cast, get_args

import regard
from experiments.common.method_runs import earlier_settings
from experiments.common.runs import Case, final_scores, make_missing, origin
from experiments.sapt.decoder import load_decoder, read_text_tasks
from regard.continual.text_learner import encode_pairs
from regard.continual.training_phase import TrainingBudget, TruncationSide
from regard.data.stream import Stream, TextTask
from regard.models.pretrained import Loaded

METHODS = ("joint", "sapt")
SIDES: tuple[str, ...] = get_args(TruncationSide)
SEEDS = (42, 1, 2)
DECODER_SEED, LENGTH, LONG = 42, 64, 128
SETTINGS: Mapping[str, Any] = {"length": LENGTH, "target_length": 16, "num_epochs": 8, "learning_rate": 5e-3}
"""A decoder that has read no such texts needs more steps, as in `experiments.sapt.decoder`."""


def read_long_prompts(seed: int, data: str, loaded: Loaded) -> Stream:
    """Read the tasks of which more than half of the training prompts are longer than `LONG` tokens."""
    stream = read_text_tasks(seed, data)

    def is_long(task: TextTask) -> bool:
        encoded = encode_pairs(task.train, loaded.tokenizer, TrainingBudget(), encoder_decoder=False)
        return float((encoded.token_counts > LONG).float().mean()) > 0.5

    tasks = tuple(task for task in cast("tuple[TextTask, ...]", stream.tasks) if is_long(task))
    return dataclasses.replace(stream, tasks=tasks, order=tuple(range(len(tasks))))


def make_run(side: str, method: str, seed: int, data: str, loaded: Loaded) -> dict[str, Any]:
    """Run a method with prompts that lose one side and return the content of its file."""
    stream, start = read_long_prompts(seed, data, loaded), time.process_time()
    result = regard.learn(
        stream,
        method,
        model=loaded,
        truncation_side=cast(Any, side),
        references="lora",
        save_models=False,
        seeds=[seed],
        set=[f"{name}={value}" for name, value in earlier_settings(method).items()],
        **SETTINGS,
    )
    (run,) = result.metadata["runs"]
    lost = [row for row in run["truncation"] if row["option"] == "length"]
    return {
        **{"side": side, "method": method, "seed": seed, "tasks": len(run["tasks"])},
        "rows cut": 100 * sum(row["rows"] for row in lost) / sum(row["num_rows"] for row in lost),
        **final_scores(result.accuracy_matrix),
        "cpu_seconds": time.process_time() - start,
        **origin(),
    }


def _cases(options: Namespace) -> Iterator[Case]:
    load = functools.cache(partial(load_decoder, options.work, DECODER_SEED))
    for seed, method, side in product(options.seeds, options.methods, SIDES):
        path = options.work / "runs" / f"{side}-{method}-{seed}.json"
        yield Case(path, partial(make_run, side, method, seed, options.data, load()), _describe)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    make_missing(__doc__, arguments, _cases, work="sides", seeds=SEEDS, methods=METHODS)


def _describe(run: Mapping[str, Any]) -> str:
    return f"{run['side']}, {run['method']}, seed {run['seed']}: {run['AP til']:.1f}, {run['cpu_seconds']:.0f} s"


if __name__ == "__main__":
    main()
