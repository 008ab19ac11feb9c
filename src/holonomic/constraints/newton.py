"""Newton's method for g(z) = 0 in many small systems at once: what `LevelSet` solves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holonomic.errors import ConstraintError

#: In units of the rounding error of g: where an iteration ends, and what counts as a solution.
ENOUGH, ACCEPTED = 2, 64
#: Iterations without progress after which a system is given up.
PATIENCE = 8


@dataclass(frozen=True)
class System:
    """g at rows of unknowns, and ``at``: its Jacobian and value together."""

    g: Callable[[Tensor], Tensor]
    at: Callable[[Tensor], tuple[Tensor, Tensor]]
    cap: int

    def back(
        self, b: Tensor, z: Tensor, J0: Tensor, names: Sequence[str]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Newton on the multipliers of (4.41): new = b - J(z)^T l. Also J^T l, and who failed: those
        are at the nearest point to b, or failing that at z. Raises if g loses rank at the new point."""
        normal, J = torch.zeros_like(b), J0
        over = torch.full_like(b[:, :1], torch.inf)  # |g| in units of its rounding error
        watch = _Watch(over)
        for _ in range(self.cap):
            J, g = self.at(b - normal)
            over = _excess(J, g, b - normal)
            if watch.ends(over):
                break
            step = _solve(J @ J0.mT, g).unsqueeze(-1)
            normal = torch.where(watch.going, normal + (J0.mT @ step).squeeze(-1), normal)
        new, failed = b - normal, ~(over <= ACCEPTED)
        _factor(torch.where(failed.unsqueeze(-1), J0, J), names)
        if bool(failed.any()):
            near, lost = self.nearest(b)
            new = torch.where(failed, torch.where(lost, z, near), new)
        return new, normal, failed

    def nearest(self, b: Tensor, patience: int = 1) -> tuple[Tensor, Tensor]:
        """The nearest point to b, (4.42): new = b - J(new)^T l. Also who failed.

        The iteration goes less far in a row whose moves grow: it swings about the nearest point if that
        is farther away than the radius of curvature there. Whatever it ends with is put on the manifold."""
        eps = torch.finfo(b.dtype).eps
        y, pace = b, torch.ones_like(b[:, :1])
        done, swung = torch.zeros_like(pace, dtype=torch.bool), torch.zeros_like(pace).bool()
        last = best = torch.full_like(pace, torch.inf)
        idle = torch.zeros_like(pace)
        for _ in range(patience * self.cap):
            J, g = self.at(y)
            rhs = g + (J @ (b - y).unsqueeze(-1)).squeeze(-1)
            new = b - (J.mT @ _solve(J @ J.mT, rhs).unsqueeze(-1)).squeeze(-1)
            moved = (new - y).abs().amax(1, keepdim=True)
            scale = y.abs().amax(1, keepdim=True)
            small = moved <= eps**0.5 * scale
            swung |= (moved > last) & ~small
            pace = torch.where(swung & (moved > last), pace / 2, (1.3 * pace).clamp(max=1))
            y = torch.where(done, y, torch.where(pace < 1, y + pace * (new - y), new))
            done |= (moved <= 4 * eps * scale) | ((moved >= last) & small & ~swung)
            idle = torch.where(moved < 0.9 * best, 0.0, idle + 1)
            hopeless = ~torch.isfinite(moved) | (idle > patience * 2 * PATIENCE)
            if bool((done | hopeless).all()):
                break
            last, best = moved, torch.minimum(best, moved)
        return self._landed(y)

    def _landed(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """The point of the manifold that Newton's method reaches from y by the shortest steps."""
        over = torch.full_like(y[:, :1], torch.inf)
        watch = _Watch(over)
        for _ in range(self.cap):
            J, g = self.at(y)
            over = _excess(J, g, y)
            if watch.ends(over):
                break
            step = _solve(J @ J.mT, g).unsqueeze(-1)
            y = torch.where(watch.going, y - (J.mT @ step).squeeze(-1), y)
        return y, ~(over <= ACCEPTED)

    def fits(self, z: Tensor, within: float) -> bool:
        """Whether g(z) = 0 to a relative ``within``. The Jacobian, which gives g its scale, is found
        only if that is not plain to see."""
        g = self.g(z).abs()
        if bool((g <= within / ACCEPTED).all()):
            return True
        J, g = self.at(z)
        return bool((_excess(J, g, z) <= within / torch.finfo(z.dtype).eps).all())

    def tangent(self, J: Tensor, w: Tensor, names: Sequence[str]) -> Tensor:
        """w - J^T (J J^T)^-1 J w."""
        step = torch.cholesky_solve(J @ w.unsqueeze(-1), _factor(J, names))
        return w - (J.mT @ step).squeeze(-1)

    def require_rank(self, z: Tensor, names: Sequence[str]) -> None:
        _factor(self.at(z)[0], names)


class _Watch:
    """Which systems of an iteration go on: not those that are solved, lost, or make no progress."""

    def __init__(self, like: Tensor) -> None:
        self.going = torch.ones_like(like, dtype=torch.bool)
        self._last = self._best = torch.full_like(like, torch.inf)
        self._idle = torch.zeros_like(like)

    def ends(self, over: Tensor) -> bool:
        """Take in how far every system is from its solution; say whether all have ended."""
        self._idle = torch.where(over < 0.5 * self._best, 0.0, self._idle + 1)
        stalled = (over <= ACCEPTED) & (over >= 0.5 * self._last)
        self.going &= ~((over <= ENOUGH) | stalled | (self._idle > PATIENCE))
        self.going &= torch.isfinite(over)
        self._last, self._best = over, torch.minimum(self._best, over)
        return not bool(self.going.any())


def _excess(J: Tensor, g: Tensor, y: Tensor) -> Tensor:
    """The largest |g| of every row, in units of the rounding error of J y."""
    unit = torch.finfo(y.dtype).eps * (J.abs() @ y.abs().unsqueeze(-1)).squeeze(-1)
    relative = g.abs() / unit.clamp(min=torch.finfo(y.dtype).tiny)
    relative = torch.where(g == 0, 0.0, relative)
    return torch.cat([relative, torch.zeros_like(y[:, :1])], dim=1).amax(1, keepdim=True)


def _solve(A: Tensor, rhs: Tensor) -> Tensor:
    """A^-1 rhs; 0 where rhs is 0, though A be singular: a point that fits need not move, and
    `tangent` says what is wrong with it."""
    step, _ = torch.linalg.solve_ex(A, rhs.unsqueeze(-1))
    return torch.where((rhs == 0).all(-1, keepdim=True), 0.0, step.squeeze(-1))


def _factor(J: Tensor, names: Sequence[str]) -> Tensor:
    L, info = torch.linalg.cholesky_ex(J @ J.mT)
    pivots = L.diagonal(dim1=-2, dim2=-1)
    low, high = pivots.amin(-1), pivots.amax(-1)
    poor = (info != 0) | ~(low > torch.finfo(J.dtype).eps ** 0.5 * high)
    if bool(poor.any()):
        raise ConstraintError(
            f"LevelSet on {listed(names)}: the Jacobian of fn, {J.shape[-2]} equations in "
            f"{J.shape[-1]} unknowns, loses rank here (pivots {low.min().item():.2g} to "
            f"{high.max().item():.2g}); equations must be independent: drop repeated ones (of a "
            f"symmetric matrix keep one triangle), and start away from points where fn is flat."
        )
    return L


def listed(names: Sequence[str]) -> str:
    """Some names for a message."""
    shown = ", ".join(map(repr, names[:4]))
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
