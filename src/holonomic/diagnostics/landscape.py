"""The loss along a line between two states of a module, and over the plane through three (3.34)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from holonomic.errors import SettingError

Array = NDArray[np.float64]
State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Line:
    """Losses at theta(a) = (1 - a) start + a end."""

    alpha: Array
    loss: Array


@dataclass(frozen=True)
class Plane:
    """Losses (beta, alpha) at b F1(a) + (1 - b) F2(a), F_i(a) = start + a (end_i - start)."""

    alpha: Array
    beta: Array
    loss: Array


def loss_on_line(
    module: nn.Module,
    loss: Callable[[nn.Module], float | Tensor],
    start: State,
    end: State,
    alpha: Sequence[float] | None = None,
) -> Line:
    """The loss along the line (3.34) between two ``state_dict`` of a module.

    ``loss(module)`` gives the number to draw, in whatever mode (train or eval) the module is.
    Parameters and floating-point buffers are interpolated, other buffers are those of the nearer end.
    The module is left as it was found, also if ``loss`` raises."""
    at = np.linspace(0, 1, 51) if alpha is None else np.asarray(alpha, dtype=float)
    states = _checked(module, [start, end])
    with _borrowed(module):
        values = [_at(module, loss, states, [1 - a, a]) for a in at]
    return Line(at, np.array(values))


def loss_on_plane(
    module: nn.Module,
    loss: Callable[[nn.Module], float | Tensor],
    start: State,
    first: State,
    second: State,
    alpha: Sequence[float] | None = None,
    beta: Sequence[float] | None = None,
) -> Plane:
    """The loss on the surface between a start and two ends; as `loss_on_line` otherwise."""
    a = np.linspace(0, 1, 21) if alpha is None else np.asarray(alpha, dtype=float)
    b = np.linspace(0, 1, 21) if beta is None else np.asarray(beta, dtype=float)
    states = _checked(module, [start, first, second])
    with _borrowed(module):
        values = [[_at(module, loss, states, [1 - s, t * s, (1 - t) * s]) for s in a] for t in b]
    return Plane(a, b, np.array(values))


def _checked(module: nn.Module, states: list[State]) -> list[State]:
    """The states as copies of what they hold now; raises if one does not fit the module."""
    own = module.state_dict()
    for k, state in enumerate(states):
        for name in own.keys() | state.keys():
            if name not in own or name not in state or own[name].shape != state[name].shape:
                raise SettingError(
                    f"state {k} and the module differ at {name!r}; give the state_dict() of this "
                    f"module at another time."
                )
    return [{name: t.detach().clone() for name, t in state.items()} for state in states]


@torch.no_grad()
def _at(
    module: nn.Module,
    loss: Callable[[nn.Module], float | Tensor],
    states: list[State],
    weights: list[float],
) -> float:
    nearest = states[int(np.argmax(weights))]
    mixed = {}
    for name, t in nearest.items():
        if t.is_floating_point() or t.is_complex():
            wide = torch.promote_types(t.dtype, torch.float32)
            parts = [w * s[name].to(wide) for w, s in zip(weights, states, strict=True)]
            mixed[name] = torch.stack(parts).sum(0).to(t.dtype)
        else:
            mixed[name] = t
    module.load_state_dict(mixed)
    return float(loss(module))


@contextmanager
def _borrowed(module: nn.Module) -> Iterator[None]:
    """Put the state back at the end, whatever happens."""
    saved = {name: t.detach().clone() for name, t in module.state_dict().items()}
    try:
        yield
    finally:
        module.load_state_dict(saved)
