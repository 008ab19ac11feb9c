"""The letters of a scheme as maps on a phase point: everything a step does to numbers.

A constraint gives each letter its geometry; this file gives it its physics (units of `Phase`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile, zip_longest

import torch
from torch import Tensor

from holonomic import native
from holonomic.constraints import Constraint
from holonomic.constraints.base import Kernel
from holonomic.native.orthogonal import Kick
from holonomic.noise import CounterNoise, Noise
from holonomic.phase import Phase, draw
from holonomic.scheme import OVERDAMPED, Substep
from holonomic.thermostat import Thermostat

Noises = tuple[list[Tensor], list[Tensor]]
Motion = Callable[[Phase, Sequence[Tensor], list[Tensor], list[Tensor]], None]


class Flow:
    """The flows of one group at its present settings, on its manifold."""

    def __init__(
        self,
        constraint: Constraint,
        lr: float,
        momentum: float,
        temperature: float,
        noise: Noise,
        thermostat: Thermostat | None = None,
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        self.constraint = constraint
        self.lr = lr
        self.momentum = momentum
        # With lr = 0 no time passes: nothing moves and nothing is shaken.
        self.temperature = temperature if lr else 0.0
        self.noise = noise
        self.thermostat = thermostat
        self.weight_decay = weight_decay
        self.maximize = maximize

    def step_(
        self,
        x: Phase,
        g: Sequence[Tensor],
        word: Sequence[Substep],
        *,
        foreach: bool = True,
        fused: bool = False,
        lazy: bool = False,
        rescale: float = 1.0,
    ) -> None:
        """Apply the letters of a word, one after the other, to every tensor; before them, ``rescale``
        the momenta, which keeps p = -sqrt(lr) v what it was if lr has changed. ``fused`` takes compiled
        kernels where there are; ``lazy`` may leave a projection to the next step."""
        if rescale != 1:
            for momenta in (x.v, x.eta):
                if momenta:
                    torch._foreach_mul_(momenta, rescale)
        if fused and self._fused(x, g, word):
            _written(x)
            return
        x.lazy = lazy
        x.native = (
            fused
            and self.thermostat is None
            and self.constraint.native_drift
            and native.fits([*x.q, *x.v, *g])
        )
        if self.constraint.separable and self.thermostat is None:
            taken = self._prefix(word) if self.constraint.leaps else 0
            leap = self._kicks(word[:taken]) if taken else (1.0, 0.0, 0.0)
            motions = self._motions(word[taken:])
            for piece, grads, noises in self._pieces(x, g, word, foreach):
                forces = self._forces(piece, grads)
                if taken:
                    self.constraint.leap_(piece, forces, *leap)
                for motion, (R, S) in zip(motions, noises[taken:], strict=True):
                    motion(piece, forces, R, S)
            return
        forces = self._forces(x, g)
        parts = [(x, forces)]
        if not (foreach or self.constraint.batched or self.thermostat):
            parts = [(x.single(i), forces[i : i + 1]) for i in range(len(x.q))]
        taken = self._prefix(word) if x.native else 0
        if taken:
            old, new, h = self._kicks(word[:taken])
            sign = -1.0 if self.maximize else 1.0
            kick = Kick(old, sign * new, self.weight_decay * new, g)
            self.constraint.native_drift_(x, h, kick)
        rest = word[taken:]
        for substep, motion in zip(rest, self._motions(rest), strict=True):
            for part, force in parts:
                motion(part, force, *self._draw(substep, part))
        if len(parts) > 1:
            x.fallbacks += sum(part.fallbacks for part, _ in parts)
        if x.native:
            _written(x)

    def _motions(self, word: Sequence[Substep]) -> list[Motion]:
        """What the letters of a word do, each with the projection that is due after it.

        What changes v is linear in it at one position, so one projection serves a whole run of such
        letters: before v is used, to move (A) or to be measured (E)."""
        motions = []
        for substep, after in zip_longest(word, word[1:]):
            following = after.letter if after else "E"
            in_drift = following == "A" and self.lr and self.constraint.drift_settles
            due = substep.letter in "BODFC" and following in "AE" and not in_drift
            motions.append(self._motion(substep, due))
        return motions

    def _motion(self, substep: Substep, settles: bool) -> Motion:
        flow, fraction = getattr(self, substep.letter), substep.fraction

        def motion(x: Phase, g: Sequence[Tensor], R: list[Tensor], S: list[Tensor]) -> None:
            flow(x, g, fraction, R, S)
            if settles:
                self.constraint.settle_(x)

        return motion

    def _forces(self, x: Phase, g: Sequence[Tensor]) -> list[Tensor]:
        forces = list(g)
        if self.maximize:
            forces = list(torch._foreach_neg(forces))
        if self.weight_decay:
            forces = list(torch._foreach_add(forces, x.q, alpha=self.weight_decay))
        return forces

    def _draw(self, substep: Substep, x: Phase) -> Noises:
        """The noise of weights and slack that a letter takes; tensor by tensor, so that its order
        does not depend on how many are handled together."""
        if not self._noisy(substep):
            return [], []
        if substep.letter in OVERDAMPED:
            return draw(x.q, x.xi, self.noise)
        return draw(x.v, x.eta, self.noise)

    def _noisy(self, substep: Substep) -> bool:
        """Whether a letter takes noise."""
        letter = substep.letter
        if letter == "O":
            return bool(self.temperature) and self.momentum**substep.fraction < 1
        if letter in OVERDAMPED:
            return bool(self.temperature)
        return letter in "DF" and bool(self.lr and self.thermostat and self.thermostat.noise)

    def _pieces(
        self, x: Phase, g: Sequence[Tensor], word: Sequence[Substep], foreach: bool
    ) -> Iterator[tuple[Phase, list[Tensor], list[Noises]]]:
        """The tensors in pieces that take the whole word at once: on a CPU, parts of large ones that
        stay in its cache, and small ones together. Rows of a separable manifold do not know each
        other, so this changes numbers by rounding at most."""
        on_cpu = x.q[0].device.type == "cpu"
        block = self.constraint.block * torch.get_num_threads() if on_cpu else math.inf
        if foreach and sum(t.numel() for t in x.q) <= block and not any(map(self._noisy, word)):
            yield x, list(g), [([], [])] * len(word)
            return
        gathered: list[tuple[Phase, Tensor, list[Noises]]] = []
        size = 0
        for i, t in enumerate(x.q):
            single = x.single(i)
            noises = self._draws(word, single)
            if t.numel() > block:
                rows = max(1, int(block * len(t) // t.numel()))
                cuts = [slice(start, start + rows) for start in range(0, len(t), rows)]
                cut_up = zip(cuts, single.split(rows), g[i].split(rows), strict=True)
                for cut, piece, grad in cut_up:
                    parts = [([r[cut] for r in R], [s[cut] for s in S]) for R, S in noises]
                    yield piece, [grad], parts
                continue
            gathered.append((single, g[i], noises))
            size += t.numel()
            if size >= block or not foreach:
                yield _together(gathered)
                gathered, size = [], 0
        if gathered:
            yield _together(gathered)

    def _fused(self, x: Phase, g: Sequence[Tensor], word: Sequence[Substep]) -> bool:
        """Take the step with the compiled kernels, if they know this manifold and these tensors."""
        kernel = self.constraint.kernel
        known = kernel is not None and all(s.letter in ("A", "B", "O", "EM") for s in word)
        if not (known and self.lr and len(word) <= native.LETTERS) or self.thermostat:
            return False
        if not native.fits([*x.q, *x.v, *x.xi, *x.eta, *g]):
            return False
        assert kernel is not None
        kind = native.Step if kernel.rows is None else native.SphereStep
        letters = tuple(self._numbers(s, kernel) for s in word)
        step = _kernel(
            kind, letters, kernel.radius, -1.0 if self.maximize else 1.0, self.weight_decay
        )
        noisy = any(map(self._noisy, word))
        if not noisy and not isinstance(step, native.SphereStep):
            step.all(x.q, x.v, x.xi, g)
            return True
        # In the order of the ordinary way: a word at a time, or else a letter at a time.
        drawn = [] if self.constraint.separable else self._draws(word, x)
        for i, q in enumerate(x.q):
            v, xi, eta = (ts[i] if ts else None for ts in (x.v, x.xi, x.eta))
            if isinstance(step, native.SphereStep):
                assert kernel.rows is not None
                noises = [(R[i : i + 1], S[i : i + 1]) for R, S in drawn]
                if q.numel():
                    rows = q.view(kernel.rows(q), -1)
                    step.rows(rows, v, xi, eta, g[i], noises or self._draws(word, x.single(i)))
            elif isinstance(self.noise, CounterNoise):
                places = [self._reserve(self.noise, s, q, xi) for s in word]
                step.with_stream(q, v, xi, g[i], self.noise.keys, places)
            else:
                step(q, v, xi, g[i], self._draws(word, x.single(i)))
        return True

    def _prefix(self, word: Sequence[Substep]) -> int:
        """How many letters can be taken in one go: kicks without noise, and the drift after them."""
        kicks = list(takewhile(lambda s: s.letter in ("B", "O") and not self._noisy(s), word))
        drift = len(kicks) < len(word) and word[len(kicks)].letter == "A"
        return len(kicks) + 1 if kicks and drift and self.lr else 0

    def _kicks(self, prefix: Sequence[Substep]) -> tuple[float, float, float]:
        """What they amount to: v <- old v + new force, and a drift of length h."""
        old, new = 1.0, 0.0
        for s in prefix[:-1]:
            if s.letter == "B":
                new += s.fraction
            else:
                mu = self.momentum**s.fraction
                old, new = mu * old, mu * new
        return old, new, prefix[-1].fraction * self.lr

    def _draws(self, word: Sequence[Substep], x: Phase) -> list[Noises]:
        return [self._draw(substep, x) for substep in word]

    def _reserve(
        self, noise: CounterNoise, substep: Substep, q: Tensor, xi: Tensor | None
    ) -> tuple[int, int]:
        """Where the noise of a letter is to be found: the numbers `_draw` would have drawn."""
        if not self._noisy(substep):
            return -1, -1
        place = noise.reserve(q)
        return place, noise.reserve(q) if substep.letter == "EM" and xi is not None else -1

    def _numbers(self, s: Substep, kernel: Kernel) -> native.Letter:
        """The coefficients of a letter as the kernels want them; on a circle v is an angle."""
        r = kernel.radius if kernel.angular else 1.0
        if s.letter == "A":
            return native.Letter("A", s.fraction * self.lr)
        if s.letter == "B":
            return native.Letter("B", s.fraction / r**2)
        if s.letter == "O":
            mu = self.momentum**s.fraction
            return native.Letter("O", mu, self._kick(mu) / r)
        return native.Letter("EM", self.lr, math.sqrt(2 * self.temperature * self.lr))

    def _kick(self, mu: float) -> float:
        return math.sqrt(self.temperature * (1 - mu * mu) / self.lr) if self.temperature else 0.0

    def A(
        self, x: Phase, g: Sequence[Tensor], fraction: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """q <- q - lr v, along the geodesic."""
        if self.lr:
            self.constraint.drift_(x, fraction * self.lr)

    def B(
        self, x: Phase, g: Sequence[Tensor], fraction: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """v <- v + g."""
        self.constraint.kick_(x, g, fraction)

    def O(  # noqa: E743 (the letter)
        self, x: Phase, g: Sequence[Tensor], fraction: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """v <- mu v + sqrt(tau (1 - mu^2) / lr) R: the exact Ornstein-Uhlenbeck flow (2.53c)."""
        mu = self.momentum**fraction
        self.constraint.thermalize_(x, mu, self._kick(mu) if R else 0.0, R, S)

    def C(
        self, x: Phase, g: Sequence[Tensor], fraction: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """v <- exp(-h xi) v."""
        assert self.thermostat is not None
        self._damp(x, self.thermostat.damping(fraction))

    def D(
        self, x: Phase, g: Sequence[Tensor], fraction: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """v <- v + sigma_A sqrt(h) / h R."""
        assert self.thermostat is not None
        if R:
            self.constraint.thermalize_(x, 1.0, self.thermostat.kick(fraction), R, S)

    def E(
        self, x: Phase, g: Sequence[Tensor], fraction: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """xi <- xi + h coupling (lr |v|^2 - N tau)."""
        assert self.thermostat is not None
        batch_dims = self.thermostat.friction.dim() - 1
        self.thermostat.regulate_(self.constraint.energies(x, batch_dims), fraction)

    def F(
        self, x: Phase, g: Sequence[Tensor], fraction: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """C and D in one: v <- exp(-h xi) v + sigma_A sqrt((1 - exp(-2 h xi)) / (2 xi)) / h R."""
        assert self.thermostat is not None
        self._damp(x, self.thermostat.damping(fraction))
        if R:
            strength = self.thermostat.exact_kick(fraction)
            self.thermostat.scale_(R, strength)
            self.thermostat.scale_(S, strength)
            self.constraint.thermalize_(x, 1.0, 1.0, R, S)

    def _damp(self, x: Phase, factors: Tensor) -> None:
        assert self.thermostat is not None
        self.thermostat.scale_(x.v, factors)
        self.thermostat.scale_(x.eta, factors)

    def EM(
        self, x: Phase, g: Sequence[Tensor], fraction: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """q <- q - lr g + sqrt(2 tau lr) R (2.51), then back to the manifold."""
        self._displace(x, g, R, S)

    def LM(
        self, x: Phase, g: Sequence[Tensor], fraction: float, R: list[Tensor], S: list[Tensor]
    ) -> None:
        """As EM, with the noise averaged over this step and the last (2.56)."""
        for last, new in ((x.R, R), (x.S, S)):
            if new:
                mean = torch._foreach_add(last, new)
                torch._foreach_copy_(last, new)
                torch._foreach_copy_(new, torch._foreach_mul(mean, 0.5))
        self._displace(x, g, R, S)

    def _displace(self, x: Phase, g: Sequence[Tensor], R: list[Tensor], S: list[Tensor]) -> None:
        if self.lr:
            sigma = math.sqrt(2 * self.temperature * self.lr)
            self.constraint.displace_(x, g, self.lr, sigma, R, S)


@lru_cache(maxsize=64)  # settings seldom change from one step to the next
def _kernel(
    kind: type[native.Step],
    letters: tuple[native.Letter, ...],
    radius: float,
    sign: float,
    decay: float,
) -> native.Step:
    return kind(letters, radius, sign, decay)


def _written(x: Phase) -> None:
    """Tell autograd, which does not see the kernels, that tensors have changed."""
    torch.autograd.graph.increment_version([*x.q, *x.v, *x.xi, *x.eta])


def _together(
    pieces: list[tuple[Phase, Tensor, list[Noises]]],
) -> tuple[Phase, list[Tensor], list[Noises]]:
    """Several tensors as one piece, the noise letter by letter."""
    phases, grads, noises = zip(*pieces, strict=True)
    joined = [
        ([r for R, _ in letter for r in R], [s for _, S in letter for s in S])
        for letter in zip(*noises, strict=True)
    ]
    return Phase.join(phases), list(grads), joined
