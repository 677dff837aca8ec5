"""What a step of the loss would take in larger groups: a model of ``cce-tp bench-tp``, no measurement.

A collective of n bytes takes ``latency + n / bandwidth``, both fitted to times of the group at hand. In a group of T
ranks, joined by links of the same kind, the latency grows with log2 T; a rank sends ``2 (T - 1) / T`` of the bytes of
an all-reduce, and half of that of an all-gather or a reduce-scatter.

Computing takes ``a + b / T``: b is the part that is shared out, and both follow from one rank and the group at hand.
What the group's collectives take beyond what was seen of them is hidden behind computing, and of that there is less in
a larger group, as 1 / T. Collectives of a few numbers a token are never hidden.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("all-gather", "all-reduce", "reduce-scatter")
SMALL_BYTES = 2**21
"""Up to here, a collective is one of a few numbers a token."""


@dataclass(frozen=True)
class Message:
    """One collective: its kind, what it is for, and the bytes of its longer side."""

    kind: str
    what: str
    bytes: int


@dataclass(frozen=True)
class Link:
    """A line through the times of one kind of collective."""

    kind: str
    latency_ms: float
    ms_per_byte: float
    measured: dict[int, float]

    @classmethod
    def fit(cls, kind: str, times: dict[int, float]) -> Link:
        """Least squares of the relative error. Without times, a collective costs nothing."""
        if not times:
            return cls(kind, 0.0, 0.0, {})
        # In x = n / t and w = 1 / t, the line says 1 = latency w + slope x.
        ww = sum(1 / ms**2 for ms in times.values())
        wx = sum(n / ms**2 for n, ms in times.items())
        xx = sum((n / ms) ** 2 for n, ms in times.items())
        w, x = sum(1 / ms for ms in times.values()), sum(n / ms for n, ms in times.items())
        determinant = ww * xx - wx * wx
        latency = (w * xx - x * wx) / determinant if determinant > 0 else 0.0
        slope = (x * ww - w * wx) / determinant if determinant > 0 else x / xx
        if slope < 0:
            return cls(kind, w / ww, 0.0, times)
        if latency < 0:
            return cls(kind, 0.0, x / xx, times)
        return cls(kind, latency, slope, times)

    def milliseconds(self, size: int, ranks: int = 2, measured_ranks: int = 2) -> float:
        """Of a collective of ``size`` bytes among ``ranks``, fitted among ``measured_ranks``."""
        latency = self.latency_ms * math.log2(ranks) / math.log2(measured_ranks)
        sent = ((ranks - 1) / ranks) / ((measured_ranks - 1) / measured_ranks)
        return latency + self.ms_per_byte * size * sent


@dataclass(frozen=True)
class Step:
    """What was measured: among ``ranks``, with and without sending, and the whole on one rank."""

    ranks: int
    ms: float
    alone_ms: float
    single_ms: float
    messages: Sequence[Message]


@dataclass(frozen=True)
class Prediction:
    """Of one method in a larger group; ``exposed`` is the share of communication in the time."""

    method: str
    sequence_parallel: bool
    ranks: int
    ms: float
    exposed: float
    efficiency: float


def _communication(step: Step, links: Sequence[Link], ranks: int) -> tuple[float, float]:
    """Milliseconds of small and of large collectives."""
    by_kind = {link.kind: link for link in links}
    small = large = 0.0
    for message in step.messages:
        ms = by_kind[message.kind].milliseconds(message.bytes, ranks, step.ranks)
        if message.bytes <= SMALL_BYTES:
            small += ms
        else:
            large += ms
    return small, large


def predict(step: Step, links: Sequence[Link], ranks: int) -> tuple[float, float]:
    """Milliseconds among ``ranks``, and the share of them that is exposed communication."""
    shared = (step.single_ms - step.alone_ms) / (1.0 - 1.0 / step.ranks)
    computing = step.single_ms - shared + shared / ranks
    small, large = _communication(step, links, step.ranks)
    hidden = max(0.0, small + large - max(0.0, step.ms - step.alone_ms))
    small, large = _communication(step, links, ranks)
    exposed = small + max(0.0, large - hidden * step.ranks / ranks)
    return computing + exposed, exposed / (computing + exposed)
