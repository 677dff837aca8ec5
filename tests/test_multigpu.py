"""The loss over several GPUs with NCCL: against float64, against one GPU, in graphs, on side streams, in meshes.

    pytest tests/test_multigpu.py                           starts a process for each GPU, up to eight
    torchrun --nproc_per_node 4 tests/test_multigpu.py      these processes run the tests together
    pytest tests/test_multigpu.py --gloo                    four processes on the CPU (by torchrun, any number)

Groups have every size that divides the number of processes.
"""

from __future__ import annotations

import math
import sys
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
from test_collectives import IN_PIECES, _overlapped
from test_filtered import wide_problem
from test_loss import ALONE, splittable
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cce_tp
from cce_tp.collectives import Overlap, overlap

pytestmark = pytest.mark.multigpu
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(params=[2, 4, 8])
def tp(request: pytest.FixtureRequest, gpu_pool: Pool) -> int:
    """Ranks of the tensor-parallel group."""
    if gpu_pool.world_size % request.param:
        pytest.skip(f"{gpu_pool.world_size} processes have no group of {request.param}")
    return request.param


def device_of(pool: Pool) -> str:
    """Where this process computes what is right."""
    return "cuda" if pool.backend == "nccl" else "cpu"


def needs_gpus(pool: Pool) -> None:
    if pool.backend != "nccl":
        pytest.skip("needs GPUs")


def reference(problem: Problem, device: str = "cpu") -> Reference:
    """The oracle."""
    return reference_where_it_lies(problem.to(device)).to("cpu")


def compare(gpu_pool: Pool, spec: Spec, tp: int, **keywords: Any) -> list[RankResult]:
    """Run a spec on ``tp`` GPUs and compare with float64, or with PyTorch's errors in 16 bits."""
    spec = splittable(spec, tp)
    shards = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)
    results = gpu_pool.run(tp, run_spec_task, spec, keywords)
    problem, device = build(spec), device_of(gpu_pool)
    expected = reference(problem, device)
    assert all(torch.equal(result.loss, results[0].loss) for result in results)
    if keywords.get("sequence_parallel"):
        whole = torch.cat([result.grad_input for result in results], dim=keywords.get("sequence_dim", 0))
        results = [replace(result, grad_input=whole) for result in results]
    if spec.dtype == torch.float32:
        check(spec, results, shards, expected=expected)
        return results
    check_loss(results[0], expected)
    errors = same_dtype_errors(problem.to(device), expected.to(device))
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
    spec = Spec(shape=(16, 8), hidden=64, vocab=300, ignored=0.2, strided=True)
    compare(gpu_pool, spec, tp, sequence_parallel=True, sequence_dim=sequence_dim)


@pytest.mark.parametrize("comm_dtype", [torch.float32, torch.bfloat16])
def test_comm_dtype(gpu_pool: Pool, comm_dtype: torch.dtype, tp: int) -> None:
    """fp32 on the wire makes the sum of bf16 parts as good as one product's."""
    spec = replace(MANY, dtype=torch.bfloat16)
    result = compare(gpu_pool, spec, tp, comm_dtype=comm_dtype)[0]
    assert result.grad_input.dtype == torch.bfloat16
    device = device_of(gpu_pool)
    expected = reference(build(spec), device)
    if comm_dtype == torch.float32:
        error = float((result.grad_input.double() - expected.grad_input).norm())
        assert error <= 2 * same_dtype_errors(build(spec).to(device), expected.to(device))[0]


# Rows beyond the hot ones have to be left for chance; lists are not to be full, since each rank thins its own.
MODES = {
    "exact": cce_tp.Exact(),
    "filtered": cce_tp.Filtered(eps=1e-30),
    "sampled": cce_tp.Sampled(eps=2.0**-6, seed=7, reference_rows=16, entries_per_token=2**12),
}
"""Each gives the same gradients however the vocabulary is shared out: the filter keeps all, since tiles differ."""
SHARED_OUT = {
    "uneven": Spec(vocab=1003, split="chunk"),
    "padded": Spec(vocab=1000, padding=24, split="megatron"),
    "at random": Spec(vocab=1003, padding=37, split="sizes"),
}
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2}
"""Of gradients against one rank's, relative: sums in another order; parts rounded before the ranks add them up."""


def _kept(result: RankResult, spec: Spec, rows: int) -> int:
    """How many entries of the softmax the backward pass used."""
    return round(float(result.stats["keep_rate"].double()) * math.prod(spec.shape) * rows)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", [*MODES, "hot rows shared"])
@pytest.mark.parametrize("split", SHARED_OUT)
def test_a_group_is_as_one_rank(
    gpu_pool: Pool, split: str, mode: str, sequence_parallel: bool, dtype: torch.dtype, tp: int
) -> None:
    """Losses to 1e-6 max(1, |LSE|), gradients, and the very entries that the sampled mode keeps."""
    options = Options(reduction="none")
    rest = {"shape": (128,), "hidden": 72, "spread": 3.0, "ignored": 0.1, "dtype": dtype, "options": options}
    spec = splittable(replace(SHARED_OUT[split], **rest), tp)
    shared, mode = mode not in MODES, mode if mode in MODES else "sampled"
    keywords: dict[str, Any] = {"backward": MODES[mode], "return_stats": True}
    (alone,) = gpu_pool.run(1, run_spec_task, spec, keywords)
    keywords["sequence_parallel"] = sequence_parallel
    results = gpu_pool.run(tp, _overlapped, spec, keywords, Overlap(hot_tokens=1 if shared else None))
    for result in results:
        assert torch.equal(result.loss, results[0].loss)
        assert torch.equal(result.lse, results[0].lse)
        assert ((result.loss - alone.loss).abs() <= 1e-6 * alone.lse.abs().clamp(min=1.0)).all()
    shards = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)
    if mode == "sampled":
        kept = [_kept(r, spec, shard.vocab.num_real) for r, shard in zip(results, shards, strict=True)]
        assert sum(kept) == _kept(alone, spec, spec.vocab)
        assert 0 < sum(kept) < 0.5 * 128 * spec.vocab
    grad_input = torch.cat([r.grad_input for r in results]) if sequence_parallel else results[0].grad_input
    assert relative_error(grad_input, alone.grad_input) < LIMITS[dtype]
    whole = gather_weight_grad([r.grad_weight for r in results], shards, build(spec).weight)
    assert relative_error(whole, alone.grad_weight) < LIMITS[dtype]


SHARING_IN_PIECES = replace(IN_PIECES, hot_tokens=1)


@pytest.mark.parametrize("hot_tokens", [None, 1], ids=["own rows", "hot rows shared"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_pieces_are_the_whole(gpu_pool: Pool, sequence_parallel: bool, hot_tokens: int | None, tp: int) -> None:
    """The sampled backward's reduction piece by piece."""
    spec = replace(MANY, ignored=0.2)
    keywords = {"backward": MODES["sampled"], "sequence_parallel": sequence_parallel}
    whole = gpu_pool.run(tp, _overlapped, spec, keywords, Overlap(pieces=1, hot_tokens=hot_tokens))
    parts = gpu_pool.run(tp, _overlapped, spec, keywords, replace(IN_PIECES, hot_tokens=hot_tokens))
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.grad_weight, other.grad_weight)
        assert relative_error(other.grad_input, one.grad_input) < 1e-6


def _against_one(rank: Rank, mode: cce_tp.Exact | cce_tp.Sampled, sequence_parallel: bool) -> list[float]:
    """A larger bf16 problem: this rank's results against the whole problem on its own GPU."""
    generator = torch.Generator(rank.device).manual_seed(0)
    tokens, hidden, vocab = 4096, 1024, 32003
    rows = torch.randn(tokens, hidden, generator=generator, device=rank.device, dtype=torch.bfloat16)
    weight = torch.randn(vocab, hidden, generator=generator, device=rank.device, dtype=torch.bfloat16) / 32
    target = torch.randint(0, vocab, (tokens,), generator=generator, device=rank.device)
    alone = [rows.clone().requires_grad_(), weight.clone().requires_grad_()]
    right = cce_tp.linear_cross_entropy(*alone, target, backward=mode)
    right.backward()
    shard = cce_tp.VocabShard.chunk(vocab, rank.index, rank.size)
    part = rows.chunk(rank.size)[rank.index] if sequence_parallel else rows
    leaves = [part.clone().requires_grad_(), weight[shard.start : shard.stop].clone().requires_grad_()]
    loss = cce_tp.linear_cross_entropy(
        *leaves, target, group=rank.group, shard=shard, sequence_parallel=sequence_parallel, backward=mode,
        comm_dtype=torch.float32,
    )  # fmt: skip
    loss.backward()
    first = alone[0].grad.chunk(rank.size)[rank.index] if sequence_parallel else alone[0].grad
    second = alone[1].grad[shard.start : shard.stop]
    errors = [relative_error(leaves[0].grad, first), relative_error(leaves[1].grad, second)]
    return [float(loss.detach()), float((loss - right).detach().abs()), *errors]


def _check_against_one(answers: list[list[float]]) -> None:
    assert len({loss for loss, *_ in answers}) == 1
    for _, loss, input_error, weight_error in answers:
        assert loss < 1e-5
        assert input_error < 6e-3
        assert weight_error < 6e-3


LARGE = {"exact": cce_tp.Exact(), "sampled": cce_tp.Sampled(seed=3, entries_per_token=1024)}


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", LARGE)
def test_many_gpus_against_one(gpu_pool: Pool, mode: str, sequence_parallel: bool, tp: int) -> None:
    """Large enough for the sampled backward to reduce in pieces."""
    needs_gpus(gpu_pool)
    _check_against_one(gpu_pool.run(tp, _against_one, LARGE[mode], sequence_parallel))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", LARGE)
def test_streams_that_share_a_hardware_queue(one_queue_pool: Pool, mode: str, sequence_parallel: bool) -> None:
    """``CUDA_DEVICE_MAX_CONNECTIONS=1``, as Megatron-core asks for."""
    _check_against_one(one_queue_pool.run(2, _against_one, LARGE[mode], sequence_parallel))


def _on_side_stream(rank: Rank, mode: Any, sequence_parallel: bool) -> list[float]:
    """Differences between a stream of one's own and the default one; the memory is reused at once."""
    spec, keywords = replace(MANY, dtype=torch.bfloat16), {"backward": mode, "sequence_parallel": sequence_parallel}
    right = _overlapped(rank, spec, keywords, SHARING_IN_PIECES)
    side, found = torch.cuda.Stream(), []
    for _ in range(5):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            again = _overlapped(rank, spec, keywords, SHARING_IN_PIECES)
        torch.full((4096, 512), math.nan, device=rank.device)
        found += [relative_error(getattr(again, name), getattr(right, name)) for name in ("grad_input", "grad_weight")]
        found.append(float((again.loss - right.loss).abs()))
    return found


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_side_stream(gpu_pool: Pool, mode: str, sequence_parallel: bool, tp: int) -> None:
    needs_gpus(gpu_pool)
    for differences in gpu_pool.run(tp, _on_side_stream, MODES[mode], sequence_parallel):
        assert max(differences) == 0.0


def _captured(rank: Rank, mode: Any, sequence_parallel: bool) -> list[float]:
    """Differences between replays of a captured step and the step itself, on inputs that the capture never saw."""
    spec = replace(MANY, dtype=torch.bfloat16)
    shard = make_shards(spec.vocab, 0, spec.split, rank.size)[rank.index]
    generator = torch.Generator(rank.device).manual_seed(0)
    rows = torch.empty(spec.shape[0], spec.hidden, device=rank.device, dtype=spec.dtype)
    weight = build(spec).weight[shard.rows].to(rank.device).requires_grad_()
    target = torch.empty(spec.shape, device=rank.device, dtype=torch.int64)
    leaf = (rows.chunk(rank.size)[rank.index] if sequence_parallel else rows).requires_grad_()

    def draw() -> None:
        with torch.no_grad():
            rows.copy_(torch.randn(rows.shape, generator=generator, device=rank.device) * 0.2)
            target.copy_(torch.randint(spec.vocab, spec.shape, generator=generator, device=rank.device))

    def step() -> list[Tensor]:
        with overlap(SHARING_IN_PIECES):
            loss = cce_tp.linear_cross_entropy(
                leaf, weight, target, group=rank.group, shard=shard.vocab, sequence_parallel=sequence_parallel,
                backward=mode,
            )  # fmt: skip
            return [loss.detach(), *torch.autograd.grad(loss, [leaf, weight])]

    draw()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        static = step()
    differences = []
    for _ in range(3):
        draw()
        graph.replay()
        found = [value.clone() for value in static]
        differences += [relative_error(a, b) for a, b in zip(found, step(), strict=True)]
    torch.cuda.synchronize()
    graph.reset()
    return differences


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_cuda_graph_of_a_step(gpu_pool: Pool, mode: str, sequence_parallel: bool, tp: int) -> None:
    """With its collectives."""
    needs_gpus(gpu_pool)
    for differences in gpu_pool.run(tp, _captured, MODES[mode], sequence_parallel):
        assert max(differences) == 0.0


def _repeat(rank: Rank, times: int) -> float:
    """The largest difference between iterations, with the results overwritten at once and a busy side stream."""
    spec = replace(MANY, dtype=torch.bfloat16)
    first = run_spec(rank, spec, rank.size)
    largest = 0.0
    on_gpu = rank.device.type == "cuda"
    side = torch.cuda.Stream() if on_gpu else None
    for _ in range(times):
        if side is not None:
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000)
        again = run_spec(rank, spec, rank.size)
        for name in ("loss", "grad_input", "grad_weight"):
            largest = max(largest, float((getattr(again, name).float() - getattr(first, name).float()).abs().max()))
    return largest


def test_b18_repeated_iterations_are_identical(gpu_pool: Pool, tp: int) -> None:
    times = 50 if gpu_pool.backend == "nccl" else 3
    assert gpu_pool.run(tp, _repeat, times) == [0.0] * tp


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
    mesh = DeviceMesh.from_group(rank.group, rank.device.type)
    weight = distribute_tensor(problem.weight.to(rank.device), mesh, [Shard(0)]).detach().requires_grad_()
    loss = cce_tp.linear_cross_entropy(problem.input.to(rank.device), weight, problem.target.to(rank.device))
    loss.backward()
    assert weight.grad is not None
    return float(loss.detach()), weight.grad.full_tensor().cpu()


@pytest.mark.parametrize("vocab", [24, 5])
def test_dtensor_weight(gpu_pool: Pool, vocab: int, tp: int) -> None:
    problem = replace(build(Spec(shape=(9,), hidden=8, vocab=vocab)), upstream=None)
    expected = reference(problem, device_of(gpu_pool))
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
    assert relative_error(rows.grad.cpu(), reference(problem, "cuda").grad_input) < 1e-5
    with pytest.raises(ValueError, match="linear_weight is on cuda:0"):
        cce_tp.linear_cross_entropy(rows, weight.detach().to("cuda:0"), problem.target.to("cuda:1"))


# -- meshes


def needs_mesh(pool: Pool) -> None:
    if pool.world_size < 4 or pool.world_size % 2:
        pytest.skip("needs an even number of four or more processes")


def _strided(rank: Rank) -> tuple[int, float, float]:
    """Two tensor-parallel groups of every other rank, the second with its labels the other way round."""
    group = rank.strided
    assert group is not None
    problem, replica, size = fixture0(), rank.index % 2, rank.size // 2
    if replica:
        problem = replace(problem, target=problem.target.flip(0))
    shard = make_shards(32, 0, "equal", size)[dist.get_rank(group)]
    place = Rank(dist.get_rank(group), size, group, rank.device)
    result = run_layer(problem, shard, place, device=rank.device)
    right = reference(problem).grad_weight[shard.rows]
    return replica, float(result.loss), relative_error(result.grad_weight, right)


def test_b12_strided_groups(gpu_pool: Pool) -> None:
    needs_mesh(gpu_pool)
    for replica, loss, error in gpu_pool.run(gpu_pool.world_size, _strided):
        assert loss == pytest.approx([7.05823367, 6.02893680][replica], abs=1e-5)
        assert error < 1e-5


def _replicas(rank: Rank, mode: Any, sequence_parallel: bool) -> list[float]:
    """tp = 2 x dp: a replica's tokens are its own, and the classifier's gradient is averaged over the replicas."""
    assert rank.paired is not None
    assert rank.strided is not None
    tp_rank, replica = rank.index % 2, rank.index // 2
    number = rank.size // 2
    specs = [replace(MANY, shape=(64,), vocab=1003, spread=3.0, seed=11 + place) for place in range(number)]
    weight = build(specs[0]).weight  # shared by the replicas, which have tokens of their own
    problems = [replace(build(spec), weight=weight) for spec in specs]
    shard = make_shards(1003, 0, "chunk", 2)[tp_rank]
    keywords = {"backward": mode, "device": rank.device}
    place = Rank(tp_rank, 2, rank.paired, rank.device)
    result = run_layer(problems[replica], shard, place, sequence_parallel=sequence_parallel, **keywords)
    total = result.grad_weight.to(rank.device)
    dist.all_reduce(total, group=rank.strided)
    whole = make_shards(1003, 0, "chunk", 1)[0]
    alone = [run_layer(problem, whole, **keywords) for problem in problems]
    right = sum(each.grad_weight for each in alone)[shard.rows]
    rows = alone[replica].grad_input
    rows = rows.chunk(2)[tp_rank] if sequence_parallel else rows
    return [
        float((result.loss - alone[replica].loss).abs() / alone[replica].loss.abs()),
        relative_error(result.grad_input, rows),
        relative_error(total.cpu(), right),
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_b40_tensor_and_data_parallel(gpu_pool: Pool, mode: str, sequence_parallel: bool) -> None:
    needs_mesh(gpu_pool)
    for errors in gpu_pool.run(gpu_pool.world_size, _replicas, MODES[mode], sequence_parallel):
        assert max(errors) < 1e-5


def _context_parallel(rank: Rank) -> list[float]:
    """tp = 2 x cp: parts of one sequence, summed and divided by the number of valid tokens in all of it."""
    assert rank.paired is not None
    assert rank.strided is not None
    tp_rank, part, parts = rank.index % 2, rank.index // 2, rank.size // 2
    problem = build(Spec(shape=(8 * parts,), hidden=16, vocab=101, ignored=0.4, split="chunk"))
    problem = replace(problem, upstream=None)
    right = reference(problem)
    shard = make_shards(101, 0, "chunk", 2)[tp_rank]
    valid = (problem.target != -100).sum()
    mine = slice(8 * part, 8 * part + 8)
    sums = replace(problem.with_options(reduction="sum"), input=problem.input[mine], target=problem.target[mine])
    sums = replace(sums, upstream=(1.0 / valid).float())
    result = run_layer(sums, shard, Rank(tp_rank, 2, rank.paired, rank.device), device=rank.device)
    loss, grad = (result.loss / valid).to(rank.device), result.grad_weight.to(rank.device)
    for value in (loss, grad):
        dist.all_reduce(value, group=rank.strided)
    return [
        float((loss.cpu() - right.loss).abs()),
        relative_error(grad.cpu(), right.grad_weight[shard.rows]),
        relative_error(result.grad_input, right.grad_input[mine]),
    ]


def test_b40_context_parallel(gpu_pool: Pool) -> None:
    needs_mesh(gpu_pool)
    for errors in gpu_pool.run(gpu_pool.world_size, _context_parallel):
        assert max(errors) < 1e-5


def _different_label(rank: Rank) -> float:
    problem = fixture0()
    if rank.index == 1:
        problem.target[2] = 7
    shard = make_shards(32, 0, "equal", rank.size)[rank.index]
    return float(run_layer(problem, shard, rank, device=rank.device, validate=True).loss)


def test_b14_ranks_with_different_tokens(gpu_pool: Pool, tp: int) -> None:
    for error in gpu_pool.errors(tp, _different_label):
        assert error is not None
        assert error.kind == "ValueError"
        assert "token 2" in error.message


def _checkpointed(rank: Rank, sequence_parallel: bool) -> list[bool]:
    spec = replace(MANY, shape=(64,))
    shard = make_shards(spec.vocab, 0, spec.split, rank.size)[rank.index]
    problem = build(spec)
    rows = problem.input.chunk(rank.size)[rank.index] if sequence_parallel else problem.input
    weight, target = problem.weight[shard.rows].to(rank.device), problem.target.to(rank.device)

    def head(hidden: Tensor, weight: Tensor) -> Tensor:
        return cce_tp.linear_cross_entropy(
            hidden * 1.0, weight, target, group=rank.group, shard=shard.vocab, sequence_parallel=sequence_parallel
        )

    grads = []
    for mode in (None, False, True):
        leaves = [rows.to(rank.device).clone().requires_grad_(), weight.clone().requires_grad_()]
        loss = head(*leaves) if mode is None else checkpoint(head, *leaves, use_reentrant=mode)
        loss.backward()
        grads.append([leaf.grad for leaf in leaves])
    return [torch.equal(a, b) for again in grads[1:] for a, b in zip(grads[0], again, strict=True)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_b44_activation_checkpointing(gpu_pool: Pool, sequence_parallel: bool, tp: int) -> None:
    assert gpu_pool.run(tp, _checkpointed, sequence_parallel) == [[True] * 4] * tp


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


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, *sys.argv[1:]]))
