"""What the study's tables say: statistics over seeds, and ``summary.md``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from study_model import BANDS, MODES
from study_pool import Row

LABELS = {
    "torch": "PyTorch, bf16 logits",
    "megatron": "Megatron, fused",
    "exact": "exact",
    "filtered": "filtered, both gradients",
    "filtered-input": "filtered, weight=False",
    "sampled-2^-12": "sampled 2⁻¹²",
    "sampled-2^-10": "sampled 2⁻¹⁰",
    "sampled-2^-8": "sampled 2⁻⁸",
    "sampled-2^-6": "sampled 2⁻⁶",
    "sampled-2^-4": "sampled 2⁻⁴",
}
"""Modes as readers know them."""


def unique(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of their first occurrence."""
    return list(dict.fromkeys(values))


def in_order(modes: Iterable[str]) -> list[str]:
    """Modes as they are listed everywhere."""
    present = set(modes)
    return [mode for mode in MODES if mode in present]


def mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def spread(values: Sequence[float]) -> float:
    """Standard deviation, of one value NaN."""
    if len(values) < 2:
        return math.nan
    centre = mean(values)
    return math.sqrt(sum((value - centre) ** 2 for value in values) / (len(values) - 1))


def part_label(part: str) -> str:
    """What noise was measured of, as readers know it."""
    names = {"hidden": "∇E, a token's", "trunk": "the layers before", "classifier": "∇C"}
    return names.get(part) or part.replace("classifier", "∇C, target") + ("" if part.endswith("never") else " times")


def cell(value: float, form: str) -> str:
    """A table's cell."""
    return "–" if math.isnan(value) else format(value, form)


def groups_of(rows: Sequence[Row]) -> list[tuple[str, float]]:
    """(size, tokens a step), the most populous first."""
    keys = [(row["size"], row["batch_tokens"]) for row in rows]
    return sorted(unique(keys), key=lambda key: -keys.count(key))


def of_group(rows: Sequence[Row], group: tuple[str, float]) -> list[Row]:
    return [row for row in rows if (row["size"], row["batch_tokens"]) == group]


def column(rows: Sequence[Row], name: str) -> list[float]:
    """One value a row."""
    return [row[name] for row in rows]


def ratios(rows: Sequence[Row], over: str, under: str) -> list[float]:
    """Of two columns; NaN where the second is not positive."""
    return [ratio(row[over], row[under]) for row in rows]


def ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


def title_of(rows: Sequence[Row]) -> str:
    first = rows[0]
    return f"{first['parameters'] / 1e6:.0f} M parameters, {first['batch_tokens']:,.0f} tokens a step"


def differences(rows: Sequence[Row], mode: str, column: str) -> dict[float, list[float]]:
    """By step: ``column`` less the exact run of the same seed, for each seed."""
    return {step: [a - b for a, b in pairs] for step, pairs in _pairs(rows, mode, column).items()}


def quotients(rows: Sequence[Row], mode: str, column: str) -> dict[float, list[float]]:
    """By step: ``column`` over the exact run's of the same seed, for each seed."""
    return {step: [ratio(a, b) for a, b in pairs] for step, pairs in _pairs(rows, mode, column).items()}


def _pairs(rows: Sequence[Row], mode: str, column: str) -> dict[float, list[tuple[float, float]]]:
    exact = {(row["seed"], row["step"]): row[column] for row in rows if row["mode"] == "exact"}
    found: dict[float, list[tuple[float, float]]] = {}
    for row in rows:
        if row["mode"] == mode and (row["seed"], row["step"]) in exact:
            found.setdefault(row["step"], []).append((row[column], exact[row["seed"], row["step"]]))
    return found


def first_run(rows: Sequence[Row], mode: str) -> list[Row]:
    """A mode's evaluations with seed 0, but for the one before any step."""
    return [row for row in rows if row["mode"] == mode and row["seed"] == 0 and row["step"] > 0]


def later_ms(run: Sequence[Row]) -> float:
    """Milliseconds a step, without those up to the first evaluation, which include what is done but once."""
    first, last = run[0], run[-1]
    if len(run) < 2:
        return first["step_ms"]
    spent = last["step_ms"] * last["step"] - first["step_ms"] * first["step"]
    return spent / (last["step"] - first["step"])


def seed_spread(rows: Sequence[Row], column: str) -> dict[float, float]:
    """By step: the standard deviation over the exact runs' seeds."""
    steps = unique(row["step"] for row in rows)
    exact = [row for row in rows if row["mode"] == "exact"]
    return {step: spread([row[column] for row in exact if row["step"] == step]) for step in steps}


def summarize_train(rows: list[Row]) -> list[str]:
    """Final losses by group and mode."""
    text = []
    for group in groups_of(rows):
        members = of_group(rows, group)
        last = max(row["step"] for row in members)
        at_end = [row for row in members if row["step"] == last]
        deviation = seed_spread(members, "val_loss")[last]
        text += [
            f"\n### {title_of(members)}, {last:,.0f} steps (exact: s.d. of seeds {cell(deviation, '.4f')})\n",
            "| mode | seeds | validation loss | − exact, same seed | s.d. of that | never | 1-9 | 10-99 | 100-999 "
            "| norm of never / exact's | entries | ms a step |",
            "|" + "---|" * 12,
        ]
        for mode in in_order(row["mode"] for row in at_end):
            chosen = [row for row in at_end if row["mode"] == mode]
            apart = [mean(differences(members, mode, f"val_loss {band}").get(last, [])) for band in BANDS[:4]]
            paired = differences(members, mode, "val_loss").get(last, [])
            text.append(
                f"| {LABELS[mode]} | {len(chosen)} | {mean([row['val_loss'] for row in chosen]):.4f} "
                f"| {mean(paired):+.4f} | {cell(spread(paired), '.4f')} "
                f"| {' | '.join(cell(value, '+.3f') for value in apart)} "
                f"| {mean(quotients(members, mode, 'norm never')[last]):.3f} "
                f"| {mean([row['entries_per_token'] for row in chosen]):,.0f} "
                f"| {later_ms(first_run(members, mode)):.1f} |"
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
            f"| tokens | mode | {' | '.join(map(part_label, parts))} |",
            "|" + "---|" * (len(parts) + 2),
        ]
        for tokens in unique(row["batch_tokens"] for row in members):
            for mode in in_order(row["mode"] for row in members):
                chosen = {row["part"]: row for row in members
                          if (row["step"], row["batch_tokens"], row["mode"]) == (last, tokens, mode)}  # fmt: skip
                values = [ratio(chosen[part]["sampling_variance"], chosen[part]["batch_variance"]) for part in parts]
                text.append(
                    f"| {tokens:,.0f} | {LABELS[mode]} | {' | '.join(cell(value, '.2g') for value in values)} |"
                )
    return text


def summarize_adam(rows: list[Row]) -> list[str]:
    """Drift of rare rows against exact."""
    names = ("target never", "target 1-9", "target 10-99")
    modes = [mode for mode in in_order(row["mode"] for row in rows) if mode != "exact"]
    text = ["\n### Drift of the classifier's rows, sampled / exact (entries a step)\n"]
    text += [f"| tokens a step | rows | {' | '.join(LABELS[m] for m in modes)} |", "|" + "---|" * (len(modes) + 2)]
    for batch in sorted(unique(row["batch_tokens"] for row in rows)):
        for name in names:
            found = {row["mode"]: row for row in rows if row["batch_tokens"] == batch and row["rows"] == name}
            if found:
                cells = [
                    f"{ratio(found[m]['drift'], found[m]['drift_exact']):.2f} ({found[m]['entries_per_step']:.2g})"
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
        f"\n### Fine-tuning: {start:.4f} before, {end:.0f} steps (exact: s.d. of seeds {cell(deviation, '.4f')})\n",
        "| mode | held-out loss | − exact, same seed | s.d. of that |",
        "|---|---|---|---|",
    ]
    for mode in in_order(row["mode"] for row in rows):
        values = [row["val_loss"] for row in rows if row["mode"] == mode and row["step"] == end]
        apart = differences(rows, mode, "val_loss")[end]
        text.append(f"| {LABELS[mode]} | {mean(values):.4f} | {mean(apart):+.5f} | {cell(spread(apart), '.5f')} |")
    return text
