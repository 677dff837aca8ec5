"""Logits that nobody has computed yet, and the classifier that hands them out: what the framework hooks share."""

from .head import HookStatus
from .logits import DeferredLogits

__all__ = ["DeferredLogits", "HookStatus"]
