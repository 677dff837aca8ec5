"""The filtered backward pass: only tiles of the softmax in which something reaches eps (see ``filtering``).

The map of tiles that may be live is known when the pass begins, on the device only. It is worked off in *rounds*. A
round takes the next *columns*, as many as its workspace has room for; a column is one or two tiles wide, what one
program of the first kernel computes. How many columns that is depends on the map, but never more than ``most_columns``;
and how many rounds there can be depends on shapes alone. So every launch is known to the host, and what is left over
when the map is sparse are programs that find nothing to do. In a round:

1. rows of C that belong to the round's columns are copied together, if they are not neighbours as it is;
2. *blocks* (tiles of tokens by columns) are recomputed, exactly as the forward did, and written as G to the workspace
   in the inputs' dtype, one behind the other. Each notes which of its tiles really are live;
3. the live tiles of every tile of tokens, and of every column, are listed;
4. ``grad E += G C`` over the list of each tile of tokens;
5. ``grad C = G^T E`` over the list of each column: its whole sum over tokens in one fp32 accumulation, rounded once.

Rows of grad C in no live column are written at the end. Label smoothing, which without a softcap is a product of two
vectors, is added where results are written.

Numerics are those of ``exact``. There are no atomics: lists are in ascending order and every result is one program's
sum over one list, so it is the same bits every time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import forward
from .exact import fp16_factors, nothing_to_reduce, select_tokens
from .filtering import thresholds, undefined
from .interface import (
    FilterPlan,
    GradientRequest,
    InputGradReady,
    LocalProblem,
    LogitGradient,
    Partials,
    Peaks,
    TileMap,
)
from .logits import (
    LOG2E,
    LogitOperands,
    chain_to_products,
    finish_logits,
    grouped_tile,
    row_products,
    softmax_tile,
    subtract_targets,
)
from .sampled import weighted_sum
from .tiles import (
    INTERPRETED,
    TensorDescriptor,
    Tile,
    can_use_tma,
    cdiv,
    filter_block,
    filter_product,
    next_power_of_2,
    product_precision,
)
from .workspace import FP32_BYTES, SLAB_BYTES, default_slab_bytes

LARGE_BYTES = 208 * 2**20
"""What a large problem may take, the accumulator of grad E included; no more than exact at the largest."""
SPARSEST = 4
SPARSEST_IN_ORDER = 2
"""A round has room for so many times the columns that it would have if all their blocks were live. More columns make
fewer rounds of a sparse map; in an order of its own, each takes room for a copy of its rows of C."""
TOKEN_TILES_TOGETHER = 16
"""Blocks of so many tiles of tokens are computed at a time, column by column, so that they share rows of C and E."""
COPY_ROWS, COPY_COLS = 16, 256
REST_ROWS, REST_COLS = 16, 256
LIST_SIZE = 1024


@triton.jit(do_not_specialize=["number", "num_rows"])
def _copy_kernel(  # type: ignore[no-untyped-def]
    weight,
    order,
    columns,
    column_edges,
    out,
    number,
    num_rows,
    hidden,
    weight_stride_v,
    weight_stride_d,
    COLS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows of C of a round's columns, one behind the other; 0 beyond the last row."""
    PIECES: tl.constexpr = COLS // SIZE
    place = tl.program_id(0) // PIECES
    first = tl.load(column_edges + number)
    if first + place >= tl.load(column_edges + number + 1):
        return
    column = tl.load(columns + first + place)
    o_row = tl.program_id(0) % PIECES * SIZE + tl.arange(0, SIZE)
    o_v = column * COLS + o_row
    o_d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_d = (o_d < hidden)[None, :]
    b_row = tl.load(order + o_v, mask=o_v < num_rows, other=0)
    p = weight + b_row[:, None] * weight_stride_v + o_d.to(tl.int64)[None, :] * weight_stride_d
    b = tl.load(p, mask=(o_v < num_rows)[:, None] & m_d, other=0.0)
    tl.store(out + (place * COLS + o_row).to(tl.int64)[:, None] * hidden + o_d[None, :], b, mask=m_d)


@triton.jit(do_not_specialize=["number", "num_tokens", "num_rows", "source_rows", "token_tiles"])
def _block_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    bias,
    target,
    row_max,
    log_sum,
    prob,
    target_factor,
    active,
    factor,
    out,
    bias_partials,
    flags,
    blocks,
    block_edges,
    sources,
    number,
    num_tokens,
    num_rows,
    source_rows,
    token_tiles,
    hidden,
    input_stride_n,
    input_stride_d,
    weight_stride_v,
    weight_stride_d,
    scale,
    softcap,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SPLIT: tl.constexpr,
    INNER: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """G of one block, and which of its tiles are live."""
    slot = tl.program_id(0)
    first = tl.load(block_edges + number)
    if first + slot >= tl.load(block_edges + number + 1):
        return
    block = tl.load(blocks + first + slot)
    column = block // token_tiles
    n0 = block % token_tiles * ROWS
    v0 = column * COLS
    source = tl.load(sources + column)

    # Small loads go before the product, which hides them.
    o_n = n0 + tl.arange(0, ROWS)
    o_v = v0 + tl.arange(0, COLS)
    m_n = o_n < num_tokens
    m_v = o_v < num_rows
    b_target = tl.load(target + o_n, mask=m_n, other=-1)
    b_active = tl.load(active + o_n, mask=m_n, other=0).to(tl.int32)
    m_hit = (b_target >= v0) & (b_target < v0 + COLS)
    b_col = tl.where(m_hit, b_target - v0, -1).to(tl.int32)
    b_max = tl.load(row_max + o_n, mask=m_n, other=0.0)
    b_log2_sum = tl.load(log_sum + o_n, mask=m_n, other=0.0) * LOG2E
    b_prob = tl.load(prob + o_n, mask=m_n, other=0.0)
    b_target_factor = tl.load(target_factor + o_n, mask=m_n, other=0.0)
    b_bias = 0.0
    if HAS_BIAS:
        b_bias = tl.load(bias + o_v, mask=m_v, other=0.0).to(tl.float32)

    b_z = row_products(
        input, weight, n0, source, num_tokens, source_rows, hidden,
        input_stride_n, input_stride_d, weight_stride_v, weight_stride_d,
        ROWS, COLS, INNER, EVEN_INNER, TMA, PRECISION,
    )  # fmt: skip
    b_z = finish_logits(b_z, b_bias, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)

    b_p = softmax_tile(b_z, b_max, b_log2_sum)
    if v0 + COLS > num_rows:
        b_p = tl.where(m_v[None, :], b_p, 0.0)
    TILE_COLS: tl.constexpr = COLS // SPLIT
    o_tile = tl.arange(0, SPLIT)
    b_peak = tl.max(tl.reshape(b_p, (ROWS, SPLIT, TILE_COLS)), 2)
    m_live = (b_peak >= eps) | (m_hit[:, None] & ((b_col // TILE_COLS)[:, None] == o_tile[None, :]))
    b_live = tl.max((m_live & (b_active != 0)[:, None]).to(tl.int32), 0)
    tl.store(flags + slot * SPLIT + o_tile, b_live)

    b_g = b_prob[:, None] * b_p
    b_g = subtract_targets(b_g, b_col, b_target_factor)
    b_g = chain_to_products(b_g, b_z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    if tl.min(b_active, 0) == 0:
        b_g = tl.where((b_active != 0)[:, None], b_g, 0.0)

    if BIAS_GRAD:
        tl.store(bias_partials + slot.to(tl.int64) * COLS + tl.arange(0, COLS), tl.sum(b_g, 0))
    if HAS_FACTOR:
        b_g *= tl.load(factor)
    if TMA:
        out.store([slot * ROWS, 0], b_g.to(out.dtype))
    else:
        o_out = (slot * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        tl.store(out + o_out[:, None] * COLS + tl.arange(0, COLS)[None, :], b_g.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["number", "token_tiles", "most_tiles"])
def _token_lists_kernel(  # type: ignore[no-untyped-def]
    flags,
    slots,
    columns,
    column_edges,
    sources,
    listed,
    listed_sources,
    counts,
    number,
    token_tiles,
    most_tiles,
    FILTERED: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE_COLS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """For one tile of tokens: its tiles of the round, in ascending order, and the rows of C that they belong to."""
    t = tl.program_id(0).to(tl.int64)
    first = tl.load(column_edges + number)
    end = tl.load(column_edges + number + 1)
    done = 0
    for start in range(0, (end - first) * SPLIT, SIZE):
        o = start + tl.arange(0, SIZE)
        m = first + o // SPLIT < end
        b_column = tl.load(columns + first + o // SPLIT, mask=m, other=0)
        b_slot = tl.load(slots + b_column.to(tl.int64) * token_tiles + t, mask=m, other=-1)
        m = m & (b_slot >= 0)
        b_tile = b_slot * SPLIT + o % SPLIT
        if FILTERED:
            m = m & (tl.load(flags + b_tile, mask=m, other=0) != 0)
        b_source = tl.load(sources + b_column, mask=m, other=0) + o % SPLIT * TILE_COLS
        b_place = t * most_tiles + done + tl.cumsum(m.to(tl.int32), 0) - 1
        tl.store(listed + b_place, b_tile, mask=m)
        tl.store(listed_sources + b_place, b_source, mask=m)
        done += tl.sum(m.to(tl.int32), 0)
    tl.store(counts + t, done)


@triton.jit(do_not_specialize=["number", "token_tiles"])
def _column_lists_kernel(  # type: ignore[no-untyped-def]
    flags,
    slots,
    columns,
    column_edges,
    listed,
    listed_tokens,
    counts,
    number,
    token_tiles,
    FILTERED: tl.constexpr,
    SPLIT: tl.constexpr,
    SIZE: tl.constexpr,
):
    """For one tile's width of a round's columns: its tiles, in ascending order, and their tokens."""
    place = tl.program_id(0)
    first = tl.load(column_edges + number)
    if first + place // SPLIT >= tl.load(column_edges + number + 1):
        return
    column = tl.load(columns + first + place // SPLIT)
    done = 0
    for start in range(0, token_tiles, SIZE):
        o = start + tl.arange(0, SIZE)
        m = o < token_tiles
        b_slot = tl.load(slots + column.to(tl.int64) * token_tiles + o, mask=m, other=-1)
        m = m & (b_slot >= 0)
        b_tile = b_slot * SPLIT + place % SPLIT
        if FILTERED:
            m = m & (tl.load(flags + b_tile, mask=m, other=0) != 0)
        b_place = place.to(tl.int64) * token_tiles + done + tl.cumsum(m.to(tl.int32), 0) - 1
        tl.store(listed + b_place, b_tile, mask=m)
        tl.store(listed_tokens + b_place, o, mask=m)
        done += tl.sum(m.to(tl.int32), 0)
    tl.store(counts + place, done)


@triton.jit
def _add(out, b, row, col, num_rows, num_cols, FIRST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add a tile to a contiguous matrix, or be the first to write there."""
    o_row = tl.arange(0, b.shape[0])
    o_col = tl.arange(0, b.shape[1])
    m = (row + o_row < num_rows)[:, None] & (col + o_col < num_cols)[None, :]
    # Only the tile's place needs 64 bits; offsets within it take half the registers.
    p = out + row.to(tl.int64) * num_cols + col + (o_row[:, None] * num_cols + o_col[None, :])
    if not FIRST:
        b += tl.load(p, mask=m, other=0.0)
    tl.store(p, b, mask=m)


@triton.jit(do_not_specialize=["num_tokens", "source_rows", "token_tiles", "most_tiles"])
def _input_grad_kernel(  # type: ignore[no-untyped-def]
    grads,
    weight,
    inverse_factor,
    smoothing,
    smoothed_weight,
    listed,
    listed_sources,
    counts,
    out,
    num_tokens,
    source_rows,
    token_tiles,
    most_tiles,
    hidden,
    weight_stride_v,
    weight_stride_d,
    scale,
    FIRST: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grad E of one tile of tokens and some columns of D, from the tiles in its list."""
    TILE_COLS: tl.constexpr = BLOCK_COLS // SPLIT
    STEPS: tl.constexpr = TILE_COLS // INNER
    pid_n, pid_d = grouped_tile(tl.program_id(0), token_tiles, tl.cdiv(hidden, COLS), GROUP)
    count = tl.load(counts + pid_n)
    if (count == 0) & (not FIRST):
        return
    d0 = pid_d * COLS
    o_d = d0 + tl.arange(0, COLS)
    m_d = o_d < hidden
    p_list = listed + pid_n.to(tl.int64) * most_tiles
    p_sources = listed_sources + pid_n.to(tl.int64) * most_tiles
    b_acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    # Each step reads where the next one's operands lie, so that these can be on their way several steps ahead.
    tile = tl.load(p_list, mask=count > 0, other=0)
    source = tl.load(p_sources, mask=count > 0, other=0)
    for i in range(0, count * STEPS):
        inner = i % STEPS * INNER
        row = tile // SPLIT * ROWS
        col = tile % SPLIT * TILE_COLS + inner
        if TMA:
            b_g = grads.load([row, col])
            b_c = weight.load([source + inner, d0])
        else:
            o_row = (row + tl.arange(0, ROWS)).to(tl.int64)
            o_inner = tl.arange(0, INNER)
            b_g = tl.load(grads + o_row[:, None] * BLOCK_COLS + (col + o_inner)[None, :])
            o_v = (source + inner + o_inner).to(tl.int64)
            p_c = weight + o_v[:, None] * weight_stride_v + o_d.to(tl.int64)[None, :] * weight_stride_d
            b_c = tl.load(p_c, mask=(o_v < source_rows)[:, None] & m_d[None, :], other=0.0)
        b_acc = tl.dot(b_g, b_c, b_acc, input_precision=PRECISION)
        following = (i + 1) // STEPS
        tile = tl.load(p_list + following, mask=following < count, other=0)
        source = tl.load(p_sources + following, mask=following < count, other=0)

    if HAS_FACTOR:
        b_acc *= tl.load(inverse_factor)
    if FIRST and HAS_SMOOTHING:
        o_n = pid_n * ROWS + tl.arange(0, ROWS)
        b_smoothing = tl.load(smoothing + o_n, mask=o_n < num_tokens, other=0.0) * scale
        b_acc -= b_smoothing[:, None] * tl.load(smoothed_weight + o_d, mask=m_d, other=0.0)[None, :]
    b_left, b_right = tl.split(tl.permute(tl.reshape(b_acc, (ROWS, 2, COLS // 2)), (0, 2, 1)))
    _add(out, b_left, pid_n * ROWS, d0, num_tokens, hidden, FIRST)
    _add(out, b_right, pid_n * ROWS, d0 + COLS // 2, num_tokens, hidden, FIRST)


@triton.jit(do_not_specialize=["number", "num_tokens", "num_rows", "token_tiles", "most_tiles"])
def _weight_grad_kernel(  # type: ignore[no-untyped-def]
    grads,
    input,
    inverse_factor,
    smoothing_weight,
    smoothed_input,
    order,
    listed,
    listed_tokens,
    counts,
    columns,
    column_edges,
    out,
    number,
    num_tokens,
    num_rows,
    token_tiles,
    most_tiles,
    hidden,
    out_stride_v,
    scale,
    HAS_FACTOR: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """grad C of one tile's width of rows and some columns of D, from the tiles in its list. ``input`` is contiguous."""
    STEPS: tl.constexpr = BLOCK_ROWS // INNER
    place, pid_d = grouped_tile(tl.program_id(0), most_tiles, tl.cdiv(hidden, COLS), GROUP)
    first = tl.load(column_edges + number)
    if first + place // SPLIT >= tl.load(column_edges + number + 1):
        return
    v0 = tl.load(columns + first + place // SPLIT) * BLOCK_COLS + place % SPLIT * ROWS
    count = tl.load(counts + place)
    d0 = pid_d * COLS
    o_d = d0 + tl.arange(0, COLS)
    m_d = o_d < hidden
    p_list = listed + place.to(tl.int64) * token_tiles
    p_tokens = listed_tokens + place.to(tl.int64) * token_tiles
    b_acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    tile = tl.load(p_list, mask=count > 0, other=0)
    token_tile = tl.load(p_tokens, mask=count > 0, other=0)
    for i in range(0, count * STEPS):
        inner = i % STEPS * INNER
        token = token_tile * BLOCK_ROWS + inner
        row = tile // SPLIT * BLOCK_ROWS + inner
        col = tile % SPLIT * ROWS
        if TMA:
            b_g = grads.load([row, col]).T
            b_e = input.load([token, d0])
        else:
            o_inner = tl.arange(0, INNER)
            o_row = (row + o_inner).to(tl.int64)
            b_g = tl.load(grads + (col + tl.arange(0, ROWS))[:, None] + o_row[None, :] * BLOCK_COLS)
            o_n = (token + o_inner).to(tl.int64)
            p_e = input + o_n[:, None] * hidden + o_d[None, :]
            b_e = tl.load(p_e, mask=(o_n < num_tokens)[:, None] & m_d[None, :], other=0.0)
        b_acc = tl.dot(b_g, b_e, b_acc, input_precision=PRECISION)
        following = (i + 1) // STEPS
        tile = tl.load(p_list + following, mask=following < count, other=0)
        token_tile = tl.load(p_tokens + following, mask=following < count, other=0)

    o_v = v0 + tl.arange(0, ROWS)
    m_v = o_v < num_rows
    if HAS_FACTOR:
        b_acc *= tl.load(inverse_factor)
    if HAS_SMOOTHING:
        b_c = tl.load(smoothing_weight + o_v, mask=m_v, other=0.0) * scale
        b_acc -= b_c[:, None] * tl.load(smoothed_input + o_d, mask=m_d, other=0.0)[None, :]
    b_row = o_v.to(tl.int64)
    if HAS_ORDER:
        b_row = tl.load(order + o_v, mask=m_v, other=0)
    p_out = out + b_row[:, None] * out_stride_v + o_d[None, :]
    m_out = m_v[:, None] & m_d[None, :]
    if ACCUMULATE:
        b_acc += tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["num_rows"])
def _rest_kernel(  # type: ignore[no-untyped-def]
    smoothing_weight,
    smoothed_input,
    order,
    column_blocks,
    out,
    num_rows,
    hidden,
    out_stride_v,
    scale,
    HAS_SMOOTHING: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """grad C in columns without a block."""
    v0 = tl.program_id(0) * ROWS
    if tl.load(column_blocks + v0 // BLOCK_COLS) > 0:
        return
    o_v = v0 + tl.arange(0, ROWS)
    o_d = tl.program_id(1) * COLS + tl.arange(0, COLS)
    m_v = o_v < num_rows
    m_d = o_d < hidden
    b = tl.zeros((ROWS, COLS), dtype=tl.float32)
    if HAS_SMOOTHING:
        b_c = tl.load(smoothing_weight + o_v, mask=m_v, other=0.0) * scale
        b -= b_c[:, None] * tl.load(smoothed_input + o_d, mask=m_d, other=0.0)[None, :]
    b_row = o_v.to(tl.int64)
    if HAS_ORDER:
        b_row = tl.load(order + o_v, mask=m_v, other=0)
    p_out = out + b_row[:, None] * out_stride_v + o_d[None, :]
    m_out = m_v[:, None] & m_d[None, :]
    if ACCUMULATE:
        b += tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out, b.to(out.dtype.element_ty), mask=m_out)


@triton.jit(do_not_specialize=["number", "num_rows", "token_tiles"])
def _bias_grad_kernel(  # type: ignore[no-untyped-def]
    bias_partials,
    order,
    listed,
    counts,
    columns,
    column_edges,
    out,
    number,
    num_rows,
    token_tiles,
    HAS_ORDER: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Add the gradient of b of one tile's width of a round's columns."""
    TILE_COLS: tl.constexpr = BLOCK_COLS // SPLIT
    place = tl.program_id(0)
    first = tl.load(column_edges + number)
    if first + place // SPLIT >= tl.load(column_edges + number + 1):
        return
    o = tl.arange(0, TILE_COLS)
    o_v = tl.load(columns + first + place // SPLIT) * BLOCK_COLS + place % SPLIT * TILE_COLS + o
    b_sum = tl.zeros((TILE_COLS,), dtype=tl.float32)
    for i in range(0, tl.load(counts + place)):
        tile = tl.load(listed + place.to(tl.int64) * token_tiles + i)
        b_sum += tl.load(bias_partials + tile.to(tl.int64) * TILE_COLS + o)
    b_row = o_v.to(tl.int64)
    if HAS_ORDER:
        b_row = tl.load(order + o_v, mask=o_v < num_rows, other=0)
    b_sum += tl.load(out + b_row, mask=o_v < num_rows, other=0.0)
    tl.store(out + b_row, b_sum, mask=o_v < num_rows)


def screen(problem: LocalProblem, plan: FilterPlan, *, stats: bool, allow_tma: bool = True) -> tuple[Partials, Peaks]:
    """The contract's ``screen``."""
    operands = LogitOperands.prepare(problem, allow_tma=allow_tma)
    group = operands.tile.rows
    shape = (cdiv(problem.num_tokens, group), problem.num_rows)
    peaks = torch.empty(shape, dtype=torch.float16, device=problem.input.device)
    partials = forward.partials(operands, stats=stats, workspace=None, threshold=thresholds(plan), peaks=peaks)
    return partials, Peaks(peaks, group)


def filtered_gradients(
    problem: LocalProblem,
    plan: FilterPlan,
    tiles: TileMap,
    logit_grad: LogitGradient,
    request: GradientRequest,
    on_input_grad: InputGradReady,
    *,
    allow_tma: bool = True,
    workspace: int | None = None,
) -> Tensor | None:
    """The contract's ``filtered_gradients``.

    Args:
        allow_tma: whether tensor memory descriptors may be used where they can.
        workspace: bytes for G and copied rows of C in one round; raised to what one column takes.
    """
    if problem.num_tokens == 0 or problem.num_rows == 0:
        return nothing_to_reduce(problem, request, on_input_grad)
    if request.input_dtype is None and request.weight is None and not request.bias:
        return None
    return _Backward(problem, plan, tiles, logit_grad, request, allow_tma, workspace).run(on_input_grad)


def _default_workspace(accumulator: int) -> int:
    """As exact's, and for large problems what that leaves of ``LARGE_BYTES``: fewer rounds keep the device busier."""
    slab = default_slab_bytes(accumulator)
    return slab if slab < SLAB_BYTES else max(slab, LARGE_BYTES - accumulator)


@dataclass(frozen=True)
class _Rounds:
    """Sizes that depend on shapes and options alone.

    Attributes:
        token_tiles, columns: the map's size in blocks.
        split: tiles a block.
        step: a round begins every so many blocks; a column that has fewer than ``least`` counts as ``least``.
        least: so that a round has at most ``most_columns`` columns.
    """

    token_tiles: int
    columns: int
    split: int
    step: int
    least: int

    @classmethod
    def fit(
        cls, token_tiles: int, columns: int, split: int, budget: int, block_bytes: int, column_bytes: int
    ) -> _Rounds:
        """As large as ``budget`` allows, evenly used; at least one column. ``column_bytes`` are those of its copy."""
        least = max(1, token_tiles // (SPARSEST_IN_ORDER if column_bytes else SPARSEST))
        capacity = int((budget - column_bytes) / (block_bytes + column_bytes / least))
        most = max(1, capacity - token_tiles + 1)
        total = columns * token_tiles
        return cls(token_tiles, columns, split, cdiv(total, cdiv(total, most)), least)

    @property
    def capacity(self) -> int:
        """Most blocks of one round: the column in which the next would begin belongs to it as a whole."""
        return min(self.step - 1 + self.token_tiles, self.columns * self.token_tiles)

    @property
    def most_columns(self) -> int:
        return min(self.columns, (self.step - 1) // self.least + 1)

    @property
    def most_tiles(self) -> int:
        """Tiles' widths in one round."""
        return self.most_columns * self.split

    @property
    def number(self) -> int:
        """How many rounds a map can take."""
        return (self.columns - 1) * self.token_tiles // self.step + 1


@dataclass(frozen=True)
class _Schedule:
    """Which blocks and columns each round has, on the device. int32.

    Attributes:
        blocks: ``[columns * token_tiles + 1]``, the blocks to compute, ``column * token_tiles + token tile``, round by
            round; the last element is spare.
        block_edges: ``[rounds + 1]``, where each round's begin.
        slots: ``[columns, token_tiles]``, the block's place among its round's, or -1.
        columns: ``[columns + 1]``, the columns that have blocks; the last element is spare.
        column_edges: ``[rounds + 1]``.
        column_blocks: ``[columns]``, how many blocks each column has.
        places: ``[columns]``, the column's place among its round's.
    """

    blocks: Tensor
    block_edges: Tensor
    slots: Tensor
    columns: Tensor
    column_edges: Tensor
    column_blocks: Tensor
    places: Tensor

    @classmethod
    def make(cls, live: Tensor, rounds: _Rounds) -> _Schedule:
        """From the map of live tiles, bool ``[token tiles, tiles' widths]``."""
        token_tiles, columns, together = rounds.token_tiles, rounds.columns, TOKEN_TILES_TOGETHER
        pad = torch.nn.functional.pad
        live = pad(live, (0, columns * rounds.split - live.shape[1])).view(token_tiles, columns, rounds.split)
        blocks = live.any(dim=2).T
        count = blocks.sum(dim=1)
        load = torch.where(count > 0, count.clamp(min=rounds.least), 0)
        number = (load.cumsum(0) - load) // rounds.step
        edges = torch.searchsorted(number, torch.arange(rounds.number + 1, device=live.device))

        # Within a round, blocks are numbered by groups of token tiles, then by column.
        groups = cdiv(token_tiles, together)
        grouped = pad(blocks, (0, groups * together - token_tiles)).view(columns, groups, together).long()
        before = pad(grouped.sum(dim=2).cumsum(0), (0, 0, 1, 0))
        at_edges = before[edges]
        totals = at_edges[1:] - at_edges[:-1]
        group_starts = totals.cumsum(1) - totals
        column_starts = group_starts[number] + before[:-1] - at_edges[number]
        slots = (column_starts[:, :, None] + grouped.cumsum(2) - grouped).view(columns, -1)[:, :token_tiles]
        block_edges = pad(totals.sum(dim=1).cumsum(0), (1, 0))
        place = torch.where(blocks, block_edges[number][:, None] + slots, blocks.numel())

        has_blocks = count > 0
        column_place = has_blocks.cumsum(0) - 1
        column_edges = pad(column_place + 1, (1, 0))[edges]
        return cls(
            _listed(place.reshape(-1)),
            block_edges.int(),
            torch.where(blocks, slots, -1).int().contiguous(),
            _listed(torch.where(has_blocks, column_place, columns)),
            column_edges.int(),
            count.int(),
            (column_place - column_edges[number]).int(),
        )


def _listed(places: Tensor) -> Tensor:
    """The numbers of elements by their place; those without one share the spare last."""
    listed = torch.zeros(places.shape[0] + 1, dtype=torch.int32, device=places.device)
    return listed.scatter_(0, places, torch.arange(places.shape[0], dtype=torch.int32, device=places.device))


class _Backward:
    """One filtered backward pass."""

    def __init__(
        self,
        problem: LocalProblem,
        plan: FilterPlan,
        tiles: TileMap,
        logit_grad: LogitGradient,
        request: GradientRequest,
        allow_tma: bool,
        workspace: int | None,
    ) -> None:
        self.problem, self.plan, self.request = problem, plan, request
        self.order = tiles.order
        self.active = logit_grad.active.contiguous()
        self.undefined = undefined(logit_grad)
        self.factor, self.inverse_factor = fp16_factors(problem, replace(logit_grad, smoothing=None))
        self.vectors = tuple(
            vector.contiguous()
            for vector in (logit_grad.max, logit_grad.log_sum, logit_grad.prob, logit_grad.target, self.active)
        )
        self.by_weight = request.weight is not None or request.bias
        self._allocate_gradients()
        self._sort_rows()
        self._choose_tiles(allow_tma, workspace)

        everything = (request.input_dtype is not None and not plan.input) or (self.by_weight and not plan.weight)
        live = torch.ones_like(tiles.live) if everything else tiles.live
        self.schedule = _Schedule.make(live, self.rounds)
        self._allocate_workspace()
        request.await_input()
        self._copy_input()
        self._set_smoothing(logit_grad)

    def run(self, on_input_grad: InputGradReady) -> Tensor | None:
        for number in range(self.rounds.number):
            if self.copies is not None:
                self._copy_rows(number)
            self._compute_blocks(number)
            if self.accumulator is not None:
                self._add_input_grad(number)
                if number == self.rounds.number - 1:
                    self.request.hand_on(self._finish_input_grad(), on_input_grad)
            if self.by_weight:
                self._list_columns(number)
            if self.request.weight is not None:
                self._write_weight_grad(number)
            if self.bias_grad is not None:
                self._add_bias_grad(number)
        if self.request.weight is not None:
            self._write_rest()
        return self.bias_grad

    # -- preparation

    def _allocate_gradients(self) -> None:
        problem, request, new = self.problem, self.request, self.problem.input.new_empty
        shape, dtype = problem.input.shape, request.input_dtype
        self.input_grad = None if dtype is None else new(shape, dtype=dtype)
        self.accumulator = self.input_grad
        if dtype is not None and dtype != torch.float32:
            self.accumulator = new(shape, dtype=torch.float32)

    def _copy_input(self) -> None:
        problem, request, new = self.problem, self.request, self.problem.input.new_empty
        self.safe_input: Tensor | None = None
        self.borrows_result = False
        if request.weight is not None:
            # As in exact: a copy of E without inactive rows, in the memory of grad E's result until that is written.
            result = self.input_grad
            fits = result is not None and result is not self.accumulator
            self.borrows_result = fits and result is not None and result.element_size() == problem.input.element_size()
            memory = result if self.borrows_result and result is not None else new(problem.input.shape)
            self.safe_input = select_tokens(problem.input, self.active, memory.view(problem.input.dtype))

    def _sort_rows(self) -> None:
        """Bias, smoothing weights and targets in the order of the tiles."""
        problem, order = self.problem, self.order
        self.bias, self.smoothing_weight, self.target = problem.bias, problem.smoothing_weight, problem.target
        if order is not None:
            place = torch.empty(problem.num_rows, dtype=torch.int64, device=order.device)
            place.scatter_(0, order, torch.arange(problem.num_rows, device=order.device))
            self.target = torch.where(self.target >= 0, place[self.target.clamp(min=0)], -1)
            self.bias = None if self.bias is None else self.bias[order]
            self.smoothing_weight = None if self.smoothing_weight is None else self.smoothing_weight[order]
        self.target = self.target.contiguous()
        self.bias = None if self.bias is None else self.bias.contiguous()

    def _set_smoothing(self, logit_grad: LogitGradient) -> None:
        problem, request = self.problem, self.request
        self.smoothing = self.smoothed_weight = self.smoothed_input = None
        self.bias_grad = problem.weight.new_zeros(problem.num_rows, dtype=torch.float32) if request.bias else None
        if logit_grad.smoothing is None or problem.smoothing_weight is None:
            self.smoothing_weight = None
            return
        assert self.smoothing_weight is not None
        self.smoothing_weight = self.smoothing_weight.contiguous()
        self.smoothing = logit_grad.smoothing.contiguous()
        if request.input_dtype is not None:
            self.smoothed_weight = weighted_sum(problem.weight, problem.smoothing_weight.contiguous(), None)
        if request.weight is not None:
            self.smoothed_input = weighted_sum(problem.input, self.smoothing, self.active)
        if self.bias_grad is not None:
            total = torch.where(self.active, self.smoothing, 0.0).sum() * problem.logit_scale
            self.bias_grad -= problem.smoothing_weight * total

    def _choose_tiles(self, allow_tma: bool, workspace: int | None) -> None:
        problem, plan = self.problem, self.plan
        dtype, hidden = problem.input.dtype, problem.hidden_size
        matrices = [problem.input] + ([problem.weight] if self.order is None else [])
        even_rows = hidden * dtype.itemsize % 16 == 0  # those of the copies of E and C
        self.tma = allow_tma and even_rows and all(can_use_tma(matrix) for matrix in matrices)
        self.tma = self.tma and (dtype.itemsize == 2 or INTERPRETED)
        self.block = filter_block(dtype, hidden, self.tma, plan.rows, plan.cols)
        self.product = filter_product(dtype, self.tma, plan.rows)
        if self.block.rows != plan.rows or self.block.cols % plan.cols != 0:
            raise ValueError(f"the filter's tiles are {plan.rows} x {plan.cols}, but blocks are {self.block}")
        self.split = self.block.cols // plan.cols
        token_tiles = cdiv(problem.num_tokens, self.block.rows)
        columns = cdiv(problem.num_rows, self.block.cols)
        if workspace is None:
            workspace = _default_workspace(problem.num_tokens * hidden * FP32_BYTES)
        block_bytes = self.block.cols * (self.block.rows * dtype.itemsize + FP32_BYTES * self.request.bias)
        column_bytes = 0 if self.order is None else self.block.cols * hidden * dtype.itemsize
        self.rounds = _Rounds.fit(token_tiles, columns, self.split, workspace, block_bytes, column_bytes)

    def _allocate_workspace(self) -> None:
        problem, rounds, block, new = self.problem, self.rounds, self.block, self.problem.input.new_empty
        self.copies = self.sources = None
        self.weight = problem.weight
        if self.order is None:
            self.sources = torch.arange(rounds.columns, dtype=torch.int32, device=problem.input.device) * block.cols
        else:
            self.sources = self.schedule.places * block.cols
            self.weight = self.copies = new((rounds.most_columns * block.cols, problem.hidden_size))
        self.grads = new((rounds.capacity * block.rows, block.cols))
        self.bias_partials = new((rounds.capacity, block.cols), dtype=torch.float32) if self.request.bias else None
        self.flags = new(rounds.capacity * self.split, dtype=torch.int32)
        if self.accumulator is not None:
            self.token_lists = tuple(new((rounds.token_tiles, rounds.most_tiles), dtype=torch.int32) for _ in range(2))
            self.token_counts = new(rounds.token_tiles, dtype=torch.int32)
        if self.by_weight:
            self.column_lists = tuple(new((rounds.most_tiles, rounds.token_tiles), dtype=torch.int32) for _ in range(2))
            self.column_counts = new(rounds.most_tiles, dtype=torch.int32)

    def _tiles_of(self, matrix: Tensor, rows: int, cols: int) -> Any:
        """A matrix as the kernels take it: a descriptor of its tiles, or a pointer."""
        return TensorDescriptor.from_tensor(matrix, [rows, cols]) if self.tma else matrix

    def _product_flags(self, tile: Tile) -> dict[str, Any]:
        return {
            "HAS_FACTOR": self.factor is not None,
            "HAS_SMOOTHING": self.smoothing is not None,
            "BLOCK_COLS": self.block.cols,
            "SPLIT": self.split,
            "COLS": tile.cols,
            "INNER": tile.inner,
            "GROUP": tile.group,
            "TMA": self.tma,
            "PRECISION": product_precision(self.problem.input.dtype),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    # -- one round

    def _copy_rows(self, number: int) -> None:
        problem, cols = self.problem, self.block.cols
        rows = min(COPY_ROWS, cols)
        grid = (self.rounds.most_columns * (cols // rows), cdiv(problem.hidden_size, COPY_COLS))
        _copy_kernel[grid](
            problem.weight, self.order, self.schedule.columns, self.schedule.column_edges, self.copies,
            number, problem.num_rows, problem.hidden_size, *problem.weight.stride(),
            COLS=cols, SIZE=rows, BLOCK=COPY_COLS, num_warps=4,
        )  # fmt: skip

    def _compute_blocks(self, number: int) -> None:
        problem, block, schedule = self.problem, self.block, self.schedule
        _block_kernel[(self.rounds.capacity,)](
            self._tiles_of(problem.input, block.rows, block.inner),
            self._tiles_of(self.weight, block.cols, block.inner),
            self.bias, self.target, *self.vectors, self.factor,
            self._tiles_of(self.grads, block.rows, block.cols), self.bias_partials, self.flags,
            schedule.blocks, schedule.block_edges, self.sources,
            number, problem.num_tokens, problem.num_rows, self.weight.shape[0], self.rounds.token_tiles,
            problem.hidden_size, *problem.input.stride(), *self.weight.stride(),
            problem.logit_scale, problem.softcap or 1.0, self.plan.eps,
            HAS_BIAS=self.bias is not None, HAS_SCALE=problem.logit_scale != 1.0,
            HAS_SOFTCAP=problem.softcap is not None, HAS_FACTOR=self.factor is not None,
            BIAS_GRAD=self.bias_partials is not None,
            ROWS=block.rows, COLS=block.cols, SPLIT=self.split, INNER=block.inner,
            EVEN_INNER=problem.hidden_size % block.inner == 0, TMA=self.tma,
            PRECISION=product_precision(problem.input.dtype),
            enable_fp_fusion=False, num_warps=block.warps, num_stages=block.stages,
        )  # fmt: skip

    def _add_input_grad(self, number: int) -> None:
        problem, rounds, schedule, tile = self.problem, self.rounds, self.schedule, self.product
        _token_lists_kernel[(rounds.token_tiles,)](
            self.flags, schedule.slots, schedule.columns, schedule.column_edges, self.sources,
            *self.token_lists, self.token_counts, number, rounds.token_tiles, rounds.most_tiles,
            FILTERED=self.plan.input, SPLIT=self.split, TILE_COLS=self.plan.cols,
            SIZE=min(LIST_SIZE, next_power_of_2(rounds.most_tiles)), num_warps=4,
        )  # fmt: skip
        _input_grad_kernel[(rounds.token_tiles * cdiv(problem.hidden_size, tile.cols),)](
            self._tiles_of(self.grads, self.block.rows, tile.inner), self._tiles_of(self.weight, tile.inner, tile.cols),
            self.inverse_factor, self.smoothing, self.smoothed_weight,
            *self.token_lists, self.token_counts, self.accumulator,
            problem.num_tokens, self.weight.shape[0], rounds.token_tiles, rounds.most_tiles,
            problem.hidden_size, *self.weight.stride(), problem.logit_scale,
            FIRST=number == 0, ROWS=self.block.rows, **self._product_flags(tile),
        )  # fmt: skip

    def _finish_input_grad(self) -> Tensor:
        """Round the sum into the result, and move the copy of E, which was there, to the accumulator's memory."""
        assert self.accumulator is not None
        assert self.input_grad is not None
        select_tokens(self.accumulator, self.active, self.input_grad)
        self.input_grad.masked_fill_(self.undefined[:, None], float("nan"))
        if self.borrows_result:
            memory = self.accumulator.view(-1).view(self.problem.input.dtype)
            memory = memory[: self.input_grad.numel()].view_as(self.input_grad)
            self.safe_input = select_tokens(self.problem.input, self.active, memory)
        return self.input_grad

    def _list_columns(self, number: int) -> None:
        rounds, schedule = self.rounds, self.schedule
        _column_lists_kernel[(rounds.most_tiles,)](
            self.flags, schedule.slots, schedule.columns, schedule.column_edges,
            *self.column_lists, self.column_counts, number, rounds.token_tiles,
            FILTERED=self.plan.weight, SPLIT=self.split,
            SIZE=min(LIST_SIZE, next_power_of_2(rounds.token_tiles)), num_warps=4,
        )  # fmt: skip

    def _write_weight_grad(self, number: int) -> None:
        problem, rounds, schedule, tile = self.problem, self.rounds, self.schedule, self.product
        assert self.request.weight is not None
        assert self.safe_input is not None
        buffer = self.request.weight.buffer
        _weight_grad_kernel[(rounds.most_tiles * cdiv(problem.hidden_size, tile.cols),)](
            self._tiles_of(self.grads, tile.inner, self.plan.cols),
            self._tiles_of(self.safe_input, tile.inner, tile.cols),
            self.inverse_factor, self.smoothing_weight, self.smoothed_input, self.order,
            *self.column_lists, self.column_counts, schedule.columns, schedule.column_edges, buffer,
            number, problem.num_tokens, problem.num_rows, rounds.token_tiles, rounds.most_tiles,
            problem.hidden_size, buffer.stride(0), problem.logit_scale,
            HAS_ORDER=self.order is not None, ACCUMULATE=self.request.weight.accumulate,
            BLOCK_ROWS=self.block.rows, ROWS=self.plan.cols, **self._product_flags(tile),
        )  # fmt: skip

    def _add_bias_grad(self, number: int) -> None:
        schedule = self.schedule
        _bias_grad_kernel[(self.rounds.most_tiles,)](
            self.bias_partials, self.order, self.column_lists[0], self.column_counts,
            schedule.columns, schedule.column_edges, self.bias_grad,
            number, self.problem.num_rows, self.rounds.token_tiles,
            HAS_ORDER=self.order is not None, BLOCK_COLS=self.block.cols, SPLIT=self.split, num_warps=4,
        )  # fmt: skip

    # -- rows of C without a block

    def _write_rest(self) -> None:
        assert self.request.weight is not None
        if self.request.weight.accumulate and self.smoothing is None:
            return
        problem, buffer = self.problem, self.request.weight.buffer
        rows = min(REST_ROWS, self.block.cols)
        grid = (cdiv(problem.num_rows, rows), cdiv(problem.hidden_size, REST_COLS))
        _rest_kernel[grid](
            self.smoothing_weight, self.smoothed_input, self.order, self.schedule.column_blocks, buffer,
            problem.num_rows, problem.hidden_size, buffer.stride(0), problem.logit_scale,
            HAS_SMOOTHING=self.smoothing is not None, HAS_ORDER=self.order is not None,
            ACCUMULATE=self.request.weight.accumulate, BLOCK_COLS=self.block.cols,
            ROWS=rows, COLS=REST_COLS, num_warps=4,
        )  # fmt: skip
