"""The Triton kernels against the whole matrix in float64: interpreted on a CPU, compiled where there is a GPU."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.attention import kernels
from regard.attention.kernels import Tiling, choose_tiling, column_statistics, row_statistics

INSTALLED = importlib.util.find_spec("triton") is not None
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
LATE = not GPU and "TRITON_INTERPRET" not in os.environ

REASON = "Triton is not installed" if not INSTALLED else "Triton was imported before it could be told to interpret"
needs_triton = pytest.mark.skipif(not INSTALLED, reason="Triton is not installed")
needs_kernels = pytest.mark.skipif(not INSTALLED or LATE, reason=REASON)
needs_gpu = pytest.mark.skipif(
    not (GPU and INSTALLED) or os.environ.get("TRITON_INTERPRET") == "1", reason="no GPU, or Triton interprets"
)
SQUARE = Tiling(resident=16, streamed=16, warps=1, stages=1)
WIDE = Tiling(resident=16, streamed=32, warps=1, stages=1)
TALL = Tiling(resident=32, streamed=16, warps=1, stages=1)


@dataclass(frozen=True)
class Case:
    """Inputs of both kernels, and what their outputs must be, by the whole matrix in float64."""

    query: Tensor
    key: Tensor
    scale: float = 0.5
    causal: bool = False
    offset: int = 0
    key_mask: Tensor | None = None
    query_mask: Tensor | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    window: int | None = None
    keep: Tensor | None = None

    def run(self, blocks: Tiling | None = SQUARE) -> dict[str, Tensor]:
        shared: dict[str, Any] = {
            "scale": self.scale,
            "causal": self.causal,
            "offset": self.offset,
            "key_mask": self.key_mask,
            "softcap": self.softcap,
            "window": self.window,
            "keep": self.keep,
            "blocks": blocks,
        }
        rows = row_statistics(self.query, self.key, sink=self.sink, distance=True, **shared)
        mass, square = column_statistics(
            self.query, self.key, rows.lse, query_mask=self.query_mask, square=True, **shared
        )
        assert rows.distance is not None
        assert square is not None
        return {"lse": rows.lse, "entropy": rows.entropy, "distance": rows.distance, "mass": mass, "square": square}

    def positions(self) -> tuple[Tensor, Tensor]:
        queries = self.offset + torch.arange(self.query.shape[2], device=self.query.device)
        return queries[:, None], torch.arange(self.key.shape[2], device=self.query.device)[None, :]

    def visible(self) -> Tensor:
        i, j = self.positions()
        see = torch.ones_like(i >= j)
        if self.causal:
            see &= j <= i
        if self.window is not None:
            see &= i - j < self.window
        if self.keep is not None:
            see = see & self.keep
        return see if self.key_mask is None else see & self.key_mask[:, None, None, :]

    def expected(self) -> dict[str, Tensor]:
        key = self.key.double().repeat_interleave(self.query.shape[1] // self.key.shape[1], dim=1)
        score = self.scale * self.query.double() @ key.mT
        if self.softcap is not None:
            score = self.softcap * torch.tanh(score / self.softcap)
        score = score.masked_fill(~self.visible(), -torch.inf)
        lse = score.logsumexp(-1)
        if self.sink is not None:
            lse = torch.logaddexp(lse, self.sink.double()[:, None])
        lse = torch.where(lse == -torch.inf, torch.inf, lse)
        a = torch.exp(score - lse[..., None])
        counted = a if self.query_mask is None else a * self.query_mask[:, None, :, None]
        i, j = self.positions()
        return {
            "lse": lse,
            "entropy": -torch.special.xlogy(a, a).sum(-1),
            "distance": (a * (i - j).abs()).sum(-1),
            "mass": counted.sum(-2),
            "square": counted.square().sum(-2),
        }

    def check(self, blocks: Tiling | None = SQUARE) -> None:
        """Every output within what the rounding of one float32 score does to it."""
        found, expected = self.run(blocks), self.expected()
        terms = self.scale * torch.einsum("bhqd,bhd->bhq", self.query.double().abs(), self._largest_key())
        lse = expected["lse"]
        largest = float(terms.max()) + float(lse[lse.isfinite()].abs().max()) if lse.isfinite().any() else 1.0
        score = torch.finfo(torch.float32).eps * (8 + self.query.shape[-1] ** 0.5) * (1 + largest)
        reach = float(expected["distance"].abs().max()) + 1
        tolerances = {
            "lse": (score, 0.0),
            "entropy": (8 * score, 8 * score),
            "distance": (score * reach, 4 * score),
            "mass": (score, 4 * score),
            "square": (score, 8 * score),
        }
        for name, (absolute, relative) in tolerances.items():
            assert found[name].dtype == (torch.float64 if name == "square" else torch.float32)
            torch.testing.assert_close(
                found[name].double(), expected[name], atol=absolute, rtol=relative, msg=lambda m, n=name: f"{n}: {m}"
            )

    def _largest_key(self) -> Tensor:
        largest = self.key.double().abs().amax(2)
        return largest.repeat_interleave(self.query.shape[1] // self.key.shape[1], dim=1)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def flags(seed: int, *shape: int) -> Tensor:
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.7).to(DEVICE)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    seed, batch, groups, share = (draw(st.integers(*ends)) for ends in ((0, 10_000), (1, 2), (1, 2), (1, 2)))
    queries, keys, width = (draw(st.integers(1, most)) for most in (40, 40, 20))
    heads = groups * share
    return Case(
        query=normal(seed, batch, heads, queries, width),
        key=normal(seed + 1, batch, groups, keys, width),
        scale=draw(st.sampled_from((0.25, 1.0))),
        causal=draw(st.booleans()),
        offset=draw(st.integers(-5, 20)),
        key_mask=draw(st.sampled_from((None, flags(seed + 2, batch, keys)))),
        query_mask=draw(st.sampled_from((None, flags(seed + 3, batch, queries)))),
        softcap=draw(st.sampled_from((None, 0.5, 30.0))),
        sink=draw(st.sampled_from((None, normal(seed + 4, heads)))),
        window=draw(st.sampled_from((None, 1, 7, 30))),
        keep=draw(st.sampled_from((None, *masks(seed + 5, batch, heads, queries, keys)))),
    )


def masks(seed: int, batch: int, heads: int, queries: int, keys: int) -> list[Tensor]:
    """Masks of every shape: some pairs, some of each head, rows alike, columns alike, packed sequences, and none."""
    bounds = torch.tensor([keys // 3, 2 * keys // 3], device=DEVICE)
    of_query, of_key = (torch.bucketize(torch.arange(length, device=DEVICE), bounds) for length in (queries, keys))
    packed = (of_query[:, None] == of_key)[None, None]
    shapes = ((1, 1, queries, keys), (batch, heads, queries, keys), (batch, 1, 1, keys), (1, 1, queries, 1))
    return [*(flags(seed, *shape) for shape in shapes), packed, torch.zeros_like(packed)]


@needs_kernels
@given(case=cases(), blocks=st.sampled_from((SQUARE, WIDE, TALL)))
@settings(max_examples=8, deadline=None)
def test_both_kernels_equal_the_whole_matrix(case: Case, blocks: Tiling) -> None:
    case.check(blocks)


@pytest.mark.sample(1)
@needs_kernels
@pytest.mark.parametrize("width", [24, 64, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_type_and_width_under_the_chosen_tiling(dtype: torch.dtype, width: int) -> None:
    """Half precision is held to float64 on the rounded inputs: what is added to their rounding is float32's alone."""
    case = Case(normal(0, 1, 2, 140, width, dtype=dtype), normal(1, 1, 1, 150, width, dtype=dtype), width**-0.5)
    replace(case, causal=True, offset=10).check(None)


@needs_kernels
def test_rows_that_see_nothing_weigh_nothing() -> None:
    real = torch.tensor([[False, False, True] + [True] * 17, [False] * 20], device=DEVICE)
    case = Case(normal(0, 2, 2, 20, 8), normal(1, 2, 2, 20, 8), causal=True, key_mask=real)
    found = case.run()
    assert found["lse"][0, :, :2].eq(torch.inf).all()
    assert found["lse"][0, :, 2:].isfinite().all()
    assert found["lse"][1].eq(torch.inf).all()
    for name in ("entropy", "distance"):
        assert found[name][0, :, :2].eq(0).all()
        assert found[name][1].eq(0).all()
    assert found["mass"][1].eq(0).all()
    torch.testing.assert_close(found["mass"][0].sum(-1), torch.full((2,), 18.0, device=DEVICE))
    case.check()

    sink = torch.tensor([0.5, -torch.inf], device=DEVICE)
    alone = replace(case, sink=sink).run()["lse"][1]
    torch.testing.assert_close(alone, torch.stack([torch.full((20,), v, device=DEVICE) for v in (0.5, torch.inf)]))


@needs_kernels
def test_a_row_of_either_infinity_weighs_nothing_in_the_columns() -> None:
    query, key = normal(0, 1, 1, 4, 8), normal(1, 1, 1, 5, 8)
    lse = torch.tensor([[[torch.inf, -torch.inf, 0.0, 0.0]]], device=DEVICE)
    options: dict[str, Any] = {"scale": 1.0, "causal": False, "offset": 0, "blocks": SQUARE}
    mass, square = column_statistics(query, key, lse, **options)
    torch.testing.assert_close(mass, (query @ key.mT).exp()[:, :, 2:].sum(2))
    assert square is None
    assert row_statistics(query, key, **options).distance is None


@needs_kernels
@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # NumPy's, in the interpreter
def test_nan_comes_out_as_nan() -> None:
    case = Case(normal(0, 1, 1, 20, 8), normal(1, 1, 1, 20, 8), causal=True)
    case.query[0, 0, 17, 3] = torch.nan
    found = case.run()
    for name in ("lse", "entropy", "distance"):
        assert found[name].isnan().nonzero().tolist() == [[0, 0, 17]]
    assert found["mass"][..., :18].isnan().all()


@needs_kernels
@pytest.mark.parametrize("queries, keys, batch", [(0, 3, 1), (3, 0, 1), (3, 3, 0)])
def test_nothing_in_gives_nothing_out(queries: int, keys: int, batch: int) -> None:
    keep = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=DEVICE)
    found = Case(normal(0, batch, 1, queries, 8), normal(1, batch, 1, keys, 8), keep=keep).run()
    assert found["lse"].shape == (batch, 1, queries)
    assert found["lse"].eq(torch.inf).all()
    assert found["mass"].shape == (batch, 1, keys)


@pytest.mark.exhaustive
@needs_kernels
def test_strides_do_not_matter() -> None:
    apart = Case(
        query=normal(0, 2, 20, 4, 8).transpose(1, 2),
        key=normal(1, 2, 2, 20, 22).mT[:, :, 1:, 2:18:2],
        key_mask=flags(2, 21, 2).T,
        query_mask=flags(3, 1, 20).expand(2, 20),
        sink=normal(4, 8)[::2],
    )
    together = {name: v.contiguous() if isinstance(v, Tensor) else v for name, v in vars(apart).items()}
    assert not apart.query.is_contiguous()
    assert apart.key.stride(-1) != 1
    found, expected = apart.run(), Case(**together).run()
    for name in found:
        assert torch.equal(found[name], expected[name])

    lse = found["lse"].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    options: dict[str, Any] = {"scale": 0.5, "causal": False, "offset": 0, "blocks": SQUARE}
    shared = {"key_mask": apart.key_mask, "query_mask": apart.query_mask}
    assert torch.equal(column_statistics(apart.query, apart.key, lse, **shared, **options)[0], expected["mass"])


PACKED = (torch.arange(64, device=DEVICE) // 32)[:, None] == torch.arange(64, device=DEVICE) // 32
PACKED = PACKED[None, None]


@needs_kernels
@pytest.mark.every_value
@pytest.mark.parametrize(
    "options, blocks",
    [
        ({"causal": False}, 16),
        ({"causal": True}, 1 + 2 + 3 + 4),
        ({"causal": True, "offset": 1}, 2 + 3 + 4 + 4),
        ({"causal": True, "offset": -32}, 1 + 2),
        ({"causal": True, "window": 17}, 1 + 2 + 2 + 2),
        ({"causal": False, "window": 1}, 4 + 3 + 2 + 1),
        ({"causal": True, "keep": PACKED}, 1 + 2 + 1 + 2),
        ({"causal": False, "keep": PACKED}, 2 + 2 + 2 + 2),
    ],
)
def test_blocks_that_cannot_see_each_other_are_skipped_and_no_others(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], blocks: int
) -> None:
    if not kernels._is_interpreted():
        pytest.skip("only the interpreter can be watched")
    source = importlib.import_module("regard.attention.triton_source")
    seen = []
    scores = source._scores
    monkeypatch.setattr(source, "_scores", lambda *a, **k: seen.append(1) or scores(*a, **k))
    Case(normal(0, 1, 1, 64, 8), normal(1, 1, 1, 64, 8), **options).check()
    assert len(seen) == 2 * blocks


def test_what_does_not_fit_is_refused() -> None:
    query, key = normal(0, 1, 3, 4, 8), normal(1, 1, 2, 4, 8)
    options: dict[str, Any] = {"scale": 1.0, "causal": True, "offset": 0}
    with pytest.raises(ValueError, match="heads a multiple of groups"):
        row_statistics(query, key, **options)
    with pytest.raises(ValueError, match="one type of"):
        row_statistics(query[:, :2].double(), key.double(), **options)
    with pytest.raises(ValueError, match="softcap: expected a positive"):
        column_statistics(query[:, :2], key, query[:, :2, :, 0], **options, softcap=0.0)
    with pytest.raises(ValueError, match="window: expected at least one key"):
        row_statistics(query[:, :2], key, **options, window=0)
    with pytest.raises(ValueError, match="lse: expected float32"):
        column_statistics(query[:, :2], key, query[:, :2, :, 0].double(), **options)


def test_without_triton_or_a_gpu_the_kernels_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8)
    options: dict[str, Any] = {"scale": 1.0, "causal": True, "offset": 0}
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not kernels.is_available()
    if INSTALLED:
        with pytest.raises(ValueError, match="take tensors on a GPU"):
            row_statistics(*tensors, **options)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.is_available() == INSTALLED
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not kernels.is_available()
    with pytest.raises(ImportError, match=r"regard\[gpu\]"):
        row_statistics(*tensors, **options)


@pytest.mark.exhaustive
@needs_triton
def test_the_compiler_takes_both_kernels(tmp_path: Path) -> None:
    """The compiler refuses much that the interpreter takes. It needs no GPU, only to be told of one: sm_80, sm_90."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_kernels.py")
    found = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=900)
    assert found.returncode == 0, found.stderr
    shared = [int(line) for line in found.stdout.split()]
    assert len(shared) == 8
    assert max(shared) <= 99 * 1024, "a consumer GPU gives a program 99 KiB of shared memory"


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_sequences_on_a_gpu(dtype: torch.dtype) -> None:
    case = Case(normal(0, 2, 4, 3000, 128, dtype=dtype), normal(1, 2, 2, 3100, 128, dtype=dtype), 128**-0.5)
    replace(case, causal=True, offset=100, key_mask=flags(2, 2, 3100)).check(None)
    replace(case, query_mask=flags(3, 2, 3000), softcap=20.0, sink=normal(4, 4)).check(None)


@needs_gpu
def test_offsets_past_two_to_the_31_on_a_gpu() -> None:
    room = torch.zeros(2**31 + 2**16, dtype=torch.bfloat16, device=DEVICE)
    query = room.as_strided((2, 1, 64, 64), (2**31, 64, 64, 1))
    query.copy_(normal(0, 2, 1, 64, 64))
    long = room.as_strided((1, 1, 64, 64), (0, 64, 2**25, 1))
    long.copy_(normal(1, 1, 1, 64, 64))
    Case(query, normal(2, 2, 1, 64, 64, dtype=torch.bfloat16), 0.125, causal=True).check(None)
    Case(long, long, 0.125, causal=True).check(SQUARE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 16, 80, 256, 576])
def test_every_tiling_is_one_that_the_compiler_takes(width: int, dtype: torch.dtype) -> None:
    cut = choose_tiling(width, dtype)
    for size in (cut.resident, cut.streamed):
        assert size >= 16
        assert size & (size - 1) == 0
