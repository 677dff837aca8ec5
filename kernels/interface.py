"""What a local implementation has to do.

One rank holds some rows of hidden states E and some rows of the classifier C. Everything in ``kernels`` works on that
pair alone and never communicates; ``cce_tp.collectives`` combines the ranks' results.

Notation, used by every file of the package:

====== ============ =====================================================================================
symbol shape        meaning
====== ============ =====================================================================================
E      [N, D]       hidden states, one row a token
C      [V, D]       this rank's classifier rows *that enter the softmax* (padding rows only if they count)
b      [V]          their bias
y      [N]          row of C that is the token's target, or -1 where this rank does not hold it
z      [N, V]       final logits, ``softcap(scale * (E C^T + b))``; never written as a whole
m, s   [N]          ``max_v z`` and ``sum_v exp(z - m)`` over this rank's rows
M, S   [N]          the same over the whole vocabulary; LSE = M + log S
c      [V]          class weights of the label-smoothing term; 0 for padding rows
G      [N, V]       gradient of the loss in z
====== ============ =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .fold import Packing
    from .sampling import AnchorRows, HotExponentials, RowIds, SharedHot, SharedRows
    from .tokens import Losses, TokenRule


@dataclass(frozen=True)
class LocalProblem:
    """One rank's share of the loss.

    The tensors may have any strides. Implementations never write into them.

    Attributes:
        input: E, ``[N, D]``, bf16, fp16 or fp32.
        weight: C, ``[V, D]``, of the same dtype and device; ``V`` may be 0.
        target: y, ``[N]`` int64, in ``[0, V)`` or -1.
        bias: b, ``[V]``, any floating dtype, or None.
        smoothing_weight: c, ``[V]`` fp32; None without label smoothing.
        logit_scale: factor on ``E C^T + b``.
        softcap: ``z <- softcap * tanh(z / softcap)`` after the scale; None for none.
        workspace: bytes that a step may allocate beyond its results, at least ``least_workspace``; None for the
            implementation's default.
    """

    input: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None = None
    smoothing_weight: Tensor | None = None
    logit_scale: float = 1.0
    softcap: float | None = None
    workspace: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.input.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.input.shape[1]

    @property
    def num_rows(self) -> int:
        """V: classifier rows on this rank."""
        return self.weight.shape[0]


@dataclass(frozen=True)
class Partials:
    """What a rank knows about every token after reading its shard: fp32 ``[N]`` each, unless said otherwise.

    Attributes:
        max: m; ``-inf`` for an empty shard.
        sum_exp: s; 0 for an empty shard, NaN where a logit is NaN.
        target_logit: ``z[n, y_n]`` from the very accumulators that ``max`` was taken from, so that a confident token
            loses nothing in ``z_y - M``; 0 where ``y_n == -1``.
        smoothing: ``sum_v c_v (z_v - m)``, or None without label smoothing; 0 for an empty shard.
        entropy: ``sum_v exp(z_v - m) (z_v - m)``, or None unless statistics were asked for; 0 for an empty shard.
        argmax: int64, the row of C with the largest logit, the lowest of equals; None unless statistics were asked
            for; -1 for an empty shard.
    """

    max: Tensor
    sum_exp: Tensor
    target_logit: Tensor
    smoothing: Tensor | None = None
    entropy: Tensor | None = None
    argmax: Tensor | None = None


@dataclass(frozen=True)
class LogitGradient:
    """G in factored form, so that a tile of it can be made from a tile of z.

    ``p_nv = exp((z_nv - max_n) - log_sum_n)`` and, on active rows,
    ``G_nv = prob_n p_nv - target_n 1[v = y_n] - smoothing_n c_v``; inactive rows have G = 0 whatever E holds there
    (NaN included). All are ``[N]``, fp32 but for ``active``.

    Attributes:
        max: M over the whole vocabulary.
        log_sum: log S over the whole vocabulary.
        prob: factor on the softmax.
        target: factor on the target's one-hot.
        smoothing: factor on c; None without label smoothing.
        active: bool; False for ignored tokens.
    """

    max: Tensor
    log_sum: Tensor
    prob: Tensor
    target: Tensor
    active: Tensor
    smoothing: Tensor | None = None


@dataclass(frozen=True)
class WeightGradBuffer:
    """Where the gradient of C goes.

    Attributes:
        buffer: ``[V, D]``, any floating dtype, last dimension contiguous.
        accumulate: add to what is there (``main_grad``) instead of overwriting it.
    """

    buffer: Tensor
    accumulate: bool


@dataclass(frozen=True)
class TokenPiece:
    """Tokens whose rows of the gradient of E are handed on together: some runs of neighbours, ``stride`` apart."""

    first: int
    length: int
    runs: int = 1
    stride: int = 0

    @property
    def size(self) -> int:
        """How many tokens."""
        return self.length * self.runs

    def ranges(self) -> Iterator[tuple[int, int]]:
        """First token of each run, and the one behind its last."""
        for run in range(self.runs):
            start = self.first + run * self.stride
            yield start, start + self.length


@dataclass(frozen=True)
class GradientRequest:
    """Which gradients to compute, and into what.

    Attributes:
        input_dtype: dtype for this rank's part of the gradient of E, or None if it is not needed.
        weight: destination for the gradient of C, or None if it is not needed.
        bias: whether the gradient of b is needed.
        pieces: the gradient of E is handed on in these, one behind the other; they hold every token once. Empty: as a
            whole, in the order of the tokens.
        input_ready: where E is still on its way here. It is to be called (``await_input``) before anything reads E,
            once whatever doesn't need E has been started.
        hot_ready: with a plan whose hot rows are shared out. In front of the gradient of E, in the first piece, their
            part of the gradient of C is handed on, ``[H, D]``, so that both are reduced together. Called later, this
            returns that piece, which then holds the ranks' sums.
        hot_start: then, if they are to be handed on alone, by this, before any piece is.
        own_input: then, where E is on its way, this rank's share of the tokens, which is here.
    """

    input_dtype: torch.dtype | None
    weight: WeightGradBuffer | None
    bias: bool
    pieces: tuple[TokenPiece, ...] = ()
    input_ready: Callable[[], object] | None = None
    hot_ready: Callable[[], Tensor] | None = None
    hot_start: Callable[[Tensor], object] | None = None
    own_input: Tensor | None = None

    def await_input(self) -> None:
        """From here on E can be read."""
        if self.input_ready is not None:
            self.input_ready()

    def hot_sum(self, part: Tensor) -> Tensor:
        """The ranks' sum of the hot rows' gradients, of which ``part`` is this rank's; without a group, just that."""
        return part if self.hot_ready is None else self.hot_ready()[: len(part)]

    def hand_on(self, whole: Tensor, on_input_grad: InputGradReady, ahead: int = 0) -> None:
        """Give away the gradient of E, ``[N, D]`` in the order of the tokens, as was asked for.

        Args:
            ahead: so many rows in front of it go with the first piece.
        """
        for piece in self.pieces:
            runs = [whole[ahead + start : ahead + stop] for start, stop in piece.ranges()]
            if piece is self.pieces[0] and ahead > 0:
                runs = [whole[:ahead], *runs]
            on_input_grad(runs[0] if len(runs) == 1 else torch.cat(runs))
        if not self.pieces:
            on_input_grad(whole)


@dataclass(frozen=True)
class SamplingPlan:
    """What the decisions of one call depend on, beside the logits.

    Attributes:
        eps: entries with ``exp(z - r) >= eps`` are certain.
        budget: most entries a token may keep, beside hot rows and its target.
        seed: int64 ``[1]`` on the device.
        anchor: r, fp32 ``[N]``.
        active: bool ``[N]``; other tokens keep nothing.
        hot: ``[H]`` int64, this rank's rows that are hot; -1 for those that another rank holds.
        hot_place: ``[V]`` int32, what number a row has among them, from 1; 0 for the others.
        first_id: vocabulary id of this rank's row 0.
        shared: where the ranks share out the hot rows' part of the backward pass by tokens.
    """

    eps: float
    budget: int
    seed: Tensor
    anchor: Tensor
    active: Tensor
    hot: Tensor
    hot_place: Tensor
    first_id: int
    shared: SharedHot | None = None


@dataclass(frozen=True)
class SamplingSize:
    """What the sampled mode's memory depends on, beside the problem's shape.

    Attributes:
        reference_rows: most hot rows.
        budget: most entries a token may keep.
        vocab_size: ids over the whole group, padding included.
    """

    reference_rows: int
    budget: int
    vocab_size: int

    @property
    def num_hot(self) -> int:
        return min(self.reference_rows, self.vocab_size)


class Selection(Protocol):
    """Which entries the forward pass kept; its form is the implementation's own."""

    @property
    def kept(self) -> Tensor:
        """How many entries the backward pass will use, hot rows and targets not counted: int64 ``[]``."""
        ...


@dataclass(frozen=True)
class FilterPlan:
    """What the filtered backward leaves out, as far as it is known before the logits are.

    Attributes:
        eps: a tile of the softmax is left out if no entry reaches it and none is a target.
        input: whether the gradient of E is filtered.
        weight: whether those of C and b are.
        order: how rows of C are sorted into tiles: "natural", "mean_logit", "count", or a permutation, int64 ``[V]``.
        anchor: fp32 ``[N]``, finite; whatever is close to the LSE.
        active: bool ``[N]``; other tokens have no gradient.
        rows, cols: tokens and classifier rows of a tile.
    """

    eps: float
    input: bool
    weight: bool
    order: str | Tensor
    anchor: Tensor
    active: Tensor
    rows: int
    cols: int


@dataclass(frozen=True)
class Peaks:
    """What the forward pass leaves for the filter.

    Attributes:
        values: fp16 ``[ceil(N / group), V]``, the largest ``z - anchor - log eps`` of ``group`` consecutive active
            tokens, NaN left out.
        group: how many; a divisor of the plan's ``rows``.
    """

    values: Tensor
    group: int


@dataclass(frozen=True)
class TileMap:
    """Which tiles the backward pass has to look at: all that the filter keeps, and few others.

    Attributes:
        live: bool ``[ceil(N / rows), ceil(V / cols)]``.
        order: int64 ``[V]``, the rows of C in the order in which they make tiles; None for the natural one.
        kept: how many entries of the softmax lie in live tiles: int64 ``[]``.
    """

    live: Tensor
    order: Tensor | None
    kept: Tensor


InputGradReady = Callable[[Tensor], None]
"""Called with this rank's part of the gradient of E, ``[N, D]``, as soon as it is complete, or with each of the pieces
asked for, contiguous and in their order: the caller starts the reduction over the group there, behind what is left of
the work. Rows given away are not touched again."""


class LocalImplementation(Protocol):
    """The two steps of the loss on one rank; stateless."""

    name: str

    def least_workspace(self, num_tokens: int, hidden_size: int, num_rows: int, dtype: torch.dtype) -> int:
        """Fewest bytes of workspace in which both steps can work on such a problem."""
        ...

    def least_sampled_workspace(
        self, num_tokens: int, hidden_size: int, num_rows: int, dtype: torch.dtype, size: SamplingSize
    ) -> int | None:
        """The same in the sampled mode, whose lists are the caller's from the forward pass to the backward pass, and
        count in the first; None if it has no bound."""
        ...

    def partials(self, problem: LocalProblem, *, stats: bool) -> Partials:
        """One pass over the shard: the reductions of z that the combine needs."""
        ...

    def gradients(
        self,
        problem: LocalProblem,
        logit_grad: LogitGradient,
        request: GradientRequest,
        on_input_grad: InputGradReady,
    ) -> Tensor | None:
        """Exact gradients of E (through ``on_input_grad``), C (into its buffer) and b (returned, fp32 ``[V]``)."""
        ...

    def local_labels(self, rule: TokenRule, target: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's rows of the labels, int64 ``[N]``, -1 for those of another; and which tokens aren't ignored."""
        ...

    def join(self, gathered: Tensor, packing: Packing) -> Partials:
        """See ``fold.join``."""
        ...

    def losses(self, rule: TokenRule, whole: Partials, target: Tensor, class_weight: Tensor | None) -> Losses:
        """See ``tokens.losses``."""
        ...

    def mean(self, rule: TokenRule, loss: Tensor, target: Tensor, class_weight: Tensor | None) -> tuple[Tensor, Tensor]:
        """See ``tokens.mean``."""
        ...

    def logit_gradient(
        self,
        rule: TokenRule,
        target: Tensor,
        class_weight: Tensor | None,
        top: Tensor,
        log_sum: Tensor,
        upstream: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, LogitGradient]:
        """See ``tokens.logit_gradient``."""
        ...

    def anchor_rows(self, target: Tensor, active: Tensor, ids: RowIds, reference_rows: int) -> AnchorRows:
        """The rows that the sampled mode's anchor looks at, see ``sampling.anchor_rows``."""
        ...

    def target_place(self, rows: AnchorRows, target: Tensor) -> Tensor:
        """See ``AnchorRows.target_place``."""
        ...

    def gather_rows(self, matrix: Tensor, rows: Tensor) -> Tensor:
        """See ``sampling.gather_rows``."""
        ...

    def hot_exponentials(
        self, weight: Tensor, num_tokens: int, num_hot: int, softcap: float | None
    ) -> HotExponentials | None:
        """Where ``anchor_sums`` leaves what the backward pass can use, in C's dtype; None if it doesn't."""
        ...

    def anchor_sums(self, problem: LocalProblem, rows: AnchorRows, shared: SharedRows | None = None) -> Tensor:
        """What the anchor needs to know of them, see ``sampling.anchor_sums``: fp64 ``[5, N]``, to be summed over the
        group."""
        ...

    def anchor(self, sums: Tensor, rows: AnchorRows) -> Tensor:
        """The anchor from the group's sums, see ``sampling.anchor``: fp32 ``[N]``."""
        ...

    def select(
        self,
        problem: LocalProblem,
        plan: SamplingPlan,
        *,
        stats: bool,
        on_partials: Callable[[Partials], object] | None = None,
    ) -> tuple[Partials, Selection]:
        """``partials``, and the entries of the softmax that the sampled backward keeps (see ``sampling``).

        Args:
            on_partials: is called with the former, once, perhaps before the latter are known.
        """
        ...

    def sampled_gradients(
        self,
        problem: LocalProblem,
        plan: SamplingPlan,
        selection: Any,
        logit_grad: LogitGradient,
        request: GradientRequest,
        on_input_grad: InputGradReady,
    ) -> Tensor | None:
        """As ``gradients``, unbiased, from the entries kept. With ``accumulate`` only rows of C that occur are touched.

        ``selection`` is what this implementation's ``select`` returned.
        """
        ...

    def screen(self, problem: LocalProblem, plan: FilterPlan, *, stats: bool) -> tuple[Partials, Peaks]:
        """``partials``, and what the filtered backward decides by (see ``filtering``)."""
        ...

    def filtered_gradients(
        self,
        problem: LocalProblem,
        plan: FilterPlan,
        tiles: TileMap,
        logit_grad: LogitGradient,
        request: GradientRequest,
        on_input_grad: InputGradReady,
    ) -> Tensor | None:
        """As ``gradients``, without the tiles in which no p reaches eps and that hold no target."""
        ...
