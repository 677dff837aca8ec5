"""The model around a deferring head: a forward that tells the head when there are labels."""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from .head import HOOK_ATTRIBUTE, HeadHook, HookStatus, install_on_head, uninstall_from_head
from .logits import DeferredLogits

logger = logging.getLogger("cce_tp")

MODEL_HOOK = "_cce_tp_model_hook"
LABELS = ("labels", "shift_labels")


class ModelHook:
    """What a hook has put on a model: its head's hook, and its ``forward`` before, if that was its own."""

    def __init__(self, head_hook: HeadHook, forward_before: Callable[..., Any] | None) -> None:
        self.head_hook = head_hook
        self.forward_before = forward_before


def status_of(model: nn.Module) -> HookStatus | None:
    """The status of an installed model's hook; None if there is none."""
    hook: ModelHook | None = model.__dict__.get(MODEL_HOOK)
    return None if hook is None else hook.head_hook.status


def install(model: nn.Module, hook: HeadHook, labels: Sequence[str] = LABELS) -> None:
    """Exchange the head's class and give the model a forward that tells it about its arguments named ``labels``."""
    uninstall(model)
    if HOOK_ATTRIBUTE in hook.layer.__dict__:
        raise RuntimeError("the head is shared with another model that has a cce_tp hook; uninstall that first")
    before = model.__dict__.get("forward")
    model.__dict__[MODEL_HOOK] = ModelHook(hook, before)
    install_on_head(hook)
    original = type(model).forward if before is None else before
    model.__dict__["forward"] = types.MethodType(_labelled_forward(original, labels), model)
    logger.info("%s: training loss without logits, backward=%r", type(model).__name__, hook.options["backward"])


def uninstall(model: nn.Module) -> bool:
    """Undo ``install``.

    Raises:
        RuntimeError: something has wrapped the head or the forward since.
    """
    hook: ModelHook | None = model.__dict__.get(MODEL_HOOK)
    if hook is None:
        return False
    forward = model.__dict__.get("forward")
    if getattr(getattr(forward, "__func__", None), "_cce_tp_forward", False) is not True:
        raise RuntimeError(
            "the model's forward was wrapped after cce_tp's hook was installed (by accelerate, say); undo that first"
        )
    uninstall_from_head(hook.head_hook)
    del model.__dict__[MODEL_HOOK], model.__dict__["forward"]
    if hook.forward_before is not None:
        model.__dict__["forward"] = hook.forward_before
    return True


def _labelled_forward(original: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """A forward that passes everything on to the model's own, with the signature of ``original``, which scripts read.

    What it calls is found on the model at every call, so that a copy of the model runs its own.
    """
    parameters = list(inspect.signature(original).parameters)
    if parameters[:1] == ["self"]:
        parameters = parameters[1:]
    places = {name: parameters.index(name) for name in names if name in parameters}

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hook: ModelHook = self.__dict__[MODEL_HOOK]
        head_hook, before = hook.head_hook, hook.forward_before
        given = [kwargs.get(name) for name in names]
        given += [args[place] for place in places.values() if place < len(args)]
        active = self.training and any(labels is not None for labels in given)
        done = head_hook.status.losses + head_hook.status.materialised
        with head_hook.forward_pass(active):
            if before is None:
                kind: Any = type(self)
                outputs = kind.forward(self, *args, **kwargs)
            else:
                outputs = before(*args, **kwargs)
        if not active:
            return outputs
        if head_hook.status.losses + head_hook.status.materialised == done and not _holds_deferred(outputs):
            head_hook.warn_once(
                "no head",
                f"{type(self).__name__} computed its loss without calling its head, or got another head since, so "
                f"cce_tp has no part in it",
            )
        return _without_deferred(outputs) if head_hook.is_partitioned else outputs

    if inspect.ismethod(original):
        # wraps() went by the bound method, whose signature lacks self.
        forward.__wrapped__ = original.__func__
    forward._cce_tp_forward = True  # type: ignore[attr-defined]
    return forward


def _holds_deferred(outputs: Any) -> bool:
    values = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple) else ()
    return any(isinstance(value, DeferredLogits) for value in values)


def _without_deferred(outputs: Any) -> Any:
    """The outputs with None for deferred logits."""
    if isinstance(outputs, dict):
        for name, value in list(outputs.items()):
            if isinstance(value, DeferredLogits):
                outputs[name] = None
        return outputs
    if isinstance(outputs, tuple):
        return tuple(None if isinstance(value, DeferredLogits) else value for value in outputs)
    return outputs
