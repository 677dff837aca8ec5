"""Loss and gradients over a tensor-parallel group: time, exposed communication, memory; ours and Megatron-core's.

    torchrun --standalone --nproc_per_node 2 -m cce_tp.launch bench-tp --data DIR --json tp.json --trace tp.png
    torchrun --standalone --nproc_per_node 2 -m cce_tp.launch bench-tp --data DIR --methods sampled --shuffle

All processes form one group; a shape's vocabulary is shared out among them. G is the time of a rank's own logits
product alone. Every method is measured with and without sequence parallelism, all in turns, each behind some 100 ms of
logits products and an all-reduce that lets the ranks begin together; a time is the median of the slowest rank's.

"alone" is the same work on the same numbers with nothing sent: what the collectives brought once is copied from memory.
What is above that is exposed communication. "tp = 1" is the whole vocabulary on every rank by itself; the efficiency
is its time over that of the group times the group's size. Memory is the peak above inputs and gradients.

Megatron-core's figures are those of its output layer and its vocabulary-parallel cross-entropy. It asks for
CUDA_DEVICE_MAX_CONNECTIONS=1 where collectives are to overlap.

With --trace the sampled mode's steps are profiled as well: a picture of the first rank's at the first shape, and at
every shape how long each rank's kernels take, by what they are for.

The predictions for larger groups of the same kind of link are a model, no measurement; see ``bench_tp_model``.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import cce_tp
from cce_tp import collectives
from cce_tp.collectives import Overlap
from cce_tp.options import Backward

from . import bench_logits, bench_tp_model, bench_tp_trace, runtime
from .bench_peers import FILTER_EPS, reason
from .bench_tp_model import KINDS, Link, Prediction
from .bench_tp_results import MEGATRON, OURS, Case, Row, show, show_links, write_json
from .bench_tp_work import Problem, Recorder, Replay, megatron_step, our_step, single_step
from .console import (
    DTYPES,
    Output,
    PlainOutput,
    UsageError,
    add_json,
    dtype_of,
    existing_folder,
    open_output,
    positive,
    probability,
    pyplot,
    shape_of,
    writable_file,
)
from .measure import GroupMeter, Meter, Place, Timing, Work, in_turns

HELP = "time, exposed communication and memory over a tensor-parallel group, against Megatron-core"
SHAPES = ((8192, 256000, 2304), (8192, 128256, 4096))
LINK_BYTES = (2**16, 2**20, 2**22, 2**24, 2**26)
CPU_LINK_BYTES = (2**12, 2**16, 2**20)
LINK_REPEATS = 7
PREDICTED = (4, 8)
TIMEOUT = timedelta(minutes=3)
PRODUCT = "the rank's logits product"


# -- measuring


@dataclass(frozen=True)
class Plan:
    """What to measure at every shape."""

    methods: Sequence[str]
    layouts: Sequence[bool]
    dtype: torch.dtype
    eps: float
    repeats: int

    def mode(self, method: str) -> Backward:
        """Of one of ours."""
        modes: dict[str, Backward] = {
            "exact": cce_tp.Exact(),
            "filtered": cce_tp.Filtered(eps=FILTER_EPS),
            "sampled": cce_tp.Sampled(eps=self.eps),
        }
        return modes[method]


@dataclass(frozen=True)
class Candidate:
    """A method that ran, what is known of it, and the work to be timed, by the row's field."""

    row: Row
    works: dict[str, Work]


def measure(problem: Problem, plan: Plan, place: Place, meter: Meter) -> list[Row]:
    """All methods at one shape; the same on every rank."""
    singles = {method: single_step(problem, plan.mode(method)) for method in plan.methods if method in OURS}
    for single in singles.values():
        single()
    prepared = [
        _attempt(Row(method, layout), partial(_prepare, problem, plan, place, meter))
        for method in plan.methods
        for layout in plan.layouts
    ]
    problem.clear()
    works: dict[str, Work] = {PRODUCT: product_of(problem)}
    works |= {_name(method, None, "single_ms"): single for method, single in singles.items()}
    for each in prepared:
        if isinstance(each, Candidate):
            row = each.row
            works |= {_name(row.method, row.sequence_parallel, what): work for what, work in each.works.items()}
    timings = in_turns(works, plan.repeats, meter, [name for name in works if name.startswith("megatron")])
    failure = timings[PRODUCT].failure
    if failure is not None:
        raise failure
    rows = [Row(PRODUCT, False, ms=timings[PRODUCT].median_ms)]
    return rows + [_timed(each, timings) if isinstance(each, Candidate) else each for each in prepared]


def product_of(problem: Problem) -> Work:
    """G: this rank's logits, into a buffer that exists."""
    e, c = problem.whole.hidden.detach(), problem.weight.detach()
    logits = e.new_empty(len(e), len(c))
    return lambda: torch.mm(e, c.T, out=logits)


def _name(method: str, layout: bool | None, what: str) -> str:
    return f"{method}, {layout}, {what}"


def _attempt(row: Row, make: Callable[[Row], Candidate]) -> Candidate | Row:
    try:
        return make(row)
    except Exception as error:  # whatever it is, on every rank alike, is the reason that the table gives
        return replace(row, reason=reason(error))


def _prepare(problem: Problem, plan: Plan, place: Place, meter: Meter, row: Row) -> Candidate:
    """Run a method until it is warm; its memory and its messages."""
    ours = row.method in OURS
    if ours:
        step = our_step(problem, place, plan.mode(row.method), row.sequence_parallel)
    else:
        step = megatron_step(problem, place, row.method == MEGATRON[0], row.sequence_parallel)
    step()
    step()
    of_gradients = problem.gradient_bytes
    problem.clear()
    peak = meter.peak(step)
    peak = None if peak is None else max(0, peak - of_gradients)
    row = replace(row, peak_bytes=peak)
    if not ours:
        return Candidate(replace(row, loss=float(step())), {"ms": step})
    recorder = Recorder()
    with collectives.using(recorder):
        loss = step()
    replay = Replay(recorder)

    def alone() -> None:
        with collectives.using(replay):
            step()

    row = replace(row, loss=float(loss), messages=tuple(recorder.messages))
    return Candidate(row, {"ms": step, "alone_ms": alone})


def _timed(candidate: Candidate, timings: dict[str, Timing]) -> Row:
    row = candidate.row
    found = {what: timings[_name(row.method, row.sequence_parallel, what)] for what in candidate.works}
    single = timings.get(_name(row.method, None, "single_ms"))
    if single is not None:
        found["single_ms"] = single
    failure = next((timing.failure for timing in found.values() if timing.failure is not None), None)
    if failure is not None:
        return Row(row.method, row.sequence_parallel, reason(failure))
    medians: dict[str, Any] = {what: timing.median_ms for what, timing in found.items()}
    return replace(row, **medians)


def measure_links(place: Place, meter: Meter) -> list[Link]:
    """Each kind of collective at several sizes, and the line through its times."""
    works: dict[tuple[str, int], Work] = {}
    group = collectives.resolve_group(place.group)
    transport = collectives.Transport()
    for size in LINK_BYTES if place.on_gpu else CPU_LINK_BYTES:
        whole = torch.zeros(size // 2 // place.size * place.size, dtype=torch.bfloat16, device=place.device)
        part = whole[: len(whole) // place.size].clone()
        works["all-reduce", size] = partial(transport.all_reduce, whole, group, "measuring")
        works["all-gather", size] = partial(transport.all_gather, whole, part, group, "measuring")
        if place.on_gpu:
            works["reduce-scatter", size] = partial(transport.reduce_scatter, part, whole, group, "measuring")
    for work in works.values():
        work()
    timings = in_turns({f"{kind} {size}": work for (kind, size), work in works.items()}, LINK_REPEATS, meter)
    times = {key: timings[f"{key[0]} {key[1]}"].median_ms for key in works}
    return [Link.fit(kind, {size: ms for (its, size), ms in times.items() if its == kind}) for kind in KINDS]


# -- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this subcommand."""
    parser.add_argument("--shape", type=shape_of, action="append", metavar="N,V,D", help="V over all ranks; repeatable")
    parser.add_argument("--methods", metavar="TEXT,...", help="only those whose names contain one of these")
    parser.add_argument(
        "--sequence-parallel", choices=("off", "on", "both"), default="both", help="(default: both)"
    )  # fmt: skip
    parser.add_argument("--data", type=existing_folder, metavar="DIR", help="a model's head and hidden states")
    parser.add_argument("--logits", choices=bench_logits.KINDS, help="default: realistic with --data, random without")
    parser.add_argument(
        "--shuffle", action="store_true",
        help="number the vocabulary at random: a tokenizer gives the frequent ids, hence more work, to the first rank",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--eps", type=probability, default=2.0**-8, help="of the sampled mode")
    parser.add_argument("--repeats", type=positive, default=12, help="runs of each; fewer of Megatron above 50 ms")
    parser.add_argument("--pieces", type=positive, metavar="NUMBER", help="in which sampled reduces the gradient of E")
    parser.add_argument(
        "--own-first", choices=("none", "anchor", "all"), default="anchor",
        help="sequence parallel: what is done to own tokens while the others' travel (default: anchor)",
    )  # fmt: skip
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="cpu: by the wall clock")
    parser.add_argument(
        "--trace", type=writable_file, metavar="PNG",
        help="draw when the first shape's sampled step does what, and tell, at every shape, how long each rank does it",
    )  # fmt: skip
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, show and write."""
    methods = _chosen(options.methods)
    if options.trace is not None:
        pyplot()
    logits = options.logits or ("random" if options.data is None else "realistic")
    if (logits == "realistic") != (options.data is not None):
        raise UsageError("--logits realistic and --data DIR belong together")
    process = runtime.discover()
    if process.world_size < 2:
        raise UsageError("bench-tp measures a group: start at least two processes, as by torchrun --nproc_per_node 2")
    for tokens, vocabulary, _ in options.shape or SHAPES:
        if tokens % process.world_size or vocabulary < process.world_size:
            raise UsageError(
                f"{tokens} tokens and {vocabulary} rows cannot be shared out to {process.world_size} ranks"
            )
    model = None if options.data is None else bench_logits.load_folder(options.data)
    output = open_output(enabled=process.rank == 0)
    try:
        started = runtime.initialize(options.device, TIMEOUT)
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        group = dist.group.WORLD
        assert group is not None
        place = Place(group, process.rank, process.world_size, started.device)
        if options.trace is not None and not place.on_gpu:
            raise UsageError("--trace needs GPUs")
        layouts = {"off": [False], "on": [True], "both": [False, True]}[options.sequence_parallel]
        plan = Plan(methods, layouts, dtype_of(options.dtype), options.eps, options.repeats)
        with collectives.overlap(_overlap(options)):
            _measure_all(options, plan, logits, model, place, output)
    finally:
        _forget_megatron()
        runtime.finalize()
    return 0


def _chosen(texts: str | None) -> list[str]:
    every = [*OURS, *MEGATRON]
    if texts is None:
        return every
    wanted = [text.strip().lower() for text in texts.split(",") if text.strip()]
    unknown = next((text for text in wanted if not any(text in name for name in every)), None)
    if unknown is not None or not wanted:
        raise UsageError(f"--methods: no name contains {unknown or texts!r}: {'; '.join(every)}")
    return [name for name in every if any(text in name for text in wanted)]


def _overlap(options: argparse.Namespace) -> Overlap:
    """The library's own choice, but for what was asked for."""
    choice = Overlap()
    if options.pieces is not None:
        choice = replace(choice, pieces=options.pieces)
    if options.own_first == "none":
        return replace(choice, anchor_tokens=None)
    return replace(choice, forward_tokens=1) if options.own_first == "all" else choice


def _forget_megatron() -> None:
    try:
        from megatron.core import parallel_state
    except ImportError:
        return
    parallel_state.destroy_model_parallel()


def _measure_all(
    options: argparse.Namespace, plan: Plan, logits: str, model: Any, place: Place, output: Output | PlainOutput
) -> None:
    cases: list[Case] = []
    links: list[Link] = []
    for shape in dict.fromkeys(options.shape or SHAPES):
        problem = Problem.make(logits, shape, plan.dtype, place, model, shuffled=options.shuffle)
        meter = GroupMeter(place, product_of(problem))
        if not links:
            links = measure_links(place, meter)
            show_links(links, place.size, output)
        rows = measure(problem, plan, place, meter)
        product, rows = rows[0], rows[1:]
        assert product.ms is not None
        device = torch.cuda.get_device_name() if place.on_gpu else "CPU"
        case = Case(
            shape, place.size, logits, str(plan.dtype).removeprefix("torch."), device, plan.repeats, product.ms, rows,
            _predict(rows, links, place.size), options.shuffle,
        )  # fmt: skip
        if options.trace is not None:
            case = replace(case, parts=_trace(problem, plan, place, None if cases else options.trace))
        cases.append(case)
        show(case, output)
        if place.rank == 0 and options.json is not None:
            write_json(options.json, cases, links, _overlap(options))
        del problem, meter
        gc.collect()
        if place.on_gpu:
            torch.cuda.empty_cache()


def _predict(rows: Sequence[Row], links: Sequence[Link], ranks: int) -> list[Prediction]:
    found = []
    for row in rows:
        if row.ms is None or row.alone_ms is None or row.single_ms is None:
            continue
        step = bench_tp_model.Step(ranks, row.ms, row.alone_ms, row.single_ms, row.messages)
        for more in PREDICTED:
            if more > ranks:
                ms, exposed = bench_tp_model.predict(step, links, more)
                efficiency = row.single_ms / (more * ms)
                found.append(Prediction(row.method, row.sequence_parallel, more, ms, exposed, efficiency))
    return found


def _trace(problem: Problem, plan: Plan, place: Place, path: Path | None) -> dict[str, list[dict[str, float]]]:
    """Both layouts of the sampled mode: how long each rank's kernels took, and the first rank's picture."""
    product = product_of(problem)
    steps = {
        f"sampled{', sequence parallel' * layout}": our_step(problem, place, plan.mode("sampled"), layout)
        for layout in (False, True)
    }
    timelines, parts = {}, {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        timelines[name] = bench_tp_trace.record(step, product, place.align)
        parts[name] = place.of_every_rank(bench_tp_trace.busy(timelines[name]))
    if place.rank == 0 and path is not None:
        tokens, vocabulary, hidden = problem.whole.shape
        title = f"{tokens:,} tokens, {vocabulary:,} rows on {place.size} ranks, D = {hidden:,}: the first rank"
        bench_tp_trace.draw(timelines, title, path)
    return parts


if __name__ == "__main__":
    import sys

    from .cli import main

    sys.exit(main(["bench-tp", *sys.argv[1:]]))
