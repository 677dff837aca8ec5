"""A classifier that puts its product off in training, by exchanging its class; parameters and hooks stay as they are.

Calling the head in training, while its model has labels, returns ``DeferredLogits`` at once. When the cross-entropy of
these is taken, the head is called as a module a second time, with the loss as an argument: then its hooks run, once,
with the hidden states as input. That is where ZeRO-3 and FSDP gather the weight, and release it when the head is done.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives import TensorParallelGroup, all_gather, resolve_group
from ..shard import VocabShard

HOOK_ATTRIBUTE = "_cce_tp_hook"

HeadLoss = Callable[[nn.Module, Tensor], Tensor]
"""The loss of a head, whose weight is there when it is called, and hidden states."""


@dataclass
class HookStatus:
    """What a hook has put in place on one model, and what came of it.

    Attributes:
        backward: the backward mode, as given.
        implementation: "triton" or "torch", as the last loss used it; None before the first.
        losses: losses computed without logits.
        materialised: deferred logits that had to be computed after all.
    """

    backward: object
    implementation: str | None = None
    losses: int = 0
    materialised: int = 0


@dataclass
class HeadHook:
    """The options of one installed head, and what is needed to restore it.

    Attributes:
        layer: the head, which holds weight and bias.
        base: its class before.
        group: the tensor-parallel group whose ranks hold the head's rows; None for a whole head.
        shard: this rank's rows; None if ``group`` is None.
        gathers: the former forward gathers the logits of a sharded head by itself.
        sums_input_grad: the former forward sums the gradient of its input over ``group``.
        strict: refuse to materialise logits.
        options: keywords of ``linear_cross_entropy``.
        active: a forward pass of the model, in training and with labels, is under way.
    """

    layer: Any
    base: Any
    group: dist.ProcessGroup | None
    shard: VocabShard | None
    gathers: bool
    sums_input_grad: bool
    strict: bool
    options: dict[str, Any]
    status: HookStatus
    active: bool = False
    in_forward: bool = False
    warned: set[str] = field(default_factory=set)

    @property
    def is_partitioned(self) -> bool:
        """DeepSpeed ZeRO-3 owns the weight: it is there only while the head runs."""
        return hasattr(weight_of(self.layer), "ds_id")

    def vocab_size(self) -> int:
        """V over the group, ids that no rank holds excluded."""
        return num_rows(self.layer) if self.shard is None else self.shard.vocab_size

    @contextmanager
    def forward_pass(self, active: bool) -> Any:
        """Around the model's forward."""
        before = self.active, self.in_forward
        self.active, self.in_forward = active, True
        try:
            yield
        finally:
            self.active, self.in_forward = before

    def warn_once(self, about: str, text: str) -> None:
        if about not in self.warned:
            self.warned.add(about)
            warnings.warn(f"cce_tp: {text}; this is said once", stacklevel=4)

    def __deepcopy__(self, memo: dict[int, Any]) -> HeadHook:
        """A copy for a copied model: process groups can't be copied."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        for name, value in self.__dict__.items():
            twin.__dict__[name] = value if name in ("group", "options") else copy.deepcopy(value, memo)
        return twin


def weight_of(layer: nn.Module) -> Tensor:
    """The head's weight as it is; reading the attribute in a forward pass would have ZeRO-3 gather it."""
    weight: Tensor | None = layer._parameters.get("weight")
    if weight is None:
        any_layer: Any = layer
        weight = any_layer.weight
    assert weight is not None
    return weight


def num_rows(layer: nn.Module) -> int:
    """Rows of the head's weight on this rank, also where ZeRO-3 has partitioned it."""
    weight = weight_of(layer)
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def hook_of(head: nn.Module) -> HeadHook | None:
    """The hook of an installed head; None if it has none."""
    found: HeadHook | None = head.__dict__.get(HOOK_ATTRIBUTE)
    return found


def install_on_head(hook: HeadHook) -> None:
    """Exchange the head's class."""
    hook.layer.__dict__[HOOK_ATTRIBUTE] = hook
    hook.layer.__class__ = _deferring_class(hook.base)


def uninstall_from_head(hook: HeadHook) -> None:
    """Give the head its class back.

    Raises:
        RuntimeError: something else has exchanged the class since.
    """
    if type(hook.layer) is not _deferring_class(hook.base):
        raise RuntimeError(
            f"the head was wrapped after cce_tp's hook was installed (it is a {type(hook.layer).__name__} now): undo "
            f"that first"
        )
    hook.layer.__class__ = hook.base
    del hook.layer.__dict__[HOOK_ATTRIBUTE]


@functools.cache
def _deferring_class(base: Any) -> Any:
    """``base`` with a ``__call__`` that defers and a ``forward`` that takes a loss; it has the name of ``base``."""
    from .logits import DeferredLogits

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook = self.__dict__[HOOK_ATTRIBUTE]
        if hook.active and len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            return DeferredLogits.of(hook, args[0])
        return base.__call__(self, *args, **kwargs)

    def forward(self: Any, input: Tensor, *, cce_tp_loss: HeadLoss | None = None) -> Tensor:
        hook = self.__dict__[HOOK_ATTRIBUTE]
        if cce_tp_loss is not None:
            return cce_tp_loss(self, input)
        if hook.group is None or hook.gathers:
            return base.forward(self, input)
        group = resolve_group(hook.group)
        tokens = input if hook.sums_input_grad else _SumGradient.apply(input, group)
        return _GatherVocabulary.apply(base.forward(self, tokens), hook.shard, group)

    members = {
        "__call__": torch.compiler.disable(call),
        "forward": forward,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
    }
    return type(base.__name__, (base,), members)


class _SumGradient(torch.autograd.Function):
    """The input of a column-parallel layer: the same on every rank of the group, its gradient summed. One all-reduce in
    the backward pass."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group = group
        return tokens.view_as(tokens)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.group.is_single:
            return grad, None
        total = grad.float() if ctx.group.sums_in_fp32(grad.device) else grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group.handle)
        return total.to(grad.dtype), None


class _GatherVocabulary(torch.autograd.Function):
    """Logits ``[..., V_local]`` to ``[..., V]``, the same on every rank. One all-gather of a few numbers and one of the
    longest shard; none in the backward pass."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: VocabShard, group: TensorParallelGroup) -> Tensor:
        ctx.shard, ctx.rows = shard, local.shape[-1]
        mine = local[..., : shard.num_real].movedim(-1, 0)
        if group.is_single:
            return mine.movedim(0, -1).contiguous()
        own = torch.tensor([shard.start, shard.stop], device=local.device)
        bounds = all_gather(own, group, "gathering the bounds of the shards").tolist()
        longest = max(stop - start for start, stop in bounds)
        padded = mine.new_zeros(longest, *mine.shape[1:])
        padded[: mine.shape[0]] = mine
        gathered = all_gather(padded, group, "gathering the logits")
        whole = mine.new_empty(shard.vocab_size, *mine.shape[1:])
        for rank, (start, stop) in enumerate(bounds):
            whole[start:stop] = gathered[rank, : stop - start]
        return whole.movedim(0, -1).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shard: VocabShard = ctx.shard
        local = grad.new_zeros(*grad.shape[:-1], ctx.rows)
        local[..., : shard.num_real] = grad[..., shard.start : shard.stop]
        return local, None, None
