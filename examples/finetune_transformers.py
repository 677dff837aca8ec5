"""Fine-tune a Hugging Face model on text with the Trainer, and a loss that never writes the logits.

    python examples/finetune_transformers.py --model path/to/SmolLM2-135M --data my_texts/
    torchrun --standalone --nproc_per_node 2 examples/finetune_transformers.py --model HuggingFaceTB/SmolLM2-135M

``--model`` is a folder with a model and its tokenizer, or a name that transformers can resolve. What --loss cce changes
is one line, ``cce_tp.transformers.patch(model)``; the Trainer is the stock one, and so is its evaluation.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import text_data
import torch
from command_line import Parser, fail, fraction, not_negative, positive, rate
from text_data import Windows
from torch import Tensor
from torch.utils.data import Dataset

import cce_tp.transformers


@dataclass(frozen=True)
class TextWindows(Dataset[dict[str, Tensor]]):
    """Windows of ``seq_len`` tokens; the model shifts the labels itself."""

    windows: Windows

    def __len__(self) -> int:
        return self.windows.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self.windows.spread(index, 1, self.windows.count)[0, :-1]
        return {"input_ids": ids, "labels": ids}


def make_parser() -> Parser:
    """All options."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--model", required=True, help="folder with model and tokenizer, or a name")
    parser.add_argument("--loss", choices=("cce", "stock"), default="cce", help="cce: no logits (default: cce)")
    parser.add_argument("--backward", choices=("exact", "sampled", "filtered"), default="exact", help="of --loss cce")
    parser.add_argument("--data", type=Path, nargs="+", default=(), help="text (default: Python's own sources)")
    parser.add_argument("--held-out", type=fraction, default=0.05, help="part of the files (default: 0.05)")
    parser.add_argument("--seq-len", type=positive, default=512, help="tokens of a sequence (default: 512)")
    parser.add_argument("--batch", type=positive, default=4, help="sequences of a forward pass (default: 4)")
    parser.add_argument("--accumulation", type=positive, default=1, help="forward passes of a step (default: 1)")
    parser.add_argument("--steps", type=positive, default=50, help="(default: 50)")
    parser.add_argument("--lr", type=rate, default=2e-5, help="(default: 2e-5)")
    parser.add_argument("--seed", type=not_negative, default=0)
    parser.add_argument("--device", choices=("auto", "cpu"), default="auto")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/finetune"), help="folder for the model (default: %(default)s)"
    )
    return parser


def load(options: argparse.Namespace) -> tuple[Any, Any]:
    """Model and tokenizer.

    Raises:
        ValueError: there is no such model.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        model = AutoModelForCausalLM.from_pretrained(options.model)
    except OSError as error:
        raise ValueError(f"--model {options.model}: {str(error).splitlines()[0]}") from None
    return model, tokenizer


def read_text(options: argparse.Namespace, tokenizer: Any) -> tuple[TextWindows, TextWindows]:
    """Windows to train on and held out, by the model's own tokenizer."""
    documents = text_data.read_documents(
        text_data.named_files(options.data) if options.data else text_data.standard_library()
    )
    if not documents:
        raise ValueError("there is no UTF-8 text to train on")
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids + end

    train, held_out = (
        TextWindows(Windows(text_data.tokenize(part, encode, lambda size: None), options.seq_len))
        for part in text_data.split(documents, options.held_out)
    )
    return train, held_out


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code."""
    options = make_parser().parse_args(argv)
    for name in ("transformers", "accelerate"):
        if find_spec(name) is None:
            fail(f"{name} isn't installed: pip install {name}")
    if options.loss != "cce" and options.backward != "exact":
        fail(f"--backward {options.backward} belongs to --loss cce")
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=options.batch,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=options.lr,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 10,
        bf16=options.device != "cpu" and torch.cuda.is_available(),
        use_cpu=options.device == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=options.seed,
    )
    try:
        text_data.check_paths(options.data)
        model, tokenizer = load(options)
        train, held_out = read_text(options, tokenizer)
    except ValueError as error:
        fail(str(error))
    status = None
    if options.loss == "cce":
        status = cce_tp.transformers.patch(model, backward=options.backward)
    trainer = Trainer(model, arguments, train_dataset=train, eval_dataset=held_out)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    cce_tp.transformers.unpatch(model)
    trainer.save_model()
    if trainer.is_world_process_zero():
        tokenizer.save_pretrained(options.out)
        counted = "" if status is None else f"; {status.losses} losses without logits, {status.materialised} with"
        print(f"Held-out loss {before:.4f} -> {after:.4f}{counted}; model in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
