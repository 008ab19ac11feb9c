"""Pictures of training on real data."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from holonomic.lab.experiment import Experiment
from holonomic.lab.plots import FIGURES, look
from holonomic.lab.real.experiment import RealExperiment
from holonomic.lab.screen import LABELS

#: Drawn on a logarithmic axis, if they differ by so much.
_LOGARITHMIC = {"train_loss", "largest_weight", "output_weight"}
#: Points of a curve that are marked: a line alone would say that there is something in between.
_FEW = 10


def training(e: Experiment, arms: dict[str, dict[str, Any]], out: Path) -> Figure:
    """Curves over training: mean over all runs, band of one standard deviation."""
    panels = e.shown if isinstance(e, RealExperiment) else ()
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.6 * len(panels), 3.4), constrained_layout=True, squeeze=False
    )
    for axis, metric in zip(axes[0], panels, strict=True):
        seen: list[float] = []
        for i, (name, arm) in enumerate(arms.items()):
            epochs = np.array(arm["curves"]["epoch"])
            values = np.array(arm["curves"][metric], dtype=float)
            mean, std = values.mean(1), values.std(1)  # NaN from where a run has diverged
            seen += mean[np.isfinite(mean)].tolist()
            style = look(i)
            marker = "o" if len(epochs) <= _FEW else None
            axis.plot(epochs, mean, label=name, marker=marker, lw=1.2, **style)
            if values.shape[1] > 1 and len(arms) <= 8:
                low, high = mean - std, mean + std
                axis.fill_between(epochs, low, high, color=style["color"], alpha=0.12, lw=0)
        axis.set_xlabel("epoch")
        axis.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axis.set_ylabel(LABELS[metric])
        if metric in _LOGARITHMIC and seen and max(seen) > 4 * min(seen) > 0:
            axis.set_yscale("log")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8
    )
    return figure


FIGURES["training"] = training
