"""|theta_i| <= r_i for every weight: the pair (theta, xi) lives on a circle of radius r (4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holonomic.constraints.base import Constraint, Grain, free_step_
from holonomic.constraints.checks import (
    MARGIN,
    Radius,
    check_options,
    check_radius,
    largest,
    opened,
    require_finite,
    require_on_manifold,
    tolerance,
)
from holonomic.errors import ConstraintError
from holonomic.phase import Phase, squares, wide


@dataclass(frozen=True, eq=False)
class Circle(Constraint):
    """Bound every weight by ``radius`` (a number, or a tensor that broadcasts to the weights).

    The momentum of a point on a circle is one number, its angular velocity. With ``v`` for the
    angular velocity in torch units (p_theta = v xi, p_xi = -v theta),

        A: rotate (theta, xi) by the angle lr v      B: v <- v + xi g / r^2
        O: v <- mu v + sqrt(tau (1 - mu^2) / lr) / r R

    which is the scheme of 4.7.2.4 with one momentum and one random number per weight, and no
    projection. EM takes the free step in theta and xi, then scales the pair to length r (4.47, but
    with the right quadrant).

    ``init="nearest"`` puts weights that lie outside on the bound, less a margin of r/256;
    ``"error"`` raises if there are any.
    """

    radius: Radius
    init: str = "nearest"
    batch_dims: int = 0

    def __post_init__(self) -> None:
        check_options(self)
        check_radius(self, self.radius)

    @property
    def grain(self) -> Grain:
        # A tensor of radii cannot be cut with the weights.
        return "tensor" if isinstance(self.radius, Tensor) else "entry"

    @property
    def lists(self) -> tuple[str, ...]:
        return ("v", "xi")

    def check(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        for t, name in zip(q, names, strict=True):
            if isinstance(self.radius, Tensor):
                shape = tuple(t.shape[self.batch_dims :])
                try:
                    fits = torch.broadcast_shapes(self.radius.shape, shape) == torch.Size(shape)
                except RuntimeError:
                    fits = False
                if not fits:
                    raise ConstraintError(
                        f"Circle on {name!r}: radius has shape {tuple(self.radius.shape)}, which does "
                        f"not broadcast to the weights' {shape}; give one number, or a tensor of that "
                        f"shape."
                    )
            require_finite(self, t, name)
            if self.init == "error":
                misfit = (t.abs() / self._r(t) - 1).max().item() if t.numel() else 0.0
                require_on_manifold(self, name, misfit, t.dtype)

    def _r(self, t: Tensor) -> float | Tensor:
        r = self.radius
        return r.to(t.device, t.dtype) if isinstance(r, Tensor) else float(r)

    def _rs(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [self._r(t) for t in tensors]

    # ------------------------------------------------------------------ placing
    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        if self.init == "error":
            return
        for t in q:
            t.copy_(_inside(wide(t), self._r(wide(t)), tolerance(t.dtype)))

    def slacks(self, q: Sequence[Tensor], open: bool = False) -> list[Tensor]:
        return [_slack(t, r, open) for t, r in zip(q, self._rs(q), strict=True)]

    def follow_(self, x: Phase, within: float) -> None:
        lengths = self._lengths2(x)
        for i, length2 in enumerate(lengths):
            r = self._r(length2)
            relative = length2 / r**2 if isinstance(r, Tensor) else length2
            scale = 1.0 if isinstance(r, Tensor) else r**2
            if not relative.numel():
                continue
            low, high = (t.item() for t in torch.aminmax(relative))
            if not (low >= (1 - within) * scale and high <= (1 + within) * scale):
                self._follow_one(x.single(i), relative, scale, within)

    def _follow_one(self, x: Phase, length2: Tensor, scale: float, within: float) -> None:
        """Where |(theta, xi)| is not r: xi <- +-sqrt(r^2 - theta^2), opened at the bound."""
        (q,), (xi,) = x.q, x.xi
        require_finite(self, q, x.names[0] if x.names else "a weight")
        r = self._r(q)
        off = ~((length2 - scale).abs() <= within * scale)
        kept = _inside(q, r, within)
        closed = _slack(kept, r)
        new = opened(closed, r)
        # An opened slack that has not moved yet is found as it was made: that is no change.
        moved = (kept != q) | ~((xi.abs() - new).abs() <= within**0.5 * r)
        x.tally.changed += int((off & moved).any())
        shrink = torch.where(new == closed, torch.ones_like(q), r / torch.hypot(kept, new))
        q.copy_(torch.where(off, kept * shrink, q))
        xi.copy_(torch.where(off, torch.copysign(new, xi) * shrink, xi))

    # ------------------------------------------------------------------ moving
    def kick_(self, x: Phase, g: Sequence[Tensor], c: float) -> None:
        if isinstance(self.radius, Tensor):
            for v, xi, gi in zip(x.v, x.xi, g, strict=True):
                v.addcmul_(xi / self._r(xi) ** 2, gi, value=c)
        else:
            torch._foreach_addcmul_(x.v, x.xi, list(g), value=c / self.radius**2)

    def thermalize_(
        self, x: Phase, mu: float, sigma: float, R: Sequence[Tensor], S: Sequence[Tensor]
    ) -> None:
        if isinstance(self.radius, Tensor):
            R = list(torch._foreach_div(list(R), self._rs(R))) if R else []
            super().thermalize_(x, mu, sigma, R, [])
        else:
            super().thermalize_(x, mu, sigma / self.radius, R, [])

    def drift_(self, x: Phase, h: float) -> None:
        cos = torch._foreach_mul(x.v, h)
        sin = torch._foreach_sin(cos)
        torch._foreach_cos_(cos)
        sin_theta = torch._foreach_mul(sin, x.q)
        torch._foreach_mul_(x.q, cos)
        torch._foreach_addcmul_(x.q, sin, x.xi, value=-1)
        torch._foreach_mul_(x.xi, cos)
        torch._foreach_add_(x.xi, sin_theta)
        # A rotation keeps the length. One Newton step for 1/sqrt stops rounding from piling up.
        scale = self._lengths2(x)
        if isinstance(self.radius, Tensor):
            torch._foreach_div_(scale, [-2 * r**2 for r in self._rs(scale)])
        else:
            torch._foreach_mul_(scale, -0.5 / self.radius**2)
        torch._foreach_add_(scale, 1.5)
        self._scale_(x, scale)

    def displace_(
        self,
        x: Phase,
        f: Sequence[Tensor],
        h: float,
        sigma: float,
        R: Sequence[Tensor],
        S: Sequence[Tensor],
    ) -> None:
        free_step_(x, f, h, sigma, R, S)
        lengths = self._lengths2(x)
        torch._foreach_clamp_min_(lengths, torch.finfo(torch.float32).tiny)
        self._scale_(x, [r / t.sqrt_() for t, r in zip(lengths, self._rs(lengths), strict=True)])

    @staticmethod
    def _lengths2(x: Phase) -> list[Tensor]:
        """theta^2 + xi^2."""
        lengths = list(torch._foreach_mul(x.q, x.q))
        torch._foreach_addcmul_(lengths, x.xi, x.xi)
        return lengths

    @staticmethod
    def _scale_(x: Phase, scale: list[Tensor]) -> None:
        torch._foreach_mul_(x.q, scale)
        torch._foreach_mul_(x.xi, scale)

    # ------------------------------------------------------------------ projecting, measuring
    def tangent_(self, x: Phase) -> None:
        for v, xi in zip(x.v, x.xi, strict=True):
            v.mul_(xi / self._r(v) ** 2)

    def residual(self, x: Phase) -> float:
        pairs = zip(self._lengths2(x), self._rs(x.q), strict=True)
        return largest([length2 - r**2 for length2, r in pairs])

    def energies(self, x: Phase, batch_dims: int) -> list[Tensor]:
        return [squares(v * self._r(v), batch_dims) for v in x.v]


def _inside(q: Tensor, r: float | Tensor, within: float) -> Tensor:
    """Weights beyond the bound put a margin inside it."""
    return torch.where(q.abs() > r * (1 + within), q.sign() * (r * (1 - MARGIN)), q)


def _slack(q: Tensor, r: float | Tensor, open: bool = False) -> Tensor:
    xi = ((r - q) * (r + q)).clamp_(min=0).sqrt_()
    return opened(xi, r) if open else xi
