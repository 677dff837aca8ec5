"""What is taken from Megatron-core, imported at its first use."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch.distributed as dist


def megatron_module(name: str) -> Any:
    """The module ``megatron.core.<name>``.

    Raises:
        ImportError: megatron-core isn't there, or is without that module.
    """
    try:
        return importlib.import_module(f"megatron.core.{name}")
    except ImportError as error:
        raise ImportError(
            f"cce_tp.megatron needs megatron-core 0.16 or newer (pip install 'cce_tp[megatron]'), but importing "
            f"megatron.core.{name} failed: {error}"
        ) from error


@functools.cache
def megatron_version() -> tuple[int, int]:
    """Major and minor version of megatron-core."""
    info = megatron_module("package_info")
    return int(info.MAJOR), int(info.MINOR)


def tensor_parallel_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """``group``, or Megatron's own tensor-parallel group."""
    if group is not None:
        return group
    own: dist.ProcessGroup = megatron_module("parallel_state").get_tensor_model_parallel_group()
    return own
