"""`regard learn`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands.learn.config import SCALES, LearnConfig, split_methods
from regard.commands.learn.progress import describe_progress
from regard.errors import UserError
from regard.runs.arguments import (
    OneList,
    add_config_options,
    add_run_options,
    file_slug,
    parse_config_options,
    parse_seeds,
)
from regard.runs.config import read_results

if TYPE_CHECKING:
    from regard.commands.learn.result import LearnResult
    from regard.runs.progress import OnProgress

HELP = "Train on task after task, and measure forgetting."
EXAMPLES = """streams:
  stdlib-split (embedded), ag-split, db-split, yahoo-split, yahoo-db-split,
  news-series, news-series-mnli, reviews, long-sequence, superni, trace

methods:
  all of a model   finetune, probe, probe-finetune, prescale, replay, agem,
                   der++, mbpa++, ewc, lwf, idbr, osf
  LoRA             sapt, sapt-paper, sapt-task-free, sequential-lora,
                   incremental-lora, replay-lora, o-lora, n-lora, inflora,
                   migu, slao, gainlora, seekr, epi,
                   merge-linear, merge-ties, merge-dare
  prompts, other   l2p, progprompt, lfpt5, ctr
  references       separate (a model for each task), joint (all tasks at once)

settings:
  --set NAME=VALUE sets a field of the method. For the sapt methods, see
  docs/sapt-settings.md. An unknown name prints the valid ones.

examples:
  regard learn stdlib-split
  regard learn --method finetune,probe-finetune,prescale --seeds 508,39,123
  regard learn db-split --data published --order paper --out runs/db
  regard learn stdlib-split --method sapt,replay-lora,joint --head labels
  regard learn reviews.jsonl --model bert-base-uncased --scale paper
  regard learn --config runs/db --method joint --out runs/joint
  regard learn --continue runs/db reviews.jsonl --out runs/db-reviews
  regard sweep learn --vary method=finetune,prescale --seeds 508,39 --out runs/s

With several methods, each method and seed is run in turn in one process.
`regard sweep learn` starts a process for each.
"""
BY_SCALE = """--scale sets the defaults of rows, lengths, batch, epochs, rates, schedule and
precision; this list shows those of laptop, the default scale."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "stream",
        nargs="?",
        metavar="STREAM",
        help="stream name (default: stdlib-split), .jsonl, .csv, .tsv or .parquet file with columns task, text, label "
        "(or answer) and optionally instruction, or folder with a folder per task; several with commas",
    )
    parser.add_argument(
        "--seeds",
        action=OneList,
        metavar="A,B,…",
        help="seeds of sampling, task order, initialization and batches (default: 508)",
    )
    parser.add_argument(
        "--continue", dest="after", metavar="RUN", help="go on with a finished run: STREAM has the new tasks"
    )
    add_run_options(parser, "runs/learn-STREAM-METHOD")
    parser.add_argument(
        "--no-save-models", action="store_true", help="do not save the model after each task, for rollback"
    )
    add_config_options(parser, LearnConfig, BY_SCALE, exclude=("stream", "seed"), scale=("laptop", SCALES["laptop"]))


def parse_config(args: argparse.Namespace) -> tuple[LearnConfig, list[int]]:
    """Return the configuration, and the seeds, from options and file. Raises UserError."""
    changes = parse_config_options(args, LearnConfig)
    if args.stream is not None:
        changes["stream"] = args.stream
    config = LearnConfig.from_options(args.config, changes)
    split_methods(config)
    if args.seeds is not None:
        return config, parse_seeds(args.seeds)
    runs = () if args.config is None else read_results(args.config, "learn").get("runs", ())
    return config, list(dict.fromkeys(int(run["seed"]) for run in runs)) or [config.seed]


def _parse_run(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Return the arguments of `learn`, and the name of the run. Raises UserError."""
    if args.after is None:
        config, seeds = parse_config(args)
        return {"stream": config, "seeds": seeds}, f"{file_slug(Path(config.stream).stem)}-{file_slug(config.method)}"
    if args.stream is None:
        raise UserError("continue: expected a stream with the new tasks, got none")
    if args.seeds is not None or args.config is not None:
        raise UserError(f"{'seeds' if args.seeds else 'config'}: expected none with --continue, whose run has its own")
    if args.out is not None and args.out.resolve() == Path(args.after).resolve():
        raise UserError(f"out: expected another folder than that of the run that is gone on with, got {args.out}")
    name = f"{file_slug(Path(args.stream).stem)}-after-{file_slug(Path(args.after).name)}"
    return {"stream": args.stream, "after": args.after, **parse_config_options(args, LearnConfig)}, name


def run(args: argparse.Namespace) -> None:
    """Train, save and print; check the configuration before the model is loaded."""
    arguments, name = _parse_run(args)
    from regard.commands.learn.run import PARTS, learn
    from regard.runs.command_line import run_command

    def run_learn(work_dir: Path, on_progress: OnProgress) -> LearnResult:
        return learn(
            **arguments,
            work_dir=work_dir,
            resume=args.resume,
            save_models=not args.no_save_models,
            on_progress=describe_progress(on_progress),
        )

    run_command(args, "learn", args.out or Path("runs") / f"learn-{name}", run_learn, parts=PARTS)
