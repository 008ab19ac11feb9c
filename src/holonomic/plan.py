"""Which tensors take which letters now: a step as data, before anything moves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from holonomic import engine, settings
from holonomic.constraints import Constraint, Free
from holonomic.constraints.checks import follow_tolerance
from holonomic.distributed import local, placed, together
from holonomic.engine.eager import Draws
from holonomic.noise import Noise, Stream
from holonomic.phase import Phase, wide
from holonomic.physics import Physics, rescaling
from holonomic.scheme import Scheme, Substep, parse
from holonomic.state import State, create, entries, gather, missing
from holonomic.thermostat import Thermostat, thermostat_for

Group = dict[str, Any]
FREE = Free()


@dataclass(eq=False)
class Part:
    """Tensors of one group that take the same word of letters this step.

    What is known at once is given; `load` adds the phase point they work on, and the numbers."""

    index: int
    group: Group
    constraint: Constraint
    scheme: Scheme
    word: tuple[Substep, ...]
    members: list[int]
    new: list[int]
    held: list[dict[str, Tensor] | None]
    names: list[str]
    noise: Noise

    x: Phase = field(init=False)
    grads: list[Tensor] = field(init=False)
    physics: Physics = field(init=False)
    streams: list[Stream] = field(init=False)
    move: engine.Engine = field(init=False)

    @property
    def where(self) -> str:
        return f"group {self.index}"

    @property
    def params(self) -> list[Tensor]:
        params = self.group["params"]
        return params if len(self.members) == len(params) else [params[k] for k in self.members]

    @property
    def constrained(self) -> bool:
        return self.constraint is not FREE

    @property
    def foreach(self) -> bool:
        """Whether torch is to handle the tensors in one call."""
        return self.group["foreach"] is not False

    @property
    def step(self) -> int:
        """How many steps of the group have moved."""
        return int(self.group["steps_taken"])

    @property
    def noisy(self) -> bool:
        """Whether this step takes noise, before there is a thermostat to ask."""
        k = Physics.of(self.group)
        stirred = k.lr and self.group["noise"] and any(s.letter in ("D", "F") for s in self.word)
        return bool(stirred) or any(map(k.noisy, self.word))

    @property
    def draws(self) -> Draws:
        return Draws(self.noise, self.streams, self.step)

    @property
    def within(self) -> float:
        """How well weights fit that no one has changed."""
        return max(follow_tolerance(dtype) for dtype in {p.dtype for p in self.params})

    def gradients(self) -> list[Tensor]:
        """What is in ``.grad``; zero for the tensors that a constraint moves along with others."""
        return [torch.zeros_like(p) if p.grad is None else placed(p.grad, p) for p in self.params]

    # ------------------------------------------------------------------ before anything moves
    def check_new(self) -> None:
        """Weights may have changed since the optimizer was built: can they still be placed?"""
        if self.new:
            q = [self.group["params"][k].detach() for k in self.new]
            with together(q):
                self.constraint.check([local(t) for t in q], [self.names[k] for k in self.new])

    def create(self, state: State) -> None:
        """State that is missing."""
        if self.new:
            params = [self.group["params"][k] for k in self.new]
            names = [self.names[k] for k in self.new]
            streams = self._streams(self.new) if self.scheme.letters == "LM" else ()
            create(
                params, names, self.constraint, self.scheme, state, self.noise, streams, self.step
            )

    def load(self, state: State) -> None:
        """The tensors to work on: those of the optimizer, or float32 copies of 16 bits; copies too for a
        user's own constraint, which may fail half-way."""
        held = entries(self.params, state) if self.new else self.held
        whole = len(self.members) == len(self.names)
        names = self.names if whole else [self.names[k] for k in self.members]
        self._home = gather(self.params, held, names, self.constraint, self.scheme)
        self.x, self.grads = self._home, [local(g) for g in self.gradients()]
        if self.constrained:
            if self.constraint.grain == "group":
                self.x = self._home.map(lambda t: wide(t).clone())
            elif any(q.dtype.itemsize < 4 for q in self._home.q):
                self.x = self._home.map(wide)
            self.grads = [wide(g) for g in self.grads]
        self.physics = Physics.of(self.group, self._thermostat())
        noisy = any(map(self.physics.noisy, self.word))
        self.streams = self._streams(self.members) if noisy else []
        self.move = engine.choose(self)

    def _thermostat(self) -> Thermostat | None:
        if not self.scheme.adaptive:
            return None
        return thermostat_for(self.group, self.constraint, self.x, self.members)

    def _streams(self, members: list[int]) -> list[Stream]:
        keys = self.group["noise_keys"]
        return [self.noise.stream(keys[k]) for k in members]

    # ------------------------------------------------------------------ moving, and after
    def run(self) -> None:
        """Take the word."""
        factor = rescaling(self.group, self.scheme.adaptive)
        if factor != 1:
            for momenta in (self.x.v, self.x.eta):
                if momenta:
                    torch._foreach_mul_(momenta, factor)
        self.move(self)

    def commit(self) -> None:
        """Round the working copy (if there is one) back into weights and state, and count."""
        group, tally = self.group, self.x.tally
        if self.x is not self._home:
            if self.x.v and self._home.v[0].dtype.itemsize < 4:
                self.constraint.project_(self.x)  # a normal part would take digits from the rest
            self._home.copy_(self.x)
        group["fallbacks"] += tally.fallbacks
        group["changed"] += bool(tally.changed)
        group["limited"] += bool(tally.limited)
        if self.physics.lr:
            group["started"] = True
            group["last_lr"] = self.physics.lr


def plan(
    groups: list[Group], names: list[list[str]], state: Mapping[Tensor, Any], noise: Noise
) -> list[Part]:
    """The parts of a step; settings have been checked."""
    return [
        part for i, group in enumerate(groups) for part in _parts(i, group, names[i], state, noise)
    ]


def _parts(i: int, group: Group, names: list[str], state: Any, noise: Noise) -> list[Part]:
    """The tensors of a group that take this step, those on their first step apart."""
    moving = settings.moving(group, names)
    if not moving:
        return []
    constraint = group["constraint"] or FREE
    scheme = parse(group["scheme"])
    params = group["params"]
    held = entries([params[k] for k in moving], state)
    lacking = missing(held, constraint, scheme)
    if group["started"] and not lacking:
        return [Part(i, group, constraint, scheme, scheme.steady, moving, [], held, names, noise)]
    new = {moving[k] for k in lacking}
    first = new if group["started"] else set(moving)
    if scheme.adaptive:  # one thermostat moves all tensors alike
        first = set() if group["started"] else set(moving)
    elif scheme.first == scheme.steady or group["momentum"] == 0:
        first = set()
    parts = []
    for word, chosen in ((scheme.first, first), (scheme.steady, set(moving) - first)):
        members = [k for k in moving if k in chosen]
        if members:
            fresh = [k for k in members if k in new]
            its = [entry for k, entry in zip(moving, held, strict=True) if k in chosen]
            parts.append(
                Part(i, group, constraint, scheme, word, members, fresh, its, names, noise)
            )
    return parts
