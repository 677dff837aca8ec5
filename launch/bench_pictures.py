"""The picture of ``cce-tp bench``: time and memory of every method, a line of panels for each problem."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .bench_results import Case, Row
from .console import MIB, pyplot

PANEL_WIDTH, BAR_HEIGHT, MARGIN = 7.0, 0.32, 1.2
FORWARD, BOTH, OURS = "tab:gray", "tab:blue", "tab:orange"


def draw(cases: Sequence[Case], path: Path) -> None:
    """Write it."""
    plot = pyplot()
    shown = [[row for row in case.rows if row.measured and row.kind != "product"] for case in cases]
    heights = [MARGIN + BAR_HEIGHT * max(1, len(rows)) for rows in shown]
    figure, panels = plot.subplots(
        len(cases), 2, figsize=(2 * PANEL_WIDTH, sum(heights)), layout="constrained", squeeze=False,
        gridspec_kw={"height_ratios": heights},
    )  # fmt: skip
    for case, rows, (times, memory) in zip(cases, shown, panels, strict=True):
        _times(times, case, rows)
        _memory(memory, rows)
    figure.savefig(path, dpi=120, format="png")
    plot.close(figure)


def _bars(axes: Any, rows: Sequence[Row], values: Sequence[tuple[float, float]], label: str) -> None:
    """Two bars a method: the forward pass, and both passes."""
    for place, (row, (forward, both)) in enumerate(zip(rows, values, strict=True)):
        axes.barh(place - 0.2, forward, 0.38, color=FORWARD, label="forward" if place == 0 else None)
        axes.barh(place + 0.2, both, 0.38, color=OURS if row.kind == "ours" else BOTH)
        if math.isnan(both):
            continue
        text = f"{both:,.0f}" if both >= 100 else f"{both:.3g}"
        end = (max(both, forward), place)
        axes.annotate(text, end, xytext=(3, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [row.method for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.grid(axis="x", alpha=0.3)
    axes.margins(x=0.12)


def _times(axes: Any, case: Case, rows: Sequence[Row]) -> None:
    unit = case.product_ms
    values = [((row.forward_ms or 0.0) / unit, (row.both_ms or 0.0) / unit) for row in rows]
    _bars(axes, rows, values, f"time / G, where G = {unit:.2f} ms (gray: forward alone)")
    axes.axvline(1.0, color="black", linestyle=":", linewidth=1)
    axes.axvline(case.three_products_ms / unit, color="black", linestyle="--", linewidth=1)
    tokens, vocabulary, hidden = case.shape
    axes.set_title(f"N = {tokens:,}, V = {vocabulary:,}, D = {hidden:,}, {case.logits} logits (dotted 1G, dashed 3G)")


def _memory(axes: Any, rows: Sequence[Row]) -> None:
    """Logarithmic; what needs less than a MiB is drawn as one, what is not known not at all."""
    nan = float("nan")
    sizes = [(row.forward_bytes, row.both_bytes) for row in rows]
    values = [tuple(nan if size is None else max(1.0, size / MIB) for size in pair) for pair in sizes]
    _bars(axes, rows, [(forward, both) for forward, both in values], "peak memory above inputs and gradients, MiB")
    axes.set_xscale("log")
    known = [size for pair in values for size in pair if not math.isnan(size)]
    axes.set_xlim(0.5, 4 * max([1.0, *known]))
    axes.set_yticklabels([])
