"""A GPT of Megatron-core's own parts, for machines without Transformer Engine and Apex.

Megatron's local layer spec is complete but for two modules: its norm refuses sequence parallelism, and its attention
writes a score for every pair of tokens. The spec has a place for others, and these two take it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig, TransformerLayer
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor, nn


class RMSNorm(nn.RMSNorm):
    """Where each rank sees part of the sequence the weight is marked, and Megatron sums its gradient over the ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, device=device, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class CausalAttention(nn.Module):
    """PyTorch's fused attention over this rank's heads; causal."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()
        if config.attention_dropout != 0.0 or config.context_parallel_size != 1:
            raise ValueError("CausalAttention has neither dropout nor context parallelism")

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any) -> Tensor:
        """``[s, b, heads, d]`` each to ``[s, b, heads * d]``."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def build_gpt(config: TransformerConfig, vocab_size: int, seq_len: int) -> GPTModel:
    """This pipeline stage's part, with rotary positions, SwiGLU and an output layer of its own."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    attention = dataclasses.replace(layer.self_attention.submodules, core_attention=CausalAttention)
    layer = dataclasses.replace(
        layer,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=dataclasses.replace(layer.self_attention, submodules=attention),
    )
    layers = [ModuleSpec(module=TransformerLayer, submodules=layer)] * get_num_layers_to_build(config)
    return GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=vocab_size,
        max_sequence_length=seq_len,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def gpt_config(
    dim: int,
    layers: int,
    heads: int,
    dtype: torch.dtype,
    on_cpu: bool,
    **parallelism: Any,
) -> TransformerConfig:
    """Megatron's settings of the model; ``parallelism`` and the loss's are passed on."""
    std = 0.02
    return TransformerConfig(
        num_layers=layers,
        hidden_size=dim,
        num_attention_heads=heads,
        # SwiGLU has three matrices where a plain MLP has two: 8/3 of dim keeps the parameters.
        ffn_hidden_size=(dim * 8 // 3 + 63) // 64 * 64,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        init_method_std=std,
        output_layer_init_method=_scaled_normal(std / math.sqrt(2 * layers)),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=on_cpu,
        # These need extensions of Transformer Engine or Apex, or a compilation that takes longer than it saves here.
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        persist_layer_norm=False,
        **parallelism,
    )


def _scaled_normal(std: float) -> Any:
    def initialize(weight: Tensor) -> Tensor:
        return nn.init.normal_(weight, 0.0, std)

    return initialize
