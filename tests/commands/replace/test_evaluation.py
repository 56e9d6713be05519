"""The cost of a forward at each fraction, of times that are given, and the likelihood of text."""

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from regard.commands.replace import evaluation
from regard.commands.replace.evaluation import HeadEvaluation
from regard.commands.replace.evaluators import PerplexityEvaluator
from regard.commands.replace.ranking import HeadRanking
from regard.constants import Constants, Origin
from regard.data import Encoded
from regard.errors import UserError
from regard.models import RegardConfig, RegardForCausalLM
from regard.runs.journal import Journal
from regard.training import ProbeConfig


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


def test_what_a_prefix_shows_is_not_predicted() -> None:
    """The model sees these tokens: their likelihood made its score too good."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = RegardForCausalLM(RegardConfig(vocab_size=20, num_attention_heads=2, attention={"prefix": 4}, **sizes))
    ids, mask = torch.randint(0, 20, (3, 9)), torch.ones(3, 9, dtype=torch.bool)
    mask[2, 6:] = False
    rows = Encoded(ids, mask, None, ids, "natural", 9, (), 0, mask.sum(1))
    settings = ProbeConfig(learning_rate=0.1, batch_size=2, epochs=1)
    evaluator = PerplexityEvaluator(model, rows, rows, settings)
    with torch.no_grad():
        logs = model.eval()(ids, attention_mask=mask).logits.log_softmax(-1)
    expected = [
        -sum(float(logs[row, t - 1, ids[row, t]]) for t in range(4, count)) for row, count in enumerate((9, 9, 6))
    ]
    assert evaluator.tokens == [5, 5, 2]
    assert evaluator.window_losses() == pytest.approx(expected, rel=1e-5)
    few = replace(rows, input_ids=ids[:, :4], attention_mask=mask[:, :4], length=4)
    with pytest.raises(UserError, match="length: expected 2 tokens or more for perplexity"):
        PerplexityEvaluator(model, few, few, settings)


def test_a_batch_of_which_a_prefix_shows_all_tokens_trains_nothing() -> None:
    """The mean of no losses is no number, and the run ended with advice to lower the rate."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    model = RegardForCausalLM(RegardConfig(vocab_size=20, num_attention_heads=2, attention={"prefix": 4}, **sizes))
    ids, mask = torch.randint(0, 20, (3, 9)), torch.ones(3, 9, dtype=torch.bool)
    mask[1:, 4:] = False
    rows = Encoded(ids, mask, None, ids, "natural", 9, (), 0, mask.sum(1))
    settings, losses = ProbeConfig(learning_rate=0.1, batch_size=1, epochs=1), list[float]()
    evaluator, weight = PerplexityEvaluator(model, rows, rows, settings), model.lm_head.weight
    expected = evaluator.window_losses()[0] / 5
    before = weight.detach().clone()
    evaluator.train([weight], 0, None, lambda _epoch, _epochs, loss: losses.append(loss))
    assert losses == pytest.approx([expected], rel=1e-5)
    assert bool(weight.isfinite().all())
    assert not torch.equal(weight, before)
    none = replace(rows, attention_mask=mask & (torch.arange(9) < 4))
    with pytest.raises(UserError, match="training: expected at least one batch with labels, got none"):
        PerplexityEvaluator(model, none, rows, settings).train([weight], 0, None, lambda *_: None)
