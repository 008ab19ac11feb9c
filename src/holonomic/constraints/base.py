"""What a constraint is: a manifold {q : g(q) = 0} and how to place, move and measure on it.

A constraint never knows which scheme moves it. It gets a `Phase` (lists of tensors) and works in
place. The default methods are those of flat space; a new constraint overrides what is curved:

    check        is this shape possible?               place_     put weights on the manifold
    slacks       the slack variables at q              constraints  how many equations
    settle_      project momenta on the tangent space  residual   max |g(q)|
    drift_       A: move along a geodesic              cotangency max |g'(q) v|
    retract_     back to the manifold after a free step
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from holonomic.errors import ConstraintError, SettingError
from holonomic.native.orthogonal import NO_KICK, Kick
from holonomic.phase import Phase, squares

#: Weights beyond the bound of an inequality are placed this fraction inside it: at the bound itself
#: the slack is 0, its force too, and without noise such a weight would never move again.
MARGIN = 1 / 256

Radius = float | Tensor


@dataclass(frozen=True)
class Kernel:
    """A manifold as the compiled kernels know it: flat space (radius 0), circles (momenta are angular),
    or spheres (``rows`` counts those of a tensor)."""

    radius: float
    angular: bool = False
    rows: Callable[[Tensor], int] | None = None


class Constraint:
    """Flat space, and the interface of every manifold."""

    #: One equation over all tensors of a group at once (then a group's slack is one vector).
    joint: ClassVar[bool] = False
    #: The constraint gathers tensors of equal shape itself; never split it tensor by tensor.
    batched: ClassVar[bool] = False
    #: Whether `drift_` projects the momenta it is given on the tangent space itself.
    drift_settles: ClassVar[bool] = False
    #: Whether it leaves the projection that ends a drift to the next one, if the phase is ``lazy``.
    lazy: ClassVar[bool] = False
    #: Weights a thread takes through a whole word together on a CPU, if the manifold is separable: few
    #: enough for its cache, enough to make a call of torch worth its while.
    block: ClassVar[int] = 1 << 17
    #: Whether there is a `leap_`. It is taken if the manifold is separable, and without a thermostat.
    leaps: ClassVar[bool] = False
    #: Whether a step writes the weights from their slack variables without reading them; then weights that
    #: were changed in between are given to `follow_` first.
    writes: ClassVar[bool] = False
    #: What slack variables are called in the optimizer's ``state``.
    slack_name: ClassVar[str] = "slack"
    #: Whether slack variables have momenta of their own.
    slack_momentum: ClassVar[bool] = True
    #: Ways to place weights that this constraint offers.
    inits: ClassVar[tuple[str, ...]] = ("nearest", "error")

    init: str
    batch_dims: int

    # ------------------------------------------------------------------ describing
    @property
    def separable(self) -> bool:
        """Whether the entries along the first dimension of a tensor never see each other."""
        return False

    @property
    def kernel(self) -> "Kernel | None":
        """What the compiled kernels need to know; None if they do not have this manifold. They do not know
        what a subclass changes, so it has none unless it says so itself."""
        return None

    @property
    def native_drift(self) -> bool:
        """Whether there is a `native_drift_`."""
        return False

    def native_drift_(self, x: Phase, h: float, kick: Kick = NO_KICK) -> None:
        """Kick (as in flat space) and `drift_` by compiled kernels, for a ``native`` phase."""
        raise NotImplementedError

    @property
    def has_slack(self) -> bool:
        """Whether the constraint is an inequality, with slack variables."""
        return False

    def spec(self) -> dict[str, Any]:
        """Plain values that define the manifold, for checkpoints; how weights get there is left out.
        Tensors are copies: a checkpoint that is read in place must not write into the constraint."""
        spec: dict[str, Any] = {"type": type(self).__name__}
        for f in fields(self):  # type: ignore[arg-type]
            if f.name not in ("init", "max_iterations"):
                value = getattr(self, f.name)
                spec[f.name] = value.clone() if isinstance(value, Tensor) else value
        return spec

    def check(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raise if these tensors cannot carry the constraint; change nothing."""

    def constraints(self, q: Sequence[Tensor]) -> int:
        """The number of equations, slack variables already taken off."""
        return 0

    # ------------------------------------------------------------------ placing
    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        """Put weights on the manifold as `init` says, in place; weights already there stay bit for bit.

        New weights are drawn only if a generator is given; without one, this is the nearest point."""

    def slacks(self, q: Sequence[Tensor]) -> list[Tensor]:
        """Slack variables (the non-negative ones) that go with q; [] if the constraint has none."""
        return []

    def unstick_(self, xi: Sequence[Tensor]) -> None:
        """Give weights that start at the bound itself a slack they can move with.

        The weights stay as they are, because a run that is resumed has such weights too; the first
        motion brings weight and slack back to the manifold together."""

    def follow_(self, x: Phase) -> None:
        """Make slack variables go with weights that may have been changed by hand (they have been checked
        and placed again). Those of weights that were not must stay bit for bit: after a checkpoint is
        loaded, all weights are looked at."""

    def renew_(self, x: Phase) -> None:
        """Whatever is to be done now and then, before a step that moves these weights."""

    # ------------------------------------------------------------------ moving
    def kick_(self, x: Phase, g: Sequence[Tensor], c: float) -> None:
        """B: v <- v + c g. The tangent projection follows in `settle_`."""
        torch._foreach_add_(x.v, list(g), alpha=c)

    def thermalize_(
        self, x: Phase, mu: float, sigma: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """O: v <- mu v + sigma R (and the slack's momentum with S); `settle_` follows."""
        for v, noise in ((x.v, R), (x.eta, S)):
            if v:
                torch._foreach_mul_(v, exact_factor(mu, v))
                if noise:
                    torch._foreach_add_(v, noise, alpha=sigma)

    def settle_(self, x: Phase) -> None:
        """v <- P(q) v, the orthogonal projection on the tangent space."""

    def drift_(self, x: Phase, h: float) -> None:
        """A: q <- q - h v along the geodesic, v carried with it."""
        torch._foreach_add_(x.q, x.v, alpha=-h)

    def leap_(self, x: Phase, g: Sequence[Tensor], old: float, new: float, h: float) -> None:
        """v <- old v + new g, the projection if one is due, and `drift_`, if that is faster in one go."""
        raise NotImplementedError

    def displace_(
        self,
        x: Phase,
        g: Sequence[Tensor],
        h: float,
        sigma: float,
        R: list[Tensor],
        S: list[Tensor],
    ) -> None:
        """EM, LM: q <- q - h g + sigma R (slack: + sigma S), then back to the manifold."""
        origin = self.origin(x)
        torch._foreach_add_(x.q, list(g), alpha=-h)
        for q, noise in ((x.q, R), (x.xi, S)):
            if noise:
                torch._foreach_add_(q, noise, alpha=sigma)
        self.retract_(x, origin)

    def origin(self, x: Phase) -> list[Tensor]:
        """What `retract_` must know of the point a free step started from."""
        return []

    def retract_(self, x: Phase, origin: list[Tensor]) -> None:
        """Put q (and slack) back on the manifold after a free step."""

    # ------------------------------------------------------------------ measuring
    def adopt_(self, x: Phase) -> None:
        """Turn unconstrained momenta (of an SGD checkpoint) into momenta of this constraint."""
        self.settle_(x)

    def residual(self, x: Phase) -> float:
        """max |g(q)|."""
        return 0.0

    def cotangency(self, x: Phase) -> float:
        """max |g'(q) v|."""
        return 0.0

    def energies(self, x: Phase, batch_dims: int) -> list[Tensor]:
        """|v|^2 of every tensor in the metric of the manifold, slack included, in double precision;
        an entry for each index of the first ``batch_dims`` dimensions."""
        energies = [squares(v, batch_dims) for v in x.v]
        for i, eta in enumerate(x.eta):
            energies[i] = energies[i] + squares(eta, batch_dims)
        return energies

    def kinetic(self, x: Phase) -> float:
        """|v|^2 in the metric of the manifold, slack included."""
        return float(sum(e.item() for e in self.energies(x, 0)))


class Free(Constraint):
    """No constraint at all: every method is the flat one."""

    init = "nearest"
    batch_dims = 0
    separable = True

    @property
    def kernel(self) -> "Kernel | None":
        return Kernel(0.0)


# ---------------------------------------------------------------------- shared by the constraints
def exact_factor(mu: float, v: list[Tensor]) -> Any:
    """On a CPU a foreach product rounds a number to the tensors' precision first (a momentum of 0.9
    to 0.8984 in bfloat16), which a plain product, and a tensor, are spared."""
    low = any(t.dtype.itemsize < 4 and t.device.type == "cpu" for t in v)
    return torch.tensor(mu, dtype=torch.float64) if low else mu


def check_options(c: Constraint) -> None:
    if c.init not in c.inits:
        raise SettingError(
            f"{type(c).__name__}: init is {c.init!r}; it must be one of {', '.join(map(repr, c.inits))}."
        )
    if not isinstance(c.batch_dims, int) or c.batch_dims < 0:
        raise SettingError(
            f"{type(c).__name__}: batch_dims is {c.batch_dims!r}; it must be an integer >= 0."
        )


def check_radius(c: Constraint, radius: Radius) -> None:
    """Raise unless a radius is positive and finite; keep it as a float, or as a tensor of its own."""
    owner = type(c).__name__
    if not isinstance(radius, Tensor | Real) or isinstance(radius, bool):
        raise SettingError(f"{owner}: radius is {radius!r}; give a number or a tensor.")
    values = radius.detach().clone() if isinstance(radius, Tensor) else torch.tensor(float(radius))
    right = (values > 0) & values.isfinite()
    if values.numel() == 0 or not bool(right.all()):
        shown = "an empty tensor" if values.numel() == 0 else f"{values[~right][0].item():g}"
        if values.numel() > 1:
            shown = f"a tensor with {int((~right).sum())} such entries as {shown}"
        raise SettingError(
            f"{owner}: radius is {shown}; it must be positive and finite (a bound of 0 would freeze "
            f"the weights: leave them out of the optimizer instead)."
        )
    kept = values if isinstance(radius, Tensor) else float(radius)
    object.__setattr__(c, "radius", kept)  # the dataclass is frozen for everyone else


def require_dims(c: Constraint, q: Tensor, name: str, least: int, remedy: str) -> None:
    if q.dim() - c.batch_dims < least:
        batch = f" of which batch_dims={c.batch_dims}" if c.batch_dims else ""
        raise ConstraintError(
            f"{type(c).__name__} on {name!r}: the tensor has shape {tuple(q.shape)}{batch}, and "
            f"at least {least} dimensions are needed; {remedy}."
        )


def opened(xi: Tensor, r: float | Tensor) -> Tensor:
    """Slack of length r, where the weight is at the bound r: that of a weight `MARGIN` inside it."""
    closed = xi <= (2 * torch.finfo(xi.dtype).eps) ** 0.5 * r
    return torch.where(closed, (2 * MARGIN) ** 0.5 * r, xi)


def tolerance(dtype: torch.dtype) -> float:
    """Below this, relative, weights count as being on the manifold already.

    Rounding every weight by at most eps/2 moves a norm or a Gram matrix by at most eps; the factor
    100 leaves room for the sums, which low precision (computed in float32) does not need."""
    return torch.finfo(dtype).eps * (100 if dtype.itemsize >= 4 else 1)


def require_on_manifold(c: Constraint, name: str, misfit: float, dtype: torch.dtype) -> None:
    if not misfit <= tolerance(dtype):
        raise ConstraintError(
            f"{type(c).__name__} on {name!r}: the weights are off the manifold by {misfit:.3g} "
            f"(tolerance {tolerance(dtype):.1g}) and init='error'; use init='nearest' to have them "
            f"placed, or place them yourself."
        )


def require_finite(c: Constraint, q: Tensor, name: str) -> None:
    if not bool(torch.isfinite(q).all()):
        raise ConstraintError(
            f"{type(c).__name__} on {name!r}: the weights hold NaN or Inf; initialize them first."
        )


def largest(values: Sequence[Tensor]) -> float:
    """The largest absolute entry of a list of tensors; NaN wins."""
    tops = [v.abs().max().item() for v in values if v.numel()]
    return math.nan if any(math.isnan(t) for t in tops) else max(tops, default=0.0)
