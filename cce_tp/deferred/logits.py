"""Deferred logits: an exact algebra of what models do between their head and their loss.

Models rescale and cap their logits, cast, shift and flatten them, and give them to
``torch.nn.functional.cross_entropy``. Each of these steps is noted here and is either a step on the hidden states
(shifting, flattening) or a factor or softcap of the loss, so that the model's own code decides what is computed. Any
other step computes the logits after all: with a warning, or refused under ``strict``; never a wrong loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.select import choose
from ..loss import linear_cross_entropy
from ..options import LossOptions
from .head import HeadHook, weight_of
from .tensor import DeferredTensor

Step = Callable[[Any], Any]


@dataclass(frozen=True)
class _Form:
    """Logits ``outer * tanh(scale * z)`` where ``outer`` is given, else ``scale * z``, of the product z."""

    scale: float = 1.0
    outer: float | None = None

    def times(self, factor: float) -> _Form:
        if self.outer is None:
            return replace(self, scale=self.scale * factor)
        return replace(self, outer=self.outer * factor)

    def options(self) -> dict[str, Any]:
        """``logit_scale`` and ``softcap`` of the loss."""
        if self.outer is None:
            return {"logit_scale": self.scale}
        return {"logit_scale": self.scale * self.outer, "softcap": self.outer}


class DeferredLogits(DeferredTensor):
    """Logits that nobody has computed yet, of shape ``[..., V]``.

    Deferred stay: products and quotients with a positive number, ``tanh`` (once), casts to a floating-point dtype,
    slices of token dimensions, and reshapes that leave the vocabulary last. ``cross_entropy`` of 2-D logits and integer
    labels is the loss without logits. Everything else computes them once: with a warning, or a ``RuntimeError`` under
    ``strict``.

    Args:
        hook: of the head.
        source: what the head was called with.
        hidden: ``source`` after the steps on token dimensions, ``[..., D]``.
        dtype: what the logits' would be.
        form: how the logits follow from the product.
        steps: all steps, to be repeated on real logits.
    """

    # No dataclass: data-parallel wrappers look for tensors in the dataclasses that a model returns.
    def __init__(
        self,
        hook: HeadHook,
        source: Tensor,
        hidden: Tensor,
        dtype: torch.dtype,
        form: _Form = _Form(),
        steps: tuple[Step, ...] = (),
    ) -> None:
        self._hook, self._source, self._hidden, self._dtype = hook, source, hidden, dtype
        self._form, self._steps = form, steps
        self._logits: Tensor | None = None

    lazy_functions: ClassVar[dict[Callable[..., Any], str]] = {torch.tanh: "tanh", F.cross_entropy: "cross_entropy"}

    @classmethod
    def of(cls, hook: HeadHook, hidden: Tensor) -> DeferredLogits:
        """What ``head(hidden)`` stands for."""
        dtype = hidden.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        return cls(hook, hidden, hidden, dtype)

    @torch.compiler.disable
    def cross_entropy(
        self,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """``torch.nn.functional.cross_entropy`` of these logits, fp32. Over no label it is 0, with zero gradients."""
        classes = isinstance(target, Tensor) and not target.is_floating_point()
        if self.ndim != 2 or not classes or size_average is not None or reduce is not None:
            logits = self.materialise("cross_entropy of other than 2-D logits and class labels")
            return F.cross_entropy(
                logits, target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        if target.shape != self.shape[:-1]:
            raise ValueError(
                f"cross_entropy got labels of shape {tuple(target.shape)} for logits of shape {tuple(self.shape)}, "
                f"expected {tuple(self.shape[:-1])} (logits_to_keep leaves logits out, but not labels)"
            )
        hook = self._hook
        keywords = {
            **hook.options,
            **self._form.options(),
            "weight": weight,
            "ignore_index": ignore_index,
            "reduction": reduction,
            "label_smoothing": label_smoothing,
            "group": hook.group,
            "shard": hook.shard,
        }

        def loss(layer: nn.Module, hidden: Tensor) -> Tensor:
            any_layer: Any = layer
            value = linear_cross_entropy(hidden, any_layer.weight, target, linear_bias=any_layer.bias, **keywords)
            assert isinstance(value, Tensor)
            return value

        value: Tensor = nn.Module.__call__(hook.layer, self._hidden, cce_tp_loss=loss)
        hook.status.losses += 1
        implementation = LossOptions(implementation=hook.options["implementation"]).implementation
        hook.status.implementation = choose(implementation, self.device, self._dtype).name
        return value

    @torch.compiler.disable
    def materialise(self, reason: str) -> Tensor:
        """The real logits, with their gradients, through the head's own forward.

        Raises:
            RuntimeError: the hook is strict; or ZeRO-3 has partitioned the head's weight again.
        """
        if self._logits is not None:
            return self._logits
        hook = self._hook
        if hook.strict:
            raise RuntimeError(
                f"strict: {reason} needs the logits, which training was to do without; use strict=False to have them "
                f"computed"
            )
        if hook.is_partitioned and not hook.in_forward:
            raise RuntimeError(
                f"{reason} needs the logits after the model's forward, where ZeRO-3 has partitioned the head's weight; "
                f"use the loss that the model computes from labels, or call the model without labels"
            )
        hook.warn_once("logits", f"{reason} needs real logits in training, so they are computed and stored")
        hook.status.materialised += 1
        logits: Tensor = nn.Module.__call__(hook.layer, self._source)
        for step in self._steps:
            logits = step(logits)
        self._logits = logits
        return logits

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._hidden.shape[:-1], self._hook.vocab_size()))

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled() and (self._hidden.requires_grad or weight_of(self._hook.layer).requires_grad)

    def _after(
        self,
        step: Step,
        *,
        hidden: Tensor | None = None,
        dtype: torch.dtype | None = None,
        form: _Form | None = None,
    ) -> DeferredLogits:
        """These logits after one more step."""
        return DeferredLogits(
            self._hook,
            self._source,
            self._hidden if hidden is None else hidden,
            self._dtype if dtype is None else dtype,
            self._form if form is None else form,
            (*self._steps, step),
        )

    def __mul__(self, factor: Any) -> Any:
        if _is_positive(factor):
            return self._after(lambda z: z * factor, form=self._form.times(float(factor)))
        return self.materialise("a multiplication by other than a positive number") * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if _is_positive(divisor):
            return self._after(lambda z: z / divisor, form=self._form.times(1.0 / float(divisor)))
        return self.materialise("a division by other than a positive number") / divisor

    def tanh(self) -> Any:
        if self._form.outer is None:
            return self._after(torch.tanh, form=replace(self._form, outer=1.0))
        return self.materialise("a second tanh").tanh()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Casts and copies; a move to another device computes the logits."""
        probe = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if probe.device != self.device or not probe.is_floating_point():
            return self.materialise("a move or cast").to(*args, **kwargs)
        return self if probe.dtype == self.dtype else self._after(lambda z: z.to(probe.dtype), dtype=probe.dtype)

    def float(self) -> Any:
        return self.to(torch.float32)

    def contiguous(self) -> DeferredLogits:
        return self

    def reshape(self, *shape: Any) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if not sizes or sizes[-1] not in (-1, self.shape[-1]):
            return self.materialise("a reshape across the vocabulary").reshape(*shape)
        hidden = self._hidden.reshape(*sizes[:-1], self._hidden.shape[-1])
        return self._after(lambda z: z.reshape(sizes), hidden=hidden)

    def view(self, *shape: Any) -> Any:
        """``reshape``: only values matter here, and no view of the storage is promised."""
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return self.materialise("a view as another dtype").view(*shape)
        return self.reshape(*shape)

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        first, last = (dim % self.ndim for dim in (start_dim, end_dim))
        if last >= self.ndim - 1:
            return self.materialise("a flatten across the vocabulary").flatten(start_dim, end_dim)
        return self._after(lambda z: z.flatten(first, last), hidden=self._hidden.flatten(first, last))

    def __getitem__(self, index: Any) -> Any:
        """Slices and numbers of token dimensions, and masks over them."""
        if isinstance(index, Tensor) and index.dtype == torch.bool and index.ndim < self.ndim:
            return self._after(lambda z: z[index], hidden=self._hidden[index])
        parts = index if isinstance(index, tuple) else (index,)
        plain = all(part is Ellipsis or isinstance(part, int | slice) for part in parts)
        dots = [place for place, part in enumerate(parts) if part is Ellipsis]
        if plain and len(dots) == 1:
            fill = (slice(None),) * (self.ndim - len(parts) + 1)
            parts = (*parts[: dots[0]], *fill, *parts[dots[0] + 1 :])
        whole_rows = len(parts) < self.ndim or (len(parts) == self.ndim and parts[-1] == slice(None))
        if not (plain and len(dots) <= 1 and whole_rows):
            return self.materialise("indexing beyond slices of tokens")[index]
        return self._after(lambda z: z[index], hidden=self._hidden[parts])


def _is_positive(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0.0 < float(value) < float("inf")
