"""What a constraint is: a manifold {q : g(q) = 0} and how to place, move and measure on it."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from holonomic.phase import Phase, squares

Grain = Literal["entry", "row", "tensor", "group"]


class Constraint:
    """Flat space, and the interface of every manifold.

    A constraint never knows which scheme moves it, nor how its methods are executed. It gets a `Phase`
    (lists of tensors) and works in place. The methods here are those of flat space; a new constraint
    overrides what is curved. Two properties describe it:

        grain   the largest unit whose parts never see each other: "entry", "row" (one index of the
                first dimension), "tensor", or "group" (one equation over all tensors of a group)
        lists   the state it needs: ("v",), with slack variables ("v", "xi"), and if these have
                momenta of their own ("v", "xi", "eta")

    Describing:   spec          plain values that define the manifold
                  check         can these tensors carry the constraint?
                  codimension   the number of equations less the number of slacks
    Placing:      place_        put weights on the manifold
                  slacks        the slack variables that go with weights
                  follow_       weights were changed by somebody: place and slack go with them
    Moving:       kick_         B: v <- v + c g
                  thermalize_   O: v <- mu v + sigma R
                  drift_        A: along the geodesic
                  displace_     EM, LM: a free step and back to the manifold
    Projecting:   project_      v <- P(q) v, on the tangent space
                  tangent_      an ambient vector made a momentum of this manifold
    Measuring:    residual      max |g(q)|
                  cotangency    max |g'(q) v|
                  energies      |v|^2 in the metric of the manifold

    One contract about momenta: `kick_`, `thermalize_` and `drift_` accept any v and may leave a part
    normal to the manifold in it; whoever reads v projects first.
    """

    #: Ways to place weights that this constraint offers.
    inits: ClassVar[tuple[str, ...]] = ("nearest", "error")

    init: str
    batch_dims: int

    # ------------------------------------------------------------------ describing
    @property
    def grain(self) -> Grain:
        """The largest unit whose parts never see each other."""
        return "tensor"

    @property
    def lists(self) -> tuple[str, ...]:
        """The state it needs beside the weights."""
        return ("v",)

    def spec(self) -> dict[str, Any]:
        """Plain values that define the manifold, for checkpoints; how weights get there is left out.
        Tensors are copies: a checkpoint that is read in place must not write into the constraint."""
        spec: dict[str, Any] = {"type": type(self).__name__}
        own: Any = self  # every concrete constraint is a dataclass
        for f in fields(own):
            if f.name not in ("init", "max_iterations"):
                value = getattr(self, f.name)
                spec[f.name] = value.clone() if isinstance(value, Tensor) else value
        return spec

    def check(self, q: Sequence[Tensor], names: Sequence[str]) -> None:
        """Raise if these tensors cannot carry the constraint; change nothing."""

    def codimension(self, q: Sequence[Tensor]) -> int:
        """The number of equations, slack variables already taken off."""
        return 0

    # ------------------------------------------------------------------ placing
    def place_(
        self, q: Sequence[Tensor], names: Sequence[str], generator: torch.Generator | None = None
    ) -> None:
        """Put weights on the manifold as `init` says, in place; weights already there stay bit for bit.

        New weights are drawn only if a generator is given; without one, this is the nearest point."""

    def slacks(self, q: Sequence[Tensor], open: bool = False) -> list[Tensor]:
        """Slack variables (the non-negative ones) that go with q; [] if the constraint has none.

        At the bound itself the slack is 0, and so is the force on it: without noise such a weight would
        never move again. ``open`` gives it the slack of a weight a little inside instead; the next step
        brings weight and slack back to the manifold together."""
        return []

    def follow_(self, x: Phase, within: float) -> None:
        """Before a step: weights that somebody changed since the last one stay as they are, if they can.

        The slack of weights within the bound goes with them and keeps its sign. Weights off the
        manifold are put on the nearest point. What fits to a relative ``within`` stays bit for bit. If
        anything did not, ``x.tally.changed`` is raised."""

    # ------------------------------------------------------------------ moving
    def kick_(self, x: Phase, g: Sequence[Tensor], c: float) -> None:
        """B: v <- v + c g."""
        torch._foreach_add_(x.v, list(g), alpha=c)

    def thermalize_(
        self, x: Phase, mu: float, sigma: float, R: Sequence[Tensor], S: Sequence[Tensor]
    ) -> None:
        """O: v <- mu v + sigma R, and the slack's momentum with S."""
        for v, noise in ((x.v, R), (x.eta, S)):
            if v and mu != 1:
                torch._foreach_mul_(v, exact_factor(mu, v))
            if v and noise:
                torch._foreach_add_(v, list(noise), alpha=sigma)

    def drift_(self, x: Phase, h: float) -> None:
        """A: q <- q - h P(q) v along the geodesic, v carried with it."""
        torch._foreach_add_(x.q, x.v, alpha=-h)

    def displace_(
        self,
        x: Phase,
        f: Sequence[Tensor],
        h: float,
        sigma: float,
        R: Sequence[Tensor],
        S: Sequence[Tensor],
    ) -> None:
        """EM, LM: q <- q - h f + sigma R (slack: + sigma S), then back to the manifold."""
        free_step_(x, f, h, sigma, R, S)

    # ------------------------------------------------------------------ projecting
    def project_(self, x: Phase) -> None:
        """v <- P(q) v, the orthogonal projection on the tangent space."""

    def tangent_(self, x: Phase) -> None:
        """Ambient vectors in v (the momenta of another optimizer) made momenta of this manifold."""
        self.project_(x)

    # ------------------------------------------------------------------ measuring
    def residual(self, x: Phase) -> float:
        """max |g(q)|."""
        return 0.0

    def cotangency(self, x: Phase) -> float:
        """max |g'(q) v|, of v as it is."""
        return 0.0

    def energies(self, x: Phase, batch_dims: int) -> list[Tensor]:
        """|v|^2 of every tensor in the metric of the manifold, slack included, in double precision;
        an entry for each index of the first ``batch_dims`` dimensions. v has been projected."""
        energies = [squares(v, batch_dims) for v in x.v]
        for i, eta in enumerate(x.eta):
            energies[i] = energies[i] + squares(eta, batch_dims)
        return energies


class Free(Constraint):
    """No constraint at all: every method is the flat one."""

    init = "nearest"
    batch_dims = 0

    @property
    def grain(self) -> Grain:
        return "entry"


# ---------------------------------------------------------------------- shared by the constraints
def free_step_(
    x: Phase,
    f: Sequence[Tensor],
    h: float,
    sigma: float,
    R: Sequence[Tensor],
    S: Sequence[Tensor],
) -> None:
    """q <- q - h f + sigma R, xi <- xi + sigma S: the overdamped step in the surrounding space."""
    torch._foreach_add_(x.q, list(f), alpha=-h)
    for q, noise in ((x.q, R), (x.xi, S)):
        if noise:
            torch._foreach_add_(q, list(noise), alpha=sigma)


def exact_factor(mu: float, v: list[Tensor]) -> Any:
    """On a CPU a foreach product rounds a number to the tensors' precision first (a momentum of 0.9
    to 0.8984 in bfloat16), which a plain product, and a tensor, are spared."""
    low = any(t.dtype.itemsize < 4 and t.device.type == "cpu" for t in v)
    return torch.tensor(mu, dtype=torch.float64) if low else mu
