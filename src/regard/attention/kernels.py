"""Statistics of attention on a GPU, without ever holding a weight: one Triton pass over the scores each.

`row_statistics` reads every query's weights once, `column_statistics` every key's. Neither multiplies by values, which
is half of a fused forward's arithmetic. Triton is optional: nothing here imports it before a kernel is used.
"""

import importlib.util
import math
import os
from dataclasses import dataclass
from types import ModuleType

import torch
from jaxtyping import Bool, Float
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """What one pass over the keys says of every query.

    lse: log Σ_j exp(s_ij) over the keys the query sees and the sink; +inf where there is neither.
    entropy: −Σ_j A_ij log A_ij in nats, over keys only (never the sink's column); 0 where no key is seen.
    distance: Σ_j A_ij |i − j| in positions, or None where it was not asked for; 0 where no key is seen.
    """

    lse: Float[Tensor, "batch head query"]
    entropy: Float[Tensor, "batch head query"]
    distance: Float[Tensor, "batch head query"] | None


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a kernel cuts its work: one program holds `resident` rows and streams blocks of `streamed` rows past them.

    Both are powers of two, 16 at least. `warps` run a program, `stages` streamed blocks are in flight.
    """

    resident: int
    streamed: int
    warps: int
    stages: int


def available() -> bool:
    """True where the kernels can run: Triton is installed, and there is a GPU or Triton's interpreter is on.

    The interpreter (TRITON_INTERPRET=1 in the environment before Triton is first imported) runs them on a CPU, slowly.
    """
    return importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or _interpreted())


def tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """The blocks for heads of this width: as large as one program's registers and shared memory hold."""
    width = _padded(head_dim)
    if dtype == torch.float32:
        blocks = {32: (64, 64, 8), 64: (64, 64, 8), 128: (32, 32, 8), 256: (32, 16, 4)}
    else:
        blocks = {32: (128, 64, 4), 64: (128, 64, 4), 128: (128, 64, 8), 256: (64, 32, 4)}
    resident, streamed, warps = blocks.get(max(width, 32), (16, 16, 4))
    return Tiling(resident=resident, streamed=streamed, warps=warps, stages=2 if width <= 256 else 1)


def row_statistics(
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch group key width"],
    *,
    scale: float,
    causal: bool,
    offset: int,
    window: int | None = None,
    key_mask: Bool[Tensor, "batch key"] | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, " head"] | None = None,
    distance: bool = False,
    blocks: Tiling | None = None,
) -> RowStatistics:
    """The log-sum-exp, entropy and mean attended distance of every query, float32, in one online pass over the keys.

    The score is s_ij = scale · q_i·k_j, or softcap · tanh(s_ij / softcap) where a cap is given. Query i stands at
    position offset + i. It sees the real keys j (`key_mask`; None: all) with j ≤ offset + i if causal, and
    with j > offset + i − window or, bidirectional, |offset + i − j| < window if there is a window. `sink` is a learned
    logit a head that joins the normaliser, uncapped and unscaled. Query head h reads key group h // (head / group).

    Any strides, head widths and lengths; float32, bfloat16 and float16, summed in float32. Not differentiable.
    `blocks` overrides the choice of `tiling`. ValueError: inputs do not fit together; ImportError: no Triton.
    Heads wider than 512 in float32 need a GPU that gives a program 128 KiB of shared memory; wider than 1024, more.

    Source: the online softmax of Milakov & Gimelshein, arXiv:1805.02867, as FlashAttention streams it
    (arXiv:2205.14135, algorithm 1), here without values; the entropy follows from Σ e·s beside Σ e.
    """
    _check(query, key, window, softcap, {"key_mask": (key_mask, (key.shape[0], key.shape[2]))})
    batch, heads, queries, head_dim = query.shape
    if sink is not None and sink.shape != (heads,):
        raise ValueError(f"sink: expected one logit a head, shape ({heads},); got {tuple(sink.shape)}")
    source = _source(query)
    lse, entropy = (query.new_empty(batch, heads, queries, dtype=torch.float32) for _ in range(2))
    reach = torch.empty_like(lse) if distance else None
    cut = blocks or tiling(head_dim, query.dtype)
    grid = (batch * heads * math.ceil(queries / cut.resident),)
    if grid[0]:
        with torch.cuda.device_of(query):
            source.row_kernel[grid](
                *(query, key, key_mask, sink, lse, entropy, reach),
                *(*query.stride(), *key.stride(), *_strides(key_mask, 2), *_strides(sink, 1)),
                *_sizes(query, key, offset, window, scale, softcap),
                HEAD_DIM=head_dim,
                WIDTH=_padded(head_dim),
                CAUSAL=causal,
                BLOCK_Q=cut.resident,
                BLOCK_K=cut.streamed,
                num_warps=cut.warps,
                num_stages=cut.stages,
            )
    return RowStatistics(lse=lse, entropy=entropy, distance=reach)


def column_statistics(
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch group key width"],
    lse: Float[Tensor, "batch head query"],
    *,
    scale: float,
    causal: bool,
    offset: int,
    window: int | None = None,
    key_mask: Bool[Tensor, "batch key"] | None = None,
    query_mask: Bool[Tensor, "batch query"] | None = None,
    softcap: float | None = None,
    square: bool = False,
    blocks: Tiling | None = None,
) -> tuple[Float[Tensor, "batch head key"], Float[Tensor, "batch head key"] | None]:
    """The mass of every column, Σ_i A_ij, and with `square` also Σ_i A_ij², over real queries, float32, else None.

    A_ij = exp(s_ij − lse_i), with `lse` (float32) as `row_statistics` or a fused forward gives it, the sink within;
    a row of lse ±inf weighs 0. Everything else is as in `row_statistics`, and must be the same. A key that is not real,
    or that no real query sees, has mass 0.

    Each program holds a block of keys and streams only the queries that can see it, without values. For the swapped
    pass see awslabs/keys_values, issue 77 and pull request 78 (two FlexAttention calls) and 83 (a kernel).
    """
    marked = {"key_mask": (key_mask, (key.shape[0], key.shape[2])), "query_mask": (query_mask, query.shape[::2])}
    _check(query, key, window, softcap, marked)
    batch, heads, _, head_dim = query.shape
    if lse.shape != query.shape[:3] or lse.dtype != torch.float32 or lse.device != query.device:
        raise ValueError(
            f"lse: expected float32 {tuple(query.shape[:3])} on {query.device}; "
            f"got {lse.dtype} {tuple(lse.shape)} on {lse.device}"
        )
    source = _source(query)
    mass = query.new_empty(batch, heads, key.shape[2], dtype=torch.float32)
    squared = torch.empty_like(mass) if square else None
    cut = blocks or tiling(head_dim, query.dtype)
    grid = (batch * heads * math.ceil(key.shape[2] / cut.resident),)
    if grid[0]:
        with torch.cuda.device_of(query):
            source.column_kernel[grid](
                *(query, key, lse, key_mask, query_mask, mass, squared),
                *(*query.stride(), *key.stride(), *lse.stride(), *_strides(key_mask, 2), *_strides(query_mask, 2)),
                *_sizes(query, key, offset, window, scale, softcap),
                HEAD_DIM=head_dim,
                WIDTH=_padded(head_dim),
                CAUSAL=causal,
                BLOCK_Q=cut.streamed,
                BLOCK_K=cut.resident,
                num_warps=cut.warps,
                num_stages=cut.stages,
            )
    return mass, squared


def _interpreted() -> bool:
    """True where Triton's interpreter is asked for, in the words that Triton itself takes for yes."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "y", "yes", "t", "true", "on"}


def _source(query: Tensor) -> ModuleType:
    """The kernels' module, once it is known that they can run on the query's device."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError("the GPU kernels need Triton, which is not installed: pip install 'regard[gpu]'")
    if not (query.is_cuda or _interpreted()):
        raise ValueError(
            f"the GPU kernels take tensors on a GPU; got {query.device} (TRITON_INTERPRET=1 runs them on a CPU, slowly)"
        )
    return importlib.import_module("regard.attention.triton_source")


def _check(
    query: Tensor,
    key: Tensor,
    window: int | None,
    softcap: float | None,
    marked: dict[str, tuple[Tensor | None, tuple[int, ...]]],
) -> None:
    """ValueError where the inputs of either kernel do not fit together."""
    if query.dtype not in DTYPES or key.dtype != query.dtype or key.device != query.device:
        raise ValueError(
            f"query and key: expected one device and one type of {DTYPES}; "
            f"got {query.dtype} on {query.device} and {key.dtype} on {key.device}"
        )
    heads, groups = query.shape[1], key.shape[1]
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or groups == 0 or heads % groups:
        raise ValueError(
            "query and key: expected (batch, head, query, width) and (batch, group, key, width), heads a multiple of "
            f"groups; got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    for name, (real, shape) in marked.items():
        if real is not None and (real.dtype != torch.bool or real.shape != shape or real.device != query.device):
            raise ValueError(
                f"{name}: expected bool {tuple(shape)} on {query.device}; "
                f"got {real.dtype} {tuple(real.shape)} on {real.device}"
            )
    if window is not None and window < 1:
        raise ValueError(f"window: expected 1 or more keys, or None for all; got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap: expected a positive cap, or None for none; got {softcap}")


def _sizes(
    query: Tensor, key: Tensor, offset: int, window: int | None, scale: float, softcap: float | None
) -> tuple[int | float | None, ...]:
    """The numbers that both kernels take, in their order; the scale and the cap such that scores come out in bits."""
    heads, groups = query.shape[1], key.shape[1]
    numbers = (heads, heads // groups, query.shape[2], key.shape[2], offset, window)
    if softcap is None:
        return (*numbers, scale * math.log2(math.e), None)
    return (*numbers, scale / softcap, softcap * math.log2(math.e))


def _strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """The strides of an optional tensor; zeros where there is none."""
    return tensor.stride() if tensor is not None else (0,) * dims


def _padded(head_dim: int) -> int:
    """The head width that the matrix product takes: a power of two, 16 at least."""
    return max(16, 1 << (head_dim - 1).bit_length())
