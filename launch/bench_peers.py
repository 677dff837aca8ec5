"""The methods that ``cce-tp bench`` compares: ours, and one adapter for each peer.

A method computes the mean loss of hidden states ``[N, D]``, a classifier ``[V, D]`` and targets ``[N]``, so that
autograd gives the gradients of the first two, in their dtype. ``load`` imports what it needs; whatever it raises is the
reason why the method is not measured.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import cce_tp
from cce_tp.options import ORDERS, Backward

from . import runtime
from .console import power_of_two

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
FILTER_EPS = 2.0**-12


class Unavailable(Exception):
    """This version of a peer, or of PyTorch, or this device, cannot do it."""


@dataclass(frozen=True)
class Method(ABC):
    """Something that computes the loss; pickled to the processes that compile it."""

    package: ClassVar[str]
    ours: ClassVar[bool] = False

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def compiles(self) -> bool:
        """Whether its first call takes long, and later ones of other processes do not."""
        return True

    @abstractmethod
    def load(self) -> Loss:
        """The loss as a function of hidden states, classifier and targets."""

    @property
    def version(self) -> str | None:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return None


def reason(error: Exception) -> str:
    """In one line, why a method was not measured."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        return f"{error.name.partition('.')[0]} is not installed"
    if isinstance(error, Unavailable | NotImplementedError | ImportError):
        return first
    return f"{type(error).__name__}: {first}"[:200]


@dataclass(frozen=True)
class Ours(Method):
    """The public function, eagerly, through autograd."""

    mode: Backward
    package: ClassVar[str] = "cce_tp"
    ours: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return ", ".join([f"cce_tp {type(self.mode).__name__.lower()}", *_options(self.mode)])

    @property
    def version(self) -> str | None:
        return cce_tp.__version__

    def load(self) -> Loss:
        return lambda e, c, y: cce_tp.linear_cross_entropy(e, c, y, backward=self.mode)


def _options(mode: Backward) -> list[str]:
    """eps, and whatever is not as usual; a seed makes no difference that matters here."""
    found = []
    for option in fields(mode):
        value = getattr(mode, option.name)
        if option.name == "eps":
            found.append(f"eps = {power_of_two(value)}")
        elif option.name != "seed" and value != option.default:
            found.append(f"{option.name} = {value}")
    return found


@dataclass(frozen=True)
class Torch(Method):
    """``F.linear`` and ``F.cross_entropy``.

    Attributes:
        widened: the logits, a product's 16-bit output, become fp32 before the loss, as most training scripts have it.
        compiled: by ``torch.compile``.
    """

    widened: bool
    compiled: bool = False
    package: ClassVar[str] = "torch"

    @property
    def name(self) -> str:
        return f"torch{'.compile' if self.compiled else ' eager'}{', logits widened' * self.widened}"

    @property
    def compiles(self) -> bool:
        return self.compiled

    def load(self) -> Loss:
        loss = _widened_loss if self.widened else _plain_loss
        # Shapes are compiled in: the measurements walk through several, and each shall have its best.
        return torch.compile(loss, dynamic=False) if self.compiled else loss


def _plain_loss(e: Tensor, c: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(e, c), y)


def _widened_loss(e: Tensor, c: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(e, c).float(), y)


@dataclass(frozen=True)
class TorchLinearCrossEntropy(Method):
    """``torch.nn.functional.linear_cross_entropy``."""

    package: ClassVar[str] = "torch"

    @property
    def name(self) -> str:
        return "torch linear_cross_entropy"

    @property
    def compiles(self) -> bool:
        return False

    def load(self) -> Loss:
        function = getattr(F, "linear_cross_entropy", None)
        if function is None:
            raise Unavailable(f"torch {torch.__version__} has no linear_cross_entropy (PyTorch 2.13 has)")
        return lambda e, c, y: function(e, c, y)


@dataclass(frozen=True)
class Megatron(Method):
    """Megatron-core's output layer and vocabulary-parallel cross-entropy, in a group of one."""

    fused: bool
    package: ClassVar[str] = "megatron-core"

    @property
    def name(self) -> str:
        return f"megatron-core {'fused' if self.fused else 'unfused'}"

    @property
    def compiles(self) -> bool:
        return self.fused

    def load(self) -> Loss:
        from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        if not dist.is_initialized():
            runtime.initialize()
        group = dist.group.WORLD

        def loss(e: Tensor, c: Tensor, y: Tensor) -> Tensor:
            logits = linear_with_grad_accumulation_and_async_allreduce(
                input=e[:, None],
                weight=c,
                bias=None,
                gradient_accumulation_fusion=False,
                allreduce_dgrad=False,
                sequence_parallel=False,
                tp_group=group,
            )
            if self.fused:
                return fused_vocab_parallel_cross_entropy(logits, y[:, None], group).mean()
            # The output layer's logits are widened in Megatron's unfused loss itself.
            return vocab_parallel_cross_entropy(logits, y[:, None], tp_group=group).mean()

        return loss


@dataclass(frozen=True)
class AppleCCE(Method):
    """Apple's kernels for cut cross-entropy (Wijmans et al., ICLR 2025).

    Attributes:
        implementation: the package's name for it.
        filter_eps: threshold of its filter; "default" for the implementation's own, None for no filter.
    """

    implementation: str = "cce"
    filter_eps: float | str | None = "default"
    package: ClassVar[str] = "cut-cross-entropy"

    @property
    def name(self) -> str:
        if self.filter_eps == "default":
            return f"Apple {self.implementation}"
        eps = power_of_two(self.filter_eps) if isinstance(self.filter_eps, float) else self.filter_eps
        return f"Apple {self.implementation}, filter_eps = {eps}"

    def load(self) -> Loss:
        from cut_cross_entropy import LinearCrossEntropyImpl, linear_cross_entropy

        if self.implementation.upper() not in LinearCrossEntropyImpl.__members__:
            raise Unavailable(f"cut-cross-entropy {self.version} has no implementation {self.implementation}")
        options: dict[str, Any] = {"impl": self.implementation}
        if self.filter_eps != "default":
            options["filter_eps"] = self.filter_eps
        return lambda e, c, y: linear_cross_entropy(e, c, y, **options)


@dataclass(frozen=True)
class Liger(Method):
    """Liger-Kernel's fused linear cross-entropy, in chunks of tokens, with its defaults."""

    package: ClassVar[str] = "liger-kernel"

    @property
    def name(self) -> str:
        return "Liger"

    def load(self) -> Loss:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        return lambda e, c, y: liger_fused_linear_cross_entropy(e, c, y)


@dataclass(frozen=True)
class DeepSpeed(Method):
    """DeepSpeed's vocabulary-parallel linear cross-entropy, which nothing in DeepSpeed calls; without a group."""

    package: ClassVar[str] = "deepspeed"

    @property
    def name(self) -> str:
        return "deepspeed"

    @property
    def compiles(self) -> bool:
        return False

    def load(self) -> Loss:
        from deepspeed.sequence.linear_cross_entropy import vocab_parallel_linear_cross_entropy

        return lambda e, c, y: vocab_parallel_linear_cross_entropy(e, c, y)


def ours(eps: float) -> list[Method]:
    filters = [Ours(cce_tp.Filtered(eps=FILTER_EPS, order=order)) for order in ORDERS]
    return [Ours(cce_tp.Exact()), *filters, Ours(cce_tp.Sampled(eps=eps))]


def peers() -> list[Method]:
    """All that there are, installed or not."""
    return [
        Torch(widened=False),
        Torch(widened=True),
        Torch(widened=False, compiled=True),
        Torch(widened=True, compiled=True),
        TorchLinearCrossEntropy(),
        Megatron(fused=True),
        Megatron(fused=False),
        AppleCCE(),
        AppleCCE("cce_kahan_full_c"),
        AppleCCE("cce_exact"),
        AppleCCE(filter_eps=None),
        Liger(),
        DeepSpeed(),
    ]
