"""The commands that a sweep can repeat."""

from __future__ import annotations

from collections.abc import Callable

from regard.commands.learn.command import LearnCommand
from regard.commands.pretrain.command import PretrainCommand
from regard.errors import UserError, check_choice
from regard.runs.command import Command

COMMANDS: dict[str, Callable[[], Command]] = {"pretrain": PretrainCommand, "learn": LearnCommand}


def find_command(name: str) -> Command:
    """Return a command by its name. Raises UserError."""
    check_choice("sweep", name, COMMANDS)
    return COMMANDS[name]()


def check_varied_field(command: Command, name: str) -> None:
    """Check that a sweep can vary a field. Raises UserError."""
    if name == "seed":
        raise UserError("vary: seeds are given by --seeds, as 0,7")
    if name not in command.config.field_names():
        allowed = ", ".join(sorted(command.config.field_names()))
        raise UserError(f"vary: there is no field {name}; allowed are {allowed}")
