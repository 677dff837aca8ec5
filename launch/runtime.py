"""Start-up and tear-down of one process of a run, under any launcher or alone.

``discover`` says where this process stands, from the launcher's environment variables alone, so that a script can check
its arguments against the number of processes before it opens a connection. ``initialize`` joins the process group and
``finalize`` leaves it. What the launchers set is in ``environment``.

The processes meet at ``MASTER_ADDR`` and ``MASTER_PORT`` where these are set, as torchrun and the deepspeed launcher
do. For srun the first node and a port drawn from the job's number serve. mpirun says neither: there rank 0 opens a port
and tells the others through MPI itself, by mpi4py.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .environment import LOOPBACK, Process, discover

__all__ = ["Process", "Runtime", "choose_device", "discover", "finalize", "initialize"]

BY_ENVIRONMENT = ("torchrun", "deepspeed")


@dataclass(frozen=True)
class Runtime:
    """A process that has joined its process group."""

    process: Process
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process reports for all of them."""
        return self.process.rank == 0

    def mesh(self, tp: int, cp: int = 1) -> DeviceMesh:
        """The ``("dp", "tp")`` mesh, or ``("dp", "cp", "tp")`` with context parallelism.

        The ranks of a tp group are neighbours, so that they share a node's fast links.

        Raises:
            ValueError: the processes cannot be divided so.
        """
        world_size = self.process.world_size
        if tp < 1 or cp < 1 or world_size % (tp * cp):
            raise ValueError(f"{world_size} process{'es' * (world_size > 1)} cannot form groups of tp={tp} x cp={cp}")
        shape = (world_size // tp, tp) if cp == 1 else (world_size // (tp * cp), cp, tp)
        names = ("dp", "tp") if cp == 1 else ("dp", "cp", "tp")
        mesh = init_device_mesh(self.device.type, shape, mesh_dim_names=names)
        mesh._flatten("world")  # what is reduced over all dimensions, as a gradient norm, then takes one collective
        return mesh


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
    if gpus == 1 and process.launcher == "srun":
        return torch.device("cuda", 0)  # srun can show each task its own GPU only
    if process.local_rank >= gpus:
        raise ValueError(f"process {process.local_rank} of this node has no GPU of its own: PyTorch sees {gpus}")
    return torch.device("cuda", process.local_rank)


def initialize(device_type: str = "auto", timeout: timedelta = timedelta(minutes=10)) -> Runtime:
    """Join the process group: NCCL for tensors on GPUs, gloo for those on the CPU.

    Args:
        device_type: "cuda", "cpu", or "auto" for GPUs where there are some.
        timeout: how long a collective waits for a missing rank before the run ends in an error.

    Raises:
        ValueError: the environment, the devices or MPI do not fit together; the message says what to do.
    """
    process = discover()
    device = choose_device(process, device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = _meet(process, timeout)
    dist.init_process_group(backend, store=store, rank=process.rank, world_size=process.world_size, timeout=timeout)
    return Runtime(process, device)


def _meet(process: Process, timeout: timedelta) -> dist.Store | None:
    """The store at which the processes find each other; None to let torch read torchrun's variables."""
    if process.launcher in BY_ENVIRONMENT:
        return None
    if process.launcher == "none":
        return dist.HashStore()
    if process.address is None:
        return _meet_through_mpi(process, timeout)
    host, port = process.address
    return dist.TCPStore(host, port, process.world_size, process.rank == 0, timeout)


def _meet_through_mpi(process: Process, timeout: timedelta) -> dist.Store:
    """Rank 0 opens a port and broadcasts it; MPI is not needed after that."""
    advice = "or set MASTER_ADDR and MASTER_PORT for all processes"
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{process.launcher} does not say where the processes meet: pip install mpi4py ({reason}), {advice}"
        ) from None
    ours = not MPI.Is_initialized()
    if ours:
        MPI.Init()
    try:
        world = MPI.COMM_WORLD
        if (world.rank, world.size) != (process.rank, process.world_size):
            raise ValueError(
                f"{process.launcher} started rank {process.rank} of {process.world_size}, but mpi4py finds itself rank "
                f"{world.rank} of {world.size}: it uses another MPI; install mpi4py for this one, {advice}"
            )
        store = None
        address: tuple[str, int] | None = None
        if process.rank == 0:
            host = LOOPBACK if process.one_node else socket.gethostname()
            store = dist.TCPStore(host, 0, process.world_size, True, timeout, wait_for_workers=False)
            address = (host, store.port)
        host, port = world.bcast(address)
        return store or dist.TCPStore(host, port, process.world_size, False, timeout, wait_for_workers=False)
    finally:
        # A process that fails later must not wait in MPI's own end for the others, which wait for it elsewhere.
        if ours:
            MPI.Finalize()


def finalize() -> None:
    """Leave the process group; harmless where there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
