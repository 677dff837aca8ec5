"""What is computed a token at a time, by the kernels and by plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cce_tp.kernels import fold, token_kernels, tokens
from cce_tp.kernels.interface import Partials
from cce_tp.kernels.tokens import TokenRule

VOCAB = 40
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "class weights": {"weighted": True},
    "everything": {"weighted": True, "label_smoothing": 0.3, "z_loss": 1e-2, "nan_unknown": False},
    "smoothing alone": {"label_smoothing": 1.0},
    "no class weights": {"label_smoothing": 0.1, "z_loss": 0.5},
}


def same(a: Tensor, b: Tensor) -> bool:
    """But for the logarithm's last bits."""
    return torch.allclose(a, b, rtol=1e-6, atol=1e-6, equal_nan=True)


def compare_token_kernels(num_tokens: int, device: str, **options: Any) -> None:
    """Labels of every kind, upstream gradients of all strides or none."""
    gen = torch.Generator().manual_seed(num_tokens)
    weighted = options.pop("weighted", False)
    rule = TokenRule(**{"vocab_size": VOCAB, "start": 10, "stop": 25, "ignored": 13, "nan_unknown": True,
                        "label_smoothing": 0.0, "z_loss": 0.0, **options})  # fmt: skip
    target = torch.randint(-5, VOCAB + 5, (num_tokens,), generator=gen).to(device)
    class_weight = torch.rand(VOCAB, generator=gen).to(device).bfloat16() if weighted else None

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen).to(device)

    smoothing = draw(num_tokens) if rule.label_smoothing else None
    whole = Partials(5 * draw(num_tokens), draw(num_tokens).exp() + 1, draw(num_tokens), smoothing)

    labels = tokens.read_labels(rule, target, class_weight)
    local, active = token_kernels.local_labels(rule, target)
    assert torch.equal(local, labels.local)
    assert torch.equal(active, labels.active)

    ours = token_kernels.losses(rule, whole, target, class_weight)
    twin = tokens.losses(rule, whole, target, class_weight)
    assert all(same(a, b) for a, b in zip(vars(ours).values(), vars(twin).values(), strict=True))
    for kept in (target, torch.full_like(target, rule.ignored)):
        mean, divisor = token_kernels.mean(rule, twin.loss, kept, class_weight)
        right, right_divisor = tokens.mean(rule, twin.loss.double(), kept, class_weight)
        torch.testing.assert_close(divisor, right_divisor)
        torch.testing.assert_close(mean.double(), right, rtol=1e-5, atol=1e-6, equal_nan=True)

    strided, one = draw(num_tokens, 2)[:, 1], draw(1).expand(num_tokens)
    for u, h in ((draw(num_tokens), None), (None, strided), (one, draw(num_tokens))):
        arguments = (rule, target, class_weight, whole.max, twin.log_sum, (u, h))
        (local, ours_grad), (_, twin_grad) = token_kernels.logit_gradient(*arguments), tokens.logit_gradient(*arguments)
        assert torch.equal(local, labels.local)
        for name, right in vars(twin_grad).items():
            got = getattr(ours_grad, name)
            assert (got is None) == (right is None)
            assert right is None or (got.dtype == right.dtype and same(got, right)), name


def compare_join(ranks: int, num_tokens: int, device: str, *, smoothing: bool, stats: bool) -> None:
    """Some shards empty, some masked throughout, equal maxima, NaN, and tokens whose shards don't make up the whole."""
    gen = torch.Generator().manual_seed(ranks + num_tokens)
    packing = fold.Packing(smoothing, stats, whole=7 * ranks)
    packed = []
    for rank in range(ranks):
        top = torch.randint(-3, 3, (num_tokens,), generator=gen).float()
        total, argmax = torch.rand(num_tokens, generator=gen) + 1, torch.randint(2**30, (num_tokens,), generator=gen)
        empty = (torch.rand(num_tokens, generator=gen) < 0.3) | (torch.arange(num_tokens) == 3)
        top, total, argmax = (
            top.masked_fill(empty, -float("inf")),
            total.masked_fill(empty, 0),
            argmax.masked_fill(empty, -1),
        )
        total[5::50] = float("nan")
        extra = torch.randn(2, num_tokens, generator=gen)
        partials = fold.Partials(
            top,
            total,
            extra[0],
            extra[1] if smoothing else None,
            extra[1] if stats else None,
            argmax if stats else None,
        )
        mass = torch.tensor(float(rank)) if smoothing else None
        packed.append(packing.pack(partials, 7, mass))
    gathered = torch.stack(packed).to(device)
    gathered[0, 0, 2::9] += 1
    ours, twin = token_kernels.join(gathered, packing), fold.join(gathered, packing)
    for name, right in vars(twin).items():
        got = getattr(ours, name)
        assert (got is None) == (right is None), name
        assert right is None or (got.dtype == right.dtype and same(got, right)), name
    assert bool(twin.max[2::9].isnan().all())
