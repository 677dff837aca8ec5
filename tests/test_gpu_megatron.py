"""The Megatron hook on real GPUs: a model's forward and backward in a CUDA graph, and Megatron's own step graphs."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed import Pool, Rank
from oracle import relative_error
from torch import Tensor, nn

import cce_tp
import cce_tp.megatron as hook

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
VOCAB, LENGTH, BATCH, DIM = 4096, 256, 2, 256
START_TIMEOUT = 150.0

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.timeout(600),
]


def _start(rank: Rank, cuda_graph_rng: bool) -> None:
    warnings.simplefilter("ignore")
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    from megatron.core import parallel_state, tensor_parallel

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=rank.size)
    tensor_parallel.model_parallel_cuda_manual_seed(0, use_cudagraphable_rng=cuda_graph_rng, force_reset_rng=True)
    torch.manual_seed(0)


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multigpu)],
)
def megatron_pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """As many NCCL processes as the tensor-parallel group has ranks."""
    pool = Pool(request.param, backend="nccl", sizes=(request.param,))
    yield pool
    pool.stop()


def _gpt(tp: int, dtype: torch.dtype) -> Any:
    from megatron_gpt import build_gpt, gpt_config

    config = gpt_config(DIM, 2, 4, dtype, False, tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    return build_gpt(config, VOCAB, LENGTH).cuda()


def _fill(batch: dict[str, Tensor], seed: int) -> None:
    """New ids, labels (some outside the vocabulary) and upstream gradients, in place."""
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, LENGTH)
    batch["ids"].copy_(torch.randint(0, VOCAB, shape, generator=generator))
    labels = torch.randint(0, VOCAB, shape, generator=generator)
    batch["labels"].copy_(labels.masked_fill(torch.rand(shape, generator=generator) < 0.1, -100))
    batch["upstream"].copy_(torch.rand(shape, generator=generator))


def _pass(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Forward and backward; gradients are new tensors, not sums."""
    for parameter in model.parameters():
        parameter.grad = None
    loss = model(batch["ids"], batch["positions"], None, labels=batch["labels"])
    (loss * batch["upstream"]).sum().backward()
    return loss


def _capture(rank: Rank, backward: Any, ignore_index: int | None) -> None:
    _start(rank, cuda_graph_rng=True)
    from megatron.core.tensor_parallel.random import get_all_rng_states

    stream = torch.cuda.Stream()
    batch = {
        "ids": torch.zeros(BATCH, LENGTH, dtype=torch.long, device=rank.device),
        "labels": torch.zeros(BATCH, LENGTH, dtype=torch.long, device=rank.device),
        "upstream": torch.zeros(BATCH, LENGTH, device=rank.device),
        "positions": torch.arange(LENGTH, device=rank.device).expand(BATCH, LENGTH),
    }
    with torch.cuda.stream(stream):
        model = _gpt(rank.size, torch.bfloat16)
        hook.install(model, backward=backward, ignore_index=ignore_index, strict=True)
        _fill(batch, 0)
        for _ in range(3):  # compiles kernels, and lets the ranks agree
            _pass(model, batch)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        for state in get_all_rng_states().values():  # under sequence parallelism the embedding switches between them
            graph.register_generator_state(state)
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            static = _pass(model, batch)
        captured = {name: parameter.grad for name, parameter in model.named_parameters()}
        for seed in (1, 2):
            _fill(batch, seed)
            graph.replay()
            stream.synchronize()
            loss, grads = static.clone(), {name: grad.clone() for name, grad in captured.items()}
            expected = _pass(model, batch).detach()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
            assert bool(loss.isfinite().all())
            if isinstance(backward, cce_tp.Sampled) and backward.seed is None:
                head = model.output_layer.weight
                assert 0.0 < relative_error(grads["output_layer.weight"], head.grad) < 0.5
                graph.replay()  # the same batch, other samples
                stream.synchronize()
                assert not torch.equal(captured["output_layer.weight"], grads["output_layer.weight"])
                continue
            for name, parameter in model.named_parameters():
                assert relative_error(grads[name], parameter.grad) < 1e-2, name
    hook.uninstall(model)


@pytest.mark.parametrize("ignore_index", [None, -100])
@pytest.mark.parametrize("backward", ["exact", cce_tp.Sampled(eps=2.0**-8, seed=3), cce_tp.Sampled(eps=2.0**-8)])
def test_model_in_a_cuda_graph(megatron_pool: Pool, backward: Any, ignore_index: int | None) -> None:
    """Replays on new batches give the eager loss and gradients; unseeded samples differ from replay to replay."""
    megatron_pool.run(megatron_pool.world_size, _capture, backward, ignore_index, timeout=START_TIMEOUT)


def _train(rank: Rank, folder: str, *arguments: str) -> list[float]:
    from cce_tp.launch import Runtime, discover

    cuda_graph = "--cuda-graph" in arguments
    _start(rank, cuda_graph)
    import pretrain_megatron
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
    from reporting import read_log
    from text_data import Corpus

    launched = {
        "RANK": rank.index,
        "WORLD_SIZE": rank.size,
        "LOCAL_RANK": rank.index,
        "MASTER_ADDR": "",
        "MASTER_PORT": 1,
    }
    os.environ.update({name: str(value) for name, value in launched.items()})
    sizes = ["--dim=128", "--layers=2", "--heads=4", "--seq-len=128", "--micro-batch=2", "--batch=4", "--steps=8"]
    layout = [f"--tp={rank.size}", *(["--sequence-parallel"] if rank.size > 1 else [])]
    options = pretrain_megatron.parse_options(
        [*sizes, *layout, "--lr=1e-3", "--eval-every=0", "--measure=0", f"--out={folder}", "--overwrite", *arguments]
    )
    Path(folder).mkdir(exist_ok=True)
    tokens = np.random.default_rng(0).zipf(1.5, 20_000).astype(np.int32) % 4001
    corpus = Corpus(tokens[:16_000], tokens[16_000:], 4001, "")
    with pretrain_megatron.capture_stream(cuda_graph):
        trainer = pretrain_megatron.Trainer(options, Runtime(discover(), rank.device), corpus)
        trainer.run()
    if cuda_graph:
        assert FullCudaGraphWrapper.cuda_graph["training"] is not None
        trainer.run_schedule.reset_cuda_graph()
        StaticBufferLoader.static_buffers["training"].clear()
    torch.distributed.barrier()
    return [record.loss for record in read_log(Path(folder) / "log.jsonl") if record.loss is not None]


@pytest.mark.parametrize("backward", ["exact", "sampled"])
def test_training_in_megatrons_step_graphs(megatron_pool: Pool, tmp_path: Path, backward: str) -> None:
    """Megatron's full-iteration graph trains as its ordinary schedule does."""
    arguments = ["--loss=cce", f"--backward={backward}"]

    def losses(*more: str) -> list[float]:
        size = megatron_pool.world_size
        return megatron_pool.run(size, _train, str(tmp_path / "run"), *arguments, *more, timeout=START_TIMEOUT)[0]

    eager, graphed = losses(), losses("--cuda-graph")
    assert len(eager) == 8
    assert eager[-1] < eager[0] - 0.1
    assert graphed == pytest.approx(eager, abs=0.02)
