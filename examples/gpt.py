"""A GPT in plain PyTorch, and how it is spread over a ``("dp", "tp")`` mesh.

Between the modules of a block every rank of a tp group holds its part of the sequence, ``[batch, sequence/tp, dim]``;
attention and MLP gather it and scatter their sum (sequence parallel). Per block and direction that is 2 all-gathers and
2 reduce-scatters; the embedding adds one reduce-scatter and the loss one all-gather and its own small combine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import cce_tp

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(this rank's part of the hidden states, the classifier's ``Shard(0)``, the whole sequence's targets) -> mean loss."""

SEQUENCE_DIM = 1


@dataclass(frozen=True)
class GPTConfig:
    """Shape of the model."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    seq_len: int
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def mlp_dim(self) -> int:
        """SwiGLU has three matrices where a plain MLP has two: 8/3 of dim keeps the parameters, rounded up to 64."""
        return (self.dim * 8 // 3 + 63) // 64 * 64


class Attention(nn.Module):
    """Causal self-attention with rotary positions; under tp each rank holds some of the heads."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        frequency = config.rope_base ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
        angle = torch.outer(torch.arange(config.seq_len), frequency)
        # Buffers, not arguments: FSDP casts arguments to bf16, and a position of some thousands needs fp32.
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Turn each pair (x_i, x_{i + head_dim/2}) by its position's angle."""
        length = x.shape[-2]
        first, second = x.float().chunk(2, dim=-1)
        cos, sin = self.cos[:length], self.sin[:length]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(self.rotate(q), self.rotate(k), v, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.up = nn.Linear(config.dim, config.mlp_dim, bias=False)
        self.down = nn.Linear(config.mlp_dim, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Head(nn.Module):
    """Classifier and loss in one module.

    FSDP gathers a parameter for the forward of the module that owns it, so the loss, which reads the weight itself and
    not a product with it, has to happen inside that forward.
    """

    def __init__(self, config: GPTConfig, loss: Loss) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.loss = loss

    def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
        return self.loss(hidden, self.weight, target)


class GPT(nn.Module):
    """Tokens and their successors in, mean loss out; no logits on the way unless ``loss`` makes them."""

    def __init__(self, config: GPTConfig, loss: Loss) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = Head(config, loss)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x), target)

    @torch.no_grad()
    def init_weights(self, seed: int, device: torch.device | str = "cpu") -> None:
        """Normal(0, 0.02), smaller where 2 · layers outputs add up in the residual stream.

        Drawn for the whole matrices, before they are spread, so that the start is the same on every layout; and on the
        CPU, so that it is the same on every device, unless ``device``, where the parameters are, says otherwise.
        """
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = 0.02
            if name.endswith(("wo.weight", "down.weight")):
                std /= (2 * len(self.blocks)) ** 0.5
            parameter.normal_(0.0, std, generator=generator)


def cce_loss(backward: str) -> Loss:
    """The loss without logits; tp group and vocabulary shard come from the classifier's DTensor."""

    def loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return cce_tp.linear_cross_entropy(
            hidden, weight, target, sequence_parallel=True, sequence_dim=SEQUENCE_DIM, backward=backward
        )

    return loss


def logits_loss(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """The ordinary loss to compare with: this rank's logits are written out in fp32, ``[batch · sequence, vocab/tp]``.

    It and its backward have to run under ``torch.distributed.tensor.parallel.loss_parallel``.
    """
    assert isinstance(weight, DTensor)
    sharded = DTensor.from_local(hidden, weight.device_mesh, [Shard(SEQUENCE_DIM)], run_check=False)
    whole = sharded.redistribute(placements=[Replicate()])
    loss = F.cross_entropy(F.linear(whole.flatten(0, 1), weight).float(), target.flatten())
    assert isinstance(loss, DTensor)
    return loss.to_local()


def _block_plan() -> dict[str, ParallelStyle]:
    gather = PrepareModuleInput(input_layouts=(Shard(SEQUENCE_DIM),), desired_input_layouts=(Replicate(),))
    return {
        "attention_norm": SequenceParallel(sequence_dim=SEQUENCE_DIM),
        "attention": gather,
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM)),
        "mlp_norm": SequenceParallel(sequence_dim=SEQUENCE_DIM),
        "mlp": gather,
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(SEQUENCE_DIM)),
    }


def parallelize(model: GPT, mesh: DeviceMesh, param_dtype: torch.dtype) -> GPT:
    """Spread the model over tp, then what each tp rank holds over dp.

    The mesh always has both dimensions, be they of size 1: one way through for every layout, and the same
    mixed precision (fp32 parameters and reductions, products in ``param_dtype``).
    """
    tp = mesh["tp"]
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE_DIM))
    norm = SequenceParallel(sequence_dim=SEQUENCE_DIM, use_local_output=True)
    parallelize_module(model, tp, {"embedding": embedding, "norm": norm})
    for block in model.blocks:
        parallelize_module(block, tp, _block_plan())
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight, tp, [Shard(0)]))

    # Nothing here works in place on what a module returns, which is what PyTorch then warns of.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for module in (model.embedding, *model.blocks, model.head, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    return model


def build_model(config: GPTConfig, loss: Loss, mesh: DeviceMesh, param_dtype: torch.dtype, seed: int) -> GPT:
    """The model of ``config``, with the weights of ``seed``, on the mesh's devices."""
    model = GPT(config, loss)
    model.init_weights(seed)
    return parallelize(model.to(mesh.device_type), mesh, param_dtype)
