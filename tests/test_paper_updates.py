"""The step equals the updates the papers write out, number by number, in double precision.

Both sides do the same arithmetic in another order, so after n steps they differ by n roundings
times the size of the numbers (1 here) times what the motion makes of a small difference. With n of
50 and motions that last a few units of time that stays below ``EXACT`` = 1e-11.

A paper's scheme is the letters repeated for ever, from rest. The library hands back the weights at
the points of that stream where it needs a new gradient; ``STREAM`` says how it is cut (first piece,
every later piece). Adjacent halves are left unmerged here.
"""

import math

import pytest
import torch
from torch import Tensor

from helpers import Drawn, Stream, phase, random_orthonormal, run
from holonomic import Circle, Langevin, Orthogonal, from_paper

EXACT = 1e-11
STEPS = 50

STREAM = {
    "OBA": ("OBA", "OBA"),
    "ABO": ("ABOA", "BOA"),
    "BAO": ("BA", "OBA"),
    "BAOA": ("BAOA", "BAOA"),
    "BAOAB": ("BAOA", "BBAOA"),
    "ABOBA": ("ABOBAA", "BOBAA"),
    "OBABO": ("OBA", "BOOBA"),
    "BOAOB": ("BOA", "OBBOA"),
}
ONE_NOISE = ("OBA", "ABO", "BAO", "BAOA", "BAOAB")  # one whole O a step
# With RATTLE two half A are not a whole one: these have no A to merge.
NO_MERGED_DRIFT = ("OBA", "ABO", "BAO", "BAOA", "BAOAB", "OBABO", "BOAOB")


class Paper:
    """A, B, O in the papers' units; subclasses write them out for a constraint."""

    def __init__(self, letters: str, h: float, gamma: float, tau: float, gradient, noise) -> None:
        self.letters, self.h, self.gamma, self.tau = letters, h, gamma, tau
        self.gradient, self.noise = gradient, noise
        self.pieces = 0

    def step(self) -> None:
        first, later = STREAM[self.letters]
        for letter in later if self.pieces else first:
            getattr(self, letter)(self.h / self.letters.count(letter))
        self.pieces += 1

    def ou(self, h: float) -> tuple[float, float]:
        mu = math.exp(-self.gamma * h)
        return mu, math.sqrt(self.tau * (1 - mu * mu))


class Unconstrained(Paper):
    """(2.53a-c)."""

    def start(self, q: Tensor) -> None:
        self.q, self.p = q.clone(), torch.zeros_like(q)

    def A(self, h: float) -> None:
        self.q = self.q + h * self.p

    def B(self, h: float) -> None:
        self.p = self.p - h * self.gradient(self.q)

    def O(self, h: float) -> None:  # noqa: E743
        mu, sigma = self.ou(h)
        self.p = mu * self.p + sigma * self.noise(self)


class PaperCircle(Paper):
    """4.7.2.4, with both momenta and the projection after O."""

    def start(self, q: Tensor, r: Tensor) -> None:
        self.q, self.r = q.clone(), r
        self.xi = (r**2 - q**2).sqrt()
        self.pc, self.px = torch.zeros_like(q), torch.zeros_like(q)

    def A(self, h: float) -> None:
        q, xi = self.q, self.xi
        w = (xi * self.pc - q * self.px) / self.r**2
        c, s = torch.cos(w * h), torch.sin(w * h)
        self.q, self.xi = c * q + s * xi, -s * q + c * xi
        self.pc, self.px = w * (-s * q + c * xi), -w * (c * q + s * xi)

    def B(self, h: float) -> None:
        g = self.gradient(self.q)
        self.pc = self.pc - h * (1 - self.q**2 / self.r**2) * g
        self.px = self.px + h * self.q * self.xi / self.r**2 * g

    def O(self, h: float) -> None:  # noqa: E743
        mu, sigma = self.ou(h)
        Rc, Rx = self.noise(self)
        pc, px = mu * self.pc + sigma * Rc, mu * self.px + sigma * Rx
        q, xi, r2 = self.q, self.xi, self.r**2
        self.pc = (1 - q**2 / r2) * pc - q * xi / r2 * px
        self.px = -q * xi / r2 * pc + (1 - xi**2 / r2) * px


class PaperOrthogonal(Paper):
    """4.7.2.6 on the tall matrix Q, K quasi-Newton iterations, a projection after every letter."""

    K = 40

    def start(self, Q: Tensor) -> None:
        self.Q, self.P = Q.clone(), torch.zeros_like(Q)

    @staticmethod
    def project(Q: Tensor, P: Tensor) -> Tensor:
        return P - 0.5 * Q @ (P.T @ Q + Q.T @ P)

    @classmethod
    def back(cls, Q0: Tensor, Qbar: Tensor) -> Tensor:
        Q = Qbar
        for _ in range(cls.K):
            Q = Q - Q0 @ (0.5 * (Q.T @ Q - torch.eye(Q.shape[1], dtype=Q.dtype)))
        return Q

    def A(self, h: float) -> None:
        Qbar = self.Q + h * self.P
        Q = self.back(self.Q, Qbar)
        P = self.P + (Q - Qbar) / h
        self.Q, self.P = Q, self.project(Q, P)

    def B(self, h: float) -> None:
        self.P = self.project(self.Q, self.P - h * self.gradient(self.Q))

    def O(self, h: float) -> None:  # noqa: E743
        mu, sigma = self.ou(h)
        self.P = self.project(self.Q, mu * self.P + sigma * self.noise(self))


def rough(q: Tensor) -> Tensor:
    """A potential with nothing special about it; its gradient is of order 1."""
    n = torch.arange(q.numel(), dtype=q.dtype).reshape(q.shape)
    return torch.sin(1.7 * q + n) + 0.3 * (q - 0.2) ** 2


def rough_gradient(q: Tensor) -> Tensor:
    q = q.detach().clone().requires_grad_()
    return torch.autograd.grad(rough(q).sum(), q)[0]


def starts(n: int, r: float | Tensor = 1.0) -> Tensor:
    u = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return (2 * u - 1) * 0.9 * r


# ---------------------------------------------------------------------- units
def test_from_paper_is_lr_h_squared_and_momentum_exp_minus_gamma_h():
    settings = from_paper(h=0.3, gamma=1.0)
    assert settings["lr"] == pytest.approx(0.09, rel=1e-15)
    assert settings["momentum"] == pytest.approx(math.exp(-0.3), rel=1e-15)


# ---------------------------------------------------------------------- no constraint
@pytest.mark.parametrize("letters", STREAM)
def test_unconstrained_without_noise(letters):
    h, gamma = 0.21, 0.8
    paper = Unconstrained(letters, h, gamma, 0.0, rough_gradient, lambda s: 0.0)
    paper.start(starts(20))
    worst = []

    def compare(q, opt):
        paper.step()
        x = phase(q, opt)
        worst.append((x.q[0] - paper.q).abs().max().item())
        worst.append((-h * x.v[0] - paper.p).abs().max().item())

    run(rough, starts(20), STEPS, compare, **from_paper(h, gamma), scheme=letters)
    assert len(worst) == 2 * STEPS
    assert max(worst) < EXACT


@pytest.mark.parametrize("letters", ONE_NOISE)
def test_unconstrained_with_the_same_noise(letters):
    """v = -p / h, so the library's R is the paper's -R."""
    h, gamma, tau = 0.21, 0.8, 0.7
    stream = Stream(5)
    paper = Unconstrained(
        letters, h, gamma, tau, rough_gradient, lambda s: -stream.like(torch.empty_like(s.q))
    )
    paper.start(starts(20))
    worst = []

    def compare(q, opt):
        paper.step()
        worst.append((q - paper.q).abs().max().item())

    settings = {**from_paper(h, gamma), "temperature": tau, "generator": Drawn(5)}
    run(rough, starts(20), STEPS, compare, scheme=letters, **settings)
    assert len(worst) == STEPS
    assert max(worst) < EXACT


def test_euler_maruyama_is_2_51():
    h, tau, stream = 0.03, 0.7, Stream(3)
    q = starts(20)
    new, _ = run(rough, q, STEPS, scheme="EM", lr=h, temperature=tau, generator=Drawn(3))
    for _ in range(STEPS):
        q = q - h * rough_gradient(q) + math.sqrt(2 * tau * h) * stream.like(q)
    assert (new - q).abs().max() < EXACT


def test_averaged_noise_is_2_56():
    h, tau, stream = 0.03, 0.7, Stream(3)
    q = starts(20)
    new, _ = run(rough, q, STEPS, scheme="LM", lr=h, temperature=tau, generator=Drawn(3))
    last = stream.like(q)
    for _ in range(STEPS):
        R = stream.like(q)
        q = q - h * rough_gradient(q) + math.sqrt(2 * tau * h) * (R + last) / 2
        last = R
    assert (new - q).abs().max() < EXACT


def test_averaged_noise_is_baoab_without_memory():
    """(2.56) from (2.55): BAOAB at step h and momentum 0 is LM with lr = h^2 / 2.

    The noise of v is that of -p, and LM's "last" noise is the first momentum of BAOAB."""
    h, tau, seed = 0.2, 0.7, 11
    q = starts(20)
    lm, _ = run(rough, q, STEPS, scheme="LM", lr=h * h / 2, temperature=tau, generator=Drawn(seed))

    w = torch.nn.Parameter(q.clone())
    source = Drawn(seed, sign=-1.0)
    opt = Langevin([w], lr=h * h, momentum=0.0, temperature=tau, scheme="BAOAB", generator=source)
    opt.state[w]["momentum_buffer"] = math.sqrt(tau) / h * source.like(q)
    for _ in range(STEPS):
        w.grad = rough_gradient(w)
        opt.step()
    assert (w.detach() - lm).abs().max() < EXACT


# ---------------------------------------------------------------------- circle
RADII = {
    "number": (0.7, torch.tensor(0.7, dtype=torch.float64)),
    "tensor": (torch.linspace(0.3, 2.0, 20, dtype=torch.float64),) * 2,
}


@pytest.mark.parametrize("radius", RADII)
@pytest.mark.parametrize("letters", STREAM)
def test_circle_without_noise(letters, radius):
    """4.7.2.4, in all four variables: p_theta = -h v xi and p_xi = h v theta."""
    given, r = RADII[radius]
    h, gamma = 0.21, 0.5
    paper = PaperCircle(letters, h, gamma, 0.0, rough_gradient, lambda s: (0.0, 0.0))
    paper.start(starts(20, r), r)
    worst = []

    def compare(q, opt):
        paper.step()
        x = phase(q, opt)
        q, v, xi = x.q[0], x.v[0], x.xi[0]
        pairs = [(q, paper.q), (xi, paper.xi), (-h * v * xi, paper.pc), (h * v * q, paper.px)]
        worst.extend((ours - theirs).abs().max().item() for ours, theirs in pairs)

    settings = from_paper(h, gamma)
    run(rough, starts(20, r), STEPS, compare, constraint=Circle(given), scheme=letters, **settings)
    assert len(worst) == 4 * STEPS
    assert max(worst) < EXACT


@pytest.mark.parametrize("letters", ONE_NOISE)
def test_circle_with_the_same_noise(letters):
    """The paper draws two numbers a weight and projects; only the tangential one survives.

    So the paper is given tangential -R (ours, for p = -h v) and something arbitrary as normal."""
    r = torch.tensor(0.7, dtype=torch.float64)
    h, gamma, tau = 0.21, 0.5, 0.6
    stream, other = Stream(8), Stream(9)

    def noise(s):
        R, N = stream.like(s.q), other.like(s.q)
        return (-R * s.xi + N * s.q) / s.r, (R * s.q + N * s.xi) / s.r

    paper = PaperCircle(letters, h, gamma, tau, rough_gradient, noise)
    paper.start(starts(20, r), r)
    worst = []

    def compare(q, opt):
        paper.step()
        x = phase(q, opt)
        q, v, xi = x.q[0], x.v[0], x.xi[0]
        pairs = [(q, paper.q), (xi, paper.xi), (-h * v * xi, paper.pc), (h * v * q, paper.px)]
        worst.extend((ours - theirs).abs().max().item() for ours, theirs in pairs)

    settings = {**from_paper(h, gamma), "temperature": tau, "generator": Drawn(8)}
    run(rough, starts(20, r), STEPS, compare, constraint=Circle(0.7), scheme=letters, **settings)
    assert len(worst) == 4 * STEPS
    assert max(worst) < EXACT


@pytest.mark.parametrize("scheme", ["EM", "LM"])
def test_overdamped_circle(scheme):
    """(4.47), the angle taken by atan2: both signs of theta and of xi occur and are kept."""
    r, h, tau, stream = 0.7, 0.04, 0.7, Stream(3)
    q = starts(20, r)
    xi = (r**2 - q**2).sqrt()
    signs = set()
    new, opt = run(
        rough,
        q,
        STEPS,
        scheme=scheme,
        lr=h,
        temperature=tau,
        generator=Drawn(3),
        constraint=Circle(r),
    )
    last = (stream.like(q), stream.like(q)) if scheme == "LM" else None
    for _ in range(STEPS):
        R, S = drawn = stream.like(q), stream.like(q)
        if last is not None:
            R, S = (R + last[0]) / 2, (S + last[1]) / 2
            last = drawn
        q = q - h * rough_gradient(q) + math.sqrt(2 * tau * h) * R
        xi = xi + math.sqrt(2 * tau * h) * S
        angle = torch.atan2(xi, q)
        q, xi = r * torch.cos(angle), r * torch.sin(angle)
        signs |= set(zip((q > 0).tolist(), (xi > 0).tolist(), strict=True))
    assert len(signs) == 4, "the run must visit all four quadrants to prove anything"
    x = phase(new, opt)
    assert (x.q[0] - q).abs().max() < EXACT
    assert (x.xi[0] - xi).abs().max() < EXACT


# ---------------------------------------------------------------------- orthogonal
SHAPES = {
    "tall": (6, 3),
    "wide": (3, 6),
    "square": (4, 4),
    "conv": (3, 2, 2, 2),
    "tall conv": (9, 1, 2, 2),
}


def as_tall(w: Tensor) -> Tensor:
    """(4.49): the weight as a matrix C_out x rest, turned so that rows are not fewer than columns."""
    matrix = w.reshape(w.shape[0], -1)
    return matrix.T if matrix.shape[0] < matrix.shape[1] else matrix


def as_weight(Q: Tensor, shape: tuple[int, ...]) -> Tensor:
    wide = shape[0] < math.prod(shape[1:])
    return (Q.T if wide else Q).reshape(shape)


def orthogonal_weight(shape: tuple[int, ...]) -> Tensor:
    n, m = shape[0], math.prod(shape[1:])
    return as_weight(random_orthonormal(max(n, m), min(n, m), seed=2), shape).contiguous()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("letters", "tau"),
    [(s, 0.0) for s in NO_MERGED_DRIFT] + [(s, 0.4) for s in ONE_NOISE],
)
def test_orthogonal(letters, shape, tau):
    shape = SHAPES[shape]
    h, gamma, stream = 0.09, 0.9, Stream(4)

    def gradient(Q):
        return as_tall(rough_gradient(as_weight(Q, shape)))

    def noise(s):
        return -as_tall(stream.like(torch.empty(shape, dtype=torch.float64))) if tau else 0.0

    paper = PaperOrthogonal(letters, h, gamma, tau, gradient, noise)
    paper.start(as_tall(orthogonal_weight(shape)))
    worst = []

    def compare(q, opt):
        paper.step()
        x = phase(q, opt)
        worst.append((as_tall(x.q[0]) - paper.Q).abs().max().item())
        worst.append((-h * as_tall(x.v[0]) - paper.P).abs().max().item())
        worst.append(float(opt.report().groups[0].fallbacks))

    settings = {**from_paper(h, gamma), "temperature": tau, "generator": Drawn(4)}
    start = orthogonal_weight(shape)
    run(rough, start, STEPS, compare, constraint=Orthogonal(), scheme=letters, **settings)
    assert len(worst) == 3 * STEPS
    assert max(worst) < EXACT


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", ["EM", "LM"])
def test_overdamped_orthogonal(scheme, shape):
    """Algorithm 4.1."""
    shape = SHAPES[shape]
    h, tau, stream = 0.004, 0.5, Stream(6)
    w = orthogonal_weight(shape)
    Q = as_tall(w)
    new, opt = run(
        rough,
        w,
        STEPS,
        scheme=scheme,
        lr=h,
        temperature=tau,
        generator=Drawn(6),
        constraint=Orthogonal(),
    )
    last = stream.like(w) if scheme == "LM" else None
    for _ in range(STEPS):
        R = drawn = stream.like(w)
        if last is not None:
            R, last = (R + last) / 2, drawn
        G = as_tall(rough_gradient(as_weight(Q, shape)))
        Q = PaperOrthogonal.back(Q, Q - h * G + math.sqrt(2 * tau * h) * as_tall(R))
    assert opt.report().groups[0].fallbacks == 0
    assert (as_tall(new) - Q).abs().max() < EXACT
