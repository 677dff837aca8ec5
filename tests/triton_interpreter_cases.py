"""The Triton kernels under Triton's interpreter, on the CPU, in fp32. Run by ``test_interpreter.py``."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from local_problem import (
    OPTION_SPECS,
    SHAPES,
    LocalSpec,
    assert_partials,
    expected_gradients,
    expected_partials,
    make,
    make_logit_gradient,
    relative_error,
    run_gradients,
)
from token_problem import RULES, compare_join, compare_token_kernels

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from cce_tp.kernels import tiles
from cce_tp.kernels.interface import GradientRequest, LocalProblem, WeightGradBuffer
from cce_tp.kernels.triton_impl import TRITON, TritonImplementation, availability

INF = float("inf")
NAN = float("nan")


def check(spec: LocalSpec, implementation: TritonImplementation = TRITON, **problem_options: Any) -> None:
    problem = replace(make(spec), **problem_options)
    partials = implementation.partials(problem, stats=True)
    assert_partials(partials, expected_partials(problem))
    grad = make_logit_gradient(problem, spec, partials)
    actual, expected = run_gradients(implementation, problem, grad), expected_gradients(problem, grad)
    for name in ("input", "weight", "bias"):
        assert relative_error(getattr(actual, name), getattr(expected, name)) < 1e-5, name
    assert torch.equal(actual.input[~grad.active], torch.zeros_like(actual.input[~grad.active]))


@pytest.mark.parametrize("options", OPTION_SPECS.values(), ids=OPTION_SPECS)
def test_options(options: dict[str, Any]) -> None:
    check(LocalSpec(**options))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int]) -> None:
    tokens, hidden, rows = shape
    check(LocalSpec(tokens, hidden, rows, bias=True, smoothing=True))


def test_library_products() -> None:
    check(LocalSpec(), TritonImplementation(library=True))


@pytest.mark.parametrize("options", [{}, OPTION_SPECS["everything"] | {"strided": False}], ids=["plain", "everything"])
def test_descriptors(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(tiles, "has_tma", lambda device: True)
    spec = LocalSpec(**options)
    check(spec)
    check(spec, workspace=12000)  # several slabs, the last one narrower


def test_several_chunks_and_slabs_change_no_bit_of_the_forward() -> None:
    spec = LocalSpec(tokens=100, smoothing=True)
    problem = make(spec)
    whole = TRITON.partials(problem, stats=True)
    small = TRITON.partials(replace(problem, workspace=4000), stats=True)
    for name in ("max", "sum_exp", "target_logit", "smoothing", "entropy", "argmax"):
        assert torch.equal(getattr(whole, name), getattr(small, name)), name


def test_least_workspace() -> None:
    spec = LocalSpec(tokens=100, smoothing=True)
    problem = replace(make(spec), workspace=1)
    with pytest.raises(ValueError, match=r"workspace=1 is too small: .* at least (\d+) bytes") as refused:
        TRITON.partials(problem, stats=True)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    with pytest.raises(ValueError, match="too small"):
        TRITON.partials(replace(problem, workspace=least - 1), stats=True)
    partials = TRITON.partials(replace(problem, workspace=least), stats=True)
    assert_partials(partials, expected_partials(problem))

    grad = make_logit_gradient(problem, spec, partials)
    with pytest.raises(ValueError, match="too small") as refused:
        run_gradients(TRITON, problem, grad)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    actual = run_gradients(TRITON, replace(problem, workspace=least), grad)
    expected = expected_gradients(problem, grad)
    assert relative_error(actual.input, expected.input) < 1e-5
    assert relative_error(actual.weight, expected.weight) < 1e-5
    assert TRITON.least_workspace(spec.tokens, spec.hidden, spec.rows, spec.dtype) >= least


@pytest.mark.parametrize("input_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_destinations(input_dtype: torch.dtype, buffer_dtype: torch.dtype) -> None:
    """Rounded and accumulated gradients, in several slabs; the row stride of the buffer is not its width."""
    spec = LocalSpec(tokens=40)
    problem = replace(make(spec), workspace=24000)
    grad = make_logit_gradient(problem, spec, TRITON.partials(problem, stats=False))
    base = torch.randn(spec.rows, spec.hidden + 3, generator=torch.Generator().manual_seed(5)).to(buffer_dtype)
    before = base.clone()
    buffer = base[:, : spec.hidden]
    actual = run_gradients(TRITON, problem, grad, buffer=buffer, accumulate=True, input_dtype=input_dtype)
    expected = expected_gradients(problem, grad)
    assert actual.input.dtype == input_dtype
    assert relative_error(actual.input, expected.input) < (1e-5 if input_dtype == torch.float32 else 4e-3)
    right = expected.weight + before[:, : spec.hidden].double()
    assert relative_error(buffer, right) < (4e-3 if buffer_dtype == torch.bfloat16 else 1e-5)
    assert torch.equal(base[:, spec.hidden :], before[:, spec.hidden :])


@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "none"])
def test_one_gradient_alone(wanted: str) -> None:
    spec = LocalSpec(bias=True, softcap=3.0)
    problem = make(spec)
    grad = make_logit_gradient(problem, spec, TRITON.partials(problem, stats=False))
    expected = expected_gradients(problem, grad)
    buffer = torch.full_like(problem.weight, NAN)
    handed: list[torch.Tensor] = []
    request = GradientRequest(
        torch.float32 if wanted == "input" else None,
        WeightGradBuffer(buffer, False) if wanted == "weight" else None,
        wanted == "bias",
    )
    bias = TRITON.gradients(problem, grad, request, handed.append)
    assert (bias is not None) == (wanted == "bias")
    assert len(handed) == (wanted == "input")
    if handed:
        assert relative_error(handed[0], expected.input) < 1e-5
    if bias is not None:
        assert relative_error(bias, expected.bias) < 1e-5
    if wanted == "weight":
        assert relative_error(buffer, expected.weight) < 1e-5


@pytest.mark.parametrize(("tokens", "rows"), [(0, 40), (9, 0), (0, 0)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_nothing(tokens: int, rows: int, accumulate: bool) -> None:
    spec = LocalSpec(tokens=tokens, rows=rows, smoothing=True)
    problem = replace(make(spec), workspace=0)
    partials = TRITON.partials(problem, stats=True)
    assert torch.equal(partials.max, torch.full((tokens,), -INF))
    for value in (partials.sum_exp, partials.target_logit, partials.smoothing, partials.entropy):
        assert value is not None
        assert torch.equal(value, torch.zeros(tokens))
    assert partials.argmax is not None
    assert torch.equal(partials.argmax, torch.full((tokens,), -1))
    grad = make_logit_gradient(problem, spec, partials)
    buffer = torch.ones(rows, spec.hidden)
    actual = run_gradients(TRITON, problem, grad, buffer=buffer, accumulate=accumulate)
    assert torch.equal(actual.input, torch.zeros(tokens, spec.hidden))
    assert torch.equal(actual.bias, torch.zeros(rows))
    assert torch.equal(buffer, torch.full((rows, spec.hidden), float(accumulate)))


def test_non_finite_rows_stay_by_themselves() -> None:
    spec = LocalSpec(tokens=40, inactive=0.0)
    problem = make(spec)
    clean = TRITON.partials(problem, stats=True)
    e = problem.input.clone()
    e[3, 2], e[17], e[30] = NAN, NAN, INF
    dirty = TRITON.partials(replace(problem, input=e), stats=True)
    bad = torch.zeros(spec.tokens, dtype=torch.bool)
    bad[[3, 17, 30]] = True
    assert dirty.sum_exp[bad].isnan().all()
    for name in ("max", "sum_exp", "target_logit", "entropy", "argmax"):
        assert torch.equal(getattr(dirty, name)[~bad], getattr(clean, name)[~bad]), name
    grad = make_logit_gradient(problem, spec, dirty)
    rows = run_gradients(TRITON, replace(problem, input=e), grad).input
    assert rows[bad].isnan().all()
    assert rows[~bad].isfinite().all()


def test_inactive_rows_may_hold_anything() -> None:
    spec = LocalSpec(tokens=40, inactive=0.3, smoothing=True)
    problem = make(spec)
    grad = make_logit_gradient(problem, spec, TRITON.partials(problem, stats=False))
    clean = run_gradients(TRITON, problem, grad)
    e = problem.input.clone()
    e[~grad.active] = NAN
    dirty = run_gradients(TRITON, replace(problem, input=e), grad)
    for name in ("input", "weight", "bias"):
        assert torch.equal(getattr(dirty, name), getattr(clean, name)), name


def test_masked_logits() -> None:
    """A whole tile, then a whole token, at -inf."""
    spec = LocalSpec(bias=True)
    problem = make(spec)
    assert problem.bias is not None
    b = problem.bias.clone()
    b[:40] = -INF
    partials = TRITON.partials(replace(problem, bias=b), stats=True)
    z = problem.input.double() @ problem.weight.double().T + b.double()
    assert torch.allclose(partials.max.double() + partials.sum_exp.double().log(), z.logsumexp(1), atol=1e-6)
    assert partials.entropy is not None
    assert partials.entropy.isfinite().all()
    partials = TRITON.partials(replace(problem, bias=torch.full_like(b, -INF)), stats=True)
    assert torch.equal(partials.max, torch.full((spec.tokens,), -INF))
    assert torch.equal(partials.sum_exp, torch.zeros(spec.tokens))


def test_argmax_takes_the_lowest_of_equals() -> None:
    spec = LocalSpec(rows=100)
    problem = make(spec)
    weight = (4 * problem.weight).round()  # small integers: equal rows give equal sums in any order
    weight[50:] = weight[:50]
    problem = replace(problem, input=problem.input.round())
    argmax = TRITON.partials(replace(problem, weight=weight), stats=True).argmax
    assert argmax is not None
    top_half = replace(problem, weight=weight[:50], target=problem.target % 50)
    assert torch.equal(argmax, expected_partials(top_half).argmax)


def test_confident_target_keeps_its_gradient() -> None:
    """p rounds to 1 in 16 bits; its distance from 1 must not (case B27)."""
    e, c = torch.zeros(1, 16), torch.zeros(2, 16)
    e[0, 0], c[0, 0] = 8.3125, 1.0
    problem = LocalProblem(e, c, torch.tensor([0]))
    partials = TRITON.partials(problem, stats=False)
    one = torch.ones(1)
    spec = LocalSpec(tokens=1, hidden=16, rows=2, inactive=0.0)
    grad = replace(make_logit_gradient(problem, spec, partials), prob=one, target=one)
    actual = run_gradients(TRITON, problem, grad)
    assert actual.bias.tolist() == pytest.approx([-2.45369e-4, 2.45369e-4], rel=1e-3)


def test_the_operands_are_left_alone() -> None:
    spec = LocalSpec(bias=True, smoothing=True)
    problem = make(spec)
    copies = {name: value.clone() for name, value in vars(problem).items() if isinstance(value, torch.Tensor)}
    check(spec)
    run_gradients(TRITON, problem, make_logit_gradient(problem, spec, TRITON.partials(problem, stats=True)))
    for name, value in copies.items():
        assert torch.equal(getattr(problem, name), value), name


def test_only_float32_here() -> None:
    assert availability(torch.device("cpu"), torch.float32) is None
    for dtype in (torch.bfloat16, torch.float16):
        assert "float32 only" in str(availability(torch.device("cpu"), dtype))
        with pytest.raises(ValueError, match="float32 only"):
            TRITON.partials(make(LocalSpec(dtype=dtype)), stats=False)
    assert "float64" in str(availability(torch.device("cpu"), torch.float64))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_token_kernels(rule: dict[str, Any]) -> None:
    for num_tokens in (0, 1, 300):
        compare_token_kernels(num_tokens, "cpu", **rule)


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize(("smoothing", "stats"), [(False, False), (True, False), (True, True)])
def test_join(ranks: int, smoothing: bool, stats: bool) -> None:
    for num_tokens in (0, 70):
        compare_join(ranks, num_tokens, "cpu", smoothing=smoothing, stats=stats)
