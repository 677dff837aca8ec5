"""Joining what was learnt from disjoint pieces of the vocabulary.

A piece (a tile, a slab, another rank's shard) is described by sums relative to its own largest logit m. To join
pieces, move each to the common maximum M: a sum of exponentials takes the factor exp(m - M), a sum of ``c (z - m)``
gains ``(m - M) sum(c)``. Only differences of logits appear, so an offset common to a whole row, however large, costs no
digits.

Rules for the edges: a piece without a finite logit (``m = -inf``: empty, or masked throughout) adds 0; a NaN stays NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .interface import Partials

NEGATIVE_INFINITY = float("-inf")


def empty_partials(num_tokens: int, device: torch.device, *, smoothing: bool, stats: bool) -> Partials:
    """Partials of a shard without rows, or of no tokens: what folding leaves any other piece unchanged by."""

    def full(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((num_tokens,), value, dtype=dtype, device=device)

    return Partials(
        max=full(NEGATIVE_INFINITY),
        sum_exp=full(0.0),
        target_logit=full(0.0),
        smoothing=full(0.0) if smoothing else None,
        entropy=full(0.0) if stats else None,
        argmax=full(-1, torch.int64) if stats else None,
    )


def unset_partials(num_tokens: int, device: torch.device, *, smoothing: bool, stats: bool) -> Partials:
    """Partials to be written."""

    def unset(wanted: bool = True, dtype: torch.dtype = torch.float32) -> Any:
        return torch.empty(num_tokens, dtype=dtype, device=device) if wanted else None

    return Partials(unset(), unset(), unset(), unset(smoothing), unset(stats), unset(stats, torch.int64))


def relative_to(parts: Partials, top: Tensor, smoothing_mass: Tensor | None) -> Partials:
    """Restate ``parts`` relative to ``top`` instead of ``parts.max``. Shapes broadcast; no sum is taken.

    Args:
        parts: fields of any shape ``[..., N]``.
        top: the common maximum M, ``[N]``.
        smoothing_mass: ``sum_v c_v`` of each piece, broadcastable to ``[..., N]``; None without label smoothing.
    """
    empty = parts.max == NEGATIVE_INFINITY
    gap = parts.max - top
    factor = torch.where(empty, 0.0, gap.exp())
    smoothing = entropy = None
    if parts.smoothing is not None and smoothing_mass is not None:
        smoothing = torch.where(smoothing_mass == 0, 0.0, parts.smoothing + gap * smoothing_mass)
    if parts.entropy is not None:
        entropy = factor * (parts.entropy + parts.sum_exp * torch.where(empty, 0.0, gap))
    return Partials(top, parts.sum_exp * factor, parts.target_logit, smoothing, entropy, parts.argmax)


def fold(parts: Partials, smoothing_mass: Tensor | None) -> Partials:
    """Join ``P >= 1`` pieces.

    The result depends on the values and their order only, so ranks that fold the same pieces get the same bits.

    Args:
        parts: every field ``[P, N]``; ``argmax`` in a numbering common to all pieces.
        smoothing_mass: ``[P, 1]`` or ``[P, N]``; None without label smoothing.

    Returns:
        Partials of the union, every field ``[N]``.
    """
    top = parts.max.amax(dim=0)
    moved = relative_to(parts, top, smoothing_mass)
    return Partials(
        max=top,
        sum_exp=moved.sum_exp.sum(dim=0),
        # All but one piece hold an exact zero here, so the sum is the owner's value to the last bit.
        target_logit=moved.target_logit.sum(dim=0),
        smoothing=None if moved.smoothing is None else moved.smoothing.sum(dim=0),
        entropy=None if moved.entropy is None else moved.entropy.sum(dim=0),
        argmax=None if parts.argmax is None else _lowest_argmax(parts.max, parts.argmax, top),
    )


@dataclass(frozen=True)
class Packing:
    """How a shard's partials travel: fp32 ``[k, N]``, in the order of ``pack``'s rows.

    Attributes:
        smoothing, stats: whether they are there.
        whole: what the shards' links add up to: numbers that say which rows of the vocabulary a shard has.
    """

    smoothing: bool
    stats: bool
    whole: int

    def pack(self, partials: Partials, link: int, smoothing_mass: Tensor | None) -> Tensor:
        rows = [torch.full_like(partials.max, link), partials.max, partials.sum_exp, partials.target_logit]
        if partials.smoothing is not None and smoothing_mass is not None:
            rows += [partials.smoothing, smoothing_mass.expand_as(partials.max)]
        if partials.entropy is not None and partials.argmax is not None:
            # Ids travel as their bits: a float32 doesn't hold integers above 2^24.
            rows += [partials.entropy, partials.argmax.to(torch.int32).view(torch.float32)]
        return torch.stack(rows)


def join(gathered: Tensor, packing: Packing) -> Partials:
    """Fold ``T`` shards' packed partials, ``[T, k, N]``; the maximum is NaN if the shards don't make up the whole."""
    fields = iter(gathered.unbind(dim=1))
    chain = next(fields).sum(dim=0)
    parts = Partials(next(fields), next(fields), next(fields))
    mass = None
    if packing.smoothing:
        parts = replace(parts, smoothing=next(fields))
        mass = next(fields)
    if packing.stats:
        parts = replace(parts, entropy=next(fields), argmax=next(fields).contiguous().view(torch.int32).long())
    whole = fold(parts, mass)
    return replace(whole, max=torch.where(chain == packing.whole, whole.max, float("nan")))


def _lowest_argmax(maxima: Tensor, argmax: Tensor, top: Tensor) -> Tensor:
    never = torch.iinfo(argmax.dtype).max
    candidates = torch.where((maxima == top) & (argmax >= 0), argmax, never)
    lowest = candidates.amin(dim=0)
    return torch.where(lowest == never, -1, lowest)
