"""The optimizer: parameter groups -> flows -> state."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from holonomic import checkpoint, native, settings
from holonomic.constraints import Constraint, Free
from holonomic.errors import NonFiniteError, SettingError
from holonomic.flows import Flow
from holonomic.marks import Mark, renews
from holonomic.noise import Noise
from holonomic.phase import Phase, wide
from holonomic.report import GroupReport, Report
from holonomic.scheme import Scheme, Substep, parse
from holonomic.state import State, create, gather, missing
from holonomic.thermostat import Thermostat, thermostat_for

Group = dict[str, Any]
_FREE = Free()


class Langevin(Optimizer):
    """Constrained Langevin dynamics, in the manner of `torch.optim`.

    A step applies the letters of ``scheme`` to every group (see `holonomic.scheme`)::

        A  q <- q - lr v        B  v <- v + g        O  v <- mu v + sqrt(tau (1 - mu^2) / lr) R
        EM q <- q - lr g + sqrt(2 tau lr) R          LM the same, R averaged over two steps (2.56)

    with q on the group's manifold and v in its tangent space. The defaults are SGD with momentum
    0.9, equal to `torch.optim.SGD` to the last bit.

    Args:
        params: parameters, named parameters, or groups (see `holonomic.groups`). Every setting
            below up to ``maximize`` can differ from group to group.
        lr: step size; h**2 of the papers (`holonomic.from_paper`), or h itself for EM and LM.
            With 0 nothing moves, noise included.
        momentum: mu = exp(-gamma h) in [0, 1]; 1 is motion without friction. EM and LM have none.
        temperature: tau >= 0, the strength of the noise; 0 is optimization, and with the loss
            summed over the data 1 samples the posterior.
        weight_decay: adds ``weight_decay * q`` to the gradient, as in `torch.optim.SGD`.
        constraint: the manifold of the group's weights, or None. Weights are placed on it now.
        scheme: the splitting in letters, or "EM" or "LM".
        coupling, noise: epsilon and sigma_A of adaptive friction, for schemes with the letters C to F
            (see `holonomic.thermostat`); temperature is then the one its thermostat holds.
        thermostat: one adaptive friction a "group" or a "tensor".
        friction: its initial value; afterwards, in the group, the variable itself.
        batch_dims: leading dimensions of unconstrained tensors that are independent systems (set by
            `Replicas.groups`); constraints have a setting of their own.
        maximize: climb instead of descend.
        seed: seed of the optimizer's own generator. Without one, it is drawn from torch's global
            generator when noise is first needed.
        generator: a generator to use instead of a seeded one, or `Replicas.noise()`.
        foreach: True handles all tensors of a group in one call of torch's, False goes tensor by tensor:
            the same numbers, less memory. Neither (the default) is the first, but see ``fused``.
        fused: take steps by kernels that are compiled on first use, in one pass over memory: the same
            numbers to rounding. By default constrained groups do, where there is a C++ compiler, unless
            ``foreach`` is given; unconstrained ones are SGD to the last bit. True is for all groups.
            Tensors that are not contiguous float32 on a CPU (16 bits are computed so), and schemes with a
            thermostat, go the ordinary way. False also leaves nothing to the next step: otherwise, with
            kernels or without, momenta of orthogonal weights keep a normal part in ``state``, which the
            next step takes off, and save two matrix products.
        nonfinite: what to do when a gradient holds NaN or Inf: "raise", "skip" the step (counted in
            `report()`), or "allow" it without looking (if something else has looked already).
        capturable, differentiable: not supported; anything but the default raises.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.9,
        *,
        temperature: float = 0.0,
        weight_decay: float = 0.0,
        constraint: Constraint | None = None,
        scheme: str = "OBA",
        coupling: float | None = None,
        noise: float = 0.0,
        thermostat: str = "group",
        friction: float = 0.0,
        batch_dims: int = 0,
        maximize: bool = False,
        seed: int | None = None,
        generator: torch.Generator | Noise | None = None,
        foreach: bool | None = None,
        nonfinite: str = "raise",
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        settings.reject(capturable=capturable, differentiable=differentiable)
        if fused and foreach:
            raise SettingError("foreach=True and fused=True were both given; give one of them.")
        if not isinstance(generator, torch.Generator | Noise | None):
            raise SettingError(f"generator is {generator!r}; give a torch.Generator, or a seed.")
        if seed is not None and generator is not None:
            raise SettingError(f"seed={seed} and a generator were both given; give one of them.")
        self._noise = generator if isinstance(generator, Noise) else Noise(seed, generator)
        self._left: dict[int, Mark] = {}  # how the last step left weights that it only writes
        self._built = False
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "temperature": temperature,
            "weight_decay": weight_decay,
            "constraint": constraint,
            "scheme": scheme,
            "coupling": coupling,
            "noise": noise,
            "thermostat": thermostat,
            "friction": friction,
            "steps_taken": 0,
            "last_lr": None,  # of the last step that moved: see _Part.rescale
            "batch_dims": batch_dims,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "nonfinite": nonfinite,
            "started": False,
            "fallbacks": 0,
            "skipped": 0,
            "rng_state": None,  # its place in checkpoints, filled by state_dict()
        }
        super().__init__(params, defaults)
        for i, group in enumerate(self.param_groups):
            self._place(i, group)  # every group has been checked: now weights may move
        self._built = True

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it is checked whole before any weight is placed on its manifold."""
        before = len(self.param_groups)
        settings.check_keys(param_group, before, self.defaults)
        param_group = settings.listed(param_group, self.param_groups)
        if param_group.get("foreach") is not None and self.defaults["fused"]:
            param_group.setdefault("fused", None)
        super().add_param_group(param_group)
        try:
            settings.check_group(self.param_groups[before], before)
            self._noise.check(self.param_groups[before]["params"])
        except Exception:
            del self.param_groups[before]
            raise
        if self._built:
            self._place(before, self.param_groups[before])

    def _place(self, i: int, group: Group) -> None:
        constraint: Constraint | None = group["constraint"]
        if constraint is not None:
            q = [p.detach() for p in group["params"]]
            draws = constraint.init == "orthogonal"
            generator = self._noise.on(q[0].device) if draws else None
            constraint.place_(q, settings.names(group, i), generator)

    # ------------------------------------------------------------------ the step
    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every group. A closure is called once, first, with gradients enabled."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parts = [part for i, g in enumerate(self.param_groups) for part in self._parts(i, g)]
        if self._refused(parts):
            return loss
        for part in parts:
            part.find_changed(self._left, self.state)
            part.check_new()
        for part in parts:
            if part.fresh:
                names = part.names(part.fresh)
                create(part.fresh, names, part.constraint, part.scheme, self.state, self._noise)
        # A user's own constraint may fail: such groups go first, on copies, before others move.
        for joint in (True, False):
            members = [part for part in parts if part.constraint.joint == joint]
            for part in members:
                self._prepare(part)
            for part in members:
                self._move(part)
        for part in parts:
            part.finish()
            if part.constraint.writes:
                self._left.update((id(p), Mark.of(p)) for p in part.params)
        for group in {part.i: part.group for part in parts}.values():
            group["steps_taken"] += 1
        return loss

    def _parts(self, i: int, group: Group) -> list["_Part"]:
        """The tensors of a group that take this step, those on their first step apart."""
        settings.check_values(group, i)
        params = settings.moving(group, i)
        if not params:
            return []
        constraint = group["constraint"] or _FREE
        scheme = parse(group["scheme"])
        fresh = missing(params, constraint, scheme, self.state)
        if group["started"] and not fresh:
            return [_Part(i, group, constraint, scheme, scheme.steady, params, [])]
        new = {id(p) for p in fresh}
        if constraint.joint and new:
            new = {id(p) for p in params}
        first = new if group["started"] else {id(p) for p in params}
        if scheme.adaptive:  # one thermostat moves all tensors alike
            first = set() if group["started"] else {id(p) for p in params}
        elif scheme.first == scheme.steady or group["momentum"] == 0:
            first = set()
        parts = []
        for word, members in (
            (scheme.first, [p for p in params if id(p) in first]),
            (scheme.steady, [p for p in params if id(p) not in first]),
        ):
            if members:
                fresh = [p for p in members if id(p) in new]
                parts.append(_Part(i, group, constraint, scheme, word, members, fresh))
        return parts

    def _prepare(self, part: "_Part") -> None:
        """Make the lists the flows work on, after state that must follow the weights has."""
        group, constraint = part.group, part.constraint
        if part.changed:
            names = part.names(part.changed)
            constraint.place_([p.detach() for p in part.changed], names)
            constraint.follow_(gather(part.changed, names, constraint, part.scheme, self.state))
        names = part.names(part.params) if constraint.joint else []
        part.home = gather(part.params, names, constraint, part.scheme, self.state)
        if constraint.writes and float(group["lr"]) and renews(group["steps_taken"]):
            constraint.renew_(part.home)
        part.forces = part.grads
        part.work = part.home
        if group["constraint"] is not None:
            if constraint.joint:
                part.work = part.home.map(lambda t: wide(t).clone())
            elif any(p.dtype.itemsize < 4 for p in part.params):
                part.work = part.home.map(wide)
            part.forces = [wide(g) for g in part.grads]
        part.thermostat = part.make_thermostat()

    def _move(self, part: "_Part") -> None:
        physics = settings.physics(part.group)
        flow = Flow(part.constraint, **physics, noise=self._noise, thermostat=part.thermostat)
        flow.step_(
            part.work,
            part.forces,
            part.word,
            foreach=part.group["foreach"] is not False,
            fused=part.fused,
            lazy=_lazy(part.group, part.constraint, part.scheme, part.params),
            rescale=part.rescale(),
        )

    def _refused(self, parts: list["_Part"]) -> bool:
        """Whether the step must be skipped for NaN or Inf in a gradient; raises if asked to."""
        guarded = [part for part in parts if part.group["nonfinite"] != "allow"]
        if _finite([g for part in guarded for g in part.grads], any(p.fused for p in guarded)):
            return False
        for part in guarded:
            for name, g in zip(part.names(part.params), part.grads, strict=True):
                bad = int((~torch.isfinite(g)).sum())
                if not bad:
                    continue
                if part.group["nonfinite"] == "skip":
                    for group in self.param_groups:
                        group["skipped"] += 1
                    return True
                raise NonFiniteError(
                    f"the gradient of {name!r} has {bad} of {g.numel()} entries NaN or Inf; no "
                    f"weight was changed. Lower lr={float(part.group['lr']):g} or clip the "
                    f"gradients, or pass nonfinite='skip' to leave such steps out."
                )
        return False

    # ------------------------------------------------------------------ reading
    @torch.no_grad()
    def report(self) -> Report:
        """Per group: largest residual, largest cotangency error, kinetic temperature, counts."""
        return Report([self._group_report(i, g) for i, g in enumerate(self.param_groups)])

    def _group_report(self, i: int, group: Group) -> GroupReport:
        constraint: Constraint = group["constraint"] or _FREE
        scheme = parse(group["scheme"])
        params = group["params"]
        new = set(missing(params, constraint, scheme, self.state))
        if constraint.joint and new:
            new = set(params)
        residual = cotangency = 0.0
        kinetic = math.nan
        if new:
            q = [wide(p.detach()) for p in params if p in new]
            residual = constraint.residual(Phase(q, xi=constraint.slacks(q)))
        held = [p for p in params if p not in new]
        if held:
            x = gather(held, settings.names_of(group, i, held), constraint, scheme, self.state)
            x = x.map(wide)
            if _lazy(group, constraint, scheme, held):
                x = x.map(torch.clone)
                constraint.settle_(x)  # what the next step would do first
            residual = _worse(residual, constraint.residual(x))
            if not scheme.overdamped:
                cotangency = constraint.cotangency(x)
                energy = float(group["lr"]) * constraint.kinetic(x)
                kinetic = energy / max(_dof(held, constraint), 1)
        return GroupReport(
            name=str(group.get("name", i)),
            constraint="-" if constraint is _FREE else type(constraint).__name__,
            scheme=scheme.letters,
            parameters=sum(p.numel() for p in params),
            dof=_dof(params, constraint),
            residual=residual,
            cotangency=cotangency,
            temperature=float(group["temperature"]),
            kinetic_temperature=kinetic,
            friction=_friction(group) if scheme.adaptive else math.nan,
            fallbacks=group["fallbacks"],
            skipped=group["skipped"],
        )

    # ------------------------------------------------------------------ saving
    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors only: loads with ``torch.load(..., weights_only=True)``."""
        return checkpoint.plain(super().state_dict(), self.param_groups, self._noise)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, bit for bit, or take over from `torch.optim.SGD`."""
        saved, rng, foreign = checkpoint.fitted(state_dict, self.param_groups)
        for i in foreign:
            settings.check_group(self.param_groups[i], i)
        if rng is not None:
            self._noise.restore(rng)
        constraints = [group["constraint"] for group in self.param_groups]
        super().load_state_dict(saved)
        self._left.clear()
        for group, constraint in zip(self.param_groups, constraints, strict=True):
            group["constraint"] = constraint  # the very same: torch makes deep copies
        for i in foreign:
            group = self.param_groups[i]
            checkpoint.adopt_momenta(group, settings.names(group, i), self.state, self._noise)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return {**state, "_noise": self._noise, "_built": self._built, "_left": {}}


@dataclass
class _Part:
    """Tensors of one group that take the same word of letters this step."""

    i: int
    group: Group
    constraint: Constraint
    scheme: Scheme
    word: tuple[Substep, ...]
    params: list[Tensor]
    fresh: list[Tensor]

    def __post_init__(self) -> None:
        self.grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        self.forces: list[Tensor] = []
        self.changed: list[Tensor] = []
        self.home = self.work = Phase([])
        self.thermostat: Thermostat | None = None

    def names(self, members: list[Tensor]) -> list[str]:
        """What to call some of the parameters: looked up only where it may be needed."""
        return settings.names_of(self.group, self.i, members)

    def rescale(self) -> float:
        """With noise, momenta are in equilibrium as p = -sqrt(lr) v, so p is kept when lr changes (v
        alone would be too hot by the ratio of the steps). Without noise v is kept, as in SGD."""
        group, last = self.group, self.group["last_lr"]
        lr = float(group["lr"])
        if not lr or not last or not (group["temperature"] or self.scheme.adaptive):
            return 1.0
        return math.sqrt(last / lr)

    def make_thermostat(self) -> Thermostat | None:
        """The group's thermostat for these tensors, if its scheme has one."""
        if not self.scheme.adaptive:
            return None
        number = {id(p): k for k, p in enumerate(self.group["params"])}
        indices = [number[id(p)] for p in self.params]
        return thermostat_for(self.group, self.constraint, self.work, indices)

    @property
    def fused(self) -> bool:
        """Whether to take the compiled kernels."""
        asked, foreach = self.group["fused"], self.group["foreach"]
        return self.constraint is not _FREE and foreach is None if asked is None else bool(asked)

    def find_changed(self, left: Mapping[int, Mark], state: State) -> None:
        """Which weights are not as the last step left them, if this one will not read them."""
        if not self.constraint.writes:
            return
        key, joint = self.constraint.slack_name, self.constraint.joint
        for p in self.params:
            mark = left.get(id(p))
            holder = self.params[0] if joint else p
            if key in state.get(holder, {}) and not (mark and mark.fits(p)):
                self.changed.append(p)
        if self.changed and joint:
            self.changed = self.params

    def check_new(self) -> None:
        """Weights may have changed since the optimizer was built: can they still be placed?"""
        chosen = {id(p) for p in (*self.fresh, *self.changed)}
        new = [p for p in self.params if id(p) in chosen]
        if new:
            self.constraint.check([p.detach() for p in new], self.names(new))

    def finish(self) -> None:
        """Round the working copy (if there is one) back into the weights and state."""
        if self.work is not self.home:
            self.home.copy_(self.work)
        self.group["fallbacks"] += self.work.fallbacks
        if float(self.group["lr"]):
            self.group["started"] = True
            self.group["last_lr"] = float(self.group["lr"])


def _lazy(group: Group, constraint: Constraint, scheme: Scheme, params: list[Tensor]) -> bool:
    """Whether a projection of the momenta is left to the next step. Momenta of 16 bits are not: they would
    be rounded together with a normal part that may be larger."""
    possible = constraint.lazy and not (scheme.adaptive or scheme.overdamped)
    wide_enough = possible and all(p.dtype.itemsize >= 4 for p in params)
    return wide_enough and group["fused"] is not False


def _worse(a: float, b: float) -> float:
    """The larger of two errors; NaN is the largest."""
    return a if math.isnan(a) or a > b else b


def _friction(group: Group) -> float:
    """The mean adaptive friction of a group."""
    friction = group["friction"]
    return float(friction.mean() if isinstance(friction, Tensor) else friction)


def _dof(params: list[Tensor], constraint: Constraint) -> int:
    """Degrees of freedom: parameters less constraints."""
    q = [p.detach() for p in params]
    return sum(t.numel() for t in q) - constraint.constraints(q)


def _finite(grads: list[Tensor], fused: bool) -> bool:
    """Whether the sum of all sums or norms is finite: one number to wait for a device. Overflow says no."""
    if not grads:
        return True
    if fused and native.fits(grads):
        return native.finite(grads)
    if all(g.device.type == "cpu" for g in grads):
        # In half the time of a norm. 16 bits would overflow.
        totals = [g.sum(dtype=torch.promote_types(g.dtype, torch.float32)) for g in grads]
    else:
        totals = list(torch._foreach_norm(grads))
    devices: dict[torch.device, list[Tensor]] = {}
    for total in totals:
        devices.setdefault(total.device, []).append(total)
    return all(math.isfinite(torch.stack(each).sum().item()) for each in devices.values())
