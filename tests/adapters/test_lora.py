"""Blocks beside a layer, against blocks added one after another, and whatever happens to their parameters meanwhile."""

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from regard.adapters.lora import LoraAdapters, MixedLayer, is_linear_layer, weight_shape
from regard.adapters.mixture import Mixture
from regard.errors import UserError
from tests.adapters import reference
from tests.adapters.mixed_models import ALPHA, INPUTS, OUTPUTS, RANK, drawn, filled, layer, run, weights_of


def compare(made: MixedLayer, states: Tensor, weights: Tensor) -> None:
    """Outputs, and gradients to the states, the weights and the parts of trained blocks, are those of the loop.

    Without gradients to the weights too: then layer and blocks may be one step of autograd.
    """
    states = states.requires_grad_()
    options = {"top_k": made.mixture.top_k, "detach_old": made.adapters.detach_old}
    parts = [part for number in made.adapters.trained for part in (made.adapters.A[number], made.adapters.B[number])]
    expected = reference.mixed(made.adapters, states, made.base_layer(states), weights, **options)
    towards = drawn(*expected.shape, seed=7)
    wanted = [states, *parts, weights]
    theirs = torch.autograd.grad((expected * towards).sum(), wanted, materialize_grads=True, allow_unused=True)
    for given in (weights, weights.detach()):
        found = run(made, states, given)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        of = wanted if given is weights else wanted[:-1]
        mine = torch.autograd.grad((found * towards).sum(), of, materialize_grads=True, allow_unused=True)
        for one, other in zip(mine, theirs, strict=False):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
    with torch.no_grad():
        torch.testing.assert_close(run(made, states, weights), expected.detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("detach_old", [False, True])
@pytest.mark.parametrize("top_k", [None, 1, 2, 9])
@pytest.mark.parametrize(
    "count, trained, used",
    [
        (1, (0,), 1),
        (4, (3,), 4),
        (4, (1,), 4),
        (5, (0, 3), 5),
        (4, (0, 1, 2, 3), 4),
        (4, (), 4),
        (6, (2,), 3),  # reserved blocks behind the one that is trained
        (6, (4,), 3),  # the one that is trained is not in use
        (12, (11,), 12),  # more than tokens
        (12, (2, 11), 12),
    ],
)
def test_a_mix_is_the_sum_over_blocks(
    count: int, trained: tuple[int, ...], used: int, top_k: int | None, detach_old: bool
) -> None:
    compare(layer(count, *trained, top_k=top_k, detach_old=detach_old), drawn(3, 4, INPUTS), weights_of(3, used))


@pytest.mark.parametrize("top_k", [None, 2])
@pytest.mark.parametrize("shape", [(3, INPUTS), (1, INPUTS), (1, 4, INPUTS), (3, 1, INPUTS), (3, 2, 4, INPUTS)])
def test_states_of_any_shape(shape: tuple[int, ...], top_k: int | None) -> None:
    compare(layer(4, 3, top_k=top_k), drawn(*shape), weights_of(shape[0], 4))


@pytest.mark.parametrize("top_k", [None, 2])
def test_weights_that_all_rows_share(top_k: int | None) -> None:
    compare(layer(4, 3, top_k=top_k), drawn(3, 4, INPUTS), drawn(4, seed=2).softmax(0).requires_grad_())


@pytest.mark.parametrize("top_k", [None, 2])
def test_rows_that_have_become_several_keep_their_weights(top_k: int | None) -> None:
    """As beam search repeats them: each row's beams one after another."""
    compare(layer(4, 3, top_k=top_k), drawn(6, 4, INPUTS), weights_of(2, 4))


def test_rows_that_no_weights_are_for() -> None:
    made = layer(3, 2)
    with pytest.raises(UserError, match="weights: expected a row for each of 5 rows, or one for several, got 2"):
        run(made, drawn(5, 4, INPUTS), weights_of(2, 3))
    with pytest.raises(UserError, match="weights: expected one for each of at most 3 adapters, got 4"):
        run(made, drawn(2, 4, INPUTS), weights_of(2, 4))


def test_a_layer_of_gpt2() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        base = Conv1D(OUTPUTS, INPUTS)
    assert weight_shape(base) == (INPUTS, OUTPUTS)
    assert is_linear_layer(base)
    assert not is_linear_layer(nn.Embedding(3, 3))
    compare(layer(4, 2, base=base), drawn(3, 4, INPUTS), weights_of(3, 4))


def test_what_a_block_adds_is_scaled_by_alpha_over_the_rank() -> None:
    made, states = layer(2), drawn(3, 4, INPUTS)
    added = run(made, states, torch.tensor([0.0, 0.5], dtype=torch.float64)) - made.base_layer(states)
    expected = 0.5 * ALPHA / RANK * states @ made.adapters.A[1].T @ made.adapters.B[1].T
    assert ALPHA > RANK > 1
    torch.testing.assert_close(added, expected, rtol=1e-10, atol=1e-12)


def test_weights_may_change_in_place_and_be_used_in_inference_mode_first() -> None:
    made, states, weights = layer(3, 2), drawn(3, 4, INPUTS), weights_of(3, 3).detach()
    with torch.inference_mode():
        run(made, states, weights)
    made(states).sum().backward()
    assert made.adapters.B[2].grad is not None
    weights.copy_(weights.flip(1))
    expected = reference.mixed(made.adapters, states, made.base_layer(states), weights)
    torch.testing.assert_close(made(states), expected, rtol=1e-10, atol=1e-12)


def test_states_that_are_not_contiguous() -> None:
    compare(layer(4, 3), drawn(4, 3, INPUTS).transpose(0, 1), weights_of(3, 4))
    compare(layer(4, 3), drawn(3, 4, 2 * INPUTS)[..., ::2], weights_of(3, 4))


@pytest.mark.parametrize("trained", [(), (4,), (1,), (0, 3)])
def test_in_evaluation_it_makes_no_difference_what_is_trained(trained: tuple[int, ...]) -> None:
    """With `top_k` of all blocks: what is frozen, saved and read again computes the same."""
    states, weights = drawn(3, 4, INPUTS), weights_of(3, 5)
    for given_ in (weights, -weights.detach()):
        open_, closed = layer(5, *trained, top_k=2).eval(), layer(5, top_k=2).eval()
        for made in (open_, closed):
            made.mixture.weights = given_
        torch.testing.assert_close(open_(states), closed(states), rtol=1e-12, atol=1e-12)
    compare(closed, states, weights)


def test_with_top_k_of_all_blocks_a_mix_is_dense() -> None:
    states, weights = drawn(3, 4, INPUTS), weights_of(3, 5)
    dense, all_of_them = layer(5, 4), layer(5, 4, top_k=4)
    assert torch.equal(run(dense, states, weights), run(all_of_them, states, weights))
    compare(layer(5, 0, 3, top_k=4), states, weights)  # more than the frozen ones


def test_old_blocks_that_are_detached_run_as_under_no_grad() -> None:
    """The authors' code: what old blocks give is computed without gradients, its weights have theirs."""
    detached, states, weights = layer(4, 3, detach_old=True), drawn(3, 4, INPUTS).requires_grad_(), weights_of(3, 4)
    blocks = detached.adapters
    with torch.no_grad():
        old = [blocks.scale * states @ blocks.A[number].T @ blocks.B[number].T for number in range(3)]
    own = blocks.scale * states @ blocks.A[3].T @ blocks.B[3].T
    stacked = torch.stack([*old, own], 1)
    expected = detached.base_layer(states) + (weights[:, :, None, None] * stacked).sum(1)
    wanted = [states, weights, blocks.A[3], blocks.B[3]]
    towards = drawn(3, 4, OUTPUTS, seed=5)
    theirs = torch.autograd.grad((expected * towards).sum(), wanted)
    mine = torch.autograd.grad((run(detached, states, weights) * towards).sum(), wanted)
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    whole = torch.autograd.grad((run(layer(4, 3), states, weights) * towards).sum(), [states, weights])
    assert (whole[0] - mine[0]).abs().max() > 1e-3
    torch.testing.assert_close(whole[1], mine[1])


@pytest.mark.parametrize("rows, tokens, count", [(8, 1, 16), (2, 400, 16)])
def test_top_k_of_few_tokens_and_of_many(rows: int, tokens: int, count: int) -> None:
    """Few are not worth gathering blocks for: the same comes out."""
    weights = weights_of(rows, count)
    chosen = Mixture(weights, top_k=2).layer_weights(rows, rows * tokens, RANK, 1.0, (count - 1,)).gathered
    assert (chosen is None) == (tokens == 1)
    compare(layer(count, count - 1, top_k=2), drawn(rows, tokens, INPUTS), weights)


def test_blocks_behind_one_that_is_dropped_are_trained_as_before() -> None:
    made = layer(4, 1, 3)
    trained = [made.adapters.B[block].detach().clone() for block in (1, 3)]
    made.adapters.delete(0)
    assert made.adapters.trained == (0, 2)
    assert [parameter.requires_grad for parameter in made.adapters.A] == [True, False, True]
    for block, expected in zip((0, 2), trained, strict=True):
        assert torch.equal(made.adapters.B[block], expected)


def test_without_weights_a_layer_is_as_it_was() -> None:
    made, states = layer(3, 2), drawn(3, 4, INPUTS)
    assert torch.equal(run(made, states, None), made.base_layer(states))


def test_a_new_block_adds_nothing_and_can_learn() -> None:
    made, states = layer(2, 1), drawn(3, 4, INPUTS)
    made.adapters.reserve(3)
    made.adapters.set_trainable(2)
    made.double()
    weights = weights_of(3, 3)
    only = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    assert torch.equal(run(made, states, only), made.base_layer(states))
    down, up = torch.autograd.grad(run(made, states, weights).square().sum(), [made.adapters.A[2], made.adapters.B[2]])
    assert not down.any()
    assert up.abs().max() > 0


def test_delta_is_what_a_block_adds_to_the_matrix() -> None:
    made, states = layer(3, 2), drawn(3, 4, INPUTS)
    for number in range(3):
        alone = torch.eye(3, dtype=torch.float64)[number]
        added = run(made, states, alone) - made.base_layer(states)
        torch.testing.assert_close(added, states @ made.adapters.delta(number).T)


def test_blocks_are_drawn_by_their_number() -> None:
    at_once, growing, others = (LoraAdapters(INPUTS, OUTPUTS, rank=2, alpha=1, seed=seed) for seed in (1, 1, 2))
    for one in (at_once, others):
        one.reserve(3)
    for count in (1, 2, 3):
        growing.reserve(count)
        growing.set_trainable(count - 1)
    for one, other, apart in zip(at_once.A, growing.A, others.A, strict=True):
        assert torch.equal(one, other)
        assert not torch.equal(one, apart)
        assert one.abs().max() <= INPUTS**-0.5
    assert not torch.equal(at_once.A[0], at_once.A[1])


def test_dropout_is_of_training_alone() -> None:
    made, states = layer(3, 2, dropout=0.5), drawn(3, 4, INPUTS)
    weights = weights_of(3, 3)
    still = run(made.eval(), states, weights)
    assert torch.equal(still, run(layer(3, 2), states, weights))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = run(made.train(), states, weights), run(made, states, weights)
    assert not torch.equal(first, second)


def test_half_precision_layers_have_blocks_in_single_precision() -> None:
    base = nn.Linear(INPUTS, OUTPUTS).to(torch.bfloat16).requires_grad_(False)
    made = MixedLayer(base, Mixture(), rank=RANK, alpha=ALPHA)
    filled(made.adapters, 3, 2)
    states = drawn(2, 4, INPUTS).to(torch.bfloat16)
    found = run(made, states, weights_of(2, 3).float())
    assert found.dtype == torch.bfloat16
    assert made.adapters.A[2].dtype == torch.float32
    plainly = reference.mixed(made.adapters, states.float(), base(states).float(), weights_of(2, 3).float())
    torch.testing.assert_close(found.float(), plainly, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("top_k", [None, 1])
def test_under_autocast(top_k: int | None) -> None:
    made = layer(3, 2, top_k=top_k).float()
    states, weights = drawn(2, 4, INPUTS).float().requires_grad_(), weights_of(2, 3).float()
    exact = run(made, states, weights)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(made, states, weights)
    assert found.dtype == torch.bfloat16
    found.float().sum().backward()
    assert made.adapters.A[2].grad is not None
    assert made.adapters.A[2].grad.dtype == torch.float32
    torch.testing.assert_close(found.float(), exact, rtol=0.05, atol=0.05)


def test_nothing_in_a_mix_waits_for_a_device() -> None:
    """On the meta device a number cannot be read: a mix that asks for one fails there."""
    made = layer(6, 5, top_k=2).to("meta")
    states = torch.empty(3, 4, INPUTS, device="meta", dtype=torch.float64, requires_grad=True)
    weights = torch.empty(3, 6, device="meta", dtype=torch.float64, requires_grad=True)
    for top_k in (None, 2):
        made.mixture.top_k = top_k
        found = run(made, states, weights)
        assert found.shape == (3, 4, OUTPUTS)
        found.sum().backward()


def test_blocks_follow_their_layer_to_another_device() -> None:
    made = MixedLayer(nn.Linear(INPUTS, OUTPUTS), Mixture(), rank=RANK, alpha=ALPHA).to("meta")
    made.adapters.reserve(1)
    assert made.adapters.A[0].device.type == "meta"


def test_activations_that_are_kept_do_not_grow_by_whole_outputs() -> None:
    """For the backward pass a mix keeps its small hidden states, and not what each block gives."""

    def kept(count: int) -> int:
        blocks = filled(LoraAdapters(64, 64, rank=2, alpha=2), count, count - 1)
        states, weights = torch.randn(4, 32, 64, requires_grad=True), torch.rand(4, count, requires_grad=True)
        out = states * 1
        seen: dict[int, int] = {}

        def keep(part: Tensor) -> Tensor:
            seen[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
            return part

        down, up = blocks.stacked() if count > 1 else (states, states)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda part: part):
            blocks(states, out, Mixture(weights))
        own = {part.untyped_storage().data_ptr() for part in (down, up, states, out)}
        return sum(size for place, size in seen.items() if place not in own)

    rows, rank, floats = 4 * 32, 2, 4
    assert kept(17) - kept(1) <= 2 * rows * rank * 16 * floats + 4096
