"""Time and memory of the local kernels against the bare logits product, on one GPU.

``python -m cce_tp.launch.bench --shape 8192,256000,2304 --shape 8192,128256,4096 --json results.json``

G is the time of ``E C^T`` alone, by the library, into a buffer that exists already, in the same run: the unit in which
times are worth quoting. Memory is the peak above the inputs and their gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from cce_tp.kernels.interface import GradientRequest, LocalImplementation, LocalProblem, LogitGradient, WeightGradBuffer
from cce_tp.kernels.select import CHOICES, choose

from .console import Parser, add_json, positive, positive_number, shape_of, write_json

MIB = 2**20


@dataclass(frozen=True)
class Errors:
    """Relative Frobenius errors against fp32, and those of torch's product and cross-entropy in the inputs' dtype."""

    input: float
    weight: float
    torch_input: float
    torch_weight: float


@dataclass(frozen=True)
class Result:
    """Milliseconds (medians) and bytes for one shape."""

    tokens: int
    rows: int
    hidden: int
    dtype: str
    device: str
    logits_product: float
    forward: float
    forward_backward: float
    forward_peak: int
    peak: int
    loss: float
    errors: Errors | None

    def row(self) -> str:
        unit = self.logits_product
        line = (
            f"({self.tokens}, {self.rows}, {self.hidden}) {self.dtype}: G {unit:.2f} ms, "
            f"forward {self.forward:.2f} ms ({self.forward / unit:.3f} G), "
            f"forward+backward {self.forward_backward:.2f} ms ({self.forward_backward / unit:.3f} G), "
            f"peak {self.forward_peak / MIB:.0f} / {self.peak / MIB:.0f} MiB"
        )
        if self.errors is None:
            return line
        e = self.errors
        return f"{line}, errors {e.input:.2e} {e.weight:.2e} (torch {e.torch_input:.2e} {e.torch_weight:.2e})"


def median_ms(work: Callable[[], object], repeats: int) -> float:
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def logits_product_ms(problem: LocalProblem, repeats: int) -> float:
    logits = problem.input.new_empty(problem.num_tokens, problem.num_rows)
    return median_ms(lambda: torch.mm(problem.input, problem.weight.T, out=logits), repeats)


def make_problem(tokens: int, rows: int, hidden: int, dtype: torch.dtype, spread: float, device: str) -> LocalProblem:
    """Random hidden states and classifier whose logits have standard deviation ``spread``."""
    gen = torch.Generator(device).manual_seed(0)
    e = torch.randn(tokens, hidden, generator=gen, device=device).to(dtype)
    c = (torch.randn(rows, hidden, generator=gen, device=device) * spread / hidden**0.5).to(dtype)
    return LocalProblem(e, c, torch.randint(rows, (tokens,), generator=gen, device=device))


class LocalLoss:
    """The mean loss of a single shard, as the package computes it."""

    def __init__(self, implementation: LocalImplementation, problem: LocalProblem) -> None:
        self.implementation = implementation
        self.problem = problem
        self.input_grad: Tensor | None = None
        self.weight_grad = torch.empty_like(problem.weight)
        self.active = torch.ones_like(problem.target, dtype=torch.bool)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        partials = self.implementation.partials(self.problem, stats=False)
        log_sum = partials.sum_exp.log()
        return (log_sum - (partials.target_logit - partials.max)).mean(), partials.max, log_sum

    def forward_backward(self) -> Tensor:
        self.input_grad = None  # its memory is a gradient's, and is counted as such
        loss, row_max, log_sum = self.forward()
        share = torch.full_like(log_sum, 1 / self.problem.num_tokens)
        grad = LogitGradient(row_max, log_sum, prob=share, target=share, active=self.active)
        request = GradientRequest(self.problem.input.dtype, WeightGradBuffer(self.weight_grad, False), False)
        self.implementation.gradients(self.problem, grad, request, self._keep)
        return loss

    def _keep(self, input_grad: Tensor) -> None:
        self.input_grad = input_grad


def peak_above(work: Callable[[], object], allowed: int) -> int:
    """Peak of ``work`` above what is allocated now plus ``allowed`` bytes of results."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - allowed


def dense_gradients(problem: LocalProblem, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """torch's own, in ``dtype``."""
    e = problem.input.to(dtype).detach().requires_grad_()
    c = problem.weight.to(dtype).detach().requires_grad_()
    torch.nn.functional.cross_entropy(e @ c.T, problem.target).backward()
    assert e.grad is not None
    assert c.grad is not None
    return e.grad, c.grad


def gradient_errors(loss: LocalLoss) -> Errors:
    loss.forward_backward()
    assert loss.input_grad is not None
    right = dense_gradients(loss.problem, torch.float32)
    ours = [_error(a, b) for a, b in zip((loss.input_grad, loss.weight_grad), right, strict=True)]
    dense = dense_gradients(loss.problem, loss.problem.input.dtype)
    theirs = [_error(a, b) for a, b in zip(dense, right, strict=True)]
    return Errors(ours[0], ours[1], theirs[0], theirs[1])


def _error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def measure(
    shape: tuple[int, int, int], dtype: torch.dtype, spread: float, implementation: str, repeats: int, check: bool
) -> Result:
    tokens, rows, hidden = shape
    device = "cuda"
    problem = make_problem(tokens, rows, hidden, dtype, spread, device)
    unit = logits_product_ms(problem, repeats)
    loss = LocalLoss(choose(implementation, torch.device(device, torch.cuda.current_device()), dtype), problem)
    forward = median_ms(loss.forward, repeats)
    both = median_ms(loss.forward_backward, repeats)
    loss.input_grad = None
    forward_peak = peak_above(loss.forward, 0)
    # The weight's gradient exists already; the input's is allocated within.
    peak = peak_above(loss.forward_backward, tokens * hidden * dtype.itemsize)
    value = float(loss.forward()[0])
    errors = gradient_errors(loss) if check else None
    name = torch.cuda.get_device_name()
    dtype_name = str(dtype).removeprefix("torch.")
    return Result(tokens, rows, hidden, dtype_name, name, unit, forward, both, forward_peak, peak, value, errors)


def main(arguments: list[str] | None = None) -> None:
    parser = Parser(prog="cce-tp bench", description=__doc__)
    parser.add_argument("--shape", type=shape_of, action="append", metavar="N,V,D", help="may be repeated")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--spread", type=positive_number, default=2.0, help="standard deviation of the logits")
    parser.add_argument("--implementation", choices=CHOICES, default="triton")
    parser.add_argument("--repeats", type=positive, default=20)
    parser.add_argument("--check", action="store_true", help="also the gradients' errors; writes the logits in fp32")
    add_json(parser)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    results = []
    for shape in options.shape or [(8192, 256000, 2304), (8192, 128256, 4096)]:
        dtype = getattr(torch, options.dtype)
        result = measure(shape, dtype, options.spread, options.implementation, options.repeats, options.check)
        results.append(result)
        print(result.row(), flush=True)
    write_json(options.json, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
