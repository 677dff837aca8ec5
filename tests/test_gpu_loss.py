"""The loss on one GPU with the Triton kernels: every option in three dtypes, the numeric field cases, and memory.

fp32 is held to the CPU's tolerances (with TF32 off, which is torch's default). In 16 bits the gradients may be off by
three times what PyTorch's own products in that dtype are, on the same data.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from oracle import Options, Problem, Reference, fixture, fixture0, relative_error, same_dtype_errors
from oracle import reference as reference_where_it_lies
from problems import RankResult, Spec, build, check, check_loss, check_stats, make_shards, run_layer, run_spec
from test_loss import ALONE, specs, splittable
from torch import Tensor

import cce_tp

pytestmark = pytest.mark.gpu

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIB = 1 << 20
CUDA: dict[str, Any] = {"device": "cuda", "implementation": "triton"}


@pytest.fixture(autouse=True)
def _ieee() -> Iterator[None]:
    """fp32 products in fp32, whatever the environment says."""
    usual = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = usual


def reference(problem: Problem) -> Reference:
    """The oracle, computed on the GPU: a CPU would take minutes over these sizes."""
    return reference_where_it_lies(problem.to("cuda")).to("cpu")


def check_low_precision(problem: Problem, result: RankResult, expected: Reference) -> None:
    """The loss as in fp32, but for the tensor cores' sums; gradients no worse than three times PyTorch's own."""
    # Tensor cores add 16 products at a time and cut the sum off at 24 bits instead of rounding it.
    cut_off = problem.input.shape[-1] / 16 * 2.0**-23
    check_loss(result, expected, slack=max(1.0, cut_off / 1e-6))
    errors = same_dtype_errors(problem.to("cuda"), expected.to("cuda"))
    for name, ours, right, error, floor in (
        ("input", result.grad_input, expected.grad_input, errors[0], expected.input_floor),
        ("weight", result.grad_weight, expected.grad_weight, errors[1], expected.weight_floor),
    ):
        assert ours is not None
        assert ours.dtype == problem.input.dtype
        off, scale, allowed = float((ours.double() - right).norm()), float(right.norm()), 3 * error + 4 * floor
        assert off <= allowed, f"grad of {name}: off by {off:.3e}, PyTorch by {error:.3e}, norm {scale:.3e}"
        assert allowed < 0.5 * scale or scale <= 100 * floor, "the tolerance would pass zeros"


def compare(spec: Spec, **keywords: Any) -> RankResult:
    spec = splittable(spec, 1)
    result = run_spec(None, spec, **(CUDA | keywords))
    expected = reference(build(spec))
    if spec.dtype == torch.float32:
        check(spec, [result], make_shards(spec.vocab, spec.padding, spec.split, 1, spec.seed), expected=expected)
    else:
        check_low_precision(build(spec), result, expected)
    return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ALONE)
def test_option_alone(name: str, dtype: str) -> None:
    compare(replace(ALONE[name], dtype=DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(reduction="none", label_smoothing=0.1, z_loss=1e-3),
        Options(reduction="sum", softcap=3.0, logit_scale=0.7, label_smoothing=0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(1000, 512, 5000), (517, 331, 4099), (64, 2304, 8192)])
def test_many_tiles(shape: tuple[int, int, int], options: Options, dtype: str) -> None:
    tokens, hidden, vocab = shape
    rich = options.label_smoothing > 0
    spec = Spec(
        shape=(tokens,),
        hidden=hidden,
        vocab=vocab,
        dtype=DTYPES[dtype],
        ignored=0.1,
        bias=rich,
        class_weight=rich,
        lse_grad=rich,
        options=options,
    )
    compare(spec)


@hypothesis.settings(max_examples=60)
@given(spec=specs)
def test_random_combination(spec: Spec) -> None:
    compare(replace(spec, padding=0) if spec.split == "equal" else spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "counted padding", "softcap", "none", "large"])
def test_stats(name: str, dtype: str) -> None:
    spec = splittable(replace(ALONE[name], dtype=DTYPES[dtype]), 1)
    result = run_spec(None, spec, device="cuda", return_stats=True)
    check_stats(result, reference(build(spec)))
    assert result.stats["implementation"] == "triton", "the GPU's default"


@pytest.mark.parametrize("dtype", DTYPES)
def test_f0(dtype: str) -> None:
    result = run_layer(fixture0(DTYPES[dtype]), make_shards(32, 0, "equal", 1)[0], **CUDA)
    assert float(result.loss) == pytest.approx(7.05823367, abs=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b35_tails_with_guards(dtype: str) -> None:
    """No dimension is a multiple of a tile, and every tensor lies inside a larger one of NaN."""
    problem = fixture(67, 83, 131, DTYPES[dtype])
    around = {name: torch.full((n + 4, 83 + 5), math.nan, device="cuda", dtype=DTYPES[dtype]) for name, n in _ROWS}
    inside = {name: values[2:-2, 3:-2] for name, values in around.items()}
    inside["input"].copy_(problem.input)
    inside["weight"].copy_(problem.weight)
    inside["grad"].zero_()
    rows, weight = (inside[name].detach().requires_grad_() for name in ("input", "weight"))
    loss = cce_tp.linear_cross_entropy(
        rows, weight, problem.target.cuda(), main_grad=inside["grad"], implementation="triton"
    )
    loss.backward()
    assert float(loss.detach()) == pytest.approx(11.95081477, abs=2e-5)
    expected = reference(problem)
    tolerance = 1e-5 if dtype == "fp32" else 8e-3
    assert rows.grad is not None
    assert relative_error(rows.grad.cpu(), expected.grad_input) < tolerance
    assert relative_error(inside["grad"].cpu(), expected.grad_weight) < tolerance
    for name, values in around.items():
        assert int(values.isnan().sum()) == values.numel() - inside[name].numel()


_ROWS = (("input", 67), ("weight", 131), ("grad", 131))


@pytest.mark.parametrize("shape", [(1, 16, 32), (8, 1, 32), (8, 16, 1), (2, 8193, 8), (130, 17, 257)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_b35_odd_sizes(shape: tuple[int, int, int], dtype: str) -> None:
    problem = fixture(*shape, DTYPES[dtype])
    result = run_layer(problem, make_shards(shape[2], 0, "equal", 1)[0], **CUDA)
    expected = reference(problem)
    check_loss(result, expected)
    off = (result.grad_weight.double() - expected.grad_weight).norm()
    tolerance = 1e-5 if dtype == "fp32" else 8e-3
    assert float(off) <= tolerance * float(expected.grad_weight.norm()) + 4 * expected.weight_floor


def test_b26_weight_grad_accumulates_in_fp32() -> None:
    rows = torch.ones(65536, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.zeros(64, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target = torch.zeros(65536, dtype=torch.int64, device="cuda")
    cce_tp.linear_cross_entropy(rows, weight, target, reduction="sum", implementation="triton").backward()
    assert weight.grad is not None
    assert (weight.grad[1:] == 1024).all()
    assert (weight.grad[0] == -64512).all()


def test_b26_input_grad_accumulates_in_fp32() -> None:
    rows = torch.zeros(1, 16, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.ones(65536, 16, dtype=torch.bfloat16, device="cuda")
    weight[7] = 0
    target = torch.tensor([7], device="cuda")
    cce_tp.linear_cross_entropy(rows, weight, target, implementation="triton").backward()
    assert rows.grad is not None
    assert float((rows.grad.double() - 0.99998474).abs().max()) < 2**-8


def test_b27_a_confident_target_keeps_its_gradient() -> None:
    rows, weight = torch.zeros(1, 16, dtype=torch.bfloat16), torch.zeros(2, 16, dtype=torch.bfloat16)
    rows[0, 0], weight[0, 0] = 8.3125, 1
    result = run_layer(Problem(rows, weight, torch.tensor([0]), 2), make_shards(2, 0, "equal", 1)[0], **CUDA)
    assert float(result.loss) == pytest.approx(2.4540e-4, rel=1e-4)
    assert float(result.grad_weight[0, 0]) == pytest.approx(-2.0396e-3, rel=1e-2)
    assert float(result.grad_weight[1, 0]) == pytest.approx(2.0396e-3, rel=1e-2)


def test_b33_fp16_range() -> None:
    rows, weight = torch.full((2, 16), 256.0, dtype=torch.float16), torch.zeros(32, 16, dtype=torch.float16)
    weight[0] = 256
    problem = Problem(rows, weight, torch.tensor([0, 1]), 32).with_options(reduction="none")
    result = run_layer(problem, make_shards(32, 0, "equal", 1)[0], **CUDA)
    assert result.loss.tolist() == [0, 1048576]
    assert (result.grad_input == torch.tensor([[0.0], [256.0]])).all()
    assert (result.grad_weight[0] == 256).all()
    assert (result.grad_weight[1] == -256).all()
    assert not result.grad_weight[2:].any()


def test_b33_fp16_loss_scale() -> None:
    shard = make_shards(32, 0, "equal", 1)[0]
    problem = replace(fixture0(torch.float16), upstream=torch.tensor(2.0**16))
    grad = run_layer(problem, shard, **CUDA).grad_input
    assert float(grad.abs().max()) == pytest.approx(16720.2, rel=2e-3)
    result = run_layer(replace(problem, upstream=torch.tensor(2.0**18)), shard, **CUDA)
    assert result.grad_input.isinf().any()
    assert not result.grad_input.isnan().any()
    assert not result.grad_weight.isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_comes_from_an_ignored_row(value: float, dtype: str) -> None:
    spec = Spec(shape=(300,), hidden=64, vocab=500, dtype=DTYPES[dtype])
    problem = build(spec)
    problem.target[3] = -100
    expected = reference(problem)
    problem.input[3, 2:5] = value
    result = run_layer(problem, make_shards(500, 0, "equal", 1)[0], **CUDA)
    check_loss(result, expected)
    tolerance = 1e-5 if dtype == "fp32" else 1e-2
    assert relative_error(result.grad_input, expected.grad_input) < tolerance
    assert relative_error(result.grad_weight, expected.grad_weight) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(dtype: str) -> None:
    problem = build(Spec(shape=(300,), hidden=64, vocab=500, dtype=DTYPES[dtype], options=Options(reduction="none")))
    expected = reference(problem)
    problem.input[3, 2] = math.nan
    result = run_layer(problem, make_shards(500, 0, "equal", 1)[0], **CUDA)
    assert result.loss.isnan().nonzero().flatten().tolist() == [3]
    assert result.grad_input.isnan().all(dim=1).nonzero().flatten().tolist() == [3]
    others = torch.arange(300) != 3
    tolerance = 1e-5 if dtype == "fp32" else 1e-2
    assert relative_error(result.grad_input[others], expected.grad_input[others]) < tolerance


def test_autocast() -> None:
    spec = Spec(shape=(300,), hidden=64, vocab=500, bias=True)
    problem = build(spec)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        result = run_layer(problem, make_shards(500, 0, "equal", 1)[0], **CUDA)
    rounded = replace(problem, input=problem.input.bfloat16(), weight=problem.weight.bfloat16())
    check_loss(result, reference(rounded))
    assert result.grad_input.dtype == result.grad_weight.dtype == torch.float32
    assert relative_error(result.grad_input, reference(rounded).grad_input) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
def test_main_grad(buffer_dtype: torch.dtype, dtype: torch.dtype) -> None:
    spec = Spec(shape=(300,), hidden=64, vocab=500, padding=12, split="megatron", dtype=dtype)
    buffer = torch.zeros(512, 64, dtype=buffer_dtype, device="cuda")
    for _ in range(2):
        result = run_spec(None, spec, main_grad=buffer, **CUDA)
    assert result.grad_weight is None
    low = torch.bfloat16 in (dtype, buffer_dtype)
    assert relative_error(buffer.cpu(), 2 * reference(build(spec)).grad_weight) < (1e-2 if low else 1e-5)
    assert not buffer[500:].any()


def _random(tokens: int, hidden: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(tokens, hidden, generator=generator, device="cuda", dtype=dtype)
    weight = torch.randn(vocab, hidden, generator=generator, device="cuda", dtype=dtype) / hidden**0.5
    target = torch.randint(0, vocab, (tokens,), generator=generator, device="cuda")
    return rows, weight, target


def test_b18_repeated_iterations_are_identical() -> None:
    """200 times the same bits: no races, no atomics; and the right ones."""
    rows, weight, target = _random(8192, 512, 16384)
    rows.requires_grad_()
    weight.requires_grad_()
    first: list[Tensor] = []
    for _ in range(200):
        loss = cce_tp.linear_cross_entropy(rows, weight, target, implementation="triton")
        grads = torch.autograd.grad(loss, (rows, weight))
        if not first:
            first = [loss.detach().clone(), *(grad.clone() for grad in grads)]
        for values, right in zip((loss.detach(), *grads), first, strict=True):
            assert torch.equal(values, right)
        for grad in grads:
            grad.fill_(math.nan)
    wide = [value.detach().float().requires_grad_() for value in (rows, weight)]
    torch.nn.functional.cross_entropy(wide[0] @ wide[1].T, target).backward()
    for values, right in zip(first[1:], wide, strict=True):
        assert relative_error(values, right.grad) < 1e-2


def _peak(rows: Tensor, weight: Tensor, target: Tensor, **keywords: Any) -> int:
    """Bytes beyond inputs and their gradients that forward and backward have taken at once."""
    # Once before, so that what libraries keep for ever (cuBLAS's workspace) is not counted.
    cce_tp.linear_cross_entropy(rows, weight, target, **keywords).backward()
    for leaf in (rows, weight):
        leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cce_tp.linear_cross_entropy(rows, weight, target, **keywords).backward()
    torch.cuda.synchronize()
    grads = sum(leaf.grad.numel() * leaf.grad.element_size() for leaf in (rows, weight) if leaf.grad is not None)
    return torch.cuda.max_memory_allocated() - before - grads


def test_b24_frozen_weight_takes_no_memory_of_its_size() -> None:
    rows, weight, target = _random(4096, 1024, 131072)
    assert _peak(rows.requires_grad_(), weight, target, workspace=64 * MIB) <= 64 * MIB
    assert _peak(rows, weight, target) <= 160 * MIB


@pytest.mark.parametrize("shape", [(8192, 1024, 131072), (8192, 2304, 256000)])
def test_b47_memory(shape: tuple[int, int, int]) -> None:
    """A small part of what the logits would take."""
    rows, weight, target = _random(*shape)
    peak = _peak(rows.requires_grad_(), weight.requires_grad_(), target)
    assert peak <= 256 * MIB
    assert peak < 0.5 * shape[0] * shape[2] * 2


@pytest.mark.parametrize("megabytes", [48, 64, 128, 512])
def test_workspace_is_obeyed(megabytes: int) -> None:
    rows, weight, target = _random(2048, 1024, 65536)
    peak = _peak(rows.requires_grad_(), weight.requires_grad_(), target, workspace=megabytes * MIB)
    assert peak <= megabytes * MIB


def test_workspace_too_small_is_refused() -> None:
    rows, weight, target = _random(2048, 1024, 65536)
    with pytest.raises(ValueError, match="workspace"):
        cce_tp.linear_cross_entropy(rows, weight, target, workspace=1024, implementation="triton")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.1, "softcap": 3.0, "return_stats": True},
        {"backward": "filtered", "return_stats": True},
    ],
    ids=str,
)
def test_no_host_synchronisation(options: dict[str, Any]) -> None:
    """The default path never waits for the device."""
    rows, weight, target = _random(512, 256, 4096)
    rows.requires_grad_()
    weight.requires_grad_()

    def step() -> None:
        result = cce_tp.linear_cross_entropy(rows, weight, target, **options)
        (result[0] if isinstance(result, tuple) else result).backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offsets_beyond_32_bits() -> None:
    """V·D beyond 2^31 elements: the last rows are where an overflow would not find them."""
    tokens, hidden, vocab = 64, 8448, 262144 + 3
    rows, weight, target = _random(tokens, hidden, vocab)
    target[::2] = vocab - 1 - torch.arange(len(target[::2]), device="cuda")
    results = []
    for implementation in ("triton", "torch"):
        leaves = [rows.clone().requires_grad_(), weight.detach().requires_grad_()]
        loss = cce_tp.linear_cross_entropy(*leaves, target, implementation=implementation)
        loss.backward()
        grads = [leaves[0].grad, leaves[1].grad[-256:].clone(), leaves[1].grad[:256].clone()]
        results.append([loss.detach(), *grads])
        del leaves, grads
    ours, right = results
    assert float((ours[0] - right[0]).abs()) < 1e-4
    for values, others in zip(ours[1:], right[1:], strict=True):
        assert relative_error(values, others.double()) < 1.5e-2


def test_devices_are_compared() -> None:
    problem = fixture0()
    with pytest.raises(ValueError, match="linear_weight is on cpu"):
        cce_tp.linear_cross_entropy(problem.input.cuda(), problem.weight, problem.target.cuda())


def test_no_tokens_and_no_valid_token() -> None:
    """No launch of an empty grid; zeros."""
    shard = make_shards(32, 0, "equal", 1)[0]
    for tokens in (0, 8):
        problem = fixture0()
        problem = replace(problem, input=problem.input[:tokens], target=torch.full((tokens,), -100))
        result = run_layer(problem, shard, **CUDA)
        assert float(result.loss) == 0
        assert not result.grad_input.any()
        assert not result.grad_weight.any()
        assert result.grad_weight.shape == (32, 16)
