"""``tokens`` in Triton: the same operations in the same order, so the same bits, in one launch for each function.

Numbers a token are few, but every PyTorch operator on them is a launch, and a call had a hundred.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fold import Packing, unset_partials
from .interface import LogitGradient, Partials
from .tiles import cdiv
from .tokens import Losses, TokenRule, smoothing_total

SIZE, SUM_SIZE = 256, 4096
_IDS = ["num_tokens", "vocab_size", "start", "stop", "ignored"]


@triton.jit
def _class_weight(b_target, m, class_weight, vocab_size, HAS_WEIGHT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Class weights of active tokens' labels, 0 for the others; and whether a label is a vocabulary id."""
    m_known = (b_target >= 0) & (b_target < vocab_size)
    b_weight = tl.where(m, 1.0, 0.0)
    if HAS_WEIGHT:
        b_class = tl.load(class_weight + b_target, mask=m & m_known, other=1.0).to(tl.float32)
        b_weight = tl.where(m, b_class, 0.0)
    return b_weight, m_known


@triton.jit(do_not_specialize=_IDS)
def _labels_kernel(target, local, active, num_tokens, vocab_size, start, stop, ignored, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m = o < num_tokens
    b_target = tl.load(target + o, mask=m, other=0)
    m_active = b_target != ignored
    m_mine = m_active & (b_target >= start) & (b_target < stop)
    tl.store(local + o, tl.where(m_mine, b_target - start, -1), mask=m)
    tl.store(active + o, m_active, mask=m)


@triton.jit(do_not_specialize=["num_tokens", "whole"])
def _join_kernel(  # type: ignore[no-untyped-def]
    gathered,
    max_out,
    sum_out,
    target_out,
    smoothing_out,
    entropy_out,
    argmax_out,
    num_tokens,
    whole,
    RANKS: tl.constexpr,
    FIELDS: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    STATS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Two passes over the ranks: the maximum, then what is relative to it."""
    o = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    m = o < num_tokens
    b_top = tl.full((SIZE,), float("-inf"), dtype=tl.float32)
    for rank in range(RANKS):
        b_top = tl.maximum(b_top, tl.load(gathered + (rank * FIELDS + 1) * num_tokens + o, mask=m, other=0.0))
    b_chain = tl.zeros((SIZE,), dtype=tl.float32)
    b_sum = tl.zeros((SIZE,), dtype=tl.float32)
    b_target = tl.zeros((SIZE,), dtype=tl.float32)
    b_smoothing = tl.zeros((SIZE,), dtype=tl.float32)
    b_entropy = tl.zeros((SIZE,), dtype=tl.float32)
    b_argmax = tl.full((SIZE,), 2147483647, dtype=tl.int32)
    for rank in range(RANKS):
        p = gathered + rank * FIELDS * num_tokens + o
        b_chain += tl.load(p, mask=m, other=0.0)
        b_max = tl.load(p + num_tokens, mask=m, other=0.0)
        b_part = tl.load(p + 2 * num_tokens, mask=m, other=0.0)
        b_target += tl.load(p + 3 * num_tokens, mask=m, other=0.0)
        m_empty = b_max == float("-inf")
        b_gap = b_max - b_top
        b_factor = tl.where(m_empty, 0.0, tl.exp(b_gap))
        b_sum += b_part * b_factor
        if HAS_SMOOTHING:
            b_mass = tl.load(p + 5 * num_tokens, mask=m, other=0.0)
            b_shifted = tl.load(p + 4 * num_tokens, mask=m, other=0.0) + b_gap * b_mass
            b_smoothing += tl.where(b_mass == 0.0, 0.0, b_shifted)
        if STATS:
            p_entropy = p + (4 + 2 * HAS_SMOOTHING) * num_tokens
            b_shifted = tl.load(p_entropy, mask=m, other=0.0) + b_part * tl.where(m_empty, 0.0, b_gap)
            b_entropy += b_factor * b_shifted
            b_id = tl.load(p_entropy + num_tokens, mask=m, other=0.0).to(tl.int32, bitcast=True)
            b_argmax = tl.minimum(b_argmax, tl.where((b_max == b_top) & (b_id >= 0), b_id, 2147483647))
    tl.store(max_out + o, tl.where(b_chain == whole, b_top, float("nan")), mask=m)
    tl.store(sum_out + o, b_sum, mask=m)
    tl.store(target_out + o, b_target, mask=m)
    if HAS_SMOOTHING:
        tl.store(smoothing_out + o, b_smoothing, mask=m)
    if STATS:
        tl.store(entropy_out + o, b_entropy, mask=m)
        tl.store(argmax_out + o, tl.where(b_argmax == 2147483647, -1, b_argmax).to(tl.int64), mask=m)


@triton.jit(do_not_specialize=_IDS)
def _losses_kernel(  # type: ignore[no-untyped-def]
    target,
    class_weight,
    smoothing_total,
    row_max,
    sum_exp,
    target_logit,
    smoothing,
    loss_out,
    lse_out,
    log_sum_out,
    num_tokens,
    vocab_size,
    start,
    stop,
    ignored,
    rest,
    share,
    z_loss,
    total,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    ONLY_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    NAN_UNKNOWN: tl.constexpr,
    SIZE: tl.constexpr,
):
    o = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    m = o < num_tokens
    b_target = tl.load(target + o, mask=m, other=0)
    m_active = m & (b_target != ignored)
    b_weight, m_known = _class_weight(b_target, m_active, class_weight, vocab_size, HAS_WEIGHT)
    b_max = tl.load(row_max + o, mask=m, other=0.0)
    b_log_sum = tl.log(tl.load(sum_exp + o, mask=m, other=1.0))
    b_lse = b_max + b_log_sum
    b_nll = b_log_sum - (tl.load(target_logit + o, mask=m, other=0.0) - b_max)
    if not NAN_UNKNOWN:
        b_nll = tl.where(m_active & (m_known == 0), b_log_sum, b_nll)
    b_loss = b_weight * b_nll
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            total = tl.load(smoothing_total)
        b_spread = share * (total * b_log_sum - tl.load(smoothing + o, mask=m, other=0.0))
        b_loss = b_spread if ONLY_SMOOTHING else rest * b_loss + b_spread
    if HAS_Z_LOSS:
        b_loss += z_loss * (b_lse * b_lse)
    b_loss = tl.where(m_active, b_loss, 0.0)
    if NAN_UNKNOWN:
        b_loss = tl.where(m_active & (m_known == 0), float("nan"), b_loss)
    tl.store(loss_out + o, b_loss, mask=m)
    tl.store(lse_out + o, b_lse, mask=m)
    tl.store(log_sum_out + o, b_log_sum, mask=m)


@triton.jit(do_not_specialize=_IDS)
def _mean_kernel(  # type: ignore[no-untyped-def]
    loss, target, class_weight, mean_out, divisor_out, num_tokens, vocab_size, ignored,
    HAS_WEIGHT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program."""
    b_loss = tl.zeros((SIZE,), dtype=tl.float32)
    b_sum = tl.zeros((SIZE,), dtype=tl.float32)
    b_count = tl.zeros((SIZE,), dtype=tl.int32)
    for first in range(0, num_tokens, SIZE):
        o = first + tl.arange(0, SIZE)
        m = o < num_tokens
        b_target = tl.load(target + o, mask=m, other=0)
        m_active = m & (b_target != ignored)
        b_weight, _ = _class_weight(b_target, m_active, class_weight, vocab_size, HAS_WEIGHT)
        b_loss += tl.load(loss + o, mask=m, other=0.0)
        b_sum += b_weight
        b_count += m_active.to(tl.int32)
    divisor = tl.where(tl.sum(b_count, 0) > 0, tl.sum(b_sum, 0), 1.0)
    tl.store(mean_out, tl.div_rn(tl.sum(b_loss, 0), divisor))
    tl.store(divisor_out, divisor)


@triton.jit(do_not_specialize=_IDS)
def _logit_gradient_kernel(  # type: ignore[no-untyped-def]
    target,
    class_weight,
    smoothing_total,
    row_max,
    log_sum,
    upstream,
    lse_upstream,
    local,
    active,
    prob_out,
    target_out,
    smoothing_out,
    upstream_stride,
    lse_upstream_stride,
    num_tokens,
    vocab_size,
    start,
    stop,
    ignored,
    rest,
    share,
    twice_z_loss,
    total,
    HAS_WEIGHT: tl.constexpr,
    HAS_SMOOTHING: tl.constexpr,
    HAS_Z_LOSS: tl.constexpr,
    HAS_UPSTREAM: tl.constexpr,
    HAS_LSE_UPSTREAM: tl.constexpr,
    NAN_UNKNOWN: tl.constexpr,
    SIZE: tl.constexpr,
):
    o = (tl.program_id(0) * SIZE + tl.arange(0, SIZE)).to(tl.int64)
    m = o < num_tokens
    b_target = tl.load(target + o, mask=m, other=0)
    m_active = m & (b_target != ignored)
    m_mine = m_active & (b_target >= start) & (b_target < stop)
    tl.store(local + o, tl.where(m_mine, b_target - start, -1), mask=m)
    tl.store(active + o, m_active, mask=m)

    b_weight, m_known = _class_weight(b_target, m_active, class_weight, vocab_size, HAS_WEIGHT)
    b_u = tl.zeros((SIZE,), dtype=tl.float32)
    if HAS_UPSTREAM:
        b_u = tl.load(upstream + o * upstream_stride, mask=m, other=0.0).to(tl.float32)
    b_target_factor = b_u * b_weight * rest
    b_prob = b_target_factor
    if HAS_SMOOTHING:
        if HAS_WEIGHT:
            total = tl.load(smoothing_total)
        b_smoothing = b_u * share
        b_prob += b_smoothing * total
        tl.store(smoothing_out + o, tl.where(m_active, b_smoothing, 0.0), mask=m)
    if HAS_Z_LOSS:
        b_lse = tl.load(row_max + o, mask=m, other=0.0) + tl.load(log_sum + o, mask=m, other=0.0)
        b_prob += b_u * twice_z_loss * b_lse
    if HAS_LSE_UPSTREAM:
        b_prob += tl.load(lse_upstream + o * lse_upstream_stride, mask=m, other=0.0).to(tl.float32)
    b_prob = tl.where(m_active, b_prob, 0.0)
    if NAN_UNKNOWN:
        b_prob = tl.where(m_active & (m_known == 0), float("nan"), b_prob)
    tl.store(prob_out + o, b_prob, mask=m)
    tl.store(target_out + o, tl.where(m_active, b_target_factor, 0.0), mask=m)


def _ids(rule: TokenRule, target: Tensor) -> tuple[int, ...]:
    return target.shape[0], rule.vocab_size, rule.start, rule.stop, rule.ignored


def _total(rule: TokenRule, class_weight: Tensor | None, smoothing: bool) -> tuple[Tensor | None, float]:
    """``smoothing_total``: on the device with class weights, else a number."""
    total = smoothing_total(rule, class_weight) if smoothing else 0.0
    return (total, 0.0) if isinstance(total, Tensor) else (None, total)


def _grid(num_tokens: int) -> tuple[int]:
    return (cdiv(num_tokens, SIZE),)


def local_labels(rule: TokenRule, target: Tensor) -> tuple[Tensor, Tensor]:
    """``Labels.local`` and ``.active``."""
    target = target.contiguous()
    local, active = torch.empty_like(target), torch.empty_like(target, dtype=torch.bool)
    if target.shape[0] > 0:
        _labels_kernel[_grid(target.shape[0])](target, local, active, *_ids(rule, target), SIZE=SIZE, num_warps=4)
    return local, active


def join(gathered: Tensor, packing: Packing) -> Partials:
    """``fold.join``; ``gathered`` is contiguous."""
    ranks, fields, num_tokens = gathered.shape
    made = unset_partials(num_tokens, gathered.device, smoothing=packing.smoothing, stats=packing.stats)
    if num_tokens > 0:
        _join_kernel[_grid(num_tokens)](
            gathered, made.max, made.sum_exp, made.target_logit, made.smoothing, made.entropy, made.argmax,
            num_tokens, packing.whole, RANKS=ranks, FIELDS=fields,
            HAS_SMOOTHING=packing.smoothing, STATS=packing.stats, **_OPTIONS,
        )  # fmt: skip
    return made


def losses(rule: TokenRule, whole: Partials, target: Tensor, class_weight: Tensor | None) -> Losses:
    """``tokens.losses``."""
    made = Losses(*(torch.empty_like(whole.max) for _ in range(3)))
    if target.shape[0] == 0:
        return made
    alpha, has_smoothing = rule.label_smoothing, whole.smoothing is not None
    total = _total(rule, class_weight, has_smoothing)
    _losses_kernel[_grid(target.shape[0])](
        target.contiguous(), _contiguous(class_weight), total[0],
        whole.max.contiguous(), whole.sum_exp.contiguous(), whole.target_logit.contiguous(),
        _contiguous(whole.smoothing), made.loss, made.lse, made.log_sum,
        *_ids(rule, target), 1.0 - alpha, rule.share, rule.z_loss, total[1],
        HAS_WEIGHT=class_weight is not None, HAS_SMOOTHING=has_smoothing, ONLY_SMOOTHING=alpha >= 1.0,
        HAS_Z_LOSS=rule.z_loss != 0.0, NAN_UNKNOWN=rule.nan_unknown, **_OPTIONS,
    )  # fmt: skip
    return made


def mean(rule: TokenRule, loss: Tensor, target: Tensor, class_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """``tokens.mean``; its order of summation is its own."""
    result, divisor = loss.new_empty(()), loss.new_empty(())
    _mean_kernel[(1,)](
        loss.contiguous(), target.contiguous(), _contiguous(class_weight), result, divisor,
        target.shape[0], rule.vocab_size, rule.ignored,
        HAS_WEIGHT=class_weight is not None, SIZE=SUM_SIZE, num_warps=8,
    )  # fmt: skip
    return result, divisor


def logit_gradient(
    rule: TokenRule,
    target: Tensor,
    class_weight: Tensor | None,
    top: Tensor,
    log_sum: Tensor,
    upstream: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, LogitGradient]:
    """``tokens.logit_gradient``."""
    target, has_smoothing = target.contiguous(), rule.label_smoothing != 0.0
    local, active = torch.empty_like(target), torch.empty_like(target, dtype=torch.bool)
    prob, target_factor = torch.empty_like(top), torch.empty_like(top)
    smoothing = torch.empty_like(top) if has_smoothing else None
    if target.shape[0] > 0:
        u, h = upstream
        total = _total(rule, class_weight, has_smoothing)
        _logit_gradient_kernel[_grid(target.shape[0])](
            target, _contiguous(class_weight), total[0], top, log_sum, u, h,
            local, active, prob, target_factor, smoothing,
            0 if u is None else u.stride(0), 0 if h is None else h.stride(0),
            *_ids(rule, target), 1.0 - rule.label_smoothing, rule.share, 2.0 * rule.z_loss, total[1],
            HAS_WEIGHT=class_weight is not None, HAS_SMOOTHING=has_smoothing, HAS_Z_LOSS=rule.z_loss != 0.0,
            HAS_UPSTREAM=u is not None, HAS_LSE_UPSTREAM=h is not None, NAN_UNKNOWN=rule.nan_unknown, **_OPTIONS,
        )  # fmt: skip
    return local, LogitGradient(top, log_sum, prob, target_factor, active, smoothing)


# Fused, a product would be rounded only after a sum.
_OPTIONS: dict[str, Any] = {"SIZE": SIZE, "num_warps": 4, "enable_fp_fusion": False}


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()
