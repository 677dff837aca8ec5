"""How Megatron wants the classifier's gradient when it fuses the accumulation.

With ``gradient_accumulation_fusion`` the gradient is added to ``weight.main_grad`` inside the backward pass and doesn't
go through ``weight.grad``. Megatron's DDP, however, waits for autograd to accumulate *something* into the parameter,
and asserts it: so a parameter that has ``grad_added_to_main_grad`` gets that flag set and a placeholder as gradient.

Megatron-FSDP gathers gradients in buffers that come and go, and takes what autograd leaves in ``weight.grad`` as well:
there autograd sums up the gradient, also of a head that is used several times.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .lazy import megatron_module


def fused_accumulation(weight: Tensor, fusion: bool) -> tuple[Tensor, Tensor | None]:
    """The weight to hand to the loss, and the ``main_grad`` to accumulate into.

    Args:
        weight: ``[V_local, D]``, the parameter.
        fusion: whether the layer has ``gradient_accumulation_fusion``.

    Returns:
        ``(weight, None)`` where autograd takes the gradient: without fusion, under Megatron-FSDP, for a frozen weight,
        without gradients, or where the parameter has no ``main_grad``. Else an alias of the weight that fulfils the
        contract above, and ``weight.main_grad``.
    """
    fused = fusion and not hasattr(weight, "__fsdp_param__")
    main_grad = getattr(weight, "main_grad", None) if fused else None
    if main_grad is None or not weight.requires_grad or not torch.is_grad_enabled():
        return weight, None
    return _AccumulatedElsewhere.apply(weight), main_grad


class _AccumulatedElsewhere(torch.autograd.Function):
    """An alias of the weight, whose user adds the gradient to ``main_grad`` and returns none."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        # The parameter itself, not a saved tensor: its attributes are what backward needs, and it is never changed.
        ctx.weight = weight
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        weight = ctx.weight
        if grad is not None or not hasattr(weight, "grad_added_to_main_grad"):
            return grad
        weight.grad_added_to_main_grad = True
        return _placeholder(weight)


def _placeholder(weight: Tensor) -> Tensor:
    """A gradient of the right shape that nobody reads; zeros where the embedding's gradient is added to it."""
    zero = bool(getattr(weight, "zero_out_wgrad", False))
    layers = megatron_module("tensor_parallel.layers")
    if getattr(layers, "HAVE_TE", False):
        # Transformer Engine keeps one such buffer for all layers.
        shared: Tensor = layers.get_dummy_wgrad(list(weight.shape), weight.dtype, zero=zero)
        return shared
    return torch.zeros_like(weight) if zero else torch.empty_like(weight)
