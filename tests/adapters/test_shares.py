"""Rows that are dealt out to processes: their gradients are averaged, or they are refused."""

import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from safetensors.torch import load_file
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler

from regard.adapters.shared import SharedAdapters
from regard.errors import UserError
from tests.adapters import shares
from tests.adapters.model_families import made
from tests.processes import started


def dealt_out(processes: int, *, by_accelerate: bool = False) -> Any:
    """The loader of the first process, as PyTorch's sampler deals rows out, or accelerate."""
    batch = shares.task_batches(0)[0]
    rows = [{name: value[row] for name, value in batch.items()} for row in range(shares.ROWS)]
    if by_accelerate:
        batches: Any = BatchSampler(SequentialSampler(rows), 2, drop_last=False)
        return DataLoader(rows, batch_sampler=BatchSamplerShard(batches, num_processes=processes, process_index=0))
    return DataLoader(rows, batch_size=2, sampler=DistributedSampler(rows, num_replicas=processes, rank=0))


@pytest.mark.parametrize("by_accelerate", [False, True])
def test_a_share_without_the_gradients_of_the_others_is_refused(by_accelerate: bool) -> None:
    """Each process would tell its router of other rows, and train an adapter of its own."""
    adapters, share = SharedAdapters(made("bert"), r=2), dealt_out(2, by_accelerate=by_accelerate)
    options: dict[str, Any] = {"epochs": 1, "loss": lambda batch: adapters(**batch).loss}
    expected = "batches: expected all rows in every process.*got a share of 2"
    with pytest.raises(UserError, match=expected):
        adapters.fit_task("weather", share)
    with pytest.raises(UserError, match=expected):
        adapters.fit_task("weather", share, **options)
    assert not adapters.adapter_names
    adapters.add_adapter("weather")
    with pytest.raises(UserError, match=expected):
        adapters.fit_router("weather", share)
    adapters.fit_router("weather", shares.task_batches(0))
    with pytest.raises(UserError, match=expected):
        adapters.fit_task("weather", share)
    assert len(adapters.fit_task("weather", share, **options).losses) == 2


@pytest.mark.parametrize("by_accelerate", [False, True])
def test_all_rows_are_no_share(by_accelerate: bool) -> None:
    adapters = SharedAdapters(made("bert"), r=2)
    assert len(adapters.fit_task("weather", dealt_out(1, by_accelerate=by_accelerate), epochs=1).losses) == 4


@pytest.mark.exhaustive
@pytest.mark.slow
def test_shares_with_averaged_gradients_train_as_all_rows(tmp_path: Path) -> None:
    """Two processes, whose gradients are averaged, take the steps of one with the rows of both."""
    script, whole = str(Path(shares.__file__)), shares.adapter_weights(shares.trained())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with ExitStack() as stack:
        processes = [
            stack.enter_context(started([script, str(tmp_path), str(rank)], environment))
            for rank in range(shares.PROCESSES)
        ]
        for process in processes:
            ended = process.end()
            assert ended.returncode == 0, ended.stderr
    for rank in range(shares.PROCESSES):
        found = load_file(tmp_path / f"{rank}.safetensors")
        assert found.keys() == whole.keys()
        for name, value in whole.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=f"{rank}: {name}")
