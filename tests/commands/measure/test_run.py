"""The verb `measure` from Python, held against the matrices that an eager forward of the same windows shows."""

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BartForConditionalGeneration,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
)

import regard
from regard import UserError, data, models
from regard.commands.measure.config import MeasureConfig
from regard.commands.measure.result import MeasureResult
from regard.statistics import ALL, DEFAULT, STATISTICS, SinkRate
from regard.statistics.table import COLUMNS, filter_statistic

Tiny = Callable[[str], Path]
Matrices = dict[str, Tensor]

KINDS = ("llama", "bert", "t5", "bart")
SITES = {"llama": frozenset({"decoder"}), "bert": frozenset({"encoder"})} | dict.fromkeys(
    ("t5", "bart"), frozenset({"encoder", "decoder", "cross"})
)
START = {"t5": 0, "bart": 7}
AXES = ["statistic", "site", "layer", "head", "position", "epsilon"]
LENGTH, SAMPLES = 20, 7


def measured(folder: Path, documents: Sequence[str], **settings: Any) -> MeasureResult:
    """What the model in the folder does, in float64 unless a dtype is asked for."""
    loaded = models.load(str(folder), device="cpu", dtype=settings.pop("dtype", "float64"))
    texts = documents if settings.get("input", "natural") == "natural" else None
    return regard.measure(loaded, texts=texts, **{"samples": SAMPLES, "length": LENGTH, **settings})


def windows(folder: Path, documents: Sequence[str], **settings: Any) -> Tensor:
    """The token ids that such a run reads."""
    tokenizer = models.load(str(folder), device="cpu").tokenizer
    kind = settings.pop("input", "natural")
    settings = {"samples": SAMPLES, "length": LENGTH, **settings}
    if kind == "natural":
        return data.make_text_windows(documents, tokenizer, **settings).input_ids
    make = {"random": data.make_random_windows, "repeated": data.make_repeated_windows}[kind]
    return make(tokenizer, **settings).input_ids


def eager(folder: Path, ids: Tensor) -> Matrices:
    """The weights (layer, sample, head, query, key) by site."""
    loaded = models.load(str(folder), device="cpu", dtype="float64", attn_implementation="eager")
    start = START.get(folder.name)
    with torch.no_grad():
        if start is None:
            (site,) = SITES[folder.name]
            return {site: torch.stack(loaded.model(input_ids=ids, output_attentions=True).attentions)}
        decoder = torch.cat([torch.full_like(ids[:, :1], start), ids[:, :-1]], dim=1)
        output = loaded.model(input_ids=ids, decoder_input_ids=decoder, output_attentions=True)
    shown = {"encoder": output.encoder_attentions, "decoder": output.decoder_attentions}
    return {site: torch.stack(layers) for site, layers in {**shown, "cross": output.cross_attentions}.items()}


def values(found: MeasureResult, statistic: str, **equal: Any) -> Tensor:
    return torch.tensor(found.frame(statistic, **equal)["value"].to_numpy(), dtype=torch.float64)


def assert_as_eager(found: MeasureResult, of_site: Matrices, epsilon: float) -> None:
    """Column mass with its error, entropy, and the sink rate of the whole model, from the matrices themselves."""
    for site, weights in of_site.items():
        layers, samples, heads, queries, keys = weights.shape
        degree = weights.mean(-2)
        mass = found.frame("column_mass", site=site)
        shape = (layers, heads, keys)
        assert len(mass) == layers * heads * keys
        for column, expected in (("value", degree.mean(1)), ("standard_error", degree.std(1) / samples**0.5)):
            there = torch.tensor(mass[column].to_numpy(dtype=float), dtype=torch.float64)
            torch.testing.assert_close(there.reshape(shape), expected, rtol=1e-5, atol=1e-7)
        entropy = torch.special.entr(weights).sum(-1).mean((1, 3))
        whole = values(found, "entropy", site=site, position=None).reshape(layers, heads)
        torch.testing.assert_close(whole, entropy, rtol=1e-5, atol=1e-6)
        able = queries - torch.arange(keys) if site == "decoder" else torch.full((keys,), queries)
        rate = 100.0 * (weights.sum(-2) / able.clamp(min=1) > epsilon).double().mean((0, 1, 2))
        model = found.frame("sink_rate", site=site, layer=None, epsilon=epsilon)
        assert model["position"].tolist() == [k for k in range(keys) if able[k] >= 8]
        torch.testing.assert_close(torch.tensor(model["value"].to_numpy(dtype=float)), rate[able >= 8])


def assert_same(a: MeasureResult, b: MeasureResult, tolerance: float) -> None:
    one, other = (run.table.sort_values(AXES).reset_index(drop=True) for run in (a, b))
    pd.testing.assert_frame_equal(one, other, check_exact=False, rtol=tolerance, atol=tolerance)


def rows_of(statistic: str, table: pd.DataFrame) -> pd.Series:
    return (table["statistic"] == statistic) | table["statistic"].str.startswith(f"{statistic}_")


# -- the table ------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_holds_every_statistic_and_nothing_else(kind: str, tiny: Tiny, documents: list[str]) -> None:
    found = measured(tiny(kind), documents, statistics="all", epsilon=(0.1, 0.3))
    table = found.table
    assert tuple(table.columns) == COLUMNS
    whole, real = ("layer", "head", "position", "n"), ("epsilon", "value", "standard_error")
    assert {column: str(table[column].dtype) for column in (*whole, *real)} == {
        **dict.fromkeys(whole, "Int64"),
        **dict.fromkeys(real, "float64"),
    }
    owned = {name: rows_of(name, table) for name in ALL if name != "modality_mass"}  # they read text alone
    assert [name for name, rows in owned.items() if not rows.any()] == []
    assert pd.concat(owned.values(), axis=1).sum(axis=1).eq(1).all()
    assert set(table["site"]) == SITES[kind]
    assert table["value"].notna().all()
    assert not table.duplicated(AXES).any()
    is_partial = table["statistic"].str.startswith(("massive_activations", "sinks_by_token_class"))
    assert table["n"][~is_partial].eq(SAMPLES).all()
    assert table["n"].between(1, SAMPLES).all()
    thresholded = table["statistic"].isin(["sink_rate", "secondary_sinks"])
    thresholded |= table["statistic"].str.match("sinks_by_token_class_.*share")
    assert table["epsilon"].notna().eq(thresholded).all()
    assert set(table["epsilon"].dropna()) == {0.1, 0.3}
    layers = 3 if kind in ("llama", "bert") else 2
    assert set(table["layer"].dropna()) == set(range(-1, layers))
    assert set(table["head"].dropna()) == set(range(4))
    assert found.frame("sink_rate", layer=None)["value"].between(0, 100).all()


def test_only_what_was_asked_for(tiny: Tiny, documents: list[str]) -> None:
    found = measured(tiny("llama"), documents, statistics=["entropy", "over_smoothing"])
    assert set(found.table["statistic"]) == {"entropy", "over_smoothing"}
    assert found.tokens is None
    assert found.matrices == {}
    default = measured(tiny("llama"), documents)
    assert [name for name in STATISTICS if rows_of(name, default.table).any()] == [
        n for n in STATISTICS if n in DEFAULT
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_the_eager_matrices(kind: str, tiny: Tiny, documents: list[str]) -> None:
    ids = windows(tiny(kind), documents)
    assert_as_eager(measured(tiny(kind), documents), eager(tiny(kind), ids), 0.3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "settings",
    [{"bos": "drop"}, {"bos": "add"}, {"input": "random"}, {"input": "repeated", "bos": "drop"}, {"seed": 5}],
    ids=str,
)
def test_the_numbers_of_other_windows(settings: dict[str, Any], tiny: Tiny, documents: list[str]) -> None:
    """T5's tokenizer puts nothing before a text, so that keep, drop and add differ between it and Llama."""
    for kind in ("llama", "t5"):
        ids = windows(tiny(kind), documents, **settings)
        assert_as_eager(measured(tiny(kind), documents, **settings), eager(tiny(kind), ids), 0.3)
        begins_with_bos = bool((ids[:, 0] == 1).all())
        assert begins_with_bos == (settings.get("bos") == "add" or (kind == "llama" and "bos" not in settings))


def test_the_mean_attention_and_the_sink_tokens(tiny: Tiny, documents: list[str]) -> None:
    found = measured(tiny("bert"), documents, statistics="input_dependence,sink_tokens")
    ids = windows(tiny("bert"), documents)
    weights = eager(tiny("bert"), ids)["encoder"]
    assert set(found.matrices) == {"encoder.0", "encoder.1", "encoder.2"}
    for layer in range(3):
        torch.testing.assert_close(
            found.matrices[f"encoder.{layer}"].double(), weights[layer].mean(0), atol=1e-6, rtol=0
        )
    strongest = weights.mean(-2).argmax(-1)
    tokenizer = models.load(str(tiny("bert"))).tokenizer
    assert found.tokens is not None
    first = found.tokens[(found.tokens["layer"] == 1) & (found.tokens["head"] == 2)]
    expected = pd.Series(
        [(int(at), tokenizer.convert_ids_to_tokens(int(ids[row, at]))) for row, at in enumerate(strongest[1, :, 2])]
    ).value_counts()
    assert dict(zip(zip(first["position"], first["token"], strict=True), first["count"], strict=True)) == dict(expected)
    assert first["share"].sum() == pytest.approx(1)


# -- what the numbers depend on -------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_the_numbers_do_not_depend_on_the_batch_size(kind: str, tiny: Tiny, documents: list[str]) -> None:
    one = measured(tiny(kind), documents, statistics="all", batch_size=1)
    for rows in (3, 100):
        other = measured(tiny(kind), documents, statistics="all", batch_size=rows)
        assert_same(one, other, 1e-6)
        assert one.tokens is not None
        pd.testing.assert_frame_equal(one.tokens, other.tokens)
        assert other.metadata["cost"]["batch_size"] == rows


@pytest.mark.exhaustive
def test_a_seed_gives_the_same_numbers_and_another_others(tiny: Tiny, documents: list[str]) -> None:
    for text in ("natural", "random", "repeated"):
        first, same, other = (
            measured(tiny("llama"), documents, statistics="column_mass", input=text, seed=seed) for seed in (3, 3, 4)
        )
        pd.testing.assert_frame_equal(first.table, same.table)
        assert not first.table["value"].equals(other.table["value"])


def test_some_layers_only(tiny: Tiny, documents: list[str]) -> None:
    whole = measured(tiny("llama"), documents, statistics="all")
    some = measured(tiny("llama"), documents, statistics="all", layer_ids=[2, 0, 2])
    assert set(some.table["layer"].dropna()) - {-1} == {0, 2}
    assert some.metadata["config"]["layer_ids"] == [2, 0]

    def of_layers(found: MeasureResult) -> pd.DataFrame:
        table = found.table[found.table["layer"].isin([0, 2])]
        return table.sort_values(AXES).reset_index(drop=True)

    pd.testing.assert_frame_equal(of_layers(some), of_layers(whole))
    by_head = some.frame("sink_rate", position=0)
    overall = by_head[by_head["layer"].isna()]["value"].item()
    assert overall == pytest.approx(by_head[by_head["layer"].notna()]["value"].mean())


def test_several_thresholds(tiny: Tiny, documents: list[str]) -> None:
    several = measured(tiny("bert"), documents, statistics="sink_rate", epsilon=[0.2, 0.05, 0.2])
    assert several.metadata["config"]["epsilon"] == [0.2, 0.05]
    for epsilon in (0.2, 0.05):
        alone = measured(tiny("bert"), documents, statistics="sink_rate", epsilon=epsilon)
        pd.testing.assert_frame_equal(several.frame("sink_rate", epsilon=epsilon), alone.table)
    assert not several.frame(epsilon=0.2)["value"].equals(several.frame(epsilon=0.05)["value"])


def test_a_model_and_its_tokenizer_as_the_user_holds_them(tiny: Tiny, documents: list[str]) -> None:
    """In training mode, with dropout: it is measured as in evaluation, and left as it was."""
    loaded = models.load(str(tiny("bert")), device="cpu", dtype="float64")
    expected = measured(tiny("bert"), documents)
    model = loaded.model.train()
    model.pooler.eval()  # type: ignore[union-attr, operator]
    before = [module.training for module in model.modules()]
    implementation, hooks = model.config._attn_implementation, len(model._forward_hooks)
    found = regard.measure(model, loaded.tokenizer, documents, samples=SAMPLES, length=LENGTH)
    assert_same(found, expected, 1e-12)
    assert [module.training for module in model.modules()] == before
    assert (model.config._attn_implementation, len(model._forward_hooks)) == (implementation, hooks)
    assert torch.is_grad_enabled()
    assert found.metadata["model"]["sha256"] is None
    assert found.metadata["data"]["source"] == "given in Python"


def test_conversations_are_measured_as_their_chat_template_writes_them(
    tiny: Tiny, documents: list[str], tmp_path: Path
) -> None:
    (tmp_path / "chat.jinja").write_text("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}")
    talks = [[{"role": role, "content": text[:400]}] for role, text in zip("ab", documents, strict=False)]
    options: dict[str, Any] = {"samples": 2, "length": 12, "statistics": ["column_mass", "entropy"]}
    template = str(tmp_path / "chat.jinja")
    found = measured(tiny("llama"), talks, chat_template=template, **options)  # type: ignore[arg-type]
    loaded = models.load(str(tiny("llama")), device="cpu", dtype="float64", attn_implementation="eager")
    texts = [f"{talk[0]['role']}: {talk[0]['content']}" for talk in talks]
    beginnings = [loaded.tokenizer(text, verbose=False).input_ids[:12] for text in texts]
    with torch.no_grad():
        layers = loaded.model(torch.tensor(beginnings), output_attentions=True).attentions
    masses = torch.stack([layer.mean(2) for layer in layers]).mean(1)
    rows = found.frame("column_mass").dropna(subset=["head", "position"])
    actual = torch.tensor(rows["value"].to_numpy()).reshape(masses.shape)
    torch.testing.assert_close(actual, masses, rtol=1e-5, atol=1e-7)  # its softmax is of float32
    about = found.metadata["data"]
    assert about["chat_template_sha256"] == sha256(Path(template).read_bytes()).hexdigest()
    assert found.metadata["config"]["chat_template"] == template
    assert "chat_template" not in measured(tiny("llama"), documents, **options).metadata["config"]
    with pytest.raises(UserError, match=r"chat-template: expected conversations \(a column messages\).*; got texts"):
        measured(tiny("llama"), documents, chat_template=template, **options)
    with pytest.raises(UserError, match=r"with a chat template for conversations, this has none"):
        measured(tiny("llama"), talks, **options)  # type: ignore[arg-type]


def test_a_template_is_read_once(tiny: Tiny, documents: list[str], tmp_path: Path) -> None:
    """It was read again when the run was described: a file that was gone lost the run, an edited one its hash."""
    path, text = tmp_path / "chat.jinja", "{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}"
    path.write_text(text)
    talks = [[{"role": "a", "content": documents[0][:400]}]]
    options: dict[str, Any] = {"samples": 1, "length": 12, "statistics": "entropy", "chat_template": str(path)}
    found = measured(tiny("llama"), talks, on_progress=lambda _: path.unlink(), **options)  # type: ignore[arg-type]
    assert found.metadata["data"]["chat_template_sha256"] == sha256(text.encode()).hexdigest()


def test_progress_is_told_after_each_batch(tiny: Tiny, documents: list[str]) -> None:
    told: list[tuple[int, int | None]] = []
    measured(tiny("llama"), documents, batch_size=3, on_progress=lambda event: told.append((event.step, event.steps)))
    assert told == [(3, 7), (6, 7), (7, 7)]


# -- the record -----------------------------------------------------------------------------------------


def test_the_record_says_where_the_numbers_come_from(tiny: Tiny, documents: list[str]) -> None:
    found = measured(tiny("llama"), documents, statistics="sink_rate,massive_activations", dtype="float32", seed=2)
    record = found.metadata
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert set(record) == {
        *("command", "schema_version", "version", "created", "config", "model", "data", "cost", "versions"),
        *("statistics", "verified"),
    }
    assert record["verified"] is True
    loaded = models.load(str(tiny("llama")))
    assert record["model"] == {
        "name": str(tiny("llama")),
        "class": "LlamaModel",
        "type": "llama",
        "sha256": loaded.sha256,
        "parameters": loaded.model.num_parameters(),
        "layers": 3,
        "heads": 4,
        "dtype": "float32",
    }
    assert record["config"] == {
        "statistics": ["sink_rate", "massive_activations"],
        "input": "natural",
        "bos": "keep",
        "samples": SAMPLES,
        "length": LENGTH,
        "epsilon": [0.3],
        "layer_ids": None,
        "part": None,
        "positions": "all",
        "batch_size": SAMPLES,
        "minimum_queries": 8,
        "perturb": "middle",
        "skip_verification": False,
        "seed": 2,
    }
    assert (record["data"]["samples"], record["data"]["tokens"]) == (SAMPLES, SAMPLES * LENGTH)
    with pytest.raises(UserError, match=r"^prompt: expected images, audio or videos, beside which it stands, got text"):
        regard.measure(loaded, texts=documents, prompt="Say it.")
    assert len(record["data"]["sha256"]) == 64
    assert set(record["versions"]) == {"python", "torch", "transformers", "platform"}
    cost = record["cost"]
    assert min(cost["seconds"], cost["tokens_per_second"], cost["peak_memory_mib"]) > 0
    assert (cost["device"], cost["processes"]) == ("cpu", 1)
    about = record["statistics"]
    assert set(about) == {"sink_rate", "massive_activations"}
    assert about["sink_rate"]["axes"] == ["layer", "head", "position", "epsilon"]
    assert about["massive_activations"]["axes"] == ["layer"]
    described = {"axes", "title", "unit", "description", "source", "cost", "seconds"}
    assert all(set(one) == described for one in about.values())
    assert [one["cost"] for one in about.values()] == ["same pass", "hidden states"]
    assert all(0 <= one["seconds"] <= cost["seconds"] for one in about.values())  # of milliseconds


def test_the_record_of_tokens_that_are_no_text(tiny: Tiny, documents: list[str]) -> None:
    of = measured(tiny("llama"), documents, input="random").metadata["data"]
    assert (of["source"], of["sha256"], of["documents"]) == ("random tokens", None, 0)


def test_short_documents_are_counted(tiny: Tiny, documents: list[str]) -> None:
    of = measured(tiny("llama"), ["w1 w2", *documents[:3], "w3"], samples=9).metadata["data"]
    assert (of["documents"], of["too_short"]) == (5, 2)


@pytest.mark.minilm
def test_the_embedded_model_on_the_default_text() -> None:
    found = regard.measure("minilm", samples=8, length=32, statistics="sink_rate,column_mass,row_sum,entropy")
    heads = found.frame("row_sum", position=None)
    assert len(heads) == 6 * 12
    assert (heads["layer"].max(), heads["head"].max()) == (5, 11)
    assert heads["value"].sub(1).abs().max() < 1e-5
    mass = found.frame("column_mass").groupby(["layer", "head"])["value"].sum()
    assert mass.sub(1).abs().max() < 1e-5
    assert found.frame("entropy", position=None)["value"].between(0, 3.4658).all()
    rate = found.frame("sink_rate", layer=None)
    assert rate.loc[rate["value"].idxmax(), "position"] == 0
    assert found.metadata["model"]["sha256"].startswith("53aa51172d14")
    assert "documentation of Python" in found.metadata["data"]["source"]


# -- mistakes of the user -------------------------------------------------------------------------------


NO_TEXTS = "texts: expected a list of at least one document, each a string, or a list of messages (a conversation)"


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"samples": 0}, "samples: expected a whole number of at least 1, got 0"),
        ({"length": -3}, "length: expected a whole number of at least 1, got -3"),
        ({"batch_size": 0}, "batch-size: expected a whole number of at least 1 or auto, got 0"),
        ({"samples": 2.5}, "samples: expected a whole number of at least 1, got 2.5"),
        ({"length": None}, "length: expected a whole number of at least 1, got None"),
        ({"seed": 1.5}, "seed: expected a whole number of at least 0, got 1.5"),
        ({"epsilon": "few"}, "epsilon: expected numbers over 0 and below 1, got 'few'"),
        ({"layer_ids": [0.5]}, "layer-ids: expected numbers and ranges such as 0,3,8-11 or all, got 0.5"),
        (
            {"statistics": None},
            "statistics: expected names, or statistics that are set up such as SinkRate(); got None",
        ),
        ({"statistics": [SinkRate]}, "statistics: expected names, or statistics that are set up such as SinkRate()"),
        (
            {"texts": ["a b"], "input": "random"},
            "texts: expected none with input random, whose tokens are not taken from text",
        ),
        ({"tokenizer": ["a b"]}, "tokenizer: expected one as AutoTokenizer loads it, or none beside the name of a "),
        ({"tokenizer": "minilm"}, "tokenizer: expected one as AutoTokenizer loads it, or none beside the name of a "),
        ({"epsilon": 2}, "epsilon: expected numbers over 0 and below 1, got 2.0"),
        ({"epsilon": [0.3, float("nan")]}, "epsilon: expected numbers over 0 and below 1, got nan"),
        ({"epsilon": []}, "epsilon: expected numbers over 0 and below 1, got none"),
        ({"layer_ids": []}, "layer-ids: expected numbers and ranges such as 0,3,8-11 or all, got none"),
        ({"layer_ids": [0, -2]}, "layer-ids: expected numbers and ranges such as 0,3,8-11 or all, got -2"),
        ({"seed": -1}, "seed: expected a whole number of at least 0, got -1"),
        ({"input": "noise"}, "input: expected one of natural, random, repeated, got 'noise'"),
        ({"bos": "maybe"}, "bos: expected one of keep, drop, add, got 'maybe'"),
        ({"statistics": "sink_rate,charm"}, "unknown statistic 'charm'; expected default, all, or some of: sink_rate"),
        ({"statistics": []}, "unknown statistic (none given)"),
        ({"texts": ["w1", "w2 \ud800"]}, "texts: expected Unicode in document 1, got half of a surrogate pair"),
        ({"texts": "one string"}, f"{NO_TEXTS}; got one string"),
        ({"texts": []}, f"{NO_TEXTS}; got none"),
        (
            {"texts": [[{"role": "user", "content": "a"}]], "chat_template": "gone.jinja"},
            "chat-template: expected a file, there is no gone.jinja",
        ),
        (
            {"texts": [{"id": "1", "text": "a"}]},
            f"{NO_TEXTS}; got dict; pass one entry of each, as [row['text'] for",
        ),
        (
            {"texts": pd.DataFrame({"body": ["a"]})},
            f"{NO_TEXTS}; got a DataFrame; pass one of its columns, as texts['body']",
        ),
        (
            {"texts": pd.DataFrame([["a"]])},
            f"{NO_TEXTS}; got a DataFrame; pass one of its columns, as texts[0]",
        ),
        (
            {"texts": pd.DataFrame([["a"]], columns=pd.MultiIndex.from_tuples([("post", "body")]))},
            f"{NO_TEXTS}; got a DataFrame; pass one of its columns, as texts[('post', 'body')]",
        ),
        (
            {"texts": {"text": ["a"]}},
            f"{NO_TEXTS}; got a dict; pass one of its columns, as texts['text']",
        ),
        (
            {"texts": DatasetDict(train=Dataset.from_dict({"body": ["a"]}))},
            f"{NO_TEXTS}; got a DatasetDict; pass one of its columns, as texts['train']['body']",
        ),
        (
            {"texts": ["a", None, 3]},
            f"{NO_TEXTS}; got NoneType, int",
        ),
    ],
    ids=str,
)
def test_a_mistake_is_found_before_the_model_is_looked_for(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        regard.measure("no-such-owner/no-such-model", **settings)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"length": 49}, "length: expected at most 48 tokens, the most this model was made for; got 49"),
        ({"length": 1}, "length: expected more than the 1 special tokens of each window, got 1"),
        ({"texts": ["w1 w2"]}, "length: expected a text of at least 20 tokens, the longest found has 3"),
        ({"samples": 1000}, "samples: expected texts with 1000 windows of 20 tokens, found"),
        ({"layer_ids": [1, 3, 99]}, "layer-ids: expected layers of this model, 0 to 2; it has no 3, 99"),
        (
            {"layer_ids": (-1,), "statistics": "entropy"},
            "layers: there is no attention in -1, but entropy measure it; choose from 0, 1",
        ),
        ({"length": 7}, "statistics: sink_rate has no data: 7 windows of 7 tokens are too few"),
        (
            {"minimum_queries": 30},
            "statistics: sink_rate has no data: 7 windows of 20 tokens are too few or too short for this model. "
            "Increase --samples or --length, lower --minimum-queries (now 30), or remove it",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model(settings: dict[str, Any], message: str, tiny: Tiny, documents: list[str]) -> None:
    options = {"texts": documents, "samples": SAMPLES, "length": LENGTH, **settings}
    with pytest.raises(UserError) as caught:
        regard.measure(str(tiny("llama")), **options)
    assert str(caught.value).startswith(message)


def test_layers_that_the_model_lacks_are_refused_before_it_runs(tiny: Tiny, documents: list[str]) -> None:
    told: list[tuple[int, int | None]] = []
    for kind in KINDS:
        with pytest.raises(UserError, match="it has no 3"):
            measured(
                tiny(kind), documents, layer_ids=[3], on_progress=lambda event: told.append((event.step, event.steps))
            )
    assert told == []


def test_non_finite_activations_are_named(tiny: Tiny, documents: list[str]) -> None:
    loaded = models.load(str(tiny("llama")), device="cpu")
    with torch.no_grad():
        loaded.model.layers[1].self_attn.k_proj.weight.fill_(float("nan"))  # type: ignore[union-attr, index]
    with pytest.raises(UserError, match=r"non-finite activations: \w+ of layer 1 \(decoder\) in batch 0"):
        regard.measure(loaded, texts=documents, samples=4, length=LENGTH, batch_size=2)
    assert loaded.model.config._attn_implementation == "sdpa"


def test_non_finite_activations_behind_the_last_attention_are_seen(tiny: Tiny, documents: list[str]) -> None:
    loaded = models.load(str(tiny("llama")), device="cpu")
    with torch.no_grad():
        loaded.model.layers[-1].mlp.down_proj.weight[0, 0] = float("inf")  # type: ignore[union-attr, index]
    with pytest.raises(UserError, match="non-finite activations: output of the last layer in batch 0"):
        regard.measure(loaded, texts=documents, samples=4, length=LENGTH, batch_size=2, statistics="entropy")


def test_what_is_no_model_for_texts(tiny: Tiny) -> None:
    from transformers import ViTConfig, ViTModel

    tokenizer = models.load(str(tiny("llama"))).tokenizer
    with pytest.raises(UserError, match="cannot observe Linear: expected a Hugging Face PreTrainedModel"):
        regard.measure(torch.nn.Linear(2, 2), tokenizer)  # type: ignore[arg-type]
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    picture = ViTModel(ViTConfig(image_size=8, patch_size=4, **sizes))
    with pytest.raises(UserError, match="is none for texts: ViTModel reads pixel_values"):
        regard.measure(picture, tokenizer)


def test_a_model_needs_a_tokenizer_that_belongs_to_it(tiny: Tiny, documents: list[str]) -> None:
    loaded = models.load(str(tiny("llama")))
    with pytest.raises(UserError, match="a model needs its tokenizer"):
        regard.measure(loaded.model, texts=documents)
    loaded.tokenizer.add_tokens(["w40"])
    for given in ((loaded.model, loaded.tokenizer), (str(tiny("llama")), loaded.tokenizer)):
        with pytest.raises(UserError, match="does not belong to it: its ids go up to 47, the model's embedding has 47"):
            regard.measure(*given, documents, samples=2, length=LENGTH)


def test_too_little_memory_is_the_batch_size(tiny: Tiny, documents: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaModel

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LlamaModel, "forward", full)
    with pytest.raises(UserError, match="batch-size: 7 windows of 20 tokens do not fit the memory of cpu"):
        measured(tiny("llama"), documents)


def test_settings_choose_a_batch_of_about_as_many_tokens_whatever_the_length() -> None:
    assert [MeasureConfig(length=length, samples=500).batch_rows for length in (64, 512, 4096, 9000)] == [64, 8, 1, 1]
    assert MeasureConfig(samples=3).batch_rows == 3
    assert MeasureConfig(batch_size=7).batch_rows == 7


def test_a_statistic_of_ones_own_is_measured_as_it_is_set_up_and_left_alone(tiny: Tiny, documents: list[str]) -> None:
    own = SinkRate((0.1,), minimum_queries=3)
    found = measured(tiny("llama"), documents, statistics=[own, "entropy"], samples=4, length=12)
    assert own.result() == []
    assert set(found.table["statistic"]) == {"sink_rate", "entropy"}
    assert set(found.frame("sink_rate")["epsilon"]) == {0.1}
    assert found.frame("sink_rate")["position"].max() == 12 - 3
    assert found.metadata["config"]["statistics"] == ["sink_rate", "entropy"]
    json.dumps(found.metadata)


def test_positions_that_few_queries_see_count_from_minimum_queries_on(tiny: Tiny, documents: list[str]) -> None:
    for minimum_queries in (3, 12):
        found = measured(tiny("llama"), documents, statistics="sink_rate", length=12, minimum_queries=minimum_queries)
        assert found.frame("sink_rate")["position"].max() == 12 - minimum_queries
        assert found.metadata["config"]["minimum_queries"] == minimum_queries


def test_sinks_by_token_class_takes_its_classes_from_the_tokenizer(tiny: Tiny, documents: list[str]) -> None:
    name = "sinks_by_token_class"
    found = measured(tiny("bert"), documents, statistics=f"{name},column_mass", minimum_queries=1)
    mass = found.frame("column_mass", layer=0, head=0)["value"]
    ids = windows(tiny("bert"), documents)
    stop = models.load(str(tiny("bert")), device="cpu").tokenizer.convert_tokens_to_ids(".")
    rows = found.frame(name, layer=0, head=0).set_index("statistic")
    assert rows.loc[f"{name}_first", "value"] == pytest.approx(mass.iloc[0])
    assert rows.loc[f"{name}_delimiter", "n"] == int((ids[:, 1:] == stop).any(1).sum()) > 0
    assert rows.loc[f"{name}_other", "n"] == len(ids)


def test_a_name_stands_for_all_that_it_tells(tiny: Tiny, documents: list[str]) -> None:
    found = measured(tiny("llama"), documents, statistics="massive_activations,key_norm", samples=2)
    endings = ["_top1", "_top2", "_top3", "_median", "_ratio", "_rate"]
    assert set(found.frame("massive_activations")["statistic"]) == {f"massive_activations{e}" for e in endings}
    assert set(found.frame("key_norm")["statistic"]) == {"key_norm"}


def test_defaults_leave_out_hidden_states_that_cannot_be_read(tiny: Tiny, documents: list[str]) -> None:
    """Those of Gemma 3n are four streams."""
    tokenizer = AutoTokenizer.from_pretrained(tiny("bert"))
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Gemma3nTextConfig(
        vocab_size=len(tokenizer),
        vocab_size_per_layer_input=len(tokenizer),
        hidden_size_per_layer_input=8,
        num_key_value_heads=2,
        head_dim=8,
        num_kv_shared_layers=0,
        layer_types=["full_attention"] * 2,
        activation_sparsity_pattern=None,
        laurel_rank=4,
        **sizes,
    )
    model = Gemma3nForCausalLM(config).eval()
    with pytest.warns(UserWarning, match="over_smoothing, hidden_norm are left out"):
        found = regard.measure(model, tokenizer, documents, samples=4, length=16)
    names = set(DEFAULT) - {"over_smoothing", "hidden_norm"}
    assert set(found.metadata["statistics"]) == names
    assert all(rows_of(name, found.table).any() for name in names)
    with pytest.raises(UserError, match="leave out hidden_norm"):
        regard.measure(model, tokenizer, documents, samples=4, length=16, statistics="hidden_norm")


def test_a_statistic_without_rows_of_its_own_is_not_what_was_derived_of_it(tiny: Tiny, documents: list[str]) -> None:
    found = measured(tiny("llama"), documents, statistics="key_norm", positions="none")
    with pytest.raises(UserError, match=r"^the table has no rows of key_norm itself .*, only key_norm_sink_ratio$"):
        found.frame("key_norm")
    assert len(found.frame("key_norm_sink_ratio"))


def test_fewer_positions_are_the_same_rows(tiny: Tiny, documents: list[str], tmp_path: Path) -> None:
    length = 24
    whole = measured(tiny("llama"), documents, length=length, minimum_queries=1)
    for positions, expected in (("thin", {*range(16), 16, length - 1}), ("none", set())):
        found = measured(tiny("llama"), documents, length=length, minimum_queries=1, positions=positions)
        rows = whole.table[whole.table["position"].isna() | whole.table["position"].isin(expected)]
        assert found.table.equals(rows.reset_index(drop=True))
        assert set(found.metadata["statistics"]) == {
            name for name in whole.metadata["statistics"] if filter_statistic(found.table, name).any()
        }
        found.save(tmp_path / positions)  # with its page
        found.summary()
    with pytest.raises(UserError, match="positions: all rows"):
        measured(tiny("llama"), documents, statistics="column_mass", positions="none")


def test_a_decoder_begins_the_same_by_name_as_in_python(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Also where the generation config alone says how, which a model without its head does not read."""
    tokenizer = AutoTokenizer.from_pretrained(tiny("bart"))
    config = AutoConfig.from_pretrained(tiny("bart"))
    model = BartForConditionalGeneration(config).eval()
    model.config.decoder_start_token_id, model.generation_config.decoder_start_token_id = None, 9
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "bart")
    options: dict[str, Any] = {"texts": ["w1 w2 w3 w4 w5 w6 w7 w8"] * 2, "samples": 2, "length": 8}
    loaded = BartForConditionalGeneration.from_pretrained(tmp_path / "bart").eval()
    by_name = regard.measure(str(tmp_path / "bart"), statistics="sink_tokens", **options)
    in_python = regard.measure(loaded, tokenizer, statistics="sink_tokens", **options)
    pd.testing.assert_frame_equal(by_name.tokens, in_python.tokens)
    first = by_name.tokens.query("site == 'decoder' and position == 0")
    assert set(first["token"]) == {tokenizer.convert_ids_to_tokens(9)}


def test_a_prompt_may_be_empty() -> None:
    """Other texts of options may not: they name something."""
    assert MeasureConfig.from_dict({"prompt": ""}).prompt == ""
