"""What the subcommands share: arguments checked in one sentence, tables, progress bars, JSON files."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .environment import discover

if TYPE_CHECKING:
    from rich.console import Console

EXIT_USAGE = 2
EXIT_MISMATCH = 1
MIB, GIB = 2**20, 2**30
DTYPES = ("bfloat16", "float16", "float32")
SECONDS_FOR_RANK_0 = 3
MOST, MOST_NUMBER = 2**30, 1e9
"""Of a count, and of a number of seconds or GiB: beyond lies a slip of the keyboard, or an overflow."""


class UsageError(Exception):
    """What was asked for cannot be done; the message says why in one sentence."""


def fail(program: str, message: str) -> NoReturn:
    """Print one sentence, once for all processes, and exit with 2."""
    try:
        rank = discover().rank
    except ValueError:
        rank = 0
    if rank == 0:
        print(f"{program}: error: {' '.join(message.split())}", file=sys.stderr, flush=True)
    else:
        # A launcher ends all processes when the first one fails: leave rank 0 the time to speak.
        time.sleep(SECONDS_FOR_RANK_0)
    sys.exit(EXIT_USAGE)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage that ``--help`` shows."""

    def __init__(self, *args: Any, **options: Any) -> None:
        defaults = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(*args, **{**defaults, **options})

    def error(self, message: str) -> NoReturn:
        fail(self.prog, message)


def positive(text: str) -> int:
    """An argparse type."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
    return _within(value, text)


def _within(value: int, text: str) -> int:
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    if value > MOST:
        raise argparse.ArgumentTypeError(f"{text} is above {MOST:,}")
    return value


def positive_number(text: str) -> float:
    """An argparse type: finite and above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    if value > MOST_NUMBER:
        raise argparse.ArgumentTypeError(f"{text} is above {MOST_NUMBER:g}")
    return value


def probability(text: str) -> float:
    """An argparse type: in (0, 1], as ``0.01``, ``2^-8`` or ``2**-8``."""
    base, _, exponent = text.replace("**", "^").partition("^")
    try:
        value = float(base) ** float(exponent) if exponent else float(base)
    except (ValueError, OverflowError, ZeroDivisionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not in (0, 1]")
    return value


def shape_of(text: str) -> tuple[int, int, int]:
    """An argparse type: tokens, vocabulary and hidden size."""
    try:
        tokens, rows, hidden = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not three numbers N,V,D") from None
    if min(tokens, rows, hidden) < 1:
        raise argparse.ArgumentTypeError(f"{text} has a size below 1")
    if max(tokens, rows, hidden) > MOST:
        raise argparse.ArgumentTypeError(f"{text} has a size above {MOST:,}")
    return tokens, rows, hidden


def _is(path: Path, kind: Callable[[Path], bool]) -> bool:
    """Also for names that no file can have."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False


def existing_file(text: str) -> Path:
    """An argparse type."""
    path = Path(text)
    if not _is(path, Path.is_file):
        raise argparse.ArgumentTypeError(f"{text} is not a file")
    return path


def existing_folder(text: str) -> Path:
    """An argparse type."""
    path = Path(text)
    if not _is(path, Path.is_dir):
        raise argparse.ArgumentTypeError(f"{text} is not a folder")
    return path


def writable_file(text: str) -> Path:
    """An argparse type: a file in a folder that exists, so that an hour's work does not end in an error."""
    path = Path(text)
    if "\0" in text or _is(path, Path.is_dir) or not _is(path.absolute().parent, Path.is_dir):
        raise argparse.ArgumentTypeError(f"{text} is not a file in a folder that exists")
    return path


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that every subcommand has."""
    parser.add_argument("--json", type=writable_file, metavar="FILE", help="also write the results here")


def write_json(path: Path | None, results: object) -> None:
    """Write the results where ``--json`` says, if it does."""
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")


def dtype_of(name: str) -> torch.dtype:
    """One of ``DTYPES``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def power_of_two(value: float) -> str:
    """``2^-8`` where it is one."""
    exponent = math.log2(value)
    return f"2^{exponent:.0f}" if exponent == round(exponent) else f"{value:.3g}"


def mib(size: float) -> str:
    """Bytes as MiB, with thousands apart."""
    return f"{size / MIB:,.0f}"


def _missing(name: str) -> UsageError:
    return UsageError(f"the package {name} is not installed: pip install 'cce_tp[examples]'")


class PlainOutput:
    """Lines of text, for results that must not be lost for want of rich."""

    def __init__(self, enabled: bool = True) -> None:
        self._enabled = enabled

    def say(self, text: str) -> None:
        """A line or a paragraph."""
        if self._enabled:
            print(text, flush=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table whose first column is text and whose others are numbers."""
        widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
        self.say(f"\n{title}")
        for row in (columns, *rows):
            cells = [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
            self.say("  ".join(cells).rstrip())


def open_output(enabled: bool = True) -> Output | PlainOutput:
    """The terminal with rich, or without where there is none."""
    try:
        return Output(enabled)
    except UsageError:
        return PlainOutput(enabled)


class Output:
    """The terminal. Silent on all ranks but the first."""

    def __init__(self, enabled: bool = True) -> None:
        """
        Raises:
            UsageError: rich isn't installed.
        """
        try:
            from rich.console import Console
        except ImportError:
            raise _missing("rich") from None
        self.console: Console = Console(quiet=not enabled, highlight=False)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, 120)  # lines of a log need not fit a window

    def say(self, text: str) -> None:
        """A line or a paragraph."""
        self.console.print(text, markup=False, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """A table whose first column is text and whose others are numbers."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_justify="left", title_style="bold")
        for index, column in enumerate(columns):
            table.add_column(column, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print(table)

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Bar]:
        """A progress bar; without a terminal, nothing."""
        from rich.progress import Progress

        with Progress(console=self.console, disable=not self.console.is_terminal, transient=True) as progress:
            yield Bar(progress, progress.add_task(what, total=total))


class Bar:
    """One line that moves."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def advance(self, steps: int = 1) -> None:
        self._progress.advance(self._task, steps)


def pyplot() -> Any:
    """matplotlib's, for drawing into files.

    Raises:
        UsageError: it isn't installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise _missing("matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module
