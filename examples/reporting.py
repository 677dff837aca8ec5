"""What a run shows and leaves behind: progress bars, a log of one JSON line a step, a picture of the losses."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True)
class Record:
    """One line of the log: the state after ``step`` optimizer steps. Step 0 only has a held-out loss.

    ``loss`` is the global batch's, before the step; ``held_out_loss`` is None where it was not measured.
    """

    step: int
    loss: float | None = None
    held_out_loss: float | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None


class Log:
    """``log.jsonl`` of a run. A resumed run first drops the lines after its checkpoint: they will be lived again."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        self.path = path
        kept = [] if resume_step is None else [record for record in read_log(path) if record.step <= resume_step]
        path.write_text("".join(self._line(record) for record in kept))

    def write(self, record: Record) -> None:
        with self.path.open("a") as file:
            file.write(self._line(record))

    @staticmethod
    def _line(record: Record) -> str:
        return json.dumps({key: value for key, value in asdict(record).items() if value is not None}) + "\n"


def read_log(path: Path) -> list[Record]:
    """The log's lines; none if there is no log."""
    return [Record(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def draw_losses(log: Path, picture: Path) -> None:
    """The curves of train and held-out loss over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = read_log(log)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    train = [(record.step, record.loss) for record in records if record.loss is not None]
    held_out = [(record.step, record.held_out_loss) for record in records if record.held_out_loss is not None]
    for label, points, marker in (("train", train, ""), ("held out", held_out, "o")):
        if points:
            axes.plot(*zip(*points, strict=True), label=label, marker=marker)
    if held_out:
        axes.annotate(f"{held_out[-1][1]:.3f}", held_out[-1], xytext=(0, 9), textcoords="offset points", ha="center")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def peak_memory(device: torch.device) -> int:
    """Bytes at this process's peak: tensors on a GPU, the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def human(size: float) -> str:
    """Bytes in the unit that suits them."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


class Display:
    """What one sees while it runs. On rank 0 only; elsewhere, and where a call has nothing to show, it is silent."""

    def __init__(self, enabled: bool) -> None:
        from rich.console import Console  # a log can be written without it

        self.console = Console(quiet=not enabled, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, what: str) -> Iterator[ProgressBar]:
        """A progress bar; without a terminal, only its remarks are printed."""
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, disable=not self.console.is_terminal) as progress:
            yield ProgressBar(progress, what)


class ProgressBar:
    """One line that moves."""

    def __init__(self, progress: Progress, what: str) -> None:
        self.progress = progress
        self.task = progress.add_task(what, total=None, facts="")

    def update(self, done: int, total: int, facts: str = "") -> None:
        self.progress.update(self.task, completed=done, total=total, facts=facts)
