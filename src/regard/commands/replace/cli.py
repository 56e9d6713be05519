"""`regard replace`."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from regard.commands.replace.config import LANGUAGE_MODEL, ReplaceConfig
from regard.runs import arguments
from regard.runs.progress import OnProgress

if TYPE_CHECKING:
    from regard.commands.replace.result import ReplaceResult

HELP = "Replace attention by constants or another operation, and score a task."
EXAMPLES = """examples:
  regard replace minilm --task sst2 --data glue
  regard replace bert-base-uncased --task cola --scale paper --out runs/cola
  regard replace minilm --task ner --constants zeros --rank-heads-by random
  regard replace minilm --task reviews.jsonl --text review --label stars
  regard replace EleutherAI/pythia-160m --task lm --rank-heads-by output-norm
  regard replace gpt2 --task lm --attention sigmoid,off-by-one
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    arguments.add_model_options(parser)
    parser.add_argument(
        "--task",
        required=True,
        metavar="TASK",
        help="cola, sst2, mrpc, mnli, ner, pos, mlm, lm (perplexity of a causal "
        "model), or a .jsonl, .csv, .tsv or .parquet file",
    )
    parser.add_argument(
        "--data", metavar="DIR", help="folder with the task's files as published; default: $REGARD_DATA, else the hub"
    )
    parser.add_argument(
        "--constants-from", metavar="TASK|FILE", help="source of the averages: another task, or a file of constants"
    )
    arguments.add_run_options(parser, "runs/replace-MODEL-TASK")
    arguments.add_config_options(parser, ReplaceConfig)


def run(args: argparse.Namespace) -> None:
    """Replace, save and print; check the configuration before the model is loaded."""
    config = ReplaceConfig.from_options(args.config, arguments.parse_config_options(args, ReplaceConfig))
    from regard.commands.replace.run import PARTS
    from regard.runs.command_line import run_command

    names = (arguments.file_slug(name) for name in (args.model, Path(args.task).stem))
    out = args.out or Path("runs") / "-".join(("replace", *names))
    run_command(args, "replace", out, partial(_replace, args, config), parts=PARTS)


def _replace(args: argparse.Namespace, config: ReplaceConfig, work_dir: Path, on_progress: OnProgress) -> ReplaceResult:
    from regard import models
    from regard.commands.replace.run import check_origin, replace
    from regard.data import TASKS, read_task
    from regard.hooks import ReplacedModel

    data = args.data or os.environ.get("REGARD_DATA")
    if args.constants_from is not None:
        config.check_constants_from()
        check_origin(args.constants_from)
    if args.task not in TASKS or data:
        read_task(args.task, data if args.task in TASKS else None, **config.columns)
    arguments.check_model_folder(args.model)
    ReplacedModel.register()
    loaded = models.load(
        args.model,
        dtype=args.dtype,
        device=args.device,
        trust_remote_code=args.trust_remote_code,
        language_model=args.task == LANGUAGE_MODEL,
        adapter=args.adapter,
    )
    return replace(
        loaded,
        args.task,
        data=data,
        constants_from=args.constants_from,
        config=config,
        work_dir=work_dir,
        resume=args.resume,
        keep_work_dir=True,
        on_progress=on_progress,
    )
