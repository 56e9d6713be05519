"""What gradient checkpointing computes again in the backward pass of adapters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from regard.adapters.shared import SharedAdapters
from regard.errors import UserError

IDS = torch.arange(1, 13).view(2, 6)


def checkpointed() -> SharedAdapters:
    """Two adapters in all layers, of which the second is trained."""
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=20, pad_token_id=0, max_position_embeddings=8, **sizes))
    adapters = SharedAdapters(model, r=2, target_modules="all-linear")
    for number, name in enumerate(("first", "second")):
        adapters.add_adapter(name)
        adapters.fit_router(name, [{"input_ids": IDS + number, "labels": IDS}])
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return adapters.train()


def loss(adapters: SharedAdapters) -> Tensor:
    result: Tensor = adapters(input_ids=IDS, labels=IDS).loss
    return result


@pytest.mark.every_value
@pytest.mark.parametrize(
    "change",
    [
        lambda adapters: adapters.add_adapter("third"),
        lambda adapters: adapters.set_adapter("first"),
        lambda adapters: adapters.freeze(),
        lambda adapters: adapters.unload(),
    ],
)
def test_adapters_that_change_before_the_backward_pass_are_refused_in_one_line(
    change: Callable[[SharedAdapters], object],
) -> None:
    """PyTorch ended it with a CheckpointError, of tensors that were saved and were not."""
    adapters = checkpointed()
    began = loss(adapters)
    change(adapters)
    with pytest.raises(UserError, match=r"^gradient checkpointing: expected the adapters of the forward pass until"):
        began.backward()


def test_what_changes_behind_the_backward_pass_is_no_matter() -> None:
    adapters = checkpointed()
    loss(adapters).backward()
    adapters.add_adapter("third")
    adapters.fit_router("third", [{"input_ids": IDS + 2, "labels": IDS}])
    loss(adapters).backward()
