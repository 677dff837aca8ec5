"""Random local problems and what float64 makes of them: the oracle for one rank's kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cce_tp.kernels.interface import (
    GradientRequest,
    LocalImplementation,
    LocalProblem,
    LogitGradient,
    Partials,
    WeightGradBuffer,
)


@dataclass(frozen=True)
class LocalSpec:
    """A local problem in a few words; ``strided`` gives operands a gap after every element, columns first."""

    tokens: int = 21
    hidden: int = 24
    rows: int = 70
    dtype: torch.dtype = torch.float32
    bias: bool = False
    smoothing: bool = False
    scale: float = 1.0
    softcap: float | None = None
    spread: float = 2.0
    offset: float = 0.0
    strided: bool = False
    off_shard: float = 0.3
    inactive: float = 0.2
    upstream: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Gradients:
    """Results of one call of ``gradients``; float64 ones from the oracle."""

    input: Tensor
    weight: Tensor
    bias: Tensor


def strided(values: Tensor) -> Tensor:
    base = torch.full((*reversed(values.shape), 2), float("nan"), dtype=values.dtype, device=values.device)
    view = base[..., 0].permute(*reversed(range(values.dim())))
    return view.copy_(values)


def make(spec: LocalSpec, device: str = "cpu") -> LocalProblem:
    gen = torch.Generator().manual_seed(spec.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen)

    e = normal(spec.tokens, spec.hidden)
    c = normal(spec.rows, spec.hidden) * spec.spread / spec.hidden**0.5
    target = torch.randint(0, max(spec.rows, 1), (spec.tokens,), generator=gen)
    target[torch.rand(spec.tokens, generator=gen) < spec.off_shard] = -1
    if spec.rows == 0:
        target.fill_(-1)
    b = normal(spec.rows) + spec.offset if spec.bias or spec.offset else None
    weights = torch.rand(spec.rows, generator=gen) * (torch.rand(spec.rows, generator=gen) < 0.7)
    e, c = e.to(spec.dtype).to(device), c.to(spec.dtype).to(device)
    return LocalProblem(
        input=strided(e) if spec.strided else e,
        weight=strided(c) if spec.strided else c,
        target=target.to(device),
        bias=None if b is None else b.to(device),
        smoothing_weight=weights.to(device) if spec.smoothing else None,
        logit_scale=spec.scale,
        softcap=spec.softcap,
    )


def logits(problem: LocalProblem) -> Tensor:
    """z in float64."""
    z = problem.input.double() @ problem.weight.double().T
    if problem.bias is not None:
        z = z + problem.bias.double()
    z = z * problem.logit_scale
    return z if problem.softcap is None else problem.softcap * torch.tanh(z / problem.softcap)


def expected_partials(problem: LocalProblem) -> Partials:
    """Partials in float64, for finite logits and at least one row."""
    z = logits(problem)
    top = z.amax(1)
    shifted = z - top[:, None]
    picked = z.gather(1, problem.target.clamp(min=0)[:, None]).squeeze(1)
    c = problem.smoothing_weight
    return Partials(
        max=top,
        sum_exp=shifted.exp().sum(1),
        target_logit=torch.where(problem.target >= 0, picked, 0.0),
        smoothing=None if c is None else (c.double() * shifted).sum(1),
        entropy=(shifted.exp() * shifted).sum(1),
        argmax=z.argmax(1),
    )


def make_logit_gradient(problem: LocalProblem, spec: LocalSpec, partials: Partials) -> LogitGradient:
    """Random factors, different for every token, relative to what the implementation itself found in its forward."""
    gen = torch.Generator().manual_seed(spec.seed + 1)
    device = problem.input.device

    def factor() -> Tensor:
        return (torch.randn(spec.tokens, generator=gen) * spec.upstream).to(device)

    active = (torch.rand(spec.tokens, generator=gen) >= spec.inactive).to(device)
    prob, target, smoothing = factor(), factor(), factor()
    return LogitGradient(
        max=partials.max,
        log_sum=partials.sum_exp.log(),
        prob=torch.where(active, prob, 0.0),
        target=torch.where(active, target, 0.0),
        active=active,
        smoothing=torch.where(active, smoothing, 0.0) if spec.smoothing else None,
    )


def expected_gradients(problem: LocalProblem, grad: LogitGradient) -> Gradients:
    """Gradients in float64."""
    safe = torch.where(grad.active[:, None], problem.input, 0.0)
    z = logits(replace(problem, input=safe))
    g = grad.prob.double()[:, None] * (z - z.logsumexp(1, keepdim=True)).exp()
    held = problem.target >= 0
    one_hot = torch.zeros_like(z).scatter_(1, problem.target.clamp(min=0)[:, None], held.double()[:, None])
    g = g - grad.target.double()[:, None] * one_hot
    if grad.smoothing is not None and problem.smoothing_weight is not None:
        g = g - grad.smoothing.double()[:, None] * problem.smoothing_weight.double()
    if problem.softcap is not None:
        g = g * (1 - (z / problem.softcap).square())
    g = torch.where(grad.active[:, None], g * problem.logit_scale, 0.0)
    return Gradients(g @ problem.weight.double(), g.T @ safe.double(), g.sum(0))


def late_input(problem: LocalProblem) -> Callable[[], object]:
    """Make the input NaN until what is returned is called: an implementation must not read it before."""
    values = problem.input.clone()
    problem.input.fill_(float("nan"))
    return lambda: problem.input.copy_(values)


def run_gradients(
    implementation: LocalImplementation,
    problem: LocalProblem,
    grad: LogitGradient,
    *,
    buffer: Tensor | None = None,
    accumulate: bool = False,
    input_dtype: torch.dtype | None = None,
) -> Gradients:
    """All three gradients; the buffer is NaN before, unless given."""
    shape = problem.weight.shape
    if buffer is None:
        buffer = torch.full(shape, float("nan"), dtype=problem.weight.dtype, device=problem.weight.device)
    handed: list[Tensor] = []
    ready = late_input(problem)
    destination = WeightGradBuffer(buffer, accumulate)
    request = GradientRequest(input_dtype or problem.input.dtype, destination, True, input_ready=ready)
    try:
        bias = implementation.gradients(problem, grad, request, handed.append)
    finally:
        ready()  # also where the call is refused: the problem is used again
    assert bias is not None
    assert bias.dtype == torch.float32
    assert len(handed) == 1
    return Gradients(handed[0], buffer, bias)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    difference = (actual.double() - expected.double()).norm()
    size = expected.double().norm()
    return float(difference / size) if size > 0 else float(difference)


def assert_partials(actual: Partials, expected: Partials, tolerance: float = 1e-6) -> None:
    """``tolerance`` times max(1, |z|), as the loss is bounded; sums relative to themselves."""
    size = expected.max.abs().clamp(min=1.0)
    for name in ("max", "target_logit"):
        assert ((getattr(actual, name) - getattr(expected, name)).abs() <= tolerance * size).all(), name
    assert ((actual.sum_exp.double().log() - expected.sum_exp.log()).abs() <= tolerance * size).all(), "sum_exp"
    for name in ("smoothing", "entropy"):
        value, right = getattr(actual, name), getattr(expected, name)
        if value is not None:
            assert right is not None
            assert ((value - right).abs() <= 4 * tolerance * size * right.abs().clamp(min=1.0)).all(), name
    if actual.argmax is not None:
        assert expected.argmax is not None
        assert torch.equal(actual.argmax, expected.argmax), "argmax"


OPTION_SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "offset": {"offset": 300.0},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "smoothing": {"smoothing": True},
    "everything": {"bias": True, "scale": 0.7, "softcap": 2.0, "smoothing": True, "strided": True},
    "strided": {"strided": True},
    "all inactive": {"inactive": 1.1},
    "off shard": {"off_shard": 1.1},
}
SHAPES = [(1, 1, 1), (1, 16, 300), (37, 83, 131), (64, 32, 64), (130, 7, 33), (5, 130, 2)]
