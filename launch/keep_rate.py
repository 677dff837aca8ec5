"""How peaked a model is on a text, and what each backward mode would make of that: work, error, time.

Give it the hidden states before the head, the labels, and the head (.npz or .safetensors):

    cce-tp keep-rate --head head.npz --hidden hidden.npz --out pictures/

A head is an array weight [V, D], or q int8 [V, D] with scale [V, D / block]; hidden states are hidden [N, D] or e_bf16
(an int16 view of bf16), labels are targets [N], negative where there is none. All is computed on the CPU in fp32, in
blocks; the temperature divides the logits: below 1, the model is as much more certain.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import density as counting
from .console import Output, add_json, existing_file, positive, power_of_two, probability, pyplot, write_json
from .density import TILE, Density, orders
from .model_files import Model, load_model

HELP = "how peaked a model is on a text, and what each backward mode would make of it"
TEMPERATURES = (1.0, 0.75, 0.5, 0.35)
PAPER_EPS = 2.0**-12
FILTER_EPS = (2.0**-12, 2.0**-9)
SAMPLER_EPS = (2.0**-12, 2.0**-10, 2.0**-9, 2.0**-8)
GRADIENT_TOKENS = 1024
FLOP_PER_BYTE = 100.0
"""Of a GPU whose products are not measured here: what it multiplies and adds while it gathers a byte of a row. (An
H200's products run at 670 TFLOP/s, and its scattered rows arrive at some 6 TB/s, many of them from its cache.)"""
WORTH_IT = 0.8
"""Sampled is recommended where it takes at most so much of exact's time."""


@dataclass(frozen=True)
class Unit:
    """What the cost model's parts take, in ``name``: the three products, and each sampled entry of one gradient."""

    name: str
    logits: float
    grad_e: float
    grad_c: float
    entry: float

    @property
    def rest(self) -> float:
        """What the backward pass does: the logits again, and the two gradients."""
        return self.logits + self.grad_e + self.grad_c


def by_counting(model: Model) -> Unit:
    """In products, for a machine that is not here."""
    product = 2 * len(model.target) * model.weight.numel()
    bytes_per_entry = 2 * model.weight.shape[1]
    return Unit("products", 1.0, 1.0, 1.0, bytes_per_entry * FLOP_PER_BYTE / product)


def by_measuring(model: Model) -> Unit:
    """In milliseconds of this machine's GPU, in bf16."""
    from .measure import median_ms

    e, c = (x.to("cuda", torch.bfloat16) for x in (model.hidden, model.weight))
    g = torch.empty(len(e), len(c), dtype=torch.bfloat16, device="cuda")
    entries = torch.randint(len(c), (len(e), 64), device="cuda")
    ones = torch.ones(entries.shape, dtype=torch.bfloat16, device="cuda")

    def gather() -> Tensor:
        return torch.nn.functional.embedding_bag(entries, c, per_sample_weights=ones, mode="sum")

    logits = median_ms(lambda: torch.mm(e, c.T, out=g), 10)
    g.zero_()
    grad_e, grad_c = median_ms(lambda: g @ c, 10), median_ms(lambda: g.T @ e, 10)
    return Unit("ms", logits, grad_e, grad_c, median_ms(gather, 10) / entries.numel())


def predict(unit: Unit, model: Model, tiles_kept: float, entries: dict[float, float]) -> dict[str, float]:
    """Forward + k x the rest, for each mode; k of the sampled one is made of hot rows and entries."""
    rows = len(model.weight)
    hot = min(counting.HOT_ROWS, rows)
    # The anchor looks at as many rows again beside the hot ones.
    dense = min(1.0, 2 * hot / rows) * unit.logits + hot / rows * unit.rest
    times = {
        "exact": unit.logits + unit.rest,
        f"tile filter {power_of_two(PAPER_EPS)}": unit.logits + tiles_kept * unit.rest,
    }
    for eps, kept in entries.items():
        times[f"sampled {power_of_two(eps)}"] = unit.logits + dense + 2 * kept * len(model.target) * unit.entry
    return times


def recommend(times: dict[str, float], errors: dict[str, list[float]], tiles_kept: float) -> str:
    """One sentence."""
    exact = times["exact"]
    noise = errors["logits rounded to bf16"][0]
    quiet = [n for n in times if n.startswith("sampled") and errors[n][0] <= noise and times[n] <= WORTH_IT * exact]
    tiles = f"a tile filter would still work on {tiles_kept:.0%} of the tiles"
    if not quiet:
        return (
            f"Use backward='exact': no eps makes sampled both less noisy than bf16 logits (grad E {noise:.1e}) and "
            f"faster than {WORTH_IT:.0%} of exact's time here, and {tiles}."
        )
    best = min(quiet, key=lambda name: times[name])
    mode = f"cce_tp.Sampled(eps={best.removeprefix('sampled ').replace('^', '**')})"
    return (
        f"Use backward={mode} where speed counts: its noise (grad E {errors[best][0]:.1e}) is below bf16 logits' "
        f"({noise:.1e}) at {times[best] / exact:.0%} of exact's time, while {tiles}; and backward='exact' where rare "
        f"rows of the vocabulary must move at every step."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--head", type=existing_file, required=True, metavar="FILE", help="the classifier")
    parser.add_argument(
        "--hidden",
        type=existing_file,
        required=True,
        metavar="FILE",
        help="hidden states and labels; may be the same file",
    )
    parser.add_argument("--tokens", type=positive, help="use only the first so many")
    parser.add_argument("--eps", type=probability, default=PAPER_EPS, help="of density and tiles (default: 2^-12)")
    parser.add_argument(
        "--gradient-tokens",
        type=positive,
        default=GRADIENT_TOKENS,
        help=f"tokens, evenly spread, on which errors of gradients are measured (default: {GRADIENT_TOKENS})",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the pictures; without it, there are none")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    output = Output()
    if options.out is not None:
        pyplot()  # better missed now than after the work
        options.out.mkdir(parents=True, exist_ok=True)
    model = load_model(options.head, options.hidden)
    if options.tokens is not None:
        model = Model(model.hidden[: options.tokens], model.weight, model.target[: options.tokens])
    weight = counting.widened(model.weight)
    with output.bar("count", counting.num_blocks(model)) as bar:
        found = counting.count(model, weight, TEMPERATURES, options.eps, SAMPLER_EPS, bar.advance)
    tokens = counting.some_tokens(model, options.gradient_tokens)
    with output.bar("gradients", counting.num_slabs(weight)) as bar:
        errors = counting.gradient_errors(model, weight, found, tokens, FILTER_EPS, SAMPLER_EPS, bar.advance)
    results = summarize(model, found, errors, options.eps, len(tokens))
    show(output, results)
    if options.out is not None:
        from .keep_rate_pictures import draw

        for path in draw(found, options.out, options.eps):
            output.say(str(path))
    write_json(options.json, results)
    return 0


def summarize(
    model: Model, found: Density, errors: dict[str, tuple[float, float]], eps: float, gradient_tokens: int
) -> dict[str, Any]:
    """All figures."""
    vocabulary = len(model.weight)
    temperatures = []
    for state in found.at:
        entries = torch.cat(state.entries)
        by_order = orders(found, state)
        temperatures.append(
            {
                "temperature": state.temperature,
                "loss": float(torch.cat(state.loss).mean()),
                "density": float(entries.mean()) / vocabulary,
                "entries_mean": float(entries.mean()),
                "entries_max": int(entries.max()),
                "rank_where_mean_p_below_eps": state.rank_below(eps),
                "tail_mass": float(torch.cat(state.tail).mean()),
                "tiles": {order.name: float(order.tiles(state.hits).float().mean()) for order in by_order}
                | {"random": counting.random_keep(state.hits)},
                "tiles_by_targets": {
                    order.name: float(order.tiles(state.target_hits).float().mean()) for order in by_order
                },
            }
        )
    named = {_named(name): list(error) for name, error in errors.items()}
    kept = {state.eps: float(torch.cat(state.kept).mean()) for state in found.sampler}
    tiles_kept = temperatures[0]["tiles"]["mean logit"]  # type: ignore[index]
    unit = by_measuring(model) if torch.cuda.is_available() else by_counting(model)
    times = predict(unit, model, tiles_kept, kept)
    return {
        "tokens": len(model.target),
        "vocabulary": vocabulary,
        "hidden": model.weight.shape[1],
        "eps": eps,
        "temperatures": temperatures,
        "gradient_tokens": gradient_tokens,
        "errors": named,
        "zero_rows": zero_rows(model, found),
        "sampled_entries": {power_of_two(value): mean for value, mean in kept.items()},
        "time_unit": unit.name,
        "times": times,
        "recommendation": recommend(times, named, tiles_kept),
    }


def _named(method: str) -> str:
    """With eps as a power of two."""
    head, _, last = method.rpartition(" ")
    return method if last == "bf16" else f"{head} {power_of_two(float(last))}"


def zero_rows(model: Model, found: Density) -> dict[str, float]:
    """Share of the vocabulary whose row of grad C is exactly zero, over all tokens."""
    state = found.at[0]
    order = found.mean_logit.argsort(descending=True)
    used = counting.Order("mean logit", order).tiles(state.hits).any(0)
    left_out = len(order) - int(used.repeat_interleave(TILE)[: len(order)].sum())
    shares = {"tile filter": left_out / len(order)}
    certain = torch.zeros(len(order), dtype=torch.bool)
    certain[found.anchor.hot] = True
    certain[model.target] = True
    for sampler in found.sampler:
        shares[f"sampled {power_of_two(sampler.eps)}"] = float((~(sampler.occurs | certain)).float().mean())
    return shares


def _percent(share: float) -> str:
    return f"{share:.2%}" if share < 0.1 else f"{share:.0%}"


def show(output: Output, results: dict[str, Any]) -> None:
    """The tables."""
    eps = power_of_two(results["eps"])
    at: Sequence[dict[str, Any]] = results["temperatures"]
    size = f"{results['tokens']:,} tokens, V = {results['vocabulary']:,}, D = {results['hidden']:,}"
    rows = [
        (
            f"{a['temperature']:g}",
            f"{a['loss']:.2f}",
            f"{a['density']:.3%}",
            f"{a['entries_mean']:.0f}",
            str(a["entries_max"]),
            str(a["rank_where_mean_p_below_eps"] or "beyond"),
            f"{a['tail_mass']:.1%}",
        )
        for a in at
    ]
    columns = ("temperature", "loss", "density", "entries a row", "most", f"mean p < {eps} from rank", "mass below")
    output.table(f"{size}: entries with p >= {eps}", columns, rows)
    names = ("natural", "mean logit", "count", "random")
    shares = [
        (
            f"{a['temperature']:g}",
            *(f"{a['tiles'][name]:.1%}" for name in names),
            *(f"{a['tiles_by_targets'][name]:.1%}" for name in names[:2]),
        )
        for a in at
    ]
    columns = ("temperature", *names, "by targets alone, natural", "... mean logit")
    output.table(f"{TILE} x {TILE} tiles kept at {eps}, by order of the vocabulary", columns, shares)
    _show_methods(output, results)
    output.say(results["recommendation"])


def _show_methods(output: Output, results: dict[str, Any]) -> None:
    errors, times, zero, entries = (results[name] for name in ("errors", "times", "zero_rows", "sampled_entries"))
    exact, unit = times["exact"], results["time_unit"]
    rows = []
    for name in ("exact", *errors):
        error = errors.get(name, (0.0, 0.0))
        first, _, eps = name.rpartition(" ")
        zero_rows_of = zero.get(name, zero.get(first) if eps == power_of_two(PAPER_EPS) else None)
        rows.append(
            (
                name,
                *(f"{value:.1e}" if value else "0" for value in error),
                "" if zero_rows_of is None else _percent(zero_rows_of),
                f"{entries[eps]:.0f}" if name.startswith("sampled") else "",
                f"{times[name]:.2f} ({times[name] / exact:.0%})" if name in times else "",
            )
        )
    columns = ("backward", "error of grad E", "of grad C", "rows of grad C = 0", "entries a row", f"time, {unit}")
    output.table("Against exact gradients in fp32", columns, rows)
    where = "measured products" if unit == "ms" else "in units of one logits product of a GPU"
    output.say(
        f"Errors are relative (Frobenius), on {results['gradient_tokens']:,} tokens spread over the text; the noise of "
        f"sampled in grad C falls with the root of the tokens of a step. Tiles are in mean-logit order. Entries are "
        f"beside hot rows and targets. Time: forward + k x the rest, {where}. (The tile filter is not available in "
        f"this version.)"
    )
