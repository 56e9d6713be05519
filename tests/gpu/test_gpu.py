"""What a GPU computes is what a CPU computes in float64. With REGARD_GPU_TESTS=cpu the same tests run without one."""

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import transformers
from torch import Tensor

import regard
from regard.attention.call import AttentionCall, Operation
from regard.attention.operator import attend, compute_output
from regard.attention.reduction import WEIGHT_REDUCTIONS, ReductionRequest, reduce_dense
from regard.attention.spec import ATTENTIONS
from regard.hooks import watching
from regard.hooks.average import average_attention
from regard.statistics import STATISTICS

pytestmark = pytest.mark.gpu
DEVICE = torch.device(os.environ.get("REGARD_GPU_TESTS") or "cuda")
SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 300, "pad_token_id": 0, "initializer_range": 0.2,
}  # fmt: skip
AROUND = ("sink-token", "gated", "qk-norm")
"""Attentions that differ beside the call."""


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "bert":
        return transformers.BertModel(transformers.BertConfig(**SIZES), add_pooling_layer=False).eval()
    return transformers.LlamaModel(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()


def make_inputs(device: torch.device, length: int = 150) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 97, (3, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - 30 :] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_all_statistics_are_those_of_float64(kind: str) -> None:
    tables = []
    for device, dtype in ((DEVICE, torch.float32), (torch.device("cpu"), torch.float64)):
        model = make_model(kind).to(device, dtype)
        with torch.no_grad(), watching(model, "all") as watch:
            model(**make_inputs(device))
        tables.append(watch.frame())
    keys = ["statistic", "site", "layer", "head", "position", "epsilon"]
    pd.testing.assert_frame_equal(tables[0][keys], tables[1][keys])
    error = (tables[0]["value"] - tables[1]["value"]).abs() / tables[1]["value"].abs().clip(lower=1.0)
    exact = ~tables[0]["statistic"].isin(["sink_tokens", "massive_activations"])
    assert error[exact].max() < 2e-3, tables[0][exact].assign(error=error).nlargest(5, "error")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
def test_reductions_are_those_of_the_whole_matrix(causal: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(2, heads, 200, 32, generator=generator).to(DEVICE, dtype) for heads in (4, 2, 2))
    call = AttentionCall(query=query, key=key, value=value, scale=0.3, causal=causal)
    request = ReductionRequest(names=frozenset(WEIGHT_REDUCTIONS) - {"spectral_bound", "weights"}, num_first_keys=3)
    with torch.no_grad():
        output, reductions = attend(call, request)
    exact = replace(call, query=query.cpu().double(), key=key.cpu().double(), value=value.cpu().double())
    expected = reduce_dense(exact, request)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for name, tensor in expected.items():
        torch.testing.assert_close(reductions[name].cpu().double(), tensor.double(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(output.cpu().double(), compute_output(exact), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [name for name in ATTENTIONS if name not in AROUND])
def test_a_step_of_training_with_each_attention(name: str) -> None:
    spec = ATTENTIONS[name]
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": (2, 4, 70, 16), "key": (2, 4, 70, 16), "value": (2, 4, 70, 16), "gradient": (2, 4, 70, 16)}
    tensors = {part: torch.randn(shape, generator=generator) for part, shape in shapes.items()}
    rows = 1 if spec.shared_extra else 4
    tensors |= {"extra_key": torch.randn(rows, 16, generator=generator)}
    tensors |= {"extra_value": torch.randn(rows, 16, generator=generator)}
    results = []
    for device, dtype in ((DEVICE, torch.float32), (torch.device("cpu"), torch.float64)):
        parts = {part: tensor.to(device, dtype).requires_grad_() for part, tensor in tensors.items()}
        learned = {}
        if spec.extra in ("k-bias", "kv-bias"):
            learned["extra_key"] = parts["extra_key"]
        if spec.extra in ("v-bias", "kv-bias"):
            learned["extra_value"] = parts["extra_value"]
        operation = Operation.from_spec(spec, **learned)
        inputs = {part: parts[part] for part in ("query", "key", "value")}
        output = compute_output(AttentionCall(**inputs, scale=0.25, causal=True, operation=operation))
        gradients = torch.autograd.grad(output, [*inputs.values(), *learned.values()], parts["gradient"].detach())
        results.append([part.detach().cpu().double() for part in (output, *gradients)])
    for one, other in zip(*results, strict=True):
        assert float((one - other).norm()) <= 1e-3 * float(other.norm().clamp(min=1e-3))


def test_replaced_heads_compute_what_they_do_on_a_cpu() -> None:
    model = make_model("bert")
    constants = average_attention(model, [make_inputs(torch.device("cpu"), 40)], 40)
    outputs = []
    for device in (DEVICE, torch.device("cpu")):
        own = copy.deepcopy(model).to(device)
        heads = constants.heads[::2]
        with torch.no_grad(), regard.replacing(own, constants, heads=heads):
            outputs.append(own(**make_inputs(device, 40)).last_hidden_state.cpu())
    real = make_inputs(torch.device("cpu"), 40)["attention_mask"].bool()
    torch.testing.assert_close(outputs[0][real], outputs[1][real], rtol=1e-3, atol=1e-3)


def test_autocast_changes_statistics_by_its_precision_alone() -> None:
    model, names = make_model("llama").to(DEVICE), ["entropy", "column_mass"]
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16), watching(model, names) as half:
        model(**make_inputs(DEVICE))
    with torch.no_grad(), watching(model, names) as full:
        model(**make_inputs(DEVICE))
    for name in names:
        difference = half.frame(name)["value"].to_numpy() - full.frame(name)["value"].to_numpy()
        assert abs(difference).max() < 0.1 * abs(full.frame(name)["value"]).max()


def test_the_command_measures_on_the_device(tiny: Callable[[str], Path]) -> None:
    tables = []
    for device in (str(DEVICE), "cpu"):
        loaded = regard.models.load(str(tiny("llama")), device=device, dtype="float32")
        result = regard.measure(loaded, texts=["w1 w2 w3 " * 30], samples=4, length=12, statistics=tuple(STATISTICS))
        assert result.metadata["cost"]["device"].startswith(DEVICE.type if device != "cpu" else "cpu")
        tables.append(result.table)
    assert len(tables[0]) == len(tables[1])
