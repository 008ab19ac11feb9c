"""A step by compiled kernels: one table says which manifolds they know.

A program serves one exact type of constraint: a subclass may change what the kernels do not see. It says
why it cannot take a part, or takes its whole word. Weights that somebody has changed are left alone by
the kernels, put right by the constraint (the only place that knows how), and then moved.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from holonomic import native
from holonomic.constraints import Circle, Constraint, Free, Orthogonal, Sphere
from holonomic.constraints.orthogonal import LARGE, _signs, iteration_ends
from holonomic.native.loader import Word
from holonomic.native.orthogonal import Kick, Limits, Stack, small
from holonomic.noise import Noise
from holonomic.phase import Phase
from holonomic.physics import Physics
from holonomic.scheme import Substep

if TYPE_CHECKING:
    from holonomic.plan import Part


class Program(Protocol):
    """How the kernels move one kind of manifold."""

    letters: tuple[str, ...]

    def refusal(self, part: "Part") -> str | None: ...

    def run(self, part: "Part") -> None: ...


def refusal(part: "Part") -> str | None:
    """None if the kernels can take a part's step, else why not."""
    if (why := native.reason()) is not None:
        return f"there are no compiled kernels ({why})"
    program = TABLE.get(type(part.constraint))
    if program is None:
        return f"they do not know {type(part.constraint).__name__}"
    if part.physics.thermostat is not None:
        return f"they do not know adaptive friction (scheme {part.scheme.letters!r})"
    unknown = [s.letter for s in part.word if s.letter not in program.letters]
    if unknown:
        return f"they do not know {unknown[0]} for {type(part.constraint).__name__}"
    if len(part.word) > native.LETTERS:
        return f"the scheme has {len(part.word)} letters, and they take {native.LETTERS} at most"
    if (why := program.refusal(part)) is not None:
        return why
    x = part.x
    moved = [*x.q, *x.v, *x.xi, *x.eta]
    if not (native.fits(moved) and native.fits(part.grads)):
        return _unsuited(part)
    if not native.apart(native.spans(moved), native.spans(part.grads)):
        return f"{x.names[0]!r} or a parameter beside it shares memory with another"
    return None


def _unsuited(part: "Part") -> str | None:
    """Which tensor of a part the kernels cannot take, and why."""
    x = part.x
    for tensors, what in (
        (x.q, "the weight"),
        (part.grads, "the gradient of"),
        (x.v, "the momentum of"),
        (x.xi, "the slack of"),
        (x.eta, "the momentum of the slack of"),
    ):
        for t, name in zip(tensors, x.names, strict=False):
            if (why := native.suits(t)) is not None:
                return f"{what} {name!r} cannot be used: {why}"
    return None


def run(part: "Part") -> None:
    """Move a part that was not refused."""
    TABLE[type(part.constraint)].run(part)
    x = part.x
    changed = [*x.q, *x.v, *x.xi, *x.eta]
    torch.autograd.graph.increment_version(changed)  # autograd does not see the kernels


class Elementwise:
    """Flat space and circles: blocks of weights go through the whole word in the cache."""

    letters: tuple[str, ...] = ("A", "B", "O", "EM")

    def refusal(self, part: "Part") -> str | None:
        c = part.constraint
        return _noise(part) or (_radii(c.radius) if isinstance(c, Circle) else None)

    def run(self, part: "Part") -> None:
        c = part.constraint
        _move(part, c.radius if isinstance(c, Circle) else 0.0, isinstance(c, Circle), None)


class Spheres:
    """Rows on spheres."""

    letters: tuple[str, ...] = ("A", "B", "O", "EM")

    def refusal(self, part: "Part") -> str | None:
        c = part.constraint
        assert isinstance(c, Sphere)
        if c.dim not in (0, None):
            return f"they know rows (dim=0) and whole tensors (dim=None), not dim={c.dim}"
        return _noise(part) or _radii(c.radius)

    def run(self, part: "Part") -> None:
        c = part.constraint
        assert isinstance(c, Sphere)
        lead = c.batch_dims if c.dim is None else c.batch_dims + 1
        _move(part, c.radius, False, lead)


class Matrices:
    """Orthogonal matrices: small ones all in one call, large ones with kernels between their products."""

    letters: tuple[str, ...] = ("A", "B", "O")

    def refusal(self, part: "Part") -> str | None:
        assert isinstance(part.constraint, Orthogonal)
        return _noise(part) or _extreme(part.constraint.scale, "scale")

    def run(self, part: "Part") -> None:
        c, k, x = part.constraint, part.physics, part.x
        assert isinstance(c, Orthogonal)
        shapes: dict[torch.Size, list[int]] = {}
        for i, q in enumerate(x.q):
            if q.numel():
                shapes.setdefault(q.shape, []).append(i)
        stacks = [(_stack(c, part, index), index) for index in shapes.values()]
        if not all(_near(c, stack, part.within) for stack, _ in stacks):
            c.follow_(x, part.within)
        begin = 0
        for number, s in enumerate(part.word):
            if s.letter == "A":
                kick = _kick_or_stir_(part, stacks, begin, number)
                for stack, _ in stacks:
                    _drift_(c, x, stack, k.h(s), kick)
                begin = number + 1
        _kick_(x, part.grads, _kick_or_stir_(part, stacks, begin, len(part.word)))


#: What the kernels know: the exact type of a constraint, and its program.
TABLE: dict[type[Constraint], Program] = {
    Free: Elementwise(),
    Circle: Elementwise(),
    Sphere: Spheres(),
    Orthogonal: Matrices(),
}


# ---------------------------------------------------------------------- circles, spheres, flat space
def _move(part: "Part", radius: float | Tensor, angular: bool, lead: int | None) -> None:
    """Take the word on all tensors; ``lead`` is how many dimensions count the spheres of a tensor."""
    x, k = part.x, part.physics
    assert not isinstance(radius, Tensor)
    letters = tuple(_numbers(s, k, radius if angular else 1.0) for s in part.word)
    shared = radius, k.sign, k.weight_decay
    noisy, spheres = any(letter.noisy for letter in letters), lead is not None
    jobs = []
    keys = [stream.keys for stream in part.streams] if noisy else repeat(None)
    lists = x.q, x.v or repeat(None), x.xi or repeat(None), x.eta or repeat(None), part.grads, keys
    for q, v, xi, eta, g, key in zip(*lists, strict=False):  # what is not there is repeated
        if q.numel():
            rows = q.shape[:lead].numel() if spheres else 1 if key is None else len(key)
            jobs.append(native.Job(rows, q, v, xi, eta, g, key))
    state = (ctypes.c_uint8 * native.parts(jobs, spheres))()
    if native.step_(_word(letters, *shared, part.within), jobs, part.step, state, spheres):
        part.constraint.follow_(x, part.within)
        native.step_(_word(letters, *shared, torch.inf), jobs, part.step, state, spheres)


@lru_cache(maxsize=64)  # settings seldom change from one step to the next
def _word(
    letters: tuple[native.Letter, ...], radius: float, sign: float, decay: float, within: float
) -> Word:
    return native.word(letters, radius, sign, decay, within)


def _numbers(s: Substep, k: Physics, r: float) -> native.Letter:
    """The coefficients of a letter as the kernels want them; on a circle of radius r, v is an angle."""
    noisy = k.noisy(s)
    if s.letter in ("A", "EM"):
        return native.Letter(s.letter, k.h(s), k.sigma(s) if noisy else 0.0, noisy)
    if s.letter == "B":
        return native.Letter("B", s.fraction / r**2)
    return native.Letter("O", k.mu(s), k.sigma(s) / r, noisy)


def _noise(part: "Part") -> str | None:
    own = not part.streams or type(part.noise).like is Noise.like
    return None if own else f"they make noise themselves, not that of {type(part.noise).__name__}"


def _radii(radius: float | Tensor) -> str | None:
    if isinstance(radius, Tensor):
        return "they take one radius for all weights, not a tensor of them"
    return _extreme(radius, "radius")


def _extreme(r: float, what: str) -> str | None:
    """Squares of lengths must be normal numbers in single precision, with room on both sides."""
    return None if 1e-15 <= r <= 1e15 else f"the {what} {r:g} is not between 1e-15 and 1e15"


# ---------------------------------------------------------------------- orthogonal matrices
def _kick_(x: Phase, g: Sequence[Tensor], kick: Kick) -> None:
    """v <- a v + b g + c q."""
    if kick.a != 1:
        torch._foreach_mul_(x.v, kick.a)
    for tensors, factor in ((list(g), kick.b), (x.q, kick.c)):
        if factor:
            torch._foreach_add_(x.v, tensors, alpha=factor)


def _kick_or_stir_(
    part: "Part", stacks: list[tuple[Stack, list[int]]], begin: int, end: int
) -> Kick:
    """The letters between two drifts. With noise they are taken at once; without, the next drift can do it:
    they amount to a kick."""
    k, letters = part.physics, part.word[begin:end]
    if any(map(k.noisy, letters)):
        idle = (native.Letter("O", 1.0),) * begin  # so that every letter keeps its number
        numbers = idle + tuple(_numbers(s, k, 1.0) for s in letters)
        word = _word(numbers, 1.0, k.sign, k.weight_decay, torch.inf)
        for stack, index in stacks:
            stack.stir_(word, [part.streams[i].keys for i in index], part.step)
        return Kick()
    kick = Kick()
    for s in letters:
        if s.letter == "B":
            kick = Kick(kick.a, kick.b + k.sign * s.fraction, kick.c + k.weight_decay * s.fraction)
        else:
            kick = Kick(*(k.mu(s) * factor for factor in kick))
    return kick


def _stack(c: Orthogonal, part: "Part", index: list[int]) -> Stack:
    """Matrices of one shape, checked."""
    q, v, g = ([ts[i] for i in index] for ts in (part.x.q, part.x.v, part.grads))
    return Stack(c.matrix(q[0]).shape, q, v, g)


def _near(c: Orthogonal, stack: Stack, within: float) -> bool:
    """Whether nobody has changed the weights."""
    q = stack.q[0]
    return stack.near(_signs(min(stack.shape[-2:]), q.dtype, q.device), c.scale, within)


def _drift_(c: Orthogonal, x: Phase, stack: Stack, h: float, kick: Kick) -> None:
    """Kick and drift; what needs care is left to the constraint."""
    q, v, g = stack.q, stack.v, stack.g
    limits = Limits(*iteration_ends(q[0].dtype), LARGE, c.max_iterations)
    if small(stack.shape):
        rest = stack.leap_(h, kick, limits, c.scale)
        if rest:
            some = [[_matrices(ts, stack.shape)[k] for k in rest] for ts in (q, v, g)]
            _with_care_(c, x, *some, h=h, kick=kick)
        return
    for i in range(len(q)):
        if not stack.drift_(i, h, kick, limits, c.scale):
            _with_care_(c, x, [q[i]], [v[i]], [g[i]], h=h, kick=Kick())  # it has been kicked


def _matrices(tensors: Sequence[Tensor], shape: torch.Size) -> list[Tensor]:
    """All matrices of some tensors, sharing memory."""
    return [m for t in tensors for m in t.view(-1, *shape[-2:]).unbind()]


def _with_care_(
    c: Orthogonal,
    x: Phase,
    q: list[Tensor],
    v: list[Tensor],
    g: list[Tensor],
    *,
    h: float,
    kick: Kick,
) -> None:
    """Kick and drift as the eager engine does; the matrices may be single ones of a batch."""
    single = c if q[0].dim() > c.batch_dims + 1 else replace(c, batch_dims=0)
    part = Phase(q, v, tally=x.tally)
    _kick_(part, g, kick)
    single.drift_(part, h)
