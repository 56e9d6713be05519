"""The commands that a sweep can repeat."""

from __future__ import annotations

from collections.abc import Callable

from regard.commands.learn.command import LearnCommand
from regard.commands.pretrain.command import PretrainCommand
from regard.runs.command import Command

COMMANDS: dict[str, Callable[[], Command]] = {"pretrain": PretrainCommand, "learn": LearnCommand}
