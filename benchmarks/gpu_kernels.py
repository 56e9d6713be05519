"""Row and column statistics by the GPU kernels against the forward of F.scaled_dot_product_attention.

On a CUDA machine: median times by CUDA events, T = 512 … 32768, bfloat16 and float32, causal and padded; prints a table
and writes gpu_kernels.json. The ratio to read is "both / sdpa": what measuring every head's rows and columns adds to a
forward that would be run anyway. Nothing has been measured yet: no expected number stands here before a first run.

Without a GPU: says so in one line, and runs both kernels once, tiny, in Triton's interpreter.

    python benchmarks/gpu_kernels.py [--out gpu_kernels.json] [--heads 16] [--head-dim 64] [--longest 32768] [--sweep]
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from regard.attention import kernels
from regard.attention.kernels import Tiling

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TOKENS = 16384
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def inputs(
    batch: int, length: int, heads: int, width: int, dtype: torch.dtype, padded: bool, device: str
) -> dict[str, Any]:
    """Random query, key and value (batch, head, length, width), laid out as models do, and which tokens are real."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch, length, heads, width)
    query, key, value = (
        torch.randn(shape, generator=generator, device=device, dtype=dtype).transpose(1, 2) for _ in range(3)
    )
    shortest = length // 2
    lengths = torch.randint(shortest, length + 1, (batch, 1), generator=generator, device=device)
    real = torch.arange(length, device=device) < lengths if padded else None
    return {"query": query, "key": key, "value": value, "real": real}


def measured(data: dict[str, Any], blocks: Tiling | None = None) -> dict[str, Callable[[], Any]]:
    """The three things that are timed, by name, each ready to be called."""
    query, key, value, real = data["query"], data["key"], data["value"], data["real"]
    shared: dict[str, Any] = {"scale": query.shape[-1] ** -0.5, "causal": real is None, "offset": 0, "key_mask": real}
    mask = None if real is None else real[:, None, None, :]
    lse = kernels.row_statistics(query, key, **shared, blocks=blocks).lse

    def forward() -> Tensor:
        with sdpa_kernel(FUSED):
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=real is None)

    def rows() -> kernels.RowStatistics:
        return kernels.row_statistics(query, key, **shared, distance=True, blocks=blocks)

    def columns() -> tuple[Tensor, Tensor | None]:
        return kernels.column_statistics(query, key, lse, **shared, query_mask=real, square=True, blocks=blocks)

    return {"sdpa": forward, "rows": rows, "columns": columns}


def medians(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each call by CUDA events; the calls take turns, so that a drift of the clock hits all."""
    for call in calls.values():
        for _ in range(3):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def column_error(data: dict[str, Any]) -> float:
    """The largest relative error of a column's mass, against the whole matrix in float64; for short sequences only."""
    calls = measured(data)
    query, key, real = data["query"].double(), data["key"].double(), data["real"]
    score = query @ key.mT * query.shape[-1] ** -0.5
    if real is None:
        score = score.masked_fill(~torch.ones_like(score[0, 0], dtype=torch.bool).tril(), -torch.inf)
        expected = score.softmax(-1).sum(-2)
    else:
        weights = score.masked_fill(~real[:, None, None, :], -torch.inf).softmax(-1)
        expected = (weights * real[:, None, :, None]).sum(-2)
    mass = calls["columns"]()[0].double()
    return float(((mass - expected).abs() / expected.clamp(min=1e-3)).max())


def tilings() -> list[Tiling | None]:
    """What --sweep tries beside the default choice (None)."""
    found: list[Tiling | None] = [None]
    for resident, streamed, warps in ((64, 64, 4), (128, 32, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8)):
        found += [Tiling(resident=resident, streamed=streamed, warps=warps, stages=stages) for stages in (2, 3)]
    return found


def on_a_gpu(options: argparse.Namespace) -> None:
    """Prints one line a shape and writes all of them to `options.out`."""
    card = torch.cuda.get_device_name()
    print(f"{card}, torch {torch.__version__}, {options.heads} heads of {options.head_dim}")
    print(f"{'dtype':9} {'kind':7} {'batch':>5} {'T':>6} {'sdpa ms':>9} {'rows/':>7} {'columns/':>9} {'both/sdpa':>10}")
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        for padded in (False, True):
            for length in (t for t in LENGTHS if t <= options.longest):
                batch = max(1, TOKENS // length)
                data = inputs(batch, length, options.heads, options.head_dim, dtype, padded, "cuda")
                error = column_error(data) if length == LENGTHS[0] else None
                for blocks in tilings() if options.sweep and dtype == torch.bfloat16 else [None]:
                    time = medians(measured(data, blocks), repeats=20 if length <= 8192 else 7)
                    ratios = {name: time[name] / time["sdpa"] for name in ("rows", "columns")}
                    both = ratios["rows"] + ratios["columns"]
                    kind, name = "padded" if padded else "causal", str(dtype).removeprefix("torch.")
                    found.append(
                        {
                            "dtype": name,
                            "kind": kind,
                            "batch": batch,
                            "length": length,
                            "blocks": vars(blocks) if blocks else None,
                            "latency_ms": time,
                            "both_over_sdpa": both,
                            "largest_relative_error_of_a_column": error,
                        }
                    )
                    print(
                        f"{name:9} {kind:7} {batch:5} {length:6} {time['sdpa']:9.3f} "
                        f"{ratios['rows']:7.2f} {ratios['columns']:9.2f} {both:10.2f}"
                        + (f"  {blocks}" if blocks else "")
                        + (f"  column error {error:.1e}" if error is not None else "")
                    )
    record = {
        "date": datetime.date.today().isoformat(),
        "card": card,
        "torch": torch.__version__,
        "heads": options.heads,
        "head_dim": options.head_dim,
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "found": found,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")


def without_a_gpu() -> None:
    """One line that says so, after both kernels ran once in the interpreter."""
    if importlib.util.find_spec("triton") is None:
        print("no GPU and no Triton here: nothing measured, no kernel run")
        return
    errors = [column_error(inputs(2, 40, 2, 16, torch.float32, padded, "cpu")) for padded in (False, True)]
    print(f"no GPU here: nothing measured; both kernels ran in the interpreter, column error {max(errors):.1e}")


def main(arguments: list[str] | None = None) -> None:
    """Measures on a GPU, or says that there is none."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_kernels.json"), help="where the JSON goes")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--longest", type=int, default=LENGTHS[-1], help="leave out longer sequences")
    parser.add_argument("--sweep", action="store_true", help="try other tilings too (bfloat16)")
    options = parser.parse_args(arguments)
    if torch.cuda.is_available():
        on_a_gpu(options)
    else:
        without_a_gpu()


if __name__ == "__main__":
    main(sys.argv[1:])
