"""How many collectives a call issues, and of what shape and dtype: the documented numbers and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import Collective, Pool, Rank
from oracle import Options
from problems import Spec, run_spec

from cce_tp import collectives as library_collectives

N, D = 8, 16
PLAIN = Spec(shape=(N,), hidden=D, vocab=37, split="chunk")
Seen = list[tuple[str, tuple[int, ...], torch.dtype]]


def _calls(rank: Rank, spec: Spec, keywords: dict[str, Any], gather_up_to: int) -> list[list[Collective]]:
    """The collectives of two equal calls, the first of them on a group that was never used."""
    usual = library_collectives.GATHER_UP_TO
    library_collectives.GATHER_UP_TO = gather_up_to
    try:
        return [run_spec(rank, spec, rank.size, **keywords).collectives for _ in range(2)]
    finally:
        library_collectives.GATHER_UP_TO = usual


def record(pool: Pool, tp: int, spec: Spec, *, gather: bool = True, **keywords: Any) -> tuple[Seen, Seen]:
    """What the first and the second call sent; the same on every rank, and only within the group."""
    answers = pool.run(tp, _calls, spec, keywords, 8 if gather else 1, fresh=True)
    assert all(answer == answers[0] for answer in answers), "the ranks issue different collectives"
    assert {seen.group_size for call in answers[0] for seen in call} <= {tp}
    first, second = ([(s.name, s.shape, s.dtype) for s in call] for call in answers[0])
    return first, second


def kinds(seen: Seen) -> list[str]:
    """allgather, allreduce or reduce_scatter, whatever the torch version calls its variant."""
    return [next(k for k in ("allgather", "allreduce", "reduce_scatter") if name.startswith(k)) for name, _, _ in seen]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize(
    ("options", "stats", "numbers"),
    [
        (Options(), False, 4),
        (Options(label_smoothing=0.1), False, 6),
        (Options(), True, 6),
        (Options(label_smoothing=0.1, softcap=3.0, z_loss=0.1), True, 8),
    ],
)
def test_small_group(pool: Pool, options: Options, stats: bool, numbers: int, tp: int) -> None:
    """Forward: one all-gather of a few numbers a token; backward: one all-reduce of the input's gradient."""
    first, second = record(pool, tp, replace(PLAIN, options=options), return_stats=stats)
    assert kinds(second) == ["allgather", "allreduce"]
    assert [numel(shape) for _, shape, _ in second] == [numbers * N, N * D]
    assert {dtype for _, _, dtype in second} == {torch.float32}
    assert kinds(first) == ["allgather", *kinds(second)]
    assert first[1:] == second
    assert first[0][2] == torch.uint8


def numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


@pytest.mark.parametrize("stats", [False, True])
def test_large_group(pool: Pool, stats: bool) -> None:
    """Forward: a MAX and a SUM, and a MIN with statistics: at most three."""
    _, second = record(pool, 4, PLAIN, gather=False, return_stats=stats)
    assert kinds(second) == ["allreduce"] * (4 if stats else 3)
    assert [numel(shape) for _, shape, _ in second] == ([N, 4 * N, N, N * D] if stats else [N, 3 * N, N * D])


@pytest.mark.parametrize("tp", [2, 4])
def test_sequence_parallel(pool: Pool, tp: int) -> None:
    """The input is gathered in both passes; gloo reduces and slices, where NCCL has a reduce-scatter."""
    _, second = record(pool, tp, PLAIN, sequence_parallel=True)
    assert kinds(second) == ["allgather", "allgather", "allgather", "allreduce"]
    assert [numel(shape) for _, shape, _ in second] == [N * D // tp, 4 * N, N * D // tp, N * D]


def test_frozen_input_reduces_nothing(pool: Pool) -> None:
    _, second = record(pool, 2, PLAIN, input_grad=False)
    assert kinds(second) == ["allgather"]


def test_frozen_weight_still_reduces(pool: Pool) -> None:
    _, second = record(pool, 2, PLAIN, weight_grad=False)
    assert kinds(second) == ["allgather", "allreduce"]


def test_validation_adds_two(pool: Pool) -> None:
    first, second = record(pool, 2, PLAIN, validate=True)
    assert first == second
    assert kinds(second) == ["allgather", "allgather", "allgather", "allreduce"]
    assert second[0][2] == torch.uint8
    assert second[1][1:] == ((2 * N,), torch.int64) or second[1][1:] == ((2, N), torch.int64)


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("split", ["chunk", "sizes", "megatron"])
def test_number_and_shapes_do_not_depend_on_data(pool: Pool, split: str, ignored: float) -> None:
    """Not on the labels, nor on who owns how much of the vocabulary."""
    spec = replace(PLAIN, split=split, ignored=ignored, vocab=5, padding=0 if split != "megatron" else 3)
    _, second = record(pool, 4, spec)
    assert [(kind, numel(shape)) for kind, (_, shape, _) in zip(kinds(second), second, strict=True)] == [
        ("allgather", 4 * N),
        ("allreduce", N * D),
    ]


def test_low_precision_is_summed_in_fp32_on_gloo(pool: Pool) -> None:
    _, second = record(pool, 2, replace(PLAIN, dtype=torch.bfloat16))
    assert second[-1][1:] == ((N, D), torch.float32)


@pytest.mark.parametrize("options", [Options(), Options(label_smoothing=0.1, softcap=2.0)])
def test_a_group_of_one_communicates_nothing(pool: Pool, options: Options) -> None:
    first, second = record(pool, 1, replace(PLAIN, options=options), return_stats=True, validate=True)
    assert first == second == []


def _without_group(rank: Rank) -> list[Collective]:
    return run_spec(None, PLAIN, return_stats=True, validate=True).collectives


def test_no_group_communicates_nothing(pool: Pool) -> None:
    """Not even where a default group exists."""
    assert pool.run(4, _without_group) == [[]] * 4
