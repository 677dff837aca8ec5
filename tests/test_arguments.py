"""Bad arguments: one clear error that names the argument, what it was and what was expected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed import Pool, Rank
from oracle import fixture0

import cce_tp


def call(**changes: Any) -> torch.Tensor:
    problem = fixture0()
    arguments: dict[str, Any] = {"input": problem.input, "linear_weight": problem.weight, "target": problem.target}
    return cce_tp.linear_cross_entropy(**(arguments | changes))


def test_the_call_itself_is_right() -> None:
    assert float(call()) == pytest.approx(7.05823367, abs=1e-5)
    assert float(call(ignore_index=None)) == pytest.approx(7.05823367, abs=1e-5)


WEIGHT = torch.zeros(32, 16)


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"input": torch.zeros(8, 15)}, ValueError, ["input", "(8, 15)", "16"]),
        ({"input": torch.zeros(7, 16)}, ValueError, ["target", "(8,)", "(7,)"]),
        ({"input": [[0.0] * 16] * 8}, TypeError, ["input", "list"]),
        ({"input": torch.zeros(8, 16, dtype=torch.int64)}, TypeError, ["input", "int64"]),
        ({"linear_weight": torch.zeros(512)}, ValueError, ["linear_weight", "(512,)", "flattened"]),
        ({"linear_weight": torch.zeros(0)}, ValueError, ["linear_weight", "(0,)", "ZeRO-3", "FSDP"]),
        ({"linear_weight": torch.zeros(2, 16, 16)}, ValueError, ["linear_weight", "(2, 16, 16)"]),
        ({"linear_weight": torch.zeros(0, 16)}, ValueError, ["linear_weight", "shard"]),
        ({"linear_weight": torch.zeros(32, 16, dtype=torch.bfloat16)}, TypeError, ["linear_weight", "bfloat16"]),
        ({"target": torch.zeros(8)}, TypeError, ["target", "float32"]),
        ({"target": torch.zeros(8, dtype=torch.bool)}, TypeError, ["target", "bool"]),
        ({"target": torch.zeros(8, 32)}, TypeError, ["target"]),
        ({"target": torch.zeros(4, 2, dtype=torch.int64)}, ValueError, ["target", "(4, 2)"]),
        ({"linear_bias": torch.zeros(31)}, ValueError, ["linear_bias", "(31,)", "(32,)"]),
        ({"linear_bias": torch.zeros(32, dtype=torch.int64)}, TypeError, ["linear_bias"]),
        ({"weight": torch.zeros(31)}, ValueError, ["weight", "(31,)", "(32,)"]),
        ({"weight": torch.ones(32, requires_grad=True)}, ValueError, ["weight", "requires"]),
        ({"reduction": "average"}, ValueError, ["reduction", "average", "mean"]),
        ({"ignore_index": 1.5}, TypeError, ["ignore_index", "1.5"]),
        ({"label_smoothing": 1.5}, ValueError, ["label_smoothing", "1.5"]),
        ({"label_smoothing": float("nan")}, ValueError, ["label_smoothing", "nan"]),
        ({"label_smoothing": "0.1"}, TypeError, ["label_smoothing"]),
        ({"logit_scale": float("inf")}, ValueError, ["logit_scale", "inf"]),
        ({"softcap": 0.0}, ValueError, ["softcap", "0.0"]),
        ({"softcap": -1.0}, ValueError, ["softcap", "-1.0"]),
        ({"z_loss": -1.0}, ValueError, ["z_loss", "-1.0"]),
        ({"group": 3}, TypeError, ["group", "3"]),
        ({"shard": (0, 32)}, TypeError, ["shard"]),
        ({"shard": cce_tp.VocabShard(start=0, stop=31, vocab_size=31)}, ValueError, ["linear_weight", "32", "31"]),
        ({"sequence_parallel": "yes"}, TypeError, ["sequence_parallel", "yes"]),
        ({"sequence_parallel": True, "sequence_dim": 1}, ValueError, ["sequence_dim", "1"]),
        ({"sequence_parallel": True, "sequence_dim": -1}, ValueError, ["sequence_dim", "-1"]),
        ({"backward": "fast"}, ValueError, ["backward", "fast", "exact"]),
        ({"backward": 3}, TypeError, ["backward", "3"]),
        ({"backward": "sampled", "label_smoothing": 0.1, "softcap": 5.0}, ValueError, ["sampled", "softcap"]),
        ({"main_grad": torch.zeros(32, 16)}, ValueError, ["main_grad", "linear_weight", "require"]),
        ({"main_grad": torch.zeros(31, 16), "linear_weight": "needs grad"}, ValueError, ["main_grad", "(31, 16)"]),
        ({"main_grad": torch.zeros(16, 32).T, "linear_weight": "needs grad"}, ValueError, ["main_grad", "stride"]),
        ({"main_grad": torch.zeros(32, 16).long(), "linear_weight": "needs grad"}, TypeError, ["main_grad"]),
        ({"comm_dtype": torch.int32}, ValueError, ["comm_dtype", "int32"]),
        ({"count_padding": 1}, TypeError, ["count_padding", "1"]),
        ({"workspace": 0}, ValueError, ["workspace", "0"]),
        ({"workspace": 1.5}, TypeError, ["workspace", "1.5"]),
        ({"workspace": 8}, ValueError, ["workspace", "8", "at least"]),
        ({"validate": "yes"}, TypeError, ["validate", "yes"]),
        ({"implementation": "cuda"}, ValueError, ["implementation", "cuda", "triton"]),
        ({"return_stats": None}, TypeError, ["return_stats", "None"]),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else "",
)
def test_bad_argument(changes: dict[str, Any], kind: type[Exception], words: list[str]) -> None:
    if isinstance(changes.get("linear_weight"), str):
        changes = {**changes, "linear_weight": torch.zeros(32, 16, requires_grad=True)}
    with pytest.raises(kind) as caught:
        call(**changes)
    for word in words:
        assert word in str(caught.value)


def test_a_partitioned_parameter_is_named() -> None:
    """ZeRO-3 leaves an empty placeholder with attributes of its own."""
    weight = torch.nn.Parameter(torch.zeros(0, 16))
    weight.ds_id = 1  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"ZeRO-3.*cce_tp\.deepspeed\.install.*GatheredParameters"):
        call(linear_weight=weight)
    with pytest.raises(ValueError, match=r"ZeRO-3.*cce_tp\.deepspeed\.install.*GatheredParameters"):
        call(linear_weight=torch.nn.Parameter(torch.zeros(0)))


def _partitioned_on(rank: Rank, ranks: list[int]) -> None:
    weight = torch.nn.Parameter(torch.zeros(0 if rank.index in ranks else 16, 16))
    if rank.index in ranks:
        weight.ds_id = 1  # type: ignore[attr-defined]
    cce_tp.linear_cross_entropy(torch.ones(8, 16), weight, torch.zeros(8, dtype=torch.int64), group=rank.group)


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_a_partitioned_parameter_is_named_on_every_rank(pool: Pool, ranks: list[int]) -> None:
    """Case B37 (a): also on the rank whose weight is there, which would wait."""
    for error in pool.errors(2, _partitioned_on, ranks, fresh=True):
        assert error.kind == "ValueError"
        assert "ZeRO-3" in error.message
        assert "GatheredParameters" in error.message


def test_devices_are_compared() -> None:
    with pytest.raises(ValueError, match="target is on meta"):
        call(target=torch.zeros(8, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("value", ["1", "true", "on"])
def test_validation_by_the_environment(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CCE_TP_VALIDATE", value)
    target = torch.full((8,), 40)
    with pytest.raises(ValueError, match="40"):
        call(target=target)
    assert call(target=target, validate=False).isnan()


def test_environment_that_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CCE_TP_VALIDATE", "maybe")
    with pytest.raises(ValueError, match="CCE_TP_VALIDATE"):
        call()


def test_position_of_a_bad_label_in_two_dimensions() -> None:
    problem = fixture0()
    target = problem.target.reshape(2, 4).clone()
    target[1, 2] = 99
    with pytest.raises(ValueError, match=r"99.*\(1, 2\).*32"):
        call(input=problem.input.reshape(2, 4, 16), target=target, validate=True)


def test_shard_constructors() -> None:
    shards = [cce_tp.VocabShard.equal(12, rank, 4) for rank in range(4)]
    assert [(s.start, s.stop) for s in shards] == [(0, 3), (3, 6), (6, 9), (9, 12)]
    shards = [cce_tp.VocabShard.chunk(5, rank, 4) for rank in range(4)]
    assert [(s.start, s.stop) for s in shards] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    shards = [cce_tp.VocabShard.megatron(9, 16, rank, 4) for rank in range(4)]
    assert [(s.start, s.stop, s.padded_stop) for s in shards] == [(0, 4, 4), (4, 8, 8), (8, 9, 12), (9, 9, 13)]
    shards = [cce_tp.VocabShard.from_sizes([3, 0, 1], rank) for rank in range(3)]
    assert [(s.start, s.stop, s.vocab_size) for s in shards] == [(0, 3, 4), (3, 3, 4), (3, 4, 4)]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("vocab", [1, 2, 5, 8, 9, 31])
def test_chunk_is_torch_chunk(vocab: int, world_size: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(vocab).chunk(world_size)]
    chunks += [0] * (world_size - len(chunks))
    shards = [cce_tp.VocabShard.chunk(vocab, rank, world_size) for rank in range(world_size)]
    assert [shard.stop - shard.start for shard in shards] == chunks


@pytest.mark.parametrize(
    "bounds",
    [
        {"start": -1, "stop": 3, "vocab_size": 4},
        {"start": 3, "stop": 2, "vocab_size": 4},
        {"start": 0, "stop": 5, "vocab_size": 4},
        {"start": 0, "stop": 4, "vocab_size": 4, "padded_stop": 3},
        {"start": 0, "stop": 0, "vocab_size": 0},
    ],
)
def test_impossible_shards(bounds: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="VocabShard"):
        cce_tp.VocabShard(**bounds)


def test_shard_bounds_are_ints() -> None:
    with pytest.raises(TypeError, match=r"1\.5"):
        cce_tp.VocabShard(start=0, stop=1.5, vocab_size=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="divisible"):
        cce_tp.VocabShard.equal(33, 0, 2)
    with pytest.raises(ValueError, match="rank"):
        cce_tp.VocabShard.equal(32, 2, 2)
