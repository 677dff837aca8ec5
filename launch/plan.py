"""How much memory the loss layer takes, by method, and the largest micro-batch that fits a GPU.

Counted per rank and beside its inputs, for N tokens, V / tp classifier rows and hidden size D. The gradients of E and C
have to be written by every method: they are the lower bound.

ordinary logits    fp32 logits, their log-softmax and their gradient: three matrices N x V / tp, before the gradients
Megatron           the logits in the inputs' dtype, and 1 fp32 matrix (unfused) or 2 (fused) for their softmax
CCE                the paper's kernels: the gradients, the rows' average logits and order, two numbers a token
cce_tp             the gradients, and what its launchers allocate, by the very functions by which they do so
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from cce_tp.collectives import TensorParallelGroup, shares_hot_rows

from .console import (
    DTYPES,
    GIB,
    Output,
    UsageError,
    add_json,
    dtype_of,
    mib,
    positive,
    positive_number,
    probability,
    shape_of,
    write_json,
)

if TYPE_CHECKING:
    from cce_tp.kernels.interface import LocalProblem
    from cce_tp.kernels.logits import LogitOperands

HELP = "memory of the loss layer, and the largest micro-batch that fits a GPU"
FP32, FP64, INT64 = 4, 8, 8
PARTIALS = 2
"""Numbers of a tile about a token: maximum and sum."""
LOSS_VALUES = 8
"""fp32 numbers about a token that are alive at once while the loss is made of the partials."""
ANCHOR_SUMS = 5
"""fp64 numbers about a token in the sampled mode's anchor."""
MOST_TOKENS = 2**26
"""Where the search for the largest micro-batch ends."""
GPUS = {"b200": 178.0, "h200": 139.8, "h100": 79.1, "a100": 79.2, "l40s": 44.4, "rtx4090": 23.5}
"""GiB that PyTorch finds."""
PAPER = (8192, 256000, 2304)


@dataclass(frozen=True)
class Shape:
    """The layer on one rank."""

    tokens: int
    vocabulary: int
    hidden: int
    tp: int
    dtype: torch.dtype
    eps: float

    @property
    def rows(self) -> int:
        """Classifier rows of the largest shard."""
        return -(-self.vocabulary // self.tp)

    @property
    def logits(self) -> int:
        """Elements of this rank's logit matrix."""
        return self.tokens * self.rows

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of E and C."""
        return (self.tokens + self.rows) * self.hidden * self.dtype.itemsize

    @property
    def shares_hot_rows(self) -> bool:
        """Whether the ranks share out the sampled mode's hot rows by tokens."""
        group = TensorParallelGroup(None, 0, self.tp)
        return self.dtype != torch.float16 and shares_hot_rows(self.tokens, group)

    @property
    def hot_tokens(self) -> int:
        """Tokens that a rank multiplies the hot rows with."""
        return -(-self.tokens // self.tp) if self.shares_hot_rows else self.tokens

    @property
    def inputs(self) -> int:
        """Bytes of E and C, and of the labels."""
        return self.gradients + INT64 * self.tokens


def ordinary(shape: Shape) -> int:
    """Where the paper finds it: in log-softmax's backward pass. Later only the logits' gradient is left."""
    matrix = FP32 * shape.logits
    return max(3 * matrix, matrix + shape.gradients)


def _megatron(shape: Shape, softmax_matrices: int) -> int:
    in_inputs_dtype = shape.dtype.itemsize * shape.logits
    copy = 0 if shape.dtype == torch.float32 else in_inputs_dtype
    return max(copy + softmax_matrices * FP32 * shape.logits, in_inputs_dtype + shape.gradients)


def megatron_unfused(shape: Shape) -> int:
    return _megatron(shape, 1)


def megatron_fused(shape: Shape) -> int:
    return _megatron(shape, 2)


def cce(shape: Shape) -> int:
    return shape.gradients + (FP32 + INT64) * shape.rows + 2 * FP32 * shape.tokens


def _as_launched(shape: Shape) -> tuple[LocalProblem, LogitOperands]:
    """The shape as the launchers on a recent GPU see it, without memory behind it."""
    try:
        from cce_tp.kernels.logits import LogitOperands
        from cce_tp.kernels.tiles import logit_tile
    except ImportError:
        raise UsageError("the package triton, whose launchers' memory is planned, is not installed") from None
    from cce_tp.kernels.interface import LocalProblem

    with torch.device("meta"):
        e = torch.empty(shape.tokens, shape.hidden, dtype=shape.dtype)
        c = torch.empty(shape.rows, shape.hidden, dtype=shape.dtype)
        problem = LocalProblem(e, c, torch.empty(shape.tokens, dtype=torch.int64))
    tile = logit_tile(shape.dtype, shape.tokens, shape.hidden, tma=True)
    return problem, replace(LogitOperands.prepare(problem), tile=tile, tma=True)


def loss_alone(shape: Shape) -> int:
    """The forward pass, as in an evaluation: no gradients."""
    _, operands = _as_launched(shape)
    return _partials(shape, operands) + LOSS_VALUES * FP32 * shape.tokens


def _partials(shape: Shape, operands: LogitOperands) -> int:
    """What the tiles say about the tokens of a chunk."""
    from cce_tp.kernels import forward, hopper

    cols = hopper.COLS if hopper.fits(operands, stats=False) else operands.tile.cols
    tiles = -(-shape.rows // cols)
    return PARTIALS * FP32 * tiles * forward._tokens_at_once(operands, tiles, PARTIALS, None)


def exact(shape: Shape) -> int:
    """The gradients, and the workspace of the pass that takes more, as ``kernels.forward`` and ``.exact`` plan it."""
    problem, operands = _as_launched(shape)
    from cce_tp.kernels import exact as backward
    from cce_tp.kernels.interface import GradientRequest, WeightGradBuffer

    request = GradientRequest(shape.dtype, WeightGradBuffer(problem.weight, False), False)
    plan = backward._Plan.make(problem, operands, request)
    fixed = backward._fixed_bytes(
        shape.tokens, shape.hidden, shape.dtype, accumulator=plan.accumulator, scratch=plan.scratch
    )
    slab = plan.slab * backward._bytes_per_row(shape.tokens, shape.dtype, None)
    return max(_partials(shape, operands), shape.gradients + fixed + slab)


def sampled(shape: Shape) -> int:
    """The largest of the steps, as the launchers allocate them: anchor, forward pass with lists, gradients."""
    problem, operands = _as_launched(shape)
    from cce_tp.kernels import sampled as backward
    from cce_tp.kernels import select_entries, transpose
    from cce_tp.options import Sampled

    mode, size, tile = Sampled(eps=shape.eps), shape.dtype.itemsize, operands.tile
    budget = min(mode.most_entries, shape.rows)
    lists = FP32 * shape.tokens * budget
    tiles = -(-shape.rows // tile.cols)
    words = tiles * tile.cols // select_entries.WORD_BITS.value
    per_token = select_entries._bytes_per_token(tiles, PARTIALS, words)
    select = per_token * select_entries._tokens_at_once(problem, tile, per_token, lists, tiles)

    hot = min(mode.reference_rows, shape.vocabulary if shape.shares_hot_rows else shape.rows)
    kept_of_hot = hot * shape.hidden * FP32 + shape.rows * FP32
    gathered = hot * shape.hidden * size
    logit_grads = min(backward.HOT_BYTES, shape.hot_tokens * hot * size)
    slots = shape.tokens * (budget + 1)
    number = transpose.slot_dtype(slots).itemsize
    lent = slots * number <= shape.rows * shape.hidden * size  # one of the lists lies in the gradient of C
    ordered = slots * number + shape.rows * number
    ordered += transpose.way_bytes(shape.tokens, slots) - (slots * number if lent else 0)
    transposed = slots * FP32 + ordered
    if shape.shares_hot_rows:
        # Their part of grad C travels in front of grad E; the transposition begins beside their products.
        held, sent = _shared(shape, hot), hot * shape.hidden * size
        backward_pass = shape.gradients + lists + held + sent + max(ordered + logit_grads, transposed)
        return max(_anchor(shape, hot), held + lists + select, backward_pass)
    hot_part = gathered + kept_of_hot + logit_grads
    backward_pass = shape.gradients + lists + max(hot_part, kept_of_hot + transposed)
    return max(_anchor(shape, hot), lists + select, backward_pass)


def _looked_at(shape: Shape, hot: int) -> int:
    from cce_tp.kernels import sampling

    return hot + min(sampling.COLD_ROWS, shape.vocabulary if shape.shares_hot_rows else shape.rows)


def _shared(shape: Shape, hot: int) -> int:
    """What is left of the anchor for the backward pass where ranks share the hot rows: these, and exponentials."""
    from cce_tp.kernels import anchor

    size, tops = shape.dtype.itemsize, -(-hot // anchor.SUM_COLS)
    return _looked_at(shape, hot) * shape.hidden * size + shape.hot_tokens * (hot * size + tops * FP32)


def _anchor(shape: Shape, hot: int) -> int:
    """Before anything else: the hot and the cold rows, the tokens' products with them, and sums of these."""
    from cce_tp.kernels import anchor
    from cce_tp.kernels.tiles import look_tile

    tile = look_tile(shape.dtype, shape.tokens, shape.hidden, tma=True)
    looked_at = _looked_at(shape, hot)
    tokens = anchor.tokens_at_once(shape.hot_tokens, looked_at, tile)
    products = FP32 * (-(-tokens // tile.rows) * tile.rows) * (-(-looked_at // tile.cols) * tile.cols)
    kept = _shared(shape, hot) if shape.shares_hot_rows else looked_at * shape.hidden * shape.dtype.itemsize
    return kept + products + ANCHOR_SUMS * FP64 * shape.tokens + FP32 * shape.vocabulary


METHODS: dict[str, Callable[[Shape], int]] = {
    "ordinary logits": ordinary,
    "Megatron, unfused": megatron_unfused,
    "Megatron, fused": megatron_fused,
    "CCE (the paper's kernels)": cce,
    "cce_tp, exact": exact,
    "cce_tp, sampled": sampled,
    "cce_tp, loss alone": loss_alone,
    "lower bound: both gradients": lambda shape: shape.gradients,
}


def largest_micro_batch(peak: Callable[[Shape], int], shape: Shape, room: int, step: int) -> int:
    """The most tokens, in multiples of ``step``, with which the layer and its inputs fit into ``room`` bytes."""

    def fits(steps: int) -> bool:
        attempt = replace(shape, tokens=steps * step)
        return attempt.inputs + peak(attempt) <= room

    if not fits(1):
        return 0
    low, high = 1, max(2, MOST_TOKENS // step)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shape",
        type=shape_of,
        action="append",
        metavar="N,V,D",
        help="tokens of a micro-batch, vocabulary, hidden size; repeatable (default: 8192,256000,2304)",
    )
    parser.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of E, C and their gradients")
    parser.add_argument("--eps", type=probability, default=2.0**-8, help="of the sampled mode (default: 2^-8)")
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--gpu", choices=tuple(GPUS), help="(default: the one of this machine, or h100)")
    place.add_argument("--memory", type=positive_number, metavar="GIB", help="of another GPU")
    parser.add_argument(
        "--reserve", type=positive_number, metavar="GIB", help="what the rest takes: model, optimizer, activations"
    )
    parser.add_argument(
        "--seq-len", type=positive, default=1, help="the micro-batch is whole sequences of so many tokens"
    )
    add_json(parser)


def _room(options: argparse.Namespace) -> tuple[str, int]:
    """What the GPU is called, and the bytes that the layer may take."""
    if options.memory is not None:
        name, size = f"a GPU of {options.memory:g} GiB", options.memory * GIB
    elif options.gpu is None and torch.cuda.is_available():
        name, size = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory
    else:
        gpu = options.gpu or "h100"
        name, size = f"{gpu} ({GPUS[gpu]:g} GiB)", GPUS[gpu] * GIB
    size -= (options.reserve or 0.0) * GIB
    if size <= 0:
        raise UsageError(f"--reserve {options.reserve:g} leaves nothing of {name}")
    return name, int(size)


def plan(shape: Shape, room: int, step: int) -> dict[str, Any]:
    """The figures of one shape, in bytes and tokens."""
    return {
        "tokens": shape.tokens,
        "vocabulary": shape.vocabulary,
        "hidden": shape.hidden,
        "tp": shape.tp,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "eps": shape.eps,
        "fp32_logits": FP32 * shape.logits,
        "inputs": shape.inputs,
        "lower_bound": shape.gradients,
        "room": room,
        "methods": {
            name: {"peak": peak(shape), "largest_micro_batch": largest_micro_batch(peak, shape, room, step)}
            for name, peak in METHODS.items()
        },
    }


def _show(output: Output, result: dict[str, Any], gpu: str, seq_len: int) -> None:
    bound = result["lower_bound"]
    rows = []
    for name, figures in result["methods"].items():
        tokens = figures["largest_micro_batch"]
        most = f"{tokens:,}" if seq_len == 1 else f"{tokens // seq_len:,} x {seq_len:,}"
        more = "" if name.startswith("ordinary") or figures["peak"] < bound else mib(figures["peak"] - bound)
        rows.append((name, mib(figures["peak"]), more, most if tokens else "none"))
    split = f", tp = {result['tp']}" if result["tp"] > 1 else ""
    title = (
        f"N = {result['tokens']:,}, V = {result['vocabulary']:,}, D = {result['hidden']:,}, {result['dtype']}{split}"
    )
    unit = "tokens" if seq_len == 1 else "sequences"
    output.table(title, ("method", "peak, MiB", "above the bound, MiB", f"most {unit}"), rows)
    logits, inputs = mib(result["fp32_logits"]), mib(result["inputs"])
    output.say(f"fp32 logits alone: {logits} MiB; E and C, not counted in the peaks: {inputs} MiB.")
    output.say(f"The last column: with E and C, in {mib(result['room'])} MiB of {gpu}; the loss layer alone.\n")


def run(options: argparse.Namespace) -> int:
    output = Output()
    gpu, room = _room(options)
    results = []
    for tokens, vocabulary, hidden in options.shape or [PAPER]:
        if options.tp > vocabulary:
            raise UsageError(f"--tp {options.tp} is more than the {vocabulary} rows of the vocabulary")
        shape = Shape(tokens, vocabulary, hidden, options.tp, dtype_of(options.dtype), options.eps)
        results.append(plan(shape, room, options.seq_len))
        _show(output, results[-1], gpu, options.seq_len)
    write_json(options.json, results)
    return 0
