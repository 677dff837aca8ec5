"""The paper's tile filter spelled out in float64, and the library run with tiles small enough for small problems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from distributed import Rank
from oracle import Problem, Reference, reference
from problems import RankResult, Shard, Spec, make_shards, run_spec
from torch import Tensor

from cce_tp.kernels import filtering

TILE = (4, 8)


@dataclass(frozen=True)
class Filter:
    """What the oracle leaves out; ``orders`` has one permutation of its rows for every shard, or None."""

    eps: float
    input: bool = True
    weight: bool = True
    tile: tuple[int, int] = TILE
    orders: list[Tensor] | None = None


@contextmanager
def small_tiles(tile: tuple[int, int] = TILE) -> Iterator[None]:
    usual = filtering.TILE_ROWS, filtering.TILE_COLS
    filtering.TILE_ROWS, filtering.TILE_COLS = tile
    try:
        yield
    finally:
        filtering.TILE_ROWS, filtering.TILE_COLS = usual


def kept_entries(p: Tensor, target: Tensor, valid: Tensor, order: Tensor, eps: float, tile: tuple[int, int]) -> Tensor:
    """Which entries of some columns of the softmax the filter keeps, tile by tile.

    Args:
        p: ``[N, V]``.
        target: ``[N]``, columns of p, or -1.
        valid: ``[N]``, tokens that count.
        order: the columns, in the order in which they make tiles.
    """
    kept = torch.zeros(p.shape, dtype=torch.bool)
    for n in range(0, p.shape[0], tile[0]):
        tokens = torch.arange(n, min(n + tile[0], p.shape[0]))
        for v in range(0, len(order), tile[1]):
            columns = order[v : v + tile[1]]
            peaks = p[tokens][:, columns][valid[tokens]]
            targets = (target[tokens][valid[tokens], None] == columns).any()
            if (peaks >= eps).any() or targets:
                kept[tokens[:, None], columns[None, :]] = True
    return kept


def close_call(p: Tensor, eps: float) -> bool:
    """Whether rounding might decide about an entry."""
    return bool(((p / eps - 1).abs() < 1e-4).any())


class FilteredOracle:
    """Loss and filtered gradients in float64.

    Attributes:
        expected: gradients are filtered.
        keep_rate: of each shard.
        is_close: an entry is so near eps that rounding might decide.
    """

    def __init__(self, problem: Problem, shards: list[Shard], filter: Filter) -> None:
        self._problem, self._shards, self._filter = problem, shards, filter
        self.keep_rate: list[float] = []
        self.is_close = False
        filtered = reference(problem, change_logit_grad=self._change)
        exact = reference(problem)
        self.expected: Reference = replace(
            exact,
            grad_input=filtered.grad_input if filter.input else exact.grad_input,
            grad_weight=filtered.grad_weight if filter.weight else exact.grad_weight,
            grad_bias=filtered.grad_bias if filter.weight else exact.grad_bias,
        )

    def _change(self, logits: Tensor, gradient: Tensor) -> Tensor:
        p = logits.softmax(1)
        problem, options = self._problem, self._problem.options
        target = problem.target.reshape(-1).long()
        valid = target != options.ignore_index
        self.is_close = close_call(p[valid], self._filter.eps)
        kept = torch.zeros(p.shape, dtype=torch.bool)
        for index, shard in enumerate(self._shards):
            rows = shard.rows[shard.rows < p.shape[1]]  # those in the softmax
            place = torch.full((max(p.shape[1], 1),), -1)
            place[rows] = torch.arange(len(rows))
            order = torch.arange(len(rows)) if self._filter.orders is None else self._filter.orders[index]
            order = order[order < len(rows)]
            local = torch.where(valid, place[torch.where(valid, target, 0)], -1)
            part = kept_entries(p[:, rows], local, valid, order, self._filter.eps, self._filter.tile)
            kept[:, rows] = part
            self.keep_rate.append(float(part.float().mean()) if part.numel() else 0.0)
        return torch.where(kept, gradient, self._smoothing(logits, valid))

    def _smoothing(self, logits: Tensor, valid: Tensor) -> Tensor:
        """The part of the gradient that label smoothing adds beside the softmax: never left out."""
        problem, alpha = self._problem, self._problem.options.label_smoothing
        vocab = problem.vocab_size
        if alpha == 0.0:
            return torch.zeros_like(logits)
        classes = torch.ones(vocab).double() if problem.class_weight is None else problem.class_weight.double()
        target = torch.where(valid, problem.target.reshape(-1).long(), 0)
        upstream = torch.tensor(1.0) if problem.upstream is None else problem.upstream
        upstream = upstream.double().reshape(-1).expand(len(valid)).clone()
        if problem.options.reduction == "mean":
            upstream /= (classes[target] * valid).sum()
        padded = torch.nn.functional.pad(classes, (0, logits.shape[1] - vocab))
        return -alpha / vocab * torch.where(valid, upstream, 0.0)[:, None] * padded


def mean_logit_orders(problem: Problem, shards: list[Shard]) -> list[Tensor]:
    """What "mean_logit" is to mean."""
    options = problem.options
    tokens = problem.input.reshape(-1, problem.input.shape[-1])
    valid = problem.target.reshape(-1) != options.ignore_index
    mean = torch.where(valid[:, None], tokens, 0.0).double().sum(0) / max(1, int(valid.sum()))
    orders = []
    for shard in shards:
        rows = shard.rows if options.count_padding else shard.rows[shard.rows < problem.vocab_size]
        score = problem.weight[rows].double() @ mean
        if problem.bias is not None:
            score = score + problem.bias[rows].double()
        orders.append((score * options.logit_scale).argsort(descending=True, stable=True))
    return orders


def run_filtered(rank: Rank | None, spec: Spec, tp: int, backward: Any, keywords: dict[str, Any]) -> RankResult:
    """The library with small tiles; ``backward`` may be a list, one for each rank."""
    with small_tiles():
        mode = backward[0 if rank is None else rank.index] if isinstance(backward, list) else backward
        return run_spec(rank, spec, tp, backward=mode, **{"return_stats": True} | keywords)


def run_filtered_task(rank: Rank, spec: Spec, backward: Any, keywords: dict[str, Any]) -> RankResult:
    return run_filtered(rank, spec, rank.size, backward, keywords)


def shards_of_spec(spec: Spec, tp: int) -> list[Shard]:
    return make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)


def row_bounds(problem: Problem, eps: float) -> Tensor:
    """The most by which the gradient of any row of C may be off, per unit of upstream gradient: a float64 scalar."""
    tokens = problem.input.reshape(-1, problem.input.shape[-1]).double()
    valid = problem.target.reshape(-1) != problem.options.ignore_index
    return eps * tokens[valid].norm(dim=1).sum() / max(1, int(valid.sum()))
