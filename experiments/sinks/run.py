"""When attention sink emerges (Gu et al. 2025, arXiv 2410.10781), at the scale of a laptop: one run for each row.

    python -m experiments.sinks.run --data TEXT [--rows softmax,sigmoid] [--seeds 3] [--workers 2]

Every row is the recipe `pico` with one thing changed: 0.3M parameters, 2,000 steps of 32 sequences of 32 tokens, with
one fixed token first and a weight decay of 0.5, without which no head of so small a model passes the threshold
(rows `weight decay 0.1` and `first token free`). Sinks are measured on 100 held-out sequences. A run takes about a
minute on one core; all rows with three seeds about an hour on two. Finished runs are kept under `--work` and never made
twice. TEXT is a file of prose; the tables were made with 21 MB of novels.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from regard.commands.pretrain.config import PretrainConfig, preset_config
from regard.commands.pretrain.result import FINAL, PretrainResult
from regard.errors import UserError
from regard.runs.launchers.jobs import Job, JobEvent, Local, run_jobs
from regard.runs.result import read_metadata

BASE = "pico"
ROWS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid": {"attention": "sigmoid"},
    "elu": {"attention": "elu"},
    "sigmoid, normalised": {"attention": "sigmoid-normalised"},
    "K bias": {"attention": "k-bias"},
    "KV bias": {"attention": "kv-bias"},
    "V bias": {"attention": "v-bias"},
    "weight decay 0": {"weight_decay": 0.0},
    "weight decay 0.1": {"weight_decay": 0.1},
    "weight decay 1": {"weight_decay": 1.0},
    "weight decay 5": {"weight_decay": 5.0},
    "window 16": {"window": 16},
    "prefix 5": {"prefix": 5, "fixed_token": None},
    "first token free": {"fixed_token": None},
    "fixed token at 1": {"fixed_token": 1},
    "learning rate 0.001": {"learning_rate": 1e-3},
    "learning rate 0.001, four times the steps": {"learning_rate": 1e-3, "max_steps": 8000},
    "batch 8": {"batch_size": 8},
    "batch 128": {"batch_size": 128},
    "1 % of the text": {"data_fraction": 0.01},
    "10 % of the text": {"data_fraction": 0.1},
    "random tokens at 1 to 4": {"random_tokens": (1, 5)},
    "prefix 2": {"prefix": 2, "fixed_token": None},
    "K bias, shared": {"attention": "k-bias-shared"},
    "KV bias, shared": {"attention": "kv-bias-shared"},
    "V bias, shared": {"attention": "v-bias-shared"},
    "sink token": {"attention": "sink-token", "fixed_token": None},
    "sink logit": {"attention": "sink-logit"},
    "off-by-one": {"attention": "off-by-one"},
    "StableMask": {"attention": "stable-mask"},
    "sigmoid, by log-length": {"attention": "sigmoid-log-length"},
    "elu, normalised": {"attention": "elu-normalised"},
    "elu kernel": {"attention": "elu-kernel"},
    "elu kernel, normalised": {"attention": "elu-kernel-normalised"},
    "mlp kernel": {"attention": "mlp-kernel"},
    "mlp kernel, normalised": {"attention": "mlp-kernel-normalised"},
    "linear": {"attention": "linear"},
    "linear, normalised": {"attention": "linear-normalised"},
    "softpick": {"attention": "softpick"},
    "gated": {"attention": "gated"},
    "gated, per head": {"attention": "gated-per-head"},
    "value residual": {"attention": "value-residual"},
    "differential": {"attention": "differential"},
    "top 8": {"attention": "top-8"},
    "QK-norm": {"attention": "qk-norm"},
    "no positions": {"positions": "none"},
    "sinusoidal positions": {"positions": "sinusoidal"},
    "learned positions": {"positions": "learned"},
    "ALiBi": {"positions": "alibi"},
    "T5": {"positions": "t5"},
    "T5's bucket number": {"positions": "t5-bucket-number"},
    "post-norm": {"norm": "post"},
    "ReLU": {"ffn": "relu"},
    "GELU": {"ffn": "gelu"},
    "Swish": {"ffn": "swish"},
    "ReGLU": {"ffn": "reglu"},
    "GeGLU": {"ffn": "geglu"},
    "one head": {"num_heads": 1},
    "two heads": {"num_heads": 2},
    "eight heads": {"num_heads": 8},
}
"""What each row changes."""
COLUMNS = ("row", "seed", *FINAL, "emergence_step", "seconds")
FOLDER, TABLE, CURVES, RECORD = Path("docs") / "results", "sinks.csv", "sinks-curves.csv", "sinks.json"
CURVE = ("step", "valid_loss", "sink_rate", "alpha_first", "virtual_sink_rate", "norm_ratio")


def of_row(name: str, seed: int, data: Sequence[str]) -> PretrainConfig:
    """The recipe of a row."""
    return preset_config(BASE, data=tuple(data), seed=seed, save_steps=None, **ROWS[name])


def folder(work: Path, name: str, seed: int) -> Path:
    """Where a run is kept."""
    return work / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"


def _finished(place: Path, wanted: PretrainConfig) -> bool:
    """Whether a folder holds a run of this recipe."""
    try:
        return PretrainConfig.from_dict(read_metadata(place, "pretrain")["config"]) == wanted
    except (UserError, KeyError):
        return False


@dataclass(frozen=True)
class Trial:
    """One run: its row, its seed, its recipe, and where it is kept."""

    row: str
    seed: int
    recipe: PretrainConfig
    place: Path

    @property
    def finished(self) -> bool:
        """Whether its folder holds a run of this recipe."""
        return _finished(self.place, self.recipe)

    def job(self, work: Path) -> Job:
        """The command that makes it."""
        config = work / f"{self.place.name}.json"
        config.write_text(json.dumps(self.recipe.to_dict()))
        options = ("--config", str(config), "--out", str(self.place), "--cache", str(work / "cache"), "--overwrite")
        return Job(self.place.name, ("-m", "regard", "pretrain", *options), ".", str(config.with_suffix(".log")))


def trials(rows: Sequence[str], seeds: int, data: Sequence[str], work: Path) -> list[Trial]:
    """All runs, those of a seed before the next."""
    return [
        Trial(name, seed, of_row(name, seed, data), folder(work, name, seed)) for seed in range(seeds) for name in rows
    ]


def collect_tables(
    rows: Sequence[str], seeds: int, data: Sequence[str], work: Path
) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """The final numbers of each finished run, the curves averaged over seeds, and where they come from.

    Model, data, watch and versions are those of the first finished run, softmax where there is one; the recipe is that
    of softmax; and `rows` is what each row that was asked for changes of it. Raises UserError if none is finished.
    """
    done = [trial for trial in trials(rows, seeds, data, work) if trial.finished]
    if not done:
        raise UserError(f"sinks: expected a finished run under {work}, found none")
    ends, curves = [], []
    record: dict[str, Any] = {}
    for name in rows:
        histories = []
        for trial in (one for one in done if one.row == name):
            result = PretrainResult.load(trial.place)
            if not record:
                unchanged = preset_config(BASE).to_dict()
                base = {field: unchanged[field] for field in ROWS[name]}
                record = result.metadata | {"recipe": result.metadata["config"] | base}
            step, seconds = result.metadata["emergence"]["step"], result.metadata["cost"]["seconds"]
            ends.append({"row": name, "seed": trial.seed, **result.final, "emergence_step": step, "seconds": seconds})
            histories.append(result.history.dropna(subset=["valid_loss"]))
        if histories:
            mean = pd.concat(histories).groupby("step", as_index=False)[list(CURVE[1:])].mean()
            curves.append(mean.assign(row=name))
    stored = {name: record[name] for name in ("recipe", "model", "data", "watch", "versions")} if record else {}
    stored.get("versions", {}).pop("platform", None)
    for domain in stored.get("data", {}).get("domains", []):
        domain.pop("source", None)
    for field in ("data", "seed"):
        stored.get("recipe", {}).pop(field, None)
    stored |= {"rows": {name: ROWS[name] for name in rows}, "seeds": seeds}
    return pd.DataFrame(ends).reindex(columns=list(COLUMNS)), pd.concat(curves)[["row", *CURVE]], stored


def main(arguments: list[str] | None = None) -> int:
    """Make the missing runs and write the tables. Return 0, 1 if a run failed, or 2 for invalid input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True)
    parser.add_argument("--rows", default=",".join(ROWS).replace(", ", ";"), help="with ; for the comma in a name")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--work", type=Path, default=Path("runs") / "sinks.work")
    options = parser.parse_args(arguments)
    try:
        return _run(options, Console())
    except UserError as error:
        Console(stderr=True).print(str(error), highlight=False, soft_wrap=True)
        return 2


def _run(options: argparse.Namespace, console: Console) -> int:
    rows = [name.replace(";", ", ") for name in options.rows.split(",")]
    unknown = [name for name in rows if name not in ROWS]
    if unknown:
        raise UserError(f"rows: expected some of {'; '.join(ROWS)}, got {unknown[0]!r}")

    def show_event(event: JobEvent) -> None:
        console.print(f"{event.kind} {event.key} {event.seconds:.0f} s {event.error}", highlight=False)

    options.work.mkdir(parents=True, exist_ok=True)
    by_name = {trial.place.name: trial for trial in trials(rows, options.seeds, options.data, options.work)}
    waiting = [trial.job(options.work) for trial in by_name.values() if not trial.finished]
    engine = Local(workers=options.workers)
    errors = run_jobs(waiting, engine, finished=lambda key: by_name[key].finished, retries=0, on_event=show_event)
    ends, curves, record = collect_tables(rows, options.seeds, options.data, options.work)
    options.out.mkdir(parents=True, exist_ok=True)
    ends.to_csv(options.out / TABLE, index=False, float_format="%.6g")
    curves.to_csv(options.out / CURVES, index=False, float_format="%.5g")
    (options.out / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    console.print(ends.groupby("row", sort=False)[["valid_loss", "sink_rate", "alpha_first"]].mean().to_string())
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
