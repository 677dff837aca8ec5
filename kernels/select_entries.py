"""The forward pass of the sampled mode: every logit reduced on chip as in ``forward``, and decided upon as well.

A tile of z serves three purposes before it is dropped:

1. ``e = exp(z - r)`` with the token's anchor r is summed: the softmax's partial. Since r is close to the token's LSE,
   no maximum has to be found first; the partial is a sum and the reference that it is relative to.
2. ``1 + e / eps`` is compared with the entry's random number in [1, 2): the decisions of ``sampling.inclusion``.
3. The decisions are packed, 32 neighbouring columns to a word of a bitmap. What is never sampled (hot rows, the tail of
   the vocabulary, tokens without gradient, a token's own target) is cleared there, a word at a time. A mark says which
   tiles have bits left for a token.

A second kernel folds the partials (``forward``'s own), a third turns each token's bits into a list of rows of C, in
order, thinned to the budget. Tokens are taken in chunks that keep bitmap and partials small.

Numerics:

- A tile whose sum is too large or too small for one of its tokens (an anchor far off, a NaN) redoes its sums relative
  to its own maxima, so the LSE is right whatever the anchor. Sums above 2^20 are too large, since exponents lose digits
  there; small ones hardly matter, unless all are small: then too the LSE loses 6e-8 times its distance from the anchor,
  up to some 60 nats, where sums are redone because they vanish.
- With statistics or label smoothing, partials are relative to the tile's maximum as in ``forward``.
- The comparison needs no ``min``: a probability beyond 1 is above every random number. A NaN is above none.
- Lists have a fixed place for each token, ``budget`` entries wide, so nothing depends on how many were kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import forward, hopper, sampling
from .anchor import chosen_bytes
from .fold import empty_partials, unset_partials
from .interface import LocalProblem, Partials, SamplingPlan, SamplingSize
from .logits import LOG2E, LogitOperands, finish_logits, grouped_tile, row_products
from .tiles import FEWEST_COLS, INTERPRETED, Tile, cdiv, extreme_tile, next_power_of_2, processors
from .workspace import ALLOCATION, FP32_BYTES, allocated, held, workspace_too_small

CHUNK_BYTES = 62 * 2**20
"""Default size of the bitmap, the marks and the partials together: beyond it, tokens are taken in chunks."""
MORE_ROWS = 8
"""Tiles of tokens by which a chunk may exceed an even share."""
WORD_BITS: tl.constexpr = tl.constexpr(sampling.WORD_BITS)
MARK_UNIT = 8
"""Marks of a token are a whole multiple of so many, which one instruction reads; the last ones stay 0."""
MARK_WORDS, TILES_AT_ONCE, LIST_WARPS = (1, 2, 1) if INTERPRETED else (32, 32, 1)
"""32 marks of tiles each that a program looks at, and marked tiles that it lists, at once."""
PREPARE_SIZE = 1024

GOLDEN = tl.constexpr(sampling.GOLDEN)
MIX_1 = tl.constexpr(sampling.MIX_1)
MIX_2 = tl.constexpr(sampling.MIX_2)
TOKEN_SALT = tl.constexpr(sampling.TOKEN_SALT)
ID_SALT = tl.constexpr(sampling.ID_SALT)
PHASE_SALT = tl.constexpr(sampling.PHASE_SALT)
OFFSET_SALT = tl.constexpr(sampling.OFFSET_SALT)
SLOW_XOR = tl.constexpr(INTERPRETED)
PTX = tl.constexpr(torch.version.cuda is not None and not INTERPRETED)
NOWHERE = tl.constexpr(2**31 - 1)
SMALLEST_SUM = tl.constexpr(sampling.SMALLEST_SUM)
LARGEST_SUM = tl.constexpr(sampling.LARGEST_SUM)


@dataclass(frozen=True)
class Selection:
    """The entries kept: for each token a list of rows of C in ascending order, in a place of fixed width.

    Attributes:
        rows: int32 ``[N, B]``; only the first ``min(found, B)`` of a line mean something.
        found: int32 ``[N]``, how many entries were kept before thinning to B.
        cold: int32 words, bit ``v % 32`` of word ``v // 32`` says that row v may be sampled.
    """

    rows: Tensor
    found: Tensor
    cold: Tensor

    @property
    def budget(self) -> int:
        return self.rows.shape[1]

    @property
    def kept(self) -> Tensor:
        return self.found.clamp(max=self.budget).sum(dtype=torch.int64)


@triton.jit
def mix(x):  # type: ignore[no-untyped-def]
    """``sampling.mix`` of uint32."""
    x = x ^ (x >> 16)
    x = x * MIX_1
    x = x ^ (x >> 15)
    x = x * MIX_2
    return x ^ (x >> 16)


@triton.jit
def token_hash(seed, tokens):  # type: ignore[no-untyped-def]
    b_low = (seed & 0xFFFFFFFF).to(tl.uint32)
    b_high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return mix(mix(tokens.to(tl.uint32) * GOLDEN + b_low) + b_high + TOKEN_SALT)


@triton.jit
def id_hash(seed, ids):  # type: ignore[no-untyped-def]
    return mix(ids.to(tl.uint32) * GOLDEN + ID_SALT + (seed & 0xFFFFFFFF).to(tl.uint32))


@triton.jit
def popcount(x):  # type: ignore[no-untyped-def]
    """Bits set in each uint32, as int32."""
    if PTX:
        return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_ids", "first_id"])
def _prepare_kernel(  # type: ignore[no-untyped-def]
    seed,
    hot_place,
    token_hashes,
    id_hashes,
    cold,
    target_logit,
    num_tokens,
    num_rows,
    num_ids,
    first_id,
    SIZE: tl.constexpr,
):
    """Hashes of tokens and of rows, which a tile would repeat for each of its threads; which rows may be sampled (those
    that exist and aren't hot), a bit each; and target logits of 0."""
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    b_seed = tl.load(seed)
    tl.store(token_hashes + o, token_hash(b_seed, o).to(tl.int32, bitcast=True), mask=o < num_tokens)
    tl.store(target_logit + o, tl.zeros((SIZE,), dtype=tl.float32), mask=o < num_tokens)
    tl.store(id_hashes + o, id_hash(b_seed, first_id + o).to(tl.int32, bitcast=True), mask=o < num_ids)
    o_bit = tl.arange(0, WORD_BITS)[None, :]
    o_word = tl.program_id(0) * (SIZE // WORD_BITS) + tl.arange(0, SIZE // WORD_BITS)
    o_row = o_word[:, None] * WORD_BITS + o_bit
    b_place = tl.load(hot_place + o_row, mask=o_row < num_rows, other=1)
    b_words = tl.sum(tl.where(b_place == 0, 1 << o_bit, 0), 1)
    tl.store(cold + o_word, b_words, mask=o_word * WORD_BITS < num_ids)


@triton.jit
def _halves(b):  # type: ignore[no-untyped-def]
    """Left and right columns; in registers only."""
    return tl.split(tl.permute(tl.reshape(b, (b.shape[0], 2, b.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def _quarters(b):  # type: ignore[no-untyped-def]
    b_left, b_right = _halves(b)
    b_0, b_1 = _halves(b_left)
    b_2, b_3 = _halves(b_right)
    return b_0, b_1, b_2, b_3


@triton.jit
def _decide(b_z, b_shift, b_factor, b_offset, b_id):  # type: ignore[no-untyped-def]
    """``exp(z - r) / eps`` of some columns of a tile, and the decisions on them, 32 columns to a word."""
    COLS: tl.constexpr = b_z.shape[1]
    b_odds = tl.exp2(tl.fma(b_z, LOG2E, b_shift[:, None]))
    b_x = b_factor[:, None] * b_id + b_offset[:, None]
    b_u = ((b_x >> 9) | 0x3F800000).to(tl.float32, bitcast=True)
    b_bits = tl.where(b_u < b_odds + 1.0, (1 << (tl.arange(0, COLS) % WORD_BITS))[None, :], 0)
    b_bits = tl.reshape(b_bits, (b_z.shape[0], COLS // WORD_BITS, WORD_BITS))
    # No two bits of a word are the same, so + would do, but the compiler makes more of it. The interpreter, less.
    return b_odds, tl.sum(b_bits, 2) if SLOW_XOR else tl.xor_sum(b_bits, 2)


@triton.jit
def _decide_tile(b_z, b_shift, b_factor, b_offset, b_id):  # type: ignore[no-untyped-def]
    """Each token's sum of ``exp(z - r) / eps``, and its words. Few columns at a time keep temporaries in registers."""
    ROWS: tl.constexpr = b_z.shape[0]
    COLS: tl.constexpr = b_z.shape[1]
    if COLS >= 4 * WORD_BITS:
        b_0, b_1, b_2, b_3 = _quarters(b_z)
        b_id_0, b_id_1, b_id_2, b_id_3 = _quarters(b_id[None, :])
        b_odds_0, b_words_0 = _decide(b_0, b_shift, b_factor, b_offset, b_id_0)
        b_odds_1, b_words_1 = _decide(b_1, b_shift, b_factor, b_offset, b_id_1)
        b_odds_2, b_words_2 = _decide(b_2, b_shift, b_factor, b_offset, b_id_2)
        b_odds_3, b_words_3 = _decide(b_3, b_shift, b_factor, b_offset, b_id_3)
        b_sum = tl.sum((b_odds_0 + b_odds_1) + (b_odds_2 + b_odds_3), 1)
        b_words = tl.join(tl.join(b_words_0, b_words_1), tl.join(b_words_2, b_words_3))
        return b_sum, tl.reshape(tl.permute(b_words, (0, 3, 2, 1)), (ROWS, COLS // WORD_BITS))
    else:
        b_odds, b_words = _decide(b_z, b_shift, b_factor, b_offset, b_id[None, :])
        return tl.sum(b_odds, 1), b_words


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "words_per_token", "marks_per_token"])
def _select_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    bias,
    smoothing_weight,
    target,
    anchor,
    token_hashes,
    id_hashes,
    cold,
    partials,
    partial_argmax,
    smoothing_mass,
    target_logit,
    bitmap,
    marks,
    num_tokens,
    num_rows,
    hidden,
    input_stride_n,
    input_stride_d,
    weight_stride_v,
    weight_stride_d,
    scale,
    softcap,
    eps,
    log2_inverse_eps,
    words_per_token,
    marks_per_token,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_INNER: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_tiles = tl.cdiv(num_rows, COLS)
    pid_n, pid_v = grouped_tile(tl.program_id(0), tl.cdiv(num_tokens, ROWS), num_tiles, GROUP)
    n0 = pid_n * ROWS
    v0 = pid_v * COLS

    # Small loads go before the product, which hides them.
    o_n = n0 + tl.arange(0, ROWS)
    o_v = v0 + tl.arange(0, COLS)
    m_n = o_n < num_tokens
    m_v = o_v < num_rows
    b_target = tl.load(target + o_n, mask=m_n, other=-1)
    m_hit = (b_target >= v0) & (b_target < v0 + COLS)
    b_col = tl.where(m_hit, b_target - v0, -1).to(tl.int32)
    b_anchor = tl.load(anchor + o_n, mask=m_n, other=0.0)
    b_token = tl.load(token_hashes + o_n, mask=m_n, other=0).to(tl.uint32, bitcast=True)
    b_id = tl.load(id_hashes + o_v).to(tl.uint32, bitcast=True)
    o_word = v0 // WORD_BITS + tl.arange(0, COLS // WORD_BITS)
    b_cold = tl.load(cold + o_word)
    b_bias = 0.0
    if HAS_BIAS:
        b_bias = tl.load(bias + o_v, mask=m_v, other=0.0).to(tl.float32)

    b_z = row_products(
        input, weight, n0, v0, num_tokens, num_rows, hidden,
        input_stride_n, input_stride_d, weight_stride_v, weight_stride_d,
        ROWS, COLS, INNER, EVEN_INNER, TMA, PRECISION,
    )  # fmt: skip
    b_z = finish_logits(b_z, b_bias, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)

    if tl.max(m_hit.to(tl.int32), 0) > 0:  # few tiles hold a target of their tokens
        m_target = b_col[:, None] == tl.arange(0, COLS)[None, :]
        tl.store(target_logit + o_n, tl.sum(tl.where(m_target, b_z, 0.0), 1), mask=m_hit)
    if v0 + COLS > num_rows:
        b_z = tl.where(m_v[None, :], b_z, float("-inf"))

    # A token without gradient: its decisions are stored, and dropped with the others that the lists leave out.
    b_shift = tl.fma(b_anchor, -LOG2E, log2_inverse_eps)
    b_odds, b_words = _decide_tile(b_z, b_shift, b_token | 1, mix(b_token + OFFSET_SALT), b_id)
    b_own = tl.where(m_hit, b_target, NOWHERE).to(tl.int32)
    m_own = (b_own // WORD_BITS)[:, None] == o_word[None, :]
    b_words &= b_cold[None, :] & ~tl.where(m_own, (1 << (b_own % WORD_BITS))[:, None], 0)
    p_words = bitmap + o_n.to(tl.int64)[:, None] * words_per_token + o_word[None, :]
    tl.store(p_words, b_words, mask=m_n[:, None])
    b_mark = tl.max((b_words != 0).to(tl.int32), 1)
    tl.store(marks + o_n.to(tl.int64) * marks_per_token + pid_v, b_mark.to(marks.dtype.element_ty), mask=m_n)

    field = num_tiles.to(tl.int64) * num_tokens
    p_out = partials + pid_v.to(tl.int64) * num_tokens + o_n
    if STATS or HAS_SMOOTHING:
        b_max = tl.max(b_z, 1)
        b_ref = tl.where(b_max > float("-inf"), b_max, 0.0)
        b_shifted = b_z - b_ref[:, None]
        b_exp = tl.exp2(b_shifted * LOG2E)
        b_sum = tl.sum(b_exp, 1)
        b_ref = b_max
        if HAS_SMOOTHING:
            b_c = tl.load(smoothing_weight + o_v, mask=m_v, other=0.0)
            b_smooth = tl.where((b_c != 0.0)[None, :], b_c[None, :] * b_shifted, 0.0)
            tl.store(p_out + 2 * field, tl.sum(b_smooth, 1), mask=m_n)
            tl.store(smoothing_mass + pid_v, tl.sum(b_c, 0))  # by every tile of tokens, the same
        if STATS:
            b_entropy = tl.where(b_exp == 0.0, 0.0, b_exp * b_shifted)
            tl.store(p_out + (2 + HAS_SMOOTHING) * field, tl.sum(b_entropy, 1), mask=m_n)
            b_ids = tl.where(b_z == b_max[:, None], o_v[None, :], 2147483647)
            tl.store(partial_argmax + pid_v.to(tl.int64) * num_tokens + o_n, tl.min(b_ids, 1), mask=m_n)
    else:
        b_ref = b_anchor
        b_sum = b_odds * eps
        m_fine = (b_odds > SMALLEST_SUM) & (b_sum < LARGEST_SUM)
        if tl.min((m_fine | ~m_n).to(tl.int32), 0) == 0:
            # Rare. Keeping the tile for it, instead of computing it again, would cost every tile its registers.
            b_z = row_products(
                input, weight, n0, v0, num_tokens, num_rows, hidden,
                input_stride_n, input_stride_d, weight_stride_v, weight_stride_d,
                ROWS, COLS, INNER, EVEN_INNER, TMA, PRECISION,
            )  # fmt: skip
            b_z = finish_logits(b_z, b_bias, scale, softcap, HAS_BIAS, HAS_SCALE, HAS_SOFTCAP)
            b_z = tl.where(m_v[None, :], b_z, float("-inf"))
            b_ref = tl.max(b_z, 1)
            b_top = tl.where(b_ref > float("-inf"), b_ref, 0.0)
            b_sum = tl.sum(tl.exp2((b_z - b_top[:, None]) * LOG2E), 1)
    tl.store(p_out, b_ref, mask=m_n)
    tl.store(p_out + field, b_sum, mask=m_n)


@triton.jit
def _marked_words(p_words, p_marks, first, marked, AT_ONCE: tl.constexpr, TILE_WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Words of some of a token's marked tiles, and the row that the first bit of each stands for."""
    o = first * TILE_WORDS + tl.arange(0, AT_ONCE * TILE_WORDS)
    m = o < marked * TILE_WORDS
    b_tile = tl.load(p_marks + o // TILE_WORDS, mask=m, other=0).to(tl.int32)
    # Read one by one, so that they are where they are written from.
    o_word = tl.max_contiguous(b_tile * TILE_WORDS + o % TILE_WORDS, 1)
    b_word = tl.load(p_words + o_word, mask=m, other=0)
    return b_word.to(tl.uint32, bitcast=True), o_word * WORD_BITS


@triton.jit
def lowest_bit(b_word):  # type: ignore[no-untyped-def]
    """The number of the lowest bit of a uint32, or of an int32 above 0, and the other bits."""
    b_others = b_word & (b_word - 1)
    b_lowest = (b_word ^ b_others).to(tl.float32)  # a power of two: its exponent is the bit's number
    return (b_lowest.to(tl.int32, bitcast=True) >> 23) - 127, b_others


@triton.jit
def _gather_marked(p_marks, tiles, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The marked tiles' numbers take the place of the marks; returns how many there are."""
    marked = tl.zeros((), dtype=tl.int32)
    o_word = tl.arange(0, WORDS) * WORD_BITS
    o_bit = tl.arange(0, WORD_BITS)
    for t in range(0, tiles, WORDS * WORD_BITS):
        o = t + o_word[:, None] + o_bit[None, :]
        m_marked = tl.load(p_marks + o, mask=o < tiles, other=0) != 0
        b_bits = tl.where(m_marked, 1 << o_bit[None, :], 0)
        b_word = (tl.sum(b_bits, 1) if SLOW_XOR else tl.xor_sum(b_bits, 1)).to(tl.uint32, bitcast=True)
        b_counts = popcount(b_word)
        # No place is beyond a tile's own, so what is overwritten was read: its mark is in the sum.
        b_place = marked + tl.cumsum(b_counts, 0) - b_counts
        for _ in range(0, tl.max(b_counts, 0)):
            b_number, b_others = lowest_bit(b_word)
            b_tile = (t + o_word + b_number).to(p_marks.dtype.element_ty)
            tl.store(p_marks + b_place, b_tile, mask=b_word != 0)
            b_word = b_others
            b_place += 1
        marked += tl.sum(b_counts, 0)
    return marked


@triton.jit
def _write_rows(p_rows, b_word, b_counts, b_first, done, count, size, phase):  # type: ignore[no-untyped-def]
    """Rows of some words' bits go to their places; ``done`` of the token's ``count`` are before them."""
    b_place = done + tl.cumsum(b_counts, 0) - b_counts
    late = (phase >= size).to(phase.dtype)
    for _ in range(0, tl.max(b_counts, 0)):  # a word's lowest bit each time
        b_bit, b_others = lowest_bit(b_word)
        b_row = b_first + b_bit
        if count == size:
            tl.store(p_rows + b_place, b_row, mask=b_word != 0)
        else:
            b_running = b_place.to(phase.dtype) * size + phase
            b_thinned = b_running // count - late
            tl.store(p_rows + b_thinned, b_row, mask=(b_word != 0) & (b_running % count < size))
        b_word = b_others
        b_place += 1


@triton.jit(do_not_specialize=["num_tiles", "mark_units", "budget"])
def _list_kernel(  # type: ignore[no-untyped-def]
    bitmap,
    marks,
    token_hashes,
    active,
    found,
    rows,
    num_tiles,
    mark_units,
    budget,
    WIDE: tl.constexpr,
    MARK_UNIT: tl.constexpr,
    MARK_WORDS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):
    """One token's bits, counted and then written out as rows of C.

    Few tiles are marked, so the others' bits are never read. The marks' number in units of MARK_UNIT tells the compiler
    how much one instruction may read.
    """
    n = tl.program_id(0).to(tl.int64)
    p_marks = marks + n * (mark_units * MARK_UNIT)
    p_words = bitmap + n * (num_tiles * TILE_WORDS)
    p_rows = rows + n * budget
    tiles = tl.where(tl.load(active + n) != 0, mark_units, 0) * MARK_UNIT
    marked = _gather_marked(p_marks, tiles, MARK_WORDS)
    tl.debug_barrier()  # other threads read them

    b_next, b_next_first = _marked_words(p_words, p_marks, 0, marked, AT_ONCE, TILE_WORDS)
    b_total = popcount(b_next)
    for first in range(AT_ONCE, marked, AT_ONCE):
        b_more, _ = _marked_words(p_words, p_marks, first, marked, AT_ONCE, TILE_WORDS)
        b_total += popcount(b_more)
    count = tl.sum(b_total, 0)
    tl.store(found + n, count)
    size = tl.minimum(count, budget)
    phase = mix(tl.load(token_hashes + n).to(tl.uint32, bitcast=True) + PHASE_SALT).to(tl.int64) * count >> 32
    if not WIDE:
        phase = phase.to(tl.int32)

    done = tl.zeros((), dtype=tl.int32)
    for first in range(0, marked, AT_ONCE):
        b_bits, b_first = b_next, b_next_first
        # The next ones are asked for before these are written.
        b_next, b_next_first = _marked_words(p_words, p_marks, first + AT_ONCE, marked, AT_ONCE, TILE_WORDS)
        b_counts = popcount(b_bits)
        _write_rows(p_rows, b_bits, b_counts, b_first, done, count, size, phase)
        done += tl.sum(b_counts, 0)


def select(
    problem: LocalProblem,
    plan: SamplingPlan,
    *,
    stats: bool,
    on_partials: Callable[[Partials], object] | None = None,
    allow_tma: bool = True,
    specialise: bool = True,
) -> tuple[Partials, Selection]:
    """The contract's ``select``: the partials are complete before the last chunk's lists are made.

    Args:
        allow_tma: whether tensor memory descriptors may be used where they can.
        specialise: whether warps may be specialised where they can (see ``hopper``).

    Raises:
        ValueError: the workspace does not hold the lists, and what one tile of tokens needs.
    """
    num_tokens, num_rows, device = problem.num_tokens, problem.num_rows, problem.input.device
    smoothing = problem.smoothing_weight is not None
    new = problem.input.new_empty
    budget = min(plan.budget, num_rows)
    rows = new((num_tokens, budget), dtype=torch.int32)
    if num_tokens == 0 or num_rows == 0:
        nothing = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        results = empty_partials(num_tokens, device, smoothing=smoothing, stats=stats)
        if on_partials is not None:
            on_partials(results)
        return results, Selection(rows, nothing, nothing)
    results = unset_partials(num_tokens, device, smoothing=smoothing, stats=stats)

    operands = LogitOperands.prepare(problem, allow_tma=allow_tma)
    specialise = specialise and hopper.available_to_select(operands, stats=stats)
    num_tiles = cdiv(num_rows, operands.tile.cols)
    words = num_tiles * operands.tile.cols // sampling.WORD_BITS
    selection = Selection(rows, new(num_tokens, dtype=torch.int32), new(words, dtype=torch.int32))
    fields = 2 + smoothing + stats
    per_token = _bytes_per_token(num_tiles, fields + stats, words)
    fixed = _fixed_bytes(num_tokens, budget, words) + held(plan.hot, plan.hot_place)
    chunk = _tokens_at_once(problem, operands.tile, per_token, fixed, num_tiles)
    buffer = new(fields * num_tiles * chunk, dtype=torch.float32)
    argmax_buffer = new(num_tiles * chunk, dtype=torch.int32) if stats else None
    mass = new(num_tiles, dtype=torch.float32) if smoothing else None
    bitmap = new((chunk, words), dtype=torch.int32)
    marks = problem.input.new_zeros((chunk, _mark_pitch(num_tiles)), dtype=_mark_dtype(num_tiles))
    anchor, active = plan.anchor.contiguous(), plan.active.contiguous()
    num_ids = words * WORD_BITS.value  # whole tiles of them
    token_hashes, id_hashes = new(num_tokens, dtype=torch.int32), new(num_ids, dtype=torch.int32)
    _prepare_kernel[(cdiv(max(num_tokens, num_ids), PREPARE_SIZE),)](
        plan.seed, plan.hot_place, token_hashes, id_hashes, selection.cold, results.target_logit,
        num_tokens, num_rows, num_ids, plan.first_id, SIZE=PREPARE_SIZE, num_warps=4,
    )  # fmt: skip
    for start in range(0, num_tokens, chunk):
        stop = min(start + chunk, num_tokens)
        part = operands.tokens(start, stop)
        eps = (plan.eps, -math.log2(plan.eps))
        if specialise:
            hopper.select_tiles(
                part, anchor[start:stop], (token_hashes[start:stop], id_hashes), selection.cold, eps,
                buffer, results.target_logit[start:stop], bitmap, marks,
            )  # fmt: skip
        else:
            _select_kernel[part.grid()](
                *part.handles(), part.bias, part.smoothing_weight, part.target,
                anchor[start:stop], token_hashes[start:stop], id_hashes, selection.cold,
                buffer, argmax_buffer, mass, results.target_logit[start:stop], bitmap, marks,
                *part.sizes(), part.scale, part.softcap or 1.0, *eps, words, marks.shape[1],
                STATS=stats, **part.flags(),
            )  # fmt: skip
        forward.fold_chunk(results, slice(start, stop), buffer, argmax_buffer, mass, num_tiles)
        if on_partials is not None and stop == num_tokens:
            on_partials(results)
        _list_kernel[(stop - start,)](
            bitmap, marks, token_hashes[start:stop], active[start:stop],
            selection.found[start:stop], selection.rows[start:stop], num_tiles, marks.shape[1] // MARK_UNIT, budget,
            WIDE=num_rows * (budget + 1) >= 2**31, MARK_UNIT=MARK_UNIT,
            MARK_WORDS=min(next_power_of_2(cdiv(num_tiles, sampling.WORD_BITS)), MARK_WORDS),
            AT_ONCE=TILES_AT_ONCE, TILE_WORDS=words // num_tiles, num_warps=LIST_WARPS,
        )  # fmt: skip
    return results, selection


def _mark_dtype(num_tiles: int) -> torch.dtype:
    """Of numbers of tiles."""
    return torch.int16 if num_tiles < 2**15 else torch.int32


def _mark_pitch(num_tiles: int) -> int:
    return cdiv(num_tiles, MARK_UNIT) * MARK_UNIT


def _bytes_per_token(num_tiles: int, values: int, words: int) -> int:
    """Of a chunk: partials, bits and marks."""
    return (values * num_tiles + words) * FP32_BYTES + _mark_pitch(num_tiles) * _mark_dtype(num_tiles).itemsize


def _fixed_bytes(num_tokens: int, budget: int, words: int) -> int:
    """The lists, bits and hashes of rows; of a token its labels' rows, anchor, hash, partials and number of entries."""
    rows = allocated(words * FP32_BYTES, words * WORD_BITS.value * FP32_BYTES)
    return allocated(num_tokens * budget * FP32_BYTES) + rows + 13 * allocated(num_tokens * FP32_BYTES)


def least_workspace(num_tokens: int, num_rows: int, dtype: torch.dtype, size: SamplingSize) -> int:
    """Enough for any options on any device."""
    tile = extreme_tile(dtype)
    words = cdiv(num_rows, tile.cols) * tile.cols // WORD_BITS.value
    per_token = _bytes_per_token(cdiv(num_rows, FEWEST_COLS), forward.MOST_VALUES, words)
    chunk = allocated(per_token * min(tile.rows, num_tokens)) + 5 * ALLOCATION
    kept = chosen_bytes(num_tokens, size)
    return chunk + kept + _fixed_bytes(num_tokens, min(size.budget, num_rows), words)


def _tokens_at_once(problem: LocalProblem, tile: Tile, per_token: int, fixed: int, columns: int) -> int:
    """Tokens per chunk, in whole tiles: as few chunks as memory allows, whose last tiles leave few processors idle.

    Args:
        columns: tiles of rows of C.
    """
    num_tokens = problem.num_tokens
    least = allocated(per_token * min(tile.rows, num_tokens)) + fixed
    if problem.workspace is None:
        budget = max(CHUNK_BYTES + fixed, least)
    elif problem.workspace < least:
        raise workspace_too_small(problem.workspace, least, num_tokens, problem.num_rows, problem.hidden_size)
    else:
        budget = min(problem.workspace, CHUNK_BYTES + fixed)
    most = max(1, (budget - fixed - ALLOCATION) // (per_token * tile.rows))
    tiles = cdiv(num_tokens, tile.rows)
    evenly = cdiv(tiles, cdiv(tiles, most))
    at_once = processors(problem.input.device)

    def rounds(rows: int) -> int:
        whole, rest = divmod(tiles, rows)
        return whole * cdiv(rows * columns, at_once) + cdiv(rest * columns, at_once)

    candidates = range(evenly, min(most, tiles, evenly + MORE_ROWS) + 1)
    return min(min(candidates, key=rounds) * tile.rows, num_tokens)
