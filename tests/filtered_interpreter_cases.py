"""The filtered mode's Triton kernels under Triton's interpreter, against the plain-PyTorch twin on the same tiles.

Run by ``test_interpreter.py``.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from filtered_local import FilterCase, compare, run
from local_problem import LocalSpec, expected_gradients, relative_error
from selection import some_of

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from cce_tp.kernels import filtered, filtered_reference, tiles
from cce_tp.kernels.interface import GradientRequest, WeightGradBuffer

NAN = float("nan")
TOLERANCE = 1e-5
SMALL = {"tokens": 20, "hidden": 16, "rows": 56, "spread": 4.0, "off_shard": 0.7}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale, softcap": {"scale": 0.7, "softcap": 6.0, "bias": True},
    "smoothing": {"smoothing": True, "scale": 0.8},
    "strided": {"strided": True, "hidden": 21},
    "all inactive": {"inactive": 1.1},
}


def small(**options: Any) -> LocalSpec:
    return LocalSpec(**{**SMALL, **options})


@pytest.mark.parametrize("name", some_of(OPTIONS, ["scale, softcap", "smoothing", "all inactive"]))
def test_options(name: str) -> None:
    options = OPTIONS[name]
    case = FilterCase.make(small(**options))
    kept = compare(case, TOLERANCE)
    assert kept < 0.95 or options.get("inactive", 0) > 1


@pytest.mark.parametrize("order", some_of(["mean_logit", "count", "tensor"], ["count"]))
def test_orders(order: str) -> None:
    """With smoothing and bias, whose vectors are sorted as well."""
    case = FilterCase.make(small(smoothing=True, bias=True), order=order, eps=0.4)
    assert compare(case, TOLERANCE, workspace=1) < 0.95


@pytest.mark.parametrize("flags", [{"weight": False}, {"input": False, "order": "count"}], ids=str)
def test_one_gradient_filtered(flags: dict[str, Any]) -> None:
    """The other one is exact."""
    case = FilterCase.make(small(bias=True), **flags)
    compare(case, TOLERANCE)
    ours, exact = run(filtered, case), expected_gradients(case.problem, case.logit_grad)
    names = ("weight", "bias") if flags.get("input", True) else ("input",)
    for name in names:
        assert relative_error(getattr(ours, name), getattr(exact, name)) < TOLERANCE


@pytest.mark.parametrize("tile", [(32, 16), (32, 32)], ids=str)
def test_tiles_and_rounds(tile: tuple[int, int]) -> None:
    """Several of the forward's tiles make one of the filter's; a workspace for one column at a time."""
    case = FilterCase.make(small(), rows=tile[0], cols=tile[1])
    compare(case, TOLERANCE, workspace=1)


@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 17, 65), (5, 40, 2)], ids=str)
def test_shapes(shape: tuple[int, int, int]) -> None:
    tokens, hidden, rows = shape
    case = FilterCase.make(small(tokens=tokens, hidden=hidden, rows=rows, bias=True), order="count")
    compare(case, TOLERANCE)


@pytest.mark.parametrize(("tokens", "rows"), [(0, 40), (9, 0)])
def test_nothing(tokens: int, rows: int) -> None:
    for order in ("natural", "count"):
        compare(FilterCase.make(small(tokens=tokens, rows=rows, smoothing=True), order=order), TOLERANCE)


def test_all_live() -> None:
    """A tiny eps is exact."""
    case = FilterCase.make(small(inactive=0.0), eps=1e-30)
    assert compare(case, TOLERANCE) == 1
    twin, exact = run(filtered_reference, case), expected_gradients(case.problem, case.logit_grad)
    for name in ("input", "weight", "bias"):
        assert relative_error(getattr(twin, name), getattr(exact, name)) < TOLERANCE


def test_none_live() -> None:
    """What bounds can't tell from live is recomputed, and left out all the same."""
    case = FilterCase.make(small(inactive=0.0, off_shard=1.1), eps=1.0)
    assert 0 < float(case.tiles(filtered_reference).live.float().mean()) < 1
    ours = run(filtered, case)
    for name in ("input", "weight", "bias"):
        assert not getattr(ours, name).any()


def test_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "has_tma", lambda device: True)
    compare(FilterCase.make(small(hidden=20, bias=True)), TOLERANCE)
    compare(FilterCase.make(small(hidden=20, tokens=9), order="count"), TOLERANCE, workspace=1)


def test_a_far_anchor_costs_time_only() -> None:
    case = FilterCase.make(small())
    far = replace(case, plan=replace(case.plan, anchor=case.plan.anchor - torch.arange(20) % 3 * 40.0))
    assert int(far.tiles(filtered_reference).kept) >= int(case.tiles(filtered_reference).kept)
    near, ours = run(filtered_reference, case), run(filtered, far)
    for name in ("input", "weight", "bias"):
        assert relative_error(getattr(ours, name), getattr(near, name)) < TOLERANCE


def test_inactive_rows_may_hold_anything_and_nan_stays_in_its_row() -> None:
    case = FilterCase.make(small(inactive=0.4, smoothing=True), order="mean_logit")
    clean = run(filtered, case)
    e = case.problem.input.clone()
    e[~case.logit_grad.active] = NAN
    got = run(filtered, replace(case, problem=replace(case.problem, input=e)))
    for name in ("input", "weight", "bias"):
        assert torch.equal(getattr(got, name), getattr(clean, name)), name
    bad = int(case.logit_grad.active.nonzero()[3])
    prob = case.logit_grad.prob.clone()
    prob[bad] = NAN
    got = run(filtered, replace(case, logit_grad=replace(case.logit_grad, prob=prob)))
    assert got.input.isnan().any(1).nonzero()[:, 0].tolist() == [bad]


@pytest.mark.parametrize("smoothing", some_of([False, True], [True]))
def test_accumulate(smoothing: bool) -> None:
    """In place, in bf16 grad E and a buffer whose row stride is not its width; rows of no live tile are not touched."""
    case = FilterCase.make(small(smoothing=smoothing, off_shard=1.1), eps=0.9)
    base = torch.randn(56, 19)
    before = base.clone()
    case_grads = run(filtered_reference, case)
    untouched = ~case_grads.weight.any(1)
    assert smoothing or untouched.any()
    handed: list[torch.Tensor] = []
    request = GradientRequest(torch.bfloat16, WeightGradBuffer(base[:, :16], True), True)
    filtered.filtered_gradients(case.problem, case.plan, case.tiles(filtered), case.logit_grad, request, handed.append)
    assert relative_error(base[:, :16], before[:, :16] + case_grads.weight) < TOLERANCE
    assert torch.equal(base[:, 16:], before[:, 16:])
    assert handed[0].dtype == torch.bfloat16
    assert relative_error(handed[0], case_grads.input) < 4e-3


@pytest.mark.parametrize("wanted", some_of(["input", "weight", "bias"], ["input", "weight"]))
def test_one_gradient_alone(wanted: str) -> None:
    case = FilterCase.make(small(bias=True))
    right = run(filtered_reference, case)
    buffer = torch.full_like(case.problem.weight, NAN)
    handed: list[torch.Tensor] = []
    request = GradientRequest(
        torch.float32 if wanted == "input" else None,
        WeightGradBuffer(buffer, False) if wanted == "weight" else None,
        wanted == "bias",
    )
    bias = filtered.filtered_gradients(
        case.problem, case.plan, case.tiles(filtered), case.logit_grad, request, handed.append
    )
    assert (bias is not None) == (wanted == "bias")
    assert len(handed) == (wanted == "input")
    if handed:
        assert relative_error(handed[0], right.input) < TOLERANCE
    if bias is not None:
        assert relative_error(bias, right.bias) < TOLERANCE
    if wanted == "weight":
        assert relative_error(buffer, right.weight) < TOLERANCE
