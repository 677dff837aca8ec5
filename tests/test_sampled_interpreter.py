"""Runs the sampled kernels through Triton's interpreter, in a process of its own: Triton reads the switch once."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).with_name("sampled_interpreter_cases.py")
AT_LEAST = 59


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.timeout(600)
def test_sampled_kernels_under_the_interpreter(record_property: pytest.RecordProperty) -> None:
    """The number of cases that ran is checked and reported: none of them may be skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("CCE_TP_TEST_START", None)
    done = subprocess.run(
        command, env=environment, cwd=CASES.parent.parent, capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted is not None
    assert "skipped" not in done.stdout.splitlines()[-1]
    assert int(counted[1]) >= AT_LEAST
    record_property("sampled_interpreter_cases", int(counted[1]))
    print(f"Triton's interpreter: {counted[1]} cases passed")
