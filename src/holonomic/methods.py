"""The literature's names, each a few settings of `Langevin`.

Units are torch's: ``lr`` is h**2 and ``momentum`` exp(-gamma h), so that the papers' settings enter as
``**hm.from_paper(h=..., gamma=...)``; the overdamped methods (``od``, SGLD) take h itself as ``lr``.
Temperatures, couplings and noise strengths are the papers' numbers. Other settings go to `Langevin`.

Methods that constrain take a radius (or globs) for the weights; partitioned methods take a ``split`` that
says which part of the model is the output: see `output_part`. For a model stands a module, or `Replicas` of
one (give ``generator=replicas.noise()``, too).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from holonomic.constraints import Circle, Constraint, Orthogonal, Sphere
from holonomic.constraints.checks import Radius
from holonomic.errors import SettingError
from holonomic.groups import groups, matches
from holonomic.langevin import Langevin
from holonomic.replicas import Replicas

Model = nn.Module | Replicas
Where = str | Sequence[str]
Radii = Radius | Mapping[str, Radius]
Split = None | int | str | type[nn.Module] | Sequence[str]

WEIGHTS = "*weight"


# ---------------------------------------------------------------------- one dynamics for all weights
def sgld(params: Iterable[Any], lr: float, temperature: float, **settings: Any) -> Langevin:
    """Stochastic gradient Langevin dynamics: q <- q - lr g + sqrt(2 temperature lr) R."""
    return Langevin(params, lr=lr, temperature=temperature, scheme="EM", **settings)


def langevin(
    params: Iterable[Any], lr: float, momentum: float, temperature: float, **settings: Any
) -> Langevin:
    """Underdamped Langevin dynamics, by BAOAB (3.20) unless another scheme is given."""
    return Langevin(
        params, lr, momentum, temperature=temperature, **{"scheme": "BAOAB", **settings}
    )


def adaptive_langevin(
    params: Iterable[Any],
    lr: float,
    temperature: float,
    coupling: float,
    noise: float,
    **settings: Any,
) -> Langevin:
    """Adaptive Langevin dynamics (3.21): a friction that holds the temperature against gradient noise."""
    own = {"scheme": "BACDEDCAB", "coupling": coupling, "noise": noise, **settings}
    return Langevin(params, lr, temperature=temperature, **own)


# ---------------------------------------------------------------------- constraints (chapter 4)
def c_cola_od(model: Model, radius: Radii, lr: float, **settings: Any) -> Langevin:
    """Overdamped Langevin with |weight| <= radius (4.47)."""
    return Langevin(_rules(model, radius, Circle), lr=lr, scheme="EM", **settings)


def c_cola_ud(
    model: Model, radius: Radii, lr: float, momentum: float = 0.9, **settings: Any
) -> Langevin:
    """Underdamped Langevin with |weight| <= radius (4.7.2.4)."""
    return Langevin(_rules(model, radius, Circle), lr=lr, momentum=momentum, **settings)


def s_cola_od(model: Model, radius: Radii, lr: float, **settings: Any) -> Langevin:
    """Overdamped Langevin with rows of norm <= radius (4.3)."""
    return Langevin(_rules(model, radius, Sphere), lr=lr, scheme="EM", **settings)


def s_cola_ud(
    model: Model, radius: Radii, lr: float, momentum: float = 0.9, **settings: Any
) -> Langevin:
    """Underdamped Langevin with rows of norm <= radius (4.3)."""
    return Langevin(_rules(model, radius, Sphere), lr=lr, momentum=momentum, **settings)


def o_cola_od(model: Model, lr: float, where: Where = WEIGHTS, **settings: Any) -> Langevin:
    """Overdamped Langevin with orthogonal weight matrices (Algorithm 4.1)."""
    return Langevin(_orthogonal(model, where), lr=lr, scheme="EM", **settings)


def o_cola_ud(
    model: Model, lr: float, momentum: float = 0.9, where: Where = WEIGHTS, **settings: Any
) -> Langevin:
    """Underdamped Langevin with orthogonal weight matrices (Algorithm 4.2)."""
    return Langevin(_orthogonal(model, where), lr=lr, momentum=momentum, **settings)


def _rules(model: Model, radius: Radii, constraint: Any) -> list[dict[str, Any]]:
    radii = radius if isinstance(radius, Mapping) else {WEIGHTS: radius}
    return _groups(model, {glob: constraint(r) for glob, r in radii.items()})


def _orthogonal(model: Model, where: Where) -> list[dict[str, Any]]:
    globs = [where] if isinstance(where, str) else where
    rules: dict[Any, Constraint] = {glob: Orthogonal() for glob in globs}
    return _groups(model, rules)


def _groups(model: Model, rules: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Groups of a module, or of the stacked parameters of its replicas."""
    return model.groups(rules) if isinstance(model, Replicas) else groups(model, rules)


# ---------------------------------------------------------------------- partitions (chapter 3)
def langevin_in_layers(
    model: Model, layers: Mapping[Any, Mapping[str, Any]], lr: float, **settings: Any
) -> Langevin:
    """A friction and temperature for every part (3.25): ``layers`` maps a rule of `holonomic.groups`
    to ``{"momentum": ..., "temperature": ...}``. By BAOAB unless another scheme is given."""
    return Langevin(_groups(model, layers), lr=lr, **{"scheme": "BAOAB", **settings})


def lol(
    model: Model,
    lr: float,
    momentum: float,
    temperature: float,
    *,
    output_temperature: float = 0.0,
    split: Split = None,
    constraints: Mapping[Any, Constraint] | None = None,
    **settings: Any,
) -> Langevin:
    """Langevin-overdamped Langevin (3.26): Langevin in the hidden part, infinite friction in the
    output."""
    hidden = {"momentum": momentum, "temperature": temperature}
    output = {"momentum": 0.0, "temperature": output_temperature}
    parts = _partition(model, split, constraints, hidden, output)
    return Langevin(parts, lr=lr, **{"scheme": "BAOAB", **settings})


def dhsgd(
    model: Model,
    lr: float,
    *,
    split: Split = None,
    constraints: Mapping[Any, Constraint] | None = None,
    **settings: Any,
) -> Langevin:
    """Dissipated Hamiltonian SGD (3.27)-(3.30): Verlet in the hidden part, steps of lr/2 down the
    gradient in the output. No noise, one parameter."""
    parts = _partition(model, split, constraints, {"momentum": 1.0}, {"momentum": 0.0})
    return Langevin(parts, lr=lr, **{"scheme": "BAOAB", **settings})


def dhsgdc(
    model: Model,
    lr: float,
    *,
    split: Split = None,
    constraints: Mapping[Any, Constraint] | None = None,
    **settings: Any,
) -> Langevin:
    """The contractive variant of `dhsgd`: the output steps h = sqrt(lr) down the gradient. (A
    learning-rate scheduler scales the lr of both parts alike, so the relation holds at the start.)"""
    output = {"scheme": "EM", "lr": math.sqrt(lr)}
    hidden = {"momentum": 1.0, "scheme": "BAOAB"}
    return Langevin(_partition(model, split, constraints, hidden, output), lr=lr, **settings)


def adlala(
    model: Model,
    lr: float,
    momentum: float,
    temperature: float,
    coupling: float,
    noise: float,
    *,
    output_temperature: float | None = None,
    split: Split = None,
    constraints: Mapping[Any, Constraint] | None = None,
    **settings: Any,
) -> Langevin:
    """Adaptive Langevin in the hidden part, Langevin in the output (3.31). ``momentum`` is the
    output's; ``output_temperature`` is ``temperature`` unless given."""
    hidden = {
        "scheme": "BACDEDCAB",
        "coupling": coupling,
        "noise": noise,
        "temperature": temperature,
    }
    output = {
        "scheme": "BAOAB",
        "momentum": momentum,
        "temperature": temperature if output_temperature is None else output_temperature,
    }
    return Langevin(_partition(model, split, constraints, hidden, output), lr=lr, **settings)


def output_part(model: Model, split: Split = None) -> list[str]:
    """The names of the parameters that form the output part of a model.

    None: those of the last layer (module) that has parameters; an integer k: of the last k; a glob,
    several globs or a module type: those that match.

    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> output_part(model)
    ['2.weight', '2.bias']
    """
    model = model.template if isinstance(model, Replicas) else model
    aliases: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    known = {name: aliases[id(p)] for name, p in model.named_parameters() if p.requires_grad}
    named = list(known)
    if split is None or isinstance(split, int):
        trained = [n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
        layers = list(dict.fromkeys(name.rpartition(".")[0] for name in trained))
        count = 1 if split is None else split
        last = layers[-count:] if count > 0 else []
        output = [n for n in named if any(a.rpartition(".")[0] in last for a in known[n])]
    else:
        rules = [split] if isinstance(split, str | type) else list(split)
        modules = dict(model.named_modules(remove_duplicate=False))
        output = [n for n in named if any(matches(r, a, modules) for r in rules for a in known[n])]
    for part, what in ((output, "output"), (set(named) - set(output), "hidden")):
        if not part:
            raise SettingError(
                f"split={split!r} leaves the {what} part empty; the model's parameters are "
                f"{', '.join(map(repr, named[:8]))}{' and more' if len(named) > 8 else ''}."
            )
    return output


def _partition(
    model: Model,
    split: Split,
    constraints: Mapping[Any, Constraint] | None,
    hidden: dict[str, Any],
    output: dict[str, Any],
) -> list[dict[str, Any]]:
    """Groups by part and, within it, by constraint."""
    last = set(output_part(model, split))
    parts = []
    for group in _groups(model, constraints or {}):
        for name, own in (("hidden", hidden), ("output", output)):
            members = [(n, p) for n, p in group["params"] if (n in last) == (name == "output")]
            if members:
                label = name if group["name"] == "rest" else f"{name}: {group['name']}"
                parts.append({**group, **own, "params": members, "name": label})
    return parts
