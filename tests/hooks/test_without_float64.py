"""Measuring on a device without float64, such as a Mac's GPU: a subclass of tensors stands in for it."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import regard
from regard.attention import float64
from regard.hooks.fidelity import _distance
from regard.statistics import STATISTICS
from regard.training.sink_monitor import sum_nll


class Elsewhere(Tensor):
    """A tensor on a device that has no float64; what is computed of it is there, too, unless it is brought back."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.cpu:
            return args[0].as_subclass(Tensor)
        result = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(result, Elsewhere) and result.dtype == torch.float64:
            raise TypeError("this device has no float64")
        return result


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float64, "has_float64", lambda tensor: not isinstance(tensor, Elsewhere))


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.4,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.every_value
@pytest.mark.usefixtures("without_float64")
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", sorted(STATISTICS.keys() - {"modality_mass", "perturbation_spread"}))
def test_statistics_are_those_of_a_device_with_float64(name: str, padded: bool) -> None:
    model, ids, mask = llama(), torch.randint(5, 50, (3, 12)), torch.ones(3, 12, dtype=torch.long)
    mask[1, : 4 * padded] = 0  # two samples without padding are what input dependence needs
    frames = []
    for kind in (Tensor, Elsewhere):
        with torch.no_grad(), regard.watching(model, [name]) as watch:
            model(input_ids=ids.as_subclass(kind), attention_mask=mask.as_subclass(kind))
        frames.append(watch.frame(name))
    assert frames[1]["value"].tolist() == pytest.approx(frames[0]["value"].tolist(), rel=1e-4, abs=1e-5, nan_ok=True)


@pytest.mark.usefixtures("without_float64")
def test_averages_and_losses_are_those_of_a_device_with_float64() -> None:
    model, ids = llama(), torch.randint(5, 50, (2, 12))
    plain, there = (
        regard.average_attention(model, [{"input_ids": ids.as_subclass(kind)}], length=12)
        for kind in (Tensor, Elsewhere)
    )
    for key, matrix in plain.matrices.items():
        torch.testing.assert_close(there.matrices[key], matrix)
    states = torch.randn(2, 12, 16)
    assert _distance(states.as_subclass(Elsewhere), (0.5 * states).as_subclass(Elsewhere), None) == pytest.approx(0.5)
    logits, targets, mask = torch.randn(5, 7), torch.randint(7, (5,)), torch.ones(5, dtype=torch.bool)
    expected = -logits.double().log_softmax(-1)[torch.arange(5), targets].sum()
    found = sum_nll(logits.as_subclass(Elsewhere), targets.as_subclass(Elsewhere), mask)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)
