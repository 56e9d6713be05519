"""What a sink is for: what is hidden and pruned, and the page of it."""

from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import pytest
import torch

import regard
from experiments.sinks import causes
from experiments.sinks.causes import ANOTHER, FIRST, KEPT, PRUNED, RANDOM, WHOLE, WINDOW, Hide, interventions, loss
from experiments.sinks.causes_page import Tables, _format_cell, cost_table, difference_table, make_page
from regard.errors import UserError
from regard.models import RegardConfig, RegardForCausalLM
from regard.runs.intervals import t_interval

LOSSES = {WHOLE: 4.0, WINDOW: 4.5, KEPT: 4.1, FIRST: 4.4, ANOTHER: 4.0, PRUNED: 4.0, RANDOM: 4.2}


def make_model() -> RegardForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = RegardForCausalLM(RegardConfig(**sizes, num_attention_heads=4, max_position_embeddings=16))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[:, :8] *= 0.01  # the first head is dormant
    return model.eval()


def test_a_hidden_token_is_seen_by_its_own_query_alone() -> None:
    weights = Hide(2)(torch.zeros(1, 1, 5, 5), torch.ones(5, 5).tril().bool())[0, 0]
    assert weights[2].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    assert weights[4].tolist() == pytest.approx([0.25, 0.25, 0, 0.25, 0.25])


def test_each_intervention_is_what_it_is_called() -> None:
    model, ids = make_model(), torch.randint(0, 30, (6, 14))
    whole = loss(model, ids, nullcontext())
    logits = model(ids).logits.detach()
    expected = torch.nn.functional.cross_entropy(logits[:, 7:-1].flatten(0, 1), ids[:, 8:].flatten())
    assert whole == pytest.approx(float(expected), abs=1e-6)
    found = [(name, heads, loss(model, ids, state)) for name, heads, state in interventions(model, ids, seed=0)]
    assert [name for name, _, _ in found] == [WHOLE, WINDOW, KEPT, FIRST, ANOTHER, PRUNED, *[RANDOM] * causes.DRAWS]
    assert {heads for name, heads, _ in found if name in (PRUNED, RANDOM)} == {2}
    assert len({round(value, 6) for _, _, value in found[:6]}) == 6
    with regard.replacing(model, "zeros", heads=[(0, 0), (1, 0)]):
        pruned = loss(model, ids, nullcontext())
    assert found[5][2] == pytest.approx(pruned, abs=1e-6)


@pytest.mark.parametrize("count, told", [(1, "(1 seed)"), (2, "(2 seeds)")])
def test_too_few_seeds_are_counted(count: int, told: str) -> None:
    assert _format_cell(t_interval([0.1] * count)).endswith(told)


def test_the_page_says_what_costs_more(tmp_path: Path) -> None:
    lines = [
        {
            "row": "softmax",
            "seed": seed,
            "intervention": name,
            "loss": value + 0.01 * seed,
            "heads": 2,
            "sink_rate": 40.0,
        }
        for name, value in LOSSES.items()
        for seed in range(3)
    ]
    lines[5]["loss"] += 0.001  # the window's costs differ by seed
    pd.DataFrame(lines)[list(causes.COLUMNS)].to_csv(tmp_path / causes.TABLE, index=False)
    (tmp_path / causes.RECORD).write_text('{"sequences": 10, "keys": 8, "dormant": 0.5, "draws": 5}', encoding="utf-8")
    tables = Tables.load(tmp_path)
    row = dict(zip(cost_table(tables).head, cost_table(tables).rows[0], strict=True))
    assert row["Sink₁ % by seed"] == "40.0, 40.0, 40.0"
    assert row[WINDOW] == "+0.500 ± 0.001"
    assert row[KEPT] == "+0.100"  # the same for every seed: no interval
    assert difference_table(tables).rows[0][:2] == ["softmax", "+0.400 ± 0.001\\*"]
    assert "# What a sink is for" in make_page(tables).to_markdown()
    with pytest.raises(UserError, match=r"no runs of experiments\.sinks\.causes"):
        Tables.load(tmp_path / "none")
