"""A point of phase space: the positions and momenta that one group moves together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

LISTS = ("q", "v", "xi", "eta", "R", "S")


@dataclass
class Tally:
    """What happened on the way: steps that a solver could not take, weights found changed, and
    frictions that had to be limited."""

    fallbacks: int = 0
    changed: int = 0
    limited: int = 0


@dataclass
class Phase:
    """Lists with one entry per tensor of the group; those not needed are empty.

    ``q`` the weights and ``v`` their momenta in torch units (q <- q - lr v); ``xi`` the slack
    variables of an inequality and ``eta`` their momenta; ``R`` and ``S`` the last noise of weights
    and slack, which LM averages with the next. A constraint that links the tensors of a group has
    one slack vector for all of them: ``xi``, ``eta`` and ``S`` then have a single entry.

    ``v`` and ``eta`` may carry a part normal to the manifold: whoever reads them projects first.
    """

    q: list[Tensor]
    v: list[Tensor] = field(default_factory=list)
    xi: list[Tensor] = field(default_factory=list)
    eta: list[Tensor] = field(default_factory=list)
    R: list[Tensor] = field(default_factory=list)
    S: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Phase":
        """The phase with every tensor changed."""
        return self._with({key: [change(t) for t in ts] for key, ts in self._lists().items()})

    def single(self, i: int) -> "Phase":
        """Tensor i alone, sharing memory."""
        return self.select([i])

    def select(self, chosen: list[int]) -> "Phase":
        """Some tensors, sharing memory."""
        lists: dict[str, Any] = {
            key: [ts[i] for i in chosen] if ts else [] for key, ts in self._lists().items()
        }
        return self._with({**lists, "names": [self.names[i] for i in chosen] if self.names else []})

    def split(self, rows: int) -> "Iterator[Phase]":
        """The only tensor of this phase in pieces of so many rows, sharing memory."""
        cut = {key: ts[0].split(rows) for key, ts in self._lists().items() if ts}
        for parts in zip(*cut.values(), strict=True):
            yield self._with({key: [t] for key, t in zip(cut, parts, strict=True)})

    def copy_(self, other: "Phase") -> None:
        """Take over the values of another phase."""
        theirs = other._lists()
        for key, mine in self._lists().items():
            if mine:
                torch._foreach_copy_(mine, theirs[key])

    def _lists(self) -> dict[str, list[Tensor]]:
        return {key: getattr(self, key) for key in LISTS}

    def _with(self, lists: dict[str, Any]) -> "Phase":
        return replace(self, **lists)


def wide(t: Tensor) -> Tensor:
    """Low precision is computed in float32 and rounded once, at the end of the step."""
    return t.float() if t.dtype.itemsize < 4 else t


def squares(t: Tensor, batch_dims: int) -> Tensor:
    """The sum of squares over all but the first dimensions, in double precision."""
    return t.double().reshape(*t.shape[:batch_dims], -1).square().sum(-1)
