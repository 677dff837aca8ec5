"""The sampled backward: unbiased, with the variance of the formula, and the same decisions at every group size.

A sampled gradient is random, so no single one is right or wrong. What is tested is the distribution: the distance of
the mean of S samples from the exact gradient, in units of the closed-form standard error; projections on random
directions; the number of kept entries against the sum of their probabilities.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from distributed import Pool, Rank
from oracle import Options, relative_error
from problems import Spec, build, gather_weight_grad, make_shards, run_spec_task
from torch import Tensor

import cce_tp
from cce_tp.kernels import sampling
from cce_tp.kernels.interface import LocalProblem
from cce_tp.options import AUTO_EPS_RANGE, MOVES_WITH, RARE_PROBABILITY

EPS = 2.0**-5
HOT = 8
COPIES = 32  # of every token in one batch: independent draws, since the hash sees the token's place
CALLS = 32
SAMPLES = COPIES * CALLS
UNBOUNDED = 10**6

ALONE = {
    "plain": Spec(),
    "bias": Spec(bias=True),
    "class weights": Spec(class_weight=True),
    "ignored": Spec(ignored=0.3),
    "smoothing": Spec(options=Options(label_smoothing=0.2)),
    "smoothing, class weights": Spec(class_weight=True, options=Options(label_smoothing=0.2)),
    "scale": Spec(options=Options(logit_scale=0.6)),
    "softcap": Spec(options=Options(softcap=2.5)),
    "z-loss": Spec(options=Options(z_loss=0.05)),
    "per-token upstream": Spec(options=Options(reduction="none")),
    "gradient of the LSE": Spec(lse_grad=True),
}


def sized(spec: Spec) -> Spec:
    return replace(spec, shape=(160,), hidden=24, vocab=131, spread=1.0, seed=11)


@dataclass(frozen=True)
class Repeated:
    """A problem whose every token stands ``COPIES`` times in the batch."""

    spec: Spec
    input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    class_weight: Tensor | None
    upstream: Tensor
    lse_upstream: Tensor | None

    @classmethod
    def build(cls, spec: Spec) -> Repeated:
        problem = build(spec)
        tokens = problem.target.numel()
        upstream = problem.upstream
        assert upstream is not None
        return cls(
            spec,
            problem.input.repeat(COPIES, 1),
            problem.weight,
            problem.bias,
            problem.target.repeat(COPIES),
            problem.class_weight,
            upstream.expand(tokens).repeat(COPIES),
            None if problem.lse_upstream is None else problem.lse_upstream.repeat(COPIES),
        )

    @property
    def num_tokens(self) -> int:
        return self.target.numel() // COPIES

    def gradients(self, backward: Any) -> tuple[Tensor, Tensor, Tensor | None, cce_tp.LossStats, Tensor]:
        """Of input ``[COPIES, N, D]``, weight and bias (sums over the copies), for per-token upstream gradients."""
        options = self.spec.options
        leaves = [x if x is None else x.clone().requires_grad_() for x in (self.input, self.weight, self.bias)]
        loss, stats = cce_tp.linear_cross_entropy(
            leaves[0],
            leaves[1],
            self.target,
            linear_bias=leaves[2],
            weight=self.class_weight,
            reduction="none",
            ignore_index=options.ignore_index,
            label_smoothing=options.label_smoothing,
            logit_scale=options.logit_scale,
            softcap=options.softcap,
            z_loss=options.z_loss,
            backward=backward,
            return_stats=True,
        )
        objective = (loss * self.upstream).sum()
        if self.lse_upstream is not None:
            objective = objective + (stats.lse * self.lse_upstream).sum()
        grads = torch.autograd.grad(objective, [leaf for leaf in leaves if leaf is not None])
        by_copy = grads[0].view(COPIES, self.num_tokens, -1)
        return by_copy, grads[1], grads[2] if self.bias is not None else None, stats, loss.detach()


@dataclass(frozen=True)
class Formula:
    """What the statistics predict for one copy of the problem, float64.

    Attributes:
        variance_input, variance_weight: of the gradient, summed over its elements.
        kept: sum of the inclusion probabilities of the entries left to chance.
        kept_variance: of their number.
    """

    variance_input: float
    variance_weight: float
    kept: float
    kept_variance: float

    @classmethod
    def of(cls, repeated: Repeated) -> Formula:
        options, vocab, tokens = repeated.spec.options, repeated.weight.shape[0], repeated.num_tokens
        target, active = repeated.target, repeated.target != options.ignore_index
        anchor, is_hot = anchor_of(repeated)
        e, c = repeated.input[:tokens].double(), repeated.weight.double()
        z = e @ c.T
        z = (z if repeated.bias is None else z + repeated.bias.double()) * options.logit_scale
        slope = torch.full_like(z, options.logit_scale)
        if options.softcap is not None:
            slope = slope * (1 - torch.tanh(z / options.softcap).square())
            z = options.softcap * torch.tanh(z / options.softcap)
        lse = z.logsumexp(1)
        target, active = target[:tokens], active[:tokens]
        known = torch.where(active, target, 0)
        weights = torch.ones(vocab).double() if repeated.class_weight is None else repeated.class_weight.double()
        alpha = options.label_smoothing
        factor = (1 - alpha) * weights[known] + alpha / vocab * weights.sum() + 2 * options.z_loss * lse
        factor = factor * repeated.upstream[:tokens].double()
        if repeated.lse_upstream is not None:
            factor = factor + repeated.lse_upstream[:tokens].double()
        inclusion = torch.exp(z - anchor[:tokens].double()[:, None]).div(EPS).clamp(max=1.0)
        chance = active[:, None] & ~is_hot[None, :]
        chance[torch.arange(tokens), known] = False
        spread = (factor[:, None] * (z - lse[:, None]).exp() * slope).square() * (1 / inclusion - 1)
        spread = torch.where(chance, spread, 0.0)
        inclusion = torch.where(chance, inclusion, 0.0)
        return cls(
            float((spread * c.square().sum(1)).sum()),
            float((spread * e.square().sum(1)[:, None]).sum()),
            float(inclusion.sum()),
            float((inclusion * (1 - inclusion)).sum()),
        )


def anchor_of(repeated: Repeated) -> tuple[Tensor, Tensor]:
    """The anchor that the library uses, and which ids are hot."""
    options, vocab = repeated.spec.options, repeated.weight.shape[0]
    active = repeated.target != options.ignore_index
    rows = sampling.anchor_rows(repeated.target, active, sampling.RowIds.whole(vocab), HOT)
    problem = LocalProblem(
        repeated.input,
        repeated.weight,
        torch.where(active, repeated.target, -1),
        repeated.bias,
        logit_scale=options.logit_scale,
        softcap=options.softcap,
    )
    return sampling.anchor(sampling.anchor_sums(problem, rows), rows), rows.place > 0


def sampled(seed: int | None, **changes: Any) -> cce_tp.Sampled:
    return cce_tp.Sampled(
        **{"eps": EPS, "seed": seed, "reference_rows": HOT, "entries_per_token": UNBOUNDED, **changes}
    )


@dataclass(frozen=True)
class Mean:
    """Means over all samples minus the exact gradient, and each call's own, to estimate standard errors from."""

    input: Tensor
    weight: Tensor
    input_calls: Tensor
    weight_calls: Tensor
    input_square: float
    kept: float


def mean_error(repeated: Repeated, **changes: Any) -> Mean:
    exact_input, exact_weight, _, _, exact_loss = repeated.gradients("exact")
    inputs, weights, square, kept = [], [], 0.0, 0.0
    for call in range(CALLS):
        by_copy, weight, _, stats, loss = repeated.gradients(sampled(call, **changes))
        torch.testing.assert_close(loss, exact_loss, rtol=1e-5, atol=1e-5)  # the loss is never sampled
        difference = (by_copy - exact_input).double()
        inputs.append(difference.mean(0))
        weights.append((weight - exact_weight).double() / COPIES)
        square += float(difference.square().sum()) / SAMPLES
        kept += float(stats.keep_rate) * repeated.target.numel() * repeated.weight.shape[0] / SAMPLES
    input_calls, weight_calls = torch.stack(inputs), torch.stack(weights)
    return Mean(input_calls.mean(0), weight_calls.mean(0), input_calls, weight_calls, square, kept)


def assert_projections_vanish(calls: Tensor) -> None:
    """16 random projections of the mean over calls lie within 4 standard errors of 0."""
    flat = calls.flatten(1)
    directions = torch.randn(flat.shape[1], 16, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    projected = flat @ directions
    error = projected.std(0) / math.sqrt(len(calls))
    assert bool((projected.mean(0).abs() <= 4 * error).all())


@pytest.mark.parametrize("name", ALONE)
def test_unbiased_with_the_variance_of_the_formula(name: str) -> None:
    repeated = Repeated.build(sized(ALONE[name]))
    formula, mean = Formula.of(repeated), mean_error(repeated)
    assert formula.variance_input > 0
    assert 0.8 < float(mean.input.square().sum()) * SAMPLES / formula.variance_input < 1.25
    assert 0.8 < float(mean.weight.square().sum()) * SAMPLES / formula.variance_weight < 1.25
    assert 0.9 < mean.input_square / formula.variance_input < 1.1
    assert_projections_vanish(mean.input_calls)
    assert_projections_vanish(mean.weight_calls)
    assert abs(mean.kept - formula.kept) < 4 * math.sqrt(formula.kept_variance / SAMPLES)


@pytest.mark.parametrize("shift", [-3.0, 3.0, 6.0])
def test_unbiased_whatever_the_anchor(shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The anchor decides how much is kept, not what it adds up to. (It exceeds the LSE by ln(1 + V / 1024) at most.)"""
    usual = sampling.anchor
    monkeypatch.setattr(sampling, "anchor", lambda *arguments: usual(*arguments) + shift)
    repeated = Repeated.build(sized(Spec()))
    mean = mean_error(repeated)
    if shift < 6:  # beyond, a few rare and heavy entries make the variance, and 1024 samples don't average it
        assert 0.75 < float(mean.input.square().sum()) * SAMPLES / Formula.of(repeated).variance_input < 1.3
    assert_projections_vanish(mean.input_calls)
    assert_projections_vanish(mean.weight_calls)


@pytest.mark.parametrize("kind", ["trained", "at initialisation", "one hot"])
def test_unbiased_under_bounded_lists(kind: str) -> None:
    """With 8 entries a token almost every list is thinned; the mean is still the exact gradient."""
    repeated = Repeated.build(sized(Spec()))
    if kind == "at initialisation":
        repeated = replace(repeated, weight=repeated.weight * 1e-3)
    if kind == "one hot":
        peak = torch.nn.functional.one_hot(torch.arange(131) % 24, 24).float() * 6
        repeated = replace(repeated, weight=peak + repeated.weight)
    mean = mean_error(repeated, entries_per_token=8)
    assert mean.kept < 8 * repeated.num_tokens + 0.01
    assert 0.8 < float(mean.input.square().sum()) * SAMPLES / mean.input_square < 1.25
    assert_projections_vanish(mean.input_calls)
    assert_projections_vanish(mean.weight_calls)


def test_more_entries_make_less_noise() -> None:
    repeated = Repeated.build(sized(Spec()))
    few, many = (mean_error(repeated, eps=eps).input_square for eps in (2.0**-3, 2.0**-8))
    assert 0 < many < 0.1 * few


def _sampled_gradients(rank: Rank | None, tp: int, seed: int | None, spec: Spec) -> tuple[Tensor, Tensor | None, float]:
    """Of the input and of this rank's rows, and how many entries the rank kept."""
    problem, index = build(spec), 0 if rank is None else rank.index
    shard = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)[index]
    leaf = problem.input.clone().requires_grad_()
    rows = problem.weight[shard.rows].clone().requires_grad_()
    loss, stats = cce_tp.linear_cross_entropy(
        leaf,
        rows,
        problem.target,
        group=None if rank is None else rank.group,
        shard=shard.vocab,
        backward=sampled(seed),
        return_stats=True,
    )
    loss.backward()
    return leaf.grad, rows.grad, float(stats.keep_rate) * problem.target.numel() * rows.shape[0]


@pytest.mark.distributed
@pytest.mark.parametrize("split", ["equal", "chunk", "sizes"])
@pytest.mark.parametrize("tp", [2, 4])
def test_the_same_entries_at_every_group_size(pool: Pool, tp: int, split: str) -> None:
    """The hash sees global ids and the anchor is a sum that does not care how it is split."""
    spec = Spec(shape=(24,), hidden=16, vocab=132, split=split, seed=7)
    alone_input, alone_weight, kept = _sampled_gradients(None, 1, 3, spec)
    again_input, again_weight, _ = _sampled_gradients(None, 1, 3, spec)
    assert torch.equal(alone_input, again_input)
    assert torch.equal(alone_weight, again_weight)
    results = pool.run(tp, _sampled_gradients, tp, 3, spec)
    assert kept > 100
    assert round(sum(result[2] for result in results)) == round(kept)
    weight = gather_weight_grad([r[1] for r in results], make_shards(132, 0, split, tp, 7), alone_weight)
    for ours, right in ((results[0][0], alone_input), (weight, alone_weight)):
        assert float((ours - right).norm()) < 1e-5 * float(right.norm())
    other_input, _, _ = _sampled_gradients(None, 1, 4, spec)
    assert float((other_input - alone_input).norm()) > 1e-3 * float(alone_input.norm())


def _replicas(rank: Rank) -> tuple[Tensor, Tensor]:
    """Two steps of a tp 2 x dp 2 job whose replicas happen to have the same batch."""
    spec = Spec(shape=(24,), hidden=16, vocab=132, split="equal", seed=7)
    assert rank.paired is not None
    problem = build(spec)
    cce_tp.sampler.manual_seed(1)
    steps = []
    for _ in range(2):
        leaf = problem.input.clone().requires_grad_()
        rows = problem.weight.chunk(2)[rank.index % 2].clone().requires_grad_()
        backward = sampled(None)
        cce_tp.linear_cross_entropy(leaf, rows, problem.target, group=rank.paired, backward=backward).backward()
        steps.append(leaf.grad)
    return steps[0], steps[1]


@pytest.mark.distributed
def test_steps_and_replicas_draw_differently_and_ranks_of_a_group_alike(pool: Pool) -> None:
    steps = pool.run(4, _replicas)
    for step in range(2):
        assert torch.equal(steps[0][step], steps[1][step])
        assert torch.equal(steps[2][step], steps[3][step])
        assert not torch.equal(steps[0][step], steps[2][step])
    assert not torch.equal(steps[0][0], steps[0][1])


def test_the_state_survives_a_checkpoint() -> None:
    spec = Spec(shape=(24,), hidden=16, vocab=132, seed=7)
    cce_tp.sampler.manual_seed(5)
    _sampled_gradients(None, 1, None, spec)
    state = cce_tp.sampler.state_dict()
    after, _, _ = _sampled_gradients(None, 1, None, spec)
    cce_tp.sampler.manual_seed(0)
    other, _, _ = _sampled_gradients(None, 1, None, spec)
    cce_tp.sampler.load_state_dict(state)
    restored, _, _ = _sampled_gradients(None, 1, None, spec)
    assert torch.equal(after, restored)
    assert not torch.equal(after, other)


def test_evaluation_draws_nothing() -> None:
    cce_tp.sampler.manual_seed(5)
    before = cce_tp.sampler.state_dict()
    with torch.no_grad():
        cce_tp.linear_cross_entropy(torch.ones(3, 4), torch.ones(5, 4), torch.arange(3), backward="sampled")
    assert cce_tp.sampler.state_dict() == before


def test_main_grad_is_touched_only_where_something_occurs() -> None:
    """Rows that are neither hot, nor a target, nor kept keep their very bits, NaN here."""
    torch.manual_seed(0)
    e, c = torch.randn(6, 16, requires_grad=True), (torch.randn(400, 16) * 3).requires_grad_()
    target = torch.randint(0, 400, (6,))
    exact = torch.zeros(400, 16)
    cce_tp.linear_cross_entropy(e, c, target, main_grad=exact).backward()
    main_grad = torch.full((400, 16), float("nan"))
    main_grad[target] = 1.0
    choice = cce_tp.Sampled(eps=0.5, seed=1, reference_rows=1)
    cce_tp.linear_cross_entropy(e, c, target, backward=choice, main_grad=main_grad).backward()
    untouched = main_grad.isnan().all(dim=1)
    assert int(untouched.sum()) > 100
    assert c.grad is None
    assert not torch.equal(main_grad[target], torch.ones(6, 16))


@pytest.mark.distributed
@pytest.mark.parametrize("tp", [2, 4])
def test_one_more_collective(pool: Pool, tp: int) -> None:
    """The anchor costs one sum of five numbers a token."""
    spec = Spec(shape=(8,), hidden=16, vocab=40, split="equal")
    sent = pool.run(tp, run_spec_task, spec, {"backward": "sampled"})[0].collectives
    assert sent[-3].name.startswith("allreduce")
    assert tuple(sent[-3].shape) == (5, 8)
    assert sent[-3].dtype == torch.float64


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"eps": 0.0}, "eps"),
        ({"eps": 1.5}, "eps"),
        ({"eps": "small"}, "eps='small' must be a number or 'auto'"),
        ({"eps": "auto"}, "eps='auto' needs tokens_per_step"),
        ({"eps": "auto", "tokens_per_step": 0}, "tokens_per_step=0 must be at least 1"),
        ({"eps": "auto", "tokens_per_step": 1e6}, "tokens_per_step=1000000.0 must be an int"),
        ({"eps": "auto", "tokens_per_step": True}, "tokens_per_step=True must be an int"),
        ({"tokens_per_step": 8192}, "tokens_per_step=8192 has no effect with eps=0.00390625"),
        ({"seed": 1.5}, "seed"),
        ({"reference_rows": 0}, "reference_rows"),
        ({"entries_per_token": -1}, "entries_per_token"),
    ],
)
def test_nonsense_is_named(options: dict[str, Any], word: str) -> None:
    with pytest.raises((TypeError, ValueError), match=word):
        cce_tp.Sampled(**options)


def test_eps_auto() -> None:
    """More tokens a step allow a larger eps; a rare row gets its entries, and the mode is one with a number."""
    low, high = AUTO_EPS_RANGE
    tokens = [2**power for power in range(31)]
    chosen = [cce_tp.Sampled(eps="auto", tokens_per_step=count).eps for count in tokens]
    assert (chosen[0], chosen[-1]) == (low, high)
    assert all(after in (before, 2 * before) for before, after in itertools.pairwise(chosen))
    between = [(count, eps) for count, eps in zip(tokens, chosen, strict=True) if low < eps < high]
    assert between
    for count, eps in between:
        assert MOVES_WITH <= count * RARE_PROBABILITY / eps < 2 * MOVES_WITH

    mode = cce_tp.Sampled(eps="auto", tokens_per_step=4096, seed=3)
    assert mode == cce_tp.Sampled(eps=low, seed=3)
    assert repr(mode) == repr(cce_tp.Sampled(eps=low, seed=3)), "ranks compare this"
    assert mode.most_entries == 1.5 / low
    assert replace(mode, seed=4) == cce_tp.Sampled(eps=low, seed=4)


def test_eps_auto_is_that_number_in_a_call() -> None:
    """Whoever names the tokens of a step gets the gradients of the number that they make."""
    generator = torch.Generator().manual_seed(8)
    e, c = torch.randn(6, 16, generator=generator), torch.randn(1500, 16, generator=generator)
    target = torch.randint(0, 1500, (6,), generator=generator)

    def gradient(mode: cce_tp.Sampled) -> Tensor:
        leaf = c.clone().requires_grad_()
        cce_tp.linear_cross_entropy(e, leaf, target, backward=mode).backward()
        assert leaf.grad is not None
        return leaf.grad

    small = {"seed": 1, "reference_rows": 1}
    auto = gradient(cce_tp.Sampled(eps="auto", tokens_per_step=2**30, **small))
    assert torch.equal(auto, gradient(cce_tp.Sampled(eps=AUTO_EPS_RANGE[1], **small)))
    assert not torch.equal(auto, gradient(cce_tp.Sampled(eps=AUTO_EPS_RANGE[0], **small)))


@pytest.mark.parametrize("options", [{"eps": 1e-30}, {"entries_per_token": 10**20}], ids=str)
def test_more_entries_allowed_than_there_are_integers(options: dict[str, Any]) -> None:
    e, c, target = torch.randn(6, 8), torch.randn(40, 8, requires_grad=True), torch.arange(6)

    def gradient(backward: str | cce_tp.Sampled) -> Tensor:
        loss = cce_tp.linear_cross_entropy(e, c, target, backward=backward, implementation="torch")
        return torch.autograd.grad(loss, c)[0]

    sampled = gradient(cce_tp.Sampled(**{"eps": 1e-6, "reference_rows": 2, **options}))
    assert relative_error(sampled, gradient("exact")) < 1e-2


def test_plain_pytorch_has_no_workspace() -> None:
    e, c, target = torch.randn(4, 8), torch.randn(16, 8), torch.arange(4)
    with pytest.raises(ValueError, match="workspace=100000 can't bound backward='sampled' in the torch implementation"):
        cce_tp.linear_cross_entropy(e, c, target, backward="sampled", workspace=10**5, implementation="torch")
