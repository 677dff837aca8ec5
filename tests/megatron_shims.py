"""What megatron-core needs to build and train a model on a machine without a GPU. For tests only."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

APEX_STANDIN = str(Path(__file__).resolve().parent / "apex_standin")


class PlainLayerNorm(nn.LayerNorm):
    """In place of Megatron's norms, which refuse sequence parallelism without Apex or Transformer Engine."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class OwnTokenAttention(nn.Module):
    """Every token attends to itself: all that is possible under context parallelism without Transformer Engine."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        return value.flatten(2)


def prepare() -> None:
    """Patch this process; again is harmless. Call before the first import of megatron."""
    if APEX_STANDIN not in sys.path:
        sys.path.insert(0, APEX_STANDIN)
    torch._dynamo.config.disable = True  # compiling Megatron's elementwise fusions takes a minute
    stream = types.SimpleNamespace(wait_event=lambda event: None, wait_stream=lambda other: None)
    torch.cuda.current_stream = lambda *args: stream  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *args: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]

    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda *args, **kwargs: torch.zeros(1)
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()

    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = lambda cls, *args, **kwargs: PlainLayerNorm(*args, **kwargs)
    with contextlib.suppress(ImportError):  # from 0.18 on
        from megatron.core.models.hybrid import hybrid_block

        hybrid_block.TENorm = PlainLayerNorm


def _means_cuda(device: Any) -> bool:
    return type(device) is int or str(device).startswith("cuda")


class _OnCpu(TorchFunctionMode):
    """``device="cuda"`` means the CPU, and its tensors are called CUDA tensors: Megatron's optimizer looks at that."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if _means_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.record_stream:
            return None
        if func is torch.Tensor.to:
            args = (args[0], *("cpu" if _means_cuda(arg) else arg for arg in args[1:]))
        answer = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


class _Stream:
    """A stream or an event that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_event(self, *args: Any) -> _Stream:
        return self

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = record = wait = synchronize = wait_stream


@contextlib.contextmanager
def fsdp() -> Iterator[None]:
    """Let Megatron-FSDP run, beside ``training``. It allocates in autograd's hooks, where no mode is active."""

    def allocating(function: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> Any:
            if _means_cuda(kwargs.get("device")):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return allocate

    with pytest.MonkeyPatch.context() as patch, training():
        for name in ("empty", "zeros"):
            patch.setattr(torch, name, allocating(getattr(torch, name)))
        for name in ("Stream", "Event", "current_stream"):
            patch.setattr(torch.cuda, name, _Stream)
        patch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        patch.setattr(torch.cuda, "empty_cache", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        yield


@contextlib.contextmanager
def training() -> Iterator[None]:
    """Let Megatron's schedules and optimizers run; in a process that ``prepare`` has patched."""
    torch.cuda.get_rng_state = lambda *args: torch.zeros(1)
    with _OnCpu():
        yield


_layout: tuple[int, int, int | None, int, int] | None = None
_megatron_groups: list[dist.ProcessGroup] = []


def initialize(tp: int, pp: int = 1, vp: int | None = None, cp: int = 1, ep: int = 1) -> None:
    """Megatron's groups over the default process group; kept as long as the layout stays the same.

    Megatron forgets its groups without destroying them, and each keeps threads that poll: some thirty for one layout.
    """
    from megatron.core import parallel_state

    global _layout
    if _layout == (tp, pp, vp, cp, ep) and vp is None and parallel_state.model_parallel_is_initialized():
        return
    parallel_state.destroy_model_parallel()
    dist.barrier()  # no rank is still at work in a group that another destroys
    for group in _megatron_groups:
        if group in dist.distributed_c10d._world.pg_map:  # Megatron does destroy some
            dist.destroy_process_group(group)
    known = set(dist.distributed_c10d._world.pg_map)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
    )
    _megatron_groups[:] = [group for group in dist.distributed_c10d._world.pg_map if group not in known]
    _layout = (tp, pp, vp, cp, ep)


def config(tp: int, pp: int = 1, **changes: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    settings = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "pipeline_dtype": torch.float32,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
    }
    return TransformerConfig(**{**settings, **changes})


def gpt(
    settings: Any, vocab: int, length: int, pre: bool = True, post: bool = True, tied: bool = False, **others: Any
) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec

    layer = get_gpt_layer_local_spec(num_experts=settings.num_moe_experts)
    if settings.context_parallel_size > 1:
        layer.submodules.self_attention.submodules.core_attention = OwnTokenAttention
    mtp = None
    if settings.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(settings, layer, use_transformer_engine=False)
    return GPTModel(
        config=settings,
        transformer_layer_spec=layer,
        vocab_size=vocab,
        max_sequence_length=length,
        pre_process=pre,
        post_process=post,
        share_embeddings_and_output_weights=tied,
        mtp_block_spec=mtp,
        **others,
    )


def hybrid(settings: Any, vocab: int, length: int, tied: bool = False) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.spec_utils import ModuleSpec

    spec = ModuleSpec(module=HybridStack, submodules=HybridStackSubmodules(attention_layer=get_gpt_layer_local_spec()))
    return HybridModel(
        config=settings,
        hybrid_stack_spec=spec,
        vocab_size=vocab,
        max_sequence_length=length,
        hybrid_layer_pattern="**",
        share_embeddings_and_output_weights=tied,
    )


def bert(settings: Any, vocab: int, length: int, tied: bool = True) -> Any:
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config=settings,
        num_tokentypes=0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=vocab,
        max_sequence_length=length,
        share_embeddings_and_output_weights=tied,
        add_binary_head=False,
    )


def t5(settings: Any, vocab: int, length: int, tied: bool = True) -> Any:
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model

    return T5Model(
        config=settings,
        encoder_config=settings,
        transformer_encoder_layer_spec=t5_spec.get_t5_encoder_with_local_block_spec(settings.num_layers),
        transformer_decoder_layer_spec=t5_spec.get_t5_decoder_with_local_block_spec(settings.num_layers),
        vocab_size=vocab,
        max_sequence_length=length,
        share_embeddings_and_output_weights=tied,
    )


def head(settings: Any, weight: Tensor, tied: bool = False, bias: bool = False) -> Any:
    """A language module that is nothing but an embedding and an output layer of ``weight`` ``[V, D]``."""
    from megatron.core import tensor_parallel
    from megatron.core.models.common.language_module.language_module import LanguageModule

    class Head(LanguageModule):
        def __init__(self) -> None:
            super().__init__(settings)
            self.pre_process = self.post_process = True
            self.share_embeddings_and_output_weights = tied
            self.embedding = nn.Module()
            self.embedding.word_embeddings = tensor_parallel.VocabParallelEmbedding(
                *weight.shape, init_method=nn.init.zeros_, config=settings, tp_group=self.tp_group
            )
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                weight.shape[1],
                weight.shape[0],
                config=settings,
                init_method=nn.init.zeros_,
                bias=bias,
                skip_weight_param_allocation=tied,
                tp_group=self.tp_group,
            )
            local = weight.chunk(self.tp_group.size())[self.tp_group.rank()]
            with torch.no_grad():
                (self.embedding.word_embeddings if tied else self.output_layer).weight.copy_(local)
            self.setup_embeddings_and_output_layer()

        def forward(self, hidden: Tensor, labels: Tensor | None, gather: bool | None = None) -> Tensor:
            shared = self.shared_embedding_or_output_weight() if tied else None
            logits, _ = self.output_layer(hidden, weight=shared, runtime_gather_output=gather)
            if hasattr(self, "_scale_logits"):  # from 0.17 on
                logits = self._scale_logits(logits)
            if labels is None:
                return logits.transpose(0, 1).contiguous()
            return self.compute_language_model_loss(labels, logits)

    return Head()
