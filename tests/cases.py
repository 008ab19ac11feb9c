"""Every constraint and scheme on one small problem: the battery the optimizer's tests run over."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from holonomic import Circle, Constraint, Langevin, LevelSet, Orthogonal, Sphere

# The tensors here are small: threads would only wait for each other (and for other test workers).
torch.set_num_threads(1)

SHAPES = ((6, 5), (6, 5), (4, 5), (3, 2, 2))
SCHEMES = ("OBA", "ABO", "BAOAB", "BACDEDCAB", "EM", "LM")


def energy(*weights: Tensor) -> Tensor:
    """One equation over all tensors: a fixed sum of squares."""
    return torch.stack([(w * w).sum() for w in weights]).sum() - 4.0


def means(*weights: Tensor) -> Tensor:
    """One value per tensor: a bound on its mean."""
    return torch.stack([w.mean() for w in weights]) - 0.02


CONSTRAINTS: dict[str, Callable[[], Constraint | None]] = {
    "none": lambda: None,
    "Circle": lambda: Circle(0.4),
    "Circle-tensor": lambda: Circle(torch.tensor([0.3, 0.5])),
    "Sphere": lambda: Sphere(0.8),
    "Sphere-equality": lambda: Sphere(0.8, slack=False),
    "Sphere-whole": lambda: Sphere(1.5, dim=None),
    "Orthogonal": lambda: Orthogonal(),
    "LevelSet": lambda: LevelSet(energy),
    "LevelSet-inequality": lambda: LevelSet(means, inequality=True),
}
CONSTRAINED = tuple(name for name in CONSTRAINTS if name != "none")


def weights(name: str = "none", dtype: torch.dtype = torch.float64, seed: int = 0) -> list[Any]:
    """Parameters of a few shapes, most of which lie off the manifold."""
    generator = torch.Generator().manual_seed(seed)
    shapes = SHAPES if name != "Circle-tensor" else ((6, 2), (3, 2, 2), (2,))
    drawn = [0.5 * torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes]
    return [torch.nn.Parameter(t.to(dtype)) for t in drawn]


def build(
    name: str, scheme: str = "OBA", dtype: torch.dtype = torch.float64, **settings: Any
) -> tuple[list[Any], Langevin]:
    """Parameters under a constraint, and their optimizer."""
    params = weights(name, dtype)
    defaults = {"lr": 0.05, "temperature": 1e-3, "seed": 1, "weight_decay": 1e-2}
    if "E" in scheme and scheme != "EM":
        defaults.update(coupling=0.1, noise=0.05)
    if "generator" in settings:
        del defaults["seed"]
    constraint = CONSTRAINTS[name]()
    return params, Langevin(
        params, **{**defaults, "constraint": constraint, "scheme": scheme, **settings}
    )


def set_grads(params: list[Any]) -> None:
    """A gradient that depends on the weights, so that no difference stays hidden."""
    for k, p in enumerate(params):
        p.grad = (torch.sin(3 * p.detach() + k) + 0.1).to(p.dtype)


def advance(params: list[Any], optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        set_grads(params)
        optimizer.step()


def copies(tensors: Any) -> list[Tensor]:
    return [t.detach().clone() for t in tensors]


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit."""
    a, b = list(a), list(b)
    return len(a) == len(b) and all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


def state_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything in ``state``, copied, in a fixed order."""
    return [
        s[key].clone()
        for group in optimizer.param_groups
        for s in (optimizer.state.get(p, {}) for p in group["params"])
        for key in sorted(s)
    ]
