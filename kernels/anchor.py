"""The sampled mode's look ahead: what the anchor needs to know of a batch's hot rows and of a sample of the others.

One product of all tokens with the few rows looked at, reduced on chip to four sums a token; the target, where it is not
hot, is one more dot product. See ``sampling.anchor_sums``, the same in plain PyTorch, for what is summed.

Numerics:

- Sums are fp64, since ranks split them in different ways and must end with the same anchor; what is summed is fp32, and
  the same on whichever rank holds the row. Exponentials are fp32 mantissas with an exponent of their own, so they
  neither overflow nor vanish within the range that the anchor can represent.
- No atomics: every tile of rows has its own partial sums.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import sampling
from .interface import LocalProblem
from .logits import LOG2E, LogitOperands, finish_logits, grouped_tile, row_products
from .tiles import INTERPRETED, Tile

MOST_COLS, WARPS = 128, 8
"""An fp64 tile takes twice the registers."""
TARGET_BLOCK = 1024
NOT_HERE, HOT, COLD = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
LARGEST_EXPONENT = tl.constexpr(sampling.LARGEST_EXPONENT * 1.4426950408889634)
SMALLEST_EXPONENT = tl.constexpr(-1000.0)


@triton.jit
def _wide_exp(b_z):  # type: ignore[no-untyped-def]
    """``exp`` in fp64 with the mantissa of fp32, and no larger than ``exp(sampling.LARGEST_EXPONENT)``."""
    b_y = b_z * LOG2E
    b_y = tl.where(b_y > LARGEST_EXPONENT, LARGEST_EXPONENT, b_y)
    b_y = tl.where(b_y < SMALLEST_EXPONENT, SMALLEST_EXPONENT, b_y)
    b_whole = tl.floor(b_y)
    b_power = ((tl.where(b_whole == b_whole, b_whole, 0.0).to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.exp2(b_y - b_whole).to(tl.float64) * b_power


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _look_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    bias,
    kinds,
    partials,
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
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile's four sums: exponentials of hot rows; logits, their squares and their exponentials of cold ones."""
    num_tiles = tl.cdiv(num_rows, COLS)
    pid_n, pid_v = grouped_tile(tl.program_id(0), tl.cdiv(num_tokens, ROWS), num_tiles, GROUP)
    n0 = pid_n * ROWS
    v0 = pid_v * COLS
    o_n = n0 + tl.arange(0, ROWS)
    o_v = v0 + tl.arange(0, COLS)
    m_n = o_n < num_tokens
    b_kind = tl.load(kinds + o_v, mask=o_v < num_rows, other=NOT_HERE)
    b_bias = 0.0
    if HAS_BIAS:
        b_bias = tl.load(bias + o_v, mask=o_v < num_rows, other=0.0).to(tl.float32)
    b_z = row_products(
        input, weight, n0, v0, num_tokens, num_rows, hidden,
        input_stride_n, input_stride_d, weight_stride_v, weight_stride_d,
        ROWS, COLS, INNER, EVEN_INNER, TMA, PRECISION,
    )  # fmt: skip
    b_z = finish_logits(b_z, b_bias, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)

    field = num_tiles.to(tl.int64) * num_tokens
    p_out = partials + pid_v.to(tl.int64) * num_tokens + o_n
    b_exp = _wide_exp(b_z)
    m_hot = (b_kind == HOT)[None, :]
    m_cold = (b_kind == COLD)[None, :]
    tl.store(p_out, tl.sum(tl.where(m_hot, b_exp, 0.0), 1), mask=m_n)
    tl.store(p_out + 3 * field, tl.sum(tl.where(m_cold, b_exp, 0.0), 1), mask=m_n)
    b_cold = tl.where(m_cold, b_z, 0.0).to(tl.float64)
    tl.store(p_out + field, tl.sum(b_cold, 1), mask=m_n)
    tl.store(p_out + 2 * field, tl.sum(b_cold * b_cold, 1), mask=m_n)


@triton.jit
def _target_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    bias,
    target,
    counted,
    out,
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
    BLOCK: tl.constexpr,
):
    """The exponential of one token's target logit, an fp32 dot product; 0 where it does not count."""
    n = tl.program_id(0).to(tl.int64)
    b_exp = tl.zeros((1,), dtype=tl.float64)
    if tl.load(counted + n) != 0:
        row = tl.load(target + n)
        b_acc = tl.zeros((1, BLOCK), dtype=tl.float32)
        for d in range(0, hidden, BLOCK):
            o_d = (d + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
            b_e = tl.load(input + n * input_stride_n + o_d * input_stride_d, mask=o_d < hidden, other=0.0)
            b_c = tl.load(weight + row * weight_stride_v + o_d * weight_stride_d, mask=o_d < hidden, other=0.0)
            b_acc += b_e.to(tl.float32) * b_c.to(tl.float32)
        b_bias = tl.zeros((1,), dtype=tl.float32)
        if HAS_BIAS:
            b_bias += tl.load(bias + row).to(tl.float32)
        b_dot = tl.sum(b_acc, 1)[:, None]
        b_z = tl.sum(finish_logits(b_dot, b_bias, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP), 1)
        b_exp = _wide_exp(b_z)
    tl.store(out + n + tl.arange(0, 1), b_exp)


def anchor_sums(
    problem: LocalProblem, rows: sampling.AnchorRows, first_id: int, num_real: int, *, allow_tma: bool = True
) -> Tensor:
    """``sampling.anchor_sums`` by Triton: fp64 ``[5, N]``.

    Args:
        allow_tma: whether tensor memory descriptors may be used where they can.
    """
    num_tokens = problem.num_tokens
    sums = torch.zeros(5, num_tokens, dtype=torch.float64, device=problem.input.device)
    if problem.num_rows == 0 or num_tokens == 0:
        return sums
    looked_at = rows.local(first_id, num_real)
    kinds = torch.where(looked_at.hot, HOT.value, torch.where(looked_at.cold, COLD.value, NOT_HERE.value))
    bias = None if problem.bias is None else problem.bias.contiguous()
    weight = problem.weight.index_select(0, looked_at.rows)
    sub_problem = replace(
        problem,
        weight=weight,
        bias=None if bias is None else bias.index_select(0, looked_at.rows),
        smoothing_weight=None,
    )
    operands = LogitOperands.prepare(sub_problem, allow_tma=allow_tma)
    operands = replace(operands, tile=_narrow(operands.tile))
    num_tiles = triton.cdiv(operands.num_rows, operands.tile.cols)
    partials = torch.empty(4, num_tiles, num_tokens, dtype=torch.float64, device=problem.input.device)
    _look_kernel[operands.grid()](
        *operands.handles(), operands.bias, kinds.to(torch.int32), partials,
        *operands.sizes(), operands.scale, operands.softcap or 1.0, **operands.flags(),
    )  # fmt: skip
    hot_exponentials, *cold = partials.sum(1)
    sums[0] = hot_exponentials
    sums[2:] = torch.stack(cold)
    _target_kernel[(num_tokens,)](
        problem.input, problem.weight, bias, problem.target.contiguous(), sampling.counted(problem, rows, first_id),
        sums[1], problem.hidden_size, *problem.input.stride(), *problem.weight.stride(),
        problem.logit_scale, problem.softcap or 1.0,
        HAS_BIAS=bias is not None, HAS_SCALE=problem.logit_scale != 1.0, HAS_SOFTCAP=problem.softcap is not None,
        BLOCK=min(triton.next_power_of_2(problem.hidden_size), TARGET_BLOCK), num_warps=2, enable_fp_fusion=False,
    )  # fmt: skip
    return sums


def _narrow(tile: Tile) -> Tile:
    if INTERPRETED or tile.cols < MOST_COLS:
        return tile
    return replace(tile, cols=MOST_COLS, warps=WARPS)
