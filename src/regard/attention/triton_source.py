"""The Triton source of the two attention kernels; `regard.attention.kernels` imports it when a kernel is first used.

A program holds a *resident* block (of queries in the row kernel, of keys in the column kernel) and streams the blocks
of the other side that it can see past it. One number a row or column is written, so memory is O(T).

Scores are in bits (times log2 e), because the hardware's exponential is 2^x. A hidden pair gets the finite score
`MASKED`, and a running maximum starts at the greater `NOTHING`: 2^(MASKED − NOTHING) is 0, and no NaN needs a guard.
"""
# No types in these signatures: the compiler makes of every parameter a pointer, a number or None, as it is passed.
# ruff: noqa: ANN001, ANN201, ANN202

from typing import no_type_check

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1e30)
MASKED = tl.constexpr(-2e30)


@triton.jit
@no_type_check
def _tanh(x):
    """tanh(x): by its series near 0, where the quotient's numerator would cancel."""
    size = tl.abs(x)
    small = tl.exp(-2.0 * size)
    far = (1.0 - small) / (1.0 + small)
    square = size * size
    near = size * (1.0 + square * (-0.3333333333 + square * (0.1333333333 + square * -0.0539682540)))
    tanh = tl.where(size < 0.2, near, far)
    return tl.where(x < 0.0, -tanh, tanh)


# The interpreter multiplies bfloat16 by its bits, so there tiles are widened first; that changes no product of two.
INTERPRETED = tl.constexpr(not isinstance(_tanh, triton.JITFunction))


@triton.jit
@no_type_check
def _tile(
    head, first, length, row_stride, width_stride, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """(BLOCK, WIDTH): rows `first` … of one head; 0 behind its last row and beyond its width."""
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    start = head + tl.cast(first, tl.int64) * row_stride
    present = (row < length - first) & (column < HEAD_DIM)
    tile = tl.load(start + row * row_stride + column * width_stride, mask=present, other=0.0)
    return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
@no_type_check
def _real(flags, index, length, stride):
    """Bool, shaped as `index`: within the length and, where flags were given, a real token."""
    present = index < length
    if flags is not None:
        present = present & (tl.load(flags + tl.cast(index, tl.int64) * stride, mask=present, other=0) != 0)
    return present


@triton.jit
@no_type_check
def _kept(keep, row, column, queries, keys, row_stride, column_stride):
    """Bool, of the shape that `row` and `column` broadcast to: pairs that may meet."""
    start = keep + tl.cast(row, tl.int64) * row_stride + tl.cast(column, tl.int64) * column_stride
    return tl.load(start, mask=(row < queries) & (column < keys), other=0) != 0


@triton.jit
@no_type_check
def _scores(resident, streamed, position, key, real, scale, softcap, window, CAUSAL: tl.constexpr):
    """(resident, streamed) scores in bits; `position` (of the queries), `key` and `real` broadcast to that shape."""
    score = tl.dot(resident, tl.trans(streamed), input_precision="ieee") * scale
    if softcap is not None:
        score = softcap * _tanh(score)
    seen = real
    if CAUSAL:
        seen = seen & (key <= position)
    if window is not None:
        seen = seen & (position - key < window)
    return tl.where(seen, score, MASKED)


@triton.jit
@no_type_check
def row_kernel(
    query, key, key_mask, sink, lse, entropy, distance, keep, first, stop,
    query_batch, query_head, query_row, query_width,
    key_batch, key_head, key_row, key_width,
    real_batch, real_row, sink_stride,
    keep_batch, keep_head, keep_row, keep_column, span_batch, span_head, span_row,
    heads, group_size, queries, keys, offset, scale, softcap, window,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a block of queries; it keeps, per query, four running numbers while the keys stream by.

    With m the highest score so far and e_j = 2^(s_j − m): total = Σ e_j, tilt = Σ e_j (s_j − m), reach = Σ e_j |i − j|.
    A rising m fades them all by 2^(old − new), and shifts tilt. At the end, with z = total (+ the sink's share),
    lse = m + log z and entropy = (total · log z − tilt) / z: no large terms cancel.
    """
    blocks = tl.cdiv(queries, BLOCK_Q)
    program = tl.program_id(0)
    # The last queries of a causal head see the most keys: they start first, so that no long program is left alone.
    first_query = (blocks - 1 - program % blocks) * BLOCK_Q
    batch_head = program // blocks
    batch = tl.cast(batch_head // heads, tl.int64)
    head = tl.cast(batch_head % heads, tl.int64)
    queries_of_head = query + batch * query_batch + head * query_head
    keys_of_head = key + batch * key_batch + (head // group_size) * key_head
    if key_mask is not None:
        key_mask = key_mask + batch * real_batch

    row = first_query + tl.arange(0, BLOCK_Q)
    position = offset + row
    start = 0
    end = keys
    if CAUSAL:
        end = tl.minimum(end, offset + tl.minimum(first_query + BLOCK_Q, queries))
    if window is not None:
        start = tl.maximum(offset + first_query - window + 1, 0)
    if keep is not None:
        keep = keep + batch * keep_batch + head * keep_head
        span = batch * span_batch + head * span_head + tl.cast(row, tl.int64) * span_row
        start = tl.maximum(start, tl.min(tl.load(first + span, mask=row < queries, other=keys), 0))
        end = tl.minimum(end, tl.max(tl.load(stop + span, mask=row < queries, other=0), 0))
    start = start // BLOCK_K * BLOCK_K

    resident = _tile(queries_of_head, first_query, queries, query_row, query_width, HEAD_DIM, WIDTH, BLOCK_Q)
    highest = tl.full([BLOCK_Q], NOTHING, tl.float32)
    if sink is not None:
        sink_score = tl.load(sink + head * sink_stride).to(tl.float32) * LOG2_E
        highest = tl.maximum(highest, sink_score)
    total = tl.zeros([BLOCK_Q], tl.float32)
    tilt = tl.zeros([BLOCK_Q], tl.float32)
    reach = tl.zeros([BLOCK_Q], tl.float32)
    for first_key in range(start, end, BLOCK_K):
        column = first_key + tl.arange(0, BLOCK_K)
        real = _real(key_mask, column, keys, real_row)[None, :]
        if keep is not None:
            real = real & _kept(keep, row[:, None], column[None, :], queries, keys, keep_row, keep_column)
        streamed = _tile(keys_of_head, first_key, keys, key_row, key_width, HEAD_DIM, WIDTH, BLOCK_K)
        score = _scores(resident, streamed, position[:, None], column[None, :], real, scale, softcap, window, CAUSAL)
        raised = tl.maximum(highest, tl.max(score, 1))
        shift = highest - raised
        fade = tl.exp2(shift)
        relative = score - raised[:, None]
        weight = tl.exp2(relative)
        tilt = fade * (tilt + total * shift) + tl.sum(weight * relative, 1)
        total = fade * total + tl.sum(weight, 1)
        if distance is not None:
            steps = tl.abs(position[:, None] - column[None, :]).to(tl.float32)
            reach = fade * reach + tl.sum(weight * steps, 1)
        highest = raised

    normaliser = total
    if sink is not None:
        normaliser += tl.exp2(sink_score - highest)
    sees = normaliser != 0.0  # true of NaN, which shall come out as it went in
    normaliser = tl.where(sees, normaliser, 1.0)
    bits = tl.log2(normaliser)
    result = tl.cast(batch_head, tl.int64) * queries + row
    stored = row < queries
    tl.store(lse + result, tl.where(sees, (highest + bits) * LN_2, float("inf")), mask=stored)
    tl.store(entropy + result, (total * bits - tilt) / normaliser * LN_2, mask=stored)
    if distance is not None:
        tl.store(distance + result, reach / normaliser, mask=stored)


@triton.jit
@no_type_check
def column_kernel(
    query, key, lse, key_mask, query_mask, mass, square, keep, first, stop,
    query_batch, query_head, query_row, query_width,
    key_batch, key_head, key_row, key_width,
    lse_batch, lse_head, lse_row,
    key_mask_batch, key_mask_row, query_mask_batch, query_mask_row,
    keep_batch, keep_head, keep_row, keep_column, span_batch, span_head, span_row,
    heads, group_size, queries, keys, offset, scale, softcap, window,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program a block of keys; every query's log-sum-exp is known, so a weight is 2^(s − lse), summed at once.

    Squares are summed around the running mean of the rows so far (Chan, Golub and LeVeque), which is added in float64.
    """
    blocks = tl.cdiv(keys, BLOCK_K)
    program = tl.program_id(0)
    first_key = program % blocks * BLOCK_K
    batch_head = program // blocks
    batch = tl.cast(batch_head // heads, tl.int64)
    head = tl.cast(batch_head % heads, tl.int64)
    queries_of_head = query + batch * query_batch + head * query_head
    keys_of_head = key + batch * key_batch + (head // group_size) * key_head
    lse_of_head = lse + batch * lse_batch + head * lse_head
    if key_mask is not None:
        key_mask = key_mask + batch * key_mask_batch
    if query_mask is not None:
        query_mask = query_mask + batch * query_mask_batch

    column = first_key + tl.arange(0, BLOCK_K)
    start = 0
    end = queries
    if CAUSAL:
        start = tl.maximum(first_key - offset, 0)
    if window is not None:
        end = tl.minimum(end, first_key + BLOCK_K - 1 + window - offset)
    if keep is not None:
        keep = keep + batch * keep_batch + head * keep_head
        span = batch * span_batch + head * span_head + tl.cast(column, tl.int64) * span_row
        start = tl.maximum(start, tl.min(tl.load(first + span, mask=column < keys, other=queries), 0))
        end = tl.minimum(end, tl.max(tl.load(stop + span, mask=column < keys, other=0), 0))
    start = start // BLOCK_Q * BLOCK_Q

    resident = _tile(keys_of_head, first_key, keys, key_row, key_width, HEAD_DIM, WIDTH, BLOCK_K)
    real = _real(key_mask, column, keys, key_mask_row)
    column_mass = tl.zeros([BLOCK_K], tl.float32)
    mean = tl.zeros([BLOCK_K], tl.float32)
    scatter = tl.zeros([BLOCK_K], tl.float32)
    rows = 0.0
    for first_query in range(start, end, BLOCK_Q):
        row = first_query + tl.arange(0, BLOCK_Q)
        counted = _real(query_mask, row, queries, query_mask_row)
        row_lse = tl.load(lse_of_head + tl.cast(row, tl.int64) * lse_row, mask=counted, other=float("inf"))
        # A row that sees nothing weighs 0, whichever infinity marks it.
        row_lse = tl.where(row_lse == float("-inf"), float("inf"), row_lse) * LOG2_E
        streamed = _tile(queries_of_head, first_query, queries, query_row, query_width, HEAD_DIM, WIDTH, BLOCK_Q)
        seen = real[:, None]
        if keep is not None:
            seen = seen & _kept(keep, row[None, :], column[:, None], queries, keys, keep_row, keep_column)
        position = (offset + row)[None, :]
        score = _scores(resident, streamed, position, column[:, None], seen, scale, softcap, window, CAUSAL)
        weight = tl.exp2(score - row_lse[None, :])
        block_mass = tl.sum(weight, 1)
        column_mass += block_mass
        if square is not None:
            block_rows = tl.sum(counted.to(tl.float32), 0)
            block_mean = block_mass / tl.maximum(block_rows, 1.0)
            deviation = tl.where(counted[None, :], weight - block_mean[:, None], 0.0)
            share = block_rows / tl.maximum(rows + block_rows, 1.0)
            shift = block_mean - mean
            scatter += tl.sum(deviation * deviation, 1) + shift * shift * rows * share
            mean += shift * share
            rows += block_rows

    result = tl.cast(batch_head, tl.int64) * keys + column
    stored = column < keys
    tl.store(mass + result, column_mass, mask=stored)
    if square is not None:
        exact = column_mass.to(tl.float64)
        tl.store(square + result, scatter.to(tl.float64) + exact * exact / tl.maximum(rows, 1.0), mask=stored)
