"""The sampled backward in plain PyTorch: the CPU path, and the oracle of the Triton kernels' decisions and weights.

The forward pass walks the logits as ``reference`` does and notes, beside the partials, which entries are kept. The
backward pass computes the hot rows densely, and every kept entry and cold target by gathering one row each of C and E.
See ``sampling`` for the statistics. Sums are fp32. (On a GPU this implementation waits for the number of entries.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import reference
from .interface import (
    GradientRequest,
    InputGradReady,
    LocalProblem,
    LogitGradient,
    Partials,
    SamplingPlan,
    WeightGradBuffer,
)
from .sampling import SharedHot, finish_logits, id_hash, inclusion, phase, thinned, token_hash, uniform_in_1_2

_ENTRIES_AT_ONCE = 4096


@dataclass(frozen=True)
class Entries:
    """Entries of G, each a token, a row of C, and the factor ``1 / Pr(kept)``; ``[K]`` each, by token, then by row."""

    tokens: Tensor
    rows: Tensor
    factor: Tensor

    @property
    def kept(self) -> Tensor:
        return torch.tensor(self.tokens.shape[0], device=self.tokens.device)


def select(problem: LocalProblem, plan: SamplingPlan, *, stats: bool) -> tuple[Partials, Entries]:
    """One pass over the shard: partials, and the entries that the backward pass will use."""
    device = problem.input.device
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    found: list[tuple[Tensor, Tensor, Tensor]] = [(nothing, nothing, torch.empty(0, device=device))]
    if problem.num_rows > 0 and problem.num_tokens > 0:
        hashes = token_hash(plan.seed, torch.arange(problem.num_tokens, device=device))
        columns = id_hash(plan.seed, torch.arange(problem.num_rows, device=device) + plan.first_id)
        excluded = torch.zeros(problem.num_rows + 1, dtype=torch.bool, device=device)
        excluded[plan.hot] = True  # -1 marks the spare one

        def note(z: Tensor, block: slice, slab: slice) -> None:
            threshold = inclusion(z, plan.anchor[block, None], plan.eps)
            kept = uniform_in_1_2(hashes[block, None], columns[slab]) < threshold
            kept &= plan.active[block, None] & ~excluded[:-1][slab]
            kept &= problem.target[block, None] != torch.arange(slab.start, slab.stop, device=device)
            token, row = kept.nonzero(as_tuple=True)
            found.append((token + block.start, row + slab.start, 1.0 / (threshold[token, row] - 1.0)))

        partials = reference.walk(problem, stats=stats, visit=note)
        tokens, rows, factor = (torch.cat(parts) for parts in zip(*found, strict=True))
        order = (tokens * problem.num_rows + rows).argsort()
        entries = _bounded(Entries(tokens[order], rows[order], factor[order]), plan, hashes)
        return partials, entries
    return reference.walk(problem, stats=stats), Entries(*found[0])


def _bounded(entries: Entries, plan: SamplingPlan, hashes: Tensor) -> Entries:
    """Thin the tokens that kept more than the budget."""
    count = torch.bincount(entries.tokens, minlength=hashes.shape[0])
    budget = count.clamp(max=plan.budget)
    first = count.cumsum(0) - count
    position = torch.arange(entries.tokens.shape[0], device=hashes.device) - first[entries.tokens]
    stays, _ = thinned(position, count[entries.tokens], budget[entries.tokens], phase(hashes, count)[entries.tokens])
    factor = entries.factor * (count / budget.clamp(min=1)).float()[entries.tokens]
    return Entries(entries.tokens[stays], entries.rows[stays], factor[stays])


def gradients(
    problem: LocalProblem,
    plan: SamplingPlan,
    entries: Entries,
    logit_grad: LogitGradient,
    request: GradientRequest,
    on_input_grad: InputGradReady,
) -> Tensor | None:
    """Unbiased gradients: hot rows and targets exactly, the rest by its sample."""
    request.await_input()
    device = problem.input.device
    total = _Sums.zeros(problem, request)
    hot_grad = None
    if plan.shared is None:
        _add_hot_rows(total, problem, plan, logit_grad)
    else:
        hot_grad = _add_shared_hot_rows(total, problem, plan.shared, logit_grad)
    targets = _cold_targets(problem, plan, logit_grad)
    for tokens, rows, factor, is_target in (
        (entries.tokens, entries.rows, entries.factor, False),
        (targets, problem.target[targets], torch.ones(targets.shape, device=device), True),
    ):
        for start in range(0, tokens.shape[0], _ENTRIES_AT_ONCE):
            part = slice(start, start + _ENTRIES_AT_ONCE)
            _add_entries(total, problem, logit_grad, Entries(tokens[part], rows[part], factor[part]), is_target)
    if logit_grad.smoothing is not None and problem.smoothing_weight is not None:
        _add_smoothing(total, problem, logit_grad)
    if total.input is not None and request.input_dtype is not None:
        whole = total.input.masked_fill_(~logit_grad.active[:, None], 0.0).to(request.input_dtype)
        if hot_grad is not None:
            hot_grad = hot_grad.to(whole.dtype)
        if hot_grad is None:
            request.hand_on(whole, on_input_grad)
        elif request.hot_start is not None:
            request.hot_start(hot_grad)
            request.hand_on(whole, on_input_grad)
        else:
            whole = torch.cat([hot_grad, whole])
            hot_grad = whole[: len(hot_grad)]
            request.hand_on(whole, on_input_grad, len(hot_grad))
    if request.weight is not None and total.weight is not None:
        if hot_grad is not None:
            here = plan.hot >= 0
            total.weight[plan.hot[here]] += request.hot_sum(hot_grad)[here]
        occurring = torch.cat([entries.rows, problem.target[logit_grad.active], plan.hot])
        touched = None if logit_grad.smoothing is not None else occurring
        _store(request.weight, total.weight, touched)
    return total.bias


@dataclass(frozen=True)
class _Sums:
    input: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, problem: LocalProblem, request: GradientRequest) -> _Sums:
        def new(wanted: bool, *shape: int) -> Tensor | None:
            return torch.zeros(shape, dtype=torch.float32, device=problem.input.device) if wanted else None

        return cls(
            new(request.input_dtype is not None, *problem.input.shape),
            new(request.weight is not None, *problem.weight.shape),
            new(request.bias, problem.num_rows),
        )


def _add_hot_rows(total: _Sums, problem: LocalProblem, plan: SamplingPlan, logit_grad: LogitGradient) -> None:
    rows = plan.hot[plan.hot >= 0]
    if rows.shape[0] == 0:
        return
    place = torch.full((problem.num_rows + 1,), -1, dtype=torch.int64, device=rows.device)
    place[rows] = torch.arange(rows.shape[0], device=rows.device)
    place[-1] = -1
    hot = replace(
        problem,
        weight=problem.weight[rows],
        target=place[problem.target],
        bias=None if problem.bias is None else problem.bias[rows],
        smoothing_weight=None,
    )
    weight_grad = None if total.weight is None else WeightGradBuffer(torch.empty_like(total.weight[: len(rows)]), False)

    def add_input_grad(part: Tensor) -> None:
        if total.input is not None:
            total.input.add_(part)

    request = GradientRequest(None if total.input is None else torch.float32, weight_grad, total.bias is not None)
    bias_grad = reference.gradients(hot, replace(logit_grad, smoothing=None), request, add_input_grad)
    if total.weight is not None and weight_grad is not None:
        total.weight[rows] += weight_grad.buffer
    if total.bias is not None and bias_grad is not None:
        total.bias[rows] += bias_grad


def _add_shared_hot_rows(total: _Sums, problem: LocalProblem, hot: SharedHot, logit_grad: LogitGradient) -> Tensor:
    """This rank's tokens' part. Returns that of the hot rows' gradients, fp32 ``[H, D]``."""
    part = slice(hot.first, hot.last)
    mine = replace(
        problem,
        input=problem.input[part],
        weight=hot.weight,
        target=hot.target_place[part].long() - 1,
        smoothing_weight=None,
    )
    grad = replace(
        logit_grad,
        max=logit_grad.max[part],
        log_sum=logit_grad.log_sum[part],
        prob=logit_grad.prob[part],
        target=logit_grad.target[part],
        active=logit_grad.active[part],
        smoothing=None,
    )
    weight_grad = torch.zeros(hot.weight.shape, dtype=torch.float32, device=hot.weight.device)

    def add_input_grad(found: Tensor) -> None:
        if total.input is not None:
            total.input[part].add_(found)

    request = GradientRequest(torch.float32, WeightGradBuffer(weight_grad, False), False)
    reference.gradients(mine, grad, request, add_input_grad)
    return weight_grad


def _cold_targets(problem: LocalProblem, plan: SamplingPlan, logit_grad: LogitGradient) -> Tensor:
    """Tokens whose target is on this rank and not hot."""
    is_hot = torch.zeros(problem.num_rows + 1, dtype=torch.bool, device=plan.hot.device)
    is_hot[plan.hot] = True
    return ((problem.target >= 0) & logit_grad.active & ~is_hot[problem.target]).nonzero()[:, 0]


def _add_entries(
    total: _Sums, problem: LocalProblem, logit_grad: LogitGradient, entries: Entries, is_target: bool
) -> None:
    hidden, rows = problem.input[entries.tokens].float(), problem.weight[entries.rows].float()
    z = finish_logits(problem, (hidden * rows).sum(dim=1)[:, None], entries.rows, paired=True)[:, 0]
    of_token = entries.tokens
    p = ((z - logit_grad.max[of_token]) - logit_grad.log_sum[of_token]).exp()
    g = logit_grad.prob[of_token] * p * entries.factor
    if is_target:
        g = g - logit_grad.target[of_token]
    if problem.softcap is not None:
        g = g * (1.0 - (z / problem.softcap).square())
    g = g * problem.logit_scale
    if total.input is not None:
        total.input.index_add_(0, entries.tokens, g[:, None] * rows)
    if total.weight is not None:
        total.weight.index_add_(0, entries.rows, g[:, None] * hidden)
    if total.bias is not None:
        total.bias.index_add_(0, entries.rows, g)


def _add_smoothing(total: _Sums, problem: LocalProblem, logit_grad: LogitGradient) -> None:
    """``-smoothing_n c_v``: a product of two vectors, since without a softcap nothing else depends on both."""
    c, factor = problem.smoothing_weight, logit_grad.smoothing
    assert c is not None
    assert factor is not None
    factor = factor * -problem.logit_scale
    if total.input is not None:
        total.input.addr_(factor, c @ problem.weight.float())
    if total.weight is not None:
        hidden = torch.where(logit_grad.active[:, None], problem.input, 0.0).float()
        total.weight.addr_(c, factor @ hidden)
    if total.bias is not None:
        total.bias.add_(c * factor.sum())


def _store(destination: WeightGradBuffer, value: Tensor, touched: Tensor | None) -> None:
    """Write, or add to only those rows that occur."""
    if not destination.accumulate:
        destination.buffer.copy_(value)
    elif touched is None:
        destination.buffer.add_(value)
    else:
        rows = touched[touched >= 0].unique()
        destination.buffer[rows] += value[rows].to(destination.buffer.dtype)
