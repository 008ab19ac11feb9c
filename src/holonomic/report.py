"""What the optimizer knows of itself: on the manifold? at temperature? anything unusual?"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from holonomic import distributed
from holonomic.constraints import Constraint
from holonomic.distributed import local
from holonomic.phase import Phase, wide
from holonomic.physics import kinetic_temperature
from holonomic.plan import FREE
from holonomic.scheme import parse
from holonomic.state import State, entries, gather, missing


@dataclass(frozen=True)
class GroupReport:
    """One parameter group.

    ``residual`` is the largest |g(q)| and ``cotangency`` the largest |g'(q) v| of the projected momenta,
    as a step uses them; ``stored_cotangency`` that of the momenta as they are in ``state``, which may carry
    a part normal to the manifold. ``changed`` counts the steps that found weights changed by somebody
    else (of distributed tensors, on the process that found most), ``fallbacks`` the steps of a solver that
    were too large for it, ``skipped`` the steps left out for NaN, ``limited`` the steps at which an
    adaptive friction had to be limited."""

    name: str
    constraint: str
    scheme: str
    parameters: int
    dof: int
    residual: float
    cotangency: float
    stored_cotangency: float
    temperature: float
    kinetic_temperature: float
    friction: float
    fallbacks: int
    skipped: int
    changed: int
    limited: int


@dataclass(frozen=True)
class Report:
    """All groups; printing it gives a table."""

    groups: list[GroupReport]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: None where a number does not apply or is not finite."""
        return {
            "groups": [
                {key: _plain(value) for key, value in asdict(group).items()}
                for group in self.groups
            ]
        }

    def __str__(self) -> str:
        rows = [_HEAD, *(_row(g) for g in self.groups)]
        widths = [max(len(r[i]) for r in rows) for i in range(len(_HEAD))]
        lines = [
            "  ".join(
                cell.ljust(w) if i < 3 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


_HEAD = (
    "group",
    "constraint",
    "scheme",
    "parameters",
    "dof",
    "max |g|",
    "max |g'v|",
    "temperature",
    "kinetic",
    "friction",
    "fallbacks",
    "skipped",
    "changed",
)


def _row(g: GroupReport) -> tuple[str, ...]:
    constrained, moving = g.constraint != "-", not math.isnan(g.kinetic_temperature)
    return (
        g.name,
        g.constraint,
        g.scheme,
        f"{g.parameters:,}",
        f"{g.dof:,}",
        _number(g.residual, constrained),
        _number(g.cotangency, constrained and moving),
        f"{g.temperature:.3g}",
        _number(g.kinetic_temperature, moving),
        _number(g.friction, not math.isnan(g.friction)),
        str(g.fallbacks),
        str(g.skipped),
        str(g.changed),
    )


def _number(value: float, applies: bool) -> str:
    return f"{value:.2e}" if applies else "-"


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------- building
def report_group(i: int, group: dict[str, Any], names: Sequence[str], state: State) -> GroupReport:
    """Measure one group."""
    constraint: Constraint = group["constraint"] or FREE
    scheme = parse(group["scheme"])
    params = group["params"]
    known = entries(params, state)
    new = set(missing(known, constraint, scheme))
    residual = cotangency = stored = 0.0
    kinetic = math.nan
    if new:
        q = [wide(local(params[k].detach())) for k in sorted(new)]
        residual = constraint.residual(Phase(q, xi=constraint.slacks(q)))
    moved = [k for k in range(len(params)) if k not in new]
    held = [params[k] for k in moved]
    if held:
        chosen, entered = [names[k] for k in moved], [known[k] for k in moved]
        x = gather(held, entered, chosen, constraint, scheme).map(wide)
        residual = _worse(residual, constraint.residual(x))
        if not scheme.overdamped:
            stored = constraint.cotangency(x)
            x.v, x.eta = ([t.clone() for t in ts] for ts in (x.v, x.eta))
            constraint.project_(x)  # what the next step would do first
            cotangency = constraint.cotangency(x)
            energy = distributed.summed(constraint.energies(x, 0), held)
            kinetic = kinetic_temperature(group, energy, _dof(held, constraint))
    own = [residual, cotangency, stored, float(group["changed"])]
    residual, cotangency, stored, changed = distributed.largest(own, params)
    friction = torch.as_tensor(group["friction"], dtype=torch.float64)
    return GroupReport(
        name=str(group.get("name", i)),
        constraint="-" if constraint is FREE else type(constraint).__name__,
        scheme=scheme.letters,
        parameters=sum(p.numel() for p in params),
        dof=_dof(params, constraint),
        residual=residual,
        cotangency=cotangency,
        stored_cotangency=stored,
        temperature=float(group["temperature"]),
        kinetic_temperature=kinetic,
        friction=friction.mean().item() if scheme.adaptive else math.nan,
        fallbacks=group["fallbacks"],
        skipped=group["skipped"],
        changed=int(changed),
        limited=group["limited"],
    )


def _worse(a: float, b: float) -> float:
    """The larger of two errors; NaN is the largest."""
    return a if math.isnan(a) or a > b else b


def _dof(params: list[Tensor], constraint: Constraint) -> int:
    """Degrees of freedom: parameters less constraints."""
    q = [p.detach() for p in params]
    return sum(t.numel() for t in q) - constraint.codimension(q)
