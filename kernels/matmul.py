"""Products of the backward pass, ``out = a @ b`` or ``out += a @ b`` with one fp32 accumulation over the whole inner
dimension.

Two ways, chosen by :func:`library_can`:

- the vendor's library, where torch exposes what is needed: an output of the operands' dtype, or an fp32 output of
  16-bit operands (newer torch);
- a Triton kernel otherwise: any strides, any output dtype, and a factor that only the device knows, applied in fp32
  before the output is rounded (fp16 needs it).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .logits import grouped_tile
from .tiles import INTERPRETED, TensorDescriptor, can_use_tma, cdiv, product_precision, product_tile

LIBRARY_WIDENS = hasattr(torch.ops.aten.addmm, "dtype_out") and hasattr(torch.ops.aten.mm, "dtype_out")
"""Whether torch's products can write fp32 from 16-bit operands."""


@triton.jit(do_not_specialize=["num_rows", "num_cols", "inner"])
def _product_kernel(  # type: ignore[no-untyped-def]
    a,
    b,
    out,
    factor,
    num_rows,
    num_cols,
    inner,
    a_stride_row,
    a_stride_inner,
    b_stride_inner,
    b_stride_col,
    out_stride_row,
    out_stride_col,
    HAS_FACTOR: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    TMA: tl.constexpr,
    A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid_r, pid_c = grouped_tile(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.cdiv(num_cols, COLS), GROUP)
    r0 = pid_r * ROWS
    c0 = pid_c * COLS
    o_row = (r0 + tl.arange(0, ROWS)).to(tl.int64)
    o_col = (c0 + tl.arange(0, COLS)).to(tl.int64)
    m_out = (o_row < num_rows)[:, None] & (o_col < num_cols)[None, :]

    b_acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    if TMA:
        for k in range(0, inner, INNER):
            b_a = a.load([k, r0]).T if A_TRANSPOSED else a.load([r0, k])
            b_b = b.load([c0, k]).T if B_TRANSPOSED else b.load([k, c0])
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION)
    else:
        o_inner = tl.arange(0, INNER).to(tl.int64)
        p_a = a + tl.minimum(o_row, num_rows - 1)[:, None] * a_stride_row + o_inner[None, :] * a_stride_inner
        p_b = b + o_inner[:, None] * b_stride_inner + tl.minimum(o_col, num_cols - 1)[None, :] * b_stride_col
        for k in range(0, inner, INNER):
            m_inner = o_inner < inner - k
            b_a = tl.load(p_a, mask=m_inner[None, :], other=0.0)
            b_b = tl.load(p_b, mask=m_inner[:, None], other=0.0)
            b_acc = tl.dot(b_a, b_b, b_acc, input_precision=PRECISION)
            p_a += INNER * a_stride_inner
            p_b += INNER * b_stride_inner

    if HAS_FACTOR:
        b_acc *= tl.load(factor)
    p_out = out + o_row[:, None] * out_stride_row + o_col[None, :] * out_stride_col
    if ACCUMULATE:
        b_acc += tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out, b_acc.to(out.dtype.element_ty), mask=m_out)


def library_can(out: Tensor, a: Tensor, factor: Tensor | None) -> bool:
    """Whether the library computes this product; it is never asked for under the interpreter, which is for testing."""
    if factor is not None or INTERPRETED:
        return False
    return out.dtype == a.dtype or (LIBRARY_WIDENS and out.dtype == torch.float32)


def product(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    accumulate: bool,
    factor: Tensor | None = None,
    library: bool | None = None,
) -> None:
    """``out = factor * (a @ b)``, added to ``out`` if ``accumulate``.

    Args:
        factor: one fp32 value on the device, or None for 1.
        library: force the library's product or the kernel's; None lets :func:`library_can` choose.
    """
    if out.numel() == 0:
        return
    if library_can(out, a, factor) if library is None else library:
        _library_product(out, a, b, accumulate)
    else:
        _triton_product(out, a, b, accumulate, factor)


def _library_product(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    if out.dtype == a.dtype:
        if accumulate:
            torch.addmm(out, a, b, out=out)
        else:
            torch.mm(a, b, out=out)
    elif accumulate:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    else:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)


def _triton_product(out: Tensor, a: Tensor, b: Tensor, accumulate: bool, factor: Tensor | None) -> None:
    a_transposed = a.stride(0) == 1 and a.stride(1) != 1
    b_transposed = b.stride(0) == 1 and b.stride(1) != 1
    a_rows = a.T if a_transposed else a
    b_rows = b.T if b_transposed else b
    tma = a.element_size() == 2 and can_use_tma(a_rows) and can_use_tma(b_rows)
    tile = product_tile(a.dtype, tma)
    a_handle: object = a
    b_handle: object = b
    if tma:
        a_block = [tile.inner, tile.rows] if a_transposed else [tile.rows, tile.inner]
        b_block = [tile.cols, tile.inner] if b_transposed else [tile.inner, tile.cols]
        a_handle = TensorDescriptor.from_tensor(a_rows, a_block)
        b_handle = TensorDescriptor.from_tensor(b_rows, b_block)
    grid = (cdiv(out.shape[0], tile.rows) * cdiv(out.shape[1], tile.cols),)
    _product_kernel[grid](
        a_handle, b_handle, out, factor,
        out.shape[0], out.shape[1], a.shape[1],
        *a.stride(), *b.stride(), *out.stride(),
        HAS_FACTOR=factor is not None, ACCUMULATE=accumulate,
        ROWS=tile.rows, COLS=tile.cols, INNER=tile.inner, GROUP=tile.group,
        TMA=tma, A_TRANSPOSED=a_transposed, B_TRANSPOSED=b_transposed,
        PRECISION=product_precision(a.dtype),
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
