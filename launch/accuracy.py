"""How far each backward mode is from the float32 gradient, on a model's own head and hidden states.

``python -m cce_tp.launch.accuracy --head head.npz --hidden hidden.npz``

``head.npz`` holds a classifier in blocks of columns, ``q`` int8 ``[V, D]`` and ``scale`` float16 ``[V, D / block]``,
row = q · scale; ``hidden.npz`` holds ``e_bf16``, an int16 view of bf16 ``[N, D]``, and ``targets`` ``[N]``. Everything
but the reference is computed in bf16: PyTorch's product and cross-entropy, ``exact``, and ``sampled`` at several eps.
Errors are relative in the Frobenius norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import cce_tp

from .console import Parser, UsageError, add_json, existing_file, positive, write_json

Loss = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def _open(path: Path, *names: str) -> Iterator[Any]:
    try:
        file = np.load(path)
        missing = [name for name in names if name not in file]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is no .npz file: {error}") from None
    if missing:
        raise UsageError(f"{path} has no array named {missing[0]}")
    with file:
        yield file


def load_head(path: Path) -> Tensor:
    """The classifier, fp32 ``[V, D]``."""
    with _open(path, "q", "scale") as file:
        q, scale = torch.from_numpy(file["q"]).float(), torch.from_numpy(file["scale"]).float()
    return q * scale.repeat_interleave(q.shape[1] // scale.shape[1], dim=1)


def load_hidden(path: Path) -> tuple[Tensor, Tensor]:
    """Hidden states, bf16 ``[N, D]``, and targets, int64 ``[N]``."""
    with _open(path, "e_bf16", "targets") as file:
        return torch.from_numpy(file["e_bf16"]).view(torch.bfloat16), torch.from_numpy(file["targets"]).long()


def _gradients(loss: Loss, hidden: Tensor, head: Tensor) -> tuple[float, Tensor, Tensor]:
    e, c = hidden.detach().clone().requires_grad_(), head.detach().clone().requires_grad_()
    value = loss(e, c)
    grad_e, grad_c = torch.autograd.grad(value, (e, c))
    return value.item(), grad_e.float(), grad_c.float()


def _relative(value: Tensor, right: Tensor) -> float:
    return float((value - right).norm() / right.norm())


def _modes(target: Tensor) -> dict[str, Loss]:
    def ours(mode: cce_tp.Exact | cce_tp.Sampled) -> Loss:
        return lambda e, c: cce_tp.linear_cross_entropy(e, c, target, backward=mode)

    return {
        "PyTorch, logits in bf16": lambda e, c: F.cross_entropy(e @ c.T, target),
        "PyTorch, bf16 logits widened": lambda e, c: F.cross_entropy((e @ c.T).float(), target),
        "exact": ours(cce_tp.Exact()),
        **{f"sampled, eps = 2^-{power}": ours(cce_tp.Sampled(eps=2.0**-power, seed=1)) for power in (12, 10, 9, 8)},
    }


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = Parser(prog="cce-tp accuracy", description=__doc__)
    parser.add_argument("--head", type=existing_file, required=True, metavar="FILE")
    parser.add_argument("--hidden", type=existing_file, required=True, metavar="FILE")
    parser.add_argument("--tokens", type=positive, help="use only the first so many")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_json(parser)
    options = parser.parse_args(arguments)
    hidden, target = (x[: options.tokens].to(options.device) for x in load_hidden(options.hidden))
    head = load_head(options.head).to(options.device).bfloat16()
    torch.set_float32_matmul_precision("highest")
    right = _gradients(lambda e, c: F.cross_entropy(e @ c.T, target), hidden.float(), head.float())
    print(f"{len(target)} tokens, V = {head.shape[0]}, D = {head.shape[1]}, {options.device}; loss {right[0]:.6f}")
    results = []
    for name, loss in _modes(target).items():
        value, grad_e, grad_c = _gradients(loss, hidden, head)
        errors = f"grad E {_relative(grad_e, right[1]):.2e}  grad C {_relative(grad_c, right[2]):.2e}"
        print(f"{name:30} loss off by {value - right[0]:+.1e}  {errors}", flush=True)
        results.append(
            {
                "mode": name,
                "loss_error": value - right[0],
                "grad_E": _relative(grad_e, right[1]),
                "grad_C": _relative(grad_c, right[2]),
            }
        )
    write_json(options.json, {"loss": right[0], "tokens": len(target), "modes": results})


if __name__ == "__main__":
    main()
