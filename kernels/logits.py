"""One tile of the logits ``z = softcap(scale * (E C^T + b))``, for the kernels that reduce it on chip.

The product is accumulated in fp32. Operands come through TMA descriptors, which fill what lies outside with zeros, or
through pointers of any strides, where rows outside are clamped to the last one. Either way the values outside the
matrix are finite rubbish at best: whoever reduces over a tile masks it, *after* the softcap.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .interface import LocalProblem
from .tiles import TensorDescriptor, Tile, can_use_tma, cdiv, logit_tile, product_precision

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def grouped_tile(pid, num_row_tiles, num_col_tiles, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Walk GROUP tiles of rows down one tile of columns before the next: programs in flight share both operands."""
    per_group = GROUP * num_col_tiles
    first = pid // per_group * GROUP
    size = tl.minimum(num_row_tiles - first, GROUP)
    inside = pid % per_group
    return first + inside % size, inside // size


@triton.jit
def row_products(  # type: ignore[no-untyped-def]
    a,
    b,
    row,
    col,
    num_rows,
    num_cols,
    inner,
    a_stride_row,
    a_stride_inner,
    b_stride_row,
    b_stride_inner,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``a[row:row+ROWS] @ b[col:col+COLS].T`` in fp32; a and b are descriptors if TMA, pointers if not."""
    b_acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    if TMA:
        for k in range(0, inner, INNER):
            b_a = a.load([row, k])
            b_b = b.load([col, k])
            b_acc = tl.dot(b_a, b_b.T, b_acc, input_precision=PRECISION)
    else:
        o_row = tl.minimum(row + tl.arange(0, ROWS), num_rows - 1).to(tl.int64)
        o_col = tl.minimum(col + tl.arange(0, COLS), num_cols - 1).to(tl.int64)
        o_inner = tl.arange(0, INNER).to(tl.int64)
        p_a = a + o_row[:, None] * a_stride_row + o_inner[None, :] * a_stride_inner
        p_b = b + o_inner[:, None] * b_stride_inner + o_col[None, :] * b_stride_row
        for k in range(0, inner, INNER):
            if EVEN_INNER:
                b_a = tl.load(p_a)
                b_b = tl.load(p_b)
            else:
                m_inner = o_inner < inner - k
                b_a = tl.load(p_a, mask=m_inner[None, :], other=0.0)
                b_b = tl.load(p_b, mask=m_inner[:, None], other=0.0)
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION)
            p_a += INNER * a_stride_inner
            p_b += INNER * b_stride_inner
    return b_acc


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh to fp32 accuracy: a polynomial where ``1 - 2 / (1 + e^2x)`` would cancel."""
    b_sq = x * x
    b_poly = tl.fma(b_sq, 0.01799921877682209, -0.05339105427265167)
    b_poly = tl.fma(b_sq, b_poly, 0.1333051323890686)
    b_poly = tl.fma(b_sq, b_poly, -0.3333331048488617)
    b_near = tl.fma(x * b_sq, b_poly, x)
    b_abs = tl.abs(x)
    b_far = 1.0 - 2.0 / (1.0 + tl.exp2(b_abs * (2.0 * LOG2E)))
    b_far = tl.where(x < 0, -b_far, b_far)
    return tl.where(b_abs < 0.5, b_near, b_far)


@triton.jit
def finish_logits(  # type: ignore[no-untyped-def]
    b_acc,
    b_bias,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """From accumulators to z."""
    if HAS_BIAS:
        b_acc += b_bias[None, :]
    if HAS_SCALE:
        b_acc *= scale
    if HAS_SOFTCAP:
        b_acc = softcap * tanh(b_acc / softcap)
    return b_acc


@triton.jit
def softmax_tile(b_z, b_max, b_log2_sum):  # type: ignore[no-untyped-def]
    """p from z, M and the binary logarithm of S."""
    return tl.exp2(tl.fma(b_z - b_max[:, None], LOG2E, -b_log2_sum[:, None]))


@triton.jit
def subtract_targets(b_g, b_col, b_factor):  # type: ignore[no-untyped-def]
    """The targets' factors at their columns of a tile, -1 for those elsewhere: few tiles hold a target of theirs."""
    if tl.max(b_col, 0) >= 0:
        m_target = b_col[:, None] == tl.arange(0, b_g.shape[1])[None, :]
        b_g = tl.where(m_target, b_g - b_factor[:, None], b_g)
    return b_g


@triton.jit
def chain_to_products(b_g, b_z, scale, softcap, HAS_SCALE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """From the gradient in z to that in ``E C^T + b``: what ``finish_logits`` did, backwards."""
    if HAS_SOFTCAP:
        b_ratio = b_z / softcap
        b_g *= 1.0 - b_ratio * b_ratio
    if HAS_SCALE:
        b_g *= scale
    return b_g


@dataclass(frozen=True)
class LogitOperands:
    """What every kernel that computes z is launched with, prepared once a call."""

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    smoothing_weight: Tensor | None
    scale: float
    softcap: float | None
    tile: Tile
    tma: bool
    precision: str

    @classmethod
    def prepare(cls, problem: LocalProblem, *, allow_tma: bool = True) -> LogitOperands:
        tma = allow_tma and can_use_tma(problem.input) and can_use_tma(problem.weight)
        return cls(
            input=problem.input,
            weight=problem.weight,
            target=problem.target.contiguous(),
            bias=None if problem.bias is None else problem.bias.contiguous(),
            smoothing_weight=None if problem.smoothing_weight is None else problem.smoothing_weight.contiguous(),
            scale=problem.logit_scale,
            softcap=problem.softcap,
            tile=logit_tile(problem.input.dtype, problem.num_tokens, problem.hidden_size, tma),
            tma=tma,
            precision=product_precision(problem.input.dtype),
        )

    @property
    def num_tokens(self) -> int:
        return self.input.shape[0]

    @property
    def num_rows(self) -> int:
        return self.weight.shape[0]

    @property
    def hidden(self) -> int:
        return self.input.shape[1]

    def tokens(self, start: int, stop: int) -> LogitOperands:
        """The same for some of the tokens."""
        return replace(self, input=self.input[start:stop], target=self.target[start:stop])

    def handles(self) -> tuple[Any, Any]:
        """E and C as the kernels take them: descriptors of their tiles, or pointers."""
        if not self.tma:
            return self.input, self.weight
        return (
            TensorDescriptor.from_tensor(self.input, [self.tile.rows, self.tile.inner]),
            TensorDescriptor.from_tensor(self.weight, [self.tile.cols, self.tile.inner]),
        )

    def grid(self, num_rows: int | None = None) -> tuple[int]:
        """One program a tile, for so many classifier rows; all of them by default."""
        num_rows = self.num_rows if num_rows is None else num_rows
        return (cdiv(self.num_tokens, self.tile.rows) * cdiv(num_rows, self.tile.cols),)

    def sizes(self) -> tuple[int, ...]:
        return self.num_tokens, self.num_rows, *self.layout()

    def layout(self) -> tuple[int, ...]:
        return self.hidden, *self.input.stride(), *self.weight.stride()

    def flags(self) -> dict[str, Any]:
        """Compile-time arguments, derived from the operands."""
        return {
            "HAS_BIAS": self.bias is not None,
            "HAS_SCALE": self.scale != 1.0,
            "HAS_SOFTCAP": self.softcap is not None,
            "HAS_SMOOTHING": self.smoothing_weight is not None,
            "ROWS": self.tile.rows,
            "COLS": self.tile.cols,
            "INNER": self.tile.inner,
            "GROUP": self.tile.group,
            "EVEN_INNER": self.hidden % self.tile.inner == 0,
            "TMA": self.tma,
            "PRECISION": self.precision,
            # A fused z - M would see a logit before its last rounding, where the forward's M is after it.
            "enable_fp_fusion": False,
            "num_warps": self.tile.warps,
            "num_stages": self.tile.stages,
        }
