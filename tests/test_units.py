"""Paper units and torch units."""

import math

import pytest
import torch

from holonomic import SettingError, from_paper, to_paper


def test_from_paper() -> None:
    settings = from_paper(h=0.3, gamma=1.0)
    assert settings == {"lr": 0.3 * 0.3, "momentum": math.exp(-0.3)}
    assert from_paper(h=0.1, gamma=math.inf) == {"lr": 0.1 * 0.1, "momentum": 0.0}
    assert from_paper(h=0.1, gamma=0.0)["momentum"] == 1.0


@pytest.mark.parametrize("h", [1e-3, 0.1, 0.7])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 20.0, math.inf])
def test_there_and_back(h: float, gamma: float) -> None:
    back = to_paper(**from_paper(h, gamma))
    # a square root, an exponential and its logarithm: gamma h >= 5e-4 loses 2^-53 / 5e-4
    assert back["h"] == pytest.approx(h, rel=1e-15)
    assert back["gamma"] == pytest.approx(gamma, rel=1e-12)


def test_a_step_in_paper_units_is_the_papers_step() -> None:
    """p <- exp(-gamma h) p - h g,  q <- q + h p."""
    from holonomic import Langevin

    h, gamma = 0.3, 1.0
    q = torch.nn.Parameter(torch.tensor([0.4, -1.2], dtype=torch.float64))
    optimizer = Langevin([q], **from_paper(h, gamma))
    x, p = q.detach().clone(), torch.zeros(2, dtype=torch.float64)
    for _ in range(50):
        q.grad = q.detach().clone()
        optimizer.step()
        p = math.exp(-gamma * h) * p - h * x
        x = x + h * p
    # 50 contracting float64 steps of numbers of order 1
    assert torch.allclose(q, x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("h", [0.0, -1.0, math.nan, math.inf])
def test_bad_step(h: float) -> None:
    with pytest.raises(SettingError, match=f"h is {h}; the step size must be a positive number"):
        from_paper(h, 1.0)
    with pytest.raises(SettingError, match=f"lr is {h}; paper units need a positive step"):
        to_paper(h, 0.9)


@pytest.mark.parametrize("gamma", [-1.0, math.nan])
def test_bad_friction(gamma: float) -> None:
    with pytest.raises(SettingError, match=f"gamma is {gamma}; the friction must be >= 0"):
        from_paper(0.1, gamma)


@pytest.mark.parametrize("momentum", [-0.1, 1.1, math.nan])
def test_bad_momentum(momentum: float) -> None:
    with pytest.raises(SettingError, match=r"momentum is .*; it must lie in \[0, 1\]"):
        to_paper(0.1, momentum)
