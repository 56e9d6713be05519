"""Models with constant heads of their own: saved, loaded, and equal to a model inside `replacing`."""

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel

import regard
from regard.constants import Constants, Origin
from regard.hooks.layers import find_attention_layers, model_fingerprint

pytestmark = pytest.mark.sample(2)


def constants_for(model: Any, length: int = 24, seed: int = 3) -> Constants:
    here = find_attention_layers(model)
    generator = torch.Generator().manual_seed(seed)
    matrices = {(p.site, p.layer): torch.rand(p.heads, length, length, generator=generator) for p in here}
    return Constants(matrices=matrices, origin=Origin(source="test", model=model_fingerprint(model, here)))


def some(constants: Constants) -> list[Any]:
    return [head for head in constants.heads if head[1] > 0 or head[2] in (0, 2)]


def test_replaced_is_replacing_and_survives_disk(
    family: Any, build: Callable, inputs: Callable, run: Callable, tmp_path: Path
) -> None:
    model = build(family)
    constants = constants_for(model)
    padding = "right" if "right" in family.paddings else "none"
    with regard.replacing(model, constants, some(constants)):
        expected = run(model, inputs(family, padding))
    untouched = run(model, inputs(family, padding))
    fixed = regard.replaced(model, constants, some(constants))
    assert isinstance(fixed, type(model))
    torch.testing.assert_close(run(fixed, inputs(family, padding)), expected)
    assert torch.equal(run(model, inputs(family, padding)), untouched), "the model itself must not change"

    fixed.save_pretrained(tmp_path / "fixed")
    loaded = regard.ReplacedModel.from_pretrained(str(tmp_path / "fixed"))
    assert type(loaded) is type(fixed)
    assert not loaded.training
    assert torch.equal(run(loaded, inputs(family, padding)), run(fixed, inputs(family, padding)))
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in fixed.parameters())


@pytest.mark.exhaustive
@pytest.mark.parametrize("attention", ["sigmoid", "softmax+window=5", "softmax+window=5+prefix=2"])
def test_another_operation_is_kept_as_well(
    family: Any, attention: str, build: Callable, inputs: Callable, run: Callable, tmp_path: Path
) -> None:
    model, batch = build(family), inputs(family, family.paddings[-1])
    try:
        with regard.replacing(model, attention):
            expected = run(model, batch)
    except regard.UserError as error:
        refusal = str(error)
        with pytest.raises(regard.UserError, match=re.escape(refusal)):
            regard.replaced(model, attention)
        return
    untouched, fixed = run(model, batch), regard.replaced(model, attention)
    assert not torch.allclose(expected, untouched)
    assert torch.equal(run(fixed, batch), expected)
    assert torch.equal(run(model, batch), untouched), "the model itself must not change"
    fixed.save_pretrained(tmp_path / "fixed")
    assert torch.equal(run(regard.ReplacedModel.from_pretrained(str(tmp_path / "fixed")), batch), expected)
    assert torch.equal(run(copy.deepcopy(fixed), batch), expected)


def test_an_operation_goes_into_some_layers(build: Callable, inputs: Callable, run: Callable, families: Any) -> None:
    model, batch = build("Llama"), inputs(families["Llama"], "left")
    with regard.replacing(model, "sigmoid", layers=[1]):
        expected = run(model, batch)
    assert torch.equal(run(regard.replaced(model, "sigmoid", layers=[1]), batch), expected)
    with pytest.raises(regard.UserError, match="choose where an operation goes with layers="):
        regard.replaced(model, "sigmoid", 0.5)
    with pytest.raises(regard.UserError, match="choose where constants go with heads="):
        regard.replaced(model, constants_for(model), layers=[1])


def test_hidden_states_are_given(build: Callable, inputs: Callable, families: Any) -> None:
    model = build("Bert")
    constants = constants_for(model)
    batch = inputs(families["Bert"], "right")
    fixed = regard.replaced(model, constants)
    found = fixed(**batch, output_hidden_states=True).hidden_states
    with regard.replacing(model, constants):
        expected = model(**batch, output_hidden_states=True).hidden_states
    assert len(found) == len(expected) == 3
    for layer, other in zip(found, expected, strict=True):
        torch.testing.assert_close(layer, other)


def test_parts_that_were_left_out_stay_out(capfd: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = transformers.BertModel(transformers.BertConfig(vocab_size=20, **sizes), add_pooling_layer=False).eval()
    fixed = regard.replaced(model, constants_for(model))
    assert fixed.pooler is None
    assert not any("pooler" in name for name in fixed.state_dict())
    assert capfd.readouterr().err == ""


def test_what_a_model_carries_comes_along(build: Callable) -> None:
    """Its generation settings, its precisions; and from disk what was left out stays out."""
    model = copy.deepcopy(build("GPT2"))
    model.generation_config.max_new_tokens, model.generation_config.repetition_penalty = 7, 1.3
    model = model.half()
    model.transformer.ln_f.float()
    fixed = regard.replaced(model, constants_for(model))
    assert (fixed.generation_config.max_new_tokens, fixed.generation_config.repetition_penalty) == (7, 1.3)
    assert fixed.transformer.ln_f.weight.dtype == torch.float32
    assert fixed.lm_head.weight.dtype == torch.float16


def test_a_model_that_was_changed_is_refused(build: Callable) -> None:
    model = copy.deepcopy(build("Bert"))
    model.encoder.layer[0].output.dense = torch.nn.Sequential(model.encoder.layer[0].output.dense)
    with pytest.raises(regard.UserError, match="its parts are not those of its class"):
        regard.replaced(model, constants_for(model))


class RoundingLinear(torch.nn.Linear):
    """As BitNet's `AutoBitLinear`: no layer of the model's class, with a weight of the same name."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(states, self.weight.round(decimals=1), self.bias)


@pytest.mark.every_value
@pytest.mark.parametrize("part, kind", [("query", "constants"), ("query", "sigmoid"), ("value", "constants")])
def test_linear_layers_of_another_class_are_refused(build: Callable, part: str, kind: str) -> None:
    """Queries ended in a traceback of Transformers, the others silently in layers of the plain class."""
    model = copy.deepcopy(build("Bert"))
    getattr(model.encoder.layer[0].attention.self, part).__class__ = RoundingLinear
    with pytest.raises(regard.UserError, match=r"not those of its class, such as encoder.layer.0.attention.self"):
        regard.replaced(model, constants_for(model) if kind == "constants" else kind)


def test_another_attention_is_refused(build: Callable) -> None:
    model = build("Bert")
    with pytest.raises(regard.UserError, match="to 'sdpa'; leave it as it is"):
        regard.replaced(model, constants_for(model)).set_attn_implementation("sdpa")


@pytest.mark.sample(2)
def test_each_architecture_is_loaded_by_its_own_auto_class(build: Callable, tmp_path: Path) -> None:
    base = build("Bert")
    torch.manual_seed(0)
    headed = transformers.BertForSequenceClassification(base.config).eval()
    for name, model in (("base", base), ("headed", headed)):
        regard.replaced(model, constants_for(model), [(0, 1)]).save_pretrained(tmp_path / name)
    loaded = [
        AutoModel.from_pretrained(tmp_path / "base"),
        transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "headed"),
        AutoModel.from_pretrained(tmp_path / "base"),
    ]
    assert [type(model).__name__ for model in loaded] == [
        "ReplacedBertModel",
        "ReplacedBertForSequenceClassification",
        "ReplacedBertModel",
    ]
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification", "QuestionAnswering"])
def test_classifiers_whose_inner_model_is_made_by_an_auto_class(task: str, build: Callable, tmp_path: Path) -> None:
    """Llama and seventy others make the model behind their head by `AutoModel`, of the class of their config."""
    base = build("Llama")
    base.config.pad_token_id = 0
    torch.manual_seed(0)
    model = getattr(transformers, f"LlamaFor{task}")(base.config).eval()
    ids = torch.randint(2, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    padded = {"input_ids": ids.masked_fill(torch.tensor([[0], [1]]) * torch.arange(9) > 5, 0)}
    padded["attention_mask"] = (padded["input_ids"] != 0).long()
    constants = constants_for(model)
    for what in ((constants, some(constants)), ("sigmoid+window=3",)):
        with torch.no_grad(), regard.replacing(model, *what):
            expected = model(**padded)
        regard.replaced(model, *what).save_pretrained(tmp_path / "headed")
        loaded = getattr(transformers, f"AutoModelFor{task}").from_pretrained(tmp_path / "headed")
        assert type(loaded).__name__ == f"ReplacedLlamaFor{task}" == type(copy.deepcopy(loaded)).__name__
        with torch.no_grad():
            torch.testing.assert_close(loaded(**padded).to_tuple()[0], expected.to_tuple()[0])
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            AutoModel.from_pretrained(tmp_path / "headed")


def test_a_stack_saved_alone_is_not_read_without_what_is_replaced(tmp_path: Path) -> None:
    """T5's stacks copy the config of the model while it is built."""
    sizes: dict[str, Any] = {"vocab_size": 50, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    made: Any = regard.replaced(model, "sigmoid", sites=("encoder",))
    made.encoder.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        transformers.AutoModel.from_pretrained(tmp_path)


def test_an_exception_on_the_way_in_leaves_the_model_as_it_was(
    build: Callable, inputs: Callable, run: Callable, families: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = build("Bert"), inputs(families["Bert"], "none")
    expected, thin = run(model, batch), sys.modules["regard.hooks.replace"].prune_projections

    def fails_later(place: Any, heads: Any) -> Any:
        if place.layer:
            raise RuntimeError("on purpose")
        return thin(place, heads)

    monkeypatch.setattr(sys.modules["regard.hooks.replace"], "prune_projections", fails_later)
    with pytest.raises(RuntimeError, match="on purpose"), regard.replacing(model, constants_for(model)):
        pass
    assert torch.equal(run(model, batch), expected)


def test_auto_classes_load_it(build: Callable, inputs: Callable, run: Callable, families: Any, tmp_path: Path) -> None:
    model = build("Bert")
    fixed = regard.replaced(model, constants_for(model), [(0, 1)])
    fixed.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "regard-replaced"
    regard.ReplacedModel.register()
    loaded = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(run(loaded, inputs(families["Bert"], "right")), run(fixed, inputs(families["Bert"], "right")))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, transformers.BertConfig)


def test_measuring_a_loaded_model(build: Callable, inputs: Callable, families: Any, tmp_path: Path) -> None:
    model = build("Bert")
    identity_like = constants_for(model)
    eye = {place: torch.eye(24).expand(len(m), 24, 24) for place, m in identity_like.matrices.items()}
    fixed = regard.replaced(model, Constants(matrices=eye, origin=identity_like.origin), [(1, 2)])
    fixed.save_pretrained(tmp_path)
    loaded = regard.ReplacedModel.from_pretrained(str(tmp_path))
    with regard.watching(loaded, "distance") as seen:
        loaded(**inputs(families["Bert"], "right"))
    frame = seen.frame("distance")
    fixed_head = frame[(frame["layer"] == 1) & (frame["head"] == 2)]["value"]
    assert len(fixed_head)
    assert (fixed_head == 0).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["GPT2", "T5"])
def test_generating(name: str, build: Callable, inputs: Callable, families: Any, tmp_path: Path) -> None:
    model = build(name)
    constants = constants_for(model, 40)
    batch = {k: v for k, v in inputs(families[name], "left").items() if k in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with regard.replacing(model, constants, some(constants)):
        expected = model.generate(**batch, **options)
    regard.replaced(model, constants, some(constants)).save_pretrained(tmp_path)
    loaded = regard.ReplacedModel.from_pretrained(str(tmp_path))
    assert torch.equal(loaded.generate(**batch, **options), expected)


def test_training_reaches_everything_that_is_left(build: Callable, inputs: Callable, families: Any) -> None:
    model = build("Bert")
    fixed = regard.replaced(model, constants_for(model), [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]).train()
    fixed(**inputs(families["Bert"], "right"))[0].square().sum().backward()
    without = [
        name
        for name, parameter in fixed.named_parameters()
        if parameter.grad is None and parameter.numel() and "pooler" not in name and "constant_heads" not in name
    ]
    assert without == []


def test_copies_stand_alone(build: Callable, inputs: Callable, run: Callable, families: Any) -> None:
    for name in ("Bert", "Deberta"):
        model = build(name)
        fixed = regard.replaced(model, constants_for(model), [(0, 0)])
        batch = inputs(families[name], "none")
        expected = run(fixed, batch)
        other = copy.deepcopy(fixed)
        with torch.no_grad():
            for parameter in fixed.parameters():
                parameter.zero_()
        assert torch.equal(run(other, batch), expected)


def test_what_is_no_replaced_model_is_refused(build: Callable, tmp_path: Path) -> None:
    build("Bert").save_pretrained(tmp_path)
    with pytest.raises(regard.UserError, match=r"expected a model that regard\.replaced made"):
        regard.ReplacedModel.from_pretrained(str(tmp_path))


def test_constants_of_another_model_are_refused(build: Callable) -> None:
    bert, electra = build("Bert"), build("Electra")
    constants = constants_for(bert)
    with pytest.raises(regard.UserError, match=r'type "electra".*type "bert"'), regard.replacing(electra, constants):
        pass
    generator = torch.Generator().manual_seed(9)
    other = copy.deepcopy(bert)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    with pytest.raises(regard.UserError, match="of another one: their weights"):
        regard.replaced(other, constants)
    assert regard.replaced(other, constants, any_model=True) is not None
    half = copy.deepcopy(bert).half()
    assert regard.replaced(half, constants) is not None, "the same weights in another dtype are the same model"
