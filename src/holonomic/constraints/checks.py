"""What the constraints check alike: options, radii, shapes, numbers, and how near is near enough."""

import math
from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from holonomic.constraints.base import Constraint
from holonomic.errors import ConstraintError, SettingError

#: Weights beyond the bound of an inequality are placed this fraction inside it: at the bound itself
#: the slack is 0, its force too, and without noise such a weight would never move again.
MARGIN = 1 / 256

Radius = float | Tensor


def check_options(c: Constraint) -> None:
    if c.init not in c.inits:
        raise SettingError(
            f"{type(c).__name__}: init is {c.init!r}; it must be one of {', '.join(map(repr, c.inits))}."
        )
    if not isinstance(c.batch_dims, int) or c.batch_dims < 0:
        raise SettingError(
            f"{type(c).__name__}: batch_dims is {c.batch_dims!r}; it must be an integer >= 0."
        )


def check_iterations(c: Constraint, count: object) -> None:
    if not isinstance(count, int) or count < 1:
        raise SettingError(
            f"{type(c).__name__}: max_iterations is {count!r}; it must be an integer >= 1."
        )


def check_radius(c: Constraint, radius: Radius, field: str = "radius") -> None:
    """Raise unless a radius is positive and finite; keep it as a float, or as a tensor of its own."""
    owner = type(c).__name__
    if not isinstance(radius, Tensor | Real) or isinstance(radius, bool):
        raise SettingError(f"{owner}: {field} is {radius!r}; give a number or a tensor.")
    values = radius.detach().clone() if isinstance(radius, Tensor) else torch.tensor(float(radius))
    right = (values > 0) & values.isfinite()
    if values.numel() == 0 or not bool(right.all()):
        shown = "an empty tensor" if values.numel() == 0 else f"{values[~right][0].item():g}"
        if values.numel() > 1:
            shown = f"a tensor with {int((~right).sum())} such entries as {shown}"
        raise SettingError(
            f"{owner}: {field} is {shown}; it must be positive and finite (a bound of 0 would freeze "
            f"the weights: leave them out of the optimizer instead)."
        )
    kept = values if isinstance(radius, Tensor) else float(radius)
    object.__setattr__(c, field, kept)  # the dataclass is frozen for everyone else


def require_dims(c: Constraint, q: Tensor, name: str, least: int, remedy: str) -> None:
    if q.dim() - c.batch_dims < least:
        batch = f" of which batch_dims={c.batch_dims}" if c.batch_dims else ""
        raise ConstraintError(
            f"{type(c).__name__} on {name!r}: the tensor has shape {tuple(q.shape)}{batch}, and "
            f"at least {least} dimensions are needed; {remedy}."
        )


def require_finite(c: Constraint, q: Tensor, name: str) -> None:
    if q.is_meta:
        raise ConstraintError(
            f"{type(c).__name__} on {name!r}: the tensor is on the meta device and has no values; "
            f"materialize the model (to_empty, then initialize it) before building the optimizer."
        )
    if not bool(torch.isfinite(q).all()):
        raise ConstraintError(
            f"{type(c).__name__} on {name!r}: the weights hold NaN or Inf; initialize them first."
        )


def require_on_manifold(c: Constraint, name: str, misfit: float, dtype: torch.dtype) -> None:
    if not misfit <= tolerance(dtype):
        raise ConstraintError(
            f"{type(c).__name__} on {name!r}: the weights are off the manifold by {misfit:.3g} "
            f"(tolerance {tolerance(dtype):.1g}) and init='error'; use init='nearest' to have them "
            f"placed, or place them yourself."
        )


def tolerance(dtype: torch.dtype) -> float:
    """Below this, relative, weights count as being on the manifold already.

    Rounding every weight by at most eps/2 moves a norm or a Gram matrix by at most eps; the factor
    100 leaves room for the sums, which low precision (computed in float32) does not need."""
    return torch.finfo(dtype).eps * (100 if dtype.itemsize >= 4 else 1)


def follow_tolerance(dtype: torch.dtype) -> float:
    """Below this, relative to the square of the radius, weights count as those that a step left.

    It is `tolerance`, twice in 16 bits, where the weight and its slack are both rounded: 2.2e-14 in
    float64, 1.2e-5 in float32, 2.0e-3 in float16, 1.6e-2 in bfloat16."""
    return tolerance(dtype) * (1 if dtype.itemsize >= 4 else 2)


def opened(xi: Tensor, r: float | Tensor) -> Tensor:
    """Slack of length r, where the weight is at the bound r: that of a weight `MARGIN` inside it."""
    closed = xi <= (2 * torch.finfo(xi.dtype).eps) ** 0.5 * r
    return torch.where(closed, (2 * MARGIN) ** 0.5 * r, xi)


def largest(values: Sequence[Tensor]) -> float:
    """The largest absolute entry of a list of tensors; NaN wins."""
    tops = [v.abs().max().item() for v in values if v.numel()]
    return math.nan if any(math.isnan(t) for t in tops) else max(tops, default=0.0)
