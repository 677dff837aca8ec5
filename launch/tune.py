"""Which tile configuration is fastest, for the kernels that compute logits: what stands in kernels/tiles.py.

    cce-tp tune --shape 8192,256000,2304 --shape 8184,49152,576

The forward pass, the forward pass that selects, and the exact gradients are timed with every candidate, in turns, on
random logits. They share one configuration, as one must recompute what the other saw; the best is the one with the
shortest forward, selecting forward and gradients together. Nothing is tuned at run time: the printed lines are to be
reviewed and put into the file by hand.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

import cce_tp

from . import bench_logits
from .bench_logits import Inputs, Shape
from .bench_peers import reason
from .console import (
    DTYPES,
    Output,
    PlainOutput,
    UsageError,
    add_json,
    dtype_of,
    open_output,
    positive,
    shape_of,
    write_json,
)
from .measure import GpuMeter, Meter, Work, in_turns

if TYPE_CHECKING:
    from cce_tp.kernels.tiles import Tile

HELP = "time the tile configurations of the kernels on this GPU, and print the best as kernels/tiles.py has them"
SHAPES = ((8192, 256000, 2304), (8192, 128256, 4096), (8184, 49152, 576), (64, 128256, 4096))
ROWS, COLS, INNER, WARPS, STAGES = (64, 128), (128, 256), (32, 64, 128), (4, 8), (2, 3, 4)
GROUP = 16
ACCUMULATOR_PER_THREAD = 128
"""Most fp32 accumulators of a thread: beyond, they spill."""
SHARED_BYTES = 227 * 1024
FINALISTS = 8
FEW_TOKENS = 256
"""Enough to compile with: no size is compiled in."""


@dataclass(frozen=True)
class Measured:
    """Milliseconds of each kernel with one tile on one shape; or why there are none."""

    shape: Shape
    tile: Tile
    milliseconds: dict[str, float]
    reason: str | None = None

    @property
    def total(self) -> float:
        return math.inf if self.reason is not None else sum(self.milliseconds.values())


def candidates(dtype: torch.dtype) -> list[Tile]:
    """Tiles whose operands fit the shared memory and whose accumulators fit the registers."""
    from cce_tp.kernels.tiles import Tile

    found = []
    for rows in ROWS:
        for cols in COLS:
            for inner in INNER:
                for warps in WARPS:
                    for stages in STAGES:
                        fits = stages * inner * (rows + cols) * dtype.itemsize <= SHARED_BYTES
                        if fits and rows * cols <= ACCUMULATOR_PER_THREAD * 32 * warps:
                            found.append(Tile(rows, cols, inner, warps, stages, GROUP))
    return found


def works(inputs: Inputs) -> dict[str, Work]:
    """What is timed, with whatever tile is in force."""
    from cce_tp.kernels import forward, select_entries
    from cce_tp.kernels.interface import GradientRequest, LocalProblem, LogitGradient, SamplingPlan, WeightGradBuffer
    from cce_tp.kernels.logits import LogitOperands
    from cce_tp.kernels.triton_impl import TRITON

    problem = LocalProblem(inputs.hidden.detach(), inputs.weight.detach(), inputs.target)
    mode = cce_tp.Sampled()
    active = torch.ones_like(problem.target, dtype=torch.bool)
    partials = forward.partials(LogitOperands.prepare(problem), stats=False, workspace=None)
    log_sum = partials.sum_exp.log()
    hot = torch.full((1,), -1, device=problem.target.device)
    seed = torch.ones(1, dtype=torch.int64, device=problem.target.device)
    hot_place = torch.zeros(problem.num_rows, dtype=torch.int32, device=problem.target.device)
    plan = SamplingPlan(float(mode.eps), mode.most_entries, seed, partials.max + log_sum, active, hot, hot_place, 0)
    share = torch.full_like(log_sum, 1.0 / problem.num_tokens)
    grad = LogitGradient(partials.max, log_sum, share, share, active)
    buffer = WeightGradBuffer(torch.empty_like(problem.weight), accumulate=False)
    request = GradientRequest(problem.input.dtype, buffer, bias=False)
    return {
        "forward": lambda: forward.partials(LogitOperands.prepare(problem), stats=False, workspace=None),
        "select": lambda: select_entries.select(problem, plan, stats=False),
        "exact": lambda: TRITON.gradients(problem, grad, request, lambda input_grad: None),
    }


def with_tile(tile: Tile, work: Work) -> Callable[[], object]:
    from cce_tp.kernels.tiles import forced

    def run_with_tile() -> object:
        with forced(tile):
            return work()

    return run_with_tile


def compile_tile(tile: Tile, shape: Shape, dtype: torch.dtype) -> str | None:
    """In a process of its own: the compiled kernels stay in Triton's cache, and what fails does no harm elsewhere.

    Returns:
        Why the tile does not work; None if it does.
    """
    inputs = bench_logits.make("random", (min(FEW_TOKENS, shape[0]), *shape[1:]), dtype, "cuda")
    try:
        for work in works(inputs).values():
            with_tile(tile, work)()
            torch.cuda.synchronize()
    except Exception as error:
        return reason(error)
    return None


def compile_all(
    tiles: Sequence[Tile], shapes: Sequence[Shape], dtype: torch.dtype, workers: int
) -> dict[tuple[Shape, Tile], str | None]:
    """Why which tile does not work, from :func:`compile_tile`."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        tasks = {(shape, tile): pool.submit(compile_tile, tile, shape, dtype) for shape in shapes for tile in tiles}
        wait(tasks.values())
    failures = {place: task.exception() for place, task in tasks.items()}
    return {place: str(failures[place]) if failures[place] else task.result() for place, task in tasks.items()}


def measure(shape: Shape, tiles: Sequence[Tile], today: Tile, dtype: torch.dtype, repeats: int) -> list[Measured]:
    """All tiles on one shape, the best first. Only those that are good in one run, and today's, get all runs."""
    inputs = bench_logits.make("random", shape, dtype, "cuda")
    e, c = inputs.hidden.detach(), inputs.weight.detach()
    logits = e.new_empty(len(e), len(c))
    kernels = works(inputs)
    meter = GpuMeter(lambda: torch.mm(e, c.T, out=logits))
    first = _measure(shape, tiles, kernels, 1, meter)
    good = [measured.tile for measured in first if measured.reason is None][:FINALISTS]
    again = _measure(shape, list(dict.fromkeys([*good, today])), kernels, repeats, meter)
    seen = {measured.tile for measured in again}
    return again + [measured for measured in first if measured.tile not in seen]


def _measure(
    shape: Shape, tiles: Sequence[Tile], kernels: dict[str, Work], repeats: int, meter: Meter
) -> list[Measured]:
    turns = {(tile, name): with_tile(tile, work) for tile in tiles for name, work in kernels.items()}
    timings = in_turns({str(place): work for place, work in enumerate(turns.values())}, repeats, meter)
    by_tile = dict(zip(turns, timings.values(), strict=True))
    found = []
    for tile in tiles:
        of_tile = {name: by_tile[tile, name] for name in kernels}
        failure = next((timing.failure for timing in of_tile.values() if timing.failure is not None), None)
        times = {name: timing.median_ms for name, timing in of_tile.items()}
        found.append(Measured(shape, tile, times, None if failure is None else reason(failure)))
    return sorted(found, key=lambda measured: measured.total)


def present(shape: Shape, dtype: torch.dtype) -> tuple[str, Tile]:
    """The configuration that serves a shape today, and its name in kernels/tiles.py."""
    from cce_tp.kernels import tiles

    device = torch.device("cuda", torch.cuda.current_device())
    tile = tiles.logit_tile(dtype, shape[0], shape[2], tiles.has_tma(device) and dtype.itemsize == 2)
    return next(name for name, value in vars(tiles).items() if value is tile), tile


def best_of_class(found: Sequence[Sequence[Measured]]) -> Tile:
    """The tile that loses least over the shapes of one class: by the product of its times over the best ones'."""
    lost: dict[Tile, float] = {}
    for of_shape in found:
        best = min(measured.total for measured in of_shape)
        for measured in of_shape:
            lost[measured.tile] = lost.get(measured.tile, 0.0) + math.log(measured.total / best)
    return min(lost, key=lambda tile: lost[tile])


def source(name: str, tile: Tile) -> str:
    """The line of kernels/tiles.py."""
    from cce_tp.kernels.tiles import Tile

    group = "" if tile.group == Tile.group else f", group={tile.group}"
    return f"{name} = Tile({tile.rows}, {tile.cols}, {tile.inner}, warps={tile.warps}, stages={tile.stages}{group})"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this subcommand."""
    parser.add_argument("--shape", type=shape_of, action="append", metavar="N,V,D", help="may be repeated")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=positive, default=7)
    parser.add_argument("--show", type=positive, default=5, help="so many of the best of each shape")
    parser.add_argument("--workers", type=positive, default=os.cpu_count() or 1, help="processes that compile")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure; print the best."""
    if not torch.cuda.is_available():
        raise UsageError("no CUDA device is here")
    if importlib.util.find_spec("triton") is None:
        raise UsageError("the package triton is not installed")
    dtype, shapes = dtype_of(options.dtype), list(dict.fromkeys(options.shape or SHAPES))
    names = {shape: present(shape, dtype) for shape in shapes}
    tiles = list(dict.fromkeys([tile for _, tile in names.values()] + candidates(dtype)))
    output, classes = open_output(), dict[str, list[list[Measured]]]()
    reasons = compile_all(tiles, shapes, dtype, options.workers)
    for shape in shapes:
        name, today = names[shape]
        works_here = [tile for tile in tiles if reasons[shape, tile] is None]
        if today not in works_here:
            raise UsageError(f"the present tile {today} does not work at {shape}: {reasons[shape, today]}")
        found = measure(shape, works_here, today, dtype, options.repeats)
        found += [Measured(shape, tile, {}, reasons[shape, tile]) for tile in tiles if tile not in works_here]
        classes.setdefault(name, []).append(found)
        show(shape, found, today, options.show, output)
        torch.cuda.empty_cache()
    for name, of_class in classes.items():
        output.say(source(name, best_of_class(of_class)))
    results = [asdict(measured) for of_class in classes.values() for found in of_class for measured in found]
    write_json(options.json, results)
    return 0


def show(shape: Shape, found: Sequence[Measured], today: Tile, number: int, output: Output | PlainOutput) -> None:
    """The best of a shape, and today's."""
    shown = [measured for measured in found[:number] if measured.reason is None]
    shown += [measured for measured in found[number:] if measured.tile == today]
    rows = [
        (
            source("today" if measured.tile == today else "", measured.tile).removeprefix(" = "),
            *("" if measured.reason else f"{value:.3f}" for value in measured.milliseconds.values()),
            measured.reason or f"{measured.total:.3f}",
        )
        for measured in shown
    ]
    failed = sum(measured.reason is not None for measured in found)
    title = f"N = {shape[0]:,}, V = {shape[1]:,}, D = {shape[2]:,}; {len(found)} tiles, {failed} of them do not work"
    output.table(title, ("", *(f"{name} ms" for name in found[0].milliseconds), "together"), rows)


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["tune", *sys.argv[1:]]))
