"""Which local implementation serves a call. The choice depends on device and dtype alone, never on data or timing."""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

from .interface import LocalImplementation
from .torch_impl import TORCH

logger = logging.getLogger("cce_tp")

CHOICES = ("auto", "triton", "torch")


def _triton_unusable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels can't run here, in one sentence; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed (pip install triton)"
    from . import triton_impl

    return triton_impl.availability(device, dtype)


@functools.cache
def choose(name: str, device: torch.device, dtype: torch.dtype) -> LocalImplementation:
    """The implementation for ``name``, one of ``CHOICES``.

    "auto" takes the kernels on a GPU and plain PyTorch on the CPU. On a GPU where the kernels can't run it says so
    once, as a warning, and takes plain PyTorch: slower, in the same small memory.

    Raises:
        ValueError: ``name="triton"`` where the kernels can't run; the message says why.
    """
    if name == "torch" or (name == "auto" and device.type == "cpu"):
        chosen: LocalImplementation = TORCH
    else:
        reason = _triton_unusable(device, dtype)
        if reason is None:
            from .triton_impl import TRITON

            chosen = TRITON
        elif name == "triton":
            raise ValueError(f"implementation='triton' can't be used on {device} with {dtype}: {reason}")
        else:
            logger.warning("the Triton kernels can't be used on %s with %s: %s", device, dtype, reason)
            chosen = TORCH
    logger.info("linear cross-entropy on %s, %s: implementation %r", device, dtype, chosen.name)
    return chosen
