"""Statistics of attention on a GPU: one Triton pass over the scores each, without values and without holding a weight.

Triton is optional, and imported when a kernel is first used.
"""

import importlib.util
import math
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class RowStatistics:
    """What one pass over the keys gives for every query.

    Attributes:
        lse: log Σ_j exp(s_ij) over the keys the query sees and the sink; +inf where there is neither.
        entropy: −Σ_j A_ij log A_ij in nats, over keys without the sink; 0 where no key is seen.
        distance: Σ_j A_ij |i − j| in positions, or None if not asked for; 0 where no key is seen.
    """

    lse: Float[Tensor, "batch head query"]
    entropy: Float[Tensor, "batch head query"]
    distance: Float[Tensor, "batch head query"] | None


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How a kernel cuts its work: the rows that a program holds and those that are streamed past them, in blocks.

    Both are powers of two, at least 16. `warps` are those of a program, `stages` the streamed blocks in flight.
    """

    resident: int
    streamed: int
    warps: int
    stages: int


def is_available() -> bool:
    """Return whether the kernels can run: Triton is installed, and there is a GPU or Triton's interpreter is on."""
    return importlib.util.find_spec("triton") is not None and (torch.cuda.is_available() or _is_interpreted())


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU, for which there are the kernels here and PyTorch's fused ones."""
    return tensor.is_cuda


def choose_tiling(head_dim: int, dtype: torch.dtype) -> Tiling:
    """Return blocks as large as the registers and shared memory of a program hold for heads of this width."""
    width = _padded_width(head_dim)
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
    key_mask: Bool[Tensor, "batch key"] | None = None,
    softcap: float | None = None,
    window: int | None = None,
    keep: Bool[Tensor, "#batch #head #query #key"] | None = None,
    sink: Float[Tensor, " head"] | None = None,
    distance: bool = False,
    blocks: Tiling | None = None,
) -> RowStatistics:
    """Return the log-sum-exp, entropy and mean attended distance of every query, in one online pass over the keys.

    Any strides, head widths and lengths; float32, bfloat16 and float16, summed in float32. Not differentiable. Heads
    wider than 512 in float32 need a GPU with 128 KiB of shared memory a program; wider than 1024, more.

    Query head h reads key group h // (head / group). The score is s_ij = scale · q_i·k_j, or with `softcap`
    softcap · tanh(s_ij / softcap). Query i stands at position `offset` + i among the keys, and sees no later key if
    `causal`; `key_mask` is False at keys that no query sees. With a `window` query i sees no key that stands `window`
    positions before it or more; `keep` is False at pairs that may not meet. Blocks outside of the window are skipped,
    and those before the first and behind the last pair of `keep` in their rows, or in their columns. `sink` is a
    learned logit a head that joins the normalizer, uncapped and unscaled. `blocks` replaces `choose_tiling`.

    Raises:
        ValueError: Inputs do not fit together.
        ImportError: Triton is not installed.

    Source:
        Milakov & Gimelshein (arXiv 1805.02867), as FlashAttention streams it (arXiv 2205.14135, algorithm 1), here
        without values; the entropy follows from Σ e·s beside Σ e.
    """
    launch = _Launch(query, key, {"key_mask": key_mask}, scale, causal, offset, softcap, window, keep, blocks)
    batch, heads, queries, _ = query.shape
    if sink is not None and sink.shape != (heads,):
        raise ValueError(f"sink: expected one logit a head, shape ({heads},); got {tuple(sink.shape)}")
    kernel = _source(query).row_kernel
    lse, entropy = (query.new_empty(batch, heads, queries, dtype=torch.float32) for _ in range(2))
    mean_distance = torch.empty_like(lse) if distance else None
    strides = (*_strides(key_mask, 2), *_strides(sink, 1))
    launch.run(kernel, (query, key, key_mask, sink, lse, entropy, mean_distance), strides, holds_queries=True)
    return RowStatistics(lse=lse, entropy=entropy, distance=mean_distance)


def column_statistics(
    query: Float[Tensor, "batch head query width"],
    key: Float[Tensor, "batch group key width"],
    lse: Float[Tensor, "batch head query"],
    *,
    scale: float,
    causal: bool,
    offset: int,
    key_mask: Bool[Tensor, "batch key"] | None = None,
    query_mask: Bool[Tensor, "batch query"] | None = None,
    softcap: float | None = None,
    window: int | None = None,
    keep: Bool[Tensor, "#batch #head #query #key"] | None = None,
    square: bool = False,
    blocks: Tiling | None = None,
) -> tuple[Float[Tensor, "batch head key"], Float[Tensor, "batch head key"] | None]:
    """Return Σ_i A_ij of every key over real queries in float32, and with `square` Σ_i A_ij² in float64, else None.

    The squares are exact enough for the variance Σ A² − (Σ A)² / n of a column whose weights are nearly equal.

    A_ij = exp(s_ij − lse_i). A key that no real query sees has mass 0. Each program holds a block of keys and streams
    the queries that see it, without values.

    `lse` is the log-sum-exp of `row_statistics` (float32, the sink in it; a row of ±inf weighs 0). `query_mask` is
    False at queries that do not count. Other arguments and errors are those of `row_statistics`.

    Source:
        The swapped pass: awslabs/keys_values, issue 77 and pull requests 78 and 83.
    """
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    launch = _Launch(query, key, masks, scale, causal, offset, softcap, window, keep, blocks)
    if lse.shape != query.shape[:3] or lse.dtype != torch.float32 or lse.device != query.device:
        raise ValueError(
            f"lse: expected float32 {tuple(query.shape[:3])} on {query.device}; "
            f"got {lse.dtype} {tuple(lse.shape)} on {lse.device}"
        )
    kernel = _source(query).column_kernel
    mass = query.new_empty(*query.shape[:2], key.shape[2], dtype=torch.float32)
    squared = torch.empty_like(mass, dtype=torch.float64) if square else None
    strides = (*lse.stride(), *_strides(key_mask, 2), *_strides(query_mask, 2))
    launch.run(kernel, (query, key, lse, key_mask, query_mask, mass, squared), strides, holds_queries=False)
    return mass, squared


def _is_interpreted() -> bool:
    """Return whether Triton's interpreter is on, by the values that Triton takes for yes."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "y", "yes", "t", "true", "on"}


def _source(query: Tensor) -> ModuleType:
    """Return the kernels' module, if they can run on the device of the query."""
    if importlib.util.find_spec("triton") is None:
        raise ImportError("the GPU kernels need Triton, which is not installed: pip install 'regard[gpu]'")
    if not (query.is_cuda or _is_interpreted()):
        raise ValueError(
            f"the GPU kernels take tensors on a GPU; got {query.device} (TRITON_INTERPRET=1 runs them on a CPU, slowly)"
        )
    return importlib.import_module("regard.attention.triton_source")


@dataclass(frozen=True)
class _Launch:
    """The inputs that both kernels take."""

    query: Tensor
    key: Tensor
    masks: dict[str, Tensor | None]
    scale: float
    causal: bool
    offset: int
    softcap: float | None
    window: int | None
    keep: Tensor | None
    blocks: Tiling | None

    def __post_init__(self) -> None:
        """Raise a ValueError if the inputs do not fit together."""
        query, key, softcap = self.query, self.key, self.softcap
        if query.dtype not in DTYPES or key.dtype != query.dtype or key.device != query.device:
            raise ValueError(
                f"query and key: expected one device and one type of {DTYPES}; "
                f"got {query.dtype} on {query.device} and {key.dtype} on {key.device}"
            )
        heads, groups = query.shape[1], key.shape[1]
        if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3] or groups == 0 or heads % groups:
            raise ValueError(
                "query and key: expected (batch, head, query, width) and (batch, group, key, width), heads a multiple "
                f"of groups; got {tuple(query.shape)} and {tuple(key.shape)}"
            )
        for name, mask in self.masks.items():
            shape = (key if name == "key_mask" else query).shape[::2]
            if mask is not None and (mask.dtype != torch.bool or mask.shape != shape or mask.device != query.device):
                raise ValueError(
                    f"{name}: expected bool {tuple(shape)} on {query.device}; "
                    f"got {mask.dtype} {tuple(mask.shape)} on {mask.device}"
                )
        if self.keep is not None and (self.keep.dtype != torch.bool or self.keep.device != query.device):
            raise ValueError(f"keep: expected bool on {query.device}; got {self.keep.dtype} on {self.keep.device}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: expected at least one key, or None for all; got {self.window}")
        if softcap is not None and softcap <= 0:
            raise ValueError(f"softcap: expected a positive cap, or None for none; got {softcap}")

    def run(
        self, kernel: Any, tensors: tuple[Tensor | None, ...], strides: tuple[int, ...], *, holds_queries: bool
    ) -> None:
        """Run a kernel whose programs hold a block of queries, or of keys; scores come out in bits."""
        (batch, heads, queries, head_dim), (_, groups, keys, _) = self.query.shape, self.key.shape
        tiling = self.blocks or choose_tiling(head_dim, self.query.dtype)
        scale, softcap = self.scale * math.log2(math.e), None
        if self.softcap is not None:
            scale, softcap = self.scale / self.softcap, self.softcap * math.log2(math.e)
        num_programs = batch * heads * math.ceil((queries if holds_queries else keys) / tiling.resident)
        if num_programs == 0:
            return
        pairs, first, stop = self._pairs(along=3 if holds_queries else 2)
        with torch.cuda.device_of(self.query):
            kernel[(num_programs,)](
                *(*tensors, pairs, first, stop),
                *(*self.query.stride(), *self.key.stride(), *strides, *_strides(pairs, 4), *_strides(first, 3)),
                *(heads, heads // groups, queries, keys, self.offset, scale, softcap, self.window),
                HEAD_DIM=head_dim,
                WIDTH=_padded_width(head_dim),
                CAUSAL=self.causal,
                BLOCK_Q=tiling.resident if holds_queries else tiling.streamed,
                BLOCK_K=tiling.streamed if holds_queries else tiling.resident,
                num_warps=tiling.warps,
                num_stages=tiling.stages,
            )

    def _pairs(self, along: int) -> tuple[Tensor, Tensor, Tensor] | tuple[None, None, None]:
        """Return the mask of pairs, and in each of its rows (of its columns) the first pair and that behind the last.

        Where there is none they are the length and 0. Nothing is read from the device.
        """
        queries, keys = self.query.shape[2], self.key.shape[2]
        if self.keep is None or 0 in (queries, keys):
            return None, None, None
        pairs = self.keep.expand(-1, -1, queries, keys).view(torch.uint8)
        length = pairs.shape[along]
        is_seen = pairs.amax(along) > 0
        first = torch.where(is_seen, pairs.argmax(along), length)
        stop = torch.where(is_seen, length - pairs.flip(along).argmax(along), 0)
        spans = torch.stack([first, stop]).int().expand(-1, *self.query.shape[:2], -1)
        return self.keep.expand(*self.query.shape[:2], queries, keys), spans[0], spans[1]


def _strides(tensor: Tensor | None, dims: int) -> tuple[int, ...]:
    """Return the strides of an optional tensor, zeros for None."""
    return tensor.stride() if tensor is not None else (0,) * dims


def _padded_width(head_dim: int) -> int:
    """Return the head width that the matrix product takes: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
