"""The arithmetic of big models: the counts are those of real adapters, and the page is what it makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import regard
from benchmarks import arithmetic
from benchmarks.arithmetic import Arithmetic
from regard.adapters.discriminant import DiscriminantRouter


def test_counts_are_those_of_adapters_and_router() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    adapters = regard.SharedAdapters(LlamaForCausalLM(config), r=2)
    for name in ("a", "b", "c"):
        adapters.add_adapter(name)
        adapters.fit_router(name, [{"input_ids": torch.randint(0, 40, (4, 6))}])
    count = Arithmetic.of(config, rank=2)
    parameters = [parameter for index in range(3) for parameter in adapters.pool.parameters_of(index)]
    assert count.adapter_bytes(3) == sum(parameter.numel() * 4 for parameter in parameters)
    assert isinstance(adapters.router, DiscriminantRouter)
    kept = (adapters.router.means, adapters.router.scatter)
    assert count.router_bytes(3) == sum(value.numel() * value.element_size() for value in kept)
    assert count.parameters == sum(value.numel() for value in LlamaForCausalLM(config).parameters())


def test_hours_follow_from_operations() -> None:
    count = Arithmetic(parameters=10**9, adapter=10**6, query=8)
    assert count.operations(1, reads=False) == pytest.approx(4e9 + 4e6 + 2e6)
    assert count.operations(1) - count.operations(1, reads=False) == pytest.approx(1e9)
    assert count.operations(100, active=4) == count.operations(4)
    seconds = arithmetic.ROWS * arithmetic.TOKENS * arithmetic.EPOCHS * count.operations(1) / arithmetic.FLOPS
    assert count.hours(1) == pytest.approx(seconds / 3600)


def test_the_page_is_what_it_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert arithmetic.main(["--check"]) == 0
