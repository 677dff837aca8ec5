"""The pictures of ``cce-tp keep-rate``: tiles kept by temperature, density along the vocabulary, the tile map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .console import power_of_two, pyplot
from .density import TILE, Density, orders, random_keep

TARGETS = "targets alone, "


def draw(found: Density, folder: Path, eps: float) -> list[Path]:
    """Write all pictures; where they are."""
    paths = [folder / name for name in ("keep_rate.png", "density.png", "tile_map.png")]
    for path, picture in zip(paths, (_keep_rate, _density, _tile_map), strict=True):
        figure = picture(pyplot(), found, eps)
        figure.savefig(path, dpi=120)
        pyplot().close(figure)
    return paths


def _power(eps: float) -> str:
    """As matplotlib sets it."""
    base, _, exponent = power_of_two(eps).partition("^")
    return f"${base}^{{{exponent}}}$" if exponent else base


def _keep_rate(plot: Any, found: Density, eps: float) -> Any:
    """A curve for each order, named at its end."""
    figure, axes = plot.subplots(figsize=(9, 5), layout="constrained")
    temperatures = [state.temperature for state in found.at]
    curves: dict[str, list[float]] = {"random": [random_keep(state.hits) for state in found.at]}
    for state in found.at:
        for order in orders(found, state):
            curves.setdefault(order.name, []).append(float(order.tiles(state.hits).float().mean()))
            if order.name != "count":
                by_targets = float(order.tiles(state.target_hits).float().mean())
                curves.setdefault(TARGETS + order.name, []).append(by_targets)
    names = sorted(curves, key=lambda name: -curves[name][0])
    places = _apart([100 * curves[name][0] for name in names])
    for name, place in zip(names, places, strict=True):
        shares = [100 * share for share in curves[name]]
        line = axes.plot(temperatures, shares, marker="o", linestyle="--" if name.startswith(TARGETS) else "-")[0]
        axes.annotate(
            f"{name}: {shares[0]:.0f} %", (temperatures[0], place), xytext=(10, 0), textcoords="offset points",
            color=line.get_color(), va="center", annotation_clip=False,
        )  # fmt: skip
    axes.set(xlabel="temperature of the softmax", ylabel="tiles kept (%)", ylim=(0, 103), xticks=temperatures)
    axes.set_title(f"{TILE} x {TILE} tiles with some |G| ≥ {_power(eps)}, by order of the vocabulary", loc="left")
    axes.set_xlim(min(temperatures) - 0.02, max(temperatures) + 0.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    return figure


LINE = 5.5
"""Of text, in percent of the axis."""


def _apart(places: list[float]) -> list[float]:
    """Descending places, moved so that lines of text do not overlap, and no line lies below the axis."""
    result: list[float] = []
    for place in places:
        result.append(min(place, result[-1] - LINE) if result else place)
    for index in range(len(result) - 1, -1, -1):
        least = result[index + 1] + LINE if index + 1 < len(result) else LINE / 2
        result[index] = max(result[index], least)
    return result


def _density(plot: Any, found: Density, eps: float) -> Any:
    figure, (left, right) = plot.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for state in found.at:
        left.loglog(range(1, len(state.profile) + 1), state.profile.numpy(), label=f"temperature {state.temperature:g}")
    left.axhline(eps, color="grey", linestyle=":", label=_power(eps))
    rank = found.at[0].rank_below(eps)
    if rank is not None:
        left.annotate(f"rank {rank}", (rank, eps), xytext=(6, 6), textcoords="offset points")
    left.set(xlabel="rank of the entry within its token", ylabel="mean p", ylim=(1e-7, 1))
    left.set_title("The softmax of a token, largest first", loc="left")
    tokens = sum(len(part) for part in found.at[0].loss)
    for order in orders(found, found.at[0]):
        rows = found.at[0].rows if order.rows is None else found.at[0].rows[order.rows]
        right.loglog(*(values.numpy() for values in _by_tile(rows / tokens)), label=order.name, alpha=0.8)
    right.set(xlabel="vocabulary rank in this order", ylabel=f"share of tokens with |G| ≥ {_power(eps)}")
    right.set_title(f"Non-trivial entries along the vocabulary, means of {TILE} rows", loc="left")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _by_tile(values: Tensor) -> tuple[Tensor, Tensor]:
    """Ranks in the middle of tiles, and the tiles' means."""
    tiles = [part.mean() for part in values.split(TILE)]
    return torch.arange(len(tiles)) * TILE + TILE // 2, torch.stack(tiles)


def _tile_map(plot: Any, found: Density, eps: float) -> Any:
    panels = orders(found, found.at[0])
    figure, axes = plot.subplots(len(panels), 1, figsize=(12, 8), layout="constrained", sharex=True)
    for panel, order in zip(axes, panels, strict=True):
        tiles = order.tiles(found.at[0].hits)
        panel.imshow(tiles.numpy(), aspect="auto", cmap="Blues", vmin=0, vmax=1.4, interpolation="nearest")
        panel.set_title(f"{order.name} order: {float(tiles.float().mean()):.0%} of the tiles kept", loc="left")
        panel.set_ylabel(f"block of {TILE} tokens")
    axes[-1].set_xlabel(f"block of {TILE} vocabulary rows (dark: some |G| ≥ {_power(eps)})")
    return figure
