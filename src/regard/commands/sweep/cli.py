"""`regard sweep`."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from regard.errors import UserError
from regard.runs.arguments import parse_number

if TYPE_CHECKING:
    from regard.commands.sweep.commands import Command
    from regard.commands.sweep.run import SweepProgress, SweepResult

HELP = "Run a verb with every combination of some settings, and compare the runs."
EXAMPLES = """examples:
  regard sweep pretrain --vary attention=softmax,sigmoid --out runs/attention
  regard sweep pretrain nano --vary window=none,16,32 --workers 2 --out runs/w
  regard sweep pretrain --vary positions=rotary,alibi --launcher ray --out /s/p
  regard sweep learn --vary method=finetune,prescale --seeds 508,39 --out runs/s

`regard sweep VERB --help` lists the settings. The same command goes on with
a sweep that was broken off. Trials of other settings are added to what DIR has.
"""
MOST_TOLD = 5
"""Failed trials with the same error, and different errors, that are told of one by one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command. Those after the verb are read when it is known, with the verb's own among them."""
    parser.add_argument("verb", metavar="VERB", help="what each trial runs: pretrain or learn")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="…", help="options of the sweep, and of the verb")


def run(given: argparse.Namespace) -> None:
    """Run the trials, print, write; everything that can be refused is refused before one begins."""
    from regard.commands.sweep.commands import COMMANDS
    from regard.commands.sweep.run import sweep

    if given.verb not in COMMANDS:
        raise UserError(f"expected one of {', '.join(COMMANDS)} to sweep, got {given.verb!r}")
    verb = COMMANDS[given.verb]()
    asked = _parser(verb).parse_args(given.rest)
    if asked.name is not None and asked.config is not None:
        raise UserError(f"--config: expected a name or a file, got both '{asked.name}' and {asked.config}")
    if asked.seeds is not None and asked.num_seeds is not None:
        raise UserError(f"--num-seeds: expected none beside --seeds, which lists them; got {asked.num_seeds}")
    vary = values(verb, asked.vary)
    settings = verb.base(asked.name, asked.config) | _settings(verb, asked)
    twice = sorted(set(vary) & set(_settings(verb, asked)))
    if twice:
        raise UserError(f"vary: {twice[0]} is also given as an option; give it once")
    progress = Progress()
    try:
        swept = sweep(
            verb,
            vary,
            out=asked.out,
            settings=settings,
            seeds=None if asked.seeds is None else parse_seeds(asked.seeds),
            num_seeds=3 if asked.num_seeds is None else asked.num_seeds,
            launcher=asked.launcher,
            address=asked.address,
            workers=asked.workers,
            gpus=asked.gpus,
            retries=asked.retries,
            options=_options(verb, asked),
            command=shlex.join(["regard", "sweep", given.verb, *given.rest]),
            on_event=progress,
        )
    except KeyboardInterrupt:
        raise UserError(f"interrupted; what is done is kept in {asked.out}: the same command goes on") from None
    _tell(verb, swept)
    if swept.failed:
        raise UserError(_failures(swept))


class _Parser(argparse.ArgumentParser):
    """A parser that refuses with a UserError, as the command does."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def _parser(verb: Command) -> argparse.ArgumentParser:
    """The options of a sweep of this verb."""
    parser = _Parser(prog=f"regard sweep {verb.name}", description=HELP, allow_abbrev=False)
    if verb.names:
        parser.add_argument("name", nargs="?", metavar="NAME", help=f"settings to begin with: {', '.join(verb.names)}")
    else:
        parser.set_defaults(name=None)
    parser.add_argument("--config", type=Path, metavar="FILE", help="or the settings in a file that a run has written")
    parser.add_argument(
        "--vary",
        nargs="+",
        action="extend",
        required=True,
        metavar="FIELD=VALUE,…",
        help="settings that vary, with their values",
    )
    parser.add_argument("--seeds", metavar="A,B,…", help="seeds of each combination (default: 0 to --num-seeds - 1)")
    parser.add_argument("--num-seeds", type=int, metavar="N", help="so many seeds from 0 (default: 3)")
    parser.add_argument("--launcher", default="local", metavar="NAME", help="local (default) or ray")
    parser.add_argument("--address", metavar="HOST:PORT", help="a Ray cluster, or auto (default: one of this machine)")
    parser.add_argument("--workers", type=int, metavar="N", help="trials at once (default: one a core, or one a GPU)")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of a trial (default: 1 where there are; on ray 0)")
    parser.add_argument("--retries", type=int, default=2, metavar="N", help="times a trial is tried again (default: 2)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write, or to go on in")
    group = parser.add_argument_group(f"settings of {verb.name}", "the same for all trials")
    shapes: dict[str, dict[str, Any]] = {
        "value": {"metavar": "VALUE"},
        "flag": {"action": argparse.BooleanOptionalAction},
        "many": {"nargs": "+", "metavar": "VALUE"},
    }
    for name, field in verb.fields.items():
        if name != "seed":
            said = field.help.replace("%", "%%")
            group.add_argument(f"--{name.replace('_', '-')}", dest=f"set:{name}", help=said, **shapes[field.kind])
    for name, said in verb.options.items():
        parser.add_argument(f"--{name}", dest=f"option:{name}", metavar="DIR", type=Path, help=said.replace("%", "%%"))
    return parser


def _options(verb: Command, asked: argparse.Namespace) -> list[str]:
    """The options of the verb's command that are no settings, as they were given, from any folder."""
    given = {name: getattr(asked, f"option:{name}") for name in verb.options}
    return [part for name, path in given.items() if path for part in (f"--{name}", str(path.resolve()))]


def _settings(verb: Command, asked: argparse.Namespace) -> dict[str, Any]:
    """The verb's settings that were given."""
    found: dict[str, Any] = {}
    for name, field in verb.fields.items():
        text = getattr(asked, f"set:{name}", None)
        if isinstance(text, bool):
            found[name] = text
        elif isinstance(text, list):
            found[name] = [value for part in text for value in field.parse(part)]
        elif text is not None:
            found[name] = field.parse(text)
    return found


def values(verb: Command, said: Sequence[str]) -> dict[str, list[Any]]:
    """The values of each field, from texts such as `weight_decay=0,0.1`; each value once. Raises UserError."""
    found: dict[str, list[Any]] = {}
    for text in said:
        name, equals, listed = text.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals:
            raise UserError(f"vary: expected FIELD=VALUE,VALUE, got {text!r}")
        if name == "seed":
            raise UserError("vary: seeds are given by --seeds, as 0,7")
        if name not in verb.fields:
            raise UserError(f"vary: there is no field {name}; allowed are {', '.join(sorted(verb.fields))}")
        parts = [part.strip() for part in listed.split(",")]
        if not all(parts):
            raise UserError(f"vary: expected values with commas between them for {name}, got {listed!r}")
        known = found.setdefault(name, [])
        known += [value for value in map(verb.fields[name].parse, parts) if value not in known]
        found[name] = [value for number, value in enumerate(known) if value not in known[:number]]
    return found


def parse_seeds(said: str) -> list[int]:
    """The seeds that a text lists, as `0,7`."""
    return [int(parse_number(part, int, "--seeds")) for part in said.split(",") if part.strip()]


class Progress:
    """Says of each trial how it ended, on standard error: all of them on a terminal, else those that failed."""

    def __init__(self) -> None:
        self._all = sys.stderr.isatty()

    def __call__(self, told: SweepProgress) -> None:
        line = _line(told)
        if line and (self._all or told.event.kind != "finished"):
            print(line, file=sys.stderr, flush=True)


def _line(told: SweepProgress) -> str:
    """How a trial ended, in a line; empty for one that began."""
    event, place = told.event, f"[{told.finished}/{told.trials}] {told.trial}:"
    ends: Mapping[str, str] = {
        "started": "",
        "finished": f"{place} finished in {event.seconds:.0f} s",
        "failed": f"{place} failed, tried again ({event.error})",
        "given up": f"{place} failed ({event.error})",
    }
    return ends[event.kind]


def _tell(verb: Command, swept: SweepResult) -> None:
    """What the trials show and where the rest is, on standard output."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(verb.summary(swept.table, swept.metadata))
    written = ", ".join(sorted(path.name for path in swept.folder.iterdir() if not path.name.startswith(".")))
    console.print(f"\nWritten to {swept.folder}: {written}", soft_wrap=True)


def _failures(swept: SweepResult) -> str:
    """Which trials failed, each with the last line of its error; those with the same one together."""
    by_key = {one["key"]: one for one in swept.metadata["trials"]}
    alike: dict[str, list[str]] = {}
    for key, error in swept.failed.items():
        said = {**by_key[key]["values"], "seed": by_key[key]["seed"]}
        alike.setdefault(error, []).append(" ".join(f"{name}={value}" for name, value in said.items()))
    told = [f"{_listed(trials)} ({error})" for error, trials in list(alike.items())[:MOST_TOLD]]
    rest = ["others as in sweep.json"] if len(alike) > MOST_TOLD else []
    count = "1 trial" if len(swept.failed) == 1 else f"{len(swept.failed)} trials"
    return f"{count} failed: {'; '.join([*told, *rest])}; the same command tries again"


def _listed(trials: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = len(trials) - MOST_TOLD
    return ", ".join(trials[:MOST_TOLD]) + (f" and {more} more" if more > 0 else "")
