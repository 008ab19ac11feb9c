"""One battery for every constraint: on the manifold and cotangent after every step.

What is tested is g and g'v written out here, in double precision, not the library's own residual.
Tolerances follow from the working precision w (float64, else float32: lower ones are computed in
float32) and the precision s the result is stored in, with eps the spacing at 1, rounding eps/2:

    * a residual is computed and removed with sums of d terms, each rounded a few times:
      |g| <= (d + 16) eps_w scale, where 16 eps_w is also where the iterations stop;
    * storing rounds both factors of every product: + eps_s scale, if s is lower than w;
    * the same holds for g'v = 2 q.v with |q||v| as scale.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import holonomic.constraints
from helpers import SCHEMES, phase, random_orthonormal, run
from holonomic import Circle, LevelSet, Orthogonal, Sphere
from holonomic.constraints import Constraint, Free
from holonomic.phase import Phase

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


# ---------------------------------------------------------------------- the registry
@dataclass(frozen=True)
class Case:
    """A constraint on weights of one shape, and its equations written out.

    ``residuals(x)`` gives pairs (|g|, scale) and ``cotangency(x)`` pairs (|g'v|, scale), for a
    phase point with any leading dimensions; ``terms`` is the number of terms in a sum. ``length``
    is that of the rows before they are placed, for a search that must start near its end."""

    make: Callable[[int], Constraint]
    shape: tuple[int, ...]
    terms: int
    residuals: Callable[[Phase], tuple[Tensor, Tensor]]
    cotangency: Callable[[Phase], tuple[Tensor, Tensor]]
    length: float | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES


def nothing(x: Phase) -> tuple[Tensor, Tensor]:
    return torch.zeros(1), torch.ones(1)


def circle(r: Tensor | float) -> dict:
    def residuals(x: Phase) -> tuple[Tensor, Tensor]:
        r2 = torch.as_tensor(r, dtype=torch.float64) ** 2
        return (x.q[0] ** 2 + x.xi[0] ** 2 - r2).abs(), r2.expand(x.q[0].shape)

    # The momentum is the angular velocity w of (theta, xi): (w xi, -w theta) is always tangent.
    return {"residuals": residuals, "cotangency": nothing}


def sphere(r: Tensor | float, dims: tuple[int, ...]) -> dict:
    """Sums over the last dimensions ``dims``; r with those dimensions kept."""

    def dot(a: list[Tensor], b: list[Tensor], xa: list[Tensor], xb: list[Tensor]) -> Tensor:
        total = (a[0] * b[0]).sum(dims, keepdim=True)
        return total + (xa[0] * xb[0]) if xa else total

    def residuals(x: Phase) -> tuple[Tensor, Tensor]:
        g = dot(x.q, x.q, x.xi, x.xi) - torch.as_tensor(r, dtype=torch.float64) ** 2
        return g.abs(), torch.as_tensor(r, dtype=torch.float64).expand(g.shape) ** 2

    def cotangency(x: Phase) -> tuple[Tensor, Tensor]:
        speed = dot(x.v, x.v, x.eta, x.eta).sqrt()
        return 2 * dot(x.q, x.v, x.xi, x.eta).abs(), 2 * r * speed

    return {"residuals": residuals, "cotangency": cotangency}


def orthogonal(shape: tuple[int, ...], scale: float = 1.0) -> dict:
    def tall(t: Tensor) -> Tensor:
        matrix = t.flatten(t.dim() - len(shape) + 1)
        return matrix.mT if matrix.shape[-2] < matrix.shape[-1] else matrix

    def residuals(x: Phase) -> tuple[Tensor, Tensor]:
        Q = tall(x.q[0])
        g = Q.mT @ Q - scale**2 * torch.eye(Q.shape[-1], dtype=Q.dtype)
        return g.abs(), torch.full_like(g, scale**2)

    def cotangency(x: Phase) -> tuple[Tensor, Tensor]:
        Q, V = tall(x.q[0]), tall(x.v[0])
        S = Q.mT @ V
        speed = torch.linalg.matrix_norm(V, keepdim=True)
        return (S + S.mT).abs(), 2 * scale * speed.expand(S.shape)

    return {"residuals": residuals, "cotangency": cotangency}


AXES = torch.tensor([1.5, 1.0, 0.8])


def ellipsoid(q: Tensor) -> Tensor:
    """Rows on an ellipsoid: no sphere, and the normals differ in length from point to point."""
    return ((q / AXES.to(q)) ** 2).sum(-1) - 1


def on_ellipsoids() -> dict:
    w = 1 / AXES.double() ** 2

    def residuals(x: Phase) -> tuple[Tensor, Tensor]:
        g = (w * x.q[0] ** 2).sum(-1) - 1
        g = g + x.xi[0].reshape(g.shape) ** 2 if x.xi else g
        return g.abs(), torch.ones_like(g)

    def cotangency(x: Phase) -> tuple[Tensor, Tensor]:
        gv = (w * x.q[0] * x.v[0]).sum(-1)
        speed = torch.linalg.vector_norm(x.v[0], dim=-1)
        if x.xi:
            eta = x.eta[0].reshape(gv.shape)
            gv, speed = gv + x.xi[0].reshape(gv.shape) * eta, speed + eta.abs()
        # One row's projection mixes in rounding errors of the others (one solve for all rows).
        return 2 * gv.abs(), 2 * speed.amax(-1, keepdim=True).expand(gv.shape)

    return {"residuals": residuals, "cotangency": cotangency, "length": 1.6}


ROWS = torch.tensor([0.5, 1.0, 2.0])
MATRIX, CONV = (3, 4), (3, 2, 2, 2)
REGISTRY = {
    "free": Case(lambda b: Free(), MATRIX, 0, nothing, nothing),
    "circle": Case(lambda b: Circle(0.7, batch_dims=b), MATRIX, 2, **circle(0.7)),
    "circle, radii": Case(
        lambda b: Circle(ROWS.reshape(3, 1), batch_dims=b), MATRIX, 2, **circle(ROWS.reshape(3, 1))
    ),
    "circle, conv": Case(lambda b: Circle(2.0, batch_dims=b), CONV, 2, **circle(2.0)),
    "sphere": Case(lambda b: Sphere(1.5, batch_dims=b), MATRIX, 5, **sphere(1.5, (-1,))),
    "sphere, radii": Case(
        lambda b: Sphere(ROWS, batch_dims=b), MATRIX, 5, **sphere(ROWS.reshape(3, 1), (-1,))
    ),
    "sphere, columns": Case(
        lambda b: Sphere(1.0, dim=1, batch_dims=b), MATRIX, 4, **sphere(1.0, (-2,))
    ),
    "sphere, whole": Case(
        lambda b: Sphere(1.0, dim=None, batch_dims=b), MATRIX, 13, **sphere(1.0, (-2, -1))
    ),
    "sphere, conv": Case(lambda b: Sphere(1.0, batch_dims=b), CONV, 9, **sphere(1.0, (-3, -2, -1))),
    "sphere, equality": Case(
        lambda b: Sphere(0.6, slack=False, batch_dims=b), MATRIX, 4, **sphere(0.6, (-1,))
    ),
    "orthogonal, wide": Case(lambda b: Orthogonal(batch_dims=b), (3, 5), 5, **orthogonal((3, 5))),
    "orthogonal, tall": Case(lambda b: Orthogonal(batch_dims=b), (5, 3), 5, **orthogonal((5, 3))),
    "orthogonal, square": Case(lambda b: Orthogonal(batch_dims=b), (3, 3), 3, **orthogonal((3, 3))),
    "orthogonal, conv": Case(lambda b: Orthogonal(batch_dims=b), CONV, 8, **orthogonal(CONV)),
    "orthogonal, scaled": Case(
        lambda b: Orthogonal(2.5, batch_dims=b), (5, 3), 5, **orthogonal((5, 3), 2.5)
    ),
    "level set": Case(lambda b: LevelSet(ellipsoid, batch_dims=b), (2, 3), 6, **on_ellipsoids()),
    "level set, oblique": Case(
        lambda b: LevelSet(ellipsoid, projection="oblique", batch_dims=b),
        (2, 3),
        6,
        **on_ellipsoids(),
    ),
    "level set, inequality": Case(
        lambda b: LevelSet(ellipsoid, inequality=True, batch_dims=b), (2, 3), 8, **on_ellipsoids()
    ),
}


#: Every constraint with every type it takes; in a hurry one of 16 bits and one of level sets do.
TYPED = [
    pytest.param(
        *(name, dtype),
        id=f"{name}-{str(dtype).removeprefix('torch.')}",
        marks=[pytest.mark.slow] if dtype is torch.float16 or name == "level set, oblique" else [],
    )
    for name, case in REGISTRY.items()
    for dtype in case.dtypes
]


def test_every_exported_constraint_is_in_the_registry():
    exported = {getattr(holonomic.constraints, name) for name in holonomic.constraints.__all__}
    exported = {c for c in exported if issubclass(c, Constraint)} - {Constraint}
    tested = {type(case.make(0)) for case in REGISTRY.values()}
    assert len(exported) >= 4
    assert exported == tested


# ---------------------------------------------------------------------- the battery
def potential(q: Tensor) -> Tensor:
    return torch.sin(2 * q) + 0.3 * (q - 0.2) ** 2


def start(case: Case, batch: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Weights off the manifold, most of them beyond the bounds: placing is part of the test."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(*batch, *case.shape, dtype=torch.float64, generator=generator)
    if case.length:
        w *= case.length / torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    return w.to(dtype)


def bound(case: Case, dtype: torch.dtype) -> float:
    """The tolerance for a scale of 1, derived above."""
    working = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    stored = torch.finfo(dtype).eps
    return (case.terms + 16) * working + (stored if stored > working else 0.0)


def require(measured: tuple[Tensor, Tensor], tolerance: float) -> None:
    error, scale = measured
    assert torch.isfinite(error).all()
    ratio = (error / scale.clamp(min=1e-30)).max().item()
    assert ratio <= tolerance, f"off by {ratio:.3g}, tolerance {tolerance:.3g}"


BATCHES = {0: (), 1: (2,), 2: (2, 3)}


@pytest.mark.parametrize("batch_dims", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_on_the_manifold_and_cotangent_after_every_step(name, scheme, dtype, batch_dims):
    case = REGISTRY[name]
    seen = []

    def look(q: Tensor, optimizer) -> None:
        assert q.dtype == dtype
        x = phase(q, optimizer)
        require(case.residuals(x), bound(case, dtype))
        if x.v:
            require(case.cotangency(x), bound(case, dtype))
        seen.append(x.q[0])

    lr = 0.01 if scheme in ("EM", "LM") else 0.02
    settings = {"lr": lr, "momentum": 0.9, "temperature": 0.2, "seed": 1, "scheme": scheme}
    w = start(case, BATCHES[batch_dims], dtype)
    constraint = case.make(batch_dims)
    _, optimizer = run(potential, w, 4, look, constraint=constraint, **settings)
    assert len(seen) == 4
    assert not torch.equal(seen[0], seen[-1])
    report = optimizer.report().groups[0]
    assert report.fallbacks == 0
    # The library's own measure agrees with ours on where the weights are.
    scale = 8 * max(
        1.0,
        case.residuals(phase(optimizer.param_groups[0]["params"][0], optimizer))[1].max().item(),
    )
    assert report.residual <= scale * bound(case, dtype)


@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_weights_are_placed_when_the_optimizer_is_built(name, dtype):
    """Before any step; an inequality is met, an equality holds to the same tolerance as later."""
    case = REGISTRY[name]
    # 1.3 times the manifold: near, but visibly off even in the lowest precision.
    near, _ = run(potential, start(case, (), torch.float64), 0, lr=0.1, constraint=case.make(0))
    w, optimizer = run(potential, (1.3 * near).to(dtype), 0, lr=0.1, constraint=case.make(0))
    assert not optimizer.state
    slack = case.make(0).slacks([w.double()])
    g, scale = case.residuals(Phase([w.double()], xi=slack))
    # Slacks are taken at the weights as they are, so an inequality fits exactly if it is met.
    require((g, scale), bound(case, dtype))


@pytest.mark.parametrize(("name", "dtype"), TYPED)
def test_weights_on_the_manifold_stay_bit_for_bit(name, dtype):
    case = REGISTRY[name]
    settings = {"lr": 0.02, "temperature": 0.2, "seed": 1}
    w, _ = run(potential, start(case, (), dtype), 5, constraint=case.make(0), **settings)
    # With slack, weights within 1/256 of the bound are moved inwards on purpose.
    if "xi" in case.make(0).lists:
        w, _ = run(potential, w, 0, lr=0.1, constraint=case.make(0))
    again, _ = run(potential, w, 0, lr=0.1, constraint=case.make(0))
    assert torch.equal(again, w)


@pytest.mark.parametrize("name", REGISTRY)
@pytest.mark.parametrize("scheme", ["BAOAB", "EM"])
def test_a_batch_entry_does_not_depend_on_the_others(name, scheme):
    """To rounding: 8 steps of roundings of 1e-16, in motions that keep differences small."""
    case = REGISTRY[name]
    w = start(case, (3,), torch.float64)
    settings = {"lr": 0.01, "scheme": scheme}
    together, _ = run(potential, w, 8, constraint=case.make(1), **settings)
    for i in range(3):
        alone, _ = run(potential, w[i], 8, constraint=case.make(0), **settings)
        assert (together[i] - alone).abs().max() < 1e-12


# ---------------------------------------------------------------------- long runs
@pytest.mark.slow
def test_circle_after_a_million_drifts():
    """A few ulp: the same tolerance as after one step, nothing has piled up."""
    case = REGISTRY["circle"]
    constraint = case.make(0)
    q = torch.linspace(-0.69, 0.69, 16)
    x = Phase([q], v=[torch.linspace(-3, 5, 16)], xi=constraint.slacks([q]))
    for _ in range(1_000_000):
        constraint.drift_(x, 0.37)
    require(case.residuals(x.map(Tensor.double)), bound(case, torch.float32))
    assert bound(case, torch.float32) < 20 * torch.finfo(torch.float32).eps


@pytest.mark.slow
def test_sphere_after_a_million_drifts():
    case = REGISTRY["sphere, equality"]
    constraint = case.make(0)
    x = Phase([torch.randn(4, 4, generator=torch.Generator().manual_seed(0))])
    constraint.place_(x.q, ["w"])
    x.v = [torch.randn(4, 4, generator=torch.Generator().manual_seed(1))]
    constraint.project_(x)
    speed = x.v[0].norm(dim=1)
    for _ in range(1_000_000):
        constraint.drift_(x, 0.37)
    require(case.residuals(x.map(Tensor.double)), bound(case, torch.float32))
    require(case.cotangency(x.map(Tensor.double)), bound(case, torch.float32))
    # Nothing renews the speed. It drifts by rounding, but far less than a million times eps = 0.12.
    assert ((x.v[0].norm(dim=1) / speed - 1).abs() < 0.01).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["circle", "sphere"])
def test_circle_and_sphere_after_many_noisy_steps(name):
    case = REGISTRY[name]
    w = torch.nn.Parameter(start(case, (), torch.float32))
    settings = {"lr": 0.02, "temperature": 0.5, "seed": 0, "nonfinite": "allow"}
    optimizer = holonomic.Langevin([w], constraint=case.make(0), **settings)
    for _ in range(10_000):
        w.grad = w.detach() - 0.3
        optimizer.step()
    x = phase(w, optimizer)
    require(case.residuals(x), bound(case, torch.float32))
    require(case.cotangency(x), bound(case, torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)], ids=["f32", "f64"]
)
def test_orthogonal_after_ten_thousand_noisy_steps(dtype, tolerance):
    case = REGISTRY["orthogonal, tall"]
    w = torch.nn.Parameter(start(case, (), dtype))
    settings = {"lr": 0.01, "temperature": 0.5, "seed": 0, "nonfinite": "allow"}
    optimizer = holonomic.Langevin([w], constraint=case.make(0), **settings)
    for _ in range(10_000):
        w.grad = w.detach() - 0.3
        optimizer.step()
    g, _ = case.residuals(phase(w, optimizer))
    assert g.max() <= tolerance
    assert optimizer.report().groups[0].fallbacks == 0


# ---------------------------------------------------------------------- steps that are too large
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_orthogonal_far_too_large_a_step(scheme, dtype):
    """The iteration cannot converge: the polar factor is taken, counted, and on the manifold."""
    case = REGISTRY["orthogonal, tall"]
    slope = 100 * torch.randn(5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    fallbacks = []

    def look(q, optimizer):
        x = phase(q, optimizer)
        require(case.residuals(x), bound(case, dtype))
        assert all(torch.isfinite(t).all() for t in (*x.q, *x.v))
        fallbacks.append(optimizer.report().groups[0].fallbacks)

    w = random_orthonormal(5, 3, dtype=dtype)
    settings = {"lr": 0.5, "constraint": case.make(0), "scheme": scheme}
    run(lambda q: q * slope.to(q), w, 5, look, **settings)
    assert len(fallbacks) == 5
    assert fallbacks[-1] > 0
    assert fallbacks == sorted(fallbacks)


def test_orthogonal_only_the_entry_that_failed_falls_back():
    case = REGISTRY["orthogonal, tall"]
    w = random_orthonormal(3, 5, 3)
    g = 0.1 * torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    calm, _ = run(lambda q: q * g, w, 1, lr=0.1, constraint=case.make(1))
    g[1] *= 1e4
    shaken, optimizer = run(lambda q: q * g, w, 1, lr=0.1, constraint=case.make(1))
    assert optimizer.report().groups[0].fallbacks == 1
    assert torch.equal(calm[0], shaken[0])
    assert torch.equal(calm[2], shaken[2])
    # The nearest orthogonal matrix to where the step went, Q - lr v with v = P(Q) g.
    Q, G = w[1], g[1]
    S = Q.T @ G
    U, _, Vh = torch.linalg.svd(Q - 0.1 * (G - Q @ (S + S.T) / 2), full_matrices=False)
    assert (shaken[1] - U @ Vh).abs().max() < 1e-12
    require(
        case.residuals(phase(optimizer.param_groups[0]["params"][0], optimizer)),
        bound(case, torch.float64),
    )


def test_orthogonal_an_overflowing_step_stays_where_it_is():
    w = random_orthonormal(5, 3, dtype=torch.float32)
    huge = torch.full_like(w, 1e38)
    new, optimizer = run(lambda q: q * huge, w, 1, lr=1e3, constraint=Orthogonal())
    assert torch.equal(new, w)
    assert optimizer.report().groups[0].fallbacks == 1


@pytest.mark.parametrize("name", ["circle", "sphere", "sphere, equality"])
def test_closed_forms_have_no_step_that_is_too_large(name):
    case = REGISTRY[name]
    for scheme in SCHEMES:
        w, optimizer = run(
            lambda q: 1e4 * potential(q),
            start(case, (), torch.float64),
            5,
            lr=10.0,
            constraint=case.make(0),
            scheme=scheme,
        )
        require(case.residuals(phase(w, optimizer)), bound(case, torch.float64))
        assert optimizer.report().groups[0].fallbacks == 0
