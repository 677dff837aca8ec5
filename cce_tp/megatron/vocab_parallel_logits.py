"""Cross-entropy of vocabulary-parallel logits that exist already, with Megatron's signature."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import TensorParallelGroup, resolve_group
from .lazy import tensor_parallel_group


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Per-token cross-entropy of logits split by vocabulary, for places that only have logits.

    As ``megatron.core.tensor_parallel.vocab_parallel_cross_entropy``, but the logits are left as they are, and label
    smoothing runs over the whole vocabulary at every group size (Megatron's takes this rank's part for the whole).

    Args:
        vocab_parallel_logits: ``[..., V_local]``, this rank's part of an equal split; padding counts.
        target: ``[...]`` ids over the whole vocabulary. As in Megatron, the logit of an id outside it counts as the
            row's maximum.
        label_smoothing: a in [0, 1); the target has 1 - a and every other id a / (V - 1).
        tp_group: default: Megatron's tensor-parallel group.

    Returns:
        ``[...]`` fp32.

    Collectives: forward 1 all-reduce MAX of ``[N]`` and 1 SUM of ``[2, N]`` (with smoothing ``[3, N]``), fp32; backward
    none. None at all for a single shard.

    Raises:
        ValueError: shapes or ``label_smoothing`` don't fit.
    """
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise ValueError(
            f"vocab_parallel_logits has shape {tuple(vocab_parallel_logits.shape)}, expected one more dimension than "
            f"target {tuple(target.shape)}"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ValueError(f"label_smoothing={label_smoothing!r} must lie in [0, 1)")
    group = resolve_group(tensor_parallel_group(tp_group))
    loss: Tensor = _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, label_smoothing, group)
    return loss


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, label_smoothing: float, group: TensorParallelGroup) -> Tensor:
        rows = logits.shape[-1]
        vocab_size = rows * group.size
        top = logits.max(dim=-1).values.float()
        if not group.is_single:
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group.require())
        shifted = logits.float() - top.unsqueeze(-1)
        local = target - group.rank * rows
        mine = (local >= 0) & (local < rows)
        local = torch.where(mine, local, 0)
        picked = shifted.gather(-1, local.unsqueeze(-1)).squeeze(-1)
        parts = [shifted.exp().sum(dim=-1), torch.where(mine, picked, 0.0)]
        if label_smoothing:
            parts.append(shifted.sum(dim=-1))
        sums = torch.stack(parts)
        if not group.is_single:
            dist.all_reduce(sums, group=group.require())
        # 1 - a for the target and a / (V - 1) for the others is 1 - s for the target and s / V for all.
        smoothing = label_smoothing * vocab_size / (vocab_size - 1) if label_smoothing else 0.0
        loss = sums[0].log() - (1.0 - smoothing) * sums[1]
        if label_smoothing:
            loss = loss - smoothing * sums[2] / vocab_size
        ctx.smoothing, ctx.vocab_size, ctx.dtype = smoothing, vocab_size, logits.dtype
        ctx.save_for_backward(logits, top + sums[0].log(), local, mine)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, lse, local, mine = ctx.saved_tensors
        softmax = (logits.float() - lse.unsqueeze(-1)).exp_()
        softmax.scatter_add_(-1, local.unsqueeze(-1), (mine.float() * (ctx.smoothing - 1.0)).unsqueeze(-1))
        if ctx.smoothing:
            softmax -= ctx.smoothing / ctx.vocab_size
        return softmax.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None, None
