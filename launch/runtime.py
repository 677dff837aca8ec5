"""Start-up and tear-down of one process of a run, under torchrun or alone.

``discover`` says where this process stands, from the launcher's environment variables alone, so that a script can check
its arguments against the number of processes before it opens a connection. ``initialize`` joins the process group and
``finalize`` leaves it. A further launcher is one more function in ``LAUNCHERS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Process:
    """One process among those of the run.

    Attributes:
        rank: its number in the whole run.
        local_rank: its number on its node; it uses the GPU of that number.
        world_size: how many processes there are.
        launcher: who said so.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: str = "none"


@dataclass(frozen=True)
class Runtime:
    """A process that has joined its process group."""

    process: Process
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process reports for all of them."""
        return self.process.rank == 0

    def mesh(self, tp: int) -> DeviceMesh:
        """The ``("dp", "tp")`` mesh; the ranks of a tp group are neighbours, so that they share a node's fast links."""
        shape = (self.process.world_size // tp, tp)
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=("dp", "tp"))
        mesh._flatten("world")  # what is reduced over both dimensions, as a gradient norm, then takes one collective
        return mesh


def _torchrun(environ: Mapping[str, str]) -> Process | None:
    missing = [name for name in TORCHRUN_VARIABLES if name not in environ]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return None
    if missing:
        raise ValueError(f"the environment names a rank or a world size but lacks {', '.join(missing)}: use torchrun")
    rank, local_rank, world_size = (int(environ[name]) for name in TORCHRUN_VARIABLES[:3])
    if not 0 <= rank < world_size:
        raise ValueError(f"RANK={rank} is not below WORLD_SIZE={world_size}")
    return Process(rank, local_rank, world_size, "torchrun")


LAUNCHERS: tuple[Callable[[Mapping[str, str]], Process | None], ...] = (_torchrun,)


def discover(environ: Mapping[str, str] = os.environ) -> Process:
    """Where this process stands; a process without a launcher is a run of its own.

    Raises:
        ValueError: the launcher's variables are incomplete or contradict each other.
    """
    for launcher in LAUNCHERS:
        process = launcher(environ)
        if process is not None:
            return process
    return Process()


def choose_device(process: Process, device_type: str = "auto") -> torch.device:
    """One GPU a process where there are GPUs, else the CPU.

    Raises:
        ValueError: a GPU is asked for and there is none for this process.
    """
    if device_type == "auto":
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if process.local_rank >= gpus:
        raise ValueError(f"process {process.local_rank} of this node has no GPU of its own: PyTorch sees {gpus}")
    return torch.device("cuda", process.local_rank)


def initialize(device_type: str = "auto", timeout: timedelta = timedelta(minutes=10)) -> Runtime:
    """Join the process group: NCCL for tensors on GPUs, gloo for those on the CPU.

    Args:
        device_type: "cuda", "cpu", or "auto" for GPUs where there are some.
        timeout: how long a collective waits for a missing rank before the run ends in an error.
    """
    process = discover()
    device = choose_device(process, device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if process.launcher == "none":
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    else:
        dist.init_process_group(backend, rank=process.rank, world_size=process.world_size, timeout=timeout)
    return Runtime(process, device)


def finalize() -> None:
    """Leave the process group; harmless where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
