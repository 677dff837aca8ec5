"""Field cases: faults that others have met, as small inputs with right values. Named after the list they come from.

F(N, D, V) holds numbers that are exact in fp32, bf16 and fp16, so the values hold in any of them. Losses are checked
token by token, gradients against the dense float64 ones and not only by their norms.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Collective, Pool, Rank, collectives
from oracle import Problem, fixture, fixture0, reference, relative_error
from problems import RankResult, Shard, check_loss, gather_weight_grad, make_shards, run_layer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cce_tp

TP_SIZES = (1, 2, 4)
F0_LOSSES = [8.41585748, 8.54002487, 6.69575868, 7.43288757, 9.86943997, 3.41203042, 7.29085471, 4.80901570]
F0_MEAN, F0_INPUT_NORM, F0_WEIGHT_NORM = 7.05823367, 1.17992639, 1.26085113


def shards_of(problem: Problem, tp: int, split: str = "equal") -> list[Shard]:
    return make_shards(problem.vocab_size, problem.weight.shape[0] - problem.vocab_size, split, tp)


def _layer(rank: Rank, problem: Problem, split: str, keywords: dict[str, Any]) -> RankResult:
    return run_layer(problem, shards_of(problem, rank.size, split)[rank.index], rank, **keywords)


def same_bits(values: Tensor | None, others: Tensor | None) -> bool:
    """Equal, NaN included; None equals None."""
    if values is None or others is None:
        return values is others
    return torch.allclose(values, others, rtol=0, atol=0, equal_nan=True)


def solve(pool: Pool, tp: int, problem: Problem, split: str = "equal", **keywords: Any) -> list[RankResult]:
    """The library on ``tp`` ranks; the loss and the input's gradient must be the same bits on all of them."""
    if tp == 1:
        return [run_layer(problem, shards_of(problem, 1, split)[0], **keywords)]
    results = pool.run(tp, _layer, problem, split, keywords)
    assert all(same_bits(result.loss, results[0].loss) for result in results)
    if not keywords.get("sequence_parallel"):
        assert all(same_bits(result.grad_input, results[0].grad_input) for result in results)
    return results


def whole_weight_grad(results: list[RankResult], problem: Problem, split: str = "equal") -> Tensor:
    shards = shards_of(problem, len(results), split)
    return gather_weight_grad([result.grad_weight for result in results], shards, problem.weight)


def solve_and_compare(pool: Pool, tp: int, problem: Problem, split: str = "equal", **keywords: Any) -> list[RankResult]:
    """As ``solve``, compared with float64 in everything that was computed."""
    results = solve(pool, tp, problem, split, **keywords)
    expected = reference(problem)
    check_loss(results[0], expected)
    assert relative_error(results[0].grad_input, expected.grad_input) < 1e-5
    assert relative_error(whole_weight_grad(results, problem, split), expected.grad_weight) < 1e-5
    return results


def norm(values: Tensor | None) -> float:
    assert values is not None
    return float(values.double().norm())


def close(value: float, tolerance: float = 1e-5) -> Any:
    return pytest.approx(value, rel=tolerance, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tp", TP_SIZES)
def test_f0(pool: Pool, tp: int, dtype: torch.dtype) -> None:
    """The fixture itself, and the detectors built into it."""
    problem = fixture0(dtype)
    results = solve(pool, tp, problem.with_options(reduction="none"))
    torch.testing.assert_close(results[0].loss, torch.tensor(F0_LOSSES), atol=1e-5, rtol=0)
    results = solve(pool, tp, problem)
    assert float(results[0].loss) == pytest.approx(F0_MEAN, abs=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    whole = whole_weight_grad(results, problem)
    assert norm(results[0].grad_input) == close(F0_INPUT_NORM, tolerance)
    assert norm(whole) == close(F0_WEIGHT_NORM, tolerance)
    assert float(whole.sum(dim=0).abs().max()) < 10 * tolerance
    assert float(results[0].grad_input[:, 3].abs().max()) < tolerance


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b01_off_shard_labels(pool: Pool, tp: int) -> None:
    """Every label is once on and once off each shard, none of which is a multiple of a tile."""
    problem = fixture(200, 16, 200)
    problem = replace(problem, target=torch.arange(200))
    results = solve_and_compare(pool, tp, problem)
    assert float(results[0].loss) == pytest.approx(7.22950093, abs=1e-5)
    assert norm(results[0].grad_input) == close(0.21677190)
    assert norm(whole_weight_grad(results, problem)) == close(0.25962926)
    loss = solve(pool, tp, problem.with_options(reduction="none"))[0].loss
    assert float(loss.max()) == pytest.approx(13.59073377, abs=1e-5)
    assert loss.isfinite().all()


@pytest.mark.parametrize("tp", [2, 4])
def test_b02_input_grad_is_summed_over_the_group(pool: Pool, tp: int) -> None:
    for result in solve_and_compare(pool, tp, fixture0()):
        assert norm(result.grad_input) == close(F0_INPUT_NORM)


def test_b05_ranks_without_a_target(pool: Pool) -> None:
    """All labels on the last shard: the others still get the softmax's gradient, row by row."""
    problem = replace(fixture0(), target=torch.arange(24, 32))
    results = solve_and_compare(pool, 4, problem)
    assert float(results[0].loss) == pytest.approx(5.59338992, abs=1e-5)
    expected = reference(problem).grad_weight
    for result, shard in zip(results, shards_of(problem, 4), strict=True):
        assert norm(result.grad_weight) > 0
        assert relative_error(result.grad_weight, expected[shard.rows]) < 1e-5
    assert float(whole_weight_grad(results, problem).sum(dim=0).abs().max()) < 1e-6


BAD_LABELS = [32, 33, -1, -101, 2**32 + 5, 2**40]


@pytest.mark.parametrize("label", BAD_LABELS)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_b06_bad_label_without_validation_is_nan_in_its_row_only(pool: Pool, tp: int, label: int) -> None:
    problem = fixture0().with_options(reduction="none")
    problem.target[3] = label
    for result in solve(pool, tp, problem):
        _check_only_row_3_is_nan(result)
    for result in solve(pool, tp, problem.with_options(reduction="mean", label_smoothing=0.1)):
        assert math.isnan(float(result.loss))


def _check_only_row_3_is_nan(result: RankResult) -> None:
    others = [n for n in range(8) if n != 3]
    right = torch.tensor(F0_LOSSES)
    assert math.isnan(float(result.loss[3]))
    torch.testing.assert_close(result.loss[others], right[others], atol=1e-5, rtol=0)
    expected = reference(fixture0().with_options(reduction="none")).grad_input
    assert result.grad_input is not None
    assert result.grad_input[3].isnan().all()
    assert relative_error(result.grad_input[others], expected[others]) < 1e-5


@pytest.mark.parametrize("label", BAD_LABELS)
@pytest.mark.parametrize("tp", TP_SIZES)
def test_b06_bad_label_under_validation_is_one_error_on_every_rank(pool: Pool, tp: int, label: int) -> None:
    problem = fixture0()
    problem.target[3] = label
    for error in pool.errors(tp, _layer, problem, "equal", {"validate": True}):
        assert error.kind == "ValueError"
        for word in (str(label), "3", "32"):
            assert word in error.message


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b06_label_of_a_padding_row(pool: Pool, tp: int) -> None:
    """A row that pads the vocabulary is no label, wherever it lies."""
    for count_padding in (False, True):
        problem = replace(fixture0(), vocab_size=30).with_options(reduction="none", count_padding=count_padding)
        problem.target[:] = torch.tensor([5, 18, 1, 31, 27, 10, 23, 6])
        for result in solve(pool, tp, problem, "megatron"):
            assert result.loss.isnan().tolist() == [n == 3 for n in range(8)]
        for error in pool.errors(tp, _layer, problem, "megatron", {"validate": True}):
            assert error.kind == "ValueError"
            assert "31" in error.message


@pytest.mark.parametrize("tp", [2, 4])
def test_b07_replicated_classifier(pool: Pool, tp: int) -> None:
    """All rows on every rank are refused, with and without a stated vocabulary."""
    for vocab_size in (32, None):
        for error in pool.errors(tp, _replicated, vocab_size, fresh=True):
            assert error.kind == "ValueError"
            assert "rows" in error.message


def _replicated(rank: Rank, vocab_size: int | None) -> float:
    group = rank.group
    shard = None if vocab_size is None else cce_tp.VocabShard.equal(vocab_size, rank.index, rank.size)
    problem = fixture0()
    return float(cce_tp.linear_cross_entropy(problem.input, problem.weight, problem.target, group=group, shard=shard))


def test_b07_a_shard_passed_as_the_whole(pool: Pool) -> None:
    """One shard without its group has labels beyond its rows: never a finite loss."""
    for loss in pool.run(2, _shard_without_group):
        assert math.isnan(loss)


def _shard_without_group(rank: Rank) -> float:
    problem = fixture0()
    weight = problem.weight[shards_of(problem, 2)[rank.index].rows]
    return float(cce_tp.linear_cross_entropy(problem.input, weight, problem.target))


@pytest.mark.parametrize("poison", [False, True])
@pytest.mark.parametrize("tp", TP_SIZES)
def test_b09_padding_of_the_vocabulary(pool: Pool, tp: int, poison: bool) -> None:
    """Padding takes no part, not even where it holds NaN, and gets a gradient of exactly 0."""
    target = torch.tensor([5, 18, 1, 14, 27, 10, 23, 6])
    problem = replace(fixture0(), vocab_size=30, target=target)
    if poison:
        problem.weight[30:] = math.nan
    results = solve(pool, tp, problem, "megatron")
    assert float(results[0].loss) == pytest.approx(4.90317817, abs=1e-5)
    assert norm(results[0].grad_input) == close(1.07025049)
    assert not whole_weight_grad(results, problem, "megatron")[30:].any()
    if not poison:
        counted = solve_and_compare(pool, tp, problem.with_options(count_padding=True), "megatron")
        assert float(counted[0].loss) == pytest.approx(4.94495242, abs=1e-5)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b10_ignored_labels(pool: Pool, tp: int) -> None:
    problem = fixture0()
    problem.target[[1, 4, 6]] = -100
    results = solve_and_compare(pool, tp, problem)
    assert float(results[0].loss) == pytest.approx(6.15310997, abs=1e-5)
    assert not results[0].grad_input[[1, 4, 6]].any()
    row0 = whole_weight_grad(results, problem)[0]
    assert relative_error(row0, reference(problem).grad_weight[0]) < 1e-5
    losses = solve(pool, tp, problem.with_options(reduction="none"))[0].loss
    assert losses[[1, 4, 6]].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b10_other_ignore_indices(pool: Pool, tp: int) -> None:
    results = solve_and_compare(pool, tp, fixture0().with_options(ignore_index=5))
    assert float(results[0].loss) == pytest.approx(6.86428742, abs=1e-5)
    problem = fixture0().with_options(ignore_index=-1)
    problem.target[[1, 4, 6]] = -1
    results = solve_and_compare(pool, tp, problem)
    assert float(results[0].loss) == pytest.approx(6.15310997, abs=1e-5)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b11_smoothing_over_the_whole_vocabulary(pool: Pool, tp: int) -> None:
    results = solve_and_compare(pool, tp, fixture0().with_options(label_smoothing=0.2))
    assert float(results[0].loss) == pytest.approx(6.72755741, abs=1e-5)


def _mesh_losses(rank: Rank, which: str) -> tuple[float, float, list[Collective]]:
    """Two tensor-parallel groups with data of their own; F0, and F0 with its labels reversed."""
    group = rank.strided if which == "strided" else rank.paired
    replica = rank.index % 2 if which == "strided" else rank.index // 2
    problem = fixture0()
    if replica:
        problem = replace(problem, target=problem.target.flip(0))
    assert group is not None
    place = Rank(dist.get_rank(group), 2, group, rank.device)
    result = run_layer(problem, shards_of(problem, 2)[place.index], place)
    return float(result.loss), relative_error(result.grad_input, reference(problem).grad_input), result.collectives


@pytest.mark.parametrize("which", ["strided", "paired"])
def test_b12_groups_of_a_mesh_do_not_mix(pool: Pool, which: str) -> None:
    """The place within the group counts, not the global rank; and nothing travels outside the group."""
    results = pool.run(4, _mesh_losses, which)
    first, second = F0_MEAN, 6.02893680
    expected = [first, second, first, second] if which == "strided" else [first, first, second, second]
    assert [loss for loss, _, _ in results] == pytest.approx(expected, abs=1e-5)
    for _, error, seen in results:
        assert error < 1e-5
        assert {collective.group_size for collective in seen} == {2}


def _no_group(rank: Rank) -> tuple[float, list[Collective]]:
    problem = fixture0()
    result = run_layer(problem, shards_of(problem, 1)[0])
    return float(result.loss), result.collectives


def test_b12_no_group_is_a_single_shard(pool: Pool) -> None:
    for loss, seen in pool.run(4, _no_group):
        assert loss == pytest.approx(F0_MEAN, abs=1e-5)
        assert seen == []


def _outside(rank: Rank) -> str:
    group = dist.new_group([0, 1])
    try:
        problem = fixture0()
        weight = problem.weight[shards_of(problem, 2)[rank.index % 2].rows]
        cce_tp.linear_cross_entropy(problem.input, weight, problem.target, group=group)
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


def test_b12_a_rank_outside_the_group(pool: Pool) -> None:
    messages = pool.run(4, _outside)
    assert messages[:2] == ["", ""]
    assert all("not a member" in message for message in messages[2:])


def _different_tokens(rank: Rank, what: str) -> float:
    problem = fixture0()
    if rank.index == 1 and what == "label":
        problem.target[2] = 7
    if rank.index == 1 and what == "input":
        problem.input[2] *= 2
    if rank.index == 1 and what == "number":
        problem = replace(problem, input=problem.input[:7], target=problem.target[:7])
    shard = shards_of(problem, 2)[rank.index]
    return float(run_layer(problem, shard, rank, validate=True).loss)


@pytest.mark.parametrize("what", ["label", "input", "number"])
@pytest.mark.parametrize("warm", [False, True])
def test_b14_ranks_with_different_tokens(pool: Pool, what: str, warm: bool) -> None:
    """Under validation: one error on every rank that names the first row that differs."""
    if warm:
        solve_and_compare(pool, 2, fixture0())
    errors = pool.errors(2, _different_tokens, what)
    for error in errors:
        assert error is not None
        assert error.kind == "ValueError"
        if what != "number":
            assert "token 2" in error.message
    assert errors[0].message == errors[1].message
    solve_and_compare(pool, 2, fixture0())


def _first_call_on_a_new_group(rank: Rank, fault: str) -> float:
    """Rank 0 of a group that was never used before does something else than rank 1."""
    group = rank.group
    problem = fixture0()
    shard = shards_of(problem, rank.size)[rank.index]
    rows = problem.input.clone().requires_grad_(not (fault == "frozen input" and rank.index == 0))
    weight = problem.weight[shard.rows].requires_grad_(not (fault == "frozen weight" and rank.index == 0))
    keywords: dict[str, Any] = {}
    if rank.index == 0:
        if fault == "shape":
            rows = rows[:, :-1]
        if fault == "dtype":
            rows = rows.double()
        if fault == "option":
            keywords["softcap"] = -1.0
        if fault == "reduction":
            keywords["reduction"] = "average"
        if fault == "other option":
            keywords["softcap"] = 30.0
        if fault == "mode":
            keywords["backward"] = "fast"
        if fault == "other mode":
            keywords["backward"] = "sampled"
        if fault == "workspace":
            keywords["workspace"] = 1
        if fault == "placeholder":
            weight = torch.empty(0)
        if fault == "number of tokens":
            rows, problem = rows[:7], replace(problem, target=problem.target[:7])
        if fault == "shard":
            keywords["shard"] = cce_tp.VocabShard(start=16, stop=32, vocab_size=32)
        if fault == "stats":
            keywords["return_stats"] = True
    result = cce_tp.linear_cross_entropy(rows, weight, problem.target, group=group, **keywords)
    loss = result[0] if isinstance(result, tuple) else result
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize(
    "fault",
    [
        "shape",
        "dtype",
        "option",
        "reduction",
        "other option",
        "mode",
        "other mode",
        "workspace",
        "placeholder",
        "number of tokens",
        "shard",
        "stats",
        "frozen input",
    ],
)
def test_b15_an_error_on_one_rank_is_an_error_on_all(pool: Pool, fault: str) -> None:
    errors = pool.errors(2, _first_call_on_a_new_group, fault, fresh=True)
    assert None not in errors, f"rank {errors.index(None)} went on alone"


def test_b15_frozen_weight_on_one_rank(pool: Pool) -> None:
    """That changes no collective, so it is allowed."""
    losses = pool.run(2, _first_call_on_a_new_group, "frozen weight", fresh=True)
    assert losses == pytest.approx([F0_MEAN] * 2, abs=1e-5)


def test_b15_all_targets_on_one_shard(pool: Pool) -> None:
    problem = replace(fixture0(), target=torch.arange(16, 24))
    solve_and_compare(pool, 2, problem)


def _masked_replica(rank: Rank, empty: str) -> tuple[float, float]:
    """A mesh of two replicas, one of which has no valid token; parameters averaged over the replicas."""
    assert rank.paired is not None
    assert rank.strided is not None
    problem = fixture0()
    if rank.index // 2 == 1:
        problem.target[:] = -100
        if empty == "no tokens":
            problem = replace(problem, input=problem.input[:0], target=problem.target[:0])
    place = Rank(rank.index % 2, 2, rank.paired, rank.device)
    result = run_layer(problem, shards_of(problem, 2)[place.index], place)
    assert result.grad_weight is not None
    dist.all_reduce(result.grad_weight, group=rank.strided)
    right = reference(fixture0()).grad_weight[shards_of(problem, 2)[place.index].rows]
    return float(result.loss), relative_error(result.grad_weight, right)


@pytest.mark.parametrize("empty", ["all ignored", "no tokens"])
def test_b15_a_replica_without_tokens(pool: Pool, empty: str) -> None:
    results = pool.run(4, _masked_replica, empty)
    assert [loss for loss, _ in results] == pytest.approx([F0_MEAN, F0_MEAN, 0, 0], abs=1e-5)
    assert all(error < 1e-5 for _, error in results)


def _accumulate(rank: Rank, calls: int) -> Tensor:
    problem = fixture0()
    weight = problem.weight[shards_of(problem, rank.size)[rank.index].rows].requires_grad_()
    weight.grad = torch.ones_like(weight)
    for _ in range(calls):
        cce_tp.linear_cross_entropy(problem.input, weight, problem.target, group=rank.group).backward()
    return weight.grad


def test_b17_gradients_accumulate(pool: Pool) -> None:
    """A gradient that was there stays, and two calls give twice one, the first call included."""
    problem = fixture0()
    grads = pool.run(2, _accumulate, 2)
    whole = gather_weight_grad(list(grads), shards_of(problem, 2), problem.weight)
    assert relative_error(whole, 1 + 2 * reference(problem).grad_weight) < 1e-5


def _repeat(rank: Rank, times: int) -> list[float]:
    """The same call again and again, overwriting what the last one returned."""
    problem = fixture(64, 32, 256)
    shard = shards_of(problem, rank.size)[rank.index]
    first = run_layer(problem, shard, rank)
    differences = []
    for _ in range(times):
        again = run_layer(problem, shard, rank)
        for name in ("loss", "grad_input", "grad_weight"):
            differences.append(float((getattr(again, name) - getattr(first, name)).abs().max()))
        again.grad_input.fill_(math.nan)
        again.grad_weight.fill_(math.nan)
    return differences


@pytest.mark.parametrize("tp", [2, 4])
def test_b18_repeated_iterations_are_identical(pool: Pool, tp: int) -> None:
    for differences in pool.run(tp, _repeat, 50):
        assert differences == [0.0] * len(differences)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("factor", [2.5, 0.0, -1.0, 65536.0])
def test_b19_upstream_is_a_factor(pool: Pool, factor: float, tp: int) -> None:
    results = solve(pool, tp, replace(fixture0(), upstream=torch.tensor(factor)))
    problem = fixture0()
    expected = reference(problem)
    whole = whole_weight_grad(results, problem)
    if factor == 0.0:
        assert not results[0].grad_input.any()
        assert not whole.any()
    else:
        assert relative_error(results[0].grad_input, factor * expected.grad_input) < 1e-5
        assert relative_error(whole, factor * expected.grad_weight) < 1e-5


def _squared(rank: Rank, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    problem = fixture0()
    rows = problem.input.clone().requires_grad_()
    weight = problem.weight[shards_of(problem, rank.size)[rank.index].rows].requires_grad_()
    loss = cce_tp.linear_cross_entropy(rows, weight, problem.target, group=rank.group)
    (loss * loss.to(dtype)).backward()
    assert rows.grad is not None
    assert weight.grad is not None
    return rows.grad, weight.grad


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b19_square_of_the_loss(pool: Pool, tp: int) -> None:
    for grad_input, _ in pool.run(tp, _squared, torch.float32):
        assert norm(grad_input) == close(16.65639234)
    for grad_input, _ in pool.run(tp, _squared, torch.bfloat16):
        assert norm(grad_input) == close(16.65639234, 8e-3)


TOKEN_UPSTREAM = (torch.arange(8) + 1).float() / 4


def _delivered(upstream: Tensor, how: str) -> Tensor:
    if how == "strided":
        base = torch.full((16,), math.nan)
        base[::2] = upstream
        return base[::2]
    if how == "expanded":
        return upstream[:1].expand(8)
    return upstream


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("how", ["contiguous", "reversed", "first zero", "strided", "expanded"])
def test_b20_upstream_per_token(pool: Pool, how: str, tp: int) -> None:
    upstream = TOKEN_UPSTREAM.clone()
    if how == "reversed":
        upstream = upstream.flip(0)
    if how == "first zero":
        upstream[0] = 0
    problem = fixture0().with_options(reduction="none")
    problem = replace(problem, upstream=_delivered(upstream, how))
    results = solve_and_compare(pool, tp, problem)
    whole = whole_weight_grad(results, problem)
    if how in ("contiguous", "strided"):
        assert norm(results[0].grad_input) == close(11.53803938)
        assert norm(whole) == close(11.49626710)
        first = torch.tensor([-0.20872635, 0.03785849, 0.47721896, 0])
        torch.testing.assert_close(results[0].grad_input[0, :4], first, atol=1e-5, rtol=0)
    if how == "reversed":
        assert norm(whole) == close(13.57063610)
    if how == "first zero":
        assert not results[0].grad_input[0].any()


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("tokens", [8, 0])
def test_b22_no_valid_token(pool: Pool, tokens: int, reduction: str, tp: int) -> None:
    """All ignored, or none at all: zeros of the right shape and dtype, a graph, and the usual collectives."""
    full = solve(pool, tp, fixture0().with_options(reduction=reduction))
    problem = fixture0().with_options(reduction=reduction)
    problem = replace(problem, input=problem.input[:tokens], target=torch.full((tokens,), -100))
    # Twice: the first call of a kind exchanges records, so that it counts one collective more.
    solve(pool, tp, problem)
    for result, usual in zip(solve(pool, tp, problem), full, strict=True):
        assert result.loss.shape == ((tokens,) if reduction == "none" else ())
        assert not result.loss.any()
        assert result.has_graph
        assert result.grad_input is not None
        assert result.grad_input.shape == (tokens, 16)
        assert not result.grad_input.any()
        assert result.grad_weight is not None
        assert result.grad_weight.shape == (32 // tp, 16)
        assert not result.grad_weight.any()
        main = [seen.name for seen in usual.collectives if seen.dtype != torch.uint8]
        assert [seen.name for seen in result.collectives] == main


def _backward_twice(rank: Rank) -> list[float]:
    problem = fixture0()
    rows = problem.input.clone().requires_grad_()
    weight = problem.weight[shards_of(problem, rank.size)[rank.index].rows].requires_grad_()
    upstream = torch.tensor(1.0)
    kept = [value.detach().clone() for value in (rows, weight, problem.target, upstream)]
    loss = cce_tp.linear_cross_entropy(rows, weight, problem.target, group=rank.group)
    loss.backward(upstream, retain_graph=True)
    assert rows.grad is not None
    first = rows.grad.clone()
    (third,) = torch.autograd.grad(3 * loss, rows)
    assert torch.equal(rows.grad, first)
    for before, after in zip(kept, (rows, weight, problem.target, upstream), strict=True):
        assert torch.equal(before, after.detach())
    return [norm(first), norm(third)]


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b23_second_backward(pool: Pool, tp: int) -> None:
    for norms in pool.run(tp, _backward_twice):
        assert norms == [close(F0_INPUT_NORM), close(3.53977917)]


def test_b23_a_second_head_gets_its_gradient_too() -> None:
    problem = fixture0()
    rows = problem.input.clone().requires_grad_()
    other = torch.arange(16.0)
    (cce_tp.linear_cross_entropy(rows, problem.weight, problem.target) + (rows @ other).sum()).backward()
    assert rows.grad is not None
    assert relative_error(rows.grad, reference(problem).grad_input + other) < 1e-5


def test_b23_double_backward_is_refused() -> None:
    problem = fixture0()
    rows = problem.input.clone().requires_grad_()
    loss = cce_tp.linear_cross_entropy(rows, problem.weight, problem.target)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(loss, rows, create_graph=True)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("weight_grad", [True, False])
@pytest.mark.parametrize("input_grad", [True, False])
def test_b24_frozen(pool: Pool, input_grad: bool, weight_grad: bool, tp: int) -> None:
    problem = fixture0()
    results = solve(pool, tp, problem, input_grad=input_grad, weight_grad=weight_grad)
    assert float(results[0].loss) == pytest.approx(F0_MEAN, abs=1e-5)
    expected = reference(problem)
    for result in results:
        assert (result.grad_input is None) == (not input_grad)
        assert (result.grad_weight is None) == (not weight_grad)
    if input_grad:
        assert relative_error(results[0].grad_input, expected.grad_input) < 1e-5
    if weight_grad:
        assert relative_error(whole_weight_grad(results, problem), expected.grad_weight) < 1e-5


def _without_grad(rank: Rank, mode: str) -> tuple[float, bool]:
    problem = fixture0()
    weight = problem.weight[shards_of(problem, rank.size)[rank.index].rows].requires_grad_()
    context = torch.no_grad() if mode == "no_grad" else torch.inference_mode()
    with context:
        loss = cce_tp.linear_cross_entropy(problem.input.requires_grad_(), weight, problem.target, group=rank.group)
    return float(loss), loss.requires_grad


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_b24_without_grad(pool: Pool, mode: str, tp: int) -> None:
    for loss, requires_grad in pool.run(tp, _without_grad, mode):
        assert loss == pytest.approx(F0_MEAN, abs=1e-5)
        assert not requires_grad


def test_b26_weight_grad_accumulates_in_fp32() -> None:
    """A bf16 accumulator sticks at 64 to 512."""
    tokens = 65536
    rows = torch.ones(tokens, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(64, 16, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(tokens, dtype=torch.int64)
    cce_tp.linear_cross_entropy(rows, weight, target, reduction="sum").backward()
    assert weight.grad is not None
    assert (weight.grad[1:] == 1024).all()
    assert (weight.grad[0] == -64512).all()


def _sum_of_many_classes(rank: Rank) -> Tensor:
    rows = torch.zeros(1, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(65536 // rank.size, 16, dtype=torch.bfloat16)
    if rank.index == 0:
        weight[7] = 0
    shard = cce_tp.VocabShard.equal(65536, rank.index, rank.size)
    loss = cce_tp.linear_cross_entropy(rows, weight, torch.tensor([7]), group=rank.group, shard=shard)
    loss.backward()
    assert rows.grad is not None
    return rows.grad


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b26_input_grad_accumulates_in_fp32(pool: Pool, tp: int) -> None:
    """A bf16 accumulator sticks at 0.125 to 0.5; the right value rounds to 1 in bf16."""
    for grad in pool.run(tp, _sum_of_many_classes):
        assert (grad.double() - 0.99998474).abs().max() < 2**-8


@pytest.mark.parametrize("tp", [1, 2])
def test_b27_a_confident_target_keeps_its_gradient(pool: Pool, tp: int) -> None:
    rows = torch.zeros(1, 16, dtype=torch.bfloat16)
    weight = torch.zeros(2, 16, dtype=torch.bfloat16)
    rows[0, 0], weight[0, 0] = 8.3125, 1
    problem = Problem(rows, weight, torch.tensor([0]), 2)
    results = solve(pool, tp, problem)
    assert float(results[0].loss) == pytest.approx(2.4540e-4, rel=1e-4)
    whole = whole_weight_grad(results, problem)
    assert float(whole[0, 0]) == pytest.approx(-2.0396e-3, rel=1e-2)
    assert float(whole[1, 0]) == pytest.approx(2.0396e-3, rel=1e-2)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize(
    ("options", "loss", "input_norm", "weight_norm"),
    [
        ({"softcap": 1.0}, 4.39975198, 0.28241325, None),
        ({"logit_scale": 0.5, "softcap": 2.0}, 4.51688556, None, None),
        ({"logit_scale": 0.0625}, 3.57870976, 0.06099557, 0.07116674),
    ],
)
def test_b31_scale_then_softcap(
    pool: Pool, options: dict, loss: float, input_norm: float | None, weight_norm: float | None, tp: int
) -> None:
    problem = fixture0().with_options(**options)
    results = solve_and_compare(pool, tp, problem)
    assert float(results[0].loss) == pytest.approx(loss, abs=1e-5)
    if input_norm is not None:
        assert norm(results[0].grad_input) == close(input_norm)
    if weight_norm is not None:
        assert norm(whole_weight_grad(results, problem)) == close(weight_norm)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("input_dtype", DTYPES)
def test_b33_mixed_dtypes(input_dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    """Equal dtypes work; others are one TypeError, with and without gradients."""
    problem = fixture0()
    rows = problem.input.to(input_dtype).requires_grad_()
    weight = problem.weight.to(weight_dtype).requires_grad_()
    if input_dtype == weight_dtype:
        loss = cce_tp.linear_cross_entropy(rows, weight, problem.target)
        loss.backward()
        assert float(loss.detach()) == pytest.approx(F0_MEAN, abs=1e-5)
        assert rows.grad is not None
        assert rows.grad.dtype == input_dtype
        return
    with pytest.raises(TypeError, match="dtype"):
        cce_tp.linear_cross_entropy(rows, weight, problem.target)
    with torch.no_grad(), pytest.raises(TypeError, match="dtype"):
        cce_tp.linear_cross_entropy(rows, weight, problem.target)


def test_b33_float64_is_refused() -> None:
    problem = fixture0(torch.float64)
    with pytest.raises(TypeError, match="float64"):
        cce_tp.linear_cross_entropy(problem.input, problem.weight, problem.target)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b33_fp16_range(pool: Pool, tp: int) -> None:
    """Logits and losses beyond fp16's largest number."""
    rows = torch.full((2, 16), 256.0, dtype=torch.float16)
    weight = torch.zeros(32, 16, dtype=torch.float16)
    weight[0] = 256
    problem = Problem(rows, weight, torch.tensor([0, 1]), 32).with_options(reduction="none")
    results = solve(pool, tp, problem)
    assert results[0].loss.tolist() == [0, 1048576]
    assert (results[0].grad_input == torch.tensor([[0.0], [256.0]])).all()
    whole = whole_weight_grad(results, problem)
    assert (whole[0] == 256).all()
    assert (whole[1] == -256).all()
    assert not whole[2:].any()


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b33_fp16_loss_scale(pool: Pool, tp: int) -> None:
    """2^16 fits; 2^18 overflows to inf, never NaN, so that a gradient scaler backs off."""
    problem = replace(fixture0(torch.float16), upstream=torch.tensor(2.0**16))
    grad = solve(pool, tp, problem)[0].grad_input
    assert float(grad.abs().max()) == pytest.approx(16720.2, rel=1e-3)
    results = solve(pool, tp, replace(problem, upstream=torch.tensor(2.0**18)))
    assert results[0].grad_input.isinf().any()
    assert not results[0].grad_input.isnan().any()
    assert not any(result.grad_weight.isnan().any() for result in results)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b35_no_dimension_is_a_multiple(pool: Pool, tp: int) -> None:
    problem = fixture(67, 83, 131)
    results = solve_and_compare(pool, tp, problem, "chunk")
    assert float(results[0].loss) == pytest.approx(11.95081477, abs=2e-5)
    assert norm(results[0].grad_input) == close(0.98272265)
    assert norm(whole_weight_grad(results, problem, "chunk")) == close(1.03088094)


@pytest.mark.parametrize("shape", [(1, 16, 32), (8, 1, 32), (8, 16, 16), (2, 8193, 8), (3, 5, 1)])
@pytest.mark.parametrize("tp", TP_SIZES)
def test_b35_odd_sizes(pool: Pool, tp: int, shape: tuple[int, int, int]) -> None:
    problem = fixture(*shape)
    results = solve(pool, tp, problem, "chunk")
    expected = reference(problem)
    check_loss(results[0], expected)
    whole = whole_weight_grad(results, problem, "chunk")
    allowed = 1e-5 * norm(expected.grad_input) + 4 * expected.input_floor
    assert norm(results[0].grad_input.double() - expected.grad_input) <= allowed
    allowed = 1e-5 * norm(expected.grad_weight) + 4 * expected.weight_floor
    assert norm(whole - expected.grad_weight) <= allowed
    if shape == (1, 16, 32):
        assert float(results[0].loss) == pytest.approx(8.41585748, abs=1e-5)


def test_b35_nothing_is_written_around_the_tensors() -> None:
    """Inputs and the buffer of the weight's gradient lie inside larger ones, whose margins stay what they were."""
    problem = fixture(67, 83, 131)
    around = {
        name: torch.full((n + 4, 83 + 6), math.nan) for name, n in (("input", 67), ("weight", 131), ("grad", 131))
    }
    inside = {name: values[2:-2, 3:-3] for name, values in around.items()}
    inside["input"].copy_(problem.input)
    inside["weight"].copy_(problem.weight)
    inside["grad"].zero_()
    weight = inside["weight"].detach().requires_grad_()
    loss = cce_tp.linear_cross_entropy(inside["input"], weight, problem.target, main_grad=inside["grad"])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(11.95081477, abs=2e-5)
    assert relative_error(inside["grad"], reference(problem).grad_weight) < 1e-5
    for name, values in around.items():
        assert int(values.isnan().sum()) == values.numel() - inside[name].numel()


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b36_z_loss(pool: Pool, tp: int) -> None:
    problem = fixture0()
    assert torch.equal(solve(pool, tp, problem.with_options(z_loss=0.0))[0].loss, solve(pool, tp, problem)[0].loss)
    results = solve_and_compare(pool, tp, problem.with_options(z_loss=1e-2))
    assert float(results[0].loss) == pytest.approx(7.36004266, abs=1e-5)
    assert norm(results[0].grad_input) == close(1.22002299)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b36_returned_lse_is_differentiable(pool: Pool, tp: int) -> None:
    problem = replace(fixture0(), upstream=torch.tensor(0.0), lse_upstream=torch.ones(8))
    results = solve_and_compare(pool, tp, problem)
    assert float(results[0].lse.sum()) == pytest.approx(43.04399440, abs=1e-4)
    assert norm(results[0].grad_input) == close(4.74959173)
    assert norm(whole_weight_grad(results, problem)) == close(4.00054982)
    assert all(torch.equal(result.lse, results[0].lse) for result in results)


def _lse_alone(rank: Rank) -> tuple[float, float]:
    """Only the LSE is used, so that the loss has no upstream gradient at all."""
    problem = fixture0()
    rows = problem.input.clone().requires_grad_()
    weight = problem.weight[shards_of(problem, rank.size)[rank.index].rows].requires_grad_()
    _, stats = cce_tp.linear_cross_entropy(rows, weight, problem.target, group=rank.group, return_stats=True)
    stats.lse.sum().backward()
    for value in (stats.target_logprob, stats.entropy, stats.correct):
        assert not value.requires_grad
    return norm(rows.grad), norm(weight.grad) ** 2


@pytest.mark.parametrize("tp", TP_SIZES)
def test_b36_lse_alone(pool: Pool, tp: int) -> None:
    results = pool.run(tp, _lse_alone)
    assert [input_norm for input_norm, _ in results] == [close(4.74959173)] * tp
    assert math.sqrt(sum(square for _, square in results)) == close(4.00054982)


def test_b39_sequence_parallel(pool: Pool) -> None:
    problem = fixture0()
    results = solve(pool, 4, problem, sequence_parallel=True)
    assert float(results[0].loss) == pytest.approx(F0_MEAN, abs=1e-5)
    first = torch.tensor([-0.10436318, 0.01892925, 0.23860948, 0])
    torch.testing.assert_close(results[0].grad_input[0, :4], first, atol=1e-6, rtol=0)
    second = torch.tensor([0.06805109, 0.11467697, -0.11105103, 0])
    torch.testing.assert_close(results[1].grad_input[0, :4], second, atol=1e-6, rtol=0)
    whole = torch.cat([result.grad_input for result in results])
    assert relative_error(whole, reference(problem).grad_input) < 1e-5
    assert norm(whole_weight_grad(results, problem)) == close(F0_WEIGHT_NORM)


def _sequence_parallel_with(rank: Rank, how: str) -> float:
    group = rank.group
    problem = fixture(10, 16, 32) if how == "indivisible" else fixture0()
    shard = shards_of(problem, rank.size)[rank.index]
    rows = problem.input if how == "whole input" else problem.input.chunk(rank.size)[rank.index]
    target = problem.target.chunk(rank.size)[rank.index] if how == "sharded target" else problem.target
    loss = cce_tp.linear_cross_entropy(rows, problem.weight[shard.rows], target, group=group, sequence_parallel=True)
    return float(loss)


@pytest.mark.parametrize("how", ["indivisible", "whole input", "sharded target"])
def test_b39_wrong_shapes_are_refused_on_every_rank(pool: Pool, how: str) -> None:
    for error in pool.errors(4, _sequence_parallel_with, how, fresh=True):
        assert error is not None
        assert error.kind == "ValueError"


@pytest.mark.parametrize("dim", [0, 1])
def test_b39_sequence_of_batches(pool: Pool, dim: int) -> None:
    """``[S, B, D]`` is scattered along S, ``[B, S, D]`` with ``sequence_dim=1``."""
    shape = (4, 2) if dim == 0 else (2, 4)
    flat = fixture0()
    problem = replace(flat, input=flat.input.reshape(*shape, 16), target=flat.target.reshape(shape))
    results = solve(pool, 4, problem, sequence_parallel=True, sequence_dim=dim)
    whole = torch.cat([result.grad_input for result in results], dim=dim)
    assert relative_error(whole, reference(problem).grad_input) < 1e-5
    assert float(results[0].loss) == pytest.approx(F0_MEAN, abs=1e-5)


def _context_parallel(rank: Rank, ignored: int) -> tuple[float, list[Collective]]:
    """Two context-parallel ranks of two tensor-parallel ones; sums divided by the global number of valid tokens."""
    assert rank.paired is not None
    assert rank.strided is not None
    problem = fixture0().with_options(reduction="sum")
    problem.target[:ignored] = -100
    half = slice(0, 4) if rank.index < 2 else slice(4, 8)
    problem = replace(problem, input=problem.input[half], target=problem.target[half])
    place = Rank(rank.index % 2, 2, rank.paired, rank.device)
    result = run_layer(problem, shards_of(problem, 2)[place.index], place)
    total = result.loss / (8 - ignored)
    dist.all_reduce(total, group=rank.strided)
    return float(total), result.collectives


@pytest.mark.parametrize(("ignored", "loss"), [(3, 6.56284567), (4, 6.34533520)])
def test_b40_context_parallel_sums(pool: Pool, ignored: int, loss: float) -> None:
    for total, seen in pool.run(4, _context_parallel, ignored):
        assert total == pytest.approx(loss, abs=1e-5)
        assert {collective.group_size for collective in seen} == {2}


def test_b41_mean_over_replicas(pool: Pool) -> None:
    """The mean over all ranks of what each returns is the mean of the replicas' losses."""
    losses = [loss for loss, _, _ in pool.run(4, _mesh_losses, "paired")]
    assert sum(losses) / 4 == pytest.approx((F0_MEAN + 6.02893680) / 2, abs=1e-5)


class _Model(torch.nn.Module):
    def __init__(self, weight: Tensor, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)
        self.scale = torch.nn.Parameter(torch.ones(16))
        self.group = group

    def forward(self, rows: Tensor, target: Tensor) -> Tensor:
        return cce_tp.linear_cross_entropy(rows * self.scale, self.weight, target, group=self.group)


def _compiled(rank: Rank) -> tuple[list[float], int, int, Tensor]:
    """Losses at three numbers of tokens, graphs compiled, breaks, and the last gradient of the scale."""
    import torch._dynamo as dynamo

    dynamo.reset()
    dynamo.utils.counters.clear()
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    problem = fixture0()
    model = _Model(problem.weight[shards_of(problem, rank.size)[rank.index].rows], rank.group)
    compiled = torch.compile(model, backend=backend)
    losses = []
    for tokens in (6, 7, 8):
        model.scale.grad = None
        loss = compiled(problem.input[:tokens], problem.target[:tokens])
        loss.backward()
        losses.append(float(loss.detach()))
    breaks = len(dynamo.utils.counters["graph_break"])
    assert model.scale.grad is not None
    return losses, len(graphs), breaks, model.scale.grad


@pytest.mark.parametrize("tp", [1, 2])
def test_b43_torch_compile(pool: Pool, tp: int) -> None:
    expected = reference(fixture0())
    scale = (expected.grad_input * fixture0().input).sum(dim=0)
    right = [sum(F0_LOSSES[:n]) / n for n in (6, 7, 8)]
    for losses, graphs, breaks, grad in pool.run(tp, _compiled):
        assert losses == pytest.approx(right, abs=1e-5)
        assert breaks <= 1
        assert graphs <= 2 * (1 + breaks), "no recompilation for every number of tokens"
        assert relative_error(grad, scale) < 1e-5


def _checkpointed(rank: Rank, mode: str) -> tuple[Tensor, Tensor, list[Collective]]:
    assert rank.strided is not None
    problem = fixture0()
    place = dist.get_rank(rank.strided)
    rows = problem.input.clone().requires_grad_()
    weight = problem.weight[shards_of(problem, 2)[place].rows].requires_grad_()

    def head(hidden: Tensor) -> Tensor:
        return cce_tp.linear_cross_entropy(hidden * 1.0, weight, problem.target, group=rank.strided)

    # Both kinds once before counting: reentrant checkpointing runs the forward without gradients.
    head(rows)
    with torch.no_grad():
        head(rows)
    with collectives() as seen:
        loss = head(rows) if mode == "none" else checkpoint(head, rows, use_reentrant=mode == "reentrant")
        loss.backward()
    assert rows.grad is not None
    assert weight.grad is not None
    return rows.grad, weight.grad, seen


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_b44_activation_checkpointing(pool: Pool, mode: str) -> None:
    """Bitwise the gradients of the plain call; twice the forward's collectives and once the backward's."""
    plain = pool.run(4, _checkpointed, "none")
    again = pool.run(4, _checkpointed, mode)
    for (rows, weight, seen), (rows_again, weight_again, seen_again) in zip(plain, again, strict=True):
        assert torch.equal(rows, rows_again)
        assert torch.equal(weight, weight_again)
        forward, backward = seen[:-1], seen[-1:]
        assert seen_again == [*forward, *forward, *backward]
        assert {collective.group_size for collective in seen_again} == {2}
