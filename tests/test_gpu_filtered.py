"""The filtered mode's Triton kernels on a real GPU: against the plain-PyTorch twin, and against exact."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from filtered_local import FilterCase, compare, run
from local_problem import LocalSpec, expected_gradients, make, relative_error
from torch import Tensor

import cce_tp
from cce_tp.kernels.interface import GradientRequest, WeightGradBuffer

pytest.importorskip("triton")

from cce_tp.kernels import filtered

pytestmark = pytest.mark.gpu

# G is rounded to the inputs' dtype, to 2^-9 or 2^-12 of each entry at most; results here are fp32.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-3, torch.float16: 2.5e-4}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "scale, softcap": {"scale": 0.7, "softcap": 6.0, "bias": True},
    "smoothing": {"smoothing": True, "scale": 0.8, "bias": True},
    "strided": {"strided": True},
    "all inactive": {"inactive": 1.1},
    "off shard": {"off_shard": 1.1},
    "loss scale": {"upstream": 65536.0},
}
MEDIUM = {"tokens": 700, "rows": 3000, "spread": 3.0, "off_shard": 0.8}


def case_of(spec: LocalSpec, **filter: Any) -> FilterCase:
    return FilterCase.make(spec, "cuda", **{"rows": 128, "cols": 128, "eps": 2.0**-7, **filter})


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("order", ["natural", "mean_logit", "count", "tensor"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any], order: str, dtype: torch.dtype) -> None:
    spec = LocalSpec(**{**MEDIUM, "hidden": 136, "dtype": dtype, **options})
    kept = compare(case_of(spec, order=order), TOLERANCES[dtype])
    assert kept < 0.99 or order not in ("natural", "count")  # which are sure to set small logits apart


@pytest.mark.parametrize("order", ["natural", "count"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_in_wide_blocks(options: dict[str, Any], order: str) -> None:
    spec = LocalSpec(**{**MEDIUM, "hidden": 1160, "dtype": torch.bfloat16, **options})
    compare(case_of(spec, order=order), TOLERANCES[torch.bfloat16])


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("order", ["natural", "count"])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (37, 83, 131), (130, 7, 33), (300, 8193, 520), (64, 2304, 900), (129, 1200, 257)], ids=str
)
def test_shapes(shape: tuple[int, int, int], order: str, dtype: torch.dtype) -> None:
    # Tensor cores truncate between steps of 16 products, so the error of a logit grows with the length of the sum.
    # Few entries do not average their roundings out.
    few = 2.0 if shape[0] * shape[1] < 4096 else 1.0
    tolerance = TOLERANCES[dtype] * max(few, shape[1] / 512 if dtype != torch.float32 else 1.0)
    compare(case_of(LocalSpec(*shape, dtype=dtype), order=order), tolerance)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("hidden", [320, 2048])
@pytest.mark.parametrize("ways", [{}, {"allow_tma": False}, {"workspace": 1}, {"workspace": 2**22}], ids=str)
def test_every_way(ways: dict[str, Any], hidden: int, dtype: torch.dtype) -> None:
    spec = LocalSpec(tokens=513, hidden=hidden, rows=3000, dtype=dtype, spread=3.0)
    tolerance = TOLERANCES[dtype] * max(1, hidden // 512)
    for order in ("natural", "count"):
        compare(case_of(spec, order=order), tolerance, **ways)


@pytest.mark.parametrize("flags", [{"weight": False}, {"input": False}], ids=str)
@pytest.mark.parametrize("order", ["natural", "count"])
def test_one_gradient_filtered(order: str, flags: dict[str, Any]) -> None:
    spec = LocalSpec(**MEDIUM, hidden=1160, dtype=torch.bfloat16, bias=True)
    case = case_of(spec, order=order, **flags)
    compare(case, TOLERANCES[torch.bfloat16])
    ours, exact = run(filtered, case), expected_gradients(case.problem, case.logit_grad)
    for name in ("weight", "bias") if flags.get("input", True) else ("input",):
        assert relative_error(getattr(ours, name), getattr(exact, name)) < 4e-3


@pytest.mark.parametrize("order", ["natural", "count"])
def test_a_tiny_eps_is_exact(order: str) -> None:
    spec = LocalSpec(**MEDIUM, hidden=320, inactive=0.1)
    case = case_of(spec, order=order, eps=1e-30)
    ours, exact = run(filtered, case), expected_gradients(case.problem, case.logit_grad)
    for name in ("input", "weight", "bias"):
        assert relative_error(getattr(ours, name), getattr(exact, name)) < 1e-5, name


@pytest.mark.parametrize("order", ["natural", "count"])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_accumulate(buffer_dtype: torch.dtype, order: str) -> None:
    """In place; rows of no live tile are not even read."""
    spec = LocalSpec(**{**MEDIUM, "off_shard": 1.1}, hidden=136, dtype=torch.bfloat16)
    case = case_of(spec, order=order, eps=0.4)
    alone = run(filtered, case).weight
    occurs = alone.abs().sum(1) > 0
    before = torch.randn(alone.shape, device="cuda").to(buffer_dtype)
    buffer = before.clone()
    handed: list[Tensor] = []
    request = GradientRequest(torch.bfloat16, WeightGradBuffer(buffer, True), False)
    filtered.filtered_gradients(case.problem, case.plan, case.tiles(filtered), case.logit_grad, request, handed.append)
    assert torch.equal(buffer[~occurs], before[~occurs])
    assert relative_error(buffer[occurs], before[occurs].double() + alone[occurs].double()) < 4e-3
    assert 0 < int(occurs.sum()) < spec.rows


def test_inactive_rows_may_hold_anything() -> None:
    spec = LocalSpec(**MEDIUM, hidden=136, dtype=torch.bfloat16, inactive=0.3, smoothing=True)
    case = case_of(spec, order="count")
    clean = run(filtered, case)
    e = case.problem.input.clone()
    e[~case.logit_grad.active] = float("nan")
    got = run(filtered, replace(case, problem=replace(case.problem, input=e)))
    for name in ("input", "weight", "bias"):
        assert torch.equal(getattr(got, name), getattr(clean, name)), name


@pytest.mark.parametrize("order", ["natural", "mean_logit", "count"])
def test_the_same_bits_twice(order: str) -> None:
    spec = LocalSpec(tokens=4000, hidden=1160, rows=9000, dtype=torch.bfloat16, spread=3.0)
    case = case_of(spec, order=order)
    first = run(filtered, case, workspace=2**24)
    for _ in range(3):
        again = run(filtered, case, workspace=2**24)
        for name in ("input", "weight", "bias"):
            assert torch.equal(getattr(first, name), getattr(again, name)), name


def public_problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A softmax that decays along the vocabulary."""
    problem = make(LocalSpec(tokens=1000, hidden=256, rows=6000, spread=2.5, dtype=torch.bfloat16), "cuda")
    bias = -torch.arange(6000, device="cuda") * (16.0 / 6000)
    target = torch.where(problem.target < 0, -100, problem.target % 700)
    return problem.input, problem.weight, target, bias


def call(mode: Any, implementation: str = "auto", **options: Any) -> tuple[Tensor, Tensor, Tensor, cce_tp.LossStats]:
    e, c, target, bias = public_problem()
    leaves = [x.requires_grad_() for x in (e, c, bias)]
    loss, stats = cce_tp.linear_cross_entropy(
        leaves[0], leaves[1], target, linear_bias=leaves[2], backward=mode, implementation=implementation,
        return_stats=True, **options,
    )  # fmt: skip
    loss.backward()
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads)
    return grads[0], grads[1], grads[2], stats  # type: ignore[return-value]


@pytest.mark.parametrize("order", ["natural", "mean_logit", "count"])
def test_through_the_public_function(order: str) -> None:
    mode = cce_tp.Filtered(eps=2.0**-8, order=order)
    ours, twin, exact = call(mode), call(mode, "torch"), call("exact")
    assert float(ours[3].keep_rate) == pytest.approx(float(twin[3].keep_rate), abs=0.01)
    assert float(ours[3].keep_rate) < 0.8
    torch.testing.assert_close(ours[3].lse, exact[3].lse, rtol=1e-6, atol=1e-5)
    for index in range(3):
        assert relative_error(ours[index], twin[index]) < 6e-3
        assert relative_error(ours[index], exact[index]) > 5e-4  # something is left out


@pytest.mark.parametrize("order", ["natural", "mean_logit", "count"])
def test_graph_capture_and_no_synchronisation(order: str) -> None:
    """A replay decides by what is there by then."""
    e, c, target, bias = public_problem()
    leaves = [x.requires_grad_() for x in (e, c, bias)]
    mode = cce_tp.Filtered(eps=2.0**-8, order=order)

    def step() -> Tensor:
        for leaf in leaves:
            leaf.grad = None
        loss = cce_tp.linear_cross_entropy(leaves[0], leaves[1], target, linear_bias=leaves[2], backward=mode)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    captured = [leaf.grad for leaf in leaves]
    with torch.no_grad():
        e.copy_(e.flip(0) * 1.5)
        bias.copy_(bias.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    replayed = [grad.clone() for grad in captured if grad is not None]
    step()
    for ours, right in zip(replayed, leaves, strict=True):
        assert right.grad is not None
        assert torch.equal(ours, right.grad)


@pytest.mark.parametrize("order", ["natural", "count"])
def test_offsets_beyond_31_bits(order: str) -> None:
    """N * V and V * D beyond 2^31, with the mass in the last tokens and rows."""
    tokens, rows, hidden = 9000, 300_000, 8192
    gen = torch.Generator("cuda").manual_seed(0)
    e = torch.randn(tokens, hidden, generator=gen, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.zeros(rows, hidden, device="cuda", dtype=torch.bfloat16)
    # Every token's own row, among the last, and 500 that all tokens share.
    own = rows - 1 - torch.arange(tokens, device="cuda") % 2000
    weight[rows - 2000 :] = 0.05 * e.detach()[:2000].flip(0) / 16
    weight[rows - 3000 : rows - 2500] = 0.2 * torch.randn(500, hidden, generator=gen, device="cuda").bfloat16()
    weight.requires_grad_()
    grads = []
    for mode in ("exact", cce_tp.Filtered(eps=2.0**-14, order=order)):
        loss = cce_tp.linear_cross_entropy(e, weight, own, backward=mode)
        grads.append(torch.autograd.grad(loss, (e, weight)))
    for exact, ours in zip(*grads, strict=True):
        assert relative_error(ours[-1500:], exact[-1500:]) < 2e-2
        assert float(exact[-1500:].norm()) > 0


def test_memory() -> None:
    """At a large shape no more than exact may take."""
    tokens, rows, hidden = 8192, 256_000, 2304
    gen = torch.Generator("cuda").manual_seed(0)
    e = torch.randn(tokens, hidden, generator=gen, device="cuda", dtype=torch.bfloat16).requires_grad_()
    c = torch.randn(rows, hidden, generator=gen, device="cuda", dtype=torch.bfloat16).mul_(0.06).requires_grad_()
    target = torch.randint(rows, (tokens,), generator=gen, device="cuda")
    for order in ("natural", "mean_logit", "count"):
        e.grad = c.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        cce_tp.linear_cross_entropy(e, c, target, backward=cce_tp.Filtered(order=order)).backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before - 2 * (e.numel() + c.numel())
        assert peak <= 224 * 2**20, f"order {order}: {peak / 2**20:.0f} MiB"
