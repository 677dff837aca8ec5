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
from .streaming import streaming_max
from .weight_gradient import fused_accumulation

_NOT_OPTIONS = ("input", "linear_weight", "target", "group", "shard", "sequence_dim", "main_grad", "reduction")


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
            gradient of ``softmax``. That reads the labels on the host (a synchronisation), and where there is such a
            label it takes one more product and all-reduce. An int: that label gives loss 0 and no gradient, any other
            label outside the vocabulary NaN, without a synchronisation.
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
    }
    # [b, s] => [s, b] and back
    target = labels.transpose(0, 1)
    if ignore_index is not None:
        loss = linear_cross_entropy(hidden, weight, target, ignore_index=ignore_index, **keywords)
    else:
        loss = _loss_as_megatron(hidden, weight, target, group, shard, keywords)
    if not isinstance(loss, Tensor):
        raise TypeError("return_stats=True can't be passed: the result is the loss alone")
    return loss.transpose(0, 1).contiguous()


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


def _loss_as_megatron(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: TensorParallelGroup,
    shard: VocabShard,
    keywords: dict[str, Any],
) -> Tensor:
    """As ``VocabParallelCrossEntropy`` has it: the logit of a label that no rank holds counts as the row's maximum.

    ``max`` is a constant to the gradient there, so what is left is that of the log-sum-exp.
    """
    known = (target >= 0) & (target < shard.vocab_size)
    if bool(known.all()):
        # Whatever is ignored must not be one of these labels.
        loss = linear_cross_entropy(hidden, weight, target, ignore_index=-1, **keywords)
        assert isinstance(loss, Tensor)
        return loss
    loss, stats = linear_cross_entropy(
        hidden, weight, torch.where(known, target, 0), ignore_index=-1, return_stats=True, **keywords
    )
    top = _global_max(hidden, weight, group, shard, keywords)
    return torch.where(known, loss, stats.lse - top.view(target.shape))


def _global_max(
    hidden: Tensor, weight: Tensor, group: TensorParallelGroup, shard: VocabShard, keywords: dict[str, Any]
) -> Tensor:
    """Largest logit of each token over the whole vocabulary, fp32 ``[N]``. One all-reduce MAX, or none if single."""
    rows = shard.num_rows if keywords["count_padding"] else shard.num_real
    scale, softcap = keywords.get("logit_scale", 1.0), keywords.get("softcap")
    tokens = gathered_tokens(hidden, group, keywords["sequence_parallel"])
    bias = keywords["linear_bias"]

    def finish(logits: Tensor) -> Tensor:
        scaled = logits.float() * scale
        return scaled if softcap is None else softcap * torch.tanh(scaled / softcap)

    if rows == 0:
        top = torch.full((tokens.shape[0],), -torch.inf, device=tokens.device)
    else:
        top, _ = streaming_max(tokens, weight[:rows], None if bias is None else bias[:rows], finish)
    if not group.is_single:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group.require())
    return top


def gathered_tokens(hidden: Tensor, group: TensorParallelGroup, sequence_parallel: bool) -> Tensor:
    """``[N, h]``, detached. One all-gather under sequence parallelism in a group of more than one rank."""
    tokens = hidden.detach().reshape(-1, hidden.shape[-1])
    return collectives.gather_sequence(tokens, group) if sequence_parallel and not group.is_single else tokens
