"""How peaked a model is on a text, and what each backward mode would make of that: work, error, time.

Give it a Hugging Face folder and text files, or what was saved of a model, as .npz or .safetensors: the head, and the
hidden states before it with their labels:

    cce-tp keep-rate --model SmolLM2-135M/ --text docs/*.txt --out pictures/
    cce-tp keep-rate --head head.npz --hidden hidden.npz --out pictures/

A head is an array weight [V, D], or q int8 [V, D] with scale [V, D / block]; hidden states are hidden [N, D] or e_bf16
(an int16 view of bf16), labels are targets [N], negative where there is none. The head is taken in the hidden states'
dtype; all is counted on the CPU in fp32, in blocks. The temperature divides the logits: below 1, the model is as much
more certain.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from . import cost_model
from . import density as counting
from .console import (
    Output,
    UsageError,
    add_json,
    existing_file,
    existing_folder,
    positive,
    power_of_two,
    probability,
    pyplot,
    write_json,
)
from .cost_model import Costs
from .density import BF16_LOGITS, TILE, Density, GradientError, orders
from .model_files import Model, load_model

HELP = "how peaked a model is on a text, and what each backward mode would make of it"
TEMPERATURES = (1.0, 0.75, 0.5, 0.35)
PAPER_EPS = 2.0**-12
FILTER_EPS = (2.0**-12, 2.0**-9)
SAMPLER_EPS = (2.0**-12, 2.0**-10, 2.0**-9, 2.0**-8)
GRADIENT_TOKENS = 1024
FOLDER_TOKENS, SEQ_LEN = 8192, 1024
WORTH_IT = 0.8
"""Sampled is recommended where it takes at most so much of exact's time."""


def recommend(times: dict[str, float], errors: dict[str, GradientError], tiles_kept: float) -> str:
    """One sentence."""
    exact, limit = times["exact"], errors[BF16_LOGITS].input
    good = [n for n in times if n != "exact" and errors[n].input <= limit and times[n] <= WORTH_IT * exact]
    tiles = f"the tile filter still works on {tiles_kept:.0%} of the tiles"
    if not good:
        return (
            f"Use backward='exact': nothing is both closer to it than bf16 logits (grad E off by {limit:.1e}) and "
            f"faster than {WORTH_IT:.0%} of its time here, and {tiles}."
        )
    best = min(good, key=lambda name: times[name])
    eps = best.rpartition(" ")[2].replace("^", "**")
    samples = best.startswith("sampled")
    mode = f"cce_tp.Sampled(eps={eps})" if samples else f"cce_tp.Filtered(eps={eps}, order='mean_logit')"
    return (
        f"Use backward={mode} where speed counts: its {'noise' if samples else 'error'} (grad E off by "
        f"{errors[best].input:.1e}) is below that of bf16 logits ({limit:.1e}) at {times[best] / exact:.0%} of exact's "
        f"time, and {tiles}; use backward='exact' where rare rows of the vocabulary must move at every step."
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    saved = parser.add_argument_group("what was saved of a model")
    saved.add_argument("--head", type=existing_file, metavar="FILE", help="the classifier")
    saved.add_argument(
        "--hidden", type=existing_file, metavar="FILE", help="hidden states and labels; may be the same file"
    )
    folder = parser.add_argument_group("or a model that is run here")
    folder.add_argument("--model", type=existing_folder, metavar="DIR", help="a Hugging Face folder")
    folder.add_argument("--text", type=existing_file, nargs="+", metavar="FILE", help="text files, in UTF-8")
    folder.add_argument("--seq-len", type=positive, metavar="TOKENS", help=f"of a window (default: {SEQ_LEN})")
    parser.add_argument(
        "--tokens",
        type=positive,
        help=f"use only the first so many (default: all that were saved, or {FOLDER_TOKENS:,} of the text)",
    )
    parser.add_argument("--eps", type=probability, default=PAPER_EPS, help="of density and tiles (default: 2^-12)")
    parser.add_argument(
        "--gradient-tokens",
        type=positive,
        default=GRADIENT_TOKENS,
        help=f"the batch, from the first token on, whose gradients are compared (default: {GRADIENT_TOKENS})",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the pictures; without it, there are none")
    add_json(parser)


def read_model(options: argparse.Namespace, output: Output) -> Model:
    """From files, or from a folder and text.

    Raises:
        UsageError: neither is given, or something does not fit.
    """
    saved = {"--head": options.head, "--hidden": options.hidden}
    run_here = {"--model": options.model, "--text": options.text, "--seq-len": options.seq_len}
    given = [name for name, value in {**saved, **run_here}.items() if value is not None]
    if all(value is not None for value in saved.values()) and len(given) == len(saved):
        model = load_model(options.head, options.hidden)
        e, target = model.hidden[: options.tokens], model.target[: options.tokens]
        return Model(e, model.weight.to(e.dtype), target)
    if options.model is None or options.text is None or set(given) & set(saved):
        raise UsageError(f"give --head and --hidden, or --model and --text, not {', '.join(given) or 'nothing'}")
    from .model_folder import load_folder

    return load_folder(
        options.model,
        options.text,
        options.seq_len or SEQ_LEN,
        options.tokens or FOLDER_TOKENS,
        lambda windows: output.bar("model", windows),
        "cuda" if torch.cuda.is_available() else "cpu",
    )


def make_folder(path: Path) -> None:
    """
    Raises:
        UsageError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {path} cannot be made: {error.strerror}") from None


def run(options: argparse.Namespace) -> int:
    output = Output()
    if options.out is not None:
        pyplot()  # better missed now than after the work
        make_folder(options.out)
    model = read_model(options, output)
    weight = counting.widened(model.weight)
    with output.bar("count", counting.num_blocks(model)) as bar:
        found = counting.count(model, weight, TEMPERATURES, options.eps, SAMPLER_EPS, bar.advance)
    batch, filter_eps = min(options.gradient_tokens, len(model.target)), sorted({options.eps, *FILTER_EPS})
    with output.bar("gradients", counting.num_slabs(weight)) as bar:
        errors = counting.gradient_errors(model, weight, found, batch, filter_eps, SAMPLER_EPS, bar.advance)
    del weight
    if torch.cuda.is_available():
        costs = cost_model.by_measuring(model, options.eps, SAMPLER_EPS)
    else:
        costs = cost_model.by_counting(len(model.target), *model.weight.shape)
    results = summarize(model, found, errors, costs, options.eps, batch)
    show(output, results)
    if options.out is not None:
        from .keep_rate_pictures import draw

        for path in draw(found, options.out, options.eps):
            output.say(str(path))
    write_json(options.json, results)
    return 0


def summarize(
    model: Model, found: Density, errors: dict[str, GradientError], costs: Costs, eps: float, batch: int
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
    named = {_named(name): error for name, error in errors.items()}
    kept = {state.eps: float(torch.cat(state.kept).mean()) for state in found.sampler}
    tiles_kept = float(orders(found, found.at[0])[1].tiles(found.at[0].hits).float().mean())
    times = cost_model.predict(costs, {eps: tiles_kept}, kept)
    return {
        "tokens": len(model.target),
        "vocabulary": vocabulary,
        "hidden": model.weight.shape[1],
        "dtype": str(model.hidden.dtype).removeprefix("torch."),
        "eps": eps,
        "temperatures": temperatures,
        "gradient_tokens": batch,
        "errors": {name: asdict(error) for name, error in named.items()},
        "zero_rows": zero_rows(model, found, eps),
        "sampled_entries": {power_of_two(value): mean for value, mean in kept.items()},
        "costs": asdict(costs),
        "predicted_ms": times,
        "measured_ms": costs.measured,
        "recommendation": recommend(times | costs.measured, named, tiles_kept),
    }


def _named(method: str) -> str:
    """With eps as a power of two."""
    kind, _, last = method.rpartition(" ")
    return f"{kind} {power_of_two(float(last))}" if kind in ("tile filter", "sampled") else method


def zero_rows(model: Model, found: Density, eps: float) -> dict[str, float]:
    """Share of the vocabulary whose row of grad C is exactly zero, over all tokens; the filter in mean-logit order."""
    state = found.at[0]
    order = orders(found, state)[1]
    used = order.tiles(state.hits).any(0).repeat_interleave(TILE)[: len(model.weight)]
    shares = {f"tile filter {power_of_two(eps)}": float((~used).float().mean())}
    certain = torch.zeros(len(model.weight), dtype=torch.bool)
    certain[found.anchor.hot] = True
    certain[model.target] = True
    for sampler in found.sampler:
        shares[f"sampled {power_of_two(sampler.eps)}"] = float((~(sampler.occurs | certain)).float().mean())
    return shares


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return "0" if share == 0 else f"{share:.1%}"


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
    predicted, measured, entries = results["predicted_ms"], results["measured_ms"], results["sampled_entries"]
    rows = []
    for name, error in results["errors"].items():
        kept = entries.get(name.removeprefix("sampled "))
        row = [
            name,
            *(f"{error[gradient]:.1e}" if error[gradient] else "0" for gradient in ("input", "weight")),
            _percent(error["zero_rows"]),
            _percent(results["zero_rows"].get(name)),
            "" if kept is None else f"{kept:.0f}",
            _share(predicted, name),
        ]
        rows.append([*row, _share(measured, name)] if measured else row)
    batch = f"{results['gradient_tokens']:,} tokens"
    columns = ["backward", "grad E off by", "grad C off by", "zero rows", "... all tokens", "entries a row"]
    columns += ["predicted, ms", "measured, ms"] if measured else ["predicted, ms"]
    output.table(f"Against exact gradients in fp32, on a batch of the first {batch}", columns, rows)
    output.say(
        f"Errors are relative (Frobenius); the noise of sampled in grad C falls with the root of the tokens of a step. "
        f"Zero rows: vocabulary rows of grad C that are exactly zero, after this batch and after all tokens at once. "
        f"Tiles are in mean-logit order. Entries are what the sampler keeps beside hot rows and targets. Times: loss "
        f"and gradients of all tokens in bf16, on {results['costs']['device']}."
    )


def _share(times: dict[str, float], name: str) -> str:
    return f"{times[name]:.2f} ({times[name] / times['exact']:.0%})" if name in times else ""
