"""`regard measure`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.commands.measure.config import MeasureConfig
from regard.errors import UserError
from regard.runs import arguments
from regard.runs.progress import OnProgress

if TYPE_CHECKING:
    from regard.commands.measure.result import MeasureResult

HELP = "Measure what a model's attention does on some text, and write a report."
EXAMPLES = """examples:
  regard measure minilm
  regard measure gpt2 --text book.txt notes.jsonl --length 512 --epsilon 0.2,0.3
  regard measure ./model --input random --statistics entropy --out runs/random
  regard measure google/vit-base-patch16-224 --images photos/
  regard measure facebook/wav2vec2-base --audio speech/
  regard measure MCG-NJU/videomae-base --videos clips/
  zcat corpus.gz | regard measure gpt2 --text - --layer-ids 0,5,11
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    arguments.add_model_options(parser)
    parser.add_argument(
        "--random-weights", action="store_true", help="measure the architecture with random weights, before training"
    )
    parser.add_argument(
        "--text",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="files of text, tables with a column text (or messages), folders with .txt, .jsonl and .parquet, or - "
        "for standard input; default: Python's own documentation",
    )
    parser.add_argument(
        "--images", nargs="+", action="extend", metavar="PATH", help="image files, or folders of them, in place of text"
    )
    parser.add_argument(
        "--audio", nargs="+", action="extend", metavar="PATH", help=".wav files, or folders of them, in place of text"
    )
    parser.add_argument(
        "--videos",
        nargs="+",
        action="extend",
        metavar="PATH",
        help="folders of frames, animations, or folders of these, in place of text",
    )
    arguments.add_run_options(parser, "a new one under runs/", resume=False)
    arguments.add_config_options(parser, MeasureConfig)


def run(args: argparse.Namespace) -> None:
    """Measure, save, print. What can be refused is refused before the model is loaded."""
    options = arguments.parse_config_options(args, MeasureConfig)
    config = MeasureConfig.from_options(args.config, options)
    if "perturb" in options and args.config is None:
        config.check_perturb()
    from regard.runs.command_line import run_command
    from regard.runs.distributed import process_group, raise_on_all_ranks

    with process_group(), raise_on_all_ranks():
        out = args.out or arguments.new_run_dir("measure", args.model)
        run_command(args, "measure", out, partial(_measure, args, config))


def _measure(args: argparse.Namespace, config: MeasureConfig, _: Path, on_progress: OnProgress) -> MeasureResult:
    from regard import models
    from regard.commands.measure.run import measure
    from regard.data import read_images, read_sounds, read_texts, read_videos
    from regard.runs.rank import num_processes

    if args.text and config.input != "natural":
        raise UserError(
            f"--text cannot be used with --input {config.input}, whose tokens are not taken from text. Leave it out."
        )
    readers: dict[str, Callable[[Sequence[str]], Any]]
    readers = {"images": read_images, "audio": read_sounds, "videos": read_videos}
    given = [kind for kind in readers if getattr(args, kind)]
    if given and (args.text or config.input != "natural"):
        raise UserError(f"--{given[0]} cannot be used with --text or --input; the text beside {given[0]} is --prompt")
    if len(given) > 1:
        raise UserError(f"--{given[0]} cannot be used with --{given[1]}: give one of them")
    if "-" in (args.text or ()) and num_processes() > 1:
        raise UserError("--text: several processes cannot share standard input; expected files")
    texts = read_texts(args.text, conversations=True) if args.text else None
    media = {kind: readers[kind](getattr(args, kind)) for kind in given}
    options = arguments.model_options(args) | dict.fromkeys(given, True)
    loaded = models.load(args.model, **options, random_weights=args.random_weights, seed=config.seed)
    return measure(loaded, texts=texts, **media, config=config, on_progress=on_progress)
