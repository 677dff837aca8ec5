"""The options of the loss: frozen, made once a call, every check of a plain argument in one place."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import torch

from .kernels.select import CHOICES as IMPLEMENTATIONS

REDUCTIONS = ("mean", "sum", "none")
UNKNOWN_LABELS = ("nan", "max")
LOW_PRECISION = (torch.bfloat16, torch.float16)
SUPPORTED_DTYPES = (*LOW_PRECISION, torch.float32)
ORDERS = ("natural", "mean_logit", "count")
VALIDATE_VARIABLE = "CCE_TP_VALIDATE"


def _check_finite(
    name: str, value: object, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r} must be a number")
    inside = low < value if open_low else low <= value
    if not (math.isfinite(value) and inside and value <= high):
        expected = f"in {'(' if open_low or low == -math.inf else '['}{low}, {high}{')' if high == math.inf else ']'}"
        raise ValueError(f"{name}={value!r} must be finite and {expected}")


def _check_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an int")


@dataclass(frozen=True)
class Exact:
    """Exact gradients: the logits are recomputed in vocabulary slabs of bounded size."""


@dataclass(frozen=True, kw_only=True)
class Filtered:
    """Gradients without the tiles of the softmax in which nothing reaches eps (Wijmans et al., ICLR 2025).

    A tile is 128 consecutive tokens by 128 of this rank's classifier rows. It is left out if every ``p < eps`` in it,
    with p over the whole vocabulary, and no token has its target there; the upstream gradient plays no part. So the
    gradient of a classifier row is off by at most ``eps sum_n |P_n| |E_n|``, where P_n is the token's factor on the
    softmax (the upstream gradient, plainly). Label smoothing is never left out. The loss itself is always exact.

    A nearly uniform softmax (``1 / V < eps``, as at initialisation) keeps hardly more than targets: for pre-training,
    filter the input's gradient alone (``weight=False``), or take another mode.

    Attributes:
        eps: in (0, 1].
        input: filter the gradient of the input.
        weight: filter those of the classifier and its bias.
        order: how this rank's rows are sorted into tiles; gradients come back in the natural order. "natural";
            "mean_logit", by their average logit in this batch; "count", by how many tiles of tokens need them, which
            leaves the fewest tiles; or a permutation of this rank's rows, ``[V_local]`` integers, which may differ from
            rank to rank.
    """

    eps: float = 2.0**-12
    input: bool = True
    weight: bool = True
    order: str | torch.Tensor = "natural"

    def __post_init__(self) -> None:
        _check_finite("Filtered: eps", self.eps, 0.0, 1.0, open_low=True)
        for name, value in (("input", self.input), ("weight", self.weight)):
            if not isinstance(value, bool):
                raise TypeError(f"Filtered: {name}={value!r} must be a bool")
        if not (self.input or self.weight):
            raise ValueError("Filtered: input=False and weight=False leave nothing to filter; use backward='exact'")
        if isinstance(self.order, torch.Tensor):
            if self.order.ndim != 1 or self.order.dtype not in (torch.int64, torch.int32):
                raise TypeError(
                    f"Filtered: order has shape {tuple(self.order.shape)} and dtype {self.order.dtype}, expected "
                    f"[V_local] int64 or int32"
                )
        elif self.order not in ORDERS:
            raise ValueError(f"Filtered: order={self.order!r} must be one of {ORDERS} or a tensor")

    def __eq__(self, other: object) -> bool:
        """Orders that are tensors are equal if they are the same one; comparing values would wait for the device."""
        if not isinstance(other, Filtered):
            return NotImplemented
        plain = (self.eps, self.input, self.weight) == (other.eps, other.input, other.weight)
        tensors = isinstance(self.order, torch.Tensor) or isinstance(other.order, torch.Tensor)
        return plain and (self.order is other.order if tensors else self.order == other.order)

    def agreed(self) -> str:
        """What ranks must have in common: all but the tensor's values, which concern this rank's rows alone."""
        order = "a tensor" if isinstance(self.order, torch.Tensor) else repr(self.order)
        return f"Filtered(eps={self.eps!r}, input={self.input}, weight={self.weight}, order={order})"


MOVES_WITH = 10.0
RARE_PROBABILITY = 2.0**-22.4
AUTO_EPS_RANGE = (2.0**-12, 2.0**-8)
"""The constants of ``auto_eps``: entries a step that a rare row shall get, what is rare, and the bounds of eps.

- ``RARE_PROBABILITY``: on the hidden states of SmolLM2-135M-Instruct (V = 49,152) at eps = 2^-8, the median row's
  sampling noise is a tenth of its signal (in energy) from 210,000 tokens on: a mean probability of 10 * 2^-8 / 210,000.
  It is the figure of a model at the end of its training, and p falls until then. In the short runs of
  ``examples/study_results/train.csv`` (V = 131,072), rows that never were a target went, at N / eps = 2^20, 92 % as far
  as with exact gradients in 40 steps, 85 % in 140, 77 % in 805: p between 2^-17 and 2^-20 by the rule below.
- ``MOVES_WITH``: 95 % as far, by that rule. Measured: 93 to 96 % (three models, 140 steps or fewer) at N / eps = 2^22
  and 16,384 tokens a step, 98.5 % at 2^24, 99.5 % at 2^24 and 65,536 tokens; at 1,024 tokens 89 % at 2^22. After 600
  steps (``adam_tail.csv``), at 2^-8: rows that are a target 10 to 99 times go 96 % as far with 262,144 tokens a step.
- The upper bound: at 2^-8 the sampling variance is about 1e-3 of the mini-batch's, or less, in every part of the
  gradient (``noise.csv``, from 4,096 tokens a step on; in rows that never are a target up to 9e-3 when training
  begins), and a larger eps saves less than a fifth of a step. The lower bound: at 2^-12 a step takes longer than with
  exact gradients.
"""


def auto_eps(tokens_per_step: int) -> float:
    """The eps of ``Sampled(eps="auto")``: a power of two that grows with the tokens of an optimizer step.

    A row of the classifier with mean probability p gets ``n = N p / eps`` sampled entries in a step of N tokens. Its
    gradient, a mean over tokens, then has the sampling variance ``eps p |e|^2 / N`` (e: a hidden state). Two things to
    hold it against:

    - the mini-batch's variance. A row that is a target as often as the model says has ``p (1 - p) |e|^2 / N`` of that.
      The ratio is at most about eps whatever N and p are, and the same holds for what depends on the hidden states'
      gradient: no reason for another eps than a small one. Measured at 2^-8: 1e-3, and 2e-4 on the layers before;
    - the row's mean gradient, ``p |e|`` at most. The ratio of energies is ``1 / n``. It matters for rows that are
      hardly ever a target: the mini-batch leaves them a small steady push away from the hidden states. Under Adam, a
      gradient with mean g and mean square ``g^2 (1 + 1 / n)`` moves the row ``1 / sqrt(1 + 1 / n)`` times as far as g
      alone would: a third as far at n = 1/8, 95 % at n = 10. Plain SGD moves it as far at any n.

    So eps is chosen for a rare row of p = ``RARE_PROBABILITY`` to get ``MOVES_WITH`` entries a step:
    ``eps = N RARE_PROBABILITY / MOVES_WITH``, rounded down to a power of two, within ``AUTO_EPS_RANGE``: 2^-12 up to
    27,000 tokens a step, 2^-8 from 217,000 on. Where the lower bound binds, rare rows still lag: at 1,024 tokens a
    step their norm came to 90 % of exact's. With less than some 108,000 tokens a step, for which eps is 2^-10 or less,
    ``Exact`` was as fast.
    """
    wanted = tokens_per_step * RARE_PROBABILITY / MOVES_WITH
    low, high = AUTO_EPS_RANGE
    return min(high, max(low, 2.0 ** math.floor(math.log2(wanted))))


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Unbiased sparse gradients: a small entry of the softmax is kept with a probability and scaled up by its inverse.

    An entry with probability p is kept with probability ``min(1, p / eps)``, nearly; targets, and the classifier rows
    that are the batch's most frequent targets, are computed exactly. The loss itself is always exact.

    Attributes:
        eps: in (0, 1]. Smaller keeps more entries and makes less noise. "auto" takes ``auto_eps(tokens_per_step)``, a
            number by the time that the constructor returns.
        tokens_per_step: with eps="auto", and only then: the tokens of an optimizer step, over all data-parallel ranks
            and accumulated micro-batches; the constructor leaves None.
        seed: None draws anew at every call (see ``cce_tp.sampler``); an int makes a call repeatable, with the same
            entries at every size of the group (as long as no list is full: ``entries_per_token`` counts on each rank).
        reference_rows: how many of the most frequent targets are computed exactly.
        entries_per_token: most entries kept a token on one rank, beside those; default ``1.5 / eps``. A token with more
            keeps a random subset, without bias but with more noise. Lists of this length are kept for the backward.
    """

    eps: float | str = 2.0**-8
    seed: int | None = None
    reference_rows: int = 1024
    entries_per_token: int | None = None
    tokens_per_step: int | None = None

    def __post_init__(self) -> None:
        self._settle_eps()
        _check_finite("Sampled: eps", self.eps, 0.0, 1.0, open_low=True)
        if self.seed is not None:
            _check_int("Sampled: seed", self.seed)
        for name, value in (("reference_rows", self.reference_rows), ("entries_per_token", self.most_entries)):
            _check_int(f"Sampled: {name}", value)
            if value < 1:
                raise ValueError(f"Sampled: {name}={value} must be at least 1")

    def _settle_eps(self) -> None:
        if isinstance(self.eps, str):
            if self.eps != "auto":
                raise ValueError(f"Sampled: eps={self.eps!r} must be a number or 'auto'")
            if self.tokens_per_step is None:
                raise ValueError("Sampled: eps='auto' needs tokens_per_step, the tokens of an optimizer step")
            _check_int("Sampled: tokens_per_step", self.tokens_per_step)
            if self.tokens_per_step < 1:
                raise ValueError(f"Sampled: tokens_per_step={self.tokens_per_step} must be at least 1")
            object.__setattr__(self, "eps", auto_eps(self.tokens_per_step))
            object.__setattr__(self, "tokens_per_step", None)
        elif self.tokens_per_step is not None:
            raise ValueError(
                f"Sampled: tokens_per_step={self.tokens_per_step!r} has no effect with eps={self.eps!r}; use eps='auto'"
            )

    @property
    def most_entries(self) -> int:
        """``entries_per_token``, or its default."""
        return math.ceil(1.5 / float(self.eps)) if self.entries_per_token is None else self.entries_per_token


Backward = Exact | Filtered | Sampled
_BACKWARD_BY_NAME: dict[str, type[Backward]] = {"exact": Exact, "filtered": Filtered, "sampled": Sampled}


def _parse_backward(value: object) -> Backward:
    if isinstance(value, str):
        if value not in _BACKWARD_BY_NAME:
            raise ValueError(f"backward={value!r} must be one of {tuple(_BACKWARD_BY_NAME)}")
        return _BACKWARD_BY_NAME[value]()
    if isinstance(value, Backward):
        return value
    raise TypeError(f"backward={value!r} must be a string or one of cce_tp.Exact(), Filtered(...), Sampled(...)")


def validate_by_environment() -> bool:
    """What ``validate=None`` means."""
    text = os.environ.get(VALIDATE_VARIABLE, "").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"environment variable {VALIDATE_VARIABLE}={text!r} must be 0 or 1")


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Everything about a call that isn't a tensor, a group or a shard. See ``linear_cross_entropy`` for the meanings.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the message names it, its value and
            what was expected.
    """

    reduction: str = "mean"
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    z_loss: float = 0.0
    sequence_parallel: bool = False
    sequence_dim: int = 0
    backward: str | Backward = "exact"
    comm_dtype: torch.dtype | None = None
    count_padding: bool = False
    unknown_labels: str = "nan"
    workspace: int | None = None
    validate: bool | None = None
    implementation: str = "auto"
    return_stats: bool = False
    mode: Backward = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction={self.reduction!r} must be one of {REDUCTIONS}")
        if self.unknown_labels not in UNKNOWN_LABELS:
            raise ValueError(f"unknown_labels={self.unknown_labels!r} must be one of {UNKNOWN_LABELS}")
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation={self.implementation!r} must be one of {IMPLEMENTATIONS}")
        if self.ignore_index is None:
            object.__setattr__(self, "ignore_index", -100)
        _check_int("ignore_index", self.ignore_index)
        if not -(2**63) <= self.ignored < 2**63:
            raise ValueError(f"ignore_index={self.ignored} must fit 64 bits")
        _check_finite("label_smoothing", self.label_smoothing, 0.0, 1.0)
        _check_finite("logit_scale", self.logit_scale)
        _check_finite("z_loss", self.z_loss, 0.0)
        if self.softcap is not None:
            _check_finite("softcap", self.softcap, 0.0, open_low=True)
        _check_int("sequence_dim", self.sequence_dim)
        if self.comm_dtype is not None and self.comm_dtype not in SUPPORTED_DTYPES:
            raise ValueError(f"comm_dtype={self.comm_dtype!r} must be None or one of {SUPPORTED_DTYPES}")
        if self.workspace is not None:
            _check_int("workspace", self.workspace)
            if self.workspace < 1:
                raise ValueError(f"workspace={self.workspace} must be a positive number of bytes")
        if self.validate is None:
            object.__setattr__(self, "validate", validate_by_environment())
        for name in ("sequence_parallel", "count_padding", "return_stats", "validate"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a bool")
        object.__setattr__(self, "mode", _parse_backward(self.backward))
        self._check_combinations()

    def _check_combinations(self) -> None:
        name = type(self.mode).__name__.lower()
        if isinstance(self.mode, Filtered) and self.workspace is not None:
            raise ValueError(
                f"workspace={self.workspace} can't bound backward='filtered', which takes a 128th of the logits' "
                f"size in bf16 to decide what it leaves out; leave workspace out"
            )
        if not isinstance(self.mode, Exact) and self.label_smoothing != 0.0 and self.softcap is not None:
            raise ValueError(
                f"backward={name!r} can't combine label_smoothing={self.label_smoothing} with softcap={self.softcap}: "
                f"the smoothing term is then dense; use backward='exact'"
            )

    @property
    def ignored(self) -> int:
        """``ignore_index`` as an int."""
        return -100 if self.ignore_index is None else self.ignore_index

    def agreed(self) -> dict[str, object]:
        """The options that must be the same on every rank of a group: they decide the arithmetic or the collectives."""
        names = (
            "reduction",
            "ignore_index",
            "label_smoothing",
            "logit_scale",
            "softcap",
            "z_loss",
            "sequence_parallel",
            "sequence_dim",
            "count_padding",
            "unknown_labels",
            "return_stats",
            "validate",
            "implementation",
        )
        by_name = {name: getattr(self, name) for name in names}
        mode = self.mode.agreed() if isinstance(self.mode, Filtered) else repr(self.mode)
        whether = {"whether workspace is given": self.workspace is not None} if isinstance(self.mode, Sampled) else {}
        return {**by_name, **whether, "backward": mode, "comm_dtype": str(self.comm_dtype)}

    def structure(self) -> tuple[object, ...]:
        """The part of ``agreed`` that decides which collectives a call issues; values that may follow a schedule, such
        as a scale or a seed, are no part of it."""
        return (
            self.label_smoothing != 0.0,
            self.sequence_parallel,
            self.sequence_dim,
            self.count_padding,
            self.return_stats,
            self.validate,
            type(self.mode).__name__,
            str(self.comm_dtype),
            # What the sampled mode does with hot rows, and how many there are.
            *((self.mode.reference_rows, self.workspace is None) if isinstance(self.mode, Sampled) else ()),
        )
