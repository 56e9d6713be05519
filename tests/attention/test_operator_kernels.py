"""The operator's route through the GPU kernels against the whole matrix: in Triton's interpreter without a GPU."""

import dataclasses

import pytest
import torch

from regard.attention import kernels, operator, reference
from regard.attention.call import AttentionCall
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


@pytest.mark.sample(2)
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


def test_kernels_are_for_gpus_and_for_what_they_can_express() -> None:
    call = made(True, 0, "", None, False)
    assert operator.supports_triton(call, ReductionRequest(names=NAMES)) == call.query.is_cuda
    whole = dataclasses.replace(call, keep=torch.ones(1, 1, 37, 37, dtype=torch.bool, device=DEVICE))
    assert not operator.supports_triton(whole, ReductionRequest(names=NAMES))
