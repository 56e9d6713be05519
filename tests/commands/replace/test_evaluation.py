"""The cost of a forward at each fraction, of times that are given."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from regard.commands.replace import evaluation
from regard.commands.replace.evaluation import HeadEvaluation
from regard.commands.replace.ranking import HeadRanking
from regard.constants import Constants, Origin
from regard.runs.journal import Journal


@pytest.mark.every_value
@pytest.mark.parametrize("has_original", [True, False])
def test_times_are_relative_to_the_original_of_the_same_round(
    has_original: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10, 20, 10 and 40 ms untouched, 5, 14, 9 and 8 replaced: 0.5, 0.7, 0.9 and 0.2."""
    untouched, replaced = [10.0, 20.0, 10.0, 40.0], [5.0, 14.0, 9.0, 8.0]
    rounds = [time for pair in zip(untouched, replaced, strict=True) for time in pair] if has_original else replaced
    times = iter(rounds)
    monkeypatch.setattr(evaluation, "TIMED", 4)
    monkeypatch.setattr(evaluation, "_milliseconds", lambda *_: next(times))
    monkeypatch.setattr(evaluation, "_flops", lambda *_: 7.0)
    monkeypatch.setattr(evaluation, "read_batches", lambda _: iter([{}]))
    monkeypatch.setattr(HeadEvaluation, "_replaced", lambda *_: torch.enable_grad())
    evaluator: Any = SimpleNamespace(model=nn.Identity(), validation_rows=None)
    run = HeadEvaluation(evaluator, None, None, Journal(tmp_path / "journal.jsonl"), tmp_path, print, print)
    constants = Constants(matrices={("encoder", 0): torch.eye(2)[None]}, origin=Origin(source="identity"))
    fractions = [1.0, 0.0] if has_original else [0.0]
    *first, found = run.cost(constants, HeadRanking((("encoder", 0, 0),), (1.0,)), fractions)
    assert first == ([(1.0, 15.0, 1.0, 1.0, 1.0, 7.0)] if has_original else [])
    relative = [0.6, 0.425, 0.75] if has_original else [math.nan] * 3
    assert found == pytest.approx((0.0, 8.5, *relative, 7.0), nan_ok=True)
