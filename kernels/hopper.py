"""The forward pass for Hopper, warp-specialised: the tensor cores don't wait while a tile is reduced.

``forward`` and ``select_entries`` compute a tile and then reduce it, with the same warps: meanwhile the tensor cores
are idle, for some 5 % of the time in the first and 8 % in the second. Here one program an SM walks over tiles for as
long as there are any, and its warps share the work. One warp loads: a ring of stages of E and C by TMA, which runs
ahead across the end of a tile. The others multiply and reduce, in one of two ways:

- ``_reduce_kernel`` (for ``forward``): two warp groups have half of a tile's tokens each, and go through its stages one
  after the other. The second is held back by SKEW stages at the beginning, and so ever after: when the first reduces,
  the second still multiplies, and the other way round.
- ``_select_kernel`` (for ``select_entries``), whose reduction is longer than the ring: two warp groups multiply and
  hand the tile over in shared memory, and two more warps reduce it, a row a thread, during the next tile's product.
  Where rows of C are short, that product is over too soon, and the plain kernel is faster.

Numerics are those of ``forward`` and ``select_entries``: the products have the same bits, and so have the decisions.

Written in Gluon, Triton's language for explicit layouts, whose interface moves: ``available`` says where it is used.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from . import sampling
from .logits import LogitOperands
from .tiles import INTERPRETED, capability, cdiv, processors

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # Triton < 3.5
    gluon = None

TRITON_VERSIONS = ((3, 6), (3, 9))
"""First and last version of Triton whose Gluon compiles these kernels."""
ROWS, COLS, GROUP = 128, 256, 16
REDUCE_INNER, REDUCE_STAGES, SKEW, REDUCE_REGISTERS = 64, 4, 3, 232
SELECT_INNER, SELECT_STAGES, SELECT_REGISTERS = 32, 4, 152
LOADER_REGISTERS = 24
LEAST_HIDDEN, SELECT_LEAST_HIDDEN = SKEW * REDUCE_INNER, 1536


def supported(device: torch.device) -> bool:
    """Whether the kernels run on a device, with this Triton."""
    known = gluon is not None and TRITON_VERSIONS[0] <= _triton_version() <= TRITON_VERSIONS[1]
    return known and not INTERPRETED and torch.cuda.is_available() and capability(device) == (9, 0)


def available(operands: LogitOperands, *, stats: bool) -> bool:
    """Whether ``reduce_tiles`` takes these operands: 16-bit, by TMA, and no option but a scale."""
    return supported(operands.input.device) and fits(operands, stats=stats)


def fits(operands: LogitOperands, *, stats: bool) -> bool:
    """``available``, on a device that is."""
    return (
        operands.tma
        and operands.input.element_size() == 2
        and operands.tile.rows == ROWS
        and not stats
        and operands.bias is None
        and operands.smoothing_weight is None
        and operands.softcap is None
        and operands.hidden >= LEAST_HIDDEN
    )


def available_to_select(operands: LogitOperands, *, stats: bool) -> bool:
    """Whether ``select_tiles`` takes these operands, and is faster than the plain kernel."""
    return available(operands, stats=stats) and operands.tile.cols == COLS and operands.hidden >= SELECT_LEAST_HIDDEN


def _triton_version() -> tuple[int, int]:
    major, minor, *_ = triton.__version__.split(".")
    return int(major), int(minor)


if gluon is not None:
    # Names that changed in Triton 3.8 and 3.9.
    _load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
    _REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
    _LOG2E = gl.constexpr(1.4426950408889634)
    _WORD = gl.constexpr(sampling.WORD_BITS)
    _MIX_1, _MIX_2 = gl.constexpr(sampling.MIX_1), gl.constexpr(sampling.MIX_2)
    _OFFSET_SALT = gl.constexpr(sampling.OFFSET_SALT)
    _SMALLEST_SUM, _LARGEST_SUM = gl.constexpr(sampling.SMALLEST_SUM), gl.constexpr(sampling.LARGEST_SUM)

    @gluon.jit
    def _tile(pid, row_tiles, col_tiles, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
        """``logits.grouped_tile``."""
        per_group = GROUP * col_tiles
        first = pid // per_group * GROUP
        size = gl.minimum(row_tiles - first, GROUP)
        inside = pid % per_group
        return first + inside % size, inside // size

    @gluon.jit
    def _mix(x):  # type: ignore[no-untyped-def]
        """``sampling.mix`` of uint32."""
        x = x ^ (x >> 16)
        x = x * _MIX_1
        x = x ^ (x >> 15)
        x = x * _MIX_2
        return x ^ (x >> 16)

    @gluon.jit
    def _xor(a, b):  # type: ignore[no-untyped-def]
        return a ^ b

    @gluon.jit
    def _load(  # type: ignore[no-untyped-def]
        buffers,
        barriers,
        problem,
        ROWS: gl.constexpr,
        COLS: gl.constexpr,
        INNER: gl.constexpr,
        GROUP: gl.constexpr,
        STAGES: gl.constexpr,
        PARTS: gl.constexpr,
    ):
        """One warp: every tile's stages, E in PARTS pieces."""
        input, weight = problem[0]
        ready, empty = barriers[0], barriers[1]
        num_tokens, num_rows, hidden = problem[3]
        row_tiles = gl.cdiv(num_tokens, ROWS)
        col_tiles = gl.cdiv(num_rows, COLS)
        step = 0
        for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
            pid_n, pid_v = _tile(tile, row_tiles, col_tiles, GROUP)
            for k in range(0, hidden, INNER):
                i = step % STAGES
                mbarrier.wait(empty.index(i), (step // STAGES & 1) ^ 1)
                bar = ready.index(i)
                mbarrier.expect(bar, input.block_type.nbytes * PARTS + weight.block_type.nbytes)
                _load_tile(weight, [pid_v * COLS, k], bar, buffers[1].index(i))
                for part in gl.static_range(PARTS):
                    n0 = pid_n * ROWS + part * (ROWS // PARTS)
                    _load_tile(input, [n0, k], bar, buffers[0].index(i * PARTS + part))
                step += 1

    @gluon.jit
    def _multiply_and_reduce(  # type: ignore[no-untyped-def]
        buffers,
        barriers,
        problem,
        ROWS: gl.constexpr,
        COLS: gl.constexpr,
        INNER: gl.constexpr,
        GROUP: gl.constexpr,
        STAGES: gl.constexpr,
        SKEW: gl.constexpr,
        HAS_SCALE: gl.constexpr,
        PART: gl.constexpr,
    ):
        """One warp group: a half of every tile's tokens."""
        ready, empty, ahead = barriers
        target, scale = problem[1]
        partials, target_logit = problem[2]
        num_tokens, num_rows, hidden = problem[3]
        HALF: gl.constexpr = ROWS // 2
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
        row_tiles = gl.cdiv(num_tokens, ROWS)
        col_tiles = gl.cdiv(num_rows, COLS)
        field = col_tiles.to(gl.int64) * num_tokens
        o_col = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
        step = 0
        if PART == 1:
            mbarrier.wait(ahead, 0)
        for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
            pid_n, pid_v = _tile(tile, row_tiles, col_tiles, GROUP)
            v0 = pid_v * COLS
            o_n = pid_n * ROWS + PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
            m_n = o_n < num_tokens
            b_target = gl.load(target + o_n, mask=m_n, other=-1)
            m_hit = (b_target >= v0) & (b_target < v0 + COLS)
            b_z = gl.zeros((HALF, COLS), gl.float32, layout=layout)
            for k in range(0, hidden, INNER):
                i = step % STAGES
                mbarrier.wait(ready.index(i), step // STAGES & 1)
                b_e = buffers[0].index(i * 2 + PART)
                b_z = warpgroup_mma(b_e, buffers[1].index(i).permute((1, 0)), b_z, is_async=True)
                b_z = warpgroup_mma_wait(1, deps=(b_z,))  # the step before is done: its stage may be filled again
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                step += 1
                if PART == 0:
                    mbarrier.arrive(ahead, count=1, pred=step == SKEW)
            b_z = warpgroup_mma_wait(0, deps=(b_z,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)

            if HAS_SCALE:
                b_z = b_z * scale
            if gl.max(m_hit.to(gl.int32), 0) > 0:  # few tiles hold a target of their tokens
                b_col = gl.where(m_hit, b_target - v0, -1).to(gl.int32)
                m_target = gl.expand_dims(b_col, 1) == gl.expand_dims(o_col, 0)
                gl.store(target_logit + o_n, gl.sum(gl.where(m_target, b_z, 0.0), 1), mask=m_hit)
            if v0 + COLS > num_rows:
                b_z = gl.where(gl.expand_dims(v0 + o_col < num_rows, 0), b_z, float("-inf"))
            b_max = gl.max(b_z, 1)
            b_ref = gl.where(b_max > float("-inf"), b_max, 0.0)
            b_sum = gl.sum(gl.exp2((b_z - gl.expand_dims(b_ref, 1)) * _LOG2E), 1)
            p_out = partials + pid_v.to(gl.int64) * num_tokens + o_n
            gl.store(p_out, b_max, mask=m_n)
            gl.store(p_out + field, b_sum, mask=m_n)

    @gluon.jit(do_not_specialize=["num_tokens", "num_rows"])
    def _reduce_kernel(  # type: ignore[no-untyped-def]
        input,
        weight,
        target,
        partials,
        target_logit,
        num_tokens,
        num_rows,
        hidden,
        scale,
        ROWS: gl.constexpr,
        COLS: gl.constexpr,
        INNER: gl.constexpr,
        GROUP: gl.constexpr,
        STAGES: gl.constexpr,
        SKEW: gl.constexpr,
        HAS_SCALE: gl.constexpr,
        REGISTERS: gl.constexpr,
        LOADER_REGISTERS: gl.constexpr,
    ):
        e = gl.allocate_shared_memory(input.dtype, [STAGES * 2, ROWS // 2, INNER], input.layout)
        c = gl.allocate_shared_memory(weight.dtype, [STAGES, COLS, INNER], weight.layout)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        ahead = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        mbarrier.init(ahead, count=1)
        buffers = (e, c)
        barriers = (ready, empty, ahead)
        problem = ((input, weight), (target, scale), (partials, target_logit), (num_tokens, num_rows, hidden))
        gl.warp_specialize(
            [
                (
                    _multiply_and_reduce,
                    (buffers, barriers, problem, ROWS, COLS, INNER, GROUP, STAGES, SKEW, HAS_SCALE, 0),
                ),
                (
                    _multiply_and_reduce,
                    (buffers, barriers, problem, ROWS, COLS, INNER, GROUP, STAGES, SKEW, HAS_SCALE, 1),
                ),
                (_load, (buffers, barriers, problem, ROWS, COLS, INNER, GROUP, STAGES, 2)),
            ],
            [4, 1],
            [REGISTERS, LOADER_REGISTERS],
        )

    @gluon.jit
    def _multiply(  # type: ignore[no-untyped-def]
        buffers,
        barriers,
        problem,
        ROWS: gl.constexpr,
        COLS: gl.constexpr,
        INNER: gl.constexpr,
        STAGES: gl.constexpr,
    ):
        """Two warp groups: every tile's product, handed over in shared memory."""
        ready, empty, full, taken = barriers
        num_tokens, num_rows, hidden = problem[3]
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, COLS, 16])
        # The words' buffers as one: a store for each would wait for the one before.
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
        if _REINTERPRET:
            tile_z = buffers[2].reinterpret(gl.float32, [COLS // _WORD, ROWS, _WORD], swizzled)
        else:
            tile_z = buffers[2]._reinterpret(gl.float32, [COLS // _WORD, ROWS, _WORD], swizzled)
        step = 0
        turn = 0
        tiles = gl.cdiv(num_tokens, ROWS) * gl.cdiv(num_rows, COLS)
        for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
            b_z = gl.zeros((ROWS, COLS), gl.float32, layout=layout)
            for k in range(0, hidden, INNER):
                i = step % STAGES
                mbarrier.wait(ready.index(i), step // STAGES & 1)
                b_z = warpgroup_mma(buffers[0].index(i), buffers[1].index(i).permute((1, 0)), b_z, is_async=True)
                b_z = warpgroup_mma_wait(1, deps=(b_z,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
                step += 1
            b_z = warpgroup_mma_wait(0, deps=(b_z,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
            mbarrier.wait(taken, (turn & 1) ^ 1)
            tile_z.store(gl.permute(gl.reshape(b_z, (ROWS, COLS // _WORD, _WORD)), (1, 0, 2)))
            mbarrier.arrive(full, count=1)
            turn += 1  # noqa: SIM113 (no Python loop)

    @gluon.jit
    def _chunk(tile_z, c, v0, num_rows, scale, layout: gl.constexpr, COLS: gl.constexpr, HAS_SCALE: gl.constexpr):  # type: ignore[no-untyped-def]
        """One word's columns of z."""
        b_z = tile_z.index(c).load(layout)
        if HAS_SCALE:
            b_z = b_z * scale
        if v0 + COLS > num_rows:
            o_v = v0 + c * _WORD + gl.arange(0, _WORD, layout=gl.SliceLayout(0, layout))
            b_z = gl.where(gl.expand_dims(o_v < num_rows, 0), b_z, float("-inf"))
        return b_z

    @gluon.jit
    def _decide(  # type: ignore[no-untyped-def]
        buffers,
        barriers,
        problem,
        ROWS: gl.constexpr,
        COLS: gl.constexpr,
        GROUP: gl.constexpr,
        HAS_SCALE: gl.constexpr,
    ):
        """Two warps: ``select_entries``'s reduction, where a thread has whole rows."""
        full, taken = barriers[2], barriers[3]
        target, anchor, token_hashes, id_hashes, cold, scale, eps, log2_inverse_eps = problem[1]
        partials, target_logit, bitmap, marks, words_per_token, marks_per_token = problem[2]
        num_tokens, num_rows, _ = problem[3]
        tile_z = buffers[2]
        layout: gl.constexpr = gl.BlockedLayout([1, _WORD], [32, 1], [2, 1], [1, 0])
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        CHUNKS: gl.constexpr = COLS // _WORD
        row_tiles = gl.cdiv(num_tokens, ROWS)
        col_tiles = gl.cdiv(num_rows, COLS)
        field = col_tiles.to(gl.int64) * num_tokens
        o_bit = gl.arange(0, _WORD, layout=gl.SliceLayout(0, layout))
        turn = 0
        for tile in range(gl.program_id(0), row_tiles * col_tiles, gl.num_programs(0)):
            pid_n, pid_v = _tile(tile, row_tiles, col_tiles, GROUP)
            v0 = pid_v * COLS
            o_n = pid_n * ROWS + gl.arange(0, ROWS, layout=rows)
            m_n = o_n < num_tokens
            b_target = gl.load(target + o_n, mask=m_n, other=-1)
            b_anchor = gl.load(anchor + o_n, mask=m_n, other=0.0)
            b_token = gl.load(token_hashes + o_n, mask=m_n, other=0).to(gl.uint32, bitcast=True)
            m_hit = (b_target >= v0) & (b_target < v0 + COLS)
            b_col = gl.where(m_hit, b_target - v0, -1).to(gl.int32)
            hits = gl.max(m_hit.to(gl.int32), 0)
            b_shift = gl.expand_dims(gl.fma(b_anchor, gl.full((ROWS,), -_LOG2E, gl.float32, rows), log2_inverse_eps), 1)
            b_factor = gl.expand_dims(b_token | 1, 1)
            b_offset = gl.expand_dims(_mix(b_token + _OFFSET_SALT), 1)
            p_words = bitmap + o_n.to(gl.int64) * words_per_token + v0 // _WORD
            b_zeros = gl.zeros((ROWS, _WORD), gl.float32, layout)
            b_odds = gl.zeros((ROWS,), gl.float32, layout=rows)
            b_any = gl.zeros((ROWS,), gl.int32, layout=rows)
            p_id = id_hashes + v0 + o_bit
            mbarrier.wait(full, turn & 1)
            for c in range(CHUNKS):
                b_id = gl.load(p_id + c * _WORD).to(gl.uint32, bitcast=True)
                b_z = _chunk(tile_z, c, v0, num_rows, scale, layout, COLS, HAS_SCALE)
                b_chunk_odds = gl.exp2(gl.fma(b_z, b_zeros + _LOG2E, b_zeros + b_shift))
                b_x = b_factor * gl.expand_dims(b_id, 0) + b_offset
                b_u = ((b_x >> 9) | 0x3F800000).to(gl.float32, bitcast=True)
                b_bits = gl.where(b_u < b_chunk_odds + 1.0, gl.expand_dims(1 << o_bit, 0), 0)
                b_own = gl.where(b_col // _WORD == c, 1 << (b_col % _WORD), 0)
                b_own = gl.where(m_hit, b_own, 0)
                b_word = gl.reduce(b_bits, 1, _xor) & gl.load(cold + v0 // _WORD + c) & ~b_own
                gl.store(p_words + c, b_word, mask=m_n)
                b_any |= b_word
                b_odds += gl.sum(b_chunk_odds, 1)
            if hits > 0:
                b_hit = gl.zeros((ROWS,), gl.float32, layout=rows)
                for c in range(CHUNKS):
                    b_z = _chunk(tile_z, c, v0, num_rows, scale, layout, COLS, HAS_SCALE)
                    m_target = gl.expand_dims(b_col - c * _WORD, 1) == gl.expand_dims(o_bit, 0)
                    b_hit += gl.sum(gl.where(m_target, b_z, 0.0), 1)
                gl.store(target_logit + o_n, b_hit, mask=m_hit)
            b_ref = b_anchor
            b_sum = b_odds * eps
            m_fine = (b_odds > _SMALLEST_SUM) & (b_sum < _LARGEST_SUM)
            if gl.min((m_fine | (o_n >= num_tokens)).to(gl.int32), 0) == 0:
                b_ref = gl.full((ROWS,), float("-inf"), gl.float32, layout=rows)
                for c in range(CHUNKS):
                    b_ref = gl.maximum(
                        b_ref, gl.max(_chunk(tile_z, c, v0, num_rows, scale, layout, COLS, HAS_SCALE), 1)
                    )
                b_top = gl.expand_dims(gl.where(b_ref > float("-inf"), b_ref, 0.0), 1)
                b_sum = gl.zeros((ROWS,), gl.float32, layout=rows)
                for c in range(CHUNKS):
                    b_z = _chunk(tile_z, c, v0, num_rows, scale, layout, COLS, HAS_SCALE)
                    b_sum += gl.sum(gl.exp2((b_z - b_top) * _LOG2E), 1)
            mbarrier.arrive(taken, count=1)
            turn += 1  # noqa: SIM113 (no Python loop)
            p_out = partials + pid_v.to(gl.int64) * num_tokens + o_n
            b_mark = (b_any != 0).to(marks.dtype.element_ty)
            gl.store(marks + o_n.to(gl.int64) * marks_per_token + pid_v, b_mark, mask=m_n)
            gl.store(p_out, b_ref, mask=m_n)
            gl.store(p_out + field, b_sum, mask=m_n)

    @gluon.jit(do_not_specialize=["num_tokens", "num_rows", "words_per_token", "marks_per_token"])
    def _select_kernel(  # type: ignore[no-untyped-def]
        input,
        weight,
        target,
        anchor,
        token_hashes,
        id_hashes,
        cold,
        partials,
        target_logit,
        bitmap,
        marks,
        num_tokens,
        num_rows,
        hidden,
        words_per_token,
        marks_per_token,
        scale,
        eps,
        log2_inverse_eps,
        ROWS: gl.constexpr,
        COLS: gl.constexpr,
        INNER: gl.constexpr,
        GROUP: gl.constexpr,
        STAGES: gl.constexpr,
        HAS_SCALE: gl.constexpr,
        REGISTERS: gl.constexpr,
    ):
        e = gl.allocate_shared_memory(input.dtype, [STAGES, ROWS, INNER], input.layout)
        c = gl.allocate_shared_memory(weight.dtype, [STAGES, COLS, INNER], weight.layout)
        # By words, and swizzled so that neither the fragments of a product nor rows read by threads meet in a bank.
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
        z = gl.allocate_shared_memory(gl.float32, [COLS // _WORD, ROWS, _WORD], swizzled)
        ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        taken = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
            mbarrier.init(empty.index(i), count=1)
        mbarrier.init(full, count=1)
        mbarrier.init(taken, count=1)
        buffers = (e, c, z)
        barriers = (ready, empty, full, taken)
        operands = (target, anchor, token_hashes, id_hashes, cold, scale, eps, log2_inverse_eps)
        results = (partials, target_logit, bitmap, marks, words_per_token, marks_per_token)
        problem = ((input, weight), operands, results, (num_tokens, num_rows, hidden))
        gl.warp_specialize(
            [
                (_multiply, (buffers, barriers, problem, ROWS, COLS, INNER, STAGES)),
                (_decide, (buffers, barriers, problem, ROWS, COLS, GROUP, HAS_SCALE)),
                (_load, (buffers, barriers, problem, ROWS, COLS, INNER, GROUP, STAGES, 1)),
            ],
            [2, 1],
            [REGISTERS, REGISTERS],
        )


def _descriptor(matrix: Tensor, rows: int, inner: int) -> TensorDescriptor:
    block = [rows, inner]
    element = gl.bfloat16 if matrix.dtype == torch.bfloat16 else gl.float16
    return TensorDescriptor.from_tensor(matrix, block, gl.NVMMASharedLayout.get_default_for(block, element))


def _programs(operands: LogitOperands) -> tuple[int]:
    return (min(processors(operands.input.device), cdiv(operands.num_tokens, ROWS) * cdiv(operands.num_rows, COLS)),)


def reduce_tiles(operands: LogitOperands, partials: Tensor, target_logit: Tensor) -> None:
    """Fill ``partials`` (``[2, tiles of COLS rows, N]``: maximum, sum), and ``target_logit`` where targets are here."""
    _reduce_kernel[_programs(operands)](
        _descriptor(operands.input, ROWS // 2, REDUCE_INNER), _descriptor(operands.weight, COLS, REDUCE_INNER),
        operands.target, partials, target_logit,
        operands.num_tokens, operands.num_rows, operands.hidden, operands.scale,
        ROWS=ROWS, COLS=COLS, INNER=REDUCE_INNER, GROUP=GROUP, STAGES=REDUCE_STAGES, SKEW=SKEW,
        HAS_SCALE=operands.scale != 1.0, REGISTERS=REDUCE_REGISTERS, LOADER_REGISTERS=LOADER_REGISTERS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def select_tiles(
    operands: LogitOperands,
    anchor: Tensor,
    hashes: tuple[Tensor, Tensor],
    cold: Tensor,
    eps: tuple[float, float],
    partials: Tensor,
    target_logit: Tensor,
    bitmap: Tensor,
    marks: Tensor,
) -> None:
    """As ``reduce_tiles``, with the anchor for a maximum, and fill the decisions' ``bitmap`` and the tiles' ``marks``.

    Args:
        hashes: of tokens, and of rows (of whole tiles).
        eps: eps, and the binary logarithm of its inverse.
    """
    _select_kernel[_programs(operands)](
        _descriptor(operands.input, ROWS, SELECT_INNER), _descriptor(operands.weight, COLS, SELECT_INNER),
        operands.target, anchor, *hashes, cold, partials, target_logit, bitmap, marks,
        operands.num_tokens, operands.num_rows, operands.hidden, bitmap.shape[1], marks.shape[1], operands.scale, *eps,
        ROWS=ROWS, COLS=COLS, INNER=SELECT_INNER, GROUP=GROUP, STAGES=SELECT_STAGES,
        HAS_SCALE=operands.scale != 1.0, REGISTERS=SELECT_REGISTERS, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
