"""Models of which each process holds a part: sharded ones are as they were, those with split heads are refused."""

import copy
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import regard
from regard import models
from regard.errors import UserError
from regard.hooks.layers import model_fingerprint

IDS = torch.randint(3, 50, (4, 12), generator=torch.Generator().manual_seed(0))
SIZES: dict[str, Any] = {"vocab_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"bos_token_id": 1, "eos_token_id": 2}
HEADS = {(0, 1), (0, 2), (1, 3)}


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("shards", "heads"))
    dist.destroy_process_group()


def built(family: str) -> Any:
    torch.manual_seed(1)
    if family == "GPT2":
        return GPT2LMHeadModel(GPT2Config(**SIZES, **WORDS, hidden_size=32, n_positions=32)).double().eval()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **WORDS, **sizes)).double().eval()


def sharded(model: Any, mesh: DeviceMesh) -> Any:
    found = copy.deepcopy(model)
    for module in (*(getattr(found.base_model, "h", None) or found.base_model.layers), found):
        fully_shard(module, mesh=mesh["shards"])
    return found


@pytest.mark.every_value
@torch.no_grad()
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_sharded_models_are_observed_averaged_and_replaced_as_they_are(family: str, mesh: DeviceMesh) -> None:
    """GPT-2 has one projection for queries, keys and values."""
    model = built(family)
    parts = sharded(model, mesh)
    assert model_fingerprint(parts) == model_fingerprint(model)
    constants = regard.average_attention(parts, [{"input_ids": IDS}], length=12)
    means = regard.average_attention(model, [{"input_ids": IDS}], length=12).matrices
    for place, mean in constants.matrices.items():
        torch.testing.assert_close(mean, means[place], rtol=0, atol=0)
    results = []
    for host in (model, parts):
        with regard.watching(host, ["entropy", "head_output_norm"]) as watch, regard.replacing(host, constants, HEADS):
            logits = host(IDS).logits
        results.append((logits, watch.rows()))
    (expected, rows), (logits, found) = results
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    assert [row[:5] for row in found] == [row[:5] for row in rows]
    assert [row.value for row in found] == pytest.approx([row.value for row in rows], rel=1e-12)
    with pytest.raises(UserError, match="sharded for good; shard the replaced model"):
        regard.replaced(parts, constants, HEADS)


def test_samples_that_would_leave_a_process_waiting_for_another_are_refused(
    mesh: DeviceMesh, tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two processes would compute a third batch, and wait for the weights of the other."""
    loaded = models.load(str(tiny("llama")), device="cpu")
    parts = sharded(loaded.model, mesh)
    alone, found = (
        regard.measure(host, loaded.tokenizer, input="random", samples=4, length=12) for host in (loaded.model, parts)
    )
    pd.testing.assert_frame_equal(found.table, alone.table)
    monkeypatch.setattr("regard.commands.measure.run.world_size", lambda: 2)
    with pytest.raises(UserError, match=r"^samples: with FSDP expected a multiple of 2 processes, .*, got 3$"):
        regard.measure(parts, loaded.tokenizer, input="random", samples=3, length=12)


def test_heads_that_are_split_over_processes_are_refused(mesh: DeviceMesh) -> None:
    """Each process would number its own from 0, and `measure` give them texts of its own."""
    split, marked = built("Llama"), built("Llama")
    plan = {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
    for layer in split.model.layers:
        parallelize_module(layer.self_attn, mesh["heads"], {**plan, "o_proj": RowwiseParallel()})
    marked._tp_size = 2  # as `from_pretrained(…, tp_plan=…)` leaves it, whose weights may be plain tensors
    inside = built("Llama")
    fully_shard(nn.Sequential(inside), mesh=mesh["shards"])
    perhaps = r"\(tensor parallelism, or fully_shard of a module around it alone\)"
    for model in (split, sharded(split, mesh), marked, inside):
        told = perhaps if model in (split, inside) else r"\(tensor parallelism\)"
        for use in (regard.watching(model), regard.replacing(model, "sigmoid")):
            with pytest.raises(UserError, match=rf"split over processes {told}"), use:
                pass
        with pytest.raises(UserError, match=rf"split over processes {told}"):
            regard.SharedAdapters(model)
