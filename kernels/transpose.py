"""The kept entries by row of C instead of by token: what grad C is summed from.

1. Every slot counts itself in at its column (integer atomics), and keeps the number of its arrival.
2. Sums over the counts say where columns begin; a slot's place there is its number, which depends on the atomics.
3. So slots are put back into ascending order: a slot's rank in its column is the number of smaller ones. Short columns
   are compared slot by slot. In a long one (the model is young, and some rows are likely everywhere) that would take
   the square of the tokens. There each token sets its bit, since it has a row once at most, and a rank is a number of
   bits.

Everything is made of integers, so the result is the same whatever the atomics did. The steps' kernels are short, and
are also what a caller has to put between long ones, or beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .entries import entries, list_of_token, row_of_slot
from .select_entries import WORD_BITS, Selection, popcount
from .tiles import INTERPRETED, cdiv, next_power_of_2
from .workspace import FP32_BYTES, allocated

SLOTS_AT_ONCE, SLOT_WARPS = (16, 1) if INTERPRETED else (256, 4)
ORDER_SLOTS, ORDER_AT_ONCE, ORDER_WARPS = (16, 16, 1) if INTERPRETED else (32, 32, 1)
ORDER_PROGRAMS = 5 if INTERPRETED else 8192
"""Most lists are far from full: one program for as many entries as there could be would find nothing to do."""
LEAST_LONG, LONG_PART = (16, 4) if INTERPRETED else (1024, 8)
"""A column is long if it has so many entries, and one for every so many tokens: hence bits and their sums take no more
than half a list."""
WORDS_AT_ONCE = 2 if INTERPRETED else 1024


def long_column(num_tokens: int) -> int:
    """Entries of the shortest column that is ordered by bits; a power of two."""
    return max(LEAST_LONG, next_power_of_2(cdiv(num_tokens, LONG_PART)))


@dataclass(frozen=True)
class Columns:
    """The entries by row of C: where each row's begin, ``[V + 1]``; all slots by row, ascending within a row."""

    starts: Tensor
    slots: Tensor


def slot_dtype(slots: int) -> torch.dtype:
    return torch.int32 if slots < 2**31 else torch.int64


def result_bytes(slots: int, num_rows: int) -> int:
    number = slot_dtype(slots).itemsize
    return allocated(slots * number, (num_rows + 1) * number)


def way_bytes(num_tokens: int, slots: int) -> int:
    """Most that is allocated besides the result, for as many tokens or fewer, where nothing is lent.

    There are half as many bits as soon as a column has to be twice as long: then what they were before counts.
    """
    edge = LONG_PART << max(0, (num_tokens // LONG_PART).bit_length() - 1)
    per_token = slots // max(1, num_tokens)
    shapes = (_bits_shape(tokens, tokens * per_token) for tokens in {num_tokens, min(edge, num_tokens)})
    return allocated(slots * slot_dtype(slots).itemsize, max(math.prod(shape) for shape in shapes) * FP32_BYTES)


def _bits_shape(num_tokens: int, slots: int) -> tuple[int, int, int]:
    """A bit a token for each long column, and how many are set before each word: ``[2, columns, words]``.

    A long column's number is its first place over the least length of such columns: two begin at least so far apart.
    """
    least = long_column(num_tokens)
    if num_tokens < least:
        return 2, 0, 0
    return 2, cdiv(slots, least), cdiv(num_tokens, WORD_BITS.value)


@triton.jit(do_not_specialize=["budget"])
def _arrive_kernel(  # type: ignore[no-untyped-def]
    target, cold, rows, found, active, column_counts, arrivals, budget, SIZE: tl.constexpr
):
    """Every slot counts itself in at its column, and keeps its number there: unique, in no particular order."""
    n = tl.program_id(0).to(tl.int64)
    if tl.load(active + n):
        size, b_target, has_target = list_of_token(n, target, cold, found, budget)
        for first in range(0, size + has_target, SIZE):
            o = first + tl.arange(0, SIZE)
            b_row, m_entry, _ = entries(o, rows, n, size, b_target, has_target, budget)
            b_arrival = tl.atomic_add(column_counts + 1 + b_row, 1, mask=m_entry, sem="relaxed")
            tl.store(arrivals + n * (budget + 1) + o, b_arrival, mask=m_entry)


@triton.jit(do_not_specialize=["budget", "words"])
def _place_kernel(  # type: ignore[no-untyped-def]
    target, cold, rows, found, active, starts, arrivals, placed, bits, budget, words,
    LONG: tl.constexpr, HAS_LONG: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Slots go to their columns' places, in the order of arrival; in long columns, tokens set their bits."""
    n = tl.program_id(0).to(tl.int64)
    if tl.load(active + n):
        size, b_target, has_target = list_of_token(n, target, cold, found, budget)
        for first in range(0, size + has_target, SIZE):
            o = first + tl.arange(0, SIZE)
            b_row, m_entry, _ = entries(o, rows, n, size, b_target, has_target, budget)
            b_slot = n * (budget + 1) + o
            b_begin = tl.load(starts + b_row, mask=m_entry, other=0)
            b_place = b_begin + tl.load(arrivals + b_slot, mask=m_entry, other=0)
            tl.store(placed + b_place, b_slot.to(placed.dtype.element_ty), mask=m_entry)
            if HAS_LONG:
                m_long = m_entry & (tl.load(starts + b_row + 1, mask=m_entry, other=0) - b_begin >= LONG)
                p_bits = bits + (b_begin // LONG).to(tl.int64) * words + n // WORD_BITS
                bit = (1 << (n % WORD_BITS)).to(tl.int32)
                tl.atomic_or(p_bits, tl.zeros((SIZE,), dtype=tl.int32) + bit, mask=m_long, sem="relaxed")


@triton.jit(do_not_specialize=["words", "size"])
def _prefix_kernel(bits, words, size, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many of a long column's bits are before each of its words; ``size`` words on."""
    p_bits = bits + tl.program_id(0).to(tl.int64) * words
    before = tl.zeros((), dtype=tl.int32)
    for w in range(0, words, SIZE):
        o = w + tl.arange(0, SIZE)
        b_counts = popcount(tl.load(p_bits + o, mask=o < words, other=0).to(tl.uint32, bitcast=True))
        tl.store(p_bits + size + o, before + tl.cumsum(b_counts, 0) - b_counts, mask=o < words)
        before += tl.sum(b_counts, 0)


@triton.jit
def _bits_before(bits, number, token, m, words, size):  # type: ignore[no-untyped-def]
    """How many smaller tokens have their bits set in some long columns."""
    p_word = bits + number.to(tl.int64) * words + token // WORD_BITS
    b_word = tl.load(p_word, mask=m, other=0) & ((1 << (token % WORD_BITS).to(tl.int32)) - 1)
    return tl.load(p_word + size, mask=m, other=0) + popcount(b_word.to(tl.uint32, bitcast=True))


@triton.jit
def _smaller(placed, begin, end, b_slot, AT_ONCE: tl.constexpr):  # type: ignore[no-untyped-def]
    """How many slots at places from ``begin`` to ``end`` are smaller than each of some slots."""
    NO_SLOT: tl.constexpr = 2**63 - 1 if placed.dtype.element_ty == tl.int64 else 2**31 - 1
    b_smaller = tl.zeros((b_slot.shape[0], AT_ONCE), dtype=tl.int32)
    for place in range(begin, end, AT_ONCE):
        o = place + tl.arange(0, AT_ONCE)
        b_other = tl.load(placed + o, mask=o < end, other=NO_SLOT)
        b_smaller += (b_other[None, :] < b_slot[:, None]).to(tl.int32)
    return tl.sum(b_smaller, 1)


@triton.jit
def _order(  # type: ignore[no-untyped-def]
    first, total, target, rows, found, starts, placed, bits, ordered, budget, words, size,
    LONG: tl.constexpr, HAS_LONG: tl.constexpr, SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Slots at neighbouring places.

    A short column that reaches beyond them is their first one or their last one, and there all of its slots are
    compared with the same others.
    """
    o = first + tl.arange(0, SIZE)
    m = o < total
    b_slot = tl.load(placed + o, mask=m, other=0)
    b_row, b_token = row_of_slot(b_slot, m, target, rows, found, budget)
    b_row = tl.where(m, b_row, -1)
    b_begin = tl.load(starts + b_row, mask=m, other=0)
    m_same = b_row[:, None] == b_row[None, :]
    b_rank = tl.sum((m_same & (b_slot[None, :] < b_slot[:, None])).to(tl.int32), 1)

    last = tl.minimum(first + SIZE, total) - 1
    s_first = tl.sum(tl.where(o == first, b_row, 0), 0)
    s_last = tl.sum(tl.where(o == last, b_row, 0), 0)
    begin = tl.load(starts + s_first).to(tl.int64)
    end = tl.load(starts + s_last + 1).to(tl.int64)
    if HAS_LONG:
        if tl.load(starts + s_first + 1) - begin >= LONG:
            begin = first
        if end - tl.load(starts + s_last) >= LONG:
            end = last + 1
    b_before = _smaller(placed, begin, first, b_slot, AT_ONCE)
    b_behind = _smaller(placed, last + 1, end, b_slot, AT_ONCE)
    b_rank += tl.where(b_row == s_first, b_before, 0) + tl.where(b_row == s_last, b_behind, 0)
    if HAS_LONG:
        m_long = m & (tl.load(starts + b_row + 1, mask=m, other=0) - b_begin >= LONG)
        b_bits = _bits_before(bits, b_begin // LONG, b_token, m_long, words, size)
        b_rank = tl.where(m_long, b_bits, b_rank)
    tl.store(ordered + b_begin + b_rank, b_slot, mask=m)


@triton.jit(do_not_specialize=["budget", "num_rows", "words", "size"])
def _order_kernel(  # type: ignore[no-untyped-def]
    target, rows, found, starts, placed, bits, ordered, budget, num_rows, words, size,
    LONG: tl.constexpr, HAS_LONG: tl.constexpr, SIZE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Within its column, a slot's place is the number of smaller slots there."""
    total = tl.load(starts + num_rows).to(tl.int64)
    for first in range(tl.program_id(0).to(tl.int64) * SIZE, total, tl.num_programs(0) * SIZE):
        _order(
            first, total, target, rows, found, starts, placed, bits, ordered, budget, words, size,
            LONG, HAS_LONG, SIZE, AT_ONCE,
        )  # fmt: skip


class Transposition:
    """Entries of tokens with gradient, and their cold targets, by row: in steps, each of which does those before it.

    So a caller has short kernels to put between long ones. Memory is taken as late as can be.

    Args:
        target: int64 ``[N]``, this rank's rows; negative for those of another rank.
        active: bool ``[N]``, which tokens have a gradient.
        lent: memory for a list on the way, a number a slot, if there is any; in use from ``place`` to ``columns``.
    """

    def __init__(
        self, selection: Selection, target: Tensor, active: Tensor, num_rows: int, lent: Tensor | None
    ) -> None:
        self._selection, self._target, self._active, self._num_rows = selection, target, active, num_rows
        self._slots = target.shape[0] * (selection.budget + 1)
        self._placed = lent
        self._bits: Tensor | None = None
        self._numbered = False
        self._stream: torch.cuda.Stream | None = None
        self._columns: Columns | None = None

    def place(self, aside: bool = False) -> Columns:
        """Every slot is in its column, in the order of arrival. Not yet in ``slots``, which holds these numbers.

        Args:
            aside: on a stream of its own, beside whatever is launched until the next step. Its programs are small and
                short, and go first, or they would wait for a place behind all of a large kernel's.
        """
        if self._columns is not None:
            return self._columns
        dtype, new = slot_dtype(self._slots), self._target.new_empty
        columns = Columns(new(self._num_rows + 1, dtype=dtype), new(self._slots, dtype=dtype))
        placed = new(self._slots, dtype=dtype) if self._placed is None else self._placed
        bits = new(_bits_shape(len(self._target), self._slots), dtype=torch.int32)
        self._columns, self._placed, self._bits = columns, placed, bits
        if aside and self._target.is_cuda:
            # What it touches is allocated on the current stream, and held until that has waited.
            self._stream = torch.cuda.Stream(priority=-1)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._place(columns, placed, bits)
        else:
            self._place(columns, placed, bits)
        return columns

    def _place(self, columns: Columns, placed: Tensor, bits: Tensor) -> None:
        selection = self._selection
        columns.starts.zero_()
        lists = (self._target, selection.cold, selection.rows, selection.found, self._active)
        sizes = {"SIZE": SLOTS_AT_ONCE, "num_warps": SLOT_WARPS}
        grid = (len(self._target),)
        _arrive_kernel[grid](*lists, columns.starts, columns.slots, selection.budget, **sizes)
        columns.starts.cumsum_(0)
        bits[:1].zero_()
        _place_kernel[grid](
            *lists, columns.starts, columns.slots, placed, bits, selection.budget, bits.shape[2], **sizes,
            **self._flags(bits),
        )  # fmt: skip

    def number(self) -> Columns:
        """Bits of long columns are summed."""
        columns = self.place()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._stream = None
        if self._bits is not None and not self._numbered:
            _, number, words = self._bits.shape
            if number > 0:
                _prefix_kernel[(number,)](self._bits, words, number * words, SIZE=WORDS_AT_ONCE, num_warps=4)
            self._numbered = True
        return columns

    def columns(self) -> Columns:
        """The slots of every column are in order."""
        columns, selection = self.number(), self._selection
        if self._bits is not None:
            _, number, words = self._bits.shape
            _order_kernel[(min(cdiv(self._slots, ORDER_SLOTS), ORDER_PROGRAMS),)](
                self._target, selection.rows, selection.found, columns.starts, self._placed, self._bits, columns.slots,
                selection.budget, self._num_rows, words, number * words,
                SIZE=ORDER_SLOTS, AT_ONCE=ORDER_AT_ONCE, num_warps=ORDER_WARPS, **self._flags(self._bits),
            )  # fmt: skip
            self._placed = self._bits = None
        return columns

    def _flags(self, bits: Tensor) -> dict[str, int]:
        return {"LONG": long_column(len(self._target)), "HAS_LONG": bits.shape[1] > 0}
