"""What ``cce-tp bench-tp`` times: one step of the loss over a group, ours and Megatron-core's, and its pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cce_tp
from cce_tp import collectives
from cce_tp.options import Backward

from . import bench_logits
from .bench_logits import Inputs, Shape
from .bench_peers import Unavailable
from .bench_tp_model import Message
from .measure import Place

# -- transports


class Recorder(collectives.Transport):
    """Sends at once, and remembers what came and how much travelled."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.results: list[Tensor | None] = []

    def _note(self, kind: str, what: str, whole: Tensor, result: Tensor) -> None:
        self.messages.append(Message(kind, what, whole.nbytes))
        # Nothing of ours reads the gradient: it may stay what this rank made of it.
        self.results.append(None if what == collectives.REDUCING else result.clone())

    def all_gather(self, out: Tensor, local: Tensor, group: Any, what: str, later: bool = False) -> Any:
        pending = super().all_gather(out, local, group, what)
        self._note("all-gather", what, out, out)
        return pending

    def all_reduce(
        self, values: Tensor, group: Any, what: str, op: Any = dist.ReduceOp.SUM, later: bool = False
    ) -> Any:
        pending = super().all_reduce(values, group, what, op)
        self._note("all-reduce", what, values, values)
        return pending

    def reduce_scatter(self, out: Tensor, values: Tensor, group: Any, what: str, later: bool = False) -> Any:
        pending = super().reduce_scatter(out, values, group, what)
        self._note("reduce-scatter", what, values, out)
        return pending


class Replay(collectives.Transport):
    """Sends nothing: brings what a ``Recorder`` remembers of the same step, again and again."""

    def __init__(self, recorder: Recorder) -> None:
        self._results, self._next = recorder.results, 0

    def _bring(self, out: Tensor, group: Any, what: str) -> Any:
        result = self._results[self._next]
        self._next = (self._next + 1) % len(self._results)
        if result is not None:
            out.copy_(result.view_as(out))
        return collectives.Pending(None, what, group)

    def all_gather(self, out: Tensor, local: Tensor, group: Any, what: str, later: bool = False) -> Any:
        return self._bring(out, group, what)

    def all_reduce(
        self, values: Tensor, group: Any, what: str, op: Any = dist.ReduceOp.SUM, later: bool = False
    ) -> Any:
        return self._bring(values, group, what)

    def reduce_scatter(self, out: Tensor, values: Tensor, group: Any, what: str, later: bool = False) -> Any:
        return self._bring(out, group, what)


# -- methods


@dataclass(frozen=True)
class Problem:
    """One shape on one rank.

    Attributes:
        whole: the whole vocabulary.
        shard: this rank's rows.
        tokens: all of them, ``[N, D]``, or this rank's ``[N/T, D]``, a leaf each.
        weight: this rank's rows of the classifier, a leaf.
    """

    whole: Inputs
    shard: cce_tp.VocabShard
    tokens: dict[bool, Tensor]
    weight: Tensor

    @classmethod
    def make(
        cls, kind: str, shape: Shape, dtype: torch.dtype, place: Place, model: Any, *, shuffled: bool = False
    ) -> Problem:
        whole = bench_logits.make(kind, shape, dtype, place.device.type, model)
        whole = whole.shuffled() if shuffled else whole
        for value in (whole.hidden.detach(), whole.weight.detach(), whole.target):
            dist.broadcast(value, 0, group=place.group)
        shard = cce_tp.VocabShard.chunk(shape[1], place.rank, place.size)
        e = whole.hidden.detach()
        tokens = {False: e.clone().requires_grad_(), True: e.chunk(place.size)[place.rank].clone().requires_grad_()}
        return cls(whole, shard, tokens, whole.weight.detach()[shard.start : shard.stop].clone().requires_grad_())

    def clear(self) -> None:
        self.whole.clear_gradients()
        for leaf in (*self.tokens.values(), self.weight):
            leaf.grad = None

    @property
    def gradient_bytes(self) -> int:
        leaves = (*self.tokens.values(), self.weight)
        return sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)


Step = Callable[[], Tensor]


def _step(problem: Problem, loss: Callable[[], Tensor]) -> Tensor:
    problem.clear()
    value = loss()
    value.backward()
    return value.detach()


def our_step(problem: Problem, place: Place, mode: Backward, sequence_parallel: bool) -> Step:
    """Loss and gradients over the group."""
    return lambda: _step(
        problem,
        lambda: cce_tp.linear_cross_entropy(
            problem.tokens[sequence_parallel], problem.weight, problem.whole.target,
            group=place.group, shard=problem.shard, sequence_parallel=sequence_parallel, backward=mode,
        ),
    )  # fmt: skip


def single_step(problem: Problem, mode: Backward) -> Step:
    """The same with the whole vocabulary on this rank."""
    whole = problem.whole
    return lambda: _step(
        problem,
        lambda: cce_tp.linear_cross_entropy(whole.hidden, whole.weight, whole.target, backward=mode),
    )


def megatron_step(problem: Problem, place: Place, fused: bool, sequence_parallel: bool) -> Step:
    """Megatron-core's output layer and loss: the classifier's gradient in the weight's dtype, as without fusion.

    Raises:
        ImportError, Unavailable: it isn't here, or not for this device.
    """
    if not place.on_gpu:
        raise Unavailable("Megatron-core's output layer needs a GPU")
    if len(problem.whole.weight) % place.size:
        raise Unavailable("Megatron-core shares out the vocabulary evenly")
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(place.size, create_gloo_process_groups=False)
    group = parallel_state.get_tensor_model_parallel_group()
    target = problem.whole.target[:, None]

    def loss() -> Tensor:
        logits = linear_with_grad_accumulation_and_async_allreduce(
            input=problem.tokens[sequence_parallel][:, None],
            weight=problem.weight,
            bias=None,
            gradient_accumulation_fusion=False,
            allreduce_dgrad=not sequence_parallel,
            sequence_parallel=sequence_parallel,
            tp_group=group,
        )
        if fused:
            return fused_vocab_parallel_cross_entropy(logits, target, group).mean()
        return vocab_parallel_cross_entropy(logits, target, tp_group=group).mean()

    return lambda: _step(problem, loss)
