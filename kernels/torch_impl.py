"""The local implementation in plain PyTorch: the contract's steps on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import filtered_reference, fold, reference, sampled_reference, sampling, tokens
from .fold import Packing
from .interface import (
    FilterPlan,
    GradientRequest,
    InputGradReady,
    LocalProblem,
    LogitGradient,
    Partials,
    Peaks,
    SamplingPlan,
    SamplingSize,
    TileMap,
)
from .sampled_reference import Entries
from .tokens import Losses, TokenRule


class TorchImplementation:
    """Stateless; see ``reference``, ``sampled_reference`` and ``filtered_reference``."""

    name = "torch"

    def least_workspace(self, num_tokens: int, hidden_size: int, num_rows: int, dtype: torch.dtype) -> int:
        return reference.least_workspace(num_tokens, hidden_size)

    def least_sampled_workspace(
        self, num_tokens: int, hidden_size: int, num_rows: int, dtype: torch.dtype, size: SamplingSize
    ) -> int | None:
        return None  # what a block of tokens keeps is thinned only at the end

    def partials(self, problem: LocalProblem, *, stats: bool) -> Partials:
        return reference.walk(problem, stats=stats)

    def gradients(
        self,
        problem: LocalProblem,
        logit_grad: LogitGradient,
        request: GradientRequest,
        on_input_grad: InputGradReady,
    ) -> Tensor | None:
        return reference.gradients(problem, logit_grad, request, on_input_grad)

    def local_labels(self, rule: TokenRule, target: Tensor) -> tuple[Tensor, Tensor]:
        labels = tokens.read_labels(rule, target, None)
        return labels.local, labels.active

    def join(self, gathered: Tensor, packing: Packing) -> Partials:
        return fold.join(gathered, packing)

    def losses(self, rule: TokenRule, whole: Partials, target: Tensor, class_weight: Tensor | None) -> Losses:
        return tokens.losses(rule, whole, target, class_weight)

    def mean(self, rule: TokenRule, loss: Tensor, target: Tensor, class_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        return tokens.mean(rule, loss, target, class_weight)

    def logit_gradient(
        self,
        rule: TokenRule,
        target: Tensor,
        class_weight: Tensor | None,
        top: Tensor,
        log_sum: Tensor,
        upstream: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, LogitGradient]:
        return tokens.logit_gradient(rule, target, class_weight, top, log_sum, upstream)

    def anchor_rows(
        self, target: Tensor, active: Tensor, ids: sampling.RowIds, reference_rows: int
    ) -> sampling.AnchorRows:
        return sampling.anchor_rows(target, active, ids, reference_rows)

    def target_place(self, rows: sampling.AnchorRows, target: Tensor) -> Tensor:
        return rows.target_place(target)

    def gather_rows(self, matrix: Tensor, rows: Tensor) -> Tensor:
        return sampling.gather_rows(matrix, rows)

    def hot_exponentials(
        self, weight: Tensor, num_tokens: int, num_hot: int, softcap: float | None
    ) -> sampling.HotExponentials | None:
        return None

    def anchor_sums(
        self, problem: LocalProblem, rows: sampling.AnchorRows, shared: sampling.SharedRows | None = None
    ) -> Tensor:
        return sampling.anchor_sums(problem, rows, shared)

    def anchor(self, sums: Tensor, rows: sampling.AnchorRows) -> Tensor:
        return sampling.anchor(sums, rows)

    def select(
        self,
        problem: LocalProblem,
        plan: SamplingPlan,
        *,
        stats: bool,
        on_partials: Callable[[Partials], object] | None = None,
    ) -> tuple[Partials, Entries]:
        partials, entries = sampled_reference.select(problem, plan, stats=stats)
        if on_partials is not None:
            on_partials(partials)
        return partials, entries

    def sampled_gradients(
        self,
        problem: LocalProblem,
        plan: SamplingPlan,
        selection: Entries,
        logit_grad: LogitGradient,
        request: GradientRequest,
        on_input_grad: InputGradReady,
    ) -> Tensor | None:
        return sampled_reference.gradients(problem, plan, selection, logit_grad, request, on_input_grad)

    def screen(self, problem: LocalProblem, plan: FilterPlan, *, stats: bool) -> tuple[Partials, Peaks]:
        return filtered_reference.screen(problem, plan, stats=stats)

    def filtered_gradients(
        self,
        problem: LocalProblem,
        plan: FilterPlan,
        tiles: TileMap,
        logit_grad: LogitGradient,
        request: GradientRequest,
        on_input_grad: InputGradReady,
    ) -> Tensor | None:
        return filtered_reference.gradients(problem, plan, tiles, logit_grad, request, on_input_grad)


TORCH = TorchImplementation()
