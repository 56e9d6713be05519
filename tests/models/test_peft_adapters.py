"""Models with adapters of PEFT: merged when they are loaded, in place where a `PeftModel` is measured."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import regard
from regard.errors import UserError
from regard.models import load
from regard.models.peft_adapters import TASK_CLASSES, merge_adapter, unwrap_peft
from regard.models.pretrained import as_loaded
from tests.tiny_quantized import KINDS, PackedLinear, dequantize, quantize

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
"""PEFT calls what Transformers renames."""

Saved = Callable[..., Path]
ALL_LAYERS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "bert": ["query", "value", "dense"],
    "t5": ["q", "v", "o"],
}
CLASSES = {"llama": AutoModelForCausalLM, "gpt2": AutoModelForCausalLM, "bert": AutoModel}
TEXTS = [" ".join(f"w{(3 * i + j) % 29 + 1}" for j in range(40)) for i in range(6)]


def ids() -> Tensor:
    return torch.randint(1, 30, (2, 12), generator=torch.Generator().manual_seed(1))


def adapt(model: Any, **options: Any) -> Any:
    """A `PeftModel` with LoRA matrices that change the output."""
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, fan_in_fan_out=model.config.model_type == "gpt2", **options)
    )
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return adapted.eval()


def adapted_folders(saved: Saved, kind: str, task: str | None, **options: Any) -> tuple[Path, Path, Any]:
    """The folders of a base and of its adapter, and both as a `PeftModel`."""
    base = saved(kind)
    model = adapt(CLASSES[kind].from_pretrained(base), task_type=task, target_modules=ALL_LAYERS[kind], **options)
    model.save_pretrained(base.parent / "adapter")
    return base, base.parent / "adapter", model


@pytest.mark.parametrize("kind,task", [("llama", "CAUSAL_LM"), ("llama", None), ("gpt2", "CAUSAL_LM"), ("bert", None)])
@torch.no_grad()
def test_a_base_with_an_adapter_is_the_peft_model(kind: str, task: str | None, saved: Saved) -> None:
    base, folder, model = adapted_folders(saved, kind, task)
    expected = model(ids(), output_hidden_states=True).hidden_states[-1]
    plain = load(str(base))
    for loaded in (load(str(base), adapter=str(folder)), load(str(folder))):
        assert type(loaded.model) is type(plain.model)
        torch.testing.assert_close(loaded.model(ids())[0], expected)
        assert (loaded.name, loaded.adapter) == (str(base), str(folder))
        assert loaded.sha256 not in (None, plain.sha256)
    assert not torch.allclose(plain.model(ids())[0], expected, atol=1e-2)


@pytest.mark.parametrize("kind, task", [("llama", "CAUSAL_LM"), ("bert", None)])
def test_what_an_adapter_was_merged_into_is_trained_whole(kind: str, task: str | None, saved: Saved) -> None:
    """PEFT freezes a base; fine-tuning it merged would train a new head alone, or nothing."""
    base, folder, model = adapted_folders(saved, kind, task)
    tokenizer = AutoTokenizer.from_pretrained(base)
    given = as_loaded(model, tokenizer, to="teach", call="regard.learn(…)").model
    for merged in (load(str(base), adapter=str(folder)).model, load(str(folder)).model, given):
        names = [name for name, parameter in merged.named_parameters() if not parameter.requires_grad]
        assert names == []
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert len(frozen) == len([*AutoModel.from_pretrained(base).parameters()]) + (kind == "llama"), "a copy is merged"


@torch.no_grad()
def test_a_language_model_keeps_its_head(saved: Saved) -> None:
    _, folder, model = adapted_folders(saved, "llama", "CAUSAL_LM")
    torch.testing.assert_close(load(str(folder), language_model=True).model(ids()).logits, model(ids()).logits)


@torch.no_grad()
def test_an_adapter_of_a_classifier_is_merged_into_its_encoder(saved: Saved) -> None:
    base = saved("bert")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classifier = AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
        model = adapt(classifier, task_type="SEQ_CLS", target_modules=ALL_LAYERS["bert"][:2])
    model.save_pretrained(base.parent / "adapter")
    expected = model(ids(), output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(load(str(base.parent / "adapter")).model(ids()).last_hidden_state, expected)


@pytest.mark.parametrize("kind, task", [("bert", "SEQ_CLS"), ("bert", "TOKEN_CLS"), ("llama", "SEQ_CLS")])
def test_a_head_of_any_number_of_classes_is_merged(kind: str, task: str, saved: Saved) -> None:
    base = saved(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        classifier = getattr(transformers, TASK_CLASSES[task]).from_pretrained(base, num_labels=5)
        model = adapt(classifier, task_type=task, target_modules=ALL_LAYERS[kind][:2])
    model.save_pretrained(base.parent / "adapter")
    expected = model.base_model.model.base_model(ids()).last_hidden_state
    torch.testing.assert_close(load(str(base), adapter=str(base.parent / "adapter")).model(ids())[0], expected)


@pytest.mark.filterwarnings("ignore")
def test_adapters_of_a_tied_head_are_refused_where_they_would_be_merged(saved: Saved) -> None:
    base = saved("gpt2")
    model = adapt(CLASSES["gpt2"].from_pretrained(base), task_type="CAUSAL_LM", target_modules=["lm_head"])
    model.save_pretrained(base.parent / "adapter")
    expected = (
        r"adapter: expected one of layers with weights of their own, .* adapts lm_head, whose weight other layers"
    )
    with pytest.raises(UserError, match=expected):
        load(str(base), adapter=str(base.parent / "adapter"))
    with pytest.raises(UserError, match=expected):
        unwrap_peft(model, merge=True)
    assert unwrap_peft(model, merge=False) is model.get_base_model()


def test_a_peft_model_is_measured_as_the_merged_one(saved: Saved) -> None:
    base, folder, model = adapted_folders(saved, "llama", "CAUSAL_LM")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    options: dict[str, Any] = {"texts": TEXTS, "samples": 4, "length": 16}
    options["statistics"] = ["column_mass", "value_weighted_mass", "head_output_norm", "hidden_norm"]
    in_place = regard.measure(model, AutoTokenizer.from_pretrained(base), **options)
    merged = regard.measure(load(str(base), adapter=str(folder)), **options)
    plain = regard.measure(str(base), **options)
    for name in options["statistics"]:
        values, others, plain_values = (
            torch.tensor(run.frame(name)["value"].to_numpy()) for run in (in_place, merged, plain)
        )
        torch.testing.assert_close(values, others, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(values, plain_values, rtol=1e-2)
    assert in_place.metadata["model"]["adapter"] == "default of a PeftModelForCausalLM"
    assert merged.metadata["model"]["adapter"] == str(folder)
    assert "adapter" not in plain.metadata["model"]
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())


def test_other_verbs_take_a_merged_copy(saved: Saved) -> None:
    base, _, model = adapted_folders(saved, "llama", "CAUSAL_LM")
    loaded = as_loaded(model, AutoTokenizer.from_pretrained(base), to="teach", call="")
    assert not any("lora" in name for name, _ in loaded.model.named_parameters())
    assert any("lora" in name for name, _ in model.named_parameters())
    torch.testing.assert_close(loaded.model(ids()).logits, model(ids()).logits)  # type: ignore[operator]


def refusal(name: Path, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(str(name), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_an_adapter_stands_beside_weights_that_are_quantized(kind: type[PackedLinear], saved: Saved) -> None:
    """Merged into them it would be rounded, or lost."""
    base, folder, _ = adapted_folders(saved, "llama", "CAUSAL_LM")
    torch.manual_seed(0)
    model = quantize(AutoModelForCausalLM.from_pretrained(base), kind, ("q_proj", "o_proj"))
    whole = dequantize(model, AutoModelForCausalLM.from_pretrained(base)).eval()
    expected = merge_adapter(whole, folder, "adapter")
    adapted = merge_adapter(model, folder, "adapter")
    torch.testing.assert_close(adapted(ids()).logits, expected(ids()).logits, rtol=1e-4, atol=1e-4)
    frames = []
    for host in (adapted, expected):
        with regard.watching(host, ["default", "head_output_norm"]) as watch:
            host(ids())
        frames.append(watch.frame()["value"])
    assert frames[0].tolist() == pytest.approx(frames[1].tolist(), rel=1e-3, abs=1e-5, nan_ok=True)
    again = quantize(AutoModelForCausalLM.from_pretrained(base), kind, ("q_proj", "o_proj"))
    beside = peft.PeftModelForCausalLM.from_pretrained(again, str(folder))
    with pytest.raises(UserError, match=r"those of this PeftModelForCausalLM are quantized: merge it into the model"):
        unwrap_peft(beside, merge=True)


def test_what_is_no_adapter_of_the_model_is_refused(saved: Saved, tmp_path: Path) -> None:
    base, folder, _ = adapted_folders(saved, "llama", "CAUSAL_LM")
    other = saved("gpt2")
    with pytest.warns(UserWarning, match="it was trained on"):
        assert "does not fit the model" in refusal(other, adapter=str(folder))
    assert "expected none with" in refusal(folder, adapter=str(folder))
    assert "expected a folder with adapter_config.json" in refusal(base, adapter=str(other))
    for name in ("two", "one"):
        shutil.copytree(folder, tmp_path / "set" / name)
    assert f"expected one of the folders in '{tmp_path / 'set'}' (one, two), got all" in refusal(
        base, adapter=str(tmp_path / "set")
    )
    assert "random weights" in refusal(base, adapter=str(folder), random_weights=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    assert "does not name its base model" in refusal(folder)
    (folder / "adapter_config.json").write_text("[]")
    assert "expected a JSON object" in refusal(base, adapter=str(folder))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "damaged or cut off" in refusal(base, adapter=str(folder))
    (folder / "adapter_model.safetensors").unlink()
    assert "pickled weights are not read" in refusal(base, adapter=str(folder))


def test_adapters_that_add_tokens_are_refused(saved: Saved, tmp_path: Path) -> None:
    base = saved("llama")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    model.save_pretrained(tmp_path / "adapter")
    assert "PROMPT_TUNING, which adds tokens" in refusal(base, adapter=str(tmp_path / "adapter"))
    with pytest.raises(UserError, match="PROMPT_TUNING, which adds tokens"):
        regard.measure(model, AutoTokenizer.from_pretrained(base), TEXTS)


def test_an_adapter_with_a_head_is_merged_in_half_precision(saved: Saved) -> None:
    base, folder, model = adapted_folders(saved, "llama", "CAUSAL_LM", modules_to_save=["lm_head"])
    found = load(str(folder), language_model=True, dtype="bfloat16").model
    expected = model.merge_and_unload().lm_head.weight.bfloat16()
    assert found.get_output_embeddings().weight.equal(expected)
    assert type(load(str(folder), head=True).model) is type(load(str(base), head=True).model)


def test_a_base_in_the_cache_of_the_hub_is_the_one_that_the_adapter_names(saved: Saved, tmp_path: Path) -> None:
    _, folder, _ = adapted_folders(saved, "llama", "CAUSAL_LM")
    snapshot = tmp_path / "models--org--base" / "snapshots" / ("a" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.move(folder.parent / "llama", snapshot)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/base"}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="adapter: it was trained on")
        warnings.filterwarnings("ignore", message="Could not find a config file")  # PEFT, without the hub
        load(str(snapshot), adapter=str(folder))
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/other"}))
    with pytest.warns(UserWarning, match="it was trained on org/other|Could not find") as told:
        load(str(snapshot), adapter=str(folder))
    assert any("it was trained on org/other" in str(one.message) for one in told)
