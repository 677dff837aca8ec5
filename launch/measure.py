"""Time and memory of pieces of work on a device, measured in turns."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

Work = Callable[[], object]
_T = TypeVar("_T")

SLOW_MS = 50.0
"""What takes longer, and may be, is repeated a quarter as often, but at least ``FEWEST`` times."""
FEWEST = 5
HEAD_START_MS = 100.0
AWAKENING = 2**18
"""fp32 numbers, more than a collective must send to use all links."""


class Meter(Protocol):
    """A device's clock and memory."""

    def milliseconds(self, work: Work) -> float:
        """Of the device, for one run."""
        ...

    def peak(self, work: Work) -> int | None:
        """Most bytes allocated during one run above what was before; None where that is not known."""
        ...


class CpuMeter:
    """The wall clock."""

    def milliseconds(self, work: Work) -> float:
        start = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - start)

    def peak(self, work: Work) -> int | None:
        return None


class GpuMeter:
    """CUDA events on the current stream.

    Args:
        filler: runs before the clock starts, for ``HEAD_START_MS`` at least. As behind a model's layers, the device is
            then as hot as products make it, whatever ran before them, and the host has time to launch ahead.
    """

    def __init__(self, filler: Work) -> None:
        self._filler, self.fillings = filler, 0
        for _ in range(3):  # the library's choice of a kernel, and the clock
            filler()
        self.fillings = max(1, round(HEAD_START_MS / self.milliseconds(filler)))

    def milliseconds(self, work: Work) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(self.fillings):
            self._filler()
        start.record()
        work()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    def peak(self, work: Work) -> int | None:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True)
class Place:
    """This process in the group."""

    group: dist.ProcessGroup
    rank: int
    size: int
    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def largest(self, value: float) -> float:
        """Of the ranks' values; the same on all of them, so that they decide alike."""
        values = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return float(values)

    def of_every_rank(self, value: _T) -> list[_T]:
        """The ranks' values, in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def align(self) -> None:
        """What follows on this rank's device begins when the others get there, and finds all links awake.

        Links that were idle for tens of milliseconds take 0.1 ms to wake up. A model's layers, which send more than a
        few bytes all the time, leave them awake.
        """
        dist.all_reduce(torch.zeros(AWAKENING if self.on_gpu else 1, device=self.device), group=self.group)


class GroupMeter:
    """The slowest rank's time, and the largest memory; all ranks measure the same work at once."""

    def __init__(self, place: Place, product: Work) -> None:
        self._place = place
        self._meter: Meter
        if not place.on_gpu:
            self._meter = CpuMeter()
            return

        def filler() -> None:
            product()
            place.align()

        self._meter = GpuMeter(filler)
        self._meter.fillings = round(place.largest(self._meter.fillings))

    def milliseconds(self, work: Work) -> float:
        if not self._place.on_gpu:
            dist.barrier(group=self._place.group)
        return self._place.largest(self._meter.milliseconds(work))

    def peak(self, work: Work) -> int | None:
        peak = self._meter.peak(work)
        return None if peak is None else round(self._place.largest(peak))


@dataclass(frozen=True)
class Timing:
    """A median of so many runs; or why a run failed."""

    median_ms: float
    repeats: int
    failure: Exception | None = None


def in_turns(works: dict[str, Work], repeats: int, meter: Meter, patient: Container[str] = ()) -> dict[str, Timing]:
    """Every work once, then every work again, in another order each time.

    The clock falls as a device warms up, and a short work suffers from a hot one before it: so no work may have its
    turn only late, or always behind the same one. The orders are the same in every process, whose collectives must
    meet. The patient ones, where they are slow, sit out some of the turns.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    wanted = dict.fromkeys(works, repeats)
    failures: dict[str, Exception] = {}
    for name, work in works.items():
        try:
            if meter.milliseconds(work) > SLOW_MS and name in patient:
                wanted[name] = min(repeats, max(FEWEST, repeats // 4))
        except Exception as error:  # whatever a peer raises, the others go on
            failures[name] = error
    names, orders = list(works), random.Random(0)
    for turn in range(repeats):
        orders.shuffle(names)
        for name in names:
            its_turn = (turn + 1) * wanted[name] // repeats > turn * wanted[name] // repeats
            if not its_turn or name in failures:
                continue
            try:
                times[name].append(meter.milliseconds(works[name]))
            except Exception as error:
                failures[name] = error
    return {
        name: Timing(statistics.median(values) if values else float("nan"), len(values), failures.get(name))
        for name, values in times.items()
    }


def medians_ms(works: dict[str, Work], repeats: int, meter: Meter) -> dict[str, float]:
    """The medians of :func:`in_turns` where nothing may fail."""
    timings = in_turns(works, repeats, meter)
    for timing in timings.values():
        if timing.failure is not None:
            raise timing.failure
    return {name: timing.median_ms for name, timing in timings.items()}


def captured(work: Work) -> Work:
    """The work as a CUDA graph, so that the host's launches do not count."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay(operands: Work = work) -> None:  # which must stay where the graph reads them
        graph.replay()

    return replay
