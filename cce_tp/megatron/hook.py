"""``install`` and ``uninstall``: one line in a Megatron training script.

Megatron's models call ``output_layer`` and give what it returns to ``compute_language_model_loss``. In training and
evaluation the installed layer returns ``DeferredLogits``; the installed loss takes hidden states and weight out of them
and never forms the logits. The layer is still called as a module, so hooks on it run (DDP's ``overlap_param_gather``
waits for the weight in one), and its parameters, their names and attributes stay as they are.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..collectives import resolve_group
from ..options import Backward, LossOptions
from .lazy import megatron_module
from .losses import megatron_shard
from .output_layer import (
    HOOK_ATTRIBUTE,
    DeferredLogits,
    Hook,
    HookStatus,
    check_fsdp_version,
    check_supported,
    deferring_class,
    hook_of,
    refuse_released_weight,
)
from .vocab_parallel_logits import vocab_parallel_cross_entropy

logger = logging.getLogger("cce_tp")

_LOSS = "compute_language_model_loss"


def install(
    model: nn.Module | Sequence[nn.Module],
    *,
    backward: str | Backward = "exact",
    count_padding: bool = True,
    vocab_size: int | None = None,
    ignore_index: int | None = None,
    implementation: str = "auto",
    strict: bool = False,
    comm_dtype: torch.dtype | None = None,
    workspace: int | None = None,
    validate: bool | None = None,
) -> int:
    """Let a Megatron model compute its loss without logits, in training and in evaluation.

    Real logits are still there in inference and for whatever else asks for them (no labels, an ``output_processor``,
    the config logger): in training with a warning, once. Logits that were gathered (``parallel_output=
    False``, ``runtime_gather_output``) can't be combined with labels in a group of more than one rank: that is refused.

    Args:
        model: a model, or the list of a pipeline stage's chunks; wrapped in DDP or Float16Module or not. Stages
            without an output layer are left alone. A second call replaces the options.
        backward: "exact", or "sampled" or ``cce_tp.Sampled(...)``.
        count_padding: True as Megatron: rows that pad the vocabulary enter the softmax.
        vocab_size: the vocabulary without padding; needed with ``count_padding=False``.
        ignore_index: None: labels outside the vocabulary as Megatron treats them; an int: that label has loss 0 and no
            gradient. See ``vocab_parallel_linear_cross_entropy``.
        implementation: "auto", "triton" or "torch".
        strict: raise, instead of warning, where training needs real logits.
        comm_dtype, workspace, validate: as in ``cce_tp.linear_cross_entropy``.

    Returns:
        How many output layers were found.

    Raises:
        ImportError: megatron-core isn't installed.
        TypeError: an argument, the model or its output layer is of the wrong kind, such as one wrapped by an adapter.
        ValueError: an option is out of range.
        NotImplementedError: the model uses a feature that isn't supported; the message names it. Nothing is installed
            then.
    """
    passed = {
        "backward": backward,
        "count_padding": count_padding,
        "implementation": implementation,
        "comm_dtype": comm_dtype,
        "workspace": workspace,
        "validate": validate,
    }
    LossOptions(ignore_index=ignore_index, **passed)  # type: ignore[arg-type]
    if not isinstance(strict, bool):
        raise TypeError(f"strict={strict!r} must be a bool")
    if count_padding and vocab_size is not None:
        raise ValueError(f"vocab_size={vocab_size} only says something with count_padding=False")
    options = {**passed, "vocab_size": vocab_size, "ignore_index": ignore_index}
    column_parallel = megatron_module("tensor_parallel.layers").ColumnParallelLinear
    found = [(chunk, layer) for chunk in _chunks(model) if (layer := _output_layer(chunk)) is not None]
    units = _fsdp_units(model)
    if units is not None:
        check_fsdp_version()
    for _, layer in found:
        if isinstance(layer, units or ()):
            refuse_released_weight()
        hook = hook_of(layer)
        if hook is None:
            check_supported(layer, column_parallel)
        megatron_shard(_rows(layer), resolve_group(_of(layer).tp_group), vocab_size, count_padding)
    for chunk, layer in found:
        _uninstall_one(chunk, layer)
        _install_one(chunk, layer, strict, not count_padding or ignore_index is not None, options)
    return len(found)


def uninstall(model: nn.Module | Sequence[nn.Module]) -> int:
    """Undo ``install``: the model is as it was before. Returns how many output layers had been installed."""
    return sum(_uninstall_one(chunk, layer) for chunk in _chunks(model) if (layer := _output_layer(chunk)) is not None)


def status(model: nn.Module | Sequence[nn.Module]) -> list[HookStatus]:
    """What is installed, and what it has done so far, for each installed output layer."""
    layers = [layer for chunk in _chunks(model) if (layer := _output_layer(chunk)) is not None]
    return [hook.status for layer in layers if (hook := hook_of(layer)) is not None]


def _of(module: nn.Module) -> Any:
    """``module``, whose attributes aren't known to the type checker."""
    return module


def _rows(layer: nn.Module) -> int:
    rows: int = _of(layer).output_size_per_partition
    return rows


def _chunks(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The models inside lists and wrappers."""
    if isinstance(model, list | tuple | nn.ModuleList):
        return [chunk for item in model for chunk in _chunks(item)]
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module or a list of modules, not {type(model).__name__}")
    inner: nn.Module = model
    while not hasattr(inner, _LOSS):
        wrapped = getattr(inner, "module", None)
        if not isinstance(wrapped, nn.Module):
            raise TypeError(
                f"{type(inner).__module__}.{type(inner).__qualname__} is no Megatron language model: it has no "
                f"{_LOSS}. Pass the GPTModel, HybridModel, T5Model or BertModel itself"
            )
        inner = wrapped
    return [inner]


def _fsdp_units(model: object) -> tuple[type[nn.Module], ...] | None:
    """The classes of modules whose weights the Megatron-FSDP around a model releases after their forward.

    None if there is no Megatron-FSDP around it.
    """
    if isinstance(model, list | tuple | nn.ModuleList):
        return _fsdp_units(model[0]) if len(model) else None
    while isinstance(model, nn.Module):
        if hasattr(model, "fsdp_unit_modules"):
            return tuple(_of(model).fsdp_unit_modules)
        model = getattr(model, "module", None)
    return None


def _output_layer(chunk: nn.Module) -> nn.Module | None:
    """The output layer of a model (of T5: its head's), or None on a pipeline stage without one."""
    layer = getattr(chunk, "output_layer", None)
    return layer if isinstance(layer, nn.Module) else None


def _install_one(chunk: nn.Module, layer: nn.Module, strict: bool, masks: bool, options: dict[str, Any]) -> None:
    before = chunk.__dict__.get(_LOSS)
    hook = Hook(type(layer), strict, masks, options, HookStatus(options["backward"]), before)
    layer.__dict__[HOOK_ATTRIBUTE] = hook
    base: Any = hook.base
    layer.__class__ = deferring_class(base)
    chunk.__dict__[_LOSS] = types.MethodType(_compute_language_model_loss, chunk)
    logger.info("%s: training loss without logits, backward=%r", type(chunk).__name__, options["backward"])


def _uninstall_one(chunk: nn.Module, layer: nn.Module) -> int:
    hook = hook_of(layer)
    if hook is None:
        return 0
    layer.__class__ = hook.base
    del layer.__dict__[HOOK_ATTRIBUTE]
    del chunk.__dict__[_LOSS]
    if hook.loss_before is not None:
        chunk.__dict__[_LOSS] = hook.loss_before
    return 1


def _compute_language_model_loss(self: nn.Module, labels: Tensor, logits: Tensor | DeferredLogits) -> Tensor:
    """In place of the model's: ``[b, s]`` fp32 of labels ``[b, s]`` and deferred or real logits ``[s, b, V_local]``."""
    if isinstance(logits, DeferredLogits):
        return logits.loss(labels)
    layer = _output_layer(self)
    hook = None if layer is None else hook_of(layer)
    if layer is None or hook is None:
        raise RuntimeError("cce_tp.megatron: the model's output layer was replaced after install; install again")
    if logits.shape[-1] != _rows(layer):
        raise ValueError(
            f"the loss got logits of {logits.shape[-1]} columns, expected this rank's {_rows(layer)}: logits gathered "
            f"over the tensor-parallel group (runtime_gather_output, parallel_output=False) can't be combined with "
            f"labels; leave the gather out"
        )
    if hook.masks:
        return _loss_of_logits(labels, logits, layer, hook)
    if hook.loss_before is not None:
        return hook.loss_before(labels, logits)
    kind: Any = type(self)
    loss: Tensor = kind.compute_language_model_loss(self, labels, logits)
    return loss


def _loss_of_logits(labels: Tensor, logits: Tensor, layer: nn.Module, hook: Hook) -> Tensor:
    """A loss of real logits that treats padding and labels as the hook's options say; ``[b, s]``."""
    target, ignored = labels.transpose(0, 1), hook.options["ignore_index"]
    handle = _of(layer).tp_group
    shard = megatron_shard(
        _rows(layer), resolve_group(handle), hook.options["vocab_size"], hook.options["count_padding"]
    )
    if not hook.options["count_padding"]:
        padding = torch.arange(logits.shape[-1], device=logits.device) >= shard.num_real
        logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
    loss = vocab_parallel_cross_entropy(logits, target, tp_group=handle)
    if ignored is not None:
        unknown = (target < 0) | (target >= shard.vocab_size)
        loss = loss.masked_fill(unknown, float("nan")).masked_fill(target == ignored, 0.0)
    return loss.transpose(0, 1).contiguous()
