"""The mean loss over a Ulysses sequence-parallel group, with the gradient that DeepSpeed's own averaging needs.

Each rank of the group holds a part of every sequence and, by its own labels, a mean over its own tokens. What is to be
minimised is the mean over all tokens. DeepSpeed averages gradients over data- *and* sequence-parallel ranks at ZeRO
stage 3, but sums them over the sequence-parallel ones at stages 0 to 2 (and at stage 3 without ``reduce_scatter``), so
the upstream factor of a rank's part depends on the stage. Adam and clipping hide such a factor; SGD doesn't.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sequence_parallel_mean(
    loss: Tensor, labels: Tensor, engine: Any, *, group: dist.ProcessGroup | None = None, ignore_index: int = -100
) -> Tensor:
    """The mean over the tokens of a sequence-parallel group, from each rank's mean over its own.

    Its gradient is right for ``engine.backward`` at the engine's ZeRO stage. Don't use it with the Hugging Face
    Trainer, which weights the ranks' losses itself.

    Args:
        loss: ``[]``, this rank's mean over the labels that aren't ignored; anything where there are none.
        labels: this rank's labels, already shifted, as they entered ``loss``.
        engine: the DeepSpeed engine.
        group: the sequence-parallel group; default: DeepSpeed's own.
        ignore_index: label of tokens that take no part.

    Returns:
        ``[]`` fp32, the same on every rank of the group. 0 over no token.

    Collectives: forward 1 all-reduce of 2 numbers; backward none.

    Raises:
        ValueError: ``loss`` is no scalar.
        TypeError: ``engine`` is no DeepSpeed engine.
    """
    if loss.ndim != 0:
        raise ValueError(f"loss has shape {tuple(loss.shape)}, expected a scalar: this rank's mean")
    if not callable(getattr(engine, "zero_optimization_stage", None)):
        raise TypeError(f"engine is a {type(engine).__name__}, expected a DeepSpeed engine, whose ZeRO stage counts")
    if group is None:
        from deepspeed.utils import groups

        group = groups._get_sequence_parallel_group()
    factor = dist.get_world_size(group) if _averages_over_sequence(engine) else 1
    count = (labels != ignore_index).sum()
    mean: Tensor = _WeightedMean.apply(loss.float(), count, factor, group)
    return mean


def _averages_over_sequence(engine: Any) -> bool:
    """Whether the engine divides the gradient by the sequence-parallel size too."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() < 3:
        return False
    contiguous = getattr(optimizer, "contiguous_gradients", False)
    return not (contiguous and not getattr(optimizer, "reduce_scatter", True))


class _WeightedMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, count: Tensor, factor: int, group: dist.ProcessGroup) -> Tensor:
        weighted = torch.where(count > 0, loss * count, 0.0)
        sums = torch.stack([weighted.double(), count.double()])
        dist.all_reduce(sums, group=group)
        total = sums[1].clamp(min=1.0)
        ctx.weight = (factor * count / total).float()
        return (sums[0] / total).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.where(ctx.weight > 0, grad * ctx.weight, 0.0), None, None, None
