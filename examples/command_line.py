"""What the examples' command lines share: kinds of arguments, and one sentence for what is wrong."""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import NoReturn

from cce_tp.launch.runtime import discover

EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, once for all processes."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def fail(message: str) -> NoReturn:
    """Print one sentence, from rank 0, and exit with 2."""
    try:
        rank = discover().rank
    except ValueError:
        rank = 0
    if rank == 0:
        print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr, flush=True)
    else:
        # A launcher ends all processes when the first one fails: leave rank 0 the time to speak.
        time.sleep(3)
    sys.exit(EXIT_USAGE)


def positive(text: str) -> int:
    """An argparse type."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def not_negative(text: str) -> int:
    """An argparse type."""
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def rate(text: str) -> float:
    """An argparse type: a finite number that is not negative."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is not a finite number of at least 0")
    return value


def fraction(text: str) -> float:
    """An argparse type: strictly between 0 and 1."""
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value
