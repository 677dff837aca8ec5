"""The exact backward pass, in slabs of the vocabulary.

For one slab of classifier rows at a time:

1. a kernel recomputes the slab's logits, tile by tile and exactly as the forward did, turns them into the gradient in
   ``x = E C^T + b`` (through softcap and scale) and writes it, in the inputs' dtype, to a bounded workspace;
2. ``grad E += G C_slab``, summed over slabs in fp32;
3. ``grad C_slab = G^T E``: its whole sum over tokens in one fp32 accumulation, rounded once, straight into the
   caller's buffer.

Numerics:

- ``p = exp((z - M) - log S)`` is near 1 only where ``z - M`` is exactly what the forward saw, and the target's 1 is
  subtracted in fp32, before anything is rounded.
- A token without gradient gets ``G = 0`` by selection, since E may be NaN there. For the same reason the product for
  grad C reads a copy of E in which those rows are 0 (``0 * NaN``), and grad E is selected once more at the end (C may
  hold an infinity). The copy lives in the memory of grad E's result until that is written.
- The gradient of b is summed in fp32 from G before it is rounded, per tile of tokens and then over the tiles.
- In fp16, G would underflow, or overflow under a loss scale. It is written times a power of two that puts its largest
  possible entry near 2^13, chosen on the device, and divided out in fp32 before results are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .interface import GradientRequest, InputGradReady, LocalProblem, LogitGradient
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
from .matmul import product
from .tiles import FEWEST_ROWS, TensorDescriptor, cdiv, extreme_tile
from .workspace import ALLOCATION, FP32_BYTES, allocated, default_slab_bytes, workspace_too_small

FP16_PEAK_EXPONENT = 13
COPY_TILE = (4, 1024)
SUM_ROWS, SUM_COLS = 32, 64


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "first_row"])
def _logit_grad_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    bias,
    smoothing_weight,
    target,
    row_max,
    log_sum,
    prob,
    target_factor,
    smoothing,
    active,
    factor,
    out,
    bias_partials,
    num_tokens,
    num_rows,
    hidden,
    input_stride_n,
    input_stride_d,
    weight_stride_v,
    weight_stride_d,
    out_stride_n,
    first_row,
    scale,
    softcap,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    STORE: tl.constexpr,
    BIAS_GRAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid_n, pid_v = grouped_tile(tl.program_id(0), tl.cdiv(num_tokens, ROWS), tl.cdiv(num_rows, COLS), GROUP)
    n0 = pid_n * ROWS
    v0 = pid_v * COLS

    # Small loads go before the product, which hides them.
    o_n = n0 + tl.arange(0, ROWS)
    o_v = v0 + tl.arange(0, COLS)
    m_n = o_n < num_tokens
    m_v = o_v < num_rows
    o_row = first_row + o_v
    b_target = tl.load(target + o_n, mask=m_n, other=-1) - first_row
    m_hit = (b_target >= v0) & (b_target < v0 + COLS)
    b_col = tl.where(m_hit, b_target - v0, -1).to(tl.int32)
    b_max = tl.load(row_max + o_n, mask=m_n, other=0.0)
    b_log2_sum = tl.load(log_sum + o_n, mask=m_n, other=0.0) * LOG2E
    b_prob = tl.load(prob + o_n, mask=m_n, other=0.0)
    b_target_factor = tl.load(target_factor + o_n, mask=m_n, other=0.0)
    b_active = tl.load(active + o_n, mask=m_n, other=0).to(tl.int32)
    b_bias = 0.0
    if HAS_BIAS:
        b_bias = tl.load(bias + o_row, mask=m_v, other=0.0).to(tl.float32)

    b_z = row_products(
        input, weight, n0, first_row + v0, num_tokens, first_row + num_rows, hidden,
        input_stride_n, input_stride_d, weight_stride_v, weight_stride_d,
        ROWS, COLS, INNER, EVEN_INNER, TMA, PRECISION,
    )  # fmt: skip
    b_z = finish_logits(b_z, b_bias, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)

    b_g = b_prob[:, None] * softmax_tile(b_z, b_max, b_log2_sum)
    if HAS_SMOOTHING:
        b_smoothing = tl.load(smoothing + o_n, mask=m_n, other=0.0)
        b_c = tl.load(smoothing_weight + o_row, mask=m_v, other=0.0)
        b_g -= b_smoothing[:, None] * b_c[None, :]
    b_g = subtract_targets(b_g, b_col, b_target_factor)
    b_g = chain_to_products(b_g, b_z, scale, softcap, HAS_SCALE, HAS_SOFTCAP)
    if tl.min(b_active, 0) == 0:
        b_g = tl.where((b_active != 0)[:, None], b_g, 0.0)

    if BIAS_GRAD:
        p_bias = bias_partials + pid_n.to(tl.int64) * num_rows + o_v
        tl.store(p_bias, tl.sum(b_g, 0), mask=m_v)
    if STORE:
        if HAS_FACTOR:
            b_g *= tl.load(factor)
        if TMA:
            out.store([n0, v0], b_g.to(out.dtype))
        else:
            p_out = out + o_n.to(tl.int64)[:, None] * out_stride_n + o_v[None, :]
            tl.store(p_out, b_g.to(out.dtype.element_ty), mask=m_n[:, None] & m_v[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _select_tokens_kernel(  # type: ignore[no-untyped-def]
    source,
    active,
    factor,
    out,
    num_tokens,
    hidden,
    source_stride_n,
    source_stride_d,
    HAS_FACTOR: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """``out = factor * source`` on active rows, 0 on the others, which are not read; ``out`` is contiguous."""
    o_n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    o_d = (tl.program_id(1) * COLS + tl.arange(0, COLS)).to(tl.int64)[None, :]
    m = (o_n < num_tokens) & (o_d < hidden)
    m_active = tl.load(active + o_n, mask=o_n < num_tokens, other=0) != 0
    b = tl.load(source + o_n * source_stride_n + o_d * source_stride_d, mask=m & m_active, other=0.0).to(tl.float32)
    if HAS_FACTOR:
        b *= tl.load(factor)
    tl.store(out + o_n * hidden + o_d, b.to(out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["num_rows", "num_cols"])
def _sum_rows_kernel(  # type: ignore[no-untyped-def]
    source,
    out,
    num_rows,
    num_cols,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Column sums, in an order that depends on the shape alone and without torch's staging buffer."""
    o_col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    b_sum = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for r in range(0, num_rows, ROWS):
        o_row = r + tl.arange(0, ROWS)
        m = (o_row < num_rows)[:, None] & (o_col < num_cols)[None, :]
        b_sum += tl.load(source + o_row.to(tl.int64)[:, None] * num_cols + o_col[None, :], mask=m, other=0.0)
    tl.store(out + o_col, tl.sum(b_sum, 0), mask=o_col < num_cols)


def select_tokens(source: Tensor, active: Tensor, out: Tensor, factor: Tensor | None = None) -> Tensor:
    num_tokens, hidden = source.shape
    rows, cols = COPY_TILE
    _select_tokens_kernel[(cdiv(num_tokens, rows), cdiv(hidden, cols))](
        source, active, factor, out, num_tokens, hidden, *source.stride(),
        HAS_FACTOR=factor is not None, ROWS=rows, COLS=cols, num_warps=4,
    )  # fmt: skip
    return out


def gradients(
    problem: LocalProblem,
    logit_grad: LogitGradient,
    request: GradientRequest,
    on_input_grad: InputGradReady,
    *,
    allow_tma: bool = True,
    library: bool | None = None,
) -> Tensor | None:
    """The contract's ``gradients``.

    Args:
        allow_tma: whether tensor memory descriptors may be used where they can.
        library: forces the products' way, see :func:`.matmul.product`.
    """
    if problem.num_tokens == 0 or problem.num_rows == 0:
        return nothing_to_reduce(problem, request, on_input_grad)
    operands = LogitOperands.prepare(problem, allow_tma=allow_tma)
    plan = _Plan.make(problem, operands, request)
    request.await_input()
    return _Backward(problem, operands, logit_grad, request, plan, library).run(on_input_grad)


def nothing_to_reduce(problem: LocalProblem, request: GradientRequest, on_input_grad: InputGradReady) -> Tensor | None:
    if request.weight is not None and not request.weight.accumulate:
        request.weight.buffer.zero_()
    if request.input_dtype is not None:
        zeros = torch.zeros_like(problem.input, dtype=request.input_dtype, memory_format=torch.contiguous_format)
        request.hand_on(zeros, on_input_grad)
    return problem.weight.new_zeros(problem.num_rows, dtype=torch.float32) if request.bias else None


@dataclass(frozen=True)
class _Plan:
    """Memory of one backward pass.

    Attributes:
        slab: classifier rows at a time.
        accumulator: whether grad E needs an fp32 accumulator beside its result.
        scratch: whether the copy of E needs memory of its own.
    """

    slab: int
    accumulator: bool
    scratch: bool

    @classmethod
    def make(cls, problem: LocalProblem, operands: LogitOperands, request: GradientRequest) -> _Plan:
        """
        Raises:
            ValueError: the workspace does not hold what is needed for one tile of classifier rows.
        """
        num_tokens, hidden, tile = problem.num_tokens, problem.hidden_size, operands.tile
        dtype = problem.input.dtype
        accumulator = request.input_dtype is not None and request.input_dtype != torch.float32
        in_result = accumulator and request.input_dtype is not None and request.input_dtype.itemsize == dtype.itemsize
        scratch = request.weight is not None and not in_result
        fixed = _fixed_bytes(num_tokens, hidden, dtype, accumulator=accumulator, scratch=scratch)
        stored = request.input_dtype is not None or request.weight is not None
        per_row = _bytes_per_row(num_tokens, dtype if stored else None, tile.rows if request.bias else None)
        if problem.workspace is None:
            budget = default_slab_bytes(num_tokens * hidden * FP32_BYTES)
        else:
            budget = problem.workspace - fixed
            if budget < per_row * tile.cols:
                least = fixed + per_row * tile.cols
                raise workspace_too_small(problem.workspace, least, num_tokens, problem.num_rows, hidden)
        most = max(1, budget // max(1, per_row * tile.cols)) * tile.cols
        slabs = cdiv(problem.num_rows, most)
        even = cdiv(cdiv(problem.num_rows, slabs), tile.cols) * tile.cols
        return cls(even, accumulator, scratch)


def _fixed_bytes(num_tokens: int, hidden: int, dtype: torch.dtype, *, accumulator: bool, scratch: bool) -> int:
    """What a backward pass needs whatever the width of its slabs."""
    size = num_tokens * hidden
    matrices = allocated(size * FP32_BYTES * accumulator, size * dtype.itemsize * scratch)
    vectors = 8 * allocated(num_tokens * FP32_BYTES)  # copies of strided ones; what fp16's factor is made from
    return matrices + vectors + 2 * ALLOCATION


def _bytes_per_row(num_tokens: int, stored: torch.dtype | None, bias_tile_rows: int | None) -> int:
    """What each classifier row of a slab takes: its column of G, and of the partial sums of the bias gradient."""
    column = 0 if stored is None else num_tokens * stored.itemsize
    return column + (0 if bias_tile_rows is None else cdiv(num_tokens, bias_tile_rows) * FP32_BYTES)


def least_workspace(num_tokens: int, hidden: int, dtype: torch.dtype) -> int:
    """Enough for any request on any device."""
    tile = extreme_tile(dtype)
    # 16-bit inputs: an fp32 accumulator, or a copy of half its size. fp32 inputs with a 16-bit result: both.
    fixed = _fixed_bytes(num_tokens, hidden, dtype, accumulator=True, scratch=dtype == torch.float32)
    return fixed + _bytes_per_row(num_tokens, dtype, FEWEST_ROWS) * tile.cols


class _Backward:
    """One backward pass over all slabs."""

    def __init__(
        self,
        problem: LocalProblem,
        operands: LogitOperands,
        logit_grad: LogitGradient,
        request: GradientRequest,
        plan: _Plan,
        library: bool | None,
    ) -> None:
        self.problem = problem
        self.operands = operands
        self.request = request
        self.plan = plan
        self.library = library
        self.handles = operands.handles()
        self.out_handle: object = None
        self.active = logit_grad.active.contiguous()
        self.vectors = (
            logit_grad.max.contiguous(),
            logit_grad.log_sum.contiguous(),
            logit_grad.prob.contiguous(),
            logit_grad.target.contiguous(),
            None if logit_grad.smoothing is None else logit_grad.smoothing.contiguous(),
            self.active,
        )
        self.factor, self.inverse_factor = fp16_factors(problem, logit_grad)

        shape = problem.input.shape
        new = problem.input.new_empty
        self.store = request.input_dtype is not None or request.weight is not None
        self.logit_grads = new((shape[0], plan.slab)) if self.store else None
        self.bias_grad = new(problem.num_rows, dtype=torch.float32) if request.bias else None
        row_tiles = cdiv(shape[0], operands.tile.rows)
        self.bias_partials = new(row_tiles * plan.slab, dtype=torch.float32) if request.bias else None
        self.input_grad = None if request.input_dtype is None else new(shape, dtype=request.input_dtype)
        self.accumulator = new(shape, dtype=torch.float32) if plan.accumulator else self.input_grad
        self.safe_input: Tensor | None = None
        if request.weight is not None:
            memory = new(shape) if plan.scratch or self.input_grad is None else self.input_grad
            self.safe_input = self._safe_input(memory.view(problem.input.dtype))

    def _safe_input(self, out: Tensor) -> Tensor:
        return select_tokens(self.problem.input, self.active, out)

    def run(self, on_input_grad: InputGradReady) -> Tensor | None:
        for start, stop in self._slabs():
            logit_grads = self._logit_grads(start, stop)
            if self.request.input_dtype is not None:
                self._add_input_grad(logit_grads, start, stop)
                if stop == self.problem.num_rows:
                    self.request.hand_on(self._finish_input_grad(), on_input_grad)
            if self.request.weight is not None:
                self._write_weight_grad(logit_grads, start, stop)
        return self.bias_grad

    def _slabs(self) -> Iterator[tuple[int, int]]:
        num_rows = self.problem.num_rows
        for start in range(0, num_rows if self.store or self.request.bias else 0, self.plan.slab):
            yield start, min(start + self.plan.slab, num_rows)

    def _logit_grads(self, start: int, stop: int) -> Tensor | None:
        operands, width = self.operands, stop - start
        out = None if self.logit_grads is None else self.logit_grads[:, :width]
        _logit_grad_kernel[operands.grid(width)](
            *self.handles, operands.bias, operands.smoothing_weight, operands.target,
            *self.vectors, self.factor, self._out_handle(out), self.bias_partials,
            operands.num_tokens, width, *operands.layout(), self.plan.slab, start,
            operands.scale, operands.softcap or 1.0,
            HAS_FACTOR=self.factor is not None, STORE=self.store, BIAS_GRAD=self.bias_partials is not None,
            **operands.flags(),
        )  # fmt: skip
        if self.bias_grad is not None and self.bias_partials is not None:
            row_tiles = cdiv(operands.num_tokens, operands.tile.rows)
            _sum_rows_kernel[(cdiv(width, SUM_COLS),)](
                self.bias_partials, self.bias_grad[start:stop], row_tiles, width,
                ROWS=SUM_ROWS, COLS=SUM_COLS, num_warps=4,
            )  # fmt: skip
        return out

    def _out_handle(self, out: Tensor | None) -> object:
        if not self.operands.tma or out is None:
            return out
        if self.out_handle is None or out.shape[1] < self.plan.slab:  # only the last slab can be narrower
            self.out_handle = TensorDescriptor.from_tensor(out, [self.operands.tile.rows, self.operands.tile.cols])
        return self.out_handle

    def _add_input_grad(self, logit_grads: Tensor | None, start: int, stop: int) -> None:
        assert logit_grads is not None
        assert self.accumulator is not None
        weight = self.problem.weight[start:stop]
        product(self.accumulator, logit_grads, weight, accumulate=start > 0, library=self.library)

    def _finish_input_grad(self) -> Tensor:
        """Round the sum into the result, and move the copy of E, which was there, to the accumulator's memory."""
        assert self.accumulator is not None
        assert self.input_grad is not None
        select_tokens(self.accumulator, self.active, self.input_grad, self.inverse_factor)
        if self.request.weight is not None and not self.plan.scratch:
            memory = self.accumulator.view(-1).view(self.problem.input.dtype)
            self.safe_input = self._safe_input(memory[: self.input_grad.numel()].view_as(self.input_grad))
        return self.input_grad

    def _write_weight_grad(self, logit_grads: Tensor | None, start: int, stop: int) -> None:
        assert logit_grads is not None
        assert self.safe_input is not None
        assert self.request.weight is not None
        product(
            self.request.weight.buffer[start:stop],
            logit_grads.T,
            self.safe_input,
            accumulate=self.request.weight.accumulate,
            factor=self.inverse_factor,
            library=self.library,
        )


def fp16_factors(problem: LocalProblem, logit_grad: LogitGradient) -> tuple[Tensor | None, Tensor | None]:
    """The power of two for fp16's G, and its inverse; None for other dtypes."""
    if problem.input.dtype != torch.float16:
        return None, None
    bound = torch.maximum(logit_grad.prob.abs(), logit_grad.target.abs())
    if logit_grad.smoothing is not None and problem.smoothing_weight is not None:
        bound = torch.maximum(bound, logit_grad.smoothing.abs() * problem.smoothing_weight.abs().max())
    largest = torch.where(logit_grad.active & bound.isfinite(), bound, 0.0).max() * abs(problem.logit_scale)
    exponent = torch.frexp(largest).exponent.clamp(-100, 100)
    return _power_of_two(FP16_PEAK_EXPONENT - exponent), _power_of_two(exponent - FP16_PEAK_EXPONENT)


def _power_of_two(exponent: Tensor) -> Tensor:
    """``2 ** exponent`` without rounding, built from its bits."""
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
