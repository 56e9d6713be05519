"""A query that sees no key reads nothing, whatever computes its attention: its weights and its output are zero."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention.call import AttentionCall, ConstantHeadsInput, Operation
from regard.attention.operator import attend
from regard.attention.reduction import ReductionRequest

TOKENS, BLIND = 6, 2
"""Tokens of a sample, and the query that sees none of them."""


def call_of(hidden_by: str, *, learns: bool = False) -> AttentionCall:
    """Return a call of two samples with biases, one query of which sees no key: by mask, padding, or bias."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, TOKENS, 8, generator=generator) for _ in range(3))
    bias = torch.randn(1, 4, TOKENS, TOKENS, generator=generator)
    parts: dict[str, Any] = {}
    if hidden_by == "mask":
        keep = torch.rand(2, 1, TOKENS, TOKENS, generator=generator) < 0.7
        keep[:, :, BLIND] = False
        parts["keep"] = keep
    elif hidden_by == "padding":
        parts |= {"key_mask": (torch.arange(TOKENS) > BLIND).expand(2, -1), "causal": True}
    else:
        bias[:, :, BLIND] = torch.finfo(bias.dtype).min if hidden_by == "smallest bias" else float("-inf")
    query, bias = query.requires_grad_(learns), bias.requires_grad_(learns)
    return AttentionCall(query=query, key=key, value=value, scale=0.3, bias=bias, **parts)


def expected_output(call: AttentionCall) -> Tensor:
    """Return the output from its definition in float64, query by query and key by key."""
    q, k, v = (tensor.detach().double() for tensor in (call.query, call.key, call.value))
    assert call.bias is not None
    bias = call.bias.detach().double()
    output = torch.zeros_like(v)
    for sample in range(2):
        for head in range(4):
            for i in range(TOKENS):
                seen = [j for j in range(TOKENS) if _sees(call, bias, sample, head, i, j)]
                if not seen:
                    continue
                scores = torch.stack(
                    [q[sample, head, i] @ k[sample, head, j] * 0.3 + bias[0, head, i, j] for j in seen]
                )
                output[sample, head, i] = scores.softmax(0) @ v[sample, head, seen]
    return output


def _sees(call: AttentionCall, bias: Tensor, sample: int, head: int, i: int, j: int) -> bool:
    if call.keep is not None and not call.keep[sample, 0, i, j]:
        return False
    if call.causal and j > i:
        return False
    if call.key_mask is not None and not call.key_mask[sample, j]:
        return False
    return bool(bias[0, head, i, j] > -1e30)


HIDDEN_BY = ("mask", "padding", "smallest bias", "infinite bias")


@pytest.mark.parametrize("hidden_by", HIDDEN_BY)
@pytest.mark.parametrize("path", ["fused", "observed", "window", "blocks", "gradients"])
def test_whole_sequences(hidden_by: str, path: str) -> None:
    call = call_of(hidden_by, learns=path == "gradients")
    names = frozenset({"column_mass"} if path == "observed" else ())
    operation = {"window": Operation(window=TOKENS + 1), "blocks": Operation(top_k=TOKENS)}.get(path)
    output, _ = attend(replace(call, operation=operation), ReductionRequest(names=names))
    torch.testing.assert_close(output.double(), expected_output(call), atol=1e-5, rtol=1e-5)
    assert (output[:, :, BLIND] == 0).all()
    if path == "gradients":
        output.square().sum().backward()
        for tensor in (call.query, call.bias):
            assert tensor is not None
            assert tensor.grad is not None
            assert tensor.grad.isfinite().all()
            assert (tensor.grad[:, :, BLIND] == 0).all()


@pytest.mark.parametrize("hidden_by", HIDDEN_BY)
@pytest.mark.parametrize("queries", [1, TOKENS])
def test_beside_a_constant_head(hidden_by: str, queries: int) -> None:
    """Its constant head aside, which has the same rows for all masks here: the identity."""
    call = call_of(hidden_by)
    first = BLIND if queries == 1 else 0
    expected = expected_output(call)
    constant = ConstantHeadsInput(matrices=torch.eye(TOKENS)[None], heads=(1,), first_query=first)
    part = call.select_tokens(slice(first, first + queries), slice(0, TOKENS))
    with torch.no_grad():
        output, _ = attend(replace(part, constant=constant), ReductionRequest())
    others = [0, 2, 3]
    torch.testing.assert_close(
        output[:, others].double(), expected[:, others, first : first + queries], atol=1e-5, rtol=1e-5
    )


class _Attention(torch.nn.Module):
    def forward(self, query: Tensor, keep: Tensor, bias: Tensor) -> Tensor:
        return attend(AttentionCall(query=query, key=query, value=query, scale=0.3, keep=keep, bias=bias), NOTHING)[0]


NOTHING = ReductionRequest()


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # PyTorch's own
def test_in_a_graph_of_onnx(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    call = call_of("mask")
    assert call.keep is not None
    assert call.bias is not None
    inputs = (call.query, call.keep, call.bias)
    expected = expected_output(replace(call, key=call.query, value=call.query))
    program = torch.export.export(_Attention(), inputs, strict=False)
    torch.testing.assert_close(program.module()(*inputs).double(), expected, atol=1e-5, rtol=1e-5)
    torch.onnx.export(_Attention().eval(), inputs, tmp_path / "attention.onnx", dynamo=True, verbose=False)
    session = runtime.InferenceSession(tmp_path / "attention.onnx", providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
    found = torch.from_numpy(session.run(None, feed)[0])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
