"""The log-normalizers of PyTorch's kernels for GPUs, with a stand-in for these kernels and for the GPU."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.attention import kernels, lse_kernels, operator, reference
from regard.attention.call import AttentionCall
from regard.attention.reduction import WEIGHT_REDUCTIONS, ReductionRequest, reduce_dense

BY_LSE = frozenset({"lse", "first_mass"})
BY_COLUMN = frozenset({*BY_LSE, "column_mass", "column_sum", "column_square", "row_sum", "virtual_sink_mass"})
BY_ROW = frozenset(name for name, reduction in WEIGHT_REDUCTIONS.items() if "triton" in reduction.backends)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
needs_triton = pytest.mark.skipif(not kernels.is_available(), reason="Triton is not installed, or does not interpret")
if torch.cuda.is_available():
    pytest.skip("the kernels themselves are there: tests/gpu", allow_module_level=True)


def dense(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Any:
    """Output and log-normalizer from all scores in float64; of a query without keys zeros and +∞."""
    score = scale * query.double() @ key.double().mT
    score = score if bias is None else score + bias.double()
    if causal:
        score = score.masked_fill(torch.ones_like(score, dtype=torch.bool).triu(1), -torch.inf)
    lse = score.logsumexp(-1)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    return ((score - lse[..., None]).exp() @ value.double()).to(query.dtype), lse.float()


class Kernels:
    """Both kernels of PyTorch; `calls` names those that were called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flash(
        self, query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, *, scale: float
    ) -> Any:
        self.calls.append("flash")
        assert query.dtype in (torch.float16, torch.bfloat16)
        assert dropout_p == 0
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], 1) for tensor in (key, value))
        return *dense(query, key, value, None, is_causal, scale), *[None] * 7

    def efficient(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float,
    ) -> Any:
        self.calls.append("efficient")
        assert compute_log_sumexp
        assert dropout_p == 0
        if attn_bias is not None:
            assert attn_bias.shape == (*query.shape[:3], key.shape[2])
            assert all(stride % 8 == 0 for stride in attn_bias.stride()[:-1])
        output, lse = dense(query, key, value, attn_bias, is_causal, scale)
        return output, torch.nn.functional.pad(lse, (0, -lse.shape[2] % 32), value=5e8), None, None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """A stand-in for a GPU that takes every call, beside the two kernels."""
    found = Kernels()
    monkeypatch.setattr(kernels, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(lse_kernels, "can_use_flash", lambda call: call.key_mask is None)
    monkeypatch.setattr(lse_kernels, "can_use_efficient", lambda call: True)
    monkeypatch.setattr(lse_kernels, "GPU_FLASH_FORWARD", found.flash)
    monkeypatch.setattr(lse_kernels, "GPU_EFFICIENT_FORWARD", found.efficient)
    return found


def made(kind: str, dtype: torch.dtype, groups: int = 2, width: int = 8) -> AttentionCall:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(3, n, 37, width, generator=generator).to(dtype) for n in (4, groups, groups))
    call = AttentionCall(query=query, key=key, value=value, scale=0.4, causal=kind.startswith("causal"))
    if kind.endswith("padded"):
        real = (torch.arange(37) >= 9) & (torch.arange(37) < torch.tensor([[37], [20], [0]]))
        call = replace(call, key_mask=real, query_mask=real, starts=(9, 9, 0))
    return call


def assert_is_the_definition(call: AttentionCall, names: frozenset[str]) -> None:
    request = ReductionRequest(names=names, num_first_keys=3)
    output, found = operator.attend(call, request)
    exact = replace(call, query=call.query.double(), key=call.key.double(), value=call.value.double())
    expected = reduce_dense(exact, request)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name].double(), tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    sees = expected["lse"] > -torch.inf
    rtol = 1e-5 if call.query.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(output.double()[sees], reference.attend(exact)[sees], rtol=rtol, atol=rtol)
    assert output.dtype == call.query.dtype


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a pass over all rows")


@pytest.mark.parametrize("kind", ["whole", "causal", "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reductions_by_the_log_normalizer_are_the_definition(
    gpu: Kernels, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "row_statistics", refuse)
    monkeypatch.setattr(kernels, "column_statistics", refuse)
    assert_is_the_definition(made(kind, dtype), BY_LSE)
    assert gpu.calls == ["efficient" if dtype == torch.float32 or kind == "padded" else "flash"]


@pytest.mark.sample(1)
@needs_triton
@pytest.mark.parametrize("kind", ["whole", "causal", "padded"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_columns_need_no_pass_over_rows(
    gpu: Kernels, dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "row_statistics", refuse)
    assert_is_the_definition(made(kind, dtype), BY_COLUMN)
    assert len(gpu.calls) == 1


@pytest.mark.exhaustive
@pytest.mark.sample(1)
@needs_triton
@pytest.mark.parametrize(
    "call, names",
    [
        (made("causal", torch.float32), BY_ROW),
        (made("causal padded", torch.float32), BY_COLUMN),
        (replace(made("causal", torch.float32), offset=2), BY_COLUMN),
        (made("causal", torch.float16, width=12), BY_COLUMN),
        (replace(made("causal", torch.float32), sink=torch.ones(4)), BY_COLUMN - {"row_sum", "virtual_sink_mass"}),
    ],
    ids=["entropy", "causal and padded", "offset", "width", "sink"],
)
def test_other_calls_take_the_pass_over_rows(gpu: Kernels, call: AttentionCall, names: frozenset[str]) -> None:
    assert_is_the_definition(call, names)
    assert gpu.calls == []


@pytest.mark.sample(1)
@needs_triton
@pytest.mark.parametrize("missing", ["GPU_FLASH_FORWARD", "GPU_EFFICIENT_FORWARD", "both"])
def test_a_release_without_a_kernel_goes_without_it(
    gpu: Kernels, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GPU_FLASH_FORWARD", "GPU_EFFICIENT_FORWARD"):
        if missing in (name, "both"):
            monkeypatch.setattr(lse_kernels, name, None)
    assert_is_the_definition(made("causal", torch.float16), BY_COLUMN)
    left = {"GPU_FLASH_FORWARD": ["efficient"], "GPU_EFFICIENT_FORWARD": ["flash"], "both": []}
    assert gpu.calls == left[missing]


def test_under_autocast_the_output_has_its_type(gpu: Kernels) -> None:
    call = made("causal", torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert lse_kernels.select_kernel(call) is None
        assert lse_kernels.select_kernel(made("causal", torch.bfloat16)) is not None
    assert lse_kernels.select_kernel(call) is not None


def test_an_operator_is_one_whose_schema_is_known() -> None:
    arguments = ("query", "key", "value", "dropout_p", "is_causal", "scale")
    name = "_scaled_dot_product_flash_attention"
    find: Callable[..., Any] = lse_kernels.find_operator
    assert find(name, arguments, "logsumexp") is getattr(torch.ops.aten, name)
    assert find(name, arguments, "log_sumexp") is None, "another result stands second"
    assert find(name, (*arguments[:3], "attn_bias", *arguments[3:]), "logsumexp") is None, "takes no bias"
    assert find(name, arguments[:3] + arguments[4:], "logsumexp") is None, "another order"
    efficient = "_scaled_dot_product_efficient_attention"
    assert find(efficient, ("query", "key", "value", "attn_bias"), "log_sumexp") is None, "an argument is missing"
    assert find(f"{name}_of_tomorrow", arguments, "logsumexp") is None
    assert lse_kernels.GPU_FLASH_FORWARD is not None
    assert lse_kernels.GPU_EFFICIENT_FORWARD is not None


@pytest.mark.parametrize("kind", ["whole", "causal", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_kernels_of_pytorch_take_these_arguments(dtype: torch.dtype, kind: str) -> None:
    """On the meta device, where their shapes are all that is computed; there the log-normalizer is padded, too."""
    call = made(kind, dtype)
    names = ("query", "key", "value", "key_mask")
    call = replace(call, **{name: t.to("meta") for name in names if (t := getattr(call, name)) is not None})
    takes = [lse_kernels._efficient_on_gpu, *([lse_kernels._flash_on_gpu] if kind != "padded" else [])]
    for kernel in takes:
        output, lse = kernel(call)
        assert output.shape == call.query.shape
        assert output.dtype == dtype
        assert lse.shape == call.query.shape[:3]
        assert lse.dtype == torch.float32
