"""The loss of a decoder's head, forward and backward: Regard's, PyTorch's own, and the one with all logits at once.

`cross_entropy(h @ W.T)` holds tokens × vocabulary more than once (whole, the reference); PyTorch's
`linear_cross_entropy` in its chunked form (torch, where this release has it); Regard's (regard). 2048 tokens, in
float32 and under autocast to bfloat16. Memory is what PyTorch allocates at the most, beyond the start.

    python -m benchmarks.loss_layer [--quick] [--threads N] [--out FILE]     about 3 minutes on one core
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.timing import device, keep, parser, prepared, race, row, with_allocated, with_gradients
from regard.models.loss import linear_cross_entropy

CASES = [(2048, 2048, 128), (2048, 16384, 256), (2048, 50432, 768)]
"""Tokens, vocabulary, width."""
QUICK = [(256, 512, 32)]


def contestants(tokens: int, vocabulary: int, width: int, precision: str) -> dict[str, Callable[[], list[Tensor]]]:
    """Everybody: the loss, and its gradients by hidden states and weights."""
    generator = torch.Generator(device()).manual_seed(0)
    with device():
        hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
        weight = (torch.randn(vocabulary, width, generator=generator) * width**-0.5).requires_grad_()
        labels = torch.randint(vocabulary, (tokens,), generator=generator)

    def run(form: Callable[[], Tensor]) -> Callable[[], list[Tensor]]:
        def cast() -> Tensor:
            with torch.autocast(device().type, torch.bfloat16, enabled=precision == "bfloat16"):
                return form()

        return with_gradients(cast, (hidden, weight))

    found = {
        "whole": run(lambda: F.cross_entropy((hidden @ weight.T).float(), labels, reduction="sum")),
        "regard": run(lambda: linear_cross_entropy(hidden, weight, labels)),
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions()
        found["torch"] = run(lambda: F.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options))
    return found


def check(runs: dict[str, Callable[[], list[Tensor]]], precision: str) -> None:
    """All give the same loss and gradients, as far as their products are exact."""
    tolerance = 1e-4 if precision == "float32" else 2e-2
    expected = runs["whole"]()
    for name, run in runs.items():
        for one, other in zip(run(), expected, strict=True):
            assert (one - other).norm() <= tolerance * other.norm(), (name, precision)


def main(arguments: list[str] | None = None) -> None:
    """Run all cases and write the result."""
    given = prepared(parser(__doc__), arguments)
    rows: list[dict[str, Any]] = []
    for tokens, vocabulary, width in QUICK if given.quick else CASES:
        for precision in ("float32", "bfloat16"):
            runs = contestants(tokens, vocabulary, width, precision)
            check(runs, precision)
            figures = with_allocated(race(runs, most=3 if given.quick else 7), runs)
            case = {"tokens": tokens, "vocabulary": vocabulary, "width": width, "precision": precision}
            case |= {"logits_mib": tokens * vocabulary * 4 / 2**20}
            keep(row(case, figures, "whole"), rows, "loss_layer", given.out)


if __name__ == "__main__":
    main()
