"""Free weights without noise under OBA are SGD with momentum: torch's own fused step, bit for bit."""

from typing import TYPE_CHECKING

import torch

from holonomic.scheme import Substep

if TYPE_CHECKING:
    from holonomic.plan import Part

_OBA = tuple(Substep(letter, 1.0) for letter in "OBA")


def fits(part: "Part") -> bool:
    """Whether a part is that. (Without momentum torch's step leaves no trace of the gradient in v.)"""
    k, q = part.physics, part.x.q
    default = part.group["fused"] is None and part.group["foreach"] is None
    if not default or part.constrained or part.word != _OBA or part.noisy:
        return False
    if not (k.lr and k.momentum):
        return False
    types = {t.dtype for t in q}
    known = q[0].device.type in ("cpu", "cuda") and len({t.is_cuda for t in q}) == 1
    if not (known and len(types) == 1 and types <= _FLOATS):
        return False
    # torch (2.13) takes for granted that all of them lie in memory alike, and without gaps.
    return all(t.is_contiguous() for ts in (q, part.grads, part.x.v) for t in ts)


_FLOATS = {torch.float32, torch.float64}  # in 16 bits torch's fused step rounds otherwise than SGD


def run(part: "Part") -> None:
    """v <- mu v + g, q <- q - lr v in one pass."""
    k = part.physics
    torch._fused_sgd_(
        part.x.q,
        part.grads,
        part.x.v,
        weight_decay=k.weight_decay,
        momentum=k.momentum,
        lr=k.lr,
        dampening=0.0,
        nesterov=False,
        maximize=k.maximize,
        is_first_step=False,
    )
    torch.autograd.graph.increment_version([*part.x.q, *part.x.v])  # which torch's step forgets
