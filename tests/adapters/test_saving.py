"""Blocks to a folder and back: the same answers, without anything of training, and no folder that is half there."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.testing import assert_close

from regard.adapters import saving
from regard.adapters.base_identity import base_sha256
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from regard.models.pretrained import load
from tests.adapters.model_families import FAMILIES, LEARNT, blocks_of, filled, logits, made, rows


@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_saved_answers_the_same(family: str, tmp_path: Path) -> None:
    adapters, batch = filled(family), rows(family)
    assert adapters.save_pretrained(tmp_path / "saved") == tmp_path / "saved"
    loaded = SharedAdapters.from_pretrained(made(family), tmp_path / "saved")
    assert loaded.adapter_names == adapters.adapter_names
    assert torch.equal(loaded.routing_weights(**batch), adapters.routing_weights(**batch))
    assert_close(logits(loaded, batch), logits(adapters, batch))
    assert not any(value.requires_grad for value in loaded.parameters())


def test_a_head_that_trains_beside_the_adapters_is_saved_again_and_again(tmp_path: Path) -> None:
    """A fresh head in its place would answer otherwise, in silence: the hash of the base does not cover it."""
    adapters, batch = filled("bert"), rows("bert")
    adapters.classifier.requires_grad_(True)
    with torch.no_grad():
        for value in adapters.classifier.parameters():
            value.normal_(generator=torch.Generator().manual_seed(1))
    first = SharedAdapters.from_pretrained(made("bert"), adapters.save_pretrained(tmp_path / "first"))
    again = SharedAdapters.from_pretrained(made("bert"), first.save_pretrained(tmp_path / "second"))
    assert_close(logits(again, batch), logits(adapters, batch))
    assert {name for name, value in again.named_parameters() if value.requires_grad} == {
        "model.classifier.weight",
        "model.classifier.bias",
    }
    with pytest.warns(UserWarning, match=r"lacks the trained head classifier\.weight, classifier\.bias"):
        again.export_peft(again.adapter_names[0], tmp_path / "peft")
    with pytest.warns(UserWarning, match="lacks the trained head"):
        again.export_peft_set(tmp_path / "set")


@pytest.mark.parametrize("kind", ["DebertaV2", "DistilBert"])
def test_what_does_not_train_of_a_fresh_head_is_saved_with_it(kind: str, tmp_path: Path) -> None:
    """The pooler of DeBERTa's classifier and the dense layer of DistilBERT's are others in each new model."""
    sizes: dict[str, Any] = {
        "DebertaV2": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
        "DistilBert": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16},
    }[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=40, **sizes)

    def make(seed: int, num_labels: int = 2) -> Any:
        torch.manual_seed(0)
        base = getattr(transformers, f"{kind}Model")(config).state_dict()
        torch.manual_seed(seed)
        model = getattr(transformers, f"{kind}ForSequenceClassification")(
            type(config)(**{**config.to_dict(), "id2label": dict(enumerate("abc"[:num_labels]))})
        )
        model.base_model.load_state_dict(base)
        return model.eval()

    adapters, ids = SharedAdapters(make(1), r=2), torch.randint(4, 40, (3, 7))
    adapters.add_adapter("one")
    adapters.classifier.requires_grad_(True)
    assert not torch.allclose(make(1)(input_ids=ids).logits, make(2)(input_ids=ids).logits)
    loaded = SharedAdapters.from_pretrained(make(2), adapters.save_pretrained(tmp_path / "saved"))
    with adapters.use_only("one"), loaded.use_only("one"):
        assert torch.equal(loaded(input_ids=ids).logits, adapters(input_ids=ids).logits)
    assert {name for name, value in loaded.model.named_parameters() if value.requires_grad} == {
        "classifier.weight",
        "classifier.bias",
    }
    state = adapters.state_dict()
    other = SharedAdapters(make(2), r=2)
    other.add_adapter("one")
    other.classifier.requires_grad_(True)
    other.load_state_dict(state)
    with adapters.use_only("one"), other.use_only("one"):
        assert torch.equal(other(input_ids=ids).logits, adapters(input_ids=ids).logits)
    frozen = SharedAdapters(make(1), r=2)
    frozen.add_adapter("one")
    folder = frozen.save_pretrained(tmp_path / "frozen")
    with pytest.warns(
        UserWarning, match=r"the model keeps its own classifier\.bias, classifier\.weight, of another shape"
    ):
        SharedAdapters.from_pretrained(make(2, num_labels=3), folder)


@pytest.mark.parametrize(
    "settings",
    [{"projection_order": "paper", "temperature": 2.0, "router_hidden_size": 5}, {"top_k": 1, "lora_alpha": 7.0}],
)
def test_settings_come_back(settings: dict[str, Any], tmp_path: Path) -> None:
    adapters, batch = filled("bert", target_modules=["query", "key"], **settings), rows("bert")
    adapters.save_pretrained(tmp_path / "saved")
    loaded = SharedAdapters.from_pretrained(made("bert"), tmp_path / "saved")
    assert loaded.settings == adapters.settings
    adapters.freeze()
    assert_close(logits(loaded, batch), logits(adapters, batch))


def test_the_file_holds_blocks_stacked_and_nothing_of_the_base(tmp_path: Path) -> None:
    adapters = filled("llama")
    adapters.save_pretrained(tmp_path / "saved")
    found = load_file(tmp_path / "saved" / "adapters.safetensors")
    layers = [f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1) for name in "qv"]
    expected = {f"layers.{name}.{part}" for name in layers for part in "AB"}
    assert set(found) == expected | {f"router.{name}" for name in ("down", "up", "norm.weight", "norm.bias", "keys")}
    assert found["layers.model.layers.0.self_attn.v_proj.A"].shape == (3, 4, 16)
    assert found["layers.model.layers.0.self_attn.v_proj.B"].shape == (3, 12, 4)
    assert found["router.keys"].shape == (3, 16)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["adapters.json", "adapters.safetensors"]


def test_the_lineage_of_each_block_is_kept(tmp_path: Path) -> None:
    adapters = SharedAdapters(made("bert"), **LEARNT, r=2)
    adapters.add_adapter("first", lineage={"task": "sst2", "data": {"train": "ab12"}})
    adapters.add_adapter("second")
    adapters.delete_adapter("first")
    adapters.add_adapter("third", lineage={"task": "agnews"})
    adapters.save_pretrained(tmp_path / "saved")
    about = json.loads((tmp_path / "saved" / "adapters.json").read_text())
    base = {"name": None, "sha256": base_sha256(made("bert")), "of": "weights"}
    assert [(one["name"], one["lineage"]) for one in about["blocks"]] == [
        ("second", {"order": 1, "base": base}),
        ("third", {"order": 2, "task": "agnews", "base": base}),
    ]
    loaded = SharedAdapters.from_pretrained(made("bert"), tmp_path / "saved")
    assert loaded.provenance["third"] == {"order": 2, "task": "agnews", "base": base}
    loaded.add_adapter("fourth")
    adapters.add_adapter("fourth")
    assert loaded.provenance["fourth"]["order"] == 3
    assert torch.equal(loaded.router.keys[2], adapters.router.keys[2])
    assert all(torch.equal(one.A[2], two.A[2]) for one, two in zip(blocks_of(loaded), blocks_of(adapters), strict=True))


def test_it_grows_on_after_it_was_loaded(tmp_path: Path) -> None:
    adapters, batch = filled("t5"), rows("t5")
    adapters.save_pretrained(tmp_path / "saved")
    loaded = SharedAdapters.from_pretrained(made("t5"), tmp_path / "saved")
    loaded.add_adapter("new")
    adapters.add_adapter("new")
    loaded(**batch).logits.sum().backward()
    assert blocks_of(loaded)[0].B[3].grad is not None
    assert_close(logits(loaded, batch), logits(adapters, batch))


def test_a_name_is_enough_for_a_model_on_disk(tmp_path: Path) -> None:
    made("bert").save_pretrained(tmp_path / "model")
    adapters = SharedAdapters(
        transformers.BertForSequenceClassification.from_pretrained(tmp_path / "model"), **LEARNT, r=2
    )
    adapters.add_adapter("one")
    adapters.save_pretrained(tmp_path / "saved")
    loaded = SharedAdapters.from_pretrained(tmp_path / "model", tmp_path / "saved")
    assert type(loaded.model) is transformers.BertForSequenceClassification
    assert loaded.provenance["one"]["base"]["name"] == str(tmp_path / "model")
    assert_close(logits(loaded, rows("bert")), logits(made("bert"), rows("bert")))
    config = json.loads((tmp_path / "model" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": None}), encoding="utf-8")
    assert SharedAdapters.from_pretrained(tmp_path / "model", tmp_path / "saved").adapter_names == ("one",)
    with pytest.raises(UserError, match=r"model: '.*nowhere' is no folder here") as refused:
        SharedAdapters.from_pretrained(str(tmp_path / "nowhere"), tmp_path / "saved")
    assert "\n" not in str(refused.value)
    transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2)).save_pretrained(tmp_path / "other")
    problem = r"model: expected the weights of a BertForSequenceClassification, got '.*other': \d+ are missing"
    with pytest.raises(UserError, match=problem):
        SharedAdapters.from_pretrained(tmp_path / "other", tmp_path / "saved")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert", "num_attention_heads": 5}')
    with pytest.raises(UserError, match=r"model: expected a BertForSequenceClassification, got") as refused:
        SharedAdapters.from_pretrained(tmp_path / "model", tmp_path / "saved")
    assert "\n" not in str(refused.value)


def test_weights_that_are_pickled_are_not_read(tmp_path: Path) -> None:
    model = made("bert")
    adapters = SharedAdapters(model, **LEARNT, r=2)
    adapters.add_adapter("one")
    adapters.save_pretrained(tmp_path / "saved")
    made("bert").config.save_pretrained(tmp_path / "model")
    torch.save(made("bert").state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"pytorch_model\.bin"):
        SharedAdapters.from_pretrained(tmp_path / "model", tmp_path / "saved")


@pytest.mark.exhaustive
@pytest.mark.minilm
def test_the_embedded_model_is_known_by_its_name(tmp_path: Path) -> None:
    adapters = SharedAdapters(load("minilm").model, **LEARNT, r=2)
    adapters.add_adapter("one")
    adapters.save_pretrained(tmp_path / "saved")
    loaded = SharedAdapters.from_pretrained("minilm", tmp_path / "saved")
    assert list(loaded.adapter_names) == ["one"]
    assert base_sha256(loaded.model) == base_sha256(adapters.model)


def test_the_digest_is_of_the_base_alone() -> None:
    plain = base_sha256(made("t5"))
    adapters = filled("t5")
    assert base_sha256(adapters.model) == plain
    assert base_sha256(adapters.unload()) == plain
    assert base_sha256(made("t5").bfloat16()) == plain
    assert base_sha256(made("t5", seed=1)) != plain
    headed = made("bert")
    with torch.no_grad():
        headed.classifier.weight.zero_()
    assert base_sha256(headed) == base_sha256(made("bert"))


def test_a_block_of_another_base_is_refused(tmp_path: Path) -> None:
    filled("llama").save_pretrained(tmp_path / "saved")
    with pytest.raises(
        UserError, match=r"model: expected the base of these adapters, LlamaForCausalLM without a name with "
    ):
        SharedAdapters.from_pretrained(made("llama", seed=1), tmp_path / "saved")
    with pytest.raises(UserError, match=r"got GPT2LMHeadModel, which has no layer model\.layers\.0"):
        SharedAdapters.from_pretrained(made("gpt2"), tmp_path / "saved")
    with pytest.raises(UserError, match=r"with model\.layers\.0\.self_attn\.q_proj of another shape"):
        SharedAdapters.from_pretrained(made("qwen"), tmp_path / "saved")
    with pytest.raises(UserError, match=r"model: expected the base of these adapters, .* got Linear"):
        SharedAdapters.from_pretrained(torch.nn.Linear(1, 1), tmp_path / "saved")  # type: ignore[arg-type]
    other = made("llama", seed=1)
    with pytest.raises(UserError, match="got the weights"):
        SharedAdapters.from_pretrained(other, tmp_path / "saved")
    assert torch.equal(logits(other, rows("llama")), logits(made("llama", seed=1), rows("llama")))


def test_a_base_in_another_precision_is_the_same_base(tmp_path: Path) -> None:
    filled("llama").save_pretrained(tmp_path / "saved")
    loaded = SharedAdapters.from_pretrained(made("llama").bfloat16(), tmp_path / "saved")
    assert logits(loaded, rows("llama")).dtype == torch.bfloat16


def test_soft_prompts_are_saved_as_they_are_read(tmp_path: Path) -> None:
    adapters, batch = (
        SharedAdapters(made("bert"), **LEARNT, adapter_type="prompt", num_virtual_tokens=3, encoder_hidden_size=8),
        rows("bert"),
    )
    adapters.add_adapter("one")
    adapters.add_adapter("two")
    adapters.save_pretrained(tmp_path / "saved")
    found = load_file(tmp_path / "saved" / "adapters.safetensors")
    assert found["prompts"].shape == (2, 3, 16)
    loaded = SharedAdapters.from_pretrained(made("bert"), tmp_path / "saved")
    assert_close(logits(loaded, batch), logits(adapters, batch))
    assert not torch.allclose(logits(loaded, batch), logits(made("bert"), batch), atol=1e-4)
    loaded.set_adapter("two")
    assert_close(logits(loaded, batch), logits(adapters, batch))


def test_what_is_no_folder_of_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"folder: expected adapters as `save_pretrained` leaves them, a folder with adap"
    ):
        SharedAdapters.from_pretrained(made("bert"), tmp_path)
    (tmp_path / "adapters.json").write_text("{")
    with pytest.raises(UserError, match=r"got a file that cannot be read"):
        SharedAdapters.from_pretrained(made("bert"), tmp_path)
    (tmp_path / "adapters.json").write_text("[]")
    with pytest.raises(UserError, match=r"got list"):
        SharedAdapters.from_pretrained(made("bert"), tmp_path)
    (tmp_path / "adapters.json").write_text('{"format": "other"}')
    with pytest.raises(UserError, match=r"expected the format 'regard shared adapters 3', got 'other'"):
        SharedAdapters.from_pretrained(made("bert"), tmp_path)


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    filled("bert").save_pretrained(tmp_path / "saved")
    about, tensors = tmp_path / "saved" / "adapters.json", tmp_path / "saved" / "adapters.safetensors"
    told, whole = json.loads(about.read_text()), tensors.read_bytes()
    for damage in (whole[:-4], whole[:-1] + bytes([whole[-1] ^ 1])):
        tensors.write_bytes(damage)
        with pytest.raises(UserError, match=r"expected the file that adapters.json tells of, got another, or none"):
            SharedAdapters.from_pretrained(made("bert"), tmp_path / "saved")
    tensors.write_bytes(whole)
    for key in ("base", "settings", "blocks", "layers"):
        about.write_text(json.dumps({name: value for name, value in told.items() if name != key}))
        with pytest.raises(UserError, match=r"expected adapters as `save_pretrained` leaves them"):
            SharedAdapters.from_pretrained(made("bert"), tmp_path / "saved")
    about.write_text(json.dumps({**told, "blocks": told["blocks"] + told["blocks"][:1]}))
    with pytest.raises(UserError, match=r"expected adapters as `save_pretrained` leaves them"):
        SharedAdapters.from_pretrained(made("bert"), tmp_path / "saved")
    tensors.unlink()
    with pytest.raises(UserError, match=r"got another, or none"):
        SharedAdapters.from_pretrained(made("bert"), tmp_path / "saved")


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = filled("bert")
    adapters.save_pretrained(tmp_path / "saved")
    before = (tmp_path / "saved" / "adapters.json").read_bytes()

    def full(*_: Any) -> None:
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(saving, "save_file", full)
        with pytest.raises(UserError, match=r"cannot write .*: no space left"):
            adapters.save_pretrained(tmp_path / "saved", overwrite=True)
        with pytest.raises(UserError, match=r"cannot write"):
            adapters.save_pretrained(tmp_path / "new")
    assert (tmp_path / "saved" / "adapters.json").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_only_a_folder_of_blocks_is_replaced_and_only_if_allowed(tmp_path: Path) -> None:
    adapters = filled("bert")
    adapters.save_pretrained(tmp_path / "saved")
    with pytest.raises(UserError, match=r"^folder: .* exists; choose another folder, or give overwrite=True"):
        adapters.save_pretrained(tmp_path / "saved")
    adapters.delete_adapter("task0")
    adapters.save_pretrained(tmp_path / "saved", overwrite=True)
    assert SharedAdapters.from_pretrained(made("bert"), tmp_path / "saved").adapter_names == ("task1", "task2")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UserError, match=r"^folder: .* holds something else .*\(no adapters\.json\); it is not overwr"):
        adapters.save_pretrained(tmp_path / "mine", overwrite=True)
    (tmp_path / "empty").mkdir()
    adapters.save_pretrained(tmp_path / "empty")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_nothing_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"adapters: expected at least one to save, got none; add one"):
        SharedAdapters(made("bert")).save_pretrained(tmp_path / "saved")
    assert not list(tmp_path.iterdir())


def test_a_model_with_adapters_is_not_saved_as_a_whole(tmp_path: Path) -> None:
    """It left a folder whose adapted layers `from_pretrained` drew at random; sentence-transformers saves so."""
    adapters = filled("bert")
    for part in (adapters.model, adapters.model.base_model):
        with pytest.raises(UserError, match=r"^save_pretrained: expected a model without adapters.*after unload\(\)"):
            part.save_pretrained(tmp_path / "whole", safe_serialization=True)
        with pytest.raises(UserError, match=r"^save_pretrained: expected a model without adapters"):
            part.push_to_hub("some/where")  # which made a repository before it was refused
    with pytest.raises(UserError, match=r"expected a folder and overwrite, got safe_serialization; save adapters by"):
        adapters.save_pretrained(tmp_path / "adapters", safe_serialization=True)
    assert not list(tmp_path.iterdir())
    adapters.unload().save_pretrained(tmp_path / "whole")
    assert not {"save_pretrained", "push_to_hub"} & vars(adapters.model).keys()
