"""Running a function on several processes, under a hard time limit.

``Pool`` keeps its processes between tests, because importing torch takes seconds, and forks them from a server that
has imported it. A task is a module-level function with a ``Rank`` as its first argument; it runs on ranks
``0 .. n - 1`` of the pool, which have process groups of their own for every ``n``. A rank that does not answer in time
fails the test with the stack of every rank, and the pool starts afresh. The processes live on between tests, and so
does what the library remembers about a process group.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

DEFAULT_TIMEOUT = float(os.environ.get("CCE_TP_TEST_TIMEOUT", "120"))
START_TIMEOUT = 120.0


@dataclass(frozen=True)
class Rank:
    """What a task knows about the process it runs in.

    Attributes:
        index: rank in ``group``.
        size: number of processes that run the task.
        group: process group of exactly those.
        device: where the task's tensors belong.
        strided: this rank's group among ranks {0, 2, ...}, {1, 3, ...}; None unless all processes, an even number of
            four or more, run the task.
        paired: this rank's group among ranks {0, 1}, {2, 3}, ...; None likewise.
    """

    index: int
    size: int
    group: dist.ProcessGroup
    device: torch.device
    strided: dist.ProcessGroup | None = None
    paired: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class RankError:
    """An exception that a task raised on one rank."""

    kind: str
    message: str
    trace: str


@dataclass(frozen=True)
class Outcome:
    """What one rank answered."""

    value: Any = None
    error: RankError | None = None


class RanksFailed(AssertionError):
    """A task raised, hung or died on some rank."""


@dataclass(frozen=True)
class Collective:
    """One collective as the process group saw it: name, shape and dtype of the first tensor sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group_size: int


class _Recorder(TorchDispatchMode):
    """Notes every collective that reaches the dispatcher, whoever called it and however."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func.__name__.split(".")[0].strip("_"), args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple) -> None:
        if name in ("wait_tensor", "barrier", "monitored_barrier"):
            return
        group = next((arg for arg in args if isinstance(arg, torch.ScriptObject)), None)
        size = dist.ProcessGroup.unbox(group).size() if group is not None else 0
        sent = _first_tensor(args[1:]) if name.startswith(("allgather", "reduce_scatter")) else _first_tensor(args)
        self.seen.append(Collective(name, tuple(sent.shape), sent.dtype, size))


def _first_tensor(args: Any) -> torch.Tensor:
    """The first tensor in nested arguments."""
    stack = list(reversed(args))
    while stack:
        arg = stack.pop()
        if isinstance(arg, torch.Tensor):
            return arg
        if isinstance(arg, (list, tuple)):
            stack.extend(reversed(arg))
    raise AssertionError("a collective without a tensor")


@contextlib.contextmanager
def collectives() -> Iterator[list[Collective]]:
    """Record the collectives of this process; works for backward too where that runs in the calling thread (CPU)."""
    recorder = _Recorder()
    with recorder:
        yield recorder.seen


@dataclass
class _Worker:
    process: Any  # what was started: the rank, or the process that forks all of them
    connection: Connection
    log: Path
    pid: int | None = None

    def signal(self, number: int) -> None:
        """Send a signal to the rank, if it is there."""
        if self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


@dataclass
class Pool:
    """``world_size`` processes with ``backend``; started at the first use, and again after a failure.

    Modules of ``preload`` are imported once, in a process that then forks the ranks. ``environment`` is set in each.
    """

    world_size: int
    backend: str = "gloo"
    sizes: tuple[int, ...] = (1, 2, 4)
    preload: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    _workers: list[_Worker] = field(default_factory=list)
    _folder: tempfile.TemporaryDirectory | None = None

    def run(
        self, size: int, task: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT, fresh: bool = False
    ) -> list[Any]:
        """Values that ``task(rank, *args)`` returned, in rank order.

        Raises:
            RanksFailed: a rank raised, died, or took longer than ``timeout`` seconds.
        """
        outcomes = self.outcomes(size, task, *args, timeout=timeout, fresh=fresh)
        failed = [f"rank {rank}:\n{o.error.trace}" for rank, o in enumerate(outcomes) if o.error is not None]
        if failed:
            raise RanksFailed("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def errors(
        self, size: int, task: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT, fresh: bool = False
    ) -> list:
        """The ``RankError`` of every rank, or None where the task returned; only a hang or a death fails the test."""
        return [outcome.error for outcome in self.outcomes(size, task, *args, timeout=timeout, fresh=fresh)]

    def outcomes(
        self, size: int, task: Callable[..., Any], *args: Any, timeout: float = DEFAULT_TIMEOUT, fresh: bool = False
    ) -> list[Outcome]:
        """What every rank answered. Where only some raised, the others may lag behind: the pool starts afresh.

        With ``fresh`` the task gets a process group that was never used before; all processes help to make it.
        """
        self.start()
        message = pickle.dumps((size, task, args, fresh))
        asked = self.world_size if fresh else size
        for rank, worker in enumerate(self._workers[:asked]):
            try:
                worker.connection.send_bytes(message)
            except ConnectionError:
                self._fail(f"rank {rank} died after its last task", {})
        outcomes = self._answers(asked, timeout)[:size]
        if len({outcome.error is None for outcome in outcomes}) > 1:
            self.stop()
        return outcomes

    def _answers(self, size: int, timeout: float) -> list[Outcome]:
        waiting = {worker.connection: rank for rank, worker in enumerate(self._workers[:size])}
        answers: dict[int, Outcome] = {}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self._fail(f"no answer in {timeout:.0f} s from ranks {sorted(waiting.values())}", answers)
            for connection in ready:
                rank = waiting.pop(connection)  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self._fail(f"rank {rank} died", answers)
        return [answers[rank] for rank in range(size)]

    def _fail(self, reason: str, answers: dict[int, Outcome]) -> None:
        """Collect the stack of every rank, stop the pool, and fail."""
        for worker in self._workers:
            worker.signal(signal.SIGUSR1)
        time.sleep(0.5)
        logs = [f"--- rank {rank}\n{worker.log.read_text()[-4000:]}" for rank, worker in enumerate(self._workers)]
        errors = [f"--- rank {r} raised\n{o.error.trace}" for r, o in sorted(answers.items()) if o.error is not None]
        self.stop()
        raise RanksFailed("\n".join([reason, *errors, *logs]))

    def start(self) -> None:
        """Start the processes, if they are not running, and wait until they are connected."""
        if self._workers:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="cce_tp_ranks_")
        context = _start_context()
        pipes = [context.Pipe() for _ in range(self.world_size)]
        logs = [Path(self._folder.name) / f"rank{rank}.log" for rank in range(self.world_size)]
        ranks = [
            (
                rank, self.world_size, self.backend, self.sizes, pipes[rank][1], self._folder.name, str(logs[rank]),
                self.environment,
            )
            for rank in range(self.world_size)
        ]  # fmt: skip
        if self.preload:
            processes = [context.Process(target=_fork_ranks, args=(self.preload, ranks), daemon=True)] * self.world_size
        else:
            processes = [context.Process(target=_serve, args=arguments, daemon=True) for arguments in ranks]
        for process in dict.fromkeys(processes):
            process.start()
        for process, (ours, theirs), log in zip(processes, pipes, logs, strict=True):
            theirs.close()
            self._workers.append(_Worker(process, ours, log))
        for worker, outcome in zip(self._workers, self._answers(self.world_size, START_TIMEOUT), strict=True):
            worker.pid = outcome.value

    def stop(self) -> None:
        """Kill the processes."""
        for worker in self._workers:
            worker.connection.close()
            worker.signal(signal.SIGKILL)
        for process in {id(worker.process): worker.process for worker in self._workers}.values():
            process.kill()
            process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _start_context() -> Any:
    """A server that forks processes with torch imported; or this process itself where nothing has run in it yet."""
    context = multiprocessing.get_context(os.environ.get("CCE_TP_TEST_START", "forkserver"))
    if context.get_start_method() == "forkserver":
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor"])
    return context


def _fork_ranks(preload: tuple[str, ...], ranks: list[tuple[Any, ...]]) -> None:
    """Import the modules, become ``ranks`` processes that serve, and wait for them."""
    for name in preload:
        importlib.import_module(name)
    for arguments in ranks:
        if os.fork() == 0:
            for _, _, _, _, connection, *_ in ranks:
                if connection is not arguments[4]:
                    connection.close()
            _serve(*arguments)
    for _, _, _, _, connection, *_ in ranks:
        connection.close()  # so that the end of a rank is noticed
    for _ in ranks:
        os.wait()


def _serve(
    rank: int,
    world_size: int,
    backend: str,
    sizes: tuple[int, ...],
    connection: Connection,
    folder: str,
    log: str,
    environment: dict[str, str],
) -> None:
    """A process of the pool: connect, then run tasks until the pipe closes."""
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout.fileno() if sys.stdout else 1, 2):
        os.dup2(descriptor, stream)
    faulthandler.register(signal.SIGUSR1, file=os.fdopen(descriptor, "w", closefd=False), all_threads=True)
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=4 * DEFAULT_TIMEOUT),
    )
    ranks = _make_ranks(rank, world_size, sizes, device)
    connection.send_bytes(pickle.dumps(Outcome(os.getpid())))
    while True:
        try:
            size, task, args, fresh = pickle.loads(connection.recv_bytes())
            group = dist.new_group(list(range(size))) if fresh else None
        except (EOFError, ConnectionError):
            os._exit(0)
        outcome = Outcome()
        if rank < size:
            place = ranks[size] if group is None else replace(ranks[size], group=group)
            outcome = attempt(task, place, *args)
        if group is not None:
            dist.destroy_process_group(group)  # or its threads would go on asking for work, a hundred times a second
        connection.send_bytes(pickle.dumps(outcome))


def _make_ranks(rank: int, world_size: int, sizes: tuple[int, ...], device: torch.device) -> dict[int, Rank]:
    """The groups of every size; all ranks make all of them, in the same order."""
    groups = {size: dist.new_group(list(range(size))) for size in sizes if size <= world_size}
    ranks = {size: Rank(rank, size, group, device) for size, group in groups.items() if rank < size}
    if world_size >= 4 and world_size % 2 == 0:
        strided = [dist.new_group(list(range(first, world_size, 2))) for first in range(2)]
        paired = [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)]
        ranks[world_size] = replace(ranks[world_size], strided=strided[rank % 2], paired=paired[rank // 2])
    return ranks


def divisors(number: int) -> tuple[int, ...]:
    """All of them, 1 and itself included."""
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def free_port() -> int:
    """A port that nobody listens at, for a launcher whose own choice is the same for all runs of a machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


class Launched:
    """The interface of a ``Pool`` where a launcher has started the processes: each runs the same tests as a rank.

    Every task's answers reach all processes, so that all of them come to the same verdict.
    """

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.world_size, self._index = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self._ranks: dict[int, Rank] | None = None
        self._control: dist.ProcessGroup | None = None

    def start(self) -> None:
        """Join the others."""
        if self._ranks is not None:
            return
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        device = torch.device("cpu")
        if self.backend == "nccl":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(self.backend, timeout=timedelta(seconds=4 * DEFAULT_TIMEOUT))
        self._control = dist.new_group(backend="gloo")
        self._ranks = _make_ranks(self._index, self.world_size, divisors(self.world_size), device)

    def stop(self) -> None:
        """Leave."""
        if self._ranks is not None:
            dist.destroy_process_group()
        self._ranks = None

    def run(self, size: int, task: Callable[..., Any], *args: Any, fresh: bool = False, **_: Any) -> list[Any]:
        """As ``Pool.run``; without its timeout, which the launcher's user has to keep an eye on."""
        outcomes = self.outcomes(size, task, *args, fresh=fresh)
        failed = [f"rank {rank}:\n{o.error.trace}" for rank, o in enumerate(outcomes) if o.error is not None]
        if failed:
            raise RanksFailed("\n".join(failed))
        return [outcome.value for outcome in outcomes]

    def errors(self, size: int, task: Callable[..., Any], *args: Any, fresh: bool = False, **_: Any) -> list:
        """As ``Pool.errors``."""
        return [outcome.error for outcome in self.outcomes(size, task, *args, fresh=fresh)]

    def outcomes(self, size: int, task: Callable[..., Any], *args: Any, fresh: bool = False) -> list[Outcome]:
        """What every rank answered."""
        self.start()
        assert self._ranks is not None
        group = dist.new_group(list(range(size))) if fresh else None
        outcome = Outcome()
        if self._index < size:
            place = self._ranks[size] if group is None else replace(self._ranks[size], group=group)
            outcome = attempt(task, place, *args)
        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, pickle.dumps(outcome), group=self._control)
        return [pickle.loads(answer) for answer in answers[:size]]


def attempt(task: Callable[..., Any], *args: Any) -> Outcome:
    """What a task returned or raised."""
    try:
        return Outcome(value=task(*args))
    except Exception as error:
        return Outcome(error=RankError(type(error).__name__, str(error), traceback.format_exc()))
