"""The diagnostics of an encoder, against whole matrices of its eager form and the paper's definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, reduce
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor

from regard.continual.diagnostics import COLUMNS, DIAGNOSTICS, TOP, diagnose
from regard.errors import UserError

VOCABULARY, LAYERS, HEADS = 40, 2, 4
LENGTHS = (9, 4, 12, 7, 11)
COMMON = frozenset({1, 2, *range(10, 24)})
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": LAYERS}
BERT = SIZES | {
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
DEBERTA = BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
LLAMA = SIZES | {"num_attention_heads": HEADS, "num_key_value_heads": 2, "initializer_range": 0.5, "pad_token_id": 0}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": LAYERS, "num_heads": HEADS}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Bert": ("BertModel", "encoder.layer", BERT),
    "Roberta": ("RobertaModel", "encoder.layer", BERT),
    "Electra": ("ElectraModel", "encoder.layer", BERT | {"embedding_size": 8}),
    "DebertaV2": ("DebertaV2Model", "encoder.layer", DEBERTA),
    "Llama": ("LlamaModel", "layers", LLAMA),
    "T5": ("T5EncoderModel", "encoder.block", T5 | {"initializer_factor": 2.0, "pad_token_id": 0}),
}


def encoder(family: str = "Bert", **config: Any) -> Any:
    """A tiny random model with dropout, in train mode, in float64."""
    name, _, sizes = FAMILIES[family]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, f"{family}Config")(**sizes, **config))
    return model.double().train()


def samples(*, left: bool = False) -> list[dict[str, Tensor]]:
    """Batches of 2, 1 and 2 samples of unequal lengths, each padded to its longest."""
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(1, VOCABULARY, (length,), generator=draw) for length in LENGTHS]
    return [batch(part, left=left) for part in (rows[:2], rows[2:3], rows[3:])]


def batch(rows: list[Tensor], *, left: bool = False) -> dict[str, Tensor]:
    """The samples padded with zeros to the longest of them."""
    longest = max(map(len, rows))
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for number, row in enumerate(rows):
        at = slice(longest - len(row), longest) if left else slice(len(row))
        ids[number, at], mask[number, at] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def matrices(model: Any, blocks: str, given: dict[str, Tensor]) -> list[tuple[Tensor, list[Tensor], list[Tensor]]]:
    """Of each sample its ids, and by layer A (head, query, key) and the layer's output, over real tokens alone."""
    outputs: list[Tensor] = []
    layers = reduce(getattr, blocks.split("."), model)
    hooks = [
        layer.register_forward_hook(lambda _m, _a, out: outputs.append(out if isinstance(out, Tensor) else out[0]))
        for layer in layers
    ]
    before = model.config._attn_implementation
    model.eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**given, output_attentions=True).attentions
    model.set_attn_implementation(before)
    model.train()
    for hook in hooks:
        hook.remove()
    found = []
    for number, mask in enumerate(given["attention_mask"].bool()):
        maps = [layer[number][:, mask][:, :, mask] for layer in weights]
        found.append((given["input_ids"][number, mask], maps, [states[number, mask] for states in outputs]))
    return found


def sinks_of(matrix: Tensor, top: int) -> list[int]:
    """The keys of the greatest average outer degree d_i = (1/n) Σ_k a_ki."""
    degree = [sum(float(a) for a in column) / len(matrix) for column in matrix.T]
    return sorted(range(len(degree)), key=lambda i: -degree[i])[:top]


def deviation(matrix: Tensor, i: int) -> float:
    """Δ_i = √(Σ_k (a_ki − d_i)²) / (n d_i)."""
    n, column = len(matrix), [float(a) for a in matrix[:, i]]
    d = sum(column) / n
    return math.sqrt(sum((a - d) ** 2 for a in column)) / (n * d)


def smoothing(states: Tensor) -> float:
    """Mean over i ≠ j of cos(h_i, h_j)."""
    n = len(states)
    pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
    return sum(float(torch.cosine_similarity(states[i], states[j], dim=0)) for i, j in pairs) / len(pairs)


def largest(matrix: Tensor) -> float:
    """λ_max of Aᵀ(I − 11ᵀ/n)A."""
    n = len(matrix)
    centring = torch.eye(n, dtype=torch.float64) - torch.ones(n, n, dtype=torch.float64) / n
    return float(torch.linalg.eigvalsh(matrix.T @ centring @ matrix)[-1])


def lower(matrix: Tensor) -> float:
    """max_i Σ_k (a_ki − d_i)²."""
    return float((matrix - matrix.mean(0)).square().sum(0).max())


def mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found)


PLAIN: dict[str, Callable[[Tensor, Tensor, Tensor], float]] = {
    "sink_deviation": lambda ids, maps, h: mean(deviation(a, i) for a in maps for i in sinks_of(a, 1)),
    "sink_deviation_top5": lambda ids, maps, h: mean(deviation(a, i) for a in maps for i in sinks_of(a, TOP)),
    "common_sink_ratio": lambda ids, maps, h: mean(100 * (int(ids[i]) in COMMON) for a in maps for i in sinks_of(a, 1)),
    "common_sink_ratio_top5": lambda ids, maps, h: mean(
        100 * (int(ids[i]) in COMMON) for a in maps for i in sinks_of(a, TOP)
    ),
    "sink_degree": lambda ids, maps, h: mean(float(a[:, i].mean()) for a in maps for i in sinks_of(a, 1)),
    "sink_degree_top5": lambda ids, maps, h: mean(float(a[:, i].mean()) for a in maps for i in sinks_of(a, TOP)),
    "over_smoothing": lambda ids, maps, h: smoothing(h),
    "spectral_bound": lambda ids, maps, h: mean(largest(a) for a in maps),
    "lower": lambda ids, maps, h: mean(lower(a) for a in maps),
}


def plain(
    model: Any, blocks: str, batches: list[dict[str, Tensor]]
) -> dict[tuple[str, int | None], tuple[float, float]]:
    """Value and standard error over samples by statistic and layer, None being the mean over layers."""
    seen = [sample for given in batches for sample in matrices(model, blocks, given)]
    found = {}
    for name, function in PLAIN.items():
        numbers = [[function(ids, a, b) for a, b in zip(maps, h, strict=True)] for ids, maps, h in seen]
        table = torch.tensor(numbers, dtype=torch.float64)
        for layer, column in [*enumerate(table.T), (None, table.mean(1))]:
            found[name, layer] = (float(column.mean()), float(column.std() / len(column) ** 0.5))
    return found


@cache
def compared(family: str, left: bool) -> tuple[dict[tuple[str, int | None], tuple[float, float]], pd.DataFrame]:
    """What plain definitions and what `diagnose` find."""
    model = encoder(family)
    # Positions of Llama are relative; its eager form has no number for padding on the left.
    expected = plain(model, FAMILIES[family][1], samples(left=left and family != "Llama"))
    return expected, diagnose(model, samples(left=left), common=COMMON, statistics=(*DIAGNOSTICS, "sink_degree"))


CASES = [(family, False) for family in FAMILIES] + [("Bert", True), ("Llama", True)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("family, left", CASES)
def test_every_number_is_that_of_its_plain_definition(family: str, left: bool) -> None:
    expected, table = compared(family, left)
    assert tuple(table.columns) == COLUMNS
    rows = {(r.statistic, None if pd.isna(r.layer) else int(r.layer)): r for r in table.itertuples()}
    summaries = {key for key in expected if key[0].endswith("_top5") and key[1] is not None}
    assert rows.keys() == {key for key in expected if key[0] != "lower"} - summaries
    assert len(rows) == len(table)
    for key, row in rows.items():
        # Lanczos stops at 1e-6; the eager form of some families takes its softmax in float32.
        close = 1e-5 if key[0] == "spectral_bound" else 1e-7 if family == "Bert" else 1e-6
        assert (row.value, row.standard_error) == pytest.approx(expected[key], rel=close, abs=1e-9), key


@pytest.mark.parametrize("family", FAMILIES)
def test_the_case_decides_something(family: str) -> None:
    """Sinks that are common and others, deviations and bounds that differ between layers and between one and five."""
    _, table = compared(family, False)
    value = table.set_index([table["statistic"], table["layer"].fillna(-1)])["value"]
    assert 0 < value["common_sink_ratio", -1] < 100
    for name in set(DIAGNOSTICS) - {"common_sink_ratio"}:
        assert value[name, 0] != pytest.approx(value[name, 1], rel=1e-3)
    assert value["sink_deviation_top5", -1] != pytest.approx(value["sink_deviation", -1], rel=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spectral_bound_is_no_less_than_the_scatter_of_any_column(family: str) -> None:
    expected, table = compared(family, False)
    found = table[table["statistic"] == "spectral_bound"].sort_values("layer")["value"].tolist()
    for layer, value in zip((0, 1, None), found, strict=True):
        below = expected["lower", layer][0]
        assert 0.05 < below <= value


def test_uniform_attention_has_no_deviation_and_lets_nothing_through() -> None:
    model = encoder()
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight.zero_()
            layer.attention.self.query.bias.zero_()
    names = ("sink_deviation", "spectral_bound", "sink_degree")
    table = diagnose(model, samples(), common=COMMON, statistics=names).set_index("statistic")["value"]
    assert table["sink_deviation"].to_numpy() == pytest.approx(0, abs=1e-7)
    assert table["spectral_bound"].to_numpy() == pytest.approx(0, abs=1e-12)
    assert table["sink_degree"].to_numpy() == pytest.approx(mean(1 / n for n in LENGTHS))


def test_how_samples_are_batched_makes_no_difference() -> None:
    rows = [ids[mask.bool()] for given in samples() for ids, mask in zip(*given.values(), strict=True)]
    together = diagnose(encoder(), [batch(rows)], common=COMMON)
    apart = diagnose(encoder(), (batch([row]) for row in rows), common=COMMON)
    exact = ["sink_deviation", "sink_deviation_top5", "over_smoothing", "common_sink_ratio", "common_sink_ratio_top5"]
    pd.testing.assert_frame_equal(
        together[together["statistic"].isin(exact)], apart[apart["statistic"].isin(exact)], rtol=1e-10
    )
    pd.testing.assert_frame_equal(together, apart, rtol=1e-5)


def test_one_sample_has_no_standard_error() -> None:
    table = diagnose(encoder(), samples()[1:2], common=COMMON)
    assert table["value"].notna().all()
    assert table["standard_error"].isna().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_goes_on_as_if_nothing_had_looked(family: str) -> None:
    def gradients(*, looks: bool) -> tuple[dict[str, Tensor], Tensor]:
        model = encoder(family)
        for parameter in list(model.parameters())[::3]:
            parameter.requires_grad_(False)
        inner = list(model.modules())[-1]
        inner.training = False
        first, _, second = samples()
        torch.manual_seed(5)
        model(**first)[0].square().mean().backward()
        output = model(**second)[0]
        if looks:
            before = [module.training for module in model.modules()]
            implementation, chance = model.config._attn_implementation, torch.get_rng_state()
            hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
            diagnose(model, samples(), common=COMMON)
            assert [module.training for module in model.modules()] == before
            assert not all(before)
            assert model.config._attn_implementation == implementation
            assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
            assert torch.equal(torch.get_rng_state(), chance)
            assert torch.is_grad_enabled()
        output.square().mean().backward()
        after = model(**first)[0]
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, after

    alone, output = gradients(looks=False)
    looked_at, same = gradients(looks=True)
    assert looked_at.keys() == alone.keys()
    assert alone
    assert all(torch.equal(looked_at[name], gradient) for name, gradient in alone.items())
    assert torch.equal(output, same)


def test_modes_and_chance_are_restored_after_a_mistake() -> None:
    model, chance = encoder(), torch.get_rng_state()
    with pytest.raises(IndexError):
        diagnose(model, [{"input_ids": torch.tensor([[VOCABULARY]])}], common=COMMON)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), chance)
    assert model.config._attn_implementation != "regard"


def test_chance_is_restored_though_an_encoder_draws_from_it() -> None:
    model = encoder()
    drawn: list[Tensor] = []
    model.register_forward_pre_hook(lambda module, given: drawn.append(torch.rand(1)))
    chance = torch.get_rng_state()
    diagnose(model, samples(), common=COMMON)
    assert torch.equal(torch.get_rng_state(), chance)
    assert drawn


def test_segments_are_handed_on() -> None:
    given = samples()[1]
    other = given | {"token_type_ids": torch.ones_like(given["input_ids"])}
    plain, segmented = (diagnose(encoder(), [one], common=COMMON)["value"] for one in (given, other))
    assert not torch.allclose(torch.tensor(plain.to_numpy()), torch.tensor(segmented.to_numpy()), rtol=1e-3)


def test_only_what_is_asked_for_is_measured() -> None:
    table = diagnose(encoder(), samples(), common=frozenset(), statistics=["over_smoothing", "common_sink_ratio"])
    assert set(table["statistic"]) == {"over_smoothing", "common_sink_ratio", "common_sink_ratio_top5"}
    assert set(table[table["statistic"] != "over_smoothing"]["value"]) == {0.0}


@pytest.mark.parametrize(
    "names, came", [(["entropy"], "'entropy'"), ([], "none"), (["sink_deviation", "x"], "got 'x'")]
)
def test_an_unknown_statistic_is_refused(names: list[str], came: str) -> None:
    with pytest.raises(UserError, match=rf"^statistics: expected some of sink_deviation, .*{came}$"):
        diagnose(encoder(), samples(), common=COMMON, statistics=names)


def test_no_samples_are_refused() -> None:
    with pytest.raises(UserError, match=r"^batches: expected at least one .*, got none$"):
        diagnose(encoder(), [], common=COMMON)


def test_samples_without_ids_have_no_common_sinks() -> None:
    vectors = {"inputs_embeds": torch.randn(1, 6, 16, dtype=torch.float64)}
    with pytest.raises(UserError, match=r"^batches: expected input_ids .*common_sink_ratio"):
        diagnose(encoder(), [vectors], common=COMMON)
    assert len(diagnose(encoder(), [vectors], common=COMMON, statistics=["over_smoothing"])) == LAYERS + 1


def test_a_decoder_beside_the_encoder_is_refused() -> None:
    model = transformers.T5Model(transformers.T5Config(**FAMILIES["T5"][2]))
    with pytest.raises(UserError, match=r"^encoder: expected an encoder alone, got T5Model"):
        diagnose(model, samples(), common=COMMON)
    assert len(diagnose(model.get_encoder(), samples(), common=COMMON, statistics=["over_smoothing"])) == LAYERS + 1
