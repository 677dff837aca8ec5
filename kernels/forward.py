"""The forward pass: every logit computed once and reduced before it leaves the chip.

A program computes one tile of z (tokens × classifier rows) and reduces it, per token, to a *partial*: the tile's
maximum and the sum of exponentials relative to it, with the smoothing and statistics sums where they are asked for.
Partials go to a ``[fields, vocabulary tiles, tokens]`` buffer. For V = 256,000 and N = 8,192 that would be 62 MiB, so
tokens are taken in chunks that keep it small, and a second kernel folds each chunk's partials into the results.

Numerics:

- Everything is relative to a maximum: to the tile's in a partial, to the token's after the fold. A large common offset
  of the logits therefore costs nothing.
- The token's maximum and its target's logit come from the same accumulators.
- No atomics and no locks; the result depends on shapes and options only, bit for bit.
- A tile of only ``-inf`` is taken relative to 0, so ``-inf - -inf`` never arises. ``max`` skips NaN, the exponentials
  do not: a NaN logit makes its own token's ``sum_exp`` NaN, and only that. So does ``+inf``, as in torch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import hopper
from .fold import empty_partials, unset_partials
from .interface import Partials
from .logits import LOG2E, LogitOperands, finish_logits, grouped_tile, row_products
from .tiles import FEWEST_COLS, INTERPRETED, cdiv, extreme_tile
from .workspace import ALLOCATION, FP32_BYTES, allocated, workspace_too_small

PARTIALS_BYTES = 16 * 2**20
"""Default size of the partials buffer: beyond it, tokens are taken in chunks."""
MOST_VALUES = 5
"""Maximum, sum, smoothing, entropy, argmax: what one tile may have to say about a token."""
FOLD_TOKENS, FOLD_TILES, FOLD_WARPS = 8, 512, 16


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _partials_kernel(  # type: ignore[no-untyped-def]
    input,
    weight,
    bias,
    smoothing_weight,
    target,
    partials,
    partial_argmax,
    smoothing_mass,
    target_logit,
    threshold,
    peaks,
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
    STATS: tl.constexpr,
    PEAKS: tl.constexpr,
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

    if PEAKS:
        b_threshold = tl.load(threshold + o_n, mask=m_n, other=float("inf"))
        b_above = tl.where((b_threshold < float("inf"))[:, None], b_z - b_threshold[:, None], float("-inf"))
        p_peaks = peaks + pid_n.to(tl.int64) * num_rows + o_v
        tl.store(p_peaks, tl.max(b_above, 0).to(peaks.dtype.element_ty), mask=m_v)

    b_max = tl.max(b_z, 1)
    b_ref = tl.where(b_max > float("-inf"), b_max, 0.0)
    b_shifted = b_z - b_ref[:, None]
    b_exp = tl.exp2(b_shifted * LOG2E)

    field = num_tiles.to(tl.int64) * num_tokens
    p_out = partials + pid_v.to(tl.int64) * num_tokens + o_n
    tl.store(p_out, b_max, mask=m_n)
    tl.store(p_out + field, tl.sum(b_exp, 1), mask=m_n)
    if HAS_SMOOTHING:
        b_c = tl.load(smoothing_weight + o_v, mask=m_v, other=0.0)
        b_smooth = tl.where((b_c != 0.0)[None, :], b_c[None, :] * b_shifted, 0.0)
        tl.store(p_out + 2 * field, tl.sum(b_smooth, 1), mask=m_n)
        tl.store(smoothing_mass + pid_v, tl.sum(b_c, 0))  # by every tile of tokens, the same
    if STATS:
        b_entropy = tl.where(b_exp == 0.0, 0.0, b_exp * b_shifted)
        tl.store(p_out + (2 + HAS_SMOOTHING) * field, tl.sum(b_entropy, 1), mask=m_n)
        b_ids = tl.where(b_z == b_max[:, None], o_v[None, :], 2147483647)
        b_first = tl.min(b_ids, 1)
        tl.store(partial_argmax + pid_v.to(tl.int64) * num_tokens + o_n, b_first, mask=m_n)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles"])
def _fold_kernel(  # type: ignore[no-untyped-def]
    partials,
    partial_argmax,
    smoothing_mass,
    max_out,
    sum_out,
    smoothing_out,
    entropy_out,
    argmax_out,
    num_tokens,
    num_tiles,
    HAS_SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Two passes over a few tokens' partials, which are in the cache: the maximum, then what is relative to it."""
    o_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_n = o_n < num_tokens
    field = num_tiles.to(tl.int64) * num_tokens

    b_maxes = tl.full((TILES, ROWS), float("-inf"), dtype=tl.float32)
    for t in range(0, num_tiles, TILES):
        o_t = t + tl.arange(0, TILES)
        m = (o_t < num_tiles)[:, None] & m_n[None, :]
        p = partials + o_t.to(tl.int64)[:, None] * num_tokens + o_n[None, :]
        b_maxes = tl.maximum(b_maxes, tl.load(p, mask=m, other=float("-inf")))
    b_max = tl.max(b_maxes, 0)
    b_max = tl.where(b_max == b_max, b_max, float("-inf"))  # only NaN logits: sum_exp says so
    b_ref = tl.where(b_max > float("-inf"), b_max, 0.0)

    b_sum = tl.zeros((TILES, ROWS), dtype=tl.float32)
    b_smoothing = tl.zeros((TILES, ROWS), dtype=tl.float32)
    b_entropy = tl.zeros((TILES, ROWS), dtype=tl.float32)
    b_argmax = tl.full((TILES, ROWS), 2147483647, dtype=tl.int32)
    for t in range(0, num_tiles, TILES):
        o_t = t + tl.arange(0, TILES)
        m = (o_t < num_tiles)[:, None] & m_n[None, :]
        o = o_t.to(tl.int64)[:, None] * num_tokens + o_n[None, :]
        b_tile_max = tl.load(partials + o, mask=m, other=float("-inf"))
        b_tile_sum = tl.load(partials + field + o, mask=m, other=0.0)
        b_tile_ref = tl.where(b_tile_max > float("-inf"), b_tile_max, 0.0)
        b_shift = b_tile_ref - b_ref[None, :]
        # A tile of only -inf has its own reference, far above the token's perhaps; its sum is 0 (or NaN) as it is.
        b_factor = tl.where(b_tile_max == float("-inf"), 1.0, tl.exp2((b_tile_max - b_ref[None, :]) * LOG2E))
        b_sum += b_tile_sum * b_factor
        if HAS_SMOOTHING:
            b_tile = tl.load(partials + 2 * field + o, mask=m, other=0.0)
            b_mass = tl.load(smoothing_mass + o_t, mask=o_t < num_tiles, other=0.0)
            m_mass = m & (b_mass != 0.0)[:, None]
            b_smoothing += tl.where(m_mass, b_tile + b_mass[:, None] * b_shift, 0.0)
        if STATS:
            b_tile = tl.load(partials + (2 + HAS_SMOOTHING) * field + o, mask=m, other=0.0)
            b_entropy += tl.where(b_factor == 0.0, 0.0, b_factor * (b_tile + b_tile_sum * b_shift))
            b_id = tl.load(partial_argmax + o, mask=m, other=2147483647)
            b_argmax = tl.minimum(b_argmax, tl.where(b_tile_max == b_max[None, :], b_id, 2147483647))

    tl.store(max_out + o_n, b_max, mask=m_n)
    tl.store(sum_out + o_n, tl.sum(b_sum, 0), mask=m_n)
    if HAS_SMOOTHING:
        tl.store(smoothing_out + o_n, tl.sum(b_smoothing, 0), mask=m_n)
    if STATS:
        tl.store(entropy_out + o_n, tl.sum(b_entropy, 0), mask=m_n)
        b_first = tl.min(b_argmax, 0)
        tl.store(argmax_out + o_n, tl.where(b_first == 2147483647, -1, b_first).to(tl.int64), mask=m_n)


def partials(
    operands: LogitOperands,
    *,
    stats: bool,
    workspace: int | None,
    threshold: Tensor | None = None,
    peaks: Tensor | None = None,
    specialise: bool = True,
) -> Partials:
    """Launch the forward pass; nothing is launched for no tokens or no classifier rows.

    Args:
        threshold: fp32 ``[N]``, ``inf`` for tokens that don't count; None without ``peaks``.
        peaks: ``[row tiles, V]``, written: the largest ``z - threshold`` of a tile's tokens, NaN left out.
        specialise: whether warps may be specialised where they can (see ``hopper``); not with ``peaks``.

    Raises:
        ValueError: ``workspace`` does not hold the partials of one tile of tokens.
    """
    num_tokens, num_rows = operands.num_tokens, operands.num_rows
    smoothing = operands.smoothing_weight is not None
    device = operands.input.device
    if num_tokens == 0 or num_rows == 0:
        return empty_partials(num_tokens, device, smoothing=smoothing, stats=stats)
    results = unset_partials(num_tokens, device, smoothing=smoothing, stats=stats)
    results.target_logit.zero_()

    specialise = specialise and peaks is None and hopper.available(operands, stats=stats)
    num_tiles = cdiv(num_rows, hopper.COLS if specialise else operands.tile.cols)
    fields = 2 + smoothing + stats
    chunk = _tokens_at_once(operands, num_tiles, fields + stats, workspace)
    new = operands.input.new_empty
    buffer = new(fields * num_tiles * chunk, dtype=torch.float32)
    argmax_buffer = new(num_tiles * chunk, dtype=torch.int32) if stats else None
    mass = new(num_tiles, dtype=torch.float32) if smoothing else None
    for start in range(0, num_tokens, chunk):
        stop = min(start + chunk, num_tokens)
        part = operands.tokens(start, stop)
        if specialise:
            hopper.reduce_tiles(part, buffer, results.target_logit[start:stop])
        else:
            _partials_kernel[part.grid()](
                *part.handles(), part.bias, part.smoothing_weight, part.target,
                buffer, argmax_buffer, mass, results.target_logit[start:stop],
                None if threshold is None else threshold[start:stop],
                None if peaks is None else peaks[start // operands.tile.rows :],
                *part.sizes(), part.scale, part.softcap or 1.0,
                STATS=stats, PEAKS=peaks is not None, **part.flags(),
            )  # fmt: skip
        fold_chunk(results, slice(start, stop), buffer, argmax_buffer, mass, num_tiles)
    return results


def least_workspace(num_tokens: int, num_rows: int, dtype: torch.dtype) -> int:
    """Enough for any options on any device."""
    num_tiles = cdiv(num_rows, FEWEST_COLS)
    rows = min(extreme_tile(dtype).rows, num_tokens)
    return allocated(MOST_VALUES * num_tiles * rows * FP32_BYTES, num_tiles * FP32_BYTES) + ALLOCATION


def fold_chunk(
    results: Partials,
    tokens: slice,
    partials: Tensor,
    partial_argmax: Tensor | None,
    smoothing_mass: Tensor | None,
    num_tiles: int,
) -> None:
    """Fold the partials of some tokens into their ``results``."""
    fields = (results.max, results.sum_exp, results.smoothing, results.entropy, results.argmax)
    num_tokens = tokens.stop - tokens.start
    _fold_kernel[(cdiv(num_tokens, FOLD_TOKENS),)](
        partials, partial_argmax, smoothing_mass, *(None if field is None else field[tokens] for field in fields),
        num_tokens, num_tiles,
        HAS_SMOOTHING=results.smoothing is not None, STATS=results.entropy is not None,
        ROWS=FOLD_TOKENS, TILES=16 if INTERPRETED else FOLD_TILES, num_warps=FOLD_WARPS,
    )  # fmt: skip


def _tokens_at_once(operands: LogitOperands, num_tiles: int, values: int, workspace: int | None) -> int:
    """Tokens per chunk: whole tiles, whole groups of tiles where there is room, evenly used."""
    num_tokens, rows = operands.num_tokens, operands.tile.rows
    mass = num_tiles * FP32_BYTES if operands.smoothing_weight is not None else 0
    per_token = values * num_tiles * FP32_BYTES
    least = allocated(per_token * min(rows, num_tokens), mass) + ALLOCATION
    if workspace is None:
        budget = max(PARTIALS_BYTES, least)
    elif workspace < least:
        raise workspace_too_small(workspace, least, num_tokens, operands.num_rows, operands.hidden)
    else:
        budget = min(workspace, PARTIALS_BYTES)
    tiles = max(1, (max(budget, least) - allocated(mass) - ALLOCATION) // (per_token * rows))
    if tiles >= operands.tile.group:
        tiles -= tiles % operands.tile.group
    return min(tiles * rows, num_tokens)
