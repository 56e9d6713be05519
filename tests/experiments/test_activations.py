"""Keys, values and angles of the first token: how they are measured, and what the claims make of them."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AttentionInterface

from experiments.common.claims import AGAINST, AS_PUBLISHED, IN_PART, NOT_RUN, UNDECIDED, judge_claims
from experiments.sinks import activations
from experiments.sinks.claims import CLAIMS
from experiments.sinks.page import describe_activations
from experiments.sinks.tables import ACTIVATIONS, SINKING, SINKLESS, Tables
from regard.models import RegardConfig, RegardForCausalLM
from regard.runs.intervals import t_interval

EPSILON = 0.3


def test_heads_are_measured_as_the_formulas_say() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 30, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = RegardForCausalLM(RegardConfig(**sizes, num_attention_heads=4, max_position_embeddings=16)).eval()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight *= 8  # so that some heads are sure of a token
    ids = torch.randint(0, 30, (6, 9))
    table = activations.measure_heads(model, ids, epsilon=EPSILON)
    assert table.index.tolist() == [(layer, head) for layer in range(2) for head in range(4)]

    seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    kept = AttentionInterface()["sdpa"]

    def keep(module: torch.nn.Module, *vectors: torch.Tensor, **options: Any) -> Any:
        query, key, value = vectors[:3]
        seen.append((query.double(), key.double(), value.double()))
        return kept(module, *vectors, **options)

    AttentionInterface.register("kept", keep)
    model.set_attn_implementation("kept")
    with torch.no_grad():
        model(input_ids=ids)
    for layer, (query, key, value) in enumerate(seen):
        causal = torch.ones(9, 9).tril().bool()
        products = query @ key.mT
        lengths = query.norm(dim=-1)[..., None] * key.norm(dim=-1)[..., None, :]
        weights = (products / query.shape[-1] ** 0.5).masked_fill(~causal, float("-inf")).softmax(-1)
        alpha = weights.sum(2)[..., 0] / 9
        for head in range(4):
            found = table.loc[(layer, head)]
            assert found["sink_rate"] == pytest.approx(100 * float((alpha[:, head] > EPSILON).double().mean()))
            for name, vectors in (("key_norm", key), ("value_norm", value)):
                norms = vectors[:, head].norm(dim=-1).mean(0)
                assert found[name] == pytest.approx(float(norms[0] / norms[1:].mean()), rel=1e-5)
            late = causal.clone()
            late[:, 0] = False
            of_pairs = lengths[:, head]
            assert found["qk_norm"] == pytest.approx(
                float(of_pairs[..., 0].mean() / of_pairs[:, late].mean()), rel=1e-5
            )
            cosines = (products / lengths)[:, head]
            assert found["cosine_first"] == pytest.approx(float(cosines[..., 0].mean()), abs=1e-6)
            assert found["cosine_others"] == pytest.approx(float(cosines[:, late].mean()), abs=1e-6)


def runs_with(**columns: Sequence[float]) -> Tables:
    """Runs of softmax whose heads have these numbers, one a seed."""
    seeds = len(next(iter(columns.values())))
    given = {name: columns.get(name, [1.0] * seeds) for name in activations.COLUMNS[5:]}
    table = pd.DataFrame(
        {"row": "softmax", "seed": range(seeds), "sink_rate": 40.0, "heads": SINKING, "count": 2, **given}
    )
    ends = pd.DataFrame({"row": ["softmax"], "seed": [0]})
    return Tables(ends, pd.DataFrame(), {"softmax": {}}, {}, table)


CASES = [
    ("keys of the first", {"key_norm": (0.5, 0.6, 0.7)}, AS_PUBLISHED),
    ("keys of the first", {"key_norm": (1.5, 1.6, 1.7)}, AGAINST),
    ("keys of the first", {"key_norm": (0.2, 0.9, 1.4)}, UNDECIDED),
    ("keys of the first", {"key_norm": (0.5, 0.6)}, UNDECIDED),
    ("values of the first", {"value_norm": (0.5, 0.6, 0.7)}, AS_PUBLISHED),
    (
        "in angle",
        {"cosine_first": (0.5, 0.6, 0.7), "cosine_others": (0.1, 0.2, 0.2), "qk_norm": (0.8, 0.9, 0.85)},
        AS_PUBLISHED,
    ),
    (
        "in angle",
        {"cosine_first": (0.5, 0.6, 0.7), "cosine_others": (0.1, 0.2, 0.2), "qk_norm": (1.8, 1.9, 1.85)},
        IN_PART,
    ),
    (
        "in angle",
        {"cosine_first": (0.1, 0.2, 0.2), "cosine_others": (0.5, 0.6, 0.7), "qk_norm": (1.8, 1.9, 1.85)},
        AGAINST,
    ),
]


@pytest.mark.parametrize("claim, columns, verdict", CASES)
def test_claims_are_decided_by_intervals_over_seeds(
    claim: str, columns: dict[str, Sequence[float]], verdict: str
) -> None:
    asked = [one for one in CLAIMS if claim in one.text]
    (judged,) = judge_claims(asked, runs_with(**columns))
    assert judged.word == verdict, judged.evidence
    (absent,) = judge_claims(asked, dataclasses.replace(runs_with(**columns), activations=None))
    assert absent.word == NOT_RUN


def test_seeds_without_such_heads_are_left_out_and_counted() -> None:
    tables = runs_with(key_norm=(0.5, 0.6, 0.7))
    assert tables.activations is not None
    rest = tables.activations.iloc[:2].assign(heads=SINKLESS, key_norm=[2.0, 4.0], count=14)
    tables = dataclasses.replace(tables, activations=pd.concat([tables.activations, rest]))
    table, _ = describe_activations(tables)
    assert not isinstance(table, str)
    half = t_interval([0.5, 0.6, 0.7]).ci_high - 0.6
    assert table.rows[0][:4] == ["softmax, heads with a sink", "40.0, 40.0, 40.0", "2, 2, 2", f"0.60 ± {half:.2f}"]
    assert table.rows[1][:3] == ["softmax, heads without", "40.0, 40.0", "14, 14"]
    assert table.rows[1][3].startswith("3.00 ± ")
    assert describe_activations(dataclasses.replace(tables, activations=None)) == []


def test_the_command_groups_heads_by_their_own_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(work: Path, row: str, seed: int) -> pd.DataFrame:
        rates = [4.9, 5.0, 60.0] if row == "softmax" else [0.0, 0.0, 0.0]
        return pd.DataFrame({"sink_rate": rates, **{name: np.arange(3.0) + seed for name in activations.COLUMNS[5:]}})

    monkeypatch.setattr(activations, "measure_model", measured)
    assert activations.main(["--work", str(tmp_path), "--out", str(tmp_path), "--seeds", "2"]) == 0
    table = pd.read_csv(tmp_path / ACTIVATIONS)
    assert table.columns.tolist() == list(activations.COLUMNS)
    assert table["sink_rate"].tolist() == pytest.approx([23.3] * 4 + [0.0] * 2)
    assert table[["row", "heads", "count"]].drop_duplicates().to_numpy().tolist() == [
        ["softmax", SINKING, 2],
        ["softmax", SINKLESS, 1],
        ["sigmoid", SINKLESS, 3],
    ]
    assert table.query("row == 'softmax' and seed == 1").set_index("heads")["key_norm"].to_dict() == {
        SINKING: 2.5,
        SINKLESS: 1.0,
    }


def test_a_missing_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert activations.main(["--work", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / ACTIVATIONS).exists()
