"""``cce_tp.linear_cross_entropy`` in Megatron's shapes and with Megatron's treatment of labels and padding."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import collectives
from ..collectives import TensorParallelGroup, resolve_group
from ..loss import linear_cross_entropy
from ..shard import VocabShard
from .lazy import tensor_parallel_group
from .weight_gradient import fused_accumulation

_NOT_OPTIONS = (
    *("input", "linear_weight", "target", "group", "shard", "sequence_dim", "main_grad", "reduction"),
    "unknown_labels",
)
_NO_LABEL = torch.iinfo(torch.int64).min


def vocab_parallel_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    *,
    bias: Tensor | None = None,
    count_padding: bool = True,
    vocab_size: int | None = None,
    ignore_index: int | None = None,
    gradient_accumulation_fusion: bool = False,
    **options: Any,
) -> Tensor:
    """Per-token cross-entropy of ``hidden @ weight.T``, in place of an output layer and its loss.

    Args:
        hidden: ``[s, b, h]``, the same on every rank of the group; ``[s/tp, b, h]`` under sequence parallelism.
            It must not have gone through the output layer's own input mapping: its gradient is summed here.
        weight: ``[V_local, h]``, this rank's rows of Megatron's equal split, padding included.
        labels: ``[b, s]``, already shifted; not sharded by sequence parallelism.
        tp_group: default: Megatron's tensor-parallel group.
        sequence_parallel: gather ``hidden`` along s, here and again in the backward pass; reduce-scatter its gradient.
        bias: ``[V_local]``.
        count_padding: True as Megatron: rows that pad the vocabulary enter the softmax. False: they don't.
        vocab_size: vocabulary without padding; needed with ``count_padding=False``. Then padding isn't a valid label.
        ignore_index: None as Megatron: a label outside the vocabulary gives its token the loss ``LSE - max`` and a
            gradient of ``softmax``. An int: that label gives loss 0 and no gradient, any other label outside the
            vocabulary NaN. Neither synchronises with the host.
        gradient_accumulation_fusion: add the weight's gradient to ``weight.main_grad``, as Megatron's layers do.
        **options: further keywords of ``cce_tp.linear_cross_entropy``, such as ``backward``, ``label_smoothing``,
            ``z_loss``, ``logit_scale``, ``implementation``.

    Returns:
        ``[b, s]`` fp32, unreduced.

    Collectives: those of ``linear_cross_entropy``.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``linear_cross_entropy``; ``count_padding=False`` without
            ``vocab_size``.
    """
    for name in _NOT_OPTIONS:
        if name in options:
            raise TypeError(f"{name}={options[name]!r} can't be passed: it follows from Megatron's layout")
    handle = tensor_parallel_group(tp_group)
    group = resolve_group(handle)
    shard = megatron_shard(weight.shape[0], group, vocab_size, count_padding)
    _check_layout(hidden, labels)
    weight, main_grad = fused_accumulation(weight, gradient_accumulation_fusion)
    keywords = {
        **options,
        "linear_bias": bias,
        "reduction": "none",
        "group": handle,
        "shard": shard,
        "sequence_parallel": sequence_parallel,
        "main_grad": main_grad,
        "count_padding": count_padding,
        "ignore_index": _NO_LABEL if ignore_index is None else ignore_index,
        "unknown_labels": "max" if ignore_index is None else "nan",
    }
    loss = linear_cross_entropy(hidden, weight, labels.transpose(0, 1), **keywords)
    if not isinstance(loss, Tensor):
        raise TypeError("return_stats=True can't be passed: the result is the loss alone")
    return loss.transpose(0, 1).contiguous()  # [s, b] => [b, s]


def megatron_shard(rows: int, group: TensorParallelGroup, vocab_size: int | None, count_padding: bool) -> VocabShard:
    """The rows of a rank of which each holds ``rows``, the last ones padding.

    Raises:
        ValueError: padding is to be left out, but ``vocab_size`` isn't given; or doesn't fit.
    """
    padded = rows * group.size
    if vocab_size is None:
        if not count_padding:
            raise ValueError(
                "count_padding=False needs vocab_size, the size of the vocabulary without the rows that pad it"
            )
        return VocabShard.equal(padded, group.rank, group.size)
    return VocabShard.megatron(vocab_size, padded, group.rank, group.size)


def _check_layout(hidden: Tensor, labels: Tensor) -> None:
    if hidden.ndim != 3 or labels.ndim != 2:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and labels {tuple(labels.shape)}, expected [s, b, h] and [b, s]"
        )


def gathered_tokens(hidden: Tensor, group: TensorParallelGroup, sequence_parallel: bool) -> Tensor:
    """``[N, h]``, detached. One all-gather under sequence parallelism in a group of more than one rank."""
    tokens = hidden.detach().reshape(-1, hidden.shape[-1])
    return collectives.gather_sequence(tokens, group) if sequence_parallel and not group.is_single else tokens
