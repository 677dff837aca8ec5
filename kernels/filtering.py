"""The filtered backward's decisions: which tiles of the softmax's gradient are left out (Wijmans et al., ICLR 2025).

A *tile* is 128 consecutive tokens by 128 rows of the classifier. It is left out if none of its active tokens has
``p >= eps`` in it or its target there; p is the softmax over the *whole* vocabulary, and the upstream gradient plays no
part. So an entry of G that is lost is below ``eps |P_n|``, and the gradient of a row of C is off by at most
``eps sum_n |P_n| |E_n|``. Where the softmax is flat (``p = 1 / V < eps`` at initialisation) hardly more than the
targets' tiles is left, and gradients are far too small: that is what this filter does.

A tile that is left out is not even recomputed. The forward pass can't know p yet, but p has two factors::

    p_nv = exp(z_nv - a_n) exp(a_n - LSE_n)

for any *anchor* a, a guess of the LSE from a few rows. The forward pass keeps the largest ``z_nv - a_n`` of each row of
C in each tile of tokens (the *peaks*, a 128th of the logits' memory in bf16), and the second factor's largest value in
a tile of tokens is known as soon as the LSE is. Their product bounds every p. The tiles that it leaves are recomputed,
and decided by their own p.

Since peaks are kept for each row of C, tiles may be made of any rows. Rows that are sorted by how many tiles of tokens
need them ("count") leave far fewer tiles to compute than the vocabulary's natural order, where most tiles hold some
row that is needed.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .interface import FilterPlan, LocalProblem, LogitGradient, Peaks, TileMap

TILE_ROWS = TILE_COLS = 128
REFERENCE_ROWS = 1024
"""How many of the batch's most frequent targets the anchor looks at."""
_SLACK, _RELATIVE_SLACK = 2e-3, 2.0**-9
"""In nats, for what rounding does to peaks: fp16's, mostly, which is 2^-11 of the distance from the anchor."""


def thresholds(plan: FilterPlan) -> Tensor:
    """What peaks are relative to, fp32 ``[N]``; inf for tokens that don't count."""
    return torch.where(plan.active, plan.anchor + math.log(plan.eps), float("inf"))


def tile_map(plan: FilterPlan, problem: LocalProblem, peaks: Peaks, lse: Tensor) -> TileMap:
    """Decide by bounds, once the LSE over the whole vocabulary is known. No host synchronisation.

    Args:
        lse: fp32 ``[N]``.
    """
    columns = _live_columns(plan, problem, peaks, lse)
    order = _order(plan, problem, columns)
    if order is not None:
        columns = columns[:, order]
    live = _any_of(columns, plan.cols)
    rows, cols = (
        _sizes(*size, lse.device) for size in ((problem.num_tokens, plan.rows), (problem.num_rows, plan.cols))
    )
    kept = (live * rows[:, None] * cols[None, :]).sum()
    return TileMap(live, order, kept)


def _live_columns(plan: FilterPlan, problem: LocalProblem, peaks: Peaks, lse: Tensor) -> Tensor:
    """Whether a token of a tile may have ``p >= eps`` in a row of C, or has its target there: ``[token tiles, V]``."""
    num_tokens, num_rows = problem.num_tokens, problem.num_rows
    excess = torch.where(plan.active, plan.anchor - lse, float("-inf")).nan_to_num(
        float("-inf"), float("inf"), float("-inf")
    )
    excess = _padded(excess, plan.rows, float("-inf")).view(-1, plan.rows).amax(dim=1)
    # Lowered so that rounding leaves no tile out; a tile without active tokens stays at inf.
    least = -excess - (_SLACK + _RELATIVE_SLACK * excess.abs())
    least = torch.where(excess > float("-inf"), least, float("inf")).half()
    groups = plan.rows // peaks.group
    least = least.repeat_interleave(groups)[: peaks.values.shape[0]]
    columns = peaks.values >= least[:, None]
    if groups > 1:
        columns = _any_of(columns.T, groups).T
    token_tile = torch.arange(num_tokens, device=lse.device) // plan.rows
    place = torch.where(plan.active & (problem.target >= 0), token_tile * num_rows + problem.target, columns.numel())
    spare = torch.zeros(1, dtype=torch.bool, device=lse.device)
    return torch.cat([columns.reshape(-1), spare]).index_fill_(0, place, True)[:-1].view(columns.shape)


def _order(plan: FilterPlan, problem: LocalProblem, columns: Tensor) -> Tensor | None:
    if isinstance(plan.order, Tensor):
        return plan.order
    if plan.order == "natural":
        return None
    score = columns.sum(dim=0) if plan.order == "count" else _mean_logits(plan, problem)
    return score.sort(descending=True, stable=True).indices


def _mean_logits(plan: FilterPlan, problem: LocalProblem) -> Tensor:
    """The average logit of each row of C over active tokens, before the softcap: ``[V]``."""
    hidden = problem.input.new_zeros(problem.hidden_size, dtype=torch.float32)
    for tokens, active in zip(problem.input.split(1024), plan.active.split(1024), strict=True):
        hidden += torch.where(active[:, None], tokens, 0.0).sum(dim=0, dtype=torch.float32)
    mean = hidden / plan.active.sum().clamp(min=1)
    score = (problem.weight @ mean.to(problem.weight.dtype)).float()
    if problem.bias is not None:
        score = score + problem.bias.float()
    return score * problem.logit_scale


def _any_of(flags: Tensor, size: int) -> Tensor:
    """Whether any of ``size`` consecutive elements of the last dimension is true."""
    lines, length = flags.shape
    padding = -length % size
    return torch.nn.functional.pad(flags, (0, padding)).reshape(lines, (length + padding) // size, size).any(dim=2)


def _padded(values: Tensor, size: int, value: float) -> Tensor:
    return torch.nn.functional.pad(values, (0, -values.shape[0] % size), value=value)


def _sizes(length: int, size: int, device: torch.device) -> Tensor:
    """How many elements each tile of ``size`` has: the last one may have fewer."""
    starts = torch.arange(0, length, size, device=device)
    return (length - starts).clamp(max=size)


def is_permutation(order: Tensor) -> Tensor:
    """Whether every row occurs; bool ``[]``. An index out of range is an error of its own."""
    return torch.zeros_like(order, dtype=torch.bool).index_fill_(0, order.long(), True).all()


def without_padding(order: Tensor, num_rows: int) -> Tensor:
    """The rows below ``num_rows`` in the order given, whose other rows take no part; static shape."""
    torch._assert_async(is_permutation(order), "Filtered: order is no permutation of this rank's rows")
    if order.shape[0] == num_rows:
        return order
    return order[(order >= num_rows).sort(stable=True).indices[:num_rows]]


def finite(anchor: Tensor) -> Tensor:
    """Any finite anchor makes a bound; a far one, a loose one."""
    return torch.where(anchor.isfinite(), anchor, 0.0)


def undefined(logit_grad: LogitGradient) -> Tensor:
    """Tokens whose gradient is NaN, whatever tiles they have: bool ``[N]``. Their label is no id, or a logit is NaN."""
    return logit_grad.active & (logit_grad.prob + logit_grad.max + logit_grad.log_sum).isnan()
