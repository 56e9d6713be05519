"""Layers on two devices: the CPU, and `meta` as a stand-in, which refuses tensors of another device as a card does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.adapters.shared import SharedAdapters
from tests.adapters.model_families import LEARNT, fill, made, rows


def move_to_meta(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    def move(value: Any) -> Any:
        return tuple(map(move, value)) if isinstance(value, tuple) else moved(value)

    def moved(value: Any) -> Any:
        return value.to("meta") if isinstance(value, Tensor) else value

    return move(args), {name: move(value) for name, value in kwargs.items()}


def spread(**options: Any) -> SharedAdapters:
    """A Llama with three adapters whose second layer and head are on another device, as `device_map` does it."""
    adapters = SharedAdapters(made("llama"), r=4, **options)
    for number in range(3):
        adapters.add_adapter(f"task{number}")
        if "router" not in options:
            adapters.fit_router(f"task{number}", [rows("llama", 9, seed=20 + number)])
    fill(adapters)
    for name in ("model.layers.1", "model.norm", "lm_head"):
        module = adapters.model.get_submodule(name).to("meta")
        module.register_forward_pre_hook(move_to_meta, with_kwargs=True)
    return adapters


@pytest.mark.parametrize("options", [{}, {"top_k": 1}, LEARNT], ids=["default", "top_k", "paper"])
def test_the_router_s_weights_follow_each_layer_to_its_device(options: dict[str, Any]) -> None:
    adapters = spread(**({"query_layers": [1]} if options is not LEARNT else {}), **options)
    batch = rows("llama")
    assert {parameter.device.type for parameter in adapters.pool.parameters_of(2)} == {"cpu", "meta"}
    for training in (True, False):
        adapters.train(training)
        with torch.set_grad_enabled(training):
            assert adapters(**batch).logits.device.type == "meta"
    assert adapters.routing_weights(**batch).device.type == "cpu"
