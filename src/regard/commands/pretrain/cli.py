"""`regard pretrain`."""

import argparse
from pathlib import Path
from typing import Any

from regard.commands.pretrain.config import PretrainConfig, preset_config
from regard.errors import UserError
from regard.runs.arguments import add_config_options, add_run_options, file_slug, parse_config_options
from regard.runs.progress import OnProgress

HELP = "Train a small decoder from scratch, and monitor the emergence of sinks."
EXAMPLES = """examples:
  regard pretrain nano
  regard pretrain pico --attention sigmoid --weight-decay 1
  regard pretrain nano --data novels.txt web@0.3=pages.jsonl --max-steps 5000
  regard pretrain --config runs/pretrain-nano/results.json --seed 1
  accelerate launch -m regard pretrain 60m --out runs/60m
"""
DEFAULT_PRESET = "nano"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="preset: pico, nano (default), 1m, 60m or 1b")
    add_run_options(parser, "runs/pretrain-NAME")
    parser.add_argument(
        "--cache", metavar="DIR", help="folder of packed text (default: $REGARD_CACHE, else ~/.cache/regard)"
    )
    add_config_options(parser, PretrainConfig, "defaults are those of NAME; this list shows those of nano")


def parse_config(args: argparse.Namespace) -> tuple[str | PretrainConfig, dict[str, Any]]:
    """Return the preset or configuration, and the changes from options. Raises UserError."""
    if args.name is not None and args.config is not None:
        raise UserError(f"--config: expected a preset's name or a file, got both '{args.name}' and {args.config}")
    base = PretrainConfig.from_file(args.config) if args.config is not None else args.name or DEFAULT_PRESET
    changes = parse_config_options(args, PretrainConfig)
    preset_config(base, **changes)
    return base, changes


def run(args: argparse.Namespace) -> None:
    """Train, save and print; check the configuration before text is read."""
    base, changes = parse_config(args)
    from regard.commands.pretrain.run import PARTS, pretrain
    from regard.runs.command_line import run_command

    name = args.name or (file_slug(Path(args.config).resolve().parent.name) if args.config else DEFAULT_PRESET)

    def run_pretrain(work_dir: Path, on_progress: OnProgress) -> Any:
        options = {"resume": args.resume, "keep_work_dir": True, "cache": args.cache, **changes}
        return pretrain(base, work_dir=work_dir, on_progress=on_progress, **options)

    run_command(args, "pretrain", args.out or Path("runs") / f"pretrain-{name}", run_pretrain, parts=PARTS)
