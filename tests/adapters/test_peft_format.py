"""Blocks that peft loads, and adapters of peft that become blocks: the same logits on both sides."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from regard.adapters.base_identity import base_sha256
from regard.adapters.peft_format import name_folders
from regard.adapters.router_warmup import PastTask
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import LEARNT, blocks_of, filled, logits, made, rows

peft = pytest.importorskip("peft")

# peft asks Transformers for a name that will go.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

ADVICE = "any_model=True takes other weights, such as this base in another precision"
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
    with adapters.use_only("task1"):
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
    assert adapters.adapter_names == ("task0", "task1", "theirs")
    assert adapters.provenance["theirs"] == {"order": 2, "task": "sst2"}
    assert adapters.active_adapter == "task1"
    with adapters.use_only("theirs"):
        assert_close(logits(adapters, batch), logits(there, batch), atol=1e-5, rtol=1e-4)


def test_patterns_of_alpha_and_of_rank_are_followed(tmp_path: Path) -> None:
    there = of_peft("llama", alpha_pattern={"q_proj": 7, "layers.1.self_attn.v_proj": 3}, rank_pattern={"v_proj": 1})
    there.save_pretrained(tmp_path / "theirs")
    adapters, batch = filled("llama", blocks=1), rows("llama")
    adapters.import_peft(tmp_path / "theirs", "theirs")
    with adapters.use_only("theirs"):
        assert_close(logits(adapters, batch), logits(there, batch), atol=1e-5, rtol=1e-4)


def test_layers_that_an_adapter_leaves_alone_stay_as_they_are(tmp_path: Path) -> None:
    there = of_peft("bert", target_modules=["layer.1.attention.self.value"])
    there.save_pretrained(tmp_path / "theirs")
    adapters, batch = filled("bert", blocks=1), rows("bert")
    adapters.import_peft(tmp_path / "theirs", "theirs")
    with adapters.use_only("theirs"):
        assert_close(logits(adapters, batch), logits(there, batch), atol=1e-5, rtol=1e-4)


def test_a_block_goes_out_and_comes_back(tmp_path: Path) -> None:
    adapters = filled("gpt2")
    adapters.freeze()
    adapters.export_peft("task0", tmp_path / "one")
    number = adapters.import_peft(tmp_path / "one", "again")
    assert adapters.active_adapter is None
    for mine, back in zip(adapters.pool.parameters_of(0), adapters.pool.parameters_of(number), strict=True):
        assert_close(back, mine)


def test_the_router_lies_beside_the_block(tmp_path: Path) -> None:
    adapters, batch = filled("bert"), rows("bert")
    adapters.export_peft("task0", tmp_path / "one", router=True)
    found = load_file(tmp_path / "one" / "router.safetensors")
    assert set(found) == {f"router.{name}" for name in ("down", "up", "norm.weight", "norm.bias", "keys")}
    hidden = adapters.query_vectors(**batch) @ found["router.down"].T @ found["router.up"].T
    query = torch.nn.functional.layer_norm(torch.nn.functional.silu(hidden), (16,), found["router.norm.weight"])
    assert_close((query @ found["router.keys"].T / 4).softmax(1), adapters.routing_weights(**batch))
    there = peft.PeftModel.from_pretrained(made("bert"), tmp_path / "one").eval()
    with adapters.use_only("task0"):
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
    assert adapters.adapter_names == ("task0", "task1", "task2")


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
    assert adapters.adapter_names == ("task0", "task1", "task2")


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
    adapters = SharedAdapters(
        made("bert"), **LEARNT, adapter_type="prompt", num_virtual_tokens=2, encoder_hidden_size=4
    )
    adapters.add_adapter("one")
    with pytest.raises(UserError, match=r"adapter_type: expected 'lora' to export, got 'prompt'"):
        adapters.export_peft("one", tmp_path / "one")
    assert not (tmp_path / "one").exists()


def metadata(path: Path) -> dict[str, str]:
    """What is told in the header of a file of safetensors."""
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())


def tell(path: Path, told: dict[str, str]) -> None:
    """Have the same tensors under another header."""
    save_file(load_file(path), path, told)


def exported(adapters: SharedAdapters, folder: Path, *, router: bool = True) -> list[Path]:
    """The folders of all blocks, in their order."""
    return [adapters.export_peft(name, folder / name, router=router) for name in adapters.adapter_names]


def trained(family: str, **options: Any) -> SharedAdapters:
    """Blocks whose keys and maps are no draw of a seed."""
    adapters = filled(family, **options)
    random = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for value in adapters.router.parameters():
            value.copy_(torch.randn(value.shape, generator=random))
    return adapters


def refusal(adapters: SharedAdapters, folder: Path, **options: Any) -> str:
    """The one line with which an adapter is refused; what is here stays as it was."""
    before = {name: value.clone() for name, value in adapters.state_dict().items()}
    names, opened = adapters.adapter_names, adapters.active_adapter
    with pytest.raises(UserError) as refused:
        adapters.import_peft(folder, "new", **options)
    assert (adapters.adapter_names, adapters.active_adapter) == (names, opened)
    after = adapters.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("family", KINDS)
def test_a_block_of_another_base_is_refused(family: str, tmp_path: Path) -> None:
    adapters = filled(family)
    adapters.export_peft("task1", tmp_path / "one")
    other = SharedAdapters(made(family, seed=99), **LEARNT, r=4)
    here, there = base_sha256(other.model)[:12], base_sha256(adapters.model)[:12]
    wanted = f"the base of these adapters, {type(adapters.model).__name__} without a name with the weights {there}"
    assert refusal(other, tmp_path / "one") == f"model: expected {wanted}, got the weights {here}; {ADVICE}"


def test_the_base_is_known_by_its_weights_in_any_precision_with_any_head(tmp_path: Path) -> None:
    filled("bert").export_peft("task1", tmp_path / "one")
    headed = made("bert").bfloat16()
    with torch.no_grad():
        headed.classifier.weight.zero_()
    assert SharedAdapters(headed, r=4).import_peft(tmp_path / "one", "one") == 0


def test_the_base_is_what_it_was_before_blocks_were_merged_into_it(tmp_path: Path) -> None:
    adapters = filled("bert")
    adapters.export_peft("task0", tmp_path / "before")
    adapters.merge("task0")
    with pytest.warns(UserWarning, match="task0, merged into the base, stays out of the folder"):
        adapters.export_peft("task1", tmp_path / "after")
    assert adapters.import_peft(tmp_path / "before", "again") == 2
    assert SharedAdapters(made("bert"), **LEARNT, r=4).import_peft(tmp_path / "after", "one") == 0


def test_the_lineage_of_a_block_comes_back_with_it(tmp_path: Path) -> None:
    adapters = SharedAdapters(made("bert"), **LEARNT, r=4)
    adapters.add_adapter("old")
    adapters.add_adapter("news", lineage={"task": "agnews", "data": {"train": "ab12"}})
    adapters.export_peft("news", tmp_path / "one")
    there = SharedAdapters(made("bert"), **LEARNT, r=4)
    there.import_peft(tmp_path / "one", "first")
    there.import_peft(tmp_path / "one", "second", lineage={"task": "mine"})
    there.import_peft(tmp_path / "one", "third", lineage={})
    base = {"name": None, "sha256": base_sha256(made("bert")), "of": "weights"}
    told = {"task": "agnews", "data": {"train": "ab12"}, "base": base}
    assert there.provenance["first"] == {"order": 0, **told}
    assert there.provenance["second"] == {"order": 1, "task": "mine"}
    assert there.provenance["third"] == {"order": 2}
    again = SharedAdapters.from_pretrained(made("bert"), there.save_pretrained(tmp_path / "saved"))
    assert again.provenance["first"] == {"order": 0, **told}


def test_peft_reads_what_is_told_of_a_block_without_a_word(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """What belongs to the block is in the header of the tensors: peft warns of settings that it does not know."""
    adapters = filled("llama")
    adapters.export_peft("task1", tmp_path / "one", router=True)
    recwarn.clear()
    there = peft.PeftModel.from_pretrained(made("llama"), tmp_path / "one")
    assert [str(one.message) for one in recwarn if "Unexpected" in str(one.message)] == []
    there.save_pretrained(tmp_path / "theirs")
    other = SharedAdapters(made("llama", seed=99), **LEARNT, r=4)
    assert other.import_peft(tmp_path / "theirs", "theirs") == 0
    assert other.provenance["theirs"] == {"order": 0}


@pytest.mark.parametrize("family", KINDS)
def test_a_pool_goes_out_block_by_block_and_comes_back_whole(family: str, tmp_path: Path) -> None:
    adapters, batch = trained(family, seed=5), rows(family)
    there = SharedAdapters(made(family), **LEARNT, r=4)
    for number, folder in enumerate(exported(adapters, tmp_path)):
        assert there.import_peft(folder, folder.name, router=True) == number
    assert there.adapter_names == adapters.adapter_names
    assert there.active_adapter is None
    assert not any(value.requires_grad for value in there.parameters())
    for name, value in adapters.router.state_dict().items():
        assert torch.equal(there.router.state_dict()[name], value), name
    assert torch.equal(there.routing_weights(**batch), adapters.routing_weights(**batch))
    adapters.freeze()
    assert_close(logits(there, batch), logits(adapters, batch), atol=1e-6, rtol=0)
    assert not torch.allclose(logits(there, batch), logits(made(family), batch), atol=1e-3)


@pytest.mark.parametrize(
    "options", [{"projection_order": "paper", "temperature": 2.0, "router_hidden_size": 5}, {"temperature": 4.0}]
)
def test_a_pool_of_other_settings_comes_back_under_these(options: dict[str, Any], tmp_path: Path) -> None:
    """A temperature of √width is the one that is meant where none is given."""
    adapters, batch = trained("gpt2", **options), rows("gpt2")
    there = SharedAdapters(made("gpt2"), **LEARNT, r=4, **({} if options == {"temperature": 4.0} else options))
    for folder in reversed(exported(adapters, tmp_path)):
        there.import_peft(folder, folder.name, router=True)
    assert torch.equal(there.routing_weights(**batch).flip(1), adapters.routing_weights(**batch))


def test_a_block_that_was_taken_out_comes_back_with_its_key(tmp_path: Path) -> None:
    """Also while another is trained, under the maps that both have."""
    adapters, batch = trained("bert"), rows("bert")
    expected, key = adapters.routing_weights(**batch), adapters.router.keys[1].detach().clone()
    adapters.export_peft("task1", tmp_path / "one", router=True)
    adapters.delete_adapter("task1")
    assert adapters.import_peft(tmp_path / "one", "back", router=True) == 2
    assert adapters.active_adapter == "task2"
    assert adapters.router.down.requires_grad
    assert torch.equal(adapters.router.keys[2], key)
    assert not adapters.router.keys[2].requires_grad
    assert_close(adapters.routing_weights(**batch), expected[:, [0, 2, 1]], atol=1e-6, rtol=0)


def test_without_the_router_a_key_is_a_draw_and_the_maps_stay(tmp_path: Path) -> None:
    folder = exported(trained("bert"), tmp_path)[0]
    there, plain = SharedAdapters(made("bert"), **LEARNT, r=4), SharedAdapters(made("bert"), **LEARNT, r=4)
    there.import_peft(folder, "one")
    plain.add_adapter("one")
    for mine, drawn in zip(there.router.parameters(), plain.router.parameters(), strict=True):
        assert torch.equal(mine, drawn)


def test_a_key_of_other_maps_is_refused(tmp_path: Path) -> None:
    folder = exported(trained("bert"), tmp_path)[0]
    reason = "; a key means something only under its own maps"
    there = f"{folder / 'router.safetensors'}: expected"
    assert refusal(filled("bert"), folder, router=True) == (
        f"{there} the maps of the adapters that are here, got others{reason}"
    )
    for options in ({"projection_order": "paper"}, {"temperature": 2.0}, {"router_hidden_size": 7}):
        other = SharedAdapters(made("bert"), **LEARNT, r=4, **options)
        values = {**LEARNT, "query_layers": None, "router_hidden_size": 100, "projection_order": "published"}
        values["temperature"] = 4.0
        mine, theirs = (
            ", ".join(f"{name}={value!r}" for name, value in one.items()) for one in ({**values, **options}, values)
        )
        assert (
            refusal(other, folder, router=True)
            == f"{there} a router of {mine}, got {theirs}; each means something else by a task"
        )


def test_maps_in_another_precision_are_the_same_maps(tmp_path: Path) -> None:
    folders = exported(trained("bert"), tmp_path)
    there = SharedAdapters(made("bert"), **LEARNT, r=4).bfloat16()
    for folder in folders:
        there.import_peft(folder, folder.name, router=True)
    assert there.router.down.dtype == torch.bfloat16
    assert there.adapter_names == ("task0", "task1", "task2")


def test_a_router_that_is_missing_or_damaged_is_refused(tmp_path: Path) -> None:
    adapters = trained("bert")
    adapters.export_peft("task1", tmp_path / "alone")
    there = SharedAdapters(made("bert"), **LEARNT, r=4)
    assert refusal(there, tmp_path / "alone", router=True) == (
        f"{tmp_path / 'alone'}: expected router.safetensors beside the adapter, got none; "
        "`export_peft` writes it with router=True"
    )
    folder = adapters.export_peft("task1", tmp_path / "one", router=True)
    file, block = folder / "router.safetensors", folder / "adapter_model.safetensors"
    whole, own, told = load_file(file), metadata(block), metadata(file)
    damaged = f"{file}: expected a router as `export_peft` leaves it, got "
    for changed in ({**told, "names": "["}, {**told, "names": "[]"}, {**told, "settings": "{}"}, {"format": "pt"}):
        tell(file, changed)
        assert refusal(there, folder, router=True).startswith(damaged)
    for name in whole:
        save_file({other: value for other, value in whole.items() if other != name}, file, told)
        assert refusal(there, folder, router=True).startswith(damaged)
        save_file({**whole, name: whole[name][:-1].contiguous()}, file, told)
        assert refusal(there, folder, router=True).startswith(damaged)
    save_file(whole, file, {**told, "names": '["task0", "a", "b"]'})
    assert refusal(there, folder, router=True) == f"{file}: expected the key of task1, got those of task0, a, b"
    save_file(whole, file, told)
    tell(block, {"format": "pt"})
    assert refusal(there, folder, router=True) == (
        f"{block}: expected the name of its adapter, got none; without router=True it is not needed"
    )
    for changed in ("[", "[]", "{}", '{"name": "task1", "lineage": {}, "base": {"sha256": 3}}'):
        tell(block, {**own, "regard": changed})
        assert refusal(there, folder).startswith(f"{block}: expected what `export_peft` tells of an adapter, got ")
    tell(block, own)
    assert there.import_peft(folder, "one", router=True) == 0


@pytest.mark.parametrize("options", [{}, {"router": "discriminant", "query": "states"}])
@pytest.mark.parametrize("family", KINDS)
def test_a_set_goes_out_and_comes_back_with_its_router(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    adapters, batch = filled(family, **options), rows(family)
    if options:
        for number, name in enumerate(adapters.adapter_names):
            adapters.fit_router(name, [rows(family, many=6, seed=number)])
    adapters.past_tasks["task0"] = PastTask(torch.tensor([0.5, 0.5]), torch.ones(2, adapters.router.width))
    folder = adapters.export_peft_set(tmp_path / "set")
    assert sorted(path.name for path in folder.iterdir()) == ["router.safetensors", "task0", "task1", "task2"]
    back = SharedAdapters.from_peft_set(made(family), folder)
    assert (back.adapter_names, back.active_adapter, back.settings) == (adapters.adapter_names, None, adapters.settings)
    assert torch.equal(back.past_tasks["task0"].vectors, adapters.past_tasks["task0"].vectors)
    assert_close(
        back.state_dict(), adapters.state_dict(), atol=0, rtol=0
    )  # the same bits; products may round otherwise
    assert_close(back.routing_weights(**batch), adapters.routing_weights(**batch), atol=1e-6, rtol=0)
    for name in adapters.adapter_names:
        there = peft.PeftModel.from_pretrained(made(family), folder / name).eval()
        with adapters.use_only(name), back.use_only(name):
            assert_close(logits(back, batch), logits(adapters, batch), atol=1e-5, rtol=1e-4)
            assert_close(logits(there, batch), logits(adapters, batch), atol=1e-5, rtol=1e-4)


def test_adapters_whose_names_no_folders_can_have_go_out_and_come_back(tmp_path: Path) -> None:
    names = ("a/b", "a-b", "A-B", "../up", "router.safetensors", " ", "表/情", "y" * 300, "z" * 250)
    adapters = SharedAdapters(made("bert"), r=2)
    for number, name in enumerate(names):
        adapters.add_adapter(name)
        with torch.no_grad():
            for layer in adapters.layers("test").values():
                layer.adapters.B[number].fill_(number + 1)
    folder = adapters.export_peft_set(tmp_path / "set")
    expected = ["a-b-2", "a-b", "A-B-3", "-up", "router.safetensors-2", "adapter", "表-情", "y" * 60, "z" * 250]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*expected, "router.safetensors"])
    assert [path.name for path in tmp_path.iterdir()] == ["set"]
    back = SharedAdapters.from_peft_set(made("bert"), folder)
    assert back.adapter_names == names
    assert_close(back.state_dict(), adapters.state_dict(), atol=0, rtol=0)
    for number, name in enumerate(expected, start=1):
        up = [value for key, value in load_file(folder / name / "adapter_model.safetensors").items() if "lora_B" in key]
        assert all(bool((value == number).all()) for value in up), name


def test_names_that_some_machines_take_for_one_have_folders_of_their_own() -> None:
    """A set of a task `straße` and a task `STRASSE` could not be copied to a Mac: one overwrote the other."""
    pairs = [("straße", "STRASSE"), ("ςοφια", "σοφια"), ("\u1112\u1161\u11ab", "\ud55c"), ("\u212b", "å")]
    folders = name_folders([name for pair in pairs for name in pair])
    assert folders == ["straße", "STRASSE-2", "ςοφια", "σοφια-2", "\u1112\u1161\u11ab", "\ud55c-2", "\u212b", "å-2"]


def test_a_set_that_cannot_be_written_or_read_whole_is_refused(tmp_path: Path) -> None:
    empty = SharedAdapters(made("bert"))
    with pytest.raises(UserError, match=r"^adapters: expected at least one to export, got none"):
        empty.export_peft_set(tmp_path / "set")
    adapters = filled("bert")
    folder = adapters.export_peft_set(tmp_path / "set")
    with pytest.raises(UserError, match=r"^model: expected the base of these adapters, .* got the weights"):
        SharedAdapters.from_peft_set(made("bert", seed=99), folder)
    with pytest.raises(UserError, match=r"^folder: expected adapters as `export_peft_set` writes them, with router"):
        SharedAdapters.from_peft_set(made("bert"), folder / "task0")
    adapters.merge("task0")
    with pytest.raises(UserError, match=r"^adapters: expected none merged into the base, got task0; `save_pretrained`"):
        adapters.export_peft_set(folder, overwrite=True)
