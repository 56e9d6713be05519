"""Readers without Regard: code beside the weights, Llama's own code, and the card that says which."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, StaticCache

from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.hooks import replaced
from regard.models import RegardConfig, RegardForCausalLM, RegardModel, load, modeling_regard
from regard.models.configuration import FEED_FORWARDS
from regard.models.standalone import CODE, find_unsupported
from regard.runs.model_card import CARD, MARK
from tests.named_cache import cache_of
from tests.processes import run_python

SETTINGS: dict[str, Any] = {
    **{"vocab_size": 41, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"max_position_embeddings": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
MORE = {
    "window": AttentionSpec(window=3),
    "prefix": AttentionSpec(prefix=3, positions="alibi"),
    "window-and-prefix": AttentionSpec(window=2, prefix=2, sink_token=True, positions="alibi"),
    "no-positions": AttentionSpec(positions="none", weighting="sigmoid", extra="kv-bias", log_length=True),
    "sum-with-a-column": AttentionSpec(weighting="elu", normalisation="sum", extra="k-bias", log_length=True),
    "softpick-with-a-logit": AttentionSpec(weighting="softpick", extra="sink-logit"),
    "learned-and-sink-token": AttentionSpec(positions="learned", sink_token=True),
    "sinusoidal": AttentionSpec(positions="sinusoidal", window=4),
    "t5": AttentionSpec(positions="t5", weighting="sigmoid", prefix=3),
    "t5-bucket-number": AttentionSpec(positions="t5-bucket-number"),
    "much-at-once": AttentionSpec(
        feature_map="mlp", qk_norm=True, differential=True, value_residual=True, gate=True, sink_token=True, top_k=3
    ),
}
SPECS = ATTENTIONS | MORE
MASKS = {
    "none": None,
    "left": [[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9],
    "right": [[1, 1, 1, 1, 1, 1, 0, 0, 0], [1] * 9],
    "a hole": [[0, 1, 1, 0, 1, 1, 1, 1, 1], [1] * 9],
}
STATIC = StaticCache(RegardConfig(**SETTINGS), max_cache_len=16)
WITHOUT_REGARD = """
import json, sys
sys.modules["regard"] = None
import torch
from safetensors.torch import save_file
folders, ids, logits = json.loads(sys.argv[1]), torch.tensor(json.loads(sys.argv[2])), {}
for folder in folders:
    found = {}
    exec((open(folder + "/use.py").read()), found)
    model = found["model"]
    logits[folder] = model(ids).logits.detach()
    logits[folder + " generated"] = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.save_pretrained(folder + "/again")
save_file(logits, sys.argv[3])
"""


def _decoder(attention: Any, **changes: Any) -> RegardForCausalLM:
    torch.manual_seed(0)
    model = RegardForCausalLM(RegardConfig(**SETTINGS | changes, attention=attention)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn_like(parameter))
    return model


def _alone(model: RegardForCausalLM) -> Any:
    """The code that is saved, with the weights and the configuration of a decoder."""
    config = modeling_regard.RegardConfig(**model.config.to_dict())
    alone = modeling_regard.RegardForCausalLM(config).double().eval()
    alone.load_state_dict(model.state_dict())
    return alone


def _ids(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, 41, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.every_value
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("mask", MASKS)
@torch.no_grad()
def test_it_computes_what_the_decoder_computes(name: str, mask: str) -> None:
    model, ids = _decoder(SPECS[name], num_key_value_heads=2), _ids()
    given = None if MASKS[mask] is None else torch.tensor(MASKS[mask])
    real = torch.ones_like(ids, dtype=torch.bool) if given is None else given.bool()
    expected = model(ids, attention_mask=given).logits
    found = _alone(model)(ids, attention_mask=given).logits
    torch.testing.assert_close(found[real], expected[real], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(found[:, 1:], found[:, :-1])


@pytest.mark.parametrize(
    "changes", [{"norm": "post"}, {"tie_word_embeddings": True}, *({"ffn": n} for n in FEED_FORWARDS)]
)
@torch.no_grad()
def test_it_has_the_other_parts_of_the_decoder(changes: dict[str, Any]) -> None:
    model = _decoder("sigmoid", **changes, rope_theta=100.0, head_dim=6, rms_norm_eps=0.1)
    torch.testing.assert_close(_alone(model)(_ids()).logits, model(_ids()).logits, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_it_continues_from_a_cache(name: str) -> None:
    model = _decoder(SPECS[name])
    ids, mask = _ids(), torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    alone = _alone(model)
    for argument in ("past_key_values", "cache"):
        started = alone(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        cache = {argument: cache_of(started)}
        later = alone(ids[:, 5:], attention_mask=mask, **cache).logits
        torch.testing.assert_close(later, model(ids, attention_mask=mask).logits[:, 5:], rtol=1e-9, atol=1e-9)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    assert torch.equal(alone.generate(ids, **options), model.generate(ids, **options))


def test_it_can_be_read_before_it_is_trusted() -> None:
    source = CODE.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 350
    imports = re.findall(r"^\s*(?:from|import) (\w+)", source, flags=re.MULTILINE)
    assert set(imports) == {"math", "dataclasses", "typing", "torch", "transformers"}


def test_it_knows_each_field_of_an_attention_or_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {field.name for field in dataclasses.fields(AttentionSpec)}
    assert set(modeling_regard.CHOICES) == fields
    monkeypatch.setitem(modeling_regard.CHOICES, "positions", ("rotary",))
    assert find_unsupported(AttentionSpec(positions="t5").to_dict()) == ["positions=t5"]
    assert find_unsupported({"sharpness": 2}) == ["sharpness=2"]
    for attention in (AttentionSpec(positions="learned").to_dict(), {"sharpness": 2}):
        with pytest.raises(ValueError, match=r"does not know this (positions|sharpness); Regard itself does"):
            modeling_regard.RegardConfig(attention=attention)


@pytest.mark.parametrize(
    "attention, options, message",
    [
        ("sigmoid-log-length", {"input_ids": _ids(1, 25)}, "expected at most 24 tokens, got 25"),
        (AttentionSpec(positions="learned"), {"input_ids": _ids(1, 25)}, "expected at most 24 tokens, got 25"),
        ("sigmoid", {"input_ids": _ids(), "attention_mask": torch.ones(2, 1, 9, 9)}, "attention_mask: expected"),
        ("sigmoid", {"input_ids": _ids(), "past_key_values": STATIC}, "expected a DynamicCache"),
    ],
)
def test_what_it_does_not_compute_is_refused(attention: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _alone(_decoder(attention))(**options)
    with pytest.raises(TypeError, match="position_ids"):
        _alone(_decoder(attention))(_ids(), position_ids=torch.zeros(2, 9))


@pytest.mark.exhaustive
def test_readers_without_regard_get_the_same(tmp_path: Path) -> None:
    """Each card's own lines, in a process in which Regard cannot be imported."""
    names = dict.fromkeys(["softmax", *list(SPECS)[::6]])  # all are compared in this process above
    models = {name: _decoder(SPECS[name]) for name in names}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        (tmp_path / name / "use.py").write_text(_use(tmp_path / name), encoding="utf-8")
    folders, ids = [str(tmp_path / name) for name in models], _ids()
    command = ["-c", WITHOUT_REGARD, json.dumps(folders), json.dumps(ids.tolist()), str(tmp_path / "found")]
    ended = run_python(command, place=tmp_path)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = load_file(tmp_path / "found")
    for folder, (name, model) in zip(folders, models.items(), strict=True):
        accuracy = 1e-5 if name == "softmax" else 1e-9  # Llama's norms are computed in float32
        with torch.no_grad():
            torch.testing.assert_close(found[folder], model(ids).logits, rtol=accuracy, atol=accuracy)
        generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
        assert torch.equal(found[f"{folder} generated"], generated)
        again = AutoModelForCausalLM.from_pretrained(f"{folder}/again")
        assert isinstance(again, RegardForCausalLM if name != "softmax" else LlamaForCausalLM)
        for part, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[part], value), part


def _use(folder: Path) -> str:
    """The Python block of a card, without its tokenizer."""
    card = (folder / CARD).read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    return "".join(line for line in block.splitlines(keepends=True) if "tokenizer =" not in line).replace(
        "FOLDER", str(folder)
    )


@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": True}])
def test_regard_loads_its_own_class(trust: dict[str, Any], tmp_path: Path) -> None:
    model = _decoder("sigmoid")
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path, **trust)
    assert type(again) is RegardForCausalLM
    assert type(AutoConfig.from_pretrained(tmp_path, **trust)) is RegardConfig
    assert type(AutoModel.from_pretrained(tmp_path, **trust)) is RegardModel
    with torch.no_grad():
        assert torch.equal(again(_ids()).logits, model(_ids()).logits)


def test_code_is_named_where_it_is_written_and_nowhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modeling_regard.CHOICES, "positions", ("rotary",))

    def names_code(folder: str) -> bool:
        named = "auto_map" in json.loads((tmp_path / folder / "config.json").read_text())
        assert named == (tmp_path / folder / CODE.name).exists()
        return named

    _decoder("sigmoid").save_pretrained(tmp_path / "sigmoid")
    assert names_code("sigmoid")
    for name, attention in {"llama": "softmax", "table": AttentionSpec(positions="learned")}.items():
        _decoder(attention).save_pretrained(tmp_path / name)
        assert not names_code(name)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "sigmoid")
    again.model.save_pretrained(tmp_path / "inner")
    assert not names_code("inner")
    softmax = _decoder("softmax")
    softmax.config.name_code(has_code=True)
    replaced(softmax, "sigmoid").save_pretrained(tmp_path / "replaced")
    assert not names_code("replaced")


def test_cards_say_what_loading_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(modeling_regard.CHOICES, "positions", ("rotary",))
    expected = {"softmax": "LlamaForCausalLM.from_pretrained", "sigmoid": "trust_remote_code=True"}
    specs = {"table": AttentionSpec(positions="learned"), "softmax": "softmax", "sigmoid": "sigmoid"}
    for name, spec in specs.items():
        _decoder(spec).save_pretrained(tmp_path / name)
        card = (tmp_path / name / CARD).read_text(encoding="utf-8")
        assert expected.get(name, "in a clone of its repository) for `positions=learned`.") in card
        assert "not known" in card
    assert "weighting=sigmoid" in (tmp_path / "sigmoid" / CARD).read_text(encoding="utf-8")
    scope: dict[str, Any] = {}
    exec(_use(tmp_path / "table"), scope)
    assert type(scope["model"]) is RegardForCausalLM


def test_a_card_of_someone_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / CARD).write_text("mine", encoding="utf-8")
    _decoder("sigmoid").save_pretrained(tmp_path)
    assert (tmp_path / CARD).read_text(encoding="utf-8") == "mine"
    (tmp_path / CARD).write_text(MARK, encoding="utf-8")
    _decoder("softmax").save_pretrained(tmp_path)
    assert "LlamaForCausalLM" in (tmp_path / CARD).read_text(encoding="utf-8")


def test_our_loader_reads_the_folder_as_before(tmp_path: Path, tiny: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny("llama"))
    model = _decoder("sigmoid", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert type(load(str(tmp_path)).model) is RegardModel
    assert type(load(str(tmp_path), language_model=True).model) is RegardForCausalLM
