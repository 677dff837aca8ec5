"""How many collectives a call issues, and of what shape and dtype: the documented numbers and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from distributed import Collective, Pool, Rank
from oracle import Options, relative_error
from problems import RankResult, Spec, run_spec

import cce_tp
from cce_tp import collectives as library_collectives
from cce_tp.collectives import Overlap
from cce_tp.kernels import sampling

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


@pytest.mark.parametrize("hot_tokens", [None, 1])
@pytest.mark.parametrize("gather_up_to", [8, 1])
@pytest.mark.parametrize("stats", [False, True])
def test_at_most_three_small_ones(pool: Pool, stats: bool, gather_up_to: int, hot_tokens: int | None) -> None:
    """In the sampled mode's forward pass, however many ranks there are; and one large one backward."""
    (seen, *_) = pool.run(4, _sampled_calls, stats, gather_up_to, hot_tokens, fresh=True)
    sizes = [numel(s.shape) for s in seen]
    rows = 4 + min(sampling.COLD_ROWS, 37)
    numbers = 6 if stats else 4
    shared = [rows * D, 5 * N, numbers * N, (4 + N) * D]
    assert sizes == (shared if hot_tokens else [5 * N, numbers * N, N * D])


def _sampled_calls(rank: Rank, stats: bool, gather_up_to: int, hot_tokens: int | None) -> list[Collective]:
    with library_collectives.overlap(Overlap(hot_tokens=hot_tokens)):
        return _calls(rank, PLAIN, {"backward": SAMPLED, "return_stats": stats}, gather_up_to)[1]


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


# -- pieces


def _overlapped(rank: Rank, spec: Spec, keywords: dict[str, Any], choice: Overlap | None) -> RankResult:
    with library_collectives.overlap(choice or library_collectives.Overlap(pieces=1)):
        return run_spec(rank, spec, rank.size, **keywords)


IN_PIECES = Overlap(pieces=3, least_bytes=0)
SAMPLED = cce_tp.Sampled(eps=2.0**-3, seed=5, reference_rows=4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("tp", "vocab"), [(2, 37), (4, 37), (4, 3)])
def test_pieces_of_the_input_gradient(pool: Pool, tp: int, vocab: int, sequence_parallel: bool) -> None:
    """The sampled backward reduces in pieces, which add up to what it would send at once; empty shards, too."""
    spec = replace(PLAIN, shape=(16,), vocab=vocab, ignored=0.2, split="chunk", bias=True)
    keywords = {"backward": SAMPLED, "sequence_parallel": sequence_parallel}
    whole = pool.run(tp, _overlapped, spec, keywords, None)
    parts = pool.run(tp, _overlapped, spec, keywords, IN_PIECES)
    for one, other in zip(whole, parts, strict=True):
        assert torch.equal(one.grad_weight, other.grad_weight)
        torch.testing.assert_close(one.grad_input, other.grad_input, rtol=0, atol=1e-7)  # ranks in another order
        reduced = [seen for seen in one.collectives if seen.shape[-1] == D]
        in_parts = [seen for seen in other.collectives if seen.shape[-1] == D]
        assert len(in_parts) == len(reduced) + 2
        assert sum(numel(seen.shape) for seen in in_parts) == sum(numel(seen.shape) for seen in reduced)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(
    ("tp", "vocab", "options"),
    [
        (2, 37, Options()),
        (4, 37, Options(label_smoothing=0.1)),
        (4, 9, Options(softcap=2.0)),
        (2, 37, Options(logit_scale=0.3, z_loss=0.1)),
    ],
    ids=["plain", "smoothing", "a rank without rows", "scale"],
)
def test_hot_rows_are_shared_out(
    pool: Pool, tp: int, vocab: int, options: Options, pieces: int, sequence_parallel: bool
) -> None:
    """By tokens, of which there may be none for a rank: the same entries and gradients.

    The rows are one collective more; their gradients travel with the input's, or alone if that is scattered.
    """
    shape = (12,) if sequence_parallel else (9,)
    spec = replace(PLAIN, shape=shape, vocab=vocab, ignored=0.2, split="chunk", options=options, lse_grad=True)
    keywords = {"backward": SAMPLED, "return_stats": True, "sequence_parallel": sequence_parallel}
    alone = pool.run(tp, _overlapped, spec, keywords, Overlap(pieces, least_bytes=0, hot_tokens=None))
    shared = pool.run(tp, _overlapped, spec, keywords, Overlap(pieces, least_bytes=0, hot_tokens=1))
    hot, looked_at = min(4, vocab), min(4, vocab) + min(sampling.COLD_ROWS, vocab)
    for one, other in zip(alone, shared, strict=True):
        for name in ("loss", "lse"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert torch.equal(one.stats["keep_rate"], other.stats["keep_rate"])
        for name in ("grad_input", "grad_weight"):
            assert relative_error(getattr(other, name), getattr(one, name)) < 2e-6, name
        before, after = ([numel(s.shape) for s in r.collectives if s.dtype != torch.uint8] for r in (one, other))
        if sequence_parallel:
            gathered, anchor, combined, gathered_again, *reduced = before
            assert after == [looked_at * D, gathered, anchor, combined, gathered_again, hot * D, *reduced]
        else:
            assert after == [looked_at * D, *before[:2], before[2] + hot * D, *before[3:]]
    with library_collectives.overlap(Overlap(hot_tokens=4)):
        group = library_collectives.TensorParallelGroup(None, 1, 3)
        assert library_collectives.shares_hot_rows(12, group)
        assert not library_collectives.shares_hot_rows(11, group)
        assert library_collectives.share_of(11, group) == (3, 7)


@pytest.mark.parametrize("mode", ["exact", "filtered"])
def test_other_modes_reduce_at_once(pool: Pool, mode: str) -> None:
    results = pool.run(2, _overlapped, PLAIN, {"backward": mode}, IN_PIECES)
    assert len([seen for seen in results[0].collectives if seen.shape == (N, D)]) == 1


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_pieces_hold_every_token_once(size: int, sequence_parallel: bool) -> None:
    group = library_collectives.TensorParallelGroup(None, 0, size)
    pieces = library_collectives.input_grad_pieces((8192, 2304), torch.bfloat16, group, sequence_parallel)
    assert len(pieces) == Overlap().pieces
    tokens = [n for piece in pieces for start, stop in piece.ranges() for n in range(start, stop)]
    assert sorted(tokens) == list(range(8192))
    if sequence_parallel:  # each rank's rows of a piece, in rank order
        first = [n // (8192 // size) for start, stop in pieces[0].ranges() for n in range(start, stop)]
        assert first == [rank for rank in range(size) for _ in range(pieces[0].length)]


@pytest.mark.parametrize(("tokens", "size"), [(0, 2), (1, 2), (512, 2), (8192, 1)])
def test_little_goes_at_once(tokens: int, size: int) -> None:
    group = library_collectives.TensorParallelGroup(None, 0, size)
    assert library_collectives.input_grad_pieces((tokens, 2304), torch.bfloat16, group, False) == ()


@pytest.mark.parametrize("options", [Options(), Options(label_smoothing=0.1)], ids=["plain", "smoothing"])
@pytest.mark.parametrize("mode", ["exact", SAMPLED], ids=["exact", "sampled"])
@pytest.mark.parametrize("tp", [2, 4])
def test_own_tokens_first(pool: Pool, options: Options, mode: Any, tp: int) -> None:
    """Under sequence parallelism work begins before the others' tokens are here: the same bits."""
    spec = replace(PLAIN, shape=(12,), ignored=0.2, options=options, lse_grad=True, bias=True)
    keywords = {"sequence_parallel": True, "backward": mode}
    whole = pool.run(tp, _overlapped, spec, keywords, Overlap(anchor_tokens=None))
    split = pool.run(tp, _overlapped, spec, keywords, Overlap(anchor_tokens=1, forward_tokens=1))
    for one, other in zip(whole, split, strict=True):
        sent, sent_in_turn = ([s for s in each.collectives if s.dtype != torch.uint8] for each in (one, other))
        assert sent == sent_in_turn
        for name in ("loss", "lse", "grad_input", "grad_weight"):
            assert torch.equal(getattr(one, name), getattr(other, name)), name
        assert all(torch.equal(one.stats[name], other.stats[name]) for name in ("correct", "entropy", "keep_rate"))


@pytest.mark.parametrize("options", [Options(), Options(label_smoothing=0.1, softcap=2.0)])
def test_a_group_of_one_communicates_nothing(pool: Pool, options: Options) -> None:
    first, second = record(pool, 1, replace(PLAIN, options=options), return_stats=True, validate=True)
    assert first == second == []


def _without_group(rank: Rank) -> list[Collective]:
    return run_spec(None, PLAIN, return_stats=True, validate=True).collectives


def test_no_group_communicates_nothing(pool: Pool) -> None:
    """Not even where a default group exists."""
    assert pool.run(4, _without_group) == [[]] * 4
