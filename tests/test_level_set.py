"""LevelSet, by writing with it the constraints that have a closed form, and on its own.

Both sides are run with the same seed. "To rounding" is 1e-12 for 40 steps in double precision: the
closed form scales or iterates, LevelSet solves for multipliers, both to a few eps a step.
"""

import pytest
import torch
from torch import Tensor

from helpers import Drawn, Stream, phase, random_orthonormal, run, slope
from holonomic import Circle, ConstraintError, Langevin, LevelSet, Orthogonal, SettingError, Sphere
from holonomic.phase import Phase

ROUNDING = 1e-12
STEPS = 40
R = 0.8


def potential(q: Tensor) -> Tensor:
    n = torch.arange(q.numel(), dtype=q.dtype).reshape(q.shape)
    return torch.sin(1.5 * q + n) + 0.2 * q**2


def weights(*shape: int, length: float = 0.6) -> Tensor:
    w = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return length * w / w.norm(dim=-1, keepdim=True)


def circle(q: Tensor) -> Tensor:
    return q**2 - R**2


def sphere(q: Tensor) -> Tensor:
    return (q**2).sum(-1) - R**2


def orthogonality(q: Tensor) -> Tensor:
    """Q^T Q - I is symmetric: the equations are those of one triangle."""
    s = q.shape[-1]
    i, j = torch.triu_indices(s, s)
    return (q.mT @ q - torch.eye(s, dtype=q.dtype))[i, j]


PAIRS = {
    "circle": (Circle(R), LevelSet(circle, inequality=True), weights(4, 3)),
    "sphere": (Sphere(R), LevelSet(sphere, inequality=True), weights(4, 3)),
    "sphere, equality": (Sphere(R, slack=False), LevelSet(sphere), weights(4, 3, length=R)),
    "orthogonal": (
        Orthogonal(),
        LevelSet(orthogonality, projection="oblique"),
        random_orthonormal(5, 3),
    ),
}


def both(name: str, steps: int = STEPS, **settings):
    closed, written, start = PAIRS[name]
    a, opt_a = run(potential, start, steps, constraint=closed, **settings)
    b, opt_b = run(potential, start, steps, constraint=written, **settings)
    for opt in (opt_a, opt_b):
        assert opt.report().groups[0].fallbacks == 0
    return phase(a, opt_a), phase(b, opt_b)


# ---------------------------------------------------------------------- against the closed forms
@pytest.mark.parametrize("scheme", ["EM", "LM"])
@pytest.mark.parametrize("name", PAIRS)
def test_overdamped_equals_the_closed_form(name, scheme):
    """The nearest point of a circle or sphere is the radial one; along the old normal is Alg. 4.1."""
    x, y = both(name, scheme=scheme, lr=0.004, temperature=0.3, seed=2)
    assert (x.q[0] - y.q[0]).abs().max() < ROUNDING
    for xi, other in zip(x.xi, y.xi, strict=True):
        assert (xi.flatten() - other.flatten()).abs().max() < ROUNDING


@pytest.mark.parametrize("scheme", ["OBA", "ABO", "BAOAB"])
def test_underdamped_orthogonality_equals_the_closed_form(scheme):
    """Both are RATTLE with the same multipliers. v = p / h, so h = 0.1 costs one digit there."""
    x, y = both("orthogonal", scheme=scheme, lr=0.01, momentum=0.9, temperature=0.3, seed=2)
    assert (x.q[0] - y.q[0]).abs().max() < ROUNDING
    assert (x.v[0] - y.v[0]).abs().max() < 10 * ROUNDING


@pytest.mark.parametrize("name", ["circle", "sphere", "sphere, equality"])
def test_underdamped_circle_and_sphere_agree_to_second_order(name):
    """The closed form follows the geodesic, RATTLE approximates it: at a fixed time they differ by
    O(h^2)."""
    T, steps = 2.0, (10, 20, 40, 80)
    errors = []
    for n in steps:
        h = T / n
        x, y = both(name, n, scheme="BAOAB", lr=h * h, momentum=1.0)
        errors.append((x.q[0] - y.q[0]).norm().item())
    assert slope([T / n for n in steps], errors) == pytest.approx(2, abs=0.25)


def test_underdamped_sphere_with_noise_agrees_to_second_order_a_step():
    """One noisy step from rest: RATTLE differs from the geodesic by h^3 (an odd map in v)."""
    errors, hs = [], (0.2, 0.1, 0.05, 0.025)
    for h in hs:
        settings = {"lr": h * h, "momentum": 0.3, "temperature": 0.5, "seed": 3}
        x, y = both("sphere, equality", 1, scheme="OBA", **settings)
        errors.append((x.q[0] - y.q[0]).norm().item())
    assert slope(hs, errors) == pytest.approx(3, abs=0.25)


def test_oblique_projection_of_a_circle_is_4_41():
    """The root nearest to the old point of the quadratic equation along the old normal."""
    h, tau, stream = 0.004, 0.3, Stream(5)
    _, _, q = PAIRS["circle"]
    constraint = LevelSet(circle, inequality=True, projection="oblique")
    settings = {"scheme": "EM", "lr": h, "temperature": tau, "generator": Drawn(5)}
    new, optimizer = run(potential, q, 10, constraint=constraint, **settings)
    xi = (R**2 - q**2).sqrt()
    for _ in range(10):
        position = q.clone().requires_grad_()
        (g,) = torch.autograd.grad(potential(position).sum(), position)
        sigma = (2 * tau * h) ** 0.5
        a = q - h * g + sigma * stream.like(q)
        b = xi + sigma * stream.like(xi)
        # |(a, b) - l (q, xi)|^2 = R^2
        half = (a * q + b * xi) / R**2
        l = half - (half**2 - (a**2 + b**2 - R**2) / R**2).sqrt()
        q, xi = a - l * q, b - l * xi
    x = phase(new, optimizer)
    assert optimizer.report().groups[0].fallbacks == 0
    assert (x.q[0] - q).abs().max() < ROUNDING
    assert (x.xi[0].reshape(xi.shape) - xi).abs().max() < ROUNDING


# ---------------------------------------------------------------------- on its own
def joint(a: Tensor, b: Tensor) -> Tensor:
    """Two equations that link two tensors of different shapes."""
    return torch.stack([(a**2).sum() + (b**2).sum() - 2, a.sum() - b.sum()])


@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "EM", "LM"])
def test_one_constraint_over_two_tensors(scheme):
    generator = torch.Generator().manual_seed(1)
    a = torch.nn.Parameter(torch.rand(2, 3, dtype=torch.float64, generator=generator))
    b = torch.nn.Parameter(torch.rand(4, dtype=torch.float64, generator=generator))
    settings = {"lr": 0.01, "temperature": 0.2, "seed": 1, "scheme": scheme}
    optimizer = Langevin([a, b], constraint=LevelSet(joint), **settings)
    before = a.detach().clone(), b.detach().clone()
    for _ in range(20):
        a.grad, b.grad = torch.cos(3 * a.detach()), torch.sin(2 * b.detach())
        optimizer.step()
        assert joint(a.detach(), b.detach()).abs().max() < 1e-14
        if scheme in ("OBA", "BAOAB"):
            x = Phase([p.detach() for p in (a, b)], names=["a", "b"])
            x.v = [optimizer.state[p]["momentum_buffer"].clone() for p in (a, b)]
            optimizer.param_groups[0]["constraint"].project_(x)
            va, vb = x.v
            radial = (a * va).sum() + (b * vb).sum()
            assert abs(radial) < 1e-13
            assert abs(va.sum() - vb.sum()) < 1e-13
    assert (a - before[0]).abs().max() > 0.01
    assert (b - before[1]).abs().max() > 0.01
    report = optimizer.report().groups[0]
    assert report.dof == 8  # 10 weights, 2 equations
    assert report.fallbacks == 0


def test_a_tensor_without_gradient_is_still_held_by_the_constraint():
    """a pulls on b through the equations alone."""
    a = torch.nn.Parameter(torch.tensor([1.0, 0.5], dtype=torch.float64))
    b = torch.nn.Parameter(torch.tensor([0.5, 1.0], dtype=torch.float64))
    optimizer = Langevin([a, b], lr=0.01, constraint=LevelSet(joint))
    start = b.detach().clone()
    for _ in range(10):
        a.grad = torch.tensor([1.0, -0.3], dtype=torch.float64)
        optimizer.step()
    assert joint(a.detach(), b.detach()).abs().max() < 1e-14
    assert (b - start).abs().max() > 1e-3


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
@pytest.mark.parametrize("scheme", ["OBA", "EM"])
def test_batched(scheme, batch):
    """Every entry of the leading dimensions has its own equations."""
    constraint = LevelSet(sphere, batch_dims=len(batch))
    w = weights(*batch, 2, 3, length=R)
    new, optimizer = run(potential, w, 10, constraint=constraint, lr=0.01, scheme=scheme)
    assert sphere(new).abs().max() < 1e-14
    assert optimizer.report().groups[0].dof == w.numel() - w.numel() // 3
    closed, _ = run(
        potential,
        w,
        10,
        lr=0.01,
        scheme=scheme,
        constraint=Sphere(R, slack=False, dim=0, batch_dims=len(batch)),
    )
    # EM: to rounding. OBA: RATTLE and the geodesic differ by (|v| h / R)^3 / 6 a step.
    assert (new - closed).abs().max() < (ROUNDING if scheme == "EM" else 0.05)


# ---------------------------------------------------------------------- placing
AXES = torch.tensor([1.5, 1.0, 0.8], dtype=torch.float64)


def ellipsoid(q: Tensor) -> Tensor:
    return ((q / AXES.to(q)) ** 2).sum(-1) - 1


@pytest.mark.parametrize("length", [0.9, 1.1, 3.0])
def test_placement_is_the_nearest_point(length):
    """On the ellipsoid, with the way there along its normal, and no point of a fine cover nearer."""
    w = weights(5, 3, length=length)
    new, _ = run(potential, w, 0, constraint=LevelSet(ellipsoid), lr=0.1)
    assert ellipsoid(new).abs().max() < 1e-14
    normal = torch.nn.functional.normalize(new / AXES**2, dim=1)
    way = w - new
    across = way - (way * normal).sum(1, keepdim=True) * normal
    assert across.abs().max() < 1e-13
    u = torch.randn(100_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    cover = AXES * torch.nn.functional.normalize(u, dim=1)
    assert (torch.cdist(w, cover).amin(1) > way.norm(dim=1) - 1e-12).all()


def test_placement_leaves_weights_that_fit():
    inside = weights(4, 3, length=0.5)
    new, _ = run(potential, inside, 0, lr=0.1, constraint=LevelSet(sphere, inequality=True))
    assert torch.equal(new, inside)


def test_placement_of_an_inequality_ends_inside():
    """With room for the slack: at the bound itself it would be 0 and the weights stuck."""
    w = weights(4, 3, length=2.0)
    new, _ = run(potential, w, 0, lr=0.1, constraint=LevelSet(sphere, inequality=True))
    c = sphere(new)
    assert (c < 0).all()
    assert (c > -0.05).all()


def test_placement_error():
    w = weights(4, 3, length=2 * R)
    with pytest.raises(ConstraintError, match=r"off by 1\.92 and init='error'"):
        run(potential, w, 0, lr=0.1, constraint=LevelSet(sphere, init="error"))


def test_placement_impossible():
    w = weights(4, 3)
    with pytest.raises(ConstraintError, match="no point where fn fits was found"):
        run(potential, w, 0, lr=0.1, constraint=LevelSet(lambda q: (q**2).sum(-1) + 1))


# ---------------------------------------------------------------------- lost rank
def test_repeated_equations_are_refused_before_anything_is_changed():
    q = torch.nn.Parameter(random_orthonormal(5, 3) + 0.01)
    before = q.detach().clone()
    whole = LevelSet(lambda q: q.mT @ q - torch.eye(3, dtype=q.dtype))  # both triangles
    with pytest.raises(ConstraintError, match=r"loses rank.*keep one triangle"):
        Langevin([q], lr=0.1, constraint=whole)
    assert torch.equal(q.detach(), before)


def cross(q: Tensor) -> Tensor:
    """The two axes of the plane; where they meet there is no tangent."""
    return q[..., 0] * q[..., 1]


@pytest.mark.parametrize("steps_before", [0, 3])
def test_rank_lost_in_a_step_changes_nothing(steps_before):
    """The step that would land on the crossing raises; weights, momenta and other groups stay."""
    q = torch.nn.Parameter(torch.tensor([1.0, 0.0], dtype=torch.float64))
    other = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups = [
        {"params": [other], "constraint": Sphere(2.0, dim=None)},
        {"params": [q], "constraint": LevelSet(cross)},
    ]
    optimizer = Langevin(groups, lr=0.5, momentum=0.5)
    for _ in range(steps_before):
        q.grad = torch.tensor([0.0625, 0.25], dtype=torch.float64)
        other.grad = torch.ones_like(other)
        optimizer.step()
    v = optimizer.state[q].get("momentum_buffer", torch.zeros_like(q)).clone()
    before = q.detach().clone(), other.detach().clone()
    states = {
        (i, k): t.clone() for i, p in enumerate((q, other)) for k, t in optimizer.state[p].items()
    }
    # q - lr (momentum v + g) = 0, exactly: all numbers are sums of few powers of two.
    q.grad = q.detach() / 0.5 - 0.5 * v
    other.grad = torch.ones_like(other)
    with pytest.raises(ConstraintError, match="loses rank"):
        optimizer.step()
    assert torch.equal(q.detach(), before[0])
    assert torch.equal(other.detach(), before[1])
    for i, p in enumerate((q, other)):
        for key, t in optimizer.state[p].items():
            assert torch.equal(
                t, states.get((i, key), t if key == "slack" else torch.zeros_like(t))
            )
    # Nothing is broken: another gradient, and the run goes on.
    q.grad = torch.tensor([0.1, 0.0], dtype=torch.float64)
    optimizer.step()
    assert cross(q.detach()) == 0
    assert not torch.equal(q.detach(), before[0])


@pytest.mark.parametrize("scheme", ["OBA", "EM"])
def test_a_step_too_large_is_counted_and_on_the_manifold(scheme):
    """Along the old normal no point fits: the nearest is taken."""
    slope_ = torch.tensor([[0.0, 30.0, 0.0]], dtype=torch.float64)
    start = torch.tensor([[R, 0.0, 0.0]], dtype=torch.float64)
    constraint = LevelSet(sphere, projection="oblique")
    new, optimizer = run(
        lambda q: q * slope_, start, 1, constraint=constraint, lr=0.1, scheme=scheme
    )
    assert optimizer.report().groups[0].fallbacks == 1
    assert sphere(new).abs().max() < 1e-14
    assert new[0, 1] < 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fn": 3}, "fn is 3; it must be a function"),
        ({"fn": sphere, "projection": "radial"}, "projection is 'radial'; it must be one of"),
        ({"fn": sphere, "max_iterations": 0}, "max_iterations is 0; it must be an integer >= 1"),
        ({"fn": sphere, "init": "orthogonal"}, "init is 'orthogonal'; it must be one of"),
        ({"fn": sphere, "batch_dims": -1}, "batch_dims is -1"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(SettingError, match=message):
        LevelSet(**settings)
