"""The launch commands on GPUs: memory against ``plan``, times against the cost model, shared caches, the doctor."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("rich")
pytest.importorskip("triton")

import cce_tp
from cce_tp.launch import cost_model, density, plan
from cce_tp.launch.keep_rate import PAPER_EPS as FILTER_EPS
from cce_tp.launch.keep_rate import SAMPLER_EPS
from cce_tp.launch.model_files import Model

SHAPES = [(8192, 256000, 2304), (8192, 32000, 4096), (8184, 49152, 576)]
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ordinary(e: torch.Tensor, c: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((e @ c.T).float(), target)


def ours(mode: cce_tp.Exact | cce_tp.Sampled) -> Loss:
    def loss(e: torch.Tensor, c: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        value = cce_tp.linear_cross_entropy(e, c, target, backward=mode)
        assert isinstance(value, torch.Tensor)
        return value

    return loss


MEASURED: dict[str, tuple[Callable[[plan.Shape], int], Loss, bool]] = {
    "ordinary": (plan.ordinary, ordinary, True),
    "exact": (plan.exact, ours(cce_tp.Exact()), True),
    "sampled": (plan.sampled, ours(cce_tp.Sampled()), True),
    "loss alone": (plan.loss_alone, ours(cce_tp.Exact()), False),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", MEASURED)
def test_plan_is_what_a_gpu_allocates(name: str, shape: tuple[int, int, int]) -> None:
    """The peak above E, C and the labels, of loss and gradients."""
    planned, loss, with_gradients = MEASURED[name]
    tokens, rows, hidden = shape
    layer = plan.Shape(*shape, tp=1, dtype=torch.bfloat16, eps=2.0**-8)
    expected = planned(layer)
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 1.3 * (expected + layer.inputs):
        pytest.skip(f"needs {(expected + layer.inputs) / 2**30:.0f} GiB of free memory")
    generator = torch.Generator("cuda").manual_seed(0)
    e = torch.randn(tokens, hidden, generator=generator, device="cuda", dtype=torch.bfloat16)
    c = torch.randn(rows, hidden, generator=generator, device="cuda", dtype=torch.bfloat16) * (8.0 / hidden) ** 0.5
    target = torch.randint(rows, (tokens,), generator=generator, device="cuda")
    e.requires_grad_(with_gradients)
    c.requires_grad_(with_gradients)

    def step() -> None:
        e.grad = c.grad = None
        value = loss(e, c, target)
        if with_gradients:
            value.backward()

    step()  # compiles, and makes the library's workspace
    e.grad = c.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert expected == pytest.approx(peak, rel=0.05), f"{name}: {peak / 2**20:.1f} MiB"
    if name == "exact":
        assert expected - layer.gradients == pytest.approx(peak - layer.gradients, rel=0.05)


@pytest.fixture(scope="module")
def model() -> Model:
    """Logits of a peaked softmax, whose targets are drawn from it."""
    generator = torch.Generator("cuda").manual_seed(1)
    tokens, rows, hidden = 8184, 49152, 576
    e = torch.randn(tokens, hidden, generator=generator, device="cuda").bfloat16()
    c = (torch.randn(rows, hidden, generator=generator, device="cuda") * 5.0 / hidden**0.5).bfloat16()
    parts = [(part @ c.T).float().softmax(1).multinomial(1, generator=generator)[:, 0] for part in e.split(1024)]
    return Model(e.cpu(), c.cpu(), torch.cat(parts).cpu())


@pytest.mark.gpu
def test_times_are_predicted(model: Model) -> None:
    """Within 15 % of the modes themselves."""
    costs = cost_model.by_measuring(model, FILTER_EPS, SAMPLER_EPS)
    step = cost_model.Step(model, "cuda", len(model.target))
    tiles = step.keep_rate(cost_model.filtered(FILTER_EPS))
    entries = {eps: step.keep_rate(cost_model.sampled(eps)) * len(model.weight) for eps in SAMPLER_EPS}
    predicted = cost_model.predict(costs, {FILTER_EPS: tiles}, entries)
    assert predicted.keys() == costs.measured.keys()
    off = {name: predicted[name] / time - 1 for name, time in costs.measured.items()}
    assert max(map(abs, off.values())) <= 0.15, (off, costs)


@pytest.mark.gpu
def test_what_keep_rate_counts_is_what_the_kernels_keep(model: Model) -> None:
    few = Model(model.hidden[:1024], model.weight, model.target[:1024])
    found = density.count(few, few.weight.float(), (1.0,), FILTER_EPS, SAMPLER_EPS, lambda: None)
    step = cost_model.Step(few, "cuda", 1024)
    for state in found.sampler:
        kept = step.keep_rate(cost_model.sampled(state.eps)) * len(few.weight)
        assert float(torch.cat(state.kept).mean()) == pytest.approx(kept, rel=0.05), state.eps
    counted = float(density.orders(found, found.at[0])[1].tiles(found.at[0].hits).float().mean())
    assert counted == pytest.approx(step.keep_rate(cost_model.filtered(FILTER_EPS)), abs=0.03)


# -- one empty cache of compiled kernels for many processes


def _compile_again_and_again(number: int, folder: str, rounds: int, barrier: Any, answers: Any) -> None:
    """Every round in a new folder, at the same moment as the others."""
    from cce_tp.kernels import exact, forward, matmul

    kernels = (
        forward._partials_kernel, forward._fold_kernel,
        exact._logit_grad_kernel, exact._select_tokens_kernel, matmul._product_kernel,
    )  # fmt: skip
    generator = torch.Generator("cuda").manual_seed(2)
    e = torch.randn(70, 64, generator=generator, device="cuda").requires_grad_()
    c = torch.randn(300, 64, generator=generator, device="cuda").requires_grad_()
    target = torch.randint(300, (70,), generator=generator, device="cuda")
    for i in range(rounds):
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/{i}"
        for kernel in kernels:
            kernel.device_caches.clear()
        barrier.wait()
        loss = cce_tp.linear_cross_entropy(e, c, target, implementation="triton")
        assert isinstance(loss, torch.Tensor)
        grad_e, grad_c = torch.autograd.grad(loss, (e, c))
        answers.put((number, i, float(loss), float(grad_e.norm()), float(grad_c.norm())))


@pytest.mark.gpu
def test_processes_share_an_empty_cache(tmp_path: Path) -> None:
    """B46: eight processes compile the same kernels into one empty folder, twenty times."""
    processes, rounds = 8, 20
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(processes, timeout=200), context.Queue()
    arguments = (str(tmp_path), rounds, barrier, answers)
    running = [
        context.Process(target=_compile_again_and_again, args=(number, *arguments)) for number in range(processes)
    ]
    for process in running:
        process.start()
    try:
        found = [answers.get(timeout=200) for _ in range(processes * rounds)]
    finally:
        for process in running:
            process.join(timeout=10)
            process.kill()
    assert [process.exitcode for process in running] == [0] * processes
    assert len({values for _, _, *numbers in found for values in [tuple(numbers)]}) == 1
    assert all(any((tmp_path / str(i)).iterdir()) for i in range(rounds))


# -- the doctor


@pytest.mark.multigpu
def test_doctor_over_nccl(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    gpus = min(torch.cuda.device_count(), 4)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
    done = subprocess.run(
        [*launch, "-m", "cce_tp.launch", "doctor", "--json", str(report)], capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(report.read_text())
    assert results["ok"]
    assert len(results["ranks"]) == gpus
    assert {rank["device"].split(":")[1] for rank in results["ranks"]} == {str(gpu) for gpu in range(gpus)}
    assert {finding["check"].split(", ")[-1] for finding in results["findings"]} >= {"float32", "bfloat16"}
    assert [link["bytes"] for link in results["links"]] == [96 * 1024, 64 * 2**20]
