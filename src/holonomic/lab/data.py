"""Made data: the planar spirals of the papers, seeded."""

import math

import torch
from torch import Tensor


def spiral(n: int, turns: int, scale: float, noise: float, seed: int) -> tuple[Tensor, Tensor]:
    """Two interleaved spirals: n points and their classes 0. and 1.

    A point of class 0 is scale sqrt(t) (cos a, sin a) + noise N(0, 1) with a = 2 pi turns sqrt(t) and
    t uniform on (0, 1); class 1 is turned by pi. Two turns, scale 1, noise 0.05 is (4.59); four
    turns, scale 2, noise 0.02 is (4.58). Half of the points belong to each class.
    """
    generator = torch.Generator().manual_seed(seed)
    root = torch.rand(n, generator=generator).sqrt()
    label = (torch.arange(n) % 2).float()
    angle = 2 * math.pi * turns * root + math.pi * label
    xy = scale * root.unsqueeze(1) * torch.stack([angle.cos(), angle.sin()], dim=1)
    return xy + noise * torch.randn(n, 2, generator=generator), label
