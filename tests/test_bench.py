"""``cce-tp bench``, ``accuracy`` and ``tune``: what is compared, against what, and what is written; never speed."""

from __future__ import annotations

import csv
import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import relative_error
from test_launch import refused

import cce_tp
from cce_tp.launch import bench, bench_logits, bench_results, cli, console, runtime
from cce_tp.launch.accuracy import Accuracy, accuracy
from cce_tp.launch.bench_logits import Inputs
from cce_tp.launch.bench_peers import (
    AppleCCE,
    DeepSpeed,
    Megatron,
    Method,
    Ours,
    Torch,
    TorchLinearCrossEntropy,
    ours,
    peers,
)
from cce_tp.launch.bench_results import BEGIN, END, ONE_PRODUCT, THREE_PRODUCTS, Case, Row
from cce_tp.launch.measure import CpuMeter, in_turns
from cce_tp.launch.model_files import Model
from cce_tp.launch.reference import reference, sampling_noise, worst_tokens

SHAPE = (48, 131, 24)


def make(kind: str = "one-hot", dtype: torch.dtype = torch.float32) -> Inputs:
    return bench_logits.make(kind, SHAPE, dtype, "cpu")


def gradients_in_fp64(inputs: Inputs) -> tuple[float, torch.Tensor, torch.Tensor]:
    e, c = (x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.weight))
    loss = torch.nn.functional.cross_entropy(e @ c.T, inputs.target)
    grads = torch.autograd.grad(loss, (e, c))
    return loss.item(), *grads


# -- what is compared


METHODS = [
    Ours(cce_tp.Exact()),
    Torch(widened=False),
    Torch(widened=True),
    TorchLinearCrossEntropy(),
    Megatron(fused=False),
    DeepSpeed(),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
@pytest.mark.parametrize("kind", ["random", "one-hot"])
def test_adapters_compute_the_mean_loss(method: Method, kind: str) -> None:
    if method.package not in ("torch", "cce_tp"):
        pytest.importorskip({"megatron-core": "megatron.core"}.get(method.package, method.package))
    if isinstance(method, TorchLinearCrossEntropy) and not hasattr(torch.nn.functional, "linear_cross_entropy"):
        pytest.skip("this PyTorch has no linear_cross_entropy")
    inputs = make(kind)
    try:
        loss = method.load()(inputs.hidden, inputs.weight, inputs.target)
        loss.backward()
    finally:
        runtime.finalize()
    right, of_input, of_weight = gradients_in_fp64(inputs)
    assert loss.item() == pytest.approx(right, rel=1e-5)
    assert inputs.hidden.grad is not None
    assert inputs.weight.grad is not None
    assert relative_error(inputs.hidden.grad, of_input) < 1e-5
    assert relative_error(inputs.weight.grad, of_weight) < 1e-5


def test_every_method_has_a_name_of_its_own() -> None:
    every = [*ours(2.0**-8), *peers()]
    assert len({method.name for method in every}) == len(every)
    assert pickle.loads(pickle.dumps(every)) == every, "they are sent to the processes that compile ahead"


def test_names_say_what_is_not_as_usual() -> None:
    assert Ours(cce_tp.Exact()).name == "cce_tp exact"
    mode = cce_tp.Sampled(eps=0.3, seed=5, reference_rows=7)
    assert Ours(mode).name == "cce_tp sampled, eps = 0.3, reference_rows = 7"


# -- against what


def test_the_reference_is_right() -> None:
    inputs = make()
    right, of_input, of_weight = gradients_in_fp64(inputs)
    found = reference(inputs)
    assert found.loss == pytest.approx(right, abs=1e-6)
    assert relative_error(found.input_grad, of_input) < 3e-6
    assert relative_error(found.weight_grad, of_weight) < 3e-6
    errors = found.errors(2 * found.input_grad, found.weight_grad)
    assert errors == (pytest.approx(1.0), 0.0)


def test_the_reference_is_made_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make()
    whole, noise = reference(inputs), sampling_noise(inputs, cce_tp.Sampled(), reference(inputs))
    monkeypatch.setattr("cce_tp.launch.reference.BLOCK_BYTES", {"cpu": 5 * 4 * SHAPE[1]})
    found = reference(inputs)
    assert relative_error(found.weight_grad, whole.weight_grad.double()) < 1e-6
    assert sampling_noise(inputs, cce_tp.Sampled(), whole) == pytest.approx(noise, rel=1e-5)


@pytest.mark.parametrize("kind", ["random", "one-hot"])
def test_sampled_gradients_have_the_noise_of_the_closed_form(kind: str) -> None:
    """The mean square over many seeds. Chance and the hot rows each decide about half of the entries."""
    inputs = make(kind)
    mode = cce_tp.Sampled(eps=2.0**-6, reference_rows=48, entries_per_token=SHAPE[1])
    right = reference(inputs)
    squares = torch.zeros(2, dtype=torch.float64)
    seeds = 100
    for seed in range(seeds):
        inputs.clear_gradients()
        Ours(replace(mode, seed=seed)).load()(inputs.hidden, inputs.weight, inputs.target).backward()
        assert inputs.hidden.grad is not None
        assert inputs.weight.grad is not None
        squares += torch.tensor(right.errors(inputs.hidden.grad, inputs.weight.grad)).double().square() / seeds
    noise = torch.tensor(sampling_noise(inputs, mode, right)).double()
    assert (squares.sqrt() / noise).tolist() == pytest.approx([1.0, 1.0], rel=0.04)


def test_worst_tokens() -> None:
    right = torch.ones(200, 4)
    value = right.clone()
    value[:3] += 7.0  # of 200 tokens, more than 1 %
    assert worst_tokens(value, right) == pytest.approx(7.0)
    assert worst_tokens(value[3:], right[3:]) == 0.0


# -- on which logits


def small_model() -> Model:
    generator = torch.Generator().manual_seed(3)
    e, c = (torch.randn(rows, 16, generator=generator) for rows in (20, 50))
    return Model(e, c, torch.randint(50, (20,), generator=generator))


def test_realistic_logits_are_the_models_own() -> None:
    model = small_model()
    made = bench_logits.make("realistic", (33, 120, 24), torch.float32, "cpu", model)
    again = torch.arange(33) % 20
    z = made.hidden.detach() @ made.weight.detach().T
    torch.testing.assert_close(z[:, :50], model.hidden[again] @ model.weight.T, rtol=1e-4, atol=1e-4)
    assert torch.equal(made.target, model.target[again])
    first, second = z[:, 50:100].sort(1).values, z[:, 100:].max(1).values
    torch.testing.assert_close(first, z[:, :50].sort(1).values - 4.0, rtol=1e-4, atol=1e-4)
    assert bool((second <= z[:, :50].max(1).values - 5.0 + 1e-3).all())


def test_fewer_rows_than_the_model_has() -> None:
    made = bench_logits.make("realistic", (20, 30, 16), torch.float32, "cpu", small_model())
    assert made.shape == (20, 30, 16)
    assert int(made.target.max()) < 30


@pytest.mark.parametrize(("shape", "least"), [((9, 50, 15), 16), ((9, 51, 16), 17)])
def test_too_few_dimensions_are_refused(shape: bench_logits.Shape, least: int) -> None:
    with pytest.raises(console.UsageError, match=f"at least {least} are needed"):
        bench_logits.make("realistic", shape, torch.float32, "cpu", small_model())


def test_random_logits_are_flat_and_one_hot_ones_are_sure() -> None:
    for kind, low, high in (("random", 4.6, 5.2), ("one-hot", 0.001, 0.05)):
        assert low < reference(make(kind)).loss < high, kind


# -- in turns


class Script(CpuMeter):
    """A clock that a work sets: each run takes what the work returns."""

    def milliseconds(self, work: Callable[[], Any]) -> float:
        return float(work())


def test_works_take_turns() -> None:
    order: list[str] = []

    def work(name: str, milliseconds: float) -> Callable[[], float]:
        return lambda: (order.append(name), milliseconds)[1]

    def broken() -> float:
        order.append("broken")
        raise RuntimeError("no")

    works = {"a": work("a", 1.0), "broken": broken, "slow": work("slow", 51.0), "b": work("b", 60.0)}
    timings = in_turns(works, 24, Script(), ["slow", "a"])
    assert {name: timing.repeats for name, timing in timings.items()} == {"a": 24, "broken": 0, "slow": 6, "b": 24}
    assert [timings[name].median_ms for name in ("a", "slow", "b")] == [1.0, 51.0, 60.0]
    assert isinstance(timings["broken"].failure, RuntimeError)
    assert order.count("broken") == 1, "what has failed is left alone"
    before = [order[:place][-1] for place, name in enumerate(order) if name == "b" and place > 4]
    assert {"a", "b", "slow"} == set(before), "nothing always comes behind the same work"
    assert "slow" in order[-10:], "slow works are spread over the turns"
    again: list[str] = order[:]
    order.clear()
    in_turns(works, 24, Script(), ["slow", "a"])
    assert order == again, "all processes of a group must take the same turns"


def test_shuffled_ids_change_nothing_else() -> None:
    inputs = bench_logits.make("random", (20, 300, 16), torch.float32, "cpu")
    shuffled = inputs.shuffled()
    assert not torch.equal(shuffled.target, inputs.target)
    assert torch.equal(shuffled.weight[shuffled.target], inputs.weight[inputs.target])
    assert torch.equal(shuffled.weight.detach().sort(0).values, inputs.weight.detach().sort(0).values)
    assert shuffled.weight.is_leaf
    assert shuffled.weight.requires_grad


# -- what is written


def canned(shape: bench_logits.Shape = (8192, 256000, 2304), logits: str = "random") -> Case:
    rows = [
        Row(ONE_PRODUCT, "product", "torch", "2.11.0", forward_ms=14.0, repeats=20),
        Row(THREE_PRODUCTS, "product", "torch", "2.11.0", both_ms=42.0, repeats=20),
        Row(
            "cce_tp sampled, eps = 2^-8", "ours", "cce_tp", "0.1.0", None, 14.7, 17.5, 20,
            2**20, 64 * 2**20, -3e-7, 2.1e-2, 1.9e-2, 2.0e-2, 1.9e-2,
        ),
        Row("Liger", "peer", "liger-kernel", "0.8.5", None, 30.0, 110.0, 5, 2**30, 2**31, 1e-4, 4e-3, 5e-3),
        Row("Apple cce", "peer", "cut-cross-entropy", None, "cut_cross_entropy is not installed"),
    ]  # fmt: skip
    versions = {"cce_tp": "0.1.0", "torch": "2.11.0"}
    return Case(shape, logits, "bfloat16", "NVIDIA H200", versions, 20, 10.5, rows)


def test_results_survive_their_file(tmp_path: Path) -> None:
    cases = [canned(), replace(canned((1, 2, 3)), parts={"milliseconds": {"hot": 1.0}, "lists": {}})]
    bench_results.write_json(tmp_path / "a.json", cases)
    assert bench_results.read_json(tmp_path / "a.json") == cases


def test_one_command_writes_the_readme_again(tmp_path: Path, capsys: Any) -> None:
    sources = []
    for place, shape in enumerate([(8192, 256000, 2304), (8184, 49152, 576)]):
        sources += ["--from", str(tmp_path / f"{place}.json")]
        bench_results.write_json(tmp_path / f"{place}.json", [canned(shape)])
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{BEGIN}\nold figures\n{END}\nafter\n")
    outputs = [f"--{name}={tmp_path / name}" for name in ("csv", "png", "markdown")]
    assert cli.main(["bench", *sources, "--readme", str(readme), *outputs]) == 0
    first = readme.read_text()
    assert first.startswith(f"before\n{BEGIN}\n")
    assert first.endswith(f"\n{END}\nafter\n")
    assert "old figures" not in first
    assert first == f"before\n{BEGIN}\n{(tmp_path / 'markdown').read_text()}{END}\nafter\n"
    assert "| N, V, D | 8192, 256000, 2304 | 8184, 49152, 576 |" in first
    assert "| **cce_tp sampled, eps = 2^-8** | 1.05 / 1.25, 64 |" in first
    assert "| Liger | 2.14 / 7.86, 2,048 |" in first
    assert "Not measured: Apple cce (cut_cross_entropy is not installed)." in first
    assert cli.main(["bench", *sources, "--readme", str(readme)]) == 0
    assert readme.read_text() == first

    with (tmp_path / "csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 10
    assert [line["both_ms"] for line in lines[:3]] == ["", "42.0", "17.5"]
    assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert "1.250" in shown
    assert "not measured: Apple cce: cut_cross_entropy is not installed" in shown


def test_the_projects_readme_has_the_marks() -> None:
    assert bench_results.readme_has_marks(Path(__file__).parent.parent / "README.md")


def test_without_rich_there_is_plain_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    bench_results.write_json(tmp_path / "a.json", [canned()])
    monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    assert cli.main(["bench", "--from", str(tmp_path / "a.json")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Liger") and "7.857" in line]
    assert line.split() == ["Liger", "30.000", "2.143", "110.000", "7.857", "2.62", "5", "1,024", "2,048"]


def test_a_whole_run_on_the_cpu(tmp_path: Path) -> None:
    arguments = [
        "--device",
        "cpu",
        "--shape",
        "40,90,16",
        "--logits",
        "one-hot",
        "--logits",
        "random",
        "--repeats",
        "2",
    ]
    names = "cce_tp,torch eager,apple cce_exact"
    path = tmp_path / "a.json"
    assert cli.main(["bench", *arguments, "--methods", names, "--json", str(path)]) == 0
    first, second = bench_results.read_json(path)
    assert [case.logits for case in (first, second)] == ["one-hot", "random"]
    for case in (first, second):
        rows = {row.method: row for row in case.rows}
        assert rows[ONE_PRODUCT].forward_ms
        assert rows[THREE_PRODUCTS].both_ms
        exact = rows["cce_tp exact"]
        assert exact.reason is None
        assert exact.forward_ms
        assert exact.both_ms
        assert exact.input_error
        assert 0 < exact.input_error < 4e-3
        assert rows["cce_tp sampled, eps = 2^-8"].input_noise is not None
        assert rows["torch eager"].both_bytes is None, "not known on the CPU"
        assert rows["Apple cce_exact"].reason, "a peer that can't run is a row with its reason"


@pytest.mark.gpu
def test_a_whole_run_on_the_gpu(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    arguments = ["--shape", "512,3000,256", "--methods", "cce_tp,torch eager", "--workers", "1", "--repeats", "2"]
    assert cli.main(["bench", *arguments, "--graph", "--parts", "--json", str(path)]) == 0
    (case,) = bench_results.read_json(path)
    rows = {row.method: row for row in case.rows}
    for name in ("cce_tp exact", "cce_tp sampled, eps = 2^-8", "torch eager"):
        row = rows[name]
        assert row.reason is None
        assert row.both_ms
        assert row.forward_bytes is not None
        assert row.both_bytes is not None
        assert row.both_bytes >= row.forward_bytes
    for name in ("cce_tp exact", "cce_tp sampled, eps = 2^-8"):
        assert rows[f"{name}, CUDA graph"].reason is None
        assert rows[f"{name}, CUDA graph"].both_ms
    eager = rows["torch eager"].both_bytes
    assert eager is not None
    assert eager >= 2 * 512 * 3000 * 2, "the logits and their gradient"
    assert case.parts is not None
    assert case.parts["milliseconds"]["hot"] > 0


def test_what_fails_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(self: Method) -> Any:
        def loss(*_: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 TiB\nand so on")

        return loss

    monkeypatch.setattr(Torch, "load", load)
    plan = bench.Plan([Torch(widened=False), AppleCCE("no_such")], torch.float32, "cpu", 1, False, False, 0.1)
    reasons = [row.reason for row in bench.measure("random", SHAPE, plan, None).rows]
    assert reasons[:3] == [None, None, "out of memory"]
    assert reasons[3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "--shape", "1,2"], "'1,2' is not three numbers N,V,D"),
        (["bench", "--logits", "x"], "invalid choice: 'x'"),
        (["bench", "--device", "cpu", "--logits", "realistic"], "--logits realistic needs --data DIR"),
        (["bench", "--device", "cpu", "--data", "{tmp}"], "has no file smollm2_head.npz"),
        (["bench", "--device", "cpu", "--data", "{tmp}", "--logits", "random"], "--data is for realistic logits, and"),
        (["bench", "--device", "cpu", "--methods", "exact,nonsense"], "--methods: no name contains 'nonsense': cce_tp"),
        (["bench", "--device", "cpu", "--methods", ","], "--methods names none"),
        (["bench", "--device", "cpu", "--graph"], "--graph and --parts need --device cuda"),
        (["bench", "--device", "cpu", "--workers", "-1"], "--workers -1 is negative"),
        (["bench", "--eps", "0"], "0 is not in (0, 1]"),
        (["bench", "--repeats", "0"], "0 is not positive"),
        (["bench", "--from", "{tmp}/empty"], "empty holds no results of cce-tp bench --json"),
        (["bench", "--from", "{tmp}/empty", "--shape", "1,2,3"], "--from measures nothing: leave out --shape"),
        (["bench", "--readme", "{tmp}/empty"], "has not one line <!-- cce-tp bench: begin --> and, below it,"),
        (["bench", "--png", "/no/such/folder/file"], "is not a file in a folder that exists"),
        (["accuracy", "--head", "{tmp}/empty", "--hidden", "{tmp}/empty"], "cannot be read as .npz or .safetensors"),
        (["accuracy", "--head", "{tmp}/empty", "--hidden", "{tmp}/empty", "--eps", "2"], "2 is not in (0, 1]"),
        (["tune", "--repeats", "x"], "'x' is not a whole number"),
    ],
)
def test_nonsense_is_refused(arguments: list[str], message: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty").write_text("{}")
    assert message in refused([argument.replace("{tmp}", str(tmp_path)) for argument in arguments], capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["bench", "tune"])
def test_without_a_gpu(command: str, capsys: Any) -> None:
    assert "no CUDA device is here" in refused([command], capsys)


# -- accuracy


def test_accuracy(tmp_path: Path, capsys: Any) -> None:
    model, path = small_model(), tmp_path / "model.npz"
    arrays = {"weight": model.weight, "hidden": model.hidden, "targets": model.target}
    np.savez(path, **{name: array.numpy() for name, array in arrays.items()})
    report = tmp_path / "report.json"
    arguments = ["--head", str(path), "--hidden", str(path), "--device", "cpu", "--eps", "2^-2", "--json", str(report)]
    assert cli.main(["accuracy", *arguments, "--tokens", "12"]) == 0
    results = json.loads(report.read_text())
    by_name = {mode["mode"]: mode for mode in results["modes"]}
    assert results["tokens"] == 12
    assert by_name["cce_tp exact"]["grad_E"] < 4e-3
    assert "grad_E_of_closed_form" not in by_name["cce_tp exact"]
    assert 0 < by_name["torch eager"]["worst_tokens"] < 0.1
    assert by_name["Apple cce, filter_eps = 2^-12"]["reason"]
    assert "12 tokens, V = 50, D = 16" in capsys.readouterr().out


def test_accuracy_compares_with_the_closed_form() -> None:
    inputs = make("random")
    found = accuracy(Ours(cce_tp.Sampled(eps=0.1, seed=1, reference_rows=4)), inputs, reference(inputs))
    assert isinstance(found, Accuracy)
    assert found.reason is None
    assert found.grad_E_of_closed_form == pytest.approx(1.0, rel=0.3)
    assert found.grad_C_of_closed_form == pytest.approx(1.0, rel=0.3)


# -- tune


def test_tune_prints_what_stands_in_the_source() -> None:
    pytest.importorskip("triton")
    from cce_tp.kernels import tiles
    from cce_tp.launch import tune

    text = Path(tiles.__file__).read_text()
    named = {name: value for name, value in vars(tiles).items() if isinstance(value, tiles.Tile)}
    assert len(named) > 3
    for name, tile in named.items():
        assert tune.source(name, tile) in text


def test_tiles_that_tune_tries_are_possible_and_distinct() -> None:
    pytest.importorskip("triton")
    from cce_tp.launch import tune

    found = tune.candidates(torch.bfloat16)
    assert len(set(found)) == len(found) > 20
    for tile in found:
        assert tile.stages * tile.inner * (tile.rows + tile.cols) * 2 <= 227 * 1024


@pytest.mark.gpu
def test_tune_on_the_gpu() -> None:
    from cce_tp.kernels.tiles import Tile
    from cce_tp.launch import tune

    shape, dtype = (300, 1000, 256), torch.bfloat16
    name, today = tune.present(shape, dtype)
    other, impossible = Tile(64, 128, 64, 4, 3), Tile(128, 256, 128, 8, 4)
    reasons = tune.compile_all([today, other, impossible], [shape], dtype, 2)
    assert [reasons[shape, tile] is None for tile in (today, other, impossible)] == [True, True, False]
    found = tune.measure(shape, [today, other], today, dtype, 2)
    assert {measured.tile for measured in found} == {today, other}
    assert all(measured.reason is None and measured.total > 0 for measured in found)
    assert name.startswith("_")


def test_a_forced_tile_holds_within() -> None:
    pytest.importorskip("triton")
    from cce_tp.kernels import tiles

    arguments = (torch.bfloat16, 4096, 4096, True)
    tile, usual = tiles.Tile(64, 64, 32, 4, 2), tiles.logit_tile(*arguments)
    with tiles.forced(tile):
        assert tiles.logit_tile(*arguments) is tile
    assert tiles.logit_tile(*arguments) is usual


def test_the_best_tile_of_a_class_loses_least_over_its_shapes() -> None:
    pytest.importorskip("triton")
    from cce_tp.kernels.tiles import Tile
    from cce_tp.launch.tune import Measured, best_of_class

    tiles = [Tile(64, 128, 64, 4, stages) for stages in (2, 3, 4)]
    times = [(1.0, 1.2, 9.0), (30.0, 22.0, 20.0)]
    found = [
        [Measured((1, 1, place), tile, {"forward": ms}) for tile, ms in zip(tiles, of_shape, strict=True)]
        for place, of_shape in enumerate(times)
    ]
    found[0].append(Measured((1, 1, 0), Tile(1, 1, 1, 1, 1), {}, "it does not compile"))
    assert best_of_class(found) == tiles[1]
