"""Megatron-core: its vocabulary-parallel loss without the logits.

``install(model)`` is the one line a training script needs; ``uninstall(model)`` takes it back. For scripts that call
the loss themselves there are ``vocab_parallel_linear_cross_entropy`` and, where only logits exist,
``vocab_parallel_cross_entropy``. Importing this module doesn't import Megatron; using it does.
"""

from .hook import install, status, uninstall
from .losses import vocab_parallel_linear_cross_entropy
from .output_layer import HookStatus
from .vocab_parallel_logits import vocab_parallel_cross_entropy

__all__ = [
    "HookStatus",
    "install",
    "status",
    "uninstall",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_linear_cross_entropy",
]
