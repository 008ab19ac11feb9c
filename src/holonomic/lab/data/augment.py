"""Augmentation of image tensors, whole batches at a time, seeded by a generator."""

import torch
from torch import Tensor
from torch.nn.functional import pad


def crop_and_flip(x: Tensor, generator: torch.Generator, padding: int = 4) -> Tensor:
    """Every image padded by zeros, cut back to its size at a random place, and mirrored by a coin.

    The generator is one of the CPU; the images (N, channels, height, width) can be anywhere."""
    n, _, height, width = x.shape
    top, left = torch.randint(2 * padding + 1, (2, n, 1), generator=generator)
    flip = torch.randint(2, (n, 1), generator=generator).bool()
    across = torch.arange(width)
    rows = (top + torch.arange(height)).to(x.device)
    columns = (left + torch.where(flip, across.flip(0), across)).to(x.device)
    images = torch.arange(n, device=x.device)[:, None, None]
    padded = pad(x, [padding] * 4)
    return padded[images, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def channel_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of every channel over images and pixels, shaped to broadcast."""
    std, mean = torch.std_mean(x, dim=(0, 2, 3), keepdim=True)
    return mean, std
