"""`regard sweep`."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from regard.errors import UserError
from regard.runs.arguments import (
    OneList,
    OptionParser,
    add_config_options,
    parse_config_options,
    parse_path,
    parse_seeds,
    suggest_option,
)
from regard.runs.progress import heartbeat, in_one_line

if TYPE_CHECKING:
    from regard.commands.sweep.run import SweepProgress, SweepResult
    from regard.runs.command import Command

HELP = "Run a verb with every combination of some settings, and compare the runs."
EXAMPLES = """examples:
  regard sweep pretrain --vary attention=softmax,sigmoid --out runs/attention
  regard sweep pretrain nano --vary window=none,16,32 --workers 2 --out runs/w
  regard sweep pretrain --vary positions=rotary,alibi --launcher ray --out /s/p
  regard sweep learn --vary method=finetune,prescale --seeds 508,39 --out runs/s

`regard sweep VERB --help` lists the settings. The same command goes on with
a sweep that was broken off. Trials of other settings are added to what DIR has.
"""
MAX_SHOWN = 5
"""How many failed trials with the same error are listed, and how many errors."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what comes before the options of the swept command, which are parsed when it is known."""
    parser.add_argument("verb", metavar="VERB", help="what each trial runs: pretrain or learn")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="…", help="options of the sweep, and of the verb")


def run(args: argparse.Namespace) -> None:
    """Run the trials, print, write. Everything that can be refused is refused before one begins."""
    from regard.commands.sweep.run import find_command, sweep
    from regard.commands.sweep.terminal import sweep_summary
    from regard.runs.command_line import print_summary

    command = find_command(args.verb)
    parser = make_parser(command)
    options, unknown = parser.parse_known_args(args.rest)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{suggest_option(parser, unknown)}")
    if options.name is not None and options.config is not None:
        raise UserError(f"--config: expected a name or a file, got both '{options.name}' and {options.config}")
    if options.seeds is not None and options.num_seeds is not None:
        raise UserError(f"--num-seeds: expected none beside --seeds, which lists them; got {options.num_seeds}")
    vary = parse_vary(command, options.vary)
    fields = parse_config_options(options, command.config)
    twice = sorted(set(vary) & set(fields))
    if twice:
        raise UserError(f"vary: {twice[0]} is also given as an option; give it once")
    launch = {name: getattr(options, name) for name in ("out", "launcher", "address", "workers", "gpus", "retries")}
    watch = _SweepWatch()
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else heartbeat(watch.beat):
            result = sweep(
                command,
                vary,
                config=lambda varied: command.initial_fields(options.name, options.config, {**fields, **varied}),
                seeds=None if options.seeds is None else parse_seeds(options.seeds),
                num_seeds=3 if options.num_seeds is None else options.num_seeds,
                **launch,
                arguments=folder_arguments(command, options),
                command_line=shlex.join(["regard", "sweep", args.verb, *args.rest]),
                on_progress=watch,
            )
    except KeyboardInterrupt:
        raise UserError(f"interrupted; what is done is kept in {options.out}: the same command goes on") from None
    print_summary(sweep_summary(result.table, result.metadata), options.out)
    if result.failed:
        raise UserError(_describe_failures(result))


class _SweepWatch:
    """Prints how trials end, and in a log how many are at work, when it is asked to."""

    def __init__(self) -> None:
        self.line = "starting"
        self._running: set[str] = set()

    def __call__(self, progress: SweepProgress) -> None:
        print_progress(progress)
        (self._running.add if progress.event.kind == "started" else self._running.discard)(progress.event.key)
        self.line = f"{progress.finished} of {progress.trials} trials finished, {len(self._running)} at work"

    def beat(self) -> None:
        print(self.line, file=sys.stderr, flush=True)


class _Parser(OptionParser):
    """A parser that refuses with a UserError, as the command does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def make_parser(command: Command) -> argparse.ArgumentParser:
    """Return the parser of what follows the command: options of the sweep, and of the command's configuration."""
    parser = _Parser(prog=f"regard sweep {command.name}", description=HELP, allow_abbrev=False)
    names = ", ".join(command.presets)
    parser.add_argument("name", nargs="?", metavar="NAME", help=f"settings to begin with: {names}")
    parser.add_argument(
        "--config",
        type=parse_path,
        metavar="FILE",
        help="settings of an earlier run (its folder) or of a JSON file, instead of NAME",
    )
    parser.add_argument(
        "--vary",
        nargs="+",
        action="extend",
        required=True,
        metavar="FIELD=VALUE,…",
        help="settings that vary, with their values",
    )
    parser.add_argument(
        "--seeds", action=OneList, metavar="A,B,…", help="seeds of each combination (default: 0 to --num-seeds - 1)"
    )
    parser.add_argument("--num-seeds", type=int, metavar="N", help="number of seeds, counted from 0 (default: 3)")
    parser.add_argument("--launcher", default="local", metavar="NAME", help="local (default) or ray")
    parser.add_argument("--address", metavar="HOST:PORT", help="a Ray cluster, or auto (default: one of this machine)")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="trials at once (default: one per core, or one per GPU)"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs per trial (default: 1 if there is one; with ray 0)")
    parser.add_argument(
        "--retries", type=int, default=2, metavar="N", help="how often a failed trial is tried again (default: 2)"
    )
    parser.add_argument(
        "--out", type=parse_path, required=True, metavar="DIR", help="folder to write; a sweep that is there goes on"
    )
    for name, text in command.folder_options.items():
        parser.add_argument(f"--{name}", metavar="DIR", type=parse_path, help=text.replace("%", "%%"))
    add_config_options(
        parser,
        command.config,
        f"the same for all trials; defaults are shown by regard {command.name} --help",
        exclude=("seed",),
        show_defaults=False,
    )
    return parser


def folder_arguments(command: Command, options: argparse.Namespace) -> list[str]:
    """Return the folders that were given, as arguments of a trial, which may start in another folder."""
    folders = {name: getattr(options, name) for name in command.folder_options}
    return [part for name, path in folders.items() if path for part in (f"--{name}", str(path.resolve()))]


def parse_vary(command: Command, texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each field, each once, from texts such as `weight_decay=0,0.1`. Raises UserError."""
    from regard.commands.sweep.run import check_varied_field

    vary: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals:
            raise UserError(f"vary: expected FIELD=VALUE,VALUE, got {text!r}")
        check_varied_field(command, name)
        parts = [part.strip() for part in listed.split(",")]
        if not all(parts):
            raise UserError(f"vary: expected values with commas between them for {name}, got {listed!r}")
        names = [part.partition("=")[0].strip().lstrip("-").replace("-", "_") for part in parts if "=" in part]
        if second := next((other for other in names if other in command.config.field_names()), None):
            line = f"--vary {name}=… {second}=…, or several --vary"
            raise UserError(f"vary: expected a space before each field, as {line}; got {text!r}")
        for value in (command.config.parse_field(name, part) for part in parts):
            if value not in vary.setdefault(name, []):
                vary[name].append(value)
    return vary


def print_progress(progress: SweepProgress) -> None:
    """Print how a trial ended on standard error: of all on a terminal, else of those that failed."""
    event = progress.event
    results = {"failed": f"failed, tried again ({event.error})", "given up": f"failed ({event.error})"}
    if sys.stderr.isatty():
        results["finished"] = f"finished in {event.seconds:.0f} s"
    if event.kind in results:
        line = f"[{progress.finished}/{progress.trials}] {progress.trial}: {results[event.kind]}"
        print(in_one_line(line), file=sys.stderr, flush=True)


def _describe_failures(result: SweepResult) -> str:
    """Return which trials failed, each with the last line of its error; those with the same one together."""
    from regard.report.labels import pluralize
    from regard.runs.selection import list_some

    by_key = {trial["key"]: trial for trial in result.metadata["trials"]}
    by_error: dict[str, list[str]] = {}
    for key, error in result.failed.items():
        values = {**by_key[key]["values"], "seed": by_key[key]["seed"]}
        by_error.setdefault(error, []).append(" ".join(f"{name}={value}" for name, value in values.items()))
    lines = [f"{list_some(trials, MAX_SHOWN)} ({error})" for error, trials in list(by_error.items())[:MAX_SHOWN]]
    lines += ["others as in sweep.json"] if len(by_error) > MAX_SHOWN else []
    return f"{pluralize(len(result.failed), 'trial')} failed: {'; '.join(lines)}; the same command tries again"
