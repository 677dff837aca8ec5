"""Where this process stands in its run, read from the launcher's environment variables alone.

A launcher is one function in ``LAUNCHERS``. Several may have left their mark on one process: torchrun inside a Slurm
step, mpirun inside an allocation. torchrun and the deepspeed launcher start processes of their own, so whatever lies
outside of them no longer counts. The others must tell the same story, or nobody's rank is to be trusted.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

TORCHRUN_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLURM_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500
FIRST_PORT, NUM_PORTS = 20000, 10000
"""Where a port is drawn from when all know nothing but their job's number: below what systems hand out themselves."""


@dataclass(frozen=True)
class Process:
    """One process among those of the run.

    Attributes:
        rank: its number in the whole run.
        local_rank: its number on its node; it uses the GPU of that number.
        world_size: how many processes there are.
        launcher: who said so.
        one_node: whether all processes are known to be on this node.
        address: host and port at which rank 0 waits for the others; None where the launcher's variables do not say.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    launcher: str = "none"
    one_node: bool = False
    address: tuple[str, int] | None = None


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        value = int(environ[name])
    except ValueError:
        raise ValueError(f"the environment variable {name}={environ[name]!r} is not a number") from None
    if value < 0:
        raise ValueError(f"the environment variable {name}={value} is negative")
    return value


def _placed(environ: Mapping[str, str], launcher: str, names: tuple[str, str], local: tuple[str, ...]) -> Process:
    """A process from the variables for rank and size and, if there are some, for the rank and the size on its node."""
    missing = [name for name in names if name not in environ]
    if missing:
        present = next(name for name in names if name in environ)
        raise ValueError(f"the environment has {present} but lacks {missing[0]}: start with {launcher}")
    rank, world_size = (_integer(environ, name) for name in names)
    if rank >= world_size:
        raise ValueError(f"{names[0]}={rank} is not below {names[1]}={world_size}")
    # Without a word about nodes there is one, and a node that has fewer GPUs will say so.
    local_rank = _integer(environ, local[0]) if local[0] in environ else rank
    one_node = len(local) > 1 and local[1] in environ and _integer(environ, local[1]) == world_size
    return Process(rank, local_rank, world_size, launcher, one_node, _master(environ))


def _master(environ: Mapping[str, str]) -> tuple[str, int] | None:
    if "MASTER_ADDR" not in environ:
        return None
    port = _integer(environ, "MASTER_PORT") if "MASTER_PORT" in environ else DEFAULT_PORT
    if not 0 < port < 2**16:
        raise ValueError(f"MASTER_PORT={port} is not a port")
    return environ["MASTER_ADDR"], port


def torchrun(environ: Mapping[str, str]) -> Process | None:
    """torchrun's variables; the deepspeed launcher sets the same, and so do scripts that imitate them."""
    missing = [name for name in TORCHRUN_VARIABLES if name not in environ]
    if "RANK" in missing and "WORLD_SIZE" in missing:
        return None
    if missing:
        raise ValueError(f"the environment names a rank or a world size but lacks {', '.join(missing)}: use torchrun")
    launcher = "deepspeed" if "CROSS_RANK" in environ else "torchrun"
    return _placed(environ, launcher, ("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def open_mpi(environ: Mapping[str, str]) -> Process | None:
    """mpirun of Open MPI."""
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if not any(name in environ for name in names):
        return None
    local = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    return _placed(environ, "mpirun (Open MPI)", names, local)


def hydra(environ: Mapping[str, str]) -> Process | None:
    """mpirun of MPICH and its kin, Intel MPI among them."""
    if not any(name in environ for name in ("PMI_RANK", "PMI_SIZE")):
        return None
    kind = "Intel MPI" if any(name.startswith("I_MPI_") for name in environ) else "MPICH"
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _placed(environ, f"mpirun ({kind})", ("PMI_RANK", "PMI_SIZE"), local)


def slurm(environ: Mapping[str, str]) -> Process | None:
    """A task of Slurm's srun. The shell of a batch script or an allocation isn't one, though it has its variables."""
    if "SLURM_PROCID" not in environ:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    if "SLURM_STEP_ID" not in environ and environ.get("ENVIRONMENT") == "BATCH":
        if int(environ.get(size, "1")) > 1:
            raise ValueError(f"this batch script has {size}={environ[size]}: put srun, or torchrun, before the command")
        return None
    process = _placed(environ, "srun", ("SLURM_PROCID", size), ("SLURM_LOCALID",))
    nodes = next((environ[name] for name in SLURM_NODE_LISTS if environ.get(name)), None)
    count = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES"))
    one_node = nodes is None if count is None else count == "1"
    # Steps of one job may run side by side.
    key = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    host = LOOPBACK if one_node or nodes is None else first_host(nodes)
    address = process.address or (host, FIRST_PORT + zlib.crc32(key.encode()) % NUM_PORTS)
    return Process(process.rank, process.local_rank, process.world_size, "srun", one_node, address)


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's notation, as ``gpu[07-09,12],login``."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^\[,]*))?", nodes)
    if match is None:
        raise ValueError(f"{nodes!r} is not a list of Slurm nodes")
    head, number, tail = match.groups()
    return head + (number or "") + (tail or "")


LAUNCHERS: tuple[Callable[[Mapping[str, str]], Process | None], ...] = (torchrun, open_mpi, hydra, slurm)


def _starts_its_own(environ: Mapping[str, str]) -> bool:
    """Whether RANK comes from a launcher that starts processes itself, rather than from a script."""
    return "TORCHELASTIC_RUN_ID" in environ or "CROSS_RANK" in environ


def discover(environ: Mapping[str, str] = os.environ) -> Process:
    """Where this process stands; a process without a launcher is a run of its own.

    Raises:
        ValueError: the launchers' variables are incomplete or contradict each other.
    """
    if _starts_its_own(environ) and (process := torchrun(environ)) is not None:
        return process
    found = [process for launcher in LAUNCHERS if (process := launcher(environ)) is not None]
    if not found:
        return Process()
    first = found[0]
    for other in found[1:]:
        if (other.rank, other.world_size) == (first.rank, first.world_size):
            continue
        if other.launcher == "srun" and first.launcher.startswith("mpirun"):
            continue  # mpirun has srun start its helpers, one a node, and these hand their variables on
        raise ValueError(
            f"the environment contradicts itself: {first.launcher} says rank {first.rank} of {first.world_size}, "
            f"{other.launcher} says rank {other.rank} of {other.world_size}; start with one of them only"
        )
    return _completed(first, found[1:], environ)


def _completed(first: Process, others: list[Process], environ: Mapping[str, str]) -> Process:
    """What one launcher leaves out and another says: srun's PMI knows no node and no address."""
    srun = next((other for other in others if other.launcher == "srun" and other.rank == first.rank), None)
    if srun is None or first.launcher.startswith("mpirun (Open") or "MPI_LOCALRANKID" in environ:
        return first
    return srun if first.launcher.startswith("mpirun") else first
