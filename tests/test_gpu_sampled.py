"""The sampled mode's Triton kernels on a real GPU: against the plain-PyTorch twin, and what statistics demand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from local_problem import OPTION_SPECS, Gradients, LocalSpec, expected_gradients, logits, make, relative_error
from sampled_problem import (
    SampledCase,
    assert_same_entries,
    at,
    compare,
    compare_anchor,
    compare_anchor_rows,
    compare_confident,
    compare_shared,
    compare_transposed,
    draw_targets,
    kept_entries,
    random_lists,
    run_sampled,
)
from torch import Tensor

from cce_tp.kernels.interface import GradientRequest, TokenPiece, WeightGradBuffer

pytest.importorskip("triton")

from cce_tp.kernels import anchor, column_sums, hopper, sampled, sampling, select_entries, transpose
from cce_tp.kernels.logits import LogitOperands

pytestmark = pytest.mark.gpu

# Sampled entries are fp32 sums of exact products in any dtype. G over the hot rows is rounded to the inputs' dtype, to
# 2^-9 or 2^-12 of each entry at most.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WAYS: dict[str, dict[str, Any]] = {
    "chosen": {},
    "warps alike": {"specialise": False},
    "no descriptors": {"allow_tma": False},
    "own products": {"library": False},
    "own products, no descriptors": {"allow_tma": False, "library": False},
}
OPTIONS = {name: options for name, options in OPTION_SPECS.items() if name != "everything"} | {
    "everything": {"bias": True, "scale": 0.7, "softcap": 2.0, "strided": True},
    "everything with smoothing": {"bias": True, "scale": 0.7, "smoothing": True, "strided": True},
}


def run(case: SampledCase, **options: Any) -> Gradients:
    return run_sampled(select_entries.select, sampled.sampled_gradients, case, **options).gradients


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], dtype: torch.dtype) -> None:
    spec = LocalSpec(tokens=300, hidden=136, rows=1000, dtype=dtype, **options)
    compare(SampledCase.make(spec, "cuda", budget=60), TOLERANCES[dtype], stats=options == {})
    compare(SampledCase.make(spec, "cuda", budget=1000), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (37, 83, 131), (130, 7, 33), (200, 8193, 130), (64, 2304, 900), (3, 64, 40000)], ids=str
)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    # A single entry is rounded twice: by the hot rows' product, and once more in the sum.
    tolerance = TOLERANCES[dtype] * (2 if shape == (1, 1, 1) else 1)
    compare(SampledCase.make(LocalSpec(*shape, dtype=dtype), "cuda", budget=256), tolerance)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way(way: dict[str, Any], dtype: torch.dtype) -> None:
    case = SampledCase.make(LocalSpec(tokens=513, hidden=320, rows=3000, dtype=dtype), "cuda")
    compare(case, TOLERANCES[dtype], **way)


@pytest.mark.skipif(not hopper.supported(torch.device("cuda")), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.6])
@pytest.mark.parametrize("shape", [(300, 1536, 9000), (129, 2312, 257), (200, 4096, 31), (1100, 1544, 2000)], ids=str)
def test_specialised_warps(shape: tuple[int, int, int], scale: float, dtype: torch.dtype) -> None:
    """Against the twin, and the same decisions as the plain kernel's; with anchors far off, and with rows of NaN."""
    case = SampledCase.make(LocalSpec(*shape, dtype=dtype, scale=scale), "cuda", budget=2000, eps=2.0**-6)
    operands = LogitOperands.prepare(case.problem)
    assert hopper.available_to_select(operands, stats=False)
    far = torch.tensor([0.0, 20.0, -20.0, 90.0, -90.0, 200.0, -200.0, float("nan")], device="cuda")
    shifts = far[torch.arange(shape[0], device="cuda") % 8] * (torch.arange(shape[0], device="cuda") > 130)
    case = replace(case, plan=replace(case.plan, anchor=case.plan.anchor + shifts))
    compare(case, TOLERANCES[dtype])
    _, ours = select_entries.select(case.problem, case.plan, stats=False)
    _, plain = select_entries.select(case.problem, case.plan, stats=False, specialise=False)
    assert_same_entries(ours, plain)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_anchors_of_every_kind(dtype: torch.dtype) -> None:
    case = SampledCase.make(LocalSpec(tokens=300, hidden=128, rows=1500, dtype=dtype), "cuda", budget=50)
    shifts = torch.tensor([0.0, 20.0, -20.0, 90.0, -90.0, 200.0, -200.0, float("nan")], device="cuda")
    for shift in (shifts[torch.arange(300, device="cuda") % 8], *shifts):
        compare(replace(case, plan=replace(case.plan, anchor=case.plan.anchor + shift)), TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_anchor_sums(options: dict[str, Any], dtype: torch.dtype) -> None:
    problem = make(LocalSpec(tokens=300, hidden=136, rows=3000, dtype=dtype, **options), "cuda")
    compare_anchor(problem)
    compare_anchor(problem, allow_tma=False)


@pytest.mark.parametrize("ids", [(50, 0, 50, 50), (70000, 20000, 30000, 30010), (256000, 0, 256000, 256000)], ids=str)
@pytest.mark.parametrize("reference_rows", [1, 512])
@pytest.mark.parametrize("tokens", [3, 20000])
def test_anchor_rows(tokens: int, reference_rows: int, ids: tuple[int, int, int, int]) -> None:
    target, active = draw_targets(tokens, ids[0], "cuda")
    compare_anchor_rows(target, active, sampling.RowIds(*ids), reference_rows)
    compare_anchor_rows(torch.full_like(target, 7), active, sampling.RowIds(*ids), reference_rows)


@pytest.mark.parametrize(("tokens", "num_rows", "budget"), [(1000, 700, 40), (5003, 333, 60)])
def test_transposition(tokens: int, num_rows: int, budget: int) -> None:
    """Columns that are never long, and such as are ordered by bits."""
    longest = compare_transposed(tokens, num_rows, budget, "cuda")
    assert (longest >= transpose.long_column(tokens)) == (tokens > 1000)


def test_transposition_beside_other_work() -> None:
    """On a stream of its own: what it reads was written just before, and what it writes is read just afterwards."""
    selection, target, active = random_lists(5003, 333, 60, "cuda")
    right = transpose.Transposition(selection, target, active, 333, None).columns()
    number, busy = int(right.starts[-1]), torch.randn(2048, 2048, device="cuda")
    for _ in range(5):
        torch.cuda._sleep(2_000_000)
        copied = replace(selection, rows=selection.rows.clone(), found=selection.found.clone())
        steps = transpose.Transposition(copied, target.clone(), active.clone(), 333, None)
        steps.place(aside=True)
        busy @ busy
        found = steps.columns()
        assert torch.equal(found.starts, right.starts)
        assert torch.equal(found.slots[:number], right.slots[:number])


def test_long_columns() -> None:
    """Rows of C that many tokens keep, whose sums have programs of their own; and such as few keep."""
    case = SampledCase.make(
        LocalSpec(tokens=3000, hidden=520, rows=300, dtype=torch.bfloat16), "cuda", hot=[3], budget=300
    )
    bias = torch.linspace(-3.0, 5.0, 300, device="cuda").bfloat16()
    case = replace(case, problem=replace(case.problem, bias=bias))
    lengths = torch.zeros(300, dtype=torch.int64)
    for kept in kept_entries(case):
        lengths[kept] += 1
    assert (lengths >= column_sums.LONG).any()
    assert ((lengths > 0) & (lengths < column_sums.LONG)).any()
    compare(case, TOLERANCES[torch.bfloat16])


def test_anchor_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tokens: the same bits."""
    problem = make(LocalSpec(tokens=1000, hidden=136, rows=3000, dtype=torch.bfloat16, bias=True), "cuda")
    active = torch.ones_like(problem.target, dtype=torch.bool)
    rows = anchor.anchor_rows(problem.target, active, sampling.RowIds.whole(3000), 300)
    whole = anchor.anchor_sums(problem, rows)
    monkeypatch.setattr(anchor, "PRODUCT_BYTES", 1)
    assert torch.equal(anchor.anchor_sums(problem, rows), whole)


def statistics_case(**options: Any) -> SampledCase:
    """fp32, so that rounding is no bias; no inactive tokens, for the closed form's sake."""
    spec = LocalSpec(tokens=500, hidden=64, rows=700, inactive=0.0, spread=1.5, **options)
    return SampledCase.make(spec, "cuda", eps=2.0**-5, budget=10**6)


SAMPLES = 256


def samples(case: SampledCase) -> tuple[Gradients, Gradients]:
    """Mean and total empirical variance (in ``[]``) over seeds, in float64."""
    sums: list[Tensor] = []
    squares: list[Tensor] = []
    for seed in range(SAMPLES):
        got = run(at(case, 7919 * seed + 1))
        values = [got.input.double(), got.weight.double(), got.bias.double()]
        sums = [a + b for a, b in zip(sums, values, strict=True)] if sums else values
        squares = [a + b.square() for a, b in zip(squares, values, strict=True)] if squares else [
            value.square() for value in values
        ]  # fmt: skip
    means = [value / SAMPLES for value in sums]
    variances = [
        (square / SAMPLES - mean.square()).sum() * SAMPLES / (SAMPLES - 1)
        for square, mean in zip(squares, means, strict=True)
    ]
    return Gradients(*means), Gradients(*variances)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "bias": True}, {"smoothing": True, "scale": 0.8}], ids=str)
def test_unbiased_with_the_closed_form_s_variance(options: dict[str, Any]) -> None:
    case = statistics_case(**options)
    problem, grad = case.problem, case.logit_grad
    mean, _ = samples(case)
    right = expected_gradients(problem, grad)
    z = logits(problem)
    p = (z - z.logsumexp(1, keepdim=True)).exp()
    odds = ((z - case.plan.anchor[:, None].double()).exp() / case.plan.eps).clamp(max=1.0)
    variance = (grad.prob.double()[:, None] * p).square() * (1 / odds - 1) * problem.logit_scale**2
    if problem.softcap is not None:
        variance *= (1 - (z / problem.softcap).square()).square()
    variance[:, case.plan.hot[case.plan.hot >= 0]] = 0
    known = (problem.target >= 0).nonzero()[:, 0]
    variance[known, problem.target[known]] = 0
    totals = {
        "input": (variance @ problem.weight.double().square().sum(1)).sum(),
        "weight": (variance.T @ problem.input.double().square().sum(1)).sum(),
        "bias": variance.sum(),
    }
    for name, total in totals.items():
        distance = (getattr(mean, name) - getattr(right, name)).square().sum()
        assert 0.8 < float(distance * SAMPLES / total) < 1.25, name

    odds[:, case.plan.hot[case.plan.hot >= 0]] = 0
    odds[known, problem.target[known]] = 0
    kept = sum(int(select_entries.select(problem, at(case, s).plan, stats=False)[1].kept) for s in range(16))
    spread = float((odds * (1 - odds)).sum() * 16) ** 0.5
    assert abs(kept - 16 * float(odds.sum())) < 4 * spread


@pytest.mark.parametrize("change", ["budget", "anchor too low", "anchor too high"])
def test_unbiased_whatever_bounds_the_lists(change: str) -> None:
    case = statistics_case()
    if change == "budget":
        case = replace(case, plan=replace(case.plan, budget=8))
    else:
        shift = {"anchor too low": -1.5, "anchor too high": 1.5}[change]
        case = replace(case, plan=replace(case.plan, anchor=case.plan.anchor + shift))
    mean, variance = samples(case)
    right = expected_gradients(case.problem, case.logit_grad)
    for name in ("input", "weight", "bias"):
        distance = (getattr(mean, name) - getattr(right, name)).square().sum()
        assert 0.8 < float(distance * SAMPLES / getattr(variance, name)) < 1.25, name


@pytest.mark.parametrize(("sent", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 1.5e-2)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("hidden", "cuts"), [(264, [0, 900]), (2304, [0, 0, 1500]), (9000, [0, 64])], ids=str)
def test_hot_rows_shared_out(hidden: int, cuts: list[int], sent: torch.dtype, tolerance: float) -> None:
    """Rows in registers and longer ones, and a rank without rows; what is sent is rounded."""
    spec = LocalSpec(tokens=700, hidden=hidden, rows=2000, dtype=torch.bfloat16, inactive=0.1)
    compare_shared(spec, cuts, tolerance, "cuda", sent=sent)
    compare_shared(spec, cuts, max(tolerance, 5e-3), "cuda", sent=sent, keep=True)
    size = len(cuts)
    spec, own = replace(spec, tokens=240 * size), (TokenPiece(0, 100, size, 240), TokenPiece(100, 140, size, 240))
    compare_shared(spec, cuts, max(tolerance, 5e-3), "cuda", pieces=own, sent=sent, keep=True, apart=True)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-3)], ids=["fp32", "bf16"])
def test_confident_hot_targets(dtype: torch.dtype, tolerance: float) -> None:
    compare_confident(dtype, tolerance, "cuda")


def test_the_same_bits_twice() -> None:
    """Long columns too, whose entries arrive in any order."""
    case = SampledCase.make(LocalSpec(tokens=4000, hidden=136, rows=3000, dtype=torch.bfloat16), "cuda", budget=100)
    first = run(case)
    for _ in range(3):
        again = run(case)
        for name in ("input", "weight", "bias"):
            assert torch.equal(getattr(first, name), getattr(again, name)), name
    assert not torch.equal(first.weight, run(at(case, 1)).weight)


def test_graph_capture_and_no_synchronisation() -> None:
    """A replay takes the seed that is there by then."""
    spec = LocalSpec(tokens=300, hidden=128, rows=5000, dtype=torch.bfloat16, bias=True, smoothing=True)
    case = SampledCase.make(spec, "cuda", budget=100)
    run(case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = run(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in (5, 6):
        case.plan.seed.fill_(seed)
        graph.replay()
        torch.cuda.synchronize()
        right = run(at(case, seed))
        for name in ("input", "weight", "bias"):
            assert torch.equal(getattr(got, name), getattr(right, name)), name


@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accumulate_touches_only_rows_that_occur(buffer_dtype: torch.dtype) -> None:
    spec = LocalSpec(tokens=200, hidden=136, rows=5000, dtype=torch.bfloat16)
    case = SampledCase.make(spec, "cuda", budget=20, hot=[7, -1])
    alone = run(case).weight
    occurs = alone.abs().sum(1) > 0
    before = torch.randn(alone.shape, device="cuda").to(buffer_dtype)
    before[~occurs] = float("nan")
    buffer = before.clone()
    run(case, buffer=buffer)
    assert buffer[~occurs].isnan().all()
    assert relative_error(buffer[occurs], before[occurs].double() + alone[occurs].double()) < 4e-3
    assert 0 < int(occurs.sum()) < spec.rows


def test_offsets_beyond_31_bits() -> None:
    """V * D beyond 2^31, with the target and the likely entry in the last rows."""
    rows, hidden, tokens = 1_100_000, 2048, 500
    spec = LocalSpec(tokens=tokens, hidden=hidden, rows=1)
    small = SampledCase.make(spec, "cuda", hot=[])
    weight = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    e = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    weight[-3, -1] = weight[-5, -1] = 4
    e[:, -1] = 4
    problem = replace(small.problem, input=e, weight=weight, target=torch.full((tokens,), rows - 3, device="cuda"))
    nowhere_hot = torch.zeros(rows, dtype=torch.int32, device="cuda")
    lse = 2 * torch.tensor(16.0).exp().double() + (rows - 2)
    one = torch.ones(tokens, device="cuda")
    grad = replace(small.logit_grad, max=16 * one, log_sum=(lse.log() - 16).float() * one, prob=one, target=one)
    grad = replace(grad, active=one.bool())
    plan = replace(small.plan, anchor=float(lse.log()) * one, active=one.bool(), budget=16, first_id=0)
    plan = replace(plan, hot_place=nowhere_hot)
    p = float(torch.tensor(16.0).exp().double() / lse)
    for allow_tma in (True, False):
        buffer = torch.empty_like(weight)
        handed: list[Tensor] = []
        partials, selection = select_entries.select(problem, plan, stats=False, allow_tma=allow_tma)
        assert torch.allclose(partials.max + partials.sum_exp.log(), float(lse.log()) * one, atol=1e-4)
        assert (partials.target_logit == 16).all()
        request = GradientRequest(torch.bfloat16, WeightGradBuffer(buffer, False), False)
        sampled.sampled_gradients(problem, plan, selection, grad, request, handed.append, allow_tma=allow_tma)
        assert float(buffer[-3, -1]) == pytest.approx((p - 1) * 4 * tokens, rel=1e-2)
        assert float(buffer[-5, -1]) == pytest.approx(p * 4 * tokens, rel=1e-2)
        assert float(handed[0][-1, -1]) == pytest.approx((2 * p - 1) * 4, rel=2e-2, abs=1e-3)
