"""UCI tables: chess endgames and poker hands."""

from dataclasses import dataclass

import torch
from torch import Tensor

from holonomic.lab.data.fetch import Progress, Remote, find

_UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases"
_CHESS = Remote(
    "krkopt",
    "krkopt.data",
    "497b61d20d3d9e2ce310f9f4d2ca92dbdb0691d9e449d983ec6f7baf387dc7a9",
    f"{_UCI}/chess/king-rook-vs-king/krkopt.data",
)
_POKER = Remote(
    "poker-hand",
    "poker-hand-training-true.data",
    "37becdf87d5f8cbf2b91d6471e965a25b86cb4a6d878c0f94a4025969fca464f",
    f"{_UCI}/poker/poker-hand-training-true.data",
)
#: Outcomes of the endgame: drawn, or lost in so many moves.
_NUMBERS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
OUTCOMES = ("draw", *_NUMBERS.split(), "fifteen", "sixteen")


@dataclass(frozen=True)
class Table:
    """Rows of numbers (one-hot for categories) and their classes."""

    x: Tensor
    y: Tensor
    classes: int


def chess(progress: Progress | None = None) -> Table:
    """King and rook against king: 28,056 positions, files and ranks one-hot (48 columns), and the
    depth of win for white, 18 classes."""
    (path,) = find([_CHESS], progress=progress)
    rows = [line.split(",") for line in path.read_text().split()]
    squares = torch.tensor(
        [[ord(v) - ord("a") if v.isalpha() else int(v) - 1 for v in row[:6]] for row in rows]
    )
    outcomes = torch.tensor([OUTCOMES.index(row[6]) for row in rows])
    one_hot = torch.nn.functional.one_hot(squares, 8).flatten(1).float()
    return Table(one_hot, outcomes, len(OUTCOMES))


def poker(progress: Progress | None = None) -> Table:
    """25,010 hands of five cards, suits and ranks one-hot (85 columns), and what they are, 10
    classes."""
    (path,) = find([_POKER], progress=progress)
    rows = torch.tensor([[int(v) for v in line.split(",")] for line in path.read_text().split()])
    cards = rows[:, :10].reshape(-1, 5, 2) - 1
    suits = torch.nn.functional.one_hot(cards[..., 0], 4)
    ranks = torch.nn.functional.one_hot(cards[..., 1], 13)
    return Table(torch.cat([suits, ranks], dim=2).flatten(1).float(), rows[:, 10], 10)
