"""Whatever happens to the parameters of blocks, the mix is made of them as they are."""

import copy
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.adapters.lora import MixedLayer
from tests.adapters import reference
from tests.adapters.mixed_models import INPUTS, OUTPUTS, RANK, drawn, layer, run, weights_of


def agree(made: MixedLayer) -> None:
    """The stack holds what the parameters do."""
    if not len(made.adapters):
        return
    dtype = made.adapters.A[0].dtype
    count = len(made.adapters)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    states, weights = drawn(2, 3, INPUTS).to(dtype), weights_of(2, count).detach().to(dtype)
    with torch.no_grad():
        found = run(made.eval(), states, weights)
        expected = reference.mixed(made.adapters, states, made.base_layer(states), weights)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert all(part.requires_grad == (n in made.adapters.trained) for n, part in enumerate(made.adapters.A))
    assert all(part.requires_grad == (n in made.adapters.trained) for n, part in enumerate(made.adapters.B))


def reserve(made: MixedLayer, number: int) -> MixedLayer:
    made.adapters.reserve(min(len(made.adapters) + number % 3, 6))
    return made


def open_one(made: MixedLayer, number: int) -> MixedLayer:
    made.adapters.set_trainable(*([number % len(made.adapters)] if len(made.adapters) else []))
    return made


def open_all(made: MixedLayer, number: int) -> MixedLayer:
    made.adapters.set_trainable(*range(len(made.adapters)))
    return made


def step(made: MixedLayer, number: int) -> MixedLayer:
    """Two steps of AdamW, the second after the stack has been used."""
    parts = [part for part in made.parameters() if part.requires_grad]
    if not parts:
        return made
    optimizer = torch.optim.AdamW(parts, lr=0.1, weight_decay=0.1)
    dtype = made.adapters.A[0].dtype
    for turn in range(2):
        weights = weights_of(2, len(made.adapters), seed=number).detach().to(dtype)
        run(made, drawn(2, 3, INPUTS, seed=turn).to(dtype), weights).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return made


def drop(made: MixedLayer, number: int) -> MixedLayer:
    if len(made.adapters):
        made.adapters.delete(number % len(made.adapters))
    return made


def double(made: MixedLayer, number: int) -> MixedLayer:
    return made.double() if number % 2 else made.float()


def copied(made: MixedLayer, number: int) -> MixedLayer:
    """A copy; what becomes of the one that was copied is nothing to it."""
    run(made, drawn(1, INPUTS).to(made.weight), None)
    made.mixture.weights = None
    other = copy.deepcopy(made)
    with torch.no_grad():
        for part in made.adapters.parameters():
            part.add_(1)
    return other


def load(made: MixedLayer, number: int) -> MixedLayer:
    random = torch.Generator().manual_seed(number)
    state = {
        name: torch.randn(value.shape, generator=random).to(value.dtype) for name, value in made.state_dict().items()
    }
    made.load_state_dict(state, assign=bool(number % 2))
    for one, part in enumerate(made.adapters.A):  # an assigned parameter is as trained as the one before it
        assert part.requires_grad == (one in made.adapters.trained)
    return made


def change(made: MixedLayer, number: int) -> MixedLayer:
    """As methods do that merge blocks."""
    if len(made.adapters):
        with torch.no_grad():
            made.adapters.A[number % len(made.adapters)].mul_(0.5)
            made.adapters.B[number % len(made.adapters)].copy_(torch.ones(OUTPUTS, RANK))
    return made


Operation = Callable[[MixedLayer, int], MixedLayer]
OPERATIONS: tuple[Operation, ...] = (reserve, open_one, open_all, step, drop, double, copied, load, change)


@given(st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 30)), max_size=12))
@settings(max_examples=60, deadline=None)
def test_whatever_happens_the_mix_is_that_of_the_parameters(doings: list[tuple[Operation, int]]) -> None:
    made = layer(2, 1)
    agree(made)
    for doing, number in doings:
        made = doing(made, number)
        agree(made)


def test_a_step_moves_the_open_block_alone() -> None:
    made = layer(3, 1)
    agree(made)
    before = [part.detach().clone() for part in made.adapters.parameters()]
    step(made, 0)
    moved = [not torch.equal(one, part) for one, part in zip(before, made.adapters.parameters(), strict=True)]
    assert moved == [False, True, False, False, True, False]


def test_optimizer_state_stays_with_a_block_through_reserving() -> None:
    """The parameter objects are the same ones all the while."""
    made = layer(2, 1)
    before = [id(part) for part in made.adapters.parameters()]
    agree(made)
    made.adapters.reserve(2)
    made.adapters.set_trainable(0)
    agree(made)
    made.adapters.set_trainable(1)
    made.float().double()
    assert [id(part) for part in made.adapters.parameters()] == before


def test_dropping_keeps_the_others() -> None:
    made = layer(4, 2)
    kept = [made.adapters.delta(number) for number in (0, 2, 3)]
    made.adapters.delete(1)
    assert made.adapters.trained == (1,)
    for number, expected in enumerate(kept):
        torch.testing.assert_close(made.adapters.delta(number), expected)
    agree(made)


def test_a_state_restores_the_mix_in_another_layer() -> None:
    one, other = layer(3, 2), layer(3, 2)
    step(one, 4)
    agree(other)
    other.load_state_dict(one.state_dict())
    states, weights = drawn(2, 3, INPUTS), weights_of(2, 3)
    assert torch.equal(run(one, states, weights), run(other, states, weights))


def test_what_is_read_under_inference_mode_can_be_trained_later() -> None:
    made = layer(3, 2)
    with torch.inference_mode():
        agree(made)
    made.adapters.set_trainable(0)
    step(made, 0)
    agree(made)
