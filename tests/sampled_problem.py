"""Sampled local problems, and the comparison of two implementations of them: same entries, same gradients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from local_problem import Gradients, LocalSpec, late_input, logits, make, make_logit_gradient, relative_error
from torch import Tensor

from cce_tp.kernels import anchor, sampled_reference, sampling, select_entries, transpose
from cce_tp.kernels.interface import (
    GradientRequest,
    LocalProblem,
    LogitGradient,
    Partials,
    SamplingPlan,
    TokenPiece,
    WeightGradBuffer,
)
from cce_tp.kernels.select_entries import Selection


@dataclass(frozen=True)
class SampledCase:
    """A problem, what its sampling depends on, and the upstream gradient."""

    problem: LocalProblem
    plan: SamplingPlan
    logit_grad: LogitGradient

    @classmethod
    def make(
        cls,
        spec: LocalSpec,
        device: str = "cpu",
        *,
        eps: float = 2.0**-4,
        budget: int = 12,
        seed: int = 12345678901234,
        hot: list[int] | None = None,
        anchor_error: float = 0.5,
    ) -> SampledCase:
        """The anchor misses the LSE by about ``anchor_error``, by default too low and too high as it comes."""
        problem = make(spec, device)
        lse, gen = logits(problem).logsumexp(1), torch.Generator().manual_seed(spec.seed + 2)
        zeros = torch.zeros(spec.tokens, device=device)
        partials = Partials(lse.float(), (lse - lse.float().double()).exp().float(), zeros)
        logit_grad = make_logit_gradient(problem, spec, partials)
        if hot is None:
            hot = [*sorted({3, 60, spec.rows - 1} & set(range(spec.rows))), -1]
        plan = SamplingPlan(
            eps=eps,
            budget=budget,
            seed=torch.tensor([seed], device=device),
            anchor=lse.float() + anchor_error * torch.randn(spec.tokens, generator=gen).to(device),
            active=logit_grad.active,
            hot=torch.tensor(hot, dtype=torch.int64, device=device),
            hot_place=places(hot, spec.rows, device),
            first_id=77,
        )
        return cls(problem, plan, logit_grad)


def places(hot: list[int], num_rows: int, device: str = "cpu") -> Tensor:
    """``SamplingPlan.hot_place``."""
    place = torch.zeros(num_rows, dtype=torch.int32)
    for number, row in enumerate(hot, start=1):
        if row >= 0:
            place[row] = number
    return place.to(device)


@dataclass(frozen=True)
class Ran:
    partials: Partials
    selection: Any
    gradients: Gradients


def run_sampled(
    select: Callable[..., tuple[Partials, Any]],
    backward: Callable[..., Tensor | None],
    case: SampledCase,
    *,
    stats: bool = False,
    buffer: Tensor | None = None,
    input_dtype: torch.dtype = torch.float32,
    pieces: tuple[TokenPiece, ...] = (),
) -> Ran:
    """Forward and backward; a buffer is accumulated into, without one the result is written over NaN.

    Pieces of the input's gradient are put back into the tokens' order.
    """
    partials, selection = select(case.problem, case.plan, stats=stats)
    accumulate = buffer is not None
    if buffer is None:
        buffer = torch.full(case.problem.weight.shape, float("nan"), device=case.problem.weight.device)
    handed: list[Tensor] = []
    ready = None if accumulate else late_input(case.problem)
    request = GradientRequest(input_dtype, WeightGradBuffer(buffer, accumulate), True, pieces, ready)
    bias = backward(case.problem, case.plan, selection, case.logit_grad, request, handed.append)
    if ready is not None:
        ready()
    assert bias is not None
    assert bias.dtype == torch.float32
    return Ran(partials, selection, Gradients(in_order(handed, pieces), buffer, bias))


def in_order(handed: list[Tensor], pieces: tuple[TokenPiece, ...]) -> Tensor:
    """The input's gradient from its pieces, in the order of the tokens."""
    if not pieces:
        (whole,) = handed
        return whole
    assert [len(part) for part in handed] == [piece.size for piece in pieces]
    assert all(part.is_contiguous() for part in handed)
    rows = [n for piece in pieces for start, stop in piece.ranges() for n in range(start, stop)]
    assert sorted(rows) == list(range(len(rows)))
    return torch.cat(handed)[torch.tensor(rows, device=handed[0].device).argsort()]


def compare_shared(
    spec: LocalSpec,
    cuts: list[int],
    tolerance: float,
    device: str = "cpu",
    pieces: tuple[TokenPiece, ...] = (),
    sent: torch.dtype = torch.float32,
    keep: bool = False,
    apart: bool = False,
) -> None:
    """Ranks whose rows begin at ``cuts``, and who share the hot rows out by tokens, against one that has all rows.

    With ``keep``, the hot rows' exponentials come from the anchor's kernels. With ``apart``, a rank has its own tokens
    long before the others', and hands on the hot rows' gradients alone.
    """
    from cce_tp.kernels import sampled

    case = SampledCase.make(spec, device, budget=10**6, hot=[1, 2, *range(30, 69)] if keep else [1, 2, 40, 69])
    one = run_sampled(select_entries.select, sampled.sampled_gradients, case).gradients
    size = len(cuts)
    parts = [shared_rank(case, cuts, rank) for rank in range(size)]
    if keep:
        parts = [_with_exponentials(case, part) for part in parts]
    chosen = [select_entries.select(part.problem, part.plan, stats=False)[1] for part in parts]

    def run(rank: int, total: Tensor | None) -> tuple[list[Tensor], Tensor]:
        part, handed = parts[rank], list[Tensor]()
        buffer = torch.full_like(part.problem.weight, float("nan"))
        ready = (lambda: handed[0].clone()) if total is None else (lambda: total)
        request = GradientRequest(sent, WeightGradBuffer(buffer, False), False, pieces, None, ready)
        problem, shared = part.problem, part.plan.shared
        if apart and shared is not None:
            own = problem.input[shared.first : shared.last].clone()
            problem = replace(problem, input=problem.input.clone())
            request = replace(request, input_ready=late_input(problem), own_input=own, hot_start=handed.append)
        sampled.sampled_gradients(problem, part.plan, chosen[rank], case.logit_grad, request, handed.append)
        return handed, buffer

    first = sum(run(rank, None)[0][0].float() for rank in range(size))
    assert isinstance(first, Tensor)
    results = [run(rank, first) for rank in range(size)]
    number = len(case.plan.hot)
    if apart:
        assert all(len(part[0]) == number for part, _ in results)
        handed = [part[1:] for part, _ in results]
    else:
        handed = [[part[0][number:], *part[1:]] for part, _ in results]
    total = sum(in_order(each, pieces).float() for each in handed)
    assert isinstance(total, Tensor)
    assert relative_error(total, one.input) < tolerance
    assert relative_error(torch.cat([buffer for _, buffer in results]), one.weight) < tolerance


def shared_rank(case: SampledCase, cuts: list[int], rank: int) -> SampledCase:
    """Tokens without gradient hold NaN."""
    problem, plan, size = case.problem, case.plan, len(cuts)
    tokens = torch.where(case.logit_grad.active[:, None], problem.input, float("nan"))
    begin, end = cuts[rank], [*cuts, problem.num_rows][rank + 1]
    here = (problem.target >= begin) & (problem.target < end)
    hot = torch.where((plan.hot >= begin) & (plan.hot < end), plan.hot - begin, -1)
    shared = sampling.SharedHot(
        problem.weight[plan.hot],
        plan.hot,
        torch.where(problem.target >= 0, plan.hot_place[problem.target.clamp(min=0)], 0),
        problem.num_tokens * rank // size,
        problem.num_tokens * (rank + 1) // size,
    )
    return replace(
        case,
        problem=replace(
            problem,
            input=tokens,
            weight=problem.weight[begin:end],
            target=torch.where(here, problem.target - begin, -1),
            smoothing_weight=None if problem.smoothing_weight is None else problem.smoothing_weight[begin:end],
        ),
        plan=replace(
            plan,
            hot=hot,
            hot_place=plan.hot_place[begin:end].contiguous(),
            first_id=plan.first_id + begin,
            shared=shared,
        ),
    )


def _with_exponentials(case: SampledCase, part: SampledCase) -> SampledCase:
    """As the forward pass leaves them."""
    problem, plan, shared = part.problem, part.plan, part.plan.shared
    assert shared is not None
    kept = anchor.hot_exponentials(shared.weight, shared.last - shared.first, shared.num_hot)
    for each in (kept.values, kept.tops):
        each.fill_(float("nan"))
    no_cold = torch.zeros(1, dtype=torch.int32, device=plan.hot.device)
    rows = sampling.AnchorRows(
        plan.hot, shared.num_hot, plan.hot_place, no_cold, case.problem.num_rows, shared.ids, case.plan.hot_place
    )
    anchor.anchor_sums(problem, rows, sampling.SharedRows(shared.weight, shared.first, shared.last, exponentials=kept))
    target_logit = logits(case.problem).gather(1, case.problem.target.clamp(min=0)[:, None])[:, 0].float()
    return replace(part, plan=replace(plan, shared=replace(shared, exponentials=kept, target_logit=target_logit)))


def compare_confident(dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    """Hot targets whose p is next to 1: what kept exponentials are too coarse for, and a gradient consists of."""
    from cce_tp.kernels import sampled

    case = SampledCase.make(LocalSpec(tokens=40, hidden=64, rows=90, dtype=dtype, inactive=0.0, off_shard=0.0), device)
    problem = case.problem
    target = torch.arange(40, device=device)
    weight = problem.weight.float()
    towards = weight[:40] * (8.0 / weight[:40].square().sum(1, keepdim=True))
    problem = replace(problem, input=towards.to(dtype), target=target)
    z = logits(problem)
    lse = z.logsumexp(1)
    assert float((z.gather(1, target[:, None])[:, 0] - lse).exp().median()) > 0.9
    ones, hot = torch.ones(40, device=device), list(range(90))
    partials = Partials(lse.float(), torch.ones(40, device=device), ones)
    grad = LogitGradient(partials.max, torch.zeros(40, device=device), ones, ones, torch.ones_like(ones).bool())
    plan = replace(case.plan, hot=torch.tensor(hot, device=device), hot_place=places(hot, 90, device))
    plan = replace(plan, active=grad.active, anchor=lse.float())
    case = SampledCase(problem, plan, grad)
    part = _with_exponentials(case, shared_rank(case, [0], 0))
    chosen = select_entries.select(part.problem, part.plan, stats=False)[1]
    handed: list[Tensor] = []
    request = GradientRequest(torch.float32, None, False, (), None, None)
    sampled.sampled_gradients(part.problem, part.plan, chosen, grad, request, handed.append)
    right = (z.softmax(1) - torch.nn.functional.one_hot(target, 90)) @ problem.weight.double()
    assert relative_error(handed[0][90:], right) < tolerance


def lists(selection: Selection) -> list[list[int]]:
    rows, sizes = selection.rows.tolist(), selection.found.clamp(max=selection.budget).tolist()
    return [line[:size] for line, size in zip(rows, sizes, strict=True)]


def kept_entries(case: SampledCase) -> list[list[int]]:
    return lists(select_entries.select(case.problem, case.plan, stats=False)[1])


def assert_same_entries(actual: Selection, expected: Selection) -> None:
    assert torch.equal(actual.found, expected.found)
    assert lists(actual) == lists(expected)


def compare(case: SampledCase, tolerance: float, *, stats: bool = False, **ways: Any) -> None:
    """The kernels against the twin: partials, entries, gradients."""

    def select(problem: LocalProblem, plan: SamplingPlan, *, stats: bool) -> tuple[Partials, Selection]:
        return select_entries.select(problem, plan, stats=stats, **{k: v for k, v in ways.items() if k != "library"})

    def backward(*arguments: Any) -> Tensor | None:
        from cce_tp.kernels import sampled

        return sampled.sampled_gradients(*arguments, **{k: v for k, v in ways.items() if k != "specialise"})

    ours = run_sampled(select, backward, case, stats=stats)
    twin = run_sampled(sampled_reference.select, sampled_reference.gradients, case, stats=stats)
    compare_partials(ours.partials, twin.partials, case, stats=stats)
    tokens, rows = twin.selection.tokens.tolist(), twin.selection.rows.tolist()
    kept: list[list[int]] = [[] for _ in range(case.problem.num_tokens)]
    for token, row in zip(tokens, rows, strict=True):
        kept[token].append(row)
    assert lists(ours.selection) == kept
    assert int(ours.selection.kept) == len(tokens)
    for name in ("input", "weight", "bias"):
        error = relative_error(getattr(ours.gradients, name), getattr(twin.gradients, name))
        assert error < tolerance, f"{name}: {error:.2e}"
    inactive = ours.gradients.input[~case.logit_grad.active]
    assert torch.equal(inactive, torch.zeros_like(inactive))


def compare_partials(ours: Partials, twin: Partials, case: SampledCase, *, stats: bool) -> None:
    """The reference of a partial is free, what it stands for is not. An anchor too high costs some digits."""
    too_high = (case.plan.anchor - twin.max).nan_to_num(0.0, 0.0, 0.0).clamp(0.0, 64.0)
    size = torch.maximum(twin.max.abs().clamp(min=1.0), too_high)

    # Tensor cores add 16 products at a time, and round the sum.
    rounding = max(2e-6, case.problem.hidden_size / 16 * 2.0**-23)

    def close(a: Tensor, b: Tensor, tolerance: float = rounding) -> bool:
        return bool(((a - b).abs() <= tolerance * size * b.abs().clamp(min=1.0)).all())

    assert close(ours.max + ours.sum_exp.log(), twin.max + twin.sum_exp.log())
    assert close(ours.target_logit, twin.target_logit)
    if twin.smoothing is not None:
        assert ours.smoothing is not None
        assert close(ours.smoothing, twin.smoothing, 1e-5)
    if stats:
        assert ours.argmax is not None
        assert twin.argmax is not None
        assert torch.equal(ours.argmax, twin.argmax)
        assert ours.entropy is not None
        assert twin.entropy is not None
        assert close(ours.entropy, twin.entropy, 1e-5)


def at(case: SampledCase, seed: int) -> SampledCase:
    """The same with another seed."""
    return replace(case, plan=replace(case.plan, seed=torch.full_like(case.plan.seed, seed)))


def compare_anchor(problem: LocalProblem, **ways: Any) -> None:
    """The anchor and its sums against plain PyTorch's in float64, on a rank in the middle of the vocabulary."""
    first_id, padding, beyond = 7, 3, 11
    vocab_size = first_id + problem.num_rows - padding + beyond
    ids = sampling.RowIds(vocab_size, first_id, problem.num_rows - padding, problem.num_rows)
    target = torch.where(problem.target >= 0, problem.target + first_id, -1)
    rows = anchor.anchor_rows(target, target >= 0, ids, 4)
    ours = anchor.anchor_sums(problem, rows, **ways)
    wide = replace(
        problem,
        input=problem.input.double(),
        weight=problem.weight.double(),
        bias=None if problem.bias is None else problem.bias.double(),
    )
    right = sampling.anchor_sums(wide, rows)
    largest = float(logits(problem).nan_to_num(0.0, 0.0, 0.0).abs().max())
    for row in range(5):  # an exponential is off by as much as its logit is
        assert relative_error(ours[row], right[row]) < 3e-7 * max(10.0, largest), f"sum {row}"
    r, twin = anchor.anchor(ours, rows), sampling.anchor(ours, rows)
    assert torch.allclose(r, twin, rtol=2e-7, atol=1e-6, equal_nan=True)


def draw_targets(tokens: int, vocab_size: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Some ids far more frequent than others, some unknown; and which tokens are active."""
    gen = torch.Generator().manual_seed(tokens + vocab_size)
    target = (torch.rand(tokens, generator=gen).pow(4) * (vocab_size + 1)).long() * 7919 % (vocab_size + 2) - 1
    return target.to(device), (torch.rand(tokens, generator=gen) > 0.1).to(device)


def compare_anchor_rows(target: Tensor, active: Tensor, ids: sampling.RowIds, reference_rows: int) -> None:
    """The very rows that plain PyTorch chooses."""
    ours = anchor.anchor_rows(target, active, ids, reference_rows)
    twin = sampling.anchor_rows(target, active, ids, reference_rows)
    assert (ours.num_hot, ours.vocab_size) == (twin.num_hot, twin.vocab_size)
    for name in ("rows", "place", "num_cold"):
        got, right = getattr(ours, name), getattr(twin, name)
        assert got.dtype == right.dtype
        assert torch.equal(got, right), name


def random_lists(tokens: int, num_rows: int, budget: int, device: str = "cpu") -> tuple[Selection, Tensor, Tensor]:
    """Lists in which some rows are everywhere, others with half or few of the tokens, and most nowhere.

    Some lists are full, and found more than they hold; some tokens have no gradient, and most a target that is cold.

    Returns:
        Lists, targets, and which tokens are active.
    """
    generator = torch.Generator(device).manual_seed(tokens)
    likely = torch.rand(num_rows, device=device, generator=generator) ** 8
    likely[::7] = 1.0
    kept = torch.rand(tokens, num_rows, device=device, generator=generator) < likely
    cold = torch.rand(num_rows, device=device, generator=generator) < 0.9
    target = torch.randint(-1, num_rows, (tokens,), device=device, generator=generator)
    kept &= cold & (torch.arange(num_rows, device=device) != target[:, None])
    place = kept.cumsum(1) - 1
    kept &= place < budget
    rows = torch.full((tokens, budget), -7, dtype=torch.int32, device=device)
    token, row = kept.nonzero(as_tuple=True)
    rows[token, place[token, row]] = row.int()
    found = kept.sum(1, dtype=torch.int32)
    found += (found == budget).int() * 3
    bits = torch.zeros(-(-num_rows // 32) * 32, dtype=torch.int64, device=device)
    bits[:num_rows] = cold
    words = (bits.view(-1, 32) << torch.arange(32, device=device)).sum(1).int()
    active = torch.rand(tokens, device=device, generator=generator) < 0.9
    return Selection(rows, found, words), target, active


class ShuffledArrivals:
    """``transpose``'s first kernel, its numbers dealt anew: from one program after another they would be in order."""

    def __init__(self, columns: list[list[int]]) -> None:
        self._columns = columns
        self._kernel = transpose._arrive_kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self._kernel[grid](*arguments, **options)
            arrivals = arguments[6]
            for slots in self._columns:
                assert sorted(arrivals[slots].tolist()) == list(range(len(slots)))
                arrivals[slots] = torch.randperm(len(slots)).to(arrivals)

        return launch


def compare_transposed(tokens: int, num_rows: int, budget: int, device: str = "cpu") -> int:
    """Columns must hold their slots in ascending order, in whatever order they arrive.

    Returns:
        How many entries the longest column has.
    """
    selection, target, active = random_lists(tokens, num_rows, budget, device)
    columns: list[list[int]] = [[] for _ in range(num_rows)]
    cold = [selection.cold[v // 32].item() >> v % 32 & 1 for v in range(num_rows)]
    for n, listed in enumerate(lists(selection)):
        if active[n]:
            own = [int(target[n])] if target[n] >= 0 and cold[int(target[n])] else []
            for place, row in enumerate(listed + own):
                columns[row].append(n * (budget + 1) + place)
    lent = torch.full((tokens * (budget + 1),), -1, dtype=torch.int32, device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transpose, "_arrive_kernel", ShuffledArrivals(columns))
        found = transpose.Transposition(selection, target, active, num_rows, lent).columns()
    starts = found.starts.tolist()
    slots = found.slots.tolist()
    assert [slots[begin:end] for begin, end in itertools.pairwise(starts)] == columns
    return max(len(column) for column in columns)
