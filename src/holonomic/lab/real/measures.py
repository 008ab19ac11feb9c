"""What is measured of a trained classifier beyond its loss."""

import math

import torch
from torch import Tensor, nn


def calibration_error(logits: Tensor, y: Tensor, bins: int = 15) -> float:
    """Expected calibration error: predictions in bins of equal width by confidence, and the mean of
    |accuracy - confidence| over the bins, weighted by their sizes. In [0, 1]."""
    confidence, chosen = logits.softmax(1).max(1)
    hit = (chosen == y).double()
    index = (confidence * bins).ceil().clamp(1, bins).long() - 1  # a bin is (k, k + 1] / bins
    gap = torch.zeros(bins, dtype=torch.float64, device=logits.device)
    gap.index_add_(0, index, hit - confidence.double())
    return gap.abs().sum().item() / len(y)


def lipschitz_bound(model: nn.Module) -> float | None:
    """The product of the spectral norms: a bound on |f(x) - f(x')| / |x - x'| of a chain of linear
    layers and ReLUs. None for other models."""
    parts = list(model) if isinstance(model, nn.Sequential) else [model]
    if not all(isinstance(part, nn.Flatten | nn.Linear | nn.ReLU) for part in parts):
        return None
    weights = [part.weight for part in parts if isinstance(part, nn.Linear)]
    return math.prod(torch.linalg.matrix_norm(w.detach(), 2).item() for w in weights)


def margins(logits: Tensor, y: Tensor) -> Tensor:
    """By how much the right class leads (or, negative, trails) the best of the others.

    An image keeps its class under every change of norm less than margin / (sqrt(2) Lipschitz bound)."""
    right = logits.gather(1, y[:, None]).squeeze(1)
    others = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    return right - others


def largest_weights(model: nn.Module) -> tuple[float, float]:
    """The largest |weight| of all matrices and kernels, and that of the last one."""
    weights = [p.detach() for p in model.parameters() if p.dim() > 1]
    largest = [w.abs().max().item() for w in weights]
    return max(largest), largest[-1]
