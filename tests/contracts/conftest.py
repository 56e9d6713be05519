"""The model of every family, its inputs, and the ways to compare what was seen.

Weights are drawn far larger than at initialisation, so that attention is peaked and a slip shows.
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from regard import models as own
from regard.hooks import Watch
from tests.contracts.families import BY_NAME, CASES, CAUSAL, FAMILIES, PADDED, VOCABULARY, Family

transformers.logging.set_verbosity_error()

LENGTHS, DECODER_LENGTHS = (20, 13, 9), (12, 8, 10)


def _class(name: str) -> Any:
    return getattr(own if name.startswith("Regard") else transformers, name)


@cache
def _built(name: str, implementation: str, dtype: torch.dtype) -> Any:
    family = BY_NAME[name]
    config = _class(family.config)(**family.settings)
    if dtype == torch.float64:
        config._experts_implementation = "eager"  # grouped products know no float64; `eager` cannot be exported
    kind = _class(family.model)
    return randomised(kind._from_config(config, attn_implementation=implementation)).to(dtype).eval()


@torch.no_grad()
def randomised(model: Any) -> Any:
    """The model with large random weights, the same for the same shape of model."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if name.endswith(("sinks", "sink_logit")):
            parameter.copy_(drawn + 2)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * drawn)
        elif parameter.ndim == 1:
            parameter.add_(0.1 * drawn)
        else:
            parameter.copy_(0.25 * drawn)
    return model


def _ids(lengths: Iterable[int], padding: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Token ids and mask, the padding id 0 where the mask is 0."""
    longest = max(lengths)
    ids = torch.randint(3, VOCABULARY, (len(tuple(lengths)), longest), generator=generator)
    steps = torch.arange(longest)
    cut = torch.tensor([longest - n for n in lengths])[:, None]
    real = {"none": steps >= cut * 0, "right": steps < longest - cut, "left": steps >= cut}[padding]
    return ids * real, real.long()


def _inputs(family: Family, padding: str, seed: int = 0) -> dict[str, Tensor]:
    """Three samples of different length where there is padding, as the arguments of a forward."""
    generator = torch.Generator().manual_seed(seed)
    if family.kind == "vision":
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}
    ids, real = _ids(LENGTHS, padding, generator)
    inputs = {"input_ids": ids, "attention_mask": real}
    if family.positions is not None:
        inputs["position_ids"] = (real.cumsum(-1) - 1).clamp(min=0) + family.positions
    if family.kind == "both":
        inputs["decoder_input_ids"], inputs["decoder_attention_mask"] = _ids(DECODER_LENGTHS, padding, generator)
    return inputs


def _singles(inputs: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """The same samples one by one, without their padding and without a mask."""
    found = []
    for row in range(len(next(iter(inputs.values())))):
        single = {}
        for name, values in inputs.items():
            mask = inputs.get("decoder_attention_mask" if name.startswith("decoder") else "attention_mask")
            if not name.endswith("attention_mask"):
                single[name] = values[row : row + 1] if mask is None else values[row : row + 1][:, mask[row].bool()]
        found.append(single)
    return found


def _real(inputs: dict[str, Tensor]) -> Tensor | None:
    """Which positions of the first output are not padding."""
    mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
    return None if mask is None else mask.bool()


def _cast(inputs: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: values.to(dtype) if values.is_floating_point() else values for name, values in inputs.items()}


@torch.no_grad()
def _run(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits or hidden states of the real positions, (position, width)."""
    output = model(**_cast(inputs, model.dtype))[0]
    real = _real(inputs)
    return output.flatten(0, 1) if real is None else output[real]


Table = dict[tuple[Any, ...], tuple[float, int]]


def _table(seen: Watch, *, leave_out: Iterable[str] = ()) -> Table:
    """(statistic, site, layer, head, position, epsilon) → (value, samples)."""
    table = {}
    for row in seen.rows():
        key = (row.statistic, row.site, row.layer, row.head, row.position, row.epsilon)
        assert key not in table, f"two rows for {key}"
        if row.statistic not in leave_out:
            table[key] = (row.value, row.n)
    return table


def _assert_same(found: Table, expected: Table, *, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    """The same rows with the same number of samples and, to rounding, the same values; λ_max to Lanczos' tolerance."""
    assert expected, "nothing to compare with"
    missing, extra = expected.keys() - found.keys(), found.keys() - expected.keys()
    assert not missing, f"{len(missing)} rows missing, such as {sorted(missing, key=str)[:3]}"
    assert not extra, f"{len(extra)} rows too many, such as {sorted(extra, key=str)[:3]}"
    wrong = []
    for key, (value, samples) in expected.items():
        tolerance = max(rtol, 1e-5) if key[0] == "spectral_bound" else rtol
        got, counted = found[key]
        if counted != samples or not abs(got - value) <= atol + tolerance * abs(value):
            wrong.append((key, got, value, counted, samples))
    assert not wrong, f"{len(wrong)} of {len(expected)} rows differ: {wrong[:5]}"


@pytest.fixture(scope="session", params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    """Every family."""
    return request.param


@pytest.fixture(scope="session", params=CAUSAL, ids=str)
def causal(request: pytest.FixtureRequest) -> Family:
    """Every family with a causal site."""
    return request.param


@pytest.fixture(scope="session", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest) -> tuple[Family, str]:
    """Every family with every kind of padding it may see."""
    return request.param


@pytest.fixture(
    scope="session",
    params=PADDED,
    ids=lambda case: f"{case[0]}-{case[1]}",
)
def padded(request: pytest.FixtureRequest) -> tuple[Family, str]:
    """Every family with every kind of padding that leaves its positions alone."""
    return request.param


@pytest.fixture(scope="session")
def families() -> dict[str, Family]:
    return BY_NAME


@pytest.fixture(scope="session")
def build() -> Callable[..., Any]:
    """Gives the one model of a family, implementation (its own if none is named) and dtype, in eval mode."""

    def built(family: Family | str, implementation: str = "", dtype: torch.dtype = torch.float32) -> Any:
        family = BY_NAME[family] if isinstance(family, str) else family
        return _built(family.name, implementation or family.plain, dtype)

    return built


@pytest.fixture
def exact_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention in the dtype of the model: Transformers takes its softmax in float32, whatever comes in."""
    softmax = torch.nn.functional.softmax

    def exact(scores: Tensor, dim: int = -1, dtype: Any = None) -> Tensor:
        return softmax(scores, dim=dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", exact)


@pytest.fixture(scope="session")
def random_weights() -> Callable[[Any], Any]:
    return randomised


@pytest.fixture(scope="session")
def inputs() -> Callable[..., dict[str, Tensor]]:
    return _inputs


@pytest.fixture(scope="session")
def singles() -> Callable[[dict[str, Tensor]], list[dict[str, Tensor]]]:
    return _singles


@pytest.fixture(scope="session")
def run() -> Callable[[Any, dict[str, Tensor]], Tensor]:
    return _run


@pytest.fixture(scope="session")
def table() -> Callable[..., Table]:
    return _table


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    return _assert_same
