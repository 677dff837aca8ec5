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

The predictions for larger groups of the same kind of link are a model, no measurement; see ``bench_tp_model``.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cce_tp
from cce_tp import collectives
from cce_tp.collectives import Overlap
from cce_tp.options import Backward

from . import bench_logits, bench_tp_model, bench_tp_trace, runtime
from .bench import versions
from .bench_logits import Inputs, Shape
from .bench_peers import FILTER_EPS, Unavailable, reason
from .bench_tp_model import KINDS, Link, Message, Prediction
from .console import (
    DTYPES,
    Output,
    PlainOutput,
    UsageError,
    add_json,
    dtype_of,
    existing_folder,
    mib,
    open_output,
    positive,
    probability,
    pyplot,
    shape_of,
    writable_file,
)
from .measure import CpuMeter, GpuMeter, Meter, Timing, Work, in_turns

HELP = "time, exposed communication and memory over a tensor-parallel group, against Megatron-core"
SHAPES = ((8192, 256000, 2304), (8192, 128256, 4096))
OURS, MEGATRON = ("exact", "filtered", "sampled"), ("megatron-core fused", "megatron-core unfused")
LINK_BYTES = (2**16, 2**20, 2**22, 2**24, 2**26)
CPU_LINK_BYTES = (2**12, 2**16, 2**20)
LINK_REPEATS = 7
PREDICTED = (4, 8)
TIMEOUT = timedelta(minutes=3)
PRODUCT = "the rank's logits product"


@dataclass(frozen=True)
class Place:
    """This process in the group."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def largest(self, value: float) -> float:
        """Of the ranks' values; the same on all of them, so that they decide alike."""
        values = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return float(values)

    def align(self) -> None:
        """What follows on this rank's device begins when the others get there."""
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)


class GroupMeter:
    """The slowest rank's time, and the largest memory; all ranks measure the same work at once."""

    def __init__(self, place: Place, product: Work) -> None:
        self._place = place
        self._meter: Meter
        if not place.on_gpu:
            self._meter = CpuMeter()
            return

        def filler() -> None:
            product()
            place.align()

        self._meter = GpuMeter(filler)
        self._meter.fillings = round(place.largest(self._meter.fillings))

    def milliseconds(self, work: Work) -> float:
        if not self._place.on_gpu:
            dist.barrier(group=self._place.group)
        return self._place.largest(self._meter.milliseconds(work))

    def peak(self, work: Work) -> int | None:
        peak = self._meter.peak(work)
        return None if peak is None else round(self._place.largest(peak))


# -- transports


class Recorder(collectives.Transport):
    """Sends at once, and remembers what came and how much travelled."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.results: list[Tensor | None] = []

    def _note(self, kind: str, what: str, whole: Tensor, result: Tensor) -> None:
        self.messages.append(Message(kind, what, whole.nbytes))
        # Nothing of ours reads the gradient: it may stay what this rank made of it.
        self.results.append(None if what == collectives.REDUCING else result.clone())

    def all_gather(self, out: Tensor, local: Tensor, group: Any, what: str, later: bool = False) -> Any:
        pending = super().all_gather(out, local, group, what)
        self._note("all-gather", what, out, out)
        return pending

    def all_reduce(
        self, values: Tensor, group: Any, what: str, op: Any = dist.ReduceOp.SUM, later: bool = False
    ) -> Any:
        pending = super().all_reduce(values, group, what, op)
        self._note("all-reduce", what, values, values)
        return pending

    def reduce_scatter(self, out: Tensor, values: Tensor, group: Any, what: str, later: bool = False) -> Any:
        pending = super().reduce_scatter(out, values, group, what)
        self._note("reduce-scatter", what, values, out)
        return pending


class Replay(collectives.Transport):
    """Sends nothing: brings what a ``Recorder`` remembers of the same step, again and again."""

    def __init__(self, recorder: Recorder) -> None:
        self._results, self._next = recorder.results, 0

    def _bring(self, out: Tensor, group: Any, what: str) -> Any:
        result = self._results[self._next]
        self._next = (self._next + 1) % len(self._results)
        if result is not None:
            out.copy_(result.view_as(out))
        return collectives.Pending(None, what, group)

    def all_gather(self, out: Tensor, local: Tensor, group: Any, what: str, later: bool = False) -> Any:
        return self._bring(out, group, what)

    def all_reduce(
        self, values: Tensor, group: Any, what: str, op: Any = dist.ReduceOp.SUM, later: bool = False
    ) -> Any:
        return self._bring(values, group, what)

    def reduce_scatter(self, out: Tensor, values: Tensor, group: Any, what: str, later: bool = False) -> Any:
        return self._bring(out, group, what)


# -- methods


@dataclass(frozen=True)
class Problem:
    """One shape on one rank.

    Attributes:
        whole: the whole vocabulary.
        shard: this rank's rows.
        tokens: all of them, ``[N, D]``, or this rank's ``[N/T, D]``, a leaf each.
        weight: this rank's rows of the classifier, a leaf.
    """

    whole: Inputs
    shard: cce_tp.VocabShard
    tokens: dict[bool, Tensor]
    weight: Tensor

    @classmethod
    def make(
        cls, kind: str, shape: Shape, dtype: torch.dtype, place: Place, model: Any, *, shuffled: bool = False
    ) -> Problem:
        whole = bench_logits.make(kind, shape, dtype, place.device.type, model)
        whole = whole.shuffled() if shuffled else whole
        for value in (whole.hidden.detach(), whole.weight.detach(), whole.target):
            dist.broadcast(value, 0, group=place.group)
        shard = cce_tp.VocabShard.chunk(shape[1], place.rank, place.size)
        e = whole.hidden.detach()
        tokens = {False: e.clone().requires_grad_(), True: e.chunk(place.size)[place.rank].clone().requires_grad_()}
        return cls(whole, shard, tokens, whole.weight.detach()[shard.start : shard.stop].clone().requires_grad_())

    def clear(self) -> None:
        self.whole.clear_gradients()
        for leaf in (*self.tokens.values(), self.weight):
            leaf.grad = None

    @property
    def gradient_bytes(self) -> int:
        leaves = (*self.tokens.values(), self.weight)
        return sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)


Step = Callable[[], Tensor]


def _step(problem: Problem, loss: Callable[[], Tensor]) -> Tensor:
    problem.clear()
    value = loss()
    value.backward()
    return value.detach()


def our_step(problem: Problem, place: Place, mode: Backward, sequence_parallel: bool) -> Step:
    """Loss and gradients over the group."""
    return lambda: _step(
        problem,
        lambda: cce_tp.linear_cross_entropy(
            problem.tokens[sequence_parallel], problem.weight, problem.whole.target,
            group=place.group, shard=problem.shard, sequence_parallel=sequence_parallel, backward=mode,
        ),
    )  # fmt: skip


def single_step(problem: Problem, mode: Backward) -> Step:
    """The same with the whole vocabulary on this rank."""
    whole = problem.whole
    return lambda: _step(
        problem,
        lambda: cce_tp.linear_cross_entropy(whole.hidden, whole.weight, whole.target, backward=mode),
    )


def megatron_step(problem: Problem, place: Place, fused: bool, sequence_parallel: bool) -> Step:
    """Megatron-core's output layer and loss: the classifier's gradient in the weight's dtype, as without fusion.

    Raises:
        ImportError, Unavailable: it isn't here, or not for this device.
    """
    if not place.on_gpu:
        raise Unavailable("Megatron-core's output layer needs a GPU")
    if len(problem.whole.weight) % place.size:
        raise Unavailable("Megatron-core shares out the vocabulary evenly")
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(place.size, create_gloo_process_groups=False)
    group = parallel_state.get_tensor_model_parallel_group()
    target = problem.whole.target[:, None]

    def loss() -> Tensor:
        logits = linear_with_grad_accumulation_and_async_allreduce(
            input=problem.tokens[sequence_parallel][:, None],
            weight=problem.weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=not sequence_parallel,
            sequence_parallel=sequence_parallel,
            tp_group=group,
        )
        if fused:
            return fused_vocab_parallel_cross_entropy(logits, target, group).mean()
        return vocab_parallel_cross_entropy(logits, target, tp_group=group).mean()

    return lambda: _step(problem, loss)


# -- measuring


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
    """All methods at one shape."""

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
        "--trace", type=writable_file, metavar="PNG", help="draw what the first shape's sampled step does when"
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
            _show_links(links, place, output)
        rows = measure(problem, plan, place, meter)
        product, rows = rows[0], rows[1:]
        assert product.ms is not None
        device = torch.cuda.get_device_name() if place.on_gpu else "CPU"
        case = Case(
            shape, place.size, logits, str(plan.dtype).removeprefix("torch."), device, plan.repeats, product.ms, rows,
            _predict(rows, links, place.size), options.shuffle,
        )  # fmt: skip
        cases.append(case)
        _show(case, output)
        if options.trace is not None and len(cases) == 1:
            _trace(problem, plan, place, options.trace)
        if place.rank == 0 and options.json is not None:
            _write(options.json, cases, links, _overlap(options))
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


def _trace(problem: Problem, plan: Plan, place: Place, path: Path) -> None:
    """Both layouts of the sampled mode, as the first rank's device saw a step."""
    product = product_of(problem)
    steps = {
        f"sampled{', sequence parallel' * layout}": our_step(problem, place, plan.mode("sampled"), layout)
        for layout in (False, True)
    }
    timelines = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        timelines[name] = bench_tp_trace.record(step, product, place.align)
    if place.rank == 0:
        tokens, vocabulary, hidden = problem.whole.shape
        title = f"{tokens:,} tokens, {vocabulary:,} rows on {place.size} ranks, D = {hidden:,}: the first rank"
        bench_tp_trace.draw(timelines, title, path)


def _write(path: Path, cases: Sequence[Case], links: Sequence[Link], choice: Overlap) -> None:
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


def _show(case: Case, output: Output | PlainOutput) -> None:
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
    for text in _comparisons(case.rows):
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


def _comparisons(rows: Sequence[Row]) -> list[str]:
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


def _show_links(links: Sequence[Link], place: Place, output: Output | PlainOutput) -> None:
    lines = [
        (link.kind, str(size), f"{1e3 * ms:.1f}", f"{1e3 * link.milliseconds(size):.1f}")
        for link in links
        for size, ms in link.measured.items()
    ]
    output.table(f"collectives of {place.size} ranks", ("", "bytes", "microseconds", "by the line"), lines)


if __name__ == "__main__":
    import sys

    from .cli import main

    sys.exit(main(["bench-tp", *sys.argv[1:]]))
