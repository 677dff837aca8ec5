"""Whether cce_tp is right on these processes: versions, devices, links, and a short check against a single shard.

Start it like the run that it is to vouch for: alone, by torchrun, mpirun, srun or the deepspeed launcher. Every rank
computes small losses twice with the same kernels, once on its own with the whole vocabulary and once over the group
with its shard, and compares. The exit status is 0 if all is well, 1 after naming the rank and the quantity that is not.
"""

from __future__ import annotations

import argparse
import platform
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import cce_tp
from cce_tp.collectives import Overlap, overlap
from cce_tp.kernels.select import choose

from .console import (
    DTYPES,
    EXIT_MISMATCH,
    GIB,
    MIB,
    Output,
    UsageError,
    add_json,
    dtype_of,
    positive,
    positive_number,
    write_json,
)
from .runtime import Runtime, choose_device, discover, finalize, initialize

HELP = "versions, devices, links, and a correctness check of the group against a single shard"
SEED = 20240607
PACKAGES = ("torch", "triton", "numpy")
LOSS_LIMIT = 1e-6
GRADIENT_LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
"""Relative, Frobenius: fp32 sums in another order; in 16 bits, parts that are rounded before the ranks add them up."""
MOST_LOGITS = 2**28
"""Of the check, which each rank does alone as well."""
LINK_BYTES = (96 * 1024, 64 * MIB)
CPU_LINK_BYTES = (96 * 1024, 4 * MIB)


@dataclass(frozen=True)
class Sizes:
    """Of the check: deliberately not multiples of a tile."""

    tokens: int
    vocabulary: int
    hidden: int


@dataclass(frozen=True)
class Finding:
    """One quantity on one rank; good if the error is at most the limit."""

    rank: int
    check: str
    quantity: str
    error: float
    limit: float

    @property
    def good(self) -> bool:
        return self.error <= self.limit  # a NaN is not


@dataclass(frozen=True)
class Case:
    """A kind of call to check.

    Attributes:
        name: of the check.
        options: keywords of the loss.
        sequence_parallel: the input is sharded over the group as well.
        uneven: the first rank has a third of a share fewer rows, the last one more.
        overlap: how the sampled mode communicates, if not as usual.
    """

    name: str
    options: dict[str, Any]
    sequence_parallel: bool = False
    uneven: bool = False
    overlap: Overlap | None = None


# Rows beyond the hot ones have to be left for chance, or the sampled check would check the exact mode. Lists are not to
# be thinned: each rank thins its own.
SAMPLED = cce_tp.Sampled(eps=2.0**-6, seed=7, reference_rows=16, entries_per_token=2**16)
# The same for the filter, whose tiles differ where shards do: it is to leave out nothing.
FILTERED = cce_tp.Filtered(eps=1e-30)
# As with a real batch: the ranks share out the hot rows, and the gradient of E is reduced in pieces.
MANY_TOKENS = Overlap(least_bytes=0, hot_tokens=1)
CASES = (
    Case("exact", {}),
    Case("exact, uneven shards", {}, uneven=True),
    Case(
        "exact, all options", {"label_smoothing": 0.1, "logit_scale": 0.5, "softcap": 20.0, "z_loss": 1e-3}, uneven=True
    ),
    Case("sequence parallel", {}, sequence_parallel=True),
    Case("sampled", {"backward": SAMPLED}),
    Case("sampled, sequence parallel", {"backward": SAMPLED}, sequence_parallel=True, uneven=True),
    Case("sampled, hot rows shared", {"backward": SAMPLED}, uneven=True, overlap=MANY_TOKENS),
    Case("sampled, both", {"backward": SAMPLED}, sequence_parallel=True, overlap=MANY_TOKENS),
    Case("filtered", {"backward": FILTERED}, uneven=True),
    Case("filtered, sequence parallel", {"backward": FILTERED}, sequence_parallel=True),
)


@dataclass(frozen=True)
class Place:
    """This rank in the group that is checked."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    device: torch.device


@dataclass(frozen=True)
class Answer:
    """What one call gave."""

    loss: Tensor
    input_grad: Tensor
    weight_grad: Tensor
    kept: Tensor


def make_inputs(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, classifier and labels, some of them ignored; made on the CPU, so the same everywhere."""
    generator = torch.Generator().manual_seed(SEED)
    e = torch.randn(sizes.tokens, sizes.hidden, generator=generator)
    c = torch.randn(sizes.vocabulary, sizes.hidden, generator=generator) * 3.0 * sizes.hidden**-0.5
    target = torch.randint(sizes.vocabulary, (sizes.tokens,), generator=generator)
    target[::7] = -100
    return e.to(device, dtype), c.to(device, dtype), target.to(device)


def shard_sizes(vocabulary: int, ranks: int, uneven: bool) -> list[int]:
    """Rows of each rank."""
    sizes = [vocabulary // ranks + (rank < vocabulary % ranks) for rank in range(ranks)]
    if uneven and ranks > 1:
        moved = sizes[0] // 3
        sizes[0], sizes[-1] = sizes[0] - moved, sizes[-1] + moved
    return sizes


def compute(case: Case, inputs: tuple[Tensor, Tensor, Tensor], place: Place, implementation: str) -> Answer:
    """Loss and gradients over the group of ``place``, or of a single shard if it has none."""
    e, c, target = inputs
    shard = None
    if place.size > 1:
        shard = cce_tp.VocabShard.from_sizes(shard_sizes(c.shape[0], place.size, case.uneven), place.rank)
        c = c[shard.start : shard.stop]
        if case.sequence_parallel:
            e = e.chunk(place.size)[place.rank]
    e, c = e.detach().clone().requires_grad_(), c.detach().clone().requires_grad_()
    loss, stats = cce_tp.linear_cross_entropy(
        e,
        c,
        target,
        group=place.group,
        shard=shard,
        sequence_parallel=case.sequence_parallel and place.size > 1,
        reduction="none",
        implementation=implementation,
        return_stats=True,
        validate=True,
        **case.options,
    )
    active = (target != -100).sum()
    (loss.sum() / active).backward()
    assert e.grad is not None
    assert c.grad is not None
    kept = (stats.keep_rate.double() * target.shape[0] * c.shape[0]).round()
    return Answer(loss.detach(), e.grad, c.grad, kept)


def _relative(value: Tensor, right: Tensor) -> float:
    return float((value.double() - right.double()).norm() / right.double().norm().clamp(min=1e-30))


def _agree_with_rank_0(value: Tensor, place: Place) -> float:
    """How many elements differ in their bits from those of the group's first rank."""
    if place.group is None:
        return 0.0
    bits = value.view(torch.int32)
    theirs = bits.clone()
    dist.broadcast(theirs, group=place.group, group_src=0)
    return float((bits != theirs).sum())


def check(case: Case, inputs: tuple[Tensor, Tensor, Tensor], place: Place, implementation: str) -> list[Finding]:
    """Compare one kind of call with a single shard's."""
    e, c, _ = inputs
    alone = compute(case, inputs, Place(0, 1, None, place.device), implementation)
    with overlap(case.overlap or Overlap()):
        ours = compute(case, inputs, place, implementation)
    limit = GRADIENT_LIMITS[e.dtype]
    input_right, weight_right = alone.input_grad, alone.weight_grad
    if place.size > 1:
        shard = cce_tp.VocabShard.from_sizes(shard_sizes(c.shape[0], place.size, case.uneven), place.rank)
        weight_right = weight_right[shard.start : shard.stop]
        if case.sequence_parallel:
            input_right = input_right.chunk(place.size)[place.rank]
    scale = alone.loss.abs().clamp(min=1.0)
    findings = [
        ("loss, bits that differ from rank 0", _agree_with_rank_0(ours.loss, place), 0.0),
        ("loss", float(((ours.loss - alone.loss).abs() / scale).max()), 10 * LOSS_LIMIT),
        ("gradient of E", _relative(ours.input_grad, input_right), limit),
        ("gradient of C", _relative(ours.weight_grad, weight_right), limit),
    ]
    if "backward" in case.options:
        total = ours.kept.clone()
        if place.group is not None:
            dist.all_reduce(total, group=place.group)
        findings.append(("entries kept", float((total - alone.kept).abs()), 0.0))
    return [Finding(dist.get_rank(), case.name, *finding) for finding in findings]


def run_checks(
    place: Place, sizes: Sizes, dtype: torch.dtype, implementation: str, advance: Callable[[], None] = lambda: None
) -> list[Finding]:
    """All kinds of calls, on this rank."""
    inputs = make_inputs(sizes, dtype, place.device)
    findings = []
    for case in CASES:
        findings += check(case, inputs, place, implementation)
        advance()
    return findings


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def describe(runtime: Runtime) -> dict[str, Any]:
    """This process's part of the first table."""
    device, process = runtime.device, runtime.process
    facts: dict[str, Any] = {
        "rank": process.rank,
        "local_rank": process.local_rank,
        "host": socket.gethostname(),
        "launcher": process.launcher,
        "python": platform.python_version(),
        "cce_tp": cce_tp.__version__,
        **{package: _version(package) for package in PACKAGES},
    }
    if device.type != "cuda":
        return facts | {"device": f"cpu, {torch.get_num_threads()} threads", "peers": []}
    properties = torch.cuda.get_device_properties(device)
    version = torch.cuda.nccl.version() if torch.version.hip is None else ()
    others = [other for other in range(torch.cuda.device_count()) if other != device.index]
    return facts | {
        "device": f"{device}: {properties.name}, {properties.total_memory / GIB:.0f} GiB",
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda or torch.version.hip,
        "nccl": ".".join(str(part) for part in version),
        "peers": [other for other in others if torch.cuda.can_device_access_peer(device.index, other)],
    }


def measure_links(place: Place) -> list[dict[str, float]]:
    """Time of an all-reduce over the group, small and large."""
    if place.group is None:
        return []
    results = []
    for size in LINK_BYTES if place.device.type == "cuda" else CPU_LINK_BYTES:
        buffer = torch.zeros(size // 4, device=place.device)
        times = []
        for _ in range(5):
            _wait(place)
            start = time.perf_counter()
            dist.all_reduce(buffer, group=place.group)
            if place.device.type == "cuda":
                torch.cuda.synchronize(place.device)
            times.append(time.perf_counter() - start)
        results.append({"bytes": size, "microseconds": 1e6 * min(times)})
    return results


def _wait(place: Place) -> None:
    if place.device.type == "cuda":
        torch.cuda.synchronize(place.device)
    dist.barrier(group=place.group)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--dtype", choices=DTYPES, action="append", help="may be repeated (default: float32, on GPUs bfloat16 as well)"
    )
    parser.add_argument("--implementation", choices=("auto", "triton", "torch"), default="auto")
    parser.add_argument("--tp", type=positive, help="ranks of a group (default: all)")
    parser.add_argument("--tokens", type=positive, default=120, help="a multiple of the ranks (default: 120)")
    parser.add_argument("--vocab", type=positive, default=1003, help="(default: 1003)")
    parser.add_argument("--hidden", type=positive, default=72, help="(default: 72)")
    parser.add_argument(
        "--timeout", type=positive_number, default=120.0, metavar="SECONDS", help="for a rank that does not answer"
    )
    add_json(parser)


def _sizes(options: argparse.Namespace, tp: int) -> Sizes:
    if options.tokens % tp:
        raise UsageError(f"--tokens {options.tokens} does not divide by {tp} ranks")
    if options.vocab < 3 * tp:
        raise UsageError(f"--vocab {options.vocab} is less than 3 rows for each of {tp} ranks")
    sizes = Sizes(options.tokens, options.vocab, options.hidden)
    if max(sizes.tokens * sizes.vocabulary, (sizes.tokens + sizes.vocabulary) * sizes.hidden) > MOST_LOGITS:
        raise UsageError("--tokens, --vocab and --hidden make more than a short check: leave them out, or smaller")
    return sizes


def _dtypes(options: argparse.Namespace, device: torch.device) -> list[str]:
    return options.dtype or (["float32", "bfloat16"] if device.type == "cuda" else ["float32"])


def run(options: argparse.Namespace) -> int:
    try:
        process = discover()
        tp = options.tp or process.world_size
        if process.world_size % tp:
            raise UsageError(f"--tp {tp} does not divide {process.world_size} processes")
        sizes = _sizes(options, tp)
        device = choose_device(process, options.device)
        for name in _dtypes(options, device):
            choose(options.implementation, device, dtype_of(name))
        output = Output(process.rank == 0)
        runtime = initialize(options.device, timedelta(seconds=options.timeout))
    except ValueError as error:
        raise UsageError(str(error)) from None
    try:
        return examine(runtime, options, tp, sizes, output)
    finally:
        finalize()


def examine(runtime: Runtime, options: argparse.Namespace, tp: int, sizes: Sizes, output: Output) -> int:
    """Everything between start-up and tear-down; the exit status, the same on every rank."""
    group = runtime.mesh(tp)["tp"].get_group() if tp > 1 else None
    place = Place(runtime.process.rank % tp, tp, group, runtime.device)
    ranks = _gathered(describe(runtime))
    names = _dtypes(options, runtime.device)
    _show_ranks(output, ranks, tp)
    links = measure_links(place)
    findings = []
    with output.bar("check", len(names) * len(CASES)) as bar:
        for name in names:
            found = run_checks(place, sizes, dtype_of(name), options.implementation, bar.advance)
            findings += [Finding(f.rank, f"{f.check}, {name}", f.quantity, f.error, f.limit) for f in found]
    everyone: list[Finding] = [finding for part in _gathered(findings) for finding in part]
    everyone += _versions(ranks)
    bad = [finding for finding in everyone if not finding.good]
    _show_links(output, links)
    _show_findings(output, everyone)
    _conclude(output, bad, runtime, tp)
    if runtime.is_main:
        results = {"ok": not bad, "tp": tp, "ranks": ranks, "links": links}
        write_json(options.json, results | {"findings": [asdict(f) | {"good": f.good} for f in everyone]})
    dist.barrier()  # a launcher ends all processes when the first one fails: rank 0 has to have spoken
    return EXIT_MISMATCH if bad else 0


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _gathered(value: Any) -> list[Any]:
    """Everybody's, in rank order."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _versions(ranks: Sequence[dict[str, Any]]) -> list[Finding]:
    """Ranks whose packages are not those of rank 0."""
    names = ("cce_tp", *PACKAGES, "cuda", "nccl")
    return [
        Finding(facts["rank"], "versions", f"{name} {facts.get(name)} (rank 0: {ranks[0].get(name)})", 1.0, 0.0)
        for facts in ranks
        for name in names
        if facts.get(name) != ranks[0].get(name)
    ]


def _show_ranks(output: Output, ranks: Sequence[dict[str, Any]], tp: int) -> None:
    first = ranks[0]
    named = ("cce_tp", "python", *PACKAGES, "cuda", "nccl")
    output.say(", ".join(f"{name} {first[name]}" for name in named if first.get(name)))
    output.say(f"started by {first['launcher']}; {_ranks(len(ranks))} in groups of {tp}")
    rows = []
    for facts in ranks:
        peers = " ".join(str(peer) for peer in facts["peers"]) or "none"
        rows.append((str(facts["rank"]), facts["host"], facts["device"], facts.get("capability", ""), peers))
    output.table("Ranks", ("rank", "host", "device", "capability", "direct access to GPUs"), rows)


def _show_links(output: Output, links: Sequence[dict[str, float]]) -> None:
    for link in links:
        speed = link["bytes"] / link["microseconds"] / 1e3
        size = f"{link['bytes'] / MIB:.0f} MiB" if link["bytes"] >= MIB else f"{link['bytes'] / 1024:.0f} KiB"
        output.say(f"all-reduce of {size}: {link['microseconds']:.0f} us ({speed:.2f} GB/s)")


def _show_findings(output: Output, findings: Sequence[Finding]) -> None:
    """One line for each quantity, with the rank where it is worst."""
    worst: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        key = (finding.check, finding.quantity)
        if key not in worst or not (finding.error <= worst[key].error):
            worst[key] = finding
    rows = [
        (f.check, f.quantity, f"{f.error:.1e}", f"{f.limit:.1e}", str(f.rank), "ok" if f.good else "WRONG")
        for f in worst.values()
    ]
    output.table("The group against a single shard", ("check", "quantity", "error", "limit", "worst rank", ""), rows)


def _conclude(output: Output, bad: Sequence[Finding], runtime: Runtime, tp: int) -> None:
    if not bad:
        alone = " (a group of one: start it with several processes to check the group)" if tp == 1 else ""
        output.say(f"All is well on {_ranks(runtime.process.world_size)}{alone}.")
    for finding in bad:
        what = f"{finding.check}: {finding.quantity}"
        output.say(f"rank {finding.rank} is wrong in {what}: {finding.error:.3g}, at most {finding.limit:.3g}")
