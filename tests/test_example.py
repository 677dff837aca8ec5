"""The training example as a user runs it: its own processes, the real tokenizer, a tiny model.

What is learned must depend neither on the layout, nor on the loss's implementation, nor on an interruption; so every
run here is held against one curve, that of a single process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

pytest.importorskip("mistral_common")
pytest.importorskip("rich")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SCRIPT = str(EXAMPLES / "pretrain_gpt.py")
STEPS = 20
TINY = ["--device", "cpu", "--dim", "16", "--layers", "1", "--heads", "4", "--seq-len", "32", "--batch", "4"]
TINY += ["--steps", str(STEPS), "--eval-every", "10", "--lr", "0.03"]
LIMIT = 150
"""Seconds for one run, on a machine busy with other things."""

Curve = dict[int, dict[str, float]]

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(2 * LIMIT)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some text in it, in which all runs share their tokens."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "text").mkdir()
    for module in ("textwrap.py", "shlex.py", "heapq.py", "bisect.py"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / module, folder / "text")
    return folder


def command(workspace: Path, out: str, processes: int, *arguments: str) -> list[str]:
    launcher = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)] if processes > 1 else []
    )
    paths = ["--data", str(workspace / "text"), "--cache", str(workspace / "tokens"), "--out", str(workspace / out)]
    return [sys.executable, *launcher, SCRIPT, *TINY, *paths, *arguments]


def wait_for_steps(process: subprocess.Popen[str], run: Path, steps: int) -> None:
    """Return once the log has that many lines."""
    log = run / "log.jsonl"
    deadline = time.monotonic() + LIMIT
    while not (log.exists() and log.read_text().count("\n") >= steps):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step was done"
        time.sleep(0.02)


@contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A run that does not outlive the block."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(arguments, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def train(workspace: Path, out: str, processes: int, *arguments: str) -> Curve:
    with started(command(workspace, out, processes, *arguments)) as process:
        printed, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, printed
    return read_curve(workspace / out)


def read_curve(run: Path) -> Curve:
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines]
    assert steps == sorted(set(steps)), "a step is in the log twice"
    return {line["step"]: line for line in lines}


def assert_same_curve(curve: Curve, expected: Curve, tolerance: float) -> None:
    """Losses within ``tolerance``, and gradient norms: Adam would hide a gradient that is off by a factor."""
    assert curve.keys() == expected.keys() == set(range(STEPS + 1))
    for step, line in expected.items():
        for name, limit in (
            ("loss", {"abs": tolerance}),
            ("held_out_loss", {"abs": tolerance}),
            ("grad_norm", {"rel": 1e-3}),
        ):
            assert (name in curve[step]) == (name in line)
            if name in line:
                assert curve[step][name] == pytest.approx(line[name], **limit), f"{name} of step {step}"


@pytest.fixture(scope="module")
def alone(workspace: Path) -> Curve:
    """The curve of one process without a launcher."""
    return train(workspace, "alone", 1)


@pytest.fixture(scope="module")
def interrupted(workspace: Path) -> Path:
    """A run on two tp ranks that got a Ctrl-C after some steps."""
    run = workspace / "interrupted"
    with started(command(workspace, "interrupted", 2, "--tp", "2")) as process:
        wait_for_steps(process, run, 5)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=LIMIT)
    assert "Interrupted after step" in printed
    assert (run / "checkpoints" / "latest").exists(), printed
    assert 4 <= max(read_curve(run)) < STEPS, "the run was over before it could be interrupted"
    return run


def test_learns_and_leaves_its_results(workspace: Path, alone: Curve) -> None:
    assert alone[0]["held_out_loss"] == pytest.approx(11.78, abs=0.05)  # ln 131072
    assert alone[STEPS]["held_out_loss"] < 10
    assert (workspace / "alone" / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert (workspace / "alone" / "checkpoints" / "latest").read_text().strip() == f"step-{STEPS:06d}"


@pytest.mark.slow
def test_ordinary_logits_give_the_same_curve(workspace: Path, alone: Curve) -> None:
    assert_same_curve(train(workspace, "torch", 2, "--tp", "2", "--loss", "torch"), alone, 1e-4)


@pytest.mark.slow
def test_tp_by_dp_gives_the_curve_of_one_process(workspace: Path, alone: Curve) -> None:
    assert_same_curve(train(workspace, "tp2dp2", 4, "--tp", "2"), alone, 2e-5)


@pytest.mark.slow
def test_resumes_on_the_same_curve(workspace: Path, interrupted: Path, alone: Curve) -> None:
    shutil.copytree(interrupted, workspace / "resumed")
    assert_same_curve(train(workspace, "resumed", 2, "--tp", "2", "--resume"), alone, 2e-5)


def test_resumes_at_another_tp(workspace: Path, interrupted: Path, alone: Curve) -> None:
    shutil.copytree(interrupted, workspace / "resumed-alone")
    assert_same_curve(train(workspace, "resumed-alone", 1, "--tp", "1", "--resume"), alone, 2e-5)


def test_sigterm_saves_and_exits_with_130(workspace: Path) -> None:
    run = workspace / "terminated"
    with started(command(workspace, "terminated", 1)) as process:
        wait_for_steps(process, run, 2)
        process.terminate()
        printed, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 130, printed
    last = max(read_curve(run))
    assert last < STEPS
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{last:06d}"


@pytest.mark.parametrize(
    ("arguments", "world_size", "message"),
    [
        (["--tp", "2"], 1, "1 process cannot form groups of --tp 2"),
        (["--tp", "2"], 3, "3 processes cannot form groups of --tp 2"),
        (["--tp", "4", "--dim", "36", "--heads", "6"], 4, "--heads 6 does not divide by --tp 4"),
        (["--tp", "2", "--seq-len", "33"], 2, "--seq-len 33 does not divide by --tp 2"),
        (["--dim", "20", "--heads", "8"], 1, "--dim 20 is not an even multiple of --heads 8"),
        (["--tp", "1", "--batch", "3"], 2, "--batch 3 does not divide over 2 data-parallel ranks"),
        (["--data", "nowhere"], 1, "--data nowhere does not exist"),
        (["--resume", "--out", "nowhere"], 1, "--resume finds no checkpoint in nowhere"),
        (["--steps", "0"], 1, "argument --steps: 0 is not positive"),
        (["--lr", "nan"], 1, "argument --lr: nan is not a finite number of at least 0"),
        (["--held-out", "1.5"], 1, "argument --held-out: 1.5 is not between 0 and 1"),
        (["--loss", "torch", "--backward", "sampled"], 1, "--backward sampled belongs to --loss cce"),
        (["--nonsense"], 1, "unrecognized arguments: --nonsense"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(
    arguments: list[str],
    world_size: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [SCRIPT])
    import pretrain_gpt

    if world_size > 1:
        launched = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world_size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
        for name, value in launched.items():
            monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as refused:
        pretrain_gpt.main(["--device", "cpu", *arguments])
    assert refused.value.code == 2
    assert capsys.readouterr().err == f"pretrain_gpt.py: error: {message}\n"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one sentence with which this very process, alone in its group, refuses the arguments of ``command``."""
    import pretrain_gpt

    with pytest.raises(SystemExit) as stopped:
        pretrain_gpt.main(arguments[arguments.index(SCRIPT) + 1 :])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert not dist.is_initialized()
    return message


def test_refuses_to_bury_a_run_and_to_resume_another_model(
    workspace: Path, alone: Curve, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    again = command(workspace, "alone", 1)
    assert "--resume goes on with it, --overwrite starts anew" in refused(again, capsys)
    other = command(workspace, "alone", 1, "--resume", "--steps", "30", "--dim", "32")
    assert "was trained with model" in refused(other, capsys)


def test_names_the_package_that_it_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import text_data

    (tmp_path / "text.txt").write_text("A few words.")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(text_data.DataError, match="pip install mistral-common"):
        text_data.load_corpus([tmp_path / "text.txt"], 0.1, tmp_path, lambda done, total: None)


def test_text_too_short_is_refused(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    (workspace / "short.txt").write_text("A few words.")
    arguments = command(workspace, "short", 1, "--data", str(workspace / "short.txt"))
    assert "too few for one sequence of 32" in refused(arguments, capsys)


def test_the_minimal_script_agrees_with_logits() -> None:
    """What the README shows, run as it says."""
    script = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*script, str(EXAMPLES / "minimal.py")],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"loss ([\d.]+), with logits ([\d.]+); gradient off by (\S+)", done.stdout)
    assert found, done.stdout
    loss, expected, error = map(float, found.groups())
    assert loss == pytest.approx(expected, abs=1e-5)
    assert error < 1e-5
