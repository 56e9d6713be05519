"""A function of the user's own, from scores and mask to weights, in a trained model."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard
from regard import UserError

SIZES: dict[str, Any] = {
    **{"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
STATISTICS = ["entropy", "first_mass", "sink_rate", "distance"]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    return transformers.LlamaForCausalLM(config).double().eval()


@pytest.fixture
def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


def softmax(scores: Tensor, keep: Tensor) -> Tensor:
    return scores.masked_fill(~keep, float("-inf")).softmax(-1)


class Tempered(nn.Module):
    """Softmax with a learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, scores: Tensor, keep: Tensor) -> Tensor:
        return softmax(scores * self.scale, keep)


def test_softmax_is_the_untouched_attention_forward_and_backward(model: Any, batch: dict[str, Tensor]) -> None:
    real = batch["attention_mask"].bool()
    parameters = list(model.parameters())
    expected = model(**batch).logits[real]
    gradients = torch.autograd.grad(expected.square().mean(), parameters)
    with regard.replacing(model, softmax) as replacement:
        output = model(**batch).logits[real]
        found = torch.autograd.grad(output.square().mean(), parameters)
    assert replacement.layers == (("decoder", 0), ("decoder", 1))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    for gradient, reference in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)
    torch.testing.assert_close(model(**batch).logits[real], expected, rtol=0, atol=0)


def test_writing_and_measuring_under_it(model: Any, batch: dict[str, Tensor]) -> None:
    ids = batch["input_ids"]
    with torch.no_grad():
        expected = model.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=0)
        with regard.watching(model, STATISTICS) as plain:
            model(ids)
        with regard.replacing(model, softmax):
            output = model.generate(**batch, max_new_tokens=5, do_sample=False, pad_token_id=0)
            with regard.watching(model, STATISTICS) as watch:
                model(ids)
    assert torch.equal(output, expected)
    for name in STATISTICS:
        found, reference = (torch.tensor(each.frame(name)["value"].to_numpy()) for each in (watch, plain))
        torch.testing.assert_close(found, reference, rtol=0, atol=1e-6)


def test_the_parameters_of_a_module_learn(model: Any, batch: dict[str, Tensor]) -> None:
    tempered = Tempered()
    with regard.replacing(model, tempered, layers=1):
        model(**batch).logits.square().mean().backward()
    assert tempered.scale.grad is not None
    assert tempered.scale.grad != 0


@pytest.mark.parametrize(
    "function,message",
    [
        (lambda scores, keep: scores.softmax(-1), "expected weights of zero where keep is False"),
        (lambda scores, keep: scores[..., :1], r"expected weights of the shape of the scores, \(2, 4, 12, 12\); got"),
        (lambda scores, keep: None, "got NoneType"),
    ],
)
def test_weights_that_cannot_be_meant(function: Any, message: str, model: Any, batch: dict[str, Tensor]) -> None:
    with pytest.raises(UserError, match=message), regard.replacing(model, function):
        model(**batch)


class OneArgument(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


@pytest.mark.parametrize(
    "function,got",
    [
        (lambda scores: scores.softmax(-1), "<lambda>(scores)"),
        (lambda scores, keep, more: scores, "<lambda>(scores, keep, more)"),
        (OneArgument(), "OneArgument(scores: torch.Tensor) -> torch.Tensor"),
    ],
)
def test_a_function_that_does_not_take_scores_and_mask_is_refused_at_once(function: Any, got: str, model: Any) -> None:
    with pytest.raises(UserError) as refusal, regard.replacing(model, function):
        pass
    said = "attention: expected a function of scores and mask, (scores, keep) -> weights; got "
    assert str(refusal.value) == said + got


def test_functions_with_more_arguments_that_need_no_value(model: Any, batch: dict[str, Tensor]) -> None:
    def tempered(scores: Tensor, keep: Tensor, *, temperature: float = 1.0) -> Tensor:
        return softmax(scores / temperature, keep)

    with torch.no_grad(), regard.replacing(model, tempered):
        found = model(**batch).logits
    torch.testing.assert_close(found[:, 4:], model(**batch).logits[:, 4:].detach())
