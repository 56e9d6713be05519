"""Which base adapters belong to: that in the files while the weights are those in them, else that of the weights."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.adapters import base_identity
from regard.adapters.base_identity import BaseIdentity, KnownIdentities, base_sha256
from regard.errors import UserError
from regard.models import base_files
from tests.adapters.model_families import FAMILIES, made
from tests.tiny_quantized import ByteLinear


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def opened(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
    return type(made(family)).from_pretrained(folder, dtype=dtype)


def identity(model: Any) -> BaseIdentity:
    return KnownIdentities().of_files(model)


def with_adapter(model: Any) -> regard.SharedAdapters:
    adapters = regard.SharedAdapters(model, r=2)
    adapters.add_adapter("one")
    return adapters


class Counts:
    """How often all of something was read: stand-ins that count, and then do as before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reads = {"files": 0, "checksums": 0, "weights": 0}
        self._replace(monkeypatch, base_files, "read_blocks", "files")
        self._replace(monkeypatch, base_identity, "checksum_of", "checksums")
        self._replace(monkeypatch, base_identity, "base_sha256", "weights")

    def _replace(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, key: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def count(*args: Any) -> Any:
            self.reads[key] += 1
            return function(*args)

        monkeypatch.setattr(module, name, count)

    def take(self) -> dict[str, int]:
        """What was counted since the last time."""
        taken, self.reads = self.reads, dict.fromkeys(self.reads, 0)
        return taken


NOTHING = {"files": 0, "checksums": 0, "weights": 0}


def test_the_checksum_of_a_tensor_is_that_of_its_file_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(7, 13, generator=torch.Generator().manual_seed(0))
    whole = int(base_files.checksum_of(values))
    monkeypatch.setattr(base_files, "_BLOCK", 8)
    assert int(base_files.checksum_of(values)) == whole
    assert int(base_files.checksum_of(values.bfloat16())) == whole
    assert int(base_files.checksum_of(values.T.contiguous().T)) == whole
    assert int(base_files.checksum_of(values.T)) != whole


def test_the_checksum_is_splitmix64_of_words_and_places() -> None:
    values, mask = torch.tensor([3.5, -1.0, 0.0, 2.0, 9.0]), 2**64 - 1
    raw = values.bfloat16().view(torch.uint8).numpy().tobytes() + bytes(6)
    expected = 0
    for place in range(2):
        word = int.from_bytes(raw[8 * place : 8 * place + 8], "little") ^ (place * 0x9E3779B97F4A7C15 & mask)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            word = (word ^ word >> shift) * factor & mask
        expected += word
    assert int(base_files.checksum_of(values)) & mask == expected & mask


@pytest.mark.parametrize(
    "change", [lambda v: v.view(-1)[[3, 9]].neg(), lambda v: v.view(-1)[[9, 3]]], ids=["signs", "places"]
)
def test_a_checksum_notices_two_entries(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = torch.randn(50, generator=torch.Generator().manual_seed(0))
    other = values.clone()
    other[[3, 9]] = change(values)
    assert int(base_files.checksum_of(other)) != int(base_files.checksum_of(values))


def test_a_checksum_notices_a_word_and_its_complement() -> None:
    values = torch.tensor([3, 0, 7])
    assert int(base_files.checksum_of(values)) != int(base_files.checksum_of(torch.tensor([3, -1, 7])))


def test_a_part_of_a_base_is_another_base(folder: Path) -> None:
    """With fewer layers, loaded so or cut, and with one layer in the place of two."""
    whole, loaded, cut, shared = (opened(folder) for _ in range(4))
    loaded = type(whole).from_pretrained(folder, num_hidden_layers=1)
    cut.model.layers = cut.model.layers[:1]
    shared.model.layers[1] = shared.model.layers[0]
    assert identity(loaded) == identity(cut) != identity(whole)
    assert identity(shared) == BaseIdentity(base_sha256(shared), "weights")


def test_weights_of_no_dimension_have_an_identity(tmp_path: Path) -> None:
    model = made("llama")
    model.model.register_buffer("steps", torch.tensor(3.0))
    model.save_pretrained(tmp_path / "base")
    known = KnownIdentities()
    before = known.of_weights(model)
    model.model.steps += 1
    assert known.of_weights(model) != before
    assert with_adapter(model).save_pretrained(tmp_path / "adapters") is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_as_it_was_loaded_is_that_of_its_files(family: str, tmp_path: Path) -> None:
    made(family).save_pretrained(tmp_path / "base")
    model = opened(tmp_path / "base", family)
    known = identity(model)
    assert known.of == "files"
    assert identity(with_adapter(model).model) == known


def test_copies_shards_and_precisions_are_one_base(folder: Path, tmp_path: Path) -> None:
    expected = identity(opened(folder))
    shutil.copytree(folder, tmp_path / "elsewhere" / "renamed")
    made("llama").save_pretrained(tmp_path / "sharded", max_shard_size="5KB")
    made("llama").bfloat16().save_pretrained(tmp_path / "halved")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    for copy in (tmp_path / "elsewhere" / "renamed", tmp_path / "sharded", tmp_path / "halved"):
        assert identity(opened(copy)) == expected
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert identity(opened(folder, dtype=dtype)) == expected
    assert expected.of == "files"


def test_the_head_is_not_of_the_base(tmp_path: Path) -> None:
    made("bert").save_pretrained(tmp_path / "base")
    model = opened(tmp_path / "base", "bert")
    expected = identity(model)
    with torch.no_grad():
        model.classifier.weight.zero_()
    assert identity(model) == expected
    assert identity(model.base_model) == expected


@pytest.mark.parametrize("way", ["step", "data", "row", "new"])
def test_a_base_that_has_changed_is_not_that_of_its_files(way: str, folder: Path) -> None:
    """Also one changed beside autograd, in a single row, or by parameters in the place of others."""
    model, known = opened(folder), KnownIdentities()
    before, weights = known.of_files(model), known.of_weights(model)
    if way == "step":
        model(input_ids=torch.tensor([[3, 4]]), labels=torch.tensor([[3, 4]])).loss.backward()
        torch.optim.SGD(model.parameters(), lr=1.0).step()
    elif way == "data":
        model.model.layers[0].mlp.up_proj.weight.data *= 2
    elif way == "row":
        model.model.embed_tokens.weight.data[7] += 1
    else:
        layer = model.model.layers[1].self_attn.q_proj
        layer.weight = nn.Parameter(layer.weight.detach() + 1)
    after = KnownIdentities().of_files(model)
    assert after == BaseIdentity(base_sha256(model), "weights")
    assert after != weights
    assert before.of == "files"
    if way != "row":  # one of 50 rows, through `.data`: see docs/adapters.md
        assert known.of_files(model) == after


def test_a_second_save_reads_all_of_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    adapters = with_adapter(opened(folder))
    adapters.save_pretrained(tmp_path / "first")
    first = counts.take()
    assert first == {"files": 21, "checksums": 20, "weights": 0}  # the files have a head as well
    adapters.save_pretrained(tmp_path / "second")
    adapters.export_peft("one", tmp_path / "peft")
    assert counts.take() == NOTHING
    again = regard.SharedAdapters.from_pretrained(opened(folder), tmp_path / "first")
    assert counts.take() == {**NOTHING, "checksums": 20}  # of the weights in memory, not of the files
    again.save_pretrained(tmp_path / "third")
    assert counts.take() == NOTHING


def test_nor_does_one_of_a_model_without_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    adapters = with_adapter(made("llama"))
    adapters.save_pretrained(tmp_path / "first")
    assert counts.take() == {**NOTHING, "weights": 1}
    adapters.save_pretrained(tmp_path / "second")
    assert counts.take() == NOTHING
    with torch.no_grad():
        adapters.model.model.norm.weight.mul_(2)
    adapters.save_pretrained(tmp_path / "third")
    assert counts.take() == {**NOTHING, "weights": 1}


def test_files_that_are_written_over_are_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity(opened(folder))
    counts = Counts(monkeypatch)
    assert identity(opened(folder)) == before
    assert counts.take()["files"] == 0
    made("llama", seed=1).save_pretrained(folder)
    after = identity(opened(folder))
    assert counts.take()["files"] == 21
    assert after.of == "files"
    assert after != before


def test_a_damaged_record_is_made_again(folder: Path, cache: Path) -> None:
    expected = identity(opened(folder))
    (record,) = (cache / "bases").glob("*.json")
    told = json.loads(record.read_text())
    for text in ("{", json.dumps({**told, "base": "0" * 64})):
        record.write_text(text)
        assert identity(opened(folder)) == expected
    assert json.loads(record.read_text()) == told


def test_adapters_go_to_the_same_files_in_another_precision_and_to_no_other(folder: Path, tmp_path: Path) -> None:
    adapters = with_adapter(opened(folder))
    adapters.save_pretrained(tmp_path / "saved")
    adapters.export_peft("one", tmp_path / "peft")
    base = json.loads((tmp_path / "saved" / "adapters.json").read_text())["base"]
    assert (base["sha256"], base["of"]) == identity(opened(folder))
    for dtype in (torch.bfloat16, torch.float16):
        here = regard.SharedAdapters.from_pretrained(opened(folder, dtype=dtype), tmp_path / "saved")
        assert here.import_peft(tmp_path / "peft", "two") == 1
    trained = opened(folder)
    with torch.no_grad():
        trained.model.norm.weight.add_(1)
    problem = r"with the files \w{12}, got the weights \w{12}; any_model=True takes"
    for load in (
        lambda: regard.SharedAdapters.from_pretrained(trained, tmp_path / "saved"),
        lambda: regard.SharedAdapters(trained, r=2).import_peft(tmp_path / "peft", "one"),
    ):
        with pytest.raises(UserError, match=problem):
            load()
    made("llama", seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"with the files \w{12}, got the files \w{12}"):
        regard.SharedAdapters.from_pretrained(opened(tmp_path / "other"), tmp_path / "saved")


def test_a_quantized_base_is_known_by_what_can_be_compared(folder: Path, tmp_path: Path) -> None:
    with_adapter(opened(folder)).save_pretrained(tmp_path / "saved")

    def quantized() -> Any:
        model = opened(folder)
        for layer in model.model.layers:
            whole = layer.self_attn.q_proj.weight
            linear = ByteLinear(whole.shape[1], whole.shape[0], bias=False)
            linear.weight = nn.Parameter((256 * whole.detach()).to(torch.int8), requires_grad=False)
            layer.self_attn.q_proj = linear
        return model

    with pytest.raises(UserError, match="got the weights"):  # a model that Transformers did not quantize
        regard.SharedAdapters.from_pretrained(quantized(), tmp_path / "saved")
    model = quantized()
    model.is_quantized = True
    here = regard.SharedAdapters.from_pretrained(model, tmp_path / "saved")
    assert here.known_identities.of_files(model) == identity(opened(folder))
    changed = quantized()
    changed.is_quantized = True
    with torch.no_grad():
        changed.model.norm.weight.mul_(2)
    with pytest.raises(UserError, match="got the weights"):
        regard.SharedAdapters.from_pretrained(changed, tmp_path / "saved")


def test_merged_adapters_leave_the_identity_of_the_files(folder: Path, tmp_path: Path) -> None:
    adapters, expected = with_adapter(opened(folder)), identity(opened(folder))
    with torch.no_grad():
        for parameter in adapters.pool.parameters_of(0):
            parameter.fill_(0.1)
    adapters.merge("one")
    adapters.save_pretrained(tmp_path / "saved")
    base = json.loads((tmp_path / "saved" / "adapters.json").read_text())["base"]
    assert (base["sha256"], base["of"]) == expected
    here = regard.SharedAdapters.from_pretrained(opened(folder), tmp_path / "saved")
    assert here.base == expected
