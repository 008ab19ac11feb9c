"""Plain networks."""

from itertools import pairwise

from torch import nn


def mlp(*widths: int) -> nn.Sequential:
    """A ReLU network: ``mlp(2, 500, 1)`` has layers "0" (2 to 500) and "2" (500 to 1)."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
