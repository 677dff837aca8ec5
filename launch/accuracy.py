"""How far each backward mode is from the float32 gradient, on a model's own head and hidden states.

    cce-tp accuracy --head head.npz --hidden hidden.npz

A head is an array weight [V, D], or q int8 [V, D] with scale [V, D / block]; hidden states are hidden [N, D] or e_bf16
(an int16 view of bf16), labels are targets [N], negative where there is none. Everything but the reference is computed
in bf16: PyTorch's product and cross-entropy, exact, sampled and filtered at several eps, and Apple's filter where its
package can be used.

Errors are relative, in the Frobenius norm. "of closed form": over the noise that the sampled mode should have,
sqrt(sum p^2 (1 / pi - 1) |C_v|^2) for the gradient of E, with |E_n|^2 for that of C. "worst 1 %": the error of a
token's gradient of E that only 1 % of the tokens exceed, in units of the RMS of these gradients.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

import cce_tp

from .bench_logits import Inputs
from .bench_peers import FILTER_EPS, AppleCCE, Method, Ours, Torch, reason
from .console import (
    UsageError,
    add_json,
    existing_file,
    open_output,
    positive,
    power_of_two,
    probability,
    write_json,
)
from .model_files import load_model
from .reference import Reference, reference, sampling_noise, worst_tokens

HELP = "distance of each backward mode from the fp32 gradient, on a model's head and hidden states"
SAMPLER_EPS = tuple(2.0**-power for power in (12, 10, 9, 8))
COLUMNS = ("", "loss off by", "∇E", "of closed form", "∇C", "of closed form", "worst 1 % of tokens")


@dataclass(frozen=True)
class Accuracy:
    """Of one method; None where there is no closed form, or nothing because of ``reason``."""

    mode: str
    reason: str | None = None
    loss_error: float | None = None
    grad_E: float | None = None
    grad_C: float | None = None
    grad_E_of_closed_form: float | None = None
    grad_C_of_closed_form: float | None = None
    worst_tokens: float | None = None

    def cells(self) -> tuple[str, ...]:
        values = (
            (self.loss_error, "+.1e"),
            (self.grad_E, ".2e"),
            (self.grad_E_of_closed_form, ".3f"),
            (self.grad_C, ".2e"),
            (self.grad_C_of_closed_form, ".3f"),
            (self.worst_tokens, ".2e"),
        )
        return self.mode, *("" if value is None else format(value, form) for value, form in values)


def methods(sampler_eps: tuple[float, ...], filter_eps: tuple[float, ...]) -> list[Method]:
    """PyTorch's, ours, and for each filter Apple's beside ours."""
    sampled = [Ours(cce_tp.Sampled(eps=eps, seed=1)) for eps in sampler_eps]
    filtered: list[Method] = []
    for eps in filter_eps:
        filtered += [Ours(cce_tp.Filtered(eps=eps)), AppleCCE(filter_eps=eps)]
    return [Torch(widened=False), Torch(widened=True), Ours(cce_tp.Exact()), *sampled, *filtered]


def accuracy(method: Method, inputs: Inputs, right: Reference) -> Accuracy:
    """One run of a method."""
    inputs.clear_gradients()
    try:
        loss = method.load()(inputs.hidden, inputs.weight, inputs.target)
        loss.backward()
    except Exception as error:  # whatever a peer raises is the reason that is reported
        return Accuracy(method.name, reason(error))
    grad_e, grad_c = inputs.hidden.grad, inputs.weight.grad
    assert grad_e is not None
    assert grad_c is not None
    of_e, of_c = right.errors(grad_e, grad_c)
    found = Accuracy(
        method.name,
        loss_error=loss.item() - right.loss,
        grad_E=of_e,
        grad_C=of_c,
        worst_tokens=worst_tokens(grad_e, right.input_grad),
    )
    if not (isinstance(method, Ours) and isinstance(method.mode, cce_tp.Sampled)):
        return found
    noise_e, noise_c = sampling_noise(inputs, method.mode, right)
    if min(noise_e, noise_c) == 0.0:  # every row is a hot one
        return found
    return replace(found, grad_E_of_closed_form=of_e / noise_e, grad_C_of_closed_form=of_c / noise_c)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Of this subcommand."""
    parser.add_argument("--head", type=existing_file, required=True, metavar="FILE")
    parser.add_argument("--hidden", type=existing_file, required=True, metavar="FILE")
    parser.add_argument("--tokens", type=positive, help="use only the first so many")
    parser.add_argument(
        "--eps", type=probability, action="append",
        help=f"of the sampled mode; may be repeated; default: {', '.join(map(power_of_two, SAMPLER_EPS))}",
    )  # fmt: skip
    parser.add_argument(
        "--filter-eps", type=probability, action="append",
        help=f"of the filtered mode, and Apple's; may be repeated; default: {power_of_two(FILTER_EPS)}",
    )  # fmt: skip
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device is here")
    model = load_model(options.head, options.hidden)
    part = slice(options.tokens)
    inputs = Inputs.leaves(
        model.hidden[part].to(options.device), model.weight.to(options.device), model.target[part].to(options.device),
        torch.bfloat16,
    )  # fmt: skip
    right = reference(inputs)
    output, results = open_output(), []
    for method in methods(tuple(options.eps or SAMPLER_EPS), tuple(options.filter_eps or (FILTER_EPS,))):
        results.append(accuracy(method, inputs, right))
    tokens, rows, hidden = inputs.shape
    title = f"{tokens:,} tokens, V = {rows:,}, D = {hidden:,}, {options.device}; loss {right.loss:.6f}"
    output.table(title, COLUMNS, [result.cells() for result in results if result.reason is None])
    for result in results:
        if result.reason is not None:
            output.say(f"  not measured: {result.mode}: {result.reason}")
    write_json(options.json, {"loss": right.loss, "tokens": tokens, "modes": [_plain(result) for result in results]})
    return 0


def _plain(result: Accuracy) -> dict[str, Any]:
    return {name: value for name, value in vars(result).items() if value is not None}


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["accuracy", *sys.argv[1:]]))
