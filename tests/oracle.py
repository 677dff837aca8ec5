"""What the loss has to be: the dense float64 computation, on one process, by autograd.

Nothing here is shared with the library: the logits are written out whole, the transform, the smoothing and the
reductions are spelled as in the documentation, and the gradients come from autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

FP32_EPS = 2.0**-23


@dataclass(frozen=True)
class Options:
    """The mathematical options of the loss; everything else only changes how it is computed."""

    reduction: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    count_padding: bool = False

    def keywords(self) -> dict[str, object]:
        """The options as arguments of ``linear_cross_entropy``."""
        return dict(vars(self))


@dataclass(frozen=True)
class Problem:
    """A whole problem, all of the vocabulary.

    Attributes:
        input: E, ``[..., D]``.
        weight: C, ``[V + padding, D]``.
        target: ``[...]``, vocabulary ids.
        bias: ``[V + padding]`` or None.
        class_weight: ``[V]`` or None.
        vocab_size: V; rows of ``weight`` beyond it are padding.
        upstream: gradient of the objective in the loss, of the loss's shape; None for ones.
        lse_upstream: gradient of the objective in the returned LSE, of the target's shape; None for none.
    """

    input: Tensor
    weight: Tensor
    target: Tensor
    vocab_size: int
    bias: Tensor | None = None
    class_weight: Tensor | None = None
    upstream: Tensor | None = None
    lse_upstream: Tensor | None = None
    options: Options = field(default_factory=Options)

    def with_options(self, **options: object) -> Problem:
        return replace(self, options=replace(self.options, **options))  # type: ignore[arg-type]

    def to(self, device: str | torch.device) -> Problem:
        return _moved(self, device)


@dataclass(frozen=True)
class Reference:
    """The right values of a problem, float64 (``correct``: bool).

    ``loss_tolerance`` is what fp32 may be off by (of the loss's shape): 1e-6 * max(1, |LSE|) a token, times what
    multiplies the token's LSE. ``input_floor`` and ``weight_floor`` are the rounding of fp32 in the gradients before
    anything cancels: below them a relative error means nothing.
    """

    loss: Tensor
    token_loss: Tensor
    lse: Tensor
    target_logprob: Tensor
    entropy: Tensor
    correct: Tensor
    valid: Tensor
    grad_input: Tensor
    grad_weight: Tensor
    grad_bias: Tensor | None
    loss_tolerance: Tensor
    input_floor: float
    weight_floor: float
    bias_floor: float

    def to(self, device: str | torch.device) -> Reference:
        return _moved(self, device)


def _moved(value: Any, device: str | torch.device) -> Any:
    """The dataclass with its tensors on ``device``."""
    tensors = {name: field for name, field in vars(value).items() if isinstance(field, Tensor)}
    return replace(value, **{name: tensor.to(device) for name, tensor in tensors.items()})


def _softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _reduced(token_loss: Tensor, denominator: Tensor, shape: torch.Size, reduction: str) -> Tensor:
    if reduction == "none":
        return token_loss.reshape(shape)
    if reduction == "sum":
        return token_loss.sum()
    assert reduction == "mean"
    return token_loss.sum() / denominator if denominator else token_loss.sum() * 0


def reference(
    problem: Problem,
    product_dtype: torch.dtype = torch.float64,
    change_logit_grad: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Reference:
    """Loss, statistics and gradients of ``problem`` in float64.

    ``change_logit_grad(logits, gradient)`` says what stands for the gradient in the final logits, ``[N, V]`` each.

    With another ``product_dtype`` the three matrix products are PyTorch's in that dtype, which rounds the logits and
    their gradient to it: what training without this library does.
    """
    options, vocab = problem.options, problem.vocab_size
    hidden = problem.weight.shape[1]
    valid = problem.target.reshape(-1).long() != options.ignore_index
    rows = problem.input.detach().double().reshape(-1, hidden)
    rows = torch.where(valid[:, None], rows, torch.nan_to_num(rows, nan=0.0, posinf=0.0, neginf=0.0))
    rows = rows.to(product_dtype, copy=True).requires_grad_()
    weight = problem.weight.detach().to(product_dtype, copy=True).requires_grad_()
    bias = None if problem.bias is None else problem.bias.detach().double().clone().requires_grad_()

    in_softmax = weight.shape[0] if options.count_padding else vocab
    logits = (rows @ weight[:in_softmax].T).double()
    if bias is not None:
        logits = logits + bias[:in_softmax]
    logits = _softcapped(options.logit_scale * logits, options.softcap)
    if change_logit_grad is not None:
        final = logits.detach()
        logits.register_hook(lambda gradient: change_logit_grad(final, gradient))
    lse = torch.logsumexp(logits, dim=1) if len(rows) else rows.sum(dim=1).double()
    label = torch.where(valid, problem.target.reshape(-1).long(), 0)
    assert not len(rows) or (int(label.min()) >= 0 and int(label.max()) < vocab), "the oracle takes valid labels only"
    target_logit = logits.gather(1, label[:, None]).squeeze(1)

    classes = torch.ones(vocab, dtype=torch.float64, device=rows.device)
    if problem.class_weight is not None:
        classes = problem.class_weight.detach().double()
    alpha = options.label_smoothing
    plain = (1 - alpha) * classes[label] * (lse - target_logit)
    smooth = alpha / vocab * (classes * (lse[:, None] - logits[:, :vocab])).sum(dim=1)
    token_loss = torch.where(valid, plain + smooth + options.z_loss * lse.square(), 0.0)
    denominator = (classes[label] * valid).sum()
    loss = _reduced(token_loss, denominator, problem.target.shape, options.reduction)

    upstream = torch.ones_like(loss) if problem.upstream is None else problem.upstream.double().expand_as(loss)
    objective = (loss * upstream).sum()
    lse_upstream = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    if problem.lse_upstream is not None:
        lse_upstream = problem.lse_upstream.double().expand(problem.target.shape).reshape(-1) * valid
    objective = objective + (lse * lse_upstream).sum()
    objective.backward()

    log_p = logits.detach() - lse.detach()[:, None]
    token_factor = (1 - alpha) * classes[label] + alpha / vocab * classes.sum()
    token_factor = token_factor + 2 * options.z_loss * lse.detach().abs()
    tolerance = 1e-6 * lse.detach().abs().clamp_min(1) * token_factor.clamp_min(1) * valid
    token_upstream = _token_upstream(upstream, denominator, options.reduction, len(rows))
    magnitude = (token_upstream.abs() * token_factor + lse_upstream.abs()) * valid * abs(options.logit_scale)
    largest_row = weight.detach().double().norm(dim=1).max() if weight.shape[0] else torch.tensor(0.0)
    return Reference(
        loss=loss.detach(),
        token_loss=token_loss.detach().reshape(problem.target.shape),
        lse=lse.detach().reshape(problem.target.shape),
        target_logprob=(target_logit - lse).detach().reshape(problem.target.shape),
        entropy=-(log_p.exp() * log_p).sum(dim=1).reshape(problem.target.shape),
        correct=_is_argmax(logits.detach(), label).reshape(problem.target.shape),
        valid=valid.reshape(problem.target.shape),
        grad_input=_grad(rows).reshape(problem.input.shape),
        grad_weight=_grad(weight),
        grad_bias=None if bias is None else _grad(bias),
        loss_tolerance=_reduced(tolerance, denominator, problem.target.shape, options.reduction),
        input_floor=FP32_EPS * float(magnitude.norm() * largest_row),
        weight_floor=FP32_EPS * float((magnitude * rows.detach().double().norm(dim=1)).norm()),
        bias_floor=FP32_EPS * float(magnitude.norm()),
    )


def _token_upstream(upstream: Tensor, denominator: Tensor, reduction: str, num_tokens: int) -> Tensor:
    if reduction == "none":
        return upstream.reshape(-1)
    scale = upstream / denominator if reduction == "mean" and denominator else upstream
    return scale.expand(num_tokens)


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _is_argmax(logits: Tensor, label: Tensor) -> Tensor:
    """Whether ``label`` is the lowest id of a largest logit."""
    if not len(logits):
        return torch.zeros(0, dtype=torch.bool, device=logits.device)
    largest = logits == logits.max(dim=1, keepdim=True).values
    return largest.int().argmax(dim=1) == label


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Frobenius norm of the difference over the expected one's; NaN anywhere in ``actual`` gives NaN."""
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    difference = float((actual - expected).norm())
    scale = float(expected.norm())
    return difference / scale if scale else difference


def assert_gradient(actual: Tensor, expected: Tensor, *, floor: float, tolerance: float = 1e-5, what: str = "") -> None:
    """Relative Frobenius error within ``tolerance``, but for the rounding that ``floor`` stands for.

    Fails by itself where the tolerance would let an all-zero gradient pass for one that is not.
    """
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    scale = float(expected.norm())
    allowed = tolerance * scale + 4 * floor
    difference = float((actual.double() - expected).norm())
    assert difference <= allowed, f"{what}: off by {difference:.3e}, allowed {allowed:.3e}, norm {scale:.3e}"
    assert scale <= 100 * floor or allowed < 0.5 * scale, f"{what}: the tolerance would pass zeros"


def fixture(num_tokens: int, hidden: int, vocab: int, dtype: torch.dtype = torch.float32) -> Problem:
    """F(N, D, V): numbers exact in fp32, bf16 and fp16, so that losses agree to 1e-5 in any of them."""
    n = torch.arange(num_tokens)[:, None]
    v = torch.arange(vocab)[:, None]
    d = torch.arange(hidden)[None, :]
    hidden_states = ((37 * n + 11 * d + 5 * d * n) % 23 - 11).double() / 8
    classifier = ((29 * v + 17 * d + 3 * v * d) % 19 - 9).double() / 8
    target = (13 * n[:, 0] + 5) % vocab
    return Problem(hidden_states.to(dtype), classifier.to(dtype), target, vocab)


def fixture0(dtype: torch.dtype = torch.float32) -> Problem:
    """F0 = F(8, 16, 32): tiny, with known losses and gradients."""
    return fixture(8, 16, 32, dtype)


def same_dtype_errors(problem: Problem, exact: Reference) -> tuple[float, float]:
    """Norms of the errors that PyTorch's own products in the problem's dtype make in the gradients of E and C."""
    rounded = reference(problem, problem.input.dtype)
    return (
        float((rounded.grad_input.double() - exact.grad_input).norm()),
        float((rounded.grad_weight.double() - exact.grad_weight).norm()),
    )
