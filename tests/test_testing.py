"""The battery for users' own constraints: ours pass it, and each kind of mistake is found."""

from dataclasses import dataclass

import pytest
import torch

from helpers import free  # noqa: F401 (one thread for small tensors)
from holonomic import Circle, LevelSet, Orthogonal, Sphere
from holonomic.testing import check_constraint

MAKERS = {
    "circle": (lambda b: Circle(0.7, batch_dims=b), (3, 4)),
    "circle, radii": (lambda b: Circle(torch.tensor([0.3, 0.5, 1.0, 2.0]), batch_dims=b), (3, 4)),
    "sphere": (lambda b: Sphere(1.2, batch_dims=b), (3, 4)),
    "sphere, fixed": (lambda b: Sphere(1.2, slack=False, batch_dims=b), (3, 4)),
    "sphere, columns": (lambda b: Sphere(1.2, slack=False, dim=1, batch_dims=b), (3, 4)),
    "sphere, whole": (lambda b: Sphere(1.2, dim=None, batch_dims=b), (3, 4)),
    "orthogonal": (lambda b: Orthogonal(batch_dims=b), (5, 3)),
    "orthogonal, scaled": (lambda b: Orthogonal(2.5, batch_dims=b), (3, 5)),
    "level set": (lambda b: LevelSet(length, batch_dims=b), (2, 3)),
    "level set, inequality": (lambda b: LevelSet(length, inequality=True, batch_dims=b), (2, 3)),
}


def length(w):
    return (w * w).sum(-1) - 1.5


@pytest.mark.parametrize("name", MAKERS)
def test_our_constraints_pass(name):
    make, shape = MAKERS[name]
    check_constraint(make, shape)


@dataclass(frozen=True, eq=False)
class NoProjection(Sphere):
    def project_(self, x):
        pass


@dataclass(frozen=True, eq=False)
class WrongCount(Sphere):
    def codimension(self, q):
        return 0


@dataclass(frozen=True, eq=False)
class WrongDrift(Sphere):
    def drift_(self, x, h):
        super().drift_(x, 2 * h)


@dataclass(frozen=True, eq=False)
class NoFollowing(Sphere):
    def follow_(self, x, within):
        pass


@dataclass(frozen=True, eq=False)
class NoBatches(Sphere):
    def _dims(self, t):
        return (t.dim() - 1,) if self.batch_dims == 0 else tuple(range(1, t.dim()))

    def _rows(self, t):
        return t.shape[-2] if self.batch_dims == 0 else 1


@dataclass(frozen=True, eq=False)
class Restless(Sphere):
    def place_(self, q, names, generator=None):
        for t in q:
            t.mul_(1.2 / t.norm(dim=-1, keepdim=True)).mul_(1 + 1e-15)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (NoProjection, "does not start along the momentum|codimension leaves"),
        (WrongCount, "tangent vectors have 9 dimensions, codimension leaves 12"),
        (NoFollowing, "not noticed"),
        (NoBatches, "respect batch_dims"),
        (Restless, "placing twice moves weights|a resumed run is another one"),
        (WrongDrift, "does not start along the momentum"),
    ],
    ids=lambda v: v.__name__ if isinstance(v, type) else "",
)
def test_mistakes_are_found(kind, words):
    with pytest.raises(AssertionError, match=words):
        check_constraint(lambda b: kind(1.2, slack=False, batch_dims=b), (3, 4))
