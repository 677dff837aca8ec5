"""``cce-tp plan``: the paper's arithmetic, and ours held against what the launchers allocate."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

pytest.importorskip("rich")
pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

import cce_tp
from cce_tp.kernels import anchor, exact, forward, hopper, logits, sampled, sampling, select_entries, transpose
from cce_tp.kernels.interface import (
    GradientRequest,
    LocalProblem,
    LogitGradient,
    Partials,
    SamplingPlan,
    SamplingSize,
    WeightGradBuffer,
)
from cce_tp.kernels.logits import LogitOperands
from cce_tp.kernels.triton_impl import TRITON
from cce_tp.kernels.workspace import allocated
from cce_tp.launch import cli, plan


def test_plan_counts_as_the_paper_does(tmp_path: Path) -> None:
    report = tmp_path / "plan.json"
    assert cli.main(["plan", "--gpu", "h100", "--json", str(report)]) == 0
    (result,) = json.loads(report.read_text())
    peaks = {name: figures["peak"] / 2**20 for name, figures in result["methods"].items()}
    assert result["fp32_logits"] / 2**20 == 8000
    assert peaks["ordinary logits"] == 24000
    assert peaks["lower bound: both gradients"] == 1161
    assert round(peaks["CCE (the paper's kernels)"]) == 1164


@pytest.mark.parametrize(
    ("shape", "measured"),
    [((8192, 256000, 2304), 152), ((8192, 128256, 4096), 208), ((8192, 32000, 4096), 200), ((8184, 49152, 576), 62)],
)
def test_plan_of_exact_is_what_was_measured(shape: tuple[int, int, int], measured: int) -> None:
    layer = plan.Shape(*shape, tp=1, dtype=torch.bfloat16, eps=2.0**-8)
    assert (plan.exact(layer) - layer.gradients) / 2**20 == pytest.approx(measured, rel=0.05)


def test_plan_of_two_gpus_is_what_was_measured() -> None:
    """Above the gradients; the sampled mode's hot rows are shared out there."""
    results = Path(__file__).parent.parent / "launch" / "results" / "h200_tp2.json"
    methods = {"exact": plan.exact, "sampled": plan.sampled}
    for case in json.loads(results.read_text())["cases"]:
        layer = plan.Shape(*case["shape"], tp=2, dtype=torch.bfloat16, eps=2.0**-8)
        assert layer.shares_hot_rows
        for row in case["rows"]:
            if row["method"] in methods and not row["sequence_parallel"]:
                planned = methods[row["method"]](layer) - layer.gradients
                assert planned == pytest.approx(row["peak_bytes"], rel=0.03), row["method"]


class Allocations(TorchDispatchMode):
    """Bytes of the live tensors, and their peak, as torch's allocator would count them; ``inputs`` are free."""

    def __init__(self, inputs: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known = {tensor.untyped_storage()._cdata for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                size = allocated(storage.nbytes())
                self.known.add(storage._cdata)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage._cdata, size)
        return result

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def _forward(problem: LocalProblem) -> Any:
    return forward.partials(LogitOperands.prepare(problem), stats=False, workspace=None)


def _logit_grad(partials: Partials, problem: LocalProblem) -> tuple[LogitGradient, GradientRequest]:
    share = torch.full_like(partials.max, 1.0)
    request = GradientRequest(torch.bfloat16, WeightGradBuffer(torch.empty_like(problem.weight), False), False)
    active = torch.ones_like(problem.target, dtype=torch.bool)
    return LogitGradient(partials.max, partials.sum_exp, share, share, active), request


def _exact(problem: LocalProblem) -> Any:
    grad, request = _logit_grad(_forward(problem), problem)
    kept: list[torch.Tensor] = []
    exact.gradients(problem, grad, request, kept.append)
    return kept, request


def _sampled(problem: LocalProblem) -> Any:
    mode, rows = cce_tp.Sampled(), problem.num_rows
    active = torch.ones_like(problem.target, dtype=torch.bool)
    looked_at = anchor.anchor_rows(problem.target, active, sampling.RowIds.whole(rows), mode.reference_rows)
    r = anchor.anchor(anchor.anchor_sums(problem, looked_at), looked_at)
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    drawn = SamplingPlan(mode.eps, mode.most_entries, seed, r, active, looked_at.hot, looked_at.place, 0)
    partials, selection = select_entries.select(problem, drawn, stats=False)
    grad, request = _logit_grad(partials, problem)
    kept: list[torch.Tensor] = []
    sampled.sampled_gradients(problem, drawn, selection, grad, request, kept.append)
    return kept, request


def _launch_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launchers run on tensors without memory, as on a recent GPU."""
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **keywords: None)
    monkeypatch.setattr(logits, "can_use_tma", lambda tensor: True)
    monkeypatch.setattr(hopper, "supported", lambda device: True)
    monkeypatch.setattr(hopper, "_descriptor", lambda *args: None)
    monkeypatch.setattr(hopper, "_programs", lambda operands: (1,))
    for module in (logits, exact):
        monkeypatch.setattr(module.TensorDescriptor, "from_tensor", lambda *args: None)


def _without_memory(shape: tuple[int, int, int], **options: Any) -> LocalProblem:
    tokens, rows, hidden = shape
    with torch.device("meta"):
        e, c = (torch.empty(size, hidden, dtype=torch.bfloat16) for size in (tokens, rows))
        return LocalProblem(e, c, torch.empty(tokens, dtype=torch.int64), **options)


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [((8192, 32000, 4096), 1), ((300, 50000, 512), 1), ((300, 50000, 8), 8), ((20000, 900, 64), 1)],
    ids=str,
)
@pytest.mark.parametrize("times", [1.0, 2.5])
@pytest.mark.parametrize(("accumulate", "stats"), [(False, False), (True, True)])
def test_sampled_keeps_to_its_workspace(
    shape: tuple[int, int, int],
    ranks: int,
    times: float,
    accumulate: bool,
    stats: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both passes, with bias, smoothing, and an fp32 gradient of E, for which E is copied."""
    tokens, rows, hidden = shape
    ids = sampling.RowIds(ranks * rows, 0, rows, rows)
    mode = cce_tp.Sampled(eps=2.0**-6)
    size = SamplingSize(mode.reference_rows, mode.most_entries, ids.vocab_size)
    least = TRITON.least_sampled_workspace(tokens, hidden, rows, torch.bfloat16, size)
    assert least is not None
    _launch_nothing(monkeypatch)
    bias, c = (torch.empty(rows, device="meta") for _ in range(2))
    problem = _without_memory(shape, workspace=int(least * times), bias=bias, smoothing_weight=c)
    assert problem.workspace is not None
    active = torch.empty(tokens, dtype=torch.bool, device="meta")
    factor, seed = torch.empty(tokens, device="meta"), torch.empty(1, dtype=torch.int64, device="meta")
    buffer = torch.empty_like(problem.weight)
    inputs = (problem.input, problem.weight, problem.target, bias, c, active, factor, seed, buffer)
    with Allocations(inputs) as allocations:
        looked_at = anchor.anchor_rows(problem.target, active, ids, mode.reference_rows)
        r = anchor.anchor(anchor.anchor_sums(problem, looked_at), looked_at)
        drawn = SamplingPlan(mode.eps, mode.most_entries, seed, r, active, looked_at.hot, looked_at.place, 0)
        partials, selection = select_entries.select(problem, drawn, stats=stats)
        assert allocations.peak <= problem.workspace
        if times == 1.0:
            assert allocations.peak >= 0.3 * least  # the least is no exaggeration
        allocations.peak = before = allocations.live
        grad = LogitGradient(partials.max, partials.sum_exp, factor, factor, active, factor)
        request = GradientRequest(torch.float32, WeightGradBuffer(buffer, accumulate), True)
        handed: list[torch.Tensor] = []
        sampled.sampled_gradients(problem, drawn, selection, grad, request, handed.append)
        results = tokens * hidden * 4 + rows * 4
        assert allocations.peak - before - results <= problem.workspace
    with pytest.raises(ValueError, match="workspace=1000 is too small"):
        anchor.anchor_sums(replace(problem, workspace=1000), looked_at)
    with pytest.raises(ValueError, match="workspace=1000 is too small"):
        sampled.sampled_gradients(replace(problem, workspace=1000), drawn, selection, grad, request, handed.append)


@pytest.mark.parametrize(
    "shape",
    [
        (8192, 256000, 2304),
        (8192, 32000, 4096),
        (8184, 49152, 576),
        (16000, 32000, 512),
        (4096, 4000, 256),
        (1024, 2000, 8192),
    ],
)
@pytest.mark.parametrize(
    ("planned", "run"), [(plan.loss_alone, _forward), (plan.exact, _exact), (plan.sampled, _sampled)]
)
def test_plan_is_what_the_launchers_allocate(
    planned: Callable[[plan.Shape], int],
    run: Callable[[LocalProblem], Any],
    shape: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokens = shape[0]
    _launch_nothing(monkeypatch)
    problem = _without_memory(shape)
    with Allocations((problem.input, problem.weight, problem.target)) as allocations:
        results = run(problem)
    of_the_loss = plan.LOSS_VALUES * plan.FP32 * tokens  # made of the partials, which is not run here
    layer = plan.Shape(*shape, tp=1, dtype=torch.bfloat16, eps=2.0**-8)
    assert planned(layer) == pytest.approx(allocations.peak, rel=0.02, abs=of_the_loss)
    del results
    assert allocations.live == 0


@pytest.mark.parametrize("tokens", [1023, 8192, 16384, 65536])
def test_more_tokens_never_take_less(tokens: int) -> None:
    """Where long columns become twice as long, too: what suffices for a batch suffices for a shorter one."""
    slots = 385
    for n in range(tokens - 3, tokens + 4):
        assert transpose.way_bytes(n, n * slots) <= transpose.way_bytes(n + 1, (n + 1) * slots)
    size = SamplingSize(1024, 384, 256000)
    least = [TRITON.least_sampled_workspace(n, 2304, 256000, torch.bfloat16, size) for n in (tokens, tokens + 1)]
    assert least[0] <= least[1]


def test_the_largest_micro_batch_just_fits() -> None:
    layer = plan.Shape(1, 32000, 512, tp=2, dtype=torch.bfloat16, eps=2.0**-8)
    for peak in plan.METHODS.values():
        most = plan.largest_micro_batch(peak, layer, 2**30, 64)
        for tokens, fits in ((most, True), (most + 64, False)):
            attempt = plan.replace(layer, tokens=tokens)
            assert (attempt.inputs + peak(attempt) <= 2**30) == fits
    assert plan.largest_micro_batch(plan.exact, layer, 2**20, 64) == 0
