"""A rank that raises or dies within a step: the others end in an error that says what they were waiting for."""

from __future__ import annotations

import json
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import Rank, _start_context
from problems import Spec, make_shards, run_layer
from problems import build as build_problem

from cce_tp import collectives

SPEC = Spec(shape=(8,), hidden=4, vocab=12, split="equal")
SAMPLED, SEQUENCE = {"backward": "sampled"}, {"sequence_parallel": True}
PLACES = {
    "gathering the input": SEQUENCE,
    "summing the anchor": SAMPLED,
    collectives.COMBINING: {},
    collectives.REDUCING: {},
}
"""What a collective is for, and options of a call that has it."""


class Failing(collectives.Transport):
    """Fails instead of taking part in the collective for ``what``."""

    def __init__(self, what: str, fatal: bool = False) -> None:
        self.what, self.fatal = what, fatal

    def _fail(self, what: str) -> None:
        if what == self.what and self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        if what == self.what:
            raise ZeroDivisionError("of this rank alone")

    def all_gather(self, out: Any, local: Any, group: Any, what: str, later: bool = False) -> Any:
        self._fail(what)
        return super().all_gather(out, local, group, what, later)

    def all_reduce(self, values: Any, group: Any, what: str, op: Any = dist.ReduceOp.SUM, later: bool = False) -> Any:
        self._fail(what)
        return super().all_reduce(values, group, what, op, later)


def _step(rank: Rank, keywords: dict[str, Any], transport: collectives.Transport) -> str:
    """The error of one step, or nothing."""
    shard = make_shards(SPEC.vocab, 0, "equal", rank.size)[rank.index]
    run_layer(build_problem(SPEC), shard, rank, **keywords)  # the first call of a kind has one more collective
    try:
        with collectives.using(transport):
            run_layer(build_problem(SPEC), shard, rank, **keywords)
    except (RuntimeError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _group(seconds: float) -> dist.ProcessGroup:
    """A new one that doesn't wait for long."""
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=seconds))
    assert group is not None
    return group


def _run(index: int, folder: str) -> None:
    """One rank of two that raises, in each place; afterwards all is well in another group. Then one that dies."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=index, world_size=2)
    device = torch.device("cpu")
    found: dict[str, Any] = {}
    for what, keywords in PLACES.items():
        place = Rank(index, 2, _group(5.0), device)
        known = len(dist.distributed_c10d._world.pg_map)
        failed = _step(place, keywords, Failing(what) if index == 1 else collectives.Transport())
        leaked = len(dist.distributed_c10d._world.pg_map) - known
        again = _step(Rank(index, 2, _group(60.0), device), keywords, collectives.Transport())
        found[what] = [failed, again, leaked]
    (Path(folder) / f"raised{index}").write_text(json.dumps(found))
    transport = Failing(collectives.REDUCING, fatal=True) if index == 1 else collectives.Transport()
    message = _step(Rank(index, 2, _group(1000.0), device), {}, transport)
    (Path(folder) / f"killed{index}").write_text(message)
    os._exit(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What both ranks saw."""
    path = tmp_path_factory.mktemp("failures")
    context = _start_context()
    ranks = [context.Process(target=_run, args=(rank, str(path)), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [3, -signal.SIGKILL]
    return path


@pytest.mark.parametrize("what", PLACES)
def test_a_rank_that_raises(folder: Path, what: str) -> None:
    """The other one runs into the group's timeout; nothing stays behind, and in another group all is well."""
    waiting, raised = (json.loads((folder / f"raised{rank}").read_text())[what] for rank in range(2))
    assert raised == ["ZeroDivisionError: of this rank alone", "", 0]
    message, *rest = waiting
    assert f"linear_cross_entropy: {what} over the tensor-parallel group failed on rank 0 of 2: " in message
    assert "imed out" in message
    assert rest == ["", 0]


def test_a_rank_that_is_killed(folder: Path) -> None:
    """In the backward pass; the other one does not even wait for the timeout."""
    message = (folder / "killed0").read_text()
    what = collectives.REDUCING
    assert f"linear_cross_entropy: {what} over the tensor-parallel group failed on rank 0 of 2: " in message
    assert not (folder / "killed1").exists()


def _run_on_gpus(index: int, folder: str, blocking: bool) -> None:
    """One rank of two that leaves in the middle of the backward pass, and one that waits for it."""
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = str(int(blocking))
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    timeout = timedelta(seconds=10)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=index, world_size=2, timeout=timeout)
    group = dist.group.WORLD
    assert group is not None
    transport = Failing(collectives.REDUCING) if index == 1 else collectives.Transport()
    message = _step(Rank(index, 2, group, device), {"device": device}, transport)
    (Path(folder) / f"message{index}").write_text(message)
    os._exit(3)


@pytest.mark.multigpu
@pytest.mark.timeout(150)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_rank_that_leaves_others_to_nccl(tmp_path: Path, blocking: bool) -> None:
    """Where NCCL blocks the thread, the error has a name; else its watchdog ends the process."""
    context = _start_context()
    ranks = [context.Process(target=_run_on_gpus, args=(rank, str(tmp_path), blocking)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes[1] == 3
    assert (tmp_path / "message1").read_text() == "ZeroDivisionError: of this rank alone"
    assert codes[0] not in (None, 0)
    if blocking:
        message = (tmp_path / "message0").read_text()
        assert (
            f"linear_cross_entropy: {collectives.REDUCING} over the tensor-parallel group failed on rank 0" in message
        )
