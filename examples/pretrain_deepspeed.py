"""Pre-train a Llama of Hugging Face's with DeepSpeed, by the model's own loss or by cce_tp's.

    torchrun --standalone --nproc_per_node 2 examples/pretrain_deepspeed.py --config zero1.json
    deepspeed --num_gpus 2 examples/pretrain_deepspeed.py --config autotp.json
    torchrun --standalone --nproc_per_node 2 examples/pretrain_deepspeed.py --config zero3.json --preset 1b --random

Everything but the loss is DeepSpeed's and follows from the configuration, a file or the name of one in
deepspeed_configs/: ZeRO's stage, AutoTP, accumulation, precision, optimizer. What --loss cce changes is one line,
``cce_tp.deepspeed.install(engine)``.

The run folder gets ``log.jsonl`` (a line a step) and ``run.json`` (the options, the median step and the peak memory),
which compare_runs.py puts side by side. On the CPU the precision is float32, whatever the configuration says.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import text_data
import torch
import torch.distributed as dist
from command_line import Parser, fail, fraction, not_negative, positive
from reporting import Log, Record, human, peak_memory
from text_data import Corpus, Windows
from torch import Tensor

import cce_tp
import cce_tp.deepspeed
from cce_tp.launch.runtime import Runtime, choose_device, discover, finalize, initialize

CONFIGS = Path(__file__).resolve().parent / "deepspeed_configs"
LOSSES = ("cce", "stock", "liger")


@dataclass(frozen=True)
class Preset:
    """A Llama and how long its sequences are."""

    dim: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    seq_len: int
    steps: int


PRESETS = {
    "tiny": Preset(dim=32, layers=2, heads=4, kv_heads=2, feed_forward=64, seq_len=64, steps=20),
    "small": Preset(dim=768, layers=12, heads=12, kv_heads=4, feed_forward=2048, seq_len=1024, steps=200),
    "1b": Preset(dim=2048, layers=16, heads=32, kv_heads=8, feed_forward=8192, seq_len=4096, steps=12),
}


@dataclass(frozen=True)
class Options(Preset):
    """The command line, presets filled in."""

    config: Path
    loss: str
    backward: str
    tied: bool
    vocab_size: int
    random: bool
    data: tuple[Path, ...]
    held_out: float
    cache: Path
    device: str
    seed: int
    eval_every: int
    eval_batches: int
    out: Path
    overwrite: bool


def make_parser() -> Parser:
    """All options, grouped."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    # The deepspeed launcher adds this to every command; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--config", type=Path, required=True, help="DeepSpeed's, a JSON file")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")

    group = parser.add_argument_group("loss")
    group.add_argument(
        "--loss",
        choices=LOSSES,
        default="cce",
        help="cce: no logits; stock: the model's own; liger: Liger's fused linear cross-entropy (default: cce)",
    )
    group.add_argument("--backward", choices=("exact", "sampled", "filtered"), default="exact", help="of --loss cce")

    group = parser.add_argument_group("model", "defaults come from the preset")
    group.add_argument("--preset", choices=("auto", *PRESETS), default="auto", help="auto: tiny on the CPU, else small")
    group.add_argument("--dim", type=positive, help="width")
    group.add_argument("--layers", type=positive)
    group.add_argument("--seq-len", type=positive, help="tokens of a sequence")
    group.add_argument("--tied", action="store_true", help="the head is the embedding")

    group = parser.add_argument_group("data")
    group.add_argument("--random", action="store_true", help="random ids in place of text: to measure time and memory")
    group.add_argument("--vocab-size", type=positive, default=128_256, help="of --random (default: 128256)")
    group.add_argument(
        "--data",
        type=Path,
        nargs="+",
        default=(),
        help="text files or folders (default: the sources of Python's standard library on this machine)",
    )
    group.add_argument(
        "--held-out", type=fraction, default=0.05, help="part of the files to measure on (default: 0.05)"
    )
    group.add_argument("--cache", type=Path, help="folder for the tokens (default: OUT/tokens)")

    group = parser.add_argument_group("run")
    group.add_argument("--steps", type=positive)
    group.add_argument("--seed", type=not_negative, default=0)
    group.add_argument("--eval-every", type=not_negative, default=20, help="steps; 0: never (default: 20)")
    group.add_argument("--eval-batches", type=positive, default=2, help="held-out batches to measure on (default: 2)")
    group.add_argument("--out", type=Path, default=Path("runs/pretrain_deepspeed"), help="run folder")
    group.add_argument("--overwrite", action="store_true", help="start anew although OUT holds a run")
    return parser


def parse_options(argv: list[str] | None) -> Options:
    """Parse and check everything that can be checked before the processes meet; exits with 2 and one sentence."""
    arguments = vars(make_parser().parse_args(argv))
    try:
        device = choose_device(discover(), arguments["device"])
        options = _fill_in(arguments, device)
        check(options)
        text_data.check_paths(options.data)
    except ValueError as error:
        fail(str(error))
    return options


def _fill_in(arguments: dict[str, Any], device: torch.device) -> Options:
    preset = arguments.pop("preset")
    chosen = PRESETS[("tiny" if device.type == "cpu" else "small") if preset == "auto" else preset]
    values = asdict(chosen) | {key: value for key, value in arguments.items() if value is not None}
    values.setdefault("cache", values["out"] / "tokens")
    values["device"] = device.type
    if not values["config"].is_file() and (CONFIGS / values["config"].name).is_file():
        values["config"] = CONFIGS / values["config"].name
    values["data"] = tuple(values["data"])
    return Options(**{field.name: values[field.name] for field in fields(Options)})


def check(options: Options) -> None:
    """Raise ValueError for what can't be."""
    for name in ("deepspeed", "transformers", *(("liger_kernel",) if options.loss == "liger" else ())):
        if find_spec(name) is None or find_spec(name).origin is None:  # type: ignore[union-attr]
            raise ValueError(f"{name} isn't installed: pip install {name.replace('_', '-')}")
    if options.loss != "cce" and options.backward != "exact":
        raise ValueError(f"--backward {options.backward} belongs to --loss cce")
    if options.dim % (2 * options.heads):
        raise ValueError(f"--dim {options.dim} is not an even multiple of {options.heads} heads")
    if not options.config.is_file():
        raise ValueError(f"--config {options.config} does not exist")
    config = read_config(options)
    if options.loss == "liger" and (
        "tensor_parallel" in config or config.get("zero_optimization", {}).get("stage") == 3
    ):
        raise ValueError("--loss liger needs a whole head: take a configuration without tensor_parallel and ZeRO-3")
    if (options.out / "log.jsonl").exists() and not options.overwrite:
        raise ValueError(f"{options.out} holds a run: --overwrite starts anew")


def read_config(options: Options) -> dict[str, Any]:
    """DeepSpeed's configuration; float32 on the CPU.

    Raises:
        ValueError: the file is no JSON object.
    """
    try:
        config = json.loads(options.config.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"--config {options.config} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--config {options.config} holds a {type(config).__name__}, expected an object")
    if options.device == "cpu":
        for precision in ("bf16", "fp16"):
            config.pop(precision, None)
    return config


def build_model(options: Options, vocab_size: int, device: torch.device) -> Any:
    """The same Llama on every rank."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=options.dim,
        intermediate_size=options.feed_forward,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.seq_len,
        tie_word_embeddings=options.tied,
        use_cache=False,
    )
    torch.manual_seed(options.seed)
    with device:
        model = LlamaForCausalLM(config)
    if options.loss == "liger":
        model.forward = types.MethodType(_liger_forward, model)
    return model


def _liger_forward(model: Any, input_ids: Tensor, labels: Tensor) -> Any:
    """The model's forward with Liger's fused linear cross-entropy; for a head that is whole on every rank."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    from transformers.modeling_outputs import CausalLMOutput

    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1]
    loss = LigerFusedLinearCrossEntropyLoss()(model.lm_head.weight, hidden.flatten(0, 1), labels[:, 1:].flatten())
    return CausalLMOutput(loss=loss)


def start_engine(options: Options, model: Any, runtime: Runtime) -> Any:
    """DeepSpeed's engine, with cce_tp's loss if that is wanted."""
    # A process without a launcher is a world of its own.
    for name, value in (("RANK", runtime.process.rank), ("LOCAL_RANK", runtime.process.local_rank)):
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("WORLD_SIZE", str(runtime.process.world_size))
    os.environ.setdefault("DS_ACCELERATOR", options.device)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled at every start on a CPU
    deepspeed.init_distributed("nccl" if options.device == "cuda" else "gloo")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=read_config(options))
    if options.loss == "cce":
        cce_tp.deepspeed.install(engine, backward=options.backward, strict=True)
        cce_tp.sampler.manual_seed(options.seed)
    return engine


class Batches:
    """Windows of text, or random ids: the same for the ranks of a tensor-parallel group, else different."""

    def __init__(self, options: Options, corpus: Corpus | None) -> None:
        self.options = options
        self.train = None if corpus is None else Windows(corpus.train, options.seq_len)
        self.held_out = None if corpus is None else Windows(corpus.held_out, options.seq_len)

    def rows(self, first: int, count: int) -> Tensor:
        """Rows ``first`` … of the endless stream, ``[count, seq_len]``."""
        if self.train is not None:
            return self.train.shuffled(first, count, self.options.seed)[:, :-1]
        generator = torch.Generator().manual_seed(self.options.seed + first)
        return torch.randint(0, self.options.vocab_size, (count, self.options.seq_len), generator=generator)

    def held_out_rows(self, first: int, count: int, total: int) -> Tensor:
        """Rows of ``total`` that are spread over the held-out text."""
        if self.held_out is None:
            return self.rows(10**9 + first, count)
        return self.held_out.spread(first, count, total)[:, :-1]


class Trainer:
    """Engine and data of one rank, and the loop over them."""

    def __init__(self, options: Options, runtime: Runtime, corpus: Corpus | None) -> None:
        self.options, self.runtime = options, runtime
        self.device = runtime.device
        self.vocab_size = options.vocab_size if corpus is None else corpus.vocab_size
        model = build_model(options, self.vocab_size, self.device)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self.engine = start_engine(options, model, runtime)
        self.batches = Batches(options, corpus)
        self.dp_rank = dist.get_rank(self.engine.data_parallel_group)
        self.micro_batch = self.engine.train_micro_batch_size_per_gpu()
        self.accumulation = self.engine.gradient_accumulation_steps()
        self.log = Log(options.out / "log.jsonl", None) if runtime.is_main else None

    @property
    def batch(self) -> int:
        """Sequences of a step, over all ranks."""
        size: int = self.micro_batch * self.accumulation * self.engine.dp_world_size
        return size  # engine.train_batch_size() counts tensor-parallel ranks too

    def run(self) -> None:
        """Train and leave the log."""
        options = self.options
        self._say(
            f"Llama of {self.parameters / 1e6:.1f} M parameters, vocabulary {self.vocab_size:,}; ZeRO stage "
            f"{self.engine.zero_optimization_stage()}, dp {self.engine.dp_world_size} of {dist.get_world_size()} "
            f"processes on {options.device}; {self.batch} x {options.seq_len} tokens a step; --loss {options.loss}"
        )
        if options.eval_every:
            self._report(Record(0, held_out_loss=self.evaluate()))
        seconds = []
        for step in range(1, options.steps + 1):
            record = self.train_step(step)
            seconds.append(record.step_seconds or 0.0)
            self._report(record)
        self._conclude(statistics.median(seconds[len(seconds) // 4 :]))  # the first ones compile and warm up

    def train_step(self, step: int) -> Record:
        """One optimizer step."""
        start, total = time.perf_counter(), torch.zeros((), device=self.device)
        for ids in self._micro_batches(step - 1):
            loss = self.engine(input_ids=ids, labels=ids).loss
            self.engine.backward(loss)
            self.engine.step()
            total += loss.detach() / self.accumulation
        mean = self._mean_over_ranks(total)
        seconds = time.perf_counter() - start
        every = self.options.eval_every
        due = every > 0 and (step % every == 0 or step == self.options.steps)
        norm = self.engine.get_global_grad_norm()
        return Record(
            step,
            loss=mean,
            held_out_loss=self.evaluate() if due else None,
            lr=self.engine.get_lr()[0],
            grad_norm=None if norm is None else float(norm),
            tokens_per_second=self.batch * self.options.seq_len / seconds,
            step_seconds=seconds,
            peak_memory_bytes=peak_memory(self.device),
        )

    def _micro_batches(self, step: int) -> Iterator[Tensor]:
        rows = self.micro_batch * self.accumulation
        first = step * self.batch + self.dp_rank * rows
        for index in range(self.accumulation):
            yield self.batches.rows(first + index * self.micro_batch, self.micro_batch).to(self.device)

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out rows. The model stays in training mode, where there are no logits; it has no
        dropout."""
        count, total = self.options.eval_batches, torch.zeros((), device=self.device)
        rows = self.micro_batch * self.engine.dp_world_size
        for index in range(count):
            first = index * rows + self.dp_rank * self.micro_batch
            ids = self.batches.held_out_rows(first, self.micro_batch, count * rows).to(self.device)
            total += self.engine(input_ids=ids, labels=ids).loss / count
        return self._mean_over_ranks(total)

    def _mean_over_ranks(self, value: Tensor) -> float:
        """Tp ranks hold equal losses, so the mean over all ranks is the mean over dp."""
        value = value.detach().float().clone()
        dist.all_reduce(value)
        return value.item() / dist.get_world_size()

    def _say(self, text: str) -> None:
        if self.runtime.is_main:
            print(text, flush=True)

    def _report(self, record: Record) -> None:
        if self.log:
            self.log.write(record)
        facts = [f"step {record.step:>5}"]
        for name, value in (("loss", record.loss), ("held out", record.held_out_loss)):
            if value is not None:
                facts.append(f"{name} {value:.3f}")
        if record.step_seconds is not None and record.peak_memory_bytes is not None:
            facts.append(f"{record.step_seconds * 1e3:.0f} ms  peak {human(record.peak_memory_bytes)}")
        self._say("  ".join(facts))

    def _conclude(self, step_seconds: float) -> None:
        options = self.options
        peak = torch.tensor(float(peak_memory(self.device)), device=self.device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        summary = {
            **json.loads(json.dumps(asdict(options), default=str)),
            "name": f"{options.config.stem} {options.loss}" + (f" {options.backward}" if options.loss == "cce" else ""),
            "world_size": dist.get_world_size(),
            "parameters": self.parameters,
            "step_seconds": step_seconds,
            "peak_memory_bytes": int(peak.item()),
        }
        if self.log:
            (options.out / "run.json").write_text(json.dumps(summary, indent=2) + "\n")
        self._say(
            f"median step {step_seconds * 1e3:.1f} ms, peak {human(peak.item())}; log.jsonl and run.json are in "
            f"{options.out}"
        )


def prepare_run_folder(options: Options, runtime: Runtime) -> None:
    """Make the folder; with ``--overwrite``, without the earlier run's log."""
    if runtime.is_main:
        if options.overwrite and (options.out / "log.jsonl").exists():
            (options.out / "log.jsonl").unlink()
        options.out.mkdir(parents=True, exist_ok=True)
        shutil.copy(options.config, options.out / "deepspeed.json")
    dist.barrier()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = parse_options(argv)
    runtime = initialize(options.device)
    try:
        prepare_run_folder(options, runtime)
        corpus = None
        if not options.random:
            corpus = text_data.share_corpus(
                options.data,
                options.held_out,
                options.cache,
                options.seq_len,
                runtime.is_main,
                lambda done, total: None,
            )
        trainer = Trainer(options, runtime, corpus)
    except ValueError as error:
        finalize()
        fail(str(error))
    trainer.run()
    trainer.engine.destroy()
    finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
