"""The sampled mode's look ahead: what the anchor needs to know of a batch's hot rows and of a sample of the others.

1. Targets are counted, and so is how many ids were a target at least c times: integers, whose sums don't depend on the
   order of the atomics. That says how frequent a hot row is at least, so the hot ones, the lowest ids first among
   equals, can be numbered by id.
2. Rows that are looked at are gathered, and multiplied with the tokens, as many at a time as leave the products, in
   fp32, small. Rows of one rank are neighbours in the list, so tiles that are another rank's cost nothing.
3. Four sums a token are taken over its products, and its target's exponential, where that is not hot, is another: one
   more dot product. Where the ranks share out the hot rows by tokens, these exponentials are kept for the backward
   pass, which needs no product then.

See ``sampling``, the same in plain PyTorch, for what is chosen and summed.

Numerics:

- Sums are fp64, since ranks split them in different ways and must end with the same anchor; what is summed is fp32, and
  the same on whichever rank holds the row. Exponentials are fp32 mantissas with an exponent of their own, so they
  neither overflow nor vanish within the range that the anchor can represent.
- fp64 is why products are written, where the forward pass reduces them on chip: its registers and latencies don't go
  with a tile's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import sampling
from .interface import LocalProblem, SamplingSize
from .logits import LOG2E, LogitOperands, finish_logits, grouped_tile, row_products
from .tiles import INTERPRETED, Tile, cdiv, extreme_tile, look_tile, next_power_of_2
from .workspace import ALLOCATION, FP32_BYTES, FP64_BYTES, allocated, held, workspace_too_small

PRODUCT_BYTES = 48 * 2**20
"""Most memory for the products: beyond it, tokens are taken in chunks."""
COUNT_TOKENS, IDS = 256, 1024
"""Tokens, and ids of the vocabulary, that a program takes when hot rows are chosen."""
ROW_BLOCK = 1024
NUM_SUMS = 5
SUM_TOKENS, SUM_COLS, SUM_BLOCK, SUM_WARPS = 2, 128, 512, 1
_SUM_COLS = 32 if INTERPRETED else SUM_COLS
SUM_STAGES = tl.constexpr(3)
ANCHOR_TOKENS = 128
LARGEST_EXPONENT = tl.constexpr(sampling.LARGEST_EXPONENT * 1.4426950408889634)
LARGEST_LOGIT = tl.constexpr(sampling.LARGEST_EXPONENT)
SMALLEST_EXPONENT = tl.constexpr(-1000.0)
LEEWAY = tl.constexpr(sampling.LEEWAY)


@triton.jit(do_not_specialize=["num_tokens", "vocab_size", "num_levels"])
def _count_kernel(  # type: ignore[no-untyped-def]
    target, active, counts, exceeding, num_tokens, vocab_size, num_levels, SIZE: tl.constexpr
):
    """How often each id is a target; and for c below ``num_levels``, how many ids are so more than c times."""
    o_n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m_n = o_n < num_tokens
    b_id = tl.load(target + o_n, mask=m_n, other=-1)
    m_n &= (tl.load(active + o_n, mask=m_n, other=0) != 0) & (b_id >= 0) & (b_id < vocab_size)
    b_before = tl.atomic_add(counts + b_id, 1, mask=m_n, sem="relaxed")
    tl.atomic_add(exceeding + b_before, 1, mask=m_n & (b_before < num_levels), sem="relaxed")


@triton.jit
def _least_count(exceeding, num_hot, num_levels, LEVELS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest c with ``num_hot`` ids or more that are targets c times or more: the least count of a hot row."""
    b_levels = tl.zeros((LEVELS,), dtype=tl.int32)
    for c in range(0, num_levels, LEVELS):
        o_c = c + tl.arange(0, LEVELS)
        b_levels += (tl.load(exceeding + o_c, mask=o_c < num_levels, other=0) >= num_hot).to(tl.int32)
    return tl.sum(b_levels, 0)


@triton.jit(do_not_specialize=["vocab_size", "num_hot", "num_levels"])
def _tally_kernel(  # type: ignore[no-untyped-def]
    counts, exceeding, tallies, vocab_size, num_hot, num_levels, SIZE: tl.constexpr, LEVELS: tl.constexpr
):
    """Of some ids, how many are more frequent than the least frequent hot row, and how many as frequent."""
    least = _least_count(exceeding, num_hot, num_levels, LEVELS)
    o_v = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    b_count = tl.load(counts + o_v, mask=o_v < vocab_size, other=-1)
    tl.store(tallies + tl.program_id(0), tl.sum((b_count > least).to(tl.int32), 0))
    tl.store(tallies + tl.num_programs(0) + tl.program_id(0), tl.sum((b_count == least).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_ids", "vocab_size", "first_id", "num_real", "num_hot", "num_sample", "num_levels"])
def _choose_kernel(  # type: ignore[no-untyped-def]
    counts,
    exceeding,
    tallies,
    rows,
    ids,
    num_cold,
    num_ids,
    vocab_size,
    first_id,
    num_real,
    num_hot,
    num_sample,
    num_levels,
    SIZE: tl.constexpr,
    LEVELS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Numbers the hot rows among some ids, and marks the cold sample. Places of ids take the place of their counts."""
    least = _least_count(exceeding, num_hot, num_levels, LEVELS)
    num_equals = num_hot - tl.load(exceeding + least)  # so many of those as frequent as the least frequent are hot
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    b_more = tl.zeros((BLOCKS,), dtype=tl.int32)
    b_equal = tl.zeros((BLOCKS,), dtype=tl.int32)
    for b in range(0, block, BLOCKS):
        o_b = b + tl.arange(0, BLOCKS)
        b_more += tl.load(tallies + o_b, mask=o_b < block, other=0)
        b_equal += tl.load(tallies + num_blocks + o_b, mask=o_b < block, other=0)

    o_v = block * SIZE + tl.arange(0, SIZE)
    if WIDE:
        o_v = o_v.to(tl.int64)
    b_count = tl.load(counts + o_v, mask=o_v < vocab_size, other=-1)
    m_more, m_equal = b_count > least, b_count == least
    b_before = tl.sum(b_more, 0) + tl.cumsum(m_more.to(tl.int32), 0) - m_more.to(tl.int32)
    b_equals_before = tl.sum(b_equal, 0) + tl.cumsum(m_equal.to(tl.int32), 0) - m_equal.to(tl.int32)
    m_hot = m_more | (m_equal & (b_equals_before < num_equals))
    b_place = b_before + tl.minimum(b_equals_before, num_equals)
    b_row = o_v - first_id
    m_here = (b_row >= 0) & (b_row < num_real)
    tl.store(rows + b_place, tl.where(m_here, b_row, -1).to(tl.int64), mask=m_hot)
    tl.store(ids + b_place, o_v.to(tl.int64), mask=m_hot)
    tl.store(counts + o_v, tl.where(m_hot, b_place + 1, 0), mask=o_v < num_ids)

    # The sample's id i is i V // S, so i is v S / V, rounded up.
    b_i = (o_v * num_sample + vocab_size - 1) // vocab_size
    m_sample = (b_i < num_sample) & (b_i * vocab_size // num_sample == o_v)
    tl.store(rows + num_hot + b_i, tl.where(m_here & (m_hot == 0), b_row, -1).to(tl.int64), mask=m_sample)
    tl.store(ids + num_hot + b_i, tl.where(m_hot == 0, o_v, -1).to(tl.int64), mask=m_sample)
    tl.atomic_add(num_cold, tl.sum((m_sample & (m_hot == 0)).to(tl.int32), 0), sem="relaxed")


def anchor_rows(target: Tensor, active: Tensor, ids: sampling.RowIds, reference_rows: int) -> sampling.AnchorRows:
    """``sampling.anchor_rows`` by Triton: four launches."""
    num_tokens, vocab_size, device = target.shape[0], ids.vocab_size, target.device
    num_hot, num_sample = min(reference_rows, vocab_size), min(sampling.COLD_ROWS, vocab_size)
    # No id can be more frequent than that if as many as there are hot rows are.
    num_levels = num_tokens // num_hot + 1
    num_ids = max(vocab_size, ids.first + ids.num_rows)
    zeros = torch.zeros(num_ids + num_levels + 1, dtype=torch.int32, device=device)
    counts, exceeding, num_cold = zeros.split([num_ids, num_levels, 1])
    rows, every = torch.empty(2, num_hot + num_sample, dtype=torch.int64, device=device)
    blocks = cdiv(num_ids, IDS)
    tallies = torch.empty(2 * blocks, dtype=torch.int32, device=device)
    sizes = {"SIZE": IDS, "LEVELS": 64, "num_warps": 4}
    if num_tokens > 0:
        _count_kernel[(cdiv(num_tokens, COUNT_TOKENS),)](
            target.contiguous(), active.contiguous(), counts, exceeding, num_tokens, vocab_size, num_levels,
            SIZE=COUNT_TOKENS, num_warps=4,
        )  # fmt: skip
    _tally_kernel[(blocks,)](counts, exceeding, tallies, vocab_size, num_hot, num_levels, **sizes)
    _choose_kernel[(blocks,)](
        counts, exceeding, tallies, rows, every, num_cold,
        num_ids, vocab_size, ids.first, ids.num_real, num_hot, num_sample, num_levels, BLOCKS=256,
        WIDE=(num_ids + 1) * num_sample + vocab_size >= 2**31, **sizes,
    )  # fmt: skip
    place = counts[ids.first : ids.first + ids.num_rows]
    if ids.num_real < ids.num_rows:  # behind the rank's ids, padding, which has none, not the next rank's
        place = place.clone()
        place[ids.num_real :].zero_()
    return sampling.AnchorRows(rows, num_hot, place, num_cold, vocab_size, every, counts)


@triton.jit(do_not_specialize=["num_tokens", "vocab_size"])
def _target_place_kernel(place, target, out, num_tokens, vocab_size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    o_n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    b_target = tl.load(target + o_n, mask=o_n < num_tokens, other=-1)
    b_place = tl.load(place + b_target, mask=(b_target >= 0) & (b_target < vocab_size), other=0)
    tl.store(out + o_n, b_place, mask=o_n < num_tokens)


def target_place(rows: sampling.AnchorRows, target: Tensor) -> Tensor:
    """``AnchorRows.target_place`` by Triton, in one launch."""
    out = torch.empty(target.shape, dtype=torch.int32, device=target.device)
    _target_place_kernel[(cdiv(max(1, len(target)), COUNT_TOKENS),)](
        rows.place_of_id, target.contiguous(), out, len(target), rows.vocab_size, SIZE=COUNT_TOKENS, num_warps=4
    )
    return out


@triton.jit
def _gather_kernel(  # type: ignore[no-untyped-def]
    matrix, rows, out, width, stride_row, stride_col, BLOCK: tl.constexpr
):
    """One piece of one row."""
    i = tl.program_id(0).to(tl.int64)
    o_d = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    row = tl.load(rows + i)
    m_here = o_d < tl.where(row >= 0, width, 0)
    b = tl.load(matrix + row * stride_row + o_d * stride_col, mask=m_here, other=0.0)
    tl.store(out + i * width + o_d, b, mask=o_d < width)


def gather_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Rows of a matrix by number, int64 ``[R]``; zeros for negative ones."""
    out = matrix.new_empty((rows.shape[0], matrix.shape[1]))
    block = min(next_power_of_2(matrix.shape[1]), ROW_BLOCK)
    _gather_kernel[(rows.shape[0], cdiv(matrix.shape[1], block))](
        matrix, rows, out, matrix.shape[1], *matrix.stride(), BLOCK=block, num_warps=2
    )
    return out


@triton.jit
def _wide_exp(b_z):  # type: ignore[no-untyped-def]
    """``exp`` in fp64 with the mantissa of fp32, and no larger than ``exp(sampling.LARGEST_EXPONENT)``."""
    b_y = b_z * LOG2E
    b_y = tl.where(b_y > LARGEST_EXPONENT, LARGEST_EXPONENT, b_y)
    b_y = tl.where(b_y < SMALLEST_EXPONENT, SMALLEST_EXPONENT, b_y)
    b_whole = tl.floor(b_y)
    b_exponent = tl.where(b_whole == b_whole, b_whole, 0.0).to(tl.int32) + 1023
    b_power = (b_exponent.to(tl.int64) << 52).to(tl.float64, bitcast=True)
    return tl.exp2(b_y - b_whole).to(tl.float64) * b_power


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _look_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    rows,
    out,
    num_tokens,
    num_rows,
    hidden,
    input_stride_n,
    input_stride_d,
    weight_stride_v,
    weight_stride_d,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """A tile of the tokens' products with the rows gathered, unless all of these are another rank's.

    ``out`` has room for whole tiles, so neither does a thread keep masks nor more than one address.
    """
    num_tiles = tl.cdiv(num_rows, COLS)
    pid_n, pid_v = grouped_tile(tl.program_id(0), tl.cdiv(num_tokens, ROWS), num_tiles, GROUP)
    n0 = pid_n * ROWS
    v0 = pid_v * COLS
    o_v = v0 + tl.arange(0, COLS)
    if tl.max(tl.load(rows + o_v, mask=o_v < num_rows, other=-1), 0) >= 0:
        b_z = row_products(
            input, weight, n0, v0, num_tokens, num_rows, hidden,
            input_stride_n, input_stride_d, weight_stride_v, weight_stride_d,
            ROWS, COLS, INNER, EVEN_INNER, TMA, PRECISION,
        )  # fmt: skip
        o_n = n0.to(tl.int64) + tl.arange(0, ROWS)
        p_out = out + o_n[:, None] * (num_tiles * COLS)
        tl.store(p_out + (v0.to(tl.int64) + tl.arange(0, COLS))[None, :], b_z)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_hot"])
def _sum_kernel(  # type: ignore[no-untyped-def]
    products,
    rows,
    input,
    weight,
    bias,
    target,
    place,
    out,
    hot_exps,
    hot_tops,
    product_stride,
    out_stride,
    num_tokens,
    num_rows,
    num_hot,
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
    KEEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some tokens' sums over the rows looked at, and the exponential of the target's logit, if that's here and cold.

    If KEEP, the hot rows' exponentials are written, relative to the largest logit of COLS of them.
    """
    o_n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    m_n = o_n < num_tokens
    b_hot = tl.zeros((ROWS, COLS), dtype=tl.float64)
    b_sum = tl.zeros((ROWS, COLS), dtype=tl.float64)
    b_squares = tl.zeros((ROWS, COLS), dtype=tl.float64)
    b_cold = tl.zeros((ROWS, COLS), dtype=tl.float64)
    for v in tl.range(0, num_rows, COLS, num_stages=SUM_STAGES):
        o_v = v + tl.arange(0, COLS)
        # Rows of another rank have room, but were never written: no reason to wait for their numbers.
        m_room = m_n[:, None] & (o_v < num_rows)[None, :]
        b_z = tl.load(products + o_n[:, None] * product_stride + o_v[None, :], mask=m_room, other=0.0)
        b_row = tl.load(rows + o_v, mask=o_v < num_rows, other=-1)
        m_here = b_row >= 0
        b_bias = 0.0
        if HAS_BIAS:
            b_bias = tl.load(bias + b_row, mask=m_here, other=0.0).to(tl.float32)
        m_z = m_n[:, None] & m_here[None, :]
        b_z = finish_logits(b_z, b_bias, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
        b_exp = _wide_exp(b_z)
        if v < num_hot:
            m_hot = m_z & (o_v < num_hot)[None, :]
            b_hot += tl.where(m_hot, b_exp, 0.0)
            if KEEP:
                b_top = tl.max(tl.where(m_hot, b_z, -float("inf")), 1)
                b_top = tl.where(b_top == -float("inf"), 0.0, b_top)
                b_kept = tl.exp2((b_z - b_top[:, None]) * LOG2E).to(hot_exps.dtype.element_ty)
                tl.store(hot_exps + o_n[:, None] * num_hot + o_v[None, :], b_kept, mask=m_hot)
                tl.store(hot_tops + o_n * tl.cdiv(num_hot, COLS) + v // COLS, b_top, mask=m_n)
        if v + COLS > num_hot:
            m_cold = m_z & (o_v >= num_hot)[None, :]
            b_wide = tl.where(m_cold, b_z, 0.0).to(tl.float64)
            b_sum += b_wide
            b_squares += b_wide * b_wide
            b_cold += tl.where(m_cold, b_exp, 0.0)
    p_out = out + o_n
    tl.store(p_out, tl.sum(b_hot, 1), mask=m_n)
    tl.store(p_out + 2 * out_stride, tl.sum(b_sum, 1), mask=m_n)
    tl.store(p_out + 3 * out_stride, tl.sum(b_squares, 1), mask=m_n)
    tl.store(p_out + 4 * out_stride, tl.sum(b_cold, 1), mask=m_n)

    b_row = tl.load(target + o_n, mask=m_n, other=-1)
    m_counts = (b_row >= 0) & (tl.load(place + b_row, mask=b_row >= 0, other=1) == 0)
    b_dot = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if tl.max(m_counts.to(tl.int32), 0) > 0:
        for d in tl.range(0, hidden, BLOCK, num_stages=SUM_STAGES):
            o_d = (d + tl.arange(0, BLOCK)).to(tl.int64)
            m = m_counts[:, None] & (o_d < hidden)[None, :]
            p_e = input + o_n[:, None] * input_stride_n + o_d[None, :] * input_stride_d
            p_c = weight + b_row[:, None] * weight_stride_v + o_d[None, :] * weight_stride_d
            b_e = tl.load(p_e, mask=m, other=0.0).to(tl.float32)
            b_dot += b_e * tl.load(p_c, mask=m, other=0.0).to(tl.float32)
    b_z = tl.sum(b_dot, 1)
    if HAS_BIAS:
        b_z += tl.load(bias + b_row, mask=m_counts, other=0.0).to(tl.float32)
    b_z = finish_logits(b_z, 0.0, scale, softcap, False, HAS_SCALE, HAS_SOFTCAP)
    tl.store(p_out + out_stride, tl.where(m_counts, _wide_exp(b_z), 0.0), mask=m_n)


def hot_exponentials(weight: Tensor, num_tokens: int, num_hot: int) -> sampling.HotExponentials:
    """Room for those of some tokens."""
    tops = weight.new_empty((num_tokens, cdiv(num_hot, _SUM_COLS)), dtype=torch.float32)
    return sampling.HotExponentials(weight.new_empty((num_tokens, num_hot)), tops, _SUM_COLS)


def anchor_sums(
    problem: LocalProblem,
    rows: sampling.AnchorRows,
    shared: sampling.SharedRows | None = None,
    *,
    allow_tma: bool = True,
) -> Tensor:
    """``sampling.anchor_sums`` by Triton: fp64 ``[5, N]``, in three launches, or two more for every further chunk.

    Where the rows are shared, one less, and one more for the tokens on either side of this rank's.

    Args:
        allow_tma: whether tensor memory descriptors may be used where they can.
    """
    num_tokens, device = problem.num_tokens, problem.input.device
    if num_tokens == 0 or (problem.num_rows == 0 and shared is None):
        if shared is not None:
            shared.ready()
        return torch.zeros(NUM_SUMS, num_tokens, dtype=torch.float64, device=device)
    sums = torch.empty(NUM_SUMS, num_tokens, dtype=torch.float64, device=device)
    first, last, present = 0, num_tokens, rows.rows
    weight = gather_rows(problem.weight, rows.rows) if shared is None else shared.weight
    if shared is not None:
        first, last, present = shared.first, shared.last, rows.ids
        for start, stop in ((0, first), (last, num_tokens)):
            _sum(problem, None, present, rows, sums, start, stop)
        shared.ready()
    if first == last:
        return sums
    operands = LogitOperands.prepare(replace(problem, weight=weight, smoothing_weight=None), allow_tma=allow_tma)
    tile = look_tile(problem.input.dtype, num_tokens, problem.hidden_size, operands.tma)
    operands = replace(operands, tile=tile)
    chunk = _tokens_at_once(problem, operands, rows, last - first)
    room = (cdiv(chunk, tile.rows) * tile.rows, cdiv(operands.num_rows, tile.cols) * tile.cols)
    products = torch.empty(room, dtype=torch.float32, device=device)
    kept = None if shared is None else shared.exponentials
    flags = operands.flags()
    for name in ("HAS_BIAS", "HAS_SCALE", "HAS_SOFTCAP", "HAS_SMOOTHING"):
        del flags[name]
    for start in range(first, last, chunk):
        stop = min(start + chunk, last)
        part = operands.tokens(start, stop)
        _look_kernel[part.grid()](*part.handles(), present, products, *part.sizes(), **flags)
        _sum(problem, products, present, rows, sums, start, stop, kept, first)
    return sums


def _sum(
    problem: LocalProblem,
    products: Tensor | None,
    present: Tensor,
    rows: sampling.AnchorRows,
    sums: Tensor,
    start: int,
    stop: int,
    kept: sampling.HotExponentials | None = None,
    first: int = 0,
) -> None:
    """The sums of some tokens; their targets' alone if there are no products. The exponentials begin at ``first``."""
    if start == stop:
        return
    tokens, target = problem.input[start:stop], problem.target[start:stop].contiguous()
    bias = None if problem.bias is None else problem.bias.contiguous()
    _sum_kernel[(cdiv(stop - start, SUM_TOKENS),)](
        sums if products is None else products, present, tokens, problem.weight, bias, target, rows.place,
        sums[:, start:],
        None if kept is None else kept.values[start - first :], None if kept is None else kept.tops[start - first :],
        0 if products is None else products.shape[1], sums.shape[1],
        stop - start, 0 if products is None else len(present), rows.num_hot,
        problem.hidden_size, *tokens.stride(), *problem.weight.stride(), problem.logit_scale, problem.softcap or 1.0,
        HAS_BIAS=bias is not None, HAS_SCALE=problem.logit_scale != 1.0, HAS_SOFTCAP=problem.softcap is not None,
        KEEP=kept is not None, ROWS=SUM_TOKENS, COLS=_SUM_COLS, BLOCK=32 if INTERPRETED else SUM_BLOCK,
        num_warps=SUM_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def tokens_at_once(num_tokens: int, looked_at: int, tile: Tile, budget: int = PRODUCT_BYTES) -> int:
    """Tokens per chunk, in whole tiles, evenly used."""
    tiles = cdiv(num_tokens, tile.rows)
    most = max(1, budget // _tile_bytes(looked_at, tile))
    return min(cdiv(tiles, cdiv(tiles, most)) * tile.rows, num_tokens)


def _tile_bytes(looked_at: int, tile: Tile) -> int:
    """Products of one tile of tokens."""
    return tile.rows * cdiv(looked_at, tile.cols) * tile.cols * FP32_BYTES


def _fixed_bytes(num_tokens: int, hidden: int, dtype: torch.dtype, looked_at: int, chosen: int) -> int:
    """Rows gathered, sums, the anchor; ``chosen_bytes``. Beside them, only the products."""
    gathered, sums = looked_at * hidden * dtype.itemsize, NUM_SUMS * FP64_BYTES * num_tokens
    return allocated(gathered, sums, num_tokens * FP32_BYTES) + chosen + 4 * ALLOCATION


def _looked_at(size: SamplingSize) -> int:
    return size.num_hot + min(sampling.COLD_ROWS, size.vocab_size)


def chosen_bytes(num_tokens: int, size: SamplingSize) -> int:
    """Most that ``anchor_rows`` leaves: a count or place of every id of the whole vocabulary, and the list of rows.

    The places outlive the anchor, by which time they are needed of this rank's ids alone.
    """
    return allocated((size.vocab_size + num_tokens) * FP32_BYTES, _looked_at(size) * FP64_BYTES)


def least_workspace(num_tokens: int, hidden: int, dtype: torch.dtype, size: SamplingSize) -> int:
    """Enough for any options on any device."""
    looked_at = _looked_at(size)
    fixed = _fixed_bytes(num_tokens, hidden, dtype, looked_at, chosen_bytes(num_tokens, size))
    return fixed + allocated(_tile_bytes(looked_at, extreme_tile(dtype)))


def _tokens_at_once(problem: LocalProblem, operands: LogitOperands, rows: sampling.AnchorRows, num_tokens: int) -> int:
    looked_at, tile, workspace = operands.num_rows, operands.tile, problem.workspace
    if workspace is None:
        return tokens_at_once(num_tokens, looked_at, tile)
    hidden = problem.hidden_size
    fixed = _fixed_bytes(num_tokens, hidden, problem.input.dtype, looked_at, held(rows.rows, rows.place))
    least = fixed + allocated(_tile_bytes(looked_at, tile))
    if workspace < least:
        raise workspace_too_small(workspace, least, num_tokens, problem.num_rows, hidden)
    return tokens_at_once(num_tokens, looked_at, tile, min(workspace - fixed, PRODUCT_BYTES))


@triton.jit(do_not_specialize=["num_tokens", "num_others"])
def _anchor_kernel(sums, num_cold, out, num_tokens, num_others, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """``sampling.anchor`` of some tokens."""
    o_n = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m_n = o_n < num_tokens
    size = tl.maximum(tl.load(num_cold), 1).to(tl.float64)
    p = sums + o_n
    b_known = tl.load(p, mask=m_n, other=1.0) + tl.load(p + num_tokens, mask=m_n, other=0.0)
    b_mean = tl.load(p + 2 * num_tokens, mask=m_n, other=0.0) / size
    b_variance = tl.load(p + 3 * num_tokens, mask=m_n, other=0.0) / size - b_mean * b_mean
    b_normal = b_mean + 0.5 * tl.where(b_variance < 0.0, 0.0, b_variance)
    b_normal = tl.exp(tl.where(b_normal > LARGEST_LOGIT, LARGEST_LOGIT, b_normal))
    b_most = LEEWAY * tl.load(p + 4 * num_tokens, mask=m_n, other=0.0) / size
    b_typical = tl.where(b_most < b_normal, b_most, b_normal)  # NaN if the second is
    b_anchor = tl.log(b_known + num_others.to(tl.float64) * b_typical)
    tl.store(out + o_n, b_anchor.to(tl.float32), mask=m_n)


def anchor(sums: Tensor, rows: sampling.AnchorRows) -> Tensor:
    """``sampling.anchor`` by Triton: fp32 ``[N]``, in one launch."""
    num_tokens = sums.shape[1]
    out = torch.empty(num_tokens, dtype=torch.float32, device=sums.device)
    if num_tokens > 0:
        _anchor_kernel[(cdiv(num_tokens, ANCHOR_TOKENS),)](
            sums, rows.num_cold, out, num_tokens, rows.num_others, SIZE=ANCHOR_TOKENS, num_warps=4
        )
    return out
