"""The circles of `Circle`, with the angle of every weight in the place of its slack."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from holonomic.constraints.base import MARGIN, largest
from holonomic.constraints.circle import Circle
from holonomic.errors import ConstraintError
from holonomic.phase import Phase


@dataclass(frozen=True, eq=False)
class AngularCircle(Circle):
    """Bound every weight by ``radius`` as `Circle` does, faster where there are no compiled kernels.

    The state is psi, with theta = r sin psi and xi = r cos psi, so that a rotation is a sum:

        A: psi <- psi - lr v, theta <- r sin psi      B: v <- v + cos(psi) g / r

    By torch alone a step of OBA on a million weights takes less than half the time that `Circle` takes,
    with noise two thirds. EM and LM take longer, without noise two to three times as long. Small weights
    have small angles, and all their digits. Weights need 32 bits or 64.

    The weights follow from their angles. Weights that were changed between two steps are noticed, and
    their angles renewed, if autograd counts the change (``load_state_dict``, ``copy_`` and the like under
    ``torch.no_grad()``), or if ``p.data`` is set. What autograd does not see (writing into ``p.data`` or
    its numpy array in place, ``torch.distributed`` calls, a fused optimizer of torch's) is lost in the next
    step, unless you say so: ``torch.autograd.graph.increment_version(p)``.
    """

    slack_name: ClassVar[str] = "angle"
    block: ClassVar[int] = 1 << 20  # so few calls that the cache matters less than their number
    leaps: ClassVar[bool] = True
    writes: ClassVar[bool] = True

    def check(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        for t, name in zip(q, names, strict=True):
            if t.dtype.itemsize < 4:
                raise ConstraintError(
                    f"AngularCircle on {name!r}: the weights are {t.dtype}, and angles of 16 bits have too "
                    f"few digits; use Circle, or keep the weights in float32."
                )
        super().check(q, names)

    # ------------------------------------------------------------------ placing
    def slacks(self, q: Sequence[Tensor]) -> list[Tensor]:
        return [(t / self._r(t)).clamp_(-1, 1).asin_() for t in q]

    def unstick_(self, xi: Sequence[Tensor]) -> None:
        # The angle that `Circle` gets when it widens the slack, and leaves the weight as it is.
        start = math.atan2(1.0, (2 * MARGIN) ** 0.5)
        for psi in xi:
            closed = psi.cos() <= (2 * torch.finfo(psi.dtype).eps) ** 0.5
            psi.copy_(torch.where(closed, psi.sign() * start, psi))

    def follow_(self, x: Phase) -> None:
        """Renew the angles of weights that are not where theirs say, on the side they were."""
        for theta, psi in zip(x.q, x.xi, strict=True):
            # A sine of torch's may differ in its last digit with an entry's place in the tensor.
            off = (theta - self._r(theta) * psi.sin()).abs()
            moved = ~(off <= 4 * torch.finfo(theta.dtype).eps * theta.abs())
            if bool(moved.any()):
                (near,) = self.slacks([theta])
                self.unstick_([near])
                far = torch.copysign(torch.full_like(near, math.pi), near) - near
                psi.copy_(torch.where(moved, torch.where(psi.cos() < 0, far, near), psi))

    def renew_(self, x: Phase) -> None:
        """Take whole turns off, so that angles keep their digits however far they go."""
        for psi in x.xi:
            if psi.numel() and not max(-psi.amin().item(), psi.amax().item()) <= math.pi:
                exact = psi if psi.device.type == "mps" else psi.double()
                psi.copy_(exact - 2 * math.pi * (exact / (2 * math.pi)).round())

    # ------------------------------------------------------------------ moving
    def kick_(self, x: Phase, g: Sequence[Tensor], c: float) -> None:
        cos = torch._foreach_cos(x.xi)
        if isinstance(self.radius, Tensor):
            torch._foreach_div_(cos, self._rs(cos))
            torch._foreach_addcmul_(x.v, cos, list(g), value=c)
        else:
            torch._foreach_addcmul_(x.v, cos, list(g), value=c / self.radius)

    def drift_(self, x: Phase, h: float) -> None:
        torch._foreach_add_(x.xi, x.v, alpha=-h)
        self._write_(x)

    def leap_(self, x: Phase, g: Sequence[Tensor], old: float, new: float, h: float) -> None:
        """Seen from the angles, kick and drift are a step of SGD, for which torch has a kernel."""
        torques = torch._foreach_cos(x.xi)
        torch._foreach_mul_(torques, list(g))
        strength = new / float(self.radius)
        for part, members in _parts(x, old, strength):
            psi, v, torque = ([ts[i] for i in members] for ts in (x.xi, x.v, torques))
            if part is None:
                torch._foreach_mul_(v, old)
                torch._foreach_add_(v, torque, alpha=strength)
                torch._foreach_add_(psi, v, alpha=-h)
            else:
                torch._fused_sgd_(
                    psi,
                    torque,
                    v,
                    weight_decay=0.0,
                    momentum=old,
                    lr=h,
                    dampening=1 - strength,
                    nesterov=False,
                    maximize=False,
                    is_first_step=False,
                )
        self._write_(x)

    def displace_(
        self,
        x: Phase,
        g: Sequence[Tensor],
        h: float,
        sigma: float,
        R: list[Tensor],
        S: list[Tensor],
    ) -> None:
        free = Phase(x.q, xi=[self._r(psi) * psi.cos() for psi in x.xi])
        super().displace_(free, g, h, sigma, R, S)
        for psi, q, xi in zip(x.xi, free.q, free.xi, strict=True):
            torch.atan2(q, xi, out=psi)
        self._write_(x)

    def _write_(self, x: Phase) -> None:
        """theta <- r sin psi."""
        if x.q[0].device.type == "cpu":
            for q, psi in zip(x.q, x.xi, strict=True):
                torch.sin(psi, out=q)
        else:
            torch._foreach_copy_(x.q, torch._foreach_sin(x.xi))
        if isinstance(self.radius, Tensor):
            torch._foreach_mul_(x.q, self._rs(x.q))
        elif self.radius != 1:
            torch._foreach_mul_(x.q, self.radius)

    # ------------------------------------------------------------------ measuring
    def adopt_(self, x: Phase) -> None:
        for v, psi in zip(x.v, x.xi, strict=True):
            v.mul_(psi.cos() / self._r(v))

    def residual(self, x: Phase) -> float:
        """How far weights are from where their angles say, in the units of theta^2 + xi^2 - r^2."""
        pairs = zip(x.q, x.xi, strict=True)
        return largest([2 * self._r(q) * (q - self._r(q) * psi.sin()) for q, psi in pairs])


Part = tuple[torch.dtype, torch.device]


def _parts(x: Phase, old: float, strength: float) -> Iterable[tuple[Part | None, list[int]]]:
    """The tensors by type and device, and without (None) those that torch's kernel of SGD is not for: it
    reads memory as it lies, it has no momentum of 0, and it is told 1 - strength."""
    parts: dict[Part | None, list[int]] = {}
    for i, (psi, v) in enumerate(zip(x.xi, x.v, strict=True)):
        told = abs(1 - (1 - strength) - strength) <= torch.finfo(v.dtype).eps / 8 * strength
        plain = all(type(t) is Tensor and t.is_contiguous() for t in (psi, v))
        suits = old and told and plain and v.device.type in ("cpu", "cuda")
        parts.setdefault((v.dtype, v.device) if suits else None, []).append(i)
    return parts.items()
