"""What ``cce-tp bench`` found: as data, in files, and as text for the terminal and the README."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .bench_logits import Shape
from .console import UsageError, mib

BEGIN, END = "<!-- cce-tp bench: begin -->", "<!-- cce-tp bench: end -->"
ONE_PRODUCT, THREE_PRODUCTS = "1G: the logits alone", "3G: the three products"


@dataclass(frozen=True)
class Row:
    """One method on one problem; None where something was not measured.

    Attributes:
        method: its name.
        kind: "product", "ours" or "peer".
        package, version: where the method comes from.
        reason: why it was not measured.
        forward_ms: median, the loss of inputs that need no gradient.
        both_ms: median, loss and gradients.
        repeats: runs of ``both_ms``, or of ``forward_ms`` where that is all.
        forward_bytes: peak above the inputs.
        both_bytes: peak above the inputs and their gradients.
        loss_error: loss minus the fp32 loss.
        input_error, weight_error: of the gradients, relative to those in fp32.
        input_noise, weight_noise: what these should be for a sampled gradient, by the closed form.
    """

    method: str
    kind: str
    package: str | None = None
    version: str | None = None
    reason: str | None = None
    forward_ms: float | None = None
    both_ms: float | None = None
    repeats: int | None = None
    forward_bytes: int | None = None
    both_bytes: int | None = None
    loss_error: float | None = None
    input_error: float | None = None
    weight_error: float | None = None
    input_noise: float | None = None
    weight_noise: float | None = None

    @property
    def measured(self) -> bool:
        return self.reason is None


@dataclass(frozen=True)
class Case:
    """All methods on one problem.

    Attributes:
        shape: N, V, D.
        logits: of which kind.
        dtype: of the inputs.
        device: its name.
        repeats: most runs that a median is of.
        loss: in fp32.
        rows: the two products first.
        parts: milliseconds of the sampled mode's parts, if asked for.
    """

    shape: Shape
    logits: str
    dtype: str
    device: str
    versions: dict[str, str]
    repeats: int
    loss: float
    rows: list[Row]
    parts: dict[str, Any] | None = field(default=None)

    @property
    def product_ms(self) -> float:
        """G."""
        return self._time(ONE_PRODUCT, "forward_ms")

    @property
    def three_products_ms(self) -> float:
        return self._time(THREE_PRODUCTS, "both_ms")

    def _time(self, method: str, name: str) -> float:
        value = next((getattr(row, name) for row in self.rows if row.method == method), None)
        return float("nan") if value is None else float(value)

    @property
    def title(self) -> str:
        tokens, rows, hidden = self.shape
        return f"N = {tokens:,}, V = {rows:,}, D = {hidden:,}, {self.logits} logits, {self.dtype}, {self.device}"


def write_json(path: Path, cases: Sequence[Case]) -> None:
    path.write_text(json.dumps({"cases": [asdict(case) for case in cases]}, indent=2) + "\n")


def read_json(path: Path) -> list[Case]:
    """What ``write_json`` wrote.

    Raises:
        UsageError: the file holds something else.
    """
    try:
        found = json.loads(path.read_text())["cases"]
        return [
            Case(**{**case, "shape": tuple(case["shape"]), "rows": [Row(**row) for row in case["rows"]]})
            for case in found
        ]
    except (OSError, ValueError, KeyError, TypeError):
        raise UsageError(f"{path} holds no results of cce-tp bench --json") from None


def write_csv(path: Path, cases: Sequence[Case]) -> None:
    """One line for each method and problem."""
    names = [column.name for column in fields(Row)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["N", "V", "D", "logits", "dtype", "device", "G_ms", "3G_ms", *names])
        for case in cases:
            problem = [*case.shape, case.logits, case.dtype, case.device, case.product_ms, case.three_products_ms]
            writer.writerows([*problem, *(getattr(row, name) for name in names)] for row in case.rows)


# -- the terminal


TIME_COLUMNS = ("", "forward ms", "/ G", "fwd+bwd ms", "/ G", "/ 3G", "runs", "MiB fwd", "MiB both")
ERROR_COLUMNS = ("", "loss off", "∇E off", "closed form", "∇C off", "closed form")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _over(value: float | None, unit: float, form: str = ".2f") -> str:
    return "" if value is None else format(value / unit, form)


def time_rows(case: Case) -> list[tuple[str, ...]]:
    """The cells under ``TIME_COLUMNS``, of what was measured."""
    unit, three = case.product_ms, case.three_products_ms
    return [
        (
            row.method,
            _number(row.forward_ms, ".3f"),
            _over(row.forward_ms, unit, ".3f"),
            _number(row.both_ms, ".3f"),
            _over(row.both_ms, unit, ".3f"),
            _over(row.both_ms, three),
            _number(row.repeats, "d"),
            "" if row.forward_bytes is None else mib(row.forward_bytes),
            "" if row.both_bytes is None else mib(row.both_bytes),
        )
        for row in case.rows
        if row.measured
    ]


def error_rows(case: Case) -> list[tuple[str, ...]]:
    """The cells under ``ERROR_COLUMNS``."""
    return [
        (
            row.method,
            _number(row.loss_error, "+.1e"),
            _number(row.input_error, ".2e"),
            _number(row.input_noise, ".2e"),
            _number(row.weight_error, ".2e"),
            _number(row.weight_noise, ".2e"),
        )
        for row in case.rows
        if row.measured and row.input_error is not None
    ]


# -- Markdown

NOTHING = "–"


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _shape_name(shape: Shape) -> str:
    return ", ".join(str(size) for size in shape)


def _cell(row: Row | None, case: Case) -> str:
    """``forward / forward + backward, memory``."""
    if row is None or not row.measured:
        return NOTHING
    times = [_over(value, case.product_ms) for value in (row.forward_ms, row.both_ms)]
    memory = "" if row.both_bytes is None else f", {mib(row.both_bytes)}"
    return f"{times[0] or NOTHING} / {times[1] or NOTHING}{memory}"


def _error_cell(row: Row | None) -> str:
    if row is None or not row.measured or row.input_error is None:
        return NOTHING
    return f"{_number(row.loss_error, '+.0e')}, {row.input_error:.1e}, {_number(row.weight_error, '.1e')}"


def _find(case: Case, method: str) -> Row | None:
    return next((row for row in case.rows if row.method == method), None)


def _methods(cases: Sequence[Case]) -> list[Row]:
    """One row for every method that was measured in some case, in the order in which they were."""
    seen: dict[str, Row] = {}
    for case in cases:
        for row in case.rows:
            if row.measured and row.kind != "product":
                seen.setdefault(row.method, row)
    return list(seen.values())


def _name(row: Row) -> str:
    return f"**{row.method}**" if row.kind == "ours" else row.method


def _missing(cases: Sequence[Case]) -> list[str]:
    """Who was not measured, and why; with the shape where that was not so everywhere."""
    lines: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for row in case.rows:
            if not row.measured:
                lines.setdefault((row.method, str(row.reason)), []).append(_shape_name(case.shape))
    return [
        f"{method} ({why})" if len(shapes) == len(cases) else f"{method} at {'; '.join(shapes)} ({why})"
        for (method, why), shapes in lines.items()
    ]


def markdown(cases: Sequence[Case]) -> str:
    """Two tables for each kind of logits: time and memory, and errors."""
    parts = []
    for logits in dict.fromkeys(case.logits for case in cases):
        parts.append(_markdown_of([case for case in cases if case.logits == logits]))
    return "\n".join(parts)


def _markdown_of(cases: Sequence[Case]) -> str:
    first = cases[0]
    shapes = [_shape_name(case.shape) for case in cases]
    versions = ", ".join(f"{name} {version}" for name, version in first.versions.items())
    packages = {row.package: row.version for row in _methods(cases) if row.kind == "peer" and row.package != "torch"}
    peers = "".join(f", {package} {version}" for package, version in packages.items())
    times = [
        ["G", *(f"{case.product_ms:.2f} ms" for case in cases)],
        ["the three products", *(f"{case.three_products_ms / case.product_ms:.2f} G" for case in cases)],
        *([_name(row), *(_cell(_find(case, row.method), case) for case in cases)] for row in _methods(cases)),
    ]
    errors = [[_name(row), *(_error_cell(_find(case, row.method)) for case in cases)] for row in _methods(cases)]
    errors = [row for row in errors if any(cell != NOTHING for cell in row[1:])]
    text = (
        f"{first.device}, {first.dtype}, {first.logits} logits; {versions}{peers}. Medians of {first.repeats} runs in "
        f"turns (a quarter as many of peers that take over 50 ms).\n\n"
        f"Forward / forward + backward in units of G, the bare logits product by the library in the same turns; peak "
        f"memory above inputs and gradients in MiB:\n\n"
        f"{_markdown_table(['N, V, D', *shapes], times)}\n"
        f"Error of the loss, and relative errors of ∇E and ∇C, against fp32:\n\n"
        f"{_markdown_table(['N, V, D', *shapes], errors)}"
    )
    missing = _missing(cases)
    return text + (f"\nNot measured: {'; '.join(missing)}.\n" if missing else "")


def readme_has_marks(path: Path) -> bool:
    """Whether there is a place for the tables."""
    text = path.read_text()
    return text.count(BEGIN) == 1 and text.count(END) == 1 and text.index(BEGIN) < text.index(END)


def write_readme(path: Path, cases: Sequence[Case]) -> None:
    """Put the tables between the two marks, instead of what is there.

    Raises:
        UsageError: the marks are not there once each, in order.
    """
    if not readme_has_marks(path):
        raise UsageError(f"{path} has not one line {BEGIN} and, below it, one line {END}")
    text = path.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    path.write_text(f"{before}{BEGIN}\n{markdown(cases)}{after}")
