"""Hidden states, labels and a classifier from .npz and .safetensors files.

A classifier is an array ``weight`` ``[V, D]``, or has one of the names that models have for it; or it is in blocks of
columns, ``q`` int8 ``[V, D]`` and ``scale`` ``[V, D / block]``, row = q · scale. Hidden states are ``hidden``
``[N, D]``, or ``e_bf16``, an int16 view of bf16; labels are ``targets`` ``[N]``, negative where there is none.
"""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .console import UsageError

WEIGHT_NAMES = ("weight", "lm_head.weight", "model.embed_tokens.weight", "transformer.wte.weight")
SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}


@dataclass(frozen=True)
class Model:
    """What the loss sees of a model on a text; tokens without a label are left out.

    Attributes:
        hidden: E, ``[N, D]``, floating.
        weight: C, ``[V, D]``, floating.
        target: ``[N]`` int64 in ``[0, V)``.
    """

    hidden: Tensor
    weight: Tensor
    target: Tensor


def read_arrays(path: Path) -> Mapping[str, Tensor]:
    """The arrays of a file.

    Raises:
        UsageError: it is neither .npz nor .safetensors.
    """
    try:
        if path.suffix == ".safetensors":
            return _read_safetensors(path)
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, zipfile.BadZipFile, struct.error):
        raise UsageError(f"{path} cannot be read as .npz or .safetensors") from None


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    """The format is a length, a JSON header, and the arrays one after the other."""
    data = np.memmap(path, dtype=np.uint8, mode="c")  # "c": private, since torch wants to be able to write
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    header = json.loads(data[8 : 8 + length].tobytes())
    arrays = {}
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] not in SAFETENSORS_DTYPES:
            continue
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        flat = torch.from_numpy(data[start:stop]).clone()  # aligned
        arrays[name] = flat.view(SAFETENSORS_DTYPES[entry["dtype"]]).view(entry["shape"])
    return arrays


def _weight(path: Path, arrays: Mapping[str, Tensor]) -> Tensor:
    for name in WEIGHT_NAMES:
        if name in arrays:
            return arrays[name]
    if "q" in arrays and "scale" in arrays:
        q, scale = arrays["q"].float(), arrays["scale"].float()
        if q.dim() != 2 or scale.dim() != 2 or len(q) != len(scale) or q.shape[1] % max(1, scale.shape[1]):
            raise UsageError(f"{path}: q {list(q.shape)} and scale {list(scale.shape)} do not belong together")
        return q * scale.repeat_interleave(q.shape[1] // scale.shape[1], dim=1)
    raise UsageError(f"{path} has neither an array weight nor q and scale")


def _hidden(path: Path, arrays: Mapping[str, Tensor]) -> Tensor:
    if "hidden" in arrays:
        return arrays["hidden"]
    if "e_bf16" in arrays and arrays["e_bf16"].dtype == torch.int16:
        return arrays["e_bf16"].view(torch.bfloat16)
    raise UsageError(f"{path} has neither an array hidden nor e_bf16")


def load_model(head: Path, hidden: Path) -> Model:
    """Read and check both files, which may be the same one.

    Raises:
        UsageError: something is missing or does not fit.
    """
    c, arrays = _weight(head, read_arrays(head)), read_arrays(hidden)
    e = _hidden(hidden, arrays)
    if "targets" not in arrays:
        raise UsageError(f"{hidden} has no array targets")
    return checked(e, c, arrays["targets"])


def checked(e: Tensor, c: Tensor, target: Tensor) -> Model:
    """What the three make together.

    Raises:
        UsageError: they do not fit.
    """
    if e.dim() != 2 or c.dim() != 2 or not e.is_floating_point() or not c.is_floating_point():
        raise UsageError(f"hidden states {list(e.shape)} {e.dtype} and classifier {list(c.shape)} {c.dtype} are no fit")
    if e.shape[1] != c.shape[1]:
        raise UsageError(f"hidden states of size {e.shape[1]} do not fit a classifier of size {c.shape[1]}")
    if target.shape != e.shape[:1] or target.is_floating_point():
        raise UsageError(f"targets {list(target.shape)} {target.dtype} are not one id for each of {len(e)} tokens")
    labelled = target >= 0
    e, target = e[labelled], target[labelled].long()
    if len(target) == 0 or len(c) < 2:
        raise UsageError(f"there is nothing to look at: {len(target)} tokens with a label, {len(c)} classifier rows")
    if int(target.max()) >= len(c):
        raise UsageError(f"target {int(target.max())} is outside the vocabulary of {len(c)}")
    if not (bool(e.isfinite().all()) and bool(c.isfinite().all())):
        raise UsageError("hidden states or classifier hold values that are not finite")
    return Model(e, c, target)
