"""The loss of a DeepSpeed ``PipelineModule``.

A pipeline computes its loss outside of its layers. So the last layer hands out hidden states and its weight, and the
loss function makes the loss of both. It is a function and no module, for a module's weight would be registered on every
stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..loss import linear_cross_entropy
from ..options import LossOptions
from ..shard import VocabShard

PipelineOutput = tuple[Tensor, ...]
"""Hidden states ``[..., D]``, weight ``[V_local, D]`` and perhaps bias ``[V_local]``."""

GroupOrCallable = dist.ProcessGroup | Callable[[], dist.ProcessGroup] | None


class PipelineHead(nn.Linear):
    """The last layer: in place of ``nn.Linear(hidden_size, vocab_size)``, with the same parameters."""

    def forward(self, input: Tensor) -> PipelineOutput:  # type: ignore[override]
        """``(input, weight)``, or ``(input, weight, bias)``."""
        weight = self.weight.view_as(self.weight)  # activation checkpointing may not return a parameter itself
        return (input, weight) if self.bias is None else (input, weight, self.bias.view_as(self.bias))


def tied_pipeline_head(module: nn.Module, hidden: Tensor) -> PipelineOutput:
    """The ``forward_fn`` of a ``TiedLayerSpec`` that uses an embedding as the last layer."""
    any_module: Any = module
    weight: Tensor = any_module.weight
    return hidden, weight.view_as(weight)


def pipeline_loss_fn(
    *, group: GroupOrCallable = None, shard: VocabShard | None = None, **options: Any
) -> Callable[[PipelineOutput, Tensor], Tensor]:
    """A ``loss_fn`` for ``PipelineModule`` whose last layer is a ``PipelineHead``.

    Args:
        group: the tensor-parallel group, if the last layer holds a shard of the vocabulary's rows; or a function that
            returns it, for it may not exist before the module does:
            ``lambda: module.mpu().get_slice_parallel_group()``.
        shard: which rows; default: equal shards in rank order.
        **options: further keywords of ``cce_tp.linear_cross_entropy``, such as ``backward`` or ``ignore_index``.

    Returns:
        A function of what the last layer returns and labels ``[...]``, already shifted, to the loss.

    Raises:
        TypeError, ValueError: an option is unknown or out of range.
    """
    LossOptions(**{name: value for name, value in options.items() if name not in ("linear_bias", "weight")})

    def loss_fn(outputs: PipelineOutput, labels: Tensor) -> Tensor:
        if not isinstance(outputs, tuple) or len(outputs) not in (2, 3):
            raise TypeError(
                f"the pipeline's last layer returned a {type(outputs).__name__}, expected (hidden, weight): end the "
                f"layers with cce_tp.deepspeed.PipelineHead or tied_pipeline_head"
            )
        hidden, weight, *bias = outputs
        handle = group() if callable(group) and not isinstance(group, dist.ProcessGroup) else group
        loss = linear_cross_entropy(
            hidden, weight, labels, linear_bias=bias[0] if bias else None, group=handle, shard=shard, **options
        )
        assert isinstance(loss, torch.Tensor)
        return loss

    return loss_fn
