"""The friction of adaptive Langevin dynamics, a variable that holds the kinetic temperature (3.21).

    C  v <- exp(-h xi) v          D  v <- v + sigma_A sqrt(h) / h R          h = sqrt(lr)
    E  xi <- xi + h coupling (lr |v|^2 - N tau)
    F  C and D in one, solved exactly: dp = -xi p dt + sigma_A dW (2.61)

If the gradient carries noise of unknown strength, the friction grows until it takes off as much energy
as the noise brings in. In equilibrium its mean is (sigma_A^2 + h sigma_G^2) / (2 tau), with sigma_G^2 the
variance of the gradient noise.

Friction and kinetic energy are an oscillator of frequency sqrt(2 coupling N tau). A step must be short
against it: h sqrt(2 coupling N tau) <= 1, which is checked at every step. E changes h xi by at most 1 at
a time and never takes it below -1, so that a burst of energy (a wild gradient, momenta far from
equilibrium) neither blows the momenta up nor freezes them; `report()` counts how often that was needed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holonomic.constraints import Constraint
from holonomic.constraints.base import exact_factor
from holonomic.errors import SettingError
from holonomic.phase import Phase, Tally

SCOPES = ("group", "tensor")


@dataclass
class Thermostat:
    """Frictions (rows, *batch) in double precision, and which row each tensor of a phase obeys."""

    friction: Tensor
    rows: list[int]
    dof: Tensor
    coupling: float
    noise: float
    lr: float
    temperature: float
    tally: Tally

    def __post_init__(self) -> None:
        self.h = math.sqrt(self.lr)

    def damping(self, fraction: float) -> Tensor:
        """C: exp(-h xi), one per row."""
        return torch.exp(-fraction * self.h * self.friction)

    def kick(self, fraction: float) -> float:
        """D: the strength of the noise in v."""
        return self.noise * math.sqrt(fraction * self.h) / self.h

    def exact_kick(self, fraction: float) -> Tensor:
        """F: sigma_A sqrt((1 - exp(-2 h xi)) / (2 xi)) / h, one per row; also where xi is 0 or below."""
        x = 2 * fraction * self.h * self.friction
        share = torch.where(x.abs() < 1e-8, 1 - x / 2, -torch.expm1(-x) / x)
        return self.kick(fraction) * share.sqrt()

    def regulate_(self, energies: Sequence[Tensor], fraction: float) -> None:
        """E: xi <- xi + h coupling (lr |v|^2 - N tau)."""
        excess = -self.dof * self.temperature
        for row, energy in zip(self.rows, energies, strict=True):
            excess[row] += self.lr * energy.to(excess.device)
        if not self.lr:
            return
        change = excess.mul_(fraction * self.h * self.coupling)
        limit = 1 / self.h
        new = (self.friction + change.clamp(-limit, limit)).clamp_(min=-limit)
        self.tally.limited += int((new != self.friction + change).any())
        self.friction.copy_(new)

    def scale_(self, tensors: Sequence[Tensor], factors: Tensor) -> None:
        """Multiply every tensor by the factor of its row."""
        if factors.numel() == 1:
            if tensors:
                torch._foreach_mul_(list(tensors), exact_factor(factors.item(), list(tensors)))
            return
        for t, row in zip(tensors, self.rows, strict=False):
            factor = factors[row].to(t.device, t.dtype)
            t.mul_(factor.reshape(factor.shape + (1,) * (t.dim() - factor.dim())))


def friction_shape(group: dict[str, Any]) -> tuple[int, ...]:
    """One row per thermostat, and in it an entry for each of a stack of independent systems."""
    constraint: Constraint | None = group["constraint"]
    batch_dims = int(group["batch_dims"]) if constraint is None else constraint.batch_dims
    rows = 1 if group["thermostat"] == "group" else len(group["params"])
    return (rows, *group["params"][0].shape[:batch_dims])


def thermostat_for(
    group: dict[str, Any], constraint: Constraint, x: Phase, indices: list[int]
) -> Thermostat:
    """The thermostat of a group for some of its tensors; its friction is the group's own tensor,
    made on first use. Raises if the step is too long for it."""
    shape = friction_shape(group)
    friction, device = group["friction"], group["params"][0].device
    if not isinstance(friction, Tensor):
        friction = torch.full(shape, float(friction), dtype=torch.float64)
    friction = group["friction"] = friction.to(device, torch.float64)
    rows = [0 if group["thermostat"] == "group" else i for i in indices]
    systems = math.prod(shape[1:])
    dof = torch.zeros_like(friction)
    for row, q in zip(rows, x.q, strict=True):
        equations = 0 if constraint.grain == "group" else constraint.codimension([q])
        dof[row] += (q.numel() - equations) / systems
    if constraint.grain == "group":
        dof[0] -= constraint.codimension(x.q) / systems
    values = {key: float(group[key]) for key in ("coupling", "noise", "lr", "temperature")}
    _require_short_step(float(dof.max()), **values)
    return Thermostat(friction, rows, dof, **values, tally=x.tally)


def _require_short_step(
    dof: float, coupling: float, noise: float, lr: float, temperature: float
) -> None:
    angle = math.sqrt(2 * lr * coupling * dof * temperature)
    if angle > 1:
        raise SettingError(
            f"the thermostat cannot hold temperature={temperature:g} with coupling={coupling:g}, "
            f"lr={lr:g} and {dof:g} degrees of freedom: h sqrt(2 coupling N temperature) is "
            f"{angle:.3g} and must be at most 1; lower the coupling to {coupling / angle**2:.3g}, or lr "
            f"or the temperature by as much."
        )
