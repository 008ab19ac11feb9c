"""What is learned: a kind of data and how it is used, a part of the frozen experiment."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from holonomic.lab import data
from holonomic.lab.measures import BINARY, MULTICLASS, Criterion, Window
from holonomic.replicas import child_seed

#: Training inputs and classes, then those of the test.
Split = tuple[Tensor, Tensor, Tensor, Tensor]
Pool = tuple[Tensor, Tensor]

#: Marks a field that is left out of descriptions while it has its default value, so that descriptions
#: from before the field existed stay what they were.
QUIET = {"quiet": True}


class Data(ABC):
    """Numbers of training and test data, the size of a batch, and where the data comes from."""

    train: int
    test: int
    batch: int
    criterion: ClassVar[Criterion]
    #: Whether there is one set of data for all replicas.
    shared: ClassVar[bool] = False

    @abstractmethod
    def draw(self, seed: int, k: int) -> Split:
        """Draw number k of the data."""

    @property
    def window(self) -> Window:
        """The part of the plane that pictures show."""
        raise NotImplementedError(f"{type(self).__name__} has no picture in the plane")

    def epochs(self, steps: int) -> int:
        """Epochs of as many steps, at least."""
        return -(-steps // self.steps)

    @property
    def steps(self) -> int:
        """Steps of an epoch."""
        return -(-self.train // self.batch)


@dataclass(frozen=True)
class Spiral(Data):
    """Two interleaved spirals, see `holonomic.lab.data.spiral`."""

    turns: int
    scale: float
    noise: float
    train: int
    test: int
    batch: int
    power: float = field(default=0.5, metadata=QUIET)
    criterion: ClassVar[Criterion] = BINARY

    def draw(self, seed: int, k: int) -> Split:
        train, test = (
            data.spiral(
                n, self.turns, self.scale, self.noise, child_seed(seed, 100 + k, part), self.power
            )
            for part, n in enumerate((self.train, self.test))
        )
        return (*train, *test)

    @property
    def window(self) -> Window:
        half = 1.2 * self.scale
        return (-half, half, -half, half)


@dataclass(frozen=True)
class Trigonometric(Data):
    """A cosine against a sine, see `holonomic.lab.data.trigonometric`."""

    a: float
    b: float
    noise: float
    train: int
    test: int
    batch: int
    criterion: ClassVar[Criterion] = BINARY

    def draw(self, seed: int, k: int) -> Split:
        train, test = (
            data.trigonometric(n, self.a, self.b, self.noise, child_seed(seed, 100 + k, part))
            for part, n in enumerate((self.train, self.test))
        )
        return (*train, *test)

    @property
    def window(self) -> Window:
        return (-0.05 * self.a, 1.05 * self.a, -1.3, 1.3)


def _chess() -> tuple[Pool, ...]:
    table = data.chess()
    return ((table.x, table.y),)


def _poker() -> tuple[Pool, ...]:
    table = data.poker()
    return ((table.x, table.y),)


def _mnist() -> tuple[Pool, ...]:
    images = data.mnist()
    return (
        (images.train_x.flatten(1), images.train_y),
        (images.test_x.flatten(1), images.test_y),
    )


#: One pool that is split, or a pool each for training and test.
_POOLS: dict[str, Callable[[], tuple[Pool, ...]]] = {
    "chess": _chess,
    "poker": _poker,
    "mnist": _mnist,
}


@dataclass(frozen=True)
class Stored(Data):
    """A part of a real set of data, chosen by the seed: "chess", "poker" or "mnist"."""

    name: str
    train: int
    test: int
    batch: int
    criterion: ClassVar[Criterion] = MULTICLASS
    shared: ClassVar[bool] = True

    def draw(self, seed: int, k: int) -> Split:
        generator = torch.Generator().manual_seed(child_seed(seed, 100 + k))

        def some(pool: Pool, count: int) -> Pool:
            chosen = torch.randperm(len(pool[1]), generator=generator)[:count]
            return pool[0][chosen], pool[1][chosen]

        pools = _POOLS[self.name]()
        if len(pools) == 2:
            return (*some(pools[0], self.train), *some(pools[1], self.test))
        x, y = some(pools[0], self.train + self.test)
        return x[: self.train], y[: self.train], x[self.train :], y[self.train :]
