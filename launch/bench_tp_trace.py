"""What a rank's device does when, in one step: recorded by PyTorch's profiler, drawn as two lanes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .console import pyplot

Work = Callable[[], object]

RECORDINGS = 3
HEAD_START = 24
"""Products before the step, so that the host is ahead of the device when it begins."""
MARK_CYCLES = 20_000
SHOWN_MS = 0.5
PARTS = (
    ("communication", ("nccl",)),
    ("labels and losses", ("_labels_kernel", "_losses_kernel", "_weight_sum_kernel", "_logit_gradient_kernel")),
    ("anchor", ("_count_", "_tally_", "_choose_", "_gather_kernel", "_look_", "_sum_kernel", "_anchor_kernel")),
    ("hot rows", ("_hot", "_select_tokens", "gemm", "nvjet", "cutlass", "cublas", "product")),
    ("logits and decisions", ("_prepare", "_select", "select_", "_partials", "_reduce_kernel", "_fold")),
    ("lists", ("_list",)),
    ("∇E", ("_input_grad", "_long_")),
    ("transpose", ("_arrive", "_place", "_prefix", "_order")),
    ("∇C", ("weight_grad",)),
    ("other", ("",)),
)
"""Which part of a step a kernel belongs to: the first that holds a piece of its name."""
COLOURS = {
    "communication": "tab:red",
    "labels and losses": "tab:pink",
    "anchor": "tab:olive",
    "hot rows": "tab:brown",
    "logits and decisions": "tab:blue",
    "lists": "tab:cyan",
    "∇E": "tab:orange",
    "transpose": "tab:purple",
    "∇C": "tab:green",
    "other": "lightgray",
}


@dataclass(frozen=True)
class Span:
    """One kernel: milliseconds from the step's begin."""

    part: str
    begin: float
    length: float


def part_of(kernel: str) -> str:
    """The part of a step that a kernel belongs to."""
    return next(part for part, pieces in PARTS if any(piece in kernel for piece in pieces))


def record(step: Work, product: Work, align: Work) -> list[Span]:
    """What the device did in one step; all ranks have to call this.

    A process's first recordings keep its host from getting ahead, so the last of a few counts.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    for _ in range(RECORDINGS):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(HEAD_START):
                product()
            align()
            torch.cuda._sleep(MARK_CYCLES)
            step()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return spans(json.loads(path.read_text())["traceEvents"])


def spans(events: Sequence[dict[str, Any]]) -> list[Span]:
    """What comes behind the mark in a trace; microseconds there."""
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    begin = max((e["ts"] + e["dur"] for e in kernels if "spin" in e["name"]), default=None)
    if begin is None:
        raise ValueError("the trace has no mark where the step begins")
    after = sorted((e for e in kernels if e["ts"] >= begin), key=lambda e: float(e["ts"]))
    return [Span(part_of(e["name"]), (e["ts"] - begin) / 1e3, e["dur"] / 1e3) for e in after]


def busy(found: Sequence[Span]) -> dict[str, float]:
    """Milliseconds of each part's kernels; those of a collective wait for the other ranks, too."""
    lengths = dict.fromkeys(COLOURS, 0.0)
    for span in found:
        lengths[span.part] += span.length
    return {part: length for part, length in lengths.items() if length > 0}


def long_kernels(found: Sequence[Span]) -> list[Span]:
    """Those beside which the others could hardly be seen."""
    return [span for span in found if span.part != "communication" and span.length > 2 * SHOWN_MS]


def place(time: float, long: Sequence[Span]) -> float:
    """Where a time is drawn: each of the long kernels, of which no two overlap, takes ``SHOWN_MS``."""
    inside = [(min(max(time - span.begin, 0.0), span.length), span.length) for span in long]
    return time - sum(gone * (1.0 - SHOWN_MS / length) for gone, length in inside)


def draw(timelines: dict[str, list[Span]], title: str, path: Path) -> None:
    """A panel for each step: what computes in the upper lane, what communicates in the lower."""
    plot = pyplot()
    figure, panels = plot.subplots(
        len(timelines), 1, figsize=(12, 0.8 + 1.9 * len(timelines)), layout="constrained", squeeze=False, sharex=True
    )
    for (name, found), axes in zip(timelines.items(), panels[:, 0], strict=True):
        _draw_step(axes, found)
        whole = max((span.begin + span.length for span in found), default=0.0)
        axes.set_title(f"{name}: {whole:.2f} ms", loc="left", fontsize=10)
    seen = {span.part for found in timelines.values() for span in found}
    handles = [
        plot.Rectangle((0, 0), 1, 1, color=colour, label=part) for part, colour in COLOURS.items() if part in seen
    ]
    panels[-1, 0].set_xlabel(f"ms; kernels of more than {2 * SHOWN_MS:g} ms are drawn as if they took {SHOWN_MS:g}")
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150, format="png")
    plot.close(figure)


def _draw_step(axes: Any, found: Sequence[Span]) -> None:
    long = long_kernels(found)
    for part, colour in COLOURS.items():
        lane = 0 if part == "communication" else 1
        ends = [(place(s.begin, long), place(s.begin + s.length, long)) for s in found if s.part == part]
        if ends:
            bars = [(begin, end - begin) for begin, end in ends]
            axes.broken_barh(bars, (lane - 0.35, 0.7), color=colour, linewidth=0)
    for span in long:
        middle = (place(span.begin + span.length / 2, long), 1)
        axes.annotate(f"// {span.length:.2f} ms //", middle, color="white", ha="center", va="center", fontsize=8)
    axes.set_yticks([0, 1], ["communication", "computing"])
    axes.set_ylim(-0.5, 1.5)
    axes.grid(axis="x", alpha=0.3)
