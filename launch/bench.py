"""Time, memory and error of the loss and its gradients: ours, and every peer that can be imported, on one GPU.

    cce-tp bench --data DIR --json results.json --png results.png --readme README.md
    cce-tp bench --logits random --shape 8192,256000,2304 --methods exact,torch
    cce-tp bench --from results.json --png results.png --readme README.md

G is the time of the product E C^T alone, by the library, into a buffer that exists already; 3G that of E C^T, G C and
G^T E, which any exact method needs. All methods take turns in the same run, each behind some 100 ms of logits products,
and times are medians. The forward pass is that of inputs that need no gradient. Memory is the peak above the inputs,
and above their gradients; errors are relative (Frobenius), against fp32. "Widened" means that logits in the inputs'
dtype become fp32 before the loss is formed.

DIR holds smollm2_head.npz and smollm2_hidden_pydocs.npz, a model's head and its hidden states on a text: realistic
logits. Random ones are those of a model at its initialisation, one-hot ones those of a model that is sure.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cce_tp

from . import bench_logits, bench_pictures, runtime
from .bench_logits import Inputs, Shape
from .bench_peers import Method, Ours, ours, peers, reason
from .bench_results import (
    ERROR_COLUMNS,
    ONE_PRODUCT,
    THREE_PRODUCTS,
    TIME_COLUMNS,
    Case,
    Row,
    error_rows,
    markdown,
    read_json,
    readme_has_marks,
    time_rows,
    write_csv,
    write_json,
    write_readme,
)
from .console import (
    DTYPES,
    Output,
    PlainOutput,
    UsageError,
    dtype_of,
    existing_file,
    existing_folder,
    open_output,
    positive,
    probability,
    pyplot,
    shape_of,
    writable_file,
)
from .measure import CpuMeter, GpuMeter, Meter, Timing, Work, captured, in_turns
from .model_files import Model
from .reference import Reference, reference, sampling_noise

HELP = "time, memory and error of ours and of every peer that can be imported, on one GPU"
SHAPES = ((8192, 256000, 2304), (8192, 128256, 4096), (8192, 32000, 4096), (8184, 49152, 576))
MEASURES = ("shape", "logits", "data", "graph", "parts", "methods")


@dataclass(frozen=True)
class Plan:
    """What to measure at every problem."""

    methods: Sequence[Method]
    dtype: torch.dtype
    device: str
    repeats: int
    graph: bool
    parts: bool
    eps: float

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True)
class Candidate:
    """A method that ran, and what is known of it before its times are."""

    row: Row
    forward: Work
    both: Work


def measure(kind: str, shape: Shape, plan: Plan, model: Model | None) -> Case:
    """All methods on one problem."""
    _forget_compiled()
    inputs = bench_logits.make(kind, shape, plan.dtype, plan.device, model)
    right = reference(inputs)
    products = _products(inputs)
    meter: Meter = GpuMeter(products[ONE_PRODUCT]) if plan.on_gpu else CpuMeter()

    outcomes = _prepare_all(plan, inputs, right, meter)
    candidates = [outcome for outcome in outcomes if isinstance(outcome, Candidate)]
    works = dict(products)
    for candidate in candidates:
        works |= zip(_names(candidate.row), (candidate.forward, candidate.both), strict=True)
    peers_works = [name for each in candidates if each.row.kind == "peer" for name in _names(each.row)]
    timings = in_turns(works, plan.repeats, meter, peers_works)
    rows = [_product_row(ONE_PRODUCT, timings), _product_row(THREE_PRODUCTS, timings)]
    rows += [_timed(outcome.row, timings) if isinstance(outcome, Candidate) else outcome for outcome in outcomes]
    parts = _measure_parts(inputs, plan, meter) if plan.parts else None
    return Case(
        shape, kind, str(plan.dtype).removeprefix("torch."),
        torch.cuda.get_device_name() if plan.on_gpu else "CPU",
        versions(), plan.repeats, right.loss, rows, parts,
    )  # fmt: skip


def _prepare_all(plan: Plan, inputs: Inputs, right: Reference, meter: Meter) -> list[Candidate | Row]:
    """A candidate for what runs, a row with its reason for what does not."""
    outcomes: list[Candidate | Row] = []
    for method in plan.methods:
        outcome = _attempt(_blank(method), partial(prepare, method, inputs, right, meter))
        outcomes.append(outcome)
        if plan.graph and method.ours and isinstance(outcome, Candidate):
            outcomes.append(_attempt(_in_graph(outcome.row), partial(graphed, outcome, inputs)))
        inputs.clear_gradients()
        _free_memory(plan)
    return outcomes


def _attempt(row: Row, make: Callable[[], Candidate]) -> Candidate | Row:
    try:
        return make()
    except Exception as error:  # whatever a peer raises is the reason that the table gives
        return replace(row, reason=reason(error))


def _blank(method: Method) -> Row:
    return Row(method.name, "ours" if method.ours else "peer", method.package, method.version)


def _forget_compiled() -> None:
    """torch.compile gives up, silently, once it has compiled a function for a few shapes."""
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()


def _products(inputs: Inputs) -> dict[str, Work]:
    """The bare products; the three take the logits themselves for the gradient in the logits."""
    e, c = inputs.hidden.detach(), inputs.weight.detach()
    logits = e.new_empty(len(e), len(c))
    input_grad, weight_grad = torch.empty_like(e), torch.empty_like(c)

    def one() -> Tensor:
        return torch.mm(e, c.T, out=logits)

    def three() -> None:
        one()
        torch.mm(logits, c, out=input_grad)
        torch.mm(logits.T, e, out=weight_grad)

    return {ONE_PRODUCT: one, THREE_PRODUCTS: three}


def prepare(method: Method, inputs: Inputs, right: Reference, meter: Meter) -> Candidate:
    """Run a method until it is warm; its errors and its memory."""
    loss, values = method.load(), inputs.detached()

    def forward() -> Tensor:
        with torch.no_grad():
            return loss(values.hidden, values.weight, values.target)

    def both() -> Tensor:
        inputs.clear_gradients()
        value = loss(inputs.hidden, inputs.weight, inputs.target)
        value.backward()
        return value

    value = float(both().detach())
    assert inputs.hidden.grad is not None
    assert inputs.weight.grad is not None
    input_error, weight_error = right.errors(inputs.hidden.grad, inputs.weight.grad)
    of_gradients = inputs.hidden.grad.nbytes + inputs.weight.grad.nbytes
    noise: tuple[float, float] | tuple[None, None] = (None, None)
    if isinstance(method, Ours) and isinstance(method.mode, cce_tp.Sampled):
        noise = sampling_noise(inputs, method.mode, right)

    inputs.clear_gradients()
    forward()
    forward_peak = meter.peak(forward)
    both()
    inputs.clear_gradients()
    both_peak = meter.peak(both)
    row = replace(
        _blank(method),
        forward_bytes=forward_peak,
        both_bytes=None if both_peak is None else max(0, both_peak - of_gradients),
        loss_error=value - right.loss,
        input_error=input_error, weight_error=weight_error,
        input_noise=noise[0], weight_noise=noise[1],
    )  # fmt: skip
    return Candidate(row, forward, both)


def _in_graph(row: Row) -> Row:
    return Row(f"{row.method}, CUDA graph", row.kind, row.package, row.version)


def graphed(candidate: Candidate, inputs: Inputs) -> Candidate:
    """The same, replayed from CUDA graphs."""
    forward = captured(candidate.forward)
    inputs.clear_gradients()
    both = captured(candidate.both)
    inputs.clear_gradients()  # the graph writes them, without autograd
    return Candidate(_in_graph(candidate.row), forward, both)


def _names(row: Row) -> tuple[str, str]:
    """Of a method's two works: the forward pass, and both."""
    return f"forward of {row.method}", f"both passes of {row.method}"


def _product_row(name: str, timings: dict[str, Timing]) -> Row:
    timing = timings[name]
    if timing.failure is not None:
        raise timing.failure
    row = Row(name, "product", "torch", torch.__version__, repeats=timing.repeats)
    one = name == ONE_PRODUCT
    return replace(row, forward_ms=timing.median_ms) if one else replace(row, both_ms=timing.median_ms)


def _timed(row: Row, timings: dict[str, Timing]) -> Row:
    forward, both = (timings[name] for name in _names(row))
    failure = forward.failure or both.failure
    if failure is not None:
        return Row(row.method, row.kind, row.package, row.version, reason(failure))
    return replace(row, forward_ms=forward.median_ms, both_ms=both.median_ms, repeats=both.repeats)


def _measure_parts(inputs: Inputs, plan: Plan, meter: Meter) -> dict[str, Any]:
    from .bench_parts import measure_parts  # the kernels need Triton

    return measure_parts(inputs, cce_tp.Sampled(eps=plan.eps), plan.repeats, meter)


def _free_memory(plan: Plan) -> None:
    if plan.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()


def versions() -> dict[str, str]:
    """Of what every method needs."""
    found = {"cce_tp": cce_tp.__version__, "torch": torch.__version__}
    try:
        import triton
    except ImportError:
        return found
    return {**found, "triton": triton.__version__}


# -- compiling ahead


def compile_ahead(plan: Plan, shapes: Sequence[Shape], workers: int) -> None:
    """Fill the caches of Triton and of torch.compile, several methods at a time, each in a process of its own."""
    tasks = [(method, shape) for shape in shapes for method in plan.methods if method.compiles]
    if workers < 1 or not tasks:
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(tasks)), context, _compile_alone) as pool:
        futures = [pool.submit(run_once, method, shape, plan.dtype) for method, shape in tasks]
        wait(futures)
        if any(isinstance(future.exception(), BrokenProcessPool) for future in futures):
            print("a process that compiled ahead has died; what is missing compiles later", file=sys.stderr, flush=True)


def _compile_alone() -> None:
    """These processes are many already."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def run_once(method: Method, shape: Shape, dtype: torch.dtype) -> None:
    """Both ways in which a method is called. What fails here fails again, and is reported, where it is measured."""
    _forget_compiled()
    inputs = bench_logits.make("random", shape, dtype, "cuda")
    try:
        loss, values = method.load(), inputs.detached()
        loss(inputs.hidden, inputs.weight, inputs.target).backward()
        with torch.no_grad():
            loss(values.hidden, values.weight, values.target)
    except Exception:
        pass
    finally:
        runtime.finalize()
        del inputs
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


# -- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this subcommand."""
    parser.add_argument("--shape", type=shape_of, action="append", metavar="N,V,D", help="may be repeated")
    parser.add_argument(
        "--logits", choices=bench_logits.KINDS, action="append",
        help="may be repeated; default: realistic with --data, random without",
    )  # fmt: skip
    parser.add_argument("--data", type=existing_folder, metavar="DIR", help="a model's head and hidden states")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--eps", type=probability, default=2.0**-8, help="of the sampled mode")
    parser.add_argument("--repeats", type=positive, default=20, help="runs of each; a quarter for peers above 50 ms")
    parser.add_argument(
        "--methods", metavar="TEXT,...", help="only those whose names contain one of these (any case)"
    )  # fmt: skip
    parser.add_argument("--graph", action="store_true", help="ours also as replays of CUDA graphs")
    parser.add_argument("--parts", action="store_true", help="also the sampled mode part by part")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: by the wall clock, no memory")
    parser.add_argument(
        "--workers", type=int, metavar="NUMBER", help="that compile ahead; 0 for none; default: 3/4 of the cores",
    )  # fmt: skip
    parser.add_argument(
        "--from", dest="sources", type=existing_file, action="append", metavar="FILE",
        help="measure nothing: results of an earlier --json; may be repeated",
    )  # fmt: skip
    for name, what in (
        ("json", "all results"),
        ("csv", "one line for each method and problem"),
        ("png", "a picture of times and memory"),
        ("markdown", "the README's tables"),
    ):
        parser.add_argument(f"--{name}", type=writable_file, metavar="FILE", help=what)
    parser.add_argument("--readme", type=existing_file, metavar="FILE", help="put the tables between its two marks")


def run(options: argparse.Namespace) -> int:
    """Measure or read; show and write."""
    _check(options)
    output = open_output()
    if options.sources:
        cases = [case for source in options.sources for case in read_json(source)]
        for case in cases:
            show(case, output)
    else:
        cases = _measure_all(options, output)
    if options.json is not None:
        write_json(options.json, cases)
    if options.csv is not None:
        write_csv(options.csv, cases)
    if options.markdown is not None:
        options.markdown.write_text(markdown(cases))
    if options.readme is not None:
        write_readme(options.readme, cases)
    if options.png is not None:
        bench_pictures.draw(cases, options.png)
    return 0


def _check(options: argparse.Namespace) -> None:
    """What would otherwise end in an error after all has been measured.

    Raises:
        UsageError: it would.
    """
    if options.png is not None:
        pyplot()
    if options.readme is not None and not readme_has_marks(options.readme):
        write_readme(options.readme, [])
    if options.sources:
        superfluous = next((name for name in MEASURES if getattr(options, name)), None)
        if superfluous:
            raise UsageError(f"--from measures nothing: leave out --{superfluous}")
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is here; --device cpu measures by the wall clock")
    if options.device == "cpu" and (options.graph or options.parts):
        raise UsageError("--graph and --parts need --device cuda")
    if "realistic" in (options.logits or ()) and options.data is None:
        raise UsageError("--logits realistic needs --data DIR")
    if options.data is not None and "realistic" not in (options.logits or ("realistic",)):
        raise UsageError(f"--data is for realistic logits, and --logits says {' and '.join(options.logits)}")
    if options.workers is not None and options.workers < 0:
        raise UsageError(f"--workers {options.workers} is negative")
    if runtime.discover().world_size > 1:
        raise UsageError("bench measures one device: start it alone, not under a launcher of several processes")


def _chosen(options: argparse.Namespace) -> list[Method]:
    every = [*ours(options.eps), *peers()]
    if options.methods is None:
        return every
    wanted = [text.strip().lower() for text in options.methods.split(",") if text.strip()]
    found = [method for method in every if any(text in method.name.lower() for text in wanted)]
    for text in wanted:
        if not any(text in method.name.lower() for method in every):
            raise UsageError(f"--methods: no name contains {text!r}: {'; '.join(method.name for method in every)}")
    if not found:
        raise UsageError("--methods names none")
    return found


def _measure_all(options: argparse.Namespace, output: Output | PlainOutput) -> list[Case]:
    shapes = list(dict.fromkeys(options.shape or SHAPES))
    kinds = list(dict.fromkeys(options.logits or (["random"] if options.data is None else ["realistic"])))
    model = None if options.data is None else bench_logits.load_folder(options.data)
    plan = Plan(
        _chosen(options), dtype_of(options.dtype), options.device, options.repeats, options.graph, options.parts,
        options.eps,
    )  # fmt: skip
    if plan.on_gpu:
        workers = (os.cpu_count() or 1) * 3 // 4 if options.workers is None else options.workers
        start = time.perf_counter()
        compile_ahead(plan, shapes, workers)
        output.say(f"compiled ahead in {time.perf_counter() - start:.0f} s")
    cases = []
    try:
        for kind in kinds:
            for shape in shapes:
                cases.append(measure(kind, shape, plan, model))
                show(cases[-1], output)
                if options.json is not None:
                    write_json(options.json, cases)  # what there is, should a later problem fail
                _free_memory(plan)
    finally:
        if dist.is_initialized():  # a peer's group of one
            runtime.finalize()
    return cases


def show(case: Case, output: Output | PlainOutput) -> None:
    """A problem's table and remarks."""
    output.table(f"{case.title}; loss {case.loss:.4f}", TIME_COLUMNS, time_rows(case))
    output.table("off from fp32, and from the closed form of the sampled noise", ERROR_COLUMNS, error_rows(case))
    for row in case.rows:
        if not row.measured:
            output.say(f"  not measured: {row.method}: {row.reason}")
    if case.parts is not None:
        times, lists = case.parts["milliseconds"], case.parts["lists"]
        rows = [(name, f"{value:.3f}", f"{value / case.product_ms:.3f}") for name, value in times.items()]
        output.table("the sampled mode's parts", ("", "ms", "/ G"), rows)
        output.say("  " + ", ".join(f"{name} {value:,.1f}" for name, value in lists.items()))


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["bench", *sys.argv[1:]]))
