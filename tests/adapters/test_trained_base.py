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


@pytest.mark.exhaustive
@pytest.mark.parametrize("opened", [False, True])
def test_a_pooler_that_the_files_lack_is_kept_with_the_head(opened: bool, tmp_path: Path) -> None:
    """A BERT that was saved as a masked language model has none: each load of a classifier makes another."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.BertConfig(vocab_size=40, **sizes)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "base")

    def classifier(seed: int) -> Any:
        torch.manual_seed(seed)
        return transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=3).eval()

    adapters = SharedAdapters(classifier(1), r=2)
    adapters.classifier.requires_grad_(True)
    adapters.model.bert.pooler.requires_grad_(opened)
    rows = {"input_ids": torch.randint(5, 40, (4, 6)), "attention_mask": torch.ones(4, 6, dtype=torch.long)}
    before = adapters.model.bert.pooler.dense.weight.detach().clone()
    adapters.fit_task("one", [{**rows, "labels": torch.tensor([0, 1, 2, 0])}], learning_rate=1e-2)
    assert torch.equal(before, adapters.model.bert.pooler.dense.weight) is not opened
    adapters.save_pretrained(tmp_path / "saved")
    again = SharedAdapters.from_pretrained(classifier(2), tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(again.eval()(**rows).logits, adapters.eval()(**rows).logits)
    other = classifier(3)
    with torch.no_grad():
        other.bert.encoder.layer[0].output.dense.weight.mul_(2)
    with pytest.raises(UserError, match="base"):
        SharedAdapters.from_pretrained(other, tmp_path / "saved")
