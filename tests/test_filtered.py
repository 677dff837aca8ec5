"""The filtered backward through the public function: what it leaves out is what the paper's filter leaves out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import Pool, Rank
from filtered_problem import (
    TILE,
    Filter,
    FilteredOracle,
    mean_logit_orders,
    row_bounds,
    run_filtered,
    run_filtered_task,
    shards_of_spec,
    small_tiles,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from local_problem import relative_error
from oracle import Options, Problem, reference
from problems import RankResult, Spec, build, check, gather_weight_grad, run_layer

import cce_tp

EPS = 0.15
SPEC = Spec(shape=(52,), hidden=9, vocab=168, split="equal", spread=4.0, seed=5)

ALONE = {
    "plain": SPEC,
    "two dimensions": replace(SPEC, shape=(13, 4)),
    "bias": replace(SPEC, bias=True),
    "class weights": replace(SPEC, class_weight=True),
    "ignored": replace(SPEC, ignored=0.4),
    "sum": replace(SPEC, options=Options(reduction="sum")),
    "per-token upstream": replace(SPEC, options=Options(reduction="none")),
    "smoothing": replace(SPEC, bias=True, options=Options(label_smoothing=0.2)),
    "smoothing, class weights": replace(SPEC, class_weight=True, ignored=0.3, options=Options(label_smoothing=0.2)),
    "scale": replace(SPEC, options=Options(logit_scale=0.6)),
    "negative scale": replace(SPEC, options=Options(logit_scale=-1.2)),
    "softcap": replace(SPEC, bias=True, options=Options(softcap=4.0)),
    "z loss": replace(SPEC, options=Options(z_loss=0.05)),
    "gradient of the LSE": replace(SPEC, lse_grad=True, ignored=0.2),
    "uneven, empty shards": replace(SPEC, split="sizes", vocab=131),
    "padding": replace(SPEC, split="sizes", vocab=131, padding=9, bias=True),
    "counted padding": replace(SPEC, split="sizes", vocab=131, padding=9, options=Options(count_padding=True)),
    "strides": replace(SPEC, strided=True, bias=True),
}
FILTERS: dict[str, dict[str, Any]] = {
    "natural": {},
    "mean logit": {"order": "mean_logit"},
    "a tensor": {"order": "tensor"},
    "input only": {"weight": False},
    "weight only": {"input": False, "order": "mean_logit"},
}


def modes_of(spec: Spec, tp: int, eps: float, choice: dict[str, Any]) -> tuple[list[cce_tp.Filtered], Filter]:
    """The mode of each rank, and what the oracle makes of them."""
    shards = shards_of_spec(spec, tp)
    order = choice.get("order", "natural")
    orders = None
    if order == "mean_logit":
        orders = mean_logit_orders(build(spec), shards)
    elif order == "tensor":
        gen = torch.Generator().manual_seed(spec.seed)
        orders = [torch.randperm(len(shard.rows), generator=gen) for shard in shards]
    flags = {name: choice[name] for name in ("input", "weight") if name in choice}
    given_orders: list[Any] = orders if order == "tensor" and orders is not None else [order] * tp
    modes = [cce_tp.Filtered(eps=eps, order=given_order, **flags) for given_order in given_orders]
    return modes, Filter(eps=eps, orders=orders, **flags)


def solve(pool: Pool | None, spec: Spec, tp: int, modes: list[cce_tp.Filtered], **keywords: Any) -> list[RankResult]:
    if pool is None or tp == 1:
        return [run_filtered(None, spec, 1, modes, keywords)]
    return pool.run(tp, run_filtered_task, spec, modes, keywords)


def compare(pool: Pool | None, spec: Spec, tp: int, eps: float, choice: dict[str, Any]) -> FilteredOracle:
    modes, filter = modes_of(spec, tp, eps, choice)
    oracle = FilteredOracle(build(spec), shards_of_spec(spec, tp), filter)
    assert not oracle.is_close, "take another seed: rounding might decide"
    assert min(oracle.keep_rate) < 0.9, "hardly anything is left out"
    results = solve(pool, spec, tp, modes)
    check(spec, results, shards_of_spec(spec, tp), expected=oracle.expected)
    return oracle


@pytest.mark.parametrize("name", ALONE)
def test_option_alone(name: str) -> None:
    for choice in FILTERS.values():
        compare(None, ALONE[name], 1, EPS, choice)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["plain", "ignored", "smoothing, class weights", "softcap", "padding"])
def test_option_on_several_ranks(pool: Pool, name: str, tp: int) -> None:
    for choice in ({}, {"order": "mean_logit"}, {"order": "tensor", "weight": False}):
        compare(pool, ALONE[name], tp, EPS, choice)


specs = st.builds(
    Spec,
    seed=st.integers(0, 2**20),
    shape=st.tuples(st.integers(0, 60)),
    hidden=st.integers(1, 20),
    vocab=st.integers(1, 150),
    padding=st.integers(0, 9),
    split=st.just("sizes"),
    spread=st.sampled_from([0.3, 2.0, 5.0]),
    bias=st.booleans(),
    class_weight=st.booleans(),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    strided=st.booleans(),
    lse_grad=st.booleans(),
    options=st.builds(
        Options,
        reduction=st.sampled_from(["mean", "sum", "none"]),
        label_smoothing=st.sampled_from([0.0, 0.0, 0.3]),
        logit_scale=st.sampled_from([1.0, 0.5, -1.25]),
        softcap=st.sampled_from([None, 5.0]),
        z_loss=st.sampled_from([0.0, 1e-2]),
        count_padding=st.booleans(),
    ),
)


def _compare_random(pool: Pool | None, spec: Spec, tp: int, eps: float, choice: dict[str, Any]) -> None:
    assume(spec.options.label_smoothing == 0.0 or spec.options.softcap is None)
    modes, filter = modes_of(spec, tp, eps, choice)
    oracle = FilteredOracle(build(spec), shards_of_spec(spec, tp), filter)
    assume(not oracle.is_close)
    check(spec, solve(pool, spec, tp, modes), shards_of_spec(spec, tp), expected=oracle.expected)


@settings(max_examples=50)
@given(spec=specs, eps=st.sampled_from([1e-3, 0.1, 0.5]), name=st.sampled_from(list(FILTERS)))
def test_random_combination_on_one_rank(spec: Spec, eps: float, name: str) -> None:
    _compare_random(None, spec, 1, eps, FILTERS[name])


@settings(max_examples=25)
@given(
    spec=specs, eps=st.sampled_from([1e-3, 0.1, 0.5]), name=st.sampled_from(list(FILTERS)), tp=st.sampled_from([2, 4])
)
def test_random_combination(pool: Pool, spec: Spec, eps: float, name: str, tp: int) -> None:
    _compare_random(pool, spec, tp, eps, FILTERS[name])


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("eps", [1e-3, EPS, 0.8])
def test_keep_rate_is_the_share_of_entries_in_kept_tiles(pool: Pool, eps: float, tp: int) -> None:
    """With fewer ids than the anchor has rows it is the LSE itself, so no tile is recomputed in vain."""
    for name in ("plain", "ignored", "uneven, empty shards"):
        modes, filter = modes_of(ALONE[name], tp, eps, {})
        oracle = FilteredOracle(build(ALONE[name]), shards_of_spec(ALONE[name], tp), filter)
        rates = [result.stats["keep_rate"] for result in solve(pool, ALONE[name], tp, modes)]
        assert [float(rate) for rate in rates] == pytest.approx(oracle.keep_rate)
        assert eps == 1e-3 or min(oracle.keep_rate) < 0.8


def wide_problem(tokens: int = 300, vocab: int = 1024, seed: int = 0) -> Problem:
    """A few ids have most of the mass; the rest is spread over several whole tiles."""
    problem = build(Spec(shape=(tokens,), hidden=12, vocab=vocab, spread=2.5, ignored=0.1, seed=seed))
    bias = -torch.arange(vocab) * (14.0 / vocab)
    target = torch.where(problem.target < 0, problem.target, problem.target % 100)
    return replace(problem, bias=bias, upstream=None, target=target)


def _wide(rank: Rank | None, tp: int, mode: cce_tp.Filtered | str) -> RankResult:
    spec = Spec(shape=(300,), vocab=1024, split="equal")
    return run_layer(wide_problem(), shards_of_spec(spec, tp)[0 if rank is None else rank.index], rank,
                     backward=mode, return_stats=True)  # fmt: skip


def _wide_task(rank: Rank, mode: cce_tp.Filtered | str) -> RankResult:
    return _wide(rank, rank.size, mode)


@pytest.mark.parametrize("order", ["natural", "mean_logit", "count"])
def test_the_error_is_bounded(order: str) -> None:
    """In every row of grad C, with tiles of the real size; and something is left out."""
    problem = wide_problem()
    exact = reference(problem)
    for eps in (2.0**-12, 2.0**-8):
        result = _wide(None, 1, cce_tp.Filtered(eps=eps, order=order))
        assert result.grad_weight is not None
        error = (result.grad_weight.double() - exact.grad_weight).norm(dim=1).max()
        assert 0 < float(error) <= float(row_bounds(problem, eps))
        assert float(result.stats["keep_rate"]) < 0.9


def test_counting_leaves_fewest_tiles() -> None:
    rates = [
        float(_wide(None, 1, cce_tp.Filtered(eps=2.0**-8, order=order)).stats["keep_rate"])
        for order in ("count", "mean_logit", torch.randperm(1024, generator=torch.Generator().manual_seed(1)))
    ]
    assert rates == sorted(rates)
    assert rates[0] < 0.7 * rates[2]


@pytest.mark.parametrize("order", ["natural", "mean_logit", "count"])
def test_a_tiny_eps_is_exact(order: str) -> None:
    exact, filtered = _wide(None, 1, "exact"), _wide(None, 1, cce_tp.Filtered(eps=1e-30, order=order))
    assert torch.equal(filtered.loss, exact.loss)
    assert float(filtered.stats["keep_rate"]) == 1.0
    for name in ("grad_input", "grad_weight", "grad_bias"):
        assert relative_error(getattr(filtered, name), getattr(exact, name)) < 1e-6, name


@pytest.mark.parametrize("tp", [2, 4])
def test_the_same_tiles_at_every_group_size(pool: Pool, tp: int) -> None:
    mode = cce_tp.Filtered(eps=2.0**-8)
    alone, results = _wide(None, 1, mode), pool.run(tp, _wide_task, mode)
    assert float(alone.stats["keep_rate"]) < 0.9
    assert sum(float(result.stats["keep_rate"]) for result in results) / tp == pytest.approx(
        float(alone.stats["keep_rate"])
    )
    spec = Spec(shape=(300,), vocab=1024, split="equal")
    whole = gather_weight_grad([r.grad_weight for r in results], shards_of_spec(spec, tp), wide_problem().weight)
    assert alone.grad_weight is not None
    assert relative_error(whole, alone.grad_weight) < 1e-5
    assert results[0].grad_input is not None
    assert alone.grad_input is not None
    assert relative_error(results[0].grad_input, alone.grad_input) < 1e-5


def flat_problem() -> Problem:
    """B32: ``C = 0``, so that every p is ``1 / 65536``, far below 2^-12."""
    n, d = torch.arange(8)[:, None], torch.arange(16)[None, :]
    hidden = ((37 * n + 11 * d + 5 * d * n) % 23 - 11).float() / 8
    target = torch.tensor([5, 18, 31, 12, 40000, 6, 19, 65535])
    return Problem(hidden, torch.zeros(65536, 16), target, 65536)


def _flat(rank: Rank | None, tp: int, peaked: bool) -> RankResult:
    problem = flat_problem()
    if peaked:  # all mass on one id of the last shard, and next to nothing on what is the largest in another
        problem = replace(problem, input=problem.input.abs())
        problem.weight[65000], problem.weight[100 + 128 * 100] = 4.0, 2.0
    spec = Spec(vocab=65536, split="equal")
    shard = shards_of_spec(spec, tp)[0 if rank is None else rank.index]
    return run_layer(problem, shard, rank, backward=cce_tp.Filtered(), return_stats=True)


def _flat_task(rank: Rank, peaked: bool) -> RankResult:
    return _flat(rank, rank.size, peaked)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("peaked", [False, True])
def test_b32_tiles_of_targets_only(pool: Pool, peaked: bool, tp: int) -> None:
    """Everything but targets' tiles is left out, on the shard without mass as well; targets' rows are exact."""
    results = pool.run(tp, _flat_task, peaked) if tp > 1 else [_flat(None, 1, peaked)]
    kept = [float(result.stats["keep_rate"]) * 65536 / tp for result in results]
    tiles = {5 // 128, 40000 // 128, 65535 // 128} | ({65000 // 128} if peaked else set())
    assert kept == pytest.approx([128 * sum(int(t * 128 * tp // 65536 == r) for t in tiles) for r in range(tp)])
    spec = Spec(vocab=65536, split="equal")
    problem = flat_problem()
    whole = gather_weight_grad([r.grad_weight for r in results], shards_of_spec(spec, tp), problem.weight)
    written = whole.abs().sum(1) > 0
    assert int(written.sum()) <= 128 * len(tiles)
    if not peaked:
        exact = reference(problem)
        assert float(results[0].loss) == pytest.approx(11.09035489, abs=1e-5)
        assert (whole - exact.grad_weight).norm(dim=1).max() <= row_bounds(problem, 2.0**-12)
        rows = problem.target.unique()
        assert relative_error(whole[rows], exact.grad_weight[rows]) < 1e-5


def test_not_a_number_stays_in_its_row() -> None:
    problem = wide_problem()
    spec = Spec(shape=(300,), vocab=1024, split="equal")
    shard = shards_of_spec(spec, 1)[0]
    problem.input[7, 3] = float("nan")
    problem.target[7] = 1
    problem.target[200] = -100
    problem.input[200] = float("nan")
    for order in ("natural", "mean_logit", "count"):
        with small_tiles(TILE):
            result = run_layer(problem, shard, backward=cce_tp.Filtered(eps=0.01, order=order))
        assert result.grad_input is not None
        bad = result.grad_input.isnan().any(1)
        assert bad.nonzero()[:, 0].tolist() == [7]
        assert not result.grad_input[200].any()


def test_a_label_that_is_no_id_makes_its_row_nan() -> None:
    """Also where every tile of its row is left out."""
    problem = flat_problem()
    problem.target[3] = 65536 + 7
    e = problem.input.requires_grad_()
    cce_tp.linear_cross_entropy(e, problem.weight.requires_grad_(), problem.target, backward="filtered").backward()
    assert e.grad is not None
    assert e.grad.isnan().all(1).tolist() == [n == 3 for n in range(8)]


def test_main_grad_and_frozen_parts() -> None:
    problem = wide_problem()
    shard = shards_of_spec(Spec(shape=(300,), vocab=1024, split="equal"), 1)[0]
    mode = cce_tp.Filtered(eps=2.0**-8, order="count")
    alone = run_layer(problem, shard, backward=mode)
    assert alone.grad_weight is not None
    before = torch.randn(1024, 12, generator=torch.Generator().manual_seed(3))
    result = run_layer(problem, shard, backward=mode, main_grad=before.clone())
    assert result.grad_weight is None
    assert result.main_grad is not None
    assert relative_error(result.main_grad, before + alone.grad_weight) < 1e-6
    frozen = run_layer(problem, shard, backward=mode, weight_grad=False)
    assert frozen.grad_weight is None
    assert torch.equal(frozen.grad_input, alone.grad_input)
    frozen = run_layer(problem, shard, backward=mode, input_grad=False)
    assert frozen.grad_input is None
    assert torch.equal(frozen.grad_weight, alone.grad_weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(dtype: torch.dtype) -> None:
    problem = wide_problem()
    problem = replace(problem, input=problem.input.to(dtype), weight=problem.weight.to(dtype))
    shard = shards_of_spec(Spec(shape=(300,), vocab=1024, split="equal"), 1)[0]
    mode = cce_tp.Filtered(eps=2.0**-8)
    result = run_layer(problem, shard, backward=mode)
    wide = replace(problem, input=problem.input.float(), weight=problem.weight.float())
    right = run_layer(wide, shard, backward=mode)
    for name in ("grad_input", "grad_weight"):
        assert getattr(result, name).dtype == dtype
        assert relative_error(getattr(result, name), getattr(right, name)) < 4e-3


@pytest.mark.parametrize("tp", [1, 2])
def test_sequence_parallel(pool: Pool, tp: int) -> None:
    spec = replace(SPEC, shape=(52, 2))
    modes, filter = modes_of(spec, tp, EPS, {"order": "mean_logit"})
    expected = FilteredOracle(build(spec), shards_of_spec(spec, tp), filter).expected
    results = pool.run(tp, run_filtered_task, spec, modes, {"sequence_parallel": True})
    whole = torch.cat([result.grad_input for result in results])
    check(spec, [replace(result, grad_input=whole) for result in results], shards_of_spec(spec, tp), expected=expected)


def test_collectives(pool: Pool) -> None:
    """One more small one than exact; and only where there will be a backward pass."""
    counts = {}
    for mode in ("exact", "filtered"):
        pool.run(2, _wide_task, mode)
        counts[mode] = len(pool.run(2, _wide_task, mode)[0].collectives)
    assert counts["filtered"] == counts["exact"] + 1
    assert pool.run(2, _without_grad) == [1, 1]


def _without_grad(rank: Rank) -> int:
    problem = wide_problem()
    shard = shards_of_spec(Spec(vocab=1024, split="equal"), 2)[rank.index]
    with torch.no_grad():
        run_layer(problem, shard, rank, backward="filtered")
        return len(run_layer(problem, shard, rank, backward="filtered").collectives)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"eps": 0.0}, ValueError, ["eps", "0.0"]),
        ({"eps": float("nan")}, ValueError, ["eps", "nan"]),
        ({"eps": "small"}, TypeError, ["eps", "small"]),
        ({"input": 1}, TypeError, ["input", "1"]),
        ({"input": False, "weight": False}, ValueError, ["exact"]),
        ({"order": "random"}, ValueError, ["order", "random", "mean_logit"]),
        ({"order": torch.ones(3, 2).long()}, TypeError, ["order", "(3, 2)"]),
        ({"order": torch.ones(3)}, TypeError, ["order", "float32"]),
    ],
    ids=str,
)
def test_bad_option(options: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    with pytest.raises(kind) as caught:
        cce_tp.Filtered(**options)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (torch.arange(167), ["order", "167", "168"]),
        (torch.arange(168).clamp(min=1), ["permutation", "167"]),
        (torch.arange(1, 169), ["permutation", "167"]),
        (torch.arange(168) - 1, ["permutation", "167"]),
        (torch.arange(168, device="meta"), ["order is on meta"]),
    ],
    ids=["length", "twice", "beyond", "negative", "device"],
)
def test_bad_order(order: torch.Tensor, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        run_filtered(None, SPEC, 1, cce_tp.Filtered(order=order), {})
    for word in words:
        assert word in str(caught.value)


def test_combinations_that_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'filtered' can't combine label_smoothing=0\.1 with softcap=4\.0"):
        run_filtered(None, replace(SPEC, options=Options(label_smoothing=0.1, softcap=4.0)), 1, "filtered", {})
    with pytest.raises(ValueError, match="workspace=1000000 can't bound backward='filtered'"):
        run_filtered(None, SPEC, 1, "filtered", {"workspace": 10**6})


def test_modes_compare() -> None:
    order = torch.arange(3)
    assert cce_tp.Filtered(order="count") == cce_tp.Filtered(order="count")
    assert cce_tp.Filtered(order="count") != cce_tp.Filtered()
    assert cce_tp.Filtered(order=order) == cce_tp.Filtered(order=order)
    assert cce_tp.Filtered(order=order) != cce_tp.Filtered(order=order.clone())
    assert len({cce_tp.Filtered(), cce_tp.Filtered(), cce_tp.Filtered(order=order)}) == 2
