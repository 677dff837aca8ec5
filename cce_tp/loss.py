"""The public function and module: options in, one autograd function, loss out.

A call walks through four steps. ``_prepare`` turns the arguments into a checked ``_Call`` and the ranks agree on it;
the forward pass gathers the input (under sequence parallelism), reads the shard once and combines the ranks' partials;
the loss is formed from differences to the common maximum; the backward pass asks the local implementation for the
gradients and sums that of the input over the group while the rest of the work goes on.

The loss of a token and the factors of its gradient: see ``kernels.tokens``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import agreement, collectives
from .arguments import Arguments, gather_arguments, resolve_tensor_parallel_group
from .collectives import SINGLE, Combination, Gathering, InputGradReduction, TensorParallelGroup, resolve_group
from .kernels import filtering, sampling
from .kernels.contexts import without_autocast
from .kernels.interface import (
    FilterPlan,
    GradientRequest,
    LocalImplementation,
    LocalProblem,
    Partials,
    Peaks,
    SamplingPlan,
    Selection,
    TileMap,
    TokenPiece,
    WeightGradBuffer,
)
from .kernels.tokens import TokenRule, is_known, negative_log_likelihood, read_labels
from .options import Backward, Filtered, LossOptions, Sampled
from .sampler import fixed_seed, sampler
from .shard import VocabShard
from .stats import LossStats

__all__ = ["LinearCrossEntropyLoss", "linear_cross_entropy"]

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Call:
    """One call, checked: all that forward and backward share and that isn't saved by autograd."""

    options: LossOptions
    shard: VocabShard
    group: TensorParallelGroup
    implementation: LocalImplementation
    main_grad: Tensor | None
    samples: bool
    filters: bool

    @property
    def softmax_rows(self) -> int:
        """Rows of the local weight that enter the softmax."""
        return self.shard.num_rows if self.options.count_padding else self.shard.num_real

    @property
    def rule(self) -> TokenRule:
        options = self.options
        return TokenRule(
            vocab_size=self.shard.vocab_size,
            start=self.shard.start,
            stop=self.shard.stop,
            ignored=options.ignored,
            nan_unknown=options.unknown_labels == "nan",
            label_smoothing=float(options.label_smoothing),
            z_loss=float(options.z_loss),
        )

    def smoothing_weight(self, class_weight: Tensor | None, device: torch.device) -> Tensor | None:
        """c over the local rows of the softmax, fp32; padding rows have 0. None without label smoothing."""
        if self.options.label_smoothing == 0.0:
            return None
        c = torch.zeros(self.softmax_rows, dtype=torch.float32, device=device)
        real = slice(self.shard.start, self.shard.stop)
        c[: self.shard.num_real] = 1.0 if class_weight is None else class_weight[real].float()
        return c

    def problem(
        self, tokens: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, smoothing_weight: Tensor | None
    ) -> LocalProblem:
        rows = self.softmax_rows
        return LocalProblem(
            input=tokens,
            weight=weight[:rows],
            target=target,
            bias=None if bias is None else bias[:rows],
            smoothing_weight=smoothing_weight,
            logit_scale=float(self.options.logit_scale),
            softcap=None if self.options.softcap is None else float(self.options.softcap),
            workspace=self.options.workspace,
        )

    def gather(self, local: Tensor) -> Gathering:
        """Begin to gather the tokens, where they are shared out."""
        return Gathering(local, self.group if self.options.sequence_parallel else SINGLE)

    def with_global_argmax(self, partials: Partials) -> Partials:
        """Number the argmax by vocabulary ids; padding rows get numbers beyond the vocabulary."""
        if partials.argmax is None:
            return partials
        row = partials.argmax
        beyond = self.shard.vocab_size + row
        numbered = torch.where(row < self.shard.num_real, row + self.shard.start, beyond)
        return Partials(
            partials.max,
            partials.sum_exp,
            partials.target_logit,
            partials.smoothing,
            partials.entropy,
            torch.where(row < 0, row, numbered),
        )


@dataclass(frozen=True)
class _Inputs:
    """What the forward pass of one call works on; ``local`` are the targets' rows here, negative for another rank's."""

    call: _Call
    local_input: Tensor
    weight: Tensor
    bias: Tensor | None
    target: Tensor
    local: Tensor
    active: Tensor
    smoothing_weight: Tensor | None

    def problem(self, tokens: Tensor, first: int = 0) -> LocalProblem:
        """Of tokens that begin at number ``first``."""
        local = self.local[first : first + len(tokens)]
        return self.call.problem(tokens, self.weight, self.bias, local, self.smoothing_weight)

    def combine(self, partials: Partials) -> Combination:
        """Begin to make the whole vocabulary's partials of the ranks'."""
        call = self.call
        mass = None if self.smoothing_weight is None else self.smoothing_weight.sum()
        ours, others = call.with_global_argmax(partials), call.samples or call.filters
        return Combination(ours, mass, call.shard, call.group, call.implementation.join, gather=others)


class _LinearCrossEntropy(torch.autograd.Function):
    """Hidden states and a vocabulary shard to per-token losses; no reduction."""

    @staticmethod
    def forward(
        ctx: Any,
        local_input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        class_weight: Tensor | None,
        call: _Call,
    ) -> tuple[Tensor | None, ...]:
        with without_autocast(local_input.device.type):
            options = call.options
            # Whatever needs no other rank's tokens goes on while they travel. Hot rows that are shared travel first.
            shares = ctx.needs_input_grad[0] and _shares_rows(call, weight, bias, len(target))
            gathering = None if shares else call.gather(local_input)
            local, active = call.implementation.local_labels(call.rule, target)
            smoothing_weight = call.smoothing_weight(class_weight, weight.device)
            inputs = _Inputs(call, local_input, weight, bias, target, local, active, smoothing_weight)
            ctx.plan = ctx.selection = None
            if call.samples:
                whole, ctx.plan, ctx.selection = _sampled_pass(inputs, gathering)
            elif call.filters:
                whole, ctx.plan, problem, peaks = _filtered_pass(inputs, gathering or call.gather(local_input))
            else:
                partials = _partials(inputs, gathering or call.gather(local_input))
                whole = inputs.combine(partials).result()
            made = call.implementation.losses(call.rule, whole, target, class_weight)
            if call.filters:
                ctx.selection = filtering.tile_map(ctx.plan, problem, peaks, made.lse)

        ctx.call, ctx.device_type = call, local_input.device.type
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(local_input, weight, bias, target, class_weight, whole.max, made.log_sum)
        if not options.return_stats:
            return made.loss, made.lse, None, None, None, None
        stats = (*_detached_stats(call.rule, whole, made.log_sum, target), _keep_rate(ctx.selection, inputs))
        ctx.mark_non_differentiable(*stats)
        return made.loss, made.lse, *stats

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "linear_cross_entropy: double backward is not supported; call backward without create_graph=True"
            )
        # saved_tensors may be read only once: activation checkpointing recomputes them at the first access.
        with without_autocast(ctx.device_type):
            return (*_gradients(ctx, upstream[0], upstream[1]), None, None, None)


class _Mean(torch.autograd.Function):
    """Per-token losses to their mean: one kernel, where a sum, a sum of weights and a division would be three."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, target: Tensor, class_weight: Tensor | None, call: _Call) -> Tensor:
        mean, divisor = call.implementation.mean(call.rule, loss, target, class_weight)
        ctx.save_for_backward(divisor)
        ctx.shape = loss.shape
        return mean

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        (divisor,) = ctx.saved_tensors
        return (upstream[0] / divisor).expand(ctx.shape), None, None, None


def _detached_stats(rule: TokenRule, whole: Partials, log_sum: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``target_logprob``, ``correct``, ``entropy``."""
    assert whole.entropy is not None
    entropy = log_sum - whole.entropy / whole.sum_exp
    labels = read_labels(rule, target, None)
    nowhere = ~labels.active | labels.invalid
    logprob = (-negative_log_likelihood(rule, whole, log_sum, labels)).masked_fill(nowhere, float("nan"))
    return logprob, (whole.argmax == target) & ~nowhere, entropy


def _sampled_pass(inputs: _Inputs, gathering: Gathering | None) -> tuple[Partials, SamplingPlan, Selection]:
    """The partials of the whole vocabulary, and what the backward pass is to know of the sample.

    Args:
        gathering: the tokens on their way; None where the ranks share out the hot rows, which go first.
    """
    call, target = inputs.call, inputs.target
    rows = _anchor_rows(inputs)
    shared = None
    if gathering is None:
        shared = _share_rows(inputs, rows)
        gathering = call.gather(inputs.local_input)
    seed, shared_hot = _seed(call, target.device), _shared_hot(call, rows, shared, target)
    # Unknown labels count as the largest logit, if not as NaN; the other tokens' losses need no maximum.
    largest = None if call.rule.nan_unknown else inputs.active & ~is_known(call.rule, target)
    anchor = _anchor(inputs, gathering, rows, shared)
    if largest is not None:
        anchor = sampling.lowered(anchor, largest)
    plan = _plan_sampling(call, rows, anchor, inputs.active, seed, shared_hot)
    begun: list[Combination] = []
    _, selection = call.implementation.select(
        inputs.problem(gathering.tokens()),
        plan,
        stats=call.options.return_stats,
        on_partials=lambda partials: begun.append(inputs.combine(partials)),
    )
    whole = begun[0].result()
    if shared_hot is not None:
        plan = replace(plan, shared=replace(shared_hot, target_logit=whole.target_logit))
    return whole, plan, selection


def _filtered_pass(inputs: _Inputs, gathering: Gathering) -> tuple[Partials, FilterPlan, LocalProblem, Peaks]:
    """The partials of the whole vocabulary, and what says which tiles the backward pass works on."""
    call = inputs.call
    anchor = _anchor(inputs, gathering, _anchor_rows(inputs), None)
    problem = inputs.problem(gathering.tokens())
    plan = _plan_filter(call, problem.num_rows, anchor, inputs.active)
    partials, peaks = call.implementation.screen(problem, plan, stats=call.options.return_stats)
    return inputs.combine(partials).result(), plan, problem, peaks


def _own_tokens_first(inputs: _Inputs, gathering: Gathering, work: Callable[[LocalProblem, bool], _T]) -> list[_T]:
    """Work on this rank's own tokens, and on the others' when they are here; the results in the tokens' order.

    Args:
        work: is told whether these are the rank's own.
    """
    length = len(gathering.local)
    start = inputs.call.group.rank * length
    results = [work(inputs.problem(gathering.local, start), True)]
    tokens = gathering.tokens()
    if start > 0:
        results.insert(0, work(inputs.problem(tokens[:start], 0), False))
    if start + length < len(tokens):
        results.append(work(inputs.problem(tokens[start + length :], start + length), False))
    return results


def _partials(inputs: _Inputs, gathering: Gathering) -> Partials:
    """The exact mode's; the same bits either way."""
    work = partial(inputs.call.implementation.partials, stats=inputs.call.options.return_stats)
    if not collectives.own_tokens_first(gathering, anchor=False):
        return work(inputs.problem(gathering.tokens()))
    parts = _own_tokens_first(inputs, gathering, lambda problem, _: work(problem))
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Partials)}
    joined: dict[str, Any] = {
        name: None if values[0] is None else torch.cat(values) for name, values in columns.items()
    }
    return Partials(**joined)


def _anchor_rows(inputs: _Inputs) -> sampling.AnchorRows:
    """The rows of the classifier that a guess of the LSE comes from."""
    call = inputs.call
    mode, shard = call.options.mode, call.shard
    number = mode.reference_rows if isinstance(mode, Sampled) else filtering.REFERENCE_ROWS
    ids = sampling.RowIds(shard.vocab_size, shard.start, shard.num_real, call.softmax_rows)
    return call.implementation.anchor_rows(inputs.target, inputs.active, ids, number)


def _shares_rows(call: _Call, weight: Tensor, bias: Tensor | None, num_tokens: int) -> bool:
    """Whether the ranks share out by tokens what is done with the hot rows."""
    plain = call.samples and bias is None and call.options.workspace is None and weight.dtype != torch.float16
    return plain and collectives.shares_hot_rows(num_tokens, call.group)


def _share_rows(inputs: _Inputs, rows: sampling.AnchorRows) -> sampling.SharedRows:
    """The rows that the anchor looks at on every rank. One collective, perhaps still under way."""
    call, weight = inputs.call, inputs.weight
    ours = call.implementation.gather_rows(weight[: call.softmax_rows], rows.rows)
    pending = collectives.begin_sum(ours, call.group, "gathering the hot rows")  # all other ranks' parts are 0
    first, last = collectives.share_of(len(inputs.target), call.group)
    kept = call.implementation.hot_exponentials(weight, last - first, rows.num_hot, call.options.softcap)
    return sampling.SharedRows(ours, first, last, pending.wait, kept)


def _shared_hot(
    call: _Call, rows: sampling.AnchorRows, shared: sampling.SharedRows | None, target: Tensor
) -> sampling.SharedHot | None:
    if shared is None:
        return None
    number = rows.num_hot
    place = call.implementation.target_place(rows, target)
    return sampling.SharedHot(
        shared.weight[:number], rows.ids[:number], place, shared.first, shared.last, shared.exponentials
    )


def _anchor(
    inputs: _Inputs, gathering: Gathering, rows: sampling.AnchorRows, shared: sampling.SharedRows | None
) -> Tensor:
    """A guess of the LSE, fp32 ``[N]``. One small collective."""
    call = inputs.call
    apart = gathering.under_way and shared is not None

    def work(problem: LocalProblem, own: bool = True) -> Tensor:
        part = shared
        if apart and shared is not None:  # these tokens are all this rank's, or none are
            part = replace(shared, first=0, last=problem.num_tokens if own else 0)
        return call.implementation.anchor_sums(problem, rows, part)

    if apart or collectives.own_tokens_first(gathering, anchor=True):
        sums = torch.cat(_own_tokens_first(inputs, gathering, work), dim=1)
    else:
        sums = work(inputs.problem(gathering.tokens()))
    return call.implementation.anchor(collectives.sum_small(sums, call.group, "summing the anchor"), rows)


def _seed(call: _Call, device: torch.device) -> Tensor:
    mode = call.options.mode
    assert isinstance(mode, Sampled)
    return sampler.next_seed(device, call.group) if mode.seed is None else fixed_seed(mode.seed, device)


def _plan_sampling(
    call: _Call,
    rows: sampling.AnchorRows,
    anchor: Tensor,
    active: Tensor,
    seed: Tensor,
    shared: sampling.SharedHot | None,
) -> SamplingPlan:
    """What the sampled backward needs to know before the logits are computed."""
    mode, shard = call.options.mode, call.shard
    assert isinstance(mode, Sampled)
    return SamplingPlan(
        eps=float(mode.eps),
        budget=min(mode.most_entries, max(1, call.softmax_rows)),  # which eps alone doesn't bound
        seed=seed,
        anchor=anchor,
        active=active,
        hot=rows.hot,
        hot_place=rows.place,
        first_id=shard.start,
        shared=shared,
    )


def _plan_filter(call: _Call, num_rows: int, anchor: Tensor, active: Tensor) -> FilterPlan:
    """What the filtered backward needs to know before the logits are computed."""
    mode = call.options.mode
    assert isinstance(mode, Filtered)
    order = mode.order
    if isinstance(order, Tensor):
        order = filtering.without_padding(order.long(), num_rows)
    return FilterPlan(
        eps=float(mode.eps),
        input=mode.input,
        weight=mode.weight,
        order=order,
        anchor=filtering.finite(anchor),
        active=active,
        rows=filtering.TILE_ROWS,
        cols=filtering.TILE_COLS,
    )


def _keep_rate(selection: Selection | TileMap | None, inputs: _Inputs) -> Tensor:
    """fp32 ``[]``; no synchronisation."""
    if selection is None:
        return torch.ones((), device=inputs.target.device)
    return selection.kept.float() / max(1, len(inputs.target) * inputs.call.softmax_rows)


def _gradients(ctx: Any, u: Tensor | None, h: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of input, weight (None if it went to ``main_grad``) and bias."""
    call: _Call = ctx.call
    local_input, weight, bias, target, class_weight, top, log_sum = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    gathering = call.gather(local_input)
    local, logit_grad = call.implementation.logit_gradient(call.rule, target, class_weight, top, log_sum, (u, h))
    smoothing_weight = call.smoothing_weight(class_weight, weight.device)

    weight_grad = None
    destination = None
    if needs_weight and call.main_grad is not None:
        destination = WeightGradBuffer(call.main_grad[: call.softmax_rows], accumulate=True)
    elif needs_weight:
        weight_grad = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        if call.softmax_rows < len(weight):
            weight_grad[call.softmax_rows :].zero_()
        destination = WeightGradBuffer(weight_grad[: call.softmax_rows], accumulate=False)

    problem = call.problem(gathering.buffer, weight, bias, local, smoothing_weight)
    dtype = collectives.reduction_dtype(local_input, call.options.comm_dtype, call.group)
    sequence_parallel = call.options.sequence_parallel
    pieces: tuple[TokenPiece, ...] = ()
    if call.samples and needs_input:  # the other modes' is done all at once
        pieces = collectives.input_grad_pieces(problem.input.shape, dtype, call.group, sequence_parallel)
    shared = ctx.plan.shared if call.samples else None
    ahead = 0 if shared is None else shared.num_hot
    reduction = InputGradReduction(call.group, sequence_parallel, local_input.dtype, pieces, ahead)
    ready = gathering.tokens if gathering.under_way else None
    request = GradientRequest(dtype if needs_input else None, destination, needs_bias, pieces, ready)
    if shared is not None:
        request = replace(request, hot_ready=reduction.hot)
        if reduction.hot_apart:
            request = replace(request, hot_start=reduction.start_hot, own_input=gathering.local)
    if ctx.selection is None:
        real_bias_grad = call.implementation.gradients(problem, logit_grad, request, reduction.start)
    else:
        implementation = call.implementation
        method = implementation.filtered_gradients if call.filters else implementation.sampled_gradients
        real_bias_grad = method(problem, ctx.plan, ctx.selection, logit_grad, request, reduction.start)

    gathering.tokens()  # whoever had no use for them
    bias_grad = None
    if bias is not None and real_bias_grad is not None:
        bias_grad = torch.zeros_like(bias)
        bias_grad[: call.softmax_rows] = real_bias_grad
    return reduction.result(), weight_grad, bias_grad


def _prepare(
    tensors: dict[str, Any],
    group: dist.ProcessGroup | None,
    shard: VocabShard | None,
    options: dict[str, Any],
) -> Arguments:
    """Check the rank's own arguments, then that the ranks agree. See ``cce_tp.agreement`` for when they exchange."""
    tp_group = resolve_tensor_parallel_group(tensors["weight"], group)
    try:
        arguments = gather_arguments(**tensors, group=tp_group, shard=shard, options=LossOptions(**options))
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        if agreement.others_await(tp_group, options["validate"]):
            agreement.report_failure(tp_group, error)
        raise
    agreement.ensure(tp_group, arguments.agreement_key(), arguments.record, validate=bool(arguments.options.validate))
    if arguments.options.validate and not tp_group.is_single:
        tokens, target = arguments.flattened()
        agreement.compare_tokens(tp_group, target, None if arguments.options.sequence_parallel else tokens)
    return arguments


def _reduce(loss: Tensor, call: _Call, target: Tensor, class_weight: Tensor | None) -> Tensor:
    """Sum, or mean over the class weights of the tokens that aren't ignored; without a host synchronisation."""
    if call.options.reduction == "sum":
        return loss.sum()
    mean: Tensor = _Mean.apply(loss, target, class_weight, call)
    return mean


# The collectives and the choice of kernels are opaque to torch.compile: one graph break, the same for every shape.
@torch.compiler.disable
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    group: dist.ProcessGroup | None = None,
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    sequence_dim: int = 0,
    backward: str | Backward = "exact",
    main_grad: Tensor | None = None,
    comm_dtype: torch.dtype | None = None,
    count_padding: bool = False,
    unknown_labels: str = "nan",
    workspace: int | None = None,
    validate: bool | None = None,
    implementation: str = "auto",
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, LossStats]:
    """Cross-entropy of ``softcap(logit_scale * (input @ linear_weight.T + linear_bias))``, without writing the logits.

    The classifier is sharded by vocabulary rows over ``group``. The loss is exact, the same bits on every rank of the
    group. Method: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (ICLR 2025), with the
    log-sum-exp combined over the group.

    Per token, with class weight c, smoothing a, and V = ``shard.vocab_size``:
    ``(1-a) c_y (LSE - z_y) + (a/V) sum_v c_v (LSE - z_v) + z_loss LSE^2``. The mean divides the sum of that by the sum
    of ``c_y`` over tokens that aren't ignored (their number, without class weights); z_loss's term takes no class
    weight.

    Args:
        input: ``[..., D]`` hidden states; bf16, fp16 or fp32; the same on every rank of ``group``, or this rank's shard
            along ``sequence_dim`` if ``sequence_parallel``. Any strides.
        linear_weight: ``[V_local, D]``, this rank's rows of the classifier, of input's dtype (under
            ``torch.autocast`` both are cast). A DTensor sharded by ``Shard(0)`` over a one-dimensional mesh also says
            ``group`` and ``shard``.
        target: ``[...]`` integer vocabulary ids over the whole vocabulary, the same on every rank, full length under
            sequence parallelism. An id outside ``[0, V)``: see ``unknown_labels`` and ``validate``.
        linear_bias: ``[V_local]``, any floating dtype.
        weight: ``[V]`` class weights, the same on every rank; not differentiable.
        reduction: "mean", "sum" or "none" (fp32 in target's shape, 0 at ignored tokens).
        ignore_index: label of tokens that take no part; None means -100.
        label_smoothing: in [0, 1], over the whole vocabulary, padding excluded.
        logit_scale: factor on the logits, before the softcap.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        z_loss: factor of the squared log-sum-exp.
        group: the tensor-parallel process group. None: a single shard, no communication (never the default group).
        shard: which rows this rank holds; default: equal contiguous shards in group-rank order.
        sequence_parallel: gather the input along ``sequence_dim`` on the way in, reduce-scatter its gradient on the way
            out. Only the shard is kept for the backward pass.
        sequence_dim: the dimension of ``input`` that is sharded.
        backward: "exact"; "sampled" for an unbiased sparse gradient, "filtered" for one without the tiles in which the
            softmax is small (``cce_tp.Sampled`` and ``cce_tp.Filtered``, which have their options).
        main_grad: ``[V_local, D]`` buffer (fp32, bf16 or fp16) to which the weight's gradient is added in place;
            ``linear_weight.grad`` then stays untouched. Adds once a backward pass.
        comm_dtype: dtype in which the input's gradient is summed over the group; default: input's (fp32 on gloo).
        count_padding: padding rows enter the softmax (and get gradient), as in Megatron.
        unknown_labels: what a label outside ``[0, V)`` that isn't ignored does: "nan" makes its token's loss and
            gradient NaN; "max" gives it the row's largest logit, a constant to the gradient, as Megatron has it.
        workspace: bytes each pass may allocate beyond inputs, outputs and gradients, refused if not enough, in
            the filtered mode, and by plain PyTorch in the sampled mode; default: the gradient of the input in fp32 and
            44 to 160 MiB, or in the sampled mode 60 MiB and what its lists take, whatever works best.
        validate: check labels and the ranks' agreement on every call, with a host synchronisation; None: the
            environment variable ``CCE_TP_VALIDATE``.
        implementation: "auto" (Triton kernels on a GPU, plain PyTorch on the CPU), "triton" or "torch".
        return_stats: also return ``LossStats``.

    Returns:
        The loss, fp32; with ``return_stats`` a pair ``(loss, LossStats)``.

    Collectives: none for a single shard. Else 1 small in the forward pass (exact in groups beyond 8: 2, 3 with
    statistics; sampled and filtered: 2, sampled with 1,024 tokens a rank: 3, the third of ``[1280, D]`` for 1,024
    reference rows) and 1 of ``[N, D]`` in the backward pass; sequence parallelism adds 1 of ``[N, D]`` to each, and
    to the sampled backward with 1,024 tokens a rank 1 of ``[1024, D]``, which rides with the large one otherwise. The
    sampled backward sends its ``[N, D]`` in pieces where it is large: still the one, a part at a time. The first call
    of a kind adds 1 small one, ``validate`` 2. See ``cce_tp.collectives`` for shapes. If a collective fails, its error
    says what it was for.

    Ignored tokens: the LSE is still in the statistics; loss and gradient are 0, whatever ``input`` holds there.

    Differences from ``torch.nn.functional.linear_cross_entropy``: no class-probability targets, no K-dimensional
    weights, no ``options``; a mean over no token is 0 with zero gradients (there: NaN); the loss is fp32.

    Under ``torch.compile`` the call is one graph break. Double backward raises.

    Raises:
        TypeError: an argument is of the wrong kind or dtype.
        ValueError: shapes, devices, shards or options don't fit; with ``validate`` also a label that is no vocabulary
            id, or ranks that differ. Raised on every rank at a group's first call and under ``validate``.
    """
    arguments = _prepare(
        {
            "input": input,
            "weight": linear_weight,
            "target": target,
            "bias": linear_bias,
            "class_weight": weight,
            "main_grad": main_grad,
        },
        group,
        shard,
        {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "logit_scale": logit_scale,
            "softcap": softcap,
            "z_loss": z_loss,
            "sequence_parallel": sequence_parallel,
            "sequence_dim": sequence_dim,
            "backward": backward,
            "comm_dtype": comm_dtype,
            "count_padding": count_padding,
            "unknown_labels": unknown_labels,
            "workspace": workspace,
            "validate": validate,
            "implementation": implementation,
            "return_stats": return_stats,
        },
    )
    samples = isinstance(arguments.options.mode, Sampled) and torch.is_grad_enabled()
    filters = isinstance(arguments.options.mode, Filtered) and torch.is_grad_enabled()
    call = _Call(
        arguments.options,
        arguments.shard,
        arguments.group,
        arguments.implementation,
        arguments.main_grad,
        samples,
        filters,
    )
    tokens, targets = arguments.flattened()
    per_token, lse, *details = _LinearCrossEntropy.apply(
        tokens, arguments.weight, arguments.bias, targets, arguments.class_weight, call
    )
    if reduction == "none":
        loss = arguments.unflatten(per_token)
    else:
        loss = _reduce(per_token, call, targets, arguments.class_weight)
    if not return_stats:
        return loss
    *details, keep_rate = details
    lse, logprob, correct, entropy = (arguments.unflatten(value) for value in (lse, *details))
    return loss, LossStats(lse, logprob, correct, entropy, keep_rate, call.implementation.name)


def _check_shape(name: str, value: object, expected: tuple[int, ...]) -> None:
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor or None, not {type(value).__name__}")
    if tuple(value.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {expected}")


class LinearCrossEntropyLoss(nn.Module):
    """A vocabulary-sharded classifier and its loss, like ``torch.nn.LinearCrossEntropyLoss``.

    Each rank of ``group`` owns the rows that ``torch.chunk`` gives it (``self.shard``). The initial values are those of
    ``torch.nn.Linear`` over the whole vocabulary: ranks that start from the same random state hold the shards of one
    matrix, whatever the group's size, and end in the same random state.

    Args:
        in_features: D.
        num_classes: V, over the whole group.
        bias: add a learnable bias to the logits.
        device, dtype: of the parameters.
        group: the tensor-parallel process group; None for a single shard.
        **options: any keyword of ``linear_cross_entropy`` but ``linear_bias``, ``group`` and ``shard``.

    Attributes:
        weight: ``[V_local, D]``.
        bias: ``[V_local]`` or None.
        shard: the ``VocabShard``.

    Raises:
        TypeError, ValueError: as ``linear_cross_entropy``, at construction where that is possible.
    """

    _INIT_ROWS = 4096  # rows drawn at a time, so that the whole matrix never exists on one rank

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        for name, size in (("in_features", in_features), ("num_classes", num_classes)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}={size!r} must be a positive int")
        class_weight = options.pop("weight", None)
        main_grad = options.pop("main_grad", None)
        known = [option.name for option in fields(LossOptions) if option.init]
        for name in options:
            if name not in known:
                raise TypeError(f"LinearCrossEntropyLoss: unknown option {name!r}, expected one of {sorted(known)}")
        LossOptions(**options)
        tp_group = resolve_group(group)
        self.in_features, self.num_classes = in_features, num_classes
        self.group = group
        self.shard = VocabShard.chunk(num_classes, tp_group.rank, tp_group.size)
        _check_shape("weight", class_weight, (num_classes,))
        _check_shape("main_grad", main_grad, (self.shard.num_rows, in_features))
        self.options = {**options, "main_grad": main_grad}
        self.weight = nn.Parameter(torch.empty(self.shard.num_rows, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.shard.num_rows, device=device, dtype=dtype)) if bias else None
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the whole vocabulary's initial values and keep this rank's."""
        bound = 1.0 / math.sqrt(self.in_features)
        self._keep_own_rows(self.weight, (self.in_features,), bound)
        if self.bias is not None:
            self._keep_own_rows(self.bias, (), bound)

    def _keep_own_rows(self, parameter: Tensor, row_shape: tuple[int, ...], bound: float) -> None:
        if parameter.is_meta:
            return
        for first in range(0, self.num_classes, self._INIT_ROWS):
            last = min(first + self._INIT_ROWS, self.num_classes)
            drawn = torch.empty(last - first, *row_shape, device=parameter.device, dtype=parameter.dtype)
            drawn.uniform_(-bound, bound)
            low, high = max(first, self.shard.start), min(last, self.shard.stop)
            if low < high:
                parameter[low - self.shard.start : high - self.shard.start] = drawn[low - first : high - first]

    def forward(self, input: Tensor, target: Tensor) -> Tensor | tuple[Tensor, LossStats]:
        """The loss of ``input`` ``[..., D]`` and ``target`` ``[...]``; see ``linear_cross_entropy``."""
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            weight=self.class_weight,
            group=self.group,
            shard=self.shard,
            **self.options,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LinearCrossEntropyLoss:
        """A copy with parameters of its own, in the same process group, which can't be copied."""
        memo[id(self.group)] = self.group
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def extra_repr(self) -> str:
        given = {
            name: value for name, value in self.options.items() if value is not None and not isinstance(value, Tensor)
        }
        return ", ".join(
            [f"in_features={self.in_features}", f"num_classes={self.num_classes}", f"{self.shard}"]
            + [f"{name}={value!r}" for name, value in given.items()]
        )
