"""Any g(q) = 0 the user writes, over all tensors of a group; or c(q) <= 0 through slack variables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from holonomic.constraints.base import Constraint, Grain, free_step_
from holonomic.constraints.checks import (
    check_iterations,
    check_options,
    require_finite,
    tolerance,
)
from holonomic.constraints.newton import System, listed
from holonomic.errors import ConstraintError, SettingError
from holonomic.phase import Phase, wide

PROJECTIONS = ("orthogonal", "oblique")


@dataclass(frozen=True, eq=False)
class LevelSet(Constraint):
    """The set where ``fn(*tensors)`` is zero, or with ``inequality=True`` nowhere positive.

    ``fn`` takes the tensors of the group in their order and returns the values of the m equations
    (any shape; it is flattened). It must be differentiable by `torch.func` and independent where it
    is zero: its Jacobian J must have rank m. An inequality is fn(q) + xi^2 = 0 with one slack per value.

        A      RATTLE: q' = q - lr v - J(q)^T l with g(q') = 0, and v' = v + J(q)^T l / lr, for
               the tangent part v of the momentum (P = I - J^T (J J^T)^-1 J)
        EM     q' = b - J(q')^T l, the nearest point to the free step b (4.42, "orthogonal"),
               or q' = b - J(q)^T l, along the old normal (4.41, "oblique")

    A step costs a few Jacobians (m backward passes each) and solves of m x m systems: right for few
    equations, or for trying a constraint before writing its closed form. A step too large to be
    projected goes to the nearest point instead, or, failing that, stays; both count in `report()`.

    ``init="nearest"`` moves the tensors to the nearest point where fn fits.
    """

    fn: Callable[..., Tensor]
    inequality: bool = False
    projection: str = "orthogonal"
    max_iterations: int = 100
    init: str = "nearest"
    batch_dims: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        if not callable(self.fn):
            raise SettingError(
                f"LevelSet: fn is {self.fn!r}; it must be a function of the tensors."
            )
        if self.projection not in PROJECTIONS:
            raise SettingError(
                f"LevelSet: projection is {self.projection!r}; it must be one of {PROJECTIONS}."
            )
        check_iterations(self, self.max_iterations)

    def spec(self) -> dict[str, Any]:
        name = f"{getattr(self.fn, '__module__', '?')}.{getattr(self.fn, '__qualname__', '?')}"
        return {**super().spec(), "fn": name}

    @property
    def grain(self) -> Grain:
        return "group"

    @property
    def lists(self) -> tuple[str, ...]:
        return ("v", "xi", "eta") if self.inequality else ("v",)

    def check(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        for t, name in zip(q, names, strict=True):
            require_finite(self, t, name)
        batches = {tuple(t.shape[: self.batch_dims]) for t in q}
        if len(batches) > 1:
            raise ConstraintError(
                f"LevelSet on {listed(names)}: the first batch_dims={self.batch_dims} dimensions "
                f"differ ({sorted(batches)}); tensors of one group must be stacked alike."
            )
        c = self._values(q)
        if not bool(torch.isfinite(c).all()):
            raise ConstraintError(f"LevelSet on {listed(names)}: fn gives NaN or Inf there.")
        if self.init == "error":
            if (misfit := self._misfit(q)) > tolerance(q[0].dtype):
                raise ConstraintError(
                    f"LevelSet on {listed(names)}: fn is off by {misfit:.3g} and init='error'; "
                    f"use init='nearest' to have the weights placed, or place them yourself."
                )
            self._placed(q, names)  # finds a Jacobian without full rank
        else:
            self._put_([t.clone() for t in q], names)

    def codimension(self, q: Sequence[Tensor]) -> int:
        return 0 if self.inequality else self._values(q).numel()

    # ------------------------------------------------------------------ one vector for the group
    def _join(self, tensors: Sequence[Tensor], slack: Sequence[Tensor] = ()) -> Tensor:
        """All tensors (and slack) as rows of one matrix, one row per batch entry."""
        rows = tensors[0].shape[: self.batch_dims].numel()
        return torch.cat([t.reshape(rows, -1) for t in (*tensors, *slack)], dim=1)

    def _split(self, z: Tensor, like: Sequence[Tensor], slack: Sequence[Tensor] = ()) -> None:
        """Write the rows back into the tensors they came from."""
        rows = like[0].shape[: self.batch_dims].numel()
        sizes = [t.numel() // rows for t in (*like, *slack)]
        for t, part in zip((*like, *slack), z.split(sizes, dim=1), strict=True):
            t.copy_(part.reshape(t.shape))

    def _c(self, z: Tensor, like: Sequence[Tensor]) -> Tensor:
        """fn at one row of weights."""
        shapes = [t.shape[self.batch_dims :] for t in like]
        parts = z[: sum(s.numel() for s in shapes)].split([s.numel() for s in shapes])
        return self.fn(*(p.reshape(s) for p, s in zip(parts, shapes, strict=True))).reshape(-1)

    def _system(self, like: Sequence[Tensor], slack: bool) -> System:
        d = sum(t[(0,) * self.batch_dims].numel() for t in like)

        def g(z: Tensor) -> Tensor:
            return self._c(z, like) + z[d:] ** 2 if slack else self._c(z, like)

        def twice(z: Tensor) -> tuple[Tensor, Tensor]:
            value = g(z)
            return value, value

        return System(vmap(g), vmap(jacrev(twice, has_aux=True)), self.max_iterations)

    def _values(self, q: Sequence[Tensor]) -> Tensor:
        widened = [wide(t) for t in q]
        return vmap(lambda z: self._c(z, widened))(self._join(widened))

    # ------------------------------------------------------------------ placing
    def _placed(self, q: Sequence[Tensor], names: Sequence[str]) -> Tensor | None:
        """The nearest fitting point as rows, or None if the search fails."""
        z = self._join([t.double() for t in q])
        system = self._system(q, slack=False)
        if not self.inequality:
            system.require_rank(z, names)
            # Once, and perhaps from afar: patience costs little here.
            new, failed = system.nearest(z, patience=20)
            return None if bool(failed.any()) else new
        c = system.g(z)
        target = torch.where(c > 0, -c / 128, c)  # a little inside, where the slack is not 0
        for _ in range(self.max_iterations):
            J, c = system.at(z)
            wrong = c > target.clamp(min=-1e-12) + 1e-12
            if not bool(wrong.any()):
                return z
            J = J * wrong.unsqueeze(-1)
            H = J @ J.mT + torch.diag_embed((~wrong).to(J.dtype))
            step, info = torch.linalg.solve_ex(H, torch.where(wrong, c - target, 0.0).unsqueeze(-1))
            if bool((info != 0).any()) or not bool(torch.isfinite(step).all()):
                return None
            z = z - (J.mT @ step).squeeze(-1)
        return None

    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        if self.init != "error" and self._misfit(q) > tolerance(q[0].dtype):
            self._put_(q, names)

    def _put_(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        z = self._placed(q, names)
        if z is None:
            raise ConstraintError(
                f"LevelSet on {listed(names)}: no point where fn fits was found near the weights "
                f"(fn is off by {self._misfit(q):.3g}); start closer, or raise max_iterations from "
                f"{self.max_iterations}."
            )
        self._split(z, q)

    def _misfit(self, q: Sequence[Tensor]) -> float:
        c = self._values(q)
        return (c if self.inequality else c.abs()).max().item() if c.numel() else 0.0

    def slacks(self, q: Sequence[Tensor], open: bool = False) -> list[Tensor]:
        if not self.inequality:
            return []
        xi = (-self._values(q)).clamp(min=0).sqrt()
        return [xi.reshape(*q[0].shape[: self.batch_dims], -1).to(q[0].dtype)]

    def follow_(self, x: Phase, within: float) -> None:
        if self._system(x.q, bool(x.xi)).fits(self._join(x.q, x.xi), within):
            return
        for q, name in zip(x.q, x.names, strict=True):
            require_finite(self, q, name)
        if not self.inequality or self._misfit(x.q) > within:
            self._put_(x.q, x.names)
        for xi, new in zip(x.xi, self.slacks(x.q), strict=True):
            xi.copy_(torch.copysign(new, xi))
        x.tally.changed += 1

    # ------------------------------------------------------------------ moving
    def drift_(self, x: Phase, h: float) -> None:
        system = self._system(x.q, bool(x.xi))
        z, w = self._join(x.q, x.xi), self._join(x.v, x.eta)
        J, _ = system.at(z)
        w = system.tangent(J, w, x.names)
        new, normal, failed = system.back(z - h * w, z, J, x.names)
        x.tally.fallbacks += int(failed.sum())
        self._split(new, x.q, x.xi)
        self._split(torch.where(failed, w, w + normal / h), x.v, x.eta)

    def displace_(
        self,
        x: Phase,
        f: Sequence[Tensor],
        h: float,
        sigma: float,
        R: Sequence[Tensor],
        S: Sequence[Tensor],
    ) -> None:
        system = self._system(x.q, bool(x.xi))
        origin = self._join(x.q, x.xi)
        free_step_(x, f, h, sigma, R, S)
        z = self._join(x.q, x.xi)
        if self.projection == "oblique":
            new, _, failed = system.back(z, origin, system.at(origin)[0], x.names)
        else:
            new, failed = system.nearest(z)
            new = torch.where(failed, origin, new)
        x.tally.fallbacks += int(failed.sum())
        self._split(new, x.q, x.xi)

    # ------------------------------------------------------------------ projecting, measuring
    def project_(self, x: Phase) -> None:
        system = self._system(x.q, bool(x.xi))
        J, _ = system.at(self._join(x.q, x.xi))
        self._split(system.tangent(J, self._join(x.v, x.eta), x.names), x.v, x.eta)

    def residual(self, x: Phase) -> float:
        g = self._system(x.q, bool(x.xi)).g(self._join(x.q, x.xi))
        return g.abs().max().item() if g.numel() else 0.0

    def cotangency(self, x: Phase) -> float:
        J, _ = self._system(x.q, bool(x.xi)).at(self._join(x.q, x.xi))
        Jv = J @ self._join(x.v, x.eta).unsqueeze(-1)
        return Jv.abs().max().item() if Jv.numel() else 0.0
