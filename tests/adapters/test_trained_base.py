"""Weights of the base that would train beside the adapters: no folder has them, so they are refused or told of."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import made
from tests.adapters.test_task_training import batches

EMBEDDINGS = "model.embed_tokens.weight"
TIED = r"; the output embeddings are tied to it \(tie_word_embeddings\)$"


def tied(**options: Any) -> SharedAdapters:
    config = type(made("llama").config)(**{**made("llama").config.to_dict(), "tie_word_embeddings": True})
    return SharedAdapters(transformers.LlamaForCausalLM(config).eval(), **options)


def test_output_embeddings_that_are_tied_are_no_head() -> None:
    adapters = tied(r=2)
    adapters.lm_head.requires_grad_(True)
    with pytest.raises(UserError, match=rf"^model: expected a frozen base, .* got {EMBEDDINGS} that would train{TIED}"):
        adapters.fit_task("one", batches("llama", 0))
    assert adapters.adapter_names == ()


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_base_that_is_open_is_not_trained(family: str) -> None:
    adapters = SharedAdapters(made(family), r=2)
    adapters.model.get_input_embeddings().requires_grad_(True)
    with pytest.raises(
        UserError, match=r"^model: expected a frozen base, .* got \S*embed\S*\.weight that would train$"
    ):
        adapters.fit_task("one", batches(family, 0))
    adapters.model.get_input_embeddings().requires_grad_(False)
    adapters.fit_task("one", batches(family, 0)[:1], epochs=1)


def test_a_folder_tells_that_it_lacks_what_trains_of_the_base(tmp_path: Path) -> None:
    adapters = tied(r=2)
    adapters.add_adapter("one")
    adapters.lm_head.requires_grad_(True)
    lacks = rf"lacks {EMBEDDINGS}, which are of the base and train{TIED}"
    with pytest.warns(UserWarning, match=f"folder: the folder {lacks}"):
        adapters.save_pretrained(tmp_path / "saved")
    with pytest.warns(UserWarning, match=f"export: the folder {lacks}"):
        adapters.export_peft("one", tmp_path / "peft")
    with pytest.warns(UserWarning, match=f"export: the folder {lacks}"):
        adapters.export_peft_set(tmp_path / "set")


@pytest.mark.parametrize("options", [{"r": 2}, {"adapter_type": "prompt"}])
def test_adapters_and_a_head_are_not_of_the_base(options: dict[str, Any], tmp_path: Path) -> None:
    """Adapters that train lie in the base; its own output embeddings are a head unless they are tied."""
    adapters = SharedAdapters(made("llama"), **options)
    adapters.lm_head.requires_grad_(True)
    before = adapters.lm_head.weight.clone()
    adapters.fit_task("one", batches("llama", 0)[:1], epochs=1)
    assert not torch.equal(adapters.lm_head.weight, before)
    adapters.save_pretrained(tmp_path / "saved")
