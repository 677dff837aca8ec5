"""The Hugging Face hook: patched models against the same models unpatched, in one process and on two gloo ranks."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import Pool, Rank, collectives
from torch import Tensor, nn

import cce_tp
import cce_tp.transformers as hook

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
    pytest.mark.filterwarnings("error:cce_tp"),
]

if importlib.util.find_spec("transformers") is not None:
    import hf_models as hf

EXACT = 2e-6

needs_peft = pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")


def check_same(mine: tuple[Tensor, dict[str, Tensor], Any], stock: tuple[Tensor, dict[str, Tensor], Any]) -> None:
    """Loss, and the gradient of every parameter."""
    assert float((mine[0] - stock[0]).abs()) < 1e-6 * max(1.0, float(stock[0].abs()))
    assert mine[1].keys() == stock[1].keys()
    floor = 1e-7 * max(float(grad.norm()) for grad in stock[1].values())  # some gradients are all rounding
    for name, grad in stock[1].items():
        assert float((mine[1][name] - grad).norm()) < EXACT * float(grad.norm()) + floor, name


def traces(model: nn.Module) -> list[Any]:
    """What ``unpatch`` has to restore."""
    return [(name, type(module), dict(module.__dict__)) for name, module in model.named_modules()]


def check_no_trace(before: list[Any], after: list[Any]) -> None:
    for (name, kind, attributes), (_, kind_after, attributes_after) in zip(before, after, strict=True):
        assert kind is kind_after, name
        assert attributes.keys() == attributes_after.keys(), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", hf.ARCHITECTURES if "hf" in globals() else [])
def test_architecture(architecture: str, tied: bool) -> None:
    if not hf.has(architecture):
        pytest.skip(f"this transformers has no {architecture}")
    model, inputs = hf.build(architecture, tied=tied), hf.batch()
    before, stock = traces(model), hf.step(model, inputs)
    by_count = {**inputs, "num_items_in_batch": torch.tensor(37)}
    stock_by_count = hf.step(model, by_count)
    status = hook.patch(model, strict=True)
    mine = hf.step(model, inputs)
    check_same(mine, stock)
    check_same(hf.step(model, by_count), stock_by_count)
    assert isinstance(mine[2].logits, hook.DeferredLogits)
    assert mine[2].logits.shape == stock[2].logits.shape
    assert mine[2].logits.dtype == stock[2].logits.dtype
    assert (status.losses, status.materialised, status.implementation) == (2, 0, "torch")
    assert hook.unpatch(model)
    check_no_trace(before, traces(model))
    again = hf.step(model, inputs)
    assert torch.equal(again[0], stock[0])
    assert all(torch.equal(again[1][name], grad) for name, grad in stock[1].items())


def test_softcap_and_scale_take_part() -> None:
    """Without them the tests above could not fail."""
    for architecture, change in (("Gemma2", "final_logit_softcapping"), ("Granite", "logits_scaling")):
        losses = [hf.step(hf.build(architecture, **{change: value}), hf.batch())[0] for value in (1.5, 2.5)]
        assert abs(losses[0] - losses[1]) > 0.01


@pytest.mark.parametrize("architecture", ["Llama", "Gemma2"])
def test_conventions_of_the_trainer(architecture: str) -> None:
    model, inputs = hf.build(architecture), hf.batch()
    shifted = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    cases: list[dict[str, Any]] = [
        {**inputs, "num_items_in_batch": 29},
        {**inputs, "return_dict": False},
        {**inputs, "use_cache": False, "output_hidden_states": True},
        {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])},
    ]
    if "shift_labels" in inspect.signature(_causal_loss()).parameters:
        cases += [
            {**inputs, "shift_labels": shifted.roll(1, 0)},
            {**inputs, "shift_labels": shifted.roll(1, 0), "num_items_in_batch": torch.tensor(31.0)},
        ]
    stock = [hf.step(model, case) for case in cases]
    status = hook.patch(model, strict=True)
    for case, expected in zip(cases, stock, strict=True):
        mine = hf.step(model, case)
        check_same(mine, expected)
        assert type(mine[2]) is type(expected[2])
        assert len(mine[2]) == len(expected[2])
    assert status.losses == len(cases)


def _causal_loss() -> Any:
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss


def test_labels_by_position_and_the_signature() -> None:
    model, inputs = hf.build(), hf.batch()
    signature = inspect.signature(model.forward)
    stock = hf.step(model, inputs)
    hook.patch(model, strict=True)
    assert inspect.signature(model.forward) == signature
    arguments = inspect.signature(model.forward).bind_partial(**inputs).arguments
    names = list(signature.parameters)[: list(signature.parameters).index("labels") + 1]
    loss = model(*(arguments.get(name) for name in names)).loss
    assert torch.equal(loss.detach(), hf.step(model, inputs)[0])
    assert abs(loss.detach() - stock[0]) < 1e-6


def test_loss_of_pre_shifted_logits() -> None:
    """Sequence parallelism in the Trainer: labels that are shifted already, the loss of logits taken afterwards."""
    model, inputs = hf.build(), hf.batch()
    if "shift_labels" not in inspect.signature(_causal_loss()).parameters:
        pytest.skip("this transformers has no shift_labels")
    shifted = F.pad(inputs.pop("labels"), (0, 1), value=-100)[:, 1:].contiguous()

    def losses() -> tuple[Tensor, dict[str, Tensor], Any]:
        model.zero_grad(set_to_none=True)
        outputs = model(**inputs, shift_labels=shifted)
        loss = model.loss_function(logits=outputs.logits, labels=None, vocab_size=hf.VOCAB, shift_labels=shifted)
        loss.backward()
        return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}, outputs

    stock = losses()
    hook.patch(model, strict=True)
    check_same(losses(), stock)


@pytest.mark.parametrize("architecture", ["Gemma2", "GPT2"])
def test_evaluation_and_generation_are_unchanged(architecture: str) -> None:
    model, inputs = hf.build(architecture), hf.batch()
    ids = inputs["input_ids"]
    model.generation_config.pad_token_id = 0

    def answers() -> list[Tensor]:
        model.eval()
        with torch.no_grad():
            found = [*model(**inputs)[:2], model(input_ids=ids).logits]
            found.append(model.generate(ids, max_new_tokens=5, do_sample=False))
        model.train()
        return [*found, model(input_ids=ids).logits.detach()]

    before = answers()
    status = hook.patch(model, strict=True)
    assert all(torch.equal(a, b) for a, b in zip(answers(), before, strict=True))
    assert status.losses == status.materialised == 0


@pytest.mark.parametrize("architecture", ["Llama", "Gemma2", "Granite"])
def test_deferred_logits_become_real(architecture: str) -> None:
    model, inputs = hf.build(architecture), hf.batch()
    stock = model(**inputs).logits
    (stock_grad,) = torch.autograd.grad(stock.square().sum(), model.get_output_embeddings().weight)
    status = hook.patch(model)
    deferred = model(**inputs).logits
    assert repr(deferred) == f"DeferredLogits(shape={tuple(stock.shape)}, dtype=torch.float32, device=cpu)"
    assert (deferred.size(-1), deferred.ndim, deferred.requires_grad) == (hf.VOCAB, 3, True)
    assert status.materialised == 0
    with pytest.warns(UserWarning, match="attribute 'square' needs real logits"):
        real = deferred.square()
    assert torch.equal(real, stock.square())
    (grad,) = torch.autograd.grad(real.sum(), model.get_output_embeddings().weight)
    assert torch.equal(grad, stock_grad)
    assert torch.equal(deferred[:, 0].argmax(-1), stock[:, 0].argmax(-1))  # and no second warning
    assert torch.equal(torch.softmax(deferred, -1), torch.softmax(stock, -1))
    assert torch.equal(deferred + 1, stock + 1)
    assert status.materialised == 2  # deferred itself, and its slice


def test_strict_refuses_logits() -> None:
    model = hf.build()
    hook.patch(model, strict=True)
    logits = model(**hf.batch()).logits
    with pytest.raises(RuntimeError, match="strict: attribute 'argmax' needs the logits"):
        logits.argmax(-1)


class _Unusual(nn.Module):
    """A model whose forward does to its logits what a test says."""

    def __init__(self, change: Any, shift: Any = lambda z: z) -> None:
        super().__init__()
        self.change, self.shift = change, shift
        self.embed = nn.Embedding(hf.VOCAB, hf.HIDDEN)
        self.lm_head = nn.Linear(hf.HIDDEN, hf.VOCAB)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor]:
        logits = self.change(self.lm_head(self.embed(input_ids)))
        assert labels is not None
        shifted = self.shift(logits)
        loss = F.cross_entropy(shifted.reshape(-1, shifted.size(-1)), labels.view(-1), label_smoothing=0.1)
        return loss, logits


LAZY = {
    "scales": lambda z: 2 * z / 3.0 * 0.5,
    "cap of a scaled product": lambda z: torch.tanh(z * 0.3 / 2.0) * 2.0,
    "cap, then scale": lambda z: 0.7 * (z / 2.0).tanh() * 2.0,
    "cast": lambda z: z.to(torch.float64).float().contiguous(),
    "in place": lambda z: z.__imul__(0.5) if isinstance(z, Tensor) else z * 0.5,
    "reshape": lambda z: z.reshape(2, 13, -1).flatten(0, 1),
}
EAGER = {
    "negative": lambda z: -1.0 * z,
    "two caps": lambda z: torch.tanh(torch.tanh(z)),
    "a mask": lambda z: z.masked_fill(torch.arange(hf.VOCAB) > 90, -1e4),
    "temperature": lambda z: z / torch.tensor(2.0),
    "added": lambda z: z + 0.1 * torch.arange(hf.VOCAB),
    "clamped": lambda z: z.clamp(-1, 1),
    "normalised": lambda z: F.log_softmax(z, dim=-1),
    "a part of the vocabulary": lambda z: torch.cat([z[..., :50], z[..., 50:] * 2], dim=-1),
}


@pytest.mark.parametrize("change", [*LAZY, *EAGER])
def test_whatever_a_model_does_to_its_logits_is_done(change: str) -> None:
    """Steps that are known stay deferred; the others compute the logits, and say so. No loss is ever wrong."""
    torch.manual_seed(0)
    model = _Unusual({**LAZY, **EAGER}[change])
    with torch.no_grad():
        model.lm_head.weight.normal_()
    inputs = {"input_ids": torch.randint(0, hf.VOCAB, (2, 13)), "labels": torch.randint(0, hf.VOCAB, (2, 13))}
    stock = hf.step(model, inputs)
    status = hook.patch(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mine = hf.step(model, inputs)
    check_same(mine, stock)
    lazy = change in LAZY
    assert (status.losses > 0, status.materialised > 0, len(caught)) == (lazy, not lazy, 0 if lazy else 1)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.as_tensor(mine[2][1] + 0), stock[2][1])


@pytest.mark.parametrize(
    ("shift", "labels"),
    [
        (lambda z: z[..., :-1, :].contiguous(), lambda y: y[..., 1:].contiguous()),
        (lambda z: z[:, :-1], lambda y: y[:, 1:].contiguous()),
        (lambda z: z[:, 2:7, :], lambda y: y[:, 2:7].contiguous()),
        (lambda z: z[MASK], lambda y: y[MASK]),
        (lambda z: z[1], lambda y: y[1]),
    ],
)
def test_shifts_written_by_hand(shift: Any, labels: Any) -> None:
    torch.manual_seed(0)
    model = _Unusual(lambda z: z.float(), shift)
    y = torch.randint(0, hf.VOCAB, (2, 13))
    inputs = {"input_ids": torch.randint(0, hf.VOCAB, (2, 13)), "labels": labels(y)}
    stock = hf.step(model, inputs)
    hook.patch(model, strict=True)
    check_same(hf.step(model, inputs), stock)


MASK = torch.arange(26).view(2, 13) % 3 > 0


def test_a_loss_without_the_head_is_reported() -> None:
    class Bypassing(_Unusual):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor]:
            logits = F.linear(self.embed(input_ids), self.lm_head.weight)
            assert labels is not None
            return (F.cross_entropy(logits.flatten(0, 1), labels.flatten()),)

    model = Bypassing(None)
    ids = torch.randint(0, hf.VOCAB, (2, 13))
    hook.patch(model)
    with pytest.warns(UserWarning, match="without calling its head"):
        model(ids, labels=ids)


def test_labels_that_leave_nothing_or_do_not_fit() -> None:
    model, inputs = hf.build(), hf.batch()
    hook.patch(model, strict=True)
    loss, gradients, _ = hf.step(model, {**inputs, "labels": torch.full_like(inputs["labels"], -100)})
    assert loss == 0
    assert all(not grad.any() for grad in gradients.values())
    outside = inputs["labels"].clone()
    outside[1, 5] = hf.VOCAB
    assert model(input_ids=inputs["input_ids"], labels=outside).loss.isnan()
    keep = "logits_to_keep" if "logits_to_keep" in inspect.signature(model.forward).parameters else "num_logits_to_keep"
    with pytest.raises((ValueError, RuntimeError)):
        model(**inputs, **{keep: 4})


def test_gradient_checkpointing_bf16_and_autocast() -> None:
    model, inputs = hf.build("Gemma2"), hf.batch()
    stock = hf.step(model, inputs)
    model.gradient_checkpointing_enable()
    hook.patch(model, strict=True)
    check_same(hf.step(model, inputs), stock)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, gradients, outputs = hf.step(model, inputs)
    assert (loss.dtype, outputs.logits.dtype) == (torch.float32, torch.bfloat16)
    assert all(hf.relative(grad, stock[1][name]) < 0.05 for name, grad in gradients.items())
    loss, gradients, _ = hf.step(model.to(torch.bfloat16), inputs)
    assert abs(loss - stock[0]) < 0.05
    assert all(grad.dtype == torch.bfloat16 for grad in gradients.values())


def _compare_compiled(model: Any, inputs: dict[str, Tensor], patch_first: bool) -> None:
    stock = hf.step(model, inputs)
    torch.compiler.reset()
    if patch_first:
        status = hook.patch(model, strict=True)
    compiled = torch.compile(model, backend="eager")
    if not patch_first:
        hf.step(compiled, inputs)
        status = hook.patch(compiled, strict=True)
    mine = hf.step(compiled, inputs)
    check_same((mine[0], {name.removeprefix("_orig_mod."): grad for name, grad in mine[1].items()}, None), stock)
    assert status.losses >= 1
    assert hook.unpatch(compiled)


@pytest.mark.parametrize("patch_first", [True, False])
def test_compiled_model(patch_first: bool) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, hf.VOCAB, (2, 13))
    model = _Unusual(lambda z: torch.tanh(z.float() / 2.0) * 2.0)
    _compare_compiled(model, {"input_ids": ids, "labels": ids.roll(1)}, patch_first)


@pytest.mark.slow
@pytest.mark.parametrize("patch_first", [True, False])
@pytest.mark.parametrize("architecture", ["Gemma2", "GPT2"])
def test_compiled_transformer(architecture: str, patch_first: bool) -> None:
    _compare_compiled(hf.build(architecture), hf.batch(), patch_first)


def test_a_copy_has_a_hook_of_its_own() -> None:
    model, inputs = hf.build(), hf.batch()
    hook.patch(model, strict=True)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    loss, gradients, _ = hf.step(twin, inputs)
    stock = hf.step(hf.build(), inputs)
    check_same((loss, gradients, None), stock)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (hook.status(twin).losses, hook.status(model).losses) == (1, 0)
    assert hook.unpatch(twin)
    assert hook.status(model) is not None
    assert hook.status(twin) is None
    assert not hook.unpatch(twin)


def test_options_are_replaced_and_checked() -> None:
    model, inputs = hf.build(), hf.batch()
    hook.patch(model)
    hook.patch(model, backward=cce_tp.Sampled(eps=2.0**-3, seed=1, reference_rows=1), strict=True)
    exact = hf.step(hf.build(), inputs)
    loss, gradients, _ = hf.step(model, inputs)
    assert abs(loss - exact[0]) < 1e-6
    assert 1e-4 < hf.relative(gradients["lm_head.weight"], exact[1]["lm_head.weight"]) < 0.5
    for wrong, error, message in (
        ({"backward": 3}, TypeError, "backward=3"),
        ({"backward": "no"}, ValueError, "backward='no'"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda'"),
        ({"strict": 1}, TypeError, "strict=1"),
        ({"shard": cce_tp.VocabShard.chunk(8, 0, 1)}, ValueError, "only says something with group"),
        ({"group": "tp"}, TypeError, "group='tp'"),
    ):
        with pytest.raises(error, match=message):
            hook.patch(model, **wrong)
    assert hook.status(model).losses == 1  # a refused call changes nothing


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch.nn.modules.linear.Linear is no Hugging Face language model"):
        hook.patch(nn.Linear(3, 3))
    model = hf.build()
    with pytest.raises(TypeError, match="has no output head"):
        hook.patch(model.model)

    class Cosine(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(F.normalize(input, dim=-1), F.normalize(self.weight, dim=-1))

    model._tp_size = 2
    with pytest.raises(NotImplementedError, match="tp_plan"):
        hook.patch(model)
    model._tp_size = None
    model.lm_head.forward = lambda hidden: hidden
    with pytest.raises(TypeError, match="the head has a forward of its own"):
        hook.patch(model)
    del model.lm_head.forward
    model.lm_head.__class__ = Cosine
    with pytest.raises(TypeError, match=r"Cosine, expected torch.nn.Linear with its own forward"):
        hook.patch(model)


@needs_peft
@pytest.mark.parametrize("dora", [False, True])
def test_adapters(dora: bool) -> None:
    """Adapters on other layers train as before, the head being frozen; one on the head is refused by name."""
    import peft

    model, inputs = hf.build(), hf.batch()
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj", "v_proj"], use_dora=dora))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    stock = hf.step(adapted, inputs)
    assert "lm_head" not in "".join(stock[1])
    status = hook.patch(adapted, strict=True)
    check_same(hf.step(adapted, inputs), stock)
    assert status.losses == 1
    assert hook.unpatch(adapted)
    for changes in ({"target_modules": ["lm_head"]}, {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}):
        on_head = peft.get_peft_model(hf.build(), peft.LoraConfig(use_dora=dora, **changes))
        with pytest.raises(TypeError, match=r"an adapter .LoRA, DoRA, modules_to_save. around the head"):
            hook.patch(on_head)


def test_hooks_on_the_head_run_once_and_count() -> None:
    """Case B38: weights that a forward pre-hook changes are used; the hook sees the hidden states, once a pass."""
    model, inputs = hf.build(), hf.batch()
    seen: list[torch.Size] = []

    def zero(module: Any, args: Any) -> None:
        seen.append(args[0].shape)
        with torch.no_grad():
            module.weight.zero_()

    model.lm_head.register_forward_pre_hook(zero)
    hook.patch(model, strict=True)
    loss = model(**inputs).loss
    assert loss.item() == pytest.approx(torch.tensor(float(hf.VOCAB)).log().item(), abs=1e-6)
    assert len(seen) == 1


def _train(model: Any, folder: Path, **settings: Any) -> dict[str, Tensor]:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    data = []
    for seed in range(12):
        inputs = hf.batch(seed, rows=1)
        data.append({name: value[0] for name, value in inputs.items()})
    Trainer(model, arguments, train_dataset=data, eval_dataset=data[:2]).train()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
@pytest.mark.parametrize(
    "settings", [{"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1}, {"bf16": True}]
)
def test_trainer(settings: dict[str, Any], tmp_path: Path) -> None:
    """Weights after three SGD steps, with the Trainer's own weighting of accumulated batches."""
    start = hf.build(tied=True).state_dict()
    stock = _train(hf.build(tied=True), tmp_path, **settings)
    model = hf.build(tied=True)
    status = hook.patch(model, strict=True)
    mine = _train(model, tmp_path, **settings)
    tolerance = 2e-2 if "bf16" in settings else 3e-6
    for name, value in stock.items():
        moved = value - start[name]
        assert float((mine[name] - value).norm()) <= tolerance * float(moved.norm()) + 1e-8, name
    assert status.losses == 3 * settings.get("gradient_accumulation_steps", 1)
    assert status.materialised == 0


# Two processes.


def _wrap(model: Any, kind: str, group: dist.ProcessGroup) -> Any:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=group)
    if kind == "fsdp2":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in (*model.model.layers, model.lm_head):
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    raise AssertionError(kind)


def _whole(value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value


def _data_parallel(rank: Rank, kind: str, patch_first: bool) -> None:
    reference = hf.build()
    parts = [hf.batch(seed, rows=2) for seed in range(rank.size)]
    expected = [hf.step(reference, part) for part in parts]
    model = hf.build()
    status = hook.patch(model, strict=True) if patch_first else None
    wrapped = _wrap(model, kind, rank.group)
    status = status or hook.patch(wrapped, strict=True)
    for _ in range(2):
        loss, gradients, _ = hf.step(wrapped, parts[rank.index])
        assert abs(loss - expected[rank.index][0]) < 1e-6
        for name, grad in gradients.items():
            name = name.removeprefix("module.")
            mean = sum(part[1][name] for part in expected) / rank.size
            assert hf.relative(_whole(grad), mean) < EXACT, name
    assert status.losses == 2
    if not patch_first:
        assert hook.unpatch(wrapped)
        assert type(model.lm_head).__name__ == ("FSDPLinear" if kind == "fsdp2" else "Linear")


@pytest.mark.parametrize(("kind", "patch_first"), [("ddp", True), ("ddp", False), ("fsdp2", False)])
def test_data_parallel(hf_pool: Pool, kind: str, patch_first: bool) -> None:
    hf_pool.run(2, _data_parallel, kind, patch_first)


def _sharded_head(rank: Rank, architecture: str) -> None:
    """The head's rows over two ranks, the rest of the model on each."""
    reference, inputs = hf.build(architecture), hf.batch()
    stock = hf.step(reference, inputs)
    reference.eval()
    ids = inputs["input_ids"]
    logits = reference(input_ids=ids).logits
    generated = reference.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    model = hf.build(architecture)
    shard = cce_tp.VocabShard.from_sizes([60, hf.VOCAB - 60], rank.index)
    rows = slice(shard.start, shard.stop)
    head = model.get_output_embeddings()
    head.weight = nn.Parameter(head.weight.detach()[rows].clone())
    hook.patch(model, group=rank.group, shard=shard, strict=True)
    for _ in range(2):
        with collectives() as seen:
            loss, gradients, outputs = hf.step(model, inputs)
    assert outputs.logits.shape == logits.shape
    assert abs(loss - stock[0]) < 1e-6
    for name, grad in stock[1].items():
        expected = grad[rows] if name == "lm_head.weight" else grad
        assert hf.relative(gradients[name], expected) < EXACT, name
    assert [one.name for one in seen] == ["allgather_", "allreduce_"] or len(seen) == 2
    model.eval()
    torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=1e-6, atol=1e-6)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0), generated)
    model.train()
    real = model(input_ids=ids).logits  # without labels: whole logits that may be trained on
    F.cross_entropy(real[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()).backward()
    for name, parameter in model.named_parameters():
        expected = stock[1][name][rows] if name == "lm_head.weight" else stock[1][name]
        assert hf.relative(parameter.grad, 2 * expected) < EXACT, name


@pytest.mark.parametrize("architecture", ["Llama", "Gemma2"])
def test_sharded_head(hf_pool: Pool, architecture: str) -> None:
    hf_pool.run(2, _sharded_head, architecture)
