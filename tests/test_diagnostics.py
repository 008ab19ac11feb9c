"""Diagnostics against known answers."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from torch import nn

import holonomic as hm
from holonomic import diagnostics as d
from holonomic.diagnostics import plots

mpl.use("Agg")


def ar1(rho: float, chains: int, steps: int, seed: int = 0) -> np.ndarray:
    """x' = rho x + sqrt(1 - rho^2) R: autocorrelation rho^t, integrated time (1 + rho) / (1 - rho)."""
    rng = np.random.default_rng(seed)
    x = np.empty((chains, steps))
    x[:, 0] = rng.normal(size=chains)
    for t in range(1, steps):
        x[:, t] = rho * x[:, t - 1] + np.sqrt(1 - rho**2) * rng.normal(size=chains)
    return x


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_integrated_time_of_an_autoregression(rho):
    x = ar1(rho, 8, 20_000)
    exact = (1 + rho) / (1 - rho)
    # A sum of lags up to some 5 tau from N = 160,000 samples: relative error sqrt(2 * 5 tau / N), and
    # cutting the sequence where it meets the noise adds as much again.
    assert abs(d.integrated_autocorrelation_time(x) / exact - 1) < 8 * (10 * exact / x.size) ** 0.5
    assert d.effective_sample_size(x) == pytest.approx(
        x.size / d.integrated_autocorrelation_time(x)
    )
    lags = d.autocorrelation(x)[:20]
    assert np.abs(lags - rho ** np.arange(20)).max() < 5 * (2 * exact / x.size) ** 0.5


def test_mean_is_as_uncertain_as_the_effective_sample_size_says():
    x = ar1(0.8, 400, 2000)
    spread = x.mean(1).std()
    predicted = 1 / np.sqrt(d.effective_sample_size(x) / 400)
    # The spread of 400 means is known to 1 / sqrt(800) = 3.5 %.
    assert abs(spread / predicted - 1) < 0.15


def test_anticorrelated_chains_are_worth_more_and_constant_ones_one_sample():
    assert d.effective_sample_size(ar1(-0.5, 4, 20_000)) > 1.5 * 80_000
    assert d.effective_sample_size(np.ones((3, 100))) == pytest.approx(3)
    apart = ar1(0.0, 2, 1000) + np.array([[5.0], [-5.0]])
    assert d.effective_sample_size(apart) < 50  # chains that never meet


@pytest.mark.parametrize("bad", [[1.0, 2.0], np.zeros((2, 3, 4, 5)), [1.0, np.nan, 2.0, 3.0, 4.0]])
def test_bad_samples(bad):
    with pytest.raises(hm.SettingError, match="samples"):
        d.effective_sample_size(bad)


# ---------------------------------------------------------------------- landscape
def quadratic(module: nn.Module) -> torch.Tensor:
    return sum(((p - 1) ** 2).sum() for p in module.parameters())


def test_loss_on_a_line_and_a_plane_of_a_quadratic():
    module = nn.Linear(3, 2)
    a, b, c = ({k: torch.randn_like(t) for k, t in module.state_dict().items()} for _ in range(3))
    before = {k: t.clone() for k, t in module.state_dict().items()}
    line = d.loss_on_line(module, quadratic, a, b, [0.0, 0.3, 1.0, 1.5])
    for alpha, value in zip(line.alpha, line.loss, strict=True):
        exact = sum((((1 - alpha) * a[k] + alpha * b[k] - 1) ** 2).sum().item() for k in a)
        assert value == pytest.approx(exact, rel=1e-5)
    plane = d.loss_on_plane(module, quadratic, a, b, c, [0.0, 1.0], [0.0, 1.0])
    ends = [sum(((s[k] - 1) ** 2).sum().item() for k in s) for s in (a, b, c)]
    expected = [[ends[0], ends[2]], [ends[0], ends[1]]]
    np.testing.assert_allclose(plane.loss, expected, rtol=1e-5)
    assert all(torch.equal(before[k], t) for k, t in module.state_dict().items())


def test_buffers_and_modes_are_kept_even_on_error():
    module = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    x = torch.randn(16, 2)
    start = {k: t.clone() for k, t in module.state_dict().items()}
    module(x)
    end = {k: t.clone() for k, t in module.state_dict().items()}
    assert end["1.num_batches_tracked"] == 1
    d.loss_on_line(module, lambda m: m(x).square().mean(), start, end, [0.0, 0.5, 1.0])
    assert all(torch.equal(end[k], t) for k, t in module.state_dict().items())
    assert module.training

    def fails(m: nn.Module) -> float:
        raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        d.loss_on_line(module, fails, start, end)
    assert all(torch.equal(end[k], t) for k, t in module.state_dict().items())
    with pytest.raises(hm.SettingError, match="state 1 and the module differ at 'extra'"):
        d.loss_on_line(module, quadratic, start, {**end, "extra": torch.zeros(1)})


# ---------------------------------------------------------------------- recorders and pictures
def test_recorders_and_plots(tmp_path):
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
    opt = hm.methods.adlala(model, 0.01, 0.9, 1e-2, 0.5, 0.1, seed=0)
    heat, weights = d.TemperatureRecorder(opt), d.WeightRecorder(model, bins=20, limit=0.5)
    start = {k: t.clone() for k, t in model.state_dict().items()}
    x = torch.randn(20, 2)
    for step in range(30):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
        if step % 10 == 0:
            heat.record(step)
            weights.record(step)
    assert heat.names == ["hidden", "output"]
    heat.record(29)
    assert heat.kinetic[-1, 0] == opt.report().groups[0].kinetic_temperature
    assert heat.kinetic.shape == (4, 2)
    assert np.isnan(heat.friction[:, 1]).all()
    assert not np.isnan(heat.friction[:, 0]).any()
    counts = weights.counts["0.weight"]
    assert counts.shape == (3, 20)
    assert (counts.sum(1) == 12).all()
    line = d.loss_on_line(model, lambda m: m(x).square().mean(), start, model.state_dict())
    plane = d.loss_on_plane(
        model, lambda m: m(x).square().mean(), start, model.state_dict(), start, [0, 0.5, 1], [0, 1]
    )
    drawn = {
        "autocorrelation": plots.plot_autocorrelation({"x": ar1(0.5, 2, 500)}),
        "temperatures": plots.plot_temperatures(heat),
        "weights": plots.plot_weights(weights),
        "line": plots.plot_line({"run": line}),
        "plane": plots.plot_plane(plane),
    }
    for name, figure in drawn.items():
        figure.savefig(tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
        assert all(axis.get_xlabel() for axis in figure.axes if axis.get_label() != "<colorbar>")
