"""The local operation in plain PyTorch: the CPU path, and the oracle that other implementations are held against.

Algorithm: the vocabulary is walked in slabs and, inside a slab, the tokens in blocks, so that only one
``[rows, columns]`` block of logits exists at a time.

Numerics: everything is fp32, whatever the inputs' dtype (bf16 and fp16 are widened block by block). A slab's logits are
reduced relative to the slab's own maximum and the slabs are folded at the end. In the backward pass the gradient of E
is summed over slabs in fp32, that of C over token blocks in fp32; each is rounded to its dtype once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .fold import NEGATIVE_INFINITY, empty_partials, fold
from .interface import GradientRequest, InputGradReady, LocalProblem, LogitGradient, Partials, WeightGradBuffer

_FP32_BYTES = 4
_DEFAULT_WORKSPACE = 160 << 20
_LIVE_BLOCKS = 4  # logits, their derivative or its mask, one temporary, and the product on its way out
_TOKENS_AT_ONCE = 1024
_COLUMNS_AT_ONCE = 8192
_LEAST_COLUMNS = 16
_LEAST_TOKENS = 16


@dataclass(frozen=True)
class _Blocks:
    """How many tokens and how many classifier rows make a block."""

    tokens: int
    columns: int

    def slabs(self, num_rows: int) -> Iterator[slice]:
        return (slice(v, min(v + self.columns, num_rows)) for v in range(0, num_rows, self.columns))

    def token_blocks(self, num_tokens: int) -> Iterator[slice]:
        return (slice(n, min(n + self.tokens, num_tokens)) for n in range(0, num_tokens, self.tokens))


def _block_bytes(tokens: int, columns: int, hidden: int) -> int:
    """One block at work: its logits and temporaries, the slab of C and of its gradient, the tokens of E."""
    return _FP32_BYTES * (_LIVE_BLOCKS * tokens * columns + 2 * columns * hidden + 2 * tokens * hidden)


def _accumulator_bytes(num_tokens: int, hidden_size: int) -> int:
    """The gradient of E in fp32. (For fp32 inputs it is the result itself, but then blocks need no widened copies.)"""
    return _FP32_BYTES * num_tokens * hidden_size


def _choose_blocks(problem: LocalProblem) -> _Blocks:
    """The largest blocks that fit the workspace; the smallest if even those don't."""
    budget = _DEFAULT_WORKSPACE
    if problem.workspace is not None:
        budget = problem.workspace - _accumulator_bytes(problem.num_tokens, problem.hidden_size)
    tokens, columns = _TOKENS_AT_ONCE, _COLUMNS_AT_ONCE
    while _block_bytes(tokens, columns, problem.hidden_size) > budget and columns > _LEAST_COLUMNS:
        columns //= 2
        tokens = max(_LEAST_TOKENS, tokens // 2)
    return _Blocks(tokens, columns)


def _raw_logits(problem: LocalProblem, tokens: Tensor, rows: Tensor, slab: slice) -> Tensor:
    """``scale * (E C^T + b)`` of one block, before the softcap."""
    z = tokens @ rows.T
    if problem.bias is not None:
        z += problem.bias[slab].float()
    if problem.logit_scale != 1.0:
        z *= problem.logit_scale
    return z


def _cap(z: Tensor, softcap: float | None) -> Tensor:
    return z if softcap is None else z.div_(softcap).tanh_().mul_(softcap)


def _hits(problem: LocalProblem, block: slice, slab: slice) -> tuple[Tensor, Tensor]:
    """Which tokens of a block have their target in the slab, and at which of its columns (0 where not)."""
    local = problem.target[block] - slab.start
    inside = (local >= 0) & (local < slab.stop - slab.start)
    return inside, torch.where(inside, local, 0)


def _reduce_block(problem: LocalProblem, z: Tensor, block: slice, slab: slice, stats: bool) -> Partials:
    """Partials of one block. Overwrites z."""
    inside, column = _hits(problem, block, slab)
    picked = z.gather(1, column[:, None]).squeeze(1)
    top = z.amax(dim=1)
    argmax = None
    if stats:
        columns = torch.arange(slab.start, slab.stop, device=z.device)
        argmax = torch.where(z == top[:, None], columns, problem.num_rows).amin(dim=1)
        argmax = torch.where(argmax == problem.num_rows, -1, argmax)
    # With every logit at -inf the differences would be NaN; relative to 0 they are -inf and their exponentials 0.
    z -= torch.where(top == NEGATIVE_INFINITY, 0.0, top)[:, None]
    smoothing = entropy = None
    if problem.smoothing_weight is not None:
        c = problem.smoothing_weight[slab]
        relative = torch.where((top == NEGATIVE_INFINITY)[:, None], 0.0, z)
        smoothing = torch.where(c == 0, 0.0, relative * c).sum(dim=1)
    z.exp_()
    if stats:
        entropy = torch.xlogy(z, z).sum(dim=1)
    return Partials(top, z.sum(dim=1), torch.where(inside, picked, 0.0), smoothing, entropy, argmax)


def _stack(parts: list[Partials], dim: int, join: str) -> Partials:
    combine = torch.stack if join == "stack" else torch.cat

    def field(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else combine(values, dim)

    names = ("max", "sum_exp", "target_logit", "smoothing", "entropy", "argmax")
    return Partials(*(field(name) for name in names))  # type: ignore[arg-type]


def probabilities(
    problem: LocalProblem, grad: LogitGradient, tokens: Tensor, rows: Tensor, block: slice, slab: slice
) -> tuple[Tensor, Tensor | None]:
    """One block of the softmax over the whole vocabulary, and the softcap's slope there."""
    z = _raw_logits(problem, tokens, rows, slab)
    slope = None
    if problem.softcap is not None:
        slope = z.div(problem.softcap).tanh_().square_().neg_().add_(1.0)
        z = _cap(z, problem.softcap)
    return z.sub_(grad.max[block, None]).sub_(grad.log_sum[block, None]).exp_(), slope


def logit_gradient(
    problem: LocalProblem, grad: LogitGradient, p: Tensor, slope: Tensor | None, block: slice, slab: slice
) -> Tensor:
    """Gradient of one block in ``E C^T + b``: G, chained through softcap and scale; exactly 0 on inactive tokens.

    Overwrites p.
    """
    g = p.mul_(grad.prob[block, None])
    if grad.smoothing is not None and problem.smoothing_weight is not None:
        g.addr_(grad.smoothing[block], problem.smoothing_weight[slab], alpha=-1.0)
    inside, column = _hits(problem, block, slab)
    g.scatter_add_(1, column[:, None], -torch.where(inside, grad.target[block], 0.0)[:, None])
    if slope is not None:
        g *= slope
    if problem.logit_scale != 1.0:
        g *= problem.logit_scale
    return g.masked_fill_(~grad.active[block, None], 0.0)


def _store_weight_grad(destination: WeightGradBuffer, slab: slice, value: Tensor) -> None:
    rows = destination.buffer[slab]
    if destination.accumulate:
        rows.add_(value)
    else:
        rows.copy_(value)


def _slab_masses(problem: LocalProblem, blocks: _Blocks) -> Tensor | None:
    c = problem.smoothing_weight
    if c is None:
        return None
    return torch.stack([c[slab].sum() for slab in blocks.slabs(problem.num_rows)])[:, None]


def walk(
    problem: LocalProblem, *, stats: bool, visit: Callable[[Tensor, slice, slice], None] | None = None
) -> Partials:
    """The forward pass. ``visit(z, tokens, rows)`` sees every block of final logits before it is reduced."""
    if problem.num_rows == 0 or problem.num_tokens == 0:
        return empty_partials(
            problem.num_tokens, problem.input.device, smoothing=problem.smoothing_weight is not None, stats=stats
        )
    blocks = _choose_blocks(problem)
    done = []
    for block in blocks.token_blocks(problem.num_tokens):
        tokens = problem.input[block].float()
        pieces = []
        for slab in blocks.slabs(problem.num_rows):
            z = _cap(_raw_logits(problem, tokens, problem.weight[slab].float(), slab), problem.softcap)
            if visit is not None:
                visit(z, block, slab)
            pieces.append(_reduce_block(problem, z, block, slab, stats))
        done.append(fold(_stack(pieces, 0, "stack"), _slab_masses(problem, blocks)))
    return _stack(done, 0, "cat")


def least_workspace(num_tokens: int, hidden_size: int) -> int:
    """Bytes in which the smallest blocks fit, beside the gradient of E in fp32."""
    return _accumulator_bytes(num_tokens, hidden_size) + _block_bytes(_LEAST_TOKENS, _LEAST_COLUMNS, hidden_size)


def gradients(
    problem: LocalProblem,
    logit_grad: LogitGradient,
    request: GradientRequest,
    on_input_grad: InputGradReady,
) -> Tensor | None:
    """The exact backward pass; see the contract."""
    request.await_input()
    device = problem.input.device
    blocks = _choose_blocks(problem)
    input_grad = None
    if request.input_dtype is not None:
        input_grad = torch.zeros(problem.num_tokens, problem.hidden_size, dtype=torch.float32, device=device)
    bias_grad = torch.zeros(problem.num_rows, dtype=torch.float32, device=device) if request.bias else None

    for slab in blocks.slabs(problem.num_rows):
        rows = problem.weight[slab].float()
        weight_grad = torch.zeros_like(rows) if request.weight is not None else None
        for block in blocks.token_blocks(problem.num_tokens):
            active = logit_grad.active[block, None]
            tokens = problem.input[block].float()
            p, slope = probabilities(problem, logit_grad, tokens, rows, block, slab)
            g = logit_gradient(problem, logit_grad, p, slope, block, slab)
            if input_grad is not None:
                input_grad[block].addmm_(g, rows)
            if weight_grad is not None:
                # An ignored token may hold NaN, and 0 * NaN would spread it over the whole gradient of C.
                weight_grad.addmm_(g.T, torch.where(active, tokens, 0.0))
            if bias_grad is not None:
                bias_grad[slab] += g.sum(dim=0)
        if request.weight is not None and weight_grad is not None:
            _store_weight_grad(request.weight, slab, weight_grad)

    if input_grad is not None and request.input_dtype is not None:
        input_grad.masked_fill_(~logit_grad.active[:, None], 0.0)
        request.hand_on(input_grad.to(request.input_dtype), on_input_grad)
    return bias_grad
