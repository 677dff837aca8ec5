"""Bookkeeping of what the Triton kernels' launchers allocate beside their results."""

from __future__ import annotations

from torch import Tensor

FP32_BYTES, FP64_BYTES = 4, 8
ALLOCATION = 512
"""torch's caching allocator hands out memory in multiples of this."""
SLAB_BYTES = 80 * 2**20
LEAST_SLAB_BYTES = 44 * 2**20
"""Default size of G's workspace: the first suits large problems, where narrower slabs cost speed. Small ones, of little
memory themselves, get by with less; where grad E's accumulator is larger still, half of that does no harm."""


def allocated(*sizes: int) -> int:
    """Bytes that buffers of these sizes take from the allocator."""
    return sum(-(-size // ALLOCATION) * ALLOCATION for size in sizes)


def held(*tensors: Tensor) -> int:
    """Bytes that tensors, or those that they are views of, keep from the allocator."""
    return allocated(*(tensor.untyped_storage().nbytes() for tensor in tensors))


def default_slab_bytes(accumulator: int) -> int:
    """Of G, beside an accumulator of so many bytes for grad E."""
    return max(LEAST_SLAB_BYTES, min(2 * accumulator, SLAB_BYTES), accumulator // 2)


def workspace_too_small(workspace: int, least: int, num_tokens: int, num_rows: int, hidden: int) -> ValueError:
    return ValueError(
        f"workspace={workspace} is too small: the triton implementation needs at least {least} bytes "
        f"for {num_tokens} tokens of size {hidden} and {num_rows} classifier rows"
    )
