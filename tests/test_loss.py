"""Every option, alone and in random combination, over 1, 2 and 4 ranks, against float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import Pool, Rank
from hypothesis import given
from hypothesis import strategies as st
from oracle import Options, Problem, reference, relative_error, same_dtype_errors
from problems import (
    RankResult,
    Spec,
    build,
    check,
    check_gradients,
    check_loss,
    check_stats,
    gather_weight_grad,
    make_shards,
    run_layer,
    run_spec,
    run_spec_task,
)

import cce_tp

TP_SIZES = (1, 2, 4)

ALONE = {
    "plain": Spec(shape=(9,), hidden=13, vocab=37),
    "one token": Spec(shape=(1,), hidden=5, vocab=11),
    "one feature": Spec(shape=(6,), hidden=1, vocab=11),
    "one id": Spec(shape=(6,), hidden=3, vocab=1),
    "few ids": Spec(shape=(6,), hidden=3, vocab=3, split="chunk"),
    "chunked with empty shards": Spec(shape=(6,), hidden=3, vocab=5, split="chunk"),
    "three dimensions": Spec(shape=(2, 3, 2), hidden=8, vocab=19),
    "equal shards": Spec(shape=(9,), hidden=8, vocab=36, split="equal"),
    "padded": Spec(shape=(9,), hidden=8, vocab=30, padding=6, split="megatron"),
    "a rank of nothing but padding": Spec(shape=(9,), hidden=8, vocab=17, padding=15, split="megatron"),
    "padding on any rank": Spec(seed=3, shape=(9,), hidden=8, vocab=23, padding=9),
    "counted padding": Spec(
        shape=(9,), hidden=8, vocab=17, padding=15, split="megatron", bias=True, options=Options(count_padding=True)
    ),
    "bias": Spec(shape=(9,), hidden=8, vocab=23, bias=True),
    "class weights": Spec(shape=(9,), hidden=8, vocab=23, class_weight=True),
    "ignored": Spec(shape=(20,), hidden=8, vocab=23, ignored=0.4),
    "ignored, an id": Spec(shape=(20,), hidden=8, vocab=23, ignored=0.4, options=Options(ignore_index=7)),
    "ignored, beyond": Spec(shape=(20,), hidden=8, vocab=23, ignored=0.4, options=Options(ignore_index=10**12)),
    "sum": Spec(shape=(9,), hidden=8, vocab=23, options=Options(reduction="sum")),
    "none": Spec(shape=(3, 4), hidden=8, vocab=23, ignored=0.3, options=Options(reduction="none")),
    "smoothing": Spec(shape=(9,), hidden=8, vocab=23, options=Options(label_smoothing=0.2)),
    "all smoothing": Spec(shape=(9,), hidden=8, vocab=23, options=Options(label_smoothing=1.0)),
    "smoothing and padding": Spec(
        shape=(9,), hidden=8, vocab=17, padding=15, split="megatron", options=Options(label_smoothing=0.2)
    ),
    "smoothing and counted padding": Spec(
        shape=(9,),
        hidden=8,
        vocab=17,
        padding=15,
        split="megatron",
        options=Options(label_smoothing=0.2, count_padding=True),
    ),
    "smoothing, class weights": Spec(
        shape=(9,), hidden=8, vocab=23, class_weight=True, ignored=0.3, options=Options(label_smoothing=0.2)
    ),
    "scale": Spec(shape=(9,), hidden=8, vocab=23, bias=True, options=Options(logit_scale=0.3)),
    "negative scale": Spec(shape=(9,), hidden=8, vocab=23, options=Options(logit_scale=-1.5)),
    "zero scale": Spec(shape=(9,), hidden=8, vocab=23, options=Options(logit_scale=0.0)),
    "softcap": Spec(shape=(9,), hidden=8, vocab=23, options=Options(softcap=1.5)),
    "softcap, smoothing": Spec(
        shape=(9,), hidden=8, vocab=23, padding=5, options=Options(softcap=1.5, label_smoothing=0.4)
    ),
    "scale, softcap, bias": Spec(
        shape=(9,), hidden=8, vocab=23, bias=True, options=Options(softcap=2.0, logit_scale=1.7)
    ),
    "z loss": Spec(shape=(9,), hidden=8, vocab=23, ignored=0.3, options=Options(z_loss=0.05)),
    "z loss, class weights": Spec(shape=(9,), hidden=8, vocab=23, class_weight=True, options=Options(z_loss=0.05)),
    "lse gradient": Spec(shape=(3, 4), hidden=8, vocab=23, ignored=0.3, lse_grad=True),
    "lse gradient, padding": Spec(shape=(9,), hidden=8, vocab=23, padding=9, lse_grad=True),
    "strides": Spec(shape=(3, 4), hidden=8, vocab=23, bias=True, class_weight=True, strided=True),
    "strides, upstream": Spec(shape=(3, 4), hidden=8, vocab=23, strided=True, options=Options(reduction="none")),
    "int32 target": Spec(shape=(9,), hidden=8, vocab=23, ignored=0.3, target_dtype=torch.int32),
    "int16 target": Spec(shape=(9,), hidden=8, vocab=23, ignored=0.3, target_dtype=torch.int16),
    "uint8 target": Spec(shape=(9,), hidden=8, vocab=23, target_dtype=torch.uint8),
    "large": Spec(shape=(70,), hidden=83, vocab=301, spread=4.0),
}


def compare(pool: Pool, spec: Spec, tp: int, **keywords: Any) -> list[RankResult]:
    """Run a spec on ``tp`` ranks and compare with float64."""
    shards = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)
    results = pool.run(tp, run_spec_task, spec, keywords) if tp > 1 else [run_spec(None, spec, **keywords)]
    check(spec, results, shards)
    return results


def splittable(spec: Spec, tp: int) -> Spec:
    """The spec with a vocabulary that its split divides."""
    if spec.split == "equal":
        return replace(spec, vocab=-(-spec.vocab // tp) * tp)
    if spec.split == "megatron":
        return replace(spec, padding=spec.padding + -(spec.vocab + spec.padding) % tp)
    if spec.split == "chunk":
        return replace(spec, padding=0)
    return spec


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("name", ALONE)
def test_option_alone(pool: Pool, name: str, tp: int) -> None:
    compare(pool, splittable(ALONE[name], tp), tp)


options = st.builds(
    Options,
    reduction=st.sampled_from(["mean", "sum", "none"]),
    ignore_index=st.sampled_from([-100, -1, 3]),
    label_smoothing=st.sampled_from([0.0, 0.1, 0.7]),
    logit_scale=st.sampled_from([1.0, 0.5, -1.25]),
    softcap=st.sampled_from([None, 1.0, 5.0]),
    z_loss=st.sampled_from([0.0, 1e-2]),
    count_padding=st.booleans(),
)
specs = st.builds(
    Spec,
    seed=st.integers(0, 2**20),
    shape=st.one_of(st.tuples(st.integers(0, 40)), st.tuples(st.integers(1, 5), st.integers(0, 5))),
    hidden=st.integers(1, 40),
    vocab=st.integers(1, 70),
    padding=st.integers(0, 9),
    split=st.sampled_from(["sizes", "sizes", "megatron", "chunk", "equal"]),
    spread=st.sampled_from([0.3, 2.0, 4.0]),
    bias=st.booleans(),
    class_weight=st.booleans(),
    ignored=st.sampled_from([0.0, 0.3, 1.0]),
    strided=st.booleans(),
    lse_grad=st.booleans(),
    target_dtype=st.sampled_from([torch.int64, torch.int32]),
    options=options,
)


def _usable(spec: Spec, tp: int) -> Spec:
    spec = splittable(replace(spec, padding=0) if spec.split == "equal" else spec, tp)
    ignored = spec.options.ignore_index
    return replace(spec, vocab=spec.vocab + 4 * tp) if ignored >= 0 and spec.vocab <= ignored else spec


@given(spec=specs)
def test_random_combination_on_one_rank(spec: Spec) -> None:
    spec = _usable(spec, 1)
    check(spec, [run_spec(None, spec)], make_shards(spec.vocab, spec.padding, spec.split, 1, spec.seed))


@pytest.mark.parametrize("tp", [2, 4])
@given(spec=specs)
def test_random_combination(pool: Pool, tp: int, spec: Spec) -> None:
    compare(pool, _usable(spec, tp), tp)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_group_of_one_rank_is_no_group(pool: Pool, tp: int) -> None:
    """A group of one, a group of several, and none at all compute the same problem."""
    spec = Spec(shape=(9,), hidden=8, vocab=24, split="equal", bias=True)
    results = pool.run(tp, run_spec_task, spec, {})
    alone = run_spec(None, spec)
    assert abs(float(results[0].loss) - float(alone.loss)) <= 1e-6 * max(1.0, float(reference(build(spec)).lse.max()))


def _run_by_reduction(rank: Rank, spec: Spec, keywords: dict[str, Any]) -> RankResult:
    """As in a group too large to gather: a MAX and a SUM."""
    from cce_tp import collectives

    usual = collectives.GATHER_UP_TO
    collectives.GATHER_UP_TO = 1
    try:
        return run_spec(rank, spec, rank.size, **keywords)
    finally:
        collectives.GATHER_UP_TO = usual


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "chunked with empty shards",
        "a rank of nothing but padding",
        "smoothing, class weights",
        "softcap, smoothing",
        "lse gradient, padding",
        "z loss",
    ],
)
def test_combine_by_reductions(pool: Pool, name: str, tp: int) -> None:
    spec = splittable(ALONE[name], tp)
    results = pool.run(tp, _run_by_reduction, spec, {"return_stats": True})
    check(spec, results, make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed))
    check_stats(results[0], reference(build(spec)))


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("name", ["plain", "chunked with empty shards", "counted padding", "softcap", "none", "bias"])
def test_stats(pool: Pool, name: str, tp: int) -> None:
    spec = splittable(ALONE[name], tp)
    results = compare(pool, spec, tp, return_stats=True)
    for result in results:
        check_stats(result, reference(build(spec)))
        for field in ("lse", "target_logprob", "correct", "entropy"):
            same = torch.equal(result.stats[field].nan_to_num(), results[0].stats[field].nan_to_num())
            assert same, f"{field} differs between ranks"


def _tied_logits(rank: Rank | None, tp: int) -> list[bool]:
    """Every id has the same logit."""
    weight = torch.ones(12, 3)
    target = torch.arange(12)
    shard = make_shards(12, 0, "equal", tp)[0 if rank is None else rank.index]
    problem = Problem(torch.ones(12, 3), weight, target, 12)
    return run_layer(problem, shard, rank, return_stats=True).stats["correct"].tolist()


def _tied_logits_task(rank: Rank) -> list[bool]:
    return _tied_logits(rank, rank.size)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_ties_go_to_the_lowest_id(pool: Pool, tp: int) -> None:
    answers = pool.run(tp, _tied_logits_task) if tp > 1 else [_tied_logits(None, 1)]
    assert answers == [[True] + [False] * 11] * tp


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("sequence_dim", [0, 1, -2])
@pytest.mark.parametrize("name", ["plain", "rich"])
def test_sequence_parallel(pool: Pool, name: str, sequence_dim: int, tp: int) -> None:
    """Each rank passes its slice of the tokens and gets that slice's gradient; the weight sees all tokens."""
    spec = Spec(shape=(8, 4), hidden=6, vocab=29, ignored=0.2, strided=name == "rich")
    if name == "rich":
        rich = Options(reduction="none", label_smoothing=0.1, softcap=3.0)
        spec = replace(spec, bias=True, class_weight=True, lse_grad=True, options=rich)
    shards = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)
    dim = sequence_dim % 3
    keywords = {"sequence_parallel": True, "sequence_dim": sequence_dim}
    results = pool.run(tp, run_spec_task, spec, keywords)
    whole = torch.cat([result.grad_input for result in results], dim=dim)
    expected = reference(build(spec))
    check_loss(results[0], expected)
    assert all(torch.equal(result.loss, results[0].loss) for result in results)
    whole_results = [replace(result, grad_input=whole) for result in results]
    check_gradients(spec, whole_results, shards, expected, 1e-5)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_main_grad(pool: Pool, dtype: torch.dtype, tp: int) -> None:
    """The gradient is added to what the buffer holds, and ``.grad`` stays None."""
    spec = Spec(shape=(9,), hidden=8, vocab=17, padding=7, split="megatron", bias=True)
    results = pool.run(tp, _run_main_grad, spec, dtype)
    shards = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)
    expected = reference(build(spec)).grad_weight
    assert all(result.grad_weight is None for result in results)
    added = [result.main_grad.double() - 1 for result in results]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    assert relative_error(gather_weight_grad(added, shards, build(spec).weight), expected) < tolerance


def _run_main_grad(rank: Rank, spec: Spec, dtype: torch.dtype) -> RankResult:
    rows = len(make_shards(spec.vocab, spec.padding, spec.split, rank.size, spec.seed)[rank.index].rows)
    buffer = torch.ones(rows, spec.hidden, dtype=dtype)
    return run_spec(rank, spec, rank.size, main_grad=buffer)


def test_main_grad_accumulates_over_micro_batches() -> None:
    spec = Spec(shape=(9,), hidden=8, vocab=17)
    buffer = torch.zeros(17, 8)
    for _ in range(3):
        run_spec(None, spec, main_grad=buffer)
    assert relative_error(buffer, 3 * reference(build(spec)).grad_weight) < 1e-5


def test_main_grad_with_a_gap_between_rows() -> None:
    spec = Spec(shape=(9,), hidden=8, vocab=17)
    around = torch.full((17, 20), float("nan"))
    buffer = around[:, 5:13].zero_()
    run_spec(None, spec, main_grad=buffer)
    assert relative_error(buffer, reference(build(spec)).grad_weight) < 1e-5
    assert int(around.isnan().sum()) == 17 * 12


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize(
    ("input_grad", "weight_grad"), [(True, False), (False, True), (False, False)], ids=["trunk", "head", "neither"]
)
def test_frozen(pool: Pool, input_grad: bool, weight_grad: bool, tp: int) -> None:
    """What needs no gradient gets none, and the rest is what it was."""
    spec = Spec(shape=(9,), hidden=8, vocab=23, ignored=0.2)
    keywords = {"input_grad": input_grad, "weight_grad": weight_grad}
    results = compare(pool, spec, tp, **keywords)
    for result in results:
        assert (result.grad_input is not None) == input_grad
        assert (result.grad_weight is not None) == weight_grad
        assert result.has_graph == (input_grad or weight_grad)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "options", [Options(), Options(label_smoothing=0.1), Options(softcap=3.0, z_loss=0.01)], ids=str
)
def test_low_precision_is_no_worse_than_pytorch(pool: Pool, dtype: torch.dtype, options: Options, tp: int) -> None:
    """Errors against float64 of at most twice those of PyTorch's products in the same dtype."""
    spec = Spec(shape=(150,), hidden=96, vocab=500, dtype=dtype, spread=3.0, ignored=0.1, options=options)
    problem = build(spec)
    expected = reference(problem)
    input_error, weight_error = same_dtype_errors(problem, expected)
    shards = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)
    results = pool.run(tp, run_spec_task, spec, {})
    # The products of a 16-bit pair are exact in fp32: the loss owes nothing to the low precision.
    check_loss(results[0], expected)
    whole = gather_weight_grad([result.grad_weight for result in results], shards, problem.weight)
    assert results[0].grad_input.dtype == results[0].grad_weight.dtype == dtype
    assert all(torch.equal(result.grad_input, results[0].grad_input) for result in results)
    assert 0 < input_error < 0.1 * float(expected.grad_input.norm())
    assert float((results[0].grad_input.double() - expected.grad_input).norm()) <= 2 * input_error
    assert float((whole - expected.grad_weight).norm()) <= 2 * weight_error


@pytest.mark.parametrize("comm_dtype", [torch.float32, torch.bfloat16, torch.float16, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_comm_dtype(pool: Pool, dtype: torch.dtype, comm_dtype: torch.dtype | None) -> None:
    """The input's gradient keeps its dtype and is never worse than the dtype it travelled in (gloo sums in fp32)."""
    spec = Spec(shape=(30,), hidden=8, vocab=61, dtype=dtype)
    results = pool.run(4, run_spec_task, spec, {"comm_dtype": comm_dtype})
    low = torch.bfloat16 in (dtype, comm_dtype) or comm_dtype == torch.float16
    expected = reference(build(spec)).grad_input
    for result in results:
        assert result.grad_input.dtype == dtype
        assert torch.equal(result.grad_input, results[0].grad_input)
        assert relative_error(result.grad_input, expected) < (8e-3 if low else 1e-5)
        sent = [seen for seen in result.collectives if seen.shape == (30, 8)]
        assert [seen.dtype for seen in sent] == [torch.float32], "gloo reduces in fp32"


@pytest.mark.parametrize("params", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tp", TP_SIZES)
def test_autocast(pool: Pool, tp: int, params: torch.dtype) -> None:
    """fp32 parameters under autocast compute in bf16 and get fp32 gradients."""
    spec = Spec(shape=(30,), hidden=16, vocab=61, bias=True)
    shards = make_shards(spec.vocab, spec.padding, spec.split, tp, spec.seed)
    results = pool.run(tp, _run_autocast, spec, params)
    problem = build(spec)
    rounded = replace(problem, input=problem.input.bfloat16(), weight=problem.weight.bfloat16())
    expected = reference(rounded)
    check_loss(results[0], expected)
    whole = gather_weight_grad([result.grad_weight for result in results], shards, problem.weight)
    assert results[0].grad_input.dtype == torch.float32
    assert results[0].grad_weight.dtype == params
    assert relative_error(results[0].grad_input, expected.grad_input) < 8e-3
    assert relative_error(whole, expected.grad_weight) < 8e-3


def _run_autocast(rank: Rank, spec: Spec, params: torch.dtype) -> RankResult:
    problem = build(spec)
    problem = replace(problem, weight=problem.weight.to(params))
    shard = make_shards(spec.vocab, spec.padding, spec.split, rank.size, spec.seed)[rank.index]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return run_layer(problem, shard, rank)


@pytest.mark.parametrize("what", ["bias", "class_weight"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_bias_and_class_weights_of_any_floating_dtype(what: str, dtype: torch.dtype) -> None:
    spec = Spec(shape=(30,), hidden=16, vocab=61, bias=True, class_weight=True)
    problem = build(spec)
    problem = replace(problem, **{what: getattr(problem, what).to(dtype)})
    result = run_layer(problem, make_shards(61, 0, "equal", 1)[0])
    expected = reference(problem)
    check_loss(result, expected)
    assert relative_error(result.grad_weight, expected.grad_weight) < 1e-5
    assert result.grad_bias.dtype == problem.bias.dtype
    assert relative_error(result.grad_bias, expected.grad_bias) < 8e-3


def _run_dtensor(rank: Rank, vocab: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(rank.group, "cpu")
    problem = build(Spec(shape=(9,), hidden=8, vocab=vocab))
    weight = distribute_tensor(problem.weight, mesh, [Shard(0)]).detach().requires_grad_()
    rows = problem.input.clone().requires_grad_()
    loss = cce_tp.linear_cross_entropy(rows, weight, problem.target)
    loss.backward()
    assert isinstance(weight.grad, DTensor)
    assert weight.grad.placements == weight.placements
    return {"loss": loss.detach(), "input": rows.grad, "weight": weight.grad.full_tensor()}


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("vocab", [24, 23, 5, 3])
def test_dtensor_weight(pool: Pool, vocab: int, tp: int) -> None:
    """A weight sharded by DTensor says group and shard itself, uneven and empty shards included."""
    expected = reference(replace(build(Spec(shape=(9,), hidden=8, vocab=vocab)), upstream=None))
    for result in pool.run(tp, _run_dtensor, vocab):
        assert abs(float(result["loss"]) - float(expected.loss)) <= 1e-6 * max(1, float(expected.lse.max()))
        assert relative_error(result["input"], expected.grad_input) < 1e-5
        assert relative_error(result["weight"], expected.grad_weight) < 1e-5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tp", TP_SIZES)
def test_nothing_comes_from_an_ignored_row(pool: Pool, tp: int, value: float) -> None:
    """Whatever the hidden state of an ignored token holds, the rest is as if it held zeros."""
    results = pool.run(tp, _run_poisoned, value, True)
    expected = reference(_poisoned(0.0, True))
    shards = make_shards(23, 0, "sizes", tp)
    whole = gather_weight_grad([result.grad_weight for result in results], shards, torch.empty(23, 8))
    for result in results:
        check_loss(replace(result, lse=None), expected)
        assert relative_error(result.grad_input, expected.grad_input) < 1e-5
        assert not result.grad_input[3].any()
    assert relative_error(whole, expected.grad_weight) < 1e-5


def _poisoned(value: float, ignored: bool) -> Problem:
    """Token 3 holds ``value``, and has a target or not; the loss and the LSE are both used."""
    options = Options(reduction="none" if not ignored else "mean", label_smoothing=0.1, z_loss=0.01)
    problem = build(Spec(shape=(9,), hidden=8, vocab=23, lse_grad=True, options=options))
    problem.input[3, 2:5] = value
    if ignored:
        problem.target[3] = -100
    return problem


def _run_poisoned(rank: Rank, value: float, ignored: bool) -> RankResult:
    shard = make_shards(23, 0, "sizes", rank.size)[rank.index]
    return run_layer(_poisoned(value, ignored), shard, rank)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_nan_stays_in_its_row(pool: Pool, tp: int) -> None:
    """A NaN hidden state gives a NaN loss and gradient for that token on every rank, and for no other."""
    expected = reference(_poisoned(0.0, False))
    others = [n for n in range(9) if n != 3]
    for result in pool.run(tp, _run_poisoned, math.nan, False):
        assert math.isnan(result.loss[3])
        assert result.grad_input[3].isnan().all()
        assert (result.loss[others].double() - expected.loss[others]).abs().max() < 1e-5
        assert relative_error(result.grad_input[others], expected.grad_input[others]) < 1e-5


def _run_offset(rank: Rank, offset: float, gather_up_to: int) -> RankResult:
    from cce_tp import collectives

    problem = build(Spec(shape=(9,), hidden=8, vocab=24, split="equal", bias=True, options=Options(reduction="none")))
    problem = replace(problem, bias=problem.bias.double() + offset, upstream=None)
    usual = collectives.GATHER_UP_TO
    collectives.GATHER_UP_TO = gather_up_to
    try:
        return run_layer(problem, make_shards(24, 0, "equal", rank.size)[rank.index], rank)
    finally:
        collectives.GATHER_UP_TO = usual


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("combine", ["gather", "reduce"])
def test_a_common_offset_cancels(pool: Pool, combine: str, tp: int) -> None:
    """Logits around 4096 lose 2^-12 each; what is formed from their differences loses no more than that."""
    gather_up_to = 8 if combine == "gather" else 1
    plain = pool.run(tp, _run_offset, 0.0, gather_up_to)[0].loss
    for result in pool.run(tp, _run_offset, 4096.0, gather_up_to):
        assert (result.loss - plain).abs().max() < 4 * 2**-12


def _masked_bias(rank: Rank) -> RankResult:
    """Every logit of the first half of the vocabulary is -inf, by the bias."""
    problem = build(Spec(shape=(9,), hidden=8, vocab=24, bias=True))
    problem.bias[:12] = -math.inf
    problem = replace(problem, target=problem.target % 12 + 12, upstream=None)
    return run_layer(problem, make_shards(24, 0, "equal", rank.size)[rank.index], rank)


@pytest.mark.parametrize("tp", TP_SIZES)
def test_a_fully_masked_shard(pool: Pool, tp: int) -> None:
    """A shard whose logits are all -inf takes no part; no -inf - -inf."""
    problem = build(Spec(shape=(9,), hidden=8, vocab=24, bias=True))
    half = Problem(problem.input, problem.weight[12:], problem.target % 12, 12, bias=problem.bias[12:])
    expected = reference(half)
    results = pool.run(tp, _masked_bias)
    whole = gather_weight_grad([r.grad_weight for r in results], make_shards(24, 0, "equal", tp), problem.weight)
    for result in results:
        check_loss(result, expected)
        assert relative_error(result.grad_input, expected.grad_input) < 1e-5
    assert not whole[:12].any()
    assert relative_error(whole[12:], expected.grad_weight) < 1e-5


@pytest.mark.parametrize("tp", TP_SIZES)
def test_workspace_is_obeyed_or_refused(pool: Pool, tp: int) -> None:
    """A small workspace changes nothing but the memory; one too small is refused by its name, on every rank."""
    spec = Spec(shape=(300,), hidden=32, vocab=900, split="chunk", options=Options(label_smoothing=0.1))
    compare(pool, spec, tp, workspace=300 * 32 * 4 + (96 << 10))
    for error in pool.errors(tp, run_spec_task, spec, {"workspace": 64}):
        assert error is not None
        assert error.kind == "ValueError"
        assert "workspace" in error.message


def _unknown_labels(rank: Rank, backward: Any) -> None:
    generator = torch.Generator().manual_seed(11)
    hidden = torch.randn(6, 7, generator=generator)
    whole = 2 * torch.randn(20, 7, generator=generator)
    target = torch.tensor([3, -100, 20, 19, -(2**31), 0])
    upstream = torch.linspace(0.5, 1.5, 6)
    weight = torch.linspace(0.5, 2.0, 20)
    for smoothing in (0.0, 0.2):
        # In float64, where the label of the three counts as the row's maximum, a constant.
        e, c = hidden.double().requires_grad_(), whole.double().requires_grad_()
        z = e @ c.T
        known = (target >= 0) & (target < 20)
        picked = z.gather(1, torch.where(known, target, 0)[:, None])[:, 0]
        y = torch.where(known, picked, z.detach().max(dim=1).values)
        lse = z.logsumexp(dim=1)
        own = torch.where(known, weight[torch.where(known, target, 0)], 1.0)
        expected = (1 - smoothing) * own * (lse - y) + smoothing / 20 * (weight * (lse[:, None] - z)).sum(dim=1)
        (expected * upstream).sum().backward()

        shard = cce_tp.VocabShard.chunk(20, rank.index, rank.size)
        local = hidden.clone().requires_grad_()
        rows = whole[shard.start : shard.stop].clone().requires_grad_()
        loss = cce_tp.linear_cross_entropy(
            local,
            rows,
            target,
            weight=weight,
            reduction="none",
            ignore_index=-1,
            label_smoothing=smoothing,
            unknown_labels="max",
            group=rank.group,
            shard=shard,
            backward=backward,
            validate=True,
        )
        (loss * upstream).sum().backward()
        assert relative_error(loss, expected) < 1e-6
        assert relative_error(local.grad, e.grad) < 1e-5
        assert relative_error(rows.grad, c.grad[shard.start : shard.stop]) < 1e-5


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("backward", ["exact", cce_tp.Sampled(eps=1e-6, reference_rows=4), cce_tp.Filtered(eps=1e-9)])
def test_unknown_labels_may_count_as_the_largest_logit(pool: Pool, tp: int, backward: Any) -> None:
    """As Megatron has it; with so small an eps the sampled and the filtered gradient are the exact one."""
    pool.run(tp, _unknown_labels, backward)


def test_default_options_are_those_of_cross_entropy() -> None:
    """With nothing but the three tensors it is ``torch.nn.functional.cross_entropy`` of the product."""
    problem = build(Spec(shape=(9,), hidden=8, vocab=23, ignored=0.3))
    ours = cce_tp.linear_cross_entropy(problem.input, problem.weight, problem.target)
    theirs = torch.nn.functional.cross_entropy(problem.input @ problem.weight.T, problem.target)
    torch.testing.assert_close(ours, theirs)


def test_one_token_without_dimensions() -> None:
    """``[D]`` and ``[]``, as torch takes them."""
    problem = build(Spec(shape=(), hidden=8, vocab=23))
    expected = reference(problem)
    result = run_layer(problem, make_shards(23, 0, "equal", 1)[0])
    check_loss(result, expected)
    assert result.grad_input.shape == (8,)
    assert relative_error(result.grad_input, expected.grad_input) < 1e-5


def test_module_is_the_function(pool: Pool) -> None:
    expected = reference(replace(build(Spec(shape=(9,), hidden=8, vocab=23)), upstream=None))
    for tp in TP_SIZES:
        for loss in pool.run(tp, _run_module):
            assert abs(loss - float(expected.loss)) < 1e-5


def _run_module(rank: Rank) -> float:
    problem = build(Spec(shape=(9,), hidden=8, vocab=23))
    group = None if rank.size == 1 else rank.group
    module = cce_tp.LinearCrossEntropyLoss(8, 23, group=group)
    shard = make_shards(23, 0, "chunk", rank.size)[rank.index]
    weight = next(p for name, p in module.named_parameters() if "weight" in name)
    assert weight.shape == (len(shard.rows), 8)
    bias = [p for name, p in module.named_parameters() if "bias" in name]
    with torch.no_grad():
        weight.copy_(problem.weight[shard.rows])
        for parameter in bias:
            parameter.zero_()
    loss = module(problem.input, problem.target)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.any() or not len(weight)
    return float(loss)


def _two_splits(rank: Rank, splits: list[list[int]]) -> list[float]:
    problem = build(Spec(shape=(5,), hidden=4, vocab=12))
    losses = []
    for sizes in splits:
        shard = cce_tp.VocabShard.from_sizes(sizes, rank.index)
        weight = problem.weight[shard.start : shard.stop]
        loss = cce_tp.linear_cross_entropy(problem.input, weight, problem.target, group=rank.group, shard=shard)
        losses.append(float(loss))
    return losses


def test_another_split_in_which_one_rank_keeps_its_rows(pool: Pool) -> None:
    """Whether the ranks exchange records may not depend on what only one of them knows: its own shard."""
    expected = float(reference(replace(build(Spec(shape=(5,), hidden=4, vocab=12)), upstream=None)).loss)
    for losses in pool.run(4, _two_splits, [[3, 3, 3, 3], [3, 4, 2, 3], [3, 3, 3, 3], [3, 0, 6, 3]]):
        assert losses == pytest.approx([expected] * 4, abs=1e-5)
