"""The random state of ``backward="sampled"``.

Every call that will have a backward pass advances a counter that lives on the device, so that steps draw different
samples, replays of a CUDA graph included. The call's seed mixes that counter with the seed of the process and with the
identity of the tensor-parallel group: the ranks of one group must make the same decisions, while data-parallel and
context-parallel replicas must not, or their noise would add up instead of averaging out.

The ranks of a group stay together as long as they make the same calls; nothing is communicated.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor

from .collectives import TensorParallelGroup

_STEP = 0x5851F42D4C957F2D  # odd: different steps give different seeds


def _hash(*parts: int) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _identity(group: TensorParallelGroup) -> int:
    """A number that the ranks of a group share and other groups don't: its first rank in the job."""
    if group.handle is not None:
        return dist.get_process_group_ranks(group.handle)[0]
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class SamplerState:
    """The seed and the counter; ``cce_tp.sampler`` is the only one. Put ``state_dict()`` into checkpoints."""

    def __init__(self) -> None:
        self._seed = 0
        self._first_step = 0
        self._steps: dict[torch.device, Tensor] = {}

    def manual_seed(self, seed: int) -> None:
        """Start again from ``seed``, which must be the same on every rank of a tensor-parallel group.

        Raises:
            TypeError: ``seed`` is no int.
        """
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed={seed!r} must be an int")
        self._seed = seed
        self._set_step(0)

    def state_dict(self) -> dict[str, int]:
        """The state as plain numbers; waits for the device."""
        step = max([self._first_step, *(int(step) for step in self._steps.values())])
        return {"seed": self._seed, "step": step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue from a ``state_dict``, also in graphs captured before."""
        self._seed = int(state["seed"])
        self._set_step(int(state["step"]))

    def _set_step(self, step: int) -> None:
        self._first_step = step
        for counter in self._steps.values():
            counter.fill_(step)

    def next_seed(self, device: torch.device, group: TensorParallelGroup) -> Tensor:
        """Advance the counter; the seed of a call, int64 ``[1]`` on the device. No synchronisation."""
        if device not in self._steps:
            self._steps[device] = torch.full((1,), self._first_step, dtype=torch.int64, device=device)
        counter = self._steps[device].add_(1)
        return counter * _STEP + _hash(self._seed, _identity(group))


def fixed_seed(seed: int, device: torch.device) -> Tensor:
    """The seed of a call that names its own: the same for every group and step."""
    return torch.full((1,), _hash(seed), dtype=torch.int64, device=device)


sampler = SamplerState()
