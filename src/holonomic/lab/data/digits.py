"""scikit-learn's digits: 1,797 grey images of 8 x 8."""

import torch

from holonomic.lab.data.fetch import DataError, Progress
from holonomic.lab.data.images import Images

#: The first images are for training. They come in the order of their writers, so the test is on others.
_TRAIN = 1437


def digits(progress: Progress | None = None) -> Images:
    """The digits that scikit-learn brings along: 1,437 + 360 images in ten classes."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError(
            'the digits come with scikit-learn, which is missing: pip install "holonomic[digits]"'
        ) from None
    found = load_digits()
    x = torch.from_numpy(found.images).float().unsqueeze(1) / 16
    y = torch.from_numpy(found.target).long()
    return Images(x[:_TRAIN], y[:_TRAIN], x[_TRAIN:], y[_TRAIN:])
