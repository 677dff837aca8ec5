"""In place of Apex's extension of this name, by PyTorch's own products. For tests and measurements only.

Megatron imports it for ``gradient_accumulation_fusion``; with this folder on ``PYTHONPATH`` that works without Apex.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_ROWS = 8192


@functools.cache
def _addmm_accumulates(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether ``addmm`` takes fp32 sums of low-precision products; it came after ``mm`` that returns them."""
    sums, factor = torch.zeros(16, 16, device=device), torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.addmm(sums, factor, factor, out_dtype=torch.float32, out=sums)
    except (RuntimeError, TypeError):
        return False
    return True


def wgrad_gemm_accum_fp32(tokens: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """``main_grad += grad_output.T @ tokens``, summed in fp32."""
    tokens, grad_output = tokens.flatten(0, -2), grad_output.flatten(0, -2)
    if tokens.dtype == torch.float32 or not tokens.is_cuda:
        main_grad.add_(grad_output.float().t() @ tokens.float())
    elif _addmm_accumulates(tokens.dtype, tokens.device):
        torch.addmm(main_grad, grad_output.t(), tokens, out_dtype=torch.float32, out=main_grad)
    else:
        for rows, part in zip(main_grad.split(_ROWS), grad_output.split(_ROWS, dim=1), strict=True):
            rows.add_(torch.mm(part.t(), tokens, out_dtype=torch.float32))


def wgrad_gemm_accum_fp16(tokens: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """The same for sums kept in 16 bits."""
    main_grad.add_((grad_output.flatten(0, -2).float().t() @ tokens.flatten(0, -2).float()).to(main_grad.dtype))
