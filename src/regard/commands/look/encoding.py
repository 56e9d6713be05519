"""Numbers as text in a page, and how much of a text's matrices fits it."""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.attention.call import AttentionCall
from regard.errors import UserError
from regard.hooks.matrices import strongest_keys, tile_means, weight_blocks
from regard.runs.integrity import tensor_bytes

FLOOR = 1e-5
"""Weights below it are 0 in one byte."""
STEPS = 254
LOG_ERROR = math.expm1(-math.log(FLOOR) / STEPS / 2)
"""Largest relative error of a weight in one byte: 2.3 %."""
FLOAT_ERROR = 2.0**-8
"""Largest relative error of a number in two bytes (bfloat16): 0.4 %."""
TILES, TOP = 24, 8
"""Tiles on each side of a matrix, and strongest keys of each of its rows, where the whole does not fit."""
BASE64 = 4 / 3
FIXED = 150_000
"""Bytes of a page without numbers and tokens."""


def encode_log(weights: Tensor) -> dict[str, str]:
    """Return weights in [0, 1] as one byte each: 255 for 1, in equal steps of the logarithm down to 1 for `FLOOR`."""
    steps = 255 + weights.double().clamp(min=FLOOR, max=1).log() * (STEPS / -math.log(FLOOR))
    return _encode("log", steps.round().masked_fill(weights < FLOOR, 0).to(torch.uint8))


def encode_float(values: Tensor) -> dict[str, str]:
    """Return numbers as two bytes each."""
    return _encode("float", values.to(torch.bfloat16).view(torch.int16))


def encode_index(indices: Tensor) -> dict[str, str]:
    """Return whole numbers below 65,536."""
    return _encode("index", indices.to(torch.int32).to(torch.uint16))


def _encode(kind: str, values: Tensor) -> dict[str, str]:
    return {"type": kind, "data": base64.b64encode(tensor_bytes(values)).decode()}  # little-endian, as is all of today


@dataclass(frozen=True)
class Shape:
    """Size of the matrices of a layer."""

    site: str
    layer: int
    heads: int
    queries: int
    keys: int


@dataclass(frozen=True)
class Detail:
    """What a page keeps: all weights, or tiles of all matrices and the strongest keys of some heads' rows."""

    whole: bool
    heads: Mapping[tuple[str, int], Sequence[int]]


def choose_detail(
    shapes: Sequence[Shape],
    num_numbers: int,
    texts: int,
    megabytes: float,
    asked: Sequence[str],
    quiet: Mapping[Any, Sequence[int]],
) -> Detail:
    """Choose what fits `megabytes`, of which `num_numbers` in two bytes, α and `texts` bytes are always there.

    Without all weights, the rows of the heads `asked` for are kept, then of the first head of `quiet` of each layer,
    layers evenly apart, then of the second, as long as there is room.

    Raises:
        UserError: There is not enough room, or no such head.
    """
    by_layer = {(shape.site, shape.layer): shape for shape in shapes}
    wanted = _find_heads(by_layer, asked)
    entries = sum(shape.heads * shape.keys for shape in shapes)
    room = (megabytes * 1e6 - FIXED - texts) / BASE64 - 2 * num_numbers
    if 2 * entries + sum(shape.heads * shape.queries * shape.keys for shape in shapes) <= room:
        return Detail(True, {})
    tiles = sum(shape.heads * min(shape.queries, TILES) * min(shape.keys, TILES) for shape in shapes)
    room -= entries + tiles
    needed = sum(_row_bytes(by_layer[key]) for key, _ in wanted)
    if needed > room:
        least = math.ceil(10 * (megabytes + (needed - room) * BASE64 / 1e6)) / 10
        raise UserError(
            f"megabytes: the page would weigh {least} MB a look, expected at most {megabytes:g}; pass a larger "
            "--megabytes, a smaller --length or fewer --heads"
        )
    ordered = [by_layer[key] for key in spread(list(by_layer))]
    others = [((s.site, s.layer), quiet[s.site, s.layer][n]) for n in range(2) for s in ordered if n < s.heads]
    kept: dict[tuple[str, int], list[int]] = {}
    for number, (key, head) in enumerate([*wanted, *(other for other in others if other not in wanted)]):
        room -= _row_bytes(by_layer[key])
        if room < 0 and number >= len(wanted):
            break
        kept.setdefault(key, []).append(head)
    return Detail(False, kept)


def _find_heads(by_layer: Mapping[tuple[str, int], Shape], asked: Sequence[str]) -> list[tuple[tuple[str, int], int]]:
    """Return the site and layer, and the head, of each LAYER.HEAD in every site that has it. UserError if none has."""
    found, missing = [], []
    for name in asked:
        layer, head = map(int, name.split("."))
        of_name = [(key, head) for key, shape in by_layer.items() if key[1] == layer and head < shape.heads]
        found += of_name
        missing += [] if of_name else [f"{layer}.{head}"]
    if missing:
        layers = max(shape.layer for shape in by_layer.values())
        heads = max(shape.heads for shape in by_layer.values()) - 1
        raise UserError(
            f"heads: expected LAYER.HEAD of this model, layers 0 to {layers} and heads 0 to {heads}; it has no "
            f"{', '.join(missing)}"
        )
    return found


def _row_bytes(shape: Shape) -> int:
    return shape.queries * min(TOP, shape.keys) * 3


def spread(values: Sequence[Any]) -> list[Any]:
    """Return values in an order of which each beginning is about evenly apart: the middle, the quarters and so on."""
    pending, ordered = [(0, len(values))], []
    while pending:
        first, last = pending.pop(0)
        if first < last:
            middle = (first + last) // 2
            ordered.append(values[middle])
            pending += [(first, middle), (middle + 1, last)]
    return ordered


def encode_matrices(shape: Shape, call: AttentionCall, tiles: Tensor | None, detail: Detail) -> dict[str, Any]:
    """Return the matrices of a layer, which its call has, in the detail that fits; `tiles` are computed if None.

    An entry of a tile is the attention of its queries, on average, to all of its keys together.
    """
    heads, queries, keys = shape.heads, shape.queries, shape.keys
    if detail.whole:
        whole = torch.zeros(heads, queries, keys)
        for rows, columns, weights in weight_blocks(call):
            whole[:, rows, columns] = weights.float().cpu()
        return {"weights": encode_log(whole)}
    means = (tile_means(call, TILES) if tiles is None else tiles).float().clamp(max=1).cpu()
    tall, wide = means.shape[1:]
    strongest, chosen = dict[int, Any](), list(detail.heads.get((shape.site, shape.layer), ()))
    if chosen:
        index, weight = (part.cpu() for part in strongest_keys(call, chosen, min(TOP, keys)))
        for number, head in enumerate(chosen):
            parts = encode_index(index[number]), encode_log(weight[number].float())
            strongest[head] = dict(zip(("index", "weight"), parts, strict=True))
    return {"tiles": {"tall": tall, "wide": wide, **encode_log(means)}, "rows": strongest}
