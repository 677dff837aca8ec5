"""The loss over several GPUs with NCCL: against float64, and against one GPU where the problem is large."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Pool, Rank
from oracle import Options, Problem, Reference, fixture0, relative_error, same_dtype_errors
from oracle import reference as reference_where_it_lies
from problems import (
    RankResult,
    Spec,
    build,
    check,
    check_loss,
    gather_weight_grad,
    make_shards,
    run_layer,
    run_spec,
    run_spec_task,
)
from test_filtered import wide_problem
from test_loss import ALONE, splittable
from torch import Tensor

import cce_tp

pytestmark = pytest.mark.multigpu
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=[2, 4])
def tp(request: pytest.FixtureRequest) -> int:
    """Ranks of the tensor-parallel group, as far as there are GPUs."""
    if request.param > torch.cuda.device_count():
        pytest.skip(f"needs {request.param} CUDA devices")
    return request.param


def reference(problem: Problem) -> Reference:
    """The oracle, computed on the first GPU."""
    return reference_where_it_lies(problem.to("cuda")).to("cpu")


def compare(gpu_pool: Pool, spec: Spec, tp: int, **keywords: Any) -> list[RankResult]:
    """Run a spec on ``tp`` GPUs and compare with float64, or with PyTorch's errors in 16 bits."""
    spec = splittable(spec, tp)
    shards = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)
    results = gpu_pool.run(tp, run_spec_task, spec, keywords)
    problem = build(spec)
    expected = reference(problem)
    assert all(torch.equal(result.loss, results[0].loss) for result in results)
    if keywords.get("sequence_parallel"):
        whole = torch.cat([result.grad_input for result in results], dim=keywords.get("sequence_dim", 0))
        results = [replace(result, grad_input=whole) for result in results]
    if spec.dtype == torch.float32:
        check(spec, results, shards, expected=expected)
        return results
    check_loss(results[0], expected)
    errors = same_dtype_errors(problem.to("cuda"), expected.to("cuda"))
    whole = gather_weight_grad([result.grad_weight for result in results], shards, problem.weight)
    # The ranks' parts are rounded before NCCL sums them, which one product on one GPU doesn't do.
    off_input = float((results[0].grad_input.double() - expected.grad_input).norm())
    assert off_input <= 3 * errors[0] + 2**-8 * float(expected.grad_input.norm())
    assert float((whole - expected.grad_weight).norm()) <= 3 * errors[1] + 4 * expected.weight_floor
    return results


@pytest.mark.parametrize("name", ALONE)
def test_option_alone(gpu_pool: Pool, name: str, tp: int) -> None:
    compare(gpu_pool, ALONE[name], tp)


MANY = Spec(shape=(1024,), hidden=512, vocab=5003, ignored=0.1, split="chunk")
RICH = replace(
    MANY,
    split="sizes",
    padding=37,
    bias=True,
    class_weight=True,
    lse_grad=True,
    options=Options(reduction="none", label_smoothing=0.1, softcap=5.0, z_loss=1e-3),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("spec", [MANY, RICH], ids=["plain", "rich"])
def test_many_tiles(gpu_pool: Pool, spec: Spec, sequence_parallel: bool, dtype: str, tp: int) -> None:
    compare(gpu_pool, replace(spec, dtype=DTYPES[dtype]), tp, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("sequence_dim", [0, 1])
def test_sequence_dim(gpu_pool: Pool, sequence_dim: int, tp: int) -> None:
    spec = Spec(shape=(8, 4), hidden=64, vocab=300, ignored=0.2, strided=True)
    compare(gpu_pool, spec, tp, sequence_parallel=True, sequence_dim=sequence_dim)


@pytest.mark.parametrize("comm_dtype", [torch.float32, torch.bfloat16])
def test_comm_dtype(gpu_pool: Pool, comm_dtype: torch.dtype, tp: int) -> None:
    """fp32 on the wire makes the sum of bf16 parts as good as one product's."""
    spec = replace(MANY, dtype=torch.bfloat16)
    result = compare(gpu_pool, spec, tp, comm_dtype=comm_dtype)[0]
    assert result.grad_input.dtype == torch.bfloat16
    expected = reference(build(spec))
    if comm_dtype == torch.float32:
        error = float((result.grad_input.double() - expected.grad_input).norm())
        assert error <= 2 * same_dtype_errors(build(spec).to("cuda"), expected.to("cuda"))[0]


def _against_one(rank: Rank, sequence_parallel: bool) -> list[float]:
    """A larger bf16 problem: this rank's results against the whole problem on its own GPU."""
    generator = torch.Generator(rank.device).manual_seed(0)
    tokens, hidden, vocab = 4096, 1024, 32003
    rows = torch.randn(tokens, hidden, generator=generator, device=rank.device, dtype=torch.bfloat16)
    weight = torch.randn(vocab, hidden, generator=generator, device=rank.device, dtype=torch.bfloat16) / 32
    target = torch.randint(0, vocab, (tokens,), generator=generator, device=rank.device)
    alone = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
    right = cce_tp.linear_cross_entropy(*alone, target)
    right.backward()
    shard = cce_tp.VocabShard.chunk(vocab, rank.index, rank.size)
    part = rows.chunk(rank.size)[rank.index] if sequence_parallel else rows
    leaves = [part.clone().requires_grad_(), weight[shard.start : shard.stop].clone().requires_grad_()]
    loss = cce_tp.linear_cross_entropy(
        *leaves, target, group=rank.group, shard=shard, sequence_parallel=sequence_parallel, comm_dtype=torch.float32
    )
    loss.backward()
    first = alone[0].grad.chunk(rank.size)[rank.index] if sequence_parallel else alone[0].grad
    second = alone[1].grad[shard.start : shard.stop]
    errors = [relative_error(leaves[0].grad, first), relative_error(leaves[1].grad, second)]
    return [float(loss.detach()), float((loss - right).detach().abs()), *errors]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_many_gpus_against_one(gpu_pool: Pool, sequence_parallel: bool, tp: int) -> None:
    answers = gpu_pool.run(tp, _against_one, sequence_parallel)
    assert len({loss for loss, *_ in answers}) == 1
    for _, loss, input_error, weight_error in answers:
        assert loss < 1e-5
        assert input_error < 6e-3
        assert weight_error < 6e-3


def _repeat(rank: Rank, times: int) -> float:
    """The largest difference between iterations, with the results overwritten at once and a busy side stream."""
    spec = replace(MANY, dtype=torch.bfloat16)
    first = run_spec(rank, spec, rank.size)
    largest = 0.0
    side = torch.cuda.Stream()
    for _ in range(times):
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000)
        again = run_spec(rank, spec, rank.size)
        for name in ("loss", "grad_input", "grad_weight"):
            largest = max(largest, float((getattr(again, name).float() - getattr(first, name).float()).abs().max()))
    return largest


def test_b18_repeated_iterations_are_identical(gpu_pool: Pool, tp: int) -> None:
    assert gpu_pool.run(tp, _repeat, 50) == [0.0] * tp


def test_b06_bad_label_is_nan_in_its_row_on_every_rank(gpu_pool: Pool, tp: int) -> None:
    for loss in gpu_pool.run(tp, _bad_label):
        assert loss.isnan().tolist() == [n == 3 for n in range(8)]


def _bad_label(rank: Rank) -> Tensor:
    problem = fixture0()
    problem.target[3] = 2**32 + 5
    shard = make_shards(32, 0, "equal", rank.size)[rank.index]
    weight = problem.weight[shard.rows].to(rank.device)
    target = problem.target.to(rank.device)
    loss = cce_tp.linear_cross_entropy(
        problem.input.to(rank.device), weight, target, group=rank.group, reduction="none"
    )
    return loss.cpu()


def _nan_row(rank: Rank) -> list[bool]:
    """A NaN hidden state must be one on every rank, whoever's rows it meets."""
    problem = fixture0()
    problem.input[3] = math.nan
    weight = problem.weight[make_shards(32, 0, "equal", rank.size)[rank.index].rows].to(rank.device)
    loss = cce_tp.linear_cross_entropy(
        problem.input.to(rank.device), weight, problem.target.to(rank.device), group=rank.group, reduction="none"
    )
    return loss.isnan().tolist()


def test_nan_reaches_every_rank(gpu_pool: Pool, tp: int) -> None:
    assert gpu_pool.run(tp, _nan_row) == [[n == 3 for n in range(8)]] * tp


def _error_on_one(rank: Rank) -> float:
    problem = fixture0()
    rows = problem.input[:, :-1] if rank.index == 0 else problem.input
    weight = problem.weight[make_shards(32, 0, "equal", rank.size)[rank.index].rows].to(rank.device)
    return float(
        cce_tp.linear_cross_entropy(rows.to(rank.device), weight, problem.target.to(rank.device), group=rank.group)
    )


def test_b15_an_error_on_one_rank_is_an_error_on_all(gpu_pool: Pool, tp: int) -> None:
    errors = gpu_pool.errors(tp, _error_on_one, fresh=True)
    assert None not in errors


def _dtensor(rank: Rank, vocab: int) -> tuple[float, Tensor]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    problem = build(Spec(shape=(9,), hidden=8, vocab=vocab))
    mesh = DeviceMesh.from_group(rank.group, "cuda")
    weight = distribute_tensor(problem.weight.to(rank.device), mesh, [Shard(0)]).detach().requires_grad_()
    loss = cce_tp.linear_cross_entropy(problem.input.to(rank.device), weight, problem.target.to(rank.device))
    loss.backward()
    assert weight.grad is not None
    return float(loss.detach()), weight.grad.full_tensor().cpu()


@pytest.mark.parametrize("vocab", [24, 5])
def test_dtensor_weight(gpu_pool: Pool, vocab: int, tp: int) -> None:
    expected = reference(replace(build(Spec(shape=(9,), hidden=8, vocab=vocab)), upstream=None))
    for loss, grad in gpu_pool.run(tp, _dtensor, vocab):
        assert loss == pytest.approx(float(expected.loss), abs=1e-5)
        assert relative_error(grad, expected.grad_weight) < 1e-5


def test_b46_tensors_on_a_device_that_is_not_the_current_one() -> None:
    """Everything on cuda:1 while cuda:0 is current."""
    problem = fixture0()
    rows = problem.input.to("cuda:1").requires_grad_()
    weight = problem.weight.to("cuda:1").requires_grad_()
    with torch.cuda.device(0):
        loss = cce_tp.linear_cross_entropy(rows, weight, problem.target.to("cuda:1"))
        loss.backward()
    assert float(loss.detach()) == pytest.approx(7.05823367, abs=1e-5)
    assert rows.grad is not None
    assert relative_error(rows.grad.cpu(), reference(problem).grad_input) < 1e-5
    with pytest.raises(ValueError, match="linear_weight is on cuda:0"):
        cce_tp.linear_cross_entropy(rows, weight.detach().to("cuda:0"), problem.target.to("cuda:1"))


def _mesh(rank: Rank) -> float:
    group = rank.strided
    assert group is not None
    problem = fixture0()
    if rank.index % 2:
        problem = replace(problem, target=problem.target.flip(0))
    weight = problem.weight[make_shards(32, 0, "equal", 2)[dist.get_rank(group)].rows].to(rank.device)
    return float(
        cce_tp.linear_cross_entropy(problem.input.to(rank.device), weight, problem.target.to(rank.device), group=group)
    )


def test_b12_strided_groups(gpu_pool: Pool) -> None:
    if torch.cuda.device_count() < 4:
        pytest.skip("needs 4 CUDA devices")
    assert gpu_pool.run(4, _mesh) == pytest.approx([7.05823367, 6.02893680] * 2, abs=1e-5)


def _filtered(rank: Rank, mode: cce_tp.Filtered) -> RankResult:
    shard = make_shards(1024, 0, "equal", rank.size)[rank.index]
    return run_layer(wide_problem(), shard, rank, device=rank.device, backward=mode, return_stats=True)


def test_filtered_tiles_are_those_of_one_rank(gpu_pool: Pool, tp: int) -> None:
    """Shards are whole tiles, so the same ones are left out as by the twin on the CPU."""
    problem, mode = wide_problem(), cce_tp.Filtered(eps=2.0**-8)
    alone = run_layer(problem, make_shards(1024, 0, "equal", 1)[0], backward=mode, return_stats=True)
    results = gpu_pool.run(tp, _filtered, mode)
    rates = [float(result.stats["keep_rate"]) for result in results]
    assert sum(rates) / tp == pytest.approx(float(alone.stats["keep_rate"]))
    assert min(rates) < 0.9
    whole = gather_weight_grad([r.grad_weight for r in results], make_shards(1024, 0, "equal", tp), problem.weight)
    assert alone.grad_weight is not None
    assert relative_error(whole, alone.grad_weight) < 1e-5
    for result in results:
        assert torch.equal(result.grad_input, results[0].grad_input)
    assert relative_error(results[0].grad_input, alone.grad_input) < 1e-5
