"""What FlexAttention is asked for, in its eager form on the CPU, against the definition; its kernel runs on CUDA."""

import pytest
import torch
from torch.nn.attention import flex_attention

from regard.attention import flex, reference
from regard.attention.operator import select_backend
from regard.attention.spec import ATTENTIONS
from regard.errors import UserError
from tests.attention.test_operation import MORE, call_of, parts

EVERY = ATTENTIONS | MORE


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores as tensors, without a trace by the compiler and its warning that this is not the fused kernel."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def _able(name: str) -> bool:
    try:
        EVERY[name].changed(backend="flex")
    except UserError:
        return False
    return True


@pytest.mark.parametrize("name", [name for name in EVERY if _able(name)])
@pytest.mark.parametrize("shares", [1, 2])
def test_the_output_is_that_of_the_definition(name: str, shares: int) -> None:
    tensors = {n: t.float() for n, t in parts(EVERY[name], length=21, shares=shares).items()}
    call = call_of(EVERY[name], tensors, length=21)
    assert call.operation is not None
    found = flex.flex(call, call.operation)
    torch.testing.assert_close(found, reference.operation_output(call, call.operation), rtol=1e-5, atol=1e-5)


def test_it_is_for_cuda_alone() -> None:
    spec = EVERY["sigmoid"]
    call = call_of(spec.changed(backend="flex"), parts(spec))
    assert call.operation is not None
    assert not flex.supports_flex(call, call.operation)
    assert select_backend(call, call.operation) == "blockwise"


@pytest.mark.parametrize("name", ["linear", "softpick", "sigmoid-kv"])
def test_what_has_no_logarithm_is_not_for_it(name: str) -> None:
    assert not _able(name)
