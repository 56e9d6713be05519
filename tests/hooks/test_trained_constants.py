"""Constants of a replaced model that learn with it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import regard
from regard.errors import UserError
from regard.hooks import average_attention, replacing
from regard.hooks.constant_heads import ConstantHeads
from regard.hooks.trained_constants import begin_training_constants, end_training_constants

LENGTH = 7


@pytest.fixture
def fixed() -> Any:
    """A model with a constant head in one layer, and two in the other."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, **sizes)).eval()
    constants = average_attention(model, [_ids(4)], LENGTH)
    return regard.replaced(model, constants, heads={(0, 1), (1, 0), (1, 1)})


def _ids(rows: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(3, 30, (rows, length), generator=torch.Generator().manual_seed(1))


def _learn(model: Any, *, negative: bool) -> list[torch.nn.Parameter]:
    matrices = begin_training_constants(model)
    with torch.no_grad():
        for matrix in matrices:
            matrix.copy_(torch.randn_like(matrix) if negative else torch.rand_like(matrix))
    return matrices


def test_only_what_was_chosen_learns(fixed: Any) -> None:
    matrices = begin_training_constants(fixed)
    assert [tuple(matrix.shape) for matrix in matrices] == [(1, LENGTH, LENGTH), (2, LENGTH, LENGTH)]
    fixed(_ids(), labels=_ids()).loss.backward()
    for matrix in matrices:
        assert matrix.grad is not None
        assert matrix.grad.tril(-1).any()
        assert not matrix.grad.triu(1).any(), "what causal heads do not see does not learn"


@torch.no_grad()
def test_the_output_is_that_of_rows_of_sum_one(fixed: Any) -> None:
    """The attention of the second layer by its definition: W_O of C V, with rows of C divided by Σ |C|."""
    matrix = _learn(fixed, negative=True)[1]
    seen: dict[str, Tensor] = {}
    attention = fixed.model.layers[1].self_attn
    attention.register_forward_hook(
        lambda module, args, kwargs, output: seen.update(x=kwargs["hidden_states"], output=output[0]), with_kwargs=True
    )
    fixed(_ids(2, 5))
    weights = matrix[:, :5, :5].tril()
    weights = weights / weights.abs().sum(-1, keepdim=True)
    value = (seen["x"] @ attention.v_proj.weight.T).unflatten(-1, (2, 8)).transpose(1, 2)
    expected = (weights @ value).transpose(1, 2).flatten(2) @ attention.o_proj.weight.T
    torch.testing.assert_close(seen["output"], expected)


@torch.no_grad()
def test_what_is_measured_is_the_size_of_weights_that_may_be_negative(fixed: Any) -> None:
    """|A| / Σ |A|, as of other attention that is no distribution; the head that attends is measured as it is."""
    matrix = _learn(fixed, negative=True)[0][0].double().tril()
    end_training_constants(fixed)
    with regard.watching(fixed, ["column_mass", "entropy", "virtual_sink_mass"]) as watch:
        fixed(_ids())
    sizes = matrix.abs() / matrix.abs().sum(-1, keepdim=True)
    found = watch.frame("column_mass").query("layer == 0 and head == 1").set_index("position")["value"]
    assert found.to_list() == pytest.approx((sizes.sum(0) / LENGTH).tolist(), rel=1e-5)
    entropy = watch.frame("entropy").query("layer == 0 and head == 1")
    assert entropy["value"].notna().all()


def test_validation_computes_what_training_computes() -> None:
    """Rows that no longer sum to one are divided by their sum with and without gradients, frozen or not."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, **sizes)).eval()
    with regard.replacing(model, average_attention(model, [_ids(4)], LENGTH), train=True) as replacement:
        with torch.no_grad():
            for matrix in replacement.parameters():
                matrix.mul_(3.0)
        expected = model(_ids()).logits.detach()
        with torch.no_grad():
            torch.testing.assert_close(model(_ids()).logits, expected)
        model.requires_grad_(False)
        torch.testing.assert_close(model(_ids()).logits, expected)


@pytest.mark.parametrize("negative", [False, True])
@torch.no_grad()
def test_they_stay_as_they_learned(fixed: Any, negative: bool, tmp_path: Path) -> None:
    _learn(fixed, negative=negative)
    inputs: list[dict[str, Tensor]] = [{"input_ids": _ids()}, {"input_ids": _ids(2, 4)}]
    inputs.append({"input_ids": _ids(), "attention_mask": torch.tensor([[1] * 5 + [0] * 2, [1] * LENGTH])})
    inputs.append({"input_ids": _ids(), "attention_mask": torch.tensor([[0] * 2 + [1] * 5, [1] * LENGTH])})
    before = [fixed(**given).logits for given in inputs]
    end_training_constants(fixed)
    for heads in (module for module in fixed.modules() if isinstance(module, ConstantHeads)):
        (matrix,) = heads.matrices
        assert not matrix.requires_grad
        assert not matrix.triu(1).any()
        torch.testing.assert_close(matrix.abs().sum(-1), torch.ones(matrix.shape[:2]))
    fixed.save_pretrained(tmp_path)
    again = regard.ReplacedModel.from_pretrained(str(tmp_path))
    for given, logits in zip(inputs, before, strict=True):
        torch.testing.assert_close(fixed(**given).logits, logits)
        torch.testing.assert_close(again(**given).logits, logits)
    assert not any(p.requires_grad for name, p in again.named_parameters() if "matrices" in name)
    assert again.lm_head.weight.requires_grad
    assert again.config.constant_heads["origin"]["source"] == "trained from average"
    end_training_constants(again)
    assert again.config.constant_heads["origin"]["source"] == "trained from average"


def test_what_is_saved_while_it_learns_is_loaded_as_it_was(fixed: Any, tmp_path: Path) -> None:
    """Someone else's training, which asks all weights for gradients and knows nothing of constants."""
    fixed.requires_grad_(True)
    fixed(_ids(), labels=_ids()).loss.backward()
    with torch.no_grad():
        for name, parameter in fixed.named_parameters():
            if "matrices" in name:
                assert parameter.grad is not None
                parameter.copy_(torch.randn_like(parameter))
    expected = fixed(_ids()).logits.detach()
    fixed.save_pretrained(tmp_path)
    again = regard.ReplacedModel.from_pretrained(str(tmp_path))
    with torch.no_grad():
        torch.testing.assert_close(again(_ids()).logits, expected)
    fixed.requires_grad_(False)
    torch.testing.assert_close(fixed(_ids()).logits, expected)


def test_what_has_no_constants_of_one_length_is_refused() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, **sizes)).eval()
    with pytest.raises(UserError, match="with constant heads, this one has none"):
        begin_training_constants(regard.replaced(model, "sigmoid"))
    several = [average_attention(model, [_ids(4, length)], length) for length in (4, LENGTH)]
    with pytest.raises(UserError, match="expected those of one length, to be trained; got several"):
        begin_training_constants(regard.replaced(model, several))


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_queries_and_keys_that_were_trained_inside_stay_trained(kind: str) -> None:
    sizes: dict[str, Any] = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3}
    torch.manual_seed(0)
    model: Any = (
        LlamaForCausalLM(
            LlamaConfig(**sizes, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
        )
        if kind == "llama"
        else GPT2LMHeadModel(GPT2Config(**sizes, n_embd=16, n_layer=2, n_head=2))
    ).eval()
    ids = torch.randint(3, 40, (2, 8))
    constants = average_attention(model, [ids], 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with replacing(model, constants, [(0, 0)]):
        expected = model(input_ids=ids, labels=ids).loss.detach()
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    with replacing(model, constants, [(0, 0)]):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        trained = model(input_ids=ids, labels=ids).loss.detach()
    assert trained < expected
    with replacing(model, constants, [(0, 0)], any_model=True):
        torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, trained)


def test_averages_are_made_over_embeddings_in_half_precision() -> None:
    sizes = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16().eval()
    states = torch.randn(2, 6, 16).bfloat16()
    assert average_attention(model, [{"inputs_embeds": states}], 8).origin.data["samples"] == 2
