"""The loss and its gradients in fp32, in blocks of tokens, and the noise that the sampled mode should have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cce_tp.kernels import sampling
from cce_tp.kernels.interface import LocalProblem
from cce_tp.options import Sampled

from .bench_logits import Inputs

BLOCK_BYTES = {"cuda": 2**30, "cpu": 64 * 2**20}
"""One block of logits; a few of them are alive at once."""
ROWS_AT_ONCE = 16384


@dataclass(frozen=True)
class Reference:
    """The mean loss, and its gradients in fp32."""

    loss: float
    input_grad: Tensor
    weight_grad: Tensor

    def errors(self, input_grad: Tensor, weight_grad: Tensor) -> tuple[float, float]:
        """Of other gradients: relative, Frobenius."""
        return distance(input_grad, self.input_grad), distance(weight_grad, self.weight_grad)


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 within."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _blocks(inputs: Inputs) -> Iterator[slice]:
    tokens, rows, _ = inputs.shape
    step = max(1, BLOCK_BYTES[inputs.hidden.device.type] // (4 * rows))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


@torch.no_grad()
def reference(inputs: Inputs) -> Reference:
    """Of the values that the inputs have in their dtype."""
    tokens = len(inputs.target)
    with full_precision():
        c = inputs.weight.float()
        loss = torch.zeros((), dtype=torch.float64, device=c.device)
        input_grad = torch.empty(inputs.hidden.shape, device=c.device)
        weight_grad = torch.zeros_like(c)
        for block in _blocks(inputs):
            e, target = inputs.hidden[block].float(), inputs.target[block, None]
            z = e @ c.T
            z.sub_(z.amax(1, keepdim=True))
            at_target = z.gather(1, target)
            # The target apart from the others: p - 1 of a confident token is a difference of equals.
            others = z.exp_().scatter_(1, target, 0.0).sum(1, keepdim=True)
            total = others + at_target.exp()
            loss += (total.double().log() - at_target).sum()
            g = z.div_(total).scatter_(1, target, -others / total)
            torch.mm(g, c, out=input_grad[block])
            weight_grad.addmm_(g.T, e)
        return Reference(float(loss / tokens), input_grad.div_(tokens), weight_grad.div_(tokens))


@torch.no_grad()
def sampling_noise(inputs: Inputs, mode: Sampled, exact: Reference) -> tuple[float, float]:
    """What the errors of the gradients of E and C should be in the sampled mode, relative to ``exact``.

    The variance of an entry that is kept with probability q and then counts p / q is ``p^2 (1 / q - 1)``. Lists are
    taken to be long enough (``entries_per_token``), and results not to be rounded.
    """
    tokens, rows, _ = inputs.shape
    active = torch.ones_like(inputs.target, dtype=torch.bool)
    looked_at = sampling.anchor_rows(inputs.target, active, sampling.RowIds.whole(rows), mode.reference_rows)
    problem = LocalProblem(inputs.hidden, inputs.weight, inputs.target)
    anchor = sampling.anchor(sampling.anchor_sums(problem, looked_at), looked_at)
    with full_precision():
        c = inputs.weight.float()
        row_sizes = c.square().sum(1)
        of_input, of_weight = (torch.zeros((), dtype=torch.float64, device=c.device) for _ in range(2))
        for block in _blocks(inputs):
            e, target = inputs.hidden[block].float(), inputs.target[block, None]
            z = e @ c.T
            kept = sampling.inclusion(z, anchor[block, None], float(mode.eps)).sub_(1.0)
            p = z.sub_(z.logsumexp(1, keepdim=True)).exp_()
            # Nothing is kept below 2^-24: there it is a bias, no noise, and as small.
            variance = torch.where(kept > 0, (1.0 / kept - 1.0), 1.0).mul_(p.square_())
            variance.masked_fill_(looked_at.place > 0, 0.0).scatter_(1, target, 0.0)
            of_input += (variance @ row_sizes).sum(dtype=torch.float64)
            of_weight += (variance.sum(1) * e.square().sum(1)).sum(dtype=torch.float64)
    return (
        float(of_input.sqrt() / tokens / exact.input_grad.norm()),
        float(of_weight.sqrt() / tokens / exact.weight_grad.norm()),
    )


def distance(value: Tensor, right: Tensor) -> float:
    """Relative, Frobenius; in blocks of rows, since the gradient of C is large."""
    off, size = (torch.zeros((), dtype=torch.float64, device=right.device) for _ in range(2))
    for mine, theirs in zip(value.split(ROWS_AT_ONCE), right.split(ROWS_AT_ONCE), strict=True):
        off += (mine.float() - theirs).square().sum(dtype=torch.float64)
        size += theirs.square().sum(dtype=torch.float64)
    return float((off / size).sqrt())


def worst_tokens(value: Tensor, right: Tensor, share: float = 0.01) -> float:
    """The error of a token's gradient that only a share of the tokens exceeds, over the RMS of the gradients."""
    errors = (value.float() - right).norm(dim=1)
    return float(errors.quantile(1.0 - share) / right.norm(dim=1).square().mean().sqrt())
