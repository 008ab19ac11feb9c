"""Row-wise ||w_i|| <= r_i (a slack a row) or ||w_i|| = r_i (no slack): points on spheres (4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holonomic.constraints.base import (
    MARGIN,
    Constraint,
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
        return sum(t.shape[: self.batch_dims].numel() * self._rows(t) for t in q)

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
        for i, (q, v) in enumerate(zip(x.q, x.v, strict=True)):
            speed2 = self._sum(v * v)
            if x.xi:
                speed2 += x.eta[i] ** 2
            r = self._r(speed2)
            angle = speed2.sqrt() * (h / r)
            cos, sinc = angle.cos(), torch.sinc(angle / torch.pi)
            turn_q, turn_v = h * sinc, speed2 * sinc * (h / r**2)
            self._turn(q, v, cos, turn_q, turn_v)
            if x.xi:
                self._turn(x.xi[i], x.eta[i], cos, turn_q, turn_v)
        self.retract_(x, [])
        self.settle_(x)

    @staticmethod
    def _turn(q: Tensor, v: Tensor, cos: Tensor, turn_q: Tensor, turn_v: Tensor) -> None:
        """(q, v) <- (cos q - turn_q v, cos v + turn_v q), in place."""
        old = q * turn_v
        q.mul_(cos).addcmul_(v, turn_q, value=-1)
        v.mul_(cos).add_(old)

    def retract_(self, x: Phase, origin: list[Tensor]) -> None:
        """Scale every row, with its slack, to length r."""
        for i, q in enumerate(x.q):
            length2 = self._sum(q * q)
            if x.xi:
                length2 += x.xi[i] ** 2
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
