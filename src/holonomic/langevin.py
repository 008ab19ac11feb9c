"""The optimizer: its groups, its step, its checkpoints. No formula."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from holonomic import checkpoint, distributed, native, settings
from holonomic.constraints import Constraint
from holonomic.errors import NonFiniteError, SettingError
from holonomic.noise import Noise
from holonomic.plan import Part, plan
from holonomic.report import Report, report_group

Group = dict[str, Any]


class Langevin(Optimizer):
    """Constrained Langevin dynamics, in the manner of `torch.optim`.

    A step applies the letters of ``scheme`` to every group (see `holonomic.scheme`)::

        A  q <- q - lr v        B  v <- v + g        O  v <- mu v + sqrt(tau (1 - mu^2) / lr) R
        EM q <- q - lr g + sqrt(2 tau lr) R          LM the same, R averaged over two steps (2.56)

    with q on the group's manifold and v in its tangent space. The defaults are SGD with momentum
    0.9, equal to `torch.optim.SGD` to the last bit (to its fused step, which rounds otherwise at the
    ends of tensors; with ``foreach`` given, to its other ones).

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
            Whoever changes weights later may do so: the next step starts from what it finds.
        scheme: the splitting in letters, or "EM" or "LM".
        coupling, noise: epsilon and sigma_A of adaptive friction, for schemes with the letters C to F
            (see `holonomic.thermostat`); temperature is then the one its thermostat holds.
        thermostat: one adaptive friction per "group" or per "tensor".
        friction: its initial value; afterwards, in the group, the variable itself.
        batch_dims: leading dimensions of unconstrained tensors that are independent systems (set by
            `Replicas.groups`); constraints have a setting of their own.
        maximize: climb instead of descend.
        seed: seed of the optimizer's own noise. Without one, it is drawn from torch's global
            generator when noise is first needed.
        generator: a generator to draw the seed from instead, or `Replicas.noise()`.
        foreach: True handles all tensors of a group in one call of torch's, False goes tensor by tensor:
            the same numbers, less memory. Either means torch alone; for None see ``fused``.
        fused: take steps by compiled kernels, in one pass over memory: the same numbers to rounding.
            None (the default) uses them for groups with a constraint or noise where they can be, and torch
            otherwise; other groups are ``SGD(fused=True)`` to the last bit. True asks for them, and raises
            if they cannot be had (for other than contiguous float32 on a CPU, or schemes with a thermostat;
            16 bits are computed in float32). False is torch alone (noise
            is the same, whoever makes it).
        nonfinite: what to do when a gradient holds NaN or Inf: "raise", "skip" the step (counted in
            `report()`), or "allow" it without looking (if something else has looked already).
        process_group: the ranks that train this model together, for `torch.distributed`: they compare
            their seeds at the first noisy step. None means all; False if every rank trains a model of
            its own.
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
        process_group: Any = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        **unknown: Any,
    ) -> None:
        settings.reject(capturable=capturable, differentiable=differentiable)
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
            "batch_dims": batch_dims,
            "maximize": maximize,
            "foreach": foreach,
            "fused": fused,
            "nonfinite": nonfinite,
        }
        settings.reject(**{key: unknown.pop(key, None) for key in settings.UNSUPPORTED})
        settings.reject_unknown(unknown, defaults)
        settings.require_parameters(params)
        distributed.refuse_zero_redundancy()
        distributed.check_ranks(process_group)
        if not isinstance(generator, torch.Generator | Noise | None):
            raise SettingError(f"generator is {generator!r}; give a torch.Generator, or a seed.")
        if seed is not None and generator is not None:
            raise SettingError(f"seed={seed} and a generator were both given; give one of them.")
        self._noise = generator if isinstance(generator, Noise) else Noise(seed, generator)
        self._ranks: Any = process_group
        self._one_seed = False  # whether the ranks have compared theirs
        self._names: list[list[str]] = []
        self._checked: list[tuple[Any, ...]] = []
        self._built = False
        kept = {  # variables of a run, which are saved with the settings
            "steps_taken": 0,  # steps that moved
            "last_lr": None,  # of the last step that moved: see physics.rescaling
            "started": False,
            "fallbacks": 0,
            "skipped": 0,
            "changed": 0,
            "limited": 0,
            "noise_keys": None,  # what the noise of each parameter is called
            "rng_state": None,  # its place in checkpoints, filled by state_dict()
        }
        super().__init__(params, {**defaults, **kept})
        for i, group in enumerate(self.param_groups):
            self._place(i, group)  # every group has been checked: now weights may move
        self._built = True

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it is checked whole before any weight is placed on its manifold."""
        i = len(self.param_groups)
        settings.check_keys(param_group, i, self.defaults)
        param_group = settings.listed(param_group, self.param_groups)
        if param_group.get("foreach") is not None and self.defaults["fused"]:
            param_group.setdefault("fused", None)
        super().add_param_group(param_group)
        group = self.param_groups[i]
        try:
            settings.check_group(group, i)
            settings.check_weights(group, i)
            self._noise.check(group["params"])
            if group["constraint"] is not None and group["constraint"].init == "orthogonal":
                self._compare_seeds([group["params"][0].device])  # new weights are drawn
        except Exception:
            del self.param_groups[i]
            raise
        before = sum(len(g["params"]) for g in self.param_groups[:i])
        indices = [str(before + k) for k in range(len(group["params"]))]
        group["noise_keys"] = list(group.get("param_names") or indices)
        self._names.append(settings.names(group, i))
        self._checked.append(settings.signature(group))
        if self._built:
            self._place(i, group)

    def _place(self, i: int, group: Group) -> None:
        constraint: Constraint | None = group["constraint"]
        q, names = settings.trainable(group, i)
        if constraint is not None and q:
            draws = constraint.init == "orthogonal"
            generator = self._noise.generator(q[0].device) if draws else None
            with torch.no_grad():
                constraint.place_(q, names, generator)

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
        for i, group in enumerate(self.param_groups):
            self._check(i, group)
        parts = plan(self.param_groups, self._names, self.state, self._noise)
        if self._skips(parts):
            return loss
        for part in parts:
            part.check_new()  # may fail: nothing has moved
        self._compare_seeds(part.params[0].device for part in parts if part.noisy)
        for part in parts:
            part.create(self.state)
        for part in parts:
            part.load(self.state)
        # A user's own constraint may fail: such groups go first, on copies, before others move.
        for part in sorted(parts, key=lambda part: part.constraint.grain != "group"):
            part.run()
        for part in parts:
            part.commit()
        for i in {part.index for part in parts if part.physics.lr}:
            self.param_groups[i]["steps_taken"] += 1
        return loss

    def _check(self, i: int, group: Group) -> None:
        """Settings may have changed since the last step: the numbers, or anything else."""
        settings.check_values(group, i)
        signature = settings.signature(group)
        if signature == self._checked[i]:
            return
        settings.check_group(group, i)
        old, new = self._checked[i][0], group["constraint"]
        begun = any(self.state.get(p) for p in group["params"])
        if begun and not checkpoint.same_constraint(old, new):
            raise SettingError(
                f"group {i}: the constraint was {checkpoint.described(old)} when the optimizer made its "
                f"state and is now {checkpoint.described(new)}; momenta of one mean nothing to the "
                f"other: build a new optimizer."
            )
        self._checked[i] = signature

    def _skips(self, parts: list[Part]) -> bool:
        """Whether the step is left out for NaN or Inf in a gradient; raises if asked to."""
        guarded = [part for part in parts if part.group["nonfinite"] != "allow"]
        grads = [g for part in guarded for g in part.gradients()]
        kernels = any(part.constrained and part.group["fused"] is not False for part in guarded)
        if not grads or not distributed.anywhere(not _finite(grads, kernels), grads):
            return False
        for part in guarded:
            for k, g in zip(part.members, part.gradients(), strict=True):
                bad = int(distributed.summed([(~torch.isfinite(distributed.local(g))).sum()], [g]))
                if not bad:
                    continue
                if part.group["nonfinite"] == "skip":
                    for group in self.param_groups:
                        group["skipped"] += 1
                    return True
                raise NonFiniteError(
                    f"the gradient of {part.names[k]!r} has {bad} of {g.numel()} entries NaN or Inf; no "
                    f"weight was changed. Lower lr={float(part.group['lr']):g} or clip the "
                    f"gradients, or pass nonfinite='skip' to leave such steps out."
                )
        return False

    def _compare_seeds(self, devices: Iterable[torch.device]) -> None:
        """Before several processes draw their first numbers, on these devices (or none)."""
        if self._one_seed or distributed.processes() == 1 or type(self._noise) is not Noise:
            return
        for device in devices:
            seed = self._noise.seed if self._noise.seeded else None
            distributed.require_one_seed(seed, self._ranks, device)
            self._one_seed = True
            return

    # ------------------------------------------------------------------ reading
    @torch.no_grad()
    def report(self) -> Report:
        """Per group: largest residual, largest cotangency error, kinetic temperature, counts.

        Distributed tensors are measured whole, so that all their processes must ask."""
        params = [p for group in self.param_groups for p in group["params"]]
        distributed.meet(params, "report()")
        groups = enumerate(zip(self.param_groups, self._names, strict=True))
        return Report([report_group(i, group, names, self.state) for i, (group, names) in groups])

    # ------------------------------------------------------------------ saving
    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors only: loads with ``torch.load(..., weights_only=True)``."""
        return checkpoint.plain(super().state_dict(), self._noise)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, bit for bit, or take over from `torch.optim.SGD`."""
        saved, rng, foreign = checkpoint.fitted(state_dict, self.param_groups)
        for i in foreign:
            settings.check_weights(self.param_groups[i], i)
        if rng is not None:
            self._noise.restore(rng)
        constraints = [group["constraint"] for group in self.param_groups]
        super().load_state_dict(saved)
        for group, constraint in zip(self.param_groups, constraints, strict=True):
            group["constraint"] = constraint  # the very same: torch makes deep copies
        self._names = [settings.names(g, i) for i, g in enumerate(self.param_groups)]
        for i in foreign:
            group = self.param_groups[i]
            checkpoint.adopt_momenta(group, self._names[i], self.state, self._noise)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        own = ("_noise", "_ranks", "_one_seed", "_names", "_checked", "_built")
        return {**state, **{key: getattr(self, key) for key in own}}


def _finite(grads: list[Tensor], kernels: bool) -> bool:
    """Whether the sum of all sums or norms is finite: one number to wait for a device. Overflow says no."""
    grads = [distributed.local(g) for g in grads]
    if kernels and native.reason() is None and native.fits(grads):
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
