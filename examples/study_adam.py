"""``study.py adam-tail``: how far Adam moves rare rows of the classifier, sampled against exact, by tokens a step.

A row v gets ``n_v = B p_v / eps`` sampled entries in a step of B tokens, on average (p_v: its mean probability). Its
gradient has the mean g of the exact one and, where that is steady, the mean square ``g^2 (1 + 1 / n_v)``; Adam divides
the one by the root of the other and moves the row ``1 / sqrt(1 + 1 / n_v)`` times as far: less than half as far for
``n_v < 1/3``. This experiment measures the factor. Only the classifier learns, from hidden states of a model trained
with exact gradients, so that a million tokens a step can be had; no weight decay, no clipping, a constant rate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import study_pool
import torch
from study_model import BANDS, MICRO_TOKENS, Recipe, Trainer, backward_of, band_of, hidden_states
from study_pool import Row, Table, run_jobs
from study_train import open_data
from torch import Tensor

import cce_tp

RATE = 1e-3


@dataclass(frozen=True)
class Plan:
    """The model that the hidden states are of, and what is tried on them."""

    recipe: Recipe
    states: int
    batches: tuple[int, ...]
    steps: int
    modes: tuple[str, ...]
    micro: int = MICRO_TOKENS


PLANS = {
    "full": Plan(
        Recipe("small", 16_384, "exact", 0, 600),
        states=2**21,
        batches=(2**20, 2**18, 2**16, 2**14, 2**12, 2**10),
        steps=16,
        modes=("exact", "sampled-2^-10", "sampled-2^-8", "sampled-2^-4"),
    ),
    "tiny": Plan(
        Recipe("tiny", 128, "exact", 0, 8),
        states=512,
        batches=(128, 32),
        steps=6,
        modes=("exact", "sampled-2^-8", "sampled-2^-4"),
        micro=64,
    ),
}


@dataclass(frozen=True)
class Source:
    """Makes the hidden states."""

    plan: Plan
    tokens: Path
    seq_len: int
    file: Path


@dataclass(frozen=True)
class Task:
    """One mode at one batch size."""

    plan: Plan
    file: Path
    batch_tokens: int
    mode: str


def make_states(source: Source) -> None:
    """Train the model, and leave the states that the head is given, with classifier and frequencies, in a file."""
    plan, data = source.plan, open_data(source.tokens, source.seq_len)
    trainer = Trainer(plan.recipe, data, study_pool.device())
    trainer.advance(plan.recipe.steps)
    windows = min(plan.states // data.seq_len, trainer.windows.count)
    hidden, target = [], []
    with torch.no_grad():
        for first in range(0, windows, 32):
            rows = trainer.windows.shuffled(first, min(32, windows - first), 7).to(trainer.device)
            hidden.append(trainer.call(hidden_states, rows))
            target.append(rows[:, 1:].flatten())
    states = {
        "hidden": torch.cat(hidden),
        "target": torch.cat(target),
        "weight": trainer.model.head.weight.detach(),
        "band": band_of(trainer.training_counts(plan.recipe.steps)),
    }
    states["mean_probability"] = mean_probability(states["hidden"], states["weight"])
    torch.save({name: value.cpu() for name, value in states.items()}, source.file)
    trainer.close()


@torch.no_grad()
def mean_probability(hidden: Tensor, weight: Tensor, tokens: int = 32_768) -> Tensor:
    """Of every vocabulary id over (the first) ``tokens`` hidden states: fp32 ``[V]``."""
    total = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
    hidden = hidden[:tokens]
    for part in hidden.split(2048):
        total += (part @ weight.to(part.dtype).T).float().softmax(dim=1).double().sum(dim=0)
    return (total / len(hidden)).float()


@cache
def _states(file: Path, device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in torch.load(file).items()}


def work(task: Task) -> Path:
    """Train the classifier; a file of how far each of its rows has gone: ``[V, D]``."""
    plan, device = task.plan, study_pool.device()
    states = _states(task.file, device)
    hidden, target = states["hidden"], states["target"]
    start = states["weight"]
    weight = torch.nn.Parameter(start.clone())
    gradient = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    backward = backward_of(task.mode)
    cce_tp.sampler.manual_seed(0)
    generator = torch.Generator(device).manual_seed(11)  # every mode sees the same batches
    for _ in range(plan.steps):
        gradient.zero_()
        low = weight.detach().to(hidden.dtype).requires_grad_()
        chosen = torch.randint(len(hidden), (task.batch_tokens,), generator=generator, device=device)
        for part in chosen.split(plan.micro):
            loss = cce_tp.linear_cross_entropy(
                hidden[part], low, target[part], reduction="sum", backward=backward, main_grad=gradient
            )
            assert isinstance(loss, Tensor)
            (loss / task.batch_tokens).backward()
        weight.grad = gradient
        optimizer.step()
    file = task.file.with_name(f"{task.batch_tokens}-{task.mode}.pt")
    torch.save((weight.detach() - start).cpu(), file)
    return file


def rows_of(task: Task, moved: Tensor, exact: Tensor, states: dict[str, Tensor]) -> list[Row]:
    """By band of frequency, and for the rows that never are a target by classes of probability (a factor of 4 each)."""
    drift, true = moved.norm(dim=1), exact.norm(dim=1)
    along = (moved * exact).sum(dim=1) / true.clamp(min=1e-30)
    norm = (states["weight"] + moved).norm(dim=1)
    probability, band = states["mean_probability"], states["band"]
    eps = getattr(backward_of(task.mode), "eps", 0.0)
    entries = task.batch_tokens * probability / eps if eps else torch.full_like(probability, float("nan"))
    classes = [(f"target {name}", band == index) for index, name in enumerate(BANDS)]
    power = probability.clamp(min=2.0**-40).log2().div(2).floor().mul(2).int()
    classes += [(f"never, p >= 2^{int(p)}", (band == 0) & (power == p)) for p in power[band == 0].unique()]
    rows = []
    for name, members in classes:
        if int(members.sum()) < 8:
            continue
        rows.append(
            {
                "batch_tokens": task.batch_tokens,
                "mode": task.mode,
                "rows": name,
                "count": int(members.sum()),
                "mean_probability": probability[members].mean().item(),
                "entries_per_step": entries[members].mean().item(),
                "drift": drift[members].mean().item(),
                "drift_exact": true[members].mean().item(),
                "drift_along_exact": along[members].mean().item(),
                "norm": norm[members].mean().item(),
            }
        )
    return rows


def main(preset: str, tokens: Path, seq_len: int, out: Path, devices: Sequence[torch.device]) -> None:
    """``adam_tail.csv``."""
    plan = PLANS[preset]
    table = Table(out / "adam_tail.csv")
    with tempfile.TemporaryDirectory() as folder:
        source = Source(plan, tokens, seq_len, Path(folder) / "states.pt")
        list(run_jobs(make_states, [source], devices, what="states"))
        states = torch.load(source.file)
        tasks = [Task(plan, source.file, batch, mode) for batch in plan.batches for mode in plan.modes]
        files: dict[tuple[int, str], Path] = {}
        for task, file in run_jobs(work, tasks, devices, what="adam-tail", describe=lambda file: file.stem):
            files[task.batch_tokens, task.mode] = file
        for task in tasks:
            exact = torch.load(files[task.batch_tokens, "exact"])
            moved = torch.load(files[task.batch_tokens, task.mode])
            table.write(rows_of(task, moved, exact, states))
