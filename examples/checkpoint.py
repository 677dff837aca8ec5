"""Checkpoints that any layout of tp and dp can go on from.

A checkpoint is a folder ``checkpoints/step-N``, written under another name and renamed when it is complete; the file
``checkpoints/latest`` names the one to resume. Every rank writes its own shards, so all nodes need the run folder.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

META = "meta.json"


def latest(run: Path) -> Path | None:
    """The checkpoint to resume, or None if the run has none."""
    marker = run / "checkpoints" / "latest"
    return marker.parent / marker.read_text().strip() if marker.exists() else None


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """What ``save`` was given as ``meta``."""
    return json.loads((checkpoint / META).read_text())


def save(
    run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: dict[str, Any], keep: int
) -> Path:
    """Write the model and the optimizer as they are after ``step`` steps; called by all ranks.

    A run that is killed meanwhile leaves the previous checkpoint in force.
    """
    folder = run / "checkpoints"
    partial, complete = folder / f"partial-{step:06d}", folder / f"step-{step:06d}"
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=partial)
    if dist.get_rank() == 0:
        (partial / META).write_text(json.dumps(meta, indent=2) + "\n")
        shutil.rmtree(complete, ignore_errors=True)
        os.replace(partial, complete)
        _write_marker(folder / "latest", complete.name)
        _remove_old(folder, keep)
    dist.barrier()
    return complete


def load(checkpoint: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Read what ``save`` wrote, at whatever layout, into this layout's model and optimizer; called by all ranks."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def _write_marker(marker: Path, name: str) -> None:
    partial = marker.with_name("latest.partial")
    partial.write_text(name + "\n")
    os.replace(partial, marker)


def _remove_old(folder: Path, keep: int) -> None:
    for old in sorted(folder.glob("step-*"))[:-keep]:
        shutil.rmtree(old)
    for abandoned in folder.glob("partial-*"):
        shutil.rmtree(abandoned)
