"""All communication of the library.

Collectives of one call over a group of more than one rank; every shape follows from shapes and options alone
(N tokens, D hidden size, T ranks, k = 4 fp32 numbers a token, +2 with label smoothing, +2 with statistics):

========================= ======================================================= =================================
when                      collective                                              tensor
========================= ======================================================= =================================
first use of a key        1 all-gather                                            [2048] bytes a rank
``validate=True``         1 all-gather (the same), then 1 all-gather              [2048] bytes, [2, N] int64 a rank
forward, sequence par.    1 all-gather                                            [N/T, D] a rank
forward, sampled          1 all-reduce SUM                                        [5, N] fp64
... hot rows shared out   and 1 all-reduce SUM                                    [H + S, D]
forward, T <= 8           1 all-gather                                            [k, N] fp32 a rank
forward, T > 8, exact     all-reduce MAX, all-reduce SUM                          [N], [3 or more, N] fp32
... with statistics       and 1 all-reduce MIN                                    [N] int64
backward                  1 all-reduce SUM                                        [N, D] in ``comm_dtype``
... hot rows shared out   the same                                                [H + N, D]
backward, sequence par.   1 all-gather, 1 reduce-scatter (on gloo an all-reduce)  [N/T, D], [N, D]
... hot rows shared out   and 1 all-reduce SUM                                    [H, D] in ``comm_dtype``
========================= ======================================================= =================================

Hot rows (H of them, and S that are only looked at) are shared out by tokens in the sampled mode from 1,024 tokens a
rank on, without a bias, a workspace or fp16: see ``shares_hot_rows``. In the modes with more than one small collective
even more than 8 ranks gather, so that the forward pass has three at most.

The sampled backward may reduce in pieces, one behind the other: together they have the shape that the table says, and
they count as the one large collective that they make up (see ``Overlap``). Gathers and reductions of ``D`` numbers a
token are asynchronous: a gather begins before whatever doesn't need it, the reduction runs behind the rest of the
backward pass.

If a rank raises or dies within a call, the others wait until the process group's timeout, or until its connection
breaks. Their error then says what the collective was for. NCCL waits on the device: there the process group's watchdog
ends the process with a message of its own, unless ``TORCH_NCCL_BLOCKING_WAIT=1`` makes this thread wait.

A group of one rank, or ``group=None``, communicates nothing. gloo sums bf16 and fp16 in fp32. The backward reductions
happen only if the input requires a gradient. A key is (group, V, D, dtype, options, whether the input requires a
gradient, whether there is a bias): nothing in it may differ between ranks.

Both ways of combining do the same arithmetic. Gathered pieces are folded locally in rank order, so every rank gets the
same bits by construction; the reductions rely on the backend delivering the same bits everywhere, as NCCL and gloo do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from .kernels.fold import Packing, join, relative_to
from .kernels.interface import Partials, TokenPiece
from .options import LOW_PRECISION
from .shard import VocabShard

GATHER_UP_TO = 8
"""Largest group whose partials are gathered and folded locally; beyond it they are reduced by a MAX and a SUM."""
COMBINING = "combining the log-sum-exp"
REDUCING = "reducing the input's gradient"
REDUCING_HOT = "reducing the hot rows' gradient"
"""What the collectives are for, in errors."""


@dataclass(frozen=True)
class TensorParallelGroup:
    """A process group and this rank's place in it; ``handle`` is None for a single shard."""

    handle: dist.ProcessGroup | None
    rank: int
    size: int

    @property
    def is_single(self) -> bool:
        return self.size == 1

    def require(self) -> dist.ProcessGroup:
        """The process group of a group that isn't single."""
        if self.handle is None:
            raise RuntimeError("a single shard has no process group")
        return self.handle

    def backend(self, device: torch.device) -> str:
        """Name of the backend that serves tensors of a device."""
        names = str(dist.get_backend(self.require()))
        if ":" not in names:
            return names
        return dict(item.split(":") for item in names.split(","))[device.type]

    def sums_in_fp32(self, device: torch.device) -> bool:
        """gloo has no dependable bf16 and fp16 sums."""
        return self.backend(device) == "gloo"

    def exchange_device(self) -> torch.device:
        """Where small records for the host travel."""
        names = str(dist.get_backend(self.require()))
        return torch.device("cpu") if "gloo" in names else torch.device("cuda", torch.cuda.current_device())


SINGLE = TensorParallelGroup(None, 0, 1)

# Renamed in torch 2.13; the old names warn there.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Pending:
    """A collective on its way."""

    work: dist.Work | None
    what: str
    group: TensorParallelGroup

    def wait(self) -> None:
        """Let what follows see the result: the current stream waits, and on gloo this thread."""
        if self.work is not None:
            with _naming(self.what, self.group):
                self.work.wait()


@contextmanager
def _naming(what: str, group: TensorParallelGroup) -> Iterator[None]:
    """An error of the process group says which part of the loss was waiting for the other ranks."""
    try:
        yield
    except RuntimeError as error:  # those of torch.distributed are, too
        place = f"on rank {group.rank} of {group.size}"
        message = f"linear_cross_entropy: {what} over the tensor-parallel group failed {place}: {error}"
        kind = type(error) if isinstance(error, dist.DistError) else RuntimeError
        raise kind(message) from error


class Transport:
    """How tensors travel. Each method is one collective and says what it is for.

    With ``later`` the collective may still be under way when the method returns: its tensors are not to be touched
    before :meth:`Pending.wait`, nor freed, and that is called on the stream that the collective was issued on.
    """

    def all_gather(
        self, out: Tensor, local: Tensor, group: TensorParallelGroup, what: str, later: bool = False
    ) -> Pending:
        """``out`` becomes the ranks' ``local``, one behind the other."""
        with _naming(what, group):
            return Pending(_all_gather(out, local, group=group.handle, async_op=later), what, group)

    def all_reduce(
        self,
        values: Tensor,
        group: TensorParallelGroup,
        what: str,
        op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
        later: bool = False,
    ) -> Pending:
        """In place."""
        with _naming(what, group):
            return Pending(dist.all_reduce(values, op=op, group=group.handle, async_op=later), what, group)

    def reduce_scatter(
        self, out: Tensor, values: Tensor, group: TensorParallelGroup, what: str, later: bool = False
    ) -> Pending:
        """``out`` becomes this rank's part of the sum of ``values``."""
        with _naming(what, group):
            return Pending(_reduce_scatter(out, values, group=group.handle, async_op=later), what, group)


_transport = Transport()


@contextmanager
def using(transport: Transport) -> Iterator[None]:
    """All collectives of the library go through ``transport``, in every thread: to count them, or to do without."""
    global _transport
    usual, _transport = _transport, transport
    try:
        yield
    finally:
        _transport = usual


def resolve_group(group: dist.ProcessGroup | None) -> TensorParallelGroup:
    """The group of a call. None is a single shard, never the default group.

    Raises:
        TypeError: ``group`` is no process group.
        ValueError: this process isn't one of its members.
    """
    if group is None:
        return SINGLE
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: this process is not a member of the tensor-parallel group it passed")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group={group!r} must be a torch.distributed.ProcessGroup or None, not {type(group).__name__}")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: this process is not a member of the tensor-parallel group it passed")
    return TensorParallelGroup(group, rank, dist.get_world_size(group))


def all_gather(local: Tensor, group: TensorParallelGroup, what: str) -> Tensor:
    """``[T, *local.shape]``, in rank order. One collective; ``what`` it is for, should it fail."""
    gathered = torch.empty(group.size * local.numel(), dtype=local.dtype, device=local.device)
    _transport.all_gather(gathered, local.reshape(-1), group, what)
    return gathered.view(group.size, *local.shape)


def gather_sequence(local: Tensor, group: TensorParallelGroup) -> Tensor:
    """``[N/T, D]`` token shards to ``[N, D]``, in rank order. One collective."""
    return Gathering(local, group).tokens()


class Gathering:
    """``[N/T, D]`` token shards of all ranks, or other rows, on their way here: one collective, begun at once; none for
    one rank.

    Attributes:
        local: this rank's tokens, contiguous; held until the others' are here, since a stream of its own reads them.
        buffer: where all tokens will be, ``[N, D]``, in rank order; not to be read before ``tokens`` was called.
    """

    def __init__(self, local: Tensor, group: TensorParallelGroup, what: str = "gathering the input") -> None:
        self.local = self.buffer = local
        self._pending: Pending | None = None
        if not group.is_single:
            self.local = local.contiguous()
            self.buffer = local.new_empty(group.size * local.shape[0], *local.shape[1:])
            self._pending = _transport.all_gather(self.buffer.view(-1), self.local.view(-1), group, what, later=True)

    @property
    def under_way(self) -> bool:
        """Whether there is anything to do in the meantime."""
        return self._pending is not None

    def tokens(self) -> Tensor:
        """``buffer``, as soon as they are here."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        return self.buffer


def sum_small(local: Tensor, group: TensorParallelGroup, what: str) -> Tensor:
    """Sum of a few numbers a token over the group, in place. One collective."""
    if not group.is_single:
        _transport.all_reduce(local, group, what)
    return local


def begin_sum(local: Tensor, group: TensorParallelGroup, what: str) -> Pending:
    """``sum_small`` that may still be under way."""
    return _transport.all_reduce(local, group, what, later=True)


class Combination:
    """Partials of the whole vocabulary from those of each rank, begun at once; ``argmax`` must count global ids.

    One number a token says which rows a rank read. If the ranks' rows don't chain from 0 to V, which the first call of
    a kind refuses but a later one could bring, the maximum and with it everything becomes NaN, without a
    synchronisation.

    Args:
        smoothing_mass: this rank's ``sum_v c_v``, fp32 ``[]``; None without label smoothing.
        join: folds what was gathered, as ``kernels.fold.join``.
        gather: also from many ranks, since there are other small collectives beside this one.
    """

    def __init__(
        self,
        partials: Partials,
        smoothing_mass: Tensor | None,
        shard: VocabShard,
        group: TensorParallelGroup,
        join: Callable[[Tensor, Packing], Partials] = join,
        gather: bool = False,
    ) -> None:
        self._result = partials
        self._gathering: Gathering | None = None
        if group.is_single:
            return
        self._join, self._size = join, group.size
        self._packing = Packing(
            smoothing=partials.smoothing is not None,
            stats=partials.entropy is not None,
            whole=_mark(shard.vocab_size) - _mark(0),
        )
        link = _mark(shard.stop) - _mark(shard.start)
        if gather or group.size <= GATHER_UP_TO:
            self._gathering = Gathering(self._packing.pack(partials, link, smoothing_mass), group, COMBINING)
        else:
            self._result = _combine_by_reduction(partials, smoothing_mass, link, self._packing.whole, group)

    def result(self) -> Partials:
        """As soon as they are here."""
        if self._gathering is not None:
            gathered = self._gathering.tokens()
            self._result = self._join(gathered.unflatten(0, (self._size, len(gathered) // self._size)), self._packing)
            self._gathering = None
        return self._result


def _mark(bound: int) -> int:
    """16 bits of a bound. Differences of marks add up exactly in fp32, and telescope only if the bounds chain."""
    return (bound * 0x9E3779B1 & 0xFFFFFFFF) >> 16


def _combine_by_reduction(
    partials: Partials, smoothing_mass: Tensor | None, link: int, whole: int, group: TensorParallelGroup
) -> Partials:
    top = partials.max.clone()
    _transport.all_reduce(top, group, COMBINING, dist.ReduceOp.MAX)
    moved = relative_to(partials, top, smoothing_mass)
    # gloo's MAX may lose a NaN on some ranks; then sum_exp is NaN, and this sum brings it to all of them.
    optional = [field for field in (moved.smoothing, moved.entropy) if field is not None]
    packed = torch.stack([torch.full_like(top, link), moved.sum_exp, moved.target_logit, *optional])
    _transport.all_reduce(packed, group, COMBINING)
    sums = iter(packed.unbind())
    covered = next(sums) == whole
    combined = Partials(torch.where(covered, top, float("nan")), next(sums), next(sums))
    if moved.smoothing is not None:
        combined = replace(combined, smoothing=next(sums))
    if moved.entropy is not None and partials.argmax is not None:
        combined = replace(
            combined, entropy=next(sums), argmax=_reduce_argmax(partials.max, partials.argmax, top, group)
        )
    return combined


def _reduce_argmax(local_max: Tensor, argmax: Tensor, top: Tensor, group: TensorParallelGroup) -> Tensor:
    never = torch.iinfo(torch.int64).max
    lowest = torch.where((local_max == top) & (argmax >= 0), argmax, never)
    _transport.all_reduce(lowest, group, COMBINING, dist.ReduceOp.MIN)
    return torch.where(lowest == never, -1, lowest)


def reduction_dtype(input: Tensor, comm_dtype: torch.dtype | None, group: TensorParallelGroup) -> torch.dtype:
    """The dtype in which the ranks' parts of the input's gradient are summed."""
    if group.is_single:
        return input.dtype
    wanted = input.dtype if comm_dtype is None else comm_dtype
    return torch.float32 if wanted in LOW_PRECISION and group.sums_in_fp32(input.device) else wanted


@dataclass(frozen=True)
class Overlap:
    """What goes on behind what; the choice depends on shapes and options alone. To measure alternatives: ``overlap``.

    Attributes:
        pieces: in how many the sampled backward reduces the input's gradient, each as soon as it is done.
        least_bytes: of a piece; what is smaller goes as a whole.
        anchor_tokens: from so many tokens a rank on, the anchors of the rank's own tokens are computed while the
            others' are gathered; None for never.
        forward_tokens: the same of the exact mode's forward pass. Off: its programs share out the whole device in
            advance, so that those whose place the gather takes hold up all the others for as long as it lasts.
        hot_tokens: from so many tokens a rank on, the ranks share out by tokens what the sampled mode does with the hot
            rows, most of which one rank may hold; None for never.
    """

    pieces: int = 2
    least_bytes: int = 4 * 2**20
    anchor_tokens: int | None = 1024
    forward_tokens: int | None = None
    hot_tokens: int | None = 1024


_overlap = Overlap()


@contextmanager
def overlap(choice: Overlap) -> Iterator[None]:
    """Use another one within, in every thread; the same on every rank."""
    global _overlap
    usual, _overlap = _overlap, choice
    try:
        yield
    finally:
        _overlap = usual


def own_tokens_first(gathering: Gathering, *, anchor: bool) -> bool:
    """Whether the anchor, or else the exact forward pass, begins before the others' tokens are here."""
    least = _overlap.anchor_tokens if anchor else _overlap.forward_tokens
    return gathering.under_way and least is not None and len(gathering.local) >= least


def shares_hot_rows(num_tokens: int, group: TensorParallelGroup) -> bool:
    """Whether the ranks share out by tokens what is done with the hot rows."""
    least = _overlap.hot_tokens
    return not group.is_single and least is not None and num_tokens >= least * group.size


def share_of(num_tokens: int, group: TensorParallelGroup) -> tuple[int, int]:
    """This rank's share of the tokens: the first, and the one behind the last."""
    return num_tokens * group.rank // group.size, num_tokens * (group.rank + 1) // group.size


def input_grad_pieces(
    shape: Sequence[int], dtype: torch.dtype, group: TensorParallelGroup, sequence_parallel: bool
) -> tuple[TokenPiece, ...]:
    """The pieces in which a gradient of ``shape`` ``[N, D]`` is reduced; empty for one.

    Under sequence parallelism, a piece holds as many tokens of each rank's shard: one run for each rank.
    """
    tokens, hidden = shape
    number = min(_overlap.pieces, tokens * hidden * dtype.itemsize // max(1, _overlap.least_bytes))
    runs = group.size if sequence_parallel else 1
    length = tokens // runs
    number = min(number, length)
    if group.is_single or number < 2:
        return ()
    bounds = [length * place // number for place in range(number + 1)]
    return tuple(TokenPiece(a, b - a, runs, length) for a, b in itertools.pairwise(bounds))


class InputGradReduction:
    """Sums the ranks' parts of the input gradient asynchronously: ``start``, do other work, then take ``result``.

    The pieces of one gradient count as one collective: together they move what it would. So do the gradients of the hot
    rows that the ranks share, ``ahead`` of them: in front of the first piece, and none of the input's gradient. A
    reduce-scatter can't bring them to whichever rank holds those rows, so under sequence parallelism they are summed by
    a collective of their own, ``start_hot``.
    """

    def __init__(
        self,
        group: TensorParallelGroup,
        sequence_parallel: bool,
        dtype: torch.dtype,
        pieces: tuple[TokenPiece, ...] = (),
        ahead: int = 0,
    ) -> None:
        self._group = group
        self._scatter = sequence_parallel and not group.is_single
        self._ahead = 0 if self._scatter else ahead
        self._dtype = dtype
        self._tokens = sum(piece.size for piece in pieces)
        self._pending: list[Pending] = []
        self._parts: list[Tensor] = []  # held until their collective was waited for
        self._sums: list[Tensor] = []
        self._scattered: Tensor | None = None
        self._hot: tuple[Tensor, Pending] | None = None

    @property
    def hot_apart(self) -> bool:
        """Whether the hot rows' gradients are none of the first piece's."""
        return self._scatter

    def start_hot(self, part: Tensor) -> None:
        """Begin the all-reduce of the hot rows' gradients alone, ``[H, D]``. Overwrites ``part``."""
        self._hot = part, _transport.all_reduce(part, self._group, REDUCING_HOT, later=True)

    def start(self, part: Tensor) -> None:
        """Begin the all-reduce of ``part``, or its reduce-scatter along the tokens. Overwrites ``part``.

        ``[N, D]``, or piece by piece in the order of :func:`input_grad_pieces`.
        """
        self._parts.append(part)
        total = part
        if self._scatter and self._group.backend(part.device) != "gloo":
            total = self._next_rows(part)
            self._pending.append(_transport.reduce_scatter(total, part, self._group, REDUCING, later=True))
        elif not self._group.is_single:
            self._pending.append(_transport.all_reduce(part, self._group, REDUCING, later=True))
        self._sums.append(total)

    def _next_rows(self, part: Tensor) -> Tensor:
        """Where this rank's rows of the sum go, below those of the pieces before."""
        if self._scattered is None:
            tokens = max(self._tokens, part.shape[0])
            self._scattered = part.new_empty(tokens // self._group.size, *part.shape[1:])
        first = sum(len(total) for total in self._sums)
        return self._scattered[first : first + part.shape[0] // self._group.size]

    def hot(self) -> Tensor:
        """The sum of the hot rows' gradients, and perhaps of what came with them."""
        if self._hot is not None:
            total, pending = self._hot
        else:
            total, pending = self._sums[0], self._pending[0]
        pending.wait()
        return total

    def result(self) -> Tensor | None:
        """The sum: ``[N, D]``, or this rank's ``[N/T, D]``; None if ``start`` was never called."""
        for pending in self._pending:
            pending.wait()
        if self._hot is not None:
            self._hot[1].wait()
        if not self._sums:
            return None
        sums = self._sums
        if self._scatter and self._scattered is None:
            sums = [self._own_rows(total) for total in sums]
        return _joined(sums)[self._ahead :].to(self._dtype)

    def _own_rows(self, total: Tensor) -> Tensor:
        length = total.shape[0] // self._group.size
        return total[self._group.rank * length : (self._group.rank + 1) * length]


def _joined(parts: list[Tensor]) -> Tensor:
    """Rows one below the other; without a copy where that is how they lie in memory already."""
    first = parts[0]
    if len(parts) == 1:
        return first
    offset = first.storage_offset()
    for part in parts:
        here = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and part.is_contiguous()
        if not here or part.storage_offset() != offset:
            return torch.cat(parts)
        offset += part.numel()
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())
