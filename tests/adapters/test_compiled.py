"""Shared adapters under `torch.compile`: the same numbers, and no break of the graph to count the adapters."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

from regard.adapters.rows import are_packed
from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
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


@torch.no_grad()
def test_a_graph_of_a_whole_forward_is_refused_in_words_unless_all_rows_have_one_weight() -> None:
    adapters = filled("llama", 2, made("llama", num_hidden_layers=1))
    given = rows("llama", seed=1)
    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=r"SharedAdapters weighs adapters for each row .* compile without fullgraph"):
        torch.compile(adapters, backend="eager", fullgraph=True)(**given)
    with adapters.use_only(adapters.adapter_names[0]):
        expected = adapters(**given).logits
        torch._dynamo.reset()
        found = torch.compile(adapters, backend="eager", fullgraph=True)(**given).logits
    torch._dynamo.reset()
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_what_is_asked_of_rows_waits_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether each has a prompt, and whether positions pack several texts; nothing where neither is given."""
    adapters = filled("llama", 2)
    ids = rows("llama", seed=1)["input_ids"]
    positions = torch.arange(ids.shape[1]).expand(len(ids), -1)
    asked: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda tensor: asked.append(tensor) or tensor.item())
    routing, mask = adapters._routing, torch.ones_like(ids)
    for inputs, prompt, count in (
        ({}, None, 0),
        ({"position_ids": positions}, mask, 1),
        ({"attention_mask": mask}, None, 1),
    ):
        asked.clear()
        routing._valid_mask({"input_ids": ids, **inputs}, prompt, are_packed(inputs))
        assert len(asked) == count
    with pytest.raises(UserError, match="several texts packed"):
        adapters(input_ids=ids, position_ids=positions % 3)
    packed = are_packed({"input_ids": ids, "position_ids": torch.stack([positions % 3] * 4)})
    with pytest.raises(UserError, match="several texts packed"):  # of a model with axes of images
        routing._valid_mask({"input_ids": ids}, mask, packed)
