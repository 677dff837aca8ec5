"""Pre-train a GPT with Megatron-core, by Megatron's own loss or by cce_tp's.

    torchrun --standalone --nproc_per_node 2 examples/pretrain_megatron.py --tp 2 --sequence-parallel --loss cce
    torchrun --standalone --nproc_per_node 8 examples/pretrain_megatron.py --tp 2 --pp 2 --loss megatron
    python examples/compare_runs.py runs/stock runs/cce --out losses.png

Everything but the loss is Megatron's: process groups, model, schedules, DDP, distributed optimizer, learning rates.
What --loss cce changes is one line, ``cce_tp.megatron.install(model)``. Neither Transformer Engine nor Apex is needed,
except that --gradient-accumulation-fusion needs Apex's extension fused_weight_gradient_mlp_cuda.

N processes form N / (tp pp) data-parallel replicas. The run folder gets ``log.jsonl`` (a line a step) and ``run.json``
(the options, and time and memory of the output layer with its loss, alone). Needs GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import text_data
import torch
import torch.distributed as dist
from command_line import Parser, fail, fraction, not_negative, positive, rate
from reporting import Log, Record, human, peak_memory
from text_data import Corpus, Windows
from torch import Tensor, nn

import cce_tp
import cce_tp.megatron
from cce_tp.launch.measure import GroupMeter, Place
from cce_tp.launch.runtime import Runtime, choose_device, discover, finalize, initialize

LOSSES = ("cce", "megatron", "megatron-unfused")
FUSION_EXTENSION = "fused_weight_gradient_mlp_cuda"
GRAPH_WARMUP = 3
"""Ordinary steps, and ordinary evaluations, before either is captured."""


@dataclass(frozen=True)
class Preset:
    """A model and a schedule that suit each other."""

    dim: int
    layers: int
    heads: int
    seq_len: int
    micro_batch: int
    batch: int
    steps: int
    lr: float


PRESETS = {
    "tiny": Preset(dim=64, layers=2, heads=4, seq_len=128, micro_batch=2, batch=8, steps=30, lr=1e-2),
    "small": Preset(dim=768, layers=12, heads=12, seq_len=1024, micro_batch=8, batch=32, steps=400, lr=1e-3),
    "1b": Preset(dim=2048, layers=10, heads=16, seq_len=4096, micro_batch=2, batch=2, steps=200, lr=3e-4),
}


@dataclass(frozen=True)
class Options(Preset):
    """The command line, presets filled in."""

    tp: int
    pp: int
    sequence_parallel: bool
    gradient_accumulation_fusion: bool
    cuda_graph: bool
    device: str
    dtype: str
    loss: str
    backward: str
    eps: float | None
    reference_rows: int | None
    data: tuple[Path, ...]
    held_out: float
    cache: Path
    tokens: Path | None
    vocab_size: int | None
    warmup: int
    weight_decay: float
    clip: float
    seed: int
    eval_every: int
    eval_batches: int
    measure: int
    out: Path
    overwrite: bool

    def describe_loss(self) -> str:
        """The loss in a word or two."""
        if self.loss != "cce":
            return self.loss
        words = [f"cce {self.backward}"]
        if self.eps is not None:
            words.append(f"eps {self.eps:g}")
        if self.reference_rows is not None:
            words.append(f"{self.reference_rows} reference rows")
        return ", ".join(words)

    def backward_mode(self) -> str | cce_tp.Sampled:
        """For ``cce_tp.megatron.install``."""
        values: dict[str, Any] = {"eps": self.eps, "reference_rows": self.reference_rows}
        given = {name: value for name, value in values.items() if value is not None}
        return cce_tp.Sampled(**given) if given else self.backward


def make_parser() -> Parser:
    """All options, grouped."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    group = parser.add_argument_group("layout")
    group.add_argument("--tp", type=positive, default=1, help="tensor-parallel ranks (default: 1)")
    group.add_argument("--pp", type=positive, default=1, help="pipeline stages (default: 1)")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument(
        "--gradient-accumulation-fusion", action="store_true", help=f"needs Apex's extension {FUSION_EXTENSION}"
    )
    group.add_argument(
        "--cuda-graph",
        action="store_true",
        help="forward and backward of a step as one graph (Megatron's full_iteration)",
    )
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument(
        "--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: bfloat16 on GPUs"
    )

    group = parser.add_argument_group("loss")
    group.add_argument(
        "--loss",
        choices=LOSSES,
        default="cce",
        help="cce: no logits; megatron: its fused cross-entropy; megatron-unfused: its other one (default: cce)",
    )
    group.add_argument("--backward", choices=("exact", "sampled", "filtered"), default="exact", help="of --loss cce")
    group.add_argument("--eps", type=rate, help="of --backward sampled")
    group.add_argument(
        "--reference-rows",
        type=positive,
        help="of --backward sampled: so many of the most frequent targets are exact (default: 1024)",
    )

    group = parser.add_argument_group("model", "defaults come from the preset")
    group.add_argument("--preset", choices=("auto", *PRESETS), default="auto", help="auto: small, tiny on the CPU")
    group.add_argument("--dim", type=positive, help="width")
    group.add_argument("--layers", type=positive)
    group.add_argument("--heads", type=positive)
    group.add_argument("--seq-len", type=positive, help="tokens of a sequence")
    group.add_argument(
        "--vocab-size",
        type=positive,
        help="rows of embedding and classifier; those beyond the tokenizer's never occur (default: the tokenizer's)",
    )

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
    group.add_argument("--tokens", type=Path, help="folder of tokens made ahead by text_data.py, in place of --data")

    group = parser.add_argument_group("training", "batch, steps and lr come from the preset")
    group.add_argument("--micro-batch", type=positive, help="sequences of a forward pass")
    group.add_argument("--batch", type=positive, help="sequences of a step, over all ranks")
    group.add_argument("--steps", type=positive)
    group.add_argument("--lr", type=rate, help="peak; a linear warm-up leads to it, a cosine from it to a tenth")
    group.add_argument("--warmup", type=not_negative, help="steps (default: a tenth of all)")
    group.add_argument("--weight-decay", type=rate, default=0.1, help="of the matrices (default: 0.1)")
    group.add_argument("--clip", type=rate, default=1.0, help="gradient norm (default: 1)")
    group.add_argument("--seed", type=not_negative, default=0)

    group = parser.add_argument_group("run")
    group.add_argument("--out", type=Path, default=Path("runs/pretrain_megatron"), help="run folder")
    group.add_argument("--overwrite", action="store_true", help="start anew although OUT holds a run")
    group.add_argument("--eval-every", type=not_negative, default=50, help="steps; 0: never (default: 50)")
    group.add_argument("--eval-batches", type=positive, default=2, help="held-out batches to measure on (default: 2)")
    group.add_argument(
        "--measure", type=not_negative, default=10, help="times the loss alone is timed at the end (default: 10)"
    )
    return parser


def parse_options(argv: list[str] | None) -> Options:
    """Parse and check everything that can be checked before the processes meet; exits with 2 and one sentence."""
    arguments = vars(make_parser().parse_args(argv))
    try:
        process = discover()
        device = choose_device(process, arguments["device"])
        options = _fill_in(arguments, device)
        check(options, process.world_size)
        text_data.check_paths(options.data)
    except ValueError as error:
        fail(str(error))
    return options


def _fill_in(arguments: dict[str, Any], device: torch.device) -> Options:
    on_cpu = device.type == "cpu"
    preset = arguments.pop("preset")
    chosen = PRESETS[("tiny" if on_cpu else "small") if preset == "auto" else preset]
    values = asdict(chosen) | {key: value for key, value in arguments.items() if value is not None}
    values.setdefault("warmup", values["steps"] // 10)
    values.setdefault("cache", values["out"] / "tokens")
    if values["dtype"] == "auto":
        values["dtype"] = "float32" if on_cpu else "bfloat16"
    for name in ("eps", "reference_rows", "tokens", "vocab_size"):
        values.setdefault(name, None)
    values["device"] = device.type
    values["data"] = tuple(values["data"])
    return Options(**{field.name: values[field.name] for field in fields(Options)})


def check(options: Options, world_size: int) -> None:
    """Raise ValueError if model and batch do not divide over the ranks, or the options contradict each other."""
    tp, pp = options.tp, options.pp
    if world_size % (tp * pp):
        raise ValueError(f"{world_size} process{'es' * (world_size > 1)} cannot form groups of --tp {tp} x --pp {pp}")
    if options.dim % (2 * options.heads):
        raise ValueError(f"--dim {options.dim} is not an even multiple of --heads {options.heads}")
    for name, size, by, parts in (
        ("--heads", options.heads, "--tp", tp),
        ("--seq-len", options.seq_len, "--tp", tp),
        ("--layers", options.layers, "--pp", pp),
    ):
        if size % parts:
            raise ValueError(f"{name} {size} does not divide by {by} {parts}")
    replicas = world_size // (tp * pp)
    if options.batch % (options.micro_batch * replicas):
        raise ValueError(
            f"--batch {options.batch} does not divide over {replicas} replicas with --micro-batch {options.micro_batch}"
        )
    if options.sequence_parallel and tp == 1:
        raise ValueError("--sequence-parallel needs --tp of at least 2")
    if options.loss != "cce" and options.backward != "exact":
        raise ValueError(f"--backward {options.backward} belongs to --loss cce")
    for name in ("eps", "reference_rows"):
        value = getattr(options, name)
        if value is not None and (options.loss, options.backward) != ("cce", "sampled"):
            raise ValueError(f"--{name.replace('_', '-')} {value} belongs to --loss cce --backward sampled")
    if options.gradient_accumulation_fusion and find_spec(FUSION_EXTENSION) is None:
        raise ValueError(
            f"--gradient-accumulation-fusion needs Apex's extension {FUSION_EXTENSION}; it isn't installed"
        )
    if options.cuda_graph and options.device != "cuda":
        raise ValueError("--cuda-graph needs --device cuda")
    if options.warmup >= options.steps:
        raise ValueError(f"--warmup {options.warmup} leaves nothing of --steps {options.steps}")
    if (options.out / "log.jsonl").exists() and not options.overwrite:
        raise ValueError(f"{options.out} holds a run: --overwrite starts anew")


class Trainer:
    """Megatron's model, optimizer and schedule on one rank, and the loop over them."""

    def __init__(self, options: Options, runtime: Runtime, corpus: Corpus) -> None:
        from megatron.core import parallel_state

        self.options, self.runtime, self.corpus = options, runtime, corpus
        self.device = runtime.device
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.dp = parallel_state.get_data_parallel_world_size()
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self.micro_batches = options.batch // (options.micro_batch * self.dp)
        self.train_windows = Windows(corpus.train, options.seq_len)
        self.held_out_windows = Windows(corpus.held_out, options.seq_len)
        self.vocab_size = padded_vocab_size(options, corpus)
        self.model = build_model(options, self.vocab_size, self.device)
        self.optimizer, self.scheduler = build_optimizer(options, self.model)
        self.run_schedule = schedule(options.cuda_graph)
        if options.loss == "cce":
            cce_tp.megatron.install(self.model, backward=options.backward_mode(), strict=True)
            cce_tp.sampler.manual_seed(options.seed)
        self.log = Log(options.out / "log.jsonl", None) if runtime.is_main else None

    def run(self) -> None:
        """Train, measure, leave the log."""
        self._introduce()
        if self.options.eval_every:
            self._report(Record(0, held_out_loss=self.evaluate()))
        seconds = []
        for step in range(1, self.options.steps + 1):
            record = self.train_step(step)
            seconds.append(record.step_seconds or 0.0)
            self._report(record)
        kept = seconds[len(seconds) // 4 :]  # the first ones compile and warm up
        summary: dict[str, Any] = {
            **json.loads(json.dumps(asdict(self.options), default=str)),
            "name": self.options.describe_loss(),
            "world_size": dist.get_world_size(),
            "step_seconds": statistics.median(kept),
            "peak_memory_bytes": int(self._largest(peak_memory(self.device))),
        }
        if self.options.measure:
            summary |= self.measure_loss(self.options.measure)
        if self.log:
            (self.options.out / "run.json").write_text(json.dumps(summary, indent=2) + "\n")
        self._say(
            f"median step {statistics.median(kept) * 1e3:.1f} ms; log.jsonl and run.json are in {self.options.out}"
        )

    def train_step(self, step: int) -> Record:
        """One optimizer step."""
        start = time.perf_counter()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self._mean_loss(self._batches((step - 1) * self.options.batch), self.micro_batches, forward_only=False)
        _, norm, _ = self.optimizer.step()
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        self.scheduler.step(increment=1)
        mean = self._sum_over_ranks(loss)
        seconds = time.perf_counter() - start
        every = self.options.eval_every
        due = every > 0 and (step % every == 0 or step == self.options.steps)
        return Record(
            step,
            loss=mean,
            held_out_loss=self.evaluate() if due else None,
            lr=lr,
            grad_norm=float(norm),
            tokens_per_second=self.options.batch * self.options.seq_len / seconds,
            step_seconds=seconds,
            peak_memory_bytes=int(self._largest(peak_memory(self.device))),
        )

    def evaluate(self) -> float:
        """Mean loss over the held-out batches."""
        self.model.eval()
        batch, count = self.options.batch, self.options.eval_batches
        rows = batch // self.dp
        windows = (
            self.held_out_windows.spread(index * batch + self.dp_rank * rows, rows, count * batch)
            for index in range(count)
        )
        batches = ({"tokens": part} for whole in windows for part in whole.split(self.options.micro_batch))
        with torch.no_grad():
            loss = self._mean_loss(batches, count * self.micro_batches, forward_only=True)
        self.model.train()
        return self._sum_over_ranks(loss)

    def measure_loss(self, repeats: int) -> dict[str, float]:
        """Output layer and loss alone, forward and backward, on the hidden states of one more batch.

        The time is the median of ``repeats``, the memory what is allocated meanwhile above what is there; of the last
        stage's ranks, the largest.
        """
        self.run_schedule = schedule(cuda_graph=False)  # a graph would not run the hook
        kept: list[tuple[Any, ...]] = []
        seconds, above = 0.0, 0
        if self.is_last_stage:
            layer = unwrap(self.model).output_layer
            handle = layer.register_forward_pre_hook(lambda _, args: kept.append(args))
        self.model.zero_grad_buffer()
        self._mean_loss(self._batches(0), self.micro_batches, forward_only=False)
        if self.is_last_stage:
            handle.remove()
            with self.model.no_sync():
                seconds, above = self._time_loss(kept[0][0].detach().requires_grad_(), repeats)
        return {"loss_seconds": self._largest(seconds), "loss_memory_bytes": int(self._largest(above))}

    def _time_loss(self, hidden: Tensor, repeats: int) -> tuple[float, int]:
        """Seconds and bytes, behind matrix products: as behind a model's layers, the host is ahead."""
        from megatron.core import parallel_state

        model = unwrap(self.model)
        labels = next(self._batches(0))["tokens"][:, 1:].to(self.device)

        def loss_layer() -> None:
            hidden.grad = None
            logits, _ = model.output_layer(hidden, weight=None)
            model.compute_language_model_loss(labels, logits).mean().backward()

        group = parallel_state.get_tensor_model_parallel_group()
        place = Place(group, dist.get_rank(group), dist.get_world_size(group), self.device)
        size = 8192 if place.on_gpu else 1
        matrix = torch.randn(size, size, device=self.device, dtype=torch.bfloat16)
        meter = GroupMeter(place, lambda: matrix @ matrix)
        above = [meter.peak(loss_layer) or 0 for _ in range(3)]
        times = [meter.milliseconds(loss_layer) for _ in range(repeats)]
        return statistics.median(times) / 1e3, max(above)

    def _batches(self, first: int) -> Iterator[dict[str, Tensor]]:
        """This replica's micro-batches of the global batch that begins at window ``first``."""
        size = self.options.micro_batch
        for index in range(self.micro_batches):
            offset = (index * self.dp + self.dp_rank) * size
            yield {"tokens": self.train_windows.shuffled(first + offset, size, self.options.seed)}

    def _mean_loss(self, batches: Iterator[dict[str, Tensor]], count: int, forward_only: bool) -> Tensor:
        """Run Megatron's schedule; the mean loss on the last stage, 0 elsewhere."""
        options = self.options
        losses = self.run_schedule(
            forward_step_func=self._forward_step,
            data_iterator=batches,
            model=[self.model],
            num_microbatches=count,
            seq_length=options.seq_len,
            micro_batch_size=options.micro_batch,
            forward_only=forward_only,
        )
        if not self.is_last_stage:
            return torch.zeros((), device=self.device)
        return torch.stack([part["loss"] for part in losses]).mean()

    def _forward_step(
        self, batches: Iterator[dict[str, Tensor]], model: nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)["tokens"].to(self.device, non_blocking=True)
        positions = torch.arange(self.options.seq_len, device=self.device).expand(len(batch), -1)
        return model(batch[:, :-1], positions, None, labels=batch[:, 1:]), _mean

    def _sum_over_ranks(self, loss: Tensor) -> float:
        """Tensor-parallel ranks hold equal losses, replicas their own, and all stages but the last have 0."""
        total = loss.detach().float().reshape(1)
        dist.all_reduce(total)
        return total.item() / (self.options.tp * self.dp)

    def _largest(self, value: float) -> float:
        largest = torch.tensor([float(value)], dtype=torch.float64, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return largest.item()

    def _introduce(self) -> None:
        options = self.options
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        itemsize = getattr(torch, options.dtype).itemsize
        logits = options.micro_batch * options.seq_len * self.vocab_size * itemsize // options.tp
        self._say(
            f"GPT, {parameters / 1e6:.1f} M parameters on a rank, vocabulary {self.vocab_size:,}; "
            f"tp {options.tp} x pp {options.pp} x dp {self.dp} on {options.device}, {options.dtype}\n"
            f"loss: {options.describe_loss()}; {options.batch} x {options.seq_len} tokens a step in "
            f"{self.micro_batches} micro-batches, each with logits of {human(logits)} on a rank"
        )

    def _report(self, record: Record) -> None:
        if self.log:
            self.log.write(record)
        if record.held_out_loss is not None or record.step % 10 == 0:
            facts = [f"step {record.step:>5}"]
            if record.loss is not None and record.step_seconds is not None and record.peak_memory_bytes is not None:
                facts += [
                    f"loss {record.loss:.4f}",
                    f"{record.step_seconds * 1e3:.1f} ms",
                    f"peak {human(record.peak_memory_bytes)}",
                ]
            if record.held_out_loss is not None:
                facts.append(f"held out {record.held_out_loss:.4f}")
            self._say("  ".join(facts))

    def _say(self, text: str) -> None:
        if self.runtime.is_main:
            print(text, flush=True)


def _mean(per_token: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = per_token.mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides its own in place


def schedule(cuda_graph: bool) -> Callable[..., list[dict[str, Tensor]]]:
    """Megatron's schedule for this pipeline; in a graph after some ordinary steps, if so."""
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func

    function: Callable[..., list[dict[str, Tensor]]] = get_forward_backward_func()
    return FullCudaGraphWrapper(function, cuda_graph_warmup_steps=GRAPH_WARMUP) if cuda_graph else function


def capture_stream(cuda_graph: bool) -> AbstractContextManager[object]:
    """The stream on which Megatron captures: autograd remembers on which one a parameter was first seen."""
    if not cuda_graph:
        return nullcontext()
    from megatron.core.full_cuda_graph import get_shared_capture_stream

    return torch.cuda.stream(get_shared_capture_stream())


def unwrap(model: nn.Module) -> Any:
    """The GPTModel inside DDP and Float16Module."""
    inner: Any = model
    while hasattr(inner, "module"):
        inner = inner.module
    return inner


def padded_vocab_size(options: Options, corpus: Corpus) -> int:
    """Rows of the classifier, shared out evenly; raises ValueError where the tokenizer has more tokens."""
    wanted = options.vocab_size or corpus.vocab_size
    if wanted < corpus.vocab_size:
        raise ValueError(f"--vocab-size {wanted} is less than the tokenizer's {corpus.vocab_size}")
    return -(-wanted // options.tp) * options.tp


def build_model(options: Options, vocab_size: int, device: torch.device) -> Any:
    """This rank's part of the model in Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module
    from megatron_gpt import build_gpt, gpt_config

    dtype = getattr(torch, options.dtype)
    on_cpu = device.type == "cpu"
    config = gpt_config(
        options.dim,
        options.layers,
        options.heads,
        dtype,
        on_cpu,
        tensor_model_parallel_size=options.tp,
        pipeline_model_parallel_size=options.pp,
        sequence_parallel=options.sequence_parallel,
        gradient_accumulation_fusion=options.gradient_accumulation_fusion,
        cross_entropy_loss_fusion=options.loss == "megatron",
        cross_entropy_fusion_impl="native",
        cuda_graph_impl="full_iteration" if options.cuda_graph else "none",
    )
    model = build_gpt(config, vocab_size, options.seq_len).to(device)
    if dtype == torch.bfloat16:
        model = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=not options.cuda_graph,  # a graph would hold the gather of one step
        use_distributed_optimizer=True,
    )
    return DistributedDataParallel(config, ddp, model)


def build_optimizer(options: Options, model: Any) -> tuple[Any, Any]:
    """Megatron's distributed optimizer and its learning rates; its schedules are told of the first."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.lr / 10,
            weight_decay=options.weight_decay,
            adam_beta2=0.95,
            clip_grad=options.clip,
            bf16=options.dtype == "bfloat16",
            params_dtype=getattr(torch, options.dtype),
            use_distributed_optimizer=True,
            overlap_param_gather=not options.cuda_graph,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.lr / 10,
        lr_warmup_steps=options.warmup,
        lr_decay_steps=options.steps,
        lr_decay_style="cosine",
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=options.steps,
        wd_incr_style="constant",
    )
    model.config.grad_scale_func = optimizer.scale_loss
    model.config.no_sync_func = model.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    return optimizer, scheduler


def start_megatron(options: Options) -> None:
    """Megatron's process groups and random states."""
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=options.tp, pipeline_model_parallel_size=options.pp
    )
    seed = options.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed, use_cudagraphable_rng=options.cuda_graph)


def find_corpus(options: Options, runtime: Runtime) -> Corpus:
    """The tokens made ahead, or those of ``--data``."""
    if options.tokens is not None:
        return text_data.prepared_corpus(options.tokens)
    return text_data.share_corpus(
        options.data, options.held_out, options.cache, options.seq_len, runtime.is_main, lambda done, total: None
    )


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = parse_options(argv)
    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        fail("megatron-core isn't installed: pip install '.[megatron]'")
    warnings.filterwarnings("ignore", module="megatron")
    runtime = initialize(options.device)
    if runtime.is_main:
        options.out.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with capture_stream(options.cuda_graph):
        try:
            corpus = find_corpus(options, runtime)
            start_megatron(options)
            trainer = Trainer(options, runtime, corpus)
        except (ValueError, NotImplementedError) as error:
            finalize()
            fail(str(error))
        trainer.run()
    finalize()
    return 0


if __name__ == "__main__":
    sys.exit(main())
