"""Random problems, their shards, and the library run on them: what the tests of the loss have in common."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from distributed import Collective, Rank, collectives
from oracle import Options, Problem, Reference, assert_gradient, reference
from torch import Tensor

import cce_tp


@dataclass(frozen=True)
class Spec:
    """A random problem in a few numbers, so that every process can make it for itself.

    Attributes:
        shape: of the target.
        padding: rows of the classifier that stand for no id.
        split: how the ranks share the vocabulary: "equal", "megatron" (equal, of the padded vocabulary), "chunk", or
            "sizes" (drawn at random, with empty shards and padding on any rank).
        spread: standard deviation of the logits before bias and transform.
        ignored: share of tokens without a target.
        strided: give every tensor strides that no kernel would wish for.
        lse_grad: the objective uses the returned LSE, too.
    """

    seed: int = 0
    shape: tuple[int, ...] = (7,)
    hidden: int = 16
    vocab: int = 32
    padding: int = 0
    split: str = "sizes"
    dtype: torch.dtype = torch.float32
    spread: float = 2.0
    bias: bool = False
    class_weight: bool = False
    ignored: float = 0.0
    strided: bool = False
    lse_grad: bool = False
    target_dtype: torch.dtype = torch.int64
    options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Shard:
    """One rank's part: its ``VocabShard`` and the rows of the padded classifier that it holds."""

    vocab: cce_tp.VocabShard
    rows: Tensor


@dataclass(frozen=True)
class RankResult:
    """What the library gave one rank; gradients are None where not asked for."""

    loss: Tensor
    lse: Tensor | None
    stats: Any
    grad_input: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None
    main_grad: Tensor | None
    collectives: list[Collective]
    has_graph: bool


def _with_strides(values: Tensor) -> Tensor:
    """The same values with a gap after every element and the first dimension moving fastest; NaN in between."""
    if values.dim() == 0:
        return values
    filler = torch.full((1,), float("nan") if values.is_floating_point() else -(2**30)).to(values.dtype)
    reversed_shape = tuple(reversed(values.shape))
    base = filler.to(values.device).expand(*reversed_shape, 2).clone()
    view = base[..., 0].permute(*reversed(range(values.dim())))
    view.copy_(values)
    return view


def build(spec: Spec) -> Problem:
    """The problem of a spec: the same in every process."""
    generator = torch.Generator().manual_seed(spec.seed)
    rows = spec.vocab + spec.padding
    scale = (spec.spread / max(1, spec.hidden) ** 0.5) ** 0.5 if spec.hidden else 1.0

    def normal(*shape: int, by: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * by).to(spec.dtype)

    target = torch.randint(0, spec.vocab, spec.shape, generator=generator)
    ignored = torch.rand(spec.shape, generator=generator) < spec.ignored
    target = torch.where(ignored, spec.options.ignore_index, target).to(spec.target_dtype)
    # Drawn always, used or not, so that a shrinking option leaves the rest of the problem alone.
    bias = normal(rows)
    class_weight = (torch.rand(spec.vocab, generator=generator, dtype=torch.float64) + 0.5).float()
    upstream = normal(*spec.shape).float() if spec.options.reduction == "none" else normal().float() + 3
    lse_upstream = normal(*spec.shape).float()
    problem = Problem(
        input=normal(*spec.shape, spec.hidden, by=scale),
        weight=normal(rows, spec.hidden, by=scale),
        target=target,
        vocab_size=spec.vocab,
        bias=bias if spec.bias else None,
        class_weight=class_weight if spec.class_weight else None,
        upstream=upstream,
        lse_upstream=lse_upstream if spec.lse_grad else None,
        options=spec.options,
    )
    if not spec.strided:
        return problem
    tensors = {name: value for name, value in vars(problem).items() if isinstance(value, Tensor)}
    return replace(problem, **{name: _with_strides(value) for name, value in tensors.items()})


def _random_sizes(total: int, parts: int, generator: torch.Generator) -> list[int]:
    """``parts`` sizes that sum to ``total``; a third of them 0 or 1 where that is possible."""
    cuts = torch.randint(0, total + 1, (parts - 1,), generator=generator)
    tiny = torch.rand(parts - 1, generator=generator)
    near = torch.randint(0, 2, (parts - 1,), generator=generator)
    edges = [0, *sorted(min(total, int(n if t < 0.34 else c)) for n, t, c in zip(near, tiny, cuts, strict=True)), total]
    return [b - a for a, b in itertools.pairwise(edges)]


def make_shards(vocab: int, padding: int, split: str, tp: int, seed: int = 0) -> list[Shard]:
    """How ``tp`` ranks share a vocabulary of ``vocab`` ids and ``padding`` more rows."""
    if split == "equal":
        vocab_shards = [cce_tp.VocabShard.equal(vocab, rank, tp) for rank in range(tp)]
    elif split == "megatron":
        vocab_shards = [cce_tp.VocabShard.megatron(vocab, vocab + padding, rank, tp) for rank in range(tp)]
    elif split == "chunk":
        vocab_shards = [cce_tp.VocabShard.chunk(vocab, rank, tp) for rank in range(tp)]
    else:
        generator = torch.Generator().manual_seed(seed + 1000 * tp)
        sizes = _random_sizes(vocab, tp, generator)
        pads = _random_sizes(padding, tp, generator)
        vocab_shards = [
            cce_tp.VocabShard(
                start=sum(sizes[:rank]),
                stop=sum(sizes[: rank + 1]),
                vocab_size=vocab,
                padded_stop=sum(sizes[: rank + 1]) + pads[rank],
            )
            for rank in range(tp)
        ]
    shards, next_padding = [], vocab
    for shard in vocab_shards:
        pads_here = (shard.padded_stop or shard.stop) - shard.stop
        rows = [*range(shard.start, shard.stop), *range(next_padding, next_padding + pads_here)]
        next_padding += pads_here
        shards.append(Shard(shard, torch.tensor(rows, dtype=torch.int64)))
    assert next_padding == vocab + padding, "the split must place all of the padding"
    return shards


def _to(values: Tensor, device: str | torch.device) -> Tensor:
    """``values`` on ``device``, with strides like the ones it had."""
    moved = values.to(device)
    return moved if values.is_contiguous() or not moved.is_contiguous() else _with_strides(moved)


def run_layer(
    problem: Problem,
    shard: Shard,
    rank: Rank | None = None,
    *,
    device: str | torch.device = "cpu",
    input_grad: bool = True,
    weight_grad: bool = True,
    use_upstream: bool = True,
    weight_strides: bool = False,
    pass_shard: bool = True,
    main_grad: Tensor | None = None,
    **keywords: Any,
) -> RankResult:
    """The library on one rank's part of ``problem``, forward and backward.

    Under ``sequence_parallel`` the rank takes its chunk of the input along ``sequence_dim``.
    """
    rows = problem.input
    if keywords.get("sequence_parallel") and rank is not None:
        rows = rows.chunk(rank.size, dim=keywords.get("sequence_dim", 0))[rank.index]
    local_weight = problem.weight[shard.rows]
    leaf_input = _to(rows.detach(), device).requires_grad_(input_grad)
    leaf_weight = _with_strides(local_weight) if weight_strides else local_weight
    leaf_weight = _to(leaf_weight.detach(), device).requires_grad_(weight_grad)
    bias = None if problem.bias is None else problem.bias[shard.rows].to(device).requires_grad_()
    before = [leaf_input.detach().clone(), leaf_weight.detach().clone()]
    keywords = {"return_stats": problem.lse_upstream is not None} | keywords
    if pass_shard:
        keywords["shard"] = shard.vocab
    with collectives() as seen:
        result = cce_tp.linear_cross_entropy(
            leaf_input,
            leaf_weight,
            _to(problem.target, device),
            linear_bias=bias,
            weight=None if problem.class_weight is None else problem.class_weight.to(device),
            group=None if rank is None else rank.group,
            main_grad=main_grad,
            **problem.options.keywords(),
            **keywords,
        )
        loss, stats = result if keywords["return_stats"] else (result, None)
        if loss.requires_grad:
            _run_backward(loss, stats, problem, use_upstream)
    for now, then in zip((leaf_input, leaf_weight), before, strict=True):
        assert torch.equal(now.detach().nan_to_num(), then.nan_to_num()), "the caller's tensor was written to"
    return RankResult(
        loss=loss.detach().cpu(),
        lse=None if stats is None else stats.lse.detach().cpu(),
        stats=None if stats is None else _stats_on_cpu(stats),
        grad_input=_grad(leaf_input),
        grad_weight=_grad(leaf_weight),
        grad_bias=None if bias is None else _grad(bias),
        main_grad=None if main_grad is None else main_grad.cpu(),
        collectives=seen,
        has_graph=loss.requires_grad,
    )


def _run_backward(loss: Tensor, stats: Any, problem: Problem, use_upstream: bool) -> None:
    outputs, upstreams = [loss], [torch.ones_like(loss)]
    if use_upstream and problem.upstream is not None:
        upstreams = [_to(problem.upstream, loss.device).to(loss.dtype)]
    if problem.lse_upstream is not None:
        outputs.append(stats.lse)
        upstreams.append(_to(problem.lse_upstream, loss.device))
    torch.autograd.backward(outputs, upstreams)


def _stats_on_cpu(stats: Any) -> dict[str, Any]:
    return {name: value.detach().cpu() if isinstance(value, Tensor) else value for name, value in vars(stats).items()}


def _grad(leaf: Tensor) -> Tensor | None:
    return None if leaf.grad is None else leaf.grad.detach().cpu()


def run_spec(rank: Rank | None, spec: Spec, tp: int = 1, **keywords: Any) -> RankResult:
    """Build a spec's problem and run the library on this rank's part of it: a task for the pool."""
    index = 0 if rank is None else rank.index
    shard = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)[index]
    device = "cpu" if rank is None else rank.device
    keywords.setdefault("device", device)
    return run_layer(build(spec), shard, rank, weight_strides=spec.strided, **keywords)


def run_spec_task(rank: Rank, spec: Spec, keywords: dict[str, Any]) -> RankResult:
    """``run_spec`` as the pool calls it."""
    return run_spec(rank, spec, rank.size, **keywords)


def gather_weight_grad(results: list[Tensor | None], shards: list[Shard], like: Tensor) -> Tensor:
    """The ranks' gradients put at their rows of the whole classifier; NaN where no rank holds a row."""
    whole = torch.full(like.shape, float("nan"), dtype=torch.float64)
    for grad, shard in zip(results, shards, strict=True):
        assert grad is not None
        assert len(grad) == len(shard.rows)
        whole[shard.rows] = grad.double()
    return whole


def check(
    spec: Spec,
    results: list[RankResult],
    shards: list[Shard],
    *,
    expected: Reference | None = None,
    tolerance: float = 1e-5,
) -> None:
    """Compare the ranks' results with float64: losses token by token, gradients in the Frobenius norm."""
    problem = build(spec)
    expected = reference(problem) if expected is None else expected
    first = results[0]
    for result in results:
        assert result.loss.dtype == torch.float32
        assert torch.equal(result.loss, first.loss), "the loss differs between ranks"
        if first.lse is not None:
            assert result.lse is not None
            assert torch.equal(result.lse, first.lse), "the LSE differs between ranks"
    check_loss(first, expected)
    check_gradients(spec, results, shards, expected, tolerance)


def check_loss(result: RankResult, expected: Reference, slack: float = 1.0) -> None:
    """The loss and the LSE within ``slack`` times what fp32 may be off by."""
    assert result.loss.shape == expected.loss.shape
    tolerance = slack * expected.loss_tolerance + 1e-12
    assert (result.loss.double() - expected.loss).abs().le(tolerance).all(), (
        f"loss {result.loss} is not {expected.loss}, tolerance {tolerance}"
    )
    if result.loss.dim():
        assert not result.loss[~expected.valid].any(), "an ignored token has a loss"
    if result.lse is not None:
        allowed = slack * 1e-6 * expected.lse.abs().clamp_min(1)
        assert (result.lse.double() - expected.lse).abs().le(allowed).all()


def check_gradients(
    spec: Spec, results: list[RankResult], shards: list[Shard], expected: Reference, tolerance: float
) -> None:
    problem = build(spec)
    first = results[0]
    if first.grad_input is not None and first.grad_input.shape == problem.input.shape:
        for result in results:
            assert result.grad_input is not None
            assert torch.equal(result.grad_input, first.grad_input), "the input's gradient differs between ranks"
        assert first.grad_input.dtype == spec.dtype
        assert_gradient(
            first.grad_input, expected.grad_input, floor=expected.input_floor, tolerance=tolerance, what="grad of input"
        )
        assert not first.grad_input[~expected.valid].any(), "an ignored token has a gradient"
    if first.grad_weight is not None:
        whole = gather_weight_grad([result.grad_weight for result in results], shards, problem.weight)
        assert first.grad_weight.dtype == spec.dtype
        assert_gradient(
            whole, expected.grad_weight, floor=expected.weight_floor, tolerance=tolerance, what="grad of weight"
        )
        if not spec.options.count_padding:
            assert not whole[spec.vocab :].any(), "padding has a gradient"
    if first.grad_bias is not None:
        assert expected.grad_bias is not None
        whole = gather_weight_grad([result.grad_bias for result in results], shards, problem.bias)  # type: ignore
        assert_gradient(whole, expected.grad_bias, floor=expected.bias_floor, tolerance=tolerance, what="grad of bias")


def check_stats(result: RankResult, expected: Reference) -> None:
    """The statistics at tokens that have a target."""
    valid = expected.valid
    stats = result.stats
    for name in ("lse", "target_logprob", "correct", "entropy"):
        assert stats[name].shape == valid.shape
    for name in ("target_logprob", "entropy"):
        ours, right = stats[name][valid].double(), getattr(expected, name)[valid]
        torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
    assert torch.equal(stats["correct"][valid], expected.correct[valid])
    assert stats["keep_rate"] == 1.0
    assert stats["implementation"] in ("torch", "triton")
