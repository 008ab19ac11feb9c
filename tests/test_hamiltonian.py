"""Without noise and friction the motion is Hamiltonian: energy, reversibility, geodesics."""

import math

import pytest
import torch
from torch import Tensor

from helpers import phase, random_orthonormal, run, slope
from holonomic import Circle, Langevin, LevelSet, Orthogonal, Sphere
from holonomic.constraints import Free
from holonomic.phase import Phase

AXES = torch.tensor([1.5, 1.0, 0.8], dtype=torch.float64)


def ellipsoid(q: Tensor) -> Tensor:
    return ((q / AXES.to(q)) ** 2).sum(-1) - 1


def rows(scale: float) -> Tensor:
    w = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return scale * w / w.norm(dim=1, keepdim=True)


CASES = {
    "none": (None, rows(1.0)),
    "circle": (Circle(1.2), rows(0.9)),
    "sphere": (Sphere(1.3), rows(0.9)),
    "sphere, equality": (Sphere(0.7, slack=False), rows(0.7)),
    "orthogonal": (Orthogonal(), random_orthonormal(5, 3)),
    "level set": (LevelSet(ellipsoid), rows(1.0)),
    "level set, inequality": (LevelSet(ellipsoid, inequality=True), rows(0.5)),
}
#: Level sets take as long as all others together.
NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] if name == "level set" else []) for name in CASES
]


def potential(q: Tensor) -> Tensor:
    n = torch.arange(q.numel(), dtype=q.dtype).reshape(q.shape)
    return torch.sin(1.5 * q + n) + 0.2 * q**2


def energy(q: Tensor, optimizer, h: float) -> float:
    """H = |p|^2 / 2 + U with p = -h v; BAOAB hands back v before its last half kick."""
    constraint = optimizer.param_groups[0]["constraint"] or Free()
    x = phase(q, optimizer)
    position = x.q[0].clone().requires_grad_()
    with torch.enable_grad():
        U = potential(position).sum()
        (g,) = torch.autograd.grad(U, position)
    constraint.kick_(x, [g], 0.5)
    constraint.project_(x)
    kinetic = sum(e.item() for e in constraint.energies(x, 0))
    return h * h * kinetic / 2 + U.item()


@pytest.mark.parametrize("name", NAMES)
def test_energy_error_of_baoab_is_of_second_order(name):
    """The largest error over a fixed time, regressed on h: slope 2 within 0.25."""
    constraint, start = CASES[name]
    T, steps = 3.2, (16, 32, 64, 128)
    errors = []
    for n in steps:
        h = T / n
        seen: list[float] = []
        settings = {"lr": h * h, "momentum": 1.0, "scheme": "BAOAB", "constraint": constraint}
        q, _ = run(potential, start, 0, **settings)
        run(
            potential,
            start,
            n,
            lambda q, opt, h=h, seen=seen: seen.append(energy(q, opt, h)),
            **settings,
        )
        initial = potential(q).sum().item()  # at rest
        errors.append(max(abs(e - initial) for e in seen))
    assert slope([T / n for n in steps], errors) == pytest.approx(2, abs=0.25)


@pytest.mark.parametrize("name", NAMES)
def test_energy_does_not_drift(name):
    """A symplectic, reversible scheme: the error at the end is no larger than at the beginning."""
    constraint, start = CASES[name]
    h, seen = 0.05, []
    settings = {"lr": h * h, "momentum": 1.0, "scheme": "BAOAB", "constraint": constraint}
    run(potential, start, 240, lambda q, opt: seen.append(energy(q, opt, h)), **settings)
    energies = torch.tensor(seen)
    early, late = energies[:60], energies[-60:]
    ripple = (energies.max() - energies.min()).item()
    assert abs(late.mean() - early.mean()) < 0.5 * ripple
    assert late.max() - late.min() < 3 * (early.max() - early.min())


def moving(name: str, seed: int = 1) -> tuple[object, Phase]:
    """A point on the manifold with a tangent momentum of order 1."""
    constraint, start = CASES[name]
    constraint = constraint or Free()
    q = start.clone()
    constraint.place_([q], ["w"])
    x = Phase([q], xi=constraint.slacks([q]), names=["w"])
    generator = torch.Generator().manual_seed(seed)
    x.v = [torch.randn(q.shape, dtype=q.dtype, generator=generator)]
    if "eta" in constraint.lists:
        x.eta = [torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in x.xi]
    constraint.project_(x)
    return constraint, x


@pytest.mark.parametrize("name", NAMES)
def test_drift_is_reversible(name):
    """Drift, turn the momentum round, drift: back at the start with the momentum turned round.

    The projections stop at 16 eps, and dividing by h = 0.1 makes that 1e-14 in the momentum."""
    constraint, x = moving(name)
    before = x.map(torch.clone)
    for _ in range(5):
        constraint.drift_(x, 0.1)
    assert (x.q[0] - before.q[0]).abs().max() > 0.05
    for t in (*x.v, *x.eta):
        t.neg_()
    for _ in range(5):
        constraint.drift_(x, 0.1)
    constraint.project_(x)  # a drift may leave a normal part
    assert (x.q[0] - before.q[0]).abs().max() < 1e-12
    assert (x.v[0] + before.v[0]).abs().max() < 1e-12
    assert x.tally.fallbacks == 0
    if x.xi:
        assert (x.xi[0] - before.xi[0]).abs().max() < 1e-12
    if x.eta:
        assert (x.eta[0] + before.eta[0]).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["circle", "sphere", "sphere, equality"])
def test_a_geodesic_does_not_depend_on_how_it_is_cut(name):
    """Closed forms: ten steps of h are one step of 10 h, to rounding."""
    constraint, x = moving(name)
    whole = x.map(torch.clone)
    constraint.drift_(whole, 3.0)
    for _ in range(10):
        constraint.drift_(x, 0.3)
    for ours, theirs in zip((*x.q, *x.v, *x.xi), (*whole.q, *whole.v, *whole.xi), strict=True):
        assert (ours - theirs).abs().max() < 1e-13


@pytest.mark.parametrize("name", ["orthogonal", "level set"])
def test_rattle_approaches_the_geodesic_with_second_order(name):
    """Speed is constant along a geodesic; RATTLE ends where a much finer RATTLE ends, up to h^2."""
    ends = {}
    for n in (8, 16, 32, 64, 512):
        constraint, x = moving(name)
        speed = x.v[0].norm()
        for _ in range(n):
            constraint.drift_(x, 1.0 / n)
        ends[n] = x.q[0]
        assert abs(x.v[0].norm() / speed - 1) < 4 * speed**2 / n**2
    coarse = [n for n in ends if n < 512]
    errors = [(ends[n] - ends[512]).norm().item() for n in coarse]
    assert slope([1 / n for n in coarse], errors) == pytest.approx(2, abs=0.25)


def test_orthogonal_geodesic_on_the_rotations():
    """Square matrices: the geodesic from Q along -V is Q exp(-t Q^T V)."""
    Q = random_orthonormal(3, 3, seed=4)
    S = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    S = S - S.T
    exact = Q @ torch.linalg.matrix_exp(-S)
    errors = []
    for n in (16, 32, 64, 128):
        x = Phase([Q.clone()], v=[Q @ S])
        for _ in range(n):
            Orthogonal().drift_(x, 1.0 / n)
        errors.append((x.q[0] - exact).norm().item())
    assert slope([1 / n for n in (16, 32, 64, 128)], errors) == pytest.approx(2, abs=0.25)


def test_free_motion_on_the_circle_turns_by_the_angle_it_should():
    """n steps turn (theta, xi) by n lr w; many turns, through all signs of theta and xi."""
    r, lr, n = 1.3, 0.04, 500
    angle = torch.linspace(0.1, 3.0, 9, dtype=torch.float64)
    w = torch.linspace(-3, 4, 9, dtype=torch.float64)
    q = torch.nn.Parameter(r * torch.cos(angle))
    optimizer = Langevin([q], lr=lr, momentum=1.0, constraint=Circle(r, init="error"))
    q.grad = torch.zeros_like(q)
    optimizer.step()  # at rest, so this makes the state and moves nothing
    optimizer.state[q]["momentum_buffer"].copy_(w)
    for _ in range(n):
        optimizer.step()
    turned = angle + n * lr * w
    assert n * lr * w.abs().max() > 4 * math.pi
    # 500 roundings of an angle of a few units
    assert (q.detach() - r * torch.cos(turned)).abs().max() < 1e-12
    assert (optimizer.state[q]["slack"] - r * torch.sin(turned)).abs().max() < 1e-12


@pytest.mark.parametrize("slack", [True, False])
def test_great_circle_closes_after_its_period(slack):
    """At speed |v| a sphere of radius r is gone round in the time 2 pi r / |v|."""
    name = "sphere" if slack else "sphere, equality"
    constraint, x = moving(name)
    speed = (x.v[0] ** 2).sum(1)
    if slack:
        speed = speed + x.eta[0].squeeze(1) ** 2
    n = 50
    for row in range(4):
        y = x.map(torch.clone)
        h = 2 * math.pi * constraint.radius / (speed[row].sqrt().item() * n)
        for k in range(n):
            constraint.drift_(y, h)
            if k == n // 2 - 1:  # half way: the antipode
                assert (y.q[0][row] + x.q[0][row]).abs().max() < 1e-12
        assert (y.q[0][row] - x.q[0][row]).abs().max() < 1e-12
        assert (y.v[0][row] - x.v[0][row]).abs().max() < 1e-12
