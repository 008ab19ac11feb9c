"""Data for the experiments: made (seeded) and real (checked by sha256)."""

from holonomic.lab.data.fetch import DataError
from holonomic.lab.data.images import Images, fashion_mnist, mnist
from holonomic.lab.data.spirals import spiral, trigonometric
from holonomic.lab.data.tables import Table, chess, poker
from holonomic.lab.data.text import Corpus, batches, penn_treebank, wikitext2

__all__ = [
    "Corpus",
    "DataError",
    "Images",
    "Table",
    "batches",
    "chess",
    "fashion_mnist",
    "mnist",
    "penn_treebank",
    "poker",
    "spiral",
    "trigonometric",
    "wikitext2",
]
