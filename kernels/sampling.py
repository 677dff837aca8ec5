"""The sampled backward's decisions: which entries of the softmax's gradient are kept, and what they then weigh.

An entry (token n, vocabulary id v) of p is kept with probability ``pi = min(1, exp(z_nv - r_n) / eps)`` and, if kept,
stands for ``p / pi``; so the expectation of the sparse gradient is the exact one. r, the *anchor*, is any number close
to the token's LSE that is known before the logits are: it decides how many entries are kept, never what they add up to.

Three kinds of entries are not left to chance:

- the *hot rows*: the classifier rows that are the batch's most frequent targets. They hold most of the mass, so their
  part of the gradient is computed densely (a small matrix product), and they serve to estimate r;
- every token's own target;
- label smoothing, which without a softcap is a product of two vectors.

Numerics. Randomness is a hash of (seed, token, *global* vocabulary id), so a decision depends neither on the number of
ranks nor on the tiles. Token and id are hashed well, each for itself, which costs nothing; what an entry costs is one
multiplication, ``a_n b_v + c_n mod 2^32``, whose upper bits are uniform, and independent for any two entries but for
some 2^-20 of the pairs. Variances ask for no more than that. ``u`` has 23 bits and is compared as a float in [1, 2):
``u + 1 < fl(1 + pi)``. The probability of that is exactly ``fl(1 + pi) - 1``, which is therefore what the weight
divides by; below ``pi = 2^-24`` nothing is kept.

Lists are bounded without a look at the data: a token that kept more than its budget of entries keeps a systematic
sample of them, entry i iff ``(i b + phi) mod count < b`` for one uniform phi a token, and its weights take the factor
``count / b``. Nothing is ever truncated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .interface import LocalProblem

GOLDEN = 0x9E3779B1
MIX_1 = 0x7FEB352D
MIX_2 = 0x846CA68B
TOKEN_SALT = 0x2545F491
ID_SALT = 0x3C6EF372
PHASE_SALT = 0x1B56C4E9
OFFSET_SALT = 0x6A09E667
_MASK = 0xFFFFFFFF

WORD_BITS = 32
"""Decisions on neighbouring columns that share a word of a bitmap."""
SMALLEST_SUM, LARGEST_SUM = 2.0**-90, 2.0**20
"""Between them, a tile's sum of exponentials relative to the anchor is as good as one relative to its maximum."""
COLD_ROWS = 256
"""Rows outside the hot ones whose logits stand for all the others' in the anchor. Where those have a standard deviation
of 2.5 nats, their part is known to 0.3 nats, and it is a small part wherever the softmax isn't flat."""
LEEWAY = 3.0
"""By how much the others' part may exceed what the sample's exponentials say."""
FAR_BELOW = 40.0
"""Nats by which the anchor of a token is lowered whose largest logit has to be found: see ``lowered``."""
_ANCHOR_TOKENS = 1024
LARGEST_EXPONENT = 600.0


@dataclass(frozen=True)
class RowIds:
    """Which part of the vocabulary a rank holds.

    Attributes:
        vocab_size: ids over the whole group.
        first: id of the rank's row 0.
        num_real: rows that have an id; those after them are padding.
        num_rows: rows that enter the softmax.
    """

    vocab_size: int
    first: int
    num_real: int
    num_rows: int

    @classmethod
    def whole(cls, vocab_size: int) -> RowIds:
        """Those of a single shard without padding."""
        return cls(vocab_size, 0, vocab_size, vocab_size)


@dataclass(frozen=True)
class AnchorRows:
    """The rows that the anchor looks at, as one rank sees them: hot ones, and a strided sample of all ids.

    Attributes:
        rows: int64 ``[H + S]``, this rank's rows: hot ones by ascending id, then the sample's; -1 for those of another
            rank, and for ids of the sample that are hot.
        num_hot: H.
        place: int32 ``[num_rows]``, what number a row has among the hot ones, from 1; 0 for a row that isn't hot.
        num_cold: int32 ``[1]``, how many ids of the sample aren't hot, over the whole vocabulary.
        vocab_size: ids over the whole group.
        ids: int64 ``[H + S]``, their ids, the same on every rank; -1 for ids of the sample that are hot.
        place_of_id: int32 ``[V]`` or more, ``place`` of every id of the whole vocabulary.
    """

    rows: Tensor
    num_hot: int
    place: Tensor
    num_cold: Tensor
    vocab_size: int
    ids: Tensor
    place_of_id: Tensor

    @property
    def hot(self) -> Tensor:
        return self.rows[: self.num_hot]

    @property
    def num_others(self) -> int:
        """Ids that aren't hot, over the whole vocabulary."""
        return self.vocab_size - self.num_hot

    def target_place(self, target: Tensor) -> Tensor:
        """What number each token's target has among the hot rows, from 1; 0 for the others: int32 ``[N]``."""
        known = (target >= 0) & (target < self.vocab_size)
        return torch.where(known, self.place_of_id[torch.where(known, target, 0)], 0)


@dataclass(frozen=True)
class HotExponentials:
    """Of the hot rows' logits, for the backward pass, which then needs no second product with them.

    Two bytes say what it takes: each value is relative to the largest logit of a few neighbours.

    Attributes:
        values: ``exp(z - top)`` of this rank's tokens and all hot rows, ``[n, H]`` in E's dtype.
        tops: fp32 ``[n, ceil(H / width)]``, the largest logits of so many rows each; 0 for -inf.
        width: rows that share one.
    """

    values: Tensor
    tops: Tensor
    width: int


@dataclass(frozen=True)
class SharedRows:
    """The rows that the anchor looks at, on every rank, each of which multiplies them with its share of the tokens.

    Attributes:
        weight: ``[H + S, D]``; rows without an id are 0.
        first, last: this rank's tokens, and the one behind them.
        ready: to be called before anything reads ``weight``, which may be on its way here, once whatever doesn't need
            it has been started.
        exponentials: those of this rank's tokens, to be written; None where nobody needs them.
    """

    weight: Tensor
    first: int
    last: int
    ready: Callable[[], object] = lambda: None
    exponentials: HotExponentials | None = None


@dataclass(frozen=True)
class SharedHot:
    """What is left of ``SharedRows`` for the backward pass.

    Attributes:
        weight: ``[H, D]``, all hot rows.
        ids: int64 ``[H]``.
        target_place: int32 ``[N]``, see ``AnchorRows.target_place``.
        first, last: this rank's tokens, and the one behind them.
        exponentials: what ``SharedRows`` kept, if it did.
        target_logit: fp32 ``[N]``, then: two bytes don't tell how far a likely target's p is from 1.
    """

    weight: Tensor
    ids: Tensor
    target_place: Tensor
    first: int
    last: int
    exponentials: HotExponentials | None = None
    target_logit: Tensor | None = None

    @property
    def num_hot(self) -> int:
        return self.weight.shape[0]


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers in which every input bit flips about half the output's (int64 tensors)."""
    x = x & _MASK
    x = x ^ (x >> 16)
    x = (x * MIX_1) & _MASK
    x = x ^ (x >> 15)
    x = (x * MIX_2) & _MASK
    return x ^ (x >> 16)


def token_hash(seed: Tensor, tokens: Tensor) -> Tensor:
    """One 32-bit hash a token; ``tokens`` are numbers within the batch, int64."""
    low, high = seed & _MASK, (seed >> 32) & _MASK
    return mix(mix(tokens * GOLDEN + low) + high + TOKEN_SALT)


def id_hash(seed: Tensor, ids: Tensor) -> Tensor:
    """One 32-bit hash a vocabulary id, int64."""
    return mix(ids * GOLDEN + ID_SALT + (seed & _MASK))


def uniform_in_1_2(token: Tensor, column: Tensor) -> Tensor:
    """The entry's random number, fp32 in [1, 2) with 23 bits, from both hashes. Broadcasts."""
    x = ((token | 1) * column + mix(token + OFFSET_SALT)) & _MASK
    return ((x >> 9) | 0x3F800000).to(torch.int32).view(torch.float32)


def inclusion(z: Tensor, anchor: Tensor, eps: float) -> Tensor:
    """``fl(1 + exp(z - r) / eps)``, at most 2: what the random number in [1, 2) is compared with."""
    return torch.exp((z - anchor) - math.log(eps)).clamp(max=1.0) + 1.0


def thinned(position: Tensor, count: Tensor, budget: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
    """Systematic sampling of ``budget`` of ``count`` entries.

    Returns:
        Whether the entry at ``position`` stays, and its place among those that do.
    """
    running = position * budget + phase
    stays = running % count.clamp(min=1) < budget
    place = running // count.clamp(min=1) - (phase >= budget).to(running.dtype)
    return stays, place


def phase(token: Tensor, count: Tensor) -> Tensor:
    """Where a token's systematic sample begins: uniform in ``[0, count)``; ``token`` are token hashes."""
    return (mix(token + PHASE_SALT) * count) >> 32


def anchor_rows(target: Tensor, active: Tensor, ids: RowIds, reference_rows: int) -> AnchorRows:
    """Choose hot rows and a cold sample: the same on every rank, each of which sees its own part.

    The hot rows are the ``min(reference_rows, V)`` most frequent targets, the lowest ids first among equals.

    Args:
        target: int64 ``[N]``, vocabulary ids.
        active: bool ``[N]``; other tokens' targets don't count.
    """
    vocab_size, device = ids.vocab_size, target.device
    known = active & (target >= 0) & (target < vocab_size)
    counts = torch.zeros(vocab_size + 1, dtype=torch.int64, device=device)
    counts.scatter_add_(0, torch.where(known, target, vocab_size), known.long())
    # A key without ties: the choice must be the same on every rank.
    key = counts[:vocab_size] * vocab_size + torch.arange(vocab_size - 1, -1, -1, device=device)
    hot = key.topk(min(reference_rows, vocab_size)).indices.sort().values
    is_hot = torch.zeros(vocab_size, dtype=torch.bool, device=device).index_fill_(0, hot, True)
    size = min(COLD_ROWS, vocab_size)
    sample = torch.arange(size, device=device) * vocab_size // size
    is_cold = ~is_hot[sample]

    hot_rows = _here(hot, ids)
    place = torch.zeros(ids.num_rows + 1, dtype=torch.int32, device=device)
    numbers = torch.arange(1, len(hot) + 1, dtype=torch.int32, device=device)
    place.scatter_(0, torch.where(hot_rows >= 0, hot_rows, ids.num_rows), numbers)
    rows = torch.cat([hot_rows, torch.where(is_cold, _here(sample, ids), -1)])
    place_of_id = torch.zeros(vocab_size, dtype=torch.int32, device=device).index_copy_(0, hot, numbers)
    every = torch.cat([hot, torch.where(is_cold, sample, -1)])
    num_cold = is_cold.sum(dtype=torch.int32)[None]
    return AnchorRows(rows, len(hot), place[:-1], num_cold, vocab_size, every, place_of_id)


def gather_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Rows of a matrix by number, int64 ``[R]``; zeros for negative ones."""
    if matrix.shape[0] == 0:
        return matrix.new_zeros(len(rows), matrix.shape[1])
    return torch.where((rows >= 0)[:, None], matrix[rows.clamp(min=0)], 0.0)


def lowered(anchor: Tensor, tokens: Tensor) -> Tensor:
    """The anchor of some tokens, bool ``[N]``, far below their LSE.

    The forward pass of the sampled mode sums relative to the anchor and finds no maximum, unless a sum is too large for
    that. So low, it is too large in the tile that holds the largest logit, which is no less than ``LSE - log V``, and
    the partials' maximum is the token's. Its list is full then: still unbiased, with more noise.
    """
    return torch.where(tokens, anchor - FAR_BELOW, anchor)


def _here(wanted: Tensor, ids: RowIds) -> Tensor:
    """Rows of vocabulary ids; -1 for those of another rank."""
    rows = wanted - ids.first
    return torch.where((rows >= 0) & (rows < ids.num_real), rows, -1)


def anchor_sums(problem: LocalProblem, rows: AnchorRows, shared: SharedRows | None = None) -> Tensor:
    """This rank's part of the anchor, to be summed over the group: fp64 ``[5, N]``.

    Sum of exponentials over hot rows; the target's exponential where it isn't hot; and over the cold sample the sums of
    logits, of their squares and of their exponentials. Sums in fp64 hardly depend on how the rows are split, so neither
    does the anchor.

    Args:
        shared: where every rank has all rows: then all but the targets is summed over this rank's tokens only.
    """
    sums = torch.zeros(5, problem.num_tokens, dtype=torch.float64, device=problem.input.device)
    if shared is not None:
        shared.ready()
    if problem.num_tokens == 0 or (problem.num_rows == 0 and shared is None):
        return sums
    looked_at, number = rows.rows.clamp(min=0), torch.arange(len(rows.rows), device=rows.rows.device)
    present = (rows.rows if shared is None else rows.ids) >= 0
    hot, cold = present & (number < rows.num_hot), present & (number >= rows.num_hot)
    # Products in fp64: a library's fp32 ones depend on how many tokens there are, and the anchor is not to.
    weight = (problem.weight[looked_at] if shared is None else shared.weight).double()
    first, last = (0, problem.num_tokens) if shared is None else (shared.first, shared.last)
    for start in range(first, last, _ANCHOR_TOKENS):
        block = slice(start, min(start + _ANCHOR_TOKENS, last))
        z = finish_logits(problem, problem.input[block].double() @ weight.T, looked_at)
        exponentials = _wide_exp(z)
        cold_z = torch.where(cold, z, 0.0).double()
        sums[0, block] = torch.where(hot, exponentials, 0.0).sum(dim=1)
        sums[2, block] = cold_z.sum(dim=1)
        sums[3, block] = cold_z.square().sum(dim=1)
        sums[4, block] = torch.where(cold, exponentials, 0.0).sum(dim=1)
    if problem.num_rows > 0:
        sums[1] = _target_exponentials(problem, rows)
    return sums


def _target_exponentials(problem: LocalProblem, rows: AnchorRows) -> Tensor:
    """0 where the target is another rank's, or hot: it would count twice."""
    row = problem.target.clamp(min=0)
    dots = torch.zeros(problem.num_tokens, dtype=torch.float32, device=problem.input.device)
    for start in range(0, problem.num_tokens, _ANCHOR_TOKENS):
        block = slice(start, start + _ANCHOR_TOKENS)
        dots[block] = (problem.input[block].float() * problem.weight[row[block]].float()).sum(dim=1)
    z = finish_logits(problem, dots[:, None], row, paired=True)[:, 0]
    return torch.where((problem.target >= 0) & (rows.place[row] == 0), _wide_exp(z), 0.0)


def _wide_exp(z: Tensor) -> Tensor:
    return z.double().clamp(max=LARGEST_EXPONENT).exp()


def finish_logits(problem: LocalProblem, products: Tensor, rows: Tensor, paired: bool = False) -> Tensor:
    """z from products with some of C's rows: columns are ``rows``, or if ``paired`` line n goes with ``rows[n]``."""
    z = products.float()
    if problem.bias is not None:
        picked = problem.bias[rows].float()
        z = z + (picked[:, None] if paired else picked)
    z = z * problem.logit_scale
    return z if problem.softcap is None else problem.softcap * torch.tanh(z / problem.softcap)


def anchor(sums: Tensor, rows: AnchorRows) -> Tensor:
    """r, fp32 ``[N]``, from the group's sums.

    The cold rows' part is estimated twice from their sample: as if their logits were normal (mean plus half the
    variance), and by the mean of their exponentials. The latter mostly misses the few rows that matter; the former
    overshoots if the logits have two modes. So the former counts, but no more than ``LEEWAY`` times the latter: an
    anchor too low makes longer lists, one too high more noise. Without a cold row in the sample, that mean is 0.
    """
    size = rows.num_cold.clamp(min=1)
    mean = sums[2] / size
    normal = mean + 0.5 * (sums[3] / size - mean.square()).clamp(min=0.0)
    typical = torch.minimum(normal.clamp(max=LARGEST_EXPONENT).exp(), LEEWAY * sums[4] / size)
    return (sums[0] + sums[1] + rows.num_others * typical).log().float()
