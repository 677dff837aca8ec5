"""grad C of the sampled mode: each row's entries, ``weight * E_n``, summed in registers and written once.

Most rows have no entry: a program takes a few rows, sets those to 0 all together, and sums the others one by one. A
long row, with hundreds of times the average's entries, would keep all waiting if it were begun late: the first programs
take the long rows, and the others go on beside them. They need no list of such rows: every so many entries, a program
looks whether the place is the first such one in a long row.

A row's sum depends on its slots alone, whatever else there is: some at a time, in their order; fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from .entries import read, row_of_slot
from .select_entries import lowest_bit
from .tiles import INTERPRETED, cache_bytes, cdiv

BLOCK, ROWS, STRIDE, MANY = 256, 8, 64, 8
"""What a program, a warp, sums: elements of a row; rows one after another, so far apart, since ids are often sorted by
frequency and neighbours have much to do; entries of a row at a time as long as there are so many."""
LONG = 16 if INTERPRETED else 256
"""From how many entries on a row is begun early."""
LONG_PROGRAMS = 3 if INTERPRETED else 4096
"""Most lists are far from full: one program for as many entries as there could be would find nothing to do."""


@dataclass(frozen=True)
class Divisor:
    """Division of numbers in ``[0, 2^31)`` by a multiplication: ``n // d == (n * factor >> 32) >> shift``."""

    factor: int
    shift: int

    @classmethod
    def of(cls, d: int) -> Divisor:
        """Of ``2 <= d < 2^31``."""
        bits = (d - 1).bit_length()
        return cls(cdiv(2 ** (31 + bits), d), bits - 1)


def by_piece(input: Tensor) -> bool:
    """Whether all rows' first pieces come before the second ones: where E does not fit the cache, but its pieces do."""
    return input.nbytes > cache_bytes(input.device)


@triton.jit
def _token_of(slot, slots_per_token, factor, shift, WIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``slot // slots_per_token``, by ``Divisor``."""
    if WIDE:
        return slot // slots_per_token
    else:
        return (tl.umulhi(slot.to(tl.uint32), factor.to(tl.uint32)) >> shift).to(tl.int64)


@triton.jit
def _column_sum(  # type: ignore[no-untyped-def]
    input,
    ordered,
    slot_grads,
    first,
    o_d,
    m_d,
    slots_per_token,
    factor,
    shift,
    input_stride_n,
    input_stride_d,
    WIDE: tl.constexpr,
    WRITE: tl.constexpr,
    EVEN: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """AT_ONCE entries' ``weight * E_n``, and their weights, both summed."""
    b_slot = tl.load(ordered + first + tl.arange(0, AT_ONCE))
    b_g = tl.load(slot_grads + b_slot)
    b_sum = tl.zeros_like(o_d).to(tl.float32)
    if WRITE:
        p_e = input + _token_of(b_slot, slots_per_token, factor, shift, WIDE)[:, None] * input_stride_n
        b_e = read(p_e + o_d[None, :] * input_stride_d, m_d[None, :], not EVEN)
        b_sum = tl.sum(b_e * b_g[:, None], 0)
    return b_sum, tl.sum(b_g, 0)


@triton.jit
def _before(out, v, o_d, m_d, out_stride_v, ACCUMULATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a row is added to. Asked for early, but added to the finished sum: a large number would swallow small terms.

    E is read again and again, and is to stay in the cache rather than what is read or written once.
    """
    if ACCUMULATE:
        p_row = out + v * out_stride_v + o_d
        return tl.load(p_row, mask=m_d, other=0.0, eviction_policy="evict_first").to(tl.float32)
    else:
        return tl.zeros_like(o_d).to(tl.float32)


@triton.jit
def _write_row(  # type: ignore[no-untyped-def]
    out,
    bias_out,
    v,
    piece,
    o_d,
    m_d,
    b_acc,
    s_bias,
    b_before,
    smoothing_weight,
    smoothed_input,
    smoothing_sum,
    out_stride_v,
    scale,
    HAS_SMOOTHING: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WRITE: tl.constexpr,
    BIAS: tl.constexpr,
):
    """A row's sum, to which label smoothing and what it is added to are added."""
    if WRITE:
        if HAS_SMOOTHING:
            s_c = tl.load(smoothing_weight + v) * scale
            b_acc -= s_c * tl.load(smoothed_input + o_d, mask=m_d, other=0.0)
        if ACCUMULATE:
            b_acc += b_before
        tl.store(out + v * out_stride_v + o_d, b_acc.to(out.dtype.element_ty), mask=m_d, eviction_policy="evict_first")
    if BIAS:  # noqa: SIM102
        if piece == 0:
            if HAS_SMOOTHING:
                s_bias -= tl.load(smoothing_weight + v) * scale * tl.load(smoothing_sum)
            tl.store(bias_out + v, s_bias)


@triton.jit
def _sum_row(  # type: ignore[no-untyped-def]
    input,
    starts,
    ordered,
    slot_grads,
    hot_place,
    hot_weight_grad,
    hot_bias_grad,
    smoothing_weight,
    smoothed_input,
    smoothing_sum,
    out,
    bias_out,
    v,
    piece,
    o_d,
    m_d,
    hidden,
    slots_per_token,
    factor,
    shift,
    input_stride_n,
    input_stride_d,
    out_stride_v,
    scale,
    HAS_HOT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WRITE: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,
    MANY: tl.constexpr,
):
    """One piece of row ``v``, summed and written."""
    begin = tl.load(starts + v)
    end = tl.load(starts + v + 1)
    b_before = _before(out, v, o_d, m_d, out_stride_v, ACCUMULATE)
    b_acc = tl.zeros_like(o_d).to(tl.float32)
    s_bias = 0.0
    many = begin + (end - begin) // MANY * MANY
    for place in range(begin, many, MANY):
        b_sum, s_sum = _column_sum(
            input, ordered, slot_grads, place, o_d, m_d, slots_per_token, factor, shift,
            input_stride_n, input_stride_d, WIDE, WRITE, EVEN, MANY,
        )  # fmt: skip
        b_acc += b_sum
        s_bias += s_sum
    for place in range(many, end):
        b_sum, s_sum = _column_sum(
            input, ordered, slot_grads, place, o_d, m_d, slots_per_token, factor, shift,
            input_stride_n, input_stride_d, WIDE, WRITE, EVEN, 1,
        )  # fmt: skip
        b_acc += b_sum
        s_bias += s_sum
    if HAS_HOT:
        hot = tl.load(hot_place + v) - 1
        if hot >= 0:
            if WRITE:
                b_acc += tl.load(hot_weight_grad + hot.to(tl.int64) * hidden + o_d, mask=m_d, other=0.0)
            if BIAS:
                s_bias += tl.load(hot_bias_grad + hot)
    _write_row(
        out, bias_out, v, piece, o_d, m_d, b_acc, s_bias, b_before, smoothing_weight, smoothed_input, smoothing_sum,
        out_stride_v, scale, HAS_SMOOTHING, ACCUMULATE, WRITE, BIAS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_blocks", "long_programs", "slots_per_token", "factor", "shift"])
def weight_grad_kernel(  # type: ignore[no-untyped-def]
    target,
    rows,
    found,
    input,
    starts,
    ordered,
    slot_grads,
    hot_place,
    hot_weight_grad,
    hot_bias_grad,
    smoothing_weight,
    smoothed_input,
    smoothing_sum,
    out,
    bias_out,
    hidden,
    num_rows,
    num_blocks,
    long_programs,
    slots_per_token,
    factor,
    shift,
    input_stride_n,
    input_stride_d,
    out_stride_v,
    scale,
    HAS_HOT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WRITE: tl.constexpr,
    BIAS: tl.constexpr,
    WIDE: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    MANY: tl.constexpr,
    LONG: tl.constexpr,
    STRIDE: tl.constexpr,
    BY_PIECE: tl.constexpr,
):
    """One piece of ROWS rows of grad C; the first piece also makes the gradients of their biases.

    The first ``long_programs`` take the long rows instead, a row's place being the first multiple of LONG that it
    reaches. As to the others, all rows' first pieces come first if BY_PIECE, else all pieces of the first rows.
    """
    tl.static_assert(ROWS <= 31, "a bit each in an int32, below its sign")
    if tl.program_id(0) < long_programs:
        total = tl.load(starts + num_rows)
        for item in range(tl.program_id(0), tl.cdiv(total, LONG).to(tl.int32) * num_blocks, long_programs):
            place = (item // num_blocks).to(tl.int64) * LONG
            piece = item % num_blocks
            v, _ = row_of_slot(tl.load(ordered + place), True, target, rows, found, slots_per_token - 1)
            v = v.to(tl.int64)
            begin = tl.load(starts + v)
            if (tl.load(starts + v + 1) - begin >= LONG) & (begin + LONG > place):
                o_d = (piece * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
                _sum_row(
                    input, starts, ordered, slot_grads, hot_place, hot_weight_grad, hot_bias_grad,
                    smoothing_weight, smoothed_input, smoothing_sum, out, bias_out, v, piece, o_d, o_d < hidden,
                    hidden, slots_per_token, factor, shift, input_stride_n, input_stride_d, out_stride_v, scale,
                    HAS_HOT, HAS_SMOOTHING, ACCUMULATE, WRITE, BIAS, WIDE, EVEN, MANY,
                )  # fmt: skip
    else:
        program = tl.program_id(0) - long_programs
        if BY_PIECE:
            num_groups = (tl.num_programs(0) - long_programs) // num_blocks
            group = program % num_groups
            piece = program // num_groups
        else:
            group = program // num_blocks
            piece = program % num_blocks
        first = (group // STRIDE).to(tl.int64) * (STRIDE * ROWS) + group % STRIDE
        o_d = (piece * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        m_d = o_d < hidden
        o_bit = tl.arange(0, ROWS)
        o_row = first + o_bit * STRIDE
        m_row = o_row < num_rows
        b_begin = tl.load(starts + o_row, mask=m_row, other=0)
        b_end = tl.load(starts + o_row + 1, mask=m_row, other=0)
        m_occurs = b_end > b_begin
        if HAS_HOT:
            m_occurs |= tl.load(hot_place + o_row, mask=m_row, other=0) > 0
        if HAS_SMOOTHING:
            m_occurs |= m_row
        m_nothing = m_row & ~m_occurs
        if WRITE and not ACCUMULATE:
            p_out = out + o_row[:, None] * out_stride_v + o_d[None, :]
            m_out = m_nothing[:, None] if EVEN else m_nothing[:, None] & m_d[None, :]
            b_zero = tl.zeros((ROWS, BLOCK), dtype=out.dtype.element_ty)
            tl.store(p_out, b_zero, mask=m_out, eviction_policy="evict_first")
        if BIAS:  # noqa: SIM102
            if piece == 0:
                tl.store(bias_out + o_row, tl.zeros((ROWS,), dtype=tl.float32), mask=m_nothing)

        left = tl.sum(tl.where(m_occurs & (b_end - b_begin < LONG), 1 << o_bit, 0), 0)
        while left != 0:
            bit, left = lowest_bit(left)
            _sum_row(
                input, starts, ordered, slot_grads, hot_place, hot_weight_grad, hot_bias_grad,
                smoothing_weight, smoothed_input, smoothing_sum, out, bias_out,
                first + bit * STRIDE, piece, o_d, m_d,
                hidden, slots_per_token, factor, shift, input_stride_n, input_stride_d, out_stride_v, scale,
                HAS_HOT, HAS_SMOOTHING, ACCUMULATE, WRITE, BIAS, WIDE, EVEN, MANY,
            )  # fmt: skip
