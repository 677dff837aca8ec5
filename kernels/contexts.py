"""Contexts that cost nothing where they change nothing: entering one takes longer than a launch."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Under autocast, torch's products would cast fp32 operands."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Kernels are launched on the current device, which need not be the operands'."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
