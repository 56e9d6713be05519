"""Heads that are new, in the base's files or trained: which of them are told of."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaModel,
)

from regard.adapters.shared import SharedAdapters

SIZES = {"hidden_size": 16, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
TOLD = r"model: the head \(.*{0}.weight.*\) is not in the files of .* and does not train: .*; adapters.{0}.requires_"


@pytest.fixture(params=["bert", "llama"])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder of a model without a head for classes."""
    torch.manual_seed(0)
    model: Any = BertModel(BertConfig(**SIZES)) if request.param == "bert" else LlamaModel(LlamaConfig(**SIZES))
    model.config.pad_token_id = 0
    model.save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def loaded(folder: Path) -> SharedAdapters:
    return SharedAdapters(AutoModelForSequenceClassification.from_pretrained(folder, num_labels=3), r=2)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 40, (6, 8), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(6) % 3}


def head_of(adapters: SharedAdapters) -> tuple[str, torch.nn.Module]:
    name = "classifier" if hasattr(adapters.model, "classifier") else "score"
    return name, getattr(adapters.model, name)


def test_a_new_head_that_stays_closed_is_told(base: Path) -> None:
    adapters = loaded(base)
    name, _ = head_of(adapters)
    with pytest.warns(UserWarning, match=TOLD.format(name)):
        adapters.fit_task("one", [batch()], epochs=1)


def test_no_other_head_is_told_of(base: Path, tmp_path: Path) -> None:
    adapters = loaded(base)
    _, head = head_of(adapters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # own weights of few rows
        warnings.filterwarnings("error", message="model: ")
        head.requires_grad_(True)
        adapters.fit_task("opened", [batch()], epochs=1)
        head.requires_grad_(False)
        adapters.fit_task("trained before", [batch()], epochs=1, check={})
        adapters.delete_adapter("opened")
        head.requires_grad_(True)
        adapters.save_pretrained(tmp_path / "adapters")
        adapters.unload().save_pretrained(tmp_path / "whole")
        loaded(tmp_path / "whole").fit_task("in the files", [batch()], epochs=1)
        model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
        again = SharedAdapters.from_pretrained(model, tmp_path / "adapters")
        head_of(again)[1].requires_grad_(False)
        again.set_adapter("trained before")
        again.fit_task("trained before", [batch()], epochs=1)
        own = loaded(base)
        own.fit_task("own loss", [batch()], epochs=1, loss=lambda rows: own(**rows).logits.square().mean())
        language = AutoModelForCausalLM.from_pretrained(base)  # whose files have no output embeddings
        SharedAdapters(language, r=2).fit_task("words", [{**batch(), "labels": batch()["input_ids"]}], epochs=1)
        made = AutoModelForSequenceClassification.from_config(type(model.config)(**SIZES, num_labels=3, pad_token_id=0))
        SharedAdapters(made, r=2).fit_task("without files", [batch()], epochs=1)
