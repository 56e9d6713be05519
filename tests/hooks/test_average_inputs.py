"""The inputs of `average_attention`: averages are those of each sample alone, or it says what it expected."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import regard
from regard.errors import UserError
from regard.hooks.average import _move_padding_behind

SIZES: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LONG, SHORT = [5, 6, 7, 8, 9], [11, 12, 13]


def bert() -> Any:
    torch.manual_seed(0)
    config = tf.BertConfig(**SIZES, intermediate_size=16, initializer_range=0.5, max_position_embeddings=16)
    return tf.BertModel._from_config(config, attn_implementation="eager").eval()


def llama() -> Any:
    torch.manual_seed(0)
    config = tf.LlamaConfig(**SIZES, intermediate_size=16, initializer_range=0.5, max_position_embeddings=16)
    return tf.LlamaModel._from_config(config, attn_implementation="eager").eval()


def bart() -> Any:
    torch.manual_seed(0)
    sizes = {f"{side}_{name}": 2 for side in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    sizes |= {f"{side}_ffn_dim": 16 for side in ("encoder", "decoder")}
    config = tf.BartConfig(vocab_size=40, d_model=16, init_std=0.5, max_position_embeddings=16, **sizes)
    return tf.BartForConditionalGeneration._from_config(config, attn_implementation="eager").eval()


@torch.no_grad()
def average_alone(model: Any, samples: list[dict[str, list[int]]], name: str, length: int) -> Tensor:
    """Return the mean weights (layer, head, query, key) over samples, each read alone, by eager attention."""
    sums, counts = torch.zeros(2, 2, length, length, dtype=torch.float64), torch.zeros(length, length)
    for sample in samples:
        inputs = {key: torch.tensor([values]) for key, values in sample.items()}
        weights = torch.cat(model(**inputs, output_attentions=True)[name]).double()
        queries, keys = weights.shape[2:]
        sums[..., :queries, :keys] += weights
        counts[:queries, :keys] += 1
    return sums / counts.clamp(min=1)


def matrices(constants: Any, site: str) -> Tensor:
    return torch.stack([constants.matrices[site, layer] for layer in range(2)]).double()


def pad(rows: list[list[int]], side: str, number: int = 0) -> Tensor:
    longest = max(map(len, rows))
    fill = [[number] * (longest - len(row)) for row in rows]
    return torch.tensor([f + row if side == "left" else row + f for f, row in zip(fill, rows, strict=True)])


@pytest.mark.every_value
@pytest.mark.parametrize("kind", ["masks", "masks of numbers", "embeddings", "on both sides"])
@torch.no_grad()
def test_padding_on_the_left_of_some_rows_is_moved_with_all_that_is_by_token(kind: str) -> None:
    model, types = bert(), [[0, 0, 1, 1, 1], [0, 1, 1]]
    samples = [{"input_ids": r, "token_type_ids": t} for r, t in zip((LONG, SHORT), types, strict=True)]
    expected = average_alone(model, samples, "attentions", 6)
    rows = {"input_ids": [LONG, SHORT], "token_type_ids": types, "attention_mask": [[1] * 5, [1] * 3]}
    inputs: dict[str, Tensor] = {name: pad(values, "left") for name, values in rows.items()}
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 4], [0, 0, 0, 1, 2]])
    if kind == "masks of numbers":
        inputs["attention_mask"] = inputs["attention_mask"].float()
    if kind == "embeddings":
        inputs["inputs_embeds"] = model.embeddings.word_embeddings(inputs.pop("input_ids"))
    if kind == "on both sides":  # the first row behind, the second before
        inputs = {name: torch.nn.functional.pad(values, (0, 1)) for name, values in inputs.items()}
        del inputs["position_ids"]
    constants = regard.average_attention(model, [inputs], 6)
    torch.testing.assert_close(matrices(constants, "encoder"), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_positions_of_rows_without_padding_on_the_left_are_read() -> None:
    model, positions = bert(), [3, 4, 5, 6, 7]
    expected = average_alone(model, [{"input_ids": LONG, "position_ids": positions}], "attentions", 5)
    inputs = {"input_ids": torch.tensor([LONG]), "position_ids": torch.tensor([positions])}
    for masks in ({}, {"attention_mask": torch.ones(1, 5, dtype=torch.long)}):
        constants = regard.average_attention(model, [inputs | masks], 5)
        torch.testing.assert_close(matrices(constants, "encoder"), expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_a_mask_of_pairs_stays_as_it_is() -> None:
    """Its first column says nothing of padding."""
    model = bert()
    seen = torch.tensor([[0, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    mask = torch.zeros(1, 1, 3, 3).masked_fill(~seen, torch.finfo(torch.float32).min)
    inputs = {"input_ids": torch.tensor([SHORT]), "attention_mask": mask, "position_ids": torch.tensor([[3, 4, 5]])}
    expected = torch.cat(model(**inputs, output_attentions=True).attentions)
    constants = regard.average_attention(model, [inputs], 3)
    torch.testing.assert_close(matrices(constants, "encoder"), expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.every_value
@pytest.mark.parametrize(
    "kind", ["ids", "ids on the left", "labels", "labels on the left", "labels beside ids", "labels and a mask"]
)
@torch.no_grad()
def test_a_decoder_reads_its_ids_or_labels(kind: str) -> None:
    model = bart()
    decoded = [[2, 21, 22, 23], [2, 24, 25]]
    samples = [{"input_ids": r, "decoder_input_ids": d} for r, d in zip((LONG, SHORT), decoded, strict=True)]
    inputs = {"input_ids": pad([LONG, SHORT], "left", 1), "attention_mask": pad([[1] * 5, [1] * 3], "left")}
    ids, mask = pad(decoded, "right", 1), pad([[1] * 4, [1] * 3], "right")
    if kind == "ids on the left":
        ids, mask = pad(decoded, "left", 1), pad([[1] * 4, [1] * 3], "left")
    if kind.startswith("ids") or kind == "labels beside ids":
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    if kind == "labels and a mask":  # without the last token of each
        inputs["decoder_attention_mask"] = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0]])
        samples[0] = {**samples[0], "decoder_input_ids": decoded[0][:3]}
    if "labels" in kind:  # the last label of a row is read by none, also where ignored ones follow
        labels = [[30] * 4] * 2 if "beside" in kind else [[21, 22, 23, 31], [24, 25, 31]]
        inputs["labels"] = pad(labels, "left" if "left" in kind else "right", -100)
    constants = regard.average_attention(model, [inputs], 6)
    for site in ("encoder", "decoder", "cross"):
        expected = average_alone(model, samples, f"{site}_attentions", 6)
        torch.testing.assert_close(matrices(constants, site), expected, rtol=1e-4, atol=1e-5)


def test_options_of_a_forward_stay_as_they_are() -> None:
    """No tensor is made of them, which the model would hand on to its attention."""
    for model in (llama(), bart()):
        inputs = {"input_ids": torch.tensor([LONG])}
        plain = regard.average_attention(model, [inputs], 5)
        found = regard.average_attention(model, [{"use_cache": False, **inputs, "return_dict": True}], 5)
        assert found.origin.data["samples"] == plain.origin.data["samples"] == 1
        assert all(torch.equal(found.matrices[key], matrix) for key, matrix in plain.matrices.items())


def test_labels_of_whole_samples_are_left_out() -> None:
    torch.manual_seed(0)
    model = tf.BertForSequenceClassification(tf.BertConfig(**SIZES, intermediate_size=16)).eval()
    inputs = {"input_ids": torch.tensor([LONG]), "labels": torch.tensor([1])}
    assert regard.average_attention(model, [inputs], 5).length == 5


def test_what_is_by_something_else_than_tokens_is_not_moved() -> None:
    """A spectrogram may have as many bands as a text has tokens, and an image as many patches."""
    mask = torch.tensor([[0, 1, 1]])
    features, patches = torch.arange(12.0).reshape(1, 3, 4), torch.arange(6).reshape(1, 3, 2)
    boxes = torch.arange(12).reshape(1, 3, 4)
    inputs = {"attention_mask": mask, "input_features": features, "image_position_ids": patches, "bbox": boxes}
    _move_padding_behind(inputs, "")
    assert inputs["attention_mask"].tolist() == [[1, 1, 0]]
    assert torch.equal(inputs["input_features"], features)
    assert torch.equal(inputs["image_position_ids"], patches)
    assert torch.equal(inputs["bbox"], boxes[:, [1, 2, 0]])


@pytest.mark.every_value
@pytest.mark.parametrize(
    "batches, options, problem",
    [
        ([torch.tensor([LONG])], {"length": 0}, "length: expected at least 1, got 0"),
        ([torch.tensor([LONG])], {"layout": "page"}, "layout: expected natural or paper, got 'page'"),
        (torch.tensor([LONG]), {}, "batches: expected a list of batches, got one batch"),
        ([None, {"input_ids": torch.tensor([LONG])}], {}, "batches: expected a list of batches, each a .* NoneType"),
        ({"input_ids": torch.tensor([LONG])}, {}, "batches: expected a list of batches, got one batch"),
        ([], {}, "batches: expected at least one batch to average over, got none"),
        ([{}], {}, "batches: expected model inputs in each batch, one is empty"),
        ([torch.tensor([[LONG]])], {}, r"expected input_ids of shape \(sample, token\), got \(1, 1, 5\)"),
        ([{"inputs_embeds": torch.zeros(1, 5)}], {}, r"expected inputs_embeds of shape \(sample, token, width\), got"),
        ([torch.tensor([[5] * 7])], {}, "expected at most 6 tokens a sample, got 7"),
        ([torch.tensor([LONG])], {"layout": "paper"}, "expected 6 tokens a sample, got 5"),
        ([{"input_ids": [LONG, SHORT]}], {}, "expected input_ids as a tensor, or rows of one length"),
        ([{"input_ids": [LONG], "past_key_values": tf.DynamicCache()}], {}, "without a cache; leave out past_key"),
        ([{"input_ids": [LONG], "past_key_values": ()}], {}, "without a cache; leave out past_key"),
        ([{"use_cache": False}], {}, "batches: expected model inputs in each batch, one is empty"),
        ([{"input_ids": [LONG], "position_ids": [[0, 1, 0, 1, 2]]}], {}, "expected whole sequences"),
    ],
    ids=str,
)
def test_other_inputs_are_refused(batches: Any, options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        regard.average_attention(llama(), batches, **{"length": 6, **options})


def test_batches_of_all_tokens_that_fit_are_read() -> None:
    for layout in ("natural", "paper"):
        assert regard.average_attention(llama(), [torch.tensor([LONG])], 5, layout=layout).length == 5
    inputs = {"input_ids": [LONG], "attention_mask": None}
    assert regard.average_attention(llama(), [inputs], 5).counts["decoder"].sum() == 25
