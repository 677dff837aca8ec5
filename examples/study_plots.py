"""``study.py plots``: pictures and ``summary.md`` from the tables of a run folder."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from study_model import BANDS
from study_pool import Row, read_table

COLOURS = {
    "torch": "black",
    "megatron": "tab:gray",
    "exact": "tab:blue",
    "filtered": "tab:red",
    "filtered-input": "tab:pink",
    "sampled-2^-12": "#003c30",
    "sampled-2^-10": "#35978f",
    "sampled-2^-8": "#5ab4ac",
    "sampled-2^-6": "#d8b365",
    "sampled-2^-4": "#8c510a",
}


def draw_all(out: Path) -> list[Path]:
    """Draw what there are tables for; the files written. Without matplotlib, the summary only."""
    tables: dict[str, tuple[Callable[[list[Row]], list[str]], Sequence[tuple[str, Callable[..., None]]]]] = {
        "train": (summarize_train, (("loss", draw_loss), ("bands", draw_bands), ("tail", draw_tail))),
        "noise": (summarize_noise, (("noise", draw_noise),)),
        "adam_tail": (summarize_adam, (("adam_tail", draw_adam),)),
        "finetune": (summarize_finetune, (("finetune", draw_finetune),)),
    }
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
        (out / "summary.md").write_text("\n".join(text) + "\n")
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


def unique(values: Iterable[Any]) -> list[Any]:
    """In the order of their first occurrence."""
    return list(dict.fromkeys(values))


def in_order(modes: Iterable[str]) -> list[str]:
    """Modes as they are listed everywhere."""
    present = set(modes)
    return [mode for mode in COLOURS if mode in present]


def mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def spread(values: Sequence[float]) -> float:
    """Standard deviation, of one value NaN."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))


def groups_of(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """(size, tokens a step), the most populous first."""
    keys = [(row["size"], row["batch_tokens"]) for row in rows]
    return sorted(unique(keys), key=lambda key: -keys.count(key))


def _of_group(rows: Sequence[Row], group: tuple[str, float]) -> list[Row]:
    return [row for row in rows if (row["size"], row["batch_tokens"]) == group]


def column(rows: Sequence[Row], name: str) -> list[float]:
    """One value a row."""
    return [row[name] for row in rows]


def ratios(rows: Sequence[Row], over: str, under: str) -> list[float]:
    """Of two columns; NaN where the second is not positive."""
    return [_ratio(row[over], row[under]) for row in rows]


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


def _title(rows: Sequence[Row]) -> str:
    first = rows[0]
    return f"{first['parameters'] / 1e6:.0f} M parameters, {first['batch_tokens']:,.0f} tokens a step"


def differences(rows: Sequence[Row], mode: str, column: str) -> dict[float, list[float]]:
    """By step: ``column`` less the exact run of the same seed, for each seed."""
    exact = {(row["seed"], row["step"]): row[column] for row in rows if row["mode"] == "exact"}
    found: dict[float, list[float]] = {}
    for row in rows:
        if row["mode"] == mode and (row["seed"], row["step"]) in exact:
            found.setdefault(row["step"], []).append(row[column] - exact[row["seed"], row["step"]])
    return found


def seed_spread(rows: Sequence[Row], column: str) -> dict[float, float]:
    """By step: the standard deviation over the exact runs' seeds."""
    steps = unique(row["step"] for row in rows)
    exact = [row for row in rows if row["mode"] == "exact"]
    return {step: spread([row[column] for row in exact if row["step"] == step]) for step in steps}


def draw_loss(plot: Any, rows: list[Row], path: Path) -> None:
    """Validation loss against that of exact with the same seed, a panel for each group; entries and step times."""
    groups = groups_of(rows)
    figure, panels = plot.subplots(len(groups), 2, figsize=(13, 3.6 * len(groups)), squeeze=False, layout="constrained")
    for (axes, sparse), group in zip(panels, groups, strict=True):
        members = _of_group(rows, group)
        deviation = {step: value for step, value in seed_spread(members, "val_loss").items() if not math.isnan(value)}
        if deviation:
            low, high = [-value for value in deviation.values()], list(deviation.values())
            axes.fill_between(
                list(deviation), low, high, color="tab:blue", alpha=0.15, label="exact: ± 1 s.d. of seeds"
            )
        for mode in in_order(row["mode"] for row in members):
            by_step = differences(members, mode, "val_loss")
            axes.plot(list(by_step), [mean(v) for v in by_step.values()], color=COLOURS[mode], label=mode, marker=".")
            kept = [row for row in members if row["mode"] == mode and row["seed"] == 0 and row["step"] > 0]
            label = f"{mode}: {kept[-1]['step_ms']:.1f} ms a step"
            entries = column(kept, "entries_per_token")
            sparse.plot(column(kept, "step"), entries, color=COLOURS[mode], marker=".", label=label)
        axes.set(title=_title(members), xlabel="step", ylabel="validation loss − exact's (nats)")
        axes.set_yscale("symlog", linthresh=0.02)
        sparse.set(title="entries of the gradient a token", xlabel="step", yscale="log")
        for one in (axes, sparse):
            one.grid(alpha=0.3)
            one.legend(fontsize=7)
    _save(plot, figure, path)


def draw_bands(plot: Any, rows: list[Row], path: Path) -> None:
    """Final validation loss by the target's frequency, against exact."""
    groups = groups_of(rows)
    figure, panels = plot.subplots(len(groups), 1, figsize=(11, 3.4 * len(groups)), squeeze=False, layout="constrained")
    for (axes,), group in zip(panels, groups, strict=True):
        members = _of_group(rows, group)
        modes = [mode for mode in in_order(row["mode"] for row in members) if mode != "exact"]
        last = max(row["step"] for row in members)
        width = 0.8 / max(1, len(modes))
        for place, mode in enumerate(modes):
            values = [mean(differences(members, mode, f"val_loss {band}").get(last, [])) for band in BANDS]
            axes.bar([x + place * width for x in range(len(BANDS))], values, width, color=COLOURS[mode], label=mode)
        for x, band in enumerate(BANDS):
            deviation = seed_spread(members, f"val_loss {band}")[last]
            if not math.isnan(deviation):
                where = [x - width / 2, x + 0.8 - width / 2]
                axes.fill_between(where, -deviation, deviation, color="tab:blue", alpha=0.15)
        axes.set_xticks([x + 0.4 for x in range(len(BANDS))], BANDS)
        axes.set(
            title=_title(members), ylabel="validation loss − exact's (nats)", xlabel="times the target was trained"
        )
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7, ncols=2)
    _save(plot, figure, path)


def draw_tail(plot: Any, rows: list[Row], path: Path) -> None:
    """Norms of the classifier's rare rows over the steps."""
    groups, bands = groups_of(rows), ("never", "1-9")
    figure, panels = plot.subplots(
        len(groups), len(bands), figsize=(13, 3.4 * len(groups)), squeeze=False, layout="constrained"
    )
    for line, group in zip(panels, groups, strict=True):
        members = _of_group(rows, group)
        for axes, band in zip(line, bands, strict=True):
            for mode in in_order(row["mode"] for row in members):
                chosen = [row for row in members if row["mode"] == mode and row["seed"] == 0]
                norms = column(chosen, f"norm {band}")
                axes.plot(column(chosen, "step"), norms, color=COLOURS[mode], label=mode, marker=".")
            axes.set(title=f"{_title(members)}; target {band}", xlabel="step", ylabel="mean norm of rows of C")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    _save(plot, figure, path)


def _eps(mode: str) -> float:
    return 2.0 ** int(mode.split("^")[1])


def draw_noise(plot: Any, rows: list[Row], path: Path) -> None:
    """Ratio of the two variances by eps, and by tokens a step."""
    sizes = unique(row["size"] for row in rows)
    figure, panels = plot.subplots(len(sizes), 3, figsize=(16, 4.2 * len(sizes)), squeeze=False, layout="constrained")
    for (by_eps, by_tokens, to_signal), size in zip(panels, sizes, strict=True):
        members = [row for row in rows if row["size"] == size and row["batch_variance"] > 0]
        last, most = max(row["step"] for row in members), max(row["batch_tokens"] for row in members)
        at_end = [row for row in members if row["step"] == last]
        for part in unique(row["part"] for row in at_end):
            largest = [row for row in at_end if row["part"] == part and row["batch_tokens"] == most]
            label = part.replace("classifier", "C").replace("hidden", "E, by token")
            eps = [_eps(row["mode"]) for row in largest]
            by_eps.plot(eps, ratios(largest, "sampling_variance", "batch_variance"), marker=".", label=label)
            fixed = [row for row in at_end if row["part"] == part and row["mode"] == "sampled-2^-8"]
            tokens = column(fixed, "batch_tokens")
            by_tokens.plot(tokens, ratios(fixed, "sampling_variance", "batch_variance"), marker=".", label=label)
            if part != "hidden":
                to_signal.plot(tokens, ratios(fixed, "sampling_variance", "signal"), marker=".", label=label)
        by_eps.set(title=f"{size}, step {last:.0f}, {most:,.0f} tokens", xlabel="eps")
        by_tokens.set(title="eps = 2^-8", xlabel="tokens a step")
        to_signal.set(title="eps = 2^-8", xlabel="tokens a step", ylabel="sampling variance / |E g|²")
        for axes in (by_eps, by_tokens):
            axes.set_ylabel("sampling / mini-batch variance")
        for axes in (by_eps, by_tokens, to_signal):
            axes.set(xscale="log", yscale="log")
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    _save(plot, figure, path)


def draw_adam(plot: Any, rows: list[Row], path: Path) -> None:
    """Drift against exact: by entries a step, where all batches fall together; and by tokens a step."""
    figure, (collapse, by_tokens) = plot.subplots(1, 2, figsize=(13, 5), layout="constrained")
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
            factors, label = ratios(shown, "drift", "drift_exact"), f"{mode}, {name}"
            by_tokens.plot(column(shown, "batch_tokens"), factors, style, color=COLOURS[mode], marker=".", label=label)
    by_tokens.set(xscale="log", xlabel="tokens a step", ylabel="drift / exact's", ylim=(0, 1.4))
    for axes in (collapse, by_tokens):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    _save(plot, figure, path)


def draw_finetune(plot: Any, rows: list[Row], path: Path) -> None:
    """Held-out loss over the steps, and at its end against exact of the same seed."""
    figure, (curves, last) = plot.subplots(1, 2, figsize=(13, 4.5), layout="constrained")
    modes = in_order(row["mode"] for row in rows)
    end = max(row["step"] for row in rows)
    for place, mode in enumerate(modes):
        chosen = [row for row in rows if row["mode"] == mode]
        steps = unique(row["step"] for row in chosen)
        means = [mean([row["val_loss"] for row in chosen if row["step"] == step]) for step in steps]
        curves.plot(steps, means, color=COLOURS[mode], label=mode)
        values = differences(rows, mode, "val_loss")[end]
        last.plot([place] * len(values), values, "o", color=COLOURS[mode])
    last.set_xticks(range(len(modes)), modes, rotation=40, ha="right")
    last.set(ylabel="held-out loss − exact's of the same seed (nats)", title=f"after {end:.0f} steps")
    curves.set(xlabel="step", ylabel="held-out loss (nats per token)")
    curves.legend(fontsize=7)
    for axes in (curves, last):
        axes.grid(alpha=0.3)
    _save(plot, figure, path)


def _save(plot: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=80)
    plot.close(figure)


def summarize_train(rows: list[Row]) -> list[str]:
    """Final losses by group and mode."""
    text = []
    for group in groups_of(rows):
        members = _of_group(rows, group)
        last = max(row["step"] for row in members)
        at_end = [row for row in members if row["step"] == last]
        deviation = seed_spread(members, "val_loss")[last]
        text += [
            f"\n### {_title(members)}, {last:,.0f} steps (exact: s.d. of seeds {deviation:.4f})\n",
            "| mode | seeds | validation loss | − exact | never | 1-9 | 10-99 | 100-999 | entries | ms a step |",
            "|---|---|---|---|---|---|---|---|---|---|",
        ]
        for mode in in_order(row["mode"] for row in at_end):
            chosen = [row for row in at_end if row["mode"] == mode]
            apart = [mean(differences(members, mode, f"val_loss {band}").get(last, [])) for band in BANDS[:4]]
            text.append(
                f"| {mode} | {len(chosen)} | {mean([row['val_loss'] for row in chosen]):.4f} "
                f"| {mean(differences(members, mode, 'val_loss').get(last, [])):+.4f} "
                f"| {' | '.join(f'{value:+.3f}' for value in apart)} "
                f"| {mean([row['entries_per_token'] for row in chosen]):,.0f} "
                f"| {mean([row['step_ms'] for row in chosen]):.1f} |"
            )
    return text


def summarize_noise(rows: list[Row]) -> list[str]:
    """Ratios of sampling to mini-batch variance, and to the signal, at the end of each run."""
    text = []
    for size in unique(row["size"] for row in rows):
        members = [row for row in rows if row["size"] == size]
        last = max(row["step"] for row in members)
        parts = unique(row["part"] for row in members)
        text += [
            f"\n### Sampling / mini-batch variance ({size}, step {last:.0f})\n",
            f"| tokens | mode | {' | '.join(parts)} |",
            "|" + "---|" * (len(parts) + 2),
        ]
        for tokens in unique(row["batch_tokens"] for row in members):
            for mode in in_order(row["mode"] for row in members):
                chosen = {row["part"]: row for row in members
                          if (row["step"], row["batch_tokens"], row["mode"]) == (last, tokens, mode)}  # fmt: skip
                values = [_ratio(chosen[part]["sampling_variance"], chosen[part]["batch_variance"]) for part in parts]
                text.append(f"| {tokens:,.0f} | {mode} | {' | '.join(f'{value:.2g}' for value in values)} |")
    return text


def summarize_adam(rows: list[Row]) -> list[str]:
    """Drift of rare rows against exact."""
    names = ("target never", "target 1-9", "target 10-99")
    modes = [mode for mode in in_order(row["mode"] for row in rows) if mode != "exact"]
    text = ["\n### Drift of the classifier's rows, sampled / exact (entries a step)\n"]
    text += [f"| tokens a step | rows | {' | '.join(modes)} |", "|" + "---|" * (len(modes) + 2)]
    for batch in sorted(unique(row["batch_tokens"] for row in rows)):
        for name in names:
            found = {row["mode"]: row for row in rows if row["batch_tokens"] == batch and row["rows"] == name}
            if found:
                cells = [
                    f"{_ratio(found[m]['drift'], found[m]['drift_exact']):.2f} ({found[m]['entries_per_step']:.2g})"
                    for m in modes
                ]
                text.append(f"| {batch:,.0f} | {name} | {' | '.join(cells)} |")
    return text


def summarize_finetune(rows: list[Row]) -> list[str]:
    """Held-out losses at the end."""
    end = max(row["step"] for row in rows)
    start = mean([row["val_loss"] for row in rows if row["step"] == 0])
    deviation = seed_spread(rows, "val_loss")[end]
    text = [
        f"\n### Fine-tuning: {start:.4f} before, {end:.0f} steps (exact: s.d. of seeds {deviation:.4f})\n",
        "| mode | held-out loss | − exact, same seed | s.d. of that |",
        "|---|---|---|---|",
    ]
    for mode in in_order(row["mode"] for row in rows):
        values = [row["val_loss"] for row in rows if row["mode"] == mode and row["step"] == end]
        apart = differences(rows, mode, "val_loss")[end]
        text.append(f"| {mode} | {mean(values):.4f} | {mean(apart):+.5f} | {spread(apart):.5f} |")
    return text
