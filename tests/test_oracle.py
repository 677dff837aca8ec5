"""The oracle against numbers that were computed elsewhere, and against PyTorch's own loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle import Options, Problem, fixture, fixture0, reference, relative_error
from torch.nn import functional

F0_LOSSES = [8.41585748, 8.54002487, 6.69575868, 7.43288757, 9.86943997, 3.41203042, 7.29085471, 4.80901570]


def test_fixture0_losses_and_gradients() -> None:
    result = reference(fixture0())
    assert fixture0().target.tolist() == [5, 18, 31, 12, 25, 6, 19, 0]
    torch.testing.assert_close(result.token_loss, torch.tensor(F0_LOSSES).double(), atol=5e-7, rtol=0)
    assert float(result.loss) == pytest.approx(7.05823367, abs=1e-8)
    assert float(result.grad_input.norm()) == pytest.approx(1.17992639, abs=1e-8)
    assert float(result.grad_weight.norm()) == pytest.approx(1.26085113, abs=1e-8)
    expected = torch.tensor([-0.10436318, 0.01892925, 0.23860948, 0]).double()
    torch.testing.assert_close(result.grad_input[0, :4], expected, atol=1e-8, rtol=0)
    expected = torch.tensor([0.17926318, -0.00832795, -0.27572542, 0.04826271]).double()
    torch.testing.assert_close(result.grad_weight[5, :4], expected, atol=1e-8, rtol=0)
    assert float(result.grad_weight.sum(dim=0).abs().max()) < 1e-14


@pytest.mark.parametrize(
    ("options", "loss", "grad_input", "grad_weight"),
    [
        ({"label_smoothing": 0.2}, 6.72755741, None, None),
        ({"softcap": 1.0}, 4.39975198, 0.28241325, None),
        ({"logit_scale": 0.5, "softcap": 2.0}, 4.51688556, None, None),
        ({"logit_scale": 0.0625}, 3.57870976, 0.06099557, 0.07116674),
        ({"z_loss": 1e-2}, 7.36004266, 1.22002299, None),
        ({"ignore_index": 5}, 6.86428742, None, None),
    ],
)
def test_options(options: dict, loss: float, grad_input: float | None, grad_weight: float | None) -> None:
    result = reference(fixture0().with_options(**options))
    assert float(result.loss) == pytest.approx(loss, abs=1e-8)
    if grad_input is not None:
        assert float(result.grad_input.norm()) == pytest.approx(grad_input, abs=1e-8)
    if grad_weight is not None:
        assert float(result.grad_weight.norm()) == pytest.approx(grad_weight, abs=1e-8)


def test_padding() -> None:
    """Rows beyond the vocabulary take part only where the options say so."""
    target = torch.tensor([5, 18, 1, 14, 27, 10, 23, 6])
    problem = replace(fixture0(), vocab_size=30, target=target)
    result = reference(problem)
    assert float(result.loss) == pytest.approx(4.90317817, abs=1e-8)
    assert float(result.grad_input.norm()) == pytest.approx(1.07025049, abs=1e-8)
    assert not result.grad_weight[30:].any()
    assert float(reference(problem.with_options(count_padding=True)).loss) == pytest.approx(4.94495242, abs=1e-8)


def test_dimension_tails() -> None:
    result = reference(fixture(67, 83, 131))
    assert float(result.loss) == pytest.approx(11.95081477, abs=1e-8)
    assert float(result.grad_input.norm()) == pytest.approx(0.98272265, abs=1e-8)
    assert float(result.grad_weight.norm()) == pytest.approx(1.03088094, abs=1e-8)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_agrees_with_pytorch(reduction: str, smoothing: float) -> None:
    """Class weights, smoothing and ignored tokens together are what ``torch.nn.functional.cross_entropy`` says."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    classes = torch.rand(11, generator=generator, dtype=torch.float64) + 0.5
    bias = torch.randn(11, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 11, (9,), generator=generator)
    target[3] = -100
    options = Options(reduction=reduction, label_smoothing=smoothing)
    problem = Problem(rows, weight, target, 11, bias=bias, class_weight=classes, options=options)
    result = reference(problem)
    leaf = rows.clone().requires_grad_()
    loss = functional.cross_entropy(
        leaf @ weight.T + bias, target, weight=classes, reduction=reduction, label_smoothing=smoothing
    )
    loss.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(result.loss, loss.detach())
    assert relative_error(leaf.grad, result.grad_input) < 1e-12
