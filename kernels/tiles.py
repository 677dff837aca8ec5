"""Tile configurations, and the predicates that choose between the ways of running a kernel.

A configuration is looked up from the architecture, the dtype and the shape class; nothing is tuned at run time, so two
ranks never pick differently and the first call computes what every later one does. ``cce-tp tune`` measures candidates
on the GPU at hand and prints the best as the lines below have them.

The forward and the gradient kernel share one configuration: the gradient recomputes a logit with the same products in
the same order, so that ``p - 1`` at a confident target is a difference of equal roundings.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton < 3.4
    TensorDescriptor = None

LARGE_SHARED_MEMORY = (9, 10)
"""Major compute capabilities with the tensor memory accelerator and over 200 KiB of shared memory; measured on 9."""
SHORT_INNER = 1024
"""Longest hidden size at which smaller tiles win, two to a multiprocessor: one's reduction hides behind the other's
product. Beyond, the larger tile's fewer reads do."""
ALIGNMENT = 16
"""Bytes to which the tensor memory accelerator wants bases and strides aligned."""


@dataclass(frozen=True)
class Tile:
    """Launch options of a kernel whose inner loop is a tile of a matrix product.

    Attributes:
        rows: rows of the left operand per program (tokens, for logits).
        cols: columns of the product per program (classifier rows, for logits).
        inner: length of the contraction per step of the loop.
        warps: warps per program.
        stages: steps of the loop in flight.
        group: tiles of rows that are walked together, so that they share the other operand in the L2 cache.
    """

    rows: int
    cols: int
    inner: int
    warps: int
    stages: int
    group: int = 16


_HOPPER_16BIT = Tile(128, 256, 64, warps=8, stages=3)
_HOPPER_16BIT_SHORT = Tile(128, 128, 64, warps=4, stages=3)
_HOPPER_16BIT_FEW_ROWS = Tile(64, 256, 64, warps=4, stages=4)
_16BIT = Tile(128, 128, 32, warps=8, stages=3, group=8)
_TF32 = Tile(128, 128, 32, warps=8, stages=2, group=8)
_IEEE = Tile(64, 64, 16, warps=4, stages=3, group=8)
_FILTER_IEEE = Tile(128, 128, 16, warps=8, stages=2, group=8)
_INTERPRETER = Tile(16, 32, 16, warps=1, stages=1, group=2)


@triton.jit
def _probe() -> None:
    pass


INTERPRETED = isinstance(_probe, InterpretedFunction)
"""Whether Triton's interpreter runs the kernels: ``TRITON_INTERPRET=1`` was set when they were imported."""


# Triton's own also serve kernels, which makes them slow for the host.
def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; without one, as in a plan, an H200's."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def cache_bytes(device: torch.device) -> int:
    """Of a GPU's L2 cache; without one, as in a plan, an H200's."""
    return torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 50 * 2**20


def product_precision(dtype: torch.dtype) -> str:
    """``input_precision`` of ``tl.dot``: fp32 follows torch's switch, and 16-bit products are exact anyway."""
    return "tf32" if dtype == torch.float32 and _torch_uses_tf32() else "ieee"


def _torch_uses_tf32() -> bool:
    try:
        return torch.backends.cuda.matmul.fp32_precision == "tf32"
    except AttributeError:  # torch < 2.9
        return torch.get_float32_matmul_precision() != "highest"


def can_use_tma(tensor: Tensor) -> bool:
    """Whether tiles of a matrix can be copied by the tensor memory accelerator, through a host-side descriptor."""
    if TensorDescriptor is None or not has_tma(tensor.device):
        return False
    return (
        tensor.dim() == 2
        and tensor.numel() > 0
        and tensor.stride(1) == 1
        and 0 < tensor.stride(0) * tensor.element_size() < 2**40
        and tensor.stride(0) * tensor.element_size() % ALIGNMENT == 0
        and tensor.stride(0) >= tensor.shape[1]
        and tensor.data_ptr() % ALIGNMENT == 0
        and max(tensor.shape) < 2**31
    )


def has_tma(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and capability(device)[0] in LARGE_SHARED_MEMORY


_forced: Tile | None = None


@contextmanager
def forced(tile: Tile) -> Iterator[None]:
    """The kernels that compute logits use ``tile`` within: to measure configurations, never in a run."""
    global _forced
    before, _forced = _forced, tile
    try:
        yield
    finally:
        _forced = before


def logit_tile(dtype: torch.dtype, num_tokens: int, hidden: int, tma: bool) -> Tile:
    """The configuration of the kernels that compute logits."""
    if _forced is not None:
        return _forced
    if INTERPRETED:
        return _INTERPRETER
    if dtype == torch.float32:
        return _TF32 if product_precision(dtype) == "tf32" else _IEEE
    if not tma:
        return _16BIT
    if num_tokens <= _HOPPER_16BIT_FEW_ROWS.rows:
        return _HOPPER_16BIT_FEW_ROWS
    return _HOPPER_16BIT_SHORT if hidden <= SHORT_INNER else _HOPPER_16BIT


def look_tile(dtype: torch.dtype, num_tokens: int, hidden: int, tma: bool) -> Tile:
    """The configuration of the anchor's products: its rows are few, so the last tiles would leave a large tile's
    multiprocessors idle for long."""
    tile = logit_tile(dtype, num_tokens, hidden, tma)
    return _HOPPER_16BIT_FEW_ROWS if tile == _HOPPER_16BIT and _forced is None else tile


def extreme_tile(dtype: torch.dtype) -> Tile:
    """The most rows and the most columns that a configuration for ``dtype`` has, on any device."""
    return _TF32 if dtype == torch.float32 else _HOPPER_16BIT


FEWEST_COLS = min(_INTERPRETER.cols, _IEEE.cols) if INTERPRETED else _IEEE.cols
FEWEST_ROWS = min(_INTERPRETER.rows, _IEEE.rows) if INTERPRETED else _IEEE.rows
"""The fewest columns, and rows, of any configuration."""


def product_tile(dtype: torch.dtype, tma: bool) -> Tile:
    """The configuration of :mod:`cce_tp.kernels.matmul`'s own product."""
    if tma and not INTERPRETED:
        return replace(_HOPPER_16BIT, group=8)
    return logit_tile(dtype, 2**31, 2**31, tma)


def filter_block(dtype: torch.dtype, hidden: int, tma: bool, rows: int, cols: int) -> Tile:
    """The configuration that recomputes logits in the filtered mode, for tiles of ``rows`` x ``cols``: as many tokens,
    and one or two tiles of classifier rows. Products are summed in the same order as by ``logit_tile``'s."""
    if INTERPRETED:
        return Tile(rows, 2 * cols, 16, warps=1, stages=1)
    if dtype == torch.float32:
        return _TF32 if product_precision(dtype) == "tf32" else _FILTER_IEEE
    if not tma:
        return _16BIT
    return _HOPPER_16BIT_SHORT if hidden <= SHORT_INNER else _HOPPER_16BIT


def filter_product(dtype: torch.dtype, tma: bool, rows: int) -> Tile:
    """The configuration of the filtered mode's two products; ``inner`` divides a tile's rows and columns."""
    if INTERPRETED:
        return Tile(rows, 32, 16, warps=1, stages=1, group=2)
    if dtype == torch.float32:
        return _TF32 if product_precision(dtype) == "tf32" else _FILTER_IEEE
    return _HOPPER_16BIT if tma else _16BIT
