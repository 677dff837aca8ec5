"""The sampled mode's Triton kernels under Triton's interpreter, against the plain-PyTorch twin with the same anchor.

Run by ``test_interpreter.py``. Both draw the same numbers, so they keep the same entries, and gradients agree
to rounding.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from local_problem import LocalSpec, expected_gradients, logits, make, relative_error
from sampled_problem import (
    SampledCase,
    assert_same_entries,
    compare,
    compare_anchor,
    compare_anchor_rows,
    compare_confident,
    compare_shared,
    compare_transposed,
    draw_targets,
    kept_entries,
    run_sampled,
    shared_rank,
)

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set", allow_module_level=True)

from selection import some_of

import cce_tp
from cce_tp.kernels import (
    anchor,
    column_sums,
    sampled,
    sampled_reference,
    sampling,
    select_entries,
    tiles,
    transpose,
)  # fmt: skip
from cce_tp.kernels.interface import GradientRequest, LocalProblem, TokenPiece, WeightGradBuffer

NAN = float("nan")
TOLERANCE = 1e-5
SMALL = {"tokens": 19, "hidden": 21, "rows": 70}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": True},
    "offset": {"offset": 300.0},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "smoothing": {"smoothing": True},
    "everything": {"bias": True, "scale": 0.7, "softcap": 2.0, "strided": True},
    "everything with smoothing": {"bias": True, "scale": 0.7, "smoothing": True, "strided": True},
    "all inactive": {"inactive": 1.1},
    "off shard": {"off_shard": 1.1},
}


def small(**options: Any) -> LocalSpec:
    return LocalSpec(**{**SMALL, **options})


@pytest.mark.parametrize(
    "name", some_of(OPTIONS, ["offset", "everything", "everything with smoothing", "all inactive"])
)
def test_options(name: str) -> None:
    compare(SampledCase.make(small(**OPTIONS[name])), TOLERANCE)


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 16, 130), (17, 33, 65), (16, 32, 64), (5, 70, 2)], ids=str)
def test_shapes(shape: tuple[int, int, int]) -> None:
    tokens, hidden, rows = shape
    case = SampledCase.make(small(tokens=tokens, hidden=hidden, rows=rows, bias=True, smoothing=True))
    compare(case, TOLERANCE)


@pytest.mark.parametrize("options", [{}, {"smoothing": True}], ids=["plain", "smoothing"])
def test_statistics(options: dict[str, Any]) -> None:
    """The variant that takes every tile's own maximum."""
    compare(SampledCase.make(small(bias=True, **options)), TOLERANCE, stats=True)


@pytest.mark.parametrize(
    "hot", some_of([[], [-1, -1], [5], [69, -1, 0], list(range(70))], [[69, -1, 0], list(range(70))]), ids=str
)
def test_hot_rows(hot: list[int]) -> None:
    """None, none here, one, some, all; and a target that is hot, one that is not."""
    case = SampledCase.make(small(bias=True), hot=hot)
    target = case.problem.target.clone()
    target[:4] = torch.tensor([69, 5, 33, -1])
    compare(replace(case, problem=replace(case.problem, target=target)), TOLERANCE)


@pytest.mark.parametrize("budget", some_of([1, 3, 10**6], [3]))
def test_budget(budget: int) -> None:
    compare(SampledCase.make(small(), budget=budget), TOLERANCE)


@pytest.mark.parametrize(
    "shift", some_of([-200.0, -20.0, 20.0, 200.0, -float("inf"), float("inf"), NAN], [-20.0, 200.0, NAN])
)
def test_anchor_far_off(shift: float) -> None:
    """The LSE does not depend on it; too low keeps all, too high nothing, and neither is wrong."""
    case = SampledCase.make(small(tokens=9, bias=True), budget=10**6)
    compare(replace(case, plan=replace(case.plan, anchor=case.plan.anchor + shift)), TOLERANCE)


def test_anchors_of_every_kind_in_one_tile() -> None:
    case = SampledCase.make(small())
    shift = torch.tensor([0.0, 90.0, -90.0, 200.0, -200.0, NAN])[torch.arange(case.problem.num_tokens) % 6]
    compare(replace(case, plan=replace(case.plan, anchor=case.plan.anchor + shift)), TOLERANCE)


def test_everything_kept_is_exact() -> None:
    """pi = 1 for every entry: the gradient is the exact one."""
    case = SampledCase.make(small(tokens=9, bias=True, smoothing=True), budget=10**6)
    case = replace(case, plan=replace(case.plan, anchor=case.plan.anchor - 100))
    ours = run_sampled(select_entries.select, sampled.sampled_gradients, case).gradients
    right = expected_gradients(case.problem, case.logit_grad)
    for name in ("input", "weight", "bias"):
        assert relative_error(getattr(ours, name), getattr(right, name)) < TOLERANCE, name


def test_inactive_rows_may_hold_anything() -> None:
    case = SampledCase.make(small(inactive=0.4, smoothing=True))
    clean = run_sampled(select_entries.select, sampled.sampled_gradients, case).gradients
    e = case.problem.input.clone()
    e[~case.logit_grad.active] = NAN
    anchor = torch.where(case.plan.active, case.plan.anchor, NAN)
    dirty = replace(case, problem=replace(case.problem, input=e), plan=replace(case.plan, anchor=anchor))
    got = run_sampled(select_entries.select, sampled.sampled_gradients, dirty).gradients
    for name in ("input", "weight", "bias"):
        assert torch.equal(getattr(got, name), getattr(clean, name)), name


def test_a_nan_row_stays_by_itself() -> None:
    case = SampledCase.make(small(inactive=0.0))
    e, anchor = case.problem.input.clone(), case.plan.anchor.clone()
    e[3, 2], anchor[3] = NAN, NAN
    bad = torch.arange(case.problem.num_tokens) == 3
    dirty = replace(case, problem=replace(case.problem, input=e), plan=replace(case.plan, anchor=anchor))
    right, _ = select_entries.select(case.problem, case.plan, stats=False)
    partials, selection = select_entries.select(dirty.problem, dirty.plan, stats=False)
    assert partials.sum_exp[bad].isnan().all()
    lse = partials.max + partials.sum_exp.log()
    assert torch.allclose(lse[~bad], (right.max + right.sum_exp.log())[~bad], atol=1e-6)
    assert selection.found[3] == 0
    grad = replace(case.logit_grad, log_sum=torch.where(bad, NAN, case.logit_grad.log_sum))
    rows = run_sampled(select_entries.select, sampled.sampled_gradients, replace(dirty, logit_grad=grad)).gradients
    assert rows.input[bad].isnan().all()
    assert rows.input[~bad].isfinite().all()


@pytest.mark.parametrize("smoothing", some_of([False, True], [True]))
def test_accumulate_touches_only_rows_that_occur(smoothing: bool) -> None:
    """Others may hold what an addition would spoil; the row stride of the buffer is not its width."""
    spec = small(smoothing=smoothing, rows=150)
    case = SampledCase.make(spec, eps=2.0**-2, hot=[7, -1])
    entries = kept_entries(case)
    occurs = torch.zeros(spec.rows, dtype=torch.bool)
    occurs[[row for line in entries for row in line]] = True
    occurs[case.problem.target[case.logit_grad.active & (case.problem.target >= 0)]] = True
    occurs[7] = True
    base = torch.randn(spec.rows, spec.hidden + 3, generator=torch.Generator().manual_seed(5))
    if not smoothing:
        base[~occurs] = NAN
    before = base.clone()
    got = run_sampled(select_entries.select, sampled.sampled_gradients, case, buffer=base[:, : spec.hidden])
    alone = run_sampled(select_entries.select, sampled.sampled_gradients, case)
    touched = torch.ones_like(occurs) if smoothing else occurs
    right = before[touched, : spec.hidden] + alone.gradients.weight[touched]
    assert relative_error(got.gradients.weight[touched], right) < 1e-6
    assert torch.equal(base[:, spec.hidden :].nan_to_num(), before[:, spec.hidden :].nan_to_num())
    assert 0 < int(occurs.sum()) < spec.rows
    if not smoothing:
        assert base[~occurs].isnan().all()
        assert torch.equal(alone.gradients.weight[~occurs], torch.zeros_like(alone.gradients.weight[~occurs]))


@pytest.mark.parametrize("wanted", some_of(["input", "weight", "bias", "none"], ["input", "weight"]))
def test_one_gradient_alone(wanted: str) -> None:
    case = SampledCase.make(small(bias=True, softcap=3.0))
    right = run_sampled(sampled_reference.select, sampled_reference.gradients, case).gradients
    _, selection = select_entries.select(case.problem, case.plan, stats=False)
    buffer = torch.full_like(case.problem.weight, NAN)
    handed: list[torch.Tensor] = []
    request = GradientRequest(
        torch.float32 if wanted == "input" else None,
        WeightGradBuffer(buffer, False) if wanted == "weight" else None,
        wanted == "bias",
    )
    bias = sampled.sampled_gradients(case.problem, case.plan, selection, case.logit_grad, request, handed.append)
    assert (bias is not None) == (wanted == "bias")
    assert len(handed) == (wanted == "input")
    if handed:
        assert relative_error(handed[0], right.input) < TOLERANCE
    if bias is not None:
        assert relative_error(bias, right.bias) < TOLERANCE
    if wanted == "weight":
        assert relative_error(buffer, right.weight) < TOLERANCE


IN_RUNS = (TokenPiece(0, 1, 2, 6), TokenPiece(1, 3, 2, 6), TokenPiece(4, 2, 2, 6))


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, but for the hot rows' products, which take a tile of tokens at a time."""
    monkeypatch.setattr(sampled, "HOT_BYTES", 1)
    monkeypatch.setattr(tiles, "_INTERPRETER", replace(tiles._INTERPRETER, rows=4))
    case = SampledCase.make(small(tokens=12, hidden=12, rows=33, bias=True, smoothing=True, inactive=0.2))
    run = partial(run_sampled, select_entries.select, sampled.sampled_gradients, case)
    whole, parts = run().gradients, run(pieces=IN_RUNS).gradients
    assert relative_error(parts.input, whole.input) < 1e-6
    assert torch.equal(parts.weight, whole.weight)
    assert torch.equal(parts.bias, whole.bias)


@pytest.mark.parametrize("input_dtype", some_of([torch.float32, torch.bfloat16], [torch.bfloat16]))
@pytest.mark.parametrize("buffer_dtype", some_of([torch.bfloat16, torch.float64], [torch.bfloat16]))
def test_destinations(input_dtype: torch.dtype, buffer_dtype: torch.dtype) -> None:
    case = SampledCase.make(small())
    right = run_sampled(sampled_reference.select, sampled_reference.gradients, case).gradients
    buffer = torch.zeros(case.problem.weight.shape, dtype=buffer_dtype)
    got = run_sampled(
        select_entries.select, sampled.sampled_gradients, case, buffer=buffer, input_dtype=input_dtype
    ).gradients
    assert got.input.dtype == input_dtype
    assert relative_error(got.input, right.input) < (TOLERANCE if input_dtype == torch.float32 else 6e-3)
    assert relative_error(buffer, right.weight) < (TOLERANCE if buffer_dtype == torch.float64 else 4e-3)


@pytest.mark.parametrize(("tokens", "rows"), [(0, 40), (9, 0), (0, 0)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_nothing(tokens: int, rows: int, accumulate: bool) -> None:
    case = SampledCase.make(small(tokens=tokens, rows=rows, smoothing=True), hot=[-1])
    buffer = torch.ones(rows, SMALL["hidden"]) if accumulate else None
    got = run_sampled(select_entries.select, sampled.sampled_gradients, case, stats=True, buffer=buffer)
    assert torch.equal(got.partials.max, torch.full((tokens,), -float("inf")))
    assert int(got.selection.kept) == 0
    assert torch.equal(got.gradients.input, torch.zeros(tokens, SMALL["hidden"]))
    assert torch.equal(got.gradients.bias, torch.zeros(rows))
    assert torch.equal(got.gradients.weight, torch.full((rows, SMALL["hidden"]), float(accumulate)))


def test_more_tiles_than_are_looked_at_together() -> None:
    """A token's marks are read in several turns."""
    case = SampledCase.make(small(tokens=3, rows=1200), eps=2.0**-4)
    assert tiles._INTERPRETER.cols * select_entries.MARK_WORDS * sampling.WORD_BITS < 1200
    compare(case, TOLERANCE)
    assert {row // 600 for line in kept_entries(case) for row in line} == {0, 1}


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the forward, and of the hot rows' gradients."""
    case = SampledCase.make(small(tokens=33, bias=True))
    whole = run_sampled(select_entries.select, sampled.sampled_gradients, case)
    monkeypatch.setattr(select_entries, "CHUNK_BYTES", 1)
    monkeypatch.setattr(sampled, "HOT_BYTES", 1)
    pieces = run_sampled(select_entries.select, sampled.sampled_gradients, case)
    assert torch.equal(whole.partials.sum_exp, pieces.partials.sum_exp)
    assert_same_entries(whole.selection, pieces.selection)
    for name in ("input", "weight", "bias"):
        assert relative_error(getattr(pieces.gradients, name), getattr(whole.gradients, name)) < 1e-6, name


@pytest.mark.parametrize(("rows", "chunk"), [(256000, 12), (128256, 22), (262144, 11), (1000, 64)])
def test_chunks_leave_few_processors_idle(rows: int, chunk: int) -> None:
    """At the first shape 11 tiles would be an even share, and 84 rounds of 132 processors for 83.3 rounds' work. At the
    third, 17 would be better than 11, but there is no memory for more."""
    with torch.device("meta"):
        problem = LocalProblem(torch.empty(8192, 64), torch.empty(rows, 64), torch.empty(8192, dtype=torch.int64))
    tile, columns = tiles._HOPPER_16BIT, tiles.cdiv(rows, 256)
    per_token = columns * (2 + 8) * 4
    tokens = select_entries._tokens_at_once(problem, tile, per_token, 0, columns)
    assert tokens == chunk * tile.rows
    assert tokens * per_token <= select_entries.CHUNK_BYTES


def test_order_of_pieces_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(column_sums, "BLOCK", 16)
    case = SampledCase.make(small(bias=True, smoothing=True))
    found = []
    for by_piece in (False, True):
        monkeypatch.setattr(column_sums, "by_piece", lambda input, by_piece=by_piece: by_piece)
        found.append(run_sampled(select_entries.select, sampled.sampled_gradients, case).gradients)
    assert torch.equal(found[0].weight, found[1].weight)
    assert torch.equal(found[0].bias, found[1].bias)


def test_workspace_too_small() -> None:
    case = SampledCase.make(small(tokens=40))
    with pytest.raises(ValueError, match=r"workspace=1 is too small: .* at least (\d+) bytes") as refused:
        select_entries.select(replace(case.problem, workspace=1), case.plan, stats=False)
    least = int(str(refused.value).split("at least ")[1].split()[0])
    partials, selection = select_entries.select(replace(case.problem, workspace=least), case.plan, stats=False)
    right, expected = select_entries.select(case.problem, case.plan, stats=False)
    assert torch.equal(partials.sum_exp, right.sum_exp)
    assert_same_entries(selection, expected)


def test_rows_too_long_for_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampled, "MOST_IN_REGISTERS", 16)
    monkeypatch.setattr(sampled, "LONG_BLOCK", 16)
    compare(SampledCase.make(small(bias=True, smoothing=True)), TOLERANCE)


_GUARDED = """
import ctypes, mmap
from dataclasses import replace
import torch
from local_problem import LocalSpec, make
from cce_tp.kernels import anchor, sampling, tiles

tiles._INTERPRETER = replace(tiles._INTERPRETER, cols=16)
libc, real = ctypes.CDLL(None), torch.empty
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def guarded(*size, **options):
    if options.get("dtype") is not torch.float32 or not isinstance(size[0], tuple):
        return real(*size, **options)
    length = 4 * size[0][0] * size[0][1]
    pages = -(-length // mmap.PAGESIZE) * mmap.PAGESIZE
    base = libc.mmap(None, pages + mmap.PAGESIZE, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert libc.mprotect(base + pages, mmap.PAGESIZE, 0) == 0
    place = (ctypes.c_char * length).from_address(base + pages - length)
    print("guarded", *size[0])
    return torch.frombuffer(place, dtype=torch.float32).view(size[0]).fill_(float("nan"))


problem = make(LocalSpec(tokens=16, hidden=9, rows=40))
rows = anchor.anchor_rows(problem.target, problem.target >= 0, sampling.RowIds.whole(40), 8)
torch.empty = guarded
assert anchor.anchor_sums(problem, rows).isfinite().all()
"""


def test_sums_stay_within_the_products() -> None:
    """Whose last row ends, by the tile that made them, before the columns that are summed at once do."""
    folder = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(Path(folder).parent)])}
    done = subprocess.run(
        [sys.executable, "-c", _GUARDED], env=environment, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "guarded 16 48" in done.stdout


@pytest.mark.parametrize("divisor", [2, 3, 9, 385, 512, 65535, 2**30 + 1, 2**31 - 1])
def test_division_by_multiplication(divisor: int) -> None:
    """Right up to 2^31, and where the quotient changes."""
    by = column_sums.Divisor.of(divisor)
    most = (2**31 - 1) // divisor
    edges = {n + d for n in (0, divisor, 2 * divisor, most // 2 * divisor, most * divisor) for d in (-1, 0, 1)}
    numbers = [n for n in edges | set(random.Random(divisor).choices(range(2**31), k=200)) if 0 <= n < 2**31]
    assert by.factor < 2**32
    assert [n * by.factor >> 32 >> by.shift for n in numbers] == [n // divisor for n in numbers]


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("hidden", [1, 64, 576, 2048, 2304, 3072, 4096, 5120, 7168, 8192])
def test_rows_fit(hidden: int, itemsize: int) -> None:
    """Into shared memory that any device has, where two are on their way (64 KiB for one of 8,192 fp32 numbers)."""
    width = sampled._Width.of(hidden, itemsize)
    assert hidden <= width.main + width.rest < 2 * hidden + 2 * sampled.READ_AT_ONCE
    assert width.main % width.unit == width.rest % width.unit == 0
    assert (width.stages - 1) * width.at_once * (width.main + width.rest) * itemsize <= 64 * 2**10
    assert width.fills(hidden) == (hidden not in (576, 7168))


def test_long_columns() -> None:
    """Columns that every token keeps, over several programs of the transposition and of grad C, added to once each."""
    case = SampledCase.make(small(tokens=50, rows=3, off_shard=1.1), hot=[])
    case = replace(case, plan=replace(case.plan, anchor=case.plan.anchor - 50))
    compare(case, TOLERANCE)
    assert kept_entries(case) == [[0, 1, 2] if active else [] for active in case.plan.active.tolist()]
    assert case.plan.active.sum() > 2 * column_sums.LONG
    before = torch.randn(case.problem.weight.shape, generator=torch.Generator().manual_seed(5))
    got = run_sampled(select_entries.select, sampled.sampled_gradients, case, buffer=before.clone()).gradients
    alone = run_sampled(select_entries.select, sampled.sampled_gradients, case).gradients
    assert relative_error(got.weight, before + alone.weight) < 1e-6


@pytest.mark.parametrize(("tokens", "num_rows", "budget"), [(15, 20, 5), (43, 70, 9), (70, 40, 20)])
def test_transposition(tokens: int, num_rows: int, budget: int) -> None:
    """Columns that are never long, and such as are ordered by bits."""
    longest = compare_transposed(tokens, num_rows, budget)
    assert (longest >= transpose.long_column(tokens)) == (tokens > 15)


def test_slots_beyond_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers are int64: in the transposition, with bits and without, and in sums of long rows and others."""
    for module in (sampled, transpose):
        monkeypatch.setattr(module, "slot_dtype", lambda slots: torch.int64)
    case = SampledCase.make(small(tokens=50, rows=70), budget=70)
    kept = torch.bincount(torch.tensor([row for line in kept_entries(case) for row in line]), minlength=70)
    assert kept.max() >= column_sums.LONG > kept.min()
    compare(case, TOLERANCE)


@pytest.mark.slow
def test_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "has_tma", lambda device: True)
    compare(SampledCase.make(small(hidden=24, bias=True)), TOLERANCE)


def test_the_ids_are_global() -> None:
    """Two shards keep what one would."""
    case = SampledCase.make(small(rows=64), hot=[], budget=10**6)
    whole = kept_entries(case)
    parts: list[list[int]] = [[] for _ in whole]
    for start in (0, 32):
        target = torch.where(case.problem.target // 32 == start // 32, case.problem.target - start, -1)
        shard = replace(case.problem, weight=case.problem.weight[start : start + 32], target=target)
        plan = replace(case.plan, first_id=case.plan.first_id + start)
        for line, rows in zip(parts, kept_entries(replace(case, problem=shard, plan=plan)), strict=True):
            line.extend(row + start for row in rows)
    assert parts == whole


@pytest.mark.slow
def test_the_operands_are_left_alone() -> None:
    case = SampledCase.make(small(bias=True, smoothing=True))
    owners = (case.problem, case.plan, case.logit_grad)
    tensors = [value for owner in owners for value in vars(owner).values() if isinstance(value, torch.Tensor)]
    copies = [value.clone() for value in tensors]
    run_sampled(select_entries.select, sampled.sampled_gradients, case)
    for value, copy in zip(tensors, copies, strict=True):
        assert torch.equal(value, copy)


def test_masked_logits() -> None:
    """A whole tile, then a whole token, at -inf."""
    case = SampledCase.make(small(bias=True))
    assert case.problem.bias is not None
    b = case.problem.bias.clone()
    b[:40] = -float("inf")
    masked = replace(case.problem, bias=b)
    partials, _ = select_entries.select(masked, case.plan, stats=False)
    right = logits(masked).logsumexp(1)
    assert torch.allclose(partials.max.double() + partials.sum_exp.double().log(), right, atol=1e-6)
    nowhere = replace(case.problem, bias=torch.full_like(b, -float("inf")))
    partials, selection = select_entries.select(nowhere, case.plan, stats=False)
    assert torch.equal(partials.sum_exp, torch.zeros_like(partials.sum_exp))
    assert int(selection.kept) == 0


@pytest.mark.parametrize(
    "options", [{}, {"bias": True, "scale": 0.7, "softcap": 2.0, "strided": True}], ids=["plain", "everything"]
)
def test_anchor_sums(options: dict[str, Any]) -> None:
    compare_anchor(make(small(**options)))


@pytest.mark.parametrize("ids", [(50, 0, 50, 50), (2100, 700, 650, 700), (1500, 600, 0, 4), (1, 0, 1, 1)], ids=str)
@pytest.mark.parametrize("reference_rows", [1, 7, 400])
def test_anchor_rows(ids: tuple[int, int, int, int], reference_rows: int) -> None:
    """Fewer ids than there may be hot rows, more than have been seen, ranks in the middle and without rows."""
    target, active = draw_targets(300, ids[0])
    compare_anchor_rows(target, active, sampling.RowIds(*ids), reference_rows)


def test_anchor_rows_of_nothing() -> None:
    """All targets the same, none known, and no token at all."""
    ids = sampling.RowIds(1100, 0, 1100, 1100)
    target = torch.full((40,), 3)
    for some in (target, target - 4, target + 1097, target[:0]):
        compare_anchor_rows(some, torch.ones_like(some, dtype=torch.bool), ids, 5)
    compare_anchor_rows(target, torch.zeros_like(target, dtype=torch.bool), ids, 5)


def test_anchor_looks_at_its_own_rows_only() -> None:
    """Ranks' sums add up to those of one shard, whose tiles they share."""
    problem = make(small(tokens=7, hidden=9, rows=130, off_shard=0.0, inactive=0.0))
    active = torch.ones_like(problem.target, dtype=torch.bool)
    whole = anchor.anchor_rows(problem.target, active, sampling.RowIds.whole(130), 50)
    right = anchor.anchor_sums(problem, whole)
    parts = torch.zeros_like(right)
    for start in (0, 40, 41):
        stop = {0: 40, 40: 41, 41: 130}[start]
        ids = sampling.RowIds(130, start, stop - start, stop - start)
        rows = anchor.anchor_rows(problem.target, active, ids, 50)
        local = (problem.target >= start) & (problem.target < stop)
        target = torch.where(local, problem.target - start, -1)
        parts += anchor.anchor_sums(replace(problem, weight=problem.weight[start:stop], target=target), rows)
        assert torch.equal(rows.num_cold, whole.num_cold)
    assert torch.allclose(parts, right, rtol=1e-14, atol=0.0)
    assert torch.equal(anchor.anchor(parts, whole), anchor.anchor(right, whole))


@pytest.mark.parametrize(
    ("options", "cuts", "pieces"),
    [
        ({}, [0, 41], ()),
        ({"smoothing": True, "scale": 0.7}, [0, 2, 50], (TokenPiece(0, 10), TokenPiece(10, 9))),
        ({"tokens": 2, "softcap": 2.0}, [0, 10, 20], ()),
        ({"hidden": 40}, [0, 0, 70], (TokenPiece(0, 4), TokenPiece(4, 15))),
    ],
    ids=["two", "pieces", "ranks without tokens", "ranks without rows"],
)
def test_hot_rows_shared_out(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], cuts: list[int], pieces: tuple[TokenPiece, ...]
) -> None:
    monkeypatch.setattr(sampled, "HOT_BYTES", 1)
    monkeypatch.setattr(tiles, "_INTERPRETER", replace(tiles._INTERPRETER, rows=4))
    compare_shared(small(inactive=0.2, **options), cuts, TOLERANCE, pieces=pieces)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(
    ("options", "cuts", "pieces"),
    [
        ({"tokens": 20}, [0, 41], (TokenPiece(0, 4, 2, 10), TokenPiece(4, 6, 2, 10))),
        ({"tokens": 18, "smoothing": True}, [0, 0, 70], (TokenPiece(0, 2, 3, 6), TokenPiece(2, 4, 3, 6))),
        ({"tokens": 4, "hidden": 40}, [0, 20, 30, 70], ()),
    ],
    ids=["two", "ranks without rows", "one piece"],
)
def test_hot_rows_of_own_tokens(
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    cuts: list[int],
    pieces: tuple[TokenPiece, ...],
    at_once: bool,
) -> None:
    """Under sequence parallelism, before the other ranks' tokens are here; E's copy lies where grad E will."""
    if not at_once:
        monkeypatch.setattr(sampled, "HOT_BYTES", 1)
    monkeypatch.setattr(tiles, "_INTERPRETER", replace(tiles._INTERPRETER, rows=4))
    compare_shared(small(inactive=0.2, **options), cuts, TOLERANCE, pieces=pieces, apart=True, keep=at_once)


@pytest.mark.parametrize(
    ("options", "cuts"),
    [({}, [0, 41]), ({"scale": 0.7, "smoothing": True}, [0, 0, 33, 70]), ({"tokens": 2, "spread": 60.0}, [0, 10, 20])],
    ids=["two", "scale", "large logits"],
)
def test_hot_exponentials(options: dict[str, Any], cuts: list[int]) -> None:
    compare_shared(small(inactive=0.2, **options), cuts, TOLERANCE, keep=True)


def test_confident_hot_targets() -> None:
    compare_confident(torch.float32, TOLERANCE)


def test_anchor_of_shared_rows() -> None:
    """The same anchor, of which every rank looks after its tokens; in padding, no place of the next rank's."""
    problem = make(small(tokens=11, hidden=9, rows=130, off_shard=0.0, inactive=0.2))
    active = problem.target >= 0
    whole = anchor.anchor_rows(problem.target, active, sampling.RowIds.whole(130), 50)
    right = anchor.anchor_sums(problem, whole)
    parts = torch.zeros_like(right)
    weight = anchor.gather_rows(problem.weight, whole.ids)
    summed = torch.zeros_like(weight)
    for start, stop, first, last in ((0, 40, 0, 0), (40, 40, 0, 5), (40, 130, 5, 11)):
        rows = anchor.anchor_rows(
            problem.target, active, sampling.RowIds(130, start, stop - start, stop - start + 2), 50
        )
        assert torch.equal(rows.ids, whole.ids)
        assert torch.equal(rows.place[stop - start :], torch.zeros(2, dtype=torch.int32))
        assert torch.equal(rows.target_place(problem.target), whole.target_place(problem.target))
        assert torch.equal(anchor.target_place(rows, problem.target), whole.target_place(problem.target))
        local = (problem.target >= start) & (problem.target < stop)
        target = torch.where(local, problem.target - start, -1)
        mine = replace(problem, weight=problem.weight[start:stop], target=target)
        summed += anchor.gather_rows(mine.weight, rows.rows)
        parts += anchor.anchor_sums(mine, rows, sampling.SharedRows(weight, first, last))
    assert torch.equal(summed, weight)
    assert torch.allclose(parts, right, rtol=1e-5, atol=1e-12)
    assert torch.equal(whole.target_place(problem.target)[active], whole.place[problem.target[active]])


@pytest.mark.parametrize("tokens", [12, 40])
def test_unknown_labels_count_as_the_largest_logit(tokens: int) -> None:
    """Which the forward pass of this mode doesn't look for; other tokens' entries are the same either way."""
    generator = torch.Generator().manual_seed(tokens)
    rows = 3 * torch.randn(tokens, 16, generator=generator)
    weight = torch.randn(90, 16, generator=generator)
    target = torch.randint(90, (tokens,), generator=generator)
    target[3], target[tokens - 1], target[5] = 90, -7, -100
    losses, gradients = [], []
    for backward, implementation in (
        (cce_tp.Sampled(eps=2.0**-4, seed=3, reference_rows=8), "triton"),
        ("exact", "torch"),
    ):
        leaf = rows.clone().requires_grad_()
        loss = cce_tp.linear_cross_entropy(
            leaf, weight, target,
            reduction="none", unknown_labels="max", backward=backward, implementation=implementation,
        )  # fmt: skip
        loss.sum().backward()
        losses.append(loss.detach())
        gradients.append(leaf.grad)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)
    assert gradients[0] is not None
    assert gradients[0].isfinite().all()
    assert gradients[0][3].norm() > 0


@pytest.mark.parametrize("own_rows", [0, 30])
def test_hot_rows_for_a_rank_that_needs_them(own_rows: int) -> None:
    """This rank's classifier is frozen; its tokens' part of the others' hot rows is handed on all the same."""
    case = SampledCase.make(small(inactive=0.2), budget=10**6, hot=[1, 2, 40, 69])
    part = shared_rank(case, [0, own_rows], 0)
    chosen = select_entries.select(part.problem, part.plan, stats=False)[1]
    handed: dict[bool, list[torch.Tensor]] = {}
    for frozen in (False, True):
        handed[frozen] = []
        buffer = None if frozen else WeightGradBuffer(torch.empty_like(part.problem.weight), False)
        request = GradientRequest(torch.float32, buffer, False, (), None, lambda: handed[False][0])
        sampled.sampled_gradients(part.problem, part.plan, chosen, case.logit_grad, request, handed[frozen].append)
    assert handed[True][0][:4].norm() > 0
    assert torch.equal(handed[True][0], handed[False][0])


def test_memory_that_grad_c_lends() -> None:
    """Of any dtype, as long as it is contiguous, large enough, and written afterwards."""
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        memory = torch.zeros(7, 3, dtype=dtype)
        lent = sampled.lent_memory(WeightGradBuffer(memory, False), 9, torch.int32)
        assert lent is not None
        assert (lent.shape, lent.dtype, lent.data_ptr()) == ((9,), torch.int32, memory.data_ptr())
        assert sampled.lent_memory(WeightGradBuffer(memory, True), 9, torch.int32) is None
        assert sampled.lent_memory(WeightGradBuffer(memory[:, :2], False), 1, torch.int32) is None
        assert sampled.lent_memory(WeightGradBuffer(memory, False), 43, torch.int32) is None
    assert (
        sampled.lent_memory(WeightGradBuffer(memory.bfloat16().view(-1)[1:].view(2, 10), False), 2, torch.int32) is None
    )
    assert sampled.lent_memory(None, 1, torch.int32) is None
