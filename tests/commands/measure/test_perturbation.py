"""`perturbation_spread` from Python, held against hidden states of the same windows, and what it is refused for."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers as tf
from rich.console import Console
from torch import Tensor

import regard
from regard import UserError, data, models
from regard.attention.spec import ATTENTIONS
from regard.commands.measure.config import MeasureConfig
from regard.commands.measure.result import MeasureResult
from regard.models import RegardConfig, RegardModel
from regard.report import labels
from tests.report.parsed import Parsed

Tiny = Callable[[str], Path]

NAME = "perturbation_spread"
LENGTH, SAMPLES = 20, 7
AXES = ["statistic", "site", "layer", "position"]


def measured(folder: Path, documents: Sequence[str], **settings: Any) -> MeasureResult:
    loaded = models.load(str(folder), device="cpu", dtype="float64")
    settings = {"statistics": NAME, "samples": SAMPLES, "length": LENGTH, "seed": 3, **settings}
    return regard.measure(loaded, texts=documents, **settings)


def two_inputs(tokenizer: Any, documents: Sequence[str], place: Any) -> tuple[Tensor, Tensor]:
    windows = data.make_text_windows(documents, tokenizer, length=LENGTH, samples=SAMPLES, seed=3)
    return windows.input_ids, data.replace_one_token(windows, tokenizer, place=place, seed=3)


def states(model: Any, ids: Tensor, decoder_ids: Tensor) -> dict[str, list[Tensor]]:
    """The hidden states of every layer by site, without a last norm."""
    if model.config.is_encoder_decoder:
        output = model(input_ids=ids, decoder_input_ids=decoder_ids, output_hidden_states=True)
        return {"encoder": output.encoder_hidden_states, "decoder": output.decoder_hidden_states}
    if isinstance(model, tf.BertModel):
        return {"encoder": model(ids, output_hidden_states=True).hidden_states}
    model.norm = torch.nn.Identity()
    return {"decoder": model(ids, output_hidden_states=True).hidden_states}


def assert_layer(found: MeasureResult, site: str, layer: int, change: Tensor, first: int, replaced: int | None) -> None:
    """Mean, error and profile of changes (sample, token) of the tokens from `first` on but the replaced one."""
    others = [position for position in range(first, change.shape[1]) if position != replaced]
    rows = found.table[(found.table["site"] == site) & (found.table["layer"] == layer)]
    (whole,) = rows[rows["position"].isna() & (rows["statistic"] == NAME)].itertuples()
    means = change[:, others].mean(1)
    assert whole.n == SAMPLES
    assert whole.value == pytest.approx(float(means.mean()), rel=1e-9, abs=1e-12)
    assert whole.standard_error == pytest.approx(float(means.std()) / SAMPLES**0.5, rel=1e-7, abs=1e-12)
    profile = rows[rows["position"].notna()]
    assert profile["position"].tolist() == others
    assert profile["value"].tolist() == pytest.approx(change[:, others].mean(0).tolist(), rel=1e-9, abs=1e-12)
    own = rows[rows["statistic"] == f"{NAME}_own"]["value"].tolist()
    assert own == ([] if replaced is None else [pytest.approx(float(change[:, replaced].mean()), rel=1e-9)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("place, replaced", [("middle", 10), ("first", 1)])
@pytest.mark.parametrize("kind", ["llama", "bert", "bart"])
def test_the_numbers_are_those_of_hidden_states(
    kind: str, place: str, replaced: int, tiny: Tiny, documents: list[str]
) -> None:
    """Of 20 tokens the replaced one has number 1, or 9 (BERT, BART: two special tokens) or 10 (Llama: one)."""
    found = measured(tiny(kind), documents, perturb=place)
    loaded = models.load(str(tiny(kind)), device="cpu", dtype="float64")
    replaced = replaced if kind == "llama" else min(replaced, 9)
    ids, others = two_inputs(loaded.tokenizer, documents, place)
    assert (ids != others).nonzero()[:, 1].tolist() == [replaced] * SAMPLES
    decoder_ids = torch.cat([torch.full_like(ids[:, :1], 7), ids[:, :-1]], dim=1)
    model = loaded.model.eval()
    with torch.no_grad():
        before, after = states(model, ids, decoder_ids), states(model, others, decoder_ids)
    assert set(found.table["site"]) == set(before)
    for site, layers in before.items():
        own = None if (kind, site) == ("bart", "decoder") else replaced
        first = replaced + 1 if kind == "llama" else 0
        for layer, pair in enumerate(zip(layers, after[site], strict=True), start=-1):
            change = (pair[1] - pair[0]).norm(dim=-1) / pair[0].norm(dim=-1)
            assert_layer(found, site, layer, change, first, own)
        assert set(found.frame(NAME, site=site)["layer"]) == set(range(-1, len(layers) - 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["llama", "bart"])
def test_the_numbers_do_not_depend_on_the_batch_size(kind: str, tiny: Tiny, documents: list[str]) -> None:
    tables = [measured(tiny(kind), documents, batch_size=size).table.sort_values(AXES) for size in (1, 3, SAMPLES)]
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table.reset_index(drop=True), tables[0].reset_index(drop=True), rtol=1e-9)


def test_other_statistics_are_those_of_the_text_as_it_is(tiny: Tiny, documents: list[str]) -> None:
    both = measured(tiny("llama"), documents, statistics=f"default,{NAME}", batch_size=3)
    alone = measured(tiny("llama"), documents, statistics="default", batch_size=3)
    rows = both.table[~both.table["statistic"].str.startswith(NAME)].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows, alone.table)
    assert both.tokens is not None
    assert both.tokens.equals(alone.tokens)
    assert (both.frame(NAME)["n"] == SAMPLES).all()


def test_a_statistic_by_its_class_and_some_layers(tiny: Tiny, documents: list[str]) -> None:
    found = measured(tiny("llama"), documents, statistics=[regard.statistics.PerturbationSpread()], layer_ids=[-1, 2])
    whole = measured(tiny("llama"), documents)
    assert set(found.table["layer"]) == {-1, 2}
    rows = whole.table[whole.table["layer"].isin([-1, 2])].reset_index(drop=True)
    pd.testing.assert_frame_equal(found.table, rows)


def test_the_record_says_what_it_is_and_what_it_took(tiny: Tiny, documents: list[str], tmp_path: Path) -> None:
    found = measured(tiny("llama"), documents, perturb="first")
    about = found.metadata["statistics"][NAME]
    assert about["cost"] == "one more forward"
    assert 0 < about["seconds"] <= found.metadata["cost"]["seconds"]
    assert found.metadata["config"]["perturb"] == "first"
    found.save(tmp_path / "run")  # with its page
    assert "Perturbation spread, max." in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    shown = io.StringIO()
    Console(width=80, file=shown).print(found.summary())
    spread = found.frame(NAME, position=None)["value"].tolist()
    line = f"layer -1: 0, layer 2: {labels.number(spread[-1])}, max. {labels.number(max(spread))} in layer "
    assert line in shown.getvalue()


def test_a_sink_token_moves_the_replaced_token_by_one(tiny: Tiny, documents: list[str]) -> None:
    """Our decoder puts it before each text: its 20 tokens stand at 1 to 20, of which 11 is replaced."""
    tokenizer = models.load(str(tiny("llama")), device="cpu").tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 32}
    config = RegardConfig(vocab_size=len(tokenizer), attention=ATTENTIONS["sink-token"].to_dict(), **sizes)
    model = RegardModel(config).double().eval()
    found = regard.measure(model, tokenizer, documents, samples=SAMPLES, length=LENGTH, statistics=NAME, seed=3)
    outputs: list[list[Tensor]] = []
    ids = two_inputs(tokenizer, documents, "middle")
    for each in ids:
        outputs.append([])
        handles = [
            block.register_forward_hook(lambda _module, _args, output: outputs[-1].append(output))
            for block in model.layers
        ]
        with torch.no_grad():
            model(each)
        for handle in handles:
            handle.remove()
    for layer, (before, after) in enumerate(zip(*outputs, strict=True)):
        assert before.shape[1] == LENGTH + 1
        change = (after - before).norm(dim=-1) / before.norm(dim=-1)
        assert_layer(found, "decoder", layer, change, first=12, replaced=11)


@pytest.mark.parametrize("place", ["first", "middle"])
def test_report_and_record_say_which_token_was_replaced(place: Any, tiny: Tiny, documents: list[str]) -> None:
    found = measured(tiny("llama"), documents, perturb=place)
    replaced = f"the {place} token of each window, special ones aside, by another drawn from the vocabulary"
    assert found.metadata["statistics"][NAME]["replaced"] == replaced
    page = Parsed(found.page())
    assert f"Replaced: {replaced}." in page.text
    about = {measure["statistic"]: measure["description"] for measure in page.data["measures"]}
    assert about[NAME] == about[f"{NAME}_own"]
    assert about[NAME].startswith("‖h′_i − h_i‖/‖h_i‖ of hidden states if one token of the text is replaced")
    assert about[NAME].endswith(f" Replaced: {replaced}.")


# -- what is refused ------------------------------------------------------------------------------------------------


def test_images_have_no_token_to_replace(documents: list[str]) -> None:
    config = tf.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=16, patch_size=8
    )
    processor = tf.ViTImageProcessor(size={"height": 16, "width": 16})
    images = [torch.zeros(3, 16, 16).numpy().astype("uint8")]
    with pytest.raises(UserError, match=f"statistics: {NAME} replaces a token of a text; expected texts, got images"):
        regard.measure(tf.ViTModel(config), processor, images=images, statistics=NAME)


def test_hidden_states_that_cannot_be_read_are_left_out_or_refused(tiny: Tiny, documents: list[str]) -> None:
    """Gemma 3n has several streams of them."""
    tokenizer = tf.AutoTokenizer.from_pretrained(tiny("llama"))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tf.Gemma3nTextConfig(
        **sizes, num_key_value_heads=2, head_dim=8, vocab_size_per_layer_input=60, hidden_size_per_layer_input=8,
        laurel_rank=4, altup_num_inputs=2, num_kv_shared_layers=0, activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"], vocab_size=60,
    )  # fmt: skip
    model = tf.Gemma3nForCausalLM(config).eval()
    settings: dict[str, Any] = {"samples": 4, "length": 16}
    with pytest.warns(UserWarning, match=f"{NAME} are left out"):
        found = regard.measure(model, tokenizer, documents, statistics=f"entropy,{NAME}", **settings)
    assert set(found.metadata["statistics"]) == {"entropy"}
    with pytest.raises(UserError, match=f"leave out {NAME}"):
        regard.measure(model, tokenizer, documents, statistics=NAME, **settings)


def test_a_place_without_the_statistic_is_refused(tiny: Tiny, documents: list[str]) -> None:
    """Given at all, or by a configuration if it is not the default one."""
    expected = (
        rf"^perturb: expected {NAME} among the statistics, for which it says where a token is replaced, got entropy"
    )
    for place in ("first", "middle"):
        with pytest.raises(UserError, match=expected):
            measured(tiny("llama"), documents, statistics="entropy", perturb=place)
    with pytest.raises(UserError, match=expected):
        MeasureConfig(statistics=("entropy",), perturb="first")
    config = MeasureConfig(statistics=(NAME,), perturb="first")
    assert config.replace(statistics=("entropy",), perturb="middle").perturb == "middle"
    assert NAME in measured(tiny("llama"), documents, config=config, statistics=[NAME]).metadata["statistics"]


def test_a_text_of_one_token_has_none_after_it(tiny: Tiny, documents: list[str]) -> None:
    found = measured(tiny("llama"), documents, length=2)
    assert set(found.table["statistic"]) == {f"{NAME}_own"}
