"""Warnings name the line of the user's code, and are plain lines on the command line."""

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import regard
from regard.errors import warn_user
from regard.runs.selection import select_rows
from tests.processes import run_python
from tests.tiny_deepseek import make_deepseek


def line_of(caught: Any) -> str:
    """The source line that a warning names."""
    (warning,) = caught
    return Path(warning.filename).read_text(encoding="utf-8").splitlines()[warning.lineno - 1].strip()


def test_a_warning_of_a_hook_names_the_line_that_calls_the_model() -> None:
    """Between them are frames of Regard, of PyTorch and of Transformers."""
    model, ids = make_deepseek(), torch.tensor([[5, 6, 7, 8]])
    with (
        torch.no_grad(),
        pytest.warns(UserWarning, match="cannot observe the hidden states") as caught,
        regard.watching(model, ["hidden_norm", "entropy"], verify=False),
    ):
        model(ids)  # this line
    assert line_of(caught) == "model(ids)  # this line"


def test_a_warning_of_a_function_names_the_line_that_calls_it() -> None:
    table = pd.DataFrame({"layer": [0, 1]})
    with pytest.warns(UserWarning, match="is empty: layer was measured for 0, 1") as caught:
        select_rows(table, {"layer": 7})  # that line
    assert line_of(caught) == 'select_rows(table, {"layer": 7})  # that line'
    with pytest.warns(UserWarning, match="^too little$") as caught:
        warn_user("too little")
    assert line_of(caught) == 'warn_user("too little")'


def test_the_command_line_shows_warnings_as_plain_lines() -> None:
    code = """
import warnings
import regard.cli as cli
def run(_):
    warnings.warn("one\\nand two", stacklevel=1)
    warnings.warn("one\\nand two", stacklevel=1)  # of another line
    warnings.warn("three", stacklevel=1)
cli.COMMANDS["compare"].run = run
write = warnings.formatwarning
assert cli.main(["compare", "a", "b"]) == 0
assert warnings.formatwarning is write
"""
    ended = run_python(["-c", code], environment())
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr == "regard compare: warning: one and two\nregard compare: warning: three\n"


def environment() -> dict[str, str]:
    """The environment of a process of its own, with this Regard."""
    return {**os.environ, "PYTHONPATH": str(Path(regard.__file__).parents[1])}
