"""Do the ranks of a group mean the same call?

A tensor-parallel call is right only if every rank passes its own shard of one classifier and the same tokens. Ranks
that differ would wait for each other for ever, or sum what doesn't belong together. So the first call of a kind
exchanges one small record a rank (and waits for it); every rank then raises the same error, or none does and later
calls of that kind exchange nothing. With ``validate=True`` every call exchanges, and compares tokens one by one.

A failed check of a rank's own arguments travels in the record too, if the group has never agreed before or validate is
on: the other ranks then raise as well instead of waiting.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import TensorParallelGroup, all_gather
from .options import validate_by_environment
from .shard import VocabShard, check_cover

_RECORD_BYTES = 2048
_TARGET = "the checksum of target"
_HINTS = {
    _TARGET: ": a tensor-parallel group shares its tokens (if FSDP sharded linear_weight over data-parallel ranks, "
    "call the loss inside the forward of the module that owns it)"
}
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[object]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class CallRecord:
    """What one rank says of its call.

    Attributes:
        common: names and values that must be equal on every rank.
        shard: the rank's rows.
        target: the tokens' labels, to be the same on every rank; None where ``compare_tokens`` will look at each.
        class_weight: to be the same on every rank; None without.
        weight: the rank's classifier rows, which must *not* be the same on every rank; None to leave that unchecked.
    """

    common: dict[str, Any]
    shard: VocabShard
    target: Tensor | None
    class_weight: Tensor | None
    weight: Tensor | None

    def encode(self) -> dict[str, Any]:
        bounds = (self.shard.start, self.shard.stop, self.shard.vocab_size, self.shard.end_of_rows)
        return {
            "common": {
                **self.common,
                **({} if self.target is None else {_TARGET: _checksum(self.target)}),
                "the checksum of weight (class weights)": _bits_checksum(self.class_weight),
            },
            "shard": bounds,
            "weight": None if self.weight is None else _sample_checksum(self.weight),
        }


def others_await(group: TensorParallelGroup, validate: object) -> bool:
    """Whether the other ranks are about to exchange records, so that this one must report its failure there."""
    if group.is_single:
        return False
    return validate is True or (validate is None and _environment_validates()) or not _agreed.get(group.require())


def _environment_validates() -> bool:
    try:
        return validate_by_environment()
    except ValueError:  # this very variable may be what is being reported
        return False


def report_failure(group: TensorParallelGroup, error: Exception) -> None:
    """Tell the other ranks, which are about to ``ensure`` agreement, that this one fails. One small all-gather."""
    _exchange(group, {"error": f"{type(error).__name__}: {error}"})


def ensure(group: TensorParallelGroup, key: object, record: Callable[[], CallRecord], *, validate: bool) -> None:
    """Compare the ranks' records unless this kind of call has been agreed on before.

    One small all-gather, and a wait for its answer, at the first call with ``key`` and under ``validate``; else
    nothing.

    Raises:
        ValueError: on every rank, naming the first quantity that differs and the ranks, or the rank that failed.
    """
    if group.is_single:
        return
    known = _agreed.setdefault(group.require(), set())
    if validate or key not in known:
        _compare(_exchange(group, record().encode()))
        known.add(key)


def _compare(records: list[dict[str, Any]]) -> None:
    for rank, other in enumerate(records):
        if "error" in other:
            raise ValueError(f"rank {rank} of the tensor-parallel group rejected its arguments: {other['error']}")
    for rank, other in enumerate(records):
        for name, value in records[0]["common"].items():
            if other["common"].get(name) != value:
                raise ValueError(
                    f"the ranks of the tensor-parallel group disagree about {name}: "
                    f"{value!r} on rank 0, {other['common'].get(name)!r} on rank {rank}{_HINTS.get(name, '')}"
                )
    check_cover([_decode_shard(other["shard"]) for other in records])
    checksums = [other["weight"] for other in records]
    if None not in checksums and len(set(map(tuple, checksums))) == 1:
        raise ValueError(
            "every rank of the tensor-parallel group holds the same classifier rows: a replicated weight was passed as "
            "if it were sharded. Pass each rank its own rows, or group=None for a replicated classifier (if the shards "
            "are meant to be equal, say so with shard=VocabShard(...))"
        )


def compare_tokens(group: TensorParallelGroup, target: Tensor, rows: Tensor | None) -> None:
    """Compare labels, and hidden states unless they are sharded, token by token. One all-gather of ``[2, N]`` int64.

    Args:
        target: ``[N]``.
        rows: ``[N, D]``, or None under sequence parallelism.

    Raises:
        ValueError: on every rank, naming the first token that differs.
    """
    hashes = torch.zeros_like(target) if rows is None else _row_hash(rows)
    gathered = all_gather(torch.stack([target, hashes]), group, "comparing the tokens")
    for index, name in enumerate(("target", "input")):
        differs = (gathered[:, index] != gathered[0, index]).any(dim=0)
        if bool(differs.any()):
            token = int(differs.to(torch.int8).argmax())
            values = f": {gathered[:, index, token].tolist()} in rank order" if name == "target" else ""
            raise ValueError(
                f"the ranks of the tensor-parallel group were given different tokens: {name} differs first at "
                f"token {token}{values}"
            )


def _exchange(group: TensorParallelGroup, record: dict[str, Any]) -> list[dict[str, Any]]:
    if "error" in record:
        record = {"error": record["error"][: _RECORD_BYTES // 2]}
    text = json.dumps(record).encode()
    if len(text) > _RECORD_BYTES:
        text = json.dumps({"error": f"internal: a record of {len(text)} bytes exceeds {_RECORD_BYTES}"}).encode()
    local = torch.tensor(list(text.ljust(_RECORD_BYTES)), dtype=torch.uint8, device=group.exchange_device())
    answers = [bytes(row) for row in all_gather(local, group, "comparing the ranks' arguments").cpu().tolist()]
    try:
        return [json.loads(answer.decode()) for answer in answers]
    except ValueError as error:
        raise ValueError(
            "the ranks of the tensor-parallel group are not making the same call: what arrived is no record of one. "
            "Set CCE_TP_VALIDATE=1 on every rank to see where they part"
        ) from error


def _decode_shard(bounds: list[int]) -> VocabShard:
    start, stop, vocab_size, padded_stop = bounds
    return VocabShard(start=start, stop=stop, vocab_size=vocab_size, padded_stop=padded_stop)


def _checksum(values: Tensor) -> int:
    """Depends on every value and its place; integer arithmetic, so the same on every device."""
    flat = values.reshape(-1).long()
    places = torch.arange(1, flat.numel() + 1, device=flat.device) * 2654435761 + 1
    return int(((flat + 7919) * places).sum())


def _bits_checksum(values: Tensor | None) -> int | None:
    return None if values is None else _checksum(values.detach().float().contiguous().view(torch.int32))


def _sample_checksum(weight: Tensor) -> tuple[int, int] | None:
    """Size and a checksum of some rows; None where equal rows prove nothing (too few, or all alike)."""
    step = max(1, weight.shape[0] // 64)
    sample = weight[::step, :256].detach().float()
    if sample.shape[0] < 2 or bool((sample == sample[:1]).all()) or not bool(sample.isfinite().all()):
        return None
    return weight.shape[0], _checksum(sample.contiguous().view(torch.int32))


def _row_hash(rows: Tensor) -> Tensor:
    bits = rows.detach().float().contiguous().view(torch.int32).long()
    places = torch.arange(1, rows.shape[1] + 1, device=rows.device) * 2654435761 + 1
    return ((bits + 7919) * places).sum(dim=1)
