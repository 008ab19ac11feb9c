"""What the chains sample: every expectation as a z-score against its exact value.

All chains of a test are entries of one tensor, independent of each other, so the spread between them
gives the standard error. Seeds are fixed; |z| < 4 fails by chance once in 16,000 honest tests.

Steps: where the stationary law of the *discrete* chain is known (harmonic potential, symmetric
manifolds) steps are large and nothing is left to h. Elsewhere the bias of first order is removed by
extrapolation from two steps, 2 E(h/2) - E(h), with independent chains, and what is left of second
order is below a third of the standard error (seen by doubling h: |z| grows by less than 1).
"""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special
from torch import Tensor

from helpers import OVERDAMPED, SCHEMES, UNDERDAMPED, free, run, slope, z_score
from holonomic import Circle, Langevin, LevelSet, Orthogonal, Sphere, from_paper

Z = 4.0

# ---------------------------------------------------------------------- harmonic, no constraint
# Where the library hands back the weights in the stream of a scheme's letters.
SHIFTED = {
    "OBA": "OBA",
    "ABO": "BOA",
    "BAO": "OBA",
    "BAOA": "BAOA",
    "BAOAB": "BBAOA",
    "ABOBA": "BOBAA",
    "OBABO": "BOOBA",
    "BOAOB": "OBBOA",
}
OMEGA2, TAU, GAMMA = 1.3, 0.6, 0.7


def stationary(letters: str, h: float) -> tuple[np.ndarray, float]:
    """Covariance of (q, p) under U = omega^2 q^2 / 2, from S = M S M^T + N; and M's spectral radius.

    Paper units; for EM and LM h is the step and the pair is (q, last noise)."""
    if letters in OVERDAMPED:
        weight = 1.0 if letters == "EM" else 0.5
        s = math.sqrt(2 * TAU * h)
        M = np.array([[1 - h * OMEGA2, s * (1 - weight)], [0.0, 0.0]])
        b = np.array([[s * weight], [1.0]])
        N = b @ b.T
    else:
        M, N = np.eye(2), np.zeros((2, 2))
        for letter in SHIFTED[letters]:
            t = h / letters.count(letter)
            mu = math.exp(-GAMMA * t)
            step = {
                "A": np.array([[1, t], [0, 1]]),
                "B": np.array([[1, 0], [-t * OMEGA2, 1]]),
                "O": np.diag([1, mu]),
            }[letter]
            noise = np.diag([0, TAU * (1 - mu * mu)]) if letter == "O" else np.zeros((2, 2))
            M, N = step @ M, step @ N @ step.T + noise
    S = np.linalg.solve(np.eye(4) - np.kron(M, M), N.reshape(4)).reshape(2, 2)
    return S, float(np.abs(np.linalg.eigvals(M)).max())


def harmonic(q: Tensor) -> Tensor:
    return OMEGA2 * q**2 / 2


@pytest.mark.parametrize("h", [0.4, 0.9])
@pytest.mark.parametrize("scheme", [*SCHEMES, "BOAOB"])
def test_harmonic_covariance_is_that_of_the_discrete_chain(scheme, h):
    """Exact at any step size, for position, momentum and their correlation."""
    chains, steps = 100_000, 120 if h < 0.5 else 60
    S, radius = stationary(scheme, h)
    assert radius ** (2 * steps) < 1e-6, "the start must be forgotten"
    settings = {"lr": h} if scheme in OVERDAMPED else from_paper(h, GAMMA)
    start = torch.full((chains,), 0.5, dtype=torch.float64)
    q, optimizer = run(harmonic, start, steps, scheme=scheme, temperature=TAU, seed=1, **settings)
    assert abs(z_score(q**2, S[0, 0])) < Z
    assert abs(z_score(q, 0.0)) < Z
    if scheme not in OVERDAMPED:
        (state,) = optimizer.state.values()
        p = -h * state["momentum_buffer"]
        assert abs(z_score(p**2, S[1, 1])) < Z
        assert abs(z_score(q * p, S[0, 1])) < Z


@pytest.mark.parametrize("scheme", SCHEMES)
def test_order_of_the_bias_in_position(scheme):
    """Of the variance tau / omega^2: EM is of first order in lr, BAOAB and its limit LM are exact,
    the other symmetric schemes of second order in h, and OBA and its shifts of first. (Derived from
    the chain that the test above confirms.)"""
    exact = TAU / OMEGA2
    steps = [0.02, 0.01, 0.005, 0.0025]
    errors = [abs(stationary(scheme, h)[0][0, 0] / exact - 1) for h in steps]
    if scheme in ("BAOAB", "BAOA", "LM"):
        assert max(errors) < 1e-12
    else:
        order = 2 if scheme in ("ABOBA", "OBABO") else 1
        assert slope(steps, errors) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("scheme", ["BAOAB", "LM"])
def test_exact_schemes_sample_the_harmonic_variance_even_with_huge_steps(scheme):
    h = 1.2
    settings = {"lr": h} if scheme == "LM" else from_paper(h, GAMMA)
    start = torch.zeros(100_000, dtype=torch.float64)
    q, _ = run(harmonic, start, 80, scheme=scheme, temperature=TAU, seed=2, **settings)
    assert abs(z_score(q**2, TAU / OMEGA2)) < Z
    assert abs(z_score(q**4, 3 * (TAU / OMEGA2) ** 2)) < Z


# ---------------------------------------------------------------------- linear loss on spheres
KAPPA, RADIUS = 1.5, 1.2


def resultant(p: int) -> tuple[float, float]:
    """E[x] and E[x^2] of the cosine x to the mean direction, von Mises-Fisher in p dimensions."""
    A = special.iv(p / 2, KAPPA) / special.iv(p / 2 - 1, KAPPA)
    return A, 1 - (p - 1) / KAPPA * A


#: name -> (dimension p of the space around, constraint, start of a chain, radius, chains, cosine x)
LINEAR = {
    "circle": (2, Circle(RADIUS), torch.tensor(-0.5), RADIUS, 20_000, lambda q: q),
    "sphere, equality": (
        3,
        Sphere(RADIUS, slack=False),
        torch.tensor([-1.0, 0.5, 0.0]),
        RADIUS,
        20_000,
        lambda q: q[:, 0],
    ),
    "sphere": (
        4,
        Sphere(RADIUS),
        torch.tensor([-0.5, 0.5, 0.0]),
        RADIUS,
        20_000,
        lambda q: q[:, 0],
    ),
    "orthogonal": (
        3,
        Orthogonal(batch_dims=1),
        torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]),
        1.0,
        4000,
        lambda q: q[:, 0, 0],
    ),
}


SAMPLED = [
    pytest.param(
        *(name, scheme),
        marks=[pytest.mark.slow] if name == "orthogonal" and scheme in OVERDAMPED else [],
        id=f"{name}-{scheme}",
    )
    for name in LINEAR
    for scheme in ("EM", "LM", "OBA", "ABO", "BAOAB")
]


@pytest.mark.parametrize(("name", "scheme"), SAMPLED)
def test_linear_loss_gives_von_mises_fisher(name, scheme):
    """U = -tau kappa x at temperature tau: density exp(kappa x) on the sphere around.

    With slack the pair (weights, slack) is on the sphere. Of an orthogonal matrix one column is
    uniform on its sphere without a loss, so a loss on this column makes it von Mises-Fisher too.
    All chains start at one point and run for six relaxation times or more."""
    p, constraint, start, radius, chains, cosine = LINEAR[name]
    start = start.repeat(chains, *[1] * start.dim())
    first, second = resultant(p)

    def sample(h: float, seed: int) -> Tensor:
        overdamped = scheme in OVERDAMPED
        settings = {"lr": h} if overdamped else from_paper(h, gamma=1.0)
        q, optimizer = run(
            lambda q: -TAU * KAPPA / radius * cosine(q),
            start,
            round((7 if overdamped else 17) / h),
            scheme=scheme,
            temperature=TAU,
            seed=seed,
            constraint=constraint,
            **settings,
        )
        assert optimizer.report().groups[0].fallbacks == 0
        return cosine(q).double() / radius

    if scheme == "BAOAB":
        x = sample(0.1, 3)
        assert abs(z_score(x, first)) < Z
        assert abs(z_score(x**2, second)) < Z
    else:
        h = 0.02 if scheme in OVERDAMPED else 0.08
        x, y = sample(h, 3), sample(h / 2, 4)
        assert abs(z_score(2 * y - x, first)) < Z
        assert abs(z_score(2 * y**2 - x**2, second)) < Z


# ---------------------------------------------------------------------- Haar measure
@pytest.mark.parametrize(
    "scheme", [pytest.param("EM", marks=pytest.mark.slow), "LM", "OBA", "ABO", "BAOAB"]
)
@pytest.mark.parametrize(("r", "s"), [(4, 2), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_stiefel_without_a_loss_is_haar(r, s, scheme):
    """Second moments 1/r, fourth moments 3/(r(r+2)), and one across rows and columns.

    Steps are large: the step commutes with rotations, so Haar measure is exactly invariant. Square
    matrices keep the sign of their determinant, which even moments of this degree do not see."""
    chains = 4000
    start = torch.eye(r, s).repeat(chains, 1, 1)
    # Steps that the projection finds its way back from: noise of 0.2 an entry.
    settings = {"lr": 0.02} if scheme in OVERDAMPED else from_paper(h=0.15, gamma=1.5)
    q, _ = run(
        free,
        start,
        200,
        scheme=scheme,
        temperature=1.0,
        seed=4,
        constraint=Orthogonal(batch_dims=1),
        **settings,
    )
    assert abs(z_score(q[:, 0, 0], 0.0)) < Z
    for i, j in ((0, 0), (r - 1, s - 1), (r - 1, 0)):
        assert abs(z_score(q[:, i, j] ** 2, 1 / r)) < Z
        assert abs(z_score(q[:, i, j] ** 4, 3 / (r * (r + 2)))) < Z
    same_column = q[:, 0, 0] ** 2 * q[:, 1, 0] ** 2
    assert abs(z_score(same_column, 1 / (r * (r + 2)))) < Z
    both_differ = q[:, 0, 0] ** 2 * q[:, 1, 1] ** 2
    assert abs(z_score(both_differ, (r + 1) / ((r - 1) * r * (r + 2)))) < Z


# ---------------------------------------------------------------------- a manifold without symmetry
AXES = (1.5, 1.0)


def ellipse(q: Tensor) -> Tensor:
    return q[..., 0] ** 2 / AXES[0] ** 2 + q[..., 1] ** 2 / AXES[1] ** 2 - 1


@pytest.mark.parametrize(
    "projection", [pytest.param("orthogonal", marks=pytest.mark.slow), "oblique"]
)
@pytest.mark.parametrize("scheme", ["EM", "LM", "OBA", "BAOAB"])
def test_level_set_without_a_loss_is_uniform_in_arc_length(scheme, projection):
    """On an ellipse arc length is neither the angle nor the density |grad g|^-1 of a thin shell."""
    a, b = AXES

    def mean(f) -> float:
        def speed(t: float) -> float:
            return math.hypot(a * math.sin(t), b * math.cos(t))

        total = integrate.quad(
            lambda t: speed(t) * f(a * math.cos(t), b * math.sin(t)), 0, 2 * math.pi
        )
        return total[0] / integrate.quad(speed, 0, 2 * math.pi)[0]

    # Uniform in the angle: wrong, but with the right symmetry, so that only fast modes are to relax.
    angle = torch.linspace(0, 2 * math.pi, 4001)[:-1]
    start = torch.stack([a * torch.cos(angle), b * torch.sin(angle)], dim=1)

    overdamped = scheme in OVERDAMPED
    settings = {"lr": 0.01} if overdamped else from_paper(h=0.1, gamma=1.0)
    q, optimizer = run(
        free,
        start,
        150 if overdamped else 80,
        scheme=scheme,
        temperature=1.0,
        seed=5,
        constraint=LevelSet(ellipse, projection=projection, batch_dims=1),
        **settings,
    )
    assert optimizer.report().groups[0].fallbacks < 10  # of 600,000: noise of 4 sigma happens
    x, y = q[:, 0], q[:, 1]
    assert abs(z_score(x**2, mean(lambda x, y: x * x))) < Z
    assert abs(z_score(x**2 * y**2, mean(lambda x, y: x * x * y * y))) < Z
    assert abs(z_score(x, 0.0)) < Z


# ---------------------------------------------------------------------- equipartition
def rows(q: Tensor) -> Tensor:
    return (q**2).sum(-1) - 1


WARM = {
    "none": (None, (200, 6), 1200),
    "circle": (Circle(0.7), (200, 6), 1200),
    "sphere": (Sphere(0.7), (200, 6), 1200),
    "sphere, equality": (Sphere(0.7, slack=False), (200, 6), 1000),
    "orthogonal": (Orthogonal(batch_dims=1), (100, 4, 3), 600),
    "level set": (LevelSet(rows, batch_dims=1), (200, 2, 3), 800),
    "level set, inequality": (LevelSet(rows, inequality=True, batch_dims=1), (200, 2, 3), 1200),
}


@pytest.mark.parametrize("scheme", UNDERDAMPED)
@pytest.mark.parametrize("name", WARM)
def test_equipartition(name, scheme):
    """lr |v|^2 = tau chi^2 with one degree of freedom for each weight, less the equations.

    So the kinetic temperature of report() has mean tau and standard error tau sqrt(2 / dof), here
    for four independent optimizers. Without a loss O alone sets the momenta and geodesics keep
    their size; RATTLE does to O(h^2) with h = 0.05."""
    constraint, shape, dof = WARM[name]
    h, gamma, replicas, steps = 0.05, 20.0, 4, 10
    assert math.exp(-2 * gamma * h * (steps - 1)) < 1e-6
    warmth = []
    for seed in range(replicas):
        w = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        w = torch.nn.Parameter(0.5 * w / w.norm(dim=-1, keepdim=True))
        optimizer = Langevin(
            [w],
            **from_paper(h, gamma),
            scheme=scheme,
            temperature=TAU,
            seed=seed,
            constraint=constraint,
        )
        for _ in range(steps):
            w.grad = torch.zeros_like(w)
            optimizer.step()
        report = optimizer.report().groups[0]
        assert report.dof == dof
        warmth.append(report.kinetic_temperature)
    error = TAU * math.sqrt(2 / (dof * replicas))
    assert abs(np.mean(warmth) - TAU) / error < Z
