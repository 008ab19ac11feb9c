"""What is measured of trained replicas: losses, and the shape of a decision boundary."""

from collections.abc import Callable
from dataclasses import dataclass

import contourpy
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, softplus

from holonomic.replicas import Loss, Replicas

Array = NDArray[np.float64]
#: x from, x to, y from, y to.
Window = tuple[float, float, float, float]

#: Metrics for which smaller is better.
LESS_IS_BETTER = frozenset(
    {
        "train_loss",
        "test_loss",
        "curvature_mean",
        "curvature_median",
        "curvature_std",
        "curvature_max",
        "slope",
        "valid_loss",
        "valid_perplexity",
        "test_perplexity",
        "largest_weight",
        "output_weight",
        "ece",
        "lipschitz",
        "deviation",
        "loss_rise",
        "steps_to_90",
    }
)


def binary_loss(output: Tensor, y: Tensor) -> Tensor:
    """Mean binary cross entropy of one replica; ``output`` holds logits, (batch, 1).

    log(1 + e^z) - y z is what `binary_cross_entropy_with_logits` computes, in a third of the calls."""
    z = output.squeeze(-1)
    return (softplus(z) - y * z).mean()


def _binary_scores(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = output.squeeze(-1)
    loss = binary_cross_entropy_with_logits(logits, y, reduction="none").mean(1)
    return loss, ((logits > 0) == (y > 0.5)).float().mean(1)


def class_loss(output: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy of one replica; ``output`` holds logits, (batch, classes)."""
    return cross_entropy(output, y)


def _class_scores(output: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = output.log_softmax(-1)
    loss = -logits.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean(1)
    return loss, (output.argmax(-1) == y).float().mean(1)


@dataclass(frozen=True)
class Criterion:
    """What is trained on (``loss`` of one replica) and looked at (``scores``: every replica's loss and
    share of right answers, from outputs (n, N, ...) and classes (n, N))."""

    loss: Loss
    scores: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


BINARY = Criterion(binary_loss, _binary_scores)
MULTICLASS = Criterion(class_loss, _class_scores)


def evaluate(
    replicas: Replicas, criterion: Criterion, x: Tensor, y: Tensor, *, own: bool
) -> tuple[Array, Array]:
    """Every replica's loss and accuracy in percent, on its ``own`` (n, N, ...) data or on one set."""
    with torch.no_grad():
        classes = y if own else y.expand(replicas.n, -1)
        loss, right = criterion.scores(replicas.predict(x, own=own), classes)
    return loss.double().cpu().numpy(), (100 * right).double().cpu().numpy()


#: Edges of the histograms of weights; what lies outside is counted in the first and the last bin.
EDGES = np.linspace(-6.0, 6.0, 121)


def histograms(replicas: Replicas, first: int) -> dict[str, list[int]]:
    """How the values of every parameter are distributed over the first so many replicas."""
    return {
        name: np.histogram(np.clip(p[:first].detach().cpu().numpy(), EDGES[0], EDGES[-1]), EDGES)[
            0
        ].tolist()
        for name, p in replicas.named_parameters()
    }


def grid(window: Window, points: int) -> tuple[Array, Array, Tensor]:
    """The axes and the points of a grid, row by row (y outer, x inner)."""
    across, up = np.linspace(*window[:2], points), np.linspace(*window[2:], points)
    x, y = np.meshgrid(across, up)
    return across, up, torch.tensor(np.stack([x.ravel(), y.ravel()], 1), dtype=torch.float32)


@torch.no_grad()
def logits_on_grid(
    replicas: Replicas, i: int, window: Window, points: int
) -> tuple[Array, Array, Array]:
    """The axes and one replica's logits on the grid, in pieces that fit the cache."""
    across, up, xy = grid(window, points)
    module = replicas[i].cpu()
    logits = torch.cat([module(part) for part in xy.split(1 << 14)])
    return across, up, logits.double().numpy().reshape(points, points)


def boundary(axis: Array, values: Array, level: float = 0.0) -> list[Array]:
    """The pieces of the contour ``values == level``, each an array of (x, y) points."""
    lines = contourpy.contour_generator(axis, axis, values).lines(level)
    return [np.asarray(line) for line in lines]


def curvature(pieces: list[Array]) -> Array:
    """|x'' y' - x' y''| / (x'^2 + y'^2)^(3/2) (4.60) at every point of a contour, with second-order
    central differences along each piece.

    The points are those of marching squares, unevenly spaced, as in the papers: where two nearly
    coincide the estimate is arbitrarily large, so its maximum and standard deviation say little about
    the boundary. Pieces of fewer than five points are left out. A piece that leaves the window is
    open: its two ends have one-sided differences. Coinciding points give 0/0 and are left out.
    """
    found = []
    for piece in pieces:
        if len(piece) < 5:
            continue
        closed = bool(np.all(piece[0] == piece[-1]))
        if closed:  # continue the piece over its seam, so that it has no ends
            piece = np.concatenate([piece[-4:-1], piece, piece[1:4]])
        d1 = np.gradient(piece, axis=0)
        d2 = np.gradient(d1, axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            kappa = np.abs(d2[:, 0] * d1[:, 1] - d1[:, 0] * d2[:, 1]) / (d1**2).sum(1) ** 1.5
        kappa = kappa[3:-4] if closed else kappa  # and the point that stands at both ends once
        found.append(kappa[np.isfinite(kappa)])
    return np.concatenate(found) if found else np.empty(0)


@torch.no_grad()
def slope(replicas: Replicas, half_width: float, points: int = 1000) -> Array:
    """|d prediction / ds| along y = 0 and along x = 0 by central differences: (n, 2, points)."""
    s = torch.linspace(-half_width, half_width, points, device=next(replicas.parameters()).device)
    zero = torch.zeros_like(s)
    lines = torch.cat([torch.stack([s, zero], 1), torch.stack([zero, s], 1)])
    p = replicas.predict(lines).squeeze(-1).sigmoid().double().cpu().numpy().reshape(-1, 2, points)
    return np.abs(np.gradient(p, float(s[1] - s[0]), axis=2))
