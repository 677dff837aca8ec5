"""The filtered mode part by part on realistic logits, on one GPU, in any configuration of its kernels.

    python -m cce_tp.launch.bench_filtered --data DIR --shape 8192,256000,2304 --order natural --order count
    python -m cce_tp.launch.bench_filtered --data DIR --block 128,256,64,8,3 --product 128,256,64,8,4 --workspace 128

Times are medians over replays of CUDA graphs, in turns. A part of the backward pass is the sum over its rounds. The
tiles of --block and --product are rows, columns, inner, warps, stages and, if given, group.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import cce_tp
from cce_tp.kernels import filtered, filtering, forward, sampling
from cce_tp.kernels.interface import FilterPlan, GradientRequest, LocalProblem, LogitGradient, WeightGradBuffer
from cce_tp.kernels.logits import LogitOperands
from cce_tp.kernels.tiles import Tile
from cce_tp.kernels.triton_impl import TRITON
from cce_tp.options import ORDERS

from . import bench_logits
from .bench_logits import Inputs
from .console import Parser, add_json, existing_folder, positive, probability, shape_of, write_json
from .measure import GpuMeter, Work, captured, medians_ms

SHAPES = ((8192, 256000, 2304), (8192, 128256, 4096), (8192, 32000, 4096), (8184, 49152, 576))
MIB = 2**20


def tile_of(text: str) -> Tile:
    """An argparse type."""
    try:
        rows, cols, inner, warps, stages, *group = (int(part) for part in text.split(","))
        return Tile(rows, cols, inner, warps, stages, *group)
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not rows,cols,inner,warps,stages[,group]") from None


class FilteredLoss:
    """The mean loss of a single shard in the filtered mode, in parts that can be timed alone."""

    def __init__(self, inputs: Inputs, mode: cce_tp.Filtered, workspace: int | None) -> None:
        self.problem = LocalProblem(inputs.hidden, inputs.weight, inputs.target)
        self.mode, self.workspace = mode, workspace
        self.active = torch.ones_like(inputs.target, dtype=torch.bool)
        self.weight_grad = torch.empty_like(inputs.weight)
        self.request = GradientRequest(inputs.hidden.dtype, WeightGradBuffer(self.weight_grad, False), False)
        self.input_grad: Tensor | None = None
        self.plan = self.make_plan()

    def make_plan(self) -> FilterPlan:
        problem = self.problem
        ids = sampling.RowIds.whole(problem.num_rows)
        rows = TRITON.anchor_rows(problem.target, self.active, ids, filtering.REFERENCE_ROWS)
        anchor = TRITON.anchor(TRITON.anchor_sums(problem, rows), rows)
        return FilterPlan(
            self.mode.eps, self.mode.input, self.mode.weight, self.mode.order, filtering.finite(anchor), self.active,
            filtering.TILE_ROWS, filtering.TILE_COLS,
        )  # fmt: skip

    def backward(self) -> tuple[filtered._Backward, filtering.TileMap]:
        partials, peaks = filtered.screen(self.problem, self.plan, stats=False)
        log_sum = partials.sum_exp.log()
        tiles = filtering.tile_map(self.plan, self.problem, peaks, partials.max + log_sum)
        share = torch.full_like(log_sum, 1.0 / self.problem.num_tokens)
        grad = LogitGradient(partials.max, log_sum, share, share, self.active)
        made = filtered._Backward(self.problem, self.plan, tiles, grad, self.request, True, self.workspace)
        return made, tiles

    def weight_round(self, backward: filtered._Backward, number: int) -> None:
        backward._list_columns(number)
        backward._write_weight_grad(number)

    def gradients(self) -> None:
        self.backward()[0].run(self._keep)

    def _keep(self, input_grad: Tensor) -> None:
        self.input_grad = input_grad


def parts_of(loss: FilteredLoss) -> tuple[dict[str, Work], dict[str, float]]:
    """What to time, and what the map of tiles looks like."""
    backward, tiles = loss.backward()
    numbers = range(backward.rounds.number)
    partials, peaks = filtered.screen(loss.problem, loss.plan, stats=False)
    lse = partials.max + partials.sum_exp.log()
    operands = LogitOperands.prepare(loss.problem)

    def over_rounds(step: Callable[[int], object]) -> Work:
        return captured(lambda: [step(number) for number in numbers])

    works: dict[str, Work] = {
        "forward": captured(lambda: forward.partials(operands, stats=False, workspace=None)),
        "anchor": captured(loss.make_plan),
        "forward with peaks": captured(lambda: filtered.screen(loss.problem, loss.plan, stats=False)),
        "map of tiles": captured(lambda: filtering.tile_map(loss.plan, loss.problem, peaks, lse)),
        "schedule": captured(lambda: filtered._Schedule.make(tiles.live, backward.rounds)),
        "blocks": over_rounds(backward._compute_blocks),
        "grad E": over_rounds(backward._add_input_grad),
        "grad C": over_rounds(lambda number: loss.weight_round(backward, number)),
        "rest of grad C": captured(backward._write_rest),
        "all but the anchor": captured(loss.gradients),
    }
    if backward.copies is not None:
        works["copies of C"] = over_rounds(backward._copy_rows)
    really = used = 0
    for number in numbers:
        if backward.copies is not None:
            backward._copy_rows(number)
        first, end = (int(edge) for edge in backward.schedule.block_edges[number : number + 2])
        backward._compute_blocks(number)
        really += int(backward.flags[: (end - first) * backward.split].sum())
        used += end > first
    facts = {
        "recomputed, share of tiles": float(tiles.live.float().mean()),
        "kept, share of tiles": really / tiles.live.numel(),
        "rounds": float(used),
        "most rounds": float(len(numbers)),
    }
    return works, facts


def call_of(inputs: Inputs, mode: Any) -> Work:
    def both() -> None:
        inputs.clear_gradients()
        cce_tp.linear_cross_entropy(inputs.hidden, inputs.weight, inputs.target, backward=mode).backward()

    return both


def measure(inputs: Inputs, options: argparse.Namespace) -> dict[str, Any]:
    values = inputs.detached()
    logits = values.hidden.new_empty(len(values.hidden), len(values.weight))
    meter = GpuMeter(captured(lambda: torch.mm(values.hidden, values.weight.T, out=logits)))
    found: dict[str, Any] = {"shape": inputs.shape}
    works: dict[str, Work] = {"exact": captured(call_of(inputs, "exact"))}
    with ExitStack() as stack:
        for name, tile in (("filter_block", options.block), ("filter_product", options.product)):
            if tile is not None:
                stack.enter_context(patch.object(filtered, name, lambda *_, tile=tile: tile))
        for name, value in (("SPARSEST", options.sparsest), ("SPARSEST_IN_ORDER", options.sparsest_in_order)):
            if value is not None:
                stack.enter_context(patch.object(filtered, name, value))
        workspace = None if options.workspace is None else options.workspace * MIB
        for order in options.order or ORDERS:
            mode = cce_tp.Filtered(eps=options.eps, order=order)
            own, facts = parts_of(FilteredLoss(values, mode, workspace))
            works |= {f"{order}: {name}": work for name, work in own.items()}
            works[f"{order}: public function"] = captured(call_of(inputs, mode))
            peak = meter.peak(call_of(inputs, mode))
            facts["peak MiB"] = ((peak or 0) - values.hidden.nbytes - values.weight.nbytes) / MIB
            found |= {f"{order}: {name}": fact for name, fact in facts.items()}
        found["milliseconds"] = medians_ms(works, options.repeats, meter)
    return found


def report(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if name != "milliseconds":
            print(f"{name:>42} {value if name == 'shape' else f'{value:.4g}'}", flush=True)
    for name, value in found["milliseconds"].items():
        print(f"{name:>42} {value:8.3f} ms", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="python -m cce_tp.launch.bench_filtered", description=__doc__)
    parser.add_argument("--data", type=existing_folder, metavar="DIR", required=True)
    parser.add_argument("--shape", type=shape_of, action="append", metavar="N,V,D", help="may be repeated")
    parser.add_argument("--order", choices=ORDERS, action="append", help="may be repeated; default: all")
    parser.add_argument("--eps", type=probability, default=2.0**-12)
    parser.add_argument("--block", type=tile_of, help="configuration of what recomputes logits")
    parser.add_argument("--product", type=tile_of, help="configuration of the two products")
    parser.add_argument("--workspace", type=positive, metavar="MIB", help="for G and copies of C in one round")
    parser.add_argument("--sparsest", type=positive)
    parser.add_argument("--sparsest-in-order", type=positive)
    parser.add_argument("--repeats", type=positive, default=10)
    add_json(parser)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    model, results = bench_logits.load_folder(options.data), []
    for shape in options.shape or SHAPES:
        inputs = bench_logits.make("realistic", shape, torch.bfloat16, "cuda", model)
        results.append(measure(inputs, options))
        report(results[-1])
        del inputs
        torch.cuda.empty_cache()
    write_json(options.json, results)


if __name__ == "__main__":
    main()
