"""Gradients of gradients: refused in one line where a backend has none, never left out."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard.attention.call import AttentionCall, Operation
from regard.attention.fused import sdpa
from regard.attention.operator import compute_output, select_backend
from regard.attention.spec import ATTENTIONS, AttentionSpec
from regard.errors import UserError

TOKENS = 160
OPERATIONS = {"sparse": "top-8", "fused": "off-by-one", "pointwise": "sigmoid", "rowwise": "softpick"}
"""An attention that each backend has."""


def output_of(spec: AttentionSpec, backend: str, leaves: list[Tensor]) -> Tensor:
    operation = replace(Operation.from_spec(spec), backend=backend)
    sink = torch.zeros(2) if spec.extra == "zero" else None
    query, key, value = leaves
    call = AttentionCall(query=query, key=key, value=value, causal=True, scale=0.5, sink=sink, operation=operation)
    assert select_backend(call, operation) == backend
    return compute_output(call)


@pytest.mark.parametrize("backend", list(OPERATIONS))
@pytest.mark.parametrize("is_constant", [False, True], ids=["grad", "constant grad"])
def test_gradients_of_gradients_are_refused(backend: str, is_constant: bool) -> None:
    """PyTorch refused them in words of its own; where the gradient of the output is a constant, it gave none."""
    spec = ATTENTIONS[OPERATIONS[backend]]
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, TOKENS, 4, requires_grad=True) for _ in range(3)]
    output = output_of(spec, backend, leaves)
    loss = output.sum() if is_constant else output.square().sum()
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    for wanted in (leaves, leaves[:1], leaves[2:]):
        with pytest.raises(
            UserError, match=r"^attention: expected no gradient of its gradient \(create_graph=True\)"
        ) as told:
            torch.autograd.grad(sum(grad.square().sum() for grad in grads), wanted, retain_graph=True)
    assert "attn_implementation='eager' of the model has it outside of watching and replacing" in str(told.value)
    output = output_of(spec, backend, leaves)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(output.square().sum(), leaves))
    if backend == "fused":
        return  # softmax with a sink is computed so whatever is chosen
    loss = output_of(spec, "materialised", leaves).square().sum()
    (grad,) = torch.autograd.grad(loss, leaves[:1], create_graph=True)
    assert torch.autograd.grad(grad.square().sum(), leaves[0])[0].abs().sum() > 0


@pytest.mark.parametrize("tokens", [1, 9, TOKENS])
def test_gradients_of_gradients_of_pytorchs_kernels_are_refused(tokens: int) -> None:
    """PyTorch refused them in words of its own, also of a model whose eager attention has them."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, tokens, 4, requires_grad=True) for _ in range(3)]
    output = sdpa(AttentionCall(query=leaves[0], key=leaves[1], value=leaves[2], scale=0.5), is_causal=True)
    grads = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
    dense = (leaves[0] @ leaves[1].mT * 0.5).masked_fill(torch.ones(tokens, tokens).triu(1) > 0, -torch.inf).softmax(-1)
    for grad, expected in zip(grads, torch.autograd.grad((dense @ leaves[2]).square().sum(), leaves), strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-6)
    for wanted in (leaves, leaves[:1], leaves[2:]):
        with pytest.raises(UserError, match=r"^attention: expected no gradient of its gradient \(create_graph=True\)"):
            torch.autograd.grad(sum(grad.square().sum() for grad in grads), wanted, retain_graph=True)


def test_gradients_of_gradients_of_pytorchs_plain_products_are_there() -> None:
    """A bias with gradients is computed by products."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, 5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    call = AttentionCall(query=leaves[0], key=leaves[1], value=leaves[2], scale=0.5)
    seconds = []
    for output in (sdpa(call, bias), (leaves[0] @ leaves[1].mT * 0.5 + bias).softmax(-1) @ leaves[2]):
        (grad,) = torch.autograd.grad(output.square().sum(), bias, create_graph=True)
        seconds.append(torch.autograd.grad(grad.square().sum(), leaves))
    for actual, expected in zip(*seconds, strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("backend", ["sparse", "fused"])
def test_a_graph_of_several_gradients_at_once_is_refused(backend: str) -> None:
    """They were constants in silence: a penalty on them changed nothing."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, TOKENS, 4, requires_grad=True) for _ in range(3)]
    output = output_of(ATTENTIONS[OPERATIONS[backend]], backend, leaves)
    several = torch.randn(2, *output.shape)
    with pytest.raises(UserError, match=r"^attention: expected no gradient of its gradient \(create_graph=True\)"):
        torch.autograd.grad(output, leaves, several, is_grads_batched=True, create_graph=True)


@pytest.mark.every_value
@pytest.mark.parametrize("backend", [*OPERATIONS, "blockwise", "chunked"])
def test_several_gradients_at_once_are_exact_or_refused(backend: str) -> None:
    """PyTorch ended some in words of its own, of a missing batching rule."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, TOKENS, 4, requires_grad=True) for _ in range(3)]
    output = output_of(ATTENTIONS[OPERATIONS.get(backend, "elu-kernel")], backend, leaves)
    several = torch.randn(2, *output.shape)
    if backend in ("pointwise", "rowwise", "chunked"):
        with pytest.raises(UserError, match=r"expected one gradient at a time.*backend='blockwise'"):
            torch.autograd.grad(output, leaves, several, is_grads_batched=True)
        return
    found = torch.autograd.grad(output, leaves, several, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(output, leaves, one, retain_graph=True) for one in several]
    for grad, expected in zip(found, map(torch.stack, zip(*each, strict=True)), strict=True):
        torch.testing.assert_close(grad, expected)


@pytest.mark.parametrize("backend", list(OPERATIONS))
def test_a_graph_of_gradients_may_be_made_where_none_of_attention_is_asked_for(backend: str) -> None:
    """It was refused at once: a penalty on the gradient of what stands behind attention needs none of its gradient."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, TOKENS, 4, requires_grad=True) for _ in range(3)]
    weight = torch.randn(4, requires_grad=True)
    output = output_of(ATTENTIONS[OPERATIONS[backend]], backend, leaves)
    every = torch.autograd.grad((output @ weight).sin().sum(), [*leaves, weight], create_graph=True)
    first = torch.autograd.grad((output.detach() @ weight).sin().sum(), weight, create_graph=True)[0]
    torch.testing.assert_close(every[-1], first)
    penalty = torch.autograd.grad(every[-1].square().sum(), weight, retain_graph=True)[0]
    torch.testing.assert_close(penalty, torch.autograd.grad(first.square().sum(), weight)[0])
    through = torch.autograd.grad(every[-1].square().sum(), leaves, retain_graph=True)  # attention's first gradient
    alone = output.detach().requires_grad_()
    (of_weight,) = torch.autograd.grad((alone @ weight).sin().sum(), weight, create_graph=True)
    incoming = torch.autograd.grad(of_weight.square().sum(), alone)
    torch.testing.assert_close(through, torch.autograd.grad(output, leaves, incoming, retain_graph=True))
    plain = torch.autograd.grad((output @ weight).sin().sum(), leaves)
    torch.testing.assert_close(every[:3], plain)
    torch.testing.assert_close([grad.mul_(2) for grad in every[:3]], [2 * grad for grad in plain])
