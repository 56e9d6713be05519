"""The command line: one sub-command per file, heavy imports inside."""

import argparse
import gc
import io
import math
import os
import re
import shlex
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
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
from regard.errors import UserError, check_utf8, describe_error, is_of_memory, is_of_rust
from regard.runs.arguments import OptionParser, suggest_option
from regard.runs.rank import IN_JOB, is_main_process
from regard.runs.signals import INTERRUPTING
from regard.runs.version import VERSION

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

_CLIENTS = ("httpx", "httpx2")  # packages through which the hub is asked, whose errors are none of the system's
_ONE_PRESS = 1.0  # seconds in which signals are one interruption


class Parser(OptionParser):
    """A parser whose errors are one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> Parser:
    """Return the parser of all commands."""
    top = Parser(prog="regard", description="A laboratory for attention in Transformers.", allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"regard {VERSION}")
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
    """Run a command, and return its exit code: 0, 1 or 3 by `regard check`, 2 after a line with an error.

    Without arguments they are those of the process, which is taken to end with the command: signals are still held
    then, so that a key that is pressed again does not interrupt the end.
    """
    code: int | None = None
    try:
        with _interruptible(restore=arguments is not None) as is_interrupted:
            try:
                code = _run(arguments)
            except Exception:
                if not is_interrupted():
                    raise
                # A library that Python's handler interrupted in its own code made another error of it.
                _print_error("regard: interrupted; what was kept before is kept")
                code = _unless_in_job()
    except KeyboardInterrupt:  # before the command began, or as it ended
        if code is None:
            _print_error("regard: interrupted; nothing was written")
            code = _unless_in_job()
    return code


def _unless_in_job() -> int:
    """Return 2, or in a job of a launcher the code of what may go well another time (EX_TEMPFAIL)."""
    return 75 if os.environ.get(IN_JOB) else 2


def _is_of_system(error: BaseException | None) -> bool:
    """Whether a mistake is none of the user: the system failed below it, as a full disk or a hub out of reach."""
    if error is None:
        return False
    is_of_network = any(base.__module__.partition(".")[0] in _CLIENTS for base in type(error).__mro__)
    return isinstance(error, OSError) or is_of_network or is_of_rust(error) or _is_of_system(error.__cause__)


def _suggest(command: str, unknown: Sequence[str]) -> str:
    """Return the option of a command that is nearest to the first unknown one, as ` (did you mean --samples?)`."""
    commands = next(action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return suggest_option(commands.choices[command], unknown)


def _check_current_folder() -> None:
    """Check that the folder in which the command runs is still there. Raises UserError."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError("the current folder is not there any more; expected one that is: change to it") from error


def _run(arguments: Sequence[str] | None) -> int:
    command, resumes = "regard", False
    _write_any_sign()
    gc.disable()  # for the imports, of which it takes a fifth of the time; run_command enables it behind them
    try:
        advice = "give the file another name, or set PYTHONUTF8=1 if the terminal writes UTF-8"
        for argument in sys.argv[1:] if arguments is None else arguments:
            check_utf8(str(argument), "expected arguments", advice=advice)
        _check_current_folder()
        args, unknown = parser().parse_known_args(arguments)
        command, resumes = f"regard {args.command}", getattr(args, "resume", False)
        if unknown:
            Parser(prog=command).error(f"unrecognized arguments: {' '.join(unknown)}{_suggest(args.command, unknown)}")
        args.line = shlex.join(["regard", *map(str, sys.argv[1:] if arguments is None else arguments)])
        with _plain_warnings(args.command):
            code: int | None = COMMANDS[args.command].run(args)
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        _print_error(f"{command}: {describe_error(error)}")
        return _unless_in_job() if _is_of_system(error) else 2
    except KeyboardInterrupt:
        _print_error(f"{command}: interrupted; {'what was kept before is kept' if resumes else 'nothing was written'}")
        return _unless_in_job()
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # which Rich makes an exit with code 1 of
            raise
        return 2
    except BrokenPipeError:
        _drop_output()
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_of_memory(error):
            raise
        size = re.search(r"tried to allocate (\d+) bytes", str(error))
        problem = f"{int(size[1]):,} bytes were asked for" if size else describe_error(error)[:300]
        problem = f": {problem}" if problem else ""  # Python's own error says nothing
        _print_error(f"{command}: out of memory{problem}; ask for less at once, as by smaller numbers")
        return _unless_in_job()
    except OSError as error:
        place = error.filename if _drop_output() else "standard output"
        problem = f"{place}: {error.strerror}" if place and error.strerror else describe_error(error)
        _print_error(f"{command}: {problem}")
        return _unless_in_job()
    finally:
        gc.unfreeze()
        gc.enable()
    return code or 0


def _write_any_sign() -> None:
    """Let standard output write what its encoding lacks as an escape, as standard error does, also with LC_ALL=C."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_output() -> bool:
    """Write what is left of standard output, or nowhere if that fails any longer; return whether it does not."""
    with suppress(ValueError, AttributeError):
        try:
            sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return False
    return True


def _print_error(line: str) -> None:
    """Print a line to standard error, in the main process."""
    if is_main_process():
        with suppress(OSError):  # there is nowhere else to say it
            print(line, file=sys.stderr)


@contextmanager
def _plain_warnings(command: str) -> Iterator[None]:
    """Show each warning once, as one line without source, for a while."""
    shown = set[str]()

    def write(message: Warning | str, *_place: Any, **_options: Any) -> str:
        line = f"regard {command}: warning: {' '.join(str(message).split())}\n"
        if line in shown or not is_main_process():  # as of files that are read again at another place
            return ""
        shown.add(line)
        return line

    before = warnings.formatwarning
    warnings.formatwarning = write
    try:
        yield
    finally:
        warnings.formatwarning = before


@contextmanager
def _interruptible(*, restore: bool) -> Iterator[Callable[[], bool]]:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does, so that nothing is left half-done, and each only once.

    Signals within a second of one that has interrupted do nothing: a key that is held, or a terminal and a parent that
    both send one, would else interrupt what the first has begun to save or to clear away. Signals that are ignored, or
    that others handle, stay so. What it yields says whether one has interrupted.

    At the end the handlers before are put back if `restore`; else signals are ignored from then on, for Python gives
    those that it handles their default, which kills, long before a process has ended.
    """
    interrupted = -math.inf

    def interrupt(*_: object) -> None:
        nonlocal interrupted
        if time.monotonic() - interrupted >= _ONE_PRESS:
            interrupted = time.monotonic()
            raise KeyboardInterrupt

    handlers = {}
    for number in INTERRUPTING if threading.current_thread() is threading.main_thread() else ():
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            handlers[number] = signal.signal(number, interrupt)
    try:
        yield lambda: interrupted > -math.inf
    finally:
        interrupted = math.inf
        for number, handler in handlers.items():
            signal.signal(number, handler if restore else signal.SIG_IGN)
