"""The Triton kernels on a real GPU, against float64.

Errors in 16 bits are held against those of PyTorch's own products in the same dtype on the same data, not against a
tolerance picked by hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from local_problem import (
    OPTION_SPECS,
    SHAPES,
    Gradients,
    LocalSpec,
    assert_partials,
    expected_gradients,
    expected_partials,
    logits,
    make,
    make_logit_gradient,
    relative_error,
    run_gradients,
)
from token_problem import RULES, compare_join, compare_token_kernels
from torch import Tensor

from cce_tp.kernels.interface import GradientRequest, LocalProblem, LogitGradient, WeightGradBuffer

pytest.importorskip("triton")

from cce_tp.kernels import hopper, matmul, tiles
from cce_tp.kernels.logits import LogitOperands
from cce_tp.kernels.triton_impl import TRITON, TritonImplementation

pytestmark = pytest.mark.gpu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAN = float("nan")
WAYS = {
    "chosen": TritonImplementation(),
    "no descriptors": TritonImplementation(allow_tma=False),
    "own products": TritonImplementation(library=False),
    "own products, no descriptors": TritonImplementation(allow_tma=False, library=False),
}


def dense_gradients(problem: LocalProblem, grad: LogitGradient) -> Gradients:
    """What PyTorch's products in the inputs' dtype make of it: rounded logits, rounded G."""
    safe = torch.where(grad.active[:, None], problem.input, 0.0)
    product = safe @ problem.weight.T
    exact = logits(replace(problem, input=safe))
    z = (product.float() + (0.0 if problem.bias is None else problem.bias)) * problem.logit_scale
    slope = torch.ones_like(z)
    if problem.softcap is not None:
        z = problem.softcap * torch.tanh(z / problem.softcap)
        slope = 1 - (z / problem.softcap).square()
    g = grad.prob[:, None] * (z - exact.logsumexp(1, keepdim=True).float()).exp()
    g.scatter_add_(1, problem.target.clamp(min=0)[:, None], -(grad.target * (problem.target >= 0))[:, None])
    if grad.smoothing is not None and problem.smoothing_weight is not None:
        g -= grad.smoothing[:, None] * problem.smoothing_weight
    g = torch.where(grad.active[:, None], g * slope * problem.logit_scale, 0.0)
    rounded = g.to(problem.input.dtype)
    return Gradients(rounded @ problem.weight, rounded.T @ safe, g.sum(0))


def check(spec: LocalSpec, implementation: TritonImplementation = TRITON) -> None:
    problem = make(spec, "cuda")
    partials = implementation.partials(problem, stats=True)
    # Tensor cores truncate between steps of 16 products, so the error grows with the length of the sum.
    assert_partials(partials, expected_partials(problem), 2e-6 * max(1, spec.hidden / 256))
    again = implementation.partials(problem, stats=True)
    assert torch.equal(partials.sum_exp, again.sum_exp)
    grad = make_logit_gradient(problem, spec, partials)
    actual, expected = run_gradients(implementation, problem, grad), expected_gradients(problem, grad)
    dense = dense_gradients(problem, grad)
    for name in ("input", "weight", "bias"):
        if spec.dtype == torch.float32:
            allowed = 1e-5
        else:  # single results round to 2**-9 or 2**-12 of themselves: a few of them may be off that far by luck
            allowed = 1.1 * relative_error(getattr(dense, name), getattr(expected, name)) + 1e-5
        error = relative_error(getattr(actual, name), getattr(expected, name))
        assert error <= allowed, f"{name}: {error:.2e}, allowed {allowed:.2e}"
    inactive = actual.input[~grad.active]
    assert torch.equal(inactive, torch.zeros_like(inactive))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("options", OPTION_SPECS.values(), ids=OPTION_SPECS)
def test_options(options: dict[str, Any], dtype: torch.dtype) -> None:
    check(LocalSpec(tokens=300, hidden=136, rows=1000, dtype=dtype, **options))


@pytest.mark.parametrize("options", OPTION_SPECS.values(), ids=OPTION_SPECS)
def test_options_in_wide_tiles(options: dict[str, Any]) -> None:
    check(LocalSpec(tokens=300, hidden=tiles.SHORT_INNER + 136, rows=1000, dtype=torch.bfloat16, **options))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 8193, 520), (3, 64, 40000), (4000, 64, 3)], ids=str)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(LocalSpec(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("hidden", [320, 2048])
def test_every_way(way: TritonImplementation, hidden: int, dtype: torch.dtype) -> None:
    check(LocalSpec(tokens=513, hidden=hidden, rows=3000, dtype=dtype), way)


@pytest.mark.skipif(not hopper.supported(torch.device("cuda")), reason="needs a Hopper GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"scale": 0.7}, {"spread": 30.0}], ids=str)
@pytest.mark.parametrize(
    "shape", [(300, 192, 9000), (129, 200, 257), (1100, 576, 2000), (200, 4096, 31), (300, 2312, 5000)], ids=str
)
def test_specialised_warps(shape: tuple[int, int, int], options: dict[str, Any], dtype: torch.dtype) -> None:
    """As right as the plain kernel, whose products they share to the last bit."""
    problem = make(LocalSpec(*shape, dtype=dtype, **options), "cuda")
    assert hopper.available(LogitOperands.prepare(problem), stats=False)
    ours = TRITON.partials(problem, stats=False)
    plain = TritonImplementation(specialise=False).partials(problem, stats=False)
    assert_partials(ours, expected_partials(problem), 2e-6 * max(1, shape[1] / 256))
    assert torch.equal(ours.max, plain.max)
    assert torch.equal(ours.target_logit, plain.target_logit)
    assert torch.equal(ours.sum_exp, TRITON.partials(problem, stats=False).sum_exp)


def test_tf32() -> None:
    """With torch's switch, fp32 products are tf32's: in the forward and in the gradient alike."""
    spec = LocalSpec(tokens=300, hidden=256, rows=1000, inactive=0.0)
    problem = make(spec, "cuda")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        partials = TRITON.partials(problem, stats=True)
        grad = make_logit_gradient(problem, spec, partials)
        actual = run_gradients(TRITON, problem, grad)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_partials(replace(partials, argmax=None), expected_partials(problem), 2e-3)
    expected = expected_gradients(problem, grad)
    for name in ("input", "weight", "bias"):
        assert relative_error(getattr(actual, name), getattr(expected, name)) < 3e-3, name


def test_the_fast_ways_are_taken() -> None:
    """Otherwise the cases above prove nothing about them."""
    problem = make(LocalSpec(tokens=64, hidden=64, rows=64, dtype=torch.bfloat16), "cuda")
    assert tiles.can_use_tma(problem.input) == (torch.cuda.get_device_capability()[0] in tiles.LARGE_SHARED_MEMORY)
    assert not tiles.can_use_tma(problem.input[:, 1:])
    assert not tiles.can_use_tma(problem.input.T)
    assert matmul.library_can(problem.input, problem.input, None)
    assert matmul.library_can(problem.input.float(), problem.input, None) == matmul.LIBRARY_WIDENS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("buffer_dtype", DTYPES.values(), ids=[f"into {name}" for name in DTYPES])
@pytest.mark.parametrize("accumulate", [False, True], ids=["write", "add"])
@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16], ids=["E fp32", "E bf16"])
def test_destinations(
    dtype: torch.dtype, buffer_dtype: torch.dtype, accumulate: bool, input_dtype: torch.dtype
) -> None:
    """Several slabs, a buffer inside a larger one, gradients of other dtypes than the inputs."""
    spec = LocalSpec(tokens=512, hidden=256, rows=3000, dtype=dtype)
    workspace = TRITON.least_workspace(spec.tokens, spec.hidden, spec.rows, dtype) + 300_000
    problem = replace(make(spec, "cuda"), workspace=workspace)
    grad = make_logit_gradient(problem, spec, TRITON.partials(problem, stats=False))
    base = torch.randn(spec.rows, spec.hidden + 8, device="cuda").to(buffer_dtype)
    before = base.clone()
    buffer = base[:, : spec.hidden]
    actual = run_gradients(TRITON, problem, grad, buffer=buffer, accumulate=accumulate, input_dtype=input_dtype)
    expected = expected_gradients(problem, grad)
    assert actual.input.dtype == input_dtype
    assert relative_error(actual.input, expected.input) < 4e-3
    right = expected.weight + accumulate * before[:, : spec.hidden].double()
    assert relative_error(buffer, right) < 4e-3
    assert torch.equal(base[:, spec.hidden :], before[:, spec.hidden :])


def requested_peak() -> int:
    """As ``max_memory_allocated``, without what the allocator adds where it does not split a cached block."""
    return torch.cuda.memory_stats()["requested_bytes.all.peak"]


def requested_now() -> int:
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_workspace_is_obeyed(dtype: torch.dtype) -> None:
    spec = LocalSpec(tokens=2048, hidden=512, rows=20000, dtype=dtype, smoothing=True)
    problem = make(spec, "cuda")
    workspace = TRITON.least_workspace(spec.tokens, spec.hidden, spec.rows, dtype)
    for extra in (0, 3 * 2**20):
        limited = replace(problem, workspace=workspace + extra)
        results = 6 * 8 * spec.tokens
        partials = None
        torch.cuda.reset_peak_memory_stats()
        before = requested_now()
        partials = TRITON.partials(limited, stats=True)
        assert requested_peak() - before <= limited.workspace + results
        grad = make_logit_gradient(problem, spec, partials)
        buffer = torch.empty_like(problem.weight)
        request = GradientRequest(dtype, WeightGradBuffer(buffer, False), True)
        torch.zeros(64, 64, device="cuda", dtype=dtype).mm(torch.zeros(64, 64, device="cuda", dtype=dtype))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = requested_now()
        results = spec.tokens * spec.hidden * dtype.itemsize + 4 * spec.rows + 1024
        TRITON.gradients(limited, grad, request, lambda _: None)
        assert requested_peak() - before <= limited.workspace + results
    with pytest.raises(ValueError, match="too small"):
        TRITON.gradients(replace(problem, workspace=2**16), grad, request, lambda _: None)


def test_frozen_weight_needs_little_memory() -> None:
    """Case B24: no buffer of the weight's size."""
    spec = LocalSpec(tokens=4096, hidden=1024, rows=131072, dtype=torch.bfloat16)
    problem = make(spec, "cuda")
    before = requested_now()
    torch.cuda.reset_peak_memory_stats()
    grad = make_logit_gradient(problem, spec, TRITON.partials(problem, stats=False))
    TRITON.gradients(problem, grad, GradientRequest(torch.bfloat16, None, False), lambda _: None)
    assert requested_peak() - before - problem.input.nbytes < 64 * 2**20


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_non_finite_rows_stay_by_themselves(dtype: torch.dtype) -> None:
    spec = LocalSpec(tokens=300, hidden=128, rows=700, dtype=dtype, inactive=0.3, smoothing=True)
    problem = make(spec, "cuda")
    clean = TRITON.partials(problem, stats=True)
    grad = make_logit_gradient(problem, spec, clean)
    right = run_gradients(TRITON, problem, grad)
    e = problem.input.clone()
    e[~grad.active] = NAN
    got = run_gradients(TRITON, replace(problem, input=e), grad)
    for name in ("input", "weight", "bias"):
        assert torch.equal(getattr(got, name), getattr(right, name)), name

    e = problem.input.clone()
    e[3, 2], e[170], e[290] = NAN, NAN, float("inf")
    dirty = TRITON.partials(replace(problem, input=e), stats=True)
    bad = torch.zeros(spec.tokens, dtype=torch.bool, device="cuda")
    bad[[3, 170, 290]] = True
    assert dirty.sum_exp[bad].isnan().all()
    for name in ("max", "sum_exp", "target_logit", "smoothing", "entropy", "argmax"):
        assert torch.equal(getattr(dirty, name)[~bad], getattr(clean, name)[~bad]), name


@pytest.mark.parametrize("exponent", [0, 16, 18, -20])
def test_fp16_range(exponent: int) -> None:
    """A loss scale neither underflows nor overflows in G; a gradient beyond fp16 is an infinity, not NaN (case B33)."""
    spec = LocalSpec(tokens=200, hidden=64, rows=500, dtype=torch.float16, upstream=2.0**exponent / 200)
    problem = make(spec, "cuda")
    grad = make_logit_gradient(problem, spec, TRITON.partials(problem, stats=False))
    actual = run_gradients(TRITON, problem, grad, input_dtype=torch.float32)
    expected = expected_gradients(problem, grad)
    assert relative_error(actual.input, expected.input) < 1e-3
    big = expected.weight.abs() > 66000
    assert not actual.weight.isnan().any()
    assert actual.weight[big].isinf().all()
    representable = (expected.weight.abs() < 65000) & (expected.weight.abs() > 1e-4)
    assert relative_error(actual.weight[representable], expected.weight[representable]) < 1e-3


def test_fp16_large_operands() -> None:
    """Case B33's: logits of 2^20."""
    e = torch.full((2, 16), 256.0, dtype=torch.float16, device="cuda")
    c = torch.zeros(32, 16, dtype=torch.float16, device="cuda")
    c[0] = 256
    problem = LocalProblem(e, c, torch.tensor([0, 1], device="cuda"))
    partials = TRITON.partials(problem, stats=False)
    assert (partials.sum_exp.log() - (partials.target_logit - partials.max)).tolist() == [0, 1048576]
    one = torch.ones(2, device="cuda")
    grad = LogitGradient(partials.max, partials.sum_exp.log(), one, one, torch.ones_like(one, dtype=torch.bool))
    actual = run_gradients(TRITON, problem, grad)
    assert (actual.input[1] == 256).all()
    assert (actual.weight[0] == 256).all()
    assert (actual.weight[1] == -256).all()


def test_low_precision_accumulation() -> None:
    """Case B26: sums that a bf16 accumulator cannot make."""

    def run(problem: LocalProblem) -> Gradients:
        partials = TRITON.partials(problem, stats=False)
        one = torch.ones(problem.num_tokens, device="cuda")
        active = torch.ones(problem.num_tokens, dtype=torch.bool, device="cuda")
        return run_gradients(TRITON, problem, LogitGradient(partials.max, partials.sum_exp.log(), one, one, active))

    def zeros(*shape: int, value: float = 0.0) -> Tensor:
        return torch.full(shape, value, dtype=torch.bfloat16, device="cuda")

    tokens = 65536
    weight = run(LocalProblem(zeros(tokens, 16, value=1.0), zeros(64, 16), torch.zeros(tokens, device="cuda").long()))
    assert (weight.weight[1:] == 1024).all()
    assert (weight.weight[0] == -64512).all()
    c = zeros(65536, 16, value=1.0)
    c[7] = 0
    row = run(LocalProblem(zeros(1, 16), c, torch.tensor([7], device="cuda")))
    assert (row.input.float() - 0.99998474).abs().max() < 4e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_confident_target_keeps_its_gradient(dtype: torch.dtype) -> None:
    """p rounds to 1 in 16 bits; its distance from 1 must not (case B27)."""
    e, c = torch.zeros(1, 16, dtype=dtype, device="cuda"), torch.zeros(2, 16, dtype=dtype, device="cuda")
    e[0, 0], c[0, 0] = 8.3125, 1.0
    problem = LocalProblem(e, c, torch.tensor([0], device="cuda"))
    partials = TRITON.partials(problem, stats=False)
    one = torch.ones(1, device="cuda")
    grad = LogitGradient(partials.max, partials.sum_exp.log(), one, one, torch.ones(1, dtype=torch.bool, device="cuda"))
    actual = run_gradients(TRITON, problem, grad)
    assert actual.weight[:, 0].tolist() == pytest.approx([-2.0396e-3, 2.0396e-3], rel=1e-2)


@pytest.mark.parametrize("value", [1000.1, 901.7, 1023.9, 777.7])
def test_confident_target_under_a_scale(value: float) -> None:
    """The gradient must see the rounded logit that the forward saw: a fused ``acc * scale - M`` is off by percents."""
    e, c = torch.zeros(1, 16, device="cuda"), torch.zeros(2, 16, device="cuda")
    e[0, 0], c[0, 0], c[1, 0] = value, 1.0, 1.0 - 83.125 / value
    problem = LocalProblem(e, c, torch.tensor([0], device="cuda"), logit_scale=0.1)
    partials = TRITON.partials(problem, stats=False)
    one = torch.ones(1, device="cuda")
    grad = LogitGradient(partials.max, partials.sum_exp.log(), one, one, one.bool())
    actual = run_gradients(TRITON, problem, grad).bias / 0.1
    p = torch.softmax(logits(problem), 1)[0]
    assert actual.tolist() == pytest.approx([-float(p[1]), float(p[1])], rel=1e-3)


def test_graph_capture_and_no_synchronisation() -> None:
    spec = LocalSpec(tokens=300, hidden=128, rows=5000, dtype=torch.bfloat16, bias=True)
    problem = make(spec, "cuda")
    grad = make_logit_gradient(problem, spec, TRITON.partials(problem, stats=True))
    right = run_gradients(TRITON, problem, grad)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            partials = TRITON.partials(problem, stats=True)
            got = run_gradients(TRITON, problem, grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for value in (partials.sum_exp, got.input, got.weight, got.bias):
        value.fill_(NAN)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(partials.sum_exp, TRITON.partials(problem, stats=True).sum_exp)
    for name in ("input", "weight", "bias"):
        assert torch.equal(getattr(got, name), getattr(right, name)), name


def test_offsets_beyond_31_bits() -> None:
    """V * D and N * V beyond 2^31, with the target and the maximum in the last rows."""
    rows, hidden, tokens = 1_100_000, 2048, 2000
    weight = torch.zeros(rows, hidden, dtype=torch.bfloat16, device="cuda")
    e = torch.zeros(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    weight[-3, -1] = 4
    e[:, -1] = 4
    target = torch.full((tokens,), rows - 3, device="cuda")
    for allow_tma in (True, False):
        implementation = TritonImplementation(allow_tma=allow_tma)
        problem = LocalProblem(e, weight, target)
        partials = implementation.partials(problem, stats=True)
        assert (partials.max == 16).all()
        assert (partials.target_logit == 16).all()
        assert (partials.argmax == rows - 3).all()
        one = torch.ones(tokens, device="cuda")
        grad = LogitGradient(partials.max, partials.sum_exp.log(), one, one, one.bool())
        buffer = torch.empty_like(weight)
        request = GradientRequest(torch.bfloat16, WeightGradBuffer(buffer, False), False)
        handed: list[Tensor] = []
        implementation.gradients(problem, grad, request, handed.append)
        p = 1 / float(partials.sum_exp[0])
        assert float(buffer[-3, -1]) == pytest.approx((p - 1) * 4 * tokens, rel=1e-2)
        assert float(handed[0][-1, -1]) == pytest.approx((p - 1) * 4, rel=1e-2)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_token_kernels(rule: dict[str, Any]) -> None:
    for num_tokens in (0, 1, 5000):
        compare_token_kernels(num_tokens, "cuda", **rule)


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(("smoothing", "stats"), [(False, False), (True, False), (True, True)])
def test_join(ranks: int, smoothing: bool, stats: bool) -> None:
    for num_tokens in (0, 1, 5000):
        compare_join(ranks, num_tokens, "cuda", smoothing=smoothing, stats=stats)


@pytest.mark.multigpu
def test_operands_on_another_device() -> None:
    spec = LocalSpec(tokens=300, hidden=128, rows=700, dtype=torch.bfloat16, bias=True)
    with torch.cuda.device(0):
        problem = make(spec, "cuda:1")
        partials = TRITON.partials(problem, stats=True)
        assert_partials(partials, expected_partials(problem), 2e-6)
        grad = make_logit_gradient(problem, spec, partials)
        actual, expected = run_gradients(TRITON, problem, grad), expected_gradients(problem, grad)
    assert relative_error(actual.input, expected.input) < 1e-2
    assert actual.input.device == torch.device("cuda:1")
