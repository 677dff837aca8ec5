"""The sampled mode part by part, on one GPU: ``cce-tp bench --parts``.

Times are medians over replays of CUDA graphs, in turns: of the forward pass of the other modes, the anchor, the forward
pass that selects, the backward pass's parts, and all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cce_tp.kernels import forward, sampled, sampling, select_entries
from cce_tp.kernels.interface import GradientRequest, LocalProblem, LogitGradient, SamplingPlan, WeightGradBuffer
from cce_tp.kernels.logits import LogitOperands
from cce_tp.kernels.triton_impl import TRITON
from cce_tp.options import Sampled

from .bench_logits import Inputs
from .measure import Meter, captured, medians_ms


class SampledLoss:
    """The mean loss of a single shard in the sampled mode, in parts that can be timed alone."""

    def __init__(self, problem: LocalProblem, mode: Sampled) -> None:
        self.problem, self.mode = problem, mode
        self.weight_grad = torch.empty_like(problem.weight)
        self.active = torch.ones_like(problem.target, dtype=torch.bool)
        self.seed = torch.tensor([20240607], device=problem.input.device)
        self.request = GradientRequest(problem.input.dtype, WeightGradBuffer(self.weight_grad, False), False)
        self.input_grad: Tensor | None = None
        self.plan = self.make_plan()

    def make_plan(self) -> SamplingPlan:
        problem = self.problem
        ids = sampling.RowIds.whole(problem.num_rows)
        rows = TRITON.anchor_rows(problem.target, self.active, ids, self.mode.reference_rows)
        anchor = TRITON.anchor(TRITON.anchor_sums(problem, rows), rows)
        return SamplingPlan(
            float(self.mode.eps), self.mode.most_entries, self.seed, anchor, self.active, rows.hot, rows.place, 0
        )

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
    slot_grads = torch.empty(backward.slots, device=loss.problem.input.device)
    hot = backward._hot_part()
    backward._entry_pass(slot_grads, has_hot=True)
    columns = backward._transposition().columns()
    return {
        "hot": captured(backward._hot_part),
        "grad_E": captured(lambda: backward._entry_pass(slot_grads, has_hot=True)),
        "transpose": captured(lambda: backward._transposition().columns()),
        "grad_C": captured(lambda: backward._weight_grad(hot, slot_grads, columns)),
    }


def _kept_rows(selection: Any) -> Tensor:
    places = torch.arange(selection.budget, device=selection.rows.device)
    return selection.rows[places < selection.found[:, None]]


def measure_parts(inputs: Inputs, mode: Sampled, repeats: int, meter: Meter) -> dict[str, dict[str, float]]:
    """Milliseconds by part, and what the lists look like."""
    values = inputs.detached()
    problem = LocalProblem(values.hidden, values.weight, values.target)
    loss = SampledLoss(problem, mode)
    loss.whole()
    operands = LogitOperands.prepare(problem)
    works: dict[str, Callable[[], object]] = {
        "forward": captured(lambda: forward.partials(operands, stats=False, workspace=None)),
        "anchor": captured(loss.make_plan),
        "select": captured(loss.select),
        "all but the anchor": captured(loss.whole),
        **parts(loss),
    }
    times = medians_ms(works, repeats, meter)
    _, selection = loss.select()
    lists = {
        "entries a token": float(selection.kept) / problem.num_tokens,
        "thinned tokens": float((selection.found > selection.budget).sum()),
        "most entries of a row": float(torch.bincount(_kept_rows(selection), minlength=1).max()),
    }
    return {"milliseconds": times, "lists": lists}
