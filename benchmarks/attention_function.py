"""The attention function alone: output and statistics in one pass, against fused attention and the whole matrix.

12 heads of width 64, float32, laid out in memory as Transformers does it, causal, padded, and under the mask of a
window of 256 tokens. Contestants: PyTorch's `scaled_dot_product_attention` (sdpa, the reference); output, column mass,
its square, entropy and the first four keys' mass from the whole matrix (eager); the same in tiles (regard); the first
four keys alone (first).

    python -m benchmarks.attention_function [--quick] [--threads N] [--out FILE]     about 4 minutes on one core
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import Contestants, device, keep, parser, prepared, race, row
from regard.attention.call import AttentionCall
from regard.attention.operator import attend
from regard.attention.reduction import ReductionRequest, reduce_dense

HEADS, WIDTH, FIRST = 12, 64, 4
NAMES = frozenset({"column_mass", "column_square", "entropy", "first_mass"})
EVERYTHING = ReductionRequest(names=NAMES, num_first_keys=FIRST)
FIRST_ALONE = ReductionRequest(names=frozenset({"first_mass"}), num_first_keys=FIRST)
LARGEST_MATRIX = 2 * 2**30
CASES = [(batch, length) for length in (64, 128, 512, 2048) for batch in (1, 8)] + [(1, 4096), (1, 8192)]
QUICK = [(1, 64), (2, 128)]
WINDOW = 256


def call(batch: int, length: int, kind: str) -> AttentionCall:
    """Random queries, keys and values; padding up to half of a row."""
    generator = torch.Generator(device()).manual_seed(0)
    real = None
    with device():
        query, key, value = (
            torch.randn(batch, length, HEADS, WIDTH, generator=generator).transpose(1, 2) for _ in range(3)
        )
        if kind == "padded":
            lengths = torch.linspace(length, length // 2, batch) if batch > 1 else torch.tensor([0.75 * length])
            real = torch.arange(length) < lengths.long()[:, None]
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=WIDTH**-0.5,
        causal=kind == "causal",
        key_mask=real,
        query_mask=real,
        keep=band(length) if kind == "window" else None,
    )


def band(length: int) -> Tensor:
    """The mask of a window, as Transformers hands it over."""
    with device():
        distance = torch.arange(length)[:, None] - torch.arange(length)
    return ((distance >= 0) & (distance < WINDOW))[None, None]


def fused(of: AttentionCall) -> Tensor:
    """The output alone."""
    mask = of.keep if of.key_mask is None else of.key_mask[:, None, None, :]
    return F.scaled_dot_product_attention(of.query, of.key, of.value, attn_mask=mask, is_causal=of.causal)


def eager(of: AttentionCall) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and reductions from the whole matrix, made once and in place."""
    scores = (of.query @ of.key.mT).mul_(of.scale)
    if of.causal:
        length = scores.shape[-1]
        scores.masked_fill_(torch.ones(length, length, dtype=torch.bool, device=scores.device).triu_(1), -torch.inf)
    if of.key_mask is not None:
        scores.masked_fill_(~of.key_mask[:, None, None, :], -torch.inf)
    if of.keep is not None:
        scores.masked_fill_(~of.keep, -torch.inf)
    weights = scores.softmax(-1)
    del scores
    output = weights @ of.value
    found = {"entropy": torch.special.entr(weights).sum(-1), "first_mass": weights[..., :FIRST].clone()}
    if of.query_mask is not None:
        weights = weights.mul_(of.query_mask[:, None, :, None])
    found["column_mass"] = weights.sum(-2)
    found["column_square"] = weights.square_().sum(-2)
    return output, found


def contestants(of: AttentionCall) -> Contestants:
    """Who runs; the whole matrix only where two of it fit."""
    batch, length = of.query.shape[0], of.query.shape[2]
    found: dict[str, Any] = {
        "sdpa": lambda: fused(of),
        "regard": lambda: attend(of, EVERYTHING),
        "first": lambda: attend(of, FIRST_ALONE),
    }
    if batch * HEADS * length * length * 4 <= LARGEST_MATRIX:
        found["eager"] = lambda: eager(of)
    return found


def check(of: AttentionCall) -> None:
    """All contestants compute the same."""
    output, found = attend(of, EVERYTHING)
    expected_output, expected = eager(of)
    torch.testing.assert_close(output, expected_output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(output, fused(of), rtol=1e-4, atol=1e-5)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].to(tensor.dtype), tensor, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(attend(of, FIRST_ALONE)[1]["first_mass"], expected["first_mass"], rtol=1e-4, atol=1e-5)
    exact = reduce_dense(of, EVERYTHING)
    torch.testing.assert_close(found["column_mass"], exact["column_mass"], rtol=1e-4, atol=1e-5)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    given = prepared(parser(__doc__), arguments)
    rows = []
    for batch, length in QUICK if given.quick else CASES:
        for kind in ("causal", "padded", "window") if length > WINDOW else ("causal", "padded"):
            of = call(batch, length, kind)
            if length <= 512:
                check(of)
            figures = race(contestants(of), most=3 if given.quick else 15)
            keep(
                row({"kind": kind, "batch": batch, "length": length}, figures, "sdpa"),
                rows,
                "attention_function",
                given.out,
            )


if __name__ == "__main__":
    main()
