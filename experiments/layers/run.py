"""Which layers have adapters at the scale `laptop`: runs of `regard learn` that differ in their layers and rank alone.

    python -m experiments.layers.run --data DIR [--streams scripts,mixed] [--seeds 508] [--work DIR]

The streams of `experiments.methods`; the first six tasks of `mixed` (`experiments.routing.streams`); and `scripts`: to
tell the script of a character from the rest of its Unicode name, five tasks of six scripts with a dozen rows each,
whose labels are words that the model does not know. MiniLM, defaults otherwise but 32 tokens a text and no diagnostics.
And `answers` of `experiments.routing`, whose answers a decoder generates that is pre-trained here, with the settings of
`experiments.sapt.decoder`. Finished runs are kept in `--work` and not made again; all take an hour and a half on one
core.

Rule, fixed before the runs: all linear layers take the place of queries and values, for `sapt` and `replay-lora`, with
a rank whose means over both methods and all seeds are, against those of queries and values: AP among the classes of all
tasks (CIL) at least 2 points above, in the mean over streams of MiniLM; AP CIL and AP with the task known (TIL) at most
1 point below on each stream, of which `answers` has TIL alone; CPU time at most 1.25 times, in the geometric mean over
streams. If both ranks pass, the lower one unless the other has 2 points more of AP CIL.
"""

import time
import unicodedata
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import regard
from experiments.common.method_runs import earlier_settings, make_record
from experiments.common.runs import Case, describe_scores, make_missing
from experiments.methods.run import SENTIMENT, take_moods
from experiments.routing.run import DECODER_SEED
from experiments.routing.streams import assemble, make_task, read_answers, read_long, read_mixed, take_first
from experiments.sapt.decoder import DECODER_BUDGET, load_decoder
from regard.data.rows import RawTask, hash_rank
from regard.data.stream import Stream

METHODS = ("sapt", "replay-lora")
PRESENT, LOW_RANK, FULL_RANK = "queries, values", "all, rank 2", "all, rank 8"
LAYERS: Mapping[str, Mapping[str, object]] = {
    PRESENT: {"target_modules": "auto", "r": 8},
    LOW_RANK: {"target_modules": "all-linear", "r": 2},
    FULL_RANK: {"target_modules": "all-linear", "r": 8},
}
"""Settings by name. Rank 2 in all linear layers of a BERT has about the parameters of rank 8 in queries and values."""
MIXED, SCRIPTS, ANSWERS = "mixed", "scripts", "answers"
ENCODED = (SCRIPTS, MIXED, "stdlib-split", "news-series", SENTIMENT)
STREAMS = (*ENCODED, ANSWERS)
DECODER: Mapping[str, Any] = {
    "length": DECODER_BUDGET.length,
    "target_length": DECODER_BUDGET.target_length,
    "num_epochs": DECODER_BUDGET.num_epochs,
    "learning_rate": DECODER_BUDGET.learning_rate,
}
SEEDS = (508,)
LENGTH, MIXED_TASKS = 32, 6
ENCODER: Mapping[str, Any] = {"model": "minilm", "length": LENGTH}
SCRIPT_TASKS, SCRIPTS_A_TASK, ROWS_A_SCRIPT, NAMES_A_SCRIPT = 5, 6, 12, 40
LAST_CHARACTER = 0x20000


def read_scripts(seed: int) -> Stream:
    """Make the tasks that ask for the script of a character, whose Unicode name begins with it."""
    names = defaultdict(list)
    for code in range(LAST_CHARACTER):
        script, _, rest = unicodedata.name(chr(code), "").partition(" ")
        if rest and script.isalpha() and script not in ("CJK", "HANGUL"):
            names[script.lower()].append(rest.lower())
    distinct = {script: sorted(set(rest)) for script, rest in names.items()}
    scripts = sorted(script for script, rest in distinct.items() if len(rest) >= NAMES_A_SCRIPT)
    scripts.sort(key=lambda script: hash_rank("script", 0, script))
    return assemble(
        SCRIPTS,
        [
            _script_task(number, {script: distinct[script] for script in scripts[number::SCRIPT_TASKS]})
            for number in range(SCRIPT_TASKS)
        ],
        seed,
        train=SCRIPTS_A_TASK * ROWS_A_SCRIPT,
    )


def _script_task(number: int, names: Mapping[str, Sequence[str]]) -> RawTask:
    pairs = [
        ((name,), script)
        for script in list(names)[:SCRIPTS_A_TASK]
        for name in sorted(names[script], key=partial(hash_rank, "name", 0))[:NAMES_A_SCRIPT]
    ]
    return make_task(f"scripts {number + 1}", pairs)


def make_run(stream: str, method: str, layers: str, seed: int, data: str, work: Path) -> dict[str, Any]:
    """Run a method with adapters in some layers and return the content of its file."""
    start = time.process_time()
    made = {
        SCRIPTS: lambda: read_scripts(seed),
        MIXED: lambda: take_first(read_mixed(seed, data), MIXED_TASKS),
        SENTIMENT: lambda: take_moods(read_long(seed, data)),
        ANSWERS: lambda: read_answers(seed, data),
    }
    settings = {"model": load_decoder(work, DECODER_SEED), **DECODER} if stream == ANSWERS else ENCODER
    result = regard.learn(
        **({"stream": made[stream]()} if stream in made else {"stream": stream, "data": data}),
        method=method,
        **settings,
        diagnostic_samples=0,
        save_models=False,
        seeds=[seed],
        set=[f"{name}={value}" for name, value in {**earlier_settings(method), **LAYERS[layers]}.items()],
    )
    return {**make_record(stream, method, seed, result.accuracy_matrix, start), "layers": layers}


def run_path(work: Path, stream: str, method: str, layers: str, seed: int) -> Path:
    """Return the file of a run."""
    return work / stream / f"{method}-{layers.replace(', ', '-').replace(' ', '-')}-{seed}.json"


def _cases(options: Namespace) -> Iterator[Case]:
    for seed, stream, method, layers in product(options.seeds, options.streams, METHODS, LAYERS):
        path = run_path(options.work, stream, method, layers, seed)
        yield Case(path, partial(make_run, stream, method, layers, seed, options.data, options.work), _describe)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the missing runs."""
    make_missing(__doc__, arguments, _cases, work="layers", streams=STREAMS, seeds=SEEDS)


def _describe(run: Mapping[str, Any]) -> str:
    name = f"{run['stream']}, {run['method']}, {run['layers']}, seed {run['seed']}"
    return describe_scores(name, run)


if __name__ == "__main__":
    main()
