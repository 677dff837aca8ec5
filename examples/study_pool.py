"""Many independent runs spread over the GPUs of one machine, and the tables they leave."""

from __future__ import annotations

import csv
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")
Row = dict[str, Any]

_device = torch.device("cpu")


def device() -> torch.device:
    """This process's."""
    return _device


def choose_devices(name: str) -> list[torch.device]:
    """All GPUs, or the CPU if there are none or it is asked for."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return [torch.device("cpu")]
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError("--device cuda: no GPU is visible")
    return [torch.device("cuda", index) for index in range(count)]


def _settle(free: Queue[torch.device]) -> None:
    """Give a worker its device."""
    global _device
    _device = free.get()
    if _device.type == "cuda":
        torch.cuda.set_device(_device)
    torch.set_num_threads(1)


def run_jobs(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    devices: Sequence[torch.device],
    *,
    what: str,
    per_device: int = 1,
    describe: Callable[[Result], str] = lambda result: "",
) -> Iterator[tuple[Job, Result]]:
    """Results as they come, the jobs begun in the given order; ``work`` finds its device by ``device()``.

    Without a GPU the jobs are done here, one after the other. With GPUs, a job that fails does not keep the others from
    their end.

    Raises:
        RuntimeError: some jobs failed; after all others are done.
    """
    report = Report(what, len(jobs))
    if devices[0].type == "cpu":
        for job in jobs:
            result = work(job)
            report.done(describe(result))
            yield job, result
        return
    context = multiprocessing.get_context("spawn")
    free: Queue[torch.device] = context.Queue()
    slots = [device for _ in range(per_device) for device in devices][: max(1, len(jobs))]
    for slot in slots:
        free.put(slot)
    failures = []
    with ProcessPoolExecutor(len(slots), context, _settle, (free,)) as pool:
        waiting: dict[Future[Result], Job] = {pool.submit(work, job): job for job in jobs}
        try:
            while waiting:
                finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in finished:
                    job = waiting.pop(future)
                    error = future.exception()
                    if error is not None:
                        failures.append(f"{job}: {type(error).__name__}: {error}")
                        report.done(f"failed: {failures[-1]}")
                        continue
                    report.done(describe(future.result()))
                    yield job, future.result()
        finally:
            for future in waiting:
                future.cancel()
    if failures:
        raise RuntimeError(f"{len(failures)} of {len(jobs)} jobs ({what}) failed:\n" + "\n".join(failures))


class Report:
    """A line for every job done; with rich and a terminal, a bar that moves."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.number, self.start = what, total, 0, time.perf_counter()
        self.progress = _rich_progress(what, total)

    def done(self, facts: str) -> None:
        self.number += 1
        if self.progress is not None:
            progress, task = self.progress
            progress.update(task, completed=self.number, facts=facts)
            if self.number == self.total:
                progress.stop()
            return
        seconds = time.perf_counter() - self.start
        print(f"{self.what} {self.number}/{self.total} {seconds:5.0f} s  {facts}", flush=True)


def _rich_progress(what: str, total: int) -> tuple[Any, Any] | None:
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        return None
    console = Console(highlight=False)
    if not console.is_terminal:
        return None
    facts = TextColumn("{task.fields[facts]}", markup=False)
    progress = Progress(TextColumn("{task.description}"), BarColumn(20), facts, TimeRemainingColumn(), console=console)
    progress.start()
    return progress, progress.add_task(what, total=total, facts="")


class Table:
    """A CSV file that is complete up to the last row at any time."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self.path = path

    def write(self, rows: Sequence[Row]) -> None:
        """Append; all rows have the first one's columns."""
        if not rows:
            return
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator=os.linesep)
            if new:
                writer.writeheader()
            writer.writerows([{key: _short(value) for key, value in row.items()} for row in rows])


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def read_table(path: Path) -> list[Row]:
    """Rows of a ``Table``; numbers as numbers."""
    with path.open(newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text
