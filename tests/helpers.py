"""Shared by the tests: running chains, z-scores, regressed orders, a copy of the noise."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holonomic import Langevin
from holonomic.noise import Noise
from holonomic.phase import Phase
from holonomic.state import KEYS

# The tensors here are small: threads would only wait for each other (and for other test workers).
torch.set_num_threads(1)

Potential = Callable[[Tensor], Tensor]

UNDERDAMPED = ("OBA", "ABO", "BAO", "BAOA", "BAOAB", "ABOBA", "OBABO")
OVERDAMPED = ("EM", "LM")
SCHEMES = UNDERDAMPED + OVERDAMPED


def free(q: Tensor) -> Tensor:
    """The potential that is 0 everywhere."""
    return 0 * q


def run(
    potential: Potential,
    start: Tensor,
    steps: int,
    after: Callable[[Tensor, Langevin], None] | None = None,
    **settings: Any,
) -> tuple[Tensor, Langevin]:
    """Move ``start`` by ``steps`` steps of a Langevin optimizer in a potential.

    The potential is summed over all entries, so leading dimensions are independent chains. ``after``
    sees the weights and the optimizer at the end of every step.
    """
    q = torch.nn.Parameter(start.clone())
    optimizer = Langevin([q], **settings)
    for _ in range(steps):
        (q.grad,) = torch.autograd.grad(potential(q).sum(), q)
        optimizer.step()
        if after is not None:
            after(q.detach(), optimizer)
    return q.detach(), optimizer


def phase(q: Tensor, optimizer: Langevin) -> Phase:
    """The state of a parameter in double precision, copied, its momenta projected as a step would."""
    state = next((s for p, s in optimizer.state.items() if p.data_ptr() == q.data_ptr()), {})
    lists: dict[str, Any] = {k: [state[n].double()] for k, n in KEYS.items() if n in state}
    x = Phase([q.detach().double()], **lists, names=["q"]).map(torch.clone)
    constraint = optimizer.param_groups[0]["constraint"]
    if x.v and constraint:
        constraint.project_(x)
    return x


def z_score(samples: Tensor, expected: float) -> float:
    """How many Monte Carlo standard errors the mean of independent samples is off."""
    x = samples.detach().double().flatten()
    return (x.mean().item() - expected) / (x.std().item() / math.sqrt(x.numel()))


def slope(h: Sequence[float], error: Sequence[float]) -> float:
    """The order p of error ~ h^p, by regression of log error on log h."""
    return float(np.polyfit(np.log(h), np.log(error), 1)[0])


class Stream:
    """Normal numbers in the order in which they are asked for."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def like(self, tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor).normal_(generator=self._generator)


class Drawn(Noise):
    """A source for an optimizer that gives the numbers of a `Stream`, in the order it asks for them."""

    def __init__(self, seed: int, sign: float = 1.0) -> None:
        super().__init__(seed)
        self._stream, self._sign = Stream(seed), sign

    def like(self, tensor: Tensor, *place: Any) -> Tensor:
        return self._sign * self._stream.like(tensor)


def random_orthonormal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Tall matrices with orthonormal columns, uniformly distributed."""
    generator = torch.Generator().manual_seed(seed)
    Z = torch.randn(*shape, dtype=torch.float64, generator=generator)
    Q, R = torch.linalg.qr(Z)
    Q = Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return Q.to(dtype).contiguous()
