"""Shared adapters under `torch.compile`: the same numbers, and no break of the graph to count the adapters."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from regard.adapters.shared import SharedAdapters
from tests.adapters.model_families import filled, made, rows


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("query", ["embeddings", pytest.param("states", marks=pytest.mark.exhaustive)])
def test_a_compiled_model_gives_the_same_losses_and_gradients(query: str) -> None:
    """A graph of the states is twice as long, as it reads the blocks before as well."""
    adapters = filled("llama", 2, made("llama", num_hidden_layers=1), router="discriminant", query=query)
    for number, name in enumerate(adapters.adapter_names):
        adapters.fit_router(name, [rows("llama", seed=number)])
    given = rows("llama", seed=1)
    given["labels"] = given["input_ids"].masked_fill(torch.arange(given["input_ids"].shape[1]) < 3, -100)

    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        adapters.zero_grad()
        loss = model(**given).loss
        loss.backward()
        return [loss.detach(), *(one.grad.clone() for one in adapters.parameters() if one.grad is not None)]

    expected = gradients(adapters)
    torch._dynamo.reset()
    counters.clear()
    torch.testing.assert_close(gradients(torch.compile(adapters, backend="eager")), expected)
    reasons = " ".join(counters["graph_break"])
    torch._dynamo.reset()
    assert reasons, "some are left"
    assert "is_inference" not in reasons


def test_the_number_of_adapters_is_known_without_reading_a_tensor(tmp_path: Path) -> None:
    adapters = SharedAdapters(made("bert"), r=2)
    assert not adapters._routing.is_active
    for number, name in enumerate("abc", 1):
        adapters.add_adapter(name)
        assert (adapters._routing.num_adapters, int(adapters.router.count)) == (number, number)
    adapters.delete_adapter("b")
    assert (adapters._routing.num_adapters, int(adapters.router.count)) == (2, 2)
    adapters.save_pretrained(tmp_path / "saved")
    again = SharedAdapters.from_pretrained(made("bert"), tmp_path / "saved")
    assert (again._routing.num_adapters, int(again.router.count)) == (2, 2)
