"""The harness itself: it returns values in order, reports errors by rank, and a hang is a failure, not a hang."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from distributed import Collective, Pool, Rank, RanksFailed, collectives


def _sum_of_ranks(rank: Rank) -> tuple[float, list[Collective]]:
    value = torch.tensor([float(rank.index)])
    with collectives() as seen:
        dist.all_reduce(value, group=rank.group)
    return float(value), seen


def _gather_ranks(rank: Rank) -> list[Collective]:
    sent = torch.zeros(3)
    with collectives() as seen:
        dist.all_gather_into_tensor(torch.empty(3 * rank.size), sent, group=rank.group)
        dist.all_gather([torch.empty(3) for _ in range(rank.size)], sent, group=rank.group)
        dist.all_reduce(sent, group=rank.group, async_op=True).wait()
    return seen


def _raise_on_last(rank: Rank) -> int:
    if rank.index == rank.size - 1:
        raise ValueError("the last rank does not like this")
    return rank.index


def _hang_on_first(rank: Rank) -> None:
    if rank.index == 0:
        time.sleep(1000)


def _group_sizes(rank: Rank) -> tuple[int, int]:
    assert rank.strided is not None
    assert rank.paired is not None
    mine = torch.tensor(rank.index)
    dist.all_reduce(mine, group=rank.strided)
    other = torch.tensor(rank.index)
    dist.all_reduce(other, group=rank.paired)
    return int(mine), int(other)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_runs_on_as_many_ranks_as_asked(pool: Pool, size: int) -> None:
    results = pool.run(size, _sum_of_ranks)
    assert [value for value, _ in results] == [sum(range(size))] * size
    assert results[0][1] == [Collective("allreduce", (1,), torch.float32, size)]


def test_records_what_was_sent(pool: Pool) -> None:
    for seen in pool.run(2, _gather_ranks):
        assert [collective.shape for collective in seen] == [(3,)] * 3
        assert [collective.name[:9] for collective in seen] == ["allgather", "allgather", "allreduce"]


def test_groups_of_a_two_by_two_mesh(pool: Pool) -> None:
    assert pool.run(4, _group_sizes) == [(2, 1), (4, 1), (2, 5), (4, 5)]


def test_reports_the_rank_that_raised(pool: Pool) -> None:
    errors = pool.errors(2, _raise_on_last)
    assert errors[0] is None
    assert errors[1].kind == "ValueError"
    with pytest.raises(RanksFailed, match=r"(?s)rank 1:.*the last rank does not like this"):
        pool.run(2, _raise_on_last)


def test_a_hang_fails_with_the_stack_and_the_pool_recovers(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)no answer in 1 s from ranks \[0\].*_hang_on_first"):
        pool.run(2, _hang_on_first, timeout=1)
    assert len(pool.run(2, _sum_of_ranks)) == 2
