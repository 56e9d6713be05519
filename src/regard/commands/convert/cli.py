"""`regard convert`."""

import argparse
from pathlib import Path
from typing import Any

from regard.commands.convert.config import ConvertConfig
from regard.runs.arguments import add_config_options, add_run_options, file_slug, parse_config_options
from regard.runs.progress import OnProgress

HELP = "Give a trained language model another attention, and train it to work again."
EXAMPLES = """examples:
  regard convert EleutherAI/pythia-160m --attention sigmoid --text hub:NAME
  regard convert runs/pretrain-nano/model --attention linear --model-steps 500
  regard convert gpt2 --attention softmax+window=256 --text novels.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("model", metavar="MODEL", help="a causal language model: a folder, or a hub id")
    add_run_options(parser, "runs/convert-MODEL")
    parser.add_argument(
        "--cache", metavar="DIR", help="folder of packed text (default: $REGARD_CACHE, else ~/.cache/regard)"
    )
    add_config_options(parser, ConvertConfig)


def run(args: argparse.Namespace) -> None:
    """Convert, save and print; check the configuration before the model is read."""
    config = ConvertConfig.from_options(args.config, parse_config_options(args, ConvertConfig))
    from regard.commands.convert.run import PARTS, convert
    from regard.runs.command_line import run_command

    def run_convert(work_dir: Path, on_progress: OnProgress) -> Any:
        options: dict[str, Any] = {"resume": args.resume, "keep_work_dir": True, "cache": args.cache}
        return convert(args.model, config=config, work_dir=work_dir, on_progress=on_progress, **options)

    out = args.out or Path("runs") / f"convert-{file_slug(args.model)}"
    run_command(args, "convert", out, run_convert, parts=PARTS)
