"""The filtered backward in plain PyTorch: the CPU path, and the oracle of the Triton kernels' decisions.

The forward pass walks the logits as ``reference`` does and notes the peaks. The backward pass goes over blocks of whole
tiles, and sets to 0 what the filter leaves out of a block's gradient, once for each of the two products. It computes
every logit all the same: a tile that is left out saves memory traffic only where kernels skip it. See ``filtering``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import reference
from .filtering import thresholds, undefined
from .interface import (
    FilterPlan,
    GradientRequest,
    InputGradReady,
    LocalProblem,
    LogitGradient,
    Partials,
    Peaks,
    TileMap,
    WeightGradBuffer,
)

_TOKENS_AT_ONCE = 1024
_COLUMNS_AT_ONCE = 8192


def screen(problem: LocalProblem, plan: FilterPlan, *, stats: bool) -> tuple[Partials, Peaks]:
    """The forward pass, and the peaks of every tile of tokens."""
    token_tiles = -(-problem.num_tokens // plan.rows)
    device = problem.input.device
    peaks = torch.full((token_tiles, problem.num_rows), float("-inf"), dtype=torch.float16, device=device)
    threshold = thresholds(plan)

    def note(z: Tensor, block: slice, slab: slice) -> None:
        above = (z - threshold[block, None]).nan_to_num(nan=float("-inf"), posinf=float("inf"), neginf=float("-inf"))
        above = torch.where(plan.active[block, None], above, float("-inf"))
        for tile in range(block.start // plan.rows, -(-block.stop // plan.rows)):
            first, last = (min(max(n, block.start), block.stop) for n in (tile * plan.rows, (tile + 1) * plan.rows))
            largest = above[first - block.start : last - block.start].amax(dim=0)
            peaks[tile, slab] = torch.maximum(peaks[tile, slab], largest.half())

    partials = reference.walk(problem, stats=stats, visit=note)
    return partials, Peaks(peaks, plan.rows)


def gradients(
    problem: LocalProblem,
    plan: FilterPlan,
    tiles: TileMap,
    logit_grad: LogitGradient,
    request: GradientRequest,
    on_input_grad: InputGradReady,
) -> Tensor | None:
    """Gradients without the tiles that the filter leaves out."""
    request.await_input()
    device = problem.input.device
    order = torch.arange(problem.num_rows, device=device) if tiles.order is None else tiles.order
    place = torch.full((problem.num_rows + 1,), -1, dtype=torch.int64, device=device)
    place[order] = torch.arange(problem.num_rows, device=device)
    target = place[problem.target]  # -1 marks the spare one
    smoothing = _Smoothing.of(problem, logit_grad)
    dense = replace(logit_grad, smoothing=None)
    input_grad = None
    if request.input_dtype is not None:
        input_grad = torch.zeros(problem.input.shape, dtype=torch.float32, device=device)
    bias_grad = torch.zeros(problem.num_rows, dtype=torch.float32, device=device) if request.bias else None

    for slab in _slices(problem.num_rows, _COLUMNS_AT_ONCE, plan.cols):
        rows = order[slab]
        part = _rows_of(
            problem, rows, torch.where((target >= slab.start) & (target < slab.stop), target - slab.start, -1)
        )
        weight = part.weight.float()
        weight_grad = torch.zeros_like(weight)
        whole = slice(0, rows.shape[0])
        for block in _slices(problem.num_tokens, _TOKENS_AT_ONCE, plan.rows):
            tokens = problem.input[block].float()
            p, slope = reference.probabilities(part, dense, tokens, weight, block, whole)
            kept = _kept(plan, p, part.target[block], logit_grad.active[block])
            g = reference.logit_gradient(part, dense, p, slope, block, whole)
            if input_grad is not None:
                input_grad[block].addmm_(torch.where(kept, g, 0.0) if plan.input else g, weight)
            if plan.weight:
                g = torch.where(kept, g, 0.0)
            # An ignored token may hold NaN, and 0 * NaN would spread it over the whole gradient of C.
            weight_grad.addmm_(g.T, torch.where(logit_grad.active[block, None], tokens, 0.0))
            if bias_grad is not None:
                bias_grad.index_add_(0, rows, g.sum(dim=0))
        if smoothing is not None:
            smoothing.add(rows, weight, weight_grad, input_grad, bias_grad)
        if request.weight is not None:
            _store(request.weight, rows, weight_grad)

    if input_grad is not None and request.input_dtype is not None:
        input_grad.masked_fill_(undefined(logit_grad)[:, None], float("nan"))
        input_grad.masked_fill_(~logit_grad.active[:, None], 0.0)
        request.hand_on(input_grad.to(request.input_dtype), on_input_grad)
    return bias_grad


@dataclass(frozen=True)
class _Smoothing:
    """``-smoothing_n c_v``: without a softcap a product of two vectors, so it needs no tiles and is never left out.

    Attributes:
        tokens: ``-scale * smoothing``, ``[N]``.
        rows: c, ``[V]``.
        hidden: ``sum_n tokens_n E_n``, ``[D]``.
    """

    tokens: Tensor
    rows: Tensor
    hidden: Tensor

    @classmethod
    def of(cls, problem: LocalProblem, logit_grad: LogitGradient) -> _Smoothing | None:
        if logit_grad.smoothing is None or problem.smoothing_weight is None:
            return None
        tokens = torch.where(logit_grad.active, -problem.logit_scale * logit_grad.smoothing, 0.0)
        hidden = torch.zeros(problem.hidden_size, dtype=torch.float32, device=tokens.device)
        for block in _slices(problem.num_tokens, _TOKENS_AT_ONCE, 1):
            hidden += tokens[block] @ torch.where(logit_grad.active[block, None], problem.input[block], 0.0).float()
        return cls(tokens, problem.smoothing_weight, hidden)

    def add(
        self,
        rows: Tensor,
        weight: Tensor,
        weight_grad: Tensor,
        input_grad: Tensor | None,
        bias_grad: Tensor | None,
    ) -> None:
        """The share of some rows of C."""
        c = self.rows[rows]
        weight_grad.addr_(c, self.hidden)
        if input_grad is not None:
            input_grad.addr_(self.tokens, c @ weight)
        if bias_grad is not None:
            bias_grad.index_add_(0, rows, c * self.tokens.sum())


def _slices(length: int, most: int, tile: int) -> Iterator[slice]:
    """Pieces of whole tiles."""
    size = max(1, most // tile) * tile
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def _rows_of(problem: LocalProblem, rows: Tensor, target: Tensor) -> LocalProblem:
    bias = None if problem.bias is None else problem.bias[rows]
    return replace(problem, weight=problem.weight[rows], target=target, bias=bias, smoothing_weight=None)


def _kept(plan: FilterPlan, p: Tensor, target: Tensor, active: Tensor) -> Tensor:
    """Whether each entry of a block lies in a tile that stays."""
    counts = (p >= plan.eps) & active[:, None]
    inside = (target >= 0) & active
    counts |= inside[:, None] & (target[:, None] == torch.arange(p.shape[1], device=p.device))
    tokens, rows = p.shape
    padding = (0, -rows % plan.cols, 0, -tokens % plan.rows)
    tiles = torch.nn.functional.pad(counts, padding)
    tiles = tiles.view(tiles.shape[0] // plan.rows, plan.rows, -1, plan.cols).any(dim=3).any(dim=1)
    return tiles.repeat_interleave(plan.rows, 0)[:tokens].repeat_interleave(plan.cols, 1)[:, :rows]


def _store(destination: WeightGradBuffer, rows: Tensor, value: Tensor) -> None:
    if destination.accumulate:
        value = value + destination.buffer[rows]
    destination.buffer[rows] = value.to(destination.buffer.dtype)
