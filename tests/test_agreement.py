"""When the ranks exchange what they hold: a matter on which they must not differ."""

from __future__ import annotations

import pytest
import torch
from distributed import Collective, Pool, Rank, collectives

import cce_tp


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
