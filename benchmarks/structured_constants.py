"""Attention with cheaper forms of constant matrices against SDPA and against whole matrices: block, and encoder layer.

BERT-base's width (768, 12 heads), random weights, float32, no padding. The block is the projections that a form needs
and the mixing of tokens; the layer adds the feed-forward part and both norms. Contestants, all heads constant:

* sdpa: the block as it is (the reference);
* dense: values, C·V as the library computes it, output projection;
* low-rank r: U·(W·V) in its place;
* joined r: the same output, but W before the value projection and U behind the output projection, so that both work on
  r rows a head in the place of all tokens;
* columns+band s: s columns gathered, and the band in blocks of rows;
* top-k k: one sparse matrix (CSR) for all heads;
* toeplitz fft: each offset's weight by convolution; toeplitz s: its band of 2s − 1 offsets in blocks of rows;
* none: values and output projection alone, what a form cannot fall below that leaves both as they are.

    python -m benchmarks.structured_constants [--quick] [--threads N] [--out FILE]     about 6 minutes on one core
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks.timing import device, parser, prepared, race, row, show, write
from regard.attention.call import AttentionCall, ConstantHeadsInput
from regard.attention.constant import constant_output
from regard.constants.structure import columns_and_band, low_rank, toeplitz, top_k

WIDTH, HEADS, INNER = 768, 12, 3072
CASES = [(batch, length) for batch in (8, 32) for length in (128, 256, 512)]
LAYER = ("sdpa", "dense", "low-rank 4", "joined 4", "joined 16", "columns+band 4", "none")
"""Contestants of the whole layer."""
ROWS = 32
"""Rows of a block of the band."""
Mix = Callable[[Tensor], Tensor]


@dataclass
class Projections:
    """The four projections of attention."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    output: nn.Linear

    @classmethod
    def random(cls) -> Projections:
        """Fresh ones of BERT-base's width."""
        return cls(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def heads(x: Tensor) -> Tensor:
    """(batch, token, width) as (batch, head, token, width of a head)."""
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def beside(value: Tensor) -> Tensor:
    """Values of all samples side by side: (head, token, batch × width of a head)."""
    batch, _, length, width = value.shape
    return value.permute(1, 2, 0, 3).reshape(HEADS, length, batch * width)


def joined(mixed: Tensor, batch: int) -> Tensor:
    """The way back from `beside`: (batch, token, width)."""
    length = mixed.shape[1]
    return mixed.view(HEADS, length, batch, -1).permute(2, 1, 0, 3).reshape(batch, length, WIDTH)


def sdpa(own: Projections) -> Mix:
    """Attention."""

    def run(x: Tensor) -> Tensor:
        found = nn.functional.scaled_dot_product_attention(heads(own.query(x)), heads(own.key(x)), heads(own.value(x)))
        return own.output(found.transpose(1, 2).reshape(x.shape))

    return run


def dense(own: Projections, matrices: Tensor) -> Mix:
    """C·V as the library computes it."""
    constant = ConstantHeadsInput(matrices=matrices, heads=tuple(range(HEADS)), normalised=True)

    def run(x: Tensor) -> Tensor:
        value = heads(own.value(x))
        call = AttentionCall(query=value, key=value, value=value, scale=1.0, constant=constant)
        return own.output(constant_output(call).view(x.shape))

    return run


def side_by_side(own: Projections, mix: Mix) -> Mix:
    """Values, a product for the whole batch, output projection."""

    def run(x: Tensor) -> Tensor:
        return own.output(joined(mix(beside(heads(own.value(x)))), len(x)))

    return run


def factors(matrices: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (head, query, rank) and W (head, rank, key)."""
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    return (left * values[:, None])[..., :rank].contiguous(), right[:, :rank].contiguous()


def of_low_rank(own: Projections, matrices: Tensor, rank: int) -> Mix:
    """U·(W·V)."""
    left, right = factors(matrices, rank)
    return side_by_side(own, lambda value: torch.bmm(left, torch.bmm(right, value)))


def of_low_rank_joined(own: Projections, matrices: Tensor, rank: int) -> Mix:
    """U·((W·X)·W_v·W_o): both projections on the few rows of W·X."""
    left, right = factors(matrices, rank)
    length = matrices.shape[1]
    outer = left.permute(1, 0, 2).reshape(length, HEADS * rank).contiguous()
    inner = right.reshape(HEADS * rank, length)
    value = own.value.weight.view(HEADS, -1, WIDTH).mT.contiguous()
    bias = right.sum(-1)[..., None] * own.value.bias.view(HEADS, 1, -1)
    output = own.output.weight.view(WIDTH, HEADS, -1).permute(1, 2, 0).contiguous()

    def run(x: Tensor) -> Tensor:
        batch = len(x)
        few = torch.matmul(inner, x).view(batch, HEADS, rank, WIDTH).transpose(0, 1)
        values = torch.bmm(few.reshape(HEADS, batch * rank, WIDTH), value).view(HEADS, batch, rank, -1)
        values = values + bias[:, None]
        out = torch.bmm(values.view(HEADS, batch * rank, -1), output).view(HEADS, batch, rank, WIDTH)
        back = out.transpose(0, 1).reshape(batch, HEADS * rank, WIDTH)
        return torch.matmul(outer, back).add_(own.output.bias)

    return run


def banded(matrices: Tensor, size: int) -> tuple[list[tuple[slice, slice]], list[Tensor]]:
    """The band in blocks: which rows and keys, and the weights of each."""
    length = matrices.shape[1]
    starts = range(0, length, ROWS)
    places = [(slice(s, s + ROWS), slice(max(s - size + 1, 0), min(s + ROWS + size - 1, length))) for s in starts]
    return places, [matrices[:, rows, keys].contiguous() for rows, keys in places]


def of_columns_and_band(own: Projections, matrices: Tensor, size: int) -> Mix:
    """A few gathered columns, and the band in blocks."""
    steps = torch.arange(matrices.shape[1])
    band = (steps[:, None] - steps).abs() < size
    outside = matrices * ~band
    columns = outside.square().sum(1).topk(size).indices
    weights = outside.gather(2, columns[:, None].expand(-1, len(steps), -1)).contiguous()
    places, blocks = banded(matrices * band, size)
    head = torch.arange(HEADS)[:, None]

    def mix(value: Tensor) -> Tensor:
        found = torch.bmm(weights, value[head, columns])
        for (rows, keys), block in zip(places, blocks, strict=True):
            found[:, rows].baddbmm_(block, value[:, keys])
        return found

    return side_by_side(own, mix)


def of_top_k(own: Projections, matrices: Tensor, size: int) -> Mix:
    """One sparse product for all heads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch calls CSR a beta feature
        sparse = torch.block_diag(*top_k(matrices, size)).to_sparse_csr()
    return side_by_side(own, lambda value: (sparse @ value.flatten(0, 1)).view_as(value))


def of_toeplitz(own: Projections, matrices: Tensor, size: int) -> Mix:
    """Offsets below `size` in blocks; the weights of the first and the last key are one a head; rows sum to one."""
    whole = toeplitz(matrices, size)
    share = whole.sum(-1, keepdim=True).reciprocal()
    ends = whole[:, :1, [0, -1]].contiguous()
    whole[:, :, [0, -1]] = 0
    places, blocks = banded(whole, size)

    def mix(value: Tensor) -> Tensor:
        found = torch.bmm(ends, value[:, [0, -1]]).expand_as(value).contiguous()
        for (rows, keys), block in zip(places, blocks, strict=True):
            found[:, rows].baddbmm_(block, value[:, keys])
        return found.mul_(share)

    return side_by_side(own, mix)


def of_toeplitz_fft(own: Projections, matrices: Tensor) -> Mix:
    """All offsets by convolution, else the same."""
    length = matrices.shape[1]
    whole = toeplitz(matrices, length)
    share = whole.sum(-1, keepdim=True).reciprocal()
    ends = whole[:, :1, [0, -1]].contiguous()
    kernel = torch.zeros(HEADS, 2 * length)
    for offset in range(2 - length, length - 1):
        key = max(1, -offset)
        kernel[:, offset] = whole[:, key + offset, key]
    frequencies = torch.fft.rfft(kernel)[..., None]

    def mix(value: Tensor) -> Tensor:
        inner = value.clone()
        inner[:, [0, -1]] = 0
        found = torch.fft.irfft(frequencies * torch.fft.rfft(inner, 2 * length, dim=1), 2 * length, dim=1)[:, :length]
        return found.add(torch.bmm(ends, value[:, [0, -1]])).mul_(share)

    return side_by_side(own, mix)


def contestants(own: Projections, matrices: Tensor) -> dict[str, Mix]:
    """The blocks by name."""
    found = {"sdpa": sdpa(own), "dense": dense(own, matrices)}
    for rank in (4, 16):
        found[f"low-rank {rank}"] = of_low_rank(own, matrices, rank)
        found[f"joined {rank}"] = of_low_rank_joined(own, matrices, rank)
    for size in (4, 8):
        found[f"columns+band {size}"] = of_columns_and_band(own, matrices, size)
    found["top-k 4"] = of_top_k(own, matrices, 4)
    found["toeplitz fft"] = of_toeplitz_fft(own, matrices)
    found["toeplitz 16"] = of_toeplitz(own, matrices, 16)
    found["none"] = lambda x: own.output(own.value(x))
    return found


def check(own: Projections, matrices: Tensor, found: dict[str, Mix]) -> None:
    """Each form gives what the matrix it stands for gives."""
    length = matrices.shape[1]
    whole = {f"low-rank {rank}": low_rank(matrices, rank) for rank in (4, 16)}
    whole |= {f"joined {rank}": low_rank(matrices, rank) for rank in (4, 16)}
    whole |= {f"columns+band {size}": columns_and_band(matrices, size) for size in (4, 8)}
    whole["top-k 4"] = top_k(matrices, 4)
    for name, size in (("toeplitz fft", length), ("toeplitz 16", 16)):
        diagonals = toeplitz(matrices, size)
        whole[name] = diagonals / diagonals.sum(-1, keepdim=True)
    x = torch.randn(2, length, WIDTH)
    for name, matrix in whole.items():
        torch.testing.assert_close(found[name](x), dense(own, matrix)(x), rtol=1e-3, atol=1e-4)


def layer(block: Mix) -> Mix:
    """A BERT layer around a block."""
    into, out = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
    first, second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def run(x: Tensor) -> Tensor:
        x = first(x + block(x))
        return second(x + out(nn.functional.gelu(into(x))))

    return run


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    given = prepared(parser(__doc__), arguments)
    rows = []
    budget = 0.0 if given.quick else 8.0
    for batch, length in [(2, 64)] if given.quick else CASES:
        torch.manual_seed(0)
        with device():
            own = Projections.random()
            matrices = (3 * torch.randn(HEADS, length, length)).softmax(-1)
            x = torch.randn(batch, length, WIDTH)
            blocks = contestants(own, matrices)
            check(own, matrices, blocks)
            layers = {name: layer(blocks[name]) for name in LAYER}
        for part, mixes in (("block", blocks), ("layer", layers)):
            figures = race({name: (lambda mix=mix, x=x: mix(x)) for name, mix in mixes.items()}, budget=budget)
            rows.append(row({"part": part, "batch": batch, "length": length}, figures, "sdpa"))
            show(rows[-1])
        if given.out or not given.quick:
            write("structured_constants", rows, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
