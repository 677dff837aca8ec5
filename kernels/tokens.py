"""What is computed a token at a time: what its label says, its loss, and the factors of its gradient. Plain PyTorch.

Per token n with label y, with class weights c, smoothing a, and LSE over the vocabulary V::

    loss_n = (1 - a) c_y (LSE - z_y) + (a / V) sum_v c_v (LSE - z_v) + z_loss LSE^2

and, for an upstream gradient u_n of loss_n and h_n of the returned LSE, the gradient in the logits is::

    G_nv = P_n p_nv - u_n (1 - a) c_y 1[v = y] - u_n (a / V) c_v
    P_n  = u_n ((1 - a) c_y + (a / V) sum_v c_v + 2 z_loss LSE_n) + h_n

``token_kernels`` does the same, operation by operation, in one launch each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import LogitGradient, Partials


@dataclass(frozen=True)
class TokenRule:
    """What the loss of a token depends on, beside tensors.

    Attributes:
        vocab_size: V.
        start, stop: vocabulary ids of this rank's rows.
        ignored: label of tokens that take no part.
        nan_unknown: a label that is no vocabulary id makes its token NaN; else its logit is taken for the largest.
        label_smoothing: a.
        z_loss: factor of the squared LSE.
    """

    vocab_size: int
    start: int
    stop: int
    ignored: int
    nan_unknown: bool
    label_smoothing: float
    z_loss: float

    @property
    def share(self) -> float:
        return self.label_smoothing / self.vocab_size


@dataclass(frozen=True)
class Labels:
    """What the labels say, per token ``[N]``.

    Attributes:
        local: row of this rank's weight, or -1.
        active: not ignored.
        invalid: not ignored, and no vocabulary id.
        weight: class weight of the label, fp32, 0 where ignored; 1 without class weights and where invalid.
    """

    local: Tensor
    active: Tensor
    invalid: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Losses:
    """Fp32 ``[N]`` each: the losses, the LSE, and log S, by which it exceeds the largest logit."""

    loss: Tensor
    lse: Tensor
    log_sum: Tensor


def is_known(rule: TokenRule, target: Tensor) -> Tensor:
    """Which labels are vocabulary ids, bool ``[N]``."""
    return (target >= 0) & (target < rule.vocab_size)


def read_labels(rule: TokenRule, target: Tensor, class_weight: Tensor | None) -> Labels:
    """``target`` are vocabulary ids, int64; ``class_weight`` is ``[V]``."""
    active = target != rule.ignored
    known = is_known(rule, target)
    mine = active & (target >= rule.start) & (target < rule.stop)
    if class_weight is None:
        weight = active.float()
    else:
        weight = torch.where(known, class_weight.float()[torch.where(known, target, 0)], 1.0) * active
    return Labels(torch.where(mine, target - rule.start, -1), active, active & ~known, weight)


def spoil(rule: TokenRule, values: Tensor, labels: Labels) -> Tensor:
    """NaN for tokens whose label means nothing; 0 for ignored ones."""
    values = torch.where(labels.active, values, 0.0)
    return values.masked_fill(labels.invalid, float("nan")) if rule.nan_unknown else values


def negative_log_likelihood(rule: TokenRule, whole: Partials, log_sum: Tensor, labels: Labels) -> Tensor:
    # z_y - M before log S: a common offset of the row cancels exactly.
    nll = log_sum - (whole.target_logit - whole.max)
    return nll if rule.nan_unknown else torch.where(labels.invalid, log_sum, nll)


def smoothing_total(rule: TokenRule, class_weight: Tensor | None) -> float | Tensor:
    """``sum_v c_v`` over the whole vocabulary."""
    return float(rule.vocab_size) if class_weight is None else class_weight.float().sum()


def losses(rule: TokenRule, whole: Partials, target: Tensor, class_weight: Tensor | None) -> Losses:
    """From what the group knows of every token."""
    labels = read_labels(rule, target, class_weight)
    log_sum = whole.sum_exp.log()
    lse = whole.max + log_sum
    loss = labels.weight * negative_log_likelihood(rule, whole, log_sum, labels)
    if whole.smoothing is not None:
        alpha = rule.label_smoothing
        spread = smoothing_total(rule, class_weight) * log_sum - whole.smoothing
        loss = (1.0 - alpha) * loss + rule.share * spread if alpha < 1.0 else rule.share * spread
    if rule.z_loss != 0.0:
        loss = loss + rule.z_loss * lse.square()
    return Losses(spoil(rule, loss, labels), lse, log_sum)


def mean(rule: TokenRule, loss: Tensor, target: Tensor, class_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The mean loss and what it divides by, fp32 ``[]``: the sum of the labels' class weights, 1 where all tokens are
    ignored."""
    labels = read_labels(rule, target, class_weight)
    divisor = torch.where(labels.active.any(), labels.weight.sum(), 1.0)
    return loss.sum() / divisor, divisor


def logit_gradient(
    rule: TokenRule,
    target: Tensor,
    class_weight: Tensor | None,
    top: Tensor,
    log_sum: Tensor,
    upstream: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, LogitGradient]:
    """The tokens' rows of this rank's weight, and the factors of G.

    Args:
        top: M, fp32 ``[N]``.
        log_sum: log S, fp32 ``[N]``.
        upstream: u and h, ``[N]``; None for 0.
    """
    labels = read_labels(rule, target, class_weight)
    u, h = upstream
    u = torch.zeros_like(top) if u is None else u.float()
    alpha = rule.label_smoothing
    target_factor = u * labels.weight * (1.0 - alpha)
    prob, smoothing = target_factor, None
    if alpha != 0.0:
        smoothing = u * rule.share
        prob = prob + smoothing * smoothing_total(rule, class_weight)
        smoothing = smoothing.masked_fill(~labels.active, 0.0)
    if rule.z_loss != 0.0:
        prob = prob + u * (2.0 * rule.z_loss) * (top + log_sum)
    if h is not None:
        prob = prob + h.float()
    prob = spoil(rule, prob, labels)
    target_factor = target_factor.masked_fill(~labels.active, 0.0)
    return labels.local, LogitGradient(top, log_sum, prob, target_factor, labels.active, smoothing)
