"""Row-wise ||w_i|| <= r_i (a slack a row) or ||w_i|| = r_i (no slack): points on spheres (4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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
    require_dims,
    require_finite,
    require_on_manifold,
    tolerance,
)
from holonomic.errors import ConstraintError, SettingError
from holonomic.phase import Phase, wide


@dataclass(frozen=True, eq=False)
class Sphere(Constraint):
    """Bound (``slack=True``) or fix (``slack=False``) the Euclidean norm of every row by ``radius``.

    A row is what one index of ``dim`` selects: with the default 0, all weights into one output of a
    linear or convolutional layer. ``dim=None`` takes the whole tensor as one vector. ``radius`` is a
    number or a vector with one entry a row. Geodesics are great circles, in closed form: with
    s = |v| over the row and its slack, a = lr s / r,

        A: q <- cos(a) q - lr sinc(a) v,   v <- cos(a) v + lr (s/r)^2 sinc(a) q

    B and O add to v and then take off its radial part; EM scales the row back to its length.
    ``slack=False`` is explicit weight normalization.

    ``init="nearest"`` scales rows to the radius (with slack: only rows beyond it, and to r/256
    less); ``"error"`` raises if a row does not fit.
    """

    radius: Radius = 1.0
    slack: bool = True
    dim: int | None = 0
    init: str = "nearest"
    batch_dims: int = 0

    drift_settles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self)
        check_radius(self, self.radius)
        if isinstance(self.radius, Tensor) and self.radius.dim() > 1:
            raise SettingError(
                f"Sphere: radius has shape {tuple(self.radius.shape)}; give one number, or a vector "
                f"with one entry a row."
            )

    @property
    def has_slack(self) -> bool:
        return self.slack

    @property
    def separable(self) -> bool:
        rows_first = self.batch_dims > 0 or self.dim == 0
        return rows_first and not isinstance(self.radius, Tensor)

    @property
    def kernel(self) -> Kernel | None:
        if isinstance(self.radius, Tensor) or self.dim not in (0, None) or type(self) is not Sphere:
            return None
        return Kernel(self.radius, rows=lambda t: self._systems(t) * self._rows(t))

    def _systems(self, t: Tensor) -> int:
        return t.shape[: self.batch_dims].numel()

    def check(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        for t, name in zip(q, names, strict=True):
            least = 1 if self.dim is None else 2
            require_dims(
                self, t, name, least, "use Sphere(dim=None) for one vector, or Circle for entries"
            )
            n = t.dim() - self.batch_dims
            if self.dim is not None and not -n <= self.dim < n:
                raise ConstraintError(
                    f"Sphere on {name!r}: dim is {self.dim}, and the weights of shape "
                    f"{tuple(t.shape)} have {n} dimensions; choose one of 0 to {n - 1}."
                )
            rows = self._rows(t)
            if isinstance(self.radius, Tensor) and self.radius.numel() not in (1, rows):
                raise ConstraintError(
                    f"Sphere on {name!r}: radius has {self.radius.numel()} entries and the weights "
                    f"of shape {tuple(t.shape)} have {rows} rows along dim={self.dim}; give one "
                    f"number, or a vector of {rows}."
                )
            require_finite(self, t, name)
            norms = self._norm(wide(t))
            relative = norms / self._r(norms)
            if self.init == "error":
                off = relative - 1
                misfit = (off if self.slack else off.abs()).max().item()
                require_on_manifold(self, name, misfit, t.dtype)
            elif not self.slack and bool((relative == 0).any()):
                raise ConstraintError(
                    f"Sphere(slack=False) on {name!r}: a row is zero and has no direction to be "
                    f"scaled in; initialize the weights first."
                )

    def _dims(self, t: Tensor) -> tuple[int, ...]:
        """The dimensions that one row runs over."""
        own = range(self.batch_dims, t.dim())
        keep = None if self.dim is None else self.batch_dims + self._dim(t)
        return tuple(d for d in own if d != keep)

    def _dim(self, t: Tensor) -> int:
        assert self.dim is not None
        return self.dim % (t.dim() - self.batch_dims)

    def _rows(self, t: Tensor) -> int:
        return 1 if self.dim is None else t.shape[self.batch_dims + self._dim(t)]

    def _r(self, rows: Tensor) -> float | Tensor:
        """The radius, shaped to go with a tensor of rows (reduced dimensions kept as 1)."""
        r = self.radius
        if not isinstance(r, Tensor):
            return float(r)
        r = r.to(rows.device, rows.dtype)
        if self.dim is None or r.numel() == 1:
            return r.reshape(())
        shape = [1] * rows.dim()
        shape[self.batch_dims + self._dim(rows)] = -1
        return r.reshape(shape)

    def _sum(self, t: Tensor) -> Tensor:
        return t.sum(self._dims(t), keepdim=True)

    def _norm(self, t: Tensor) -> Tensor:
        return torch.linalg.vector_norm(t, dim=self._dims(t), keepdim=True)

    def constraints(self, q: Sequence[Tensor]) -> int:
        if self.slack:
            return 0  # as many slacks as equations
        return sum(self._systems(t) * self._rows(t) for t in q)

    # ------------------------------------------------------------------ placing
    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        if self.init == "error":
            return
        for t in q:
            work = wide(t)
            norms = self._norm(work)
            if self.slack:
                r = self._r(norms)
                beyond = norms > r * (1 + tolerance(t.dtype))
                scale = torch.where(beyond, r * (1 - MARGIN) / norms, 1.0)
            else:
                scale = self._r(norms) / norms
                scale = torch.where((scale - 1).abs() <= tolerance(t.dtype), 1.0, scale)
            t.copy_(torch.where(scale == 1, work, work * scale))

    def slacks(self, q: Sequence[Tensor]) -> list[Tensor]:
        if not self.slack:
            return []
        return [
            ((self._r(n) - n) * (self._r(n) + n)).clamp_(min=0).sqrt_()
            for n in (self._norm(t) for t in q)
        ]

    def unstick_(self, xi: Sequence[Tensor]) -> None:
        for t in xi:
            t.copy_(opened(t, self._r(t)))

    # ------------------------------------------------------------------ moving

    def settle_(self, x: Phase) -> None:
        for i, (q, v) in enumerate(zip(x.q, x.v, strict=True)):
            radial = self._sum(q * v)
            if x.xi:
                radial += x.xi[i] * x.eta[i]
            radial /= self._r(radial) ** 2
            v.addcmul_(q, radial, value=-1)
            if x.xi:
                x.eta[i].addcmul_(x.xi[i], radial, value=-1)

    def drift_(self, x: Phase, h: float) -> None:
        """The formula above with v = w - a q, the tangent part of the momentum w that is given, on the
        sphere through q: its length is r to rounding, to which it is scaled back at the end."""
        for i, (q, w) in enumerate(zip(x.q, x.v, strict=True)):
            length2, speed2 = self._norm(q).square_(), self._norm(w).square_()
            a = self._sum(q * w)
            if x.xi:
                xi, eta = x.xi[i], x.eta[i]
                length2.addcmul_(xi, xi)
                speed2.addcmul_(eta, eta)
                a.addcmul_(xi, eta)
            a /= length2
            speed2 = (speed2 - a.square() * length2).clamp_(min=0)
            angle = h * (speed2 / length2).sqrt_()
            cos, turn = angle.cos(), h * torch.sinc(angle / torch.pi)
            from_q, to_w = cos + turn * a, turn * speed2 / length2 - cos * a
            for position, momentum in ((q, w), (x.xi[i], x.eta[i])) if x.xi else ((q, w),):
                old = position * to_w
                position.mul_(from_q).addcmul_(momentum, turn, value=-1)
                momentum.mul_(cos).add_(old)
        self.retract_(x, [])

    def retract_(self, x: Phase, origin: list[Tensor]) -> None:
        """Scale every row, with its slack, to length r."""
        for i, q in enumerate(x.q):
            length2 = self._norm(q).square_()
            if x.xi:
                length2.addcmul_(x.xi[i], x.xi[i])
            scale = length2.clamp_(min=torch.finfo(torch.float32).tiny).rsqrt_() * self._r(length2)
            q.mul_(scale)
            if x.xi:
                x.xi[i].mul_(scale)

    # ------------------------------------------------------------------ measuring
    def residual(self, x: Phase) -> float:
        return largest([g - self._r(g) ** 2 for g in self._products(x.q, x.q, x.xi, x.xi)])

    def cotangency(self, x: Phase) -> float:
        return largest([2 * g for g in self._products(x.q, x.v, x.xi, x.eta)])

    def _products(
        self, a: list[Tensor], b: list[Tensor], xa: list[Tensor], xb: list[Tensor]
    ) -> list[Tensor]:
        sums = [self._sum(s * t) for s, t in zip(a, b, strict=True)]
        return [s + p * q for s, p, q in zip(sums, xa, xb, strict=True)] if xa else sums
