"""The output layer that puts the logits off, and what it returns in their place."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import resolve_group
from ..deferred.head import HookStatus
from ..deferred.tensor import DeferredTensor
from ..kernels.select import choose
from ..options import LossOptions
from .lazy import megatron_version
from .losses import gathered_tokens, vocab_parallel_linear_cross_entropy
from .streaming import streaming_max

HOOK_ATTRIBUTE = "_cce_tp_hook"
FSDP_SINCE = (0, 19)


@dataclass
class Hook:
    """The options of one installed layer, and what ``uninstall`` has to restore.

    Attributes:
        base: the layer's class before.
        strict: refuse to materialise logits.
        masks: labels or padding aren't treated as Megatron does, so a loss from real logits needs the same treatment.
        options: keywords of ``vocab_parallel_linear_cross_entropy``.
        loss_before: an instance's own ``compute_language_model_loss``, if it had one.
    """

    base: type[nn.Module]
    strict: bool
    masks: bool
    options: dict[str, Any]
    status: HookStatus
    loss_before: Callable[..., Tensor] | None = None
    warned: bool = field(default=False)


def hook_of(layer: nn.Module) -> Hook | None:
    """The hook of an installed output layer; None if it has none."""
    found: Hook | None = layer.__dict__.get(HOOK_ATTRIBUTE)
    return found


def check_supported(layer: nn.Module, column_parallel: type[nn.Module]) -> None:
    """Refuse what can't be done right.

    Raises:
        TypeError: the layer isn't Megatron's ``ColumnParallelLinear``, or changes its forward.
        NotImplementedError: a feature of the layer isn't supported; the message names it.
    """
    any_layer: Any = layer
    kind = type(layer)
    config = any_layer.config if hasattr(layer, "config") else None
    if kind.__name__.startswith("TE") or getattr(config, "fp8_output_proj", False):
        raise NotImplementedError(
            f"cce_tp.megatron doesn't support an fp8 output layer (output_layer is a {kind.__name__}); turn "
            f"fp8_output_proj off"
        )
    if not isinstance(layer, column_parallel) or kind.forward is not column_parallel.forward:
        raise TypeError(
            f"output_layer is a {kind.__module__}.{kind.__qualname__}, expected Megatron's ColumnParallelLinear with "
            f"its own forward: an adapter (LoRA) or wrapper around the output layer would be bypassed"
        )
    refused = {
        "defer_embedding_wgrad_compute": getattr(config, "defer_embedding_wgrad_compute", False),
        "gtp weight sharding (gtp_remat_size > 1)": getattr(layer, "gtp_remat_size", 1) > 1,
        "disable_grad_reduce": getattr(layer, "disable_grad_reduce", False),
        "an expert output layer (is_expert)": getattr(layer, "is_expert", False),
    }
    for name, present in refused.items():
        if present:
            raise NotImplementedError(f"cce_tp.megatron doesn't support {name} on the output layer; turn it off")


@functools.cache
def deferring_class(base: Any) -> type[nn.Module]:
    """``base``, a ``ColumnParallelLinear``, with a forward that returns ``DeferredLogits`` in training and evaluation.

    It has the name of ``base``: Megatron-FSDP and others go by it.
    """

    def forward(
        self: Any,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        *more: Any,
        **others: Any,
    ) -> tuple[Any, Tensor | None]:
        gather = self.gather_output if runtime_gather_output is None else runtime_gather_output
        gather = gather and dist.get_world_size(self.tp_group) > 1
        rows = self.weight if weight is None else weight
        # Not by whether gradients are on: recomputation runs the first forward without. Inference asks for the gather,
        # even in a group of one; evaluation doesn't.
        infers = torch.is_inference_mode_enabled() or (not self.training and runtime_gather_output)
        if infers or gather or more or others or rows is None:
            return base.forward(self, input_, weight, runtime_gather_output, *more, **others)
        _check_shape(self, rows)
        if hasattr(rows, "__fsdp_param__"):
            check_fsdp_version()
        return DeferredLogits(self, input_, rows), self.bias if self.skip_bias_add else None

    return type(
        base.__name__,
        (base,),
        {
            "forward": forward,
            "__doc__": base.__doc__,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
        },
    )


def _check_shape(layer: Any, weight: Tensor) -> None:
    """Raise ValueError for a weight whose shape isn't the layer's."""
    expected = (layer.output_size_per_partition, layer.input_size)
    if tuple(weight.shape) != expected:
        raise ValueError(f"output_layer got a weight of shape {tuple(weight.shape)}, expected {expected}")


def check_fsdp_version() -> None:
    """Refuse Megatron-FSDP of the versions that wait for the output layer's logits to begin a backward pass.

    Raises:
        NotImplementedError: megatron-core is older than 0.19.
    """
    if megatron_version() < FSDP_SINCE:
        raise NotImplementedError(
            f"cce_tp.megatron supports Megatron-FSDP from megatron-core 0.19 on, and this is "
            f"{'.'.join(map(str, megatron_version()))}: use DistributedDataParallel with the distributed optimizer"
        )


def refuse_released_weight() -> None:
    """Raise for an output layer that Megatron-FSDP treats as a unit.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        "cce_tp.megatron doesn't support an output layer that is an FSDP unit of its own: Megatron-FSDP then releases "
        "its weight before the loss reads it. Leave the layer's class out of fsdp_unit_modules"
    )


class DeferredLogits(DeferredTensor):
    """Logits ``scale * (hidden @ weight.T + bias)`` that nobody has computed yet.

    The loss takes them as they are. ``shape``, ``size``, ``dtype``, ``device``, ``dim``, a multiplication by a number,
    and, without gradients, maxima over the vocabulary need no logits either. Whatever else is done with the object
    computes real logits, once, and in training warns (or raises, under ``strict``).
    """

    lazy_functions: ClassVar[dict[Callable[..., Any], str]] = {torch.max: "max", torch.argmax: "argmax"}

    def __init__(self, layer: Any, hidden: Tensor, weight: Tensor, scale: float = 1.0) -> None:
        self._layer = layer
        self._hidden = hidden
        self._weight = weight
        self._scale = scale
        self._logits: Tensor | None = None

    @property
    def _hook(self) -> Hook:
        hook = hook_of(self._layer)
        if hook is None:
            raise RuntimeError("cce_tp.megatron was uninstalled between the forward pass and the loss")
        return hook

    @property
    def _bias(self) -> Tensor | None:
        bias: Tensor | None = None if self._layer.skip_bias_add else self._layer.bias
        return bias

    def loss(self, labels: Tensor) -> Tensor:
        """Per-token loss ``[b, s]``, fp32, of ``labels`` ``[b, s]``."""
        hook, layer = self._hook, self._layer
        if self._weight.untyped_storage().size() == 0:
            refuse_released_weight()
        loss = vocab_parallel_linear_cross_entropy(
            self._hidden,
            self._weight,
            labels,
            layer.tp_group,
            layer.sequence_parallel,
            bias=self._bias,
            gradient_accumulation_fusion=layer.gradient_accumulation_fusion,
            logit_scale=self._scale,
            **hook.options,
        )
        hook.status.losses += 1
        requested = LossOptions(implementation=hook.options["implementation"]).implementation
        hook.status.implementation = choose(requested, self._hidden.device, self._hidden.dtype).name
        return loss

    def materialise(self, reason: str) -> Tensor:
        """The real logits ``[s, b, V_local]``, with their gradients, through Megatron's own layer.

        Raises:
            RuntimeError: in training, the hook is strict.
        """
        if self._logits is None:
            if self._layer.training:
                self._account(reason)
            forward: Callable[..., Any] = self._hook.base.forward
            logits, _ = forward(self._layer, self._hidden, weight=self._weight, runtime_gather_output=False)
            self._logits = logits if self._scale == 1.0 else logits * self._scale
        return self._logits

    def _account(self, reason: str) -> None:
        """Refuse, or warn once and count."""
        hook = self._hook
        if hook.strict:
            raise RuntimeError(
                f"cce_tp.megatron, strict: {reason} needs the logits, which training was to do without; install with "
                f"strict=False to have them computed"
            )
        if not hook.warned:
            warnings.warn(
                f"cce_tp.megatron: {reason} needs real logits, so they are computed and stored; this is said once",
                stacklevel=4,
            )
            hook.warned = True
        hook.status.materialised += 1

    @property
    def shape(self) -> torch.Size:
        tokens, *rest = self._hidden.shape[:-1]
        if self._layer.sequence_parallel:
            tokens *= dist.get_world_size(self._layer.tp_group)
        return torch.Size((tokens, *rest, self._weight.shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        return self._hidden.dtype

    @property
    def device(self) -> torch.device:
        return self._hidden.device

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled() and (self._hidden.requires_grad or self._weight.requires_grad)

    def __mul__(self, factor: Any) -> Any:
        if isinstance(factor, Real):
            return DeferredLogits(self._layer, self._hidden, self._weight, self._scale * float(factor))
        return self.materialise("a multiplication by a tensor") * factor

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> Any:
        if isinstance(divisor, Real) and divisor != 0:
            return self * (1.0 / float(divisor))
        return self.materialise("a division by a tensor") / divisor

    def max(self, *args: Any, **kwargs: Any) -> Any:
        """``Tensor.max``; over the vocabulary and without gradients, in slabs."""
        if self._is_over_vocabulary(args, kwargs) and not torch.is_grad_enabled():
            return torch.return_types.max(self._row_maxima())
        return self.materialise("max with gradients or over other dimensions").max(*args, **kwargs)

    def argmax(self, *args: Any, **kwargs: Any) -> Tensor:
        """``Tensor.argmax``; over the vocabulary, in slabs."""
        if self._is_over_vocabulary(args, kwargs):
            return self._row_maxima()[1]
        return self.materialise("argmax over other dimensions").argmax(*args, **kwargs)

    def _is_over_vocabulary(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        given = [*args, *kwargs.values()] if set(kwargs) <= {"dim"} else []
        return len(given) == 1 and given[0] in (-1, self.ndim - 1)

    def _row_maxima(self) -> tuple[Tensor, Tensor]:
        """Over this rank's rows, ``[s, b]`` each. One all-gather under sequence parallelism."""
        tokens = gathered_tokens(self._hidden, resolve_group(self._layer.tp_group), self._layer.sequence_parallel)
        scale = self._scale
        finish: Callable[[Tensor], Tensor] = (lambda z: z) if scale == 1.0 else (lambda z: z * scale)
        best, rows = streaming_max(tokens, self._weight, self._bias, finish)
        return best.view(self.shape[:-1]), rows.view(self.shape[:-1])
