"""What ``cce-tp bench-tp`` found: its file, its tables, and how Megatron-core compares."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path

from cce_tp.collectives import Overlap

from .bench import versions
from .bench_logits import Shape
from .bench_tp_model import Link, Message, Prediction
from .console import Output, PlainOutput, mib

OURS, MEGATRON = ("exact", "filtered", "sampled"), ("megatron-core fused", "megatron-core unfused")


@dataclass(frozen=True)
class Row:
    """One method, with or without sequence parallelism; None where something was not measured.

    Attributes:
        reason: why it was not measured.
        ms: loss and gradients.
        alone_ms: the same, with nothing sent.
        single_ms: the whole vocabulary on one rank.
        peak_bytes: above inputs and gradients.
        loss: its value.
        messages: what one step sends.
    """

    method: str
    sequence_parallel: bool
    reason: str | None = None
    ms: float | None = None
    alone_ms: float | None = None
    single_ms: float | None = None
    peak_bytes: int | None = None
    loss: float | None = None
    messages: tuple[Message, ...] = ()

    @property
    def exposed(self) -> float | None:
        """Share of the time in which nothing but communication goes on."""
        return None if self.ms is None or self.alone_ms is None else (self.ms - self.alone_ms) / self.ms

    def efficiency(self, ranks: int) -> float | None:
        return None if self.ms is None or self.single_ms is None else self.single_ms / (ranks * self.ms)


@dataclass(frozen=True)
class Case:
    """All methods at one shape.

    Attributes:
        parts: of a profiled step, by its name, how long each rank's kernels took, by the part of the step.
    """

    shape: Shape
    tp: int
    logits: str
    dtype: str
    device: str
    repeats: int
    product_ms: float
    rows: list[Row]
    predictions: list[Prediction]
    shuffled: bool = False
    parts: dict[str, list[dict[str, float]]] = field(default_factory=dict)


def write_json(path: Path, cases: Sequence[Case], links: Sequence[Link], choice: Overlap) -> None:
    """Everything, with what the times don't say of themselves."""
    found = []
    for case in cases:
        rows = [asdict(row) | {"exposed": row.exposed, "efficiency": row.efficiency(case.tp)} for row in case.rows]
        found.append({**asdict(case), "rows": rows})
    connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    about = {"versions": versions(), "CUDA_DEVICE_MAX_CONNECTIONS": connections, "overlap": asdict(choice)}
    path.write_text(json.dumps(about | {"cases": found, "links": [asdict(link) for link in links]}, indent=2) + "\n")


# -- tables


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _number(value: float | None, form: str = ".3f") -> str:
    return "" if value is None else format(value, form)


def _layout(sequence_parallel: bool) -> str:
    return ", sequence parallel" if sequence_parallel else ""


COLUMNS = ("", "ms", "/ G", "alone", "exposed", "tp = 1", "efficiency", "MiB", "loss")


def show(case: Case, output: Output | PlainOutput) -> None:
    tokens, vocabulary, hidden = case.shape
    title = (
        f"N = {tokens:,}, V = {vocabulary:,} on {case.tp} ranks, D = {hidden:,}, {case.logits} logits"
        f"{', ids in random order' * case.shuffled}, {case.dtype}, {case.device}; G = {case.product_ms:.3f} ms"
    )
    lines = [
        (
            row.method + _layout(row.sequence_parallel),
            _number(row.ms),
            _number(None if row.ms is None else row.ms / case.product_ms),
            _number(row.alone_ms),
            _percent(row.exposed),
            _number(row.single_ms),
            _number(row.efficiency(case.tp), ".2f"),
            "" if row.peak_bytes is None else mib(row.peak_bytes),
            _number(row.loss, ".5f"),
        )
        for row in case.rows
        if row.reason is None
    ]
    output.table(title, COLUMNS, lines)
    for row in case.rows:
        if row.reason is not None:
            output.say(f"  not measured: {row.method}{_layout(row.sequence_parallel)}: {row.reason}")
    for text in comparisons(case.rows):
        output.say(f"  {text}")
    if case.predictions:
        predicted = [
            (
                each.method + _layout(each.sequence_parallel),
                str(each.ranks),
                _number(each.ms),
                _number(each.ms * each.ranks / (case.product_ms * case.tp)),
                _percent(each.exposed),
                _number(each.efficiency, ".2f"),
            )
            for each in case.predictions
        ]
        output.table("prediction, not measured", ("", "tp", "ms", "/ G", "exposed", "efficiency"), predicted)
    for name, ranks in case.parts.items():
        parts = [(part, *(_number(rank.get(part)) for rank in ranks)) for part in dict.fromkeys(chain(*ranks))]
        output.table(f"{name}, ms of kernels", ("", *(f"rank {rank}" for rank in range(len(ranks)))), parts)


def comparisons(rows: Sequence[Row]) -> list[str]:
    """How often ours fits into Megatron's time and memory, in the same layout."""
    texts = []
    for peer in rows:
        for row in rows:
            if row.method not in OURS or peer.method not in MEGATRON or row.sequence_parallel != peer.sequence_parallel:
                continue
            if row.ms is None or peer.ms is None:
                continue
            text = (
                f"{row.method} against {peer.method}{_layout(row.sequence_parallel)}: {peer.ms / row.ms:.2f} x faster"
            )
            if row.peak_bytes and peer.peak_bytes:
                text += f", {peer.peak_bytes / row.peak_bytes:.1f} x less memory"
            texts.append(text)
    return texts


def show_links(links: Sequence[Link], ranks: int, output: Output | PlainOutput) -> None:
    lines = [
        (link.kind, str(size), f"{1e3 * ms:.1f}", f"{1e3 * link.milliseconds(size):.1f}")
        for link in links
        for size, ms in link.measured.items()
    ]
    output.table(f"collectives of {ranks} ranks", ("", "bytes", "microseconds", "by the line"), lines)
