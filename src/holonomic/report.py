"""What the optimizer knows of itself: on the manifold? at temperature? anything unusual?"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupReport:
    """One parameter group; ``residual`` and ``cotangency`` are the largest |g(q)| and |g'(q) v|."""

    name: str
    constraint: str
    scheme: str
    parameters: int
    dof: int
    residual: float
    cotangency: float
    temperature: float
    kinetic_temperature: float
    friction: float
    fallbacks: int
    skipped: int


@dataclass(frozen=True)
class Report:
    """All groups; printing it gives a table."""

    groups: list[GroupReport]

    def __str__(self) -> str:
        head = (
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
        )
        rows = [head] + [
            (
                g.name,
                g.constraint,
                g.scheme,
                f"{g.parameters:,}",
                f"{g.dof:,}",
                _number(g.residual, g.constraint != "-"),
                _number(
                    g.cotangency, g.constraint != "-" and not math.isnan(g.kinetic_temperature)
                ),
                f"{g.temperature:.3g}",
                _number(g.kinetic_temperature, not math.isnan(g.kinetic_temperature)),
                _number(g.friction, not math.isnan(g.friction)),
                str(g.fallbacks),
                str(g.skipped),
            )
            for g in self.groups
        ]
        widths = [max(len(r[i]) for r in rows) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(w) if i < 3 else cell.rjust(w)
                for i, (cell, w) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _number(value: float, applies: bool) -> str:
    return f"{value:.2e}" if applies else "-"
