"""Any g(q) = 0 the user writes, over all tensors of a group; or c(q) <= 0 through slack variables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import jacrev, vmap

from holonomic.constraints.base import Constraint, check_options, require_finite, tolerance
from holonomic.errors import ConstraintError, SettingError
from holonomic.phase import Phase, wide

PROJECTIONS = ("orthogonal", "oblique")


@dataclass(frozen=True, eq=False)
class LevelSet(Constraint):
    """The set where ``fn(*tensors)`` is zero, or with ``inequality=True`` nowhere positive.

    ``fn`` takes the tensors of the group in their order and returns the values of the m equations
    (any shape; it is flattened). It must be differentiable by `torch.func` and independent where it
    is zero: its Jacobian J must have rank m. An inequality is fn(q) + xi^2 = 0 with a slack a value.

        B, O   v <- P(q) v,            P = I - J^T (J J^T)^-1 J
        A      RATTLE: q' = q - lr v - J(q)^T l with g(q') = 0, then v' = P(q') (v + J^T l / lr)
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

    joint: ClassVar[bool] = True
    batched: ClassVar[bool] = True

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
        if self.max_iterations < 1:
            raise SettingError(
                f"LevelSet: max_iterations is {self.max_iterations}; it must be at least 1."
            )

    def spec(self) -> dict[str, Any]:
        name = f"{getattr(self.fn, '__module__', '?')}.{getattr(self.fn, '__qualname__', '?')}"
        return {**super().spec(), "fn": name}

    @property
    def has_slack(self) -> bool:
        return self.inequality

    def check(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        for t, name in zip(q, names, strict=True):
            require_finite(self, t, name)
        batches = {tuple(t.shape[: self.batch_dims]) for t in q}
        if len(batches) > 1:
            raise ConstraintError(
                f"LevelSet on {_listed(names)}: the first batch_dims={self.batch_dims} dimensions "
                f"differ ({sorted(batches)}); tensors of one group must be stacked alike."
            )
        c = self._values(q)
        if not bool(torch.isfinite(c).all()):
            raise ConstraintError(f"LevelSet on {_listed(names)}: fn gives NaN or Inf there.")
        place = self._placed(q, names)  # also finds a Jacobian without full rank
        if self.init == "error":
            misfit = (c if self.inequality else c.abs()).max().item() if c.numel() else 0.0
            if misfit > tolerance(q[0].dtype):
                raise ConstraintError(
                    f"LevelSet on {_listed(names)}: fn is off by {misfit:.3g} and init='error'; "
                    f"use init='nearest' to have the weights placed, or place them yourself."
                )
        elif place is None:
            raise ConstraintError(
                f"LevelSet on {_listed(names)}: no point where fn fits was found near the weights "
                f"(largest |fn| {c.abs().max().item():.3g}); start closer, or raise max_iterations "
                f"from {self.max_iterations}."
            )

    def constraints(self, q: Sequence[Tensor]) -> int:
        return 0 if self.inequality else self._values(q).numel()

    # ------------------------------------------------------------------ one vector for the group
    def _join(self, tensors: Sequence[Tensor], slack: Sequence[Tensor] = ()) -> Tensor:
        """All tensors (and slack) as rows of one matrix, a row a batch entry."""
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

    def _system(self, like: Sequence[Tensor], slack: bool) -> "_System":
        d = sum(t[(0,) * self.batch_dims].numel() for t in like)

        def g(z: Tensor) -> Tensor:
            return self._c(z, like) + z[d:] ** 2 if slack else self._c(z, like)

        return _System(vmap(g), vmap(jacrev(g)), self.max_iterations)

    def _values(self, q: Sequence[Tensor]) -> Tensor:
        widened = [wide(t) for t in q]
        return vmap(lambda z: self._c(z, widened))(self._join(widened))

    # ------------------------------------------------------------------ placing
    def _placed(self, q: Sequence[Tensor], names: Sequence[str]) -> Tensor | None:
        """The nearest fitting point as rows, or None if the search fails."""
        z = self._join([t.double() for t in q])
        system = self._system(q, slack=False)
        c = system.g(z)
        if not self.inequality:
            system.require_rank(z, names)
            # Once, and perhaps from afar: patience costs little here.
            new, failed = replace(system, cap=20 * self.max_iterations).nearest(z)
            return None if bool(failed.any()) else new
        target = torch.where(c > 0, -c / 128, c)  # a little inside, where the slack is not 0
        for _ in range(self.max_iterations):
            c = system.g(z)
            wrong = c > target.clamp(min=-1e-12) + 1e-12
            if not bool(wrong.any()):
                return z
            J = system.J(z) * wrong.unsqueeze(-1)
            H = J @ J.mT + torch.diag_embed((~wrong).to(J.dtype))
            step, info = torch.linalg.solve_ex(H, torch.where(wrong, c - target, 0.0).unsqueeze(-1))
            if bool((info != 0).any()) or not bool(torch.isfinite(step).all()):
                return None
            z = z - (J.mT @ step).squeeze(-1)
        return None

    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        c = self._values(q)
        off = (c if self.inequality else c.abs()).max().item() if c.numel() else 0.0
        if self.init == "error" or off <= tolerance(q[0].dtype):
            return
        z = self._placed(q, names)
        assert z is not None, "check() comes first and has seen this"
        self._split(z, q)

    def slacks(self, q: Sequence[Tensor]) -> list[Tensor]:
        if not self.inequality:
            return []
        xi = (-self._values(q)).clamp(min=0).sqrt()
        return [xi.reshape(*q[0].shape[: self.batch_dims], -1).to(q[0].dtype)]

    # ------------------------------------------------------------------ moving
    def settle_(self, x: Phase) -> None:
        system = self._system(x.q, bool(x.xi))
        z, w = self._join(x.q, x.xi), self._join(x.v, x.eta)
        self._split(system.tangent(z, w, x.names), x.v, x.eta)

    def drift_(self, x: Phase, h: float) -> None:
        system = self._system(x.q, bool(x.xi))
        z, w = self._join(x.q, x.xi), self._join(x.v, x.eta)
        new, normal, failed = system.back(z - h * w, z)
        w = torch.where(failed, w, w + normal / h)
        x.fallbacks += int(failed.sum())
        self._split(new, x.q, x.xi)
        self._split(system.tangent(new, w, x.names), x.v, x.eta)

    def origin(self, x: Phase) -> list[Tensor]:
        return [self._join(x.q, x.xi)]

    def retract_(self, x: Phase, origin: list[Tensor]) -> None:
        system = self._system(x.q, bool(x.xi))
        z = self._join(x.q, x.xi)
        if self.projection == "oblique":
            new, _, failed = system.back(z, origin[0])
        else:
            new, failed = system.nearest(z)
            new = torch.where(failed, origin[0], new)
        x.fallbacks += int(failed.sum())
        self._split(new, x.q, x.xi)

    # ------------------------------------------------------------------ measuring
    def residual(self, x: Phase) -> float:
        g = self._system(x.q, bool(x.xi)).g(self._join(x.q, x.xi))
        return g.abs().max().item() if g.numel() else 0.0

    def cotangency(self, x: Phase) -> float:
        J = self._system(x.q, bool(x.xi)).J(self._join(x.q, x.xi))
        Jv = J @ self._join(x.v, x.eta).unsqueeze(-1)
        return Jv.abs().max().item() if Jv.numel() else 0.0


@dataclass(frozen=True)
class _System:
    """g, its Jacobian and Newton's method, batched over rows."""

    g: Callable[[Tensor], Tensor]
    J: Callable[[Tensor], Tensor]
    cap: int

    def back(self, b: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Newton on the multipliers of (4.41): new = b - J(z)^T l. Also J^T l, and who failed."""
        J0 = self.J(z)

        def along(multipliers: Tensor) -> Tensor:
            return (J0.mT @ multipliers.unsqueeze(-1)).squeeze(-1)

        def update(multipliers: Tensor) -> Tensor:
            y = b - along(multipliers)
            return multipliers + _solve(self.J(y) @ J0.mT, self.g(y))

        multipliers, failed = self._iterate(update, torch.zeros_like(J0[..., 0]), z, along)
        normal = along(multipliers)
        new = b - normal
        if bool(failed.any()):
            near, lost = self.nearest(b)
            new = torch.where(failed, torch.where(lost, z, near), new)
        return new, normal, failed

    def nearest(self, b: Tensor) -> tuple[Tensor, Tensor]:
        """The nearest point to b, (4.42): new = b - J(new)^T l. Also who failed."""

        def update(y: Tensor) -> Tensor:
            J = self.J(y)
            rhs = self.g(y) + (J @ (b - y).unsqueeze(-1)).squeeze(-1)
            return b - (J.mT @ _solve(J @ J.mT, rhs).unsqueeze(-1)).squeeze(-1)

        return self._iterate(update, b, b, lambda move: move, damped=True)

    def _iterate(
        self,
        update: Callable[[Tensor], Tensor],
        y: Tensor,
        size: Tensor,
        along: Callable[[Tensor], Tensor],
        damped: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Repeat until the weights of a row, of size ``size``, move no more than rounding moves them
        (``along`` turns a change of y into one of the weights); also which rows were far from that
        to the last.

        ``damped`` goes less far in a row whose moves grow: the search for the nearest point swings
        about it if it is farther away than the radius of curvature there."""
        eps = torch.finfo(y.dtype).eps
        scale = size.abs().amax(1, keepdim=True)
        pace = torch.ones_like(scale)
        done, swung = torch.zeros_like(scale, dtype=torch.bool), torch.zeros_like(scale).bool()
        last = torch.full_like(scale, torch.inf)
        for _ in range(self.cap):
            new = update(y)
            moved = along(new - y).abs().amax(1, keepdim=True)
            small = moved <= eps**0.5 * scale
            if damped:
                swung |= (moved > last) & ~small
                pace = torch.where(swung & (moved > last), pace / 2, (1.3 * pace).clamp(max=1))
                new = torch.where(pace < 1, y + pace * (new - y), new)
            y = torch.where(done, y, new)
            stalled = (moved >= last) & small & ~swung
            done |= (moved <= 4 * eps * scale) | stalled
            if bool((done | ~torch.isfinite(moved)).all()):
                break
            last = moved
        # The moves left are along the manifold: off it the error is their square.
        return y, ~(done | small)

    def tangent(self, z: Tensor, w: Tensor, names: Sequence[str]) -> Tensor:
        """w - J^T (J J^T)^-1 J w."""
        J = self.J(z)
        L = self._factor(J, names)
        step = torch.cholesky_solve(J @ w.unsqueeze(-1), L)
        return w - (J.mT @ step).squeeze(-1)

    def require_rank(self, z: Tensor, names: Sequence[str]) -> None:
        self._factor(self.J(z), names)

    @staticmethod
    def _factor(J: Tensor, names: Sequence[str]) -> Tensor:
        L, info = torch.linalg.cholesky_ex(J @ J.mT)
        pivots = L.diagonal(dim1=-2, dim2=-1)
        low, high = pivots.amin(-1), pivots.amax(-1)
        poor = (info != 0) | ~(low > torch.finfo(J.dtype).eps ** 0.5 * high)
        if bool(poor.any()):
            raise ConstraintError(
                f"LevelSet on {_listed(names)}: the Jacobian of fn, {J.shape[-2]} equations in "
                f"{J.shape[-1]} unknowns, loses rank here (pivots {low.min().item():.2g} to "
                f"{high.max().item():.2g}); equations must be independent: drop repeated ones (of a "
                f"symmetric matrix keep one triangle), and start away from points where fn is flat."
            )
        return L


def _solve(A: Tensor, rhs: Tensor) -> Tensor:
    """A^-1 rhs; 0 where rhs is 0, though A be singular: a point that fits need not move, and
    `tangent` says what is wrong with it."""
    step, _ = torch.linalg.solve_ex(A, rhs.unsqueeze(-1))
    return torch.where((rhs == 0).all(-1, keepdim=True), 0.0, step.squeeze(-1))


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:4]))
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
