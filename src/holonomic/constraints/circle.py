"""|theta_i| <= r_i for every weight: the pair (theta, xi) lives on a circle of radius r (4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from holonomic.constraints.base import (
    MARGIN,
    Constraint,
    Kernel,
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

    which is the scheme of 4.7.2.4 with one momentum and one random number a weight, and no
    projection. EM takes the free step in theta and xi, then scales the pair to length r (4.47, but
    with the right quadrant).

    ``init="nearest"`` puts weights that lie outside on the bound, less a margin of r/256;
    ``"error"`` raises if there are any.
    """

    radius: Radius
    init: str = "nearest"
    batch_dims: int = 0

    slack_momentum = False

    def __post_init__(self) -> None:
        check_options(self)
        check_radius(self, self.radius)

    @property
    def has_slack(self) -> bool:
        return True

    @property
    def separable(self) -> bool:
        return not isinstance(self.radius, Tensor)

    @property
    def kernel(self) -> Kernel | None:
        if isinstance(self.radius, Tensor) or type(self) is not Circle:
            return None
        return Kernel(self.radius, angular=True)

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
                        f"{type(self).__name__} on {name!r}: radius has shape "
                        f"{tuple(self.radius.shape)}, which does not broadcast to the weights' {shape}; "
                        f"give one number, or a tensor of that shape."
                    )
            require_finite(self, t, name)
            if self.init == "error":
                misfit = (t.abs() / self._r(t) - 1).max().item() if t.numel() else 0.0
                require_on_manifold(self, name, misfit, t.dtype)

    def constraints(self, q: Sequence[Tensor]) -> int:
        return 0  # one equation and one slack a weight

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
            work = wide(t)
            r = self._r(work)
            beyond = work.abs() > r * (1 + tolerance(t.dtype))
            t.copy_(torch.where(beyond, work.sign() * (r * (1 - MARGIN)), work))

    def slacks(self, q: Sequence[Tensor]) -> list[Tensor]:
        rs = self._rs(q)
        return [((r - t) * (r + t)).clamp_(min=0).sqrt_() for t, r in zip(q, rs, strict=True)]

    def unstick_(self, xi: Sequence[Tensor]) -> None:
        for t in xi:
            t.copy_(opened(t, self._r(t)))

    # ------------------------------------------------------------------ moving
    def kick_(self, x: Phase, g: Sequence[Tensor], c: float) -> None:
        if isinstance(self.radius, Tensor):
            for v, xi, gi in zip(x.v, x.xi, g, strict=True):
                v.addcmul_(xi / self._r(xi) ** 2, gi, value=c)
        else:
            torch._foreach_addcmul_(x.v, x.xi, list(g), value=c / self.radius**2)

    def thermalize_(
        self, x: Phase, mu: float, sigma: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        torch._foreach_mul_(x.v, mu)
        if not R:
            return
        if isinstance(self.radius, Tensor):
            torch._foreach_div_(R, self._rs(R))
            torch._foreach_add_(x.v, R, alpha=sigma)
        else:
            torch._foreach_add_(x.v, R, alpha=sigma / self.radius)

    def drift_(self, x: Phase, h: float) -> None:
        cos = torch._foreach_mul(x.v, h)
        sin = torch._foreach_sin(cos)
        torch._foreach_cos_(cos)
        sin_theta = torch._foreach_mul(sin, x.q)
        torch._foreach_mul_(x.q, cos)
        torch._foreach_addcmul_(x.q, sin, x.xi, value=-1)
        torch._foreach_mul_(x.xi, cos)
        torch._foreach_add_(x.xi, sin_theta)
        self.retract_(x, [])  # a rotation keeps the length; this stops rounding from piling up

    def retract_(self, x: Phase, origin: list[Tensor]) -> None:
        """(theta, xi) <- r (theta, xi) / |(theta, xi)|."""
        scale = torch._foreach_mul(x.q, x.q)
        torch._foreach_addcmul_(scale, x.xi, x.xi)
        torch._foreach_clamp_min_(scale, torch.finfo(torch.float32).tiny)
        torch._foreach_sqrt_(scale)
        if isinstance(self.radius, Tensor):
            torch._foreach_div_(scale, self._rs(scale))
        else:
            torch._foreach_mul_(scale, 1 / self.radius)
        torch._foreach_div_(x.q, scale)
        torch._foreach_div_(x.xi, scale)

    # ------------------------------------------------------------------ measuring
    def adopt_(self, x: Phase) -> None:
        for v, xi in zip(x.v, x.xi, strict=True):
            v.mul_(xi / self._r(v) ** 2)

    def residual(self, x: Phase) -> float:
        return largest([q * q + xi * xi - self._r(q) ** 2 for q, xi in zip(x.q, x.xi, strict=True)])

    def energies(self, x: Phase, batch_dims: int) -> list[Tensor]:
        return [squares(v * self._r(v), batch_dims) for v in x.v]
