"""``cce-tp bench-tp``: what is compared, what is sent, what is predicted and drawn; never speed."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed import Pool, Rank, collectives

pytest.importorskip("rich")

from cce_tp import collectives as library_collectives
from cce_tp.launch import bench_tp, bench_tp_model, bench_tp_results, bench_tp_trace, bench_tp_work, cli
from cce_tp.launch.bench_tp import Plan
from cce_tp.launch.bench_tp_model import Link, Message, Step
from cce_tp.launch.bench_tp_results import MEGATRON, OURS
from cce_tp.launch.bench_tp_work import Problem, Recorder, Replay
from cce_tp.launch.console import PlainOutput
from cce_tp.launch.measure import GroupMeter, Place

SHAPE = (8, 60, 6)
PLAN = Plan([*OURS, *MEGATRON], [False, True], torch.float32, 2.0**-8, 1)


def _place(rank: Rank) -> Place:
    return Place(rank.group, rank.index, rank.size, rank.device)


def _measure(rank: Rank) -> list[bench_tp_results.Row]:
    place = _place(rank)
    problem = Problem.make("random", SHAPE, torch.float32, place, None)
    return bench_tp.measure(problem, PLAN, place, GroupMeter(place, bench_tp.product_of(problem)))


def test_every_method_gets_a_row(pool: Pool) -> None:
    """The ranks find the same; ours is complete, with the documented collectives, and one loss for all."""
    first, second = pool.run(2, _measure)
    assert first == second
    product, *rows = first
    assert product.ms > 0
    assert [(row.method, row.sequence_parallel) for row in rows] == [
        (method, layout) for method in PLAN.methods for layout in PLAN.layouts
    ]
    ours, peers = rows[: 2 * len(OURS)], rows[2 * len(OURS) :]
    assert all(row.reason is not None and row.ms is None for row in peers)
    assert len({round(row.loss, 5) for row in ours}) == 1
    for row in ours:
        assert min(row.ms, row.alone_ms, row.single_ms) > 0
        assert row.exposed == pytest.approx(1 - row.alone_ms / row.ms)
        assert row.efficiency(2) == pytest.approx(row.single_ms / row.ms / 2)
        small = ["summing the anchor"] * (row.method != "exact") + [library_collectives.COMBINING]
        gather = ["gathering the input"] * row.sequence_parallel
        assert [message.what for message in row.messages] == [*gather, *small, *gather, library_collectives.REDUCING]
        assert row.messages[-1].bytes == SHAPE[0] * SHAPE[2] * 4


def _replay(rank: Rank, method: str, sequence_parallel: bool) -> tuple[bool, int]:
    place = _place(rank)
    problem = Problem.make("random", SHAPE, torch.float32, place, None)
    mode = dataclasses.replace(PLAN.mode(method), **({"seed": 3} if method == "sampled" else {}))
    step = bench_tp_work.our_step(problem, place, mode, sequence_parallel)
    step()
    recorder = Recorder()
    with library_collectives.using(recorder):
        loss = step()
    grad = problem.weight.grad
    replay, sent = Replay(recorder), 0
    for _ in range(2):
        with library_collectives.using(replay), collectives() as seen:
            again = step()
        sent += len(seen)
    assert problem.weight.grad is not grad
    return torch.equal(loss, again) and torch.equal(grad, problem.weight.grad), sent


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("method", OURS)
def test_alone_is_the_same_work_without_a_collective(pool: Pool, method: str, sequence_parallel: bool) -> None:
    assert pool.run(2, _replay, method, sequence_parallel) == [(True, 0)] * 2


# -- the model


def test_a_line_is_found() -> None:
    link = Link.fit("all-reduce", {size: 0.03 + size * 5e-9 for size in (2**16, 2**20, 2**24, 2**26)})
    assert (link.latency_ms, link.ms_per_byte) == pytest.approx((0.03, 5e-9))
    assert link.milliseconds(2**20) == pytest.approx(0.03 + 2**20 * 5e-9)
    # Among 8, three times the latency, and 7/8 instead of 1/2 of the bytes twice.
    assert link.milliseconds(2**20, 8, 2) == pytest.approx(0.09 + 2**20 * 5e-9 * 1.75)


@pytest.mark.parametrize(
    ("times", "expected"),
    [({}, (0.0, 0.0)), ({10: 1.0}, (0.0, 0.1)), ({10: 2.0, 20: 1.0}, (1.2, 0.0)), ({10: 1.0, 20: 3.0}, (0.0, 3 / 26))],
)
def test_no_line_goes_down_or_begins_below_zero(times: dict[int, float], expected: tuple[float, float]) -> None:
    link = Link.fit("all-reduce", times)
    assert (link.latency_ms, link.ms_per_byte) == pytest.approx(expected)


def test_prediction() -> None:
    """Half of the work is shared out; the small collective stays in sight, the large one as far as it isn't hidden."""
    links = [Link("all-reduce", 0.1, 1e-8, {})]
    messages = [Message("all-reduce", "small", 0), Message("all-reduce", "large", 10**8)]
    step = Step(ranks=2, ms=7.7, alone_ms=7.5, single_ms=10.0, messages=messages)
    # Shared: 5. The collectives take 0.1 + 1.1, of which 1.0 was hidden. Among 4: 0.2 + 1.7, and 0.5 is hidden.
    ms, exposed = bench_tp_model.predict(step, links, 4)
    assert ms == pytest.approx(5 + 5 / 4 + 0.2 + 1.2)
    assert exposed == pytest.approx(1.4 / ms)
    same, _ = bench_tp_model.predict(step, links, 2)
    assert same == pytest.approx(7.7)


# -- the picture


def _every_rank(rank: Rank) -> list[dict[str, float]]:
    return _place(rank).of_every_rank({"∇E": float(rank.index)})


def test_every_rank_knows_of_all(pool: Pool) -> None:
    assert pool.run(2, _every_rank) == [[{"∇E": 0.0}, {"∇E": 1.0}]] * 2


def _trace() -> list[dict[str, Any]]:
    names = ["ampere_gemm", "at::cuda::spin_kernel", "_select_kernel", "_input_grad_kernel", "ncclDevKernel_AllReduce"]
    names += ["_arrive_kernel", "weight_grad_kernel", "fill"]
    kernels = [{"cat": "kernel", "name": name, "ts": 1000.0 * i, "dur": 900.0} for i, name in enumerate(names)]
    return [*reversed(kernels), {"cat": "cpu_op", "name": "nothing", "ts": 5000.0, "dur": 1.0}, {"name": "meta"}]


def test_spans_begin_behind_the_mark() -> None:
    found = bench_tp_trace.spans(_trace())
    assert [span.part for span in found] == [
        "logits and decisions", "∇E", "communication", "transpose", "∇C", "other",
    ]  # fmt: skip
    assert found[0].begin == pytest.approx(0.1)
    assert {span.length for span in found} == {0.9}
    assert bench_tp_trace.busy([*found, found[1]])["∇E"] == pytest.approx(1.8)
    assert "anchor" not in bench_tp_trace.busy(found)
    with pytest.raises(ValueError, match="no mark"):
        bench_tp_trace.spans(_trace()[:3])


def test_long_kernels_are_drawn_short() -> None:
    """What is beside them moves with them."""
    parts = ["anchor", "logits and decisions", "communication", "logits and decisions", "∇C"]
    times = [(0.0, 0.1), (0.2, 5.0), (5.2, 0.5), (5.7, 2.0), (7.7, 1.0)]
    step = [bench_tp_trace.Span(part, *time) for part, time in zip(parts, times, strict=True)]
    long = bench_tp_trace.long_kernels(step)
    assert long == [step[1], step[3]]
    drawn = [bench_tp_trace.place(time, long) for time in (0.1, 0.2, 2.7, 5.2, 5.7, 7.7, 8.7)]
    assert drawn == pytest.approx([0.1, 0.2, 0.45, 0.7, 1.2, 1.7, 2.7])
    assert bench_tp_trace.place(3.0, []) == 3.0


def test_every_part_has_a_colour_and_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "trace.png"
    found = bench_tp_trace.spans(_trace())
    bench_tp_trace.draw({"one": found, "two": found[:2]}, "title", path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(bench_tp_trace.COLOURS) == [name for name, _ in bench_tp_trace.PARTS]
    assert len(set(bench_tp_trace.COLOURS.values())) == len(bench_tp_trace.PARTS)


# -- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "start at least two processes"),
        (["--methods", "none"], "--methods: no name contains 'none'"),
        (["--methods", ","], "--methods: no name contains ','"),
        (["--logits", "realistic"], "--logits realistic and --data DIR belong together"),
        (["--shape", "1,2"], "'1,2' is not three numbers"),
    ],
)
def test_usage(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench-tp", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_results_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = (Message("all-reduce", "x", 4),)
    row = bench_tp_results.Row("sampled", True, None, 3.0, 2.0, 4.0, 10, 1.0, messages)
    peer = bench_tp_results.Row(MEGATRON[0], True, ms=9.0, peak_bytes=100)
    links = [Link("all-reduce", 0.0, 1e-9, {4: 1.0})]
    parts = {"sampled": [{"∇E": 2.0, "∇C": 1.0}, {"∇E": 0.5, "lists": 0.25}]}
    case = bench_tp_results.Case(SHAPE, 2, "random", "float32", "CPU", 2, 1.0, [row, peer], [], parts=parts)
    bench_tp_results.write_json(tmp_path / "tp.json", [case], links, library_collectives.Overlap())
    found = json.loads((tmp_path / "tp.json").read_text())
    assert found["cases"][0]["rows"][0]["exposed"] == pytest.approx(1 / 3)
    assert found["cases"][0]["rows"][0]["efficiency"] == pytest.approx(2 / 3)
    assert found["cases"][0]["rows"][1]["efficiency"] is None
    assert found["cases"][0]["parts"] == parts
    bench_tp_results.show(case, PlainOutput())
    table = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table[-3:]] == [["∇E", "2.000", "0.500"], ["∇C", "1.000"], ["lists", "0.250"]]
    assert bench_tp_results.comparisons(case.rows) == [
        "sampled against megatron-core fused, sequence parallel: 3.00 x faster, 10.0 x less memory"
    ]


@pytest.mark.multigpu
@pytest.mark.timeout(300)
def test_on_gpus(tmp_path: Path) -> None:
    """The command itself, with everything that it writes."""
    pytest.importorskip("matplotlib")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "cce_tp.launch", "bench-tp", "--shape", "4096,8192,1024", "--repeats", "2"]
    command += ["--json", str(tmp_path / "tp.json"), "--trace", str(tmp_path / "tp.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-4000:]
    (case,) = json.loads((tmp_path / "tp.json").read_text())["cases"]
    ours = [row for row in case["rows"] if row["method"] in OURS]
    assert len(ours) == 2 * len(OURS)
    assert all(row["reason"] is None and row["peak_bytes"] > 0 for row in ours)
    assert {row["method"]: len(row["messages"]) for row in ours if not row["sequence_parallel"]} == {
        "exact": 2, "filtered": 3, "sampled": 5,
    }  # fmt: skip
    assert (tmp_path / "tp.png").read_bytes().startswith(b"\x89PNG")
    assert [len(ranks) for ranks in case["parts"].values()] == [2, 2]
    assert all(
        rank["∇E"] > 0 and rank["logits and decisions"] > 0 for ranks in case["parts"].values() for rank in ranks
    )
