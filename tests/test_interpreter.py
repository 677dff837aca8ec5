"""Runs the kernels through Triton's interpreter, in processes of their own: the switch is read when Triton loads."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from selection import slow_too

HERE = Path(__file__).parent
AT_LEAST = {"triton": 50, "sampled": 52, "filtered": 19}
"""Cases in ``*_interpreter_cases.py`` that are not marked slow."""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kernels", AT_LEAST)
def test_under_the_interpreter(
    kernels: str, pytestconfig: pytest.Config, record_property: pytest.RecordProperty
) -> None:
    """The number of cases that ran is checked and reported: none of them may be skipped."""
    cases = HERE / f"{kernels}_interpreter_cases.py"
    chosen = ["--slow"] if slow_too(pytestconfig) else ["-m", "not slow"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, str(cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("CCE_TP_TEST_START", None)
    done = subprocess.run(
        command, env=environment, cwd=HERE.parent, capture_output=True, text=True, timeout=1170, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    assert "skipped" not in done.stdout.splitlines()[-1]
    assert int(counted[1]) >= AT_LEAST[kernels]
    record_property(f"{kernels}_interpreter_cases", int(counted[1]))
    print(f"Triton's interpreter: {counted[1]} cases passed")
