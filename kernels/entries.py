"""How kernels read the lists of kept entries.

Token n's list has room for ``budget`` rows of C. Its *slots*, numbered over all tokens, are one more: the last one
used is the token's own target, where that is this rank's and could be sampled (it is exact instead).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .select_entries import WORD_BITS


@triton.jit
def has_cold_target(target, cold):  # type: ignore[no-untyped-def]
    """1 for a token whose target is here and could be sampled, else 0."""
    word = tl.load(cold + tl.maximum(target, 0) // WORD_BITS)
    return tl.where(target >= 0, (word >> (tl.maximum(target, 0) % WORD_BITS).to(tl.int32)) & 1, 0)


@triton.jit
def list_of_token(n, target, cold, found, budget):  # type: ignore[no-untyped-def]
    """How many entries token n's list has, its target, and whether that follows them."""
    b_target = tl.load(target + n)
    return tl.minimum(tl.load(found + n), budget), b_target, has_cold_target(b_target, cold)


@triton.jit
def entries(o, rows, n, size, target, has_target, budget):  # type: ignore[no-untyped-def]
    """Rows of C at places ``o`` of token n's list, whose last entry is the target."""
    m_list = o < size
    m_target = o == tl.where(has_target != 0, size, -1)
    b_row = tl.load(rows + n * budget + o, mask=m_list, other=0)
    return tl.where(m_target, target.to(tl.int32), b_row), m_list | m_target, m_target


@triton.jit
def entries_or_last(o, rows, n, size, target, has_target, budget):  # type: ignore[no-untyped-def]
    """As ``entries``, of a list with entries. Places beyond it repeat the last one, to be read without a mask."""
    last = size + has_target - 1
    m_entry = o <= last
    m_target = o >= size
    b_row = tl.load(rows + n * budget + tl.minimum(o, tl.maximum(size - 1, 0)))
    m_target &= has_target != 0
    return tl.where(m_target, target.to(tl.int32), b_row), m_entry, m_target


@triton.jit
def row_of_slot(slot, m, target, rows, found, budget):  # type: ignore[no-untyped-def]
    """The row of C of some slots, and their tokens."""
    token = (slot // (budget + 1)).to(tl.int64)
    place = (slot % (budget + 1)).to(tl.int64)
    m_list = place < tl.minimum(tl.load(found + token, mask=m, other=0), budget)
    row = tl.load(rows + token * budget + place, mask=m & m_list, other=0)
    return tl.where(m_list, row, tl.load(target + token, mask=m, other=0).to(tl.int32)), token


@triton.jit
def read(pointers, mask, MASKED: tl.constexpr):  # type: ignore[no-untyped-def]
    """As fp32. A mask costs instructions even where it leaves nothing out."""
    if MASKED:
        return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(pointers).to(tl.float32)
