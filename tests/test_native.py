"""The compiled kernels: torch's steps to rounding, and no call that reaches where it should not."""

import ctypes
import math
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holonomic as hm
from holonomic import engine, native
from holonomic.constraints.orthogonal import _next_residual
from holonomic.engine import native as programs
from holonomic.errors import ConstraintError, NonFiniteError, SettingError
from holonomic.native import loader
from holonomic.native.loader import SETS, _library, built, library, suited
from holonomic.native.orthogonal import Kick, Limits, Stack, small
from holonomic.noise import Noise
from holonomic.phase import Phase
from holonomic.plan import FREE
from holonomic.state import KEYS

needs_kernels = pytest.mark.skipif(native.reason() is not None, reason=f"{native.reason()}")
EPS = torch.finfo(torch.float32).eps

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_decay.* has no effect")


# ---------------------------------------------------------------------- shared
def weights(*shapes: tuple[int, ...], scale: float = 0.3, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(scale * torch.randn(shape, generator=generator)) for shape in shapes]


def advance(params: list[Any], opt: torch.optim.Optimizer, steps: int) -> None:
    """Steps with a force that depends on the weights, so that no difference stays hidden."""
    for _ in range(steps):
        for k, p in enumerate(params):
            p.grad = (torch.sin(3 * p.detach().float() + k) + 0.1).to(p.dtype)
        opt.step()


def point(opt: hm.Langevin) -> Phase:
    """Weights and state of the only group in double precision, the momenta projected: a part of them that
    is normal to the manifold means nothing."""
    group = opt.param_groups[0]
    states = [opt.state[p] for p in group["params"]]
    lists: dict[str, Any] = {
        name: [state[key] for state in states] for name, key in KEYS.items() if key in states[0]
    }
    x = Phase([p.detach() for p in group["params"]], **lists).map(lambda t: t.double().clone())
    if x.v and group["constraint"]:
        group["constraint"].project_(x)
    return x


def assert_near(a: Phase, b: Phase, units: float, size: float = 1.0) -> None:
    """Equal to so many units of rounding of a tensor's largest number (at least ``size``)."""
    for name in ("q", "v", "xi", "eta"):
        for s, t in zip(getattr(a, name), getattr(b, name), strict=True):
            largest = t.abs().max().item() if t.numel() else 0.0
            torch.testing.assert_close(s, t, rtol=0, atol=units * EPS * max(size, largest))


def pair(
    constraint: Any,
    shapes: list[tuple[int, ...]],
    steps: int = 8,
    scale: float = 0.3,
    **settings: Any,
) -> tuple[hm.Langevin, hm.Langevin]:
    """The same run by the kernels and by torch."""
    runs = []
    for way in ({"fused": True}, {"fused": False}):
        params = weights(*shapes, scale=scale)
        chosen = {"lr": 0.02, "seed": 1, **settings, **way}
        opt = hm.Langevin(params, constraint=constraint, **chosen)
        advance(params, opt, steps)
        runs.append(opt)
    return runs[0], runs[1]


class Counted:
    """How often the kernels were called, by the names of their functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        kernels = library()
        outer = self

        class Library:
            def __getattr__(self, name: str) -> Any:
                outer.calls.append(name)
                return getattr(kernels, name)

        for module in ("holonomic.native", "holonomic.native.orthogonal"):
            monkeypatch.setattr(f"{module}.library", Library)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


# ---------------------------------------------------------------------- the same steps
CIRCLES_AND_SPHERES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "Circle": lambda: hm.Circle(0.4),
    "Circle, stacked": lambda: hm.Circle(1.7, batch_dims=1),
    **{
        f"Sphere, slack={slack}, dim={dim}, batch_dims={batch_dims}": (
            lambda slack=slack, dim=dim, batch_dims=batch_dims: hm.Sphere(
                0.8, slack=slack, dim=dim, batch_dims=batch_dims
            )
        )
        for slack in (True, False)
        for dim in (0, None)
        for batch_dims in (0, 1)
    },
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "noise": {"temperature": 1e-3},
    "all": {"temperature": 1e-3, "weight_decay": 0.05, "maximize": True},
}
SHAPES = [(3, 5, 4), (2, 1, 1), (5, 7, 100), (1, 2, 3)]  # three dimensions: one may count replicas


@needs_kernels
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "ABO", "BAO", "EM"])
@pytest.mark.parametrize("name", CIRCLES_AND_SPHERES)
def test_kernels_take_the_steps_of_torch(name, scheme, settings):
    """8 steps of a few operations each, which round numbers below 1 (momenta: below their largest), and
    pass on what they rounded: 8 * 8 units."""
    a, b = pair(CIRCLES_AND_SPHERES[name](), SHAPES, scheme=scheme, **SETTINGS[settings])
    assert_near(point(a), point(b), 64)


@needs_kernels
@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 63, 511, 512, 513, 1023, 1025, 4097])
@pytest.mark.parametrize("constraint", [None, hm.Circle(0.4), hm.Sphere(0.8)], ids=repr)
def test_sizes_that_do_not_fill_vectors_or_blocks(constraint, n):
    shapes = [(n, 1), (1, n), (3, n)]
    a, b = pair(constraint, shapes, scheme="BAOAB", temperature=1e-3, weight_decay=0.05)
    assert_near(point(a), point(b), 64)


#: Tall, wide and square; such as fill vectors and tiles and such as do not; on both sides of `small`.
MATRICES = [
    *[(1, 1), (4, 4), (7, 3), (3, 7), (1, 5), (33, 70), (64, 64), (100, 40), (40, 100)],
    *[(4, 2, 3, 3), (9, 2, 2, 2)],  # convolutions: wide, and tall
    *[(190, 180), (180, 190), (200, 40, 5)],  # too large for a step within the cache
]
STACKED = [(3, 4, 6), (2, 6, 4), (2, 16, 16), (1, 5, 5), (2, 4, 2, 3), (2, 190, 180)]


def test_matrices_are_on_both_sides_of_what_is_small():
    assert [small(torch.Size((m, math.prod(n)))) for m, *n in MATRICES] == [True] * 11 + [False] * 3


@needs_kernels
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("scheme", ["OBA", "BAOAB", "ABO", "BAO"])
def test_kernels_take_the_steps_of_torch_for_matrices(scheme, settings, scale):
    """As above, in 5 steps; products round sums of up to 200 numbers by sqrt(200) / 2 units."""
    shapes = [shape for shape in MATRICES for _ in range(1 + (shape[0] < 100))]
    chosen = {"scheme": scheme, "lr": 0.002, **SETTINGS[settings]}
    a, b = pair(hm.Orthogonal(scale=scale), shapes, 5, **chosen)
    assert_near(point(a), point(b), 64)
    report = a.report().groups[0]
    assert report.fallbacks == report.changed == 0
    assert report.residual < 16 * scale**2 * EPS


@needs_kernels
@pytest.mark.parametrize("settings", SETTINGS)
def test_kernels_take_the_steps_of_torch_for_stacked_matrices(settings):
    chosen = {"scheme": "BAOAB", "lr": 0.002, **SETTINGS[settings]}
    a, b = pair(hm.Orthogonal(batch_dims=1), STACKED, 5, **chosen)
    assert_near(point(a), point(b), 64)


@needs_kernels
def test_words_as_long_as_the_kernels_take_and_longer():
    for count, longest in ((7, True), (8, False)):  # O B ... O B A: 15 and 17 letters
        scheme = "OB" * count + "A"
        settings = {"lr": 0.01, "temperature": 1e-3, "scheme": scheme}
        if longest:
            assert_near(*map(point, pair(hm.Sphere(0.8), [(3, 4)], **settings)), 64)
            assert_near(*map(point, pair(hm.Orthogonal(), [(3, 4)], **settings)), 64)
        else:
            with pytest.raises(SettingError, match="17 letters, and they take 16 at most"):
                pair(hm.Sphere(0.8), [(3, 4)], 1, **settings)


@needs_kernels
@pytest.mark.parametrize("name", ["none", "Circle", "Sphere, slack=True, dim=0, batch_dims=0"])
def test_threads_do_not_change_a_bit(name):
    results = []
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            params = weights((700, 300), (40, 3), scale=0.1)
            constraint = CIRCLES_AND_SPHERES[name]()
            settings = {"lr": 0.02, "temperature": 1e-3, "seed": 1, "weight_decay": 0.01}
            opt = hm.Langevin(params, constraint=constraint, fused=True, **settings)
            advance(params, opt, 3)
            x = point(opt)
            results.append([*x.q, *x.v, *x.xi, *x.eta])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_kernels
def test_two_threads_move_small_matrices_as_one():
    results, threads = [], torch.get_num_threads()
    for n in (1, 2):
        params = weights(*[(64, 64)] * 40)
        settings = {"lr": 0.01, "temperature": 1e-3, "seed": 1, "fused": True}
        opt = hm.Langevin(params, constraint=hm.Orthogonal(), **settings)
        advance(params, opt, 1)
        try:
            torch.set_num_threads(n)
            advance(params, opt, 1)
        finally:
            torch.set_num_threads(threads)
        results.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "constraint", [hm.Circle(0.4), hm.Sphere(0.8), hm.Orthogonal()], ids=lambda c: type(c).__name__
)
def test_16_bits_take_the_kernels_by_copies_in_single_precision(constraint, dtype, counted):
    """Weights and state are rounded once, at the end of each step: to the other neighbour now and then."""
    results = []
    for fused in (True, False):
        params = [nn.Parameter(p.detach().to(dtype)) for p in weights((6, 5), (4, 9))]
        opt = hm.Langevin(params, lr=0.05, constraint=constraint, fused=fused, seed=1)
        advance(params, opt, 5)
        calls, counted.calls = counted.calls, []
        assert any("step" in c or "leap" in c for c in calls) is fused
        assert all(p.dtype is dtype for p in params)
        assert all(t.dtype is dtype for p in params for t in opt.state[p].values())
        results.append(point(opt))
    # Half a unit in each of five steps, of the weights and of the momenta that move them.
    assert_near(*results, 5 * torch.finfo(dtype).eps / EPS)


@needs_kernels
def test_without_a_step_size_nothing_moves(counted):
    p = nn.Parameter(torch.tensor([0.1, 0.9, 1.0, -1.0]))
    before = p.detach().clone()
    for scheme in ("OBA", "BAOAB", "EM"):
        settings = {"scheme": scheme, "temperature": 1.0, "fused": True, "seed": 0}
        opt = hm.Langevin([p], lr=0.0, constraint=hm.Circle(1.0), **settings)
        advance([p], opt, 3)
        assert torch.equal(p.detach(), before)
    assert set(counted.calls) == {"holonomic_finite"}


@needs_kernels
def test_replicas_take_the_kernels(counted):
    """Rows of a stack, each with a stream of its own, longer and shorter than a block."""
    results = []
    for way in ({}, {"foreach": True}):
        replicas = hm.Replicas(lambda: nn.Linear(3, 500), 4, seed=3)
        groups = replicas.groups({"weight": hm.Circle(0.9), "bias": hm.Sphere(5.0, dim=None)})
        settings = {"lr": 0.05, "temperature": 0.1, "scheme": "BAOAB", **way}
        opt = hm.Langevin(groups, generator=replicas.noise(), **settings)
        params = list(replicas.parameters())
        advance(params, opt, 4)
        results.append([p.detach().clone() for p in params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=64 * EPS)
    assert {"holonomic_step", "holonomic_sphere_step"} <= set(counted.calls)


@needs_kernels
@pytest.mark.parametrize("scheme", ["OBA", "EM"])
def test_a_run_by_kernels_resumes_bit_for_bit(scheme):
    for constraint in (hm.Circle(0.4), hm.Sphere(0.8)):

        def build(constraint: Any = constraint) -> tuple[list[Any], hm.Langevin]:
            params = weights((6, 5), (4, 9))
            settings = {"lr": 0.05, "temperature": 1e-3, "scheme": scheme, "fused": True}
            return params, hm.Langevin(params, constraint=constraint, seed=1, **settings)

        params, opt = build()
        advance(params, opt, 5)
        saved, at = deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
        advance(params, opt, 5)
        again, other = build()
        with torch.no_grad():
            for p, w in zip(again, at, strict=True):
                p.copy_(w)
        other.load_state_dict(saved)
        advance(again, other, 5)
        assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))


# ---------------------------------------------------------------------- on the manifold
@needs_kernels
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


@needs_kernels
@pytest.mark.parametrize(
    ("constraint", "size"),
    [(hm.Circle(1.0), size) for size in (1e5, 1e12, 1e20, 1e30)]
    + [(hm.Sphere(1.0), size) for size in (1e5, 1e12, 1e17)],
    ids=repr,
)
def test_any_gradient_leaves_weights_on_the_manifold(constraint, size):
    """Angles of many turns. (On spheres, squares of momenta must not overflow single precision.)"""
    p = nn.Parameter(torch.linspace(-0.9, 0.9, 66).reshape(6, 11))
    opt = hm.Langevin([p], lr=0.1, constraint=constraint, fused=True)
    p.grad = size * torch.linspace(-1, 1, 66).reshape(6, 11)
    opt.step()
    assert opt.report().groups[0].residual < 4 * EPS


@needs_kernels
@pytest.mark.parametrize("scheme", ["OBA", "EM"])
def test_weights_stay_on_their_circles(scheme):
    p = nn.Parameter(torch.linspace(-2, 2, 999))
    settings = {"lr": 0.01, "scheme": scheme, "temperature": 0.1, "seed": 0, "fused": True}
    opt = hm.Langevin([p], constraint=hm.Circle(1.5), **settings)
    for _ in range(3000):
        p.grad = p.detach().sin()
        opt.step()
    length2 = p.detach().double() ** 2 + opt.state[p]["slack"].double() ** 2
    assert (length2 / 1.5**2 - 1).abs().max() < 4 * EPS  # two numbers, each rounded twice
    assert opt.report().groups[0].changed == 0


@needs_kernels
@pytest.mark.parametrize("slack", [True, False])
@pytest.mark.parametrize("shape", [(3, 300), (1, 200_000)])
def test_rows_stay_on_their_spheres(shape, slack):
    """However long they are: sums are of blocks, in double precision."""
    p = nn.Parameter(torch.linspace(-2, 2, math.prod(shape)).reshape(shape))
    settings = {"lr": 0.01, "temperature": 0.1 / shape[1], "seed": 0, "fused": True}
    opt = hm.Langevin([p], constraint=hm.Sphere(1.5, slack=slack), **settings)
    for _ in range(3000 if shape[1] < 1000 else 30):
        p.grad = p.detach().sin()
        opt.step()
    x = point(opt)
    length2 = x.q[0].square().sum(1, keepdim=True) + (x.xi[0] ** 2 if slack else 0)
    assert (length2 / 1.5**2 - 1).abs().max() < 4 * EPS
    assert opt.report().groups[0].changed == 0


@needs_kernels
def test_a_weight_driven_into_its_bound_ends_there():
    p = nn.Parameter(torch.full((5000,), 0.5))
    opt = hm.Langevin([p], lr=0.1, scheme="EM", constraint=hm.Circle(1.0), fused=True)
    for _ in range(2000):
        p.grad = -torch.ones(5000)
        opt.step()
    assert (p.detach() - 1).abs().max() <= 2 * EPS
    assert (opt.state[p]["slack"] >= 0).all()


@needs_kernels
@pytest.mark.parametrize("constraint", [hm.Circle(1.0), hm.Sphere(1.0), hm.Orthogonal()], ids=repr)
def test_numbers_below_the_normal_ones_do_no_harm(constraint):
    """Kernels count them as 0, and the rest of the program goes on with them."""
    results = []
    for fused in (True, False):
        p = nn.Parameter(torch.eye(4) * 0.5 + 1e-40)
        opt = hm.Langevin([p], lr=0.1, constraint=constraint, fused=fused)
        for _ in range(3):
            p.grad = torch.full((4, 4), 1e-41)
            opt.step()
        results.append(point(opt))
    assert_near(*results, 8)
    assert (torch.tensor([1e-40]) * 0.5).item() > 0


@needs_kernels
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
        with pytest.raises(NonFiniteError, match="'w' has 1 of"):
            opt.step()
        assert torch.equal(p.detach(), torch.zeros(size))


def test_nothing_to_look_at_is_finite():
    assert native.reason() is not None or native.finite([])
    p = nn.Parameter(torch.full((3,), 0.1))
    hm.Langevin([p], constraint=hm.Circle(1.0)).step()
    assert torch.equal(p.detach(), torch.full((3,), 0.1))


@pytest.mark.parametrize(
    "constraint", [None, hm.Circle(1.0), hm.Sphere(1.0), hm.Orthogonal()], ids=repr
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tensors_without_numbers_stay_as_they_are(constraint, temperature):
    shapes = [(0, 5), (5, 0), (3, 2), (0, 0)]
    for fused in (None, False) if native.reason() else (True, None, False):
        params = [nn.Parameter(torch.eye(*shape)) for shape in shapes]
        settings = {"temperature": temperature, "fused": fused, "seed": 1}
        opt = hm.Langevin(params, lr=0.1, constraint=constraint, **settings)
        advance(params, opt, 2)
        assert [tuple(p.shape) for p in params] == shapes
        assert opt.report().groups[0].residual < 8 * EPS


@needs_kernels
@pytest.mark.parametrize("constraint", [hm.Circle(1.0), hm.Sphere(1.0), hm.Orthogonal()], ids=repr)
def test_only_empty_tensors(constraint):
    params = [nn.Parameter(torch.zeros(0, 5)), nn.Parameter(torch.zeros(3, 0))]
    opt = hm.Langevin(params, lr=0.1, constraint=constraint, fused=True, temperature=1.0, seed=1)
    advance(params, opt, 2)


# ---------------------------------------------------------------------- weights somebody changed
def changed_run(
    constraint: Any, size: float, change: Callable[[Tensor], Any], way: dict[str, Any]
) -> Any:
    (p,) = weights((9, 260), scale=size)
    opt = hm.Langevin([p], lr=0.02, constraint=constraint, **way)
    advance([p], opt, 2)
    assert opt.report().groups[0].changed == 0
    with torch.no_grad():
        change(p)
    advance([p], opt, 1)
    assert opt.report().groups[0].changed == 1
    advance([p], opt, 3)
    assert opt.report().groups[0].changed == 1
    return opt


def raise_one(p: Tensor) -> None:
    p[0, 0] = 0.9


def raise_a_little(p: Tensor) -> None:
    p[0, 0] += 0.3


def raise_some(p: Tensor) -> None:
    p.view(-1)[::7] = 0.5


def beyond(p: Tensor) -> None:
    p[3] = 3.0


def zero(p: Tensor) -> None:
    p.zero_()


def scale_row(p: Tensor) -> None:
    p[4] *= 1.5


def scale_all(p: Tensor) -> None:
    p *= 1.2


def noise(p: Tensor) -> None:
    p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(5))


CHANGES = [
    *[(hm.Circle(1.0), 0.2, f) for f in (raise_one, raise_some, beyond, zero, scale_all)],
    *[(hm.Sphere(1.0), 0.02, f) for f in (raise_one, beyond, zero, scale_row, scale_all)],
    *[(hm.Sphere(1.0, dim=None), 0.01, f) for f in (raise_a_little, scale_all)],
    *[(hm.Sphere(1.0, slack=False), 0.02, f) for f in (raise_one, scale_row, scale_all)],
    *[(hm.Orthogonal(), 1.0, f) for f in (scale_row, scale_all, noise)],
]


@needs_kernels
@pytest.mark.parametrize(
    ("constraint", "size", "change"), CHANGES, ids=lambda c: getattr(c, "__name__", None) or repr(c)
)
def test_weights_that_were_changed_are_followed_as_by_torch(constraint, size, change):
    """The next step starts from what it finds, and says so once."""
    a, b = (
        changed_run(constraint, size, change, way) for way in ({"fused": True}, {"fused": False})
    )
    assert_near(point(a), point(b), 32)
    assert a.report().groups[0].residual < 32 * EPS


@needs_kernels
@pytest.mark.parametrize("factor", [0.0, 0.9999, 1.001, 3.0, 30.0])
def test_every_seventh_circle_changed_by_a_factor(factor):
    results = []
    for fused in (True, False):
        p = nn.Parameter(torch.linspace(-0.39, 0.39, 3001))
        opt = hm.Langevin([p], lr=0.05, constraint=hm.Circle(0.4), fused=fused)
        advance([p], opt, 2)
        with torch.no_grad():
            p[::7] *= factor
        advance([p], opt, 1)
        xi = opt.state[p]["slack"]
        assert (p.double() ** 2 + xi.double() ** 2 - 0.16).abs().max() < 0.16 * 8 * EPS
        results.append(point(opt))
    assert_near(*results, 64)


@needs_kernels
@pytest.mark.parametrize("constraint", [hm.Circle(0.4, batch_dims=1), hm.Sphere(2.0)], ids=repr)
def test_a_part_keeps_its_bits_whatever_its_neighbours_do(constraint):
    results = []
    for factor in (1.0, 3.0):
        p = nn.Parameter(torch.linspace(-0.39, 0.39, 1300).reshape(2, 650).clone())
        settings = {"lr": 0.02, "temperature": 1e-4, "seed": 2, "fused": True}
        opt = hm.Langevin([p], constraint=constraint, **settings)
        advance([p], opt, 2)
        with torch.no_grad():
            p[1, 600:] *= factor
        advance([p], opt, 4)
        results.append(p.detach())
        assert opt.report().groups[0].changed == (factor != 1)
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(results[0][1], results[1][1])
    if isinstance(constraint, hm.Circle):
        assert torch.equal(results[0][1, :600], results[1][1, :600])


@needs_kernels
@pytest.mark.parametrize("constraint", [hm.Circle(0.4), hm.Sphere(2.0), hm.Orthogonal()], ids=repr)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_made_not_finite_are_refused(constraint, value):
    for fused in (True, False):
        (p,) = weights((5, 4))
        opt = hm.Langevin([("w", p)], lr=0.05, constraint=constraint, fused=fused)
        advance([p], opt, 2)
        grad = p.grad
        with torch.no_grad():
            p[2, 1] = value
        p.grad = grad
        with pytest.raises(ConstraintError, match=r"'w'.*NaN or Inf"):
            opt.step()


# ---------------------------------------------------------------------- orthogonal matrices
def orthogonal(
    fused: bool | None, shapes: list[tuple[int, ...]], steps: int, **settings: Any
) -> Any:
    params = weights(*shapes, scale=1.0)
    chosen = {"lr": 0.002, "constraint": hm.Orthogonal(), "seed": 1, **settings}
    opt = hm.Langevin(params, fused=fused, **chosen)
    advance(params, opt, steps)
    return params, opt


@needs_kernels
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (40, 40)])
def test_a_matrix_too_far_for_the_iteration_is_rescued_alone(shape):
    """Of three matrices one takes a step far too large: it gets its polar factor, the others do what they
    do without it. (The polar factor of a matrix of size 50 is known to 50 times as many units.)"""
    results = []
    for fused in (True, False):
        params, opt = orthogonal(fused, [shape] * 3, 2)
        generator = torch.Generator().manual_seed(2)
        for p, size in zip(params, (0.1, 1e5, 0.1), strict=True):
            p.grad = size * torch.randn(shape, generator=generator)
        opt.step()
        report = opt.report().groups[0]
        assert report.fallbacks == 1
        assert report.residual < 2e-6
        results.append([p.detach() for p in params])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=50 * 16 * EPS)


@needs_kernels
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (2, 3, 2), (180, 190)])
def test_of_matrices_in_one_tensor_only_those_too_far_are_rescued(shape):
    """The second of three takes a step far too large, and the others do what they do without it."""
    results = []
    for size in (0.1, 1e5):
        p = nn.Parameter(torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)))
        opt = hm.Langevin([p], lr=0.002, constraint=hm.Orthogonal(batch_dims=1), fused=True)
        p.grad = torch.randn(3, *shape, generator=torch.Generator().manual_seed(1))
        p.grad[1] *= size
        opt.step()
        report = opt.report().groups[0]
        assert report.fallbacks == (size == 1e5)
        assert report.residual < 2e-6
        results.append((p.detach(), opt.state[p]["momentum_buffer"]))
    for a, b in zip(*results, strict=True):
        if size_is_small := small(torch.Size((3, shape[0], math.prod(shape[1:])))):
            assert torch.equal(a[0], b[0])
            assert torch.equal(a[2], b[2])
        else:
            torch.testing.assert_close(a[::2], b[::2], rtol=64 * EPS, atol=64 * EPS)
        assert not torch.equal(a[1], b[1]), size_is_small


@needs_kernels
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
        report = opt.report().groups[0]
        assert report.fallbacks == (kind == "too large a step")
        assert report.residual < 1e-6
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_kernels
@pytest.mark.parametrize("lr", [1e-3, 1e-5, 1e-7])
@pytest.mark.parametrize("shape", [(4, 13), (13, 4), (10, 22), (64, 64), (190, 180)])
def test_momenta_of_matrices_are_right_for_any_step_size(shape, lr):
    """Against double precision. Rounding errors of the weights, divided by lr, must all be normal: hardly
    any of them stays after a projection. (Sums of up to 190 numbers, three steps.)"""
    points = []
    for dtype, fused in ((torch.float32, True), (torch.float64, False)):
        params = [nn.Parameter(p.detach().to(dtype)) for p in weights(shape, scale=1.0)]
        opt = hm.Langevin(params, lr=lr, constraint=hm.Orthogonal(), fused=fused)
        for _ in range(3):
            params[0].grad = torch.sin(3 * params[0].detach()) + 0.1
            opt.step()
        points.append(point(opt))
    assert_near(*points, 16)


@needs_kernels
def test_products_that_are_not_symmetric_do_no_harm(monkeypatch):
    """Some libraries' products of a matrix with itself are not, in the last bit."""
    shape, product = (190, 180), torch.matmul

    def careless(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        product(a, b, out=out)
        if a.shape == b.mT.shape and torch.equal(a, b.mT):
            out += EPS * (torch.rand(out.shape, generator=torch.Generator().manual_seed(1)) - 0.5)
        return out

    points = []
    for change in (False, True):
        if change:
            monkeypatch.setattr(torch, "matmul", careless)
        params, opt = orthogonal(True, [shape], 0, lr=1e-5)
        params[0].grad = torch.sin(3 * params[0].detach()) + 0.1
        opt.step()
        monkeypatch.undo()
        points.append(point(opt))
    assert_near(*points, 8)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("scheme", ["OBA", "ABO", "EM"])
def test_large_steps_do_not_leave_the_manifold_little_by_little(scheme, fused):
    """A multiplier larger than 1 would make what is missing to Q^T Q = I grow in every step."""
    shapes = [(33, 70), (40, 40), (70, 33)]
    params, opt = orthogonal(fused, shapes, 0, lr=0.05, scheme=scheme, maximize=True)
    for _ in range(40):
        for k, p in enumerate(params):
            p.grad = torch.sin(3 * p.detach() + k) + 0.5
        opt.step()
        assert opt.report().groups[0].residual < 3e-6  # sqrt(70) eps, with room


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


# ---------------------------------------------------------------------- which engine
class Halved(hm.Circle):
    """A constraint of a user's, which moves in a way of its own."""

    def drift_(self, x: Any, h: float) -> None:
        super().drift_(x, h / 2)


class Slow(hm.Orthogonal):
    def kick_(self, x: Any, g: Any, c: float) -> None:
        super().kick_(x, g, c / 2)


class Fixed(Noise):
    """Noise of a user's."""

    def like(self, tensor: Tensor, *place: Any) -> Tensor:
        return torch.ones_like(tensor)


def norm2(*params: Tensor) -> Tensor:
    return torch.stack([(p * p).sum() for p in params]).sum() - 1.0


def plain() -> Tensor:
    return torch.linspace(-0.3, 0.3, 12).reshape(3, 4).clone()


#: What the kernels do not know: weights, settings, and the reason that is given.
REFUSED: dict[str, tuple[Callable[[], Tensor], dict[str, Any], str]] = {
    "float64": (
        lambda: plain().double(),
        {"constraint": hm.Circle(0.4)},
        "the weight 'w' cannot be used: it is torch.float64",
    ),
    "free float64": (lambda: plain().double(), {"scheme": "ABO"}, "it is torch.float64"),
    "free bfloat16": (lambda: plain().bfloat16(), {"scheme": "ABO"}, "it is torch.bfloat16"),
    "not contiguous": (
        lambda: plain().t(),
        {"constraint": hm.Circle(0.4)},
        "the weight 'w' cannot be used: it is not contiguous",
    ),
    "tensor of radii": (
        plain,
        {"constraint": hm.Circle(torch.full((4,), 0.4))},
        "one radius for all weights",
    ),
    "radius per row": (
        plain,
        {"constraint": hm.Sphere(torch.tensor([0.8, 0.9, 1.0]))},
        "one radius for all weights",
    ),
    "columns": (plain, {"constraint": hm.Sphere(0.8, dim=1)}, "not dim=1"),
    "small circle": (plain, {"constraint": hm.Circle(1e-16)}, "radius 1e-16 is not between"),
    "large circle": (plain, {"constraint": hm.Circle(1e16)}, r"radius 1e\+16 is not between"),
    "thermostat": (
        plain,
        {"constraint": hm.Circle(0.4), "scheme": "BACDEDCAB", "coupling": 0.1},
        "they do not know adaptive friction",
    ),
    "LM": (plain, {"constraint": hm.Circle(0.4), "scheme": "LM"}, "they do not know LM for Circle"),
    "free LM": (plain, {"scheme": "LM"}, "they do not know LM for Free"),
    "EM of matrices": (
        plain,
        {"constraint": hm.Orthogonal(), "scheme": "EM"},
        "they do not know EM for Orthogonal",
    ),
    "LevelSet": (plain, {"constraint": hm.LevelSet(norm2)}, "they do not know LevelSet"),
    "a subclass of Circle": (plain, {"constraint": Halved(0.4)}, "they do not know Halved"),
    "a subclass of Orthogonal": (plain, {"constraint": Slow()}, "they do not know Slow"),
    "a user's noise": (
        plain,
        {"constraint": hm.Circle(0.4), "temperature": 0.1, "generator": Fixed(1)},
        "they make noise themselves, not that of Fixed",
    ),
}


@needs_kernels
@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernels_do_not_know_is_refused_with_the_reason(case):
    make, settings, why = REFUSED[case]
    p = nn.Parameter(make())
    with torch.no_grad():
        before = p.clone()
    opt = hm.Langevin([("w", p)], lr=0.05, fused=True, **settings)
    placed = p.detach().clone()
    p.grad = torch.ones_like(p)
    with pytest.raises(SettingError, match=f"fused=True asks for the compiled kernels.*{why}"):
        opt.step()
    assert torch.equal(p.detach(), placed)
    assert before.shape == placed.shape


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_kernels_do_not_know_is_left_to_torch_in_silence(case):
    """By default: the very bits of a run without kernels."""
    make, settings, _ = REFUSED[case]
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for fused in (None, False):
            p = nn.Parameter(make())
            chosen = {"lr": 0.05, "fused": fused, **settings}
            if "generator" not in settings:
                chosen.update(seed=1, temperature=1e-3)
            opt = hm.Langevin([("w", p)], **chosen)
            advance([p], opt, 4)
            results.append([p.detach(), *opt.state[p].values()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b) or not torch.isfinite(b).all()


@needs_kernels
def test_gradients_that_are_not_contiguous():
    p = nn.Parameter(plain())
    for fused in (True, None):
        opt = hm.Langevin([("w", p)], lr=0.05, constraint=hm.Circle(0.4), fused=fused)
        p.grad = torch.ones(4, 3).t()
        if fused:
            with pytest.raises(SettingError, match=r"the gradient of 'w'.*not contiguous"):
                opt.step()
        else:
            opt.step()


@needs_kernels
@pytest.mark.parametrize("constraint", [hm.Circle(0.4), hm.Sphere(0.8), hm.Orthogonal()], ids=repr)
def test_constrained_groups_take_the_kernels_by_default(constraint, counted):
    """Unless ``foreach`` or ``fused`` asks for torch; unconstrained ones do if they are asked to."""
    for settings, uses in (
        ({}, (True, False)),
        ({"fused": True}, (True, True)),
        ({"fused": False}, (False, False)),
        ({"foreach": True}, (False, False)),
        ({"foreach": False}, (False, False)),
    ):
        for chosen, used in zip((constraint, None), uses, strict=True):
            params = weights((7, 5), (5, 7))
            opt = hm.Langevin(params, lr=0.05, constraint=chosen, scheme="BAOAB", **settings)
            counted.calls.clear()
            advance(params, opt, 2)
            moved = [c for c in counted.calls if c != "holonomic_finite"]
            assert bool(moved) is used, (settings, chosen)


@needs_kernels
def test_fused_false_calls_no_kernel_at_all(monkeypatch):
    """Nor does ``foreach`` for the steps; noise is the same numbers whoever makes them."""

    def none() -> Any:
        raise AssertionError("a kernel was called")

    for module in ("holonomic.native", "holonomic.native.orthogonal"):
        monkeypatch.setattr(f"{module}.library", none)
    monkeypatch.setattr("holonomic.engine.native.run", none)
    for constraint in (None, hm.Circle(0.4), hm.Sphere(0.8), hm.Orthogonal()):
        for scheme in ("OBA", "BAOAB", "EM", "LM"):
            params = weights((7, 5), (5, 7))
            opt = hm.Langevin(params, lr=0.05, constraint=constraint, scheme=scheme, fused=False)
            if scheme != "LM":  # which draws noise to begin with
                advance(params, opt, 2)


def test_foreach_of_a_group_is_for_that_group():
    p, q = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    groups = [{"params": [p], "foreach": True}, {"params": [q]}]
    opt = hm.Langevin(groups, constraint=hm.Circle(1.0))
    assert [g["foreach"] for g in opt.param_groups] == [True, None]
    for fused, expected in ((True, [None, True]), (False, [False, False])):
        if fused and native.reason() is not None:
            continue
        opt = hm.Langevin(groups, constraint=hm.Circle(1.0), fused=fused)
        assert [g["fused"] for g in opt.param_groups] == expected


def test_impossible_settings_are_named():
    p = [nn.Parameter(torch.ones(2))]
    if native.reason() is None:
        with pytest.raises(SettingError, match="both given"):
            hm.Langevin(p, fused=True, foreach=True)
    with pytest.raises(SettingError, match="fused is 'yes'"):
        hm.Langevin([{"params": p, "fused": "yes"}])


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("constraint", [hm.Circle(0.4), hm.Orthogonal()], ids=repr)
def test_the_default_dtype_does_not_matter(constraint, default, dtype):
    results, before = [], torch.get_default_dtype()
    for chosen in (before, default):
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(16, 9, generator=generator, dtype=torch.float32) for _ in range(4)]
        params = [nn.Parameter((0.1 * t).to(dtype)) for t in drawn]
        torch.set_default_dtype(chosen)
        try:
            opt = hm.Langevin(params, lr=0.01, constraint=constraint, temperature=1e-4, seed=1)
            advance(params, opt, 5)
        finally:
            torch.set_default_dtype(before)
        results.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@needs_kernels
def test_engines_are_chosen_in_one_place():
    assert set(programs.TABLE) == {type(FREE), hm.Circle, hm.Sphere, hm.Orthogonal}
    assert engine.native is programs


# ---------------------------------------------------------------------- autograd
@needs_kernels
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    "constraint", [None, hm.Circle(0.9), hm.Sphere(0.9), hm.Orthogonal()], ids=repr
)
def test_autograd_sees_that_weights_and_state_have_changed(constraint, fused):
    (p,) = weights((3, 4))
    opt = hm.Langevin([p], lr=0.1, constraint=constraint, scheme="BAOAB", fused=fused)
    advance([p], opt, 1)
    tensors = [p, *opt.state[p].values()]
    before = [t._version for t in tensors]
    advance([p], opt, 1)
    assert all(t._version > v for t, v in zip(tensors, before, strict=True))


@needs_kernels
@pytest.mark.parametrize("constraint", [hm.Circle(2.0), hm.Sphere(2.0), hm.Orthogonal()], ids=repr)
def test_a_backward_pass_through_old_weights_raises(constraint):
    w = nn.Parameter(torch.eye(3)[:2].clone())
    opt = hm.Langevin([w], lr=0.1, constraint=constraint, fused=True)
    x = torch.ones(4, 3, requires_grad=True)
    y = (x @ w.T).sum()
    w.grad = torch.ones(2, 3)
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x)


@needs_kernels
def test_steps_in_inference_mode():
    for constraint in (hm.Circle(0.9), hm.Sphere(0.9), hm.Orthogonal()):
        (p,) = weights((3, 4))
        opt = hm.Langevin([p], lr=0.1, constraint=constraint, fused=True)
        p.grad = torch.ones_like(p)
        with torch.inference_mode():
            opt.step()
            opt.step()
        opt.step()
        assert opt.report().groups[0].residual < 8 * EPS


# ---------------------------------------------------------------------- safety: tensors
def test_what_suits_the_kernels():
    class Wrapped(Tensor):
        pass

    assert native.suits(torch.zeros(3)) is None
    assert native.suits(nn.Parameter(torch.zeros(3))) is None
    assert native.suits(torch.zeros(0)) is None
    for t, why in (
        (torch.zeros(3, dtype=torch.float64), "float64"),
        (torch.zeros(3, dtype=torch.int32), "int32"),
        (torch.zeros(3, device="meta"), "meta"),
        (torch.zeros(4)[::2], "contiguous"),
        (torch.zeros(2, 3).t(), "contiguous"),
        (torch.zeros(3).expand(2, 3), "contiguous"),
        (torch.zeros(3).as_subclass(Wrapped), "Wrapped"),
        (torch._neg_view(torch.zeros(3)), "plain"),
        (torch.zeros(3, dtype=torch.complex64).conj().imag, "contiguous"),
    ):
        assert why in str(native.suits(t))
        assert not native.fits([torch.zeros(2), t])
    assert native.fits([])


def shrunk(nbytes: int) -> Tensor:
    t = torch.zeros(64)
    t.untyped_storage().resize_(nbytes)
    return t


@needs_kernels
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.zeros(64, dtype=torch.float64), "float64"),
        (lambda: torch.zeros(128)[::2], "contiguous"),
        (lambda: torch.zeros(64, device="meta"), "meta"),
        (lambda: torch.zeros(64).to_sparse(), "contiguous|plain"),
        (lambda: torch.zeros(63), "shape"),
        (lambda: torch.zeros(1, 64), "shape"),
        (lambda: torch.zeros(8, 8), "shape"),
        (lambda: shrunk(0), "no memory"),
        (lambda: shrunk(16), "no memory"),
        (lambda: torch._efficientzerotensor(64), "no memory"),
    ],
)
def test_what_no_kernel_may_be_given(make, why):
    with pytest.raises(native.Wrong, match=why):
        native.require(make(), (64,))
    if why != "shape":
        with pytest.raises(native.Wrong, match=why):
            native.finite([torch.zeros(3), make()])


@needs_kernels
def test_wrappers_of_functional_transforms_are_no_tensors_for_kernels():
    def inside(x: Tensor) -> Tensor:
        with pytest.raises(native.Wrong):
            native.require(x, x.shape)
        return x.sum()

    torch.func.vmap(inside)(torch.zeros(2, 3))
    torch.func.grad(inside)(torch.zeros(3))


@needs_kernels
def test_require_gives_the_address():
    t = torch.zeros(5, 4)
    assert native.require(t, (5, 4)) == t.data_ptr()
    assert native.require(t[2:], torch.Size((3, 4))) == t.data_ptr() + 4 * 8
    assert native.addresses([t, None], 20) == [t.data_ptr(), 0]
    with pytest.raises(native.Wrong, match="20 numbers"):
        native.addresses([t], 19)


def test_memory_that_is_shared_is_seen():
    def apart(written: list[Tensor], read: list[Tensor] | None = None) -> bool:
        return native.apart(native.spans(written), native.spans(read or []))

    t = torch.zeros(100)
    a, b, c = t[:40], t[30:60], t[40:80]
    assert apart([])
    assert apart([a, c])
    assert not apart([a, b])
    assert not apart([b, c])
    assert not apart([a], [b])
    assert not apart([b], [a, c])
    assert apart([c], [a, a[:10], t[20:40]])  # what is only read may be read twice
    assert not apart([t[85:]], [a, t[70:90]])
    assert not apart([t[50:51]], [t, torch.zeros(5)])
    assert not apart([a, a])
    assert apart([a, t[20:20], torch.zeros(0), torch.zeros(0)], [t[40:40]])
    with pytest.raises(native.Wrong, match="share memory"):
        native.require_apart(native.spans([a]), native.spans([b]))


# ---------------------------------------------------------------------- safety: jobs
def word(names: str = "OBA", noisy: bool = False) -> Any:
    letters = [native.Letter(n, 0.1, 0.1, noisy and n in "OE") for n in names]
    return native.word(letters, 1.0, 1.0, 0.0, 1e-5)


def job(spheres: bool, **changes: Any) -> native.Job:
    """Six rows of 100 weights on their manifold, with or without a change."""
    q, xi = torch.zeros(6, 100), torch.ones(6, 1) if spheres else torch.ones(6, 100)
    good: dict[str, Any] = {
        **{"rows": 6, "q": q, "v": torch.zeros(6, 100), "xi": xi},
        **{"eta": torch.zeros(6, 1) if spheres else None, "g": torch.ones(6, 100)},
        "keys": torch.arange(12).reshape(6, 2),
    }
    return native.Job(**{**good, **changes})


def take(letters: Any, one: native.Job, spheres: bool, parts: int | None = None) -> int:
    size = native.parts([one], spheres) if parts is None else parts
    return native.step_(letters, [one], 3, (ctypes.c_uint8 * max(0, size))(), spheres)


@needs_kernels
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("names", ["OBA", "E"])
@pytest.mark.parametrize("spheres", [False, True])
def test_a_job_that_is_right_is_done(spheres, names, noisy):
    one = job(spheres)
    if names == "E":
        one = one._replace(v=None, eta=None)
    assert take(word(names, noisy), one, spheres) == 0
    assert one.q.abs().max() > 0


@needs_kernels
def test_parts_off_the_manifold_are_left_alone_and_counted():
    for spheres, row in ((False, slice(None)), (True, 2)):
        one = job(spheres)
        one.q[2, 5] = 0.5
        before = one.q.clone()
        state = (ctypes.c_uint8 * native.parts([one], spheres))()
        assert native.step_(word(), [one], 0, state, spheres) == 1
        assert torch.equal(
            one.q[row] if spheres else one.q[2], before[row] if spheres else before[2]
        )
        assert sum(state) == native.parts([one], spheres) - 1
        assert not torch.equal(one.q[3], before[3])
        moved = one.q[3].clone()
        limitless = native.word([native.Letter("A", 0.1)], 1.0, 1.0, 0.0, math.inf)
        assert native.step_(limitless, [one], 0, state, spheres) == 0
        assert sum(state) == native.parts([one], spheres)
        assert torch.equal(one.q[3], moved)  # it had been done


WRONG: dict[str, Callable[[bool], dict[str, Any]]] = {
    "rows that do not divide": lambda _: {"rows": 7},
    "no rows": lambda _: {"rows": 0},
    "fewer than no rows": lambda _: {"rows": -6},
    "v too small": lambda _: {"v": torch.zeros(6, 99)},
    "v too large": lambda _: {"v": torch.zeros(7, 100)},
    "v of another shape": lambda _: {"v": torch.zeros(100, 6)},
    "v in double precision": lambda _: {"v": torch.zeros(6, 100).double()},
    "v not contiguous": lambda _: {"v": torch.zeros(100, 6).t()},
    "v is q": lambda _: {"v": None, "rows": 6},
    "g too small": lambda _: {"g": torch.zeros(5, 100)},
    "g a number": lambda _: {"g": torch.zeros(())},
    "q in half precision": lambda _: {"q": torch.zeros(6, 100).half()},
    "q shrunk": lambda _: {"q": shrunk(16), "v": shrunk(256), "g": shrunk(256), "rows": 1},
    "xi too small": lambda s: {"xi": torch.ones(5, 1) if s else torch.ones(6, 99)},
    "xi too large": lambda s: {"xi": torch.ones(6, 2) if s else torch.ones(6, 101)},
    "xi of one number": lambda _: {"xi": torch.ones(1, 1)},
    "xi not contiguous": lambda s: {"xi": torch.ones(6, 2)[:, :1] if s else torch.ones(100, 6).t()},
    "eta too small": lambda _: {"eta": torch.zeros(5)},
    "eta in double precision": lambda _: {"eta": torch.zeros(6, 1).double()},
    "xi missing": lambda s: {"xi": None, "eta": torch.zeros(6, 1)},
    "keys missing": lambda _: {"keys": None},
    "too many keys": lambda _: {"keys": torch.zeros(7, 2, dtype=torch.int64)},
    "too few keys": lambda _: {"keys": torch.zeros(4, 2, dtype=torch.int64)},
    "no keys": lambda _: {"keys": torch.zeros(0, 2, dtype=torch.int64)},
    "keys of one word": lambda _: {"keys": torch.zeros(6, 1, dtype=torch.int64)},
    "keys in a row": lambda _: {"keys": torch.zeros(12, dtype=torch.int64)},
    "a single key": lambda _: {"keys": torch.tensor(5)},
    "keys of 32 bits": lambda _: {"keys": torch.zeros(6, 2, dtype=torch.int32)},
    "keys not contiguous": lambda _: {"keys": torch.zeros(2, 6, dtype=torch.int64).t()},
}


@needs_kernels
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("spheres", [False, True])
def test_a_job_that_is_wrong_raises_and_moves_nothing(spheres, case):
    one = job(spheres, **WRONG[case](spheres))
    before = one.q.clone() if case != "q shrunk" else None
    with pytest.raises(native.Wrong):
        take(word(noisy=True), one, spheres)
    assert before is None or torch.equal(one.q, before)


@needs_kernels
@pytest.mark.parametrize("spheres", [False, True])
def test_jobs_that_share_memory_raise(spheres):
    memory = torch.zeros(1300)
    for changes in (
        {"v": memory[:600].view(6, 100), "q": memory[300:900].view(6, 100)},
        {"g": memory[:600].view(6, 100), "q": memory[300:900].view(6, 100)},
        {"xi": memory[:6].view(6, 1) if spheres else memory[:600].view(6, 100)},
    ):
        changes.setdefault("q", memory[5:605].view(6, 100))
        with pytest.raises(native.Wrong, match="share memory"):
            take(word(), job(spheres, **changes), spheres)
    one = job(spheres)
    jobs, state = [one, job(spheres, q=one.q)], (ctypes.c_uint8 * 12)()
    with pytest.raises(native.Wrong, match="share memory"):
        native.step_(word(), jobs, 0, state, spheres)
    with pytest.raises(native.Wrong, match="share memory"):
        take(word(), job(spheres, q=one.q, v=one.q), spheres)


@needs_kernels
@pytest.mark.parametrize("spheres", [False, True])
def test_a_state_of_another_length_raises(spheres):
    right = native.parts([job(spheres)], spheres)
    for parts in (0, right - 1, right + 1):
        with pytest.raises(native.Wrong, match="parts were announced"):
            take(word(), job(spheres), spheres, parts)


@needs_kernels
def test_a_word_that_is_wrong_raises():
    with pytest.raises(native.Wrong, match="17 letters"):
        word("O" * 17)
    for change in ({"count": 16}, {"count": -1}, {"letters": b"OXA"}, {"letters": b"OB"}):
        letters = word()
        for key, value in change.items():
            setattr(letters, key, value)
        with pytest.raises(native.Wrong, match="a word is"):
            take(letters, job(False), False)


@needs_kernels
def test_a_circle_with_a_momentum_of_its_slack_raises():
    with pytest.raises(native.Wrong, match="momentum"):
        take(word(), job(False, eta=torch.zeros(6, 100)), False)


@needs_kernels
def test_noise_that_is_wrong_raises():
    keys = torch.zeros(2, 2, dtype=torch.int64)
    for out, k, first in (
        (torch.zeros(3, 4), keys, 0),
        (torch.zeros(4), keys, 0),
        (torch.zeros(()), keys, 0),
        (torch.zeros(4, 2).t(), keys, 0),
        (torch.zeros(2, 4).double(), keys, 0),
        (torch.zeros(2, 4), keys.int(), 0),
        (torch.zeros(2, 4), keys[:, :1], 0),
        (torch.zeros(2, 4), keys, -1),
        (torch.zeros(2, 4), keys, 2**40),
    ):
        with pytest.raises(native.Wrong):
            native.normal_(out, k, first, 0, 0)


@needs_kernels
def test_a_stack_that_is_wrong_raises():
    shape = torch.Size((4, 3))
    limits = Limits(1e-6, 1e-7, 0.5, 10)

    def tensors(*shape: int) -> list[Tensor]:
        return [torch.eye(4)[:, :3].contiguous() if not shape else torch.zeros(shape)]

    for q, v, g in (
        (tensors(4, 2), tensors(4, 3), tensors(4, 3)),
        (tensors(), tensors(3, 3), tensors(4, 3)),
        (tensors(), tensors(4, 3), tensors(13)),
        (tensors(), [], tensors(4, 3)),
        (tensors(), tensors(4, 3), []),
        (tensors(), [torch.zeros(3, 4).t()], tensors(4, 3)),
        (tensors(), [torch.zeros(4, 3).double()], tensors(4, 3)),
    ):
        with pytest.raises(native.Wrong):
            Stack(shape, q, v, g)
    q = tensors()
    for lists in ((q, q, tensors(4, 3)), (q, tensors(4, 3), q), (q * 2, tensors(4, 3) * 2, q * 2)):
        with pytest.raises(native.Wrong, match="share memory"):
            Stack(shape, *lists)
    stack = Stack(shape, q, tensors(4, 3), tensors(4, 3))
    with pytest.raises(native.Wrong):
        stack.near(torch.ones(4), 1.0, 1e-5)
    assert stack.near(torch.ones(3), 1.0, 1e-5)
    assert not stack.near(torch.ones(3), 1.1, 1e-5)
    assert stack.leap_(0.1, Kick(), limits, 1.0) == []
    assert torch.equal(q[0], tensors()[0])
    good = torch.arange(4).reshape(2, 2)
    stack.stir_(word("OB", noisy=True), [good], 3)
    assert stack.v[0].abs().min() > 0
    assert torch.equal(q[0], tensors()[0])
    for names, keys in (
        ("OBA", [good]),
        ("E", [good]),
        ("OB", []),
        ("OB", [good] * 2),
        ("OB", [good.int()]),
        ("OB", [good.flatten()]),
        ("OB", [torch.zeros(5, 2, dtype=torch.int64)]),
    ):
        with pytest.raises(native.Wrong):
            stack.stir_(word(names, noisy=True), keys, 3)


# ---------------------------------------------------------------------- safety: optimizers
MANIFOLDS = {"Circle": hm.Circle(0.9), "Sphere": hm.Sphere(0.9), "Orthogonal": hm.Orthogonal()}


@needs_kernels
@pytest.mark.parametrize("name", ["none", *MANIFOLDS])
@pytest.mark.parametrize("shape", [(1200, 800), (2, 3), (12,), (4, 3), (3, 4, 1)])
def test_a_weight_replaced_after_a_step_raises(name, shape):
    """Its state has the shape that it had."""
    (p,) = weights((3, 4))
    opt = hm.Langevin([("w", p)], lr=0.1, constraint=MANIFOLDS.get(name), fused=True)
    advance([p], opt, 2)
    p.data = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    p.grad = torch.zeros(shape)
    with pytest.raises(SettingError, match="'w' has shape"):
        opt.step()


@needs_kernels
@pytest.mark.parametrize("name", MANIFOLDS)
@pytest.mark.parametrize("key", ["momentum_buffer", "slack", "slack_momentum"])
@pytest.mark.parametrize("shape", [(1,), (2, 4), (3, 2), (300, 400), (1, 1), (4, 3), (0, 4), ()])
def test_state_replaced_after_a_step_raises(name, key, shape):
    """By a file, say. Whoever notices, nothing is read or written beyond a tensor."""
    (p,) = weights((3, 4))
    opt = hm.Langevin([("w", p)], lr=0.1, constraint=MANIFOLDS[name], fused=True)
    advance([p], opt, 1)
    if key not in opt.state[p]:
        pytest.skip(f"{name} has no {key}")
    opt.state[p][key] = torch.zeros(shape)
    with pytest.raises(SettingError):
        advance([p], opt, 1)


@needs_kernels
@pytest.mark.parametrize("name", MANIFOLDS)
def test_a_weight_without_memory_raises(name):
    (p,) = weights((3, 4))
    opt = hm.Langevin([("w", p)], lr=0.1, constraint=MANIFOLDS[name], fused=True)
    advance([p], opt, 1)
    p.grad = torch.ones(3, 4)
    p.data.untyped_storage().resize_(16)
    with pytest.raises(native.Wrong, match="no memory"):
        opt.step()


@needs_kernels
@pytest.mark.parametrize("name", ["none", *MANIFOLDS])
def test_two_parameters_in_the_same_memory(name):
    """The kernels refuse them before anything moves. Torch goes on: it applies every operation of a step
    to one of the two after the other, so the numbers they share are moved twice, once with either
    momentum, and what one has left on its manifold the other takes off. By default, torch it is."""
    results = []
    for way in ({"fused": True}, {"fused": None}, {"fused": False}):
        memory = 0.3 * torch.randn(18, generator=torch.Generator().manual_seed(0))
        p, q = nn.Parameter(memory[:12].view(3, 4)), nn.Parameter(memory[6:].view(3, 4))
        chosen = {"lr": 0.1, "scheme": "BAOAB", "constraint": MANIFOLDS.get(name), **way}
        opt = hm.Langevin([("p", p), ("q", q)], **chosen)
        p.grad, q.grad = torch.ones(3, 4), torch.full((3, 4), 0.5)
        before = memory.clone()
        if way["fused"]:
            with pytest.raises(SettingError, match="shares memory with another"):
                opt.step()
            assert not any(opt.state[t]["momentum_buffer"].any() for t in (p, q))
        else:
            opt.step()
            assert not torch.equal(memory, before)
            results.append(memory)
    assert torch.equal(*results)


@needs_kernels
def test_a_gradient_in_the_memory_of_its_weight():
    p = nn.Parameter(torch.full((3, 4), 0.1))
    opt = hm.Langevin([("p", p)], lr=0.1, constraint=hm.Circle(1.0), fused=True)
    p.grad = p.detach()
    with pytest.raises(SettingError, match="shares memory with another"):
        opt.step()


@needs_kernels
def test_pieces_of_one_block_of_memory_are_fine():
    """As flattened parameters are: side by side, not in each other."""
    results = []
    for apart in (False, True):
        memory = torch.linspace(-0.3, 0.4, 24)
        p, q = memory[:12].view(3, 4), memory[12:].view(3, 4)
        params = [nn.Parameter(t.clone() if apart else t) for t in (p, q)]
        opt = hm.Langevin(params, lr=0.1, constraint=hm.Circle(1.0), fused=True)
        advance(params, opt, 3)
        results.append([t.detach() for t in params])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------------- building
def python(code: str, **variables: str) -> str:
    own = ("HOLONOMIC_NATIVE", "HOLONOMIC_ISA")
    env = {key: value for key, value in os.environ.items() if key not in own}
    env.update(variables)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True
    )
    return done.stdout


_RUN = """
import torch, holonomic as hm
p = torch.nn.Parameter(torch.tensor([[0.1, 0.2], [0.3, -0.4]]))
opt = hm.Langevin([p], constraint=hm.Circle(1.0), lr=0.1, temperature=0.1, seed=1)
for _ in range(3):
    p.grad = torch.ones(2, 2)
    opt.step()
print(p.tolist())
"""
_WITHOUT = (
    _RUN
    + """
try:
    hm.Langevin([p], constraint=hm.Circle(1.0), fused=True)
except hm.errors.SettingError as error:
    print(error)
"""
)
_WITH = (
    _RUN
    + """
from holonomic.native.loader import instruction_set
print(instruction_set())
"""
)


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"HOLONOMIC_NATIVE": "0"}, "HOLONOMIC_NATIVE=0"),
        (
            {"HOLONOMIC_ISA": "mmx"},
            "HOLONOMIC_ISA is 'mmx'; it must be one of avx512, avx2, baseline",
        ),
    ],
)
def test_without_kernels_everything_goes_on(variables, why):
    """The same numbers to rounding, noise included (three steps of numbers below 1)."""
    made, refused = python(_WITHOUT, **variables).splitlines()
    assert "fused=True asks for the compiled kernels, and there are none" in refused
    assert why in refused
    assert_same_run(made)


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_every_instruction_set_gives_the_same_numbers(name):
    if name not in built() or name not in suited():
        pytest.skip(f"there are kernels for {built()}, and this machine has {suited()}")
    made, used = python(_WITH, HOLONOMIC_ISA=name).splitlines()
    assert used == name
    assert_same_run(made)


def assert_same_run(made: str) -> None:
    p = nn.Parameter(torch.tensor([[0.1, 0.2], [0.3, -0.4]]))
    opt = hm.Langevin([p], constraint=hm.Circle(1.0), lr=0.1, temperature=0.1, seed=1)
    for _ in range(3):
        p.grad = torch.ones(2, 2)
        opt.step()
    torch.testing.assert_close(torch.tensor(eval(made)), p.detach(), rtol=0, atol=24 * EPS)


@pytest.fixture
def fresh(monkeypatch):
    """The library is looked for once: here, and in the next test, again."""
    for variable in ("HOLONOMIC_NATIVE", "HOLONOMIC_ISA"):
        monkeypatch.delenv(variable, raising=False)
    _library.cache_clear()
    yield
    _library.cache_clear()


@pytest.mark.usefixtures("fresh")
def test_a_package_without_libraries_says_so(monkeypatch):
    monkeypatch.setattr(loader, "_path", lambda name: None)
    assert "the package was installed without them" in str(native.reason())


@pytest.mark.usefixtures("fresh")
def test_libraries_for_other_machines_are_not_loaded(monkeypatch):
    monkeypatch.setattr(loader, "built", lambda: ["avx512"])
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert suited() == ["avx2", "baseline"]
    assert "were built for avx512, and avx2 or baseline is needed" in str(native.reason())
    monkeypatch.setenv("HOLONOMIC_ISA", "avx512")
    _library.cache_clear()
    assert "this machine has avx2, baseline only" in str(native.reason())


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("content", [b"not a library", b""])
def test_a_file_that_is_no_library_is_a_reason_not_a_crash(content, monkeypatch, tmp_path):
    (tmp_path / "broken.so").write_bytes(content)
    monkeypatch.setattr(loader, "_path", lambda name: tmp_path / "broken.so")
    assert "cannot be loaded" in str(native.reason())


@needs_kernels
def test_the_library_is_looked_for_once():
    assert library() is library()
