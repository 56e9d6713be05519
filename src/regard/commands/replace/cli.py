"""`regard replace`."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

from regard.errors import UserError
from regard.runs.arguments import (
    check_model_folder,
    check_work_dir,
    default_work_dir,
    model_slug,
    print_summary,
)

HELP = "Put constants or another operation where attention was; score a task."
EXAMPLES = """examples:
  regard replace minilm --task sst2 --data glue
  regard replace bert-base-uncased --task cola --scale paper --out runs/cola
  regard replace minilm --task ner --constants average,zeros --rank-heads-by random
  regard replace minilm --task reviews.jsonl --text review --label stars
  regard replace EleutherAI/pythia-160m --task lm --rank-heads-by output-norm
  regard replace gpt2 --task lm --attention sigmoid,off-by-one
"""
OWN = ("text", "label", "validation", "metric")
"""Settings of a task from a file of one's own."""
FRACTIONS, RANKING = "1,1/2,1/8,1/16,0", "lambda"
"""What is taken for constants without a choice: as good as not given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("model", metavar="MODEL", help="a hub id, a local folder, or minilm (embedded)")
    parser.add_argument(
        "--task",
        required=True,
        metavar="TASK",
        help="cola, sst2, mrpc, mnli, ner, pos, mlm, lm (perplexity of a causal "
        "model), or a .jsonl, .csv, .tsv or .parquet file",
    )
    parser.add_argument(
        "--data",
        metavar="DIR",
        help="folder with the task's files as published; default: $REGARD_DATA, else the hub",
    )
    parser.add_argument(
        "--constants",
        metavar="NAME,…",
        help="average (default, but for --attention), identity, toeplitz, zeros, toeplitz-init, average-init",
    )
    parser.add_argument(
        "--attention",
        metavar="NAME,…",
        help="operations in the place of softmax in all heads: sigmoid, sigmoid-normalised, off-by-one, softpick, "
        "elu-kernel-normalised, softmax+window=8, …",
    )
    parser.add_argument(
        "--constants-from", metavar="TASK|FILE", help="take the averages from another task, or from a file of constants"
    )
    parser.add_argument(
        "--dynamic-fractions", default=FRACTIONS, metavar="F,…", help="heads that stay dynamic (1,1/2,1/8,1/16,0)"
    )
    parser.add_argument(
        "--rank-heads-by",
        default=RANKING,
        metavar="NAME,…",
        help="order of the heads: lambda (default), input-dependence, "
        "output-norm, first-layers, last-layers, random, reversed",
    )
    parser.add_argument("--num-seeds", type=int, default=3, help="probes for each score (default: 3)")
    parser.add_argument("--scale", default="laptop", metavar="SCALE", help="laptop (default) or paper")
    parser.add_argument("--special-token-layout", default="paper", metavar="LAYOUT", help="paper (default) or natural")
    parser.add_argument("--length", type=int, help="tokens of an input (default: the scale's)")
    parser.add_argument("--max-train-samples", type=int, help="training examples, at most (default: the scale's)")
    parser.add_argument("--max-eval-samples", type=int, help="validation examples, at most (default: the scale's)")
    parser.add_argument("--num-epochs", type=int, help="epochs of a probe (default: the scale's)")
    parser.add_argument("--batch-size", type=int, help="examples a step (default: the scale's)")
    parser.add_argument("--learning-rate", type=float, help="of the probe (default: the scale's)")
    parser.add_argument(
        "--text", metavar="COLUMN", help="column of texts in your own file, or two: a,b (default: text)"
    )
    parser.add_argument("--label", metavar="COLUMN", help="column of labels in your own file (default: label)")
    parser.add_argument(
        "--validation", metavar="FILE", help="validation rows of your own (default: a fifth of the file)"
    )
    parser.add_argument("--metric", help="for your own file: accuracy (default), f1 or mcc")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--dtype", default="auto", help="auto, float32, float16, bfloat16 or float64")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: runs/replace-MODEL-TASK)")
    parser.add_argument("--overwrite", action="store_true", help="write over an earlier run in DIR")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was broken off")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def run(given: argparse.Namespace) -> None:
    """Replace, print, write; everything that can be refused is refused before the model is loaded."""
    settings = _settings(given)
    from regard import models
    from regard.commands.replace.config import LANGUAGE_MODEL, ReplaceConfig
    from regard.commands.replace.run import can_resume, replace
    from regard.data import TASKS, read_task
    from regard.hooks import ReplacedModel
    from regard.hooks.operation import parse_attention
    from regard.runs.output_dir import check_output_dir

    out = given.out or Path("runs") / f"replace-{model_slug(given.model)}-{model_slug(Path(given.task).stem)}"
    work = default_work_dir(out)
    check_output_dir(out, overwrite=given.overwrite, verb="replace")
    check_work_dir(work, can_resume(work), given)
    chosen = ReplaceConfig(**settings)
    for name in chosen.attention:
        parse_attention(name)
    if given.constants_from is not None:
        chosen.check_constants_from()
    data = given.data or os.environ.get("REGARD_DATA")
    if given.task not in TASKS or data:
        read_task(given.task, data if given.task in TASKS else None, **{name: settings[name] for name in OWN})
    if given.constants_from not in (None, *TASKS) and not Path(given.constants_from).is_file():
        raise UserError(
            f"constants-from: expected one of {', '.join(TASKS)}, or a file of constants; got '{given.constants_from}'"
        )
    check_model_folder(given.model)
    ReplacedModel.register()
    loaded = models.load(
        given.model,
        dtype=given.dtype,
        device=given.device,
        trust_remote_code=given.trust_remote_code,
        language_model=given.task == LANGUAGE_MODEL,
    )
    try:
        with _progress() as step:
            found = replace(
                loaded,
                given.task,
                data=data,
                constants_from=given.constants_from,
                work_dir=work,
                resume=given.resume,
                keep_work_dir=True,
                on_step=step,
                **settings,
            )
        found.save(out, overwrite=given.overwrite)
    except KeyboardInterrupt:
        if not work.exists():
            raise
        raise UserError(
            f"interrupted; what was found is kept in {work}: the same command with --resume goes on"
        ) from None
    shutil.rmtree(work)
    print_summary(found.summary(), out)


def _settings(given: argparse.Namespace) -> dict[str, Any]:
    names = (
        *("num_seeds", "scale", "special_token_layout", "length", "max_train_samples", "max_eval_samples"),
        *("num_epochs", "batch_size", "learning_rate"),
    )
    settings: dict[str, Any] = {name: getattr(given, name) for name in names}
    settings |= {name: getattr(given, name) for name in OWN}
    several = [name for name in ("constants", "attention") if getattr(given, name) is not None]
    several += ["rank_heads_by"] if given.rank_heads_by != RANKING else []
    settings |= {name: tuple(getattr(given, name).split(",")) for name in several}
    if given.dynamic_fractions != FRACTIONS:
        settings["dynamic_fractions"] = tuple(_fraction(part) for part in given.dynamic_fractions.split(","))
    return settings


def _fraction(text: str) -> float:
    try:
        return float(Fraction(text.strip()))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise UserError(f"--dynamic-fractions: expected numbers such as 1, 1/2, 0.25, got {text!r}") from None


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being done, on standard error, where that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda step: None
        return
    with console.status("starting") as status:
        yield status.update
