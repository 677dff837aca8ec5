"""``study.py finetune``: a real head moves to another domain.

The classifier of a trained model, and a small residual adapter before it, learn from that model's own final hidden
states on texts of one kind; the text's last quarter is held out. All modes start from the same weights and see the same
batches of a seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import study_pool
import torch
import torch.nn.functional as F
from study_model import SAMPLED, make_loss
from study_pool import Row, Table, run_jobs
from torch import Tensor, nn

import cce_tp

MODES = ("torch", "exact", "filtered", "filtered-input", *SAMPLED)


@dataclass(frozen=True)
class Plan:
    """Length of the runs."""

    steps: int
    evaluations: int
    batch_tokens: int
    seeds: int
    vocabulary: int | None = None
    lr_head: float = 5e-5
    lr_adapter: float = 1e-4


PLANS = {
    "full": Plan(steps=80, evaluations=16, batch_tokens=1024, seeds=4),
    "tiny": Plan(steps=4, evaluations=2, batch_tokens=32, seeds=1, vocabulary=2500),
}


@dataclass(frozen=True)
class Task:
    """One run."""

    plan: Plan
    head: Path
    hidden: Path
    mode: str
    seed: int


@dataclass(frozen=True)
class States:
    """A classifier ``[V, D]`` fp32, and hidden states ``[N, D]`` with their targets, to train on and held out."""

    weight: Tensor
    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]


@cache
def read_states(head: Path, hidden: Path, vocabulary: int | None, device: torch.device) -> States:
    """Read both files; ``vocabulary`` keeps the first so many rows, and the tokens whose targets are among them."""
    with np.load(head) as file:
        q, scale = file["q"], file["scale"]
    weight = torch.from_numpy(q[:vocabulary].astype(np.float32))
    weight *= torch.from_numpy(scale[:vocabulary].astype(np.float32)).repeat_interleave(q.shape[1] // scale.shape[1], 1)
    with np.load(hidden) as file:
        states = torch.from_numpy(file["e_bf16"]).view(torch.bfloat16)
        target = torch.from_numpy(file["targets"].astype(np.int64))
    known = target < len(weight)
    states, target = states[known].to(device), target[known].to(device)
    cut = len(states) * 3 // 4
    return States(weight.to(device), (states[:cut], target[:cut]), (states[cut:], target[cut:]))


class Adapter(nn.Module):
    """``e + B silu(A e / |e|)``, in which B starts as zero: at first, nothing changes."""

    def __init__(self, dim: int, inner: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.a = nn.Parameter(torch.randn(inner, dim, generator=generator) / dim**0.5)
        self.b = nn.Parameter(torch.zeros(dim, inner))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = F.silu(F.rms_norm(hidden, hidden.shape[-1:]) @ self.a.to(hidden.dtype).T)
        return hidden + inner @ self.b.to(hidden.dtype).T


def work(task: Task) -> list[Row]:
    """One run; a row for each evaluation."""
    plan, device = task.plan, study_pool.device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    states = read_states(task.head, task.hidden, plan.vocabulary, device)
    weight = nn.Parameter(states.weight.clone())
    adapter = Adapter(weight.shape[1], 64, task.seed).to(device)
    groups = [
        {"params": [weight], "lr": plan.lr_head},
        {"params": list(adapter.parameters()), "lr": plan.lr_adapter},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    loss_of = make_loss(task.mode, device)
    cce_tp.sampler.manual_seed(task.seed)
    generator = torch.Generator(device).manual_seed(task.seed)
    hidden, target = states.train
    hidden = hidden.to(dtype)
    rows = [_row(task, 0, float("nan"), _held_out_loss(states, adapter, weight, dtype))]
    total = torch.zeros((), device=device)
    every = plan.steps // plan.evaluations
    for step in range(1, plan.steps + 1):
        chosen = torch.randint(len(hidden), (plan.batch_tokens,), generator=generator, device=device)
        loss = loss_of(adapter(hidden[chosen]), weight.to(dtype), target[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
        if step % every == 0:
            held_out = _held_out_loss(states, adapter, weight, dtype)
            rows.append(_row(task, step, total.item() / every, held_out))
            total.zero_()
    return rows


@torch.no_grad()
def _held_out_loss(states: States, adapter: Adapter, weight: Tensor, dtype: torch.dtype) -> float:
    hidden, target = states.held_out
    loss = cce_tp.linear_cross_entropy(adapter(hidden.to(dtype)), weight.to(dtype), target)
    assert isinstance(loss, Tensor)
    return loss.item()


def _row(task: Task, step: int, train_loss: float, val_loss: float) -> Row:
    return {"mode": task.mode, "seed": task.seed, "step": step, "train_loss": train_loss, "val_loss": val_loss}


def main(preset: str, head: Path, hidden: Path, out: Path, devices: Sequence[torch.device]) -> None:
    """``finetune.csv``."""
    plan = PLANS[preset]
    tasks = [Task(plan, head, hidden, mode, seed) for mode in MODES for seed in range(plan.seeds)]
    table = Table(out / "finetune.csv")
    for _, rows in run_jobs(work, tasks, devices, what="finetune", describe=_facts):
        table.write(rows)


def _facts(rows: Sequence[Row]) -> str:
    first, last = rows[0], rows[-1]
    return f"{last['mode']}, seed {last['seed']}: {first['val_loss']:.4f} -> {last['val_loss']:.4f}"
