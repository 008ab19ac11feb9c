"""Row-wise ||w_i|| <= r_i (one slack per row) or ||w_i|| = r_i (no slack): points on spheres (4.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    number or a vector with one entry per row. Geodesics are great circles, in closed form: with
    s = |v| over the row and its slack, a = lr s / r,

        A: q <- cos(a) q - lr sinc(a) v,   v <- cos(a) v + lr (s/r)^2 sinc(a) q

    for the tangent part v of the momentum, which B and O leave with a radial part. EM scales the row
    back to its length. ``slack=False`` is explicit weight normalization.

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
                f"with one entry per row."
            )

    @property
    def grain(self) -> Grain:
        rows_first = self.batch_dims > 0 or self.dim == 0
        return "row" if rows_first and not isinstance(self.radius, Tensor) else "tensor"

    @property
    def lists(self) -> tuple[str, ...]:
        return ("v", "xi", "eta") if self.slack else ("v",)

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
            if not relative.numel():
                continue
            if self.init == "error":
                off = relative - 1
                misfit = (off if self.slack else off.abs()).max().item()
                require_on_manifold(self, name, misfit, t.dtype)
            elif not self.slack:
                self._require_direction(norms, name)

    def _require_direction(self, norms: Tensor, name: str) -> None:
        zero = (norms == 0).flatten().nonzero()
        if len(zero):
            raise ConstraintError(
                f"Sphere(slack=False) on {name!r}: row {int(zero[0])} is zero and has no direction to "
                f"be scaled in; give it other values first, or use slack=True, which allows zero."
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

    def codimension(self, q: Sequence[Tensor]) -> int:
        if self.slack:
            return 0  # as many slacks as equations
        return sum(t.shape[: self.batch_dims].numel() * self._rows(t) for t in q)

    # ------------------------------------------------------------------ placing
    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        if self.init != "error":
            for t in q:
                work = wide(t)
                t.copy_(self._nearest(work, self._norm(work), tolerance(t.dtype)))

    def _nearest(self, q: Tensor, norms: Tensor, within: float) -> Tensor:
        r = self._r(norms)
        if self.slack:
            scale = torch.where(norms > r * (1 + within), r * (1 - MARGIN) / norms, 1.0)
        else:
            scale = r / norms
            scale = torch.where((scale - 1).abs() <= within, 1.0, scale)
        return torch.where(scale == 1, q, q * scale)

    def slacks(self, q: Sequence[Tensor], open: bool = False) -> list[Tensor]:
        return [self._slack(self._norm(t), open) for t in q] if self.slack else []

    def _slack(self, norms: Tensor, open: bool = False) -> Tensor:
        r = self._r(norms)
        xi = ((r - norms) * (r + norms)).clamp_(min=0).sqrt_()
        return opened(xi, r) if open else xi

    def follow_(self, x: Phase, within: float) -> None:
        for i, length2 in enumerate(self._lengths2(x)):
            r2 = self._r(length2) ** 2
            fits = (length2 - r2).abs() <= within * r2
            if not bool(fits.all()):
                self._follow_one(x.single(i), ~fits, within)

    def _follow_one(self, x: Phase, off: Tensor, within: float) -> None:
        """Rows whose length, with their slack, is not r."""
        q, name = x.q[0], x.names[0] if x.names else "a weight"
        require_finite(self, q, name)
        norms = self._norm(q)
        if not self.slack:
            self._require_direction(norms, name)
            q.copy_(torch.where(off, self._nearest(q, norms, within), q))
            x.tally.changed += 1
            return
        xi, r = x.xi[0], self._r(norms)
        kept = self._nearest(q, norms, within)
        norms = self._norm(kept)
        closed = self._slack(norms)
        new = opened(closed, r)
        # An opened slack that has not moved yet is found as it was made: that is no change.
        moved = (norms < self._norm(q)) | ~((xi.abs() - new).abs() <= within**0.5 * r)
        x.tally.changed += int((off & moved).any())
        shrink = torch.where(new == closed, torch.ones_like(norms), r / torch.hypot(norms, new))
        q.copy_(torch.where(off, kept * shrink, q))
        xi.copy_(torch.where(off, torch.copysign(new, xi) * shrink, xi))

    # ------------------------------------------------------------------ moving
    def drift_(self, x: Phase, h: float) -> None:
        """The formula above with v = w - a q, the tangent part of the momentum w that is given."""
        for i, (q, w) in enumerate(zip(x.q, x.v, strict=True)):
            speed2, a = self._norm(w).square_(), self._sum(q * w)
            if x.xi:
                xi, eta = x.xi[i], x.eta[i]
                speed2.addcmul_(eta, eta)
                a.addcmul_(xi, eta)
            r2 = self._r(a) ** 2
            a /= r2
            speed2 = (speed2 - a.square() * r2).clamp_(min=0)
            angle = h * (speed2 / r2).sqrt_()
            cos, turn = angle.cos(), h * torch.sinc(angle / torch.pi)
            from_q, to_w = cos + turn * a, turn * speed2 / r2 - cos * a
            for position, momentum in ((q, w), (x.xi[i], x.eta[i])) if x.xi else ((q, w),):
                old = position * to_w
                position.mul_(from_q).addcmul_(momentum, turn, value=-1)
                momentum.mul_(cos).add_(old)
        self._scale_(x)

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
        self._scale_(x)

    def _scale_(self, x: Phase) -> None:
        """Scale every row, with its slack, to length r."""
        for i, length2 in enumerate(self._lengths2(x)):
            scale = length2.clamp_(min=torch.finfo(torch.float32).tiny).rsqrt_() * self._r(length2)
            x.q[i].mul_(scale)
            if x.xi:
                x.xi[i].mul_(scale)

    def _lengths2(self, x: Phase) -> list[Tensor]:
        """|q|^2 + xi^2 of every row."""
        lengths = [self._norm(q).square_() for q in x.q]
        for length2, xi in zip(lengths, x.xi, strict=False):  # without slack there is no xi
            length2.addcmul_(xi, xi)
        return lengths

    # ------------------------------------------------------------------ projecting, measuring
    def project_(self, x: Phase) -> None:
        for i, (q, v) in enumerate(zip(x.q, x.v, strict=True)):
            radial = self._sum(q * v)
            if x.xi:
                radial += x.xi[i] * x.eta[i]
            radial /= self._r(radial) ** 2
            v.addcmul_(q, radial, value=-1)
            if x.xi:
                x.eta[i].addcmul_(x.xi[i], radial, value=-1)

    def residual(self, x: Phase) -> float:
        return largest([g - self._r(g) ** 2 for g in self._products(x.q, x.q, x.xi, x.xi)])

    def cotangency(self, x: Phase) -> float:
        return largest([2 * g for g in self._products(x.q, x.v, x.xi, x.eta)])

    def _products(
        self, a: list[Tensor], b: list[Tensor], xa: list[Tensor], xb: list[Tensor]
    ) -> list[Tensor]:
        sums = [self._sum(s * t) for s, t in zip(a, b, strict=True)]
        return [s + p * q for s, p, q in zip(sums, xa, xb, strict=True)] if xa else sums
