"""Whether a row's few blocks are better gathered or masked out of all, and what the pool chooses.

A layer with `top_k` of many blocks, for eight rows of some tokens: with the weights of the other blocks set to 0, with
the blocks of each row gathered, and as `Mixture.layer_weights` decides by `regard.adapters.mixture.GATHERED`.

    python -m benchmarks.gathering [--quick] [--threads N] [--out FILE]     about 4 minutes on one core
"""

from itertools import product
from typing import Any

import torch
from torch import nn

from benchmarks.timing import device, parser, prepared, race, row, show, write
from regard.adapters.lora import MixedLayer
from regard.adapters.mixture import AdapterWeights, Mixture, _layer_weights

GROUPS, ALPHA = 8, 8.0
CASES = tuple(product((384, 1024), (4, 8), (16, 64, 128), (1, 8), (1, 8, 32, 128)))
QUICK = ((32, 2, 6, 2, 3),)


class Forced(Mixture):
    """A mixture that is told whether it gathers."""

    def __init__(self, weights: torch.Tensor, top_k: int, *, gathers: bool) -> None:
        super().__init__(weights, top_k)
        self.gathers = gathers
        self.found: AdapterWeights | None = None

    def layer_weights(
        self, rows: int, tokens: int, rank: int, scale: float, trained: tuple[int, ...], **_: Any
    ) -> AdapterWeights:
        """The shares, made once."""
        if self.found is None:
            assert self.weights is not None
            self.found = _layer_weights(self.weights, rank, scale, trained, self.top_k, self.gathers, None)
        return self.found


def main(arguments: list[str] | None = None) -> None:
    """Measure, print, write; and say how often the choice is the quicker."""
    given = prepared(parser(__doc__), arguments)
    rows = []
    for width, rank, blocks, top_k, tokens in QUICK if given.quick else CASES:
        torch.manual_seed(0)
        base = nn.Linear(width, width, device=device())
        layer = MixedLayer(base, Mixture(top_k=top_k), rank=rank, alpha=ALPHA).eval()
        layer.adapters.reserve(blocks)
        layer.adapters.set_trainable()
        with device():
            states, weights = torch.randn(GROUPS, tokens, width), torch.rand(GROUPS, blocks).softmax(-1)
        ways = {
            "masked": Forced(weights, top_k, gathers=False),
            "gathered": Forced(weights, top_k, gathers=True),
            "chosen": Mixture(weights, top_k),
        }

        def run(way: Mixture, layer: MixedLayer = layer, states: torch.Tensor = states) -> torch.Tensor:
            return layer.adapters(states, layer.base_layer(states), way)

        torch.testing.assert_close(run(ways["masked"]), run(ways["gathered"]))
        figures = race({name: (lambda way=way, run=run: run(way)) for name, way in ways.items()}, budget=2.0)
        case = {"width": width, "rank": rank, "blocks": blocks, "top_k": top_k, "tokens": tokens}
        rows.append(row(case, figures, "masked"))
        show(rows[-1])
        if given.out or not given.quick:
            write("gathering", rows, given.out)
    losses = [one["chosen"] / min(one["masked"], one["gathered"]) for one in map(_ratios, rows)]
    print(f"chosen against the better of both: median ×{sorted(losses)[len(losses) // 2]:.2f}, most ×{max(losses):.2f}")


def _ratios(line: dict[str, Any]) -> dict[str, float]:
    return {name: one["time_ratio"] for name, one in line["figures"].items()}


if __name__ == "__main__":
    main()
