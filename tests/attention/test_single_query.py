"""One query that sees every key, against the definition in float64."""

from dataclasses import replace

import pytest
import torch

from regard.attention import call as call_module
from regard.attention import operator, reference, single_query
from regard.attention.call import AttentionCall
from regard.attention.reduction import ReductionRequest, reduce_dense

REQUEST = ReductionRequest(names=single_query.REDUCTIONS)


def make_call(heads: int, groups: int, keys: int, **options: object) -> AttentionCall:
    generator = torch.Generator().manual_seed(heads * keys)
    query, key, value = (
        3 * torch.randn(2, number, length, width, generator=generator)
        for number, length, width in ((heads, 1, 8), (groups, keys, 8), (groups, keys, 5))
    )
    return AttentionCall(query=query, key=key, value=value, scale=0.3, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "heads, groups, keys, options",
    [
        (4, 4, 9, {"causal": True, "offset": 8}),
        (6, 2, 17, {"causal": True, "offset": 16, "query_mask": torch.tensor([[True], [False]])}),
        (4, 2, 1, {"causal": True}),
        (4, 1, 6, {"query_mask": torch.tensor([[True], [True]])}),
        (2, 2, 5, {"causal": True, "offset": 7}),  # of a window that has dropped three keys
    ],
)
def test_it_is_the_definition(heads: int, groups: int, keys: int, options: dict[str, object]) -> None:
    call = make_call(heads, groups, keys, **options)
    assert single_query.supports_single_query(call, REQUEST)
    with torch.no_grad():
        output, reductions = operator.attend(call, REQUEST)
    exact = replace(call, query=call.query.double(), key=call.key.double(), value=call.value.double())
    torch.testing.assert_close(output.double(), reference.attend(exact), rtol=1e-5, atol=1e-5)
    expected = reduce_dense(exact, REQUEST)
    assert reductions.keys() == expected.keys()
    for name, tensor in reductions.items():
        assert tensor.dtype == (torch.float64 if name in ("column_sum", "column_square") else torch.float32)
        torch.testing.assert_close(tensor.double(), expected[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True, "offset": 3},
        {"keep": torch.ones(1, 1, 1, 9, dtype=torch.bool)},
        {"key_mask": torch.ones(2, 9, dtype=torch.bool)},
        {"softcap": 5.0},
        {"sink": torch.zeros(4)},
        {"bias": torch.zeros(1, 1, 1, 9)},
    ],
)
def test_other_calls_go_another_way(options: dict[str, object]) -> None:
    assert not single_query.supports_single_query(make_call(4, 4, 9, **options), REQUEST)


def test_indices_of_ever_other_heads_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "MAX_INDICES", 3)
    monkeypatch.setattr(call_module, "_INDICES", {})
    cpu = torch.device("cpu")
    for number in range(8):
        assert call_module.as_tensor((number, 9), cpu).tolist() == [number, 9]
        assert len(call_module._INDICES) <= 3
    assert call_module.as_tensor((7, 9), cpu) is call_module.as_tensor((7, 9), cpu)
