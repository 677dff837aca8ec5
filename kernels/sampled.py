"""The sampled backward pass: sparse, but for the hot rows.

1. *Hot rows*, a small exact backward: their rows of C are gathered, G over them is one tile product, and two library
   products make their part of grad E (in the result, rounded there) and of grad C (fp32). Where the ranks share them
   out, each does so for its tokens: their part of grad C is handed on in front of grad E, to be summed with it, or
   alone. If the anchor kept their exponentials, G is made of these without a product.
2. *grad E*, one program a token, long lists first: it walks the token's list a few entries at a time. Gathering row v
   of C once gives the logit (an fp32 dot product with the token's row of E), hence the weight, and then adds
   ``weight * C_v`` in registers. The target's own entry, unless hot, comes last and is exact. Tokens are taken piece by
   piece where pieces are asked for, in the pieces' order, which is also that of the result's rows. Weights are kept,
   one a slot, for
3. *grad C*: the entries are sorted by row (``transpose``), in steps between and beside the others; a list on the way
   lies in the memory of grad C, unless that is added to. Then rows of grad C are summed and written once
   (``column_sums``), and those that do not occur are set to 0; with ``accumulate``, they are not touched.
4. Label smoothing, which without a softcap is a product of two vectors, is added where 2 and 3 write.

Numerics:

- A weight is ``p / pi`` with both from the same logit, so it hardly depends on the logit where ``pi < 1``. The division
  is by ``fl(1 + pi) - 1``, the probability of the comparison that kept the entry. The forward's logit may differ in its
  last bits; where pi is at the edge of being 0, the smallest nonzero one is meant.
- Everything but the hot rows' products is fp32 whatever the inputs are, so fp16 needs care only there: G is scaled by
  a power of two, as in ``exact``.
- Tokens without gradient are never read: not their row of E, not their list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import column_sums
from .anchor import gather_rows
from .entries import entries, entries_or_last, has_cold_target, list_of_token, read
from .exact import fp16_factors, nothing_to_reduce, select_tokens
from .interface import (
    GradientRequest,
    InputGradReady,
    LocalProblem,
    LogitGradient,
    SamplingPlan,
    SamplingSize,
    TokenPiece,
    WeightGradBuffer,
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
    tanh,
)
from .matmul import product
from .sampling import HotExponentials, SharedHot
from .select_entries import Selection
from .tiles import INTERPRETED, Tile, cdiv, extreme_tile, next_power_of_2
from .transpose import Columns, Transposition, result_bytes, slot_dtype, way_bytes
from .workspace import ALLOCATION, FP32_BYTES, allocated, workspace_too_small

HOT_BYTES = 17 * 2**20
"""Most memory for G over the hot rows, and its sums: beyond it, tokens are taken in chunks."""
MOST_IN_REGISTERS = 8192
"""Longest row that one program holds; longer ones are read twice."""
LONG_BLOCK = 2048
READ_AT_ONCE = 256
"""16-bit numbers that a warp reads at once."""
LONGEST_OF_A_WARP = 2560
MOST_OF_TWO_ROWS = 1280
"""Elements of a row, a warp, of which two rows at once still fit."""
INPUT_GRAD_STAGES, MOST_STAGES = 3, 7
"""One stage for the row numbers, one for the rows of C, one to compute; or rows on their way for two turns more."""
LONG_LIST = 4 if INTERPRETED else 64
"""Entries from which on a token is begun early."""
ROWS_BYTES = 48 * 2**10
"""Shared memory that rows on their way may take, if there are two at once or more stages: any device has it."""
HOT_BLOCK = 32 if INTERPRETED else 1024
SMALLEST_PROBABILITY = tl.constexpr(2.0**-23)
SUM_ROWS, SUM_COLS, MOST_SPLITS = 32, 128, 64


@dataclass(frozen=True)
class _Width:
    """How a row of length D lies in registers, and how many rows are in flight.

    A power of two would waste up to half, so it is two of them. The smaller is no less than what the threads read at
    once, or they would have to share it out among the rows. A single warp sums a dot product without waiting for
    others; more are needed where its registers don't hold the row. Where a single one's registers hold but one row, few
    warps fit a processor, so rows are asked for earlier.
    """

    main: int
    rest: int
    warps: int
    at_once: int
    stages: int

    @classmethod
    def of(cls, hidden: int, itemsize: int) -> _Width:
        main = 1 << (hidden.bit_length() - 1)
        warps = 1 if hidden <= LONGEST_OF_A_WARP else max(2, min(8, main // 1024))
        rest = max(next_power_of_2(hidden - main), READ_AT_ONCE * warps) if hidden > main else 0
        if rest >= main:
            main, rest = 2 * main, 0
        size = main + rest
        two = size <= MOST_OF_TWO_ROWS * warps and 2 * (INPUT_GRAD_STAGES - 1) * size * itemsize <= ROWS_BYTES
        early = warps == 1 and not two and (MOST_STAGES - 1) * size * itemsize <= ROWS_BYTES
        return cls(main, rest, warps, 2 if two else 1, MOST_STAGES if early else INPUT_GRAD_STAGES)

    @property
    def unit(self) -> int:
        """What the threads read at once, if both parts are whole multiples of it."""
        return min(size for size in (self.main, self.rest, READ_AT_ONCE * self.warps) if size > 0)

    def fills(self, hidden: int) -> bool:
        """Whether nothing of it lies beyond the row."""
        return self.main + self.rest == hidden


@triton.jit
def _entry_gradient(  # type: ignore[no-untyped-def]
    b_dot,
    b_row,
    m_entry,
    m_target,
    bias,
    factor,
    row_max,
    log2_sum,
    prob,
    target_factor,
    anchor,
    scale,
    softcap,
    log2_inverse_eps,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """The gradient in ``E C^T + b`` of some entries of one token, and of its target, from their dot products."""
    b_z = b_dot
    if HAS_BIAS:
        b_z += tl.load(bias + b_row, mask=m_entry, other=0.0).to(tl.float32)
    if HAS_SCALE:
        b_z *= scale
    if HAS_SOFTCAP:
        b_z = softcap * tanh(b_z / softcap)
    b_p = tl.exp2((b_z - row_max) * LOG2E - log2_sum)
    b_odds = tl.exp2((b_z - anchor) * LOG2E + log2_inverse_eps)
    b_pi = tl.maximum((1.0 + tl.minimum(b_odds, 1.0)) - 1.0, SMALLEST_PROBABILITY)
    b_g = prob * b_p * tl.where(m_target, 1.0, factor / b_pi)
    b_g = tl.where(m_target, b_g - target_factor, b_g)
    b_g = chain_to_products(b_g, b_z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    return tl.where(m_entry, b_g, 0.0)


@triton.jit
def _token(i, first, length, stride):  # type: ignore[no-untyped-def]
    """The token at place ``i`` of a ``TokenPiece``."""
    return (first + i // length * stride + i % length).to(tl.int64)


@triton.jit
def _folded(b, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sums of columns UNIT apart. If a thread holds them, that takes as many independent sums, where ``tl.sum`` makes
    one long chain."""
    if b.shape[1] > UNIT:
        return tl.sum(tl.reshape(b, (b.shape[0], b.shape[1] // UNIT, UNIT)), 1)
    else:
        return b


@triton.jit(do_not_specialize=["budget", "first", "length", "stride", "first_row", "hot_first", "hot_last"])
def _input_grad_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    bias,
    target,
    cold,
    rows,
    found,
    anchor,
    row_max,
    log_sum,
    prob,
    target_factor,
    smoothing,
    smoothed_weight,
    active,
    out,
    slot_grads,
    budget,
    first,
    length,
    stride,
    first_row,
    hot_first,
    hot_last,
    hidden,
    input_stride_n,
    input_stride_d,
    weight_stride_v,
    weight_stride_d,
    scale,
    softcap,
    log2_inverse_eps,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_HOT: tl.constexpr,
    WRITE: tl.constexpr,
    KEEP: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    EVEN: tl.constexpr,
    UNIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    STAGES: tl.constexpr,
    LONG_LIST: tl.constexpr,
):
    """One token whose row lies in registers: dot products and sums in one pass over its rows of C.

    Half of the programs take the tokens with long lists, and the other half, which begins later, the others: all would
    wait for a long list that is begun last.
    """
    half = tl.num_programs(0) // 2
    place = tl.program_id(0) % half
    n = _token(place, first, length, stride)
    row = (first_row + place).to(tl.int64)
    # What lies beyond the row, if anything does, is in its last part.
    CUT: tl.constexpr = REST == 0 and not EVEN
    o_d = tl.arange(0, MAIN)
    m_d = o_d < hidden
    if WRITE:
        p_out = out + row * hidden + o_d
    if REST > 0:
        o_r = MAIN + tl.arange(0, REST)
        m_r = o_r < hidden
        if WRITE:
            p_out_r = out + row * hidden + o_r
    # All at once, rather than after the first has said that the others are needed.
    is_active = tl.load(active + n)
    count = tl.load(found + n)
    b_target = tl.load(target + n)
    s_max = tl.load(row_max + n)
    s_log2_sum = tl.load(log_sum + n) * LOG2E
    s_prob = tl.load(prob + n)
    s_target = tl.load(target_factor + n)
    s_anchor = tl.load(anchor + n)
    # Both are known before any work: a program that has none is gone soon.
    is_mine = (tl.where(is_active, count, 0) >= LONG_LIST) == (tl.program_id(0) < half)
    if WRITE:  # noqa: SIM102
        if is_mine & (is_active == 0):
            tl.store(p_out, tl.zeros((MAIN,), dtype=tl.float32).to(out.dtype.element_ty), mask=m_d)
            if REST > 0:
                tl.store(p_out_r, tl.zeros((REST,), dtype=tl.float32).to(out.dtype.element_ty), mask=m_r)
    if is_mine & (is_active != 0):
        size = tl.minimum(count, budget)
        factor = count.to(tl.float32) / tl.maximum(size, 1).to(tl.float32)
        has_target = has_cold_target(b_target, cold)
        b_e = read(input + n * input_stride_n + o_d.to(tl.int64) * input_stride_d, m_d, CUT)
        b_acc = tl.zeros((MAIN,), dtype=tl.float32)
        if REST > 0:
            b_e_r = read(input + n * input_stride_n + o_r.to(tl.int64) * input_stride_d, m_r, not EVEN)
            b_acc_r = tl.zeros((REST,), dtype=tl.float32)
        if WRITE and HAS_HOT:  # with E's row, rather than at the end, when there is nothing else to do
            hot_width = tl.where((n >= hot_first) & (n < hot_last), hidden, 0)
            b_acc += tl.load(p_out, mask=o_d < hot_width, other=0.0).to(tl.float32)
            if REST > 0:
                b_acc_r += tl.load(p_out_r, mask=o_r < hot_width, other=0.0).to(tl.float32)

        # Two rows apart rather than a block of two, whose weighted sum would cost an addition more.
        APART: tl.constexpr = AT_ONCE == 2 and REST == 0
        for entry in tl.range(0, size + has_target, AT_ONCE, num_stages=STAGES):
            o = entry + tl.arange(0, AT_ONCE)
            b_row, m_entry, m_target = entries_or_last(o, rows, n, size, b_target, has_target, budget)
            if APART:
                s_row, s_other = tl.split(b_row)
                b_c = read(weight + s_row.to(tl.int64) * weight_stride_v + o_d.to(tl.int64) * weight_stride_d, m_d, CUT)
                p_other = weight + s_other.to(tl.int64) * weight_stride_v
                b_other = read(p_other + o_d.to(tl.int64) * weight_stride_d, m_d, CUT)
                b_products = tl.join(b_c * b_e, b_other * b_e)
                if MAIN > UNIT:
                    b_products = tl.sum(tl.reshape(b_products, (MAIN // UNIT, UNIT, 2)), 0)
                b_dot = tl.sum(b_products, 0)
            else:
                p_row = weight + b_row.to(tl.int64) * weight_stride_v
                b_c = read(p_row[:, None] + o_d.to(tl.int64)[None, :] * weight_stride_d, m_d[None, :], CUT)
                b_products = _folded(b_c * b_e[None, :], UNIT)
                if REST > 0:
                    b_c_r = read(p_row[:, None] + o_r.to(tl.int64)[None, :] * weight_stride_d, m_r[None, :], not EVEN)
                    b_products += _folded(b_c_r * b_e_r[None, :], UNIT)
                b_dot = tl.sum(b_products, 1)
            b_g = _entry_gradient(
                b_dot, b_row, m_entry, m_target, bias, factor, s_max, s_log2_sum, s_prob, s_target,
                s_anchor, scale, softcap, log2_inverse_eps, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP,
            )  # fmt: skip
            if KEEP:
                tl.store(slot_grads + n * (budget + 1) + o, b_g, mask=m_entry)
            if WRITE:
                if APART:
                    s_g, s_other_g = tl.split(b_g)
                    b_acc += b_c * s_g
                    b_acc += b_other * s_other_g
                else:
                    b_acc += tl.sum(b_c * b_g[:, None], 0)
                    if REST > 0:
                        b_acc_r += tl.sum(b_c_r * b_g[:, None], 0)

        if WRITE:
            if HAS_SMOOTHING:
                s_smoothing = tl.load(smoothing + n) * scale
                b_acc -= s_smoothing * tl.load(smoothed_weight + o_d, mask=m_d, other=0.0)
            tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=m_d)
            if REST > 0:
                if HAS_SMOOTHING:
                    b_acc_r -= s_smoothing * tl.load(smoothed_weight + o_r, mask=m_r, other=0.0)
                tl.store(p_out_r, b_acc_r.to(out.dtype.element_ty), mask=m_r)


@triton.jit(do_not_specialize=["budget"])
def _long_weights_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    bias,
    target,
    cold,
    rows,
    found,
    anchor,
    row_max,
    log_sum,
    prob,
    target_factor,
    active,
    slot_grads,
    budget,
    hidden,
    input_stride_n,
    input_stride_d,
    weight_stride_v,
    weight_stride_d,
    scale,
    softcap,
    log2_inverse_eps,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One token whose row is too long for registers: the entries' weights."""
    n = tl.program_id(0).to(tl.int64)
    if tl.load(active + n):
        count = tl.load(found + n)
        size = tl.minimum(count, budget)
        factor = count.to(tl.float32) / tl.maximum(size, 1).to(tl.float32)
        b_target = tl.load(target + n)
        has_target = has_cold_target(b_target, cold)
        for first in range(0, size + has_target, AT_ONCE):
            o = first + tl.arange(0, AT_ONCE)
            b_row, m_entry, m_target = entries(o, rows, n, size, b_target, has_target, budget)
            p_row = weight + b_row.to(tl.int64) * weight_stride_v
            b_dot = tl.zeros((AT_ONCE,), dtype=tl.float32)
            for d in range(0, hidden, BLOCK):
                o_d = (d + tl.arange(0, BLOCK)).to(tl.int64)
                m_d = o_d < hidden
                b_e = tl.load(input + n * input_stride_n + o_d * input_stride_d, mask=m_d, other=0.0).to(tl.float32)
                m = m_entry[:, None] & m_d[None, :]
                b_c = tl.load(p_row[:, None] + o_d[None, :] * weight_stride_d, mask=m, other=0.0).to(tl.float32)
                b_dot += tl.sum(b_c * b_e[None, :], 1)
            b_g = _entry_gradient(
                b_dot, b_row, m_entry, m_target, bias, factor,
                tl.load(row_max + n), tl.load(log_sum + n) * LOG2E, tl.load(prob + n), tl.load(target_factor + n),
                tl.load(anchor + n), scale, softcap, log2_inverse_eps, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP,
            )  # fmt: skip
            tl.store(slot_grads + n * (budget + 1) + o, b_g, mask=m_entry)


@triton.jit(
    do_not_specialize=["budget", "first", "length", "stride", "first_row", "hot_first", "hot_last", "num_blocks"]
)
def _long_input_grad_kernel(  # type: ignore[no-untyped-def]
    weight,
    target,
    cold,
    rows,
    found,
    smoothing,
    smoothed_weight,
    active,
    out,
    slot_grads,
    budget,
    first,
    length,
    stride,
    first_row,
    hot_first,
    hot_last,
    hidden,
    num_blocks,
    weight_stride_v,
    weight_stride_d,
    scale,
    HAS_SMOOTHING: tl.constexpr,
    HAS_HOT: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """One piece of one token's row of grad E, from weights that are known."""
    place = tl.program_id(0) // num_blocks
    n = _token(place, first, length, stride)
    o_d = (tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    m_d = o_d < hidden
    p_out = out + (first_row + place).to(tl.int64) * hidden + o_d
    b_acc = tl.zeros((BLOCK,), dtype=tl.float32)
    if tl.load(active + n):
        size, b_target, has_target = list_of_token(n, target, cold, found, budget)
        for start in range(0, size + has_target, AT_ONCE):
            o = start + tl.arange(0, AT_ONCE)
            b_row, m_entry, _ = entries(o, rows, n, size, b_target, has_target, budget)
            b_g = tl.load(slot_grads + n * (budget + 1) + o, mask=m_entry, other=0.0)
            p = weight + b_row.to(tl.int64)[:, None] * weight_stride_v + o_d[None, :] * weight_stride_d
            b_c = tl.load(p, mask=m_entry[:, None] & m_d[None, :], other=0.0).to(tl.float32)
            b_acc += tl.sum(b_c * b_g[:, None], 0)
        if HAS_SMOOTHING:
            b_acc -= tl.load(smoothing + n) * scale * tl.load(smoothed_weight + o_d, mask=m_d, other=0.0)
        if HAS_HOT:
            hot_width = tl.where((n >= hot_first) & (n < hot_last), hidden, 0)
            b_acc += tl.load(p_out, mask=o_d < hot_width, other=0.0).to(tl.float32)
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=m_d)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _hot_logit_grad_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    bias,
    target,
    hot,
    hot_place,
    row_max,
    log_sum,
    prob,
    target_factor,
    active,
    factor,
    out,
    bias_partials,
    out_stride,
    num_tokens,
    num_rows,
    hidden,
    input_stride_n,
    input_stride_d,
    weight_stride_v,
    weight_stride_d,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of G over the hot rows; 0 for those that another rank holds and for tokens without gradient.

    ``out`` has room for whole tiles.
    """
    pid_n, pid_v = grouped_tile(tl.program_id(0), tl.cdiv(num_tokens, ROWS), tl.cdiv(num_rows, COLS), GROUP)
    n0 = pid_n * ROWS
    v0 = pid_v * COLS
    o_n = n0 + tl.arange(0, ROWS)
    o_v = v0 + tl.arange(0, COLS)
    m_n = o_n < num_tokens
    m_v = o_v < num_rows
    b_z = row_products(
        input, weight, n0, v0, num_tokens, num_rows, hidden,
        input_stride_n, input_stride_d, weight_stride_v, weight_stride_d,
        ROWS, COLS, INNER, EVEN_INNER, TMA, PRECISION,
    )  # fmt: skip
    b_row = tl.load(hot + o_v, mask=m_v, other=-1)
    b_bias = 0.0
    if HAS_BIAS:
        b_bias = tl.load(bias + b_row, mask=b_row >= 0, other=0.0).to(tl.float32)
    b_z = finish_logits(b_z, b_bias, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)

    b_max = tl.load(row_max + o_n, mask=m_n, other=0.0)
    b_log2_sum = tl.load(log_sum + o_n, mask=m_n, other=0.0) * LOG2E
    b_g = tl.load(prob + o_n, mask=m_n, other=0.0)[:, None] * softmax_tile(b_z, b_max, b_log2_sum)
    b_target = tl.load(target + o_n, mask=m_n, other=-1)
    b_col = tl.load(hot_place + b_target, mask=b_target >= 0, other=0) - 1 - v0
    b_col = tl.where(b_col < COLS, b_col, -1)
    b_g = subtract_targets(b_g, b_col, tl.load(target_factor + o_n, mask=m_n, other=0.0))
    b_g = chain_to_products(b_g, b_z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    b_active = tl.load(active + o_n, mask=m_n, other=0).to(tl.int32)
    b_g = tl.where((b_active != 0)[:, None] & (b_row >= 0)[None, :], b_g, 0.0)
    if BIAS_GRAD:
        tl.store(bias_partials + pid_n.to(tl.int64) * num_rows + o_v, tl.sum(b_g, 0), mask=m_v)
    if HAS_FACTOR:
        b_g *= tl.load(factor)
    p_out = out + (n0.to(tl.int64) + tl.arange(0, ROWS))[:, None] * out_stride
    p_out += (v0.to(tl.int64) + tl.arange(0, COLS))[None, :]
    tl.store(p_out, b_g.to(out.dtype.element_ty))


@triton.jit
def _hot_logit_grad_from_exps_kernel(  # type: ignore[no-untyped-def]
    exps,
    tops,
    target_place,
    target_logit,
    row_max,
    log_sum,
    prob,
    target_factor,
    active,
    out,
    input,
    copy,
    out_stride,
    num_hot,
    hidden,
    input_stride_n,
    input_stride_d,
    scale,
    HAS_SCALE: tl.constexpr,
    COPY: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """G of one token over some of the hot rows, from what the anchor kept of their logits; 0 without a gradient.

    The target's p is not taken from there: next to 1, the difference would be lost in 16 bits. If COPY, the token's row
    of E is copied by the way, and is 0 without a gradient: see ``_room_for_copy``.
    """
    n = tl.program_id(0).to(tl.int64)
    o_v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_v = o_v < num_hot
    is_active = tl.load(active + n)
    if COPY:
        width = tl.where(is_active, hidden, 0)
        for d in range(tl.program_id(1) * BLOCK, hidden, tl.num_programs(1) * BLOCK):
            o_d = (d + tl.arange(0, BLOCK)).to(tl.int64)
            b_e = tl.load(input + n * input_stride_n + o_d * input_stride_d, mask=o_d < width, other=0.0)
            tl.store(copy + n * hidden + o_d, b_e, mask=o_d < hidden)
    b_g = tl.zeros((BLOCK,), dtype=tl.float32)
    if is_active:
        s_max = tl.load(row_max + n)
        s_log2_sum = tl.load(log_sum + n) * LOG2E
        b_top = tl.load(tops + n * tl.cdiv(num_hot, WIDTH) + o_v // WIDTH, mask=m_v, other=0.0)
        b_p = tl.load(exps + n * num_hot + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_p *= tl.exp2(tl.fma(b_top - s_max, LOG2E, -s_log2_sum))
        s_p = tl.exp2(tl.fma(tl.load(target_logit + n) - s_max, LOG2E, -s_log2_sum))
        s_prob = tl.load(prob + n)
        s_target = s_prob * s_p - tl.load(target_factor + n)
        b_g = tl.where(o_v == tl.load(target_place + n) - 1, s_target, s_prob * b_p)
        b_g = chain_to_products(b_g, b_g, scale, 1.0, HAS_SCALE, False)
    tl.store(out + n * out_stride + o_v, b_g.to(out.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize=["num_rows", "rows_per_split"])
def _weighted_sum_kernel(  # type: ignore[no-untyped-def]
    matrix,
    factors,
    active,
    out,
    num_rows,
    hidden,
    rows_per_split,
    stride_row,
    stride_col,
    HAS_ACTIVE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """``factors @ matrix`` over some of its rows; rows of factor 0 or without gradient may hold anything."""
    o_col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    split = tl.program_id(1)
    last = tl.minimum((split + 1) * rows_per_split, num_rows)
    b_acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for r in range(split * rows_per_split, last, ROWS):
        o_row = (r + tl.arange(0, ROWS)).to(tl.int64)
        m_row = o_row < last
        b_factor = tl.load(factors + o_row, mask=m_row, other=0.0)
        m_row = m_row & (b_factor != 0.0)
        if HAS_ACTIVE:
            m_row = m_row & (tl.load(active + o_row, mask=m_row, other=0) != 0)
        p = matrix + o_row[:, None] * stride_row + o_col.to(tl.int64)[None, :] * stride_col
        b = tl.load(p, mask=m_row[:, None] & (o_col < hidden)[None, :], other=0.0).to(tl.float32)
        b_acc += tl.where(m_row, b_factor, 0.0)[:, None] * b
    tl.store(out + split.to(tl.int64) * hidden + o_col, tl.sum(b_acc, 0), mask=o_col < hidden)


def weighted_sum(matrix: Tensor, factors: Tensor, active: Tensor | None) -> Tensor:
    """fp32 ``factors @ matrix``, ``[D]``, in an order that depends on shapes alone."""
    num_rows, hidden = matrix.shape
    splits = max(1, min(MOST_SPLITS, num_rows // 256))
    out = torch.empty(splits, hidden, dtype=torch.float32, device=matrix.device)
    rows_per_split = cdiv(cdiv(num_rows, splits), SUM_ROWS) * SUM_ROWS
    _weighted_sum_kernel[(cdiv(hidden, SUM_COLS), splits)](
        matrix, factors, active, out, num_rows, hidden, rows_per_split, *matrix.stride(),
        HAS_ACTIVE=active is not None, ROWS=SUM_ROWS, COLS=SUM_COLS, num_warps=4,
    )  # fmt: skip
    return out.sum(0)


def sampled_gradients(
    problem: LocalProblem,
    plan: SamplingPlan,
    selection: Selection,
    logit_grad: LogitGradient,
    request: GradientRequest,
    on_input_grad: InputGradReady,
    *,
    allow_tma: bool = True,
    library: bool | None = None,
) -> Tensor | None:
    """The contract's ``sampled_gradients``.

    Args:
        allow_tma: whether tensor memory descriptors may be used where they can.
        library: forces the hot rows' products' way, see :func:`.matmul.product`.
    """
    if problem.num_tokens == 0 or (problem.num_rows == 0 and plan.shared is None):
        return nothing_to_reduce(problem, request, on_input_grad)
    return _Backward(problem, plan, selection, logit_grad, request, allow_tma, library).run(on_input_grad)


@dataclass(frozen=True)
class _HotRows:
    """The hot rows, and the tokens from ``first`` to ``last`` that this rank multiplies them with.

    ``ids`` are negative where a row is missing. ``place`` says for a row that is a ``target`` what number it has among
    them, from 1.
    """

    weight: Tensor
    ids: Tensor
    place: Tensor
    target: Tensor
    input: Tensor
    first: int
    last: int


@dataclass(frozen=True)
class _HotPart:
    """The hot rows' share of the gradients: fp32, or where it comes from the other ranks too, in what they send."""

    weight_grad: Tensor | None
    bias_grad: Tensor | None


def lent_memory(destination: WeightGradBuffer | None, size: int, dtype: torch.dtype) -> Tensor | None:
    """Memory of the gradient of C, which is written last, for so many values; None where it can't be had."""
    if destination is None or destination.accumulate:
        return None
    buffer, per_value = destination.buffer, max(1, dtype.itemsize // destination.buffer.element_size())
    aligned = buffer.is_contiguous() and buffer.data_ptr() % dtype.itemsize == 0
    aligned = aligned and buffer.storage_offset() % per_value == 0
    if not aligned or buffer.numel() * buffer.element_size() < size * dtype.itemsize:
        return None
    values = cdiv(size * dtype.itemsize, buffer.element_size())
    return buffer.view(-1)[:values].view(dtype)[:size]


def _hot_bytes(hidden: int, num_hot: int, dtype: torch.dtype) -> int:
    """The hot rows and their gradients."""
    return allocated(num_hot * hidden * dtype.itemsize, num_hot * hidden * FP32_BYTES, num_hot * FP32_BYTES)


def _hot_tile_bytes(hidden: int, num_hot: int, dtype: torch.dtype, tile: Tile, *, copies: bool) -> int:
    """G over them for one tile of tokens, its sums, and perhaps a copy of E."""
    columns = cdiv(num_hot, tile.cols) * tile.cols
    return tile.rows * (columns + (hidden if copies else 0)) * dtype.itemsize + num_hot * FP32_BYTES


def least_workspace(num_tokens: int, hidden: int, num_rows: int, dtype: torch.dtype, size: SamplingSize) -> int:
    """Enough for any options on any device."""
    tile, num_hot = extreme_tile(dtype), size.num_hot
    slots = num_tokens * (min(size.budget, num_rows) + 1)
    hot, transposed = _hot_bytes(hidden, num_hot, dtype), result_bytes(slots, num_rows)
    dense = allocated(_hot_tile_bytes(hidden, num_hot, dtype, tile, copies=True)) + 4 * ALLOCATION
    more = allocated(slots * FP32_BYTES) + way_bytes(num_tokens, slots)  # weights, and lists on the way
    smoothed = 3 * allocated(MOST_SPLITS * hidden * FP32_BYTES)
    return hot + transposed + max(dense, more + smoothed) + 8 * allocated(num_tokens * FP32_BYTES)


class _Backward:
    """One sampled backward pass."""

    def __init__(
        self,
        problem: LocalProblem,
        plan: SamplingPlan,
        selection: Selection,
        logit_grad: LogitGradient,
        request: GradientRequest,
        allow_tma: bool,
        library: bool | None,
    ) -> None:
        self.problem = problem
        self.plan = plan
        self.selection = selection
        self.request = request
        self.allow_tma = allow_tma
        self.library = library
        self.bias = None if problem.bias is None else problem.bias.contiguous()
        self.target = problem.target.contiguous()
        self.active = logit_grad.active.contiguous()
        self.anchor = plan.anchor.contiguous()
        self.max = logit_grad.max.contiguous()
        self.log_sum = logit_grad.log_sum.contiguous()
        self.prob = logit_grad.prob.contiguous()
        self.target_factor = logit_grad.target.contiguous()
        self.factor, self.inverse_factor = fp16_factors(problem, replace(logit_grad, smoothing=None))
        self.smoothing = self.smoothing_weight = None
        if logit_grad.smoothing is not None and problem.smoothing_weight is not None:
            self.smoothing = logit_grad.smoothing.contiguous()
            self.smoothing_weight = problem.smoothing_weight.contiguous()
        self.wants_columns = request.weight is not None or request.bias
        self.slots = problem.num_tokens * (selection.budget + 1)
        self.pieces = request.pieces or (TokenPiece(0, problem.num_tokens),)
        self.shared = plan.shared
        self.ahead = 0 if plan.shared is None or request.hot_start is not None else plan.shared.num_hot
        self.input_grad = None
        if request.input_dtype is not None:
            shape = (self.ahead + problem.num_tokens, problem.hidden_size)
            self.input_grad = problem.input.new_empty(shape, dtype=request.input_dtype)

    def run(self, on_input_grad: InputGradReady) -> Tensor | None:
        self._check_workspace()
        if self.problem.num_rows == 0:
            return self._run_without_rows(on_input_grad)
        transposition = self._transposition() if self.wants_columns else None
        if self.request.own_input is None:
            if transposition is not None and self.request.input_ready is not None:
                # E is on its way: lists alone. A workspace has no room for these and the hot rows' products.
                _ = transposition.place() if self.problem.workspace is None else transposition.columns()
            self.request.await_input()
        if transposition is not None and self.shared is not None:  # memory is no concern then
            transposition.place(aside=True)
        hot = self._hot_part() if self.plan.hot.numel() > 0 else None
        self.request.await_input()
        slot_grads = self.problem.input.new_empty(self.slots, dtype=torch.float32)
        self._entry_pass(slot_grads, on_input_grad, transposition, has_hot=hot is not None)
        if transposition is None:
            return None
        columns = transposition.columns()
        if hot is not None and self.shared is not None and hot.weight_grad is not None:
            hot = _HotPart(self.request.hot_sum(hot.weight_grad), None)
        return self._weight_grad(hot, slot_grads, columns)

    def _run_without_rows(self, on_input_grad: InputGradReady) -> Tensor | None:
        """This rank's share of what other ranks' hot rows need."""
        if self.request.own_input is None:
            self.request.await_input()
        self._hot_part()
        self.request.await_input()
        if self.input_grad is not None and self.shared is not None:
            shared = self.shared
            for low, high, row in self._rows_of(0, self.problem.num_tokens):
                nothing = ~self.active[low:high]
                nothing[: max(0, shared.first - low)] = True
                nothing[max(0, shared.last - low) :] = True
                self.input_grad[row : row + high - low].masked_fill_(nothing[:, None], 0.0)
            row = self.ahead
            for piece in self.pieces:
                self._hand_on(on_input_grad, piece, row)
                row += piece.size
        return self.problem.weight.new_empty(0, dtype=torch.float32) if self.request.bias else None

    # -- hot rows

    def _hot_rows(self) -> _HotRows:
        shared, num_tokens = self.shared, self.problem.num_tokens
        if shared is None:
            weight = gather_rows(self.problem.weight, self.plan.hot)
            return _HotRows(weight, self.plan.hot, self.plan.hot_place, self.target, self.problem.input, 0, num_tokens)
        # Whose target that is doesn't matter: a token's number stands for it.
        numbers = torch.arange(shared.first, shared.last, device=shared.ids.device)
        own = self.request.own_input
        own = self.problem.input[shared.first : shared.last] if own is None else own
        return _HotRows(shared.weight, shared.ids, shared.target_place, numbers, own, shared.first, shared.last)

    def _hot_part(self) -> _HotPart:
        hot, num_hot = self._hot_rows(), self.plan.hot.shape[0]
        new = hot.weight.new_empty
        operands = LogitOperands.prepare(
            replace(self.problem, input=hot.input, weight=hot.weight, target=hot.target, smoothing_weight=None),
            allow_tma=self.allow_tma,
        )
        tile, chunk = operands.tile, self._hot_tokens(operands)
        at_once = hot.last - hot.first <= chunk
        row_tiles = cdiv(chunk, tile.rows)
        logit_grads = new((row_tiles * tile.rows, cdiv(num_hot, tile.cols) * tile.cols))
        sent = self._hot_rows_sent(num_hot)
        weight_grad = bias_grad = bias_partials = None
        if self.request.weight is not None or sent is not None:  # other ranks' rows may need what this one's do not
            weight_grad = sent if at_once and sent is not None else new(hot.weight.shape, dtype=torch.float32)
        if self.request.bias:
            bias_grad = new(num_hot, dtype=torch.float32).zero_()
            bias_partials = new((row_tiles, num_hot), dtype=torch.float32)
        ways: dict[str, Any] = {"factor": self.inverse_factor, "library": self.library}
        for start in range(hot.first, hot.last, chunk):
            stop = min(start + chunk, hot.last)
            part, g = operands.tokens(start - hot.first, stop - hot.first), logit_grads[: stop - start, :num_hot]
            copy = None if weight_grad is None else self._room_for_copy(part.input, start, whole=at_once)
            self._hot_logit_grads(hot, part, start, logit_grads, bias_partials, copy)
            if bias_grad is not None and bias_partials is not None:
                bias_grad += bias_partials[: cdiv(stop - start, tile.rows)].sum(0)
            if weight_grad is not None and copy is not None:
                product(weight_grad, g.T, copy, accumulate=start > hot.first, **ways)
            del copy  # before there is another
            if self.input_grad is not None:
                for low, high, row in self._rows_of(start, stop):
                    out, part_g = self.input_grad[row : row + high - low], g[low - start : high - start]
                    product(out, part_g, hot.weight, accumulate=False, **ways)
        if sent is not None:
            if hot.first == hot.last:
                sent.zero_()
            elif weight_grad is not None and weight_grad is not sent:
                sent.copy_(weight_grad)
            weight_grad = sent
        if sent is not None and self.request.hot_start is not None:
            self.request.hot_start(sent)
        return _HotPart(weight_grad, bias_grad)

    def _hot_rows_sent(self, num_hot: int) -> Tensor | None:
        """Where their gradients go if they are the ranks' sum: in front of grad E, or alone."""
        if self.shared is None or self.input_grad is None:
            return None
        return self.input_grad[:num_hot] if self.ahead else self.input_grad.new_empty(num_hot, self.input_grad.shape[1])

    def _hot_logit_grads(
        self,
        hot: _HotRows,
        part: LogitOperands,
        start: int,
        out: Tensor,
        bias_partials: Tensor | None,
        copy: Tensor | None,
    ) -> None:
        """G of some tokens, the first of which is number ``start``; and into ``copy`` their rows of E."""
        if self.shared is not None and self.shared.exponentials is not None:
            self._hot_logit_grads_from(self.shared, self.shared.exponentials, part.input, start, out, copy)
            return
        tokens = slice(start, start + part.num_tokens)
        if copy is not None:
            select_tokens(part.input, self.active[tokens], copy)
        _hot_logit_grad_kernel[part.grid()](
            *part.handles(), part.bias, part.target, hot.ids, hot.place,
            self.max[tokens], self.log_sum[tokens], self.prob[tokens], self.target_factor[tokens], self.active[tokens],
            self.factor, out, bias_partials, out.stride(0), *part.sizes(), part.scale, part.softcap or 1.0,
            HAS_FACTOR=self.factor is not None, BIAS_GRAD=bias_partials is not None, **part.flags(),
        )  # fmt: skip

    def _hot_logit_grads_from(
        self, shared: SharedHot, kept: HotExponentials, input: Tensor, start: int, out: Tensor, copy: Tensor | None
    ) -> None:
        """The same from what the anchor kept: then there is no scaling for fp16, and no bias."""
        assert shared.target_logit is not None
        tokens = slice(start, start + len(input))
        own = slice(start - shared.first, start - shared.first + len(input))
        block = min(next_power_of_2(shared.num_hot), HOT_BLOCK)
        _hot_logit_grad_from_exps_kernel[(len(input), cdiv(shared.num_hot, block))](
            kept.values[own], kept.tops[own], shared.target_place[tokens], shared.target_logit[tokens],
            self.max[tokens], self.log_sum[tokens], self.prob[tokens], self.target_factor[tokens], self.active[tokens],
            out, input, copy, out.stride(0), shared.num_hot, input.shape[1], *input.stride(), self.problem.logit_scale,
            HAS_SCALE=self.problem.logit_scale != 1.0, COPY=copy is not None, WIDTH=kept.width, BLOCK=block,
            num_warps=4,
        )  # fmt: skip

    def _check_workspace(self) -> None:
        """The caller's must hold what the entries take, and the hot rows of one tile of tokens."""
        problem = self.problem
        if problem.workspace is None:
            return
        size = SamplingSize(self.plan.hot.shape[0], self.selection.budget, self.plan.hot.shape[0])
        shape = (problem.num_tokens, problem.hidden_size, problem.num_rows, problem.input.dtype)
        least = least_workspace(*shape, size)
        if problem.workspace < least:
            raise workspace_too_small(problem.workspace, least, *shape[:1], problem.num_rows, problem.hidden_size)

    def _hot_tokens(self, operands: LogitOperands) -> int:
        """Tokens per chunk of the hot rows' part, in whole tiles, evenly used."""
        problem, tile, num_hot = self.problem, operands.tile, operands.num_rows
        budget = HOT_BYTES
        if problem.workspace is not None:
            fixed = _hot_bytes(problem.hidden_size, num_hot, problem.input.dtype)
            fixed += result_bytes(self.slots, problem.num_rows)
            budget = min(budget, problem.workspace - fixed - ALLOCATION)
        num_tokens = problem.num_tokens if self.shared is None else self.shared.last - self.shared.first
        tiles = cdiv(num_tokens, tile.rows)
        shape = (problem.hidden_size, num_hot, problem.input.dtype, tile)
        if tiles * _hot_tile_bytes(*shape, copies=not self.lends_input_grad) <= budget:
            return max(1, num_tokens)
        copies = not self.lends_input_grad or any(piece.runs > 1 for piece in self.pieces)
        most = max(1, budget // _hot_tile_bytes(*shape, copies=copies))
        return min(cdiv(tiles, cdiv(tiles, most)) * tile.rows, num_tokens)

    @property
    def lends_input_grad(self) -> bool:
        """Whether a copy of E can lie in the memory of grad E, as long as that is not written."""
        return self.input_grad is not None and self.input_grad.element_size() == self.problem.input.element_size()

    def _rows_of(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Tokens from ``start`` to ``stop`` as neighbours also in grad E: first, one behind the last, and first row."""
        row = self.ahead
        for piece in self.pieces:
            for first, last in piece.ranges():
                low, high = max(first, start), min(last, stop)
                if low < high:
                    yield low, high, row + low - first
                row += last - first

    def _room_for_copy(self, part: Tensor, start: int, *, whole: bool) -> Tensor:
        """For the tokens from ``start`` on with 0 where they have no gradient, and may hold NaN.

        In the memory of grad E's result if it fits there. Unless that is the ``whole`` of the tokens, rows of others
        may be done already, and with runs these rows can be theirs.
        """
        stop = start + len(part)
        unused = whole or all(piece.runs == 1 for piece in self.pieces)
        if unused and self.input_grad is not None and self.lends_input_grad:
            return self.input_grad[self.ahead + start : self.ahead + stop].view(part.dtype)
        return part.new_empty(part.shape)

    # -- grad E, and the weights of all entries

    def _entry_pass(
        self,
        slot_grads: Tensor,
        on_input_grad: InputGradReady | None = None,
        transposition: Transposition | None = None,
        *,
        has_hot: bool,
    ) -> None:
        """Piece by piece, each given away at once.

        A reduction needs a place on the device, and finds none once a long kernel is begun. So behind each piece come
        short ones, of the transposition: until those are done, the reduction has begun.
        """
        smoothed = None
        if self.smoothing_weight is not None and self.input_grad is not None:
            smoothed = weighted_sum(self.problem.weight, self.smoothing_weight, None)
        row = self.ahead
        for piece in self.pieces:
            self._enter(piece, row, slot_grads, smoothed, has_hot)
            if on_input_grad is not None:
                self._hand_on(on_input_grad, piece, row)
            if transposition is not None:
                transposition.number()
            row += piece.size

    def _hand_on(self, on_input_grad: InputGradReady, piece: TokenPiece, row: int) -> None:
        """With the first piece, what is in front of it."""
        if self.input_grad is not None:
            on_input_grad(self.input_grad[row if row > self.ahead else 0 : row + piece.size])

    def _enter(self, piece: TokenPiece, row: int, slot_grads: Tensor, smoothed: Tensor | None, has_hot: bool) -> None:
        """Weights of a piece's entries, and its part of grad E, whose first row is ``row``."""
        problem, selection = self.problem, self.selection
        lists = (self.target, selection.cold, selection.rows, selection.found)
        vectors = (self.anchor, self.max, self.log_sum, self.prob, self.target_factor)
        hot_tokens = (0, problem.num_tokens) if self.shared is None else (self.shared.first, self.shared.last)
        place = (piece.first, piece.length, piece.stride, row, *hot_tokens)
        scalars = (problem.logit_scale, problem.softcap or 1.0, -math.log2(self.plan.eps))
        flags = {
            "HAS_BIAS": self.bias is not None,
            "HAS_SCALE": problem.logit_scale != 1.0,
            "HAS_SOFTCAP": problem.softcap is not None,
        }
        if problem.hidden_size <= MOST_IN_REGISTERS:
            width = _Width.of(problem.hidden_size, problem.weight.element_size())
            _input_grad_kernel[(2 * piece.size,)](
                problem.input, problem.weight, self.bias, *lists, *vectors, self.smoothing, smoothed,
                self.active, self.input_grad, slot_grads, selection.budget, *place, problem.hidden_size,
                *problem.input.stride(), *problem.weight.stride(), *scalars,
                HAS_SMOOTHING=smoothed is not None, HAS_HOT=has_hot, WRITE=self.input_grad is not None,
                KEEP=self.wants_columns, MAIN=width.main, REST=width.rest, EVEN=width.fills(problem.hidden_size),
                UNIT=width.unit, AT_ONCE=width.at_once, STAGES=width.stages, LONG_LIST=LONG_LIST,
                num_warps=width.warps, **flags,
            )  # fmt: skip
            return
        if row == self.ahead:  # all tokens' at once
            _long_weights_kernel[(problem.num_tokens,)](
                problem.input, problem.weight, self.bias, *lists, *vectors,
                self.active, slot_grads, selection.budget, problem.hidden_size,
                *problem.input.stride(), *problem.weight.stride(), *scalars,
                BLOCK=LONG_BLOCK, AT_ONCE=4, num_warps=4, **flags,
            )  # fmt: skip
        if self.input_grad is not None:
            blocks = cdiv(problem.hidden_size, LONG_BLOCK)
            _long_input_grad_kernel[(piece.size * blocks,)](
                problem.weight, *lists, self.smoothing, smoothed, self.active, self.input_grad, slot_grads,
                selection.budget, *place, problem.hidden_size, blocks, *problem.weight.stride(), problem.logit_scale,
                HAS_SMOOTHING=smoothed is not None, HAS_HOT=has_hot, BLOCK=LONG_BLOCK, AT_ONCE=4, num_warps=4,
            )  # fmt: skip

    # -- grad C

    def _transposition(self) -> Transposition:
        lent = lent_memory(self.request.weight, self.slots, slot_dtype(self.slots))
        return Transposition(self.selection, self.target, self.active, self.problem.num_rows, lent)

    def _weight_grad(self, hot: _HotPart | None, slot_grads: Tensor, columns: Columns) -> Tensor | None:
        problem, request, selection = self.problem, self.request, self.selection
        bias_grad = problem.weight.new_empty(problem.num_rows, dtype=torch.float32) if request.bias else None
        smoothed = total = None
        if self.smoothing is not None:
            if request.weight is not None:
                smoothed = weighted_sum(problem.input, self.smoothing, self.active)
            total = torch.where(self.active, self.smoothing, 0.0).sum()
        buffer = None if request.weight is None else request.weight.buffer
        block = min(next_power_of_2(problem.hidden_size), column_sums.BLOCK)
        blocks = 1 if buffer is None else cdiv(problem.hidden_size, block)
        divisor = column_sums.Divisor.of(selection.budget + 1)
        # No row has more entries than there are tokens.
        long_items = cdiv(self.slots, column_sums.LONG) * blocks if problem.num_tokens >= column_sums.LONG else 0
        long_programs = min(long_items, column_sums.LONG_PROGRAMS)
        groups = cdiv(problem.num_rows, column_sums.ROWS * column_sums.STRIDE) * column_sums.STRIDE
        column_sums.weight_grad_kernel[(long_programs + groups * blocks,)](
            self.target, selection.rows, selection.found,
            problem.input, columns.starts, columns.slots, slot_grads, self.plan.hot_place,
            None if hot is None else hot.weight_grad,
            None if hot is None else hot.bias_grad,
            self.smoothing_weight, smoothed, total, buffer, bias_grad,
            problem.hidden_size, problem.num_rows, blocks, long_programs,
            selection.budget + 1, divisor.factor, divisor.shift,
            *problem.input.stride(), 0 if buffer is None else buffer.stride(0), problem.logit_scale,
            HAS_HOT=hot is not None,
            HAS_SMOOTHING=self.smoothing is not None,
            ACCUMULATE=request.weight is not None and request.weight.accumulate,
            WRITE=buffer is not None,
            BIAS=bias_grad is not None,
            WIDE=columns.slots.dtype == torch.int64,
            EVEN=problem.hidden_size % block == 0,
            BLOCK=block, ROWS=column_sums.ROWS, MANY=column_sums.MANY, LONG=column_sums.LONG, STRIDE=column_sums.STRIDE,
            BY_PIECE=column_sums.by_piece(problem.input), num_warps=1,
        )  # fmt: skip
        return bias_grad
