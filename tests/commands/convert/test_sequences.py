"""Sequences of a conversion: every text in them begins as the tokenizer begins a text."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.commands.convert.held_out import HeldOutLoss
from regard.commands.convert.sequences import Sequences

BOS, EOS, MARK = 1, 2, 9


def begun(rows: list[list[int]], start: tuple[int, ...], eos: int = EOS) -> list[list[int]]:
    draw: Any = None
    found: list[list[int]] = Sequences(draw, start, eos).begin(torch.tensor(rows)).tolist()
    return found


def test_each_text_within_a_row_begins_with_what_the_tokenizer_puts_before_a_text() -> None:
    rows = [[5, 6, EOS, 7, 8, EOS], [EOS, 5, EOS, EOS, 6, 7], [3, 4, 5, 6, 7, 8]]
    assert begun(rows, (BOS,)) == [
        [BOS, 5, 6, EOS, BOS, 7, 8],
        [BOS, EOS, BOS, 5, EOS, BOS, EOS],
        [BOS, 3, 4, 5, 6, 7, 8],
    ]
    assert begun(rows[:1], (BOS, MARK)) == [[BOS, MARK, 5, 6, EOS, BOS, MARK, 7]]


def test_a_run_is_of_sequences_with_their_beginnings() -> None:
    """What an earlier version began without them does not go on with them."""
    draw: Any = None
    assert Sequences(draw, (BOS, MARK), EOS).identity() == {"texts_begin_with": [BOS, MARK]}
    assert Sequences(draw, (EOS,), EOS).identity() == Sequences(draw, (), EOS).identity() == {}


def test_a_tokenizer_that_puts_nothing_before_a_text() -> None:
    assert begun([[5, EOS, 6]], ()) == [[5, EOS, 6]]


def test_texts_that_begin_with_what_ends_them_are_parted_by_one_token() -> None:
    """As of OPT, whose texts begin and end with </s>."""
    assert begun([[5, EOS, 6]], (EOS,)) == [[EOS, 5, EOS, 6]]


def test_held_out_losses_of_the_weights_before_a_stage_are_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []

    def note(model: Any, rows: torch.Tensor) -> list[float]:
        measured.append(model)
        return [4.0, 5.0, 9.0]

    monkeypatch.setattr("regard.commands.convert.held_out.row_losses", note)
    domains = {"one": torch.zeros(2, 4, dtype=torch.long), "two": torch.zeros(1, 4, dtype=torch.long)}
    monitor, model = HeldOutLoss(domains, every=2, before=[1.0, 2.0, 6.0]), SimpleNamespace()
    assert monitor(model, 0) == {"valid_loss": 3.0, "valid_loss.one": 1.5, "valid_loss.two": 6.0}
    assert not measured
    assert monitor(model, 2) == {"valid_loss": 6.0, "valid_loss.one": 4.5, "valid_loss.two": 9.0}
    assert monitor.losses_at(2) == [4.0, 5.0, 9.0]
    assert monitor.losses_at(3) is None
    assert [monitor.due(step, last=step == 3) for step in range(4)] == [True, False, True, True]
