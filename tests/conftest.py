"""Markers, skips, the processes that distributed tests share, and the count of what ran where."""

from __future__ import annotations

import importlib.util
import os
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import quick_interpreter
import torch
from distributed import Launched, Pool, divisors
from selection import slow_too

torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "cce_tp",
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=int(os.environ.get("CCE_TP_TEST_EXAMPLES", "150")),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("cce_tp")
if os.environ.get("TRITON_INTERPRET") == "1":
    quick_interpreter.patch_once_a_launch()

GPUS = torch.cuda.device_count()
LAUNCHED = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
"""Whether a launcher has started several processes that run the tests together."""
_real_kernel_cases: Counter[str] = Counter()
_skipped: Counter[str] = Counter()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Fork at once where the pool is to be forked from this very process, before anything has run in it."""
    if os.environ.get("CCE_TP_TEST_START") == "fork":
        session.config.stash[_POOL] = pool = Pool(4)
        pool.start()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _POOL in session.config.stash:
        session.config.stash[_POOL].stop()


_POOL: pytest.StashKey[Pool] = pytest.StashKey()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Four gloo processes on the CPU, kept for the whole session."""
    shared = request.config.stash.get(_POOL, None) or Pool(4)
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def hf_pool() -> Iterator[Pool]:
    """Four gloo processes that have transformers, and DeepSpeed where it is installed; for the tests of one file, since
    DeepSpeed's processes are busy even when nothing is asked of them."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    wanted = ("transformers.models.llama.modeling_llama", "transformers.models.gemma2.modeling_gemma2", "deepspeed")
    preload = tuple(name for name in wanted if importlib.util.find_spec(name.split(".")[0]) is not None)
    shared = Pool(4, sizes=(2, 4), preload=preload)
    yield shared
    shared.stop()


@pytest.fixture(scope="session")
def gpu_pool(request: pytest.FixtureRequest) -> Iterator[Pool | Launched]:
    """One NCCL process a GPU, up to eight; or with ``--gloo`` four processes on the CPU. Under torchrun, its processes,
    of which this is one."""
    on_cpu = request.config.getoption("--gloo")
    size = 4 if on_cpu else min(8, GPUS)
    if LAUNCHED:
        shared: Pool | Launched = Launched("gloo" if on_cpu else "nccl")
    else:
        shared = Pool(size, backend="gloo" if on_cpu else "nccl", sizes=divisors(size))
    yield shared
    shared.stop()


@pytest.fixture(scope="module")
def one_queue_pool() -> Iterator[Pool]:
    """Two NCCL processes whose streams share one hardware queue."""
    shared = Pool(2, backend="nccl", sizes=(1, 2), environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    yield shared
    shared.stop()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Under a launcher, the first process alone speaks."""
    if LAUNCHED and int(os.environ["RANK"]) > 0:
        reporter = config.pluginmanager.getplugin("terminalreporter")
        config.pluginmanager.unregister(reporter)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gloo", action="store_true", help="tests of several GPUs run on four CPU processes, where they can"
    )
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow (or CCE_TP_TEST_SLOW=1)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    thorough = slow_too(config)
    for item in items:
        if item.get_closest_marker("slow") and not thorough:
            item.add_marker(pytest.mark.skip(reason="slow: pass --slow"))
        if {"pool", "hf_pool"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.distributed)
        multi = item.get_closest_marker("multigpu")
        on_cpu = multi and config.getoption("--gloo") and "gpu_pool" in getattr(item, "fixturenames", ())
        if multi and LAUNCHED and "gpu_pool" not in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="starts processes of its own: run it without a launcher"))
        elif multi and GPUS < 2 and not on_cpu:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA devices, found {GPUS}"))
        elif item.get_closest_marker("gpu") and GPUS < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if hasattr(config, "workerinput"):  # one of several processes of pytest: none of them shall end with a long test
        items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "slow" in report.keywords and report.skipped:
        _skipped["slow"] += 1
    for mark in ("gpu", "multigpu"):
        if mark in report.keywords and not (mark == "multigpu" and GPUS < 2 and not report.skipped):  # --gloo
            if report.when == "call" and report.passed:
                _real_kernel_cases[mark] += 1
            elif report.skipped:
                _skipped[mark] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say apart how many cases ran on real kernels: a green run without any proves nothing about them (case B45)."""
    ran = ", ".join(f"{_real_kernel_cases[mark]} {mark}" for mark in ("gpu", "multigpu"))
    skipped = ", ".join(f"{_skipped[mark]} {mark}" for mark in ("gpu", "multigpu"))
    terminalreporter.write_line(f"real kernels: passed {ran}; skipped {skipped}; {GPUS} CUDA devices")
    if _skipped["slow"]:
        terminalreporter.write_line(f"slow: skipped {_skipped['slow']} (--slow runs them)")
