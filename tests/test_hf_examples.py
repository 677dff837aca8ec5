"""The Hugging Face and DeepSpeed examples, shrunk, on the CPU."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from distributed import free_port

for _name in ("transformers", "deepspeed", "accelerate"):
    if importlib.util.find_spec(_name) is None:
        pytest.skip(f"needs {_name}", allow_module_level=True)

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TINY = ["--device", "cpu", "--dim", "16", "--layers", "1", "--seq-len", "32", "--steps", "8", "--eval-every", "4"]
LIMIT = 150
LAUNCHERS = {
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "deepspeed": ["-m", "deepspeed.launcher.runner", "--num_gpus", "2"],
}

pytestmark = pytest.mark.timeout(2 * LIMIT)


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some text in it, in which all runs share their tokens."""
    folder = tmp_path_factory.mktemp("hf_examples")
    (folder / "text").mkdir()
    for module in ("textwrap.py", "shlex.py", "heapq.py", "bisect.py"):
        shutil.copy(Path(sysconfig.get_path("stdlib")) / module, folder / "text")
    return folder


def pretrain(workspace: Path, out: str, launcher: str, config: str, *arguments: str) -> tuple[list[dict], dict]:
    """The log and the summary of a run."""
    paths = ["--data", str(workspace / "text"), "--cache", str(workspace / "tokens"), "--out", str(workspace / out)]
    if "--random" in arguments:
        paths = paths[-2:]
    start = [*LAUNCHERS[launcher], *(["--master_port", str(free_port())] if launcher == "deepspeed" else [])]
    script = [str(EXAMPLES / "pretrain_deepspeed.py"), "--config", config, *TINY, *paths, *arguments]
    done = subprocess.run(
        [sys.executable, *start, *script],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        cwd=workspace,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    log = [json.loads(line) for line in (workspace / out / "log.jsonl").read_text().splitlines()]
    return log, json.loads((workspace / out / "run.json").read_text())


def check_same(log: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [line["step"] for line in log] == [line["step"] for line in expected] == list(range(9))
    for mine, theirs in zip(log, expected, strict=True):
        for name in ("loss", "held_out_loss"):
            assert (name in mine) == (name in theirs)
            if name in mine:
                assert mine[name] == pytest.approx(theirs[name], abs=2e-4)


@pytest.mark.slow
def test_random_ids_under_autotp(workspace: Path) -> None:
    arguments = ["--random", "--vocab-size", "1001"]
    log, summary = pretrain(workspace, "random", "torchrun", "autotp.json", *arguments)
    assert (log[0]["held_out_loss"], log[1]["loss"]) == pytest.approx((6.909, 6.909), abs=0.05)  # ln 1001
    assert summary["name"] == "autotp cce exact"
    assert summary["peak_memory_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "launcher"),
    [("zero1.json", "torchrun"), ("zero3.json", "torchrun"), ("autotp.json", "torchrun"), ("autotp.json", "deepspeed")],
)
def test_pretraining_gives_the_stock_curve(workspace: Path, config: str, launcher: str) -> None:
    name = f"{config}-{launcher}"
    log, _ = pretrain(workspace, name, launcher, config, "--tied")
    expected, _ = pretrain(workspace, f"{name}-stock", "torchrun", config, "--tied", "--loss", "stock")
    check_same(log, expected)
    assert log[0]["held_out_loss"] == pytest.approx(11.78, abs=0.05)  # ln 131072


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "nowhere.json"], "--config nowhere.json does not exist"),
        (["--config", "zero1.json", "--loss", "stock", "--backward", "sampled"], "--backward sampled belongs to"),
        (["--config", "zero1.json", "--dim", "18"], "--dim 18 is not an even multiple of 4 heads"),
        (["--config", "list.json"], "--config list.json holds a list, expected an object"),
        (["--config", "broken.json"], "--config broken.json is no JSON"),
        ([], "the following arguments are required: --config"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    import pretrain_deepspeed

    with pytest.raises(SystemExit) as refused:
        pretrain_deepspeed.main(["--device", "cpu", *arguments])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def _write_model(folder: Path, text: Path) -> None:
    """A tiny Llama and a tokenizer of the text's bytes, as ``save_pretrained`` leaves them."""
    import hf_models as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    transformers = hf.quiet()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<end>"], show_progress=False)
    tokenizer.train([str(path) for path in sorted(text.iterdir())], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.save_pretrained(folder)
    hf.build("Llama", vocab_size=len(fast), max_position_embeddings=64).save_pretrained(folder)


def test_finetuning_gives_the_stock_result(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import finetune_transformers

    _write_model(workspace / "model", workspace / "text")
    said = []
    for loss in ("cce", "stock"):
        arguments = ["--model", str(workspace / "model"), "--data", str(workspace / "text"), "--seq-len", "48"]
        arguments += ["--steps", "4", "--lr", "1e-2", "--accumulation", "2", "--device", "cpu", "--loss", loss]
        assert finetune_transformers.main([*arguments, "--out", str(workspace / f"tuned-{loss}")]) == 0
        said.append(capsys.readouterr().out.splitlines()[-1])
    numbers = [[float(word.rstrip(";")) for word in line.split()[2:5:2]] for line in said]
    assert numbers[0] == pytest.approx(numbers[1], abs=2e-4)
    assert numbers[0][1] < numbers[0][0] - 0.1
    assert "; 8 losses without logits, 0 with" in said[0]
    assert (workspace / "tuned-cce" / "model.safetensors").exists()
    with pytest.raises(SystemExit):
        finetune_transformers.main(["--model", str(workspace / "nowhere"), "--device", "cpu"])
    assert "error: --model" in capsys.readouterr().err
