"""The study of training with sampled gradients, shrunk to seconds on the CPU."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from selection import some_of

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
sys.path.append(str(EXAMPLES))
import study  # noqa: E402
import study_model  # noqa: E402
import study_noise  # noqa: E402
import study_plots  # noqa: E402
import study_pool  # noqa: E402
import study_summary  # noqa: E402
import study_train  # noqa: E402
import text_data  # noqa: E402

from cce_tp.options import auto_eps  # noqa: E402

VOCABULARY = 1501  # more than the rows that the sampled mode computes exactly


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of which the frequent ids are half the targets and many never occur."""
    folder = tmp_path_factory.mktemp("tokens")
    weights = 1.0 / np.arange(1, VOCABULARY + 1)
    for part, count in (("train", 4000), ("held-out", 1500)):
        drawn = np.random.default_rng(count).choice(VOCABULARY, count, p=weights / weights.sum())
        np.save(folder / f"key.{part}.npy", drawn.astype(np.int32))
    (folder / "key.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return folder


@pytest.fixture
def trained_head(tmp_path: Path) -> list[str]:
    """Options: a classifier and hidden states, as ``finetune`` reads them."""
    rng = np.random.default_rng(5)
    rows, dim, count = 1203, 64, 400
    quantized = rng.integers(-127, 128, (rows, dim), dtype=np.int8)
    scale = np.full((rows, dim // 32), 0.002, dtype=np.float16)
    hidden = torch.from_numpy(rng.normal(size=(count, dim))).bfloat16().view(torch.int16).numpy()
    np.savez(tmp_path / "head.npz", q=quantized, scale=scale)
    np.savez(tmp_path / "hidden.npz", e_bf16=hidden, targets=rng.integers(rows, size=count, dtype=np.int32))
    return ["--head", str(tmp_path / "head.npz"), "--hidden", str(tmp_path / "hidden.npz")]


def run_command(name: str, out: Path, *arguments: str) -> list[study_pool.Row]:
    """Run a subcommand in this process; the rows of its table."""
    assert study.main([name, "--preset", "tiny", "--device", "cpu", "--out", str(out), *arguments]) == 0
    return study_pool.read_table(out / f"{name.replace('-', '_')}.csv")


def test_finetune_and_its_picture(trained_head: list[str], tmp_path: Path) -> None:
    rows = run_command("finetune", tmp_path, *trained_head, "--no-plots")
    assert {row["mode"] for row in rows} >= {"torch", "exact", "filtered", "sampled-2^-12", "sampled-2^-4"}
    start = {row["val_loss"] for row in rows if row["step"] == 0}
    assert max(start) - min(start) < 1e-4, "all modes start from the same head and measure the same loss"
    exact = [row["val_loss"] for row in rows if row["mode"] == "exact"]
    torch_loss = [row["val_loss"] for row in rows if row["mode"] == "torch"]
    assert exact == pytest.approx(torch_loss, abs=1e-4)
    assert exact[-1] != exact[0]

    written = {path.name for path in study_plots.draw_all(tmp_path)}
    assert "summary.md" in written
    assert "| exact | " in (tmp_path / "summary.md").read_text()
    if "finetune.png" in written:
        assert (tmp_path / "finetune.png").read_bytes().startswith(b"\x89PNG")


def test_committed_results_bear_out_the_rule() -> None:
    """With eps="auto", or the next larger eps that was measured, rare rows come to nine tenths of exact's norm."""
    rows = study_pool.read_table(EXAMPLES / "study_results" / "train.csv")
    for group in study_summary.groups_of(rows):
        members = study_summary.of_group(rows, group)
        eps = {study_plots.eps_of(row["mode"]): row["mode"] for row in members if row["mode"].startswith("sampled")}
        chosen = min(value for value in eps if value >= auto_eps(int(group[1])))
        norms = study_summary.quotients(members, eps[chosen], "norm never")[max(row["step"] for row in members)]
        assert min(norms) > 0.89
        largest = study_summary.quotients(members, eps[max(eps)], "norm never")[max(row["step"] for row in members)]
        assert max(largest) < min(norms), "and it is eps that does it"


def test_statistics_of_seeds() -> None:
    def row(mode: str, seed: int, step: int, loss: float, ms: float) -> study_pool.Row:
        return {"mode": mode, "seed": seed, "step": step, "val_loss": loss, "step_ms": ms}

    rows = [row("exact", 0, 2, 3.0, 9.0), row("exact", 0, 6, 2.0, 5.0), row("exact", 1, 6, 4.0, 1.0)]
    rows += [row("torch", 1, 6, 5.0, 1.0), row("torch", 0, 6, 2.5, 1.0), row("torch", 2, 6, 9.0, 1.0)]
    assert study_summary.differences(rows, "torch", "val_loss") == {6: [1.0, 0.5]}, "by seed; the third has no partner"
    assert study_summary.quotients(rows, "torch", "val_loss") == {6: [1.25, 1.25]}
    assert study_summary.seed_spread(rows, "val_loss")[6] == pytest.approx(math.sqrt(2))
    assert study_summary.later_ms(study_summary.first_run(rows, "exact")) == pytest.approx((6 * 5 - 2 * 9) / 4)
    assert study_summary.cell(math.nan, ".1f") == "–"


@pytest.mark.slow
def test_train(tokens: Path, tmp_path: Path) -> None:
    rows = run_command("train", tmp_path, "--tokens", str(tokens))
    runs = {(row["mode"], row["seed"]) for row in rows}
    assert {mode for mode, _ in runs} >= {*study_model.MODES} - {"megatron"}
    last = max(row["step"] for row in rows)
    losses = {(row["mode"], row["seed"]): row["val_loss"] for row in rows if row["step"] == last}
    start = {row["seed"]: row["val_loss"] for row in rows if row["step"] == 0}
    assert all(loss < start[seed] - 0.1 for (_, seed), loss in losses.items()), "every run learns"
    assert losses["torch", 0] == pytest.approx(losses["exact", 0], abs=1e-3)
    assert losses["sampled-2^-12", 0] == pytest.approx(losses["exact", 0], abs=5e-3)
    assert losses["exact", 0] != losses["exact", 1]
    entries = {row["mode"]: row["entries_per_token"] for row in rows if row["step"] == last}
    assert entries["sampled-2^-4"] < entries["sampled-2^-8"] < entries["exact"] == VOCABULARY


@pytest.mark.slow
def test_noise(tokens: Path, tmp_path: Path) -> None:
    """The sampling variance falls with eps and, as the mini-batch's, with the tokens of a batch."""
    rows = run_command("noise", tmp_path, "--tokens", str(tokens))
    last = max(row["step"] for row in rows)
    for part in ("hidden", "trunk", "classifier"):
        found = {
            (row["batch_tokens"], row["mode"]): row["sampling_variance"]
            for row in rows
            if (row["part"], row["step"]) == (part, last)
        }
        assert 0 < found[64, "sampled-2^-12"] < found[64, "sampled-2^-8"] < found[64, "sampled-2^-4"]
        assert found[128, "sampled-2^-4"] < 0.8 * found[64, "sampled-2^-4"]


@pytest.mark.slow
def test_adam_tail(tokens: Path, tmp_path: Path) -> None:
    """A rare row moves less the fewer entries it gets; as those are without bias, not less than Adam's rule says."""
    rows = run_command("adam-tail", tmp_path, "--tokens", str(tokens))
    factors = {}
    for row in (row for row in rows if row["rows"] == "target never"):
        factor = factors[row["batch_tokens"], row["mode"]] = row["drift"] / row["drift_exact"]
        if row["mode"] == "exact":
            assert factor == 1
        else:
            assert 1 / math.sqrt(1 + 1 / row["entries_per_step"]) - 0.05 < factor < 1.02
    assert factors[32, "sampled-2^-4"] < 0.9 * factors[128, "sampled-2^-4"]
    assert factors[32, "sampled-2^-4"] < 0.9 * factors[32, "sampled-2^-8"]


def test_steps_fit_the_time() -> None:
    seeds = {"exact": 2, "torch": 1}
    group = study_train.Group("tiny", 128, 100, 1.0, seeds)
    costs = {
        ("tiny", 128, "exact"): study_train.Cost(step=0.1, rest=1.0),
        ("tiny", 128, "torch"): study_train.Cost(step=0.3, rest=2.0),
    }
    assert study_train.shortening([group], costs, 1000.0) == 1.0
    half = study_train.shortening([group], costs, (4.0 + 25.0) / 0.9)
    assert half == pytest.approx(0.5)
    assert study_train.shortening([group], costs, 1.0) == 0.0
    assert len(group.recipes(50)) == 3


def test_bands() -> None:
    band = study_model.band_of(torch.tensor([0, 1, 9, 10, 999, 1000, 10_000, 10**7]))
    assert band.tolist() == [0, 1, 1, 2, 3, 4, 5, 5]
    means = study_model.per_band(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 1])).tolist()
    assert means[:2] == [1.0, 3.0]
    assert all(math.isnan(value) for value in means[2:])


@pytest.mark.parametrize("mode", some_of(study_model.MODES, ["exact", "filtered-input", "sampled-2^-6"]))
def test_modes_are_what_they_say(mode: str) -> None:
    """Every mode's loss is the cross-entropy of the same logits."""
    if mode == "megatron" and not study_model.megatron_available():
        pytest.skip("megatron-core is not installed")
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 5, 16, generator=generator)
    weight = torch.randn(37, 16, generator=generator)
    target = torch.randint(37, (2, 5), generator=generator)
    loss = study_model.make_loss(mode, torch.device("cpu"))(hidden, weight, target)
    reference = torch.nn.functional.cross_entropy((hidden @ weight.T).flatten(0, 1), target.flatten())
    assert loss.item() == pytest.approx(reference.item(), rel=1e-5)
    with pytest.raises(ValueError, match="sampled-3"):
        study_model.make_loss("sampled-3", torch.device("cpu"))


def test_variance_of_batches() -> None:
    """Signal and variance are unbiased: known numbers come out."""
    generator = torch.Generator().manual_seed(1)
    band = torch.tensor([0, 1, 1])
    mean = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]])

    def draw() -> study_noise.Gradients:
        noise = torch.randn(3, 2, generator=generator)
        return study_noise.Gradients(torch.randn(4, 2, generator=generator), torch.ones(5), mean + noise)

    signal, variance = study_noise._signal_and_variance([draw() for _ in range(4000)], band)
    found = dict(zip(study_noise.PARTS, zip(signal.tolist(), variance.tolist(), strict=True), strict=True))
    assert found["classifier"] == (pytest.approx(25.0, abs=0.5), pytest.approx(6.0, abs=0.2))
    assert found["classifier never"] == (pytest.approx(9.0, abs=0.3), pytest.approx(2.0, abs=0.15))
    assert found["trunk"] == (pytest.approx(5.0), pytest.approx(0.0, abs=1e-9))
    assert found["hidden"] == (pytest.approx(0.0, abs=0.05), pytest.approx(8.0, abs=0.3))


def test_compressed_tokens(tokens: Path, tmp_path: Path) -> None:
    shutil.copytree(tokens, tmp_path, dirs_exist_ok=True)
    text_data.compress(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"key.json", "key.train.npy.xz", "key.held-out.npy.xz"}
    whole, packed = text_data.prepared_corpus(tokens), text_data.prepared_corpus(tmp_path)
    assert np.array_equal(packed.train, whole.train)
    assert np.array_equal(packed.held_out, whole.held_out)


FAILING_JOB = """
import torch, study_pool
def work(number):
    if number == 2:
        raise ValueError("two is refused")
    return number, str(study_pool.device())
if __name__ == "__main__":
    devices = [torch.device("meta", 0), torch.device("meta", 1)]
    for job, result in study_pool.run_jobs(work, [1, 2, 3], devices, what="test"):
        print(job, result)
"""


def test_folders_without_results_or_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text("[]")
    for arguments, message in (
        (["plots", "--out", str(tmp_path)], "holds none of the tables train.csv, noise.csv"),
        (["noise", "--out", str(tmp_path), "--preset", "tiny", "--tokens", str(tmp_path)], "names no vocab_size"),
    ):
        with pytest.raises(SystemExit) as stopped:
            study.main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_failing_job_is_named_and_the_others_are_done(tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(FAILING_JOB)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)])}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "jobs.py")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "1 (1, 'meta:" in done.stdout
    assert "3 (3, 'meta:" in done.stdout
    assert "1 of 3 jobs (test) failed:\n2: ValueError: two is refused" in done.stderr
