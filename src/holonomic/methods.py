"""The literature's names, each a few settings of `Langevin`.

``od`` methods are overdamped (Euler-Maruyama, no momentum; ``lr`` is the papers' h), ``ud`` methods
underdamped (``lr`` is h**2: use `holonomic.from_paper`). All weights are constrained (biases and norms
are not), or those that ``where`` names by globs, or the globs of a dictionary of radii. Other settings
go to `Langevin`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from holonomic.constraints import Circle, Constraint, Orthogonal, Sphere
from holonomic.constraints.base import Radius
from holonomic.groups import groups
from holonomic.langevin import Langevin

Where = str | Sequence[str]
Radii = Radius | Mapping[str, Radius]

WEIGHTS = "*weight"


def sgld(params: Iterable[Any], lr: float, temperature: float, **settings: Any) -> Langevin:
    """Stochastic gradient Langevin dynamics: q <- q - lr g + sqrt(2 temperature lr) R."""
    return Langevin(params, lr=lr, temperature=temperature, scheme="EM", **settings)


def c_cola_od(model: nn.Module, radius: Radii, lr: float, **settings: Any) -> Langevin:
    """Overdamped Langevin with |weight| <= radius (4.47)."""
    return Langevin(_rules(model, radius, Circle), lr=lr, scheme="EM", **settings)


def c_cola_ud(
    model: nn.Module, radius: Radii, lr: float, momentum: float = 0.9, **settings: Any
) -> Langevin:
    """Underdamped Langevin with |weight| <= radius (4.7.2.4)."""
    return Langevin(_rules(model, radius, Circle), lr=lr, momentum=momentum, **settings)


def s_cola_od(model: nn.Module, radius: Radii, lr: float, **settings: Any) -> Langevin:
    """Overdamped Langevin with rows of norm <= radius (4.3)."""
    return Langevin(_rules(model, radius, Sphere), lr=lr, scheme="EM", **settings)


def s_cola_ud(
    model: nn.Module, radius: Radii, lr: float, momentum: float = 0.9, **settings: Any
) -> Langevin:
    """Underdamped Langevin with rows of norm <= radius (4.3)."""
    return Langevin(_rules(model, radius, Sphere), lr=lr, momentum=momentum, **settings)


def o_cola_od(model: nn.Module, lr: float, where: Where = WEIGHTS, **settings: Any) -> Langevin:
    """Overdamped Langevin with orthogonal weight matrices (Algorithm 4.1)."""
    return Langevin(_orthogonal(model, where), lr=lr, scheme="EM", **settings)


def o_cola_ud(
    model: nn.Module, lr: float, momentum: float = 0.9, where: Where = WEIGHTS, **settings: Any
) -> Langevin:
    """Underdamped Langevin with orthogonal weight matrices (Algorithm 4.2)."""
    return Langevin(_orthogonal(model, where), lr=lr, momentum=momentum, **settings)


def _rules(model: nn.Module, radius: Radii, constraint: Any) -> list[dict[str, Any]]:
    radii = radius if isinstance(radius, Mapping) else {WEIGHTS: radius}
    return groups(model, {glob: constraint(r) for glob, r in radii.items()})


def _orthogonal(model: nn.Module, where: Where) -> list[dict[str, Any]]:
    globs = [where] if isinstance(where, str) else where
    rules: dict[Any, Constraint] = {glob: Orthogonal() for glob in globs}
    return groups(model, rules)
