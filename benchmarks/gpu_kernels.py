"""Row and column statistics by the GPU kernels against the forward of PyTorch's fused attention.

16 heads of width 64, bfloat16 and float32, causal and padded, 16384 tokens a batch. Contestants:
`scaled_dot_product_attention` (sdpa, the reference); entropy, distance and log-sum-exp of every row (rows); mass and
square of every column (columns). What measuring adds to a forward that would run anyway is the sum of both ratios.

On a CPU both kernels run in Triton's interpreter, tiny: that says that they are right, and nothing of their speed.

    python -m benchmarks.gpu_kernels [--quick] [--device cuda] [--longest 32768] [--sweep] [--out FILE]
"""

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from benchmarks.timing import device, on_gpu, parser, prepared, race, row, show, write
from regard.attention import kernels
from regard.attention.kernels import Tiling

HEADS, WIDTH, TOKENS = 16, 64, 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
QUICK = (40,)
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def inputs(
    batch: int, length: int, *, padded: bool, dtype: torch.dtype, heads: int = HEADS, width: int = WIDTH
) -> dict[str, Any]:
    """Random query, key and value (batch, head, length, width), laid out as models do, and which tokens are real."""
    generator, shape = torch.Generator(device()).manual_seed(0), (batch, length, heads, width)
    with device():
        query, key, value = (torch.randn(shape, generator=generator, dtype=dtype).transpose(1, 2) for _ in range(3))
        lengths = torch.randint(length // 2, length + 1, (batch, 1), generator=generator)
        real = torch.arange(length) < lengths if padded else None
    return {"query": query, "key": key, "value": value, "real": real}


def contestants(data: dict[str, Any], blocks: Tiling | None = None) -> dict[str, Callable[[], Any]]:
    """The three things that are timed."""
    query, key, value, real = data["query"], data["key"], data["value"], data["real"]
    options: dict[str, Any] = {"scale": query.shape[-1] ** -0.5, "causal": real is None, "offset": 0, "key_mask": real}
    mask = None if real is None else real[:, None, None, :]
    lse = kernels.row_statistics(query, key, **options, blocks=blocks).lse

    def forward() -> Tensor:
        with sdpa_kernel(FUSED if on_gpu() else SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=real is None)

    def rows() -> kernels.RowStatistics:
        return kernels.row_statistics(query, key, **options, distance=True, blocks=blocks)

    def columns() -> tuple[Tensor, Tensor | None]:
        return kernels.column_statistics(query, key, lse, **options, query_mask=real, square=True, blocks=blocks)

    return {"sdpa": forward, "rows": rows, "columns": columns}


def column_error(data: dict[str, Any]) -> float:
    """The largest relative error of a column's mass, against the whole matrix in float64; for short sequences only."""
    query, key, real = data["query"].double(), data["key"].double(), data["real"]
    score = query @ key.mT * query.shape[-1] ** -0.5
    if real is None:
        score = score.masked_fill(~torch.ones_like(score[0, 0], dtype=torch.bool).tril(), -torch.inf)
        expected = score.softmax(-1).sum(-2)
    else:
        weights = score.masked_fill(~real[:, None, None, :], -torch.inf).softmax(-1)
        expected = (weights * real[:, None, :, None]).sum(-2)
    mass = contestants(data)["columns"]()[0].double()
    return float(((mass - expected).abs() / expected.clamp(min=1e-3)).max())


def tilings() -> list[Tiling | None]:
    """What --sweep tries beside the default choice (None)."""
    sizes = ((64, 64, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8))
    return [
        None,
        *(
            Tiling(resident=resident, streamed=streamed, warps=warps, stages=stages)
            for resident, streamed, warps in sizes
            for stages in (2, 3)
        ),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result; on a CPU those of --quick."""
    options = parser(__doc__)
    options.add_argument("--longest", type=int, default=LENGTHS[-1], help="leave out longer sequences")
    options.add_argument("--sweep", action="store_true", help="try other tilings too (bfloat16)")
    given = prepared(options, arguments)
    if importlib.util.find_spec("triton") is None:
        print("Triton is not installed: nothing measured")
        return
    small = given.quick or not on_gpu()
    errors: dict[str, float] = {}
    rows: list[dict[str, Any]] = []
    for dtype in (torch.float32,) if small else (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for kind in ("causal", "padded"):
            for length in QUICK if small else [length for length in LENGTHS if length <= given.longest]:
                size = {"heads": 2, "width": 16} if small else {}
                batch = 2 if small else max(1, TOKENS // length)
                data = inputs(batch, length, padded=kind == "padded", dtype=dtype, **size)
                case = {"dtype": name, "kind": kind, "batch": batch, "length": length}
                if length <= LENGTHS[0]:
                    errors[f"{name} {kind}"] = column_error(data)
                for blocks in tilings() if given.sweep and dtype == torch.bfloat16 else [None]:
                    figures = race(contestants(data, blocks), most=1 if small else 20, budget=4.0)
                    rows.append(row(case | (vars(blocks) if blocks else {}), figures, "sdpa"))
                    show(rows[-1])
                    if on_gpu() or given.out:
                        write("gpu_kernels", rows, given.out)
    print("largest relative error of a column:", ", ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    for name, error in errors.items():
        assert error < (1e-3 if name.startswith("float32") else 5e-2), f"{name}: the kernels are wrong by {error:.1e}"


if __name__ == "__main__":
    main()
