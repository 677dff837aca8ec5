"""``study.py noise``: the sampled gradient's variance next to the mini-batch's, at three moments of an exact run.

For the gradient g of a batch of B tokens, and its sampled estimate s, over batches and seeds::

    signal    |E g|^2            batch     E |g - E g|^2            sampling   E |s - g|^2

summed over the elements of a part: the trunk's parameters, the classifier's rows in a band of frequency. Of the hidden
states' gradient, which is one vector a token, ``batch`` is the variance over tokens: what the variance of everything
behind it is made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import study_pool
import torch
from study_model import BANDS, SAMPLED, Recipe, Trainer, backward_of, band_of, hidden_states
from study_pool import Row, Table, run_jobs
from study_train import open_data
from text_data import Windows
from torch import Tensor

import cce_tp
from cce_tp.options import Backward

MOMENTS = (0.1, 0.4, 1.0)
"""Parts of the run after which is measured."""


@dataclass(frozen=True)
class Task:
    """A run with exact gradients, and what is measured in it."""

    recipe: Recipe
    tokens: Path
    seq_len: int
    batches: tuple[tuple[int, int], ...]
    modes: tuple[str, ...]
    seeds: int


TASKS = {
    "full": (("small", 700, 16_384),),
    "tiny": (("tiny", 8, 128),),
}
BATCHES = {"full": ((1024, 8), (4096, 8), (16_384, 6), (65_536, 4)), "tiny": ((64, 3), (128, 2))}
"""(Tokens a batch, how many batches) to measure."""


@dataclass(frozen=True)
class Gradients:
    """Of one batch's mean loss, fp32: hidden states ``[B, D]``, trunk (one vector), classifier ``[V, D]``."""

    hidden: Tensor
    trunk: Tensor
    classifier: Tensor


class Meter:
    """Gradients of batches, exact and sampled, at the present parameters of a run."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.trunk = [p for name, p in trainer.model.named_parameters() if name.startswith(("blocks", "norm"))]
        self.weight = trainer.model.head.weight.detach().to(trainer.dtype).requires_grad_()

    def gradients(self, rows: Tensor, backwards: Sequence[Backward]) -> list[Gradients]:
        """Of windows ``rows``, once for each of ``backwards``; the trunk's forward pass is shared."""
        found: list[list[Gradients]] = [[] for _ in backwards]
        weights = [torch.zeros_like(self.weight, dtype=torch.float32) for _ in backwards]
        parts = self.trainer.micro_batches(rows)
        for part in parts:
            hidden = self.trainer.call(hidden_states, part)
            target = part[:, 1:].flatten()
            for results, weight, backward in zip(found, weights, backwards, strict=True):
                leaf = hidden.detach().requires_grad_()
                loss = cce_tp.linear_cross_entropy(leaf, self.weight, target, backward=backward, main_grad=weight)
                assert isinstance(loss, Tensor)
                (loss * len(target) / rows[:, 1:].numel()).backward()
                assert leaf.grad is not None
                trunk = torch.autograd.grad(hidden, self.trunk, leaf.grad, retain_graph=True)
                results.append(Gradients(leaf.grad.float(), _flat(trunk), weight))
        return [
            Gradients(torch.cat([g.hidden for g in results]), sum_of([g.trunk for g in results]), weight)
            for results, weight in zip(found, weights, strict=True)
        ]


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Without a zero to start from, unlike ``sum``."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


PARTS = ("hidden", "trunk", "classifier", *(f"classifier {band}" for band in BANDS))


def energies(gradients: Gradients, band: Tensor) -> Tensor:
    """Squared norms by ``PARTS``, fp64."""
    rows = gradients.classifier.square().sum(dim=1).double()
    by_band = torch.zeros(len(BANDS), dtype=torch.float64, device=rows.device).index_add_(0, band, rows)
    whole = [gradients.hidden.double().square().sum(), gradients.trunk.double().square().sum(), rows.sum()]
    return torch.cat([torch.stack(whole), by_band])


def minus(a: Gradients, b: Gradients) -> Gradients:
    """Their difference."""
    return Gradients(a.hidden - b.hidden, a.trunk - b.trunk, a.classifier - b.classifier)


def measure_batches(meter: Meter, windows: Windows, tokens: int, count: int, task: Task, band: Tensor) -> list[Row]:
    """A row for each mode and part, from ``count`` batches of ``tokens`` tokens."""
    rows = tokens // task.seq_len
    names = [mode for mode in task.modes for _ in range(task.seeds)]
    backwards = [backward_of(name) for name in ("exact", *names)]
    exact: list[Gradients] = []
    sampling = {mode: torch.zeros(len(PARTS), dtype=torch.float64, device=band.device) for mode in task.modes}
    inflation = dict.fromkeys(task.modes, 0.0)
    for index in range(count):
        batch = windows.shuffled(index * rows, rows, 1_000_003).to(band.device)
        true, *estimates = meter.gradients(batch, backwards)
        for name, estimate in zip(names, estimates, strict=True):
            sampling[name] += energies(minus(estimate, true), band) / (count * task.seeds)
            growth = estimate.trunk.norm() / true.trunk.norm() - 1
            inflation[name] += growth.item() / (count * task.seeds)
        exact.append(true)
    signal, batch_variance = _signal_and_variance(exact, band)
    return [
        {
            "size": task.recipe.size,
            "step": meter.trainer.step,
            "batch_tokens": tokens,
            "mode": mode,
            "part": part,
            "signal": signal[index].item(),
            "batch_variance": batch_variance[index].item(),
            "sampling_variance": sampling[mode][index].item(),
            "trunk_norm_inflation": inflation[mode],
        }
        for mode in task.modes
        for index, part in enumerate(PARTS)
    ]


def _signal_and_variance(exact: Sequence[Gradients], band: Tensor) -> tuple[Tensor, Tensor]:
    """``|E g|^2`` and ``E |g - E g|^2`` by ``PARTS``, unbiased, from several batches."""
    count = len(exact)
    mean = Gradients(
        sum_of([g.hidden for g in exact]) / count,
        sum_of([g.trunk for g in exact]) / count,
        sum_of([g.classifier for g in exact]) / count,
    )
    deviation = sum_of([energies(minus(g, mean), band) for g in exact])
    variance = deviation / (count - 1)
    signal = energies(mean, band) - variance / count
    # The hidden states' gradient: B vectors a batch, of a mean over batches and tokens.
    tokens = torch.cat([g.hidden for g in exact]).double()
    centre = tokens.mean(dim=0)
    each = tokens.shape[0] // count
    signal[0] = centre.square().sum() * each
    variance[0] = (tokens - centre).square().sum() / count
    return signal, variance


def work(task: Task) -> list[Row]:
    """Train, and stop to measure."""
    data = open_data(task.tokens, task.seq_len)
    trainer = Trainer(task.recipe, data, study_pool.device())
    band = band_of(trainer.training_counts(task.recipe.steps))
    rows: list[Row] = []
    for moment in MOMENTS:
        trainer.advance(max(1, int(moment * task.recipe.steps)) - trainer.step)
        meter = Meter(trainer)
        for tokens, count in task.batches:
            rows += measure_batches(meter, data.held_out, tokens, count, task, band)
    trainer.close()
    return rows


def main(preset: str, tokens: Path, seq_len: int, out: Path, devices: Sequence[torch.device]) -> None:
    """``noise.csv``."""
    tasks = [
        Task(
            Recipe(size, batch, "exact", 0, steps),
            tokens,
            seq_len,
            BATCHES[preset],
            SAMPLED,
            seeds=2,
        )
        for size, steps, batch in TASKS[preset]
    ]
    table = Table(out / "noise.csv")
    for _, rows in run_jobs(work, tasks, devices, what="noise", describe=lambda rows: f"{len(rows)} rows"):
        table.write(rows)
