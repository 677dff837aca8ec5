"""Row maxima of logits that are never stored as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_CHUNK_BYTES = 64 << 20


def logit_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, finish: Callable[[Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """First row and logits ``finish(hidden @ rows.T + bias)`` of one slab of the classifier after another."""
    size = max(1, min(weight.shape[0], _CHUNK_BYTES // max(1, hidden.shape[0] * hidden.element_size())))
    for first in range(0, weight.shape[0], size):
        part = None if bias is None else bias[first : first + size]
        yield first, finish(torch.nn.functional.linear(hidden, weight[first : first + size], part))


@torch.no_grad()
def streaming_max(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, finish: Callable[[Tensor], Tensor] = lambda z: z
) -> tuple[Tensor, Tensor]:
    """Largest logit of each token over the local rows and the first row that has it, in slabs of about 64 MiB.

    Args:
        hidden: ``[N, D]``.
        weight: ``[V_local, D]``, at least one row.
        bias: ``[V_local]``.
        finish: applied to the logits, elementwise.

    Returns:
        Maxima ``[N]`` in the logits' dtype and rows ``[N]`` int64. No collective.
    """
    best = rows = None
    for first, logits in logit_chunks(hidden, weight, bias, finish):
        values, places = logits.max(dim=-1)
        places = places + first
        if best is None or rows is None:
            best, rows = values, places
            continue
        better = values > best
        best, rows = torch.where(better, values, best), torch.where(better, places, rows)
    if best is None or rows is None:
        raise ValueError("streaming_max needs at least one classifier row")
    return best, rows
