"""The pictures of ``cce-tp keep-rate``: tiles kept by temperature, density along the vocabulary, the tile map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .console import power_of_two, pyplot
from .density import TILE, Density, orders, random_keep


def draw(found: Density, folder: Path, eps: float) -> list[Path]:
    """Write all pictures; where they are."""
    paths = [folder / name for name in ("keep_rate.png", "density.png", "tile_map.png")]
    for path, picture in zip(paths, (_keep_rate, _density, _tile_map), strict=True):
        figure = picture(pyplot(), found, power_of_two(eps))
        figure.savefig(path, dpi=120)
        pyplot().close(figure)
    return paths


def _keep_rate(plot: Any, found: Density, eps: str) -> Any:
    figure, axes = plot.subplots(figsize=(8, 5), layout="constrained")
    temperatures = [state.temperature for state in found.at]
    curves: dict[str, list[float]] = {"random": [random_keep(state.hits) for state in found.at]}
    for state in found.at:
        for order in orders(found, state):
            curves.setdefault(order.name, []).append(float(order.tiles(state.hits).float().mean()))
            if order.name != "count":
                by_targets = float(order.tiles(state.target_hits).float().mean())
                curves.setdefault(f"targets alone, {order.name}", []).append(by_targets)
    for name, shares in curves.items():
        line = axes.plot(temperatures, [100 * share for share in shares], marker="o", label=name)[0]
        line.set_linestyle("--" if name.startswith("targets") else "-")
    axes.set(xlabel="temperature of the softmax", ylabel="tiles kept (%)", ylim=(0, 102))
    axes.set_title(f"{TILE} x {TILE} tiles with some |G| >= {eps}, by order of the vocabulary")
    axes.invert_xaxis()
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _density(plot: Any, found: Density, eps: str) -> Any:
    figure, (left, right) = plot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for state in found.at:
        left.loglog(range(1, len(state.profile) + 1), state.profile.numpy(), label=f"T = {state.temperature:g}")
    left.axhline(2.0 ** float(eps[2:]) if eps.startswith("2^") else float(eps), color="grey", linestyle=":", label=eps)
    left.set(xlabel="rank of the entry within its token", ylabel="mean p", ylim=(1e-7, 1))
    left.set_title("The softmax of a token, largest first")
    tokens = sum(len(part) for part in found.at[0].loss)
    for order in orders(found, found.at[0]):
        rows = found.at[0].rows if order.rows is None else found.at[0].rows[order.rows]
        right.loglog(*(values.numpy() for values in _by_tile(rows / tokens)), label=order.name, alpha=0.8)
    right.set(xlabel="vocabulary rank in this order", ylabel=f"share of tokens with |G| >= {eps}")
    right.set_title(f"Non-trivial entries along the vocabulary, means of {TILE} rows")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _by_tile(values: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks in the middle of tiles, and the tiles' means."""
    tiles = [part.mean() for part in values.split(TILE)]
    return torch.arange(len(tiles)) * TILE + TILE // 2, torch.stack(tiles)


def _tile_map(plot: Any, found: Density, eps: str) -> Any:
    panels = orders(found, found.at[0])
    figure, axes = plot.subplots(len(panels), 1, figsize=(12, 8), layout="constrained", sharex=True)
    for panel, order in zip(axes, panels, strict=True):
        tiles = order.tiles(found.at[0].hits)
        panel.imshow(tiles.numpy(), aspect="auto", cmap="Greys", vmin=0, vmax=1.3, interpolation="nearest")
        panel.set_title(f"{order.name} order: {float(tiles.float().mean()):.0%} kept")
        panel.set_ylabel(f"block of {TILE} tokens")
    axes[-1].set_xlabel(f"block of {TILE} vocabulary rows (dark: some |G| >= {eps})")
    return figure
