"""What the loss and its gradients take in each backward mode: the forward pass, and k times the rest.

exact        forward + rest; the rest is the logits again, and the products for grad E and grad C
tile filter  forward + (share of the tiles kept) x rest
sampled      forward + fixed + (entries kept) x entry; fixed is what it does at any eps: decisions, anchor, hot rows,
             lists; entry is one entry of both gradients

With a GPU the constants are measured on it: products and forward pass one by one, and the sampled mode at two eps that
lie around those to be predicted, which gives ``fixed`` and ``entry``. Without one they are counted, for an H200.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import cce_tp
from cce_tp.options import Backward

from .console import power_of_two
from .density import HOT_ROWS
from .measure import GpuMeter, Meter, Work, medians_ms
from .model_files import Model

REPEATS = 10
LOGITS_SHARE = 0.25
"""Of the free memory that the products' logits may take; of more tokens, the first so many are measured."""

PRODUCT_FLOPS = 640e12
REDUCED_LOGIT = 0.45e-12
DECIDED_LOGIT = 0.5e-12
SAMPLED_TOKEN = 100e-9
GATHERED_BYTES = 2.5e12
"""Of an H200, in bf16: operations a second of a product; seconds that the forward pass takes for a logit beside its
product, and for a decision about it; seconds of the anchor and the lists for a token; bytes a second at which scattered
rows of C and of E arrive. The exact mode's come from the README's table and give it back within 10 %; the sampled
mode's come from one shape and are as rough as that."""


@dataclass(frozen=True)
class Costs:
    """Milliseconds for all tokens; ``entry`` for one entry of every token.

    Attributes:
        device: whose.
        forward: the loss alone.
        rest: what the exact backward pass does.
        fixed: what the sampled mode adds to the forward pass whatever it keeps.
        entry: what it adds for every entry that a token keeps.
        measured: the modes themselves, by name; empty where there is no GPU.
    """

    device: str
    forward: float
    rest: float
    fixed: float
    entry: float
    measured: dict[str, float]


def by_counting(tokens: int, rows: int, hidden: int) -> Costs:
    """Of an H200 in bf16, for a machine without a GPU."""
    hot = min(HOT_ROWS, rows)

    def product(some_rows: int) -> float:
        return 2.0 * tokens * some_rows * hidden / PRODUCT_FLOPS

    forward = product(rows) + tokens * rows * REDUCED_LOGIT
    # The anchor looks at as many other rows as there are hot ones; these then have a small exact backward pass.
    dense = product(2 * hot) + product(3 * hot)
    fixed = tokens * rows * DECIDED_LOGIT + dense + tokens * SAMPLED_TOKEN
    entry = tokens * 2 * (2 * hidden) / GATHERED_BYTES
    seconds = {"forward": forward, "rest": forward + 2 * product(rows), "fixed": fixed, "entry": entry}
    return Costs("an H200, by counting", **{name: 1e3 * value for name, value in seconds.items()}, measured={})


class Step:
    """The loss of a model's tokens by the public function, with and without gradients."""

    def __init__(self, model: Model, device: str, tokens: int) -> None:
        self.hidden = model.hidden[:tokens].to(device, torch.bfloat16).requires_grad_()
        self.weight = model.weight.to(device, torch.bfloat16).requires_grad_()
        self.target = model.target[:tokens].to(device)

    def products(self) -> dict[str, Work]:
        """E C^T, G C and G^T E by the library, with the logits for G."""
        e, c = self.hidden.detach(), self.weight.detach()
        logits = e @ c.T
        input_grad, weight_grad = torch.empty_like(e), torch.empty_like(c)
        return {
            "logits": partial(torch.mm, e, c.T, out=logits),
            "grad E": partial(torch.mm, logits, c, out=input_grad),
            "grad C": partial(torch.mm, logits.T, e, out=weight_grad),
        }

    def forward(self) -> Tensor:
        with torch.no_grad():
            return self._loss(cce_tp.Exact())

    def both(self, mode: Backward) -> None:
        """Loss and gradients."""
        self.hidden.grad = self.weight.grad = None
        self._loss(mode).backward()

    def _loss(self, mode: Backward) -> Tensor:
        loss = cce_tp.linear_cross_entropy(self.hidden, self.weight, self.target, backward=mode)
        assert isinstance(loss, Tensor)
        return loss

    def entries(self, mode: cce_tp.Sampled) -> float:
        """How many a token keeps in the mean, beside hot rows and its target."""
        _, stats = cce_tp.linear_cross_entropy(
            self.hidden, self.weight, self.target, backward=mode, return_stats=True
        )  # fmt: skip
        return float(stats.keep_rate) * len(self.weight)


def sampled(eps: float) -> cce_tp.Sampled:
    """The mode whose noise and time are given; its hot rows are those that were left out of the counts."""
    return cce_tp.Sampled(eps=eps, seed=1, reference_rows=HOT_ROWS)


def by_measuring(model: Model, sampler_eps: Sequence[float], device: str = "cuda", meter: Meter | None = None) -> Costs:
    """Of this machine's GPU in bf16, with the model's own tokens; the modes are timed as well, to hold against it."""
    everything = len(model.target)
    tokens = _tokens_to_measure(model) if device == "cuda" else everything
    step = Step(model, device, tokens)
    works = step.products()
    around = {f"around {eps}": sampled(eps) for eps in (min(1.0, 2 * max(sampler_eps)), min(sampler_eps) / 2)}
    modes: dict[str, Backward] = {"exact": cce_tp.Exact()}
    modes |= {f"sampled {power_of_two(eps)}": sampled(eps) for eps in sampler_eps}
    works |= {"forward": step.forward}
    works |= {name: partial(step.both, mode) for name, mode in {**around, **modes}.items()}
    for work in works.values():
        work()  # compiles
    times = medians_ms(works, REPEATS, meter or GpuMeter(works["logits"]))
    times = {name: time * everything / tokens for name, time in times.items()}

    (few, many), (cheap, dear) = (step.entries(mode) for mode in around.values()), (times[name] for name in around)
    entry = max(0.0, dear - cheap) / max(many - few, 1.0)
    return Costs(
        torch.cuda.get_device_name() if device == "cuda" else device,
        forward=times["forward"],
        rest=times["forward"] + times["grad E"] + times["grad C"],
        fixed=cheap - times["forward"] - few * entry,
        entry=entry,
        measured={name: times[name] for name in modes},
    )


def _tokens_to_measure(model: Model) -> int:
    free, _ = torch.cuda.mem_get_info()
    most = int(LOGITS_SHARE * free) // (2 * len(model.weight))
    return max(1, min(len(model.target), most))


def predict(costs: Costs, tile_filters: dict[float, float], entries: dict[float, float]) -> dict[str, float]:
    """Milliseconds of each mode, by its name.

    Args:
        tile_filters: share of the tiles that are kept, by eps.
        entries: what a token keeps in the mean, beside hot rows and its target, by eps.
    """
    times = {"exact": costs.forward + costs.rest}
    for eps, kept in tile_filters.items():
        times[f"tile filter {power_of_two(eps)}"] = costs.forward + kept * costs.rest
    for eps, kept in entries.items():
        times[f"sampled {power_of_two(eps)}"] = costs.forward + costs.fixed + kept * costs.entry
    return times
