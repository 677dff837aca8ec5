"""``install`` and ``uninstall``: one line in a DeepSpeed training script.

The head's class is exchanged and its parameters are left alone, so ZeRO's hooks stay where they are. ZeRO-3 gathers the
weight when the head is called with the loss as an argument, keeps it until the loss is there, and gathers it again for
the backward pass. AutoTP's heads say themselves which rows they hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..collectives import resolve_group
from ..deferred.head import HeadHook, HookStatus, hook_of, num_rows
from ..deferred.model import LABELS, MODEL_HOOK, status_of
from ..deferred.model import install as install_on_model
from ..deferred.model import uninstall as uninstall_from_model
from ..options import Backward, LossOptions
from ..shard import VocabShard
from ..transformers.patch import check_linear

_HEAD_NAMES = ("lm_head", "embed_out", "output_layer", "head")
_STOCK_LOSS = "_deepspeed_original_loss_function"
_LOSS_BEFORE = "_cce_tp_loss_before"


def install(
    engine_or_model: Any,
    *,
    head: str | None = None,
    labels: Sequence[str] = LABELS,
    backward: str | Backward = "exact",
    group: dist.ProcessGroup | None = None,
    mpu: Any = None,
    shard: VocabShard | None = None,
    implementation: str = "auto",
    strict: bool = False,
    comm_dtype: torch.dtype | None = None,
    workspace: int | None = None,
    validate: bool | None = None,
) -> HookStatus:
    """Let a model trained by DeepSpeed compute its loss without logits.

    The model's forward must take the labels and compute the loss, as Hugging Face's models do, or give its head's
    output to ``torch.nn.functional.cross_entropy``. ``logits`` is then a ``DeferredLogits``, None under ZeRO-3.

    Where AutoTP has sharded the head (``vocab_parallel_lm_head``, a tied head under an ``embedding_rowwise`` plan, or a
    plan's ``colwise_gather_output``), rows and group are the head's own; the model gets whole logits where it needs
    some, so that ``generate`` and evaluation work. Vocabularies that don't divide are split as AutoTP splits them.

    Call it after ``deepspeed.initialize``, which may replace the head.

    Args:
        engine_or_model: a DeepSpeed engine or its module. A second call replaces the options.
        head: dotted name of the head in the model; default: the Hugging Face model's, or a layer called ``lm_head``,
            ``embed_out``, ``output_layer`` or ``head``.
        labels: names of the forward's arguments that hold labels.
        backward: "exact", "sampled" or "filtered", or ``cce_tp.Sampled(...)`` or ``cce_tp.Filtered(...)``.
        group: the tensor-parallel group of a head that was sharded by hand: an ``nn.Linear`` with this rank's rows. Its
            input's gradient is summed here, so it must not have gone through a "copy to the tensor-parallel region";
            its parameter needs ``tensor_model_parallel=True`` for DeepSpeed's gradient norm.
        mpu: a Megatron-style ``mpu`` that names that group.
        shard: which rows; default: equal shards in rank order. Only with ``group`` or ``mpu``.
        implementation, strict, comm_dtype, workspace, validate: as in ``cce_tp.transformers.patch``.

    Returns:
        The hook's status, which counts what it does.

    Collectives: those of ``linear_cross_entropy``, and whatever ZeRO does for any layer; with a sharded head, real
    logits take two all-gathers.

    Raises:
        TypeError: an argument, the model or its head is of the wrong kind; or the head is wrapped by an adapter.
        ValueError: an option is out of range; or ``head`` names nothing.
        NotImplementedError: the model uses a feature that isn't supported; the message names it.
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
    model = _find_model(engine_or_model)
    layer = _find_head(model, head)
    installed = hook_of(layer)
    base = type(layer) if installed is None else installed.base
    given = _given_group(group, mpu)
    if given is None and shard is not None:
        raise ValueError(f"shard={shard!r} only says something with group= or mpu=")
    hook = _hook(layer, base, given, shard, strict, options)
    install_on_model(model, hook, labels)
    _use_stock_loss(model)
    return hook.status


def uninstall(engine_or_model: Any) -> bool:
    """Undo ``install``: the model is as it was before. Returns whether there was something to undo."""
    model = _find_model(engine_or_model)
    done = uninstall_from_model(model)
    if _LOSS_BEFORE in model.__dict__:
        any_model: Any = model
        any_model.loss_function = model.__dict__.pop(_LOSS_BEFORE)
    return done


def status(engine_or_model: Any) -> HookStatus | None:
    """What is installed, and what it has done so far; None if nothing is."""
    return status_of(_find_model(engine_or_model))


def _find_model(engine_or_model: Any) -> nn.Module:
    """The model inside an engine and wrappers: the outermost module that isn't one.

    Raises:
        TypeError: there is no module.
        NotImplementedError: it is a pipeline.
    """
    inner: Any = engine_or_model
    while True:
        if not isinstance(inner, nn.Module):
            raise TypeError(f"engine_or_model is a {type(inner).__name__}, expected a DeepSpeed engine or a module")
        wrapper: Any = inner
        names = {base.__name__ for base in type(inner).__mro__}
        if names & {"PipelineModule", "PipelineEngine"}:
            raise NotImplementedError(
                "a pipeline's loss is its loss_fn: end the layers with cce_tp.deepspeed.PipelineHead and give "
                "PipelineModule loss_fn=cce_tp.deepspeed.pipeline_loss_fn()"
            )
        wrapped = None
        if names & {"DeepSpeedEngine", "DistributedDataParallel", "OptimizedModule"}:
            wrapped = wrapper._modules.get("module", wrapper._modules.get("_orig_mod"))
        elif hasattr(type(inner), "get_base_model"):  # peft
            wrapped = wrapper.get_base_model()
        if wrapped is None:
            return inner
        inner = wrapped


def _find_head(model: nn.Module, name: str | None) -> nn.Module:
    any_model: Any = model
    if name is not None:
        try:
            return model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"head={name!r} names no module of {type(model).__name__}") from None
    output_embeddings = getattr(any_model, "get_output_embeddings", None)
    found: Any = None if output_embeddings is None else output_embeddings()
    if found is None:
        found = next((any_model._modules[name] for name in _HEAD_NAMES if any_model._modules.get(name)), None)
    if not isinstance(found, nn.Module):
        raise TypeError(f"{type(model).__name__} has no layer called {', '.join(_HEAD_NAMES)}: pass head=")
    return found


def _given_group(group: dist.ProcessGroup | None, mpu: Any) -> dist.ProcessGroup | None:
    if mpu is None:
        return group
    if group is not None:
        raise ValueError("group and mpu both name the tensor-parallel group; pass one of them")
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group", "get_slice_parallel_group"):
        if hasattr(mpu, name):
            found: dist.ProcessGroup = getattr(mpu, name)()
            return found
    raise TypeError(f"mpu is a {type(mpu).__name__} without get_tensor_model_parallel_group")


def _hook(
    layer: nn.Module,
    base: type[nn.Module],
    group: dist.ProcessGroup | None,
    shard: VocabShard | None,
    strict: bool,
    options: dict[str, Any],
) -> HeadHook:
    """The hook of a head, with its group and rows."""
    own = HookStatus(options["backward"])
    if not _is_autotp(base):
        check_linear(layer, base)
        tp_group = resolve_group(group)
        if group is not None and shard is None:
            rows = num_rows(layer)
            start = tp_group.rank * rows
            shard = VocabShard(start=start, stop=start + rows, vocab_size=tp_group.size * rows)
        return HeadHook(layer, base, group, shard, False, False, strict, options, own)
    if group is not None:
        raise ValueError("group and mpu are for heads sharded by hand; AutoTP's head brings its own group")
    head: Any = layer
    if getattr(head, "defer_collectives_to_compiler", False):
        raise NotImplementedError("DeepCompile's autotp pass (collectives deferred to the compiler) isn't supported")
    if not head.is_tp_parallel:
        return HeadHook(layer, base, None, None, False, False, strict, options, own)
    shard = VocabShard.from_sizes(list(head._partition_sizes), head.tp_index)
    return HeadHook(layer, base, head.mp_group, shard, bool(head.gather_output), True, strict, options, own)


def _is_autotp(kind: type[nn.Module]) -> bool:
    """Whether a head is AutoTP's column-parallel linear layer, or its vocabulary-parallel one.

    Raises:
        TypeError: it is another of DeepSpeed's layers.
    """
    if not kind.__module__.startswith("deepspeed."):
        return False
    from deepspeed.module_inject.layers import LinearLayer

    if issubclass(kind, LinearLayer) and kind.forward is LinearLayer.forward:
        return True
    raise TypeError(
        f"the head is DeepSpeed's {kind.__qualname__}, expected torch.nn.Linear, or AutoTP's VocabParallelLinear or "
        f"LinearLayer: ask for tensor_parallel.vocab_parallel_lm_head"
    )


def _use_stock_loss(model: nn.Module) -> None:
    """The model's own loss function, in place of AutoTP's, which wants a shard of the logits."""
    any_model: Any = model
    stock = getattr(model, _STOCK_LOSS, None)
    if stock is None or _LOSS_BEFORE in model.__dict__ or MODEL_HOOK not in model.__dict__:
        return
    model.__dict__[_LOSS_BEFORE] = any_model.loss_function
    any_model.loss_function = stock
