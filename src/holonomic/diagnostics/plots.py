"""Pictures of the diagnostics; each returns a matplotlib figure."""

from typing import Any

import numpy as np

from holonomic.diagnostics.autocorrelation import autocorrelation, integrated_autocorrelation_time
from holonomic.diagnostics.landscape import Line, Plane
from holonomic.diagnostics.recorders import TemperatureRecorder, WeightRecorder
from holonomic.errors import HolonomicError

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999933")


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise HolonomicError(
            "pictures need matplotlib; install it, or the extra holonomic[lab]."
        ) from None
    return plt


def plot_autocorrelation(samples: dict[str, Any], lags: int = 200) -> Any:
    """Autocorrelation of one or more series of samples, with their integrated times."""
    figure, axis = _pyplot().subplots(figsize=(6, 3.2), layout="constrained")
    for i, (name, chain) in enumerate(samples.items()):
        rho = autocorrelation(chain)[:lags]
        time = integrated_autocorrelation_time(chain)
        axis.plot(rho, color=COLOURS[i % 8], label=f"{name}: {time:.1f} steps")
    axis.axhline(0, color="0.6", lw=0.8)
    axis.set(xlabel="lag / steps", ylabel="autocorrelation")
    axis.legend(title="integrated time", frameon=False)
    return figure


def plot_temperatures(recorder: TemperatureRecorder) -> Any:
    """Kinetic temperature of every group over time."""
    figure, axis = _pyplot().subplots(figsize=(6, 3.2), layout="constrained")
    for i, name in enumerate(recorder.names):
        values = recorder.kinetic[:, i]
        if not np.isnan(values).all():
            axis.plot(recorder.steps, values, color=COLOURS[i % 8], label=name, lw=1)
    axis.set(xlabel="step", ylabel="kinetic temperature", yscale="log")
    axis.legend(frameon=False)
    return figure


def plot_weights(recorder: WeightRecorder) -> Any:
    """Histograms of every parameter over time: dark is many, on a logarithmic scale."""
    plt = _pyplot()
    counts = recorder.counts
    figure, axes = plt.subplots(
        1,
        len(counts),
        figsize=(2.6 * len(counts), 3),
        layout="constrained",
        sharey=True,
        squeeze=False,
    )
    for axis, (name, c) in zip(axes[0], counts.items(), strict=True):
        share = c / np.maximum(c.sum(1, keepdims=True), 1)
        axis.pcolormesh(
            _edges(recorder.steps), recorder.edges, np.log10(share.T + 1e-4), cmap="viridis"
        )
        axis.set(title=name, xlabel="step")
    axes[0][0].set_ylabel("weight")
    return figure


def _edges(steps: list[int]) -> list[int]:
    """Where each reading begins, and where the last one ends."""
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1
    return [*steps, steps[-1] + width]


def plot_line(lines: dict[str, Line]) -> Any:
    """The loss along lines between two states."""
    figure, axis = _pyplot().subplots(figsize=(5, 3.2), layout="constrained")
    for i, (name, line) in enumerate(lines.items()):
        axis.plot(line.alpha, line.loss, color=COLOURS[i % 8], label=name)
    axis.set(xlabel="from start (0) to end (1)", ylabel="loss")
    axis.legend(frameon=False)
    return figure


def plot_plane(plane: Plane) -> Any:
    """The loss over the plane through three states."""
    figure, axis = _pyplot().subplots(figsize=(4.6, 3.6), layout="constrained")
    filled = axis.contourf(plane.alpha, plane.beta, plane.loss, levels=24, cmap="cividis")
    figure.colorbar(filled, label="loss")
    axis.set(xlabel="from start (0) to ends (1)", ylabel="from second (0) to first (1) end")
    return figure
