"""A step by torch: the letters of a word, one after the other."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holonomic.noise import Noise, Stream
from holonomic.phase import Phase
from holonomic.physics import Physics
from holonomic.scheme import OVERDAMPED, Substep

if TYPE_CHECKING:
    from holonomic.constraints import Constraint
    from holonomic.plan import Part

#: Weights that a thread takes through a whole word together on a CPU: few enough for its cache, enough to
#: make a call of torch worth its while.
BLOCK = 1 << 17


@dataclass(frozen=True)
class Draws:
    """The noise of some tensors at one step."""

    noise: Noise
    streams: Sequence[Stream]
    step: int

    def take(self, number: int, s: Substep, x: Phase) -> tuple[list[Tensor], list[Tensor]]:
        """The noise of a letter, the number of which is given: for weights and slack."""
        lists = (x.q, x.xi) if s.letter in OVERDAMPED else (x.v, x.eta)
        R, S = (
            [
                self.noise.like(t, stream, self.step, 2 * number + slack)
                for t, stream in zip(ts, self.streams, strict=False)  # one slack may serve a group
            ]
            for slack, ts in enumerate(lists)
        )
        return R, S


def run(part: "Part") -> None:
    """Move a part. Tensors go together, or one by one; where rows do not see each other, in pieces that
    stay in the cache, which changes numbers by rounding at most."""
    c, k, x = part.constraint, part.physics, part.x
    draws = Draws(part.noise, part.streams, part.step)
    linked = c.grain == "group" or k.thermostat is not None
    if not linked and c.grain in ("entry", "row"):
        for piece, grads, its in _pieces(x, part.grads, draws, part.foreach):
            _word(part.word, piece, grads, k, c, its, part.within)
    elif linked or part.foreach:
        _word(part.word, x, part.grads, k, c, draws, part.within)
    else:
        for i in range(len(x.q)):
            one = Draws(draws.noise, draws.streams[i : i + 1], draws.step)
            _word(part.word, x.single(i), part.grads[i : i + 1], k, c, one, part.within)


def _word(
    word: Sequence[Substep],
    x: Phase,
    g: Sequence[Tensor],
    k: Physics,
    c: "Constraint",
    draws: Draws,
    within: float,
) -> None:
    if k.lr:
        c.follow_(x, within)
    f = _forces(x, g, k)
    for number, s in enumerate(word):
        R, S = draws.take(number, s, x) if k.noisy(s) else ([], [])
        match s.letter:
            case "A":
                if k.lr:
                    c.drift_(x, k.h(s))
            case "B":
                c.kick_(x, f, s.fraction)
            case "O":
                c.thermalize_(x, k.mu(s), k.sigma(s), R, S)
            case "EM" | "LM":
                if s.letter == "LM":
                    R, S = _averaged(x.R, R), _averaged(x.S, S)
                if k.lr:
                    c.displace_(x, f, k.h(s), k.sigma(s), R, S)
            case _:
                _adapt(s, x, k, c, R, S)


def _adapt(
    s: Substep, x: Phase, k: Physics, c: "Constraint", R: list[Tensor], S: list[Tensor]
) -> None:
    """C v <- exp(-h xi) v, D v <- v + sigma_A sqrt(h) / h R, F both in one, E the friction xi itself."""
    t = k.thermostat
    assert t is not None
    if s.letter == "E":
        c.project_(x)
        t.regulate_(c.energies(x, t.friction.dim() - 1), s.fraction)
    if s.letter in "CF":
        for momenta in (x.v, x.eta):
            t.scale_(momenta, t.damping(s.fraction))
    if s.letter == "D" and R:
        c.thermalize_(x, 1.0, t.kick(s.fraction), R, S)
    if s.letter == "F" and R:
        for drawn in (R, S):
            t.scale_(drawn, t.exact_kick(s.fraction))
        c.thermalize_(x, 1.0, 1.0, R, S)


def _forces(x: Phase, g: Sequence[Tensor], k: Physics) -> list[Tensor]:
    forces = list(g)
    if k.maximize:
        forces = list(torch._foreach_neg(forces))
    if k.weight_decay:
        forces = list(torch._foreach_add(forces, x.q, alpha=k.weight_decay))
    return forces


def _averaged(last: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """The mean of this step's noise and the last (2.56), which this step's becomes."""
    if not new:
        return []
    mean = torch._foreach_add(last, new)
    torch._foreach_copy_(last, new)
    return list(torch._foreach_mul(mean, 0.5))


def _pieces(
    x: Phase, g: Sequence[Tensor], draws: Draws, foreach: bool
) -> Iterator[tuple[Phase, list[Tensor], Draws]]:
    """Small tensors together, large ones in parts."""
    on_cpu = x.q[0].device.type == "cpu"
    block = BLOCK * torch.get_num_threads() if on_cpu else math.inf
    if foreach and sum(t.numel() for t in x.q) <= block:
        yield x, list(g), draws
        return
    gathered: list[int] = []
    size = 0
    for i, t in enumerate(x.q):
        if t.numel() > block:
            yield from _cut(x.single(i), g[i], draws, draws.streams[i : i + 1], int(block))
            continue
        gathered.append(i)
        size += t.numel()
        if size >= block or not foreach:
            yield _together(x, g, draws, gathered)
            gathered, size = [], 0
    if gathered:
        yield _together(x, g, draws, gathered)


def _cut(
    x: Phase, g: Tensor, draws: Draws, streams: Sequence[Stream], block: int
) -> Iterator[tuple[Phase, list[Tensor], Draws]]:
    """A large tensor in parts of whole rows."""
    t = x.q[0]
    rows = max(1, block * len(t) // t.numel())
    starts = range(0, len(t), rows)
    for start, piece, grad in zip(starts, x.split(rows), g.split(rows), strict=True):
        its = [stream.cut(start, start + len(grad)) for stream in streams]  # none without noise
        yield piece, [grad], Draws(draws.noise, its, draws.step)


def _together(
    x: Phase, g: Sequence[Tensor], draws: Draws, chosen: list[int]
) -> tuple[Phase, list[Tensor], Draws]:
    """Some tensors as one piece."""
    streams = [draws.streams[i] for i in chosen] if draws.streams else []
    return x.select(chosen), [g[i] for i in chosen], Draws(draws.noise, streams, draws.step)
