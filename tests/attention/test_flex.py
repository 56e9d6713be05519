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
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)


def _able(name: str) -> bool:
    try:
        EVERY[name].changed(backend="flex")
    except UserError:
        return False
    return True


@pytest.mark.every_value
@pytest.mark.parametrize("name", [name for name in EVERY if _able(name)])
@pytest.mark.parametrize("shares", [1, 2])
def test_the_output_is_that_of_the_definition(name: str, shares: int) -> None:
    tensors = {n: t.float() for n, t in parts(EVERY[name], length=21, shares=shares).items()}
    call = call_of(EVERY[name], tensors, length=21)
    assert call.operation is not None
    found = flex.flex(call, call.operation)
    torch.testing.assert_close(found, reference.operation_output(call, call.operation), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [5, 128, 300, 512])
@pytest.mark.parametrize("window", [None, 1, 129, 200])
@pytest.mark.parametrize("prefix", [0, 3, 128, 290])
def test_blocks_that_meet_are_those_of_the_mask_of_pairs(length: int, window: int | None, prefix: int) -> None:
    prefix = min(prefix, length)
    mask = flex._block_mask(length, window, prefix, torch.device("cpu"))
    expected = flex_attention.create_block_mask(mask.mask_mod, None, None, length, length, device="cpu")
    assert mask.seq_lengths == expected.seq_lengths
    for part in ("kv", "full_kv", "q", "full_q"):
        counts, others = (getattr(made, f"{part}_num_blocks") for made in (mask, expected))
        assert torch.equal(counts, others), part
        indices, others = (getattr(made, f"{part}_indices") for made in (mask, expected))
        for row, count in enumerate(counts[0, 0].tolist()):
            assert indices[0, 0, row, :count].tolist() == others[0, 0, row, :count].tolist(), part


def test_it_is_for_cuda_alone() -> None:
    spec = EVERY["sigmoid"]
    call = call_of(spec.changed(backend="flex"), parts(spec))
    assert call.operation is not None
    assert not flex.supports_flex(call, call.operation)
    assert select_backend(call, call.operation) == "blockwise"


def test_it_is_not_for_functions_that_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As while a block intercepts the calls of a model."""
    spec = EVERY["sigmoid"]
    tensors = {name: part.float().repeat(1, 1, 1, 4) for name, part in parts(spec).items()}
    call = call_of(spec.changed(backend="flex"), tensors)
    assert call.operation is not None
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert flex.supports_flex(call, call.operation)
    with torch.compiler.set_stance("force_eager"):
        assert select_backend(call, call.operation) == "blockwise"


@pytest.mark.parametrize("name", ["linear", "softpick", "sigmoid-kv"])
def test_what_has_no_logarithm_is_not_for_it(name: str) -> None:
    assert not _able(name)
