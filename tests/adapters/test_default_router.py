"""Shared adapters with their default router: what it reads, when it learns of rows, and where they go."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

import regard
from regard.adapters.queries import StateReader
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import (
    DECODERS,
    FAMILIES,
    TWO_PARTS,
    fill,
    logits,
    loss_of,
    made,
    merged,
    padded,
    rows,
)
from tests.tiny_longcat import make_longcat


def known(family: str, **options: Any) -> SharedAdapters:
    """A model with two adapters that do something, whose tasks' rows the router was given."""
    adapters = SharedAdapters(made(family), r=4, **options)
    for number, name in enumerate(("one", "two")):
        adapters.add_adapter(name)
        adapters.fit_router(name, [rows(family, seed=number), rows(family, seed=10 + number)])
    fill(adapters)
    return adapters.eval()


def states_of(family: str, batch: dict[str, Tensor], layers: tuple[int, ...]) -> Tensor:
    """Mean states of the plain model, (row, width), by `output_hidden_states`."""
    model = made(family)
    reader = model.get_encoder() if family in TWO_PARTS else model.base_model
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        states = reader(**inputs, output_hidden_states=True).hidden_states
    mask = batch["attention_mask"].bool()
    pooled = [[states[layer][row][mask[row]].mean(0) for row in range(len(mask))] for layer in layers]
    return torch.cat([torch.stack(of_layer) for of_layer in pooled], 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_query_is_the_mean_state_of_the_model_without_adapters(family: str) -> None:
    adapters, batch = known(family), padded(rows(family), 0, 4)
    assert adapters.settings["query_layers"] == [1]
    assert_close(adapters.query_vectors(**batch), states_of(family, batch, (1,)), atol=1e-5, rtol=1e-4)
    with adapters.use_only("two"):
        assert_close(adapters.query_vectors(**batch), states_of(family, batch, (1,)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_several_layers_may_be_read(family: str) -> None:
    """The last of a decoder is before its final norm, which `hidden_states` has behind it."""
    layers = (1, 2) if family == "bert" else (1,)
    adapters, batch = known(family, query_layers=layers), rows(family)
    assert adapters.router.width == 16 * len(layers)
    assert_close(adapters.query_vectors(**batch), states_of(family, batch, layers), atol=1e-5, rtol=1e-4)


def test_by_default_layers_at_a_quarter_and_half_are_read() -> None:
    for count, layers in ((1, (1,)), (2, (1,)), (6, (1, 3)), (12, (3, 6)), (32, (8, 16))):
        config = transformers.BertConfig(
            vocab_size=9, hidden_size=4, num_hidden_layers=count, num_attention_heads=1, intermediate_size=4
        )
        assert StateReader(transformers.BertModel(config)).layers == layers


def test_a_model_that_repeats_one_layer_is_read_whole() -> None:
    config = transformers.AlbertConfig(
        vocab_size=50, embedding_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8
    )
    model = transformers.AlbertModel(config).eval()
    batch = rows("bert")
    found = StateReader(model)(batch, batch["attention_mask"])
    with torch.no_grad():
        states = model(**batch, output_hidden_states=True).hidden_states
    assert_close(found, torch.cat([states[1].mean(1), states[2].mean(1)], 1))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_is_read_with_the_mix_that_the_router_gives_it(family: str) -> None:
    adapters, batch = known(family), rows(family, seed=0)
    weights = adapters.routing_weights(**batch)
    assert_close(weights, adapters.router(adapters.query_vectors(**batch)))
    assert weights[:, 0].min() > 0.5
    found = logits(adapters, batch)
    assert_close(logits(adapters.model, batch), found)
    for row in range(3):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        expected = logits(merged(family, adapters, weights[row]), alone)
        assert_close(found[row : row + 1], expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_is_weighed_by_its_prompt_however_it_is_padded(family: str) -> None:
    adapters, batch = known(family), rows(family)
    labels = batch["input_ids"].clone()
    labels[:, :4] = -100
    prompt = {name: value[:, :4] for name, value in batch.items()}
    expected = adapters.routing_weights(**prompt)
    assert_close(adapters.routing_weights(**batch, labels=labels), expected)
    for left, right in ((3, 0), (0, 5)):
        assert_close(adapters.routing_weights(**padded(prompt, left, right)), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", DECODERS)
def test_a_row_without_a_prompt_is_weighed_by_all_of_it(family: str) -> None:
    """As with labels = input_ids; the rows beside it have theirs."""
    adapters, batch = known(family), rows(family)
    whole, padding = adapters.routing_weights(**batch), padded(batch, 0, 2)
    labels = batch["input_ids"].clone()
    labels[1, :4] = -100
    found = adapters.routing_weights(**padding, labels=torch.nn.functional.pad(labels, (0, 2), value=-100))
    expected = adapters.routing_weights(**{name: value[1:2, :4] for name, value in batch.items()})
    assert_close(found[[0, 2]], whole[[0, 2]], atol=1e-4, rtol=1e-3)
    assert_close(found[1:2], expected, atol=1e-4, rtol=1e-3)
    assert not torch.allclose(found[1], whole[1], atol=1e-3)


@pytest.mark.parametrize("place", [0, 6])
def test_an_end_of_text_that_is_masked_as_padding_is_no_prompt(place: int) -> None:
    """GPT-2 and others pad with it, so that collators take its labels away wherever it stands."""
    model = made("gpt2")
    model.config.eos_token_id = [4, 5]
    adapters = SharedAdapters(model, r=4)
    for number, name in enumerate(("one", "two")):
        adapters.add_adapter(name)
        adapters.fit_router(name, [rows("gpt2", seed=number)])
    batch = rows("gpt2")
    batch["input_ids"][:, place] = 5
    labels = batch["input_ids"].masked_fill(batch["input_ids"] == 5, -100)
    assert torch.equal(adapters.routing_weights(**batch, labels=labels), adapters.routing_weights(**batch))


@pytest.mark.parametrize("family", ["t5", "bart", "llama", "gpt2"])
def test_answers_are_generated_with_the_weights_of_the_prompt(family: str) -> None:
    adapters, batch = known(family), rows(family)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    with adapters.use_weights(adapters.routing_weights(**given)):
        expected = adapters.model.generate(**given, **options)
    assert torch.equal(adapters.generate(**given, **options), expected)
    assert torch.equal(adapters.model.generate(**given, **options), expected)


# -- what the router must know ---------------------------------------------------------------------------


def test_an_adapter_without_rows_is_refused_before_it_is_mixed() -> None:
    """In training and in evaluation: a weight of zero would be silent, and the adapter would never learn."""
    adapters = SharedAdapters(made("bert"), r=4)
    adapters.add_adapter("one")
    loss_of(adapters.train(), "bert").backward()  # with one adapter there is nothing to tell apart
    adapters.fit_router("one", [rows("bert")])
    adapters.add_adapter("two")
    for mode in (adapters.train(), adapters.eval()):
        with pytest.raises(UserError, match="router: expected rows of every adapter's task, got none for two; call"):
            loss_of(mode, "bert")
    with adapters.use_only("two"):
        loss_of(adapters, "bert").backward()
    adapters.fit_router("two", [rows("bert", seed=3)])
    loss_of(adapters, "bert").backward()
    assert adapters.router.adapter_tensors()["num_rows"] == [3, 3]  # training adds none


def test_a_name_that_comes_again_is_another_task() -> None:
    adapters = known("bert")
    adapters.delete_adapter("one")
    adapters.add_adapter("one")
    assert [float(count) for count in adapters.router.adapter_tensors()["num_rows"]] == [6, 0]
    with pytest.raises(UserError, match="got none for one; call"):
        adapters.routing_weights(**rows("bert"))


@pytest.mark.parametrize("family", ["bert", "t5", "llama", "gpt2"])
def test_queries_are_those_of_the_model_before_adapters_were_merged_into_it(family: str, tmp_path: Path) -> None:
    adapters, batch = known(family), rows(family, seed=0)
    adapters.add_adapter("three")
    adapters.fit_router("three", [rows(family, seed=7)])
    adapters.freeze()
    vectors, scores = adapters.query_vectors(**batch), adapters.router.scores(adapters.query_vectors(**batch))
    adapters.merge("two")
    assert torch.equal(adapters.query_vectors(**batch), vectors)
    assert_close(adapters.routing_weights(**batch), scores[:, [0, 2]].softmax(1), atol=1e-5, rtol=1e-4)
    plain = made(family)
    for name, layer in adapters.layers("look").items():  # the merged weights are there again
        assert not torch.equal(layer.weight, plain.get_submodule(name).weight)
    adapters.save_pretrained(tmp_path / "saved")
    again = SharedAdapters.from_pretrained(made(family), tmp_path / "saved")
    assert torch.equal(again.query_vectors(**batch), vectors)
    assert_close(logits(again, batch), logits(adapters, batch))


def test_a_model_that_calls_its_decoder_by_itself_is_routed() -> None:
    config = transformers.OPTConfig(
        vocab_size=50, hidden_size=16, word_embed_proj_dim=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2
    )
    adapters = SharedAdapters(transformers.OPTForCausalLM(config).eval(), r=4)
    for number, name in enumerate(("one", "two")):
        adapters.add_adapter(name)
        adapters.fit_router(name, [rows("llama", seed=number)])
    fill(adapters)
    batch = rows("llama", seed=0)
    with adapters.use_weights(adapters.routing_weights(**batch)):
        expected = logits(adapters, batch)
    assert_close(logits(adapters.model, batch), expected)
    with adapters.use_weights(None):
        assert not torch.allclose(logits(adapters, batch), expected, atol=1e-3)


def test_a_model_whose_reader_is_never_called_is_refused() -> None:
    adapters = known("bert")
    model = adapters.model
    embed = model.get_input_embeddings()
    model.forward = lambda input_ids, **_: model.classifier(embed(input_ids).mean(1))
    with pytest.raises(UserError, match="model: expected one that reads its tokens in its BertModel, got a BertForSeq"):
        adapters(**rows("bert"))


def test_texts_that_the_model_lengthens_are_read_as_far_as_they_go() -> None:
    config = transformers.LongformerConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        attention_window=4,
        max_position_embeddings=64,
        pad_token_id=0,
    )
    model = transformers.LongformerModel(config).eval()
    batch = rows("bert")
    found = StateReader(model)(batch, batch["attention_mask"])
    with torch.no_grad():
        expected = model(**batch, output_hidden_states=True).hidden_states[1][:, :7].mean(1)
    assert_close(found, expected)


def test_layers_that_are_spread_over_lists_are_read_by_hidden_states() -> None:
    config = transformers.XLMConfig(
        vocab_size=50, emb_dim=16, n_layers=2, n_heads=2, dropout=0.0, attention_dropout=0.0
    )
    model = transformers.XLMModel(config).eval()
    batch = rows("bert")
    found = StateReader(model)(batch, batch["attention_mask"])
    with torch.no_grad():
        assert_close(found, model(**batch, output_hidden_states=True).hidden_states[1].mean(1))


def test_what_trains_is_the_adapter_alone() -> None:
    adapters = known("bert")
    trained = {name for name, value in adapters.named_parameters() if value.requires_grad}
    assert trained
    assert all(".adapters." in name and name.endswith(".1") for name in trained)


# -- going on -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
def test_what_the_router_knows_is_saved_and_exported(family: str, tmp_path: Path) -> None:
    adapters, batch = known(family), rows(family)
    adapters.freeze()
    expected = adapters.routing_weights(**batch)
    adapters.save_pretrained(tmp_path / "saved")
    again = SharedAdapters.from_pretrained(made(family), tmp_path / "saved")
    assert torch.equal(again.routing_weights(**batch), expected)
    there = SharedAdapters(made(family), r=4)
    for number, name in enumerate(adapters.adapter_names):
        folder = adapters.export_peft(name, tmp_path / name, router=True)
        assert there.import_peft(folder, name, router=True) == number
    assert_close(there.routing_weights(**batch), expected)
    other = SharedAdapters(made(family), r=4, query_layers=[2])
    with pytest.raises(UserError, match=r"expected a router of router='discriminant', .*query_layers=\[2\], got "):
        other.import_peft(tmp_path / "one", "one", router=True)
    assert other.adapter_names == ()


def test_an_adapter_may_come_to_others_with_its_mean(tmp_path: Path) -> None:
    """The covariance that is there stays."""
    adapters = known("bert")
    adapters.export_peft("one", tmp_path / "one", router=True)
    there = SharedAdapters(made("bert"), r=4)
    there.add_adapter("own")
    there.fit_router("own", [rows("bert", seed=5)])
    scatter = there.router.shared_tensors()["scatter"].clone()
    there.import_peft(tmp_path / "one", "one", router=True)
    assert torch.equal(there.router.shared_tensors()["scatter"], scatter)
    assert torch.equal(there.router.adapter_tensors()["means"][1], adapters.router.adapter_tensors()["means"][0])


def test_attention_is_observed_once_a_forward() -> None:
    """What the router reads is none of the model's own forward."""
    adapters, batch = known("bert"), rows("bert")
    with adapters.use_weights(adapters.routing_weights(**batch)), regard.hooks.watching(adapters.model) as expected:
        logits(adapters, batch)
    with regard.hooks.watching(adapters.model) as found:
        logits(adapters, batch)
    numbers = (watch.frame().select_dtypes("number") for watch in (found, expected))
    mine, plain = (frame.to_numpy(float, na_value=math.nan) for frame in numbers)
    assert_close(torch.tensor(mine), torch.tensor(plain), atol=1e-5, rtol=1e-4, equal_nan=True)


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"router": "lda"}, "router: expected one of discriminant, attention, got 'lda'"),
        ({"query": "tokens"}, "query: expected one of states, embeddings, got 'tokens'"),
        ({"query": "embeddings", "query_layers": [1]}, "query_layers: expected none with query='embeddings', got [1]"),
        ({"query_layers": [3]}, "query_layers: expected different numbers from 1 to 2, in order, got [3]"),
        ({"query_layers": []}, "query_layers: expected different numbers from 1 to 2, in order, got []"),
        ({"query_layers": [2, 1]}, "query_layers: expected different numbers from 1 to 2, in order, got [2, 1]"),
        ({"query_layers": "1"}, "query_layers: expected different numbers from 1 to 2, in order, got '1'"),
        ({"temperature": 2.0}, "temperature: expected None with router='discriminant', got 2.0"),
        ({"router_hidden_size": 5}, "router_hidden_size: expected 100 with router='discriminant', got 5"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        SharedAdapters(made("bert"), **options)
    assert str(refused.value) == problem


def test_only_a_router_in_closed_form_is_fitted_and_only_to_rows() -> None:
    adapters = known("bert")
    with pytest.raises(UserError, match="batches: expected at least one, got none"):
        adapters.fit_router("one", [])
    with pytest.raises(UserError, match="batches: expected a list of them, got one alone"):
        adapters.fit_router("one", rows("bert"))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="name: expected one of one, two, got 'three'"):
        adapters.fit_router("three", [rows("bert")])
    learnt = SharedAdapters(made("bert"), router="attention")
    learnt.add_adapter("one")
    with pytest.raises(UserError, match="router: expected 'discriminant', which is fitted, got 'attention'"):
        learnt.fit_router("one", [rows("bert")])


def test_layers_of_a_model_with_two_attentions_a_block_are_its_blocks() -> None:
    """LongCat-Flash, whose configuration counts its attention layers: it has states after each block alone."""
    model, batch = make_longcat(50), padded(rows("llama"), 3, 0)
    reader = StateReader(model.model)
    assert reader.layers == (1,)
    states = model(**batch, output_hidden_states=True).hidden_states
    mask = batch["attention_mask"].bool()
    expected = torch.stack([states[1][row][mask[row]].mean(0) for row in range(len(mask))])
    with torch.no_grad():
        assert_close(reader(batch, mask), expected, atol=1e-5, rtol=1e-4)
        assert reader(batch, mask).shape == StateReader(model.model, [2])(batch, mask).shape
    with pytest.raises(UserError, match=r"^query_layers: expected different numbers from 1 to 2, in order, got \[3\]"):
        StateReader(model.model, [3])
    model.config.use_cache = False
    adapters = SharedAdapters(model, r=4, target_modules=["o_proj"])
    adapters.add_adapter("one")
    adapters.fit_router("one", [batch])
    assert adapters.settings["query_layers"] == [1]
    with torch.no_grad():
        assert_close(adapters.query_vectors(**batch), expected, atol=1e-5, rtol=1e-4)
