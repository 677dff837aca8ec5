"""Who owns which rows of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class VocabShard:
    """The rows of the classifier that one rank of a tensor-parallel group holds.

    The rank's weight has ``padded_stop - start`` rows. The first ``stop - start`` are the vocabulary ids
    ``start .. stop - 1``; the rest is padding, which belongs to no id. Over the group, the ranges ``[start, stop)``
    must cover ``[0, vocab_size)`` once; the library checks that when the group is first used.

    Attributes:
        start: first vocabulary id of the shard.
        stop: one past the last.
        vocab_size: V, ids of the whole vocabulary, padding excluded.
        padded_stop: one past the last row held, counted from ``start``; default ``stop`` (no padding).

    Raises:
        TypeError: a bound is not an int.
        ValueError: the bounds are out of order.
    """

    start: int
    stop: int
    vocab_size: int
    padded_stop: int | None = None

    def __post_init__(self) -> None:
        if self.padded_stop is None:
            object.__setattr__(self, "padded_stop", self.stop)
        for name in ("start", "stop", "vocab_size", "padded_stop"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"VocabShard: {name}={value!r} must be an int")
        if self.vocab_size < 1:
            raise ValueError(f"VocabShard: vocab_size={self.vocab_size} must be at least 1")
        if not 0 <= self.start <= self.stop:
            raise ValueError(f"VocabShard: start={self.start}, stop={self.stop} must satisfy 0 <= start <= stop")
        if self.stop > self.vocab_size and self.stop > self.start:
            raise ValueError(
                f"VocabShard: stop={self.stop} is beyond vocab_size={self.vocab_size}; rows that pad the vocabulary "
                f"are counted by padded_stop"
            )
        if self.end_of_rows < self.stop:
            raise ValueError(f"VocabShard: padded_stop={self.padded_stop} must be at least stop={self.stop}")

    @property
    def end_of_rows(self) -> int:
        """``padded_stop``, as an int."""
        return self.stop if self.padded_stop is None else self.padded_stop

    @property
    def num_real(self) -> int:
        """Rows that stand for a vocabulary id."""
        return self.stop - self.start

    @property
    def num_rows(self) -> int:
        """Rows that the rank's weight has, padding included."""
        return self.end_of_rows - self.start

    @classmethod
    def equal(cls, vocab_size: int, rank: int, world_size: int) -> VocabShard:
        """Contiguous equal shards in rank order.

        Raises:
            ValueError: ``vocab_size`` is not divisible by ``world_size``, or ``rank`` is outside it.
        """
        _check_rank(rank, world_size)
        if vocab_size % world_size != 0:
            raise ValueError(
                f"vocab_size={vocab_size} is not divisible by world_size={world_size}; "
                f"use VocabShard.chunk, VocabShard.megatron or VocabShard.from_sizes"
            )
        size = vocab_size // world_size
        return cls(start=rank * size, stop=(rank + 1) * size, vocab_size=vocab_size)

    @classmethod
    def megatron(cls, vocab_size: int, padded_vocab_size: int, rank: int, world_size: int) -> VocabShard:
        """Equal shards of a vocabulary padded to ``padded_vocab_size``, as Megatron makes them.

        The last ranks hold the padding; a rank may hold nothing else.

        Raises:
            ValueError: ``padded_vocab_size`` is less than ``vocab_size`` or not divisible by ``world_size``.
        """
        _check_rank(rank, world_size)
        if padded_vocab_size < vocab_size or padded_vocab_size % world_size != 0:
            raise ValueError(
                f"padded_vocab_size={padded_vocab_size} must be at least vocab_size={vocab_size} and divisible by "
                f"world_size={world_size}"
            )
        size = padded_vocab_size // world_size
        start = min(rank * size, vocab_size)
        stop = min((rank + 1) * size, vocab_size)
        return cls(start=start, stop=stop, vocab_size=vocab_size, padded_stop=start + size)

    @classmethod
    def chunk(cls, vocab_size: int, rank: int, world_size: int) -> VocabShard:
        """The split of ``torch.chunk`` and of a DTensor with ``Shard(0)``: the last shards are short or empty."""
        _check_rank(rank, world_size)
        size = -(-vocab_size // world_size)
        start = min(rank * size, vocab_size)
        return cls(start=start, stop=min(start + size, vocab_size), vocab_size=vocab_size)

    @classmethod
    def from_sizes(cls, sizes: Sequence[int], rank: int) -> VocabShard:
        """Shards of the given sizes in rank order; sizes may be 0.

        Raises:
            ValueError: a size is negative, or ``rank`` is outside ``sizes``.
        """
        _check_rank(rank, len(sizes))
        if any(size < 0 for size in sizes):
            raise ValueError(f"sizes={list(sizes)} must not be negative")
        start = sum(sizes[:rank])
        return cls(start=start, stop=start + sizes[rank], vocab_size=sum(sizes))


def _check_rank(rank: int, world_size: int) -> None:
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} must lie in [0, world_size={world_size})")


def check_cover(shards: Sequence[VocabShard]) -> None:
    """Check that the shards of a group hold every vocabulary id exactly once.

    Raises:
        ValueError: they disagree about the size, overlap, or leave a gap; the message names the ranks.
    """
    sizes = [shard.vocab_size for shard in shards]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"the ranks of the group disagree about vocab_size: {sizes} in group-rank order (if the shards are uneven "
            f"or padded, pass shard=VocabShard(...) on every rank)"
        )
    expected, previous = 0, None
    for rank, shard in sorted(enumerate(shards), key=lambda item: (item[1].start, item[1].stop)):
        if shard.num_real == 0:
            continue
        if shard.start != expected:
            fault = "overlaps with" if shard.start < expected else "leaves a gap after"
            before = "the beginning of the vocabulary" if previous is None else f"rank {previous}"
            raise ValueError(
                f"vocabulary shards don't cover [0, {shard.vocab_size}) once: rank {rank} holds "
                f"[{shard.start}, {shard.stop}), which {fault} {before} (expected to start at {expected})"
            )
        expected, previous = shard.stop, rank
    if expected != sizes[0]:
        raise ValueError(f"vocabulary shards end at {expected}, but vocab_size={sizes[0]}")
