"""The compiled kernels: the same steps as the ordinary way, and numbers that are normal."""

import math
import os
import subprocess
import sys
import warnings
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holonomic as hm
from cases import advance, build, copies
from holonomic import native
from holonomic.constraints.orthogonal import _next_residual
from holonomic.errors import CheckpointError, SettingError
from holonomic.native.build import _compiler, library

needs_compiler = pytest.mark.skipif(native.reason() is not None, reason=f"{native.reason()}")
EPS = torch.finfo(torch.float32).eps


MANIFOLDS: dict[str, Any] = {
    "none": lambda: None,
    "Circle": lambda: hm.Circle(0.4),
    "Sphere": lambda: hm.Sphere(0.8),
    "Sphere-equality": lambda: hm.Sphere(0.8, slack=False),
    "Sphere-whole": lambda: hm.Sphere(1.5, dim=None),
    "Sphere-stack": lambda: hm.Sphere(1.5, dim=None, batch_dims=1),
}


# ---------------------------------------------------------------------- steps
def pair(name: str, scheme: str, size: tuple[int, ...], **settings: Any) -> list[Any]:
    """The same weights with and without the kernels, after 20 steps of a force that depends on them."""
    results = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(0)
        p = nn.Parameter(0.3 * torch.randn(size, generator=generator))
        constraint = MANIFOLDS[name]()
        opt = hm.Langevin(
            [p], lr=0.05, scheme=scheme, constraint=constraint, seed=1, fused=fused, **settings
        )
        advance([p], opt, 20)
        results.append([p.detach(), *opt.state[p].values()])
    return results


@needs_compiler
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (1023, 1), (5, 205), (7, 1000), (2, 3, 4)])
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
@pytest.mark.parametrize("scheme", ["OBA", "ABO", "BAOAB", "EM"])
@pytest.mark.parametrize("name", MANIFOLDS)
def test_fused_steps_are_the_ordinary_ones(name, scheme, temperature, size):
    plain, fused = pair(name, scheme, size, temperature=temperature, weight_decay=1e-2)
    # 20 steps, each rounding a few times numbers below 1 (v: below 30, from |g| / (1 - mu) / r).
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(b, a, rtol=100 * EPS, atol=100 * EPS * max(1.0, a.abs().max()))


@needs_compiler
@pytest.mark.parametrize("name", MANIFOLDS)
def test_maximize_and_decay_reach_the_kernels(name):
    plain, fused = pair(name, "OBA", (4, 10), maximize=True, weight_decay=0.1)
    other = pair(name, "OBA", (4, 10))[0]
    torch.testing.assert_close(fused[0], plain[0], rtol=1e-5, atol=1e-5)
    assert (other[0] - plain[0]).abs().max() > 0.01


@needs_compiler
def test_rotation_is_right_for_small_and_large_angles():
    """Against double precision. The argument of sine and cosine is rounded to float32 itself, so an
    angle a is known to eps |a|; 4 eps for the polynomials and the scaling."""
    angles = torch.cat([torch.linspace(-4, 4, 2001), torch.tensor([1e-9, 30.0, -200.0, 1000.0])])
    r, n = 0.7, len(angles)
    theta = torch.rand(n, generator=torch.Generator().manual_seed(0)) * 1.2 - 0.6
    p = nn.Parameter(theta.clone())
    opt = hm.Langevin([p], lr=1.0, momentum=1.0, constraint=hm.Circle(r), fused=True)
    p.grad = torch.zeros(n)
    opt.step()  # makes the state; at rest, nothing moves
    q0, xi0 = p.detach().double(), opt.state[p]["slack"].double()
    opt.state[p]["momentum_buffer"].copy_(angles)
    opt.step()
    a = angles.double()
    exact = a.cos() * q0 - a.sin() * xi0, a.cos() * xi0 + a.sin() * q0
    allowed = r * EPS * (a.abs() + 4)
    for got, want in zip((p.detach(), opt.state[p]["slack"]), exact, strict=True):
        assert ((got.double() - want).abs() <= allowed).all()


@needs_compiler
@pytest.mark.parametrize("scheme", ["OBA", "EM"])
def test_weights_stay_on_their_circles(scheme):
    p = nn.Parameter(torch.linspace(-2, 2, 999))
    opt = hm.Langevin(
        [p],
        lr=0.01,
        scheme=scheme,
        temperature=0.1,
        constraint=hm.Circle(1.5),
        seed=0,
        fused=True,
    )
    for _ in range(5000):
        p.grad = p.detach().sin()
        opt.step()
    length2 = p.detach().double() ** 2 + opt.state[p]["slack"].double() ** 2
    assert (length2 / 1.5**2 - 1).abs().max() < 4 * EPS  # two numbers, each rounded twice
    assert torch.isfinite(opt.state[p].get("momentum_buffer", torch.zeros(1))).all()


@needs_compiler
@pytest.mark.parametrize("slack", [True, False])
def test_rows_stay_on_their_spheres(slack):
    """Sums of 300 squares: rounding of (300 / 16 + 16) additions in each of 16 lanes at most."""
    p = nn.Parameter(torch.linspace(-2, 2, 900).reshape(3, 300))
    opt = hm.Langevin(
        [p], lr=0.01, temperature=0.1, constraint=hm.Sphere(1.5, slack=slack), seed=0, fused=True
    )
    for _ in range(5000):
        p.grad = p.detach().sin()
        opt.step()
    q, v = p.detach().double(), opt.state[p]["momentum_buffer"].double()
    length2, dot, speed2 = (q * q).sum(1), (q * v).sum(1), (v * v).sum(1)
    if slack:
        xi, eta = (
            opt.state[p]["slack"].double()[:, 0],
            opt.state[p]["slack_momentum"].double()[:, 0],
        )
        length2, dot, speed2 = length2 + xi * xi, dot + xi * eta, speed2 + eta * eta
    assert (length2 / 1.5**2 - 1).abs().max() < 40 * EPS
    assert (dot.abs() / (length2 * speed2).sqrt()).max() < 40 * EPS


@needs_compiler
def test_a_weight_driven_into_its_bound_ends_there():
    p = nn.Parameter(torch.full((5000,), 0.5))
    opt = hm.Langevin([p], lr=0.1, scheme="EM", constraint=hm.Circle(1.0), fused=True)
    for _ in range(2000):
        p.grad = -torch.ones(5000)
        opt.step()
    assert (p.detach() - 1).abs().max() <= 2 * EPS
    assert (opt.state[p]["slack"] >= 0).all()


@needs_compiler
@pytest.mark.parametrize("name", ["Circle", "Sphere"])
def test_threads_do_not_change_a_bit(name):
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            results.append(pair(name, "OBA", (700, 300), temperature=1e-3)[1])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_compiler
@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "EM"])
def test_nothing_moves_without_a_step_size(scheme):
    p = nn.Parameter(torch.tensor([0.1, 0.9, 1.0, -1.0]))
    opt = hm.Langevin(
        [p],
        lr=0.0,
        scheme=scheme,
        temperature=1.0,
        constraint=hm.Circle(1.0),
        fused=True,
        seed=0,
    )
    before = p.detach().clone()
    advance([p], opt, 3)
    assert torch.equal(p.detach(), before)


@needs_compiler
def test_what_the_kernels_do_not_know_goes_the_ordinary_way():
    for name in ("Circle-tensor", "LevelSet"):
        results = []
        for way in ({"foreach": True}, {"fused": True}):
            params, opt = build(name, dtype=torch.float32, **way)
            advance(params, opt, 5)
            results.append(copies(params))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    for change in (lambda t: t.double(), lambda t: t.bfloat16(), lambda t: t.t()):
        results = []
        for way in ({"foreach": True}, {"fused": True}):
            p = nn.Parameter(change(torch.linspace(-0.3, 0.3, 12).reshape(3, 4)))
            opt = hm.Langevin([p], constraint=hm.Circle(0.4), lr=0.1, **way)
            advance([p], opt, 5)
            results.append(p.detach())
        assert torch.equal(*results)


@pytest.mark.parametrize("way", [{}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "EM", "BACDEDCAB"])
def test_orthogonal_weights_leave_a_projection_to_the_next_drift(scheme, way):
    """The same weights to rounding (float64, 30 steps); the momenta differ by what is normal."""
    results = []
    for settings in ({"fused": False}, way):
        params, opt = build("Orthogonal", scheme, **settings)
        advance(params, opt, 30)
        (report,) = opt.report().groups
        assert report.residual < 1e-13
        assert report.cotangency < 1e-12
        results.append((params, opt, report))
    (plain, one, a), (lazy, two, b) = results
    assert a.kinetic_temperature == pytest.approx(b.kinetic_temperature, rel=1e-9, nan_ok=True)
    for p, r in zip(plain, lazy, strict=True):
        torch.testing.assert_close(p, r, rtol=0, atol=1e-11)
        if scheme in ("OBA", "BAOAB"):
            momenta = (one.state[p]["momentum_buffer"], two.state[r]["momentum_buffer"])
            Q, V, W = (t.detach().flatten(1) for t in (p, *momenta))
            Q, V, W = (t if len(t) >= len(t[0]) else t.T for t in (Q, V, W))
            S = Q.T @ W
            torch.testing.assert_close(W - Q @ (S + S.T) / 2, V, rtol=0, atol=1e-9)
            assert (S + S.T).abs().max() > 1e-6  # there was something left to take off


MATRICES = [
    *[(4, 4), (7, 3), (3, 7), (33, 70), (64, 64), (100, 40), (4, 2, 3, 3), (1, 5)],
    *[(190, 180), (180, 190)],  # too large for a step within the cache
]


def orthogonal(
    fused: bool | None, shapes: list[tuple[int, ...]], steps: int, **settings: Any
) -> Any:
    """Orthogonal matrices after some steps of a force that depends on them."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    chosen = {"lr": 0.002, "constraint": hm.Orthogonal(), "seed": 1, **settings}
    opt = hm.Langevin(params, fused=fused, **chosen)
    advance(params, opt, steps)
    return params, opt


@needs_compiler
@pytest.mark.parametrize("scheme", ["OBA", "ABO", "BAOAB", "EM"])
@pytest.mark.parametrize("temperature", [0.0, 1e-4])
def test_kernels_of_orthogonal_matrices_change_rounding_alone(scheme, temperature):
    """Single matrices and stacks, tall and wide, of sizes that fill tiles and that do not."""
    shapes = [shape for shape in MATRICES for _ in range(1 + (shape[0] < 100))]
    settings = {
        "scheme": scheme,
        "temperature": temperature,
        "weight_decay": 1e-2,
        "maximize": True,
    }
    plain, _ = orthogonal(False, shapes, 20, **settings)
    fused, opt = orthogonal(True, shapes, 20, **settings)
    (report,) = opt.report().groups
    assert report.fallbacks == 0
    assert report.residual < 2e-6  # a float32 Gram matrix of rows of 190: sqrt(190) eps
    assert math.isnan(report.kinetic_temperature) or report.cotangency < 1e-4 * temperature + 1e-4
    # 20 steps of products that round sums of up to 190 numbers below 1, and pass errors on.
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=400 * EPS)


@needs_compiler
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (40, 40)])
def test_a_matrix_too_far_for_the_iteration_is_rescued_alone(shape):
    """Of three matrices in a stack one takes a step far too large: it gets its polar factor, the others do
    what they do without it."""
    results = []
    for fused in (False, True):
        params, opt = orthogonal(fused, [shape] * 3, 2)
        generator = torch.Generator().manual_seed(2)
        for p, size in zip(params, (0.1, 1e5, 0.1), strict=True):
            p.grad = size * torch.randn(shape, generator=generator)
        opt.step()
        (report,) = opt.report().groups
        assert report.fallbacks == 1
        assert report.residual < 2e-6
        results.append(copies(params))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(
            b, a, rtol=0, atol=1e-4
        )  # the polar factor of a matrix of size 50


@needs_compiler
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (180, 190)])
def test_of_matrices_in_one_tensor_only_those_too_far_are_rescued(shape):
    """The second of three takes a step far too large, and the others do what they do without it."""
    results = []
    for size in (0.1, 1e5):
        p = nn.Parameter(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)))
        opt = hm.Langevin([p], lr=0.002, constraint=hm.Orthogonal(batch_dims=1))
        p.grad = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
        p.grad[1] *= size
        opt.step()
        (report,) = opt.report().groups
        assert report.fallbacks == (size == 1e5)
        assert report.residual < 2e-6
        results.append(copies([p, opt.state[p]["momentum_buffer"]]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a[0], b[0])
        assert torch.equal(a[2], b[2])
        assert not torch.equal(a[1], b[1])


@pytest.mark.filterwarnings("ignore:fused=True has no effect")
@pytest.mark.parametrize("fused", [False, True])
def test_matrices_without_numbers_stay_as_they_are(fused):
    shapes = [(0, 5), (5, 0), (3, 2)]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    opt = hm.Langevin(params, lr=0.1, constraint=hm.Orthogonal(), fused=fused)
    advance(params, opt, 2)
    assert [tuple(p.shape) for p in params] == shapes
    assert opt.report().groups[0].residual < 1e-6


@pytest.mark.parametrize("size", [0.01, 0.1, 0.5])
def test_the_iteration_knows_a_bound_of_its_next_residual(size):
    """It may end without computing it: in float64, for any C = Q^T B, symmetric M and G."""
    generator = torch.Generator().manual_seed(3)
    for s in (1, 2, 5, 40):
        K, M, G = (
            size * torch.randn(s, s, generator=generator).double() / s**0.5 for _ in range(3)
        )
        M, G = M + M.T, G + G.T
        eye = torch.eye(s).double()

        def residual(M, K=K, G=G, eye=eye):
            T = (eye - K - M / 2).T @ M
            return G - T - T.T

        F = residual(M)
        new = M + F / 2
        bound = _next_residual(eye - K - new / 2, new, F)
        assert residual(new).abs().max() <= bound * (1 + 1e-12)


@needs_compiler
def test_what_others_in_a_stack_do_changes_no_bit():
    results = []
    for kind in ("an ordinary step", "a large multiplier", "too large a step"):
        params, opt = orthogonal(True, [(9, 6)] * 2, 2)
        calm, other = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(2))
        normal = params[1].detach()
        grads = {"an ordinary step": other, "a large multiplier": 1e3 * normal}
        params[0].grad, params[1].grad = calm, grads.get(kind, 1e5 * other)
        opt.step()
        results.append(params[0].detach())
        (report,) = opt.report().groups
        assert report.fallbacks == (kind == "too large a step")
        assert report.residual < 1e-6
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_compiler
def test_constrained_groups_take_the_kernels_by_default():
    """A circle's bits are those of the kernels, unless ``foreach`` is given; a flat group's are SGD's."""
    bits = {}
    for key, settings in {
        "default": {},
        "fused": {"fused": True},
        "foreach": {"foreach": True},
        "single": {"foreach": False},
        "ordinary": {"fused": False},
    }.items():
        p, q = (nn.Parameter(torch.linspace(-0.3, 0.3, 1001)) for _ in range(2))
        groups = [{"params": [p], "constraint": hm.Circle(0.4)}, {"params": [q]}]
        opt = hm.Langevin(groups, lr=0.05, **settings)
        advance([p, q], opt, 10)
        bits[key] = (p.detach(), q.detach())
    assert torch.equal(bits["default"][0], bits["fused"][0])
    for key in ("foreach", "single", "ordinary"):
        assert not torch.equal(bits["default"][0], bits[key][0])
        assert torch.equal(bits["default"][1], bits[key][1])
        assert all(map(torch.equal, bits["ordinary"], bits[key]))


@pytest.mark.parametrize("foreach", [None, True, False])
def test_nothing_is_left_to_the_next_step_without_fused(foreach):
    """The momenta of orthogonal weights are cotangent in ``state``."""
    shapes = [(7, 3), (3, 7), (7, 3)]
    params, opt = orthogonal(False, shapes, 10, foreach=foreach)
    for p in params:
        Q, V = (t.detach().double() for t in (p, opt.state[p]["momentum_buffer"]))
        S = Q.T @ V if len(Q) > len(Q.T) else Q @ V.T
        assert (S + S.T).abs().max() < 20 * EPS * V.abs().max()


@pytest.mark.filterwarnings("ignore:fused=True has no effect")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scheme", ["OBA", "ABO", "EM"])
def test_large_steps_do_not_leave_the_manifold_little_by_little(scheme, fused):
    """A multiplier larger than 1 would make what is missing to Q^T Q = I grow in every step."""
    shapes = [(33, 70), (40, 40), (70, 33)]
    params, opt = orthogonal(fused, shapes, 0, lr=0.05, scheme=scheme, maximize=True)
    for _ in range(60):
        for k, p in enumerate(params):
            p.grad = torch.sin(3 * p.detach() + k) + 0.5
        opt.step()
        assert opt.report().groups[0].residual < 3e-6  # sqrt(70) eps, with room


@needs_compiler
@pytest.mark.parametrize("size", [1, 5, 1023, 200_000])
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_found(size, value):
    good = torch.full((size,), -3e38)  # the sum of their squares overflows; they do not
    good[0] = 1e-42
    assert native.finite([good, torch.empty(0), torch.zeros(2)])
    for place in {0, size // 2, size - 1}:
        bad = good.clone()
        bad[place] = value
        assert not native.finite([good, bad])
        p = nn.Parameter(torch.zeros(size))
        opt = hm.Langevin([("w", p)], lr=0.1, constraint=hm.Circle(1.0), fused=True)
        p.grad = bad
        with pytest.raises(hm.errors.NonFiniteError, match="'w' has 1 of"):
            opt.step()
        assert torch.equal(p.detach(), torch.zeros(size))


@needs_compiler
@pytest.mark.parametrize("factor", [0.0, 0.9999, 1.001, 3.0, 30.0])
def test_weights_that_were_changed_by_hand_return_to_their_circles(factor):
    results = []
    for fused in (False, True):
        p = nn.Parameter(torch.linspace(-0.39, 0.39, 3001))
        opt = hm.Langevin([p], lr=0.05, constraint=hm.Circle(0.4), fused=fused)
        advance([p], opt, 2)
        with torch.no_grad():
            p[::7] *= factor
        advance([p], opt, 1)
        xi = opt.state[p]["slack"]
        assert (p.double() ** 2 + xi.double() ** 2 - 0.16).abs().max() < 0.16 * 8 * EPS
        results.append(p.detach())
    torch.testing.assert_close(*results, rtol=0, atol=20 * EPS)


def twin(make: Any, steps: int = 10, **settings: Any) -> list[list[Tensor]]:
    """Weights and state by default and by torch alone."""
    results = []
    for foreach in (None, True):
        params, constraint = make()
        opt = hm.Langevin(
            params,
            **{"lr": 0.05, "constraint": constraint, "seed": 1, "foreach": foreach, **settings},
        )
        advance(params, opt, steps)
        results.append([t.detach() for p in params for t in (p, *opt.state[p].values())])
    return results


class Halved(hm.Circle):
    """A constraint of a user's, which moves in a way of its own."""

    def drift_(self, x: Any, h: float) -> None:
        super().drift_(x, h / 2)


class Slow(hm.Orthogonal):
    def kick_(self, x: Any, g: Any, c: float) -> None:
        super().kick_(x, g, c / 2)


@pytest.mark.parametrize(
    "constraint",
    [
        hm.Sphere(0.8, dim=1),
        hm.Sphere(torch.tensor([0.8, 0.9, 1.0])),
        hm.Circle(torch.full((4,), 0.4)),
        Halved(0.4),
        Slow(),
    ],
    ids=lambda c: type(c).__name__,
)
def test_manifolds_without_kernels_keep_their_bits_by_default(constraint):
    def make() -> Any:
        return [nn.Parameter(torch.linspace(-0.3, 0.3, 12).reshape(3, 4))], constraint

    for a, b in zip(*twin(make, temperature=1e-3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_default_dtype_does_not_matter(default, dtype):
    def make() -> Any:
        generator = torch.Generator().manual_seed(0)
        q = [torch.randn(16, 9, generator=generator, dtype=torch.float32) for _ in range(4)]
        return [nn.Parameter(t.to(dtype)) for t in q], hm.Orthogonal()

    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        results = twin(make, lr=0.01)
    finally:
        torch.set_default_dtype(before)
    # Ten steps of rounding; a momentum is up to ten gradients.
    for a, b in zip(*results, strict=True):
        atol = 100 * torch.finfo(dtype).eps * max(1.0, b.abs().max().item())
        torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_wrappers_of_tensors_go_the_ordinary_way():
    class Wrapped(Tensor):
        pass

    assert not native.fits([torch.zeros(3).as_subclass(Wrapped)])
    assert not native.fits([torch.zeros(3, dtype=torch.complex64).conj().imag])  # negated lazily


@needs_compiler
@pytest.mark.parametrize("name", ["Circle", "Sphere", "Orthogonal"])
def test_autograd_sees_that_weights_have_changed(name):
    constraint = hm.Orthogonal() if name == "Orthogonal" else MANIFOLDS[name]()
    w = nn.Parameter(torch.eye(3)[:2].clone())
    opt = hm.Langevin([w], lr=0.1, constraint=constraint)
    x = torch.ones(4, 3, requires_grad=True)
    y = (x @ w.T).sum()
    w.grad = torch.ones(2, 3)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x)


def test_nothing_to_look_at_is_finite(monkeypatch):
    """Without kernels, no gradient, or none that anybody wants looked at."""
    monkeypatch.setattr("holonomic.native.build._library", lambda: "none here")
    p = nn.Parameter(torch.full((3,), 0.1))
    hm.Langevin([p], constraint=hm.Circle(1.0)).step()
    assert torch.equal(p.detach(), torch.full((3,), 0.1))
    p.grad = torch.ones(3)
    hm.Langevin([p], constraint=hm.Circle(1.0), nonfinite="allow").step()
    assert not torch.equal(p.detach(), torch.full((3,), 0.1))


@needs_compiler
@pytest.mark.parametrize("size", [1e5, 1e12, 1e20, 1e30])
def test_any_gradient_leaves_weights_on_their_circles(size):
    p = nn.Parameter(torch.linspace(-0.9, 0.9, 65))
    opt = hm.Langevin([p], lr=0.1, constraint=hm.Circle(1.0))
    p.grad = size * torch.linspace(-1, 1, 65)
    opt.step()
    assert opt.report().groups[0].residual < 4 * EPS
    with torch.no_grad():
        p[0] = math.nan
    assert math.isnan(opt.report().groups[0].residual)


@needs_compiler
def test_a_circle_keeps_its_bits_whatever_its_neighbours_do():
    results = []
    for factor in (1.0, 3.0):
        p = nn.Parameter(torch.linspace(-0.39, 0.39, 1000).reshape(2, 500).clone())
        opt = hm.Langevin([p], lr=0.05, constraint=hm.Circle(0.4, batch_dims=1))
        advance([p], opt, 2)
        with torch.no_grad():
            p[1] *= factor
        advance([p], opt, 5)
        results.append(p[0].detach())
    assert torch.equal(*results)


def test_no_rows_and_long_words():
    empty = nn.Parameter(torch.zeros(0, 4))
    opt = hm.Langevin([empty], constraint=hm.Sphere(1.0))
    advance([empty], opt, 2)

    def make() -> Any:
        return [nn.Parameter(torch.eye(4)[:3].clone())], hm.Orthogonal()

    for a, b in zip(*twin(make, scheme="OB" * 9 + "A", lr=0.01), strict=True):
        torch.testing.assert_close(a, b, rtol=100 * EPS, atol=100 * EPS)


@needs_compiler
@pytest.mark.parametrize("dim", [0, None])
def test_noise_comes_in_the_order_of_the_ordinary_way(dim):
    def make() -> Any:
        q = [nn.Parameter(torch.linspace(-0.3, 0.3, 12).reshape(3, 4)) for _ in range(2)]
        return q, hm.Sphere(0.8, dim=dim)

    for a, b in zip(*twin(make, scheme="BOAOB", temperature=0.1), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=200 * EPS * max(1.0, b.abs().max().item()))


def test_foreach_of_a_group_is_for_that_group():
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups = [{"params": [p], "foreach": True}, {"params": [q]}]
    opt = hm.Langevin(groups, constraint=hm.Circle(1.0))
    assert [g["foreach"] for g in opt.param_groups] == [True, None]
    for fused, expected in ((True, [None, True]), (False, [False, False])):
        opt = hm.Langevin(groups, constraint=hm.Circle(1.0), fused=fused)
        assert [g["fused"] for g in opt.param_groups] == expected


@needs_compiler
def test_fused_steps_resume_bit_for_bit():
    params, opt = build("Circle", dtype=torch.float32, fused=True)
    advance(params, opt, 5)
    saved, weights = deepcopy(opt.state_dict()), copies(params)
    advance(params, opt, 5)
    again, other = build("Circle", dtype=torch.float32, fused=True)
    with torch.no_grad():
        for p, w in zip(again, weights, strict=True):
            p.copy_(w)
    other.load_state_dict(saved)
    advance(again, other, 5)
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


def test_impossible_settings_are_named():
    p = [nn.Parameter(torch.ones(2))]
    with pytest.raises(SettingError, match="both given"):
        hm.Langevin(p, fused=True, foreach=True)
    with pytest.raises(SettingError, match="fused is 'yes'"):
        hm.Langevin([{"params": p, "fused": "yes"}])


_WITHOUT = """
import torch, warnings, holonomic as hm
p = torch.nn.Parameter(torch.tensor([0.1, 0.2])); p.grad = torch.ones(2)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    opt = hm.Langevin([p], constraint=hm.Circle(1.0), lr=0.1, fused=True)
opt.step()
print(caught[0].message)
print(p.tolist())
try:
    hm.Replicas(lambda: torch.nn.Linear(1, 1), 2).noise(native=True)
except hm.errors.SettingError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("variables", "why"),
    [({"HOLONOMIC_NATIVE": "0"}, "HOLONOMIC_NATIVE=0"), ({"CXX": "no-such"}, "CXX=no-such")],
)
def test_without_a_compiler_everything_goes_on(variables, why):
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT],
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
        check=True,
    )
    warned, weights, refused = done.stdout.splitlines()
    assert "fused=True has no effect" in warned
    assert why in warned
    assert "native noise cannot be had" in refused
    assert why in refused
    p = nn.Parameter(torch.tensor([0.1, 0.2]))
    p.grad = torch.ones(2)
    hm.Langevin([p], constraint=hm.Circle(1.0), lr=0.1, foreach=True).step()
    assert weights == str(p.tolist())


def test_a_source_that_does_not_compile_is_a_reason_not_a_crash(tmp_path):
    code = (
        "import holonomic.native.build as b, pathlib;"
        f"s = pathlib.Path({str(tmp_path)!r}) / 'broken.cpp'; s.write_text('this is not C++');"
        "b._SOURCE = s; print(b.reason())"
    )
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert "could not compile" in done.stdout or "no C++ compiler" in done.stdout
    assert not list(tmp_path.glob("**/*.so"))


@needs_compiler
def test_a_compiler_that_leaves_out_openmp_compiles_without(tmp_path):
    """It says nothing, and the library does not load."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        "#!/bin/sh\n"
        "for last; do :; done\n"
        'case " $* " in *" -fopenmp "*)\n'
        '  echo "void nowhere(); void f() { nowhere(); }" |\n'
        f'  {_compiler()} -x c++ -shared -fPIC - -o "$last"; exit;;\n'
        "esac\n"
        f'exec {_compiler()} "$@"\n'
    )
    compiler.chmod(0o755)
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    code = "import holonomic.native as n; print(n.reason())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert done.stdout.strip() == "None"
    assert len(list(tmp_path.rglob("*.so"))) == 1


# ---------------------------------------------------------------------- noise
def threefry(x0: int, x1: int, k0: int, k1: int) -> tuple[int, int]:
    """Threefry-2x32-20, written from its definition (Salmon et al. 2011)."""
    mask = 0xFFFFFFFF
    key = (k0, k1, k0 ^ k1 ^ 0x1BD11BDA)
    x0, x1 = (x0 + k0) & mask, (x1 + k1) & mask
    for i in range(20):
        by = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x0 = (x0 + x1) & mask
        x1 = ((x1 << by | x1 >> (32 - by)) & mask) ^ x0
        if i % 4 == 3:
            j = i // 4 + 1
            x0 = (x0 + key[j % 3]) & mask
            x1 = (x1 + key[(j + 1) % 3] + j) & mask
    return x0, x1


def test_threefry_gives_the_published_answers():
    assert threefry(0, 0, 0, 0) == (0x6B200159, 0x99BA4EFE)
    ones = 0xFFFFFFFF
    assert threefry(ones, ones, ones, ones) == (0x1CB996FC, 0xBB002BE7)
    assert threefry(0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344) == (0xC4923A9C, 0x483DF7A0)


@needs_compiler
def test_numbers_are_box_muller_on_threefry():
    """In double precision from the definition; the kernels' logarithm, root and polynomials are good
    to a few eps, and radius times a sine that is nearly 0 is good absolutely."""
    key, first = 0x0123456789ABCDEF, 2 * (2**32 - 3)  # crosses into the upper half of the counter
    got = torch.empty(1, 12)
    native.normal_(got, first, torch.tensor([key]))
    for k in range(6):
        place = first // 2 + k
        x0, x1 = threefry(place & 0xFFFFFFFF, place >> 32, key & 0xFFFFFFFF, key >> 32)
        radius = math.sqrt(-2 * math.log(((x0 >> 8) + 0.5) / 2**24))
        signed = x1 - 2**32 if x1 >= 2**31 else x1
        angle = ((signed >> 8) + 0.5) / 2**23 * math.pi / 4
        c, s = math.cos(angle), math.sin(angle)
        c, s = (s, c) if x1 & 1 else (c, s)
        want = (radius * (-c if x1 & 2 else c), radius * (-s if x1 & 4 else s))
        assert got[0, 2 * k : 2 * k + 2].tolist() == pytest.approx(want, abs=8 * EPS * radius)


def z_scores(y: Tensor) -> list[float]:
    """Moments of normal numbers, in standard errors."""
    y, n = y.double(), y.numel()
    known = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96), 6: (15, 10170), 8: (105, 2016000)}
    return [
        ((y**k).mean().item() - mean) * math.sqrt(n / variance)
        for k, (mean, variance) in known.items()
    ]


@needs_compiler
def test_noise_is_standard_normal_and_independent():
    n = 2_000_000
    y = torch.empty(2, n)
    native.normal_(y, 0, torch.tensor([5, 6]))  # neighbouring keys
    for row in y:
        assert max(map(abs, z_scores(row))) < 4
    a, b = y.double()
    products = {
        "between streams": a * b,
        "within a pair": a[::2] * a[1::2],
        "their squares": (a[::2] ** 2 - 1) * (a[1::2] ** 2 - 1) / 2,
        **{f"lag {k}": a[:-k] * a[k:] for k in (1, 2, 3, 16, 1024, 2048)},
    }
    for what, p in products.items():
        assert abs(p.mean().item()) * math.sqrt(len(p)) < 4, what
    # The tails: numbers beyond 4 are Poisson with mean n P(|x| > 4).
    expected = 2 * n * math.erfc(4 / math.sqrt(2))
    assert abs((y.abs() > 4).sum().item() - expected) < 4 * math.sqrt(expected)


@needs_compiler
def test_a_number_depends_on_its_key_and_place_alone():
    whole = torch.empty(3, 5000)
    keys = torch.tensor([7, 8, 9])
    native.normal_(whole, 0, keys)
    part = torch.empty(1, 1001)
    native.normal_(part, 1500, keys[1:2])
    assert torch.equal(part[0], whole[1, 1500:2501])


@needs_compiler
@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "EM"])
def test_noise_of_replicas_is_read_where_it_lies(scheme, monkeypatch):
    """Rows of a block that are not contiguous, in weights, slack and flat space: the same to rounding as
    without kernels, and to the last bit as from copies that are."""
    results = []
    for fused, copied in ((False, False), (True, False), (True, True)):
        replicas = hm.Replicas(lambda: nn.Linear(3, 500), 4, seed=3)  # more than a block a row
        noise = replicas.noise()
        drawn = noise.like(next(iter(replicas.parameters())))
        assert not drawn.is_contiguous()
        if copied:
            like = noise.like
            monkeypatch.setattr(noise, "like", lambda t, like=like: like(t).contiguous())
        groups = replicas.groups({"weight": hm.Circle(0.5)})
        opt = hm.Langevin(
            groups, lr=0.05, temperature=0.1, scheme=scheme, generator=noise, fused=fused
        )
        params = list(replicas.parameters())
        advance(params, opt, 6)
        results.append(copies(params))
    for a, b, c in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=200 * EPS)
        assert torch.equal(b, c)


def stack(n: int, first: int = 0, **settings: Any) -> tuple[hm.Replicas, hm.Langevin]:
    replicas = hm.Replicas(lambda: nn.Linear(3, 5), n, seed=3, first=first)
    rules: dict[Any, Any] = {"weight": hm.Circle(1.0)}
    opt = hm.Langevin(
        replicas.groups(rules),
        lr=0.05,
        temperature=1e-2,
        generator=replicas.noise(native=True),
        **settings,
    )
    return replicas, opt


@needs_compiler
@pytest.mark.parametrize("scheme", ["OBA", "EM", "LM"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_replica_does_not_depend_on_the_others(scheme, fused):
    eight, opt = stack(8, scheme=scheme, fused=fused)
    alone, other = stack(1, first=5, scheme=scheme, fused=fused)
    for _ in range(50):
        for r, o in ((eight, opt), (alone, other)):
            for p in r.parameters():
                p.grad = torch.sin(3 * p.detach())
            o.step()
    for a, b in zip(eight.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a[5], b[0], rtol=0, atol=0)


@needs_compiler
def test_native_noise_resumes():
    _, opt = stack(4)
    noise = opt._noise
    t = torch.empty(4, 3, 5)
    noise.like(t)
    saved = noise.state()
    expected = noise.like(t)
    other = hm.Replicas(lambda: nn.Linear(3, 5), 4, seed=99).noise(native=True)
    other.restore(saved)
    assert torch.equal(other.like(t), expected)
    with pytest.raises(CheckpointError, match="another kind of noise"):
        other.restore(hm.Replicas(lambda: nn.Linear(1, 1), 4).noise().state())
    with pytest.raises(CheckpointError, match="4 replicas, and there are 3"):
        hm.Replicas(lambda: nn.Linear(1, 1), 3).noise(native=True).restore(saved)


def test_nothing_is_warned_of_where_there_are_kernels():
    if native.reason() is None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hm.Langevin([nn.Parameter(torch.ones(2))], fused=True)
        assert library() is library()
