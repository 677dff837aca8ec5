"""``patch`` and ``unpatch``: one line in a Hugging Face training script.

The model's own code stays in charge. While its forward runs, in training and with labels, its head hands out
``DeferredLogits``; what the model does with them (a scale, a softcap, the shift), and what its loss function makes of
``labels``, ``shift_labels`` and ``num_items_in_batch``, is the installed transformers' business. Only the product and
the cross-entropy at the end are computed as one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..collectives import resolve_group
from ..deferred.head import HeadHook, HookStatus, hook_of, num_rows
from ..deferred.model import install, status_of, uninstall
from ..options import Backward, LossOptions
from ..shard import VocabShard


def patch(
    model: nn.Module,
    *,
    backward: str | Backward = "exact",
    group: dist.ProcessGroup | None = None,
    shard: VocabShard | None = None,
    implementation: str = "auto",
    strict: bool = False,
    comm_dtype: torch.dtype | None = None,
    workspace: int | None = None,
    validate: bool | None = None,
) -> HookStatus:
    """Let a Hugging Face model compute its training loss without logits.

    In training mode and with ``labels`` (or ``shift_labels``) the model returns its loss as before, and as ``logits``
    a ``DeferredLogits``, which becomes real at the first use of a value; under DeepSpeed ZeRO-3 ``logits`` is None.
    Without labels, in evaluation and in ``generate`` nothing changes.

    How a model shifts, scales, caps and averages follows from its own code: see ``cce_tp.deferred.logits``. What that
    doesn't know computes the logits, with a warning, or is refused under ``strict``. Two differences: a batch without
    any label has loss 0 and zero gradients (there: NaN), and a label outside the vocabulary gives NaN (there: an
    error).

    Args:
        model: a model with ``get_output_embeddings``; wrapped in DDP, FSDP, ``torch.compile``, a peft model or a
            DeepSpeed engine or not. A second call replaces the options.
        backward: "exact", "sampled" or "filtered", or ``cce_tp.Sampled(...)`` or ``cce_tp.Filtered(...)``.
        group: the tensor-parallel group, if this process's head holds a shard of the vocabulary's rows. Then the model
            gets whole logits where it needs some, gathered over the group.
        shard: which rows; default: equal shards in rank order. Only with ``group``.
        implementation: "auto", "triton" or "torch".
        strict: raise, instead of warning, where training needs real logits.
        comm_dtype, workspace, validate: as in ``cce_tp.linear_cross_entropy``.

    Returns:
        The hook's status, which counts what it does.

    Collectives: those of ``linear_cross_entropy``; with ``group``, real logits take two all-gathers.

    Raises:
        TypeError: an argument or the model is of the wrong kind; or the head isn't a linear layer with its own forward,
            such as one that an adapter (LoRA, DoRA) or a quantisation wraps.
        ValueError: an option is out of range.
        NotImplementedError: the head is sharded in a way that isn't supported; the message names it.
    """
    options = {
        "backward": backward,
        "implementation": implementation,
        "comm_dtype": comm_dtype,
        "workspace": workspace,
        "validate": validate,
    }
    LossOptions(**options)  # type: ignore[arg-type]
    if not isinstance(strict, bool):
        raise TypeError(f"strict={strict!r} must be a bool")
    inner = find_model(model)
    layer, base = find_head(inner)
    tp_group = resolve_group(group)
    if group is None and shard is not None:
        raise ValueError(f"shard={shard!r} only says something with group=")
    if group is not None and shard is None:
        rows = num_rows(layer)
        shard = VocabShard(start=tp_group.rank * rows, stop=(tp_group.rank + 1) * rows, vocab_size=tp_group.size * rows)
    hook = HeadHook(layer, base, group, shard, False, False, strict, options, HookStatus(backward))
    install(inner, hook)
    return hook.status


def unpatch(model: nn.Module) -> bool:
    """Undo ``patch``: the model is as it was before. Returns whether it had been patched."""
    return uninstall(find_model(model))


def status(model: nn.Module) -> HookStatus | None:
    """What is installed on a model, and what it has done so far; None if nothing is."""
    return status_of(find_model(model))


def find_model(model: nn.Module) -> nn.Module:
    """The Hugging Face model inside wrappers.

    Raises:
        TypeError: there is none.
    """
    inner: Any = model
    while isinstance(inner, nn.Module):
        wrapped = _wrapped(inner)
        if wrapped is None:
            break
        inner = wrapped
    if not isinstance(inner, nn.Module) or not callable(getattr(inner, "get_output_embeddings", None)):
        raise TypeError(
            f"{type(inner).__module__}.{type(inner).__qualname__} is no Hugging Face language model: it has no "
            f"get_output_embeddings"
        )
    return inner


def _wrapped(module: Any) -> nn.Module | None:
    """What a wrapper wraps; None for a model. Wrappers pass attributes on, so only their own ones count."""
    if hasattr(type(module), "get_base_model"):  # peft
        base: nn.Module = module.get_base_model()
        return base
    for name in ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"):
        found = module._modules.get(name)
        if found is not None and "get_output_embeddings" not in dir(type(module)):
            inner: nn.Module = found
            return inner
    return None


def find_head(model: nn.Module) -> tuple[nn.Module, type[nn.Module]]:
    """The linear layer that makes the logits, and its class, a hook's aside.

    Raises:
        TypeError: there is none, or it isn't a linear layer with its own forward.
        NotImplementedError: FSDP1 wraps it, or transformers shards the model by itself.
    """
    any_model: Any = model
    layer = any_model.get_output_embeddings()
    if layer is None:
        raise TypeError(f"{type(model).__name__} has no output head (get_output_embeddings is None)")
    if (getattr(model, "_tp_size", None) or 1) > 1:
        raise NotImplementedError(
            f"{type(model).__name__} was made tensor parallel by transformers (tp_plan), whose head gathers its logits "
            f"by itself; that isn't supported: use DeepSpeed's AutoTP with cce_tp.deepspeed"
        )
    hook = hook_of(layer)
    base = type(layer) if hook is None else hook.base
    check_linear(layer, base)
    return layer, base


def check_linear(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Refuse a head whose logits aren't ``input @ weight.T + bias``.

    Raises:
        TypeError: so.
        NotImplementedError: FSDP1 wraps it.
    """
    if any(base.__name__ == "FullyShardedDataParallel" for base in kind.__mro__):
        raise NotImplementedError(
            "FullyShardedDataParallel (FSDP1) around the head itself isn't supported: leave the head to the unit of "
            "the whole model, or use FSDP2 (fully_shard)"
        )
    if "forward" in layer.__dict__:
        raise TypeError(
            "the head has a forward of its own, which device_map or a similar hook put there: not supported"
        )
    if isinstance(layer, nn.Linear) and kind.forward is nn.Linear.forward:
        return
    adapter = ""
    if any(name in kind.__module__ for name in ("peft", "lora")):
        adapter = (
            ": an adapter (LoRA, DoRA, modules_to_save) around the head would be bypassed; leave the head out of its "
            "target modules, or merge it"
        )
    raise TypeError(
        f"the head is a {kind.__module__}.{kind.__qualname__}, expected torch.nn.Linear with its own forward{adapter}"
    )
