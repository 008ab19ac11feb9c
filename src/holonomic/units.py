"""Paper units (step h, friction gamma) to torch units (lr, momentum), and back.

The papers write the underdamped step as ``p <- exp(-gamma h) p - h g``, ``q <- q + h p``. With
``v = -p / h`` that is ``v <- momentum v + g``, ``q <- q - lr v`` for

    lr = h**2,    momentum = exp(-gamma h),

which is `torch.optim.SGD`. For the overdamped schemes EM and LM the step h *is* the ``lr``.
"""

import math

from holonomic.errors import SettingError


def from_paper(h: float, gamma: float) -> dict[str, float]:
    """The settings ``lr = h**2`` and ``momentum = exp(-gamma h)`` of an underdamped scheme.

    >>> from_paper(h=0.5, gamma=0.0)
    {'lr': 0.25, 'momentum': 1.0}
    """
    if not (math.isfinite(h) and h > 0):
        raise SettingError(f"h is {h}; the step size must be a positive number.")
    if math.isnan(gamma) or gamma < 0:
        raise SettingError(
            f"gamma is {gamma}; the friction must be >= 0 (0: none, math.inf: no memory)."
        )
    return {"lr": h * h, "momentum": math.exp(-gamma * h)}


def to_paper(lr: float, momentum: float) -> dict[str, float]:
    """The step ``h = sqrt(lr)`` and friction ``gamma = -log(momentum) / h`` of a group.

    >>> to_paper(lr=0.25, momentum=1.0)
    {'h': 0.5, 'gamma': 0.0}
    """
    if not (math.isfinite(lr) and lr > 0):
        raise SettingError(f"lr is {lr}; paper units need a positive step.")
    if not 0 <= momentum <= 1:
        raise SettingError(f"momentum is {momentum}; it must lie in [0, 1].")
    h = math.sqrt(lr)
    return {"h": h, "gamma": math.inf if momentum == 0 else abs(math.log(momentum)) / h}
