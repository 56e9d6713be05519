"""Adapters above the layers that are read: one forward pass gives both, and the same as two."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from regard.adapters.queries import StateReader
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import FAMILIES, TWO_PARTS, fill, logits, loss_of, made, padded, rows


def known(family: str, **options: Any) -> SharedAdapters:
    """A model of two layers with two adapters above the first, whose tasks' rows the router was given."""
    adapters = SharedAdapters(made(family), r=4, above_query=True, **options)
    for number, name in enumerate(("one", "two")):
        adapters.add_adapter(name)
        adapters.fit_router(name, [rows(family, seed=number), rows(family, seed=10 + number)])
    fill(adapters, 2.0)
    return adapters.eval()


@contextmanager
def counted(adapters: SharedAdapters) -> Iterator[list[int]]:
    """How many times the layer below the adapters ran."""
    reader = adapters._routing.query_reader
    assert isinstance(reader, StateReader)
    assert reader.blocks is not None
    calls: list[int] = []
    handle = reader.blocks[1].register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def apart(adapters: SharedAdapters, batch: dict[str, Tensor], **more: Any) -> Tensor:
    """The logits with weights that were read before."""
    with adapters.use_weights(adapters.routing_weights(**{**batch, **more})):
        return logits(adapters, batch)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_routes_and_answers_as_two_do(family: str) -> None:
    adapters, batch = known(family), padded(rows(family), 0, 2)
    expected = apart(adapters, batch)
    with counted(adapters) as calls:
        found = logits(adapters, batch)
    assert len(calls) == 1
    assert_close(found, expected, atol=1e-5, rtol=1e-4)
    with adapters.use_weights(None):
        assert not torch.allclose(logits(adapters, batch), found, atol=1e-3)
    assert_close(logits(adapters.model, batch), expected, atol=1e-5, rtol=1e-4)
    assert adapters._routing.mixture.weights is None
    everywhere = SharedAdapters(made(family), r=4)
    assert 0 < len(adapters.layers("count")) < len(everywhere.layers("count"))


@pytest.mark.parametrize("family, beams", [("t5", 2), ("llama", 1), ("gpt2", 2)])
def test_generating_reads_the_prompt_once(family: str, beams: int) -> None:
    adapters, batch = known(family), padded(rows(family), 3, 0)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": beams}
    with adapters.use_weights(adapters.routing_weights(**given)):
        expected = adapters.model.generate(**given, **options)
    with counted(adapters) as calls:
        assert torch.equal(adapters.generate(**given, **options), expected)
    assert len(calls) == (1 if family in TWO_PARTS else 4)
    with counted(adapters) as calls:
        without = adapters.generate(**given, **options, prompt_mask=given["attention_mask"])
    assert torch.equal(without, expected)
    assert len(calls) == (2 if family in TWO_PARTS else 5)


def test_positions_that_a_plain_pass_counts_otherwise_are_read_apart() -> None:
    adapters, batch = known("gpt2"), padded(rows("gpt2"), 3, 0)
    expected = apart(adapters, batch)
    with counted(adapters) as calls:
        assert_close(logits(adapters, batch), expected, atol=1e-5, rtol=1e-4)
    assert len(calls) == 2
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    with counted(adapters) as calls:
        logits(adapters, batch, position_ids=positions)
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_gives_the_gradients_of_two_passes(family: str, checkpointing: bool) -> None:
    found = []
    for along in (True, False):
        adapters = known(family)
        adapters._routing.reads_along = along
        adapters.set_adapter("two")
        if checkpointing:
            adapters.model.enable_input_require_grads()
            adapters.model.gradient_checkpointing_enable({"use_reentrant": False})
        adapters.train()
        loss_of(adapters, family).backward()
        found.append([one.grad for one in adapters.parameters() if one.requires_grad])
    assert any(bool(gradient.abs().max() > 1e-4) for gradient in found[0])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_dropout_is_not_in_the_query() -> None:
    config = made("bert").config
    config.hidden_dropout_prob = 0.5
    model = transformers.BertForSequenceClassification(config)
    adapters = SharedAdapters(model, r=4, above_query=True)
    adapters.add_adapter("one")
    adapters.fit_router("one", [rows("bert")])
    for training, passes in ((True, 2), (False, 1)):
        adapters.train(training)
        with counted(adapters) as calls:
            adapters(**rows("bert"))
        assert len(calls) == passes


def test_an_interrupted_pass_leaves_nothing_behind() -> None:
    adapters, batch = known("bert"), rows("bert")
    expected = logits(adapters, batch)
    with pytest.raises(IndexError):
        adapters(input_ids=torch.full((1, 3), 1000))
    vectors = adapters.query_vectors(**batch)
    assert vectors.shape == (3, 16)
    assert adapters._routing.mixture.weights is None
    assert_close(logits(adapters, batch), expected)


def test_they_are_saved_and_exported_where_they_are(tmp_path: Path) -> None:
    adapters, batch = known("llama"), rows("llama")
    expected = logits(adapters, batch)
    for back in (
        SharedAdapters.from_pretrained(made("llama"), adapters.save_pretrained(tmp_path / "saved")),
        SharedAdapters.from_peft_set(made("llama"), adapters.export_peft_set(tmp_path / "set")),
    ):
        assert list(back.layers("look")) == [f"model.layers.1.self_attn.{name}_proj" for name in "qv"]
        with counted(back) as calls:
            assert_close(logits(back, batch), expected)
        assert len(calls) == 1
    adapters.merge("one", 0.5)
    with adapters.use_weights(adapters.routing_weights(**batch)):
        assert_close(logits(adapters, batch), logits(adapters.model, batch))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"query": "embeddings"}, "above_query: expected false, since no layers of their own are read before others"),
        (
            {"query_layers": [2]},
            r"above_query: expected targets after layer 2, which is read, got bert.encoder.layer.0",
        ),
        ({"adapter_type": "prompt"}, r"above_query: expected False with adapter_type='prompt', got True"),
    ],
)
def test_where_there_is_nothing_above_it_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        SharedAdapters(made("bert"), above_query=True, **options)


def test_a_model_that_repeats_one_layer_has_none_above() -> None:
    config = transformers.AlbertConfig(
        vocab_size=50, embedding_size=8, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=8
    )
    with pytest.raises(UserError, match=r"^above_query: expected false"):
        SharedAdapters(transformers.AlbertModel(config), r=2, above_query=True)
