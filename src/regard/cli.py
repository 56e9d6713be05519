"""The command line: one sub-command per file, heavy imports inside."""

import argparse
import gc
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from regard.commands.compare import cli as compare
from regard.commands.convert import cli as convert
from regard.commands.explore import cli as explore
from regard.commands.learn import check, merge, rollback
from regard.commands.learn import cli as learn
from regard.commands.look import cli as look
from regard.commands.measure import cli as measure
from regard.commands.pretrain import cli as pretrain
from regard.commands.replace import cli as replace
from regard.commands.sweep import cli as sweep
from regard.errors import UserError, describe_error
from regard.runs.provenance import regard_version
from regard.runs.rank import is_main_process

COMMANDS = {
    "measure": measure,
    "look": look,
    "explore": explore,
    "compare": compare,
    "replace": replace,
    "pretrain": pretrain,
    "convert": convert,
    "learn": learn,
    "check": check,
    "rollback": rollback,
    "merge": merge,
    "sweep": sweep,
}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(prog="regard", description="A laboratory for attention in Transformers.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"regard {regard_version()}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_arguments(
            commands.add_parser(
                name,
                help=module.HELP,
                description=module.HELP,
                epilog=module.EXAMPLES,
                formatter_class=argparse.RawDescriptionHelpFormatter,
                allow_abbrev=False,
            )
        )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code: 0, 1 or 3 by `regard check`, 2 after a line with an error."""
    args, unknown = parser().parse_known_args(arguments)
    if unknown:
        Parser(prog=f"regard {args.command}").error(f"unrecognized arguments: {' '.join(unknown)}")
    args.line = shlex.join(["regard", *map(str, sys.argv[1:] if arguments is None else arguments)])
    gc.disable()  # for the imports, of which it takes a fifth of the time; run_command enables it behind them
    try:
        with _interruptible(), _plain_warnings(args.command):
            code: int | None = COMMANDS[args.command].run(args)
    except UserError as error:
        _print_error(f"regard {args.command}: {describe_error(error)}")
        return 2
    except KeyboardInterrupt:
        kept = "what was kept before is kept" if getattr(args, "resume", False) else "nothing was written"
        _print_error(f"regard {args.command}: interrupted; {kept}")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    finally:
        gc.unfreeze()
        gc.enable()
    return code or 0


def _print_error(line: str) -> None:
    """Print a line to standard error, in the main process."""
    if is_main_process():
        print(line, file=sys.stderr)


@contextmanager
def _plain_warnings(command: str) -> Iterator[None]:
    """Show each warning as one line without source for a while."""

    def write(message: Warning | str, *_place: Any, **_options: Any) -> str:
        return f"regard {command}: warning: {' '.join(str(message).split())}\n" if is_main_process() else ""

    before = warnings.formatwarning
    warnings.formatwarning = write
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does for a while, so that nothing is left half-done."""
    handlers = {}
    for name in ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ():
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            handlers[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
