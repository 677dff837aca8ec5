"""A test that cannot fail proves nothing: every known fault of such a loss, put into the code, turns a test red."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mutate import MUTATIONS, apply, copy_package
from selection import slow_too, some_of

SCRIPT = Path(__file__).with_name("mutate.py")
NAMES = [mutation.name for mutation in MUTATIONS]
ALWAYS = (
    "the input's gradient is not reduced",
    "the mean divides by the tokens, not by their class weights",
    "the first token's upstream gradient serves all",
    "the ranks' maxima are summed (gathered)",
    "padding is not masked",
    "the shard starts one row early",
    "the weight's gradient accumulates in bf16",
    "a label that is no id passes",
    "smoothing over the local vocabulary",
    "main_grad is overwritten",
    "no group means the default group",
    "a kept entry is not divided by its probability",
    "a shard hashes its own row numbers",
    "the target is sampled as well",
    "every replica draws alike",
    "a shard filters by its own log-sum-exp",
    "a tile is left out with a target in it",
)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    """The mutants, run by the script in a process of its own, which has to fork before it computes anything."""
    report = tmp_path_factory.mktemp("mutants") / "report.json"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(report), *(() if slow_too(request.config) else ALWAYS)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=870,
    )
    assert report.exists(), done.stdout + done.stderr
    return {result["name"]: result for result in json.loads(report.read_text())}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_unmutated_copy_is_green(outcomes: dict[str, dict]) -> None:
    assert outcomes["no mutation"]["status"] == 0, outcomes["no mutation"]["failed"]


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", some_of(NAMES, ALWAYS))
def test_mutant_turns_a_test_red(outcomes: dict[str, dict], name: str) -> None:
    assert outcomes[name]["status"] == 1, "the mutant survived, or could not be run"
    assert outcomes[name]["failed"], "no test failed by name"


def test_every_mutation_still_finds_its_place(tmp_path: Path) -> None:
    for number, mutation in enumerate(MUTATIONS):
        copy_package(tmp_path / str(number))
        apply(mutation, tmp_path / str(number))
