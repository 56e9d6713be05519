"""`regard replace`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regard.commands.replace.config import LANGUAGE_MODEL, ReplaceConfig
from regard.errors import UserError
from regard.runs import arguments
from regard.runs.progress import OnProgress

if TYPE_CHECKING:
    from regard.commands.replace.result import ReplaceResult
    from regard.commands.replace.several import SeveralResult

HELP = "Replace attention by constants or another operation, and score a task."
EXAMPLES = """examples:
  regard replace minilm --task sst2 --data glue
  regard replace bert-base-uncased --task cola --scale paper --out runs/cola
  regard replace minilm --task ner --constants zeros --rank-heads-by random
  regard replace minilm --task reviews.jsonl --text review --label stars
  regard replace EleutherAI/pythia-160m --task lm --rank-heads-by output-norm
  regard replace gpt2 --task lm --attention sigmoid,off-by-one
  regard replace bert-base-uncased roberta-base --task cola,sst2 --workers 2

With several models or tasks each pair is a run of its own, in OUT/runs; one
page compares them.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    arguments.add_model_options(parser, several=True)
    parser.add_argument(
        "--task",
        action=arguments.OneList,
        required=True,
        metavar="TASK,…",
        help="cola, sst2, mrpc, mnli, ner, pos, mlm, lm (perplexity of a causal "
        "model), or a .jsonl, .csv, .tsv or .parquet file; several with commas",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder with the task's files as published, or a text file for lm and mlm; default: $REGARD_DATA, "
        "else the hub",
    )
    parser.add_argument(
        "--constants-from", metavar="TASK|FILE", help="source of the averages: another task, or a file of constants"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="runs at once, of several (default: 1)")
    parser.add_argument("--launcher", default="local", metavar="NAME", help="of several runs: local (default) or ray")
    arguments.add_run_options(parser, "runs/replace-MODEL-TASK")
    arguments.add_config_options(parser, ReplaceConfig)


def run(args: argparse.Namespace) -> None:
    """Replace, save and print; check the configuration before the model is loaded."""
    config = ReplaceConfig.from_options(args.config, arguments.parse_config_options(args, ReplaceConfig))
    models = args.model
    tasks = [args.task] if Path(args.task).exists() else [name.strip() for name in args.task.split(",")]
    several = len(models) > 1 or len(tasks) > 1
    names = ("several",) if several else (arguments.file_slug(models[0]), arguments.file_slug(Path(tasks[0]).stem))
    out = args.out or Path("runs") / "-".join(("replace", *names))
    if several:
        _run_several(args, config, models, tasks, out)
        return
    if args.workers is not None or args.launcher != "local":
        option = "launcher" if args.workers is None else "workers"
        raise UserError(f"{option}: expected several models or tasks, for one run has one process")
    from regard.commands.replace.run import PARTS
    from regard.runs.command_line import run_command

    args.model, args.task = models[0], tasks[0]
    run_command(args, "replace", out, partial(_replace, args, config), parts=PARTS)


def _run_several(
    args: argparse.Namespace, config: ReplaceConfig, models: Sequence[str], tasks: Sequence[str], out: Path
) -> None:
    """Run each model with each task; what can be refused is refused before one begins."""
    from regard.commands.replace.several import PARTS, RUNS, is_finished, make_pairs, replace_several
    from regard.models.pretrained import check_model
    from regard.runs.command_line import default_work_dir, run_command
    from regard.runs.launchers import make_launcher

    if args.adapter is not None:
        raise UserError("adapter: expected one model with it, got several models or tasks")
    pairs = make_pairs(models, tasks)
    for task in tasks:
        _check_data(args, config, task)
    done = default_work_dir(out) / RUNS if args.resume else None
    begun = [pair.model for pair in pairs if done is None or not is_finished(done / pair.key)]
    for model in dict.fromkeys(begun) if args.launcher == "local" else ():  # other machines may have other models
        check_model(model, code=args.trust_remote_code, language_model=LANGUAGE_MODEL in tasks)
    gpus = None if args.device in ("auto", "cuda") else 0
    engine = make_launcher(args.launcher, workers=1 if args.workers is None else args.workers, gpus=gpus)
    given = {"--data": args.data, "--constants-from": args.constants_from, "--device": args.device}
    given |= {"--dtype": args.dtype}
    line = [part for name, value in given.items() if value is not None for part in (name, str(value))]
    line += ["--trust-remote-code"] if args.trust_remote_code else []

    def start(work_dir: Path, on_progress: OnProgress) -> SeveralResult:
        return replace_several(pairs, config, line, engine, work_dir, resume=args.resume, on_progress=on_progress)

    run_command(args, "replace", out, start, parts=PARTS)


def _check_data(args: argparse.Namespace, config: ReplaceConfig, task: str) -> None:
    """Read the task's files as far as they are here. Raises UserError."""
    from regard.commands.replace.run import check_origin
    from regard.data import TASKS, read_task

    data = args.data or os.environ.get("REGARD_DATA")
    if args.constants_from is not None:
        config.check_constants_from()
        check_origin(args.constants_from)
    if task not in TASKS or data:
        read_task(task, data if task in TASKS else None, **config.columns)


def _replace(args: argparse.Namespace, config: ReplaceConfig, work_dir: Path, on_progress: OnProgress) -> ReplaceResult:
    from regard import models
    from regard.commands.replace.run import replace

    _check_data(args, config, args.task)
    options = arguments.model_options(args)
    loaded = models.load(args.model, language_model=args.task == LANGUAGE_MODEL, **options)
    return replace(
        loaded,
        args.task,
        data=args.data or os.environ.get("REGARD_DATA"),
        constants_from=args.constants_from,
        config=config,
        work_dir=work_dir,
        resume=args.resume,
        keep_work_dir=True,
        on_progress=on_progress,
    )
