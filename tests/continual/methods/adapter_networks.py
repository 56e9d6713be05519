"""Networks with blocks to look at: in float64, without dropout, their blocks filled with numbers."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.continual.adapter_network import PoolNetwork
from regard.continual.learner import Learner
from regard.continual.method import Method
from regard.continual.methods import METHODS
from regard.continual.run import make_learner, run_stream
from regard.continual.run_state import RunState
from regard.data.stream import Stream
from tests.continual.small_tasks import BUDGET, loaded, stream


def made(name: str, **said: Any) -> Method:
    """A method with small blocks."""
    return METHODS[name](METHODS[name].Config.parse({"r": 2, "lora_alpha": 4.0, **said}))


def short(tasks: int = 2) -> Stream:
    """The first tasks of the stream, with few rows."""
    return Stream(name="short", tasks=stream(4).tasks[:tasks], order=tuple(range(tasks)), seed=0)


def precise(method: Method, *, task: int = 1, tasks: int = 3) -> Learner:
    """A run at a task, all blocks up to it filled."""
    learner = make_learner(short(tasks), method, loaded(dropout=0.0, dtype=torch.float64), BUDGET, seed=1)
    learner.network.double()
    for module in learner.network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    learner.task = task
    fill(learner.network_as(PoolNetwork))
    return learner


def fill(network: PoolNetwork, size: float = 0.3) -> None:
    """Draw A and B of every block."""
    drawn = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for blocks in network.pool.adapters:
            for part in (*blocks.A, *blocks.B):
                part.copy_(size * torch.randn(part.shape, generator=drawn, dtype=torch.float64))


def learnt(name: str, *, tasks: int = 2, **said: Any) -> tuple[RunState, list[dict[str, Tensor]]]:
    """A run without dropout, and the network's weights before the first task and after each."""
    method = made(name, **said)
    learner = make_learner(short(tasks), method, loaded(dropout=0.0), BUDGET, seed=1)
    after = [copied(learner)]
    ran = run_stream(learner, method, on_task=lambda learner, _: after.append(copied(learner)))
    return ran, after


def copied(learner: Learner) -> dict[str, Tensor]:
    """The weights as they are now."""
    return {name: value.detach().clone() for name, value in learner.network.state_dict().items()}


def moved(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    """The names of what is not bit for bit the same."""
    return {name for name, value in one.items() if not torch.equal(value, other[name])}


def of_block(names: set[str], block: int) -> set[str]:
    """Those names that are of a block."""
    return {name for name in names if ".adapters." in name and name.endswith(f".{block}")}


def merged(learner: Learner, blocks: int) -> Tensor:
    """The logits of some rows by the plain model, with W + Σ_i (α/r) B_i A_i in the place of each adapted W."""
    network, rows = learner.network_as(PoolNetwork), some(learner)
    model = loaded(dropout=0.0, dtype=torch.float64).model.double()
    with torch.no_grad():
        for name, layer in network.pool.layers.items():
            weight: Any = model.get_submodule(name).weight
            for number in range(blocks):
                weight += 4.0 / 2 * layer.adapters.B[number] @ layer.adapters.A[number]
        inputs = {name: rows[name] for name in ("input_ids", "attention_mask") if name in rows}
        states = model(**inputs).last_hidden_state
        found: Tensor = network.classifier.head(states, rows["attention_mask"])
    return found


def some(learner: Learner) -> dict[str, Tensor]:
    """Rows of the first and second task."""
    return learner.rows([*learner.items(0)[:3], *learner.items(1)[:4]])


def gradients(learner: Learner, loss: Tensor) -> dict[str, Tensor]:
    """The gradient of each parameter that is trained and has one."""
    named = {name: one for name, one in learner.network.named_parameters() if one.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: one for name, one in zip(named, found, strict=True) if one is not None}
