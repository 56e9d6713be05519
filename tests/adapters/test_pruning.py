"""Which blocks are used, and that taking out those that are not is measured."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close

from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import LEARNT, fill, filled, logits, made, rows

FAMILIES = ("bert", "t5", "gpt2", "llama")


def ignored(family: str, name: str = "task1") -> SharedAdapters:
    """Blocks of which no row selects one."""
    adapters = filled(family)
    adapters.freeze()
    batch = rows(family)
    with torch.no_grad():
        query = adapters.router.query(adapters.query_vectors(**batch)).mean(0)
        adapters.router.keys[adapters.index_of(name)].copy_(-20 * query)
    return adapters


def batches(family: str) -> list[dict[str, Tensor]]:
    found = [rows(family), {name: value[:2] for name, value in rows(family).items()}]
    for one in found:
        if family == "t5":
            one["labels"] = one.pop("decoder_input_ids")
        elif family != "bert":
            one["labels"] = torch.where(torch.arange(7) < 3, -100, one["input_ids"])
        else:
            one["labels"] = torch.arange(len(one["input_ids"])) % 2
    return found


def test_usage_is_the_mean_over_rows_not_over_batches() -> None:
    adapters = filled("bert")
    found = adapters.usage(batches("bert"))
    weights = torch.cat([adapters.routing_weights(**batch) for batch in batches("bert")]).detach()
    assert_close(found, weights.double().mean(0))
    assert not torch.allclose(found, (weights[:3].mean(0) + weights[3:].mean(0)).double() / 2, atol=1e-6)


def test_looking_leaves_the_model_as_it_was() -> None:
    adapters = filled("bert").train()
    adapters.model.bert.eval()
    before = [module.training for module in adapters.modules()]
    adapters.usage(batches("bert"))
    assert [module.training for module in adapters.modules()] == before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_block_is_part_of_the_model(family: str) -> None:
    adapters, batch = filled(family), rows(family)
    weights = torch.tensor([0.5, 0.3, 0.2])
    with adapters.use_weights(weights):
        expected = logits(adapters, batch)
    adapters.merge("task1", 0.3)
    assert adapters.adapter_names == ("task0", "task2")
    with adapters.use_weights(torch.tensor([0.5, 0.2])):
        assert_close(logits(adapters, batch), expected, atol=1e-4, rtol=1e-3)
    with adapters.use_weights(None):
        alone = logits(adapters, batch)
    other = filled(family)
    with other.use_weights(torch.tensor([0.0, 0.3, 0.0])):
        assert_close(alone, logits(other, batch), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("merge", [False, True])
def test_what_no_row_selects_goes_and_the_loss_is_measured(family: str, merge: bool) -> None:
    adapters = ignored(family)
    given = batches(family)
    usage = adapters.usage(given)
    with torch.no_grad():
        before = sum(float(adapters(**one).loss) * len(one["input_ids"]) for one in given) / 5
    found = adapters.prune(given, merge=merge)
    with torch.no_grad():
        after = sum(float(adapters(**one).loss) * len(one["input_ids"]) for one in given) / 5
    assert found.removed == ("task1",)
    assert adapters.adapter_names == ("task0", "task2")
    assert found.usage == pytest.approx(dict(zip(("task0", "task1", "task2"), usage.tolist(), strict=True)))
    assert (found.loss_before, found.loss_after) == pytest.approx((before, after))
    assert found.loss_after == pytest.approx(found.loss_before, abs=0.02)
    assert len(adapters.merged) == merge


@pytest.mark.parametrize("name", ["XLM", "Flaubert", "GPT2"])
def test_batches_weigh_as_many_labels_as_the_models_own_loss_has(name: str) -> None:
    """XLM and Flaubert score each token against its own label, the first too; others against that of the next.

    So do they as decoders, which count among the models that write text.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    if name != "GPT2":
        sizes = {"emb_dim": 16, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 16}
        sizes |= {"causal": True, "is_decoder": True, "n_langs": 1, "pad_index": 0}
    head = "GPT2LMHeadModel" if name == "GPT2" else f"{name}WithLMHeadModel"
    model = getattr(transformers, head)(getattr(transformers, f"{name}Config")(vocab_size=30, **sizes)).eval()
    adapters = SharedAdapters(model, r=2)
    adapters.add_adapter("task")
    fill(adapters)
    ids = torch.randint(3, 30, (5, 7), generator=torch.Generator().manual_seed(1))
    given = [{"input_ids": part, "labels": part.clone()} for part in ids.split(3)]
    given[0]["labels"][:, 2:5] = -100
    given[1]["labels"][:, 0] = -100
    sums, counts = 0.0, 0
    for batch in given:
        with torch.no_grad():
            scores = adapters(input_ids=batch["input_ids"]).logits.double()
        labels = batch["labels"]
        if name == "GPT2":
            scores, labels = scores[:, :-1], labels[:, 1:]
        sums += float(torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum"))
        counts += int((labels != -100).sum())
    assert adapters.prune(given).loss_before == pytest.approx(sums / counts, rel=1e-5)


def test_a_loss_of_ones_own_is_used() -> None:
    adapters = ignored("bert")
    seen: list[int] = []

    def loss(batch: Any) -> float:
        seen.append(len(batch["input_ids"]))
        return float(len(adapters.adapter_names))

    found = adapters.prune(batches("bert"), loss)
    assert (found.loss_before, found.loss_after) == (3.0, 2.0)
    assert seen == [3, 2, 3, 2]


def test_what_one_row_selects_stays() -> None:
    adapters = filled("bert")
    most = torch.cat([adapters.routing_weights(**batch) for batch in batches("bert")]).detach().amax(0)
    adapters.freeze()
    found = adapters.prune(batches("bert"), least=float(most.min()) - 1e-4)
    assert found.removed == ()
    assert found.loss_before == found.loss_after
    assert adapters.prune(batches("bert"), least=float(most.min()) + 1e-4).removed == (f"task{int(most.argmin())}",)


def test_the_block_that_is_trained_stays() -> None:
    adapters = ignored("bert")
    adapters.set_adapter("task1")
    assert adapters.prune(batches("bert")).removed == ()


def test_a_merged_block_is_saved_and_merged_again(tmp_path: Path) -> None:
    adapters, batch = filled("gpt2"), rows("gpt2")
    adapters.merge("task1", 0.4)
    expected = logits(adapters, batch)
    adapters.save_pretrained(tmp_path / "saved")
    loaded = SharedAdapters.from_pretrained(made("gpt2"), tmp_path / "saved")
    assert loaded.adapter_names == ("task0", "task2")
    assert_close(logits(loaded, batch), expected, atol=1e-5, rtol=1e-4)
    assert [(one.name, one.weight) for one in loaded.merged] == [("task1", 0.4)]
    loaded.save_pretrained(tmp_path / "again")
    again = SharedAdapters.from_pretrained(made("gpt2"), tmp_path / "again")
    assert_close(logits(again, batch), expected, atol=1e-5, rtol=1e-4)
    loaded.merge("task0")
    loaded.merge("task2")
    loaded.save_pretrained(tmp_path / "all")
    nothing = SharedAdapters.from_pretrained(made("gpt2"), tmp_path / "all")
    assert nothing.adapter_names == ()
    assert_close(logits(nothing, batch), logits(loaded, batch), atol=1e-5, rtol=1e-4)


def tied(kind: str) -> SharedAdapters:
    """Adapters in layers whose weight others have too: adapted ones, frozen ones, or embeddings."""
    if kind == "blocks":  # two attention layers of one weight, which both get an adapter
        sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4}
        sizes |= {"num_attention_heads": 2, "mamba_d_state": 4, "mamba_ngroups": 1, "n_mamba_heads": 2}
        sizes |= {"mamba_headdim": 16, "num_mem_blocks": 1, "use_mamba_kernels": False, "adapter_rank": 2}
        layers: Any = {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "hybrid_layer_ids": [1, 3]}
        return SharedAdapters(transformers.Zamba2ForCausalLM(transformers.Zamba2Config(**sizes, **layers)).eval(), r=2)
    model = made("llama")
    first, second = (layer.self_attn for layer in model.model.layers)
    if kind == "weights":
        second.q_proj.weight = first.q_proj.weight
        return SharedAdapters(model, r=2, target_modules=["model.layers.0.self_attn.q_proj"])
    if kind == "module":
        second.q_proj = first.q_proj
        return SharedAdapters(model, r=2)
    model.lm_head.weight = model.model.embed_tokens.weight
    return SharedAdapters(model, r=2, target_modules=["lm_head"] if kind == "embeddings" else "auto")


@pytest.mark.parametrize("kind", ["blocks", "weights", "module", "embeddings"])
def test_nothing_is_merged_into_a_weight_that_other_layers_have(kind: str) -> None:
    adapters = tied(kind)
    adapters.add_adapter("one")
    fill(adapters)
    before = [value.clone() for value in adapters.model.parameters()]
    with pytest.raises(UserError, match="model: expected adapted layers with weights of their own to merge into, got"):
        adapters.merge("one")
    assert adapters.adapter_names == ("one",)
    assert all(torch.equal(value, old) for value, old in zip(adapters.model.parameters(), before, strict=True))


def test_a_merge_does_not_mind_other_weights_that_are_tied() -> None:
    adapters, batch = tied("other"), rows("llama")
    adapters.add_adapter("one")
    fill(adapters)
    expected = logits(adapters, batch)
    adapters.merge("one")
    assert_close(logits(adapters, batch), expected, atol=1e-4, rtol=1e-4)


def test_one_batch_is_no_list() -> None:
    with pytest.raises(UserError, match="batches: expected a list of them, got one alone, with input_ids"):
        filled("bert").usage(rows("bert"))  # type: ignore[arg-type]


def test_mistakes_are_refused() -> None:
    adapters = filled("bert")
    with pytest.raises(UserError, match=r"batches: expected at least one, got none"):
        adapters.usage([])
    with pytest.raises(UserError, match=r"least: expected a number between 0 and 1, got 0"):
        adapters.prune(batches("bert"), least=0)
    with pytest.raises(UserError, match=r"loss: expected batches with labels, or a function of a batch, got neither"):
        adapters.prune([rows("bert")])
    adapters.freeze()
    with pytest.raises(UserError, match=r"least: expected a weight that an adapter reaches, got 0.99"):
        adapters.prune(batches("bert"), least=0.99)
    with pytest.raises(UserError, match=r"name: expected one of task0, task1, task2, got 'other'"):
        adapters.merge("other")
    prompts = SharedAdapters(made("bert"), **LEARNT, adapter_type="prompt", num_virtual_tokens=2, encoder_hidden_size=4)
    prompts.add_adapter("one")
    with pytest.raises(UserError, match=r"adapter_type: expected 'lora' to merge, got 'prompt'"):
        prompts.merge("one")
    fill(adapters)
    assert len(adapters.adapter_names) == 3
