"""Time, memory and error of the sampled mode on realistic logits, on one GPU, part by part.

``python -m cce_tp.launch.bench_sampled --data DIR --shape 8192,256000,2304 --json results.json``

DIR holds ``smollm2_head.npz`` and ``smollm2_hidden_pydocs.npz``: a model's head and its hidden states on a text. They
are rotated into D dimensions; the vocabulary is extended by permuted copies of the head, shifted down by 4, 5, 6, ...
nats.
Times are medians over replays of CUDA graphs, in turns; G is the logits product alone, by the library, in the same run.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cce_tp.kernels import exact, forward, sampled, sampling, select_entries
from cce_tp.kernels.interface import GradientRequest, LocalProblem, LogitGradient, SamplingPlan, WeightGradBuffer
from cce_tp.kernels.logits import LogitOperands

from .console import Parser, add_json, existing_folder, positive, probability, shape_of, write_json

MIB = 2**20
FIRST_SHIFT = 4.0


def load(folder: Path, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, head (fp32) and targets."""
    head = np.load(folder / "smollm2_head.npz")
    hidden = np.load(folder / "smollm2_hidden_pydocs.npz")
    q, scale = (torch.from_numpy(head[name]).to(device).float() for name in ("q", "scale"))
    group = q.shape[1] // scale.shape[1]
    c = q * scale.repeat_interleave(group, dim=1)
    e = torch.from_numpy(hidden["e_bf16"]).to(device).view(torch.bfloat16).float()
    return e, c, torch.from_numpy(hidden["targets"]).to(device).long()


def realistic(folder: Path, tokens: int, rows: int, hidden: int, dtype: torch.dtype, device: str) -> LocalProblem:
    e, c, target = load(folder, device)
    gen = torch.Generator(device).manual_seed(0)
    again = torch.arange(tokens, device=device) % e.shape[0]
    e, target = e[again], target[again]
    if rows < c.shape[0]:
        c = c[:rows]
        outside = target >= rows
        target[outside] = (e[outside] @ c.T).softmax(1).multinomial(1, generator=gen)[:, 0]
    if hidden > e.shape[1]:
        size = e.square().mean().sqrt()
        shifts = [torch.zeros(c.shape[0], device=device)]
        copies = [c]
        while sum(len(copy) for copy in copies) < rows:
            order = torch.randperm(c.shape[0], generator=gen, device=device)
            copies.append(c[order])
            shifts.append(torch.full((c.shape[0],), -(FIRST_SHIFT + len(copies) - 2), device=device))
        c = torch.cat([torch.cat(copies), torch.cat(shifts)[:, None] / size], dim=1)[:rows]
        e = torch.cat([e, size.expand(tokens, 1)], dim=1)
        q = torch.linalg.qr(torch.randn(hidden, e.shape[1], generator=gen, device=device)).Q
        e, c = e @ q.T, c @ q.T
    return LocalProblem(e.to(dtype), c.to(dtype), target)


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """The work as a graph, so that the host's launches do not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def medians_ms(works: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """In turns, since the clock falls as the device warms up: what is measured later must not look slower for that."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for i in range(repeats + 1):
        for name, work in works.items():
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            stop.record()
            torch.cuda.synchronize()
            if i > 0:
                times[name].append(start.elapsed_time(stop))
    return {name: statistics.median(values) for name, values in times.items()}


class SampledLoss:
    """The mean loss of a single shard in the sampled mode, in parts that can be timed alone."""

    def __init__(self, problem: LocalProblem, eps: float, hot_rows: int, budget: int) -> None:
        self.problem = problem
        self.eps, self.hot_rows, self.budget = eps, hot_rows, budget
        self.weight_grad = torch.empty_like(problem.weight)
        self.active = torch.ones_like(problem.target, dtype=torch.bool)
        self.seed = torch.tensor([20240607], device=problem.input.device)
        self.request = GradientRequest(problem.input.dtype, WeightGradBuffer(self.weight_grad, False), False)
        self.input_grad: Tensor | None = None
        self.plan = self.make_plan()

    def make_plan(self) -> SamplingPlan:
        problem = self.problem
        hot = sampling.choose_hot_rows(problem.target, self.active, problem.num_rows, self.hot_rows)
        rows = sampling.AnchorRows.choose(hot, problem.num_rows)
        sums = sampling.anchor_sums(problem, rows, 0, problem.num_rows)
        anchor = sampling.anchor(sums, rows, problem.target, self.active)
        return SamplingPlan(self.eps, self.budget, self.seed, anchor, self.active, hot.ids, 0)

    def select(self) -> Any:
        return select_entries.select(self.problem, self.plan, stats=False)

    def logit_grad(self, partials: Any) -> LogitGradient:
        share = torch.full_like(partials.max, 1.0 / self.problem.num_tokens)
        return LogitGradient(partials.max, partials.sum_exp.log(), share, share, self.active)

    def gradients(self, selection: Any, grad: LogitGradient) -> None:
        sampled.sampled_gradients(self.problem, self.plan, selection, grad, self.request, self._keep)

    def whole(self) -> None:
        partials, selection = self.select()
        self.gradients(selection, self.logit_grad(partials))

    def _keep(self, input_grad: Tensor) -> None:
        self.input_grad = input_grad


def parts(loss: SampledLoss) -> dict[str, Callable[[], object]]:
    partials, selection = loss.select()
    grad = loss.logit_grad(partials)
    backward = sampled._Backward(loss.problem, loss.plan, selection, grad, loss.request, True, None)
    slots = loss.problem.num_tokens * (selection.budget + 1)
    slot_grads = torch.empty(slots, device="cuda")
    hot = backward._hot_part()
    backward._entry_pass(slot_grads, has_hot=True)
    starts, ordered = backward._transpose(slots)
    return {
        "hot": captured(backward._hot_part),
        "grad_E": captured(lambda: backward._entry_pass(slot_grads, has_hot=True)),
        "transpose": captured(lambda: backward._transpose(slots)),
        "grad_C": captured(lambda: backward._weight_grad(hot, slot_grads, starts, ordered)),
    }


def errors(loss: SampledLoss) -> dict[str, float]:
    """Relative to the exact gradients of the same operands, with fp32 results."""
    loss.whole()
    partials, selection = loss.select()
    handed: list[Tensor] = []
    buffer = torch.empty_like(loss.problem.weight, dtype=torch.float32)
    request = GradientRequest(torch.float32, WeightGradBuffer(buffer, False), False)
    exact.gradients(loss.problem, loss.logit_grad(partials), request, handed.append)
    assert loss.input_grad is not None
    input_error = (loss.input_grad.float() - handed[0]).norm() / handed[0].norm()
    difference = sum(
        (ours.float() - right).square().sum().item()
        for ours, right in zip(loss.weight_grad.split(8192), buffer.split(8192), strict=True)
    )
    right = forward.partials(LogitOperands.prepare(loss.problem), stats=False, workspace=None)
    lse = (partials.max + partials.sum_exp.log()) - (right.max + right.sum_exp.log())
    return {
        "error_E": float(input_error),
        "error_C": difference**0.5 / float(buffer.norm()),
        "error_LSE": float(lse.abs().max()),
        "kept_per_token": float(selection.kept) / loss.problem.num_tokens,
        "thinned_tokens": int((selection.found > selection.budget).sum()),
        "most_in_a_row": int(torch.bincount(_kept_rows(selection), minlength=1).max()),
        "loss": float((partials.sum_exp.log() - (partials.target_logit - partials.max)).mean()),
    }


def _kept_rows(selection: Any) -> Tensor:
    places = torch.arange(selection.budget, device=selection.rows.device)
    return selection.rows[places < selection.found[:, None]]


def peak_above(work: Callable[[], object], allowed: int) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - allowed


def logits_product(problem: LocalProblem) -> Callable[[], object]:
    logits = problem.input.new_empty(problem.num_tokens, problem.num_rows)
    return captured(lambda: torch.mm(problem.input, problem.weight.T, out=logits))


def measure(problem: LocalProblem, options: argparse.Namespace) -> dict[str, Any]:
    loss = SampledLoss(problem, options.eps, options.hot, options.budget)
    loss.whole()
    operands = LogitOperands.prepare(problem)
    works: dict[str, Callable[[], object]] = {
        "G": logits_product(problem),
        "forward": captured(lambda: forward.partials(operands, stats=False, workspace=None)),
        "anchor": loss.make_plan,  # not captured: PyTorch operators of the caller's
        "select": captured(loss.select),
        "total": captured(loss.whole),
        **parts(loss),
    }
    result: dict[str, Any] = {"shape": [problem.num_tokens, problem.num_rows, problem.hidden_size]}
    result |= medians_ms(works, options.repeats)
    del works
    loss.input_grad = None
    size = problem.num_tokens * problem.hidden_size * problem.input.element_size()
    result["select_peak_MiB"] = peak_above(loss.select, 0) / MIB
    result["peak_MiB"] = peak_above(loss.whole, size) / MIB
    return result | errors(loss)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="cce-tp bench --sampled", description=__doc__)
    parser.add_argument("--data", type=existing_folder, metavar="DIR", required=True)
    parser.add_argument("--shape", type=shape_of, action="append", metavar="N,V,D", help="may be repeated")
    parser.add_argument("--eps", type=probability, default=2.0**-8)
    parser.add_argument("--hot", type=positive, default=512, help="hot rows")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--repeats", type=positive, default=10)
    add_json(parser)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    results = []
    for shape in options.shape or [(8192, 256000, 2304), (8192, 128256, 4096)]:
        tokens, rows, hidden = shape
        problem = realistic(options.data, tokens, rows, hidden, torch.bfloat16, "cuda")
        results.append(measure(problem, options))
        unit = results[-1]["G"]
        for name, value in results[-1].items():
            times = isinstance(value, float) and "error" not in name and "MiB" not in name and "kept" not in name
            print(f"{name:>16} {value}" + (f" = {value / unit:.3f} G" if times else ""), flush=True)
    write_json(options.json, results)


if __name__ == "__main__":
    main()
