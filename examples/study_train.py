"""``study.py train``: the same model from the same start on the same batches, with every way to compute the loss."""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import study_pool
import text_data
import torch
from study_model import (
    BANDS,
    MICRO_TOKENS,
    MODES,
    SIZES,
    Data,
    Recipe,
    Trainer,
    backward_of,
    band_of,
    make_loss,
    megatron_available,
    per_band,
)
from study_pool import Row, Table, run_jobs

import cce_tp

SHORT_MODES = ("exact", "filtered", "sampled-2^-8", "sampled-2^-4")
# Megatron's loss is not captured in a graph: small steps would take several times as long as the others'.
GRAPH_MODES = tuple(mode for mode in MODES if mode != "megatron")


@dataclass(frozen=True)
class Group:
    """Runs that are compared: they differ in mode and seed alone.

    Attributes:
        steps: at most; a time limit shortens all groups by the same factor.
        lr_factor: on the size's learning rate.
        seeds: how many each mode has.
    """

    size: str
    batch_tokens: int
    steps: int
    lr_factor: float
    seeds: dict[str, int]

    def recipes(self, steps: int) -> list[Recipe]:
        return [
            Recipe(self.size, self.batch_tokens, mode, seed, steps, self.lr_factor)
            for mode, seeds in self.seeds.items()
            for seed in range(seeds)
        ]


def _seeds(modes: Sequence[str], several: Sequence[str] = (), number: int = 3) -> dict[str, int]:
    return {mode: number if mode in several else 1 for mode in modes}


SEVERAL = ("exact", "sampled-2^-8")
GROUPS = {
    "full": (
        Group("medium", 16_384, 700, 1.0, _seeds(MODES, SEVERAL)),
        Group("medium", 1024, 4000, 0.5, _seeds(GRAPH_MODES, SEVERAL)),
        Group("small", 16_384, 700, 1.0, _seeds(SHORT_MODES, SEVERAL)),
        Group("large", 16_384, 500, 1.0, _seeds(SHORT_MODES, SEVERAL, 2)),
        Group("medium", 65_536, 200, 1.5, _seeds(("exact", "sampled-2^-8", "sampled-2^-4"))),
    ),
    "tiny": (Group("tiny", 128, 8, 1.0, _seeds(MODES, SEVERAL, 2)),),
}


@dataclass(frozen=True)
class Task:
    """A run, and where its text is."""

    recipe: Recipe
    tokens: Path
    seq_len: int
    eval_tokens: int
    evaluations: int


@dataclass(frozen=True)
class Cost:
    """Seconds of a step, and of all else that a run does."""

    step: float
    rest: float


@cache
def open_data(tokens: Path, seq_len: int) -> Data:
    """The text, read once a process."""
    return Data(text_data.prepared_corpus(tokens), seq_len)


def _trainer(task: Task) -> Trainer:
    gc.collect()  # the run before this one
    return Trainer(task.recipe, open_data(task.tokens, task.seq_len), study_pool.device())


def rehearse(task: Task) -> None:
    """Compile the kernels that a run needs: one forward and backward pass."""
    data, device = open_data(task.tokens, task.seq_len), study_pool.device()
    size = SIZES[task.recipe.size]
    loss = make_loss(task.recipe.mode, device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tokens = min(task.recipe.batch_tokens, MICRO_TOKENS)
    hidden = torch.randn(tokens, size.dim, device=device, dtype=dtype).requires_grad_()
    weight = torch.zeros(data.corpus.vocab_size, size.dim, device=device, dtype=dtype).requires_grad_()
    target = torch.arange(tokens, device=device) % data.corpus.vocab_size
    loss(hidden, weight, target).backward()
    cce_tp.linear_cross_entropy(hidden, weight, target, backward=backward_of(task.recipe.mode), return_stats=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def measure(task: Task) -> Cost:
    """Time a few steps, and what surrounds them, alone on the device."""
    start = time.perf_counter()
    trainer = _trainer(task)
    trainer.advance(1)
    trainer.evaluate(task.eval_tokens)
    set_up = time.perf_counter() - start
    steps = 3 if study_pool.device().type == "cuda" else 1
    _wait()
    start = time.perf_counter()
    trainer.advance(steps)
    _wait()
    step = (time.perf_counter() - start) / steps
    start = time.perf_counter()
    trainer.evaluate(task.eval_tokens)
    trainer.entries_per_token()
    evaluation = time.perf_counter() - start
    trainer.close()
    return Cost(step, set_up + task.evaluations * evaluation)


def _wait() -> None:
    if study_pool.device().type == "cuda":
        torch.cuda.synchronize()


def train(task: Task) -> list[Row]:
    """One run; a row for each evaluation, the first before any step."""
    recipe, trainer = task.recipe, _trainer(task)
    band = band_of(trainer.training_counts(recipe.steps))
    rows, seconds, done = [], 0.0, 0
    for evaluation in range(task.evaluations + 1):
        steps = recipe.steps * evaluation // task.evaluations - done
        start = time.perf_counter()
        trainer.advance(steps)
        train_loss, grad_norm = trainer.means(steps)  # waits for the device
        seconds += time.perf_counter() - start
        done += steps
        rows.append(_row(trainer, band, train_loss, grad_norm, 1e3 * seconds / max(1, done), task.eval_tokens))
    trainer.close()
    return rows


def _row(trainer: Trainer, band: torch.Tensor, train_loss: float, grad_norm: float, ms: float, tokens: int) -> Row:
    recipe = trainer.recipe
    losses, targets = trainer.evaluate(tokens)
    by_band = per_band(losses, band[targets]).tolist()
    norms, drifts = (values.tolist() for values in trainer.classifier_by_band(band))
    started = trainer.step > 0
    row: Row = {
        "size": recipe.size,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "batch_tokens": recipe.batch_tokens,
        "mode": recipe.mode,
        "seed": recipe.seed,
        "steps": recipe.steps,
        "step": trainer.step,
        "tokens": trainer.step * recipe.batch_tokens,
        "train_loss": train_loss if started else math.nan,
        "grad_norm": grad_norm if started else math.nan,
        "val_loss": losses.double().mean().item(),
        "entries_per_token": trainer.entries_per_token() if started else math.nan,
        "step_ms": ms if started else math.nan,
    }
    for index, name in enumerate(BANDS):
        row |= {f"val_loss {name}": by_band[index], f"norm {name}": norms[index], f"drift {name}": drifts[index]}
    return row


@dataclass(frozen=True)
class Options:
    """Of ``study.py train``."""

    preset: str
    tokens: Path
    seq_len: int
    out: Path
    devices: list[torch.device]
    time_limit: float
    eval_tokens: int
    evaluations: int
    sizes: tuple[str, ...]
    batches: tuple[int, ...]


def main(options: Options) -> None:
    """Choose the steps that fit the time, then train; ``train.csv`` grows with every finished run."""
    start = time.perf_counter()
    groups = [
        _without_missing(group)
        for group in GROUPS[options.preset]
        if group.size in (options.sizes or SIZES) and group.batch_tokens in (options.batches or (group.batch_tokens,))
    ]
    if not groups:
        raise ValueError(f"preset {options.preset!r} has no runs of these sizes and batches")

    def task(recipe: Recipe) -> Task:
        return Task(recipe, options.tokens, options.seq_len, options.eval_tokens, options.evaluations)

    samples = [task(Recipe(g.size, g.batch_tokens, mode, 0, g.steps, g.lr_factor)) for g in groups for mode in g.seeds]
    if options.devices[0].type == "cuda":
        _compile(samples, options.devices)
    costs: dict[tuple[str, int, str], Cost] = {}
    failure = None
    try:
        for sample, cost in run_jobs(measure, samples, options.devices, what="measure"):
            costs[sample.recipe.size, sample.recipe.batch_tokens, sample.recipe.mode] = cost
    except RuntimeError as error:  # what works goes on without the others, and the end says so
        failure = error
    groups = [_measured(group, costs) for group in groups]
    left = options.time_limit - (time.perf_counter() - start)
    factor = shortening(groups, costs, left * len(options.devices))
    tasks = [task(recipe) for group in groups for recipe in group.recipes(max(2, int(group.steps * factor)))]
    print(
        f"{len(tasks)} runs of {factor:.0%} of their steps, {left:.0f} s on {len(options.devices)} device(s)",
        flush=True,
    )

    def seconds(one: Task) -> float:
        cost = costs[one.recipe.size, one.recipe.batch_tokens, one.recipe.mode]
        return cost.rest + one.recipe.steps * cost.step

    table = Table(options.out / "train.csv")
    longest_first = sorted(tasks, key=seconds, reverse=True)
    for _, rows in run_jobs(train, longest_first, options.devices, what="train", describe=_facts):
        table.write(rows)
    if failure is not None:
        raise failure


def _compile(samples: Sequence[Task], devices: Sequence[torch.device]) -> None:
    """Fill Triton's cache from many processes at once: it is the CPU that works."""
    ours = [sample for sample in samples if sample.recipe.mode not in ("torch", "megatron")]
    ours = [sample for sample in ours if sample.recipe.batch_tokens <= MICRO_TOKENS]
    with contextlib.suppress(RuntimeError):  # it was printed, and will come again where it matters
        for _ in run_jobs(rehearse, ours, devices, what="compile", per_device=8):
            pass


def _without_missing(group: Group) -> Group:
    if "megatron" not in group.seeds or megatron_available():
        return group
    print("megatron-core is not installed: its line is left out", flush=True)
    return replace(group, seeds={mode: seeds for mode, seeds in group.seeds.items() if mode != "megatron"})


def _measured(group: Group, costs: dict[tuple[str, int, str], Cost]) -> Group:
    known = {mode: n for mode, n in group.seeds.items() if (group.size, group.batch_tokens, mode) in costs}
    return replace(group, seeds=known)


def shortening(groups: Sequence[Group], costs: dict[tuple[str, int, str], Cost], seconds: float) -> float:
    """The factor, at most 1, on all groups' steps that makes the runs take so many seconds of a device."""
    steps = rest = 0.0
    for group in groups:
        for mode, seeds in group.seeds.items():
            cost = costs[group.size, group.batch_tokens, mode]
            steps += seeds * group.steps * cost.step
            rest += seeds * cost.rest
    # The runs do not fill all devices to the very end.
    return min(1.0, max(0.0, 0.9 * seconds - rest) / steps)


def _facts(rows: Sequence[Row]) -> str:
    last = rows[-1]
    return (
        f"{last['size']}, {last['batch_tokens']} tokens, {last['mode']}, seed {last['seed']}: "
        f"{last['val_loss']:.4f} after {last['step']} steps of {last['step_ms']:.1f} ms"
    )
