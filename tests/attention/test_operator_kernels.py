"""The operator's route through the GPU kernels against the whole matrix: in Triton's interpreter without a GPU."""

import dataclasses

import pytest
import torch

from regard.attention import kernels, operator, reference
from regard.attention.call import QKV, AttentionCall, Operation, map_fields
from regard.attention.reduction import WEIGHT_REDUCTIONS, ReductionRequest, reduce_dense

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = frozenset(name for name, reduction in WEIGHT_REDUCTIONS.items() if "triton" in reduction.backends)

if not kernels.is_available():
    pytest.skip("triton is not installed, or was imported without its interpreter", allow_module_level=True)


def made(causal: bool, offset: int, padded: str, softcap: float | None, sink: bool) -> AttentionCall:
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(2, heads, 37, 8, generator=generator).to(DEVICE) for heads in (4, 2, 2))
    real = torch.ones(2, 37, dtype=torch.bool, device=DEVICE)
    if padded == "left":
        real[1, :9] = False
    elif padded == "right":
        real[1, 30:] = False
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=0.4,
        causal=causal,
        offset=offset,
        softcap=softcap,
        sink=torch.randn(4, generator=generator).to(DEVICE) if sink else None,
        key_mask=real if padded else None,
        query_mask=real if padded else None,
        starts=(0, 9) if padded == "left" else None,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "causal, offset, padded, softcap, sink",
    [
        (True, 0, "", None, False),
        (True, 0, "left", None, False),
        (True, -3, "right", None, False),
        (False, 0, "right", None, False),
        (False, 0, "left", 2.0, True),
    ],
)
def test_kernels_equal_the_whole_matrix(
    causal: bool, offset: int, padded: str, softcap: float | None, sink: bool
) -> None:
    call = made(causal, offset, padded, softcap, sink)
    names = NAMES - {"first_mass"} if softcap else NAMES
    names = names - {"row_sum", "virtual_sink_mass"} if sink else names
    found = operator.reduce_by_triton(call, ReductionRequest(names=names, num_first_keys=3))
    exact = dataclasses.replace(
        call, **{p: t.double() for p in ("query", "key", "value", "sink") if (t := getattr(call, p)) is not None}
    )
    expected = reduce_dense(exact, ReductionRequest(names=names, num_first_keys=3))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name].double(), tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("causal, padded", [(True, ""), (False, "left")])
def test_the_scatter_of_columns_of_equal_weights_is_exact(causal: bool, padded: str) -> None:
    call = dataclasses.replace(made(causal, 0, padded, None, False), scale=0.02)
    found = operator.reduce_by_triton(call, ReductionRequest(names=frozenset({"column_sum", "column_square"})))
    exact = dataclasses.replace(call, query=call.query.double(), key=call.key.double(), value=call.value.double())
    matrix = reference.weights(exact)
    for sample in range(2):
        rows = matrix[sample] if call.query_mask is None else matrix[sample][:, call.query_mask[sample]]
        scatter = found["column_square"][sample] - found["column_sum"][sample].square() / rows.shape[1]
        torch.testing.assert_close(scatter, (rows - rows.mean(1, keepdim=True)).square().sum(1), rtol=1e-5, atol=1e-12)


def hidden(kind: str) -> AttentionCall:
    """A call whose queries see a window, of the operation or of a mask, their own sequence of a packed row, or less."""
    call = made(kind != "both sides", 0, "left" if "padded" in kind else "", None, "sink" in kind)
    i, j = torch.arange(37, device=DEVICE)[:, None], torch.arange(37, device=DEVICE)
    if kind.startswith("operation"):
        return dataclasses.replace(call, operation=Operation(window=7))
    if kind.startswith("window"):
        return dataclasses.replace(call, keep=((i - j < 7) & (j <= i))[None, None])
    if kind.startswith("packed"):
        ends = torch.tensor([[5, 21], [12, 30]], device=DEVICE)
        of_token = torch.stack([torch.bucketize(j, row, right=True) for row in ends])
        return dataclasses.replace(call, keep=(of_token[:, None, :, None] == of_token[:, None, None]))
    generator = torch.Generator().manual_seed(5)
    return dataclasses.replace(call, keep=(torch.rand(2, 4, 37, 37, generator=generator) < 0.2).to(DEVICE))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind",
    [
        "operation",
        "operation padded",
        "operation sink",
        "window",
        "window padded sink",
        "packed",
        "both sides",
        "heads",
    ],
)
def test_windows_and_packed_rows_equal_the_whole_matrix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = hidden(kind)
    names = NAMES - ({"row_sum", "virtual_sink_mass"} if "sink" in kind else set())
    request = ReductionRequest(names=names, num_first_keys=3)
    monkeypatch.setattr(kernels, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(operator, "reduce_by_rows", None)
    found = operator.reduce(call, request)
    exact = map_fields(call, **dict.fromkeys((*QKV, "sink"), lambda tensor: tensor.double()))
    for name, tensor in reduce_dense(exact, request).items():
        torch.testing.assert_close(
            found[name].double(), tensor, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.sample(1)
@pytest.mark.parametrize("padded", ["", "left"])
def test_what_kernels_lack_comes_from_tiles_and_nothing_else_does(padded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, tiled = made(True, 0, padded, None, False), set[str]()
    request = ReductionRequest(names=frozenset(WEIGHT_REDUCTIONS), num_first_keys=3)
    own_pass = operator.one_pass

    def one_pass(call: AttentionCall, request: ReductionRequest, *, output: bool) -> object:
        tiled.update(request.names)
        return own_pass(call, request, output=output)

    monkeypatch.setattr(kernels, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(operator, "one_pass", one_pass)
    reductions = operator.reduce(call, request)
    assert tiled == {"weights"}
    exact = map_fields(call, **dict.fromkeys(QKV, lambda tensor: tensor.double()))
    for name, tensor in reduce_dense(exact, request).items():
        torch.testing.assert_close(
            reductions[name].double(), tensor, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_kernels_are_for_gpus_and_for_what_they_can_express(monkeypatch: pytest.MonkeyPatch) -> None:
    call, request = made(True, 0, "", None, False), ReductionRequest(names=NAMES)
    assert operator.supports_triton(call, request) == call.query.is_cuda
    monkeypatch.setattr(kernels, "is_on_gpu", lambda tensor: True)
    assert operator.supports_triton(call, request)
    assert operator.supports_triton(hidden("operation"), request)
    assert operator.supports_triton(hidden("packed"), request)
    biased = dataclasses.replace(call, bias=torch.zeros(1, 1, 37, 37, device=DEVICE))
    assert not operator.supports_triton(biased, request)
    for operation in (Operation(window=7, prefix=2), Operation(window=7, top_k=3), Operation(weighting="sigmoid")):
        assert not operator.supports_triton(dataclasses.replace(call, operation=operation), request)
    slopes = Operation(window=7, slopes=torch.ones(4, device=DEVICE))
    assert not operator.supports_triton(dataclasses.replace(call, operation=slopes), request)
