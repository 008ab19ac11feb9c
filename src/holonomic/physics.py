"""The numbers of a letter: how far it drifts, how much it damps, how strongly it shakes.

This is the only place that knows the units: lr = h**2 and momentum = exp(-gamma h); for EM and LM, lr = h.
"""

import math
from dataclasses import dataclass
from typing import Any

from holonomic.scheme import OVERDAMPED, Substep
from holonomic.thermostat import Thermostat

NUMBERS = ("lr", "momentum", "temperature", "weight_decay")


@dataclass(frozen=True)
class Physics:
    """A group's settings at one step, and its thermostat if its scheme has one."""

    lr: float
    momentum: float
    temperature: float
    weight_decay: float = 0.0
    maximize: bool = False
    thermostat: Thermostat | None = None

    @staticmethod
    def of(group: dict[str, Any], thermostat: Thermostat | None = None) -> "Physics":
        """The numbers of a group as they are now."""
        lr, mu, tau, decay = map(float, (group[k] for k in NUMBERS))
        return Physics(lr, mu, tau, decay, group["maximize"], thermostat)

    def noisy(self, s: Substep) -> bool:
        """Whether a letter takes noise. With lr = 0 no time passes, and nothing is shaken."""
        if not self.lr:
            return False
        if s.letter == "O":
            return self.temperature > 0 and self.mu(s) < 1
        if s.letter in OVERDAMPED:
            return self.temperature > 0
        return s.letter in "DF" and self.thermostat is not None and self.thermostat.noise > 0

    def h(self, s: Substep) -> float:
        """A, EM, LM: the length of the step."""
        return s.fraction * self.lr

    def mu(self, s: Substep) -> float:
        """O: exp(-gamma h)."""
        return self.momentum**s.fraction

    def sigma(self, s: Substep) -> float:
        """The strength of the noise: of v in O (2.53c), of q in EM and LM (2.51)."""
        if not self.noisy(s):
            return 0.0
        if s.letter in OVERDAMPED:
            return math.sqrt(2 * self.temperature * self.lr)
        mu = self.mu(s)
        return math.sqrt(self.temperature * (1 - mu * mu) / self.lr)

    @property
    def sign(self) -> float:
        """Of the gradient in the force."""
        return -1.0 if self.maximize else 1.0


def rescaling(group: dict[str, Any], adaptive: bool) -> float:
    """What momenta are multiplied by before a step whose lr is new.

    With noise, momenta are in equilibrium as p = -sqrt(lr) v, so p is kept when lr changes (v alone would
    be too hot by the ratio of the steps). Without noise v is kept, as in SGD."""
    lr, last = float(group["lr"]), group["last_lr"]
    if not lr or not last or not (group["temperature"] or adaptive):
        return 1.0
    return math.sqrt(last / lr)


def kinetic_temperature(group: dict[str, Any], energy: float, dof: int) -> float:
    """lr |v|^2 / dof, with the lr of the step that left these momenta."""
    lr = group["last_lr"] or float(group["lr"])
    return lr * energy / max(dof, 1)
