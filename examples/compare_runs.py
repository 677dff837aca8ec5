"""Draw the losses of several runs of pretrain_megatron.py on one picture, with their times and memory in a table.

    python examples/compare_runs.py runs/stock runs/exact runs/sampled --out losses.png

The lower half shows each run's loss less the first one's, averaged over some steps.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from reporting import human, read_log

COLUMNS = ("run", "step", "peak memory", "output layer + loss", "its memory", "last losses", "held out")


@dataclass(frozen=True)
class Run:
    """What one run folder says."""

    name: str
    losses: np.ndarray
    cells: list[str]

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Raises OSError if the folder holds no finished run."""
        said = json.loads((folder / "run.json").read_text())
        records = read_log(folder / "log.jsonl")
        losses = np.array([record.loss for record in records if record.loss is not None])
        held_out = [record.held_out_loss for record in records if record.held_out_loss is not None]
        measured = "loss_seconds" in said
        cells = [
            f"{folder.name}: {said['name']}",
            f"{said['step_seconds'] * 1e3:.1f} ms",
            human(said["peak_memory_bytes"]),
            f"{said['loss_seconds'] * 1e3:.2f} ms" if measured else "",
            human(said["loss_memory_bytes"]) if measured else "",
            f"{losses[-20:].mean():.4f}",
            f"{held_out[-1]:.4f}" if held_out else "",
        ]
        return cls(cells[0], losses, cells)


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean over ``width`` neighbours."""
    return np.convolve(values, np.ones(width) / width, mode="valid")


def draw(runs: list[Run], picture: Path) -> None:
    """Losses above, differences to the first run in the middle, the table below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, differences, table) = pyplot.subplots(
        3, 1, figsize=(9, 8 + 0.3 * len(runs)), height_ratios=[4, 2, 0.4 + 0.3 * len(runs)], layout="constrained"
    )
    for run in runs:
        losses.plot(np.arange(1, len(run.losses) + 1), run.losses, label=run.name, linewidth=1, alpha=0.8)
    losses.set(ylabel="training loss (nats per token)")
    losses.legend()
    for run in runs:
        length = min(len(run.losses), len(runs[0].losses))
        width = max(1, length // 20)
        difference = smooth(run.losses[:length] - runs[0].losses[:length], width)
        differences.plot(np.arange(len(difference)) + (width + 1) / 2, difference, linewidth=1)
    differences.set(xlabel="step", ylabel=f"less that of {runs[0].name.split(':')[0]}\n(mean of {width} steps)")
    for axes in (losses, differences):
        axes.grid(alpha=0.3)
    table.axis("off")
    cells = table.table([run.cells for run in runs], colLabels=COLUMNS, loc="center", cellLoc="left")
    cells.auto_set_font_size(False)
    cells.set_fontsize(8)
    cells.auto_set_column_width(range(len(COLUMNS)))
    figure.savefig(picture, dpi=120)
    pyplot.close(figure)


def main() -> int:
    """Print the table, draw the picture; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="run folders; the first is what the others are held against")
    parser.add_argument("--out", type=Path, default=Path("losses.png"), help="picture (default: losses.png)")
    options = parser.parse_args()
    try:
        runs = [Run.read(folder) for folder in options.runs]
    except OSError as error:
        print(f"compare_runs.py: error: {error}", file=sys.stderr)
        return 2
    rows = [list(COLUMNS), *(run.cells for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    draw(runs, options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
