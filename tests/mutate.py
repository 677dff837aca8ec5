"""Break the library on purpose, one small fault at a time, and see that a test turns red.

``python tests/mutate.py`` copies the package to a temporary folder, once as it is and once for every mutation, and runs
the tests that a mutation names against its copy. It prints a line each and exits with 1 if a mutant survived or the
unmutated copy failed. Every child is forked from this process, which has imported torch but computed nothing, so that
a mutant costs about two seconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import hypothesis  # noqa: F401  imported before the fork, like torch
import pytest
import torch.distributed.tensor  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
LOSS, COLLECTIVES = "cce_tp/loss.py", "cce_tp/collectives.py"
TOKENS = "cce_tp/kernels/tokens.py"
REFERENCE, FOLD = "cce_tp/kernels/reference.py", "cce_tp/kernels/fold.py"
SAMPLED = "cce_tp/kernels/sampled_reference.py"
FILTERED = "cce_tp/kernels/filtered_reference.py"


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: what is wrong.
        file: path in the copy, where ``kernels`` lies inside ``cce_tp``.
        old: source text, which must occur exactly once.
        new: what replaces it.
        tests: node ids, relative to ``tests``, of which one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """Outcome of the tests of one copy: pytest's exit status (0 green, 1 red), and the first test that failed."""

    name: str
    status: int
    failed: str
    seconds: float


_REDUCE = "self._pending.append(_transport.all_reduce(part, self._group, REDUCING, later=True))"
_UNBIASED = "test_sampled.py::test_unbiased_with_the_variance_of_the_formula[plain]"
_FILTERED = "test_filtered.py::test_option_alone[plain]"
_REPLICAS = "test_sampled.py::test_steps_and_replicas_draw_differently_and_ranks_of_a_group_alike"

MUTATIONS = (
    Mutation(
        "the input's gradient is not reduced",
        COLLECTIVES,
        "elif not self._group.is_single:",
        "elif self._group.is_single:",
        ("test_cases.py::test_b02_input_grad_is_summed_over_the_group[2]",),
    ),
    Mutation(
        "the input's gradient is reduced twice",
        COLLECTIVES,
        _REDUCE,
        f"_transport.all_reduce(part, self._group, REDUCING)\n            {_REDUCE}",
        ("test_cases.py::test_b02_input_grad_is_summed_over_the_group[2]",),
    ),
    Mutation(
        "the mean divides by all tokens, not by those with a target",
        TOKENS,
        "labels.weight.sum(), 1.0)",
        "float(target.numel()), 1.0)",
        ("test_cases.py::test_b10_ignored_labels[1]",),
    ),
    Mutation(
        "the mean divides by the tokens, not by their class weights",
        LOSS,
        "implementation.mean(call.rule, loss, target, class_weight)",
        "implementation.mean(call.rule, loss, target, None)",
        ("test_loss.py::test_option_alone[class weights-1]",),
    ),
    Mutation(
        "the upstream gradient is taken for 1",
        TOKENS,
        "u = torch.zeros_like(top) if u is None else u.float()",
        "u = torch.full_like(top, 1 / len(top))",
        ("test_cases.py::test_b19_upstream_is_a_factor[2.5-1]",),
    ),
    Mutation(
        "the first token's upstream gradient serves all",
        TOKENS,
        "u = torch.zeros_like(top) if u is None else u.float()",
        "u = torch.zeros_like(top) if u is None else u.float()[:1].expand_as(top)",
        ("test_cases.py::test_b20_upstream_per_token[contiguous-1]",),
    ),
    Mutation(
        "the ranks' maxima are summed (reduced)",
        COLLECTIVES,
        "_transport.all_reduce(top, group, COMBINING, dist.ReduceOp.MAX)",
        "_transport.all_reduce(top, group, COMBINING, dist.ReduceOp.SUM)",
        ("test_loss.py::test_a_common_offset_cancels[reduce-2]",),
    ),
    Mutation(
        "the ranks' maxima are summed (gathered)",
        FOLD,
        "top = parts.max.amax(dim=0)",
        "top = parts.max.sum(dim=0)",
        ("test_loss.py::test_a_common_offset_cancels[gather-2]",),
    ),
    Mutation(
        "padding is not masked",
        LOSS,
        "rows = self.softmax_rows\n        return LocalProblem(",
        "rows = self.shard.num_rows\n        return LocalProblem(",
        ("test_cases.py::test_b09_padding_of_the_vocabulary[1-False]",),
    ),
    Mutation(
        "the shard starts one row early",
        TOKENS,
        "torch.where(mine, target - rule.start, -1)",
        "torch.where(mine, target - rule.start + (rule.start > 0), -1)",
        ("test_cases.py::test_f0[2-dtype0]",),
    ),
    Mutation(
        "the owner of the last row does not know it",
        TOKENS,
        "(target < rule.stop)",
        "(target < rule.stop - 1)",
        ("test_cases.py::test_b01_off_shard_labels[2]",),
    ),
    Mutation(
        "the input's gradient accumulates in bf16",
        REFERENCE,
        "input_grad[block].addmm_(g, rows)",
        "input_grad[block] = input_grad[block].addmm(g, rows).bfloat16().float()",
        ("test_cases.py::test_b02_input_grad_is_summed_over_the_group[2]",),
    ),
    Mutation(
        "the weight's gradient accumulates in bf16",
        REFERENCE,
        "weight_grad.addmm_(g.T, torch.where(active, tokens, 0.0))",
        "weight_grad = weight_grad.addmm(g.T, torch.where(active, tokens, 0.0)).bfloat16().float()",
        ("test_cases.py::test_b26_weight_grad_accumulates_in_fp32",),
    ),
    Mutation(
        "ignored labels are clamped to row 0",
        TOKENS,
        "active = target != rule.ignored",
        "active, target = torch.ones_like(target, dtype=torch.bool), target.clamp_min(0)",
        ("test_cases.py::test_b10_ignored_labels[1]",),
    ),
    Mutation(
        "a label that is no id passes",
        TOKENS,
        'values.masked_fill(labels.invalid, float("nan")) if rule.nan_unknown else values',
        "values",
        ("test_cases.py::test_b06_bad_label_without_validation_is_nan_in_its_row_only[1-32]",),
    ),
    Mutation(
        "an ignored token's NaN reaches the weight's gradient",
        REFERENCE,
        "weight_grad.addmm_(g.T, torch.where(active, tokens, 0.0))",
        "weight_grad.addmm_(g.T, tokens)",
        ("test_loss.py::test_nothing_comes_from_an_ignored_row[1-nan]",),
    ),
    Mutation(
        "smoothing over the local vocabulary",
        TOKENS,
        "self.label_smoothing / self.vocab_size",
        "self.label_smoothing / (self.stop - self.start)",
        ("test_cases.py::test_b11_smoothing_over_the_whole_vocabulary[2]",),
    ),
    Mutation(
        "the softcap's slope is left out",
        REFERENCE,
        "if slope is not None:",
        "if slope is not None and False:",
        ("test_cases.py::test_b31_scale_then_softcap[options0-4.39975198-0.28241325-None-1]",),
    ),
    Mutation(
        "the z-loss contributes no gradient",
        TOKENS,
        "prob = prob + u * (2.0 * rule.z_loss) * (top + log_sum)",
        "prob = prob + 0.0",
        ("test_cases.py::test_b36_z_loss[1]",),
    ),
    Mutation(
        "the returned LSE contributes no gradient",
        TOKENS,
        "if h is not None:\n        prob = prob + h.float()",
        "if h is not None:\n        prob = prob + 0.0",
        ("test_cases.py::test_b36_returned_lse_is_differentiable[1]",),
    ),
    Mutation(
        "main_grad is overwritten",
        LOSS,
        "WeightGradBuffer(call.main_grad[: call.softmax_rows], accumulate=True)",
        "WeightGradBuffer(call.main_grad[: call.softmax_rows], accumulate=False)",
        ("test_loss.py::test_main_grad_accumulates_over_micro_batches",),
    ),
    Mutation(
        "no group means the default group",
        COLLECTIVES,
        "if group is None:\n        return SINGLE",
        "if group is None:\n        group = dist.group.WORLD",
        ("test_cases.py::test_b12_no_group_is_a_single_shard",),
    ),
    Mutation(
        "the sequence's gradient goes to the next rank",
        COLLECTIVES,
        "return total[self._group.rank * length : (self._group.rank + 1) * length]",
        "return total.roll(length, 0)[self._group.rank * length : (self._group.rank + 1) * length]",
        ("test_cases.py::test_b39_sequence_parallel",),
    ),
    Mutation(
        "a kept entry is not divided by its probability",
        SAMPLED,
        "1.0 / (threshold[token, row] - 1.0)",
        "torch.ones_like(threshold[token, row])",
        (_UNBIASED,),
    ),
    Mutation(
        "a shard hashes its own row numbers",
        SAMPLED,
        "torch.arange(problem.num_rows, device=device) + plan.first_id",
        "torch.arange(problem.num_rows, device=device)",
        ("test_sampled.py::test_the_same_entries_at_every_group_size[2-equal]",),
    ),
    Mutation(
        "the target is sampled as well",
        SAMPLED,
        "kept &= problem.target[block, None] != torch.arange(slab.start, slab.stop, device=device)",
        "pass",
        (_UNBIASED,),
    ),
    Mutation(
        "a thinned list is not scaled up",
        SAMPLED,
        "entries.factor * (count / budget.clamp(min=1)).float()[entries.tokens]",
        "entries.factor",
        ("test_sampled.py::test_unbiased_under_bounded_lists[one hot]",),
    ),
    Mutation(
        "every step draws alike",
        "cce_tp/sampler.py",
        "counter * _STEP + _hash",
        "counter * 0 + _hash",
        ("test_sampled.py::test_the_state_survives_a_checkpoint", _REPLICAS),
    ),
    Mutation(
        "every replica draws alike",
        "cce_tp/sampler.py",
        "_hash(self._seed, _identity(group))",
        "_hash(self._seed)",
        (_REPLICAS,),
    ),
    Mutation(
        "sampled is silently exact",
        LOSS,
        "samples = isinstance(arguments.options.mode, Sampled) and torch.is_grad_enabled()",
        "samples = False",
        (_UNBIASED,),
    ),
    Mutation(
        "a shard filters by its own log-sum-exp",
        LOSS,
        "filtering.tile_map(ctx.plan, problem, peaks, made.lse)",
        "filtering.tile_map(ctx.plan, problem, peaks, (problem.input @ problem.weight.T).logsumexp(1))",
        ("test_filtered.py::test_b32_tiles_of_targets_only[True-2]",),
    ),
    Mutation(
        "a tile is left out with a target in it",
        FILTERED,
        "counts |= inside",
        "counts |= False & inside",
        ("test_filtered.py::test_b32_tiles_of_targets_only[False-1]",),
    ),
    Mutation(
        "a tile is kept if one entry is below eps",
        FILTERED,
        "(p >= plan.eps) & active[:, None]",
        "(p < plan.eps) & active[:, None]",
        (_FILTERED,),
    ),
    Mutation(
        "what is left out takes the smoothing with it",
        FILTERED,
        "smoothing = _Smoothing.of(problem, logit_grad)",
        "smoothing = None",
        ("test_filtered.py::test_option_alone[smoothing]",),
    ),
    Mutation(
        "the weight's gradient comes back sorted",
        FILTERED,
        "_store(request.weight, rows, weight_grad)",
        "_store(request.weight, torch.arange(slab.start, slab.stop), weight_grad)",
        (_FILTERED,),
    ),
    Mutation(
        "filtered is silently exact",
        LOSS,
        "filters = isinstance(arguments.options.mode, Filtered) and torch.is_grad_enabled()",
        "filters = False",
        (_FILTERED,),
    ),
)


def copy_package(destination: Path) -> None:
    """The package as an installation lays it out: ``kernels`` and ``launch`` inside ``cce_tp``."""
    unwanted = shutil.ignore_patterns("__pycache__", "kernels", "launch")
    shutil.copytree(ROOT / "cce_tp", destination / "cce_tp", ignore=unwanted)
    for name in ("kernels", "launch"):
        shutil.copytree(ROOT / name, destination / "cce_tp" / name, ignore=shutil.ignore_patterns("__pycache__"))


def apply(mutation: Mutation, folder: Path) -> None:
    """Make the fault in a copy of the package.

    Raises:
        ValueError: the source no longer holds the text exactly once; the mutation has to follow the code.
    """
    path = folder / mutation.file
    source = path.read_text()
    if source.count(mutation.old) != 1:
        raise ValueError(f"{mutation.name}: {mutation.file} holds {source.count(mutation.old)} times\n{mutation.old}")
    path.write_text(source.replace(mutation.old, mutation.new))


def _run_tests(folder: Path, tests: tuple[str, ...], log: Path) -> int:
    """In a forked child: the tests against the package in ``folder``; does not return."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ["CCE_TP_TEST_START"] = "fork"
    os.environ["CCE_TP_TEST_TIMEOUT"] = "40"
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    import cce_tp

    assert str(folder) in str(cce_tp.__file__)
    arguments = [str(ROOT / "tests" / test) for test in tests]
    status = pytest.main([*arguments, "-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)])
    sys.stdout.flush()
    os._exit(int(status))


def run(name: str, mutation: Mutation | None, tests: tuple[str, ...], work: Path) -> Result:
    """Copy, break, and test in a child."""
    started = time.monotonic()
    folder = Path(tempfile.mkdtemp(dir=work))
    copy_package(folder)
    if mutation is not None:
        apply(mutation, folder)
    log = folder / "log"
    child = os.fork()
    if child == 0:
        try:
            _run_tests(folder, tests, log)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            os._exit(99)
    _, wait_status = os.waitpid(child, 0)
    text = log.read_text(errors="replace")
    failed = re.search(r"^FAILED \S*tests/(.+?)(?: - .*)?$", text, re.MULTILINE)
    status = os.waitstatus_to_exitcode(wait_status)
    if status not in (0, 1):
        print(text[-3000:], file=sys.stderr)
    return Result(name, status, failed.group(1) if failed else "", time.monotonic() - started)


def main() -> int:
    """All of them; ``--json FILE`` writes the results, other arguments select mutations by a part of the name."""
    arguments = sys.argv[1:]
    report = Path(arguments.pop(arguments.index("--json") + 1)) if "--json" in arguments else None
    wanted = [argument for argument in arguments if argument != "--json"]
    chosen = [m for m in MUTATIONS if not wanted or any(word in m.name for word in wanted)]
    every_test = tuple(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
    with tempfile.TemporaryDirectory(prefix="cce_tp_mutants_") as work:
        results = [run("no mutation", None, every_test, Path(work))]
        print(f"{'green' if results[0].status == 0 else 'RED':>8}  no mutation  {results[0].failed}", flush=True)
        for mutation in chosen:
            result = run(mutation.name, mutation, mutation.tests, Path(work))
            results.append(result)
            verdict = {0: "SURVIVED", 1: "red"}.get(result.status, f"BROKEN {result.status}")
            print(f"{verdict:>8}  {mutation.name}: {result.failed} ({result.seconds:.1f} s)", flush=True)
    if report is not None:
        report.write_text(json.dumps([asdict(result) for result in results]))
    return int(results[0].status != 0 or any(result.status != 1 for result in results[1:]))


if __name__ == "__main__":
    sys.exit(main())
