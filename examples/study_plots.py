"""``study.py plots``: pictures and ``summary.md`` from the tables of a run folder."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from study_model import BANDS
from study_pool import Row, read_table
from study_summary import (
    LABELS,
    column,
    differences,
    first_run,
    groups_of,
    in_order,
    later_ms,
    mean,
    of_group,
    part_label,
    quotients,
    ratios,
    seed_spread,
    summarize_adam,
    summarize_finetune,
    summarize_noise,
    summarize_train,
    title_of,
    unique,
)

COLOURS = {
    "torch": "black",
    "megatron": "tab:gray",
    "exact": "tab:blue",
    "filtered": "tab:red",
    "filtered-input": "tab:pink",
    "sampled-2^-12": "#003c30",
    "sampled-2^-10": "#1b9e77",
    "sampled-2^-8": "#66c2a5",
    "sampled-2^-6": "#e0b040",
    "sampled-2^-4": "#8c510a",
}


def draw_all(out: Path) -> list[Path]:
    """Draw what there are tables for; the files written. Without matplotlib, the summary only."""
    of_train = (
        ("loss", draw_loss),
        ("final", draw_final),
        ("bands", draw_bands),
        ("tail", draw_tail),
        ("drift", draw_drift),
        ("cost", draw_cost),
    )
    tables: dict[str, tuple[Callable[[list[Row]], list[str]], Sequence[tuple[str, Callable[..., None]]]]] = {
        "train": (summarize_train, of_train),
        "noise": (summarize_noise, (("noise", draw_noise),)),
        "adam_tail": (summarize_adam, (("adam_tail", draw_adam),)),
        "finetune": (summarize_finetune, (("finetune", draw_finetune),)),
    }
    if not any((out / f"{name}.csv").exists() for name in tables):
        raise ValueError(f"--out {out} holds none of the tables {', '.join(f'{name}.csv' for name in tables)}")
    plot = _pyplot()
    written, text = [], []
    for name, (summarize, pictures) in tables.items():
        if not (out / f"{name}.csv").exists():
            continue
        rows = read_table(out / f"{name}.csv")
        text += summarize(rows)
        for picture, draw in pictures if plot else ():
            path = out / f"{picture}.png"
            draw(plot, rows, path)
            written.append(path)
    if text:
        (out / "summary.md").write_text("\n".join(text).lstrip() + "\n")
        written.append(out / "summary.md")
    return written


def _pyplot() -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        print("matplotlib is not installed: the tables wait for `study.py plots` elsewhere", flush=True)
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _finish(plot: Any, figure: Any, path: Path, columns: int = 5) -> None:
    """One legend below all panels, with each label once; then the file."""
    known: dict[str, Any] = {}
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            known.setdefault(label, handle)
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=columns, fontsize=9)
    figure.savefig(path, dpi=80)
    plot.close(figure)


def main_groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of the groups that compare many modes, by rising tokens a step; the others have too few for a panel."""
    modes = {group: len(unique(row["mode"] for row in of_group(rows, group))) for group in groups_of(rows)}
    chosen = [group for group, count in modes.items() if 2 * count > max(modes.values())]
    return [of_group(rows, group) for group in sorted(chosen, key=lambda group: group[1])]


def _panels(plot: Any, lines: int, columns: int, height: float = 4.2) -> tuple[Any, Any]:
    return plot.subplots(lines, columns, figsize=(13, height * lines + 0.8), squeeze=False, layout="constrained")


def draw_loss(plot: Any, rows: list[Row], path: Path) -> None:
    """Validation loss, and its difference from exact of the same seed, a line for each main group."""
    groups = main_groups(rows)
    figure, panels = _panels(plot, len(groups), 2)
    for (losses, apart), members in zip(panels, groups, strict=True):
        deviation = {step: value for step, value in seed_spread(members, "val_loss").items() if not math.isnan(value)}
        if deviation:
            low, high = [-value for value in deviation.values()], list(deviation.values())
            apart.fill_between(
                list(deviation), low, high, color="tab:blue", alpha=0.12, label="exact: ± 1 s.d. of its seeds"
            )
        for mode in in_order(row["mode"] for row in members):
            look = {"color": COLOURS[mode], "label": LABELS[mode], "marker": "."}
            first = first_run(members, mode)
            losses.plot(column(first, "step"), column(first, "val_loss"), **look)
            by_step = differences(members, mode, "val_loss")
            apart.plot(list(by_step), [mean(values) for values in by_step.values()], **look)
        losses.set(title=f"{title_of(members)}, seed 0", xlabel="step", ylabel="validation loss (nats)")
        apart.set(title="less exact's, same seed; mean of seeds", xlabel="step", ylabel="difference (nats)")
    _finish(plot, figure, path)


def draw_final(plot: Any, rows: list[Row], path: Path) -> None:
    """The end of every run, for all groups: less exact of the same seed, and exact's seeds less their mean."""
    groups = sorted(groups_of(rows), key=lambda group: (of_group(rows, group)[0]["parameters"], group[1]))
    modes = in_order(row["mode"] for row in rows)
    figure, ((axes,),) = _panels(plot, 1, 1, 5.0)
    ticks = []
    for place, group in enumerate(groups):
        members = of_group(rows, group)
        last = max(row["step"] for row in members)
        first = members[0]
        ticks.append(f"{first['parameters'] / 1e6:.0f} M\n{first['batch_tokens']:,.0f} tokens a step\n{last:.0f} steps")
        for index, mode in enumerate(modes):
            values = differences(members, mode, "val_loss").get(last, [])
            label = LABELS[mode]
            if mode == "exact":
                ends = [row["val_loss"] for row in members if row["mode"] == mode and row["step"] == last]
                values, label = [value - mean(ends) for value in ends], "exact's seeds − their mean"
            x = place + 0.8 * (index + 0.5) / len(modes) - 0.4
            axes.plot([x] * len(values), values, "o", color=COLOURS[mode], label=label)
    for place in range(1, len(groups)):
        axes.axvline(place - 0.5, color="black", linewidth=0.5)
    axes.axhline(0, color="tab:blue", linewidth=0.7)
    axes.set_xticks(range(len(groups)), ticks)
    axes.set(title="final validation loss − exact's of the same seed", ylabel="difference (nats)")
    _finish(plot, figure, path)


def draw_bands(plot: Any, rows: list[Row], path: Path) -> None:
    """Final validation loss by the target's frequency, against exact."""
    groups = main_groups(rows)
    figure, panels = _panels(plot, len(groups), 1)
    modes = [mode for mode in in_order(row["mode"] for row in rows) if mode != "exact"]
    width = 0.84 / max(1, len(modes))
    for (axes,), members in zip(panels, groups, strict=True):
        last = max(row["step"] for row in members)
        for place, mode in enumerate(modes):
            values = [mean(differences(members, mode, f"val_loss {band}").get(last, [])) for band in BANDS]
            where = [x + (place + 0.5) * width - 0.42 for x in range(len(BANDS))]
            axes.bar(where, values, width, color=COLOURS[mode], label=LABELS[mode])
        for x, band in enumerate(BANDS):
            deviation = seed_spread(members, f"val_loss {band}")[last]
            if not math.isnan(deviation):
                label = "exact: ± 1 s.d. of its seeds"
                axes.fill_between([x - 0.46, x + 0.46], -deviation, deviation, color="tab:blue", alpha=0.2, label=label)
        axes.set_xticks(range(len(BANDS)), BANDS)
        axes.set(
            title=f"{title_of(members)}, {last:.0f} steps",
            ylabel="validation loss − exact's (nats)",
            xlabel="times that the id was a target in training",
        )
    _finish(plot, figure, path)


def draw_tail(plot: Any, rows: list[Row], path: Path) -> None:
    """Norms of the classifier's rare rows over the steps."""
    groups, bands = main_groups(rows), ("never", "1-9")
    figure, panels = _panels(plot, len(groups), len(bands))
    for line, members in zip(panels, groups, strict=True):
        for axes, band in zip(line, bands, strict=True):
            for mode in in_order(row["mode"] for row in members):
                chosen = [row for row in members if row["mode"] == mode and row["seed"] == 0]
                norms = column(chosen, f"norm {band}")
                axes.plot(column(chosen, "step"), norms, color=COLOURS[mode], label=LABELS[mode], marker=".")
            times = "never a target" if band == "never" else f"{band} times a target"
            axes.set(title=f"{title_of(members)}; {times}", xlabel="step", ylabel="mean norm of rows of C")
    _finish(plot, figure, path)


def draw_drift(plot: Any, rows: list[Row], path: Path) -> None:
    """How far rare rows have gone, over exact's: all groups, by tokens a step over eps; and what Adam's rule says."""
    figure, (panels,) = _panels(plot, 1, 2, 4.8)
    markers = dict(zip(sorted(groups_of(rows), key=lambda group: group[1]), "osD^vPX", strict=False))
    for axes, band in zip(panels, ("never", "1-9"), strict=True):
        for group, marker in markers.items():
            members = of_group(rows, group)
            last, tokens = max(row["step"] for row in members), members[0]["batch_tokens"]
            for mode in in_order(row["mode"] for row in members):
                if mode.startswith("sampled"):
                    values = quotients(members, mode, f"drift {band}").get(last, [])
                    axes.plot([tokens / eps_of(mode)] * len(values), values, marker, color=COLOURS[mode])
            axes.plot([], [], marker, color="gray", label=f"{title_of(members)}, {last:.0f} steps")
        for mode in in_order(row["mode"] for row in rows if row["mode"].startswith("sampled")):
            axes.plot([], [], color=COLOURS[mode], linewidth=4, label=LABELS[mode])
        powers = [power / 4 for power in range(13 * 4, 27 * 4)]
        for rare, style in (("17", "-"), ("19", "--"), ("20", "-."), ("22.4", ":")):
            theory = [1 / math.sqrt(1 + 2.0 ** (float(rare) - power)) for power in powers]
            label = f"Adam's rule, p = $2^{{-{rare}}}$"
            axes.plot([2.0**power for power in powers], theory, style, color="black", linewidth=1, label=label)
        axes.set_xscale("log", base=2)
        times = "never a target" if band == "never" else f"{band} times a target"
        axes.set(title=f"rows {times}", xlabel="N / eps: tokens a step over eps", ylim=(0, 1.05))
        axes.set_ylabel("drift / exact's; lines: 1 / √(1 + eps / N p)")
    _finish(plot, figure, path, columns=3)


def draw_cost(plot: Any, rows: list[Row], path: Path) -> None:
    """Entries of the gradient a token over the steps, and the time of a step."""
    groups = main_groups(rows)
    figure, panels = _panels(plot, len(groups), 2)
    for (entries, times), members in zip(panels, groups, strict=True):
        modes = in_order(row["mode"] for row in members)
        ends = {}
        for mode in modes:
            run = first_run(members, mode)
            look = {"color": COLOURS[mode], "label": LABELS[mode]}
            entries.plot(column(run, "step"), column(run, "entries_per_token"), marker=".", **look)
            ends[mode] = later_ms(run)
        times.barh([LABELS[mode] for mode in modes], list(ends.values()), color=[COLOURS[mode] for mode in modes])
        times.invert_yaxis()
        times.set(title="milliseconds a step")
        entries.set(title=title_of(members), xlabel="step", ylabel="entries of the gradient a token", yscale="log")
    _finish(plot, figure, path)


def eps_of(mode: str) -> float:
    """The number in a sampled mode's name."""
    return 2.0 ** int(mode.split("^")[1])


def draw_noise(plot: Any, rows: list[Row], path: Path) -> None:
    """Ratio of the two variances by eps, and by tokens a step."""
    sizes = unique(row["size"] for row in rows)
    figure, panels = _panels(plot, len(sizes), 3)
    for (by_eps, by_tokens, to_signal), size in zip(panels, sizes, strict=True):
        members = [row for row in rows if row["size"] == size and row["batch_variance"] > 0]
        last, most = max(row["step"] for row in members), max(row["batch_tokens"] for row in members)
        at_end = [row for row in members if row["step"] == last]
        for part in unique(row["part"] for row in at_end):
            largest = [row for row in at_end if row["part"] == part and row["batch_tokens"] == most]
            look = {"marker": ".", "label": part_label(part)}
            eps = [eps_of(row["mode"]) for row in largest]
            by_eps.plot(eps, ratios(largest, "sampling_variance", "batch_variance"), **look)
            fixed = [row for row in at_end if row["part"] == part and row["mode"] == "sampled-2^-8"]
            tokens = column(fixed, "batch_tokens")
            by_tokens.plot(tokens, ratios(fixed, "sampling_variance", "batch_variance"), **look)
            if part == "hidden":
                to_signal.plot([], [])  # keeps the colours of the other panels
            else:
                to_signal.plot(tokens, ratios(fixed, "sampling_variance", "signal"), **look)
        by_eps.set(title=f"{size} model, step {last:.0f}, {most:,.0f} tokens a step", xlabel="eps")
        by_tokens.set(title="eps = 2⁻⁸", xlabel="tokens a step")
        to_signal.set(title="eps = 2⁻⁸", xlabel="tokens a step", ylabel="sampling variance / |mean gradient|²")
        for axes in (by_eps, by_tokens):
            axes.set_ylabel("sampling / mini-batch variance")
        for axes, base in ((by_eps, 2), (by_tokens, 10), (to_signal, 10)):
            axes.set_xscale("log", base=base)
            axes.set_yscale("log")
    _finish(plot, figure, path)


def draw_adam(plot: Any, rows: list[Row], path: Path) -> None:
    """Drift against exact: by entries a step, where all batches fall together; and by tokens a step."""
    figure, ((collapse, by_tokens),) = _panels(plot, 1, 2, 4.8)
    sampled = [row for row in rows if row["mode"] != "exact"]
    for batch in sorted(unique(row["batch_tokens"] for row in sampled)):
        shown = [row for row in sampled if row["batch_tokens"] == batch and row["rows"].startswith("never")]
        factors = ratios(shown, "drift", "drift_exact")
        collapse.scatter(column(shown, "entries_per_step"), factors, s=10, label=f"{batch:,.0f} tokens a step")
    entries = [2.0 ** (power / 4) for power in range(-48, 49)]
    theory = [1 / math.sqrt(1 + 1 / count) for count in entries]
    collapse.plot(entries, theory, color="black", linewidth=1, label="1 / √(1 + 1/n)")
    collapse.set(
        xscale="log", xlabel="n: sampled entries of the row a step", ylabel="its drift / exact's", ylim=(0, 1.4)
    )
    collapse.set_title("rows that are never a target")
    for mode in in_order(row["mode"] for row in sampled):
        for name, style in (("target never", "-"), ("target 1-9", "--")):
            shown = [row for row in sampled if row["mode"] == mode and row["rows"] == name]
            shown.sort(key=lambda row: row["batch_tokens"])
            factors, label = ratios(shown, "drift", "drift_exact"), f"{LABELS[mode]}, {name}"
            by_tokens.plot(column(shown, "batch_tokens"), factors, style, color=COLOURS[mode], marker=".", label=label)
    by_tokens.set(xscale="log", xlabel="tokens a step", ylabel="drift / exact's", ylim=(0, 1.4))
    _finish(plot, figure, path)


def draw_finetune(plot: Any, rows: list[Row], path: Path) -> None:
    """Held-out loss over the steps, and less exact's of the same seed: the mean of the seeds and their range."""
    figure, ((curves, apart),) = _panels(plot, 1, 2, 4.5)
    for mode in in_order(row["mode"] for row in rows):
        look = {"color": COLOURS[mode], "label": LABELS[mode]}
        chosen = [row for row in rows if row["mode"] == mode]
        steps = unique(row["step"] for row in chosen)
        means = [mean([row["val_loss"] for row in chosen if row["step"] == step]) for step in steps]
        curves.plot(steps, means, **look)
        by_step = differences(rows, mode, "val_loss")
        apart.plot(list(by_step), [1e3 * mean(values) for values in by_step.values()], **look)
        low, high = ([1e3 * pick(values) for values in by_step.values()] for pick in (min, max))
        apart.fill_between(list(by_step), low, high, color=COLOURS[mode], alpha=0.15)
    curves.set(title="mean of the seeds", xlabel="step", ylabel="held-out loss (nats a token)")
    apart.set(title="less exact's of the same seed; range of the seeds", xlabel="step", ylabel="difference (10⁻³ nats)")
    _finish(plot, figure, path)
