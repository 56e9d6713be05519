"""A model with constant heads against the same model under SDPA, forward pass end to end.

MiniLM's shape (6 layers, width 384) and two layers of BERT-base's (width 768; a layer is a layer, and twelve would take
an hour), 12 heads, random weights, float32, batches without padding, and two cases with. Contestants: the model under
SDPA (sdpa, the reference); the same with all heads constant (regard), with a sixteenth, an eighth and half of its heads
dynamic, these drawn at random over all layers, so that layers are mixed (sixteenth, eighth, half); and all heads
constant the plain way, C times the values of each sample behind whole projections (plain). Each case says what the
matrix products alone would allow with all heads constant (`floor`), as a share of SDPA's FLOPs. Before the clock runs,
regard is checked to give what plain gives.

    python -m benchmarks.constant_attention [--quick] [--allocated-only] [--threads N] [--out FILE]

About 18 minutes on one core.
"""

import copy
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, BertConfig, BertModel
from transformers.masking_utils import sdpa_mask

import regard
from benchmarks.timing import RESULTS, allocated, device, parser, prepared, race, row, show, write
from regard.constants import Constants, Origin
from regard.hooks import find_attention_layers, model_fingerprint

SHAPES = {
    "MiniLM": {"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536},
    "BERT-base": {"num_hidden_layers": 2, "hidden_size": 768, "intermediate_size": 3072},
}
FRACTIONS = {"regard": 0.0, "sixteenth": 1 / 16, "eighth": 1 / 8, "half": 1 / 2}
LENGTHS, BATCHES = (64, 128, 256, 512), (8, 32)
CASES = [(shape, batch, length, False) for shape in SHAPES for batch in BATCHES for length in LENGTHS]
PADDED = [(shape, 8, length, True) for shape in SHAPES for length in (128, 512)]


def constants_for(model: BertModel, length: int) -> Constants:
    """Random averages in the shape of a model."""
    here = find_attention_layers(model)
    generator = torch.Generator().manual_seed(0)
    matrices = {}
    for place in here:
        drawn = torch.randn(place.heads, length, length, generator=generator)
        matrices[place.site, place.layer] = drawn.softmax(-1)
    return Constants(matrices=matrices, origin=Origin(source="random", model=model_fingerprint(model, here)))


def floor(config: Any, length: int) -> float:
    """The model's FLOPs under SDPA over those with all heads constant, matrix products alone, per token."""
    d, f = config.hidden_size, config.intermediate_size
    shared = 2 * (2 * d * d + 2 * d * f) + 2 * length * d
    return 1 + (2 * 2 * d * d + 2 * length * d) / shared


def plain(model: BertModel, constants: Constants) -> BertModel:
    """The model with all heads constant and nothing saved: whole projections, a product for each sample."""
    layers = find_attention_layers(model)
    matrices = {layer.module: constants.matrices[layer.site, layer.layer].to(model.device) for layer in layers}
    own = copy.deepcopy(model)
    of = dict(zip(own.modules(), model.modules(), strict=True))

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **_: Any
    ) -> tuple[Tensor, None]:
        weights = matrices[of[module]]
        if mask is not None:
            weights = weights * mask
        weights = weights / weights.sum(-1, keepdim=True)
        return (weights @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("plain_constants", attention)
    AttentionMaskInterface.register("plain_constants", sdpa_mask)
    own.set_attn_implementation("plain_constants")
    return own


def check(found: Tensor, expected: Tensor, mask: Tensor) -> None:
    """Nothing, or an AssertionError: two ways to compute the same do not agree on the real tokens."""
    real = mask.bool()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-3, atol=1e-4)


Runs = dict[str, Callable[[], Any]]


def contestants_of(shape: str, batch: int, length: int, padded: bool) -> tuple[dict[str, Any], Runs]:
    """The case, and its contestants on one batch, checked to agree where they should."""
    torch.manual_seed(0)
    config = BertConfig(**SHAPES[shape], num_attention_heads=12, max_position_embeddings=512)  # type: ignore[arg-type]
    model = BertModel(config, add_pooling_layer=False).to(device()).eval()
    constants = constants_for(model, length)
    with device():
        ids = torch.randint(100, 1000, (batch, length))
        lengths = torch.linspace(length, length // 2, batch).long() if padded else torch.full((batch,), length)
        mask = (torch.arange(length) < lengths[:, None]).long()
    order = random.Random(0).sample(constants.heads, len(constants.heads))
    models: dict[str, Any] = {"sdpa": model, "plain": plain(model, constants)}
    for name, dynamic in FRACTIONS.items():
        models[name] = regard.replaced(model, constants, order[round(dynamic * len(order)) :])
    inputs = {"input_ids": ids, "attention_mask": mask}
    check(*(models[name](**inputs)[0] for name in ("regard", "plain")), mask)
    case = {"shape": shape, "batch": batch, "length": length, "padded": padded}
    case["floor"] = round(1 / floor(config, length), 3)
    return case, {name: partial(model, **inputs) for name, model in models.items()}


def with_allocated(line: dict[str, Any], runs: Runs) -> dict[str, Any]:
    """The line, and for each contestant the MiB that PyTorch allocates at the most."""
    for name, run in runs.items():
        line["figures"][name]["allocated"] = allocated(run)
    return line


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = parser(__doc__)
    options.add_argument(
        "--allocated-only", action="store_true", help="measure memory again, and keep the times there are"
    )
    given = prepared(options, arguments)
    cases = [("MiniLM", 2, 32, True)] if given.quick else CASES + PADDED
    known = json.loads((RESULTS / "constant_attention.json").read_text())["rows"] if given.allocated_only else []
    rows: list[dict[str, Any]] = []
    for shape, batch, length, padded in cases:
        case, runs = contestants_of(shape, batch, length, padded)
        if known:
            line = next(one for one in known if one["case"] == case)
        else:
            figures = race(runs, least=3 if given.quick or batch * length > 8192 else 5, budget=20.0)
            line = row(case, figures, "sdpa")
            show(line)
        rows.append(with_allocated(line, runs))
        if not given.quick and not known:
            write("constant_attention", rows, given.out)
    if known or (given.quick and given.out):
        write("constant_attention", rows, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
