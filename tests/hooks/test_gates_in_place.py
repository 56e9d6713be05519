"""A gate that a host applies to the output of attention in place: refused where it cannot be told, else as any gate."""

from typing import Any

import pytest
import torch
import transformers

import regard
from regard import UserError

STATISTICS = ["value_weighted_mass", "head_output_norm"]


def watch(statistics: list[str], *, in_place: bool, inference: bool) -> dict[str, float]:
    """Return the mean of each statistic of a Llama whose output projections receive a quarter of their input."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=99, **sizes)).eval()

    def gate(_module: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if in_place:
            args[0].mul_(0.25)
            return None
        return (args[0] * 0.25,)

    for layer in model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(gate)
    mode = torch.inference_mode() if inference else torch.no_grad()
    with mode, regard.watching(model, statistics, verify=False) as seen:
        model(torch.arange(5, 15)[None])
    return dict(seen.frame().groupby("statistic")["value"].mean())


def test_what_is_written_to_in_place_is_refused() -> None:
    with pytest.raises(UserError, match=r"^cannot weigh the values of .*in place.*leave out value_weighted_mass"):
        watch(STATISTICS, in_place=True, inference=False)
    norms = [watch(STATISTICS[1:], in_place=flag, inference=False)["head_output_norm"] for flag in (True, False)]
    assert norms[0] == pytest.approx(norms[1])


def test_in_inference_mode_it_is_a_gate() -> None:
    found, expected = (watch(STATISTICS, in_place=flag, inference=True) for flag in (True, False))
    assert found == pytest.approx(expected)
