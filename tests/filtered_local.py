"""Filtered local problems, and the comparison of two implementations of them: same tiles, same gradients."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from local_problem import Gradients, LocalSpec, late_input, logits, make, make_logit_gradient, relative_error
from torch import Tensor

from cce_tp.kernels import filtered_reference, filtering
from cce_tp.kernels.interface import (
    FilterPlan,
    GradientRequest,
    LocalProblem,
    LogitGradient,
    Partials,
    TileMap,
    WeightGradBuffer,
)


@dataclass(frozen=True)
class FilterCase:
    """A problem, its filter, the upstream gradient, and the LSE over the whole vocabulary."""

    problem: LocalProblem
    plan: FilterPlan
    logit_grad: LogitGradient
    lse: Tensor

    @classmethod
    def make(
        cls,
        spec: LocalSpec,
        device: str = "cpu",
        *,
        eps: float = 0.1,
        order: str = "natural",
        rows: int = 16,
        cols: int = 16,
        anchor_error: float = 0.2,
        **flags: Any,
    ) -> FilterCase:
        """Rows of the second half are no targets and have small logits, so that some tiles are left out."""
        problem, gen = make(spec, device), torch.Generator().manual_seed(spec.seed + 2)
        half = (spec.rows + 1) // 2
        problem.weight[half:] *= 0.1
        problem.target[problem.target >= half] -= half
        z = logits(problem)
        lse = z.logsumexp(1) if spec.rows else z.new_zeros(spec.tokens)
        partials = Partials(lse.float(), (lse - lse.float().double()).exp().float(), torch.zeros_like(lse))
        logit_grad = make_logit_gradient(problem, spec, partials)
        sorted_by: Any = order
        if order == "tensor":
            halves = half + torch.randperm(spec.rows - half, generator=gen), torch.randperm(half, generator=gen)
            sorted_by = torch.cat(halves).to(device)
        anchor = lse.float() + anchor_error * torch.randn(spec.tokens, generator=gen).to(device)
        flags = {"input": True, "weight": True} | flags
        plan = FilterPlan(
            eps=eps, order=sorted_by, anchor=anchor, active=logit_grad.active, rows=rows, cols=cols, **flags
        )
        return cls(problem, plan, logit_grad, lse.float())

    def tiles(self, module: ModuleType, **ways: Any) -> TileMap:
        _, peaks = module.screen(self.problem, self.plan, stats=False, **ways)
        return filtering.tile_map(self.plan, self.problem, peaks, self.lse)


def run(module: ModuleType, case: FilterCase, *, input_dtype: torch.dtype = torch.float32, **ways: Any) -> Gradients:
    """Forward and backward of ``filtered`` or its twin; the result is written over NaN."""
    forward_ways = {name: value for name, value in ways.items() if name == "allow_tma"}
    problem = case.problem
    buffer = torch.full(problem.weight.shape, float("nan"), device=problem.weight.device)
    handed: list[Tensor] = []
    backward = module.gradients if module is filtered_reference else module.filtered_gradients
    tiles = case.tiles(module, **forward_ways)
    ready = late_input(problem)
    request = GradientRequest(input_dtype, WeightGradBuffer(buffer, False), True, input_ready=ready)
    bias = backward(problem, case.plan, tiles, case.logit_grad, request, handed.append, **ways)
    ready()
    assert bias is not None
    assert bias.dtype == torch.float32
    assert len(handed) == 1
    return Gradients(handed[0], buffer, bias)


def compare(case: FilterCase, tolerance: float, **ways: Any) -> float:
    """The kernels against the twin: tiles, gradients. Returns the share of tiles that are kept."""
    from cce_tp.kernels import filtered

    ours, twin = case.tiles(filtered), case.tiles(filtered_reference)
    assert torch.equal(ours.live, twin.live)
    assert int(ours.kept) == int(twin.kept)
    got, right = run(filtered, case, **ways), run(filtered_reference, case)
    for name in ("input", "weight", "bias"):
        error = relative_error(getattr(got, name), getattr(right, name))
        assert error < tolerance, f"{name}: {error:.2e}"
    inactive = got.input[~case.logit_grad.active]
    assert torch.equal(inactive, torch.zeros_like(inactive))
    return float(twin.live.float().mean()) if twin.live.numel() else 0.0
