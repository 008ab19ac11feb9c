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
from holonomic.lab.measures import EDGES
from holonomic.lab.runner import train_set
from holonomic.lab.screen import LABELS

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999933")
#: What the settings of an arm are called on axes.
SETTINGS = {"noise": "noise strength σ_A", "temperature": "temperature τ of the hidden layer"}
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
    if not e.panels:
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
        _curves(e, arms, axes)
        figure.legend(
            *axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8
        )
        return figure
    count = len(e.panels)
    figure, grid = plt.subplots(
        2, count, figsize=(1 + 2.7 * count, 6), constrained_layout=True, sharey="row", squeeze=False
    )
    for (title, members), axes in zip(e.panels, grid.T, strict=True):
        _curves(e, {name: arms[name] for name in members if name in arms}, axes)
        axes[0].set_title(title, fontsize=9)
        axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), fontsize=7, frameon=False)
    for axis in grid[:, 1:].flat:
        axis.set_ylabel("")
    return figure


def _curves(e: Experiment, arms: dict[str, dict[str, Any]], axes: Any) -> None:
    """Some arms' losses on the first axis, accuracies on the second."""
    for axis, metric in zip(axes, ("test_loss", "test_accuracy"), strict=True):
        for i, (name, arm) in enumerate(arms.items()):
            at = np.array(arm["curves"]["epoch"]) * (e.data.steps if e.in_steps else 1)
            values = np.array(arm["curves"][metric], dtype=float)
            mean, std = np.nanmean(values, 1), np.nanstd(values, 1)
            axis.plot(at, mean, label=name, **look(i))
            if len(arms) <= 8:
                low, high = (
                    np.nanmin(values, 1),
                    np.nanmax(values, 1),
                )  # a band stays among the values
                band = np.maximum(mean - std, low), np.minimum(mean + std, high)
                axis.fill_between(at, *band, color=COLOURS[i % 8], alpha=0.12, lw=0)
        axis.set_xlabel("step" if e.in_steps else "epoch")
        axis.set_ylabel(LABELS[metric])
    axes[0].set_yscale("log")


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
            across, logits = stored["axis"], stored["logits"]
            up = stored.get("up", across)
        extent = (across[0], across[-1], up[0], up[-1])
        p = 1 / (1 + np.exp(-np.clip(logits, -50, 50)))
        axis.imshow(
            p, extent=extent, origin="lower", cmap="PuOr", vmin=0, vmax=1, alpha=0.8, aspect="auto"
        )
        axis.contour(across, up, logits, levels=[0.0], colors="black", linewidths=0.8)
        for label, colour in ((0, COLOURS[4]), (1, COLOURS[0])):
            axis.scatter(*x[y == label].T, s=7, color=colour, edgecolors="white", linewidths=0.4)
        accuracy = arms[name]["finals"]["test_accuracy"][0]
        axis.set_title(f"{name}\n{accuracy:.1f} %", fontsize=9)
        axis.set_box_aspect(1)
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
    half = e.data.window[1]
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
    usual = all("test_accuracy" in arm["finals"] for arm in arms.values())
    return _strips(arms, ("test_accuracy", "test_loss") if usual else e.metrics[:2], log=False)


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


def weights(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """How weights and biases are distributed over all runs on the one draw, as training goes on. The
    outermost bins hold all that lies beyond them."""
    counted = {name: arm["weights"] for name, arm in arms.items() if arm.get("weights")}
    parameters = list(next(iter(next(iter(counted.values())).values())))
    figure, grid = plt.subplots(
        len(counted),
        len(parameters),
        figsize=(2.4 * len(parameters), 0.8 + 1.5 * len(counted)),
        constrained_layout=True,
        sharex=True,
        squeeze=False,
    )
    middles = (EDGES[1:] + EDGES[:-1]) / 2
    for (name, times), row in zip(counted.items(), grid, strict=True):
        for parameter, axis in zip(parameters, row, strict=True):
            for k, (epoch, found) in enumerate(times.items()):
                counts = np.array(found[parameter], dtype=float)
                share = counts / max(counts.sum(), 1) / np.diff(EDGES)
                look = {"color": mpl.colormaps["viridis_r"]((k + 0.6) / len(times)), "lw": 1}
                step = int(epoch) * e.data.steps
                axis.plot(middles, np.maximum(share, 1e-4), label=f"step {step:,}", **look)
            axis.set_yscale("log")
            axis.set_ylim(1e-3, None)
        row[0].set_ylabel(f"{name}\ndensity", fontsize=8)
    for parameter, axis in zip(parameters, grid[0], strict=True):
        axis.set_title(parameter, fontsize=9)
    for axis in grid[-1]:
        axis.set_xlabel("value")
    figure.legend(
        *grid[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8
    )
    return figure


def lines(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """The test loss on the line from start to end of every replica (thin), and the mean."""
    figure, axis = plt.subplots(figsize=(5.4, 3.4), constrained_layout=True)
    slugs = {arm.name: arm.slug for arm in e.arms}
    for i, name in enumerate(arms):
        with np.load(out / f"{slugs[name]}.npz") as stored:
            at, found = stored["line_at"], stored["lines"]
        axis.plot(at, found.T, lw=0.5, alpha=0.35, **look(i))
        axis.plot(at, found.mean(0), lw=2, label=name, **look(i))
    axis.set_xlabel("from start (0) to end (1) of training")
    axis.set_ylabel(LABELS["test_loss"])
    axis.legend(fontsize=8)
    return figure


def planes(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """The test loss on the surface through one start and the ends of two runs from it."""
    slugs = {arm.name: arm.slug for arm in e.arms}
    found = {}
    for name in arms:
        with np.load(out / f"{slugs[name]}.npz") as stored:
            if "plane" in stored:
                found[name] = [stored[k] for k in ("plane_along", "plane_across", "plane")]
    figure, axes = plt.subplots(
        1, max(len(found), 1), figsize=(4.2 * len(found) + 0.5, 3.4), constrained_layout=True,
        squeeze=False,
    )  # fmt: skip
    for axis, (name, (along, across, loss)) in zip(axes[0], found.items(), strict=False):
        filled = axis.contourf(along, across, loss, levels=24, cmap="cividis")
        figure.colorbar(filled, label=LABELS["test_loss"])
        axis.grid(visible=False)
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("from start (0) to the ends (1)")
        axis.set_ylabel("from second (0) to first (1) run")
    return figure


def map_(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """Mean final test accuracy over two settings, all replicas."""
    assert e.axes is not None
    at = {arm.name: tuple(float(arm.settings[k]) for k in e.axes) for arm in e.arms}
    placed = {name: where for name, where in at.items() if name in arms}
    across, up = (sorted({where[k] for where in placed.values()}) for k in (0, 1))
    values = np.full((len(up), len(across)), np.nan)
    for name, (x, y) in placed.items():
        accuracy = np.array(arms[name]["finals"]["test_accuracy"], dtype=float)
        values[up.index(y), across.index(x)] = np.nanmean(accuracy)
    figure, axis = plt.subplots(
        figsize=(2 + 0.75 * len(across), 1.4 + 0.6 * len(up)), constrained_layout=True
    )
    image = axis.imshow(values, origin="lower", cmap="cividis", vmin=50, vmax=100, aspect="auto")
    for (k, j), value in np.ndenumerate(values):
        colour = "white" if value < 75 else "black"
        axis.text(j, k, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=8)
    axis.set_xticks(range(len(across)), [f"{v:g}" for v in across])
    axis.set_yticks(range(len(up)), [f"{v:g}" for v in up])
    axis.set_xlabel(SETTINGS[e.axes[0]])
    axis.set_ylabel(SETTINGS[e.axes[1]])
    axis.grid(visible=False)
    figure.colorbar(image, label=LABELS["test_accuracy"])
    return figure


FIGURES = {
    "boundaries": boundaries,
    "curves": curves,
    "curvature": curvature,
    "slopes": slopes,
    "finals": finals,
    "weights": weights,
    "lines": lines,
    "planes": planes,
    "map": map_,
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
