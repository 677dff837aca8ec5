"""Pre-train a GPT on text with tensor parallelism (DTensor), FSDP2 and a loss that never writes the logits.

    torchrun --standalone --nproc_per_node 2 examples/pretrain_gpt.py --tp 2
    torchrun --standalone --nproc_per_node 8 examples/pretrain_gpt.py --tp 4 --data my_texts/ --out runs/mine
    torchrun --standalone --nproc_per_node 4 examples/pretrain_gpt.py --tp 1 --out runs/mine --resume

N processes form a dp x tp mesh, dp = N / tp. What is learned depends neither on N nor on tp: the start, the global
batch of every step and the held-out text are the same on every layout, and a checkpoint resumes on any of them.

The run folder gets ``log.jsonl`` (a line a step), ``losses.png``, ``checkpoints/`` and the tokens of the text.
Ctrl-C or SIGTERM ends the step, saves a checkpoint and exits with 130. (torchrun itself then exits with 1, and kills
what has not ended after 30 s.) Arguments that make no sense exit with 2.
"""

from __future__ import annotations

import argparse
import math
import shutil
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import checkpoint
import text_data
import torch
import torch.distributed as dist
from command_line import Parser, fail, fraction, not_negative, positive, rate
from gpt import GPT, GPTConfig, build_model, cce_loss, logits_loss
from reporting import Display, Log, Record, draw_losses, human, peak_memory, read_log
from text_data import Corpus, Windows
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

import cce_tp
from cce_tp.launch.runtime import Runtime, choose_device, discover, finalize, initialize

EXIT_INTERRUPTED = 130


@dataclass(frozen=True)
class Preset:
    """A model and a schedule that suit each other."""

    dim: int
    layers: int
    heads: int
    seq_len: int
    batch: int
    steps: int
    lr: float


PRESETS = {
    "tiny": Preset(dim=64, layers=2, heads=4, seq_len=128, batch=8, steps=50, lr=1e-2),
    "small": Preset(dim=768, layers=12, heads=12, seq_len=1024, batch=32, steps=400, lr=1e-3),
    "medium": Preset(dim=1024, layers=24, heads=16, seq_len=2048, batch=16, steps=1000, lr=6e-4),
    "large": Preset(dim=2048, layers=24, heads=16, seq_len=2048, batch=32, steps=2000, lr=3e-4),
}


@dataclass(frozen=True)
class Options(Preset):
    """The command line, presets filled in."""

    tp: int
    device: str
    dtype: str
    loss: str
    backward: str
    data: tuple[Path, ...]
    held_out: float
    cache: Path
    warmup: int
    weight_decay: float
    clip: float
    seed: int
    eval_every: int
    eval_batches: int
    save_every: int
    keep: int
    out: Path
    resume: bool
    overwrite: bool


def make_parser() -> Parser:
    """All options, grouped."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    # The deepspeed launcher adds this to every command; the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)

    group = parser.add_argument_group("layout")
    group.add_argument("--tp", type=positive, help="tensor-parallel ranks (default: 2, or 1 if processes are odd)")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of the products; parameters and optimizer are float32 (default: bfloat16 on GPUs, float32 on the CPU)",
    )

    group = parser.add_argument_group("loss")
    group.add_argument("--loss", choices=("cce", "torch"), default="cce", help="cce: no logits; torch: ordinary logits")
    group.add_argument("--backward", choices=("exact", "sampled"), default="exact", help="of --loss cce")

    group = parser.add_argument_group("model", "defaults come from the preset")
    group.add_argument(
        "--preset", choices=("auto", *PRESETS), default="auto", help="auto: tiny on the CPU, small on GPUs"
    )
    group.add_argument("--dim", type=positive, help="width")
    group.add_argument("--layers", type=positive)
    group.add_argument("--heads", type=positive)
    group.add_argument("--seq-len", type=positive, help="tokens of a sequence")

    group = parser.add_argument_group("data")
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

    group = parser.add_argument_group("training", "batch, steps and lr come from the preset")
    group.add_argument("--batch", type=positive, help="sequences of a step, over all ranks")
    group.add_argument("--steps", type=positive)
    group.add_argument("--lr", type=rate, help="peak; a linear warm-up leads to it, a cosine from it to a tenth")
    group.add_argument("--warmup", type=not_negative, help="steps (default: a tenth of all)")
    group.add_argument("--weight-decay", type=rate, default=0.1, help="of the matrices (default: 0.1)")
    group.add_argument("--clip", type=rate, default=1.0, help="gradient norm (default: 1)")
    group.add_argument("--seed", type=not_negative, default=0)

    group = parser.add_argument_group("run")
    group.add_argument("--out", type=Path, default=Path("runs/pretrain_gpt"), help="run folder, shared by all nodes")
    group.add_argument("--resume", action="store_true", help="go on from the latest checkpoint in OUT")
    group.add_argument("--overwrite", action="store_true", help="start anew although OUT holds checkpoints")
    group.add_argument("--eval-every", type=positive, default=10, help="steps (default: 10)")
    group.add_argument("--eval-batches", type=positive, default=2, help="held-out batches to measure on (default: 2)")
    group.add_argument("--save-every", type=not_negative, default=100, help="steps; 0: only at the end (default: 100)")
    group.add_argument("--keep", type=positive, default=2, help="checkpoints to keep (default: 2)")
    return parser


def parse_options(argv: list[str] | None) -> Options:
    """Parse and check everything that can be checked before the processes meet; exits with 2 and one sentence."""
    arguments = vars(make_parser().parse_args(argv))
    try:
        process = discover()
        device = choose_device(process, arguments["device"])
        options = _fill_in(arguments, process.world_size, device)
        check_layout(options, process.world_size)
        check_run_folder(options)
        text_data.check_paths(options.data)
    except ValueError as error:
        fail(str(error))
    return options


def _fill_in(arguments: dict[str, Any], world_size: int, device: torch.device) -> Options:
    on_cpu = device.type == "cpu"
    preset = arguments.pop("preset")
    chosen = PRESETS[("tiny" if on_cpu else "small") if preset == "auto" else preset]
    values = asdict(chosen) | {key: value for key, value in arguments.items() if value is not None}
    values.setdefault("tp", 2 if world_size % 2 == 0 else 1)
    values.setdefault("warmup", values["steps"] // 10)
    values.setdefault("cache", values["out"] / "tokens")
    if values["dtype"] == "auto":
        values["dtype"] = "float32" if on_cpu else "bfloat16"
    values["device"] = device.type
    values["data"] = tuple(values["data"])
    return Options(**{field.name: values[field.name] for field in fields(Options)})


def check_layout(options: Options, world_size: int) -> None:
    """Raise ValueError if the model and the batch do not divide over the ranks."""
    tp = options.tp
    if world_size % tp:
        raise ValueError(f"{world_size} process{'es' * (world_size > 1)} cannot form groups of --tp {tp}")
    if options.dim % (2 * options.heads):
        raise ValueError(f"--dim {options.dim} is not an even multiple of --heads {options.heads}")
    for name, size in (("--heads", options.heads), ("--seq-len", options.seq_len)):
        if size % tp:
            raise ValueError(f"{name} {size} does not divide by --tp {tp}")
    if options.batch % (world_size // tp):
        raise ValueError(f"--batch {options.batch} does not divide over {world_size // tp} data-parallel ranks")
    if options.loss == "torch" and options.backward != "exact":
        raise ValueError(f"--backward {options.backward} belongs to --loss cce")


def check_run_folder(options: Options) -> None:
    """Raise ValueError rather than resume nothing, or bury an earlier run."""
    found = checkpoint.latest(options.out)
    if options.resume and options.overwrite:
        raise ValueError("--resume and --overwrite contradict each other")
    if options.resume and found is None:
        unfinished = sorted(path.name for path in (options.out / "checkpoints").glob("partial-*"))
        hint = f", only {unfinished[-1]}, whose saving was cut short" if unfinished else ""
        raise ValueError(f"--resume finds no checkpoint in {options.out}{hint}")
    if found and not (options.resume or options.overwrite):
        raise ValueError(f"{options.out} holds a run: --resume goes on with it, --overwrite starts anew")


def learning_rate(options: Options, step: int) -> float:
    """Of step ``step``, counted from 0."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


def make_optimizer(model: nn.Module, options: Options) -> torch.optim.AdamW:
    """AdamW; norms do not decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": options.weight_decay},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)


def clip_gradients(model: nn.Module, limit: float) -> Tensor:
    """Clip to ``limit`` and return the norm before it, over all shards of all ranks."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class StopRequest:
    """Turns Ctrl-C and SIGTERM into a wish that the ranks agree upon at the end of a step."""

    def __init__(self) -> None:
        self.received = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True


class Trainer:
    """Model, optimizer and data of one rank, and the loop over them."""

    def __init__(self, options: Options, runtime: Runtime, corpus: Corpus, display: Display) -> None:
        self.options, self.runtime, self.corpus, self.display = options, runtime, corpus, display
        self.device = runtime.device
        self.mesh = runtime.mesh(options.tp)
        self.config = GPTConfig(corpus.vocab_size, options.dim, options.layers, options.heads, options.seq_len)
        self.rows = options.batch // self.mesh["dp"].size()
        self.first_row = self.rows * self.mesh.get_local_rank("dp")
        self.train_windows = Windows(corpus.train, options.seq_len)
        self.held_out_windows = Windows(corpus.held_out, options.seq_len)
        self.meta = {
            "model": asdict(self.config),
            "data": corpus.fingerprint,
            "batch": options.batch,
            "seed": options.seed,
        }

        found = checkpoint.latest(options.out) if options.resume else None
        self.step = self._check_meta(found) if found else 0
        loss = logits_loss if options.loss == "torch" else cce_loss(options.backward)
        self.model: GPT = build_model(self.config, loss, self.mesh, getattr(torch, options.dtype), options.seed)
        self.optimizer = make_optimizer(self.model, options)
        if found:
            checkpoint.load(found, self.model, self.optimizer)
            cce_tp.sampler.load_state_dict(checkpoint.read_meta(found)["sampler"])
        else:
            cce_tp.sampler.manual_seed(options.seed)
        self.log = Log(options.out / "log.jsonl", self.step if found else None) if runtime.is_main else None

    def _check_meta(self, found: Path) -> int:
        """The checkpoint's step; raises ValueError if it belongs to another model or another text."""
        saved = checkpoint.read_meta(found)
        for key, value in self.meta.items():
            if saved[key] != value:
                raise ValueError(f"{found} was trained with {key} {saved[key]}, and this run has {value}")
        if saved["step"] >= self.options.steps:
            raise ValueError(f"{found} has done {saved['step']} of --steps {self.options.steps}")
        return saved["step"]

    def run(self) -> int:
        """Train to the end or until interrupted; the exit code."""
        self._introduce()
        stop = StopRequest()
        held_out = self.evaluate() if self.step == 0 else None
        if held_out is not None:
            self._report(Record(0, held_out_loss=held_out))
        with self.display.bar("train") as bar:
            while self.step < self.options.steps:
                record, interrupted = self.train_step(stop)
                held_out = record.held_out_loss or held_out
                self._report(record)
                bar.update(self.step, self.options.steps, self._facts(record, held_out))
                if interrupted or self._due(self.options.save_every):
                    self.save()
                if interrupted:
                    self.display.say(f"Interrupted after step {self.step}; --resume goes on from there.")
                    return EXIT_INTERRUPTED
        self.save()
        self._conclude()
        return 0

    def train_step(self, stop: StopRequest) -> tuple[Record, bool]:
        """One optimizer step; what to log, and whether some rank has been asked to stop."""
        start = time.perf_counter()
        options = self.options
        lr = learning_rate(options, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batch = self.train_windows.shuffled(self.step * options.batch + self.first_row, self.rows, options.seed)
        with self._loss_context():
            loss = self._loss(batch)
            loss.backward()
        norm = clip_gradients(self.model, options.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean_loss, stops = self._sum_over_ranks(loss.detach() / dist.get_world_size(), float(stop.received))
        self.step += 1
        seconds = time.perf_counter() - start
        return Record(
            self.step,
            loss=mean_loss,
            held_out_loss=self.evaluate() if self._due(options.eval_every) or self.step == options.steps else None,
            lr=lr,
            grad_norm=norm.item(),
            tokens_per_second=options.batch * options.seq_len / seconds,
            peak_memory_bytes=peak_memory(self.device),
        ), stops > 0

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss over the held-out batches."""
        batch, batches = self.options.batch, self.options.eval_batches
        total = torch.zeros((), device=self.device)
        for index in range(batches):
            rows = self.held_out_windows.spread(index * batch + self.first_row, self.rows, batches * batch)
            with self._loss_context():
                total += self._loss(rows)
        return self._sum_over_ranks(total / (batches * dist.get_world_size()))[0]

    def save(self) -> None:
        """Checkpoint of the current step, and the picture up to it."""
        meta = {"step": self.step, "sampler": cce_tp.sampler.state_dict(), **self.meta}
        checkpoint.save(self.options.out, self.step, self.model, self.optimizer, meta, self.options.keep)
        if self.log:
            draw_losses(self.log.path, self.options.out / "losses.png")

    def _loss(self, batch: Tensor) -> Tensor:
        batch = batch.to(self.device)
        return self.model(batch[:, :-1], batch[:, 1:])

    def _loss_context(self) -> AbstractContextManager[None]:
        """PyTorch's vocabulary-parallel cross-entropy, backward included, exists only inside a context."""
        return loss_parallel() if self.options.loss == "torch" else nullcontext()

    def _sum_over_ranks(self, *values: Tensor | float) -> list[float]:
        """All in one all-reduce. Tp ranks hold equal losses, so the mean over all ranks is the mean over dp."""
        packed = torch.stack([torch.as_tensor(value, dtype=torch.float32, device=self.device) for value in values])
        dist.all_reduce(packed)
        return packed.tolist()

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _logits_bytes(self) -> int:
        """fp32 logits of one rank: its sequences by its part of the vocabulary."""
        return self.rows * self.options.seq_len * self.config.vocab_size * 4 // self.options.tp

    def _introduce(self) -> None:
        options = self.options
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.display.say(
            f"GPT of {parameters / 1e6:.1f} M parameters, vocabulary {self.config.vocab_size:,}; "
            f"tp {options.tp} x dp {self.mesh['dp'].size()} on {options.device}, {options.dtype}\n"
            f"{len(self.corpus.train):,} tokens to train on, {len(self.corpus.held_out):,} held out; "
            f"{options.batch} x {options.seq_len} tokens a step\n"
            f"--loss {options.loss}: the logits of a rank's batch, {human(self._logits_bytes())} in float32, "
            f"{'are written out' if options.loss == 'torch' else 'are never written'}"
        )
        if self.step:
            self.display.say(f"Resuming after step {self.step}")

    def _report(self, record: Record) -> None:
        if self.log:
            self.log.write(record)
        if record.held_out_loss is not None:
            self.display.say(f"step {record.step:>5}  {self._facts(record, record.held_out_loss)}")

    def _facts(self, record: Record, held_out: float | None) -> str:
        facts = []
        if record.loss is not None:
            facts.append(f"loss {record.loss:.3f}")
        if held_out is not None:
            facts.append(f"held out {held_out:.3f}")
        if record.tokens_per_second is not None and record.peak_memory_bytes is not None:
            facts.append(f"{record.tokens_per_second:,.0f} tokens/s")
            facts.append(f"peak {human(record.peak_memory_bytes)}")
            facts.append(
                f"{'logits' if self.options.loss == 'torch' else 'logits avoided'} {human(self._logits_bytes())}"
            )
        return "  ".join(facts)

    def _conclude(self) -> None:
        if not self.log:
            return
        held_out = [record.held_out_loss for record in read_log(self.log.path) if record.held_out_loss is not None]
        out = self.options.out
        self.display.say(
            f"Held-out loss {held_out[0]:.3f} -> {held_out[-1]:.3f}\n"
            f"Log {self.log.path}, picture {out / 'losses.png'}, checkpoint {checkpoint.latest(out)}"
        )


def prepare_run_folder(options: Options, runtime: Runtime) -> None:
    """Make the folder; with ``--overwrite``, without the earlier run's checkpoints."""
    if runtime.is_main:
        options.out.mkdir(parents=True, exist_ok=True)
        if options.overwrite:
            shutil.rmtree(options.out / "checkpoints", ignore_errors=True)
    dist.barrier()


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = parse_options(argv)
    runtime = initialize(options.device)
    display = Display(runtime.is_main)
    try:
        prepare_run_folder(options, runtime)
        with display.bar("tokenize") as bar:
            corpus = text_data.share_corpus(
                options.data, options.held_out, options.cache, options.seq_len, runtime.is_main, bar.update
            )
        trainer = Trainer(options, runtime, corpus, display)
    except ValueError as error:
        finalize()
        fail(str(error))
    code = trainer.run()
    finalize()
    return code


if __name__ == "__main__":
    sys.exit(main())
