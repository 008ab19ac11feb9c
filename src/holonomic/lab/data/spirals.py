"""Made data: planar spirals and trigonometric curves, seeded."""

import math

import torch
from torch import Tensor


def spiral(
    n: int, turns: float, scale: float, noise: float, seed: int, power: float = 0.5
) -> tuple[Tensor, Tensor]:
    """Two interleaved spirals (3.32): n points and their classes 0. and 1.

    A point of class 0 is scale s (cos a, sin a) + noise N(0, 1) with s = t^power, a = 2 pi turns s and
    t uniform on (0, 1); class 1 is turned by pi. Two turns, scale 1, noise 0.05 is (4.59); four
    turns, scale 2, noise 0.02 is (4.58). Half of the points belong to each class.
    """
    generator = torch.Generator().manual_seed(seed)
    s = torch.rand(n, generator=generator) ** power
    label = (torch.arange(n) % 2).float()
    angle = 2 * math.pi * turns * s + math.pi * label
    xy = scale * s.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)
    return xy + noise * torch.randn(n, 2, generator=generator), label


def trigonometric(n: int, a: float, b: float, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """A cosine (class 0) against a sine (class 1) over x = a t, t uniform on (0, 1): n points
    (x, cos(b pi x) + noise N(0, 1)) and their classes, half of the points each.

    (3.33) prints cos(b t pi), where a would only stretch the picture; the text says that a = 10 has
    more crossings than a = 6, which is so if the curve is one of x.
    """
    generator = torch.Generator().manual_seed(seed)
    t = torch.rand(n, generator=generator)
    label = (torch.arange(n) % 2).float()
    angle = b * a * t * math.pi
    height = torch.where(label == 0, angle.cos(), angle.sin())
    height = height + noise * torch.randn(n, generator=generator)
    return torch.stack([a * t, height], dim=1), label
