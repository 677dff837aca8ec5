"""The DeepSpeed hook against stock DeepSpeed, on four gloo processes.

Every case trains the same model twice for three SGD steps without clipping (Adam and clipping are blind to a wrong
factor), and compares how far the weights moved.
"""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import Pool, Rank
from oracle import fixture0
from torch import Tensor, nn

import cce_tp
import cce_tp.deepspeed as hook

INSTALLED = all(importlib.util.find_spec(name) is not None for name in ("deepspeed", "transformers"))

pytestmark = [
    pytest.mark.skipif(not INSTALLED, reason="needs deepspeed and transformers (tests/run.sh installs them)"),
    pytest.mark.timeout(300),
]

if INSTALLED:
    import deepspeed_shims as shims
    import hf_models as hf

STEPS = 3
RANKS = 4
F0_LOSS, F0_WEIGHT_NORM = 7.05823367, 1.26085113


@pytest.fixture(scope="module")
def run(hf_pool: Pool) -> Any:
    """Run a task on four processes that have DeepSpeed ready."""
    return lambda task, *args: hf_pool.run(RANKS, _prepared, task, args, timeout=120.0)


def _prepared(rank: Rank, task: Any, args: tuple[Any, ...]) -> Any:
    shims.prepare(rank.index, rank.size)
    known = set(dist.distributed_c10d._world.pg_map)
    answer = task(rank, *args)
    shims.destroy_groups(known)
    return answer


def check_moved(mine: dict[str, Tensor], stock: dict[str, Tensor], start: dict[str, Tensor], tolerance: float) -> None:
    """Weights agree to a fraction of how far they moved."""
    assert mine.keys() == stock.keys() == start.keys()
    largest = max(float((stock[name] - value).norm()) for name, value in start.items())
    assert largest > 0.01
    for name, value in start.items():
        moved = float((stock[name] - value).norm())
        error = float((mine[name] - stock[name]).norm())
        assert error <= tolerance * moved + 1e-7 * largest + 1e-7 * float(value.norm()), (name, error, moved)


def _train(
    engine: Any, replica: int, accumulation: int = 1, offset: int = 0
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Weights before and after, and the losses; ``replica`` chooses the data."""
    start, losses = shims.weights(engine), []
    for index in range(STEPS * accumulation):
        loss = engine(**hf.batch(100 * offset + 10 * index + replica)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return start, shims.weights(engine), losses


# ZeRO stages, tensor parallelism, tied heads, accumulation.


def _compare(rank: Rank, stage: int, tp: int, tied: bool, accumulation: int, changes: dict[str, Any]) -> None:
    dtype = changes.get("dtype", "fp32")
    settings = shims.config(stage, accumulation, tp, **changes)
    replica = rank.index // tp
    stock = _train(shims.engine(hf.build(tied=tied), settings), replica, accumulation)
    engine = shims.engine(hf.build(tied=tied), settings)
    status = hook.install(engine, strict=True)
    mine = _train(engine, replica, accumulation)
    assert (status.losses, status.materialised) == (STEPS * accumulation, 0)
    exact = dtype == "fp32"
    if exact:  # Adam turns the rounding of tiny gradients into steps
        check_moved(mine[1], stock[1], mine[0], 1e-3 if "optimizer" in changes else 3e-6)
    else:  # stock rounds its logits
        moved = torch.cat([(stock[1][name] - value).flatten() for name, value in mine[0].items()])
        error = torch.cat([(stock[1][name] - value).flatten() for name, value in mine[1].items()])
        assert float(moved.norm()) > 0.01
        assert float(error.norm()) < 0.03 * float(moved.norm())
    torch.testing.assert_close(torch.tensor(mine[2]), torch.tensor(stock[2]), rtol=1e-6 if exact else 0.01, atol=1e-6)
    rows = mine[1]["model.embed_tokens.weight" if tied else "lm_head.weight"].shape[0]
    assert rows == ([49, 48][rank.index % 2] if tp == 2 else hf.VOCAB)  # uneven
    if tp == 2:
        _check_equal(torch.tensor(mine[2]), rank.paired)


def _check_equal(value: Tensor, group: dist.ProcessGroup | None) -> None:
    assert group is not None
    others = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(others, value, group=group)
    assert all(torch.equal(value, other) for other in others)


OFTEN = {(0, 1, False, 1), (1, 1, True, 2), (2, 1, False, 2), (3, 1, True, 1), (1, 2, True, 2), (2, 2, False, 1)}
OFTEN |= {(3, 2, False, 1), (0, 2, False, 2)}
MATRIX = [
    pytest.param(*case, marks=[] if case in OFTEN else [pytest.mark.slow])
    for case in (
        (stage, tp, tied, acc) for stage in range(4) for tp in (1, 2) for tied in (False, True) for acc in (1, 2)
    )
]


@pytest.mark.parametrize(("stage", "tp", "tied", "accumulation"), MATRIX)
def test_weights_after_three_steps(run: Any, stage: int, tp: int, tied: bool, accumulation: int) -> None:
    """dp 4, or tp 2 × dp 2 with AutoTP's vocabulary-parallel head (97 ids: 49 and 48)."""
    run(_compare, stage, tp, tied, accumulation, {})


OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}, "zero_force_ds_cpu_optimizer": False}
OFFLOAD_ALL = {
    "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
}
GATHERED_HEAD = {"tensor_parallel": {"vocab_parallel_lm_head": False}}
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}


@pytest.mark.parametrize(
    ("stage", "tp", "changes"),
    [
        pytest.param(1, 2, {"dtype": "bf16"}),
        pytest.param(2, 1, {"dtype": "fp16"}, marks=pytest.mark.slow),
        pytest.param(3, 1, {"dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param(1, 2, {"dtype": "fp16"}),
        pytest.param(2, 1, OFFLOAD, marks=pytest.mark.slow),
        pytest.param(3, 1, OFFLOAD_ALL),
        pytest.param(0, 1, ADAM, marks=pytest.mark.slow),
    ],
)
def test_precisions_and_offload(run: Any, stage: int, tp: int, changes: dict[str, Any]) -> None:
    run(_compare, stage, tp, False, 2, changes)


def _dense(tied: bool, replicas: int, accumulation: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights before and after: one process, ordinary logits, the mean over all replicas' losses."""
    model = hf.build(tied=tied)
    start = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=shims.LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(accumulation):
            for replica in range(replicas):
                loss = model(**hf.batch(10 * (step * accumulation + index) + replica)).loss
                (loss / (replicas * accumulation)).backward()
        optimizer.step()
    return start, {name: value.detach().clone() for name, value in model.named_parameters()}


def _against_dense(rank: Rank, stage: int, tp: int, gathered: bool) -> None:
    start, expected = _dense(False, RANKS // tp)
    settings = shims.config(stage, 1, tp, **(GATHERED_HEAD if gathered else {}))
    engine = shims.engine(hf.build(), settings)
    status = hook.install(engine, strict=True)
    _, mine, _ = _train(engine, rank.index // tp)
    assert status.losses == STEPS
    rows = slice(0, 49) if rank.index % tp == 0 else slice(49, None)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        part = rows if name == "lm_head.weight" and tp > 1 else slice(None)
        moved = float((expected[name] - start[name])[part].norm())
        assert float((mine[name] - expected[name][part]).norm()) < 5e-6 * moved + 1e-7, name


@pytest.mark.parametrize(("stage", "tp", "gathered"), [(1, 2, False), (1, 2, True), (3, 1, False)])
def test_weights_are_those_of_one_process(run: Any, stage: int, tp: int, gathered: bool) -> None:
    """The stock engine isn't the only judge. ``gathered``: AutoTP's head that gathers its logits by itself."""
    run(_against_dense, stage, tp, gathered)


# Logits under a sharded head; no trace.


def _logits_and_trace(rank: Rank) -> None:
    reference = hf.build().eval()
    ids = hf.batch(3)["input_ids"]
    expected = reference(input_ids=ids).logits
    generated = reference.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
    engine = shims.engine(hf.build(), shims.config(1, 1, 2))
    model = engine.module
    stock_class, stock_loss, before = type(model.lm_head), model.loss_function, set(model.__dict__)
    assert model(input_ids=ids).logits.shape[-1] < hf.VOCAB  # stock: a shard
    hook.install(engine)
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0), generated)
        labelled = model(**hf.batch(3)).loss
        torch.testing.assert_close(labelled, reference(**hf.batch(3)).loss, rtol=1e-6, atol=1e-6)
    model.train()
    hook.install(engine, strict=True, backward="sampled")
    assert hook.status(engine) == hook.HookStatus("sampled")
    assert hook.uninstall(engine)
    assert not hook.uninstall(engine)
    assert hook.status(engine) is None
    assert type(model.lm_head) is stock_class
    assert model.loss_function is stock_loss
    assert set(model.__dict__) == before
    assert "_cce_tp_hook" not in model.lm_head.__dict__
    _, after, losses = _train(engine, rank.index // 2)
    again = _train(shims.engine(hf.build(), shims.config(1, 1, 2)), rank.index // 2)
    assert losses == again[2]
    assert all(torch.equal(after[name], value) for name, value in again[1].items())


def test_generation_with_a_sharded_head_and_uninstall(run: Any) -> None:
    run(_logits_and_trace)


# Case B37: ZeRO-3 and a head of one's own.


class _Head(nn.Module):
    """Hidden states, a head, a loss: a model that isn't Hugging Face's."""

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("hidden", hidden)
        self.classifier = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        with torch.no_grad():
            self.classifier.weight.copy_(weight)

    def forward(self, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier(self.hidden * self.scale), targets)


def _fixture_under_zero3(rank: Rank, frozen: bool) -> None:
    from deepspeed.utils import safe_get_full_grad

    problem = fixture0()
    hidden, weight, target = problem.input.detach(), problem.weight.detach(), problem.target
    model = _Head(hidden, weight)
    model.classifier.weight.requires_grad_(not frozen)
    reference = _Head(hidden, weight)
    engine = shims.engine(model, shims.config(3, zero_optimization={"stage3_param_persistence_threshold": 0}))
    assert model.classifier.weight.numel() == 0
    with pytest.raises(ValueError, match=r"ZeRO-3.*cce_tp\.deepspeed\.install.*GatheredParameters"):
        cce_tp.linear_cross_entropy(hidden, model.classifier.weight, target)
    status = hook.install(engine, head="classifier", labels=("targets",), strict=True)
    for step in range(2):
        loss = engine(target)
        engine.backward(loss)
        reference.zero_grad()
        expected = reference(target)
        expected.backward()
        if step == 0:
            assert loss.item() == pytest.approx(F0_LOSS, abs=2e-6)
        assert loss.item() == pytest.approx(expected.item(), abs=2e-6)
        grad = safe_get_full_grad(model.classifier.weight)
        if frozen:
            assert grad is None
        else:
            assert hf.relative(grad, reference.classifier.weight.grad) < 2e-6
            assert step or float(grad.norm()) == pytest.approx(F0_WEIGHT_NORM, abs=2e-6)
        assert hf.relative(safe_get_full_grad(model.scale), reference.scale.grad) < 1e-5
        engine.step()
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter is not reference.classifier.weight or not frozen:
                    parameter -= shims.LEARNING_RATE * parameter.grad
    assert (status.losses, status.materialised) == (2, 0)


@pytest.mark.parametrize("frozen", [False, True])
def test_fixture_under_zero3(run: Any, frozen: bool) -> None:
    """Case B37 (b)."""
    run(_fixture_under_zero3, frozen)


def _logits_after_zero3(rank: Rank) -> None:
    engine = shims.engine(hf.build(), shims.config(3))
    hook.install(engine)
    outputs = engine(**hf.batch())
    assert outputs.logits is None
    engine.backward(outputs.loss)
    real = engine(input_ids=hf.batch()["input_ids"]).logits
    assert real.shape == (2, hf.LENGTH, hf.VOCAB)


def test_zero3_returns_no_logits(run: Any) -> None:
    run(_logits_after_zero3)


# A head sharded by hand, with a Megatron-style mpu.


class _ByHand(nn.Module):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.embed = nn.Embedding(64, 16)
        self.lm_head = nn.Linear(16, 64 // size, bias=False)
        with torch.no_grad():
            self.embed.weight.copy_(torch.randn(64, 16, generator=generator))
            self.lm_head.weight.copy_(torch.randn(64, 16, generator=generator).chunk(size)[rank])
        if size > 1:
            self.lm_head.weight.tensor_model_parallel = True

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.lm_head(self.embed(ids))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _mpu(rank: Rank) -> Any:
    groups = {
        "tensor_model_parallel": rank.paired,
        "model_parallel": rank.paired,
        "data_parallel": rank.strided,
    }
    mpu = SimpleNamespace()
    for name, group in groups.items():
        assert group is not None
        setattr(mpu, f"get_{name}_group", lambda group=group: group)
        setattr(mpu, f"get_{name}_world_size", lambda group=group: group.size())
        setattr(mpu, f"get_{name}_rank", lambda group=group: group.rank())
    return mpu


def _by_hand(rank: Rank, stage: int) -> None:
    def data(step: int, replica: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(10 * step + replica)
        return torch.randint(0, 64, (2, 9), generator=generator), torch.randint(0, 64, (2, 9), generator=generator)

    reference = _ByHand(0, 1)
    optimizer = torch.optim.SGD(reference.parameters(), lr=shims.LEARNING_RATE)
    mpu = _mpu(rank)
    engine = shims.engine(_ByHand(rank.index % 2, 2), shims.config(stage), mpu=mpu)
    status = hook.install(engine, mpu=mpu, strict=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        expected = [reference(*data(step, replica)) for replica in range(2)]
        (sum(expected) / 2).backward()
        optimizer.step()
        loss = engine(*data(step, rank.index // 2))
        assert loss.item() == pytest.approx(expected[rank.index // 2].item(), abs=2e-6)
        engine.backward(loss)
        engine.step()
    mine = shims.weights(engine)
    assert hf.relative(mine["embed.weight"], reference.embed.weight) < 1e-6
    assert hf.relative(mine["lm_head.weight"], reference.lm_head.weight.chunk(2)[rank.index % 2]) < 1e-6
    assert status.losses == STEPS


@pytest.mark.parametrize("stage", [1, pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_megatron_style_mpu(run: Any, stage: int) -> None:
    run(_by_hand, stage)


# Ulysses sequence parallelism: sp 2 × dp 2.


def _ulysses(rank: Rank, stage: int, accumulation: int, reduce_scatter: bool) -> None:
    import deepspeed.runtime.sequence_parallel.parallel_state_sp as sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    length = 16
    changes = {"attention": "sdpa", "num_key_value_heads": 4}

    def data(index: int, replica: int) -> dict[str, Tensor]:
        inputs = hf.batch(10 * index + replica, length=length)
        shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
        shifted[:, : 1 + replica] = -100  # so that the parts of a sequence have different numbers of labels
        shifted[0, :9] = -100
        return {**inputs, "shift_labels": shifted, "position_ids": torch.arange(length).expand(2, -1)}

    first_loss = hf.build(**changes)(**data(0, rank.index // 2)).loss.detach()
    reference = hf.build(**changes)
    start = {name: value.detach().clone() for name, value in reference.named_parameters()}
    optimizer = torch.optim.SGD(reference.parameters(), lr=shims.LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(accumulation):
            for replica in range(2):
                loss = reference(**data(step * accumulation + index, replica)).loss
                (loss / (2 * accumulation)).backward()
        optimizer.step()

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model, plain = hf.build(**changes), ALL_ATTENTION_FUNCTIONS["sdpa"]
    for name in [name for name in vars(sp) if name.startswith("_") and name.endswith(("GROUP", "WORLD_SIZE", "RANK"))]:
        setattr(sp, name, None)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=2, micro_batch_size=2
    )
    zero = {} if reduce_scatter else {"reduce_scatter": False, "contiguous_gradients": True}
    settings = shims.config(stage, accumulation, sequence_parallel_size=2, zero_optimization=zero)
    engine = shims.engine(model, settings, mpu=mpu)
    status = hook.install(engine, strict=True)
    part = slice(0, 8) if rank.index % 2 == 0 else slice(8, None)
    for index in range(STEPS * accumulation):
        inputs = {name: value[:, part].contiguous() for name, value in data(index, rank.index // 2).items()}
        loss = hook.sequence_parallel_mean(engine(**inputs).loss, inputs["shift_labels"], engine)
        if index == 0:
            torch.testing.assert_close(loss.detach(), first_loss, rtol=1e-6, atol=1e-6)
        engine.backward(loss)
        engine.step()
    ALL_ATTENTION_FUNCTIONS["sdpa"] = plain
    assert status.losses == STEPS * accumulation
    mine = shims.weights(engine)
    check_moved(mine, {name: value.detach() for name, value in reference.named_parameters()}, start, 1e-5)


@pytest.mark.parametrize(
    ("stage", "accumulation", "reduce_scatter"),
    [
        (1, 2, True),
        (3, 1, True),
        pytest.param(0, 1, True, marks=pytest.mark.slow),
        pytest.param(2, 1, True, marks=pytest.mark.slow),
        pytest.param(3, 2, False, marks=pytest.mark.slow),
        pytest.param(3, 2, True, marks=pytest.mark.slow),
    ],
)
def test_ulysses(run: Any, stage: int, accumulation: int, reduce_scatter: bool) -> None:
    """The gradient of the mean over all tokens, whatever the ZeRO stage makes of the sequence-parallel ranks."""
    run(_ulysses, stage, accumulation, reduce_scatter)


# Pipelines: pp 2 × dp 2.


class _Embed(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def _layers(tied: bool, head: Any, tied_forward: Any) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    first = TiedLayerSpec("embed", _Embed, 64, 16) if tied else LayerSpec(_Embed, 64, 16)
    middle = [LayerSpec(nn.Linear, 16, 16), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 16, 16)]
    last = TiedLayerSpec("embed", _Embed, 64, 16, forward_fn=tied_forward) if tied else LayerSpec(head, 16, 64)
    return [first, *middle, last]


def _train_pipeline(rank: Rank, tied: bool, stage: int, ours: bool, checkpoint: int) -> Any:
    from deepspeed.pipe import PipelineModule

    def stock_loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    shims.reset()
    torch.manual_seed(0)
    module = PipelineModule(
        _layers(
            tied,
            hook.PipelineHead if ours else nn.Linear,
            hook.tied_pipeline_head if ours else lambda module, hidden: F.linear(hidden, module.weight),
        ),
        num_stages=2,
        loss_fn=hook.pipeline_loss_fn() if ours else stock_loss,
        partition_method="uniform",
        activation_checkpoint_interval=checkpoint,
        seed_layers=True,
    )
    settings = shims.config(stage, 2, **({"pipeline": {"use_reentrant": False}} if checkpoint else {}))
    engine = shims.engine(module, settings)
    start = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    generator = torch.Generator().manual_seed(engine.grid.get_data_parallel_rank())
    losses = []
    for _ in range(STEPS):
        data = [
            tuple(torch.randint(0, 64, (2, 9), generator=generator) for _ in range(2))
            for _ in range(engine.gradient_accumulation_steps())
        ]
        losses.append(float(engine.train_batch(iter(data))))
    return start, {name: value.detach().clone() for name, value in engine.module.named_parameters()}, losses


def _pipeline(rank: Rank, tied: bool, stage: int, checkpoint: int) -> None:
    stock = _train_pipeline(rank, tied, stage, False, checkpoint)
    start, mine, losses = _train_pipeline(rank, tied, stage, True, checkpoint)
    assert losses == pytest.approx(stock[2], rel=1e-6)
    check_moved(mine, stock[1], start, 3e-6)


@pytest.mark.parametrize(
    ("tied", "stage", "checkpoint"),
    [(False, 1, 0), (True, 0, 0), pytest.param(False, 0, 1, marks=pytest.mark.slow)],
)
def test_pipeline_of_two_stages(run: Any, tied: bool, stage: int, checkpoint: int) -> None:
    run(_pipeline, tied, stage, checkpoint)


def test_pipeline_loss_function_refuses() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        hook.pipeline_loss_fn(softmax=1)
    with pytest.raises(TypeError, match=r"last layer returned a Tensor, expected .hidden, weight."):
        hook.pipeline_loss_fn()(torch.ones(2, 3), torch.zeros(2))


def test_refusals() -> None:
    model = _ByHand(0, 1)
    for arguments, error, message in (
        ({"engine_or_model": 3}, TypeError, "engine_or_model is a int"),
        ({"head": "nowhere"}, ValueError, "head='nowhere' names no module"),
        ({"head": "embed"}, TypeError, r"the head is a torch.nn.modules.sparse.Embedding"),
        ({"backward": 3}, TypeError, "backward=3"),
        ({"strict": 0}, TypeError, "strict=0"),
        ({"mpu": object()}, TypeError, "mpu is a object without"),
        ({"shard": object()}, ValueError, "only says something with group= or mpu="),
    ):
        with pytest.raises(error, match=message):
            hook.install(**{"engine_or_model": model, **arguments})
    with pytest.raises(TypeError, match="has no layer called lm_head"):
        hook.install(nn.Sequential(nn.Linear(2, 2)))

    class PipelineModule(nn.Module):
        pass

    with pytest.raises(NotImplementedError, match="pipeline_loss_fn"):
        hook.install(PipelineModule())
    with pytest.raises(TypeError, match="engine is a _ByHand, expected a DeepSpeed engine"):
        hook.sequence_parallel_mean(torch.zeros(()), torch.zeros(2), model)
    with pytest.raises(ValueError, match=r"loss has shape \(2,\)"):
        hook.sequence_parallel_mean(torch.zeros(2), torch.zeros(2), model)
