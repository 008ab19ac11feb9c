"""Pictures of an experiment. Colours are Okabe and Ito's, which colour-blind people can tell apart."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from holonomic.lab.experiment import Experiment
from holonomic.lab.files import write_bytes
from holonomic.lab.runner import train_set
from holonomic.lab.screen import LABELS

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999933")
STYLES = ("-", "--", "-.", ":")

plt.rcParams.update(
    {
        "figure.dpi": 130,
        "savefig.bbox": "tight",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "font.size": 9,
        "svg.hashsalt": "holonomic",
    }
)


def look(i: int) -> dict[str, Any]:
    """The colour and style of the i-th line."""
    return {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[(i // len(COLOURS)) % 4]}


def curves(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """Test loss and accuracy over training: mean over all replicas, band of one standard deviation."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for axis, metric in zip(axes, ("test_loss", "test_accuracy"), strict=True):
        for i, (name, arm) in enumerate(arms.items()):
            epochs = np.array(arm["curves"]["epoch"])
            values = np.array(arm["curves"][metric], dtype=float)
            mean, std = np.nanmean(values, 1), np.nanstd(values, 1)
            axis.plot(epochs, mean, label=name, **look(i))
            if len(arms) <= 8:
                axis.fill_between(
                    epochs, mean - std, mean + std, color=COLOURS[i % 8], alpha=0.12, lw=0
                )
        axis.set_xlabel("epoch")
        axis.set_ylabel(LABELS[metric])
    axes[0].set_yscale("log")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8
    )
    return figure


def boundaries(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """The classifier of run 0 of every arm over the plane, with its boundary and the training data."""
    names = list(arms)
    figure, axes = plt.subplots(
        1, len(names), figsize=(2.3 * len(names), 2.6), constrained_layout=True, squeeze=False
    )
    x, y = train_set(e)
    slugs = {arm.name: arm.slug for arm in e.arms}
    for axis, name in zip(axes[0], names, strict=True):
        with np.load(out / f"{slugs[name]}.npz") as stored:
            grid, logits = stored["axis"], stored["logits"]
        extent = (grid[0], grid[-1], grid[0], grid[-1])
        p = 1 / (1 + np.exp(-np.clip(logits, -50, 50)))
        axis.imshow(p, extent=extent, origin="lower", cmap="PuOr", vmin=0, vmax=1, alpha=0.8)
        axis.contour(grid, grid, logits, levels=[0.0], colors="black", linewidths=0.8)
        for label, colour in ((0, COLOURS[4]), (1, COLOURS[0])):
            axis.scatter(*x[y == label].T, s=7, color=colour, edgecolors="white", linewidths=0.4)
        accuracy = arms[name]["finals"]["test_accuracy"][0]
        axis.set_title(f"{name}\n{accuracy:.1f} %", fontsize=9)
        axis.set_xticks([])
        axis.set_yticks([])
        axis.grid(visible=False)
    return figure


def curvature(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """Mean and median curvature of every replica's boundary."""
    return _strips(arms, ("curvature_mean", "curvature_median"), log=True)


def slopes(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """Mean steepness of the prediction along y = 0 and x = 0."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True, sharey=True)
    slugs = {arm.name: arm.slug for arm in e.arms}
    half = 1.2 * e.data.scale
    for i, name in enumerate(arms):
        with np.load(out / f"{slugs[name]}.npz") as stored:
            steep = stored["slopes"]
        at = np.linspace(-half, half, steep.shape[1])
        for axis, line in zip(axes, steep, strict=True):
            axis.plot(at, line, label=name, lw=1, **look(i))
    axes[0].set_xlabel("x along y = 0")
    axes[1].set_xlabel("y along x = 0")
    axes[0].set_ylabel("mean |d prediction / d position|")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8
    )
    return figure


def finals(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """Every replica's final numbers as a dot, over the mean."""
    return _strips(arms, e.metrics[:2], log=False)


def _strips(arms: dict[str, dict[str, Any]], metrics: tuple[str, ...], *, log: bool) -> Figure:
    figure, axes = plt.subplots(
        1, 2, figsize=(9, 1.2 + 0.28 * len(arms)), constrained_layout=True, sharey=True
    )
    for axis, metric in zip(axes, metrics, strict=True):
        for i, arm in enumerate(arms.values()):
            _strip(axis, np.array(arm["finals"][metric], dtype=float), i)
        axis.set_yticks(range(len(arms)), list(arms))
        axis.set_xlabel(LABELS[metric])
        if log:
            axis.set_xscale("log")
    axes[0].invert_yaxis()
    return figure


def _strip(axis: Axes, values: Any, i: int) -> None:
    jitter = np.random.default_rng(0).uniform(-0.18, 0.18, len(values))
    axis.scatter(values, i + jitter, s=12, alpha=0.5, color=COLOURS[i % 8], linewidths=0)
    axis.plot([np.nanmean(values)] * 2, [i - 0.32, i + 0.32], color="black", lw=1.5)


FIGURES = {
    "boundaries": boundaries,
    "curves": curves,
    "curvature": curvature,
    "slopes": slopes,
    "finals": finals,
}


def draw(
    e: Experiment, arms: dict[str, dict[str, Any]], out: Path, warn: Callable[[str], None]
) -> list[Path]:
    """Draw every figure of the experiment as PNG and SVG into its folder. One whose data is not there
    (the arrays are large, and not kept with the results) is left as it is."""
    made = []
    for name in dict.fromkeys((*e.figures, "finals")):
        picture = out / f"{name}.png"
        try:
            figure = FIGURES[name](e, arms, out)
        except FileNotFoundError as error:
            warn(f"{name} is not drawn again: {error.filename} is missing.")
            made += [picture] if picture.exists() else []
            continue
        for suffix in ("png", "svg"):
            drawn = io.BytesIO()
            metadata = {"Date": None} if suffix == "svg" else {}
            figure.savefig(drawn, format=suffix, metadata=metadata)
            write_bytes(out / f"{name}.{suffix}", drawn.getvalue())
        made.append(picture)
        plt.close(figure)
    return made
