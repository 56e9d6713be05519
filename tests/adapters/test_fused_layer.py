"""A layer and its adapters as one step of autograd: when that is, and that nothing else changes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard.adapters.lora import MixedLayer
from regard.errors import UserError
from tests.adapters.mixed_models import INPUTS, OUTPUTS, drawn, layer, run, weights_of


def is_fused(made: MixedLayer, states: Tensor, weights: Tensor | None = None) -> bool:
    out = run(made, states, weights_of(3, 4).detach() if weights is None else weights)
    assert out.grad_fn is not None
    return type(out.grad_fn.next_functions[0][0]).__name__ == "FusedLayerBackward"  # behind a view


def states() -> Tensor:
    return drawn(3, 4, INPUTS).requires_grad_()


@pytest.mark.parametrize("made", [layer(4, 3), layer(4, 0, 3), layer(4, 0, 1, 2, 3), layer(1, 0), layer(6, 2)])
def test_training_with_given_weights_is_one_step(made: MixedLayer) -> None:
    assert is_fused(made, states(), weights_of(3, min(4, len(made.adapters))).detach())
    made.train()
    assert is_fused(made, states(), weights_of(3, min(4, len(made.adapters))).detach())


class Recording(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class RecordingOperations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def a_hook(made: MixedLayer, method: str, of: Callable[[MixedLayer], nn.Module]) -> Iterator[None]:
    handle = getattr(of(made), method)(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def a_forward_of_its_own(made: MixedLayer) -> Iterator[None]:
    made.base_layer.forward = made.base_layer.forward
    yield
    del made.base_layer.forward


@contextmanager
def a_hook_of_all_modules(_: MixedLayer) -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def a_trained_weight(made: MixedLayer) -> Iterator[None]:
    made.base_layer.weight.requires_grad_(True)
    yield
    made.base_layer.weight.requires_grad_(False)


WATCHED: dict[str, Callable[[MixedLayer], Any]] = {
    "a hook": lambda made: a_hook(made, "register_forward_hook", lambda made: made.base_layer),
    "a hook before": lambda made: a_hook(made, "register_forward_pre_hook", lambda made: made.base_layer),
    "a hook of gradients": lambda made: a_hook(made, "register_full_backward_hook", lambda made: made.base_layer),
    "a hook of adapters": lambda made: a_hook(made, "register_forward_hook", lambda made: made.adapters),
    "a hook of all": a_hook_of_all_modules,
    "a forward of its own": a_forward_of_its_own,
    "a trained weight": a_trained_weight,
    "a mode": lambda _: Recording(),
    "a mode of operations": lambda _: RecordingOperations(),  # as of selective checkpointing, which keeps outputs
    "autocast": lambda _: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("name", WATCHED)
def test_where_something_may_see_the_parts_they_are_there(name: str) -> None:
    made = layer(4, 3)
    with WATCHED[name](made):
        assert not is_fused(made, states())
    assert is_fused(made, states())


@pytest.mark.parametrize(
    "made, weights",
    [
        (layer(4, 3), weights_of(3, 4)),  # the router is trained
        (layer(4, 3, detach_old=True), None),
        (layer(4), None),  # nothing is trained
        (layer(4, 3, dropout=0.1), None),
        (layer(4, 3, layout=None), None),
    ],
)
def test_other_mixes_are_several_steps(made: MixedLayer, weights: Tensor | None) -> None:
    assert not is_fused(made.train(), states(), weights)


def test_other_kinds_of_layers_are_several_steps() -> None:
    class Scaled(nn.Linear):
        def forward(self, given: Tensor) -> Tensor:
            return 2 * super().forward(given)

    assert not is_fused(layer(4, 3, base=Scaled(INPUTS, OUTPUTS)), states())


@pytest.mark.parametrize("count", [4, 12])  # 22 rows of frozen matrices for 12 tokens are not joined
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_without_gradients(context: Callable[[], Any], count: int) -> None:
    made, weights = layer(count, 3), weights_of(3, count).detach()
    expected = run(made, states(), weights)
    with context():
        found = run(made, drawn(3, 4, INPUTS), weights)
    assert torch.equal(found, expected.detach())
    assert not found.requires_grad


@pytest.mark.parametrize("shape", [(3, 0, INPUTS), (0, 4, INPUTS)])
def test_no_tokens(shape: tuple[int, ...]) -> None:
    made = layer(4, 3)
    weights = torch.ones(4, dtype=torch.float64)
    assert run(made, drawn(*shape).requires_grad_(), weights).shape == (*shape[:-1], OUTPUTS)


def test_states_of_another_width_are_refused_as_by_the_layer() -> None:
    made = layer(4, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run(made, drawn(3, 4, 2 * INPUTS).requires_grad_(), weights_of(3, 4).detach())


def test_states_in_another_order_in_memory() -> None:
    made, weights = layer(4, 3), weights_of(3, 4).detach()
    turned = drawn(4, 3, INPUTS).transpose(0, 1).requires_grad_()
    assert is_fused(made, turned, weights)
    torch.testing.assert_close(run(made, turned, weights), run(made, turned.contiguous(), weights))


@pytest.mark.parametrize("base", [nn.Linear(INPUTS, OUTPUTS), nn.Linear(INPUTS, OUTPUTS, bias=False)])
@pytest.mark.parametrize("count, trained", [(4, (3,)), (4, (0, 2)), (12, (11,)), (1, (0,))])
def test_gradients_of_gradients(base: nn.Linear, count: int, trained: tuple[int, ...]) -> None:
    made, weights = layer(count, *trained, base=base), weights_of(3, count).detach()
    parts = [part for index in trained for part in (made.adapters.A[index], made.adapters.B[index])]

    def output(*given: Tensor) -> Tensor:
        assert is_fused(made, given[0], weights)
        return run(made, given[0], weights)

    assert torch.autograd.gradgradcheck(output, (states(), *parts))


def test_parts_that_are_not_trained_get_no_gradients() -> None:
    made, weights = layer(4, 3), weights_of(3, 4).detach()
    made.adapters.A[3].requires_grad_(False)  # as InfLoRA has it
    run(made, drawn(3, 4, INPUTS), weights).sum().backward()
    assert made.adapters.A[3].grad is None
    found = made.adapters.B[3].grad
    expected = torch.einsum(
        "rto,rti,hi,r->oh",
        torch.ones(3, 4, OUTPUTS, dtype=torch.float64),
        drawn(3, 4, INPUTS),
        made.adapters.A[3],
        made.adapters.scale * weights[:, 3],
    )
    torch.testing.assert_close(found, expected)


def test_tangents_of_forward_mode_are_followed() -> None:
    made, weights, towards = layer(4, 3), weights_of(3, 4).detach(), drawn(3, 4, INPUTS, seed=5)
    with forward_ad.dual_level():
        out = run(made, forward_ad.make_dual(drawn(3, 4, INPUTS), towards), weights)
        tangent = forward_ad.unpack_dual(out).tangent
    zero = run(made, torch.zeros_like(towards), weights)
    torch.testing.assert_close(tangent, run(made, towards, weights) - zero)


def test_it_saves_what_checkpointing_drops() -> None:
    made, weights, given = layer(4, 3), weights_of(3, 4).detach(), states()
    grads = []
    for again in (False, True):
        made.mixture.weights = weights
        out = torch.utils.checkpoint.checkpoint(made, given, use_reentrant=False) if again else made(given)
        grads.append(torch.autograd.grad(out.pow(2).sum(), (given, made.adapters.A[3], made.adapters.B[3])))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))


def gradients_of(loss: Callable[[Tensor], Tensor], made: MixedLayer, given: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss(run(made, given, torch.ones(4))), (given, made.adapters.A[3], made.adapters.B[3]))


def gradients_apart(loss: Callable[[Tensor], Tensor], made: MixedLayer, given: Tensor) -> tuple[Tensor, ...]:
    with a_hook(made, "register_forward_hook", lambda made: made.base_layer):
        return gradients_of(loss, made, given)


@pytest.mark.parametrize("change", [torch.relu_, lambda out: out.mul_(2).add_(1)])
@pytest.mark.parametrize("shape", [(3, 4, INPUTS), (3, INPUTS), (INPUTS,)])
def test_its_output_may_be_changed_in_place(change: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    """As by `nn.ReLU(inplace=True)`, or a residual that is added; PyTorch refused it for a view of a function."""
    made, given = layer(4, 3), drawn(*shape).requires_grad_()
    assert is_fused(made, given, torch.ones(4))
    found, expected = (of(lambda out: change(out).pow(2).sum(), made, given) for of in (gradients_of, gradients_apart))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_of_several_losses_at_once() -> None:
    made, given, weights = layer(4, 3), states(), weights_of(3, 4).detach()
    assert is_fused(made, given, weights)
    out, towards = run(made, given, weights), drawn(2, 3, 4, OUTPUTS, seed=5)
    wanted = (given, made.adapters.A[3], made.adapters.B[3])
    found = torch.autograd.grad(out, wanted, towards, is_grads_batched=True, retain_graph=True)
    for number, one in enumerate(towards):
        for mine, theirs in zip(found, torch.autograd.grad(out, wanted, one, retain_graph=True), strict=True):
            torch.testing.assert_close(mine[number], theirs)


def test_a_backward_pass_in_autocast_is_that_of_its_forward() -> None:
    made = layer(4, 3).float()
    given, weights = drawn(3, 4, INPUTS).float().requires_grad_(), torch.ones(4)
    assert is_fused(made, given, weights)
    wanted, losses = (given, made.adapters.A[3], made.adapters.B[3]), []
    for casts in (False, True):
        out = run(made, given, weights).pow(2).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            losses.append(torch.autograd.grad(out, wanted))
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))


def test_trained_adapters_of_another_type_are_several_steps() -> None:
    """As where a model is in bfloat16 and what is trained was cast to float32."""
    made = layer(4, 3).bfloat16()
    given = drawn(3, 4, INPUTS).bfloat16().requires_grad_()
    assert is_fused(made, given)
    for part in (made.adapters.A[3], made.adapters.B[3]):
        part.data = part.data.float()
    assert not is_fused(made, given)


def test_adapters_that_are_not_in_memory_are_refused() -> None:
    """The layer alone was computed, as if they were not there."""
    made = layer(4, 3)
    made.adapters.to("meta")
    with pytest.raises(UserError, match=r"^adapters: expected tensors in memory"):
        run(made, states(), torch.ones(4))


def test_states_of_inference_mode_are_never_kept() -> None:
    made = layer(4, 3)
    made.adapters.A[3].requires_grad_(False)  # else PyTorch itself refuses them
    with torch.inference_mode():
        given = drawn(3, 4, INPUTS)
    found, expected = (
        torch.autograd.grad(run(made, of, torch.ones(4)).sum(), made.adapters.B[3]) for of in (given, given.clone())
    )
    torch.testing.assert_close(found, expected)
