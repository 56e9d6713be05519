"""Heads that are new, in the base's files or trained: which of them are told of."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    GPTJConfig,
    GPTNeoXConfig,
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


@pytest.mark.sample(1)
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
        made = AutoModelForSequenceClassification.from_config(type(model.config)(**SIZES, num_labels=3, pad_token_id=0))
        SharedAdapters(made, r=2).fit_task("without files", [batch()], epochs=1)


LANGUAGE = {
    "llama": lambda **more: LlamaConfig(**SIZES, **more),
    "gpt_neox": lambda **more: GPTNeoXConfig(**SIZES, **more),  # whose output embeddings are `embed_out` or `lm_head`
    "gptj": lambda **more: GPTJConfig(n_embd=16, n_layer=4, n_head=2, rotary_dim=4, vocab_size=40, **more),
    "bert": lambda **more: BertConfig(**SIZES, is_decoder=True, **more),
}


def words() -> dict[str, torch.Tensor]:
    return {**batch(), "labels": batch()["input_ids"]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", LANGUAGE)
def test_new_output_embeddings_are_told(kind: str, tmp_path: Path) -> None:
    """Output embeddings of a base whose files have none, that are not tied to those of the input, are random."""
    torch.manual_seed(0)
    config = LANGUAGE[kind](tie_word_embeddings=False, pad_token_id=0)
    AutoModel.from_config(config).save_pretrained(tmp_path / "base")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "whole")
    adapters = SharedAdapters(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), r=2)
    with pytest.warns(
        UserWarning, match=r"model: the head \(.*weight.*\) is not in the files of .* and does not train"
    ):
        adapters.fit_task("one", [words()], epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # own weights of few rows
        warnings.filterwarnings("error", message="model: ")
        adapters.model.get_output_embeddings().requires_grad_(True)
        adapters.fit_task("opened", [words()], epochs=1)
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
        SharedAdapters(whole, r=2).fit_task("in the files", [words()], epochs=1)
        larger = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
        larger.resize_token_embeddings(52)
        SharedAdapters(larger, r=2).fit_task("resized", [words()], epochs=1)
        tied = AutoModelForCausalLM.from_pretrained(tmp_path / "base", tie_word_embeddings=True)
        SharedAdapters(tied, r=2).fit_task("tied", [words()], epochs=1)
