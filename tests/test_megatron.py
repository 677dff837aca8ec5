"""The Megatron hook against stock Megatron-core, on gloo. Four processes: tp 1 and 2, tp 2 × pp 2.

Stock and hooked passes run in the same process on the same model; what is compared is the loss of every token and the
gradient of every parameter.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_shims as shims
import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import Pool, Rank, collectives
from oracle import fixture0
from selection import some_of
from torch import Tensor, nn

import cce_tp
import cce_tp.megatron as hook

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
VOCAB, LENGTH, BATCH = 64, 16, 2
F0_MEAN, F0_INPUT_NORM = 7.05823367, 1.17992639
START_TIMEOUT = 150.0  # the first task on every process imports megatron

HAS_MEGATRON = all(importlib.util.find_spec(name) is not None for name in ("megatron", "megatron.core"))
needs_megatron = pytest.mark.skipif(not HAS_MEGATRON, reason="needs megatron-core (tests/run.sh installs it)")
VERSION = tuple(map(int, importlib.metadata.version("megatron-core").split(".")[:2])) if HAS_MEGATRON else (0, 0)
SINCE = {"use_mup": (0, 17), "hybrid": (0, 18), "mtp_detach_heads": (0, 19)}


def skip_before(version: tuple[int, int]) -> None:
    """Skip what this megatron-core doesn't have."""
    if version > VERSION:
        pytest.skip(f"needs megatron-core {version[0]}.{version[1]}")


def _prepare(rank: Rank) -> None:
    warnings.simplefilter("ignore")
    shims.prepare()


@pytest.fixture(scope="module")
def megatron_pool() -> Iterator[Pool]:
    """Processes of their own: the shims patch torch."""
    pool = Pool(4, sizes=(4,))
    pool.run(4, _prepare, timeout=START_TIMEOUT)
    yield pool
    pool.stop()


def run(pool: Pool, task: Any, *args: Any) -> list[Any]:
    if not pool._workers:  # a failure has stopped them
        pool.run(4, _prepare, timeout=START_TIMEOUT)
    return pool.run(4, task, *args)


# What a model of each kind is given, and one forward and backward pass.


def _build(
    kind: str, tp: int, tied: bool = False, vocab: int = VOCAB, stage: dict[str, bool] | None = None, **changes: Any
) -> Any:
    torch.manual_seed(0)
    settings = shims.config(tp, **changes)
    builders = {"gpt": shims.gpt, "hybrid": shims.hybrid, "bert": shims.bert, "t5": shims.t5}
    model = builders[kind](settings, vocab, LENGTH, tied=tied, **(stage or {}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
    return model


def _batch(seed: int, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Ids, labels and the loss's upstream gradient; the same on a tensor-parallel group, not on data-parallel ranks."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(1000 * seed + parallel_state.get_data_parallel_rank())
    shape = (BATCH, LENGTH)
    return {
        "ids": torch.randint(0, vocab, shape, generator=generator),
        "labels": torch.randint(0, vocab, shape, generator=generator),
        "upstream": torch.rand(shape, generator=generator) * (torch.rand(shape, generator=generator) > 0.25),
    }


def _positions() -> Tensor:
    return torch.arange(LENGTH).expand(BATCH, LENGTH)


def _forward(model: nn.Module, kind: str, batch: dict[str, Tensor], labels: Tensor | None) -> Tensor:
    causal = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    if kind == "bert":
        loss, _ = model(batch["ids"], torch.ones(BATCH, LENGTH, dtype=torch.long), lm_labels=labels)
        return loss
    if kind == "t5":
        see_all = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
        return model(batch["ids"], batch["ids"].flip(1), see_all, causal, see_all, lm_labels=labels)
    return model(batch["ids"], _positions(), causal, labels=labels)


def _step(model: nn.Module, kind: str, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    for parameter in model.parameters():
        parameter.grad = None
    loss = _forward(model, kind, batch, batch["labels"])
    (loss * batch["upstream"]).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), grads


def _check_same(mine: tuple[Tensor, dict[str, Tensor]], stock: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(mine[0], stock[0], rtol=1e-6, atol=2e-6)
    assert mine[0].dtype == torch.float32
    assert mine[0].is_contiguous()
    assert mine[1].keys() == stock[1].keys()
    # Some gradients are nearly zero by construction, all rounding: they are held to the largest one.
    floor = 1e-7 * max(float(grad.norm()) for grad in stock[1].values())
    for name, grad in stock[1].items():
        assert mine[1][name].dtype == grad.dtype
        error = float((mine[1][name] - grad).norm())
        assert error < 2e-6 * float(grad.norm()) + floor, (name, error, float(grad.norm()))


def relative(value: Tensor, expected: Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-6))


def _check_equal_over_group(value: Tensor, group: dist.ProcessGroup) -> None:
    others = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(others, value, group=group)
    assert all(torch.equal(value, other) for other in others)


CASES: dict[str, dict[str, Any]] = {
    "gpt": {"kind": "gpt"},
    "gpt tied": {"kind": "gpt", "tied": True},
    "gpt sequence parallel": {"kind": "gpt", "sequence_parallel": True},
    "gpt tied sequence parallel": {"kind": "gpt", "tied": True, "sequence_parallel": True},
    "gpt mup": {"kind": "gpt", "use_mup": True, "mup_base_hidden_size": 16},
    "gpt mup tied mtp": {
        "kind": "gpt",
        "tied": True,
        "use_mup": True,
        "mup_base_hidden_size": 16,
        "mtp_num_layers": 2,
    },
    "gpt mtp": {"kind": "gpt", "mtp_num_layers": 2},
    "gpt mtp sequence parallel": {"kind": "gpt", "mtp_num_layers": 2, "sequence_parallel": True},
    "gpt mtp detached heads": {"kind": "gpt", "mtp_num_layers": 1, "mtp_detach_heads": True},
    "gpt mtp per token": {"kind": "gpt", "mtp_num_layers": 1, "calculate_per_token_loss": True},
    "gpt full recompute": {
        "kind": "gpt",
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "gpt fused cross-entropy": {"kind": "gpt", "cross_entropy_loss_fusion": True},
    "gpt bf16": {"kind": "gpt", "bf16": True, "sequence_parallel": True},
    "hybrid": {"kind": "hybrid"},
    "hybrid tied sequence parallel": {"kind": "hybrid", "tied": True, "sequence_parallel": True},
    "bert tied": {"kind": "bert", "tied": True},
    "bert": {"kind": "bert"},
    "t5 tied": {"kind": "t5", "tied": True},
    "t5": {"kind": "t5"},
}


def _mtp_metrics() -> dict[str, Tensor]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    tracker = MTPLossLoggingHelper.tracker
    found = {name: tracker[name].clone() for name in tracker if name.endswith("_values")}
    tracker.clear()
    return found


def _compare_model(rank: Rank, tp: int, case: str) -> None:
    shims.initialize(tp)
    keywords = dict(CASES[case])
    model = _build(tp=tp, **keywords)
    kind, batch = keywords["kind"], _batch(1)
    group, layers = model.tp_group, model.config.mtp_num_layers or 0
    if keywords.get("bf16"):
        from megatron.core.transformer.module import Float16Module

        model = Float16Module(model.config, model)
    _mtp_metrics()
    stock, stock_metrics = _step(model, kind, batch), _mtp_metrics()
    assert hook.install(model, strict=True) == 1
    mine, metrics = _step(model, kind, batch), _mtp_metrics()
    if keywords.get("bf16") or keywords.get("cross_entropy_loss_fusion"):
        # Stock rounds its logits, or their gradient, to bf16.
        assert (mine[0] - stock[0]).abs().max() < 0.05
        assert all(relative(mine[1][name], grad) < 0.05 for name, grad in stock[1].items())
    else:
        _check_same(mine, stock)
    _check_equal_over_group(mine[0], group)
    assert metrics.keys() == stock_metrics.keys()
    for name, values in stock_metrics.items():
        torch.testing.assert_close(metrics[name], values, rtol=1e-6, atol=1e-6)
    (status,) = hook.status(model)
    assert (status.implementation, status.materialised) == ("torch", 0)
    assert status.losses == 1 + layers
    assert hook.uninstall(model) == 1
    again = _step(model, kind, batch)
    assert torch.equal(again[0], stock[0])
    assert all(torch.equal(again[1][name], grad) for name, grad in stock[1].items())


@needs_megatron
@pytest.mark.parametrize(
    "case",
    some_of(
        CASES,
        [
            *(
                "gpt sequence parallel",
                "gpt tied",
                "gpt mup tied mtp",
                "gpt mtp sequence parallel",
                "gpt mtp per token",
            ),
            *("gpt full recompute", "gpt fused cross-entropy", "gpt bf16"),
            *("hybrid tied sequence parallel", "bert", "t5 tied"),
        ],
    ),
)
def test_model_in_two_shards(megatron_pool: Pool, case: str) -> None:
    skip_before(max((SINCE[word] for word in (*CASES[case], CASES[case]["kind"]) if word in SINCE), default=(0, 0)))
    run(megatron_pool, _compare_model, 2, case)


@needs_megatron
@pytest.mark.parametrize("case", ["gpt tied", "gpt mtp", "hybrid", "t5 tied"])
def test_model_in_one_shard(megatron_pool: Pool, case: str) -> None:
    skip_before(SINCE.get(CASES[case]["kind"], (0, 0)))
    run(megatron_pool, _compare_model, 1, case)


# Pipeline stages and virtual chunks: the activations travel by hand, since Megatron's schedules need CUDA.


def _stages(chunks: list[Any], batch: dict[str, Tensor], settings: Any) -> tuple[Tensor | None, list[dict]]:
    """One forward and backward pass over pipeline ranks and, within each, over this rank's ``chunks``."""
    from megatron.core import parallel_state

    pp_rank, pp = parallel_state.get_pipeline_model_parallel_rank(), settings.pipeline_model_parallel_size
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    length = LENGTH // (settings.tensor_model_parallel_size if settings.sequence_parallel else 1)
    order = [(stage, chunk) for chunk in range(len(chunks)) for stage in range(pp)]
    causal = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    received: dict[int, Tensor] = {}
    sent: dict[int, Tensor] = {}
    loss = None
    for place, (stage, chunk) in enumerate(order):
        if stage != pp_rank:
            continue
        if place > 0:
            received[place] = torch.empty(length, BATCH, settings.hidden_size)
            dist.recv(received[place], ranks[order[place - 1][0]])
            received[place].requires_grad_()
            chunks[chunk].set_input_tensor([received[place]])
        out = chunks[chunk](batch["ids"], _positions(), causal, labels=batch["labels"])
        if place < len(order) - 1:
            dist.send(out.detach().contiguous(), ranks[order[place + 1][0]])
            sent[place] = out
        else:
            loss = out
    for place, (stage, _) in reversed(list(enumerate(order))):
        if stage != pp_rank:
            continue
        if place == len(order) - 1:
            assert loss is not None
            (loss * batch["upstream"]).sum().backward()
        else:
            grad = torch.empty_like(sent[place])
            dist.recv(grad, ranks[order[place + 1][0]])
            sent[place].backward(grad)
        if place > 0:
            dist.send(received[place].grad.contiguous(), ranks[order[place - 1][0]])
    grads = []
    for chunk in chunks:
        grads.append({name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None})
        for parameter in chunk.parameters():
            parameter.grad = None
    return None if loss is None else loss.detach(), grads


def _compare_pipeline(rank: Rank, tied: bool, sequence_parallel: bool, vp: int | None) -> int:
    from megatron.core import parallel_state

    shims.initialize(tp=2, pp=2, vp=vp)
    settings = shims.config(
        2,
        2,
        num_layers=2 * (vp or 1),
        sequence_parallel=sequence_parallel,
        virtual_pipeline_model_parallel_size=vp,
    )
    first = parallel_state.get_pipeline_model_parallel_rank() == 0
    torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    chunks = []
    for index in range(vp or 1):
        pre, post = first and index == 0, not first and index == (vp or 1) - 1
        stage = {} if vp is None else {"vp_stage": index}
        chunks.append(shims.gpt(settings, VOCAB, LENGTH, pre=pre, post=post, tied=tied, **stage))
    batch = _batch(2)
    stock_loss, stock = _stages(chunks, batch, settings)
    before = [dict(chunk.__dict__) for chunk in chunks]
    installed = hook.install(chunks, strict=True)
    assert installed == (0 if first else 1)
    loss, grads = _stages(chunks, batch, settings)
    if loss is not None and stock_loss is not None:
        torch.testing.assert_close(loss, stock_loss, rtol=1e-6, atol=2e-6)
        assert hook.status(chunks)[0].losses == 1
    for mine, theirs in zip(grads, stock, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(relative(mine[name], grad) < 3e-6 for name, grad in theirs.items())
    assert hook.uninstall(chunks) == installed
    assert [chunk.__dict__.keys() for chunk in chunks] == [attributes.keys() for attributes in before]
    return installed


@needs_megatron
@pytest.mark.parametrize(
    ("tied", "sequence_parallel", "vp"),
    [(False, False, None), (True, True, None), (True, False, 2), (False, True, 2)],
)
def test_pipeline_of_two_stages(megatron_pool: Pool, tied: bool, sequence_parallel: bool, vp: int | None) -> None:
    """tp 2 × pp 2; stages without an output layer are left alone, and so are virtual chunks."""
    assert run(megatron_pool, _compare_pipeline, tied, sequence_parallel, vp) == [0, 0, 1, 1]


# The gradient contract: fusion, DDP, the distributed optimizer.


def _train(model: Any, ddp_options: dict[str, Any], install: bool) -> tuple[Any, ...]:
    """Losses, main_grads of the last step, and parameters after two steps of gradient descent, on two micro-batches."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(**ddp_options), model)
    if install:
        assert hook.install(wrapped, strict=True) == 1
    losses, grads = [], {}
    for step in range(2):
        wrapped.zero_grad_buffer()
        for micro in range(2):
            batch = _batch(10 * step + micro)
            with wrapped.no_sync() if micro == 0 else torch.enable_grad():
                loss = _forward(wrapped, "gpt", batch, batch["labels"])
                (loss * batch["upstream"]).sum().backward()
            losses.append(loss.detach())
        wrapped.finish_grad_sync()
        assert all(parameter.grad is None for parameter in model.parameters())
        grads = {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}
        _descend(wrapped, model)
    if ddp_options.get("overlap_param_gather"):
        wrapped.start_param_sync(force_sync=True)
    return losses, grads, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def _descend(wrapped: Any, model: Any) -> None:
    """What Megatron's optimizers do to the parameters; they themselves need CUDA.

    The distributed one updates a rank's part of every bucket. The other parts are spoilt here, so that only the gather
    that the next forward pass waits for makes them right again.
    """
    if not wrapped.ddp_config.use_distributed_optimizer:
        for parameter in model.parameters():
            parameter -= 0.5 * parameter.main_grad
        return
    rank, size = wrapped.intra_dp_cp_group.rank(), wrapped.intra_dp_cp_group.size()
    for buffer in wrapped.buffers:
        for bucket in buffer.buckets:
            for index, (values, grad) in enumerate(
                zip(bucket.param_data.chunk(size), bucket.grad_data.chunk(size), strict=True)
            ):
                if index == rank:
                    values -= 0.5 * grad
                else:
                    values.fill_(float("nan"))
    if not wrapped.ddp_config.overlap_param_gather:
        wrapped.start_param_sync()


FUSION: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tied": True},
    "tied mtp": {"tied": True, "mtp_num_layers": 2},
    "sequence parallel": {"sequence_parallel": True},
    "no fusion": {"tied": True, "gradient_accumulation_fusion": False},
}
DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "overlapped": {"overlap_grad_reduce": True},
    "distributed optimizer": {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
    "overlapped gather": {
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
    },
}


def _compare_training(rank: Rank, fusion: str, ddp: str) -> None:
    shims.initialize(2)
    keywords = {"gradient_accumulation_fusion": True, **FUSION[fusion]}
    results = []
    for install in (False, True):
        model = _build("gpt", 2, **keywords)
        results.append(_train(model, dict(DDP[ddp]), install))
        _mtp_metrics()
    (stock_losses, stock_grads, stock_weights), (losses, grads, weights) = results
    for loss, expected in zip(losses, stock_losses, strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, grad in stock_grads.items():
        assert relative(grads[name], grad) < 1e-4, name
    for name, weight in stock_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-4)


@needs_megatron
@pytest.mark.parametrize(
    ("fusion", "ddp"),
    some_of(
        [(fusion, "overlapped") for fusion in FUSION] + [("tied", ddp) for ddp in DDP if ddp != "overlapped"],
        [("tied mtp", "overlapped"), ("no fusion", "overlapped"), ("tied", "overlapped gather")],
    ),
)
def test_training_under_ddp(megatron_pool: Pool, fusion: str, ddp: str) -> None:
    """Two steps of two micro-batches with Megatron's own DDP; tp 2 × dp 2."""
    run(megatron_pool, _compare_training, fusion, ddp)


GROUPS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "cp 2": ({"tp": 1, "cp": 2}, {}),
    "cp 2, per token": ({"tp": 1, "cp": 2}, {"calculate_per_token_loss": True}),
    "tp 2, cp 2, mtp": ({"tp": 2, "cp": 2}, {"mtp_num_layers": 1, "sequence_parallel": True}),
    "tp 2, cp 2, mtp, per token": (
        {"tp": 2, "cp": 2},
        {"mtp_num_layers": 1, "sequence_parallel": True, "calculate_per_token_loss": True},
    ),
    "tp 2, pp 2, tied, mtp": (
        {"tp": 2, "pp": 2},
        {"tied": True, "mtp_num_layers": 1, "sequence_parallel": True, "calculate_per_token_loss": True},
    ),
    "tp 2, ep 2": ({"tp": 2, "ep": 2}, {"sequence_parallel": True}),
    "tp 2, ep 2, per token": ({"tp": 2, "ep": 2}, {"sequence_parallel": True, "calculate_per_token_loss": True}),
}


def _train_by_schedule(rank: Rank, layout: dict[str, int], install: bool, **changes: Any) -> tuple[Any, ...]:
    """Losses and main_grads of two micro-batches by Megatron's schedule, DDP and finalize_model_grads."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    if layout.get("ep", 1) > 1:
        changes |= {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False}
    changes |= {"context_parallel_size": layout.get("cp", 1), "expert_model_parallel_size": layout.get("ep", 1)}
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    changes |= {"pipeline_model_parallel_size": layout.get("pp", 1), "stage": {"pre": first, "post": last}}
    model = _build("gpt", layout["tp"], gradient_accumulation_fusion=True, **changes)
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True), model
    )
    model.config.no_sync_func = wrapped.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads
    if install:
        assert hook.install(wrapped, strict=True) == int(last)
    # Tokens differ from rank to rank, but for those of a tensor-parallel group and the stages of a pipeline.
    replica = 0 if "pp" in layout else rank.index // layout["tp"]
    batches = [_batch(100 * micro + replica) for micro in range(2)]
    losses = []

    def forward_step(iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        batch = next(iterator)
        mask = (batch["upstream"] > 0).float()

        def reduce(per_token: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            losses.append(per_token.detach().clone())
            return (per_token * mask).sum(), mask.sum().int(), {}

        return _forward(model, "gpt", batch, batch["labels"]), reduce

    wrapped.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[wrapped],
        num_microbatches=2,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return losses, {name: parameter.main_grad.clone() for name, parameter in model.named_parameters()}


def _compare_groups(rank: Rank, case: str) -> None:
    layout, changes = GROUPS[case]
    shims.initialize(**layout)
    with shims.training():
        stock_losses, stock_grads = _train_by_schedule(rank, layout, False, **changes)
        stock_metrics = _mtp_metrics()
        losses, grads = _train_by_schedule(rank, layout, True, **changes)
    torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=1e-5)
    for name, values in _mtp_metrics().items():
        torch.testing.assert_close(values, stock_metrics[name], rtol=1e-5, atol=1e-5)
    for name, grad in stock_grads.items():
        assert relative(grads[name], grad) < 1e-4, name
    assert any("experts" in name for name in grads) == (layout.get("ep", 1) > 1)


@needs_megatron
@pytest.mark.parametrize("case", some_of(GROUPS, ["tp 2, cp 2, mtp, per token", "tp 2, ep 2"]))
def test_training_by_schedule_in_every_kind_of_group(megatron_pool: Pool, case: str) -> None:
    """Over 4 ranks; losses averaged over micro-batches, or divided by all tokens at the end."""
    if "ep 2" in case:
        skip_before((0, 17))  # whose experts need Transformer Engine for a fused accumulation
    run(megatron_pool, _compare_groups, case)


FSDP: dict[str, dict[str, Any]] = {
    "sharded parameters": {"sequence_parallel": True},
    "sharded parameters, tied, mtp": {"tied": True, "mtp_num_layers": 1},
    "sharded optimizer": {"strategy": "optim"},
}


def _train_fsdp(install: bool, strategy: str = "optim_grads_params", **keywords: Any) -> tuple[Any, dict[str, Tensor]]:
    """Losses of two micro-batches, and this rank's shards of the gradients."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

    options = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=strategy == "optim_grads_params",
    )
    model = _build("gpt", 2, calculate_per_token_loss=True, **keywords)  # else it scales gradients inside NCCL
    wrapped = FullyShardedDataParallel(model.config, options, model)
    if install:
        assert hook.install(wrapped, strict=True) == 1
    wrapped.zero_grad_buffer()
    losses = []
    for micro in range(2):
        wrapped.module.is_last_microbatch = micro == 1
        batch = _batch(micro)
        loss = _forward(wrapped, "gpt", batch, batch["labels"])
        (loss * batch["upstream"]).sum().backward()
        losses.append(loss.detach())
    wrapped.finish_grad_sync()
    grads = {n: p.grad.to_local().clone() for n, p in model.named_parameters() if p.grad is not None}
    _mtp_metrics()
    return losses, grads


def _compare_fsdp(rank: Rank, case: str) -> list[str]:
    from megatron.core import tensor_parallel

    shims.initialize(2)
    with shims.fsdp():
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        stock_losses, stock_grads = _train_fsdp(False, **FSDP[case])
        losses, grads = _train_fsdp(True, **FSDP[case])
    torch.testing.assert_close(losses, stock_losses, rtol=1e-6, atol=2e-6)
    assert grads.keys() == stock_grads.keys()
    for name, grad in stock_grads.items():
        assert relative(grads[name], grad) < 1e-5, name
    return list(grads)


@needs_megatron
@pytest.mark.parametrize("case", some_of(FSDP, ["sharded parameters, tied, mtp"]))
def test_training_under_megatron_fsdp(megatron_pool: Pool, case: str) -> None:
    """Two micro-batches; tp 2 × dp 2. Between them, the ranks hold a part of every gradient."""
    skip_before((0, 19))
    held = run(megatron_pool, _compare_fsdp, case)
    head = "embedding.word_embeddings.weight" if "tied" in case else "output_layer.weight"
    assert any(name.endswith(head) for names in held for name in names)


# Field cases, with the numbers of F0: a language module that is nothing but an embedding and an output layer.


def _head(tp: int, tied: bool = False, zero_embedding: bool = True, bias: bool = False, **changes: Any) -> Any:
    problem = fixture0()
    settings = shims.config(tp, hidden_size=problem.input.shape[1], **changes)
    return shims.head(settings, problem.weight, tied, bias)


def _f0(reverse: bool = False) -> tuple[Tensor, Tensor]:
    """Hidden states ``[8, 1, 16]`` and labels ``[1, 8]``."""
    problem = fixture0()
    target = problem.target.flip(0) if reverse else problem.target
    return problem.input[:, None].clone().requires_grad_(), target[None]


def _sharded(hidden: Tensor, model: Any) -> Tensor:
    if not model.config.sequence_parallel:
        return hidden
    return hidden.detach().chunk(model.tp_group.size())[model.tp_group.rank()].clone().requires_grad_()


def _reduced_once(rank: Rank, sequence_parallel: bool) -> None:
    shims.initialize(2)
    model = _head(2, sequence_parallel=sequence_parallel)
    hook.install(model, strict=True)
    hidden, labels = _f0()
    hidden = _sharded(hidden, model)
    model(hidden, labels)  # the first call compares what the ranks hold
    with collectives() as forward:
        loss = model(hidden, labels)
    with collectives() as backward:
        loss.mean().backward()
    assert float(loss.mean()) == pytest.approx(F0_MEAN, abs=1e-5)
    whole = hidden.grad
    if sequence_parallel:
        whole = torch.cat(list(_gathered(hidden.grad, model.tp_group)))
    assert float(whole.norm()) == pytest.approx(F0_INPUT_NORM, abs=1e-5)
    assert len(forward) == (2 if sequence_parallel else 1)
    assert len(backward) == (2 if sequence_parallel else 1)


def _gathered(value: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.contiguous(), group=group)
    return parts


@needs_megatron
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_b04_input_gradient_is_reduced_once(megatron_pool: Pool, sequence_parallel: bool) -> None:
    """Neither the layer's own input mapping nor its all-reduce runs beside the loss's; collectives are counted."""
    run(megatron_pool, _reduced_once, sequence_parallel)


def _head_is_not_bypassed(rank: Rank, tp: int) -> None:
    shims.initialize(tp)
    # (a) untied, embedding 0: the loss is the head's.
    model = _head(tp)
    hook.install(model, strict=True)
    hidden, labels = _f0()
    assert float(model(hidden, labels).mean()) == pytest.approx(F0_MEAN, abs=1e-5)

    # (b) tied: both uses of the matrix give gradient.
    model = _head(tp, tied=True)
    hook.install(model, strict=True)
    embedded = model.embedding.word_embeddings(torch.arange(8)[None]).transpose(0, 1)
    loss = model(embedded, labels).mean()
    assert float(loss) == pytest.approx(8.67749766, abs=1e-5)
    loss.backward()
    grad = torch.cat(_gathered(model.embedding.word_embeddings.weight.grad, model.tp_group))
    assert float(grad.norm()) == pytest.approx(2.08110915, abs=1e-5)
    expected = torch.tensor([0.30430538, -0.05474504, -0.40719326, -0.03208264])
    torch.testing.assert_close(grad[5, :4], expected, rtol=0, atol=1e-6)

    # (c) hooks before the head run once, and the weight they leave is the one that is used.
    model = _head(tp)
    hook.install(model, strict=True)
    rows = model.output_layer.weight.detach().clone()
    with torch.no_grad():
        model.output_layer.weight.zero_()
    calls = []

    def restore(layer: nn.Module, *_: Any) -> None:
        calls.append(layer)
        with torch.no_grad():
            layer.weight.copy_(rows)

    model.output_layer.register_forward_pre_hook(restore)
    assert float(model(hidden, labels).mean()) == pytest.approx(F0_MEAN, abs=1e-5)
    assert len(calls) == 1

    # (d) an adapter around the head.
    class Adapted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

    model.output_layer = Adapted(_head(tp).output_layer)
    with pytest.raises(TypeError, match=r"adapter \(LoRA\)"):
        hook.install(model)


@needs_megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_b38_head_is_not_bypassed(megatron_pool: Pool, tp: int) -> None:
    run(megatron_pool, _head_is_not_bypassed, tp)


def _main_grad(rank: Rank, tp: int, dtype: torch.dtype) -> None:
    """B38 (e): with fusion main_grad grows by the gradient, the flag is set, the placeholder is right."""
    shims.initialize(tp)
    hidden, labels = _f0()
    plain = _head(tp)
    hook.install(plain)
    plain(hidden, labels).mean().backward()
    expected = plain.output_layer.weight.grad

    model = _head(tp, gradient_accumulation_fusion=True)
    weight = model.output_layer.weight
    hook.install(model, strict=True)
    weight.main_grad = torch.zeros(weight.shape, dtype=dtype)
    for _ in range(2):
        model(hidden, labels).mean().backward()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2
    assert relative(weight.main_grad, 2 * expected) < tolerance
    assert weight.grad is None  # no flag, no placeholder

    for zero in (False, True):
        weight.main_grad.zero_()
        weight.grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = None, False, zero
        model(hidden, labels).mean().backward()
        assert weight.grad_added_to_main_grad is True
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        assert not zero or not weight.grad.any()
        assert relative(weight.main_grad, expected) < tolerance

    # Frozen: neither; the input's gradient is there.
    weight.main_grad.zero_()
    weight.grad, weight.grad_added_to_main_grad = None, False
    weight.requires_grad_(False)
    hidden.grad = None
    model(hidden, labels).mean().backward()
    assert weight.grad is None
    assert not weight.grad_added_to_main_grad
    assert not weight.main_grad.any()
    assert float(hidden.grad.norm()) == pytest.approx(F0_INPUT_NORM, abs=1e-5)

    # Under Megatron-FSDP autograd takes it, also with fusion.
    weight.requires_grad_(True)
    weight.__fsdp_param__ = True
    if VERSION >= (0, 19):
        model(hidden, labels).mean().backward()
        assert relative(weight.grad, expected) < 1e-6
        assert not weight.main_grad.any()
    else:
        with pytest.raises(NotImplementedError, match=r"from megatron-core 0\.19 on"):
            model(hidden, labels)

    # No fusion, though there is a main_grad.
    unfused = _head(tp)
    unfused.output_layer.weight.main_grad = torch.zeros_like(expected)
    hook.install(unfused)
    unfused(hidden, labels).mean().backward()
    assert relative(unfused.output_layer.weight.grad, expected) < 1e-6
    assert not unfused.output_layer.weight.main_grad.any()


@needs_megatron
@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float32), (2, torch.float32), (2, torch.bfloat16)])
def test_b38_gradient_accumulation_fusion(megatron_pool: Pool, tp: int, dtype: torch.dtype) -> None:
    run(megatron_pool, _main_grad, tp, dtype)


def _reported_loss(rank: Rank) -> float:
    from megatron.core import parallel_state

    shims.initialize(2)
    model = _head(2)
    hook.install(model)
    hidden, labels = _f0(reverse=parallel_state.get_data_parallel_rank() == 1)
    per_token = model(hidden, labels)
    assert type(per_token) is Tensor
    assert per_token.shape == (1, 8)
    _check_equal_over_group(per_token.detach(), model.tp_group)
    return float(per_token.mean())


@needs_megatron
def test_b41_loss_is_the_same_on_every_rank_of_a_group(megatron_pool: Pool) -> None:
    """2 × 2 (tp × dp): an average over the world, or over data-parallel ranks, is the mean of the replicas' losses."""
    losses = run(megatron_pool, _reported_loss)
    problem = fixture0()
    logits = problem.input @ problem.weight.T
    references = [float(nn.functional.cross_entropy(logits, y)) for y in (problem.target, problem.target.flip(0))]
    assert sum(losses) / 4 == pytest.approx(sum(references) / 2, abs=1e-5)
    assert losses[0] == losses[1]
    assert losses[2] == losses[3]


def _nothing_is_silent(rank: Rank) -> None:
    shims.initialize(2)
    model = _build("gpt", 2)
    batch = _batch(3)
    stock = _forward(model, "gpt", batch, None)
    hook.install(model)
    (status,) = hook.status(model)
    assert status.backward == "exact"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logits = _forward(model, "gpt", batch, None)
        _forward(model, "gpt", batch, None)
    assert len([w for w in caught if "real logits" in str(w.message)]) == 1
    assert status.materialised == 2
    assert torch.equal(logits, stock)
    logits.sum().backward()

    hook.install(model, strict=True)
    with pytest.raises(RuntimeError, match="strict"):
        _forward(model, "gpt", batch, None)
    # Evaluation has real logits for the asking, and a loss without them; inference has them at once.
    model.eval()
    (status,) = hook.status(model)
    with torch.no_grad():
        assert torch.equal(_forward(model, "gpt", batch, None), stock)
        evaluated = _forward(model, "gpt", batch, batch["labels"])
    assert (status.losses, status.materialised) == (1, 0)
    with torch.inference_mode():
        assert torch.equal(_forward(model, "gpt", batch, None), stock)
        inferred = _forward(model, "gpt", batch, batch["labels"])
    assert type(model.output_layer(torch.zeros(8, 1, 32), runtime_gather_output=True)[0]) is Tensor
    hook.uninstall(model)
    with torch.no_grad():
        expected = _forward(model, "gpt", batch, batch["labels"])
    assert torch.equal(inferred, expected)
    torch.testing.assert_close(evaluated, expected, rtol=1e-6, atol=2e-6)


@needs_megatron
def test_b47_fallbacks_warn_once_or_raise(megatron_pool: Pool) -> None:
    run(megatron_pool, _nothing_is_silent)


def _describe(value: Any) -> Any:
    keep = ("key", "global_shape", "global_offset", "local_shape", "replica_id", "allow_shape_mismatch", "dtype")
    return {name: getattr(value, name) for name in keep if hasattr(value, name)} or type(value).__name__


def _no_trace(rank: Rank, tied: bool) -> None:
    from megatron.core import tensor_parallel

    shims.initialize(2)
    model = _build("gpt", 2, tied=tied)
    layer = model.output_layer

    def state() -> Any:
        metadata = {"dp_cp_group": None}
        sharded = model.sharded_state_dict()
        return (
            {name: _describe(value) for name, value in sharded.items()},
            {name: dict(parameter.__dict__) for name, parameter in model.named_parameters()},
            list(model.state_dict()),
            repr(model),
            metadata,
        )

    attributes = dict(model.__dict__), dict(layer.__dict__)
    before = state()
    hook.install(model)
    assert state() == before
    assert type(layer).__name__ == "ColumnParallelLinear"
    assert isinstance(layer, tensor_parallel.ColumnParallelLinear)
    if not tied:
        assert before[0]["output_layer.weight"]["global_shape"] == (VOCAB, model.config.hidden_size)
    hook.install(model, backward="sampled")  # replaces
    assert hook.status(model)[0].backward == "sampled"
    assert hook.uninstall(model) == 1
    assert hook.uninstall(model) == 0
    assert state() == before
    assert type(layer) is tensor_parallel.ColumnParallelLinear
    assert (model.__dict__.keys(), layer.__dict__.keys()) == (attributes[0].keys(), attributes[1].keys())


@needs_megatron
@pytest.mark.parametrize("tied", [False, True])
def test_b47_metadata_stay_and_uninstall_leaves_no_trace(megatron_pool: Pool, tied: bool) -> None:
    run(megatron_pool, _no_trace, tied)


def _checkpoint(rank: Rank, folder: str) -> None:
    """Saved while installed, at tp 2; loaded before ``install``, at tp 1: the same loss."""
    from megatron.core import dist_checkpointing

    shims.initialize(2)
    model = _build("gpt", 2)
    batch = {name: _gathered(value, dist.group.WORLD)[0] for name, value in _batch(4).items()}
    hook.install(model)
    _step(model, "gpt", batch)
    loss = _forward(model, "gpt", batch, batch["labels"]).detach()
    multiprocessing.current_process()._config["daemon"] = False  # Megatron writes from a process of its own
    dist_checkpointing.save(model.sharded_state_dict(), folder)
    shims.initialize(1)
    torch.manual_seed(1)
    other = shims.gpt(shims.config(1), VOCAB, LENGTH)
    other.load_state_dict(dist_checkpointing.load(other.sharded_state_dict(), folder))
    assert other.output_layer.weight.shape == (VOCAB, other.config.hidden_size)
    stock = _forward(other, "gpt", batch, batch["labels"]).detach()
    hook.install(other)
    torch.testing.assert_close(stock, loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(_forward(other, "gpt", batch, batch["labels"]).detach(), loss, rtol=1e-5, atol=1e-5)


@needs_megatron
def test_b47_checkpoint_at_another_group_size(megatron_pool: Pool, tmp_path: Any) -> None:
    run(megatron_pool, _checkpoint, str(tmp_path))


# Parity switches.


def _labels_outside(rank: Rank, tp: int, sequence_parallel: bool, bias: bool) -> None:
    shims.initialize(tp)
    hidden, labels = _f0()
    labels = labels.clone()
    labels[0, 1], labels[0, 6] = -100, 32
    upstream = torch.linspace(0.5, 1.5, 8)[None]

    def step(model: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        if options:
            hook.install(model, strict=True, **options)
        tokens = _sharded(hidden, model).detach().clone().requires_grad_()
        model.output_layer.weight.grad = None
        loss = model(tokens, labels)
        (loss * upstream).sum().backward()
        return loss.detach(), tokens.grad, model.output_layer.weight.grad

    model = _head(tp, sequence_parallel=sequence_parallel, bias=bias)
    if bias:
        torch.manual_seed(model.tp_group.rank())
        nn.init.normal_(model.output_layer.bias)
    stock = step(model)
    for value, expected in zip(step(model, backward="exact"), stock, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    labels[0, 6] = 3
    loss, *_ = step(model, ignore_index=-100)
    hook.uninstall(model)
    stock_loss, *_ = step(model)
    assert float(loss[0, 1]) == 0.0
    keep = torch.arange(8) != 1
    torch.testing.assert_close(loss[0, keep], stock_loss[0, keep], rtol=1e-6, atol=1e-5)
    # In evaluation and, from real logits, in inference the options hold as well.
    hook.install(model, ignore_index=-100)
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(model(_sharded(hidden, model), labels), loss, rtol=1e-6, atol=1e-5)


@needs_megatron
@pytest.mark.parametrize(("tp", "sequence_parallel", "bias"), [(1, False, False), (2, False, True), (2, True, False)])
def test_labels_outside_the_vocabulary(megatron_pool: Pool, tp: int, sequence_parallel: bool, bias: bool) -> None:
    """By default as stock Megatron, loss and gradients; or ignored."""
    run(megatron_pool, _labels_outside, tp, sequence_parallel, bias)


def _padding(rank: Rank, tp: int) -> None:
    """Of F0's 32 rows the last 5 are padding; the labels lie below."""
    shims.initialize(tp)
    model = _head(tp)
    hidden, labels = _f0()
    labels = labels % 27
    stock = model(hidden, labels).detach()
    hook.install(model)
    torch.testing.assert_close(model(hidden, labels).detach(), stock, rtol=1e-6, atol=1e-5)
    problem = fixture0()
    expected = nn.functional.cross_entropy(problem.input @ problem.weight[:27].T, labels[0], reduction="none")
    hook.install(model, count_padding=False, vocab_size=27)
    loss = model(hidden, labels)
    torch.testing.assert_close(loss[0].detach(), expected, rtol=1e-6, atol=1e-5)
    loss.sum().backward()
    grad = torch.cat(_gathered(model.output_layer.weight.grad, model.tp_group))
    assert not grad[27:].any()
    model.eval()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.testing.assert_close(model(hidden, labels)[0], expected, rtol=1e-6, atol=1e-5)
    with pytest.raises(ValueError, match="needs vocab_size"):
        hook.install(model, count_padding=False)


@needs_megatron
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_padding_counts_or_not(megatron_pool: Pool, tp: int) -> None:
    run(megatron_pool, _padding, tp)


# The functions.


def _functions(rank: Rank, tp: int) -> None:
    from megatron.core import parallel_state, tensor_parallel

    shims.initialize(tp)
    group = _head(tp).tp_group
    single = _single_group(rank)

    def stock_function(logits: Tensor, target: Tensor, smoothing: float, group: dist.ProcessGroup) -> Tensor:
        function = tensor_parallel.vocab_parallel_cross_entropy
        if VERSION >= (0, 19):
            return function(logits, target, smoothing, group)
        whole = parallel_state._TENSOR_MODEL_PARALLEL_GROUP
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = group
        try:
            return function(logits, target, smoothing)
        finally:
            parallel_state._TENSOR_MODEL_PARALLEL_GROUP = whole

    generator = torch.Generator().manual_seed(5)
    whole = 3 * torch.randn(LENGTH, BATCH, VOCAB, generator=generator)
    target = torch.randint(0, VOCAB, (LENGTH, BATCH), generator=generator)
    upstream = torch.rand(LENGTH, BATCH, generator=generator)

    def step(function: Any, logits: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        logits = logits.clone().requires_grad_()
        loss = function(logits * 1.0, target, *args)  # stock overwrites what it is given
        (loss * upstream).sum().backward()
        return loss.detach(), logits.grad

    local = whole.chunk(group.size(), dim=-1)[group.rank()]
    for smoothing in (0.0, 0.1):
        # A single shard is what Megatron gets right: this rank's whole logits in a group of itself.
        expected = step(stock_function, whole, smoothing, single)
        for own_group in (group, None):
            loss, grad = step(hook.vocab_parallel_cross_entropy, local, smoothing, own_group)
            torch.testing.assert_close(loss, expected[0], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(
                grad, expected[1].chunk(group.size(), dim=-1)[group.rank()], rtol=1e-5, atol=1e-6
            )
    if tp == 2:
        wrong, _ = step(stock_function, local, 0.1, group)
        assert not torch.allclose(wrong, expected[0], rtol=1e-3)
    target[0, 0], target[3, 1] = -100, VOCAB
    expected = step(stock_function, local, 0.0, group)
    for value, other in zip(step(hook.vocab_parallel_cross_entropy, local, 0.0, group), expected, strict=True):
        torch.testing.assert_close(value, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="label_smoothing"):
        hook.vocab_parallel_cross_entropy(local, target, 1.0, group)

    # From hidden states.
    model = _head(tp)
    hidden, labels = _f0()
    weight = model.output_layer.weight
    stock = model(hidden, labels)
    loss = hook.vocab_parallel_linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, stock, rtol=1e-6, atol=1e-5)
    loss = hook.vocab_parallel_linear_cross_entropy(
        hidden, weight, labels, group, label_smoothing=0.1, backward=cce_tp.Sampled(seed=1)
    )
    problem = fixture0()
    expected_loss = nn.functional.cross_entropy(
        problem.input @ problem.weight.T, problem.target, reduction="none", label_smoothing=0.1
    )
    torch.testing.assert_close(loss[0].detach(), expected_loss, rtol=1e-6, atol=1e-5)
    loss.sum().backward()
    with pytest.raises(ValueError, match=r"\[s, b, h\]"):
        hook.vocab_parallel_linear_cross_entropy(hidden[:, 0], weight, labels)
    with pytest.raises(TypeError, match="reduction"):
        hook.vocab_parallel_linear_cross_entropy(hidden, weight, labels, reduction="sum")


_singles: list[dist.ProcessGroup] = []


def _single_group(rank: Rank) -> dist.ProcessGroup:
    if not _singles:
        _singles.extend(dist.new_group([index]) for index in range(4))
    return _singles[rank.index]


@needs_megatron
@pytest.mark.parametrize("tp", [1, 2])
def test_functions(megatron_pool: Pool, tp: int) -> None:
    """Label smoothing at tp 2 is the single-shard value, which stock Megatron's isn't."""
    run(megatron_pool, _functions, tp)


# What isn't the main road.


def _deferred(rank: Rank, sequence_parallel: bool) -> None:
    shims.initialize(2)
    model = _head(2, sequence_parallel=sequence_parallel, bias=True)
    torch.manual_seed(model.tp_group.rank())
    nn.init.normal_(model.output_layer.bias)
    hidden = _sharded(_f0()[0], model)
    real = model.output_layer(hidden)[0] * 0.5
    hook.install(model, strict=True)
    logits = model.output_layer(hidden)[0] / 2
    assert type(logits).__name__ == "DeferredLogits"
    assert (logits.shape, logits.size(), logits.size(-1)) == (real.shape, real.shape, real.size(-1))
    assert (logits.dtype, logits.device, logits.dim(), logits.ndim) == (real.dtype, real.device, 3, 3)
    assert logits.requires_grad
    with torch.no_grad():
        for maximum in (logits.max(dim=-1), logits.max(-1), torch.max(logits, 2)):
            torch.testing.assert_close(maximum.values, real.max(dim=-1).values)
            assert torch.equal(maximum.indices, real.max(dim=-1).indices)
        for argmax in (logits.argmax(dim=-1), torch.argmax(logits, dim=-1)):
            assert torch.equal(argmax, real.argmax(dim=-1))
    with pytest.raises(RuntimeError, match="strict"):
        torch.softmax(logits, dim=-1)

    hook.install(model)
    for use in (
        lambda z: torch.logsumexp(z, dim=-1),
        lambda z: z + 1,
        lambda z: 1 - z,
        lambda z: z[0],
        lambda z: z.float(),
        lambda z: z * torch.tensor(2.0),
        lambda z: torch.ones(()) * z,
        lambda z: z.max(),
        lambda z: torch.cat([z, z]),
        lambda z: z > 0,
        lambda z: z.transpose(0, 1).contiguous(),
    ):
        assert torch.equal(use(model.output_layer(hidden)[0] * 0.5), use(real))
    upstream = torch.linspace(0, 1, real.numel()).view_as(real)
    grads = []
    for value in (real, model.output_layer(hidden)[0] * 0.5):
        hidden.grad = None
        (value * upstream).sum().backward()
        grads.append(hidden.grad)
    assert torch.equal(*grads)


@needs_megatron
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_deferred_logits_stand_in_for_logits(megatron_pool: Pool, sequence_parallel: bool) -> None:
    run(megatron_pool, _deferred, sequence_parallel)


def _other_roads(rank: Rank) -> None:
    from megatron.core import tensor_parallel

    shims.initialize(2)
    model = _head(2)
    hidden, labels = _f0()
    hook.install(model, strict=True)
    expected = model(hidden, labels)
    expected.mean().backward()
    grads = [hidden.grad, model.output_layer.weight.grad]
    for checkpoint in (
        lambda: torch.utils.checkpoint.checkpoint(model, hidden, labels, use_reentrant=False),
        lambda: tensor_parallel.checkpoint(lambda h: model(h, labels), False, hidden),
    ):
        hidden.grad = model.output_layer.weight.grad = None
        loss = checkpoint()
        assert torch.equal(loss, expected)
        loss.mean().backward()
        assert torch.equal(hidden.grad, grads[0])
        assert torch.equal(model.output_layer.weight.grad, grads[1])

    # Gathered logits: fine without labels, refused with them.
    assert model(hidden, None, True).shape == (1, 8, 32)
    with pytest.raises(ValueError, match="can't be combined with labels"):
        model(hidden, labels, True)

    # Sampled: the loss is exact.
    hook.install(model, backward=cce_tp.Sampled(seed=3))
    torch.testing.assert_close(model(hidden, labels), expected)


@needs_megatron
def test_recompute_gathers_and_sampled(megatron_pool: Pool) -> None:
    run(megatron_pool, _other_roads)


def _refusals(rank: Rank) -> None:
    from megatron.core import tensor_parallel

    shims.initialize(2)

    def refused(error: type[Exception], match: str, **options: Any) -> None:
        attributes = dict(model.__dict__), type(model.output_layer)
        with pytest.raises(error, match=match):
            hook.install(model, **options)
        assert (dict(model.__dict__), type(model.output_layer)) == attributes

    for name, value, match in (
        ("gtp_remat_size", 2, "gtp weight sharding"),
        ("disable_grad_reduce", True, "disable_grad_reduce"),
        ("is_expert", True, "is_expert"),
    ):
        model = _head(2)
        setattr(model.output_layer, name, value)
        refused(NotImplementedError, match)
    for name, match in (
        ("defer_embedding_wgrad_compute", "defer_embedding_wgrad_compute"),
        ("fp8_output_proj", "fp8 output layer"),
    ):
        model = _head(2)
        setattr(model.config, name, True)
        refused(NotImplementedError, match)

    class Changed(tensor_parallel.ColumnParallelLinear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    model = _head(2)
    model.output_layer.__class__ = Changed
    refused(TypeError, "its own forward")
    model = _head(2)
    refused(ValueError, "backward='none'", backward="none")
    refused(TypeError, "strict=1", strict=1)
    refused(ValueError, "count_padding=False", vocab_size=30)
    with pytest.raises(TypeError, match="no Megatron language model"):
        hook.install(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="must be a module"):
        hook.install(3)  # type: ignore[arg-type]

    # Megatron-FSDP around the output layer itself, before or after install.
    unit = "an FSDP unit of its own" if VERSION >= (0, 19) else "from megatron-core 0.19 on"
    fsdp = nn.Module()
    fsdp.module, fsdp.fsdp_unit_modules = model, [tensor_parallel.ColumnParallelLinear]
    with pytest.raises(NotImplementedError, match=unit):
        hook.install([fsdp])
    hook.install(model)

    def release(layer: nn.Module, *_: Any) -> None:
        layer.weight.untyped_storage().resize_(0)

    model.output_layer.register_forward_hook(release)
    with pytest.raises(NotImplementedError, match="an FSDP unit of its own"):
        model(*_f0())


@needs_megatron
def test_refusals_name_what_they_refuse(megatron_pool: Pool) -> None:
    """And leave the model as it was."""
    run(megatron_pool, _refusals)


# The example: Megatron's schedules, DDP and distributed optimizer.


def _example(rank: Rank, folder: str, loss: str, layout: dict[str, int], *arguments: str) -> list[Any]:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import pretrain_megatron
    from reporting import read_log
    from text_data import Corpus

    from cce_tp.launch import Runtime, discover

    launched = {"RANK": rank.index, "WORLD_SIZE": 4, "LOCAL_RANK": rank.index, "MASTER_ADDR": "", "MASTER_PORT": 1}
    os.environ.update({name: str(value) for name, value in launched.items()})
    try:
        sizes = ["--dim=32", "--heads=4", "--seq-len=16", "--micro-batch=2", "--batch=8", "--steps=3", "--eval-every=2"]
        sizes += [f"--{name}={size}" for name, size in layout.items()]
        options = pretrain_megatron.parse_options(
            [*sizes, "--device=cpu", "--measure=1", f"--loss={loss}", f"--out={folder}", "--overwrite", *arguments]
        )
        Path(folder).mkdir(exist_ok=True)
        shims.initialize(**layout)
        torch.manual_seed(0)
        tokens = np.random.default_rng(0).zipf(1.5, 4000).astype(np.int32) % 61
        with shims.training():
            runtime = Runtime(discover(), torch.device("cpu"))
            trainer = pretrain_megatron.Trainer(options, runtime, Corpus(tokens[:3000], tokens[3000:], 61, ""))
            trainer.run()
    finally:
        for name in launched:
            del os.environ[name]
    statuses = hook.status(trainer.model)
    assert len(statuses) == int(loss == "cce" and trainer.is_last_stage)
    assert all(status.materialised == 0 and status.losses > 0 for status in statuses)
    dist.barrier()
    records = read_log(Path(folder) / "log.jsonl")
    return [*(r.loss for r in records[1:]), records[0].held_out_loss, *(r.grad_norm for r in records[1:])]


@needs_megatron
@pytest.mark.parametrize(
    ("layout", "arguments"),
    [
        ({"tp": 2}, ["--sequence-parallel", "--gradient-accumulation-fusion", "--vocab-size=75"]),
        pytest.param({"tp": 2, "pp": 2}, [], marks=pytest.mark.slow),
    ],
)
def test_example_trains_as_stock_megatron(
    megatron_pool: Pool, tmp_path: Path, layout: dict[str, int], arguments: list[str]
) -> None:
    """Losses and gradient norms of Megatron's own loop, with its loss and with ours."""
    stock = run(megatron_pool, _example, str(tmp_path / "stock"), "megatron-unfused", layout, *arguments)[0]
    mine = run(megatron_pool, _example, str(tmp_path / "cce"), "cce", layout, *arguments)[0]
    assert len(stock) == 7
    assert mine == pytest.approx(stock, rel=2e-4)
    assert stock[2] < stock[0] - 0.05


@needs_megatron
@pytest.mark.long
def test_example_runs_from_the_command_line_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One process, on tokens made ahead; and the picture that compares runs."""
    generator = np.random.default_rng(0)
    for part in ("train", "held-out"):
        np.save(tmp_path / f"x.{part}.npy", generator.integers(0, 99, 2000, dtype=np.int32))
    (tmp_path / "x.json").write_text('{"vocab_size": 99}')
    script = [str(Path(shims.__file__).with_name("megatron_on_cpu.py")), str(EXAMPLES / "pretrain_megatron.py")]
    options = ["--preset", "tiny", "--steps", "2", "--batch", "2", "--backward", "sampled"]
    options += ["--eps", "0.01", "--reference-rows", "50"]
    paths = ["--tokens", str(tmp_path), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *script, *options, *paths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert "cce sampled, eps 0.01, 50 reference rows" in done.stdout
    refused = subprocess.run(
        [*command, "--overwrite", "--vocab-size", "98"], env=environment, capture_output=True, text=True, timeout=150
    )
    assert refused.returncode == 2
    assert "--vocab-size 98 is less than the tokenizer's 99" in refused.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["loss_seconds"] > 0

    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(EXAMPLES)
    import compare_runs

    picture = tmp_path / "losses.png"
    monkeypatch.setattr(sys, "argv", ["compare_runs.py", *[str(tmp_path / "run")] * 2, "--out", str(picture)])
    assert compare_runs.main() == 0
    assert capsys.readouterr().out.count("run: cce sampled") == 2
    assert picture.stat().st_size > 10_000


def test_megatron_is_imported_when_it_is_used() -> None:
    code = """
import sys, torch
sys.modules["megatron"] = None
import cce_tp, cce_tp.megatron
try:
    cce_tp.megatron.install(torch.nn.Linear(1, 1))
except ImportError as error:
    print(error)
"""
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "needs megatron-core" in answer.stdout
