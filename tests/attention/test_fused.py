"""Softmax operations through the fused kernels, by each of their devices, against the definition."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import fused, reference
from regard.attention.call import AttentionCall, Operation

DEVICES = {
    "normaliser": lambda call, operation: fused._by_normalizer(call, *_beside(call, operation)),
    "entries": lambda call, operation: fused._by_entries(call, *_beside(call, operation)),
}


def _beside(call: AttentionCall, operation: Operation) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    value = operation.extra_value if operation.extra_key is not None else None
    return operation.slopes, fused.column_score(call, operation), value


def drawn(
    seed: int,
    *,
    groups: int = 2,
    shares: int = 1,
    length: int = 9,
    width: int = 4,
    value_width: int = 4,
    **learned: str,
) -> tuple[AttentionCall, Operation, list[Tensor]]:
    """A call with its operation, of leaves; `learned` says which tensors there are, of how many heads."""
    generator = torch.Generator().manual_seed(seed)
    heads = groups * shares

    def leaf(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    parts = {"query": leaf(2, heads, length, width), "key": leaf(2, groups, length, width)}
    parts["value"] = leaf(2, groups, length, value_width)
    wide = {"extra_key": width, "extra_value": value_width}
    own = {name: leaf(1 if learned[name] == "shared" else heads, wide[name]) for name in wide if name in learned}
    if "slopes" in learned:
        own["slopes"] = torch.rand(heads, generator=generator, dtype=torch.float64)
    sink = leaf(heads) if "sink" in learned else None
    call = AttentionCall(**parts, scale=0.6, causal=True, sink=sink)
    return call, Operation(**own), [t for t in (*parts.values(), *own.values(), sink) if t is not None]


def assert_defined(
    found: Tensor, call: AttentionCall, operation: Operation, leaves: list[Tensor], near: float = 1e-9
) -> None:
    expected = reference.operation_output(call, operation)
    torch.testing.assert_close(found, expected, rtol=near, atol=near)
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    onto = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
    pairs = zip(torch.autograd.grad(found, leaves, onto), torch.autograd.grad(expected, leaves, onto), strict=True)
    for got, right in pairs:
        torch.testing.assert_close(got, right, rtol=near, atol=near)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 100),
    device=st.sampled_from(sorted(DEVICES)),
    groups=st.integers(1, 2),
    shares=st.integers(1, 3),
    length=st.integers(1, 80),
    value_width=st.integers(1, 6),
    column=st.sampled_from([{}, {"sink": ""}, {"extra_key": "own"}, {"extra_key": "shared", "extra_value": "own"}]),
    slopes=st.booleans(),
)
def test_each_device_has_the_output_and_gradients_of_the_definition(
    seed: int, device: str, column: dict[str, str], slopes: bool, **sizes: int
) -> None:
    if not column and not slopes:
        return
    call, operation, leaves = drawn(seed, **sizes, **column, **({"slopes": ""} if slopes else {}))
    assert_defined(DEVICES[device](call, operation), call, operation, leaves)


@pytest.mark.parametrize("learned", [{"extra_key": "own"}, {"extra_key": "own", "extra_value": "own"}])
@pytest.mark.parametrize("shares", [1, 3])
def test_a_key_in_front_serves_where_groups_share_it(learned: dict[str, str], shares: int) -> None:
    learned = dict.fromkeys(learned, "shared" if shares > 1 else "own")
    call, operation, leaves = drawn(3, shares=shares, **learned)
    assert fused._shares_column(call, operation)
    assert operation.extra_key is not None
    assert_defined(fused._with_front_key(call, operation.extra_key, operation.extra_value), call, operation, leaves)


def test_keys_of_their_own_for_heads_of_one_group_cannot_stand_with_front_key() -> None:
    call, operation, _ = drawn(3, shares=3, extra_key="own")
    assert not fused._shares_column(call, operation)


@settings(max_examples=40, deadline=None)
@given(window=st.integers(1, 160), length=st.integers(1, 330), shares=st.integers(1, 2), folded=st.booleans())
def test_windows_by_either_way_are_those_of_the_definition(window: int, length: int, shares: int, folded: bool) -> None:
    if window >= length:
        return
    call, operation, leaves = drawn(window, length=length, shares=shares)
    operation = replace(operation, window=window)
    way = fused._folded if folded else fused._in_blocks
    assert_defined(way(call, window), call, operation, leaves)


@pytest.mark.parametrize("window", [1, 64, 299, 300, 301, 1000])
def test_windows_about_the_length_of_the_sequence(window: int) -> None:
    call, operation, leaves = drawn(window, length=300, groups=1)
    operation = replace(operation, window=window)
    assert_defined(fused.fused(call, operation), call, operation, leaves)


@pytest.mark.parametrize("prefix", [1, 5, 9, 20])
@pytest.mark.parametrize("learned", [{}, {"slopes": ""}, {"sink": ""}, {"extra_key": "own", "extra_value": "own"}])
def test_a_prefix_sees_itself(prefix: int, learned: dict[str, str]) -> None:
    call, operation, leaves = drawn(prefix, **learned)
    operation = replace(operation, prefix=prefix)
    assert_defined(fused.fused(call, operation), call, operation, leaves)


def test_slopes_may_be_learned() -> None:
    call, operation, leaves = drawn(8, slopes="", sink="")
    assert operation.slopes is not None
    operation.slopes.requires_grad_()
    assert_defined(fused.fused(call, operation), call, operation, [*leaves, operation.slopes])


LOW: list[dict[str, Any]] = [{"slopes": "", "sink": ""}, {"extra_key": "own", "extra_value": "own"}, {"slopes": ""}]


@pytest.mark.sample(1)
@pytest.mark.parametrize("learned", LOW)
@pytest.mark.parametrize("device", sorted(DEVICES))
def test_sixteen_bits_are_as_near_as_they_can_be_far_into_a_sequence(learned: dict[str, Any], device: str) -> None:
    """The bias of a slope reaches 1500 here, where the nearest 16-bit floats stand 8 apart."""
    call, operation, _ = drawn(2, length=1500, groups=2, width=16, value_width=16, **learned)
    parts = ("query", "key", "value")
    half = replace(call, **{name: getattr(call, name).detach().bfloat16() for name in parts})
    exact = replace(half, **{name: getattr(half, name).double() for name in parts})
    if operation.slopes is not None:
        operation = replace(operation, slopes=operation.slopes / operation.slopes.max())
    found = DEVICES[device](half, operation)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), reference.operation_output(exact, operation), rtol=0.03, atol=0.03)


def test_autocast_decides_the_dtype() -> None:
    call, operation, leaves = drawn(2, extra_key="own", extra_value="own")
    names = ("query", "key", "value")
    single = replace(call, **{name: getattr(call, name).float() for name in names})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = fused.fused(single, operation)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), reference.operation_output(call, operation), rtol=0.03, atol=0.03)
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(found.float().sum(), leaves))


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("learned", [{"sink": ""}, {"extra_key": "own", "extra_value": "own"}, {"slopes": ""}])
def test_without_the_kernels_for_cpus_the_others_serve(
    learned: dict[str, str], shares: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> Tensor:
        raise AssertionError("the kernels for CPUs are not there")

    monkeypatch.setattr(fused, "FLASH_FORWARD", None)
    monkeypatch.setattr(fused, "_by_normalizer", refused)
    call, operation, leaves = drawn(4, shares=shares, **learned)
    assert_defined(fused.fused(call, operation), call, operation, leaves)


@pytest.mark.parametrize("learned", [{"sink": ""}, {"extra_key": "own", "extra_value": "own"}])
def test_gradients_of_several_outputs_at_once_are_those_of_each(learned: dict[str, str]) -> None:
    call, operation, leaves = drawn(5, **learned)
    onto = torch.randn(3, 2, 2, 9, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = torch.autograd.grad(fused.fused(call, operation), leaves, onto, is_grads_batched=True)
    for index, each in enumerate(onto):
        expected = torch.autograd.grad(reference.operation_output(call, operation), leaves, each)
        for several, one in zip(found, expected, strict=True):
            torch.testing.assert_close(several[index], one)


def test_a_batch_without_rows_has_an_output_without_rows() -> None:
    call, operation, _ = drawn(5, extra_key="own")
    assert fused.fused(call.select_samples(slice(0)), operation).shape == (0, 2, 9, 4)
