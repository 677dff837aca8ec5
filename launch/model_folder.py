"""Hidden states and classifier of a Hugging Face folder, computed on text files.

The model runs up to its output layer, whose input is what the loss sees: windows of tokens, one file after the other,
each token labelled with the next. The package transformers is needed, and a tokenizer in the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .console import UsageError
from .model_files import Model, checked

SAME_LOGITS = 1e-2
"""How far the model's own logits may lie from hidden states times classifier, relative to their norm."""
FEWEST_TOKENS = 2


class _Reached(Exception):
    """The output layer, with what it was given."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _stop(layer: Any, inputs: tuple[Tensor, ...]) -> None:
    raise _Reached(inputs[0])


def _load(folder: Path, device: str) -> tuple[Any, Any]:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError:
        raise UsageError("--model needs the package transformers: pip install 'cce_tp[transformers]'") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, torch_dtype="auto")
    except Exception as error:  # every kind that a folder can be wrong in has its own
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UsageError(f"--model {folder} cannot be loaded by transformers: {reason.rstrip(':')}") from None
    if model.get_output_embeddings() is None:
        raise UsageError(f"--model {folder} is a {type(model).__name__}, which has no output layer")
    return tokenizer, model.to(device).eval()


def _read(files: Sequence[Path]) -> Iterator[str]:
    for path in files:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not UTF-8 text") from None


def windows(tokenizer: Any, files: Sequence[Path], length: int, tokens: int) -> list[Tensor]:
    """Consecutive tokens, ``length + 1`` at most, of one file each and not overlapping but for their ends."""
    found: list[Tensor] = []
    left = tokens
    for text in _read(files):
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"], dtype=torch.int64)
        for start in range(0, len(ids) - 1, length):
            window = ids[start : start + min(length, left) + 1]
            if left < 1 or len(window) < FEWEST_TOKENS:
                break
            found.append(window)
            left -= len(window) - 1
    if not found:
        raise UsageError("the text has no two tokens")
    return found


def num_windows(found: Sequence[Tensor]) -> int:
    """Steps of :func:`hidden_states`."""
    return len(found)


@torch.no_grad()
def hidden_states(model: Any, found: Sequence[Tensor], step: Callable[[], None]) -> tuple[Tensor, Tensor]:
    """E ``[N, D]`` and targets ``[N]``, on the CPU."""
    hidden, targets = [], []
    hook = model.get_output_embeddings().register_forward_pre_hook(_stop)
    try:
        for window in found:
            hidden.append(_up_to_the_head(model, window[None, :-1].to(model.device)).cpu())
            targets.append(window[1:])
            step()
    finally:
        hook.remove()
    return torch.cat(hidden), torch.cat(targets)


def _up_to_the_head(model: Any, ids: Tensor) -> Tensor:
    try:
        model(input_ids=ids, use_cache=False)
    except _Reached as reached:
        return reached.hidden[0]
    raise UsageError(f"{type(model).__name__} does not call its output layer")


@torch.no_grad()
def check_logits(model: Any, window: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Hold the model's own logits of a few tokens against plain products.

    Raises:
        UsageError: they differ: a bias, a scale or a softcap, which is not counted.
    """
    few = min(16, len(window) - 1)
    theirs = model(input_ids=window[None, :few].to(model.device), use_cache=False).logits[0].float().cpu()
    ours = hidden[:few].float() @ weight.float().T
    if theirs.shape != ours.shape or float((theirs - ours).norm()) > SAME_LOGITS * float(ours.norm()):
        raise UsageError(
            f"the logits of {type(model).__name__} are not hidden states times classifier (a bias, a scale or a "
            f"softcap?), which keep-rate takes them for"
        )


def load_folder(
    folder: Path, files: Sequence[Path], length: int, tokens: int, progress: Callable[[int], Any], device: str
) -> Model:
    """Run a model over text.

    Args:
        length: tokens of a window, at most as many as the model has positions.
        progress: makes, for so many steps, a context that gives a function to call after each.

    Raises:
        UsageError: the folder, the text or the model will not do; transformers is not installed.
    """
    tokenizer, model = _load(folder, device)
    positions = getattr(model.config, "max_position_embeddings", None) or length
    found = windows(tokenizer, files, min(length, positions), tokens)
    with progress(num_windows(found)) as bar:
        hidden, target = hidden_states(model, found, bar.advance)
    weight = model.get_output_embeddings().weight.detach().cpu()
    check_logits(model, found[0], hidden, weight)
    return checked(hidden, weight, target)
