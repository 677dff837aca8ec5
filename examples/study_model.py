"""What the study's experiments share: model sizes, the ways to compute the loss, one training run, its evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, GPTConfig, Loss
from text_data import Corpus, Windows
from torch import Tensor, nn
from torch.func import functional_call

import cce_tp
from cce_tp.options import Backward

SEQ_LEN = 512
MICRO_TOKENS = 16_384
"""Most tokens in one forward pass; larger batches are accumulated."""


@dataclass(frozen=True)
class Size:
    """A model's shape and its learning rate at 16k tokens a step."""

    dim: int
    layers: int
    heads: int
    lr: float


SIZES = {
    "tiny": Size(dim=32, layers=1, heads=2, lr=1e-2),
    "small": Size(dim=256, layers=4, heads=4, lr=2e-3),
    "medium": Size(dim=512, layers=6, heads=8, lr=1e-3),
    "large": Size(dim=768, layers=12, heads=12, lr=6e-4),
}
SAMPLED = tuple(f"sampled-2^-{power}" for power in (12, 10, 8, 6, 4))
MODES = ("torch", "megatron", "exact", "filtered", "filtered-input", *SAMPLED)


def backward_of(mode: str) -> Backward:
    """The ``backward`` argument of a mode of ours; raises ValueError for other names."""
    if mode == "exact":
        return cce_tp.Exact()
    if mode == "filtered":
        return cce_tp.Filtered()
    if mode == "filtered-input":
        return cce_tp.Filtered(weight=False)
    name, _, power = mode.partition("-2^-")
    if name == "sampled" and power.isdigit():
        return cce_tp.Sampled(eps=2.0 ** -int(power))
    raise ValueError(f"mode {mode!r} is none of {', '.join(MODES)}")


def make_loss(mode: str, device: torch.device) -> Loss:
    """The mean loss as a mode computes it, from hidden states, the classifier and the targets."""
    if mode == "torch":
        return _torch_loss
    if mode == "megatron":
        return _megatron_loss(device)
    backward = backward_of(mode)

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return cce_tp.linear_cross_entropy(hidden, weight, target, backward=backward)

    return loss


def _torch_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Logits in the dtype of the products, the softmax in fp32."""
    return F.cross_entropy(F.linear(hidden, weight).flatten(0, -2).float(), target.flatten())


def megatron_available() -> bool:
    """Whether Megatron's loss can be had."""
    try:
        from megatron.core.fusions import fused_cross_entropy  # noqa: F401
    except ImportError:
        return False
    return True


def _megatron_loss(device: torch.device) -> Loss:
    """Megatron's fused vocabulary-parallel cross-entropy, in a group of one."""
    import torch._dynamo
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    # Its numerics are the same without the compiler, which would take longer than some of the runs.
    torch._dynamo.config.disable = True
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(hidden, weight).flatten(0, -2)
        return fused_vocab_parallel_cross_entropy(logits, target.flatten(), group).float().mean()

    return loss


@dataclass(frozen=True)
class Data:
    """The text as tokens, and how much of it is used."""

    corpus: Corpus
    seq_len: int = SEQ_LEN

    @property
    def train(self) -> Windows:
        return Windows(self.corpus.train, self.seq_len)

    @property
    def held_out(self) -> Windows:
        return Windows(self.corpus.held_out, self.seq_len)


BANDS = ("never", "1-9", "10-99", "100-999", "1k-10k", "10k+")
"""Vocabulary ids by how often they are a target in the text that a run trains on."""


def band_of(counts: Tensor) -> Tensor:
    """``[V]`` counts to indices of ``BANDS``."""
    edges = torch.tensor([1, 10, 100, 1000, 10_000], device=counts.device)
    return torch.bucketize(counts, edges, right=True)


def per_band(values: Tensor, band: Tensor) -> Tensor:
    """Means of ``values`` by ``band``, fp64 ``[bands]``; NaN where a band is empty."""
    sums = torch.zeros(len(BANDS), dtype=torch.float64, device=values.device)
    number = sums.clone()
    sums.index_add_(0, band, values.double())
    number.index_add_(0, band, torch.ones_like(values, dtype=torch.float64))
    return sums / number


@dataclass(frozen=True)
class Recipe:
    """All that decides what a run learns, but for the text."""

    size: str
    batch_tokens: int
    mode: str
    seed: int
    steps: int
    lr_factor: float = 1.0

    @property
    def lr(self) -> float:
        return SIZES[self.size].lr * self.lr_factor

    def learning_rate(self, step: int) -> float:
        """Warm-up over a tenth of the steps, then a cosine to a tenth."""
        warmup = max(1, self.steps // 10)
        if step < warmup:
            return self.lr * (step + 1) / warmup
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup))))


class Trainer:
    """One run on one device. On a GPU a step is a CUDA graph, so that small steps are not bound by launches.

    Parameters and optimizer are fp32, products bf16 on a GPU (as with FSDP's mixed precision) and fp32 on the CPU.
    """

    def __init__(self, recipe: Recipe, data: Data, device: torch.device) -> None:
        self.recipe, self.data, self.device = recipe, data, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        size = SIZES[recipe.size]
        config = GPTConfig(data.corpus.vocab_size, size.dim, size.layers, size.heads, data.seq_len)
        self.rows = recipe.batch_tokens // data.seq_len
        if self.rows * data.seq_len != recipe.batch_tokens:
            raise ValueError(f"{recipe.batch_tokens} tokens a step do not divide into sequences of {data.seq_len}")
        self.loss = make_loss(recipe.mode, device)
        with torch.device(device):
            self.model = GPT(config, self.loss)
        self.model.init_weights(recipe.seed, device)
        self.first_classifier = self.model.head.weight.detach().clone()
        self.windows = data.train
        self.step = 0
        self.batch = torch.zeros(self.rows, data.seq_len + 1, dtype=torch.int64, device=device)
        self.sums = torch.zeros(2, dtype=torch.float32, device=device)
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        norms = [p for p in self.model.parameters() if p.dim() == 1]
        on_gpu = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
            lr=torch.zeros((), device=device) if on_gpu else 0.0,
            betas=(0.9, 0.95),
            fused=True,
            capturable=on_gpu,
        )
        cce_tp.sampler.manual_seed(recipe.seed)
        self.graph: torch.cuda.CUDAGraph | None = None
        if on_gpu and recipe.mode != "megatron":  # whose loss assigns to masked elements
            self.graph = self._capture()

    def call(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor], rows: Tensor) -> Tensor:
        """``loss`` of (hidden states, classifier, targets) for windows ``rows``, in the dtype of the products."""
        cast = {name: parameter.to(self.dtype) for name, parameter in self.model.named_parameters()}
        self.model.head.loss = loss
        return functional_call(self.model, cast, (rows[:, :-1], rows[:, 1:]))

    def micro_batches(self, rows: Tensor) -> Sequence[Tensor]:
        return rows.split(max(1, MICRO_TOKENS // self.data.seq_len))

    def advance(self, steps: int) -> None:
        """Train; the means of loss and gradient norm wait in ``means``."""
        for _ in range(steps):
            self.batch.copy_(self.windows.shuffled(self.step * self.rows, self.rows, self.recipe.seed))
            self._set_lr(self.recipe.learning_rate(self.step))
            if self.graph is None:
                self._one_step()
            else:
                self.graph.replay()
            self.step += 1

    def means(self, steps: int) -> list[float]:
        """Mean training loss and gradient norm of the last ``steps`` steps; forgets them."""
        values = (self.sums / max(1, steps)).tolist()
        self.sums.zero_()
        return values

    def _set_lr(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def _one_step(self) -> None:
        self.optimizer.zero_grad()
        parts = self.micro_batches(self.batch)
        for rows in parts:
            loss = self.call(self.loss, rows) / len(parts)
            loss.backward()
            self.sums[0] += loss.detach()
        self.sums[1] += nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """One step as a graph; everything that its rehearsal moved is put back."""
        start = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.batch.copy_(self.windows.shuffled(0, self.rows, self.recipe.seed))
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._one_step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may look at the device meanwhile: NCCL's watchdog, where there is a group.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._one_step()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), start)
            for state in self.optimizer.state.values():
                for value in state.values():
                    value.zero_()
            self.sums.zero_()
        cce_tp.sampler.manual_seed(self.recipe.seed)
        return graph

    def training_counts(self, steps: int) -> Tensor:
        """How often each vocabulary id is a target in the first ``steps`` steps: int64 ``[V]``."""
        counts = np.zeros(self.data.corpus.vocab_size, dtype=np.int64)
        windows = min(steps * self.rows, self.windows.count)
        for first in range(0, windows, 1024):
            rows = self.windows.shuffled(first, min(1024, windows - first), self.recipe.seed)
            counts += np.bincount(rows[:, 1:].flatten().numpy(), minlength=len(counts))
        return torch.from_numpy(counts).to(self.device)

    @torch.no_grad()
    def evaluate(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Exact losses and targets of held-out tokens, the same ones for every run: ``[T]`` each."""
        windows = self.data.held_out
        count = min(windows.count, max(1, tokens // self.data.seq_len))
        rows = windows.spread(0, count, count).to(self.device)
        losses = [self.call(_token_losses, part).flatten() for part in self.micro_batches(rows)]
        return torch.cat(losses), rows[:, 1:].flatten()

    def entries_per_token(self) -> float:
        """How many entries of a token's softmax the backward pass works on, in the present batch (hot rows aside)."""
        try:
            backward = backward_of(self.recipe.mode)
        except ValueError:
            return float(self.data.corpus.vocab_size)
        with sampler_restored(), torch.no_grad():
            rate = self.call(_keep_rate(backward), self.micro_batches(self.batch)[0])
        return float(rate) * self.data.corpus.vocab_size

    def classifier_by_band(self, band: Tensor) -> tuple[Tensor, Tensor]:
        """Mean norm of the classifier's rows, and their mean distance from the start, by band."""
        weight = self.model.head.weight.detach()
        drift = (weight - self.first_classifier).norm(dim=1)
        return per_band(weight.norm(dim=1), band), per_band(drift, band)

    def close(self) -> None:
        """Give the graph's memory back before the next run."""
        if self.graph is not None:
            torch.cuda.synchronize()
            self.optimizer.zero_grad()
            self.graph.reset()
            self.graph = None


def hidden_states(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """A "loss" for ``Trainer.call`` that hands out what the head is given: ``[tokens, dim]``."""
    return hidden.flatten(0, -2)


def _token_losses(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    loss = cce_tp.linear_cross_entropy(hidden, weight, target, reduction="none")
    assert isinstance(loss, Tensor)
    return loss


def _keep_rate(backward: Backward) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def rate(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        with torch.enable_grad():  # or nothing would be selected
            result = cce_tp.linear_cross_entropy(
                hidden.detach().requires_grad_(), weight.detach(), target, backward=backward, return_stats=True
            )
        assert isinstance(result, tuple)
        return result[1].keep_rate

    return rate


@contextmanager
def sampler_restored() -> Iterator[None]:
    """A look aside must not change the samples of the training."""
    state = cce_tp.sampler.state_dict()
    try:
        yield
    finally:
        cce_tp.sampler.load_state_dict(state)
