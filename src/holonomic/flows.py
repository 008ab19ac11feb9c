"""The letters of a scheme as maps on a phase point: everything a step does to numbers.

A constraint gives each letter its geometry; this file gives it its physics (units of `Phase`).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from holonomic.constraints import Constraint
from holonomic.noise import Noise
from holonomic.phase import Phase, draw
from holonomic.scheme import Substep
from holonomic.thermostat import Thermostat


class Flow:
    """The flows of one group at its present settings, on its manifold."""

    def __init__(
        self,
        constraint: Constraint,
        lr: float,
        momentum: float,
        temperature: float,
        noise: Noise,
        thermostat: Thermostat | None = None,
    ) -> None:
        self.constraint = constraint
        self.lr = lr
        self.momentum = momentum
        # With lr = 0 no time passes: nothing moves and nothing is shaken.
        self.temperature = temperature if lr else 0.0
        self.noise = noise
        self.thermostat = thermostat

    def step_(
        self,
        x: Phase,
        g: Sequence[Tensor],
        word: Sequence[Substep],
        foreach: bool,
        rescale: float = 1.0,
    ) -> None:
        """Apply the letters of a word, one after the other, to every tensor; before them, ``rescale``
        the momenta, which keeps p = -sqrt(lr) v what it was if lr has changed."""
        if rescale != 1:
            for momenta in (x.v, x.eta):
                if momenta:
                    torch._foreach_mul_(momenta, rescale)
        parts = [(x, g)]
        if not (foreach or self.constraint.batched or self.thermostat):
            parts = [(x.single(i), g[i : i + 1]) for i in range(len(x.q))]
        for substep, following in zip(word, [*word[1:], None], strict=True):
            # What changes v is linear in it at one position, so one projection serves a whole run of
            # such letters: before v is used, to move (A) or to be measured (E).
            ends_kicks = following is None or following.letter in "AE"
            for part, grads in parts:
                getattr(self, substep.letter)(part, grads, substep.fraction)
                if substep.letter in "BODFC" and ends_kicks:
                    self.constraint.settle_(part)
        if len(parts) > 1:
            x.fallbacks += sum(part.fallbacks for part, _ in parts)

    def A(self, x: Phase, g: Sequence[Tensor], fraction: float) -> None:
        """q <- q - lr v, along the geodesic."""
        if self.lr:
            self.constraint.drift_(x, fraction * self.lr)

    def B(self, x: Phase, g: Sequence[Tensor], fraction: float) -> None:
        """v <- v + g."""
        self.constraint.kick_(x, g, fraction)

    def O(self, x: Phase, g: Sequence[Tensor], fraction: float) -> None:  # noqa: E743 (the letter)
        """v <- mu v + sqrt(tau (1 - mu^2) / lr) R: the exact Ornstein-Uhlenbeck flow (2.53c)."""
        mu = self.momentum**fraction
        R: list[Tensor] = []
        S: list[Tensor] = []
        sigma = 0.0
        if self.temperature and mu < 1:
            R, S = draw(x.v, x.eta, self.noise)
            sigma = math.sqrt(self.temperature * (1 - mu * mu) / self.lr)
        self.constraint.thermalize_(x, mu, sigma, R, S)

    def C(self, x: Phase, g: Sequence[Tensor], fraction: float) -> None:
        """v <- exp(-h xi) v."""
        assert self.thermostat is not None
        self._damp(x, self.thermostat.damping(fraction))

    def D(self, x: Phase, g: Sequence[Tensor], fraction: float) -> None:
        """v <- v + sigma_A sqrt(h) / h R."""
        assert self.thermostat is not None
        if self.lr and self.thermostat.noise:
            R, S = draw(x.v, x.eta, self.noise)
            self.constraint.thermalize_(x, 1.0, self.thermostat.kick(fraction), R, S)

    def E(self, x: Phase, g: Sequence[Tensor], fraction: float) -> None:
        """xi <- xi + h coupling (lr |v|^2 - N tau)."""
        assert self.thermostat is not None
        batch_dims = self.thermostat.friction.dim() - 1
        self.thermostat.regulate_(self.constraint.energies(x, batch_dims), fraction)

    def F(self, x: Phase, g: Sequence[Tensor], fraction: float) -> None:
        """C and D in one: v <- exp(-h xi) v + sigma_A sqrt((1 - exp(-2 h xi)) / (2 xi)) / h R."""
        assert self.thermostat is not None
        self._damp(x, self.thermostat.damping(fraction))
        if self.lr and self.thermostat.noise:
            R, S = draw(x.v, x.eta, self.noise)
            strength = self.thermostat.exact_kick(fraction)
            self.thermostat.scale_(R, strength)
            self.thermostat.scale_(S, strength)
            self.constraint.thermalize_(x, 1.0, 1.0, R, S)

    def _damp(self, x: Phase, factors: Tensor) -> None:
        assert self.thermostat is not None
        self.thermostat.scale_(x.v, factors)
        self.thermostat.scale_(x.eta, factors)

    def EM(self, x: Phase, g: Sequence[Tensor], fraction: float) -> None:
        """q <- q - lr g + sqrt(2 tau lr) R (2.51), then back to the manifold."""
        R, S = draw(x.q, x.xi, self.noise) if self.temperature else ([], [])
        self._displace(x, g, R, S)

    def LM(self, x: Phase, g: Sequence[Tensor], fraction: float) -> None:
        """As EM, with the noise averaged over this step and the last (2.56)."""
        R: list[Tensor] = []
        S: list[Tensor] = []
        if self.temperature:
            R, S = draw(x.q, x.xi, self.noise)
            for last, new in ((x.R, R), (x.S, S)):
                if new:
                    mean = torch._foreach_add(last, new)
                    torch._foreach_copy_(last, new)
                    torch._foreach_copy_(new, torch._foreach_mul(mean, 0.5))
        self._displace(x, g, R, S)

    def _displace(self, x: Phase, g: Sequence[Tensor], R: list[Tensor], S: list[Tensor]) -> None:
        if self.lr:
            sigma = math.sqrt(2 * self.temperature * self.lr)
            self.constraint.displace_(x, g, self.lr, sigma, R, S)
