"""Blocks that peft loads, and adapters of peft that become blocks: the same logits on both sides."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.adapters.families import blocks_of, filled, logits, made, rows
from torch.testing import assert_close

from regard.adapters.shared import SharedAdapters
from regard.errors import UserError

peft = pytest.importorskip("peft")

# peft asks Transformers for a name that will go.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

KINDS = ("bert", "t5", "gpt2", "llama")
TARGETS = {"bert": ["query", "value"], "t5": ["q", "v"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}


def of_peft(family: str, **options: Any) -> Any:
    """A model of peft with an adapter that does something."""
    config = {"r": 4, "lora_alpha": 32, "target_modules": TARGETS[family], "fan_in_fan_out": family == "gpt2"}
    model = peft.get_peft_model(made(family), peft.LoraConfig(**{**config, **options})).eval()
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_B" in name:
                value.copy_(0.3 * torch.randn(value.shape, generator=random))
    return model


@pytest.mark.parametrize("family", KINDS)
def test_a_block_gives_the_same_logits_in_peft(family: str, tmp_path: Path) -> None:
    adapters, batch = filled(family), rows(family)
    assert adapters.export_peft("task1", tmp_path / "one") == tmp_path / "one"
    with adapters.forced("task1"):
        expected = logits(adapters, batch)
    there = peft.PeftModel.from_pretrained(made(family), tmp_path / "one").eval()
    assert_close(logits(there, batch), expected, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(expected, logits(made(family), batch), atol=1e-3)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("options", [{}, {"r": 2, "lora_alpha": 5}, {"use_rslora": True, "lora_alpha": 3}])
def test_an_adapter_of_peft_gives_the_same_logits_as_a_block(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    there, batch = of_peft(family, **options), rows(family)
    there.save_pretrained(tmp_path / "theirs")
    adapters = filled(family, blocks=2)
    assert adapters.import_peft(tmp_path / "theirs", "theirs", lineage={"task": "sst2"}) == 2
    assert adapters.names == ("task0", "task1", "theirs")
    assert adapters.lineages["theirs"] == {"order": 2, "task": "sst2"}
    assert adapters.opened == "task1"
    with adapters.forced("theirs"):
        assert_close(logits(adapters, batch), logits(there, batch), atol=1e-5, rtol=1e-4)


def test_patterns_of_alpha_and_of_rank_are_followed(tmp_path: Path) -> None:
    there = of_peft("llama", alpha_pattern={"q_proj": 7, "layers.1.self_attn.v_proj": 3}, rank_pattern={"v_proj": 1})
    there.save_pretrained(tmp_path / "theirs")
    adapters, batch = filled("llama", blocks=1), rows("llama")
    adapters.import_peft(tmp_path / "theirs", "theirs")
    with adapters.forced("theirs"):
        assert_close(logits(adapters, batch), logits(there, batch), atol=1e-5, rtol=1e-4)


def test_layers_that_an_adapter_leaves_alone_stay_as_they_are(tmp_path: Path) -> None:
    there = of_peft("bert", target_modules=["layer.1.attention.self.value"])
    there.save_pretrained(tmp_path / "theirs")
    adapters, batch = filled("bert", blocks=1), rows("bert")
    adapters.import_peft(tmp_path / "theirs", "theirs")
    with adapters.forced("theirs"):
        assert_close(logits(adapters, batch), logits(there, batch), atol=1e-5, rtol=1e-4)


def test_a_block_goes_out_and_comes_back(tmp_path: Path) -> None:
    adapters = filled("gpt2")
    adapters.close()
    adapters.export_peft("task0", tmp_path / "one")
    number = adapters.import_peft(tmp_path / "one", "again")
    assert adapters.opened is None
    for mine, back in zip(adapters.pool.parameters_of(0), adapters.pool.parameters_of(number), strict=True):
        assert_close(back, mine)


def test_the_router_lies_beside_the_block(tmp_path: Path) -> None:
    adapters, batch = filled("bert"), rows("bert")
    adapters.export_peft("task0", tmp_path / "one", router=True)
    found = load_file(tmp_path / "one" / "shared_attention.safetensors")
    assert set(found) == {f"attention.{name}" for name in ("down", "up", "norm.weight", "norm.bias", "keys")}
    hidden = adapters.vectors(**batch) @ found["attention.down"].T @ found["attention.up"].T
    query = torch.nn.functional.layer_norm(torch.nn.functional.silu(hidden), (16,), found["attention.norm.weight"])
    assert_close((query @ found["attention.keys"].T / 4).softmax(1), adapters.weights(**batch))
    there = peft.PeftModel.from_pretrained(made("bert"), tmp_path / "one").eval()
    with adapters.forced("task0"):
        assert_close(logits(there, batch), logits(adapters, batch), atol=1e-5, rtol=1e-4)


def test_a_folder_is_replaced_only_where_that_is_allowed(tmp_path: Path) -> None:
    adapters = filled("bert")
    adapters.export_peft("task0", tmp_path / "one")
    with pytest.raises(UserError, match=r"^folder: .* exists; choose another folder, or give overwrite=True"):
        adapters.export_peft("task1", tmp_path / "one")
    adapters.export_peft("task1", tmp_path / "one", overwrite=True)
    name = "base_model.model.bert.encoder.layer.0.attention.self.query.lora_B.weight"
    assert torch.equal(load_file(tmp_path / "one" / "adapter_model.safetensors")[name], blocks_of(adapters)[0].B[1])
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"use_dora": True}, r"expected a plain LoRA adapter, got one that is weight-decomposed \(DoRA\)"),
        ({"peft_type": "IA3"}, "expected a LoRA adapter, got one of the type 'IA3'"),
        ({"bias": "all"}, "expected a plain LoRA adapter, got one with biases"),
        ({"modules_to_save": ["classifier"]}, "got one that is with whole modules"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            r"peft changes the base model's own weights \(init_lora_weights='pissa",
        ),
        ({"init_lora_weights": "olora"}, "peft changes the base model's own weights"),
        ({"r": None}, "expected a rank r and lora_alpha"),
    ],
)
def test_another_kind_of_adapter_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    adapters = filled("bert")
    adapters.export_peft("task0", tmp_path / "one")
    path = tmp_path / "one" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(UserError, match=message):
        adapters.import_peft(tmp_path / "one", "new")
    assert adapters.names == ("task0", "task1", "task2")


def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    of_peft("bert", r=6).save_pretrained(tmp_path / "wide")
    of_peft("llama").save_pretrained(tmp_path / "other")
    of_peft("bert", target_modules=["key"]).save_pretrained(tmp_path / "keys")
    adapters = filled("bert")
    with pytest.raises(UserError, match=r"expected a rank of at most 4, got 6"):
        adapters.import_peft(tmp_path / "wide", "new")
    with pytest.raises(
        UserError, match=r"expected an adapter of the layers query, value of this model, got one of model"
    ):
        adapters.import_peft(tmp_path / "other", "new")
    with pytest.raises(UserError, match=r"got one of bert.encoder.layer.0.attention.self.key"):
        adapters.import_peft(tmp_path / "keys", "new")
    with pytest.raises(UserError, match=r"expected an adapter of PEFT, a folder with adapter_config.json"):
        adapters.import_peft(tmp_path / "nowhere", "new")
    with pytest.raises(UserError, match=r"name: expected a new one, got 'task0'"):
        filled("bert").import_peft(_narrow(tmp_path), "task0")
    assert adapters.names == ("task0", "task1", "task2")


def _narrow(folder: Path) -> Path:
    of_peft("bert", r=2).save_pretrained(folder / "narrow")
    return folder / "narrow"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    adapters = filled("bert")
    adapters.export_peft("task0", tmp_path / "one")
    weights = tmp_path / "one" / "adapter_model.safetensors"
    tensors = load_file(weights)
    key = next(name for name in tensors if "lora_A" in name)
    save_file({name: value for name, value in tensors.items() if name != key}, weights)
    with pytest.raises(UserError, match=r"expected A and B of .*, got B alone"):
        adapters.import_peft(tmp_path / "one", "new")
    save_file({**tensors, "base_model.model.bert.lora_embedding_A": torch.ones(1)}, weights)
    with pytest.raises(UserError, match=r"expected A and B of layers in adapter_model.safetensors, got base_model"):
        adapters.import_peft(tmp_path / "one", "new")
    save_file({**tensors, key: torch.ones(4, 3)}, weights)
    with pytest.raises(UserError, match=r"of 16 inputs and 16 outputs, got A"):
        adapters.import_peft(tmp_path / "one", "new")
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(UserError, match=r"expected a whole file of safetensors"):
        adapters.import_peft(tmp_path / "one", "new")
    weights.unlink()
    with pytest.raises(UserError, match=r"expected adapter_model.safetensors, got none"):
        adapters.import_peft(tmp_path / "one", "new")


def test_prompts_are_no_lora(tmp_path: Path) -> None:
    adapters = SharedAdapters(made("bert"), block="prompt", length=2, hidden=4)
    adapters.add("one")
    with pytest.raises(UserError, match=r"block: expected 'lora' to export, got 'prompt'"):
        adapters.export_peft("one", tmp_path / "one")
    assert not (tmp_path / "one").exists()
