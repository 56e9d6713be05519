"""Kept states: what the model showed, of real tokens, whole or not at all."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BartConfig, BartModel, T5Config, T5ForConditionalGeneration

from regard import UserError
from regard.training import States, encode_states
from tests.training.dense import dense_rows

from .conftest import LAYERS, LENGTH, SAMPLES, WIDTH, WORDS, Inputs

Encode = Callable[..., States]
ALL = torch.arange(SAMPLES)


def zeroed(dense: Tensor, mask: Tensor) -> Tensor:
    return dense * mask[:, None, :, None]


def test_states_are_those_the_model_shows(encode: Encode, dense: Tensor, inputs: Inputs) -> None:
    kept = encode(dtype=torch.float32)
    assert (len(kept), kept.layers, kept.length, kept.width) == (SAMPLES, LAYERS, LENGTH, WIDTH)
    torch.testing.assert_close(dense_rows(kept, ALL), zeroed(dense, inputs.mask), rtol=1e-5, atol=1e-5)


def test_half_precision_is_the_same_rounded(encode: Encode) -> None:
    whole = encode(key="whole", dtype=torch.float32)
    half = encode(key="half")
    assert (whole.metadata["dtype"], half.metadata["dtype"]) == ("float32", "float16")
    assert dense_rows(half, ALL).dtype == torch.float32
    assert torch.equal(dense_rows(half, ALL), dense_rows(whole, ALL).half().float())
    assert half.metadata["largest"] == pytest.approx(float(dense_rows(whole, ALL).abs().max()))


def test_rows_come_in_the_order_asked_for(encode: Encode, inputs: Inputs) -> None:
    kept = encode()
    rows = torch.tensor([4, 17, 0, 4])
    assert torch.equal(dense_rows(kept, rows), dense_rows(kept, ALL)[rows])
    tokens = kept.tokens(rows)
    assert torch.equal(tokens.states, dense_rows(kept, ALL)[rows].transpose(1, 2)[inputs.mask[rows]])
    chosen = inputs.mask[rows] & (torch.arange(LENGTH) > 3)
    few = kept.tokens(rows, chosen)
    assert torch.equal(few.states, dense_rows(kept, rows)[few.row, :, few.position])
    assert torch.equal(torch.stack([few.row, few.position], 1), chosen.nonzero())


def test_only_real_tokens_take_room(encode: Encode, inputs: Inputs, tmp_path: Path) -> None:
    encode()
    size = (tmp_path / "states-k.bin").stat().st_size
    assert size == int(inputs.mask.sum()) * LAYERS * WIDTH * 2 + SAMPLES * LENGTH


def test_what_is_kept_opens_again(encode: Encode, inputs: Inputs, tmp_path: Path) -> None:
    kept = encode()
    again = States.open(tmp_path, "k")
    assert again is not None
    assert torch.equal(again.mask, inputs.mask)
    assert torch.equal(dense_rows(again, ALL), dense_rows(kept, ALL))
    assert States.open(tmp_path, "other") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["states-k.bin", "states-k.json"]
    States.remove(tmp_path, "k")
    assert not list(tmp_path.iterdir())


def test_the_model_stays_as_it_was(encode: Encode, model: Any) -> None:
    model.bert.encoder.layer[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    encode()
    assert {name: module.training for name, module in model.named_modules()} == before
    assert all(one.grad is None and one.requires_grad for one in model.parameters())


def test_a_killed_pass_leaves_nothing_that_opens(encode: Encode, inputs: Inputs, tmp_path: Path) -> None:
    encode()  # of an earlier run, under the same key

    def killed() -> Iterator[dict[str, Tensor]]:
        yield from list(inputs.batches())[:2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode(batches=killed())
    assert States.open(tmp_path, "k") is None
    assert not list(tmp_path.iterdir())


def test_a_pass_killed_without_warning_leaves_nothing_that_opens(encode: Encode, tmp_path: Path) -> None:
    """What a machine that goes down leaves: the file of states before its note, whole or in part."""
    encode()
    (tmp_path / "states-k.json").unlink()
    assert States.open(tmp_path, "k") is None
    encode()
    whole = (tmp_path / "states-k.bin").read_bytes()
    for spoilt in (whole[:-1], whole[: len(whole) // 2], whole + whole[:1], b""):
        (tmp_path / "states-k.bin").write_bytes(spoilt)
        assert States.open(tmp_path, "k") is None
    (tmp_path / "states-k.bin").unlink()
    assert States.open(tmp_path, "k") is None


@pytest.mark.parametrize("note", ["", "{}", "[]", '{"format": 0}', "null"])
def test_a_spoilt_note_does_not_open(encode: Encode, tmp_path: Path, note: str) -> None:
    encode()
    (tmp_path / "states-k.json").write_text(note)
    assert States.open(tmp_path, "k") is None


def test_a_note_of_another_key_does_not_open(encode: Encode, tmp_path: Path) -> None:
    encode()
    for end in ("bin", "json"):
        (tmp_path / f"states-k.{end}").rename(tmp_path / f"states-l.{end}")
    assert States.open(tmp_path, "l") is None


def test_a_full_disk_is_told_before_anything_is_written(
    encode: Encode, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = int(inputs.mask.sum()) * LAYERS * WIDTH * 2 + SAMPLES * LENGTH
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=needed - 1))
    with pytest.raises(UserError, match=f"need {needed:,} bytes in .*, {needed - 1:,} are free"):
        encode()
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=needed))
    assert len(encode()) == SAMPLES


def test_states_that_are_not_finite_are_told_with_their_layer(encode: Encode, model: Any, tmp_path: Path) -> None:
    model.bert.encoder.layer[1].output.dense.bias.data[0] = torch.inf
    with pytest.raises(UserError, match="non-finite hidden states after 2 layers"):
        encode()
    assert not list(tmp_path.iterdir())


class Growing(torch.nn.Module):
    """An encoder whose states are its token ids, large where the ids are."""

    config, device = SimpleNamespace(is_encoder_decoder=False), torch.device("cpu")

    @property
    def base_model(self) -> "Growing":
        return self

    def forward(self, input_ids: Tensor, attention_mask: Tensor, output_hidden_states: bool) -> Any:
        states = input_ids[..., None].float() * torch.tensor([1.0, 0.1])
        return SimpleNamespace(hidden_states=(states, -states))


@pytest.mark.parametrize("largest, stored", [(59_000, "float16"), (61_000, "float32"), (10_000_000, "float32")])
def test_values_beyond_half_precision_are_kept_whole(encode: Encode, inputs: Inputs, largest: int, stored: str) -> None:
    """The large value comes in the third batch, when two are written already."""
    ids = inputs.ids.clone()
    ids[13, int(inputs.mask[13].nonzero()[0])] = largest
    kept = encode(model=Growing(), batches=Inputs(ids, inputs.mask).batches())
    assert (kept.metadata["dtype"], kept.metadata["dtype_asked"], kept.metadata["largest"]) == (
        stored,
        "float16",
        largest,
    )
    values = ids[..., None].float() * torch.tensor([1.0, 0.1])
    expected = zeroed(torch.stack([values, -values], 1), inputs.mask)
    torch.testing.assert_close(dense_rows(kept, ALL), expected, rtol=1e-3, atol=0)
    if stored == "float32":
        assert torch.equal(dense_rows(kept, ALL[10:]), expected[10:])


def test_large_values_on_padding_do_not_count(encode: Encode, inputs: Inputs) -> None:
    ids = torch.where(inputs.mask, inputs.ids, 10_000_000)
    assert encode(model=Growing(), batches=Inputs(ids, inputs.mask).batches()).metadata["dtype"] == "float16"


@pytest.mark.parametrize("size", [4, 7])
def test_batches_that_are_not_the_masks_are_refused(encode: Encode, inputs: Inputs, size: int, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"batches: expected {SAMPLES} samples, got {size}"):
        encode(batches=Inputs(inputs.ids[:size], inputs.mask[:size]).batches())
    twice = Inputs(inputs.ids.repeat(2, 1), inputs.mask.repeat(2, 1))
    with pytest.raises(UserError, match=f"batches: expected {SAMPLES} samples"):
        encode(batches=twice.batches(size))
    with pytest.raises(UserError, match=f"batches: expected {SAMPLES} samples of {LENGTH} tokens"):
        encode(batches=Inputs(inputs.ids[:, 1:], inputs.mask[:, 1:]).batches())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_of_an_encoder_decoder_the_encoder_is_kept(encode: Encode, inputs: Inputs, kind: str) -> None:
    torch.manual_seed(0)
    if kind == "t5":
        model: Any = T5ForConditionalGeneration(
            T5Config(vocab_size=WORDS, d_model=16, d_kv=4, d_ff=16, num_layers=2, num_heads=4)
        )
    else:
        sizes = {"encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        model = BartModel(BartConfig(vocab_size=WORDS, d_model=16, max_position_embeddings=LENGTH, **sizes, **heads))
    kept = encode(model=model, dtype=torch.float32)
    with torch.no_grad():
        shown = model.eval().get_encoder()(**inputs.batch(ALL), output_hidden_states=True).hidden_states
    torch.testing.assert_close(dense_rows(kept, ALL), zeroed(torch.stack(shown, 1), inputs.mask), rtol=1e-5, atol=1e-5)


def test_a_folder_that_cannot_be_written_is_told(model: Any, inputs: Inputs, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write hidden states to"):
        encode_states(model, inputs.batches(), tmp_path / "file" / "folder", mask=inputs.mask, key="k")


def test_the_note_says_how_the_states_came_about(encode: Encode, inputs: Inputs, tmp_path: Path) -> None:
    encode()
    note = json.loads((tmp_path / "states-k.json").read_text())
    assert note["model"] == "BertForMaskedLM"
    assert note["shape"] == [int(inputs.mask.sum()), LAYERS, WIDTH]
