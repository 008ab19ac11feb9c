"""All real data sets by name."""

import difflib
from collections.abc import Callable

from holonomic.lab.data.cifar10 import cifar10
from holonomic.lab.data.digits import digits
from holonomic.lab.data.fetch import DataError, Progress
from holonomic.lab.data.images import Images, fashion_mnist, mnist
from holonomic.lab.data.tables import Table, chess, poker
from holonomic.lab.data.text import Corpus, penn_treebank, wikitext2

Dataset = Images | Table | Corpus

DATASETS: dict[str, Callable[[Progress | None], Dataset]] = {
    "fashion-mnist": fashion_mnist,
    "mnist": mnist,
    "cifar-10": cifar10,
    "digits": digits,
    "ptb": penn_treebank,
    "wikitext-2": wikitext2,
    "krkopt": chess,
    "poker-hand": poker,
}


def dataset(name: str, progress: Progress | None = None) -> Dataset:
    """A real data set, named as its folder; an unknown name suggests the nearest."""
    if name not in DATASETS:
        near = difflib.get_close_matches(name.lower(), DATASETS, n=3, cutoff=0.3) or list(DATASETS)
        raise DataError(f"there is no data set {name!r}; did you mean {', '.join(near)}?")
    return DATASETS[name](progress)
