"""Hugging Face transformers: the training loss of a language model without the logits.

``patch(model)`` is the one line a training script needs; ``unpatch(model)`` takes it back. Importing this module
doesn't import transformers, and neither does using it.
"""

from ..deferred import DeferredLogits, HookStatus
from .patch import patch, status, unpatch

__all__ = ["DeferredLogits", "HookStatus", "patch", "status", "unpatch"]
