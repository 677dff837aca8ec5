"""Tiny language models of Hugging Face's architectures, for the tests of the hooks."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn

VOCAB, HIDDEN, LENGTH = 97, 32, 13

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GEMMA = {**_COMMON, "head_dim": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 1.5}

ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaConfig", _COMMON),
    "Qwen2": ("Qwen2Config", _COMMON),
    "Qwen3": ("Qwen3Config", {**_COMMON, "head_dim": 8}),
    "Mistral": ("MistralConfig", _COMMON),
    "Gemma2": ("Gemma2Config", _GEMMA),
    "Gemma3": ("Gemma3TextConfig", _GEMMA),
    "Phi": ("PhiConfig", _COMMON),
    "GPT2": ("GPT2Config", {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "Granite": ("GraniteConfig", {**_COMMON, "logits_scaling": 3.0}),
    "Cohere": ("CohereConfig", {**_COMMON, "logit_scale": 0.25}),
}
"""Name to the configuration's class and its arguments. Granite and Cohere scale their logits; Gemma's are capped."""


def quiet() -> Any:
    """The transformers package, which says nothing and asks no network."""
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    warnings.filterwarnings("ignore", module="transformers")
    return importlib.import_module("transformers")


def has(architecture: str) -> bool:
    """Whether the installed transformers has it."""
    return hasattr(quiet(), ARCHITECTURES[architecture][0])


def build(architecture: str = "Llama", *, tied: bool = False, attention: str = "eager", **changes: Any) -> Any:
    """A model in training mode without dropout, in fp32, whose logits are large enough that scales and caps matter."""
    transformers = quiet()
    name, settings = ARCHITECTURES[architecture]
    config = getattr(transformers, name)(**{**settings, **changes}, tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(std=0.3)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.train()


def batch(seed: int = 0, rows: int = 2, length: int = LENGTH, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Ids and labels, some of them ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (rows, length), generator=generator)
    labels = ids.clone()
    labels[0, : 2 + seed % 3] = -100
    return {"input_ids": ids, "labels": labels}


def step(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Loss, gradients and outputs of one forward and backward pass."""
    model.zero_grad(set_to_none=True)
    outputs = model(**inputs)
    loss = outputs[0]
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), gradients, outputs


def relative(value: Tensor, expected: Tensor) -> float:
    """Relative Frobenius error in float64."""
    return float((value.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12))
