"""A point of phase space: the positions and momenta that one group moves together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holonomic.noise import Noise


@dataclass
class Phase:
    """Lists with one entry per tensor of the group; those not needed are empty.

    ``q`` the weights and ``v`` their momenta in torch units (q <- q - lr v); ``xi`` the slack
    variables of an inequality and ``eta`` their momenta; ``R`` and ``S`` the last noise of weights
    and slack, which LM averages with the next. A constraint that links the tensors of a group has one
    slack vector for all of them: ``xi``, ``eta`` and ``S`` then have a single entry. A ``lazy`` phase
    may leave a normal part in ``v`` after a drift, which the next one takes off; the tensors of a
    ``native`` one suit the compiled kernels.
    """

    q: list[Tensor]
    v: list[Tensor] = field(default_factory=list)
    xi: list[Tensor] = field(default_factory=list)
    eta: list[Tensor] = field(default_factory=list)
    R: list[Tensor] = field(default_factory=list)
    S: list[Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    fallbacks: int = 0
    lazy: bool = False
    native: bool = False

    def map(self, change: Callable[[Tensor], Tensor]) -> "Phase":
        """The phase with every tensor changed."""
        lists: dict[str, Any] = {k: [change(t) for t in ts] for k, ts in self._lists().items()}
        return Phase(**lists, names=self.names, lazy=self.lazy)

    def single(self, i: int) -> "Phase":
        """Tensor i alone, sharing memory."""
        lists: dict[str, Any] = {k: ts[i : i + 1] for k, ts in self._lists().items()}
        return Phase(**lists, names=self.names[i : i + 1], lazy=self.lazy)

    def split(self, rows: int) -> "list[Phase]":
        """The only tensor of this phase in pieces of so many rows, sharing memory."""
        cut = {k: ts[0].split(rows) for k, ts in self._lists().items() if ts}
        pieces = []
        for parts in zip(*cut.values(), strict=True):
            lists: dict[str, Any] = {k: [t] for k, t in zip(cut, parts, strict=True)}
            pieces.append(Phase(**lists, lazy=self.lazy))
        return pieces

    @staticmethod
    def join(phases: Sequence["Phase"]) -> "Phase":
        """The tensors of several phases, sharing memory."""
        lists: dict[str, Any] = {
            k: [t for x in phases for t in getattr(x, k)] for k in phases[0]._lists()
        }
        return Phase(**lists, lazy=phases[0].lazy)

    def copy_(self, other: "Phase") -> None:
        """Take over the values of another phase."""
        theirs = other._lists()
        for key, mine in self._lists().items():
            if mine:
                torch._foreach_copy_(mine, theirs[key])

    def _lists(self) -> dict[str, list[Tensor]]:
        return {k: getattr(self, k) for k in ("q", "v", "xi", "eta", "R", "S")}


def draw(
    first: list[Tensor], second: list[Tensor], noise: Noise
) -> tuple[list[Tensor], list[Tensor]]:
    """Normal numbers shaped like two lists, drawn tensor by tensor: the order is the same whether
    the tensors are handled one by one or all at once."""
    R: list[Tensor] = []
    S: list[Tensor] = []
    for i, t in enumerate(first):
        R.append(noise.like(t))
        if i < len(second):
            S.append(noise.like(second[i]))
    return R, S


def wide(t: Tensor) -> Tensor:
    """Low precision is computed in float32 and rounded once, at the end of the step."""
    return t.float() if t.dtype.itemsize < 4 else t


def squares(t: Tensor, batch_dims: int) -> Tensor:
    """The sum of squares over all but the first dimensions, in double precision."""
    return t.double().reshape(*t.shape[:batch_dims], -1).square().sum(-1)
