"""Data for the experiments: made (seeded) and real (checked by sha256)."""

from holonomic.lab.data.augment import channel_statistics, crop_and_flip
from holonomic.lab.data.catalog import DATASETS, Dataset, dataset
from holonomic.lab.data.cifar10 import cifar10
from holonomic.lab.data.digits import digits
from holonomic.lab.data.fetch import DataError, Progress
from holonomic.lab.data.images import Images, fashion_mnist, mnist
from holonomic.lab.data.spirals import spiral, trigonometric
from holonomic.lab.data.tables import Table, chess, poker
from holonomic.lab.data.text import Corpus, batches, penn_treebank, wikitext2, windows

__all__ = [
    "DATASETS",
    "Corpus",
    "DataError",
    "Dataset",
    "Images",
    "Progress",
    "Table",
    "batches",
    "channel_statistics",
    "chess",
    "cifar10",
    "crop_and_flip",
    "dataset",
    "digits",
    "fashion_mnist",
    "mnist",
    "penn_treebank",
    "poker",
    "spiral",
    "trigonometric",
    "wikitext2",
    "windows",
]
