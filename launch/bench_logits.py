"""Hidden states, classifier and targets whose softmax is realistic, flat, or certain; of any shape.

``realistic``: a model's head and its hidden states on a text, from files. They are rotated into D dimensions; the
vocabulary is extended by permuted copies of the head, shifted down by 4, 5, 6, ... nats (one more dimension, constant
in the hidden states, carries the shift). Tokens are repeated if there are too few.

``random``: a model at its initialisation, whose softmax is nearly flat. ``one-hot``: a model that is sure of its
targets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .console import UsageError
from .model_files import Model, load_model

KINDS = ("realistic", "random", "one-hot")
HEAD_FILE, HIDDEN_FILE = "smollm2_head.npz", "smollm2_hidden_pydocs.npz"
FIRST_SHIFT = 4.0
INITIAL_SPREAD = 0.02
SURENESS = 5.0
"""Nats by which a one-hot model's target exceeds all the others together: a loss of about exp(-5)."""

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Inputs:
    """Leaves of the autograd graph, and the targets.

    Attributes:
        hidden: E, ``[N, D]``.
        weight: C, ``[V, D]``.
        target: int64 ``[N]``.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor

    @classmethod
    def leaves(cls, hidden: Tensor, weight: Tensor, target: Tensor, dtype: torch.dtype) -> Inputs:
        return cls(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), target)

    @property
    def shape(self) -> Shape:
        """N, V, D."""
        return len(self.hidden), len(self.weight), self.hidden.shape[1]

    def detached(self) -> Inputs:
        """The same values, which need no gradient."""
        return Inputs(self.hidden.detach(), self.weight.detach(), self.target)

    def shuffled(self) -> Inputs:
        """The same softmax over ids in random order, in which the frequent ones don't come first. Leaves again."""
        order = torch.randperm(len(self.weight), generator=torch.Generator().manual_seed(0)).to(self.target.device)
        return replace(self, weight=self.weight.detach()[order].requires_grad_(), target=order.argsort()[self.target])

    def clear_gradients(self) -> None:
        self.hidden.grad = self.weight.grad = None


def load_folder(folder: Path) -> Model:
    """The model in ``HEAD_FILE`` and ``HIDDEN_FILE``.

    Raises:
        UsageError: they are not there, or are no such files.
    """
    for name in (HEAD_FILE, HIDDEN_FILE):
        if not (folder / name).is_file():
            raise UsageError(f"{folder} has no file {name}")
    return load_model(folder / HEAD_FILE, folder / HIDDEN_FILE)


def make(kind: str, shape: Shape, dtype: torch.dtype, device: str, model: Model | None = None) -> Inputs:
    """One of ``KINDS``; ``realistic`` is made from ``model``. The same call makes the same inputs.

    Raises:
        UsageError: the model cannot be brought into this shape.
    """
    generator = torch.Generator(device).manual_seed(0)
    if kind == "realistic":
        assert model is not None
        return Inputs.leaves(*_realistic(model, shape, device, generator), dtype)
    return Inputs.leaves(*(_random if kind == "random" else _one_hot)(shape, device, generator), dtype)


def _realistic(model: Model, shape: Shape, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    tokens, rows, hidden = shape
    e, c, target = (x.to(device) for x in (model.hidden.float(), model.weight.float(), model.target))
    size, extended = e.shape[1], rows > len(c)
    if hidden < size + extended:
        what = f"{rows} rows from one of {len(c)} rows" if extended else "this model"
        raise UsageError(f"{what} cannot be brought into {hidden} dimensions: at least {size + extended} are needed")
    again = torch.arange(tokens, device=device) % len(e)
    e, target = e[again], target[again]
    if rows < len(c):
        c = c[:rows]
        outside = target >= rows
        target[outside] = (e[outside] @ c.T).softmax(1).multinomial(1, generator=generator)[:, 0]
    if hidden == size:
        return e, c, target
    scale = e.square().mean().sqrt()
    copies, shifts = [c], [torch.zeros(len(c), device=device)]
    while sum(len(copy) for copy in copies) < rows:
        order = torch.randperm(len(c), generator=generator, device=device)
        copies.append(c[order])
        shifts.append(torch.full((len(c),), -(FIRST_SHIFT + len(copies) - 2), device=device))
    c = torch.cat([torch.cat(copies), torch.cat(shifts)[:, None] / scale], dim=1)[:rows]
    e = torch.cat([e, scale.expand(tokens, 1)], dim=1)
    q = torch.linalg.qr(torch.randn(hidden, e.shape[1], generator=generator, device=device)).Q
    return e @ q.T, c @ q.T, target


def _random(shape: Shape, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    tokens, rows, hidden = shape
    e = torch.randn(tokens, hidden, generator=generator, device=device)
    c = INITIAL_SPREAD * torch.randn(rows, hidden, generator=generator, device=device)
    return e, c, torch.randint(rows, (tokens,), generator=generator, device=device)


def _one_hot(shape: Shape, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    tokens, rows, hidden = shape
    c = torch.nn.functional.normalize(torch.randn(rows, hidden, generator=generator, device=device))
    target = torch.randint(rows, (tokens,), generator=generator, device=device)
    return (math.log(rows) + SURENESS) * c[target], c, target
