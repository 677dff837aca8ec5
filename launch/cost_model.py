"""What the loss and its gradients take in each backward mode: the forward pass, and k times the rest.

exact        forward + rest; the rest is the logits again, G written, and the products for grad E and grad C, in slabs
tile filter  forward + filter_fixed + (share of the tiles kept) x filter_tiles
sampled      forward + sampled_fixed + (entries a token keeps) x sampled_entry

With a GPU the constants are measured on it: products and forward pass one by one, and both sparse modes at two eps each
that lie around those to be predicted, between which a straight line is drawn. Without one they are counted, for an
H200; there the filter is taken for exact's rest, less the tiles that it leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import cce_tp
from cce_tp.kernels.sampling import COLD_ROWS
from cce_tp.kernels.workspace import FP32_BYTES, default_slab_bytes
from cce_tp.options import Backward

from .console import power_of_two
from .density import HOT_ROWS
from .measure import GpuMeter, Meter, Work, medians_ms
from .model_files import Model

REPEATS = 10
ALL_TILES_EPS = 2.0**-100
TILE_ROWS = 256
"""A slab has whole tiles: products with a number of rows that isn't round are many times slower."""
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
    """Milliseconds for all tokens.

    Attributes:
        device: whose.
        forward: the loss alone.
        rest: what the exact backward pass does.
        filter_fixed: what the filtered mode adds to the forward pass whatever it keeps.
        filter_tiles: what it adds if it keeps all tiles.
        sampled_fixed: what the sampled mode adds to the forward pass whatever it keeps: decisions, anchor, hot rows.
        sampled_entry: what it adds for every entry that a token keeps.
        measured: the modes themselves, by name; empty where there is no GPU.
    """

    device: str
    forward: float
    rest: float
    filter_fixed: float
    filter_tiles: float
    sampled_fixed: float
    sampled_entry: float
    measured: dict[str, float]


def by_counting(tokens: int, rows: int, hidden: int) -> Costs:
    """Of an H200 in bf16, for a machine without a GPU."""
    hot = min(HOT_ROWS, rows)

    def seconds(some_rows: int) -> float:
        return 2.0 * tokens * some_rows * hidden / PRODUCT_FLOPS

    forward = seconds(rows) + tokens * rows * REDUCED_LOGIT
    # The anchor looks at some others beside the hot ones; these then have a small exact backward pass.
    dense = seconds(hot + COLD_ROWS) + seconds(3 * hot)
    fixed = tokens * rows * DECIDED_LOGIT + dense + tokens * SAMPLED_TOKEN
    entry = tokens * 2 * (2 * hidden) / GATHERED_BYTES
    rest = forward + 2 * seconds(rows)
    return Costs(
        "an H200, by counting",
        forward=1e3 * forward,
        rest=1e3 * rest,
        filter_fixed=0.0,
        filter_tiles=1e3 * rest,
        sampled_fixed=1e3 * fixed,
        sampled_entry=1e3 * entry,
        measured={},
    )


class Step:
    """The loss of a model's tokens by the public function, with and without gradients."""

    def __init__(self, model: Model, device: str, tokens: int) -> None:
        self.hidden = model.hidden[:tokens].to(device, torch.bfloat16).requires_grad_()
        self.weight = model.weight.to(device, torch.bfloat16).requires_grad_()
        self.target = model.target[:tokens].to(device)

    def products(self) -> dict[str, Work]:
        """E C^T by the library; and slab by slab, as the exact mode works, the writing of G, G C and G^T E.

        A slab's logits stand for its G. Slabs are smaller than the whole, and so are the products' speeds.
        """
        e, c = self.hidden.detach(), self.weight.detach()
        logits = e @ c.T
        rows = default_slab_bytes(e.numel() * FP32_BYTES) // (len(e) * e.element_size())
        rows = max(1, rows // TILE_ROWS) * TILE_ROWS
        slabs = [c[start : start + rows] for start in range(0, len(c), rows)]
        grads = logits[:, :rows].contiguous()
        input_grad, weight_grad = torch.zeros_like(e), torch.empty_like(slabs[0])

        def write() -> None:
            for slab in slabs:
                grads[:, : len(slab)].zero_()

        def input_product() -> None:
            for slab in slabs:
                input_grad.addmm_(grads[:, : len(slab)], slab)

        def weight_product() -> None:
            for slab in slabs:
                torch.mm(grads[:, : len(slab)].T, e, out=weight_grad[: len(slab)])

        return {
            "logits": partial(torch.mm, e, c.T, out=logits),
            "grad E": input_product,
            "grad C": weight_product,
            "G": write,
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

    def keep_rate(self, mode: Backward) -> float:
        """Share of the softmax's entries, or of its tiles, that the backward pass works on."""
        _, stats = cce_tp.linear_cross_entropy(
            self.hidden, self.weight, self.target, backward=mode, return_stats=True
        )  # fmt: skip
        return float(stats.keep_rate)


def sampled(eps: float) -> cce_tp.Sampled:
    """The mode whose noise and time are given; its hot rows are those that were left out of the counts."""
    return cce_tp.Sampled(eps=eps, seed=1, reference_rows=HOT_ROWS)


def filtered(eps: float) -> cce_tp.Filtered:
    """The mode whose error and time are given."""
    return cce_tp.Filtered(eps=eps, order="mean_logit")


def by_measuring(
    model: Model,
    filter_eps: float,
    sampler_eps: Sequence[float],
    device: str = "cuda",
    meter: Meter | None = None,
) -> Costs:
    """Of this machine's GPU in bf16, with the model's own tokens; the modes are timed as well, to hold against it."""
    everything = len(model.target)
    tokens = _tokens_to_measure(model) if device == "cuda" else everything
    step = Step(model, device, tokens)
    around: dict[str, Backward] = {
        "fewest tiles": filtered(1.0),
        "all tiles": filtered(ALL_TILES_EPS),
        "fewest entries": sampled(min(1.0, 2 * max(sampler_eps))),
        "most entries": sampled(min(sampler_eps) / 2),
    }
    modes: dict[str, Backward] = {
        "exact": cce_tp.Exact(),
        f"tile filter {power_of_two(filter_eps)}": filtered(filter_eps),
    }
    modes |= {f"sampled {power_of_two(eps)}": sampled(eps) for eps in sampler_eps}
    works = step.products() | {"forward": step.forward}
    works |= {name: partial(step.both, mode) for name, mode in {**around, **modes}.items()}
    for work in works.values():
        work()  # compiles
    times = medians_ms(works, REPEATS, meter or GpuMeter(works["logits"]))
    times = {name: time * everything / tokens for name, time in times.items()}
    points = [(step.keep_rate(mode), times[name] - times["forward"]) for name, mode in around.items()]
    filter_fixed, filter_tiles = _line(*points[:2])
    sampled_fixed, every_entry = _line(*points[2:])
    return Costs(
        torch.cuda.get_device_name() if device == "cuda" else device,
        times["forward"],
        times["forward"] + times["G"] + times["grad E"] + times["grad C"],
        filter_fixed,
        filter_tiles,
        sampled_fixed,
        every_entry / len(model.weight),
        measured={name: times[name] for name in modes},
    )


def _line(low: tuple[float, float], high: tuple[float, float]) -> tuple[float, float]:
    """Height at 0, and slope, of the line through two points; level where they are one above the other."""
    slope = (high[1] - low[1]) / (high[0] - low[0]) if high[0] > low[0] else 0.0
    return low[1] - slope * low[0], slope


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
        times[f"tile filter {power_of_two(eps)}"] = costs.forward + costs.filter_fixed + kept * costs.filter_tiles
    for eps, kept in entries.items():
        times[f"sampled {power_of_two(eps)}"] = costs.forward + costs.sampled_fixed + kept * costs.sampled_entry
    return times
