"""FSDP2: a step under `fully_shard` is that of the plain model, in a mesh of one process."""

import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters.model_families import fill, made, rows


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def taught() -> SharedAdapters:
    adapters = SharedAdapters(made("llama"), r=4)
    for number in range(3):
        adapters.add_adapter(f"task{number}")
        adapters.fit_router(f"task{number}", [rows("llama", 9, seed=20 + number)])
    fill(adapters)
    return adapters


def shard(adapters: Any, mesh: DeviceMesh) -> None:
    for module in (*adapters.model.model.layers, adapters.model):
        fully_shard(module, mesh=mesh)


def test_steps_under_fully_shard_are_those_of_the_plain_model(mesh: DeviceMesh) -> None:
    plain, sharded = taught(), taught()
    batch = rows("llama")
    sharded(**batch)  # frozen adapters become views of one tensor
    sharded.set_adapter("task2")  # and tensors of their own again
    shard(sharded, mesh)
    losses: list[list[float]] = []
    for adapters in (plain, sharded):
        trained = [parameter for parameter in adapters.parameters() if parameter.requires_grad]
        optimizer, steps = torch.optim.SGD(trained, lr=0.5), []
        for _ in range(2):
            loss = adapters(**batch, labels=batch["input_ids"]).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(float(loss.detach()))
        losses.append(steps)
    assert losses[0][0] != losses[0][1]
    torch.testing.assert_close(losses[1], losses[0])


def test_adapters_that_were_used_are_refused_until_one_is_set(mesh: DeviceMesh) -> None:
    adapters = taught()
    adapters(**rows("llama"))
    with pytest.raises(NotImplementedError, match="non-contiguous"):
        shard(adapters, mesh)


def test_the_router_is_told_of_rows_before_the_model_is_sharded(mesh: DeviceMesh) -> None:
    adapters = SharedAdapters(made("llama"), r=4)
    shard(adapters, mesh)
    with pytest.raises(UserError, match="Call fit_router before fully_shard"):
        adapters.fit_task("new", [rows("llama")])
    assert adapters.adapter_names == ()
