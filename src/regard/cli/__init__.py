"""The command line: one sub-command per file, heavy imports inside."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from regard import __version__
from regard.cli import compare, measure
from regard.errors import UserError

COMMANDS = {"measure": measure, "compare": compare}


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    top = argparse.ArgumentParser(prog="regard", description="A laboratory for attention in Transformers.")
    top.add_argument("--version", action="version", version=f"regard {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        module.add_arguments(
            commands.add_parser(
                name,
                help=module.HELP,
                description=module.HELP,
                epilog=module.EXAMPLES,
                formatter_class=argparse.RawDescriptionHelpFormatter,
            )
        )
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, or 2 after one line that says what was wrong."""
    given = parser().parse_args(arguments)
    try:
        COMMANDS[given.command].run(given)
    except UserError as error:
        print(f"regard {given.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"regard {given.command}: interrupted; nothing was written", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 2
    return 0
