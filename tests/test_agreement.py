"""When the ranks exchange what they hold: a matter on which they must not differ."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from distributed import Collective, Pool, Rank, collectives

import cce_tp
from cce_tp import collectives as library_collectives


def _two_splits(rank: Rank) -> list[list[Collective]]:
    """Two calls of one vocabulary whose second split moves nothing on rank 1."""
    sent = []
    for padding in (0, 2):
        sizes = (3, 5)
        whole = cce_tp.VocabShard.from_sizes(sizes, rank.index)
        extra = padding if rank.index == 0 else 0
        shard = cce_tp.VocabShard(start=whole.start, stop=whole.stop, vocab_size=8, padded_stop=whole.stop + extra)
        weight = torch.randn(shard.num_rows, 4, requires_grad=True)
        with collectives() as seen:
            loss = cce_tp.linear_cross_entropy(
                torch.ones(6, 4, requires_grad=True), weight, torch.arange(6), group=rank.group, shard=shard
            )
            loss.backward()
        sent.append(list(seen))
    return sent


@pytest.mark.distributed
def test_a_split_that_changes_on_some_ranks_only(pool: Pool) -> None:
    """Every rank exchanges at the first call and none at the second, though rank 1 sees the same shard twice."""
    answers = pool.run(2, _two_splits, fresh=True)
    first, second = ([[seen.name for seen in call] for call in calls] for calls in zip(*answers, strict=True))
    assert first[0] == first[1]
    assert second[0] == second[1] == first[0][1:]


def _later_layouts(rank: Rank) -> list[float]:
    """After a good call, layouts that don't cover the vocabulary once."""
    weight, hidden, target = torch.randn(32, 16), torch.randn(8, 16), torch.arange(8)
    losses = []
    for rows, shard in (
        (slice(16 * rank.index, 16 * rank.index + 16), None),
        (slice(0, 32), cce_tp.VocabShard(start=0, stop=32, vocab_size=32)),
        (slice(0, 4), cce_tp.VocabShard(start=4 * rank.index, stop=4 * rank.index + 4, vocab_size=32)),
    ):
        loss = cce_tp.linear_cross_entropy(hidden, weight[rows], target, group=rank.group, shard=shard)
        losses.append(float(loss))
    return losses


@pytest.mark.distributed
@pytest.mark.parametrize("gather_up_to", [1, 8])
def test_a_later_layout_with_gaps_or_overlaps_is_nan(pool: Pool, gather_up_to: int) -> None:
    """It is not looked at on the host again, but no wrong number comes out of it."""
    for losses in pool.run(2, _with_gather_up_to, gather_up_to, fresh=True):
        assert losses[0] == losses[0]
        assert losses[1] != losses[1]
        assert losses[2] != losses[2]


def _with_gather_up_to(rank: Rank, size: int) -> list[float]:
    usual = library_collectives.GATHER_UP_TO
    library_collectives.GATHER_UP_TO = size
    try:
        torch.manual_seed(0)
        return _later_layouts(rank)
    finally:
        library_collectives.GATHER_UP_TO = usual


def _one_rank_differs(rank: Rank, changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    keywords = dict(changes) if rank.index == 1 else {}
    if "class weights" in keywords:
        keywords = {"weight": torch.arange(32.0)}
    weight = torch.randn(16, 4) + rank.index
    cce_tp.linear_cross_entropy(torch.randn(8, 4), weight, torch.arange(8), group=rank.group, **keywords)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"validate": True}, "validate"),
        ({"class weights": True}, "class weights"),
        ({"linear_bias": [1.0]}, "linear_bias"),
        ({"linear_bias": torch.zeros(16)}, "whether linear_bias is given"),
        ({"ignore_index": 2**70}, "ignore_index"),
        ({"logit_scale": 2.0}, "logit_scale"),
        ({"backward": cce_tp.Filtered()}, "backward"),
        ({"backward": cce_tp.Filtered(order="count")}, "order='count'"),
    ],
)
def test_one_rank_that_differs_is_an_error_on_every_rank(pool: Pool, changes: dict[str, Any], word: str) -> None:
    errors = pool.errors(2, _one_rank_differs, changes, fresh=True)
    assert all(error is not None and word in error.message for error in errors), errors


def _hot_rows_differ(rank: Rank) -> None:
    torch.manual_seed(0)
    mode = cce_tp.Sampled(seed=1, reference_rows=4 + rank.index)
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(16, 4) + rank.index
    with library_collectives.overlap(library_collectives.Overlap(hot_tokens=1)):
        cce_tp.linear_cross_entropy(hidden, weight, torch.arange(8), group=rank.group, backward=mode)


@pytest.mark.distributed
def test_ranks_that_share_hot_rows_agree_on_their_number(pool: Pool) -> None:
    errors = pool.errors(2, _hot_rows_differ, fresh=True)
    assert all(error is not None and "reference_rows=4" in error.message for error in errors), errors


def test_what_decides_whether_hot_rows_are_shared_is_agreed_upon() -> None:
    """It decides the collectives: another number of hot rows, and a workspace or none."""
    options = cce_tp.options.LossOptions(backward=cce_tp.Sampled())
    others = [
        cce_tp.options.LossOptions(backward=cce_tp.Sampled(reference_rows=7)),
        cce_tp.options.LossOptions(backward=cce_tp.Sampled(), workspace=2**24),
    ]
    for other in others:
        assert other.structure() != options.structure()
        assert other.agreed() != options.agreed()
    exact = [cce_tp.options.LossOptions(workspace=workspace) for workspace in (None, 2**24)]
    assert exact[0].structure() == exact[1].structure()


def _scheduled(rank: Rank) -> list[int]:
    """How many collectives each of some calls with changing values issues."""
    counts = []
    weight, hidden, target = torch.randn(16, 4) + rank.index, torch.ones(6, 4), torch.arange(6)
    for step in range(3):
        with collectives() as seen:
            cce_tp.linear_cross_entropy(
                hidden, weight, target, group=rank.group, logit_scale=1 + step / 10, backward=cce_tp.Sampled(seed=step)
            )
        counts.append(len(seen))
    return counts


@pytest.mark.distributed
def test_values_on_a_schedule_do_not_exchange_anew(pool: Pool) -> None:
    for counts in pool.run(2, _scheduled, fresh=True):
        assert counts[1] == counts[2] == counts[0] - 1


def test_a_copied_module_keeps_its_group_and_owns_its_parameters() -> None:
    module = cce_tp.LinearCrossEntropyLoss(4, 8, bias=True, label_smoothing=0.1)
    twin = copy.deepcopy(module)
    assert twin.group is module.group
    assert twin.shard == module.shard
    assert torch.equal(twin.weight, module.weight)
    assert twin.weight.data_ptr() != module.weight.data_ptr()
    assert twin(torch.ones(3, 4), torch.arange(3)) == module(torch.ones(3, 4), torch.arange(3))
