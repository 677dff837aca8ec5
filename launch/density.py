"""How peaked a model's softmax is, and what a sparse gradient makes of it. In blocks; nothing is N x V.

With p the softmax and G = p - onehot, the paper's filter leaves out a tile of 128 tokens x 128 vocabulary rows when
every |G| < eps in it. Whether some |G| >= eps is noted once for each block of 128 tokens and each vocabulary row; from
that small table the kept tiles of any order of the vocabulary follow.

The sampler keeps an entry with probability min(1, exp(z - r) / eps), hot rows and targets aside; r and the hot rows are
those of ``cce_tp.kernels.sampling``, the random numbers are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cce_tp.kernels import sampling
from cce_tp.kernels.interface import LocalProblem

from .model_files import Model

TILE = 128
BLOCK_BYTES = 64 * 2**20
"""One block of logits; three of them are alive at once."""
SLAB_ROWS = 4096
WIDENED_BYTES = 768 * 2**20
"""A classifier that is no larger in fp32 is widened once, a larger one slab by slab."""
PROFILE_TOKENS, PROFILE_RANKS = 512, 4096
RANDOM_ORDERS = 3
HOT_ROWS = 1024
EXACT, BF16_LOGITS = "exact", "bf16 logits"

Advance = Callable[[], None]


@dataclass
class AtTemperature:
    """What was counted at one temperature.

    Attributes:
        hits: bool ``[N / 128, V]``, some |G| >= eps in the block of tokens.
        target_hits: the same by targets alone.
        rows: tokens with a non-trivial entry, by vocabulary row, int64 ``[V]``.
        entries: p >= eps, by token.
        tail: probability below eps, by token.
        loss: by token.
        profile: mean p by rank within the token, over some of the tokens.
    """

    temperature: float
    hits: Tensor
    target_hits: Tensor
    rows: Tensor
    entries: list[Tensor] = field(default_factory=list)
    tail: list[Tensor] = field(default_factory=list)
    loss: list[Tensor] = field(default_factory=list)
    profile: Tensor = field(default_factory=lambda: torch.zeros(0))

    def rank_below(self, eps: float) -> int | None:
        """The first rank, from 1, whose mean p is below eps; None beyond those looked at."""
        below = (self.profile < eps).nonzero()
        return int(below[0]) + 1 if len(below) else None


@dataclass
class SamplerCount:
    """Beside hot rows and targets, which are exact: entries kept by token, and which rows got any."""

    eps: float
    kept: list[Tensor] = field(default_factory=list)
    occurs: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))


@dataclass(frozen=True)
class Anchor:
    """The sampler's reference point r of each token, and the rows that it computes exactly."""

    r: Tensor
    hot: Tensor

    @classmethod
    def of(cls, model: Model, weight: Tensor) -> Anchor:
        active = torch.ones(len(model.target), dtype=torch.bool)
        rows = sampling.anchor_rows(model.target, active, sampling.RowIds.whole(len(weight)), HOT_ROWS)
        problem = LocalProblem(model.hidden.to(weight.dtype), weight, model.target)
        return cls(sampling.anchor(sampling.anchor_sums(problem, rows), rows), rows.hot)


@dataclass(frozen=True)
class Density:
    """The counts over all tokens."""

    at: list[AtTemperature]
    sampler: list[SamplerCount]
    mean_logit: Tensor
    anchor: Anchor


def widened(weight: Tensor) -> Tensor:
    """In fp32, if that is not too much."""
    return weight.float() if weight.numel() * 4 <= WIDENED_BYTES else weight


def _block_tokens(vocabulary: int) -> int:
    return max(1, BLOCK_BYTES // (4 * vocabulary * TILE)) * TILE


def num_blocks(model: Model) -> int:
    """Steps of :func:`count`."""
    return -(-len(model.target) // _block_tokens(len(model.weight)))


def _logits(tokens: Tensor, weight: Tensor, z: Tensor) -> Tensor:
    """Into ``z``."""
    for start in range(0, len(weight), SLAB_ROWS):
        slab = slice(start, start + SLAB_ROWS)
        torch.mm(tokens, weight[slab].float().T, out=z[:, slab])
    return z


def _count_by_tile(flags: Tensor) -> Tensor:
    """Zeros and ones ``[n, V]`` to their sums over blocks of 128 tokens, ``[ceil(n / 128), V]``."""
    whole = len(flags) // TILE * TILE
    sums = flags[:whole].view(-1, TILE, flags.shape[1]).sum(1)
    return sums if whole == len(flags) else torch.cat([sums, flags[whole:].sum(0, keepdim=True)])


def count(
    model: Model, weight: Tensor, temperatures: Sequence[float], eps: float, sampler_eps: Sequence[float], step: Advance
) -> Density:
    """One pass over all tokens, ``num_blocks`` steps."""
    tokens, vocabulary = len(model.target), len(weight)
    tiles = -(-tokens // TILE)
    at = [
        AtTemperature(
            temperature,
            torch.zeros(tiles, vocabulary, dtype=torch.bool),
            torch.zeros(tiles, vocabulary, dtype=torch.bool),
            torch.zeros(vocabulary, dtype=torch.int64),
        )
        for temperature in temperatures
    ]
    anchor = Anchor.of(model, weight)
    sampler = [SamplerCount(value, occurs=torch.zeros(vocabulary, dtype=torch.bool)) for value in sampler_eps]
    logit_sum = torch.zeros(vocabulary)
    generator = torch.Generator().manual_seed(0)
    profiles: list[list[Tensor]] = [[] for _ in at]
    stride = max(1, tokens // PROFILE_TOKENS)
    block = _block_tokens(vocabulary)
    logits, *buffers = (torch.empty(min(block, tokens), vocabulary) for _ in range(3))
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        target = model.target[part]
        z = _logits(model.hidden[part].float(), weight, logits[: len(target)])
        logit_sum += z.sum(0)
        highest = z[::stride].topk(min(PROFILE_RANKS, vocabulary)).values
        first, second = (buffer[: len(target)] for buffer in buffers)
        for state, profile in zip(at, profiles, strict=True):
            lse = _count_temperature(state, z, first, second, target, eps, start // TILE)
            profile.append(torch.exp(highest / state.temperature - lse[::stride, None]))
        _count_sampler(sampler, z, (first, second), target, (anchor.r[part], anchor.hot), generator)
        step()
    for state, profile in zip(at, profiles, strict=True):
        state.profile = torch.cat(profile).mean(0)
    return Density(at, sampler, logit_sum / tokens, anchor)


def _count_temperature(
    state: AtTemperature, z: Tensor, p: Tensor, flags: Tensor, target: Tensor, eps: float, first_tile: int
) -> Tensor:
    """Add a block of tokens; p and flags are overwritten. Returns the LSE.

    Flags are numbers: mixing types would make torch convert and allocate, which takes longer than all the rest.
    """
    torch.div(z, state.temperature, out=p)
    picked = p.gather(1, target[:, None])
    top = p.amax(1, keepdim=True)
    total = p.sub_(top).exp_().sum(1, keepdim=True)
    lse = top + total.log()
    state.loss.append((lse - picked)[:, 0])

    # p still lacks the division by its total, which would be one more walk through memory.
    at_target = p.gather(1, target[:, None]) / total
    torch.ge(p, eps * total, out=flags)
    state.entries.append(flags.sum(1))
    state.tail.append(1.0 - p.mul_(flags).sum(1) / total[:, 0])
    # From here on it is |G| >= eps that counts, and at the target G is p - 1.
    forced = 1.0 - at_target >= eps
    flags.scatter_(1, target[:, None], forced.float())
    counts = _count_by_tile(flags)
    state.hits[first_tile : first_tile + len(counts)] = counts > 0
    state.rows += counts.sum(0).long()
    token = forced[:, 0].nonzero()[:, 0]
    state.target_hits[first_tile + token // TILE, target[token]] = True
    return lse[:, 0]


def _count_sampler(
    sampler: list[SamplerCount],
    z: Tensor,
    buffers: tuple[Tensor, Tensor],
    target: Tensor,
    anchor: tuple[Tensor, Tensor],
    generator: torch.Generator,
) -> None:
    """Add a block of tokens; z and the buffers are overwritten."""
    (r, hot), (uniform, flags) = anchor, buffers
    odds = z.sub_(r[:, None]).exp_()
    odds.index_fill_(1, hot, 0.0)
    odds.scatter_(1, target[:, None], 0.0)
    # Kept iff u < odds / eps: one random number serves every eps, which is right for each alone.
    uniform.uniform_(generator=generator)
    for state in sampler:
        torch.mul(uniform, state.eps, out=flags)
        torch.gt(odds, flags, out=flags)
        state.occurs |= flags.sum(0) > 0
        state.kept.append(flags.sum(1))


@dataclass(frozen=True)
class Order:
    """Where each vocabulary row is put before tiles are cut."""

    name: str
    rows: Tensor | None

    def tiles(self, hits: Tensor) -> Tensor:
        """Bool ``[N / 128, V / 128]``: tiles that are kept."""
        placed = hits if self.rows is None else hits[:, self.rows]
        missing = -placed.shape[1] % TILE
        placed = torch.nn.functional.pad(placed, (0, missing))
        return placed.view(len(placed), -1, TILE).any(2)


def orders(density: Density, state: AtTemperature) -> list[Order]:
    """Natural, by mean logit, by count at this temperature."""
    return [
        Order("natural", None),
        Order("mean logit", density.mean_logit.argsort(descending=True)),
        Order("count", state.rows.argsort(descending=True, stable=True)),
    ]


def random_keep(hits: Tensor) -> float:
    """Share of tiles kept in random order."""
    generator = torch.Generator().manual_seed(1)
    shares = []
    for _ in range(RANDOM_ORDERS):
        order = Order("random", torch.randperm(hits.shape[1], generator=generator))
        shares.append(float(order.tiles(hits).float().mean()))
    return sum(shares) / len(shares)


# -- errors of the gradients, on a batch


@dataclass
class _Sums:
    """Over all slabs: a method's deviation in grad E, the squares of that in grad C, and rows of grad C that are 0."""

    input: Tensor
    weight: float = 0.0
    zero_rows: int = 0


@dataclass(frozen=True)
class GradientError:
    """How far a method's gradients are off, relative to the exact ones (Frobenius).

    Attributes:
        input, weight: of the gradients of E and C.
        zero_rows: share of the vocabulary whose row of grad C is exactly zero.
    """

    input: float
    weight: float
    zero_rows: float


Deviation = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From G, p and z of a slab to what the method's G has too much."""


def num_slabs(weight: Tensor) -> int:
    """Steps of :func:`gradient_errors`."""
    return 2 * -(-len(weight) // SLAB_ROWS)


def gradient_errors(
    model: Model,
    weight: Tensor,
    density: Density,
    tokens: int,
    filter_eps: Sequence[float],
    sampler_eps: Sequence[float],
    step: Advance,
) -> dict[str, GradientError]:
    """By method, on a batch of the first ``tokens`` tokens; the vocabulary is walked in their mean logits' order."""
    e, target = model.hidden[:tokens].float(), model.target[:tokens]
    order = _logits(e.mean(0, keepdim=True), weight, torch.empty(1, len(weight)))[0].argsort(descending=True)
    slabs = [order[start : start + SLAB_ROWS] for start in range(0, len(weight), SLAB_ROWS)]
    lse, rounded_lse = _log_sums(e, weight, slabs, step)
    walker = _Deviations(lse, rounded_lse, density.anchor.r[:tokens], density.anchor.hot, len(weight))
    methods: dict[str, Deviation] = {EXACT: lambda g, p, z: torch.zeros_like(g)}
    methods |= walker.methods(filter_eps, sampler_eps)
    sums = {name: _Sums(torch.zeros_like(e)) for name in methods}
    exact = _Sums(torch.zeros_like(e))
    place = torch.empty(len(weight), dtype=torch.int64)
    place[order] = torch.arange(len(weight))
    for index, rows in enumerate(slabs):
        c = weight[rows].float()
        z = e @ c.T
        p = torch.exp(z - lse[:, None])
        here = place[target] - index * SLAB_ROWS
        inside = ((here >= 0) & (here < len(rows))).nonzero()[:, 0]
        onehot = torch.zeros_like(p)
        onehot[inside, here[inside]] = 1.0
        g = p - onehot
        walker.enter(rows, onehot)
        _add(exact, g, c, e)
        for name, method in methods.items():
            deviation = method(g, p, z)
            sums[name].zero_rows += int((deviation == -g).all(0).sum())
            if name != EXACT:
                _add(sums[name], deviation, c, e)
        step()
    return {
        name: GradientError(
            float(found.input.double().norm() / exact.input.double().norm()),
            (found.weight / exact.weight) ** 0.5,
            found.zero_rows / len(weight),
        )
        for name, found in sums.items()
    }


def _add(sums: _Sums, g: Tensor, c: Tensor, e: Tensor) -> None:
    sums.input.addmm_(g, c)
    sums.weight += float((g.T @ e).double().square().sum())


def _log_sums(e: Tensor, weight: Tensor, slabs: Sequence[Tensor], step: Advance) -> tuple[Tensor, Tensor]:
    """The LSE, and that of logits rounded to bf16."""
    exact, rounded = [], []
    for rows in slabs:
        z = e @ weight[rows].float().T
        exact.append(z.logsumexp(1))
        rounded.append(z.bfloat16().float().logsumexp(1))
        step()
    return torch.stack(exact).logsumexp(0), torch.stack(rounded).logsumexp(0)


class _Deviations:
    """The methods, and what they need to know about the slab at hand."""

    def __init__(self, lse: Tensor, rounded_lse: Tensor, r: Tensor, hot: Tensor, vocabulary: int) -> None:
        self.lse, self.rounded_lse, self.r = lse, rounded_lse, r
        self.is_hot = torch.zeros(vocabulary, dtype=torch.bool)
        self.is_hot[hot] = True
        self.generator = torch.Generator().manual_seed(2)
        self.certain, self.onehot = torch.zeros(0), torch.zeros(0)

    def enter(self, rows: Tensor, onehot: Tensor) -> None:
        """Go on to a slab."""
        self.onehot = onehot
        self.certain = self.is_hot[rows] | (onehot > 0)

    def methods(self, filter_eps: Sequence[float], sampler_eps: Sequence[float]) -> dict[str, Deviation]:
        found: dict[str, Deviation] = {
            "bf16 G": lambda g, p, z: g.bfloat16().float() - g,
            BF16_LOGITS: lambda g, p, z: self._rounded_logits(z) - p,
        }
        for eps in filter_eps:
            found[f"tile filter {eps}"] = lambda g, p, z, eps=eps: self._filtered(g, eps)  # type: ignore[misc]
        for eps in sampler_eps:
            found[f"sampled {eps}"] = lambda g, p, z, eps=eps: self._sampled(p, z, eps)  # type: ignore[misc]
        return found

    def _rounded_logits(self, z: Tensor) -> Tensor:
        return torch.exp(z.bfloat16().float() - self.rounded_lse[:, None])

    def _filtered(self, g: Tensor, eps: float) -> Tensor:
        """-G where it is left out. Slabs are whole tiles, but for the last."""
        tiles, columns = _count_by_tile((g.abs() >= eps).float()) > 0, g.shape[1]
        kept = Order("", None).tiles(tiles)
        kept = kept.repeat_interleave(TILE, 0)[: len(g)].repeat_interleave(TILE, 1)[:, :columns]
        return g.neg().masked_fill_(kept, 0.0)

    def _sampled(self, p: Tensor, z: Tensor, eps: float) -> Tensor:
        """p (kept / pi - 1) where chance decides."""
        pi = torch.exp(z - self.r[:, None]).div_(eps).clamp_(max=1.0)
        kept = torch.rand(pi.shape, generator=self.generator) < pi
        weight = torch.where(kept, pi.reciprocal(), 0.0)
        return (p * (weight - 1.0)).masked_fill_(self.certain, 0.0)
