"""The card of a model that `replaced` made."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from regard.hooks import average_attention
from regard.runs.model_card import CARD, MARK


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """A model with a folder of its own, so that it has a name."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=30, **sizes)).save_pretrained(tmp_path / "base")
    return LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()


def _saved(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    return (folder / CARD).read_text(encoding="utf-8")


def test_constants(model: Any, tmp_path: Path) -> None:
    ids = torch.randint(3, 30, (4, 7))
    constants = average_attention(model, [ids], 7)
    fixed = regard.replaced(model, constants, heads={(0, 1), (2, 0)})
    card = _saved(fixed, tmp_path / "fixed")
    assert "`base` (`LlamaForCausalLM`) in which 2 of 6 attention heads have a constant matrix" in card
    assert "source: `average`" in card
    assert "at most 7 tokens" in card
    assert "It needs Regard (`pip install .` in a clone" in card
    assert "not known to Regard" in card
    assert str(tmp_path) not in card
    (block,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    scope: dict[str, Any] = {}
    exec(block.replace("FOLDER", str(tmp_path / "fixed")), scope)
    with torch.no_grad():
        assert torch.equal(scope["model"](ids).logits, fixed(ids).logits)
    again = _saved(scope["model"], tmp_path / "again")
    assert again == card, "the base is not the folder that it was loaded from"


def test_an_operation(model: Any, tmp_path: Path) -> None:
    card = _saved(regard.replaced(model, "sigmoid+window=4", layers=[0, 2]), tmp_path / "sigmoid")
    assert "whose attention layers 0, 2 compute `weighting=sigmoid`, `window=4` in the place" in card


def test_a_card_of_someone_else_is_left_as_it_is(model: Any, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / CARD).write_text("mine", encoding="utf-8")
    fixed = regard.replaced(model, "sigmoid")
    assert _saved(fixed, tmp_path / "own") == "mine"
    fixed.save_pretrained(tmp_path / "worker", is_main_process=False)
    assert not (tmp_path / "worker" / CARD).exists()
    assert MARK in _saved(fixed, tmp_path / "new")
