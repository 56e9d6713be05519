"""Watched, a model computes what it would alone."""

from typing import Any

import pytest
import torch

from regard.hooks import watching

pytestmark = pytest.mark.sample(4)

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize(
    "dtype, statistics, tolerance",
    [(F32, "default", 1e-5), (F32, "first_mass", 1e-5), (F64, "all", 1e-10), (BF16, "default", 0.1)],
    ids=["float32", "float32-fused", "float64", "bfloat16"],
)
@pytest.mark.usefixtures("exact_softmax")
def test_output_is_that_of_the_model_alone(
    case: tuple[Any, str],
    dtype: torch.dtype,
    statistics: str,
    tolerance: float,
    build: Any,
    inputs: Any,
    run: Any,
) -> None:
    family, padding = case
    model, given = build(family, dtype=dtype), inputs(family, padding)
    alone = run(model, given)
    with watching(model, statistics) as seen:
        watched = run(model, given)
    assert watched.dtype == dtype
    assert seen.samples == 3
    if family.name.startswith("Deberta"):
        tolerance = max(tolerance, 1e-6)  # it scales by a square root that it takes in float32
    assert (watched - alone).abs().max() <= tolerance * alone.abs().max()


def test_output_is_that_of_eager_attention_too(family: Any, build: Any, inputs: Any, run: Any) -> None:
    """SDPA's own slips would not be noticed by a comparison with SDPA."""
    model = build(family, implementation="eager")
    given = inputs(family, family.paddings[-1])
    alone = run(model, given)
    with watching(model):
        watched = run(model, given)
    assert (watched - alone).abs().max() <= 2e-5 * alone.abs().max()


def test_encoder_output_of_an_encoder_decoder(families: Any, build: Any, inputs: Any) -> None:
    for name in ("T5", "Bart"):
        model, given = build(name), inputs(families[name], "right")
        with torch.no_grad():
            alone = model(**given).encoder_last_hidden_state
            with watching(model):
                watched = model(**given).encoder_last_hidden_state
        real = given["attention_mask"].bool()
        assert torch.allclose(watched[real], alone[real], rtol=1e-5, atol=1e-5), name
