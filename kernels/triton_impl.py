"""The local implementation in Triton: the contract's two steps, on the device of the operands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import anchor, exact, filtered, forward, sampled, sampling, select_entries, token_kernels
from .contexts import on_device, without_autocast
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
from .logits import LogitOperands
from .tiles import INTERPRETED
from .tokens import Losses, TokenRule

OLDEST_GPU = (8, 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def availability(device: torch.device, dtype: torch.dtype) -> str | None:
    """None where the implementation runs, else one sentence saying why it does not."""
    if dtype not in DTYPES:
        return f"the Triton kernels take bfloat16, float16 and float32, not {str(dtype).removeprefix('torch.')}."
    if INTERPRETED:
        if dtype != torch.float32:
            return "Triton's interpreter (TRITON_INTERPRET=1) runs the kernels in float32 only."
        return None
    if device.type != "cuda":
        return f"the Triton kernels need a GPU, or TRITON_INTERPRET=1; the input is on {device.type}."
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_GPU:
        major, minor = torch.cuda.get_device_capability(device)
        return f"the Triton kernels need compute capability 8.0 or newer; {device} has {major}.{minor}."
    return None


class TritonImplementation:
    """Stateless; ``options`` of tests reach the kernels' alternatives.

    Args:
        allow_tma: whether tensor memory descriptors may be used where they can.
        library: None to choose between the library's products and the package's own, or which of them to force.
        specialise: whether warps may be specialised where they can.
    """

    name = "triton"

    def __init__(self, *, allow_tma: bool = True, library: bool | None = None, specialise: bool = True) -> None:
        self.allow_tma = allow_tma
        self.library = library
        self.specialise = specialise

    def least_workspace(self, num_tokens: int, hidden_size: int, num_rows: int, dtype: torch.dtype) -> int:
        if num_tokens == 0 or num_rows == 0:
            return 0
        return max(
            forward.least_workspace(num_tokens, num_rows, dtype), exact.least_workspace(num_tokens, hidden_size, dtype)
        )

    def least_sampled_workspace(
        self, num_tokens: int, hidden_size: int, num_rows: int, dtype: torch.dtype, size: SamplingSize
    ) -> int | None:
        if num_tokens == 0 or num_rows == 0:
            return 0
        return max(
            anchor.least_workspace(num_tokens, hidden_size, dtype, size),
            select_entries.least_workspace(num_tokens, num_rows, dtype, size),
            sampled.least_workspace(num_tokens, hidden_size, num_rows, dtype, size),
        )

    @torch.no_grad()
    def partials(self, problem: LocalProblem, *, stats: bool) -> Partials:
        _check(problem)
        with on_device(problem.input):
            operands = LogitOperands.prepare(problem, allow_tma=self.allow_tma)
            return forward.partials(operands, stats=stats, workspace=problem.workspace, specialise=self.specialise)

    @torch.no_grad()
    def gradients(
        self,
        problem: LocalProblem,
        logit_grad: LogitGradient,
        request: GradientRequest,
        on_input_grad: InputGradReady,
    ) -> Tensor | None:
        _check(problem)
        with on_device(problem.input), without_autocast(problem.input.device.type):
            return exact.gradients(
                problem, logit_grad, request, on_input_grad, allow_tma=self.allow_tma, library=self.library
            )

    @torch.no_grad()
    def local_labels(self, rule: TokenRule, target: Tensor) -> tuple[Tensor, Tensor]:
        with on_device(target):
            return token_kernels.local_labels(rule, target)

    @torch.no_grad()
    def join(self, gathered: Tensor, packing: Packing) -> Partials:
        with on_device(gathered):
            return token_kernels.join(gathered, packing)

    @torch.no_grad()
    def losses(self, rule: TokenRule, whole: Partials, target: Tensor, class_weight: Tensor | None) -> Losses:
        with on_device(target):
            return token_kernels.losses(rule, whole, target, class_weight)

    @torch.no_grad()
    def mean(self, rule: TokenRule, loss: Tensor, target: Tensor, class_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        with on_device(target):
            return token_kernels.mean(rule, loss, target, class_weight)

    @torch.no_grad()
    def logit_gradient(
        self,
        rule: TokenRule,
        target: Tensor,
        class_weight: Tensor | None,
        top: Tensor,
        log_sum: Tensor,
        upstream: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, LogitGradient]:
        with on_device(target):
            return token_kernels.logit_gradient(rule, target, class_weight, top, log_sum, upstream)

    @torch.no_grad()
    def anchor_rows(
        self, target: Tensor, active: Tensor, ids: sampling.RowIds, reference_rows: int
    ) -> sampling.AnchorRows:
        with on_device(target):
            return anchor.anchor_rows(target, active, ids, reference_rows)

    @torch.no_grad()
    def target_place(self, rows: sampling.AnchorRows, target: Tensor) -> Tensor:
        with on_device(target):
            return anchor.target_place(rows, target)

    @torch.no_grad()
    def gather_rows(self, matrix: Tensor, rows: Tensor) -> Tensor:
        with on_device(matrix):
            return anchor.gather_rows(matrix, rows)

    def hot_exponentials(
        self, weight: Tensor, num_tokens: int, num_hot: int, softcap: float | None
    ) -> sampling.HotExponentials | None:
        if softcap is not None:  # its derivative asks for z
            return None
        return anchor.hot_exponentials(weight, num_tokens, num_hot)

    @torch.no_grad()
    def anchor_sums(
        self, problem: LocalProblem, rows: sampling.AnchorRows, shared: sampling.SharedRows | None = None
    ) -> Tensor:
        _check(problem)
        with on_device(problem.input):
            return anchor.anchor_sums(problem, rows, shared, allow_tma=self.allow_tma)

    @torch.no_grad()
    def anchor(self, sums: Tensor, rows: sampling.AnchorRows) -> Tensor:
        with on_device(sums):
            return anchor.anchor(sums, rows)

    @torch.no_grad()
    def select(
        self,
        problem: LocalProblem,
        plan: SamplingPlan,
        *,
        stats: bool,
        on_partials: Callable[[Partials], object] | None = None,
    ) -> tuple[Partials, select_entries.Selection]:
        _check(problem)
        with on_device(problem.input), without_autocast(problem.input.device.type):
            return select_entries.select(
                problem, plan,
                stats=stats, on_partials=on_partials, allow_tma=self.allow_tma, specialise=self.specialise,
            )  # fmt: skip

    @torch.no_grad()
    def sampled_gradients(
        self,
        problem: LocalProblem,
        plan: SamplingPlan,
        selection: select_entries.Selection,
        logit_grad: LogitGradient,
        request: GradientRequest,
        on_input_grad: InputGradReady,
    ) -> Tensor | None:
        _check(problem)
        with on_device(problem.input), without_autocast(problem.input.device.type):
            return sampled.sampled_gradients(
                problem, plan, selection, logit_grad, request, on_input_grad,
                allow_tma=self.allow_tma, library=self.library,
            )  # fmt: skip

    @torch.no_grad()
    def screen(self, problem: LocalProblem, plan: FilterPlan, *, stats: bool) -> tuple[Partials, Peaks]:
        _check(problem)
        with on_device(problem.input), without_autocast(problem.input.device.type):
            return filtered.screen(problem, plan, stats=stats, allow_tma=self.allow_tma)

    @torch.no_grad()
    def filtered_gradients(
        self,
        problem: LocalProblem,
        plan: FilterPlan,
        tiles: TileMap,
        logit_grad: LogitGradient,
        request: GradientRequest,
        on_input_grad: InputGradReady,
    ) -> Tensor | None:
        _check(problem)
        with on_device(problem.input), without_autocast(problem.input.device.type):
            return filtered.filtered_gradients(
                problem, plan, tiles, logit_grad, request, on_input_grad, allow_tma=self.allow_tma
            )


def _check(problem: LocalProblem) -> None:
    reason = availability(problem.input.device, problem.input.dtype)
    if reason is not None:
        raise ValueError(f"implementation 'triton' cannot run here: {reason}")


TRITON = TritonImplementation()
