"""Saving and loading: plain values out, checked values in."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from holonomic.constraints import Constraint
from holonomic.distributed import joined, local, together
from holonomic.errors import CheckpointError
from holonomic.noise import Noise
from holonomic.phase import wide
from holonomic.plan import FREE
from holonomic.scheme import parse
from holonomic.settings import linked
from holonomic.settings import names as names_in
from holonomic.state import KEYS, State, create, entries, gather, needed
from holonomic.thermostat import friction_shape

Group = dict[str, Any]


def plain(saved: dict[str, Any], noise: Noise) -> dict[str, Any]:
    """A state_dict of plain values: constraints by their spec, noise by its seed (which rides in the
    first group, where every tool that saves optimizers finds it)."""
    described = [
        {**g, "constraint": None if g["constraint"] is None else g["constraint"].spec()}
        for g in saved["param_groups"]
    ]
    for g in described:
        if isinstance(g["friction"], Tensor):
            g["friction"] = g["friction"].clone()  # a checkpoint read in place must not write here
    described[0]["rng_state"] = noise.state()
    return {**saved, "param_groups": described}


def fitted(
    state_dict: Mapping[str, Any], groups: list[Group]
) -> tuple[dict[str, Any], dict[str, Any] | None, list[int]]:
    """The checkpoint made ready for these groups, the state of the noise, and which groups are
    strangers (`torch.optim.SGD`'s). Raises before anything is changed if something does not fit."""
    if not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError(
            f"the checkpoint has {_listed(state_dict)} and not the state and param_groups of an "
            f"optimizer; load the entry that optimizer.state_dict() was saved under."
        )
    saved = [dict(g) for g in state_dict["param_groups"]]
    if len(saved) != len(groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} parameter groups and the optimizer {len(groups)}; "
            f"build it with the same groups."
        )
    rng = next((g["rng_state"] for g in saved if g.get("rng_state")), None)
    foreign = []
    for i, (old, group) in enumerate(zip(saved, groups, strict=True)):
        if len(old["params"]) != len(group["params"]):
            raise CheckpointError(
                f"group {i} of the checkpoint has {len(old['params'])} parameters and the "
                f"optimizer's has {len(group['params'])}; build it with the same groups."
            )
        _match_names(i, old, group)
        if "scheme" in old:
            _match(i, old["constraint"], group["constraint"])
            _match_scheme(i, old["scheme"], group["scheme"])
            _match_friction(i, old, group)
            with together(group["params"], CheckpointError):
                _match_state(i, old, group, state_dict["state"])
            for key, value in group.items():  # settings that are newer than the checkpoint
                old.setdefault(key, value)
        else:
            _from_sgd(i, old, group)
            with together(group["params"], CheckpointError):
                _match_state(i, old, group, state_dict["state"])
            foreign.append(i)
        old["constraint"] = group["constraint"]
        old["rng_state"] = None
    return {**state_dict, "param_groups": saved}, rng, foreign


def adopt_momenta(group: Group, names: list[str], state: State, noise: Noise) -> None:
    """Momenta of an SGD checkpoint become momenta on the group's manifold."""
    momenta = {p: (state.pop(p, None) or {}).get(KEYS["v"]) for p in group["params"]}
    constraint: Constraint | None = group["constraint"]
    if constraint is not None:
        constraint.place_([local(p.detach()) for p in group["params"]], names)
    scheme = parse(group["scheme"])
    params = [p for p in group["params"] if momenta[p] is not None]
    if scheme.overdamped or not params:
        return
    if constraint is None:
        for p in params:
            state[p] = {KEYS["v"]: momenta[p]}
        return
    if linked(constraint):
        params = group["params"]
    named = dict(zip(group["params"], names, strict=True))
    chosen = [named[p] for p in params]
    for p in params:
        state[p] = {}
    create(params, chosen, constraint, scheme, state, noise, (), 0)
    home = gather(params, entries(params, state), chosen, constraint, scheme)
    for v, p in zip(home.v, params, strict=True):
        old = momenta[p]
        if old is not None:
            v.copy_(local(old))
    work = home.map(lambda t: wide(t).clone())
    constraint.tangent_(work)
    home.copy_(work)


def same_constraint(old: Constraint | None, new: Constraint | None) -> bool:
    """Whether two constraints are the same manifold."""
    return old is new or _equal(_spec(old), _spec(new))


def described(constraint: Constraint | None) -> str:
    """A constraint for a message."""
    return _shown(_spec(constraint))


def _spec(constraint: Constraint | None) -> dict[str, Any] | None:
    return None if constraint is None else constraint.spec()


def _match(i: int, old: dict[str, Any] | None, constraint: Constraint | None) -> None:
    new = _spec(constraint)
    if old is not None and old.get("type") == "AngularCircle":
        raise CheckpointError(
            f"group {i} was saved with AngularCircle, which no longer exists; use Circle with the same "
            f"radius, and start a new optimizer from the weights alone."
        )
    if old is not None and new is not None and old.get("type") == new["type"]:
        built: Any = constraint  # a dataclass
        defaults = {f.name: f.default for f in fields(built)}
        newer = {k: defaults[k] for k in new if defaults.get(k, MISSING) is not MISSING}
        old = {**{k: newer.get(k) for k in new}, **old}  # fields that are newer than the checkpoint
    if not _equal(old, new):
        raise CheckpointError(
            f"group {i} was saved with the constraint {_shown(old)} and is now built with "
            f"{_shown(new)}; build the optimizer with the constraint of the checkpoint, or start "
            f"a new one from the weights alone."
        )


def _match_scheme(i: int, old: str, new: str) -> None:
    if old != new:
        raise CheckpointError(
            f"group {i} was saved with the scheme {old!r} and is now built with {new!r}; build the "
            f"optimizer with scheme={old!r}, or start a new one from the weights alone."
        )


def _match_names(i: int, old: Group, group: Group) -> None:
    """Equal shapes in another order would load without a word."""
    saved, here = old.get("param_names"), group.get("param_names")
    if not saved or not here:
        return
    for a, b in zip(saved, here, strict=True):
        if a != b:
            raise CheckpointError(
                f"group {i} of the checkpoint has the parameter {a!r} where the optimizer has {b!r}; "
                f"build it with the same parameters in the same order."
            )


def _match_state(i: int, old: Group, group: Group, state: Mapping[Any, Any]) -> None:
    """Every entry must fit the parameter it is for, and be a number."""
    constraint: Constraint = group["constraint"] or FREE
    params = group["params"]
    lists = needed(constraint, parse(group["scheme"]))
    slack: list[Tensor] = []
    if "xi" in lists and any(state.get(key) for key in old["params"]):
        q = [local(p.detach()) for p in params]
        slack = constraint.slacks([torch.zeros_like(t) for t in q] if not linked(constraint) else q)
        slack = [joined(t, p) for t, p in zip(slack, params, strict=False)]
    for k, (key, p, name) in enumerate(zip(old["params"], params, names_in(group, i), strict=True)):
        held = state.get(key) or {}
        shapes = {"v": p.shape, "R": p.shape}
        if k < len(slack):
            shapes.update(dict.fromkeys(("xi", "eta", "S"), slack[k].shape))
        for short, shape in shapes.items():
            entry = held.get(KEYS[short])
            if not isinstance(entry, Tensor):
                continue
            if entry.shape != shape:
                raise CheckpointError(
                    f"{name!r} has shape {tuple(p.shape)}, so its {KEYS[short]} must have "
                    f"{tuple(shape)}, and in the checkpoint it has {tuple(entry.shape)}; load the "
                    f"checkpoint of this model, with its parameters in the same order."
                )
            if getattr(entry, "placements", None) != getattr(p, "placements", None):
                raise CheckpointError(
                    f"the {KEYS[short]} of {name!r} does not lie on the processes as the parameter does; "
                    f"load the checkpoint by torch.distributed.checkpoint.state_dict."
                    f"set_optimizer_state_dict, which distributes it."
                )
            if not entry.is_meta and not bool(torch.isfinite(local(entry)).all()):
                raise CheckpointError(
                    f"the {KEYS[short]} of {name!r} in the checkpoint holds NaN or Inf; load an earlier "
                    f"one."
                )


def _match_friction(i: int, old: Group, group: Group) -> None:
    friction = old.get("friction")
    if not isinstance(friction, Tensor):
        return
    shape = friction_shape(group)
    if tuple(friction.shape) != shape:
        raise CheckpointError(
            f"group {i} of the checkpoint has frictions of shape {tuple(friction.shape)} and the "
            f"optimizer's must have {shape}: one row per thermostat, one entry per replica; "
            f"build it as it was saved."
        )


def _from_sgd(i: int, old: Group, group: Group) -> None:
    """Make a group of `torch.optim.SGD` one of ours."""
    if not {"momentum", "dampening", "nesterov"} <= old.keys():
        raise CheckpointError(
            f"group {i} of the checkpoint is neither Langevin's nor torch.optim.SGD's (it has "
            f"{_listed(k for k in old if k != 'params')}); only those can be loaded."
        )
    for key in ("dampening", "nesterov"):
        if old.pop(key, 0):
            raise CheckpointError(
                f"group {i} of the checkpoint is of torch.optim.SGD with {key}, which Langevin does "
                f"not have; continue with SGD, or start from the weights alone."
            )
    for key in ("differentiable", "fused"):
        old.pop(key, None)
    for key, value in group.items():
        if key not in ("params", "momentum_buffer"):
            old.setdefault(key, value)
    old["foreach"] = group["foreach"]
    old["started"] = True


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and a.shape == b.shape and bool(torch.equal(a.cpu(), b.cpu()))
    return bool(a == b)


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(sorted(map(str, keys))) or "nothing"


def _shown(spec: dict[str, Any] | None) -> str:
    if spec is None:
        return "None"
    values = ", ".join(f"{k}={_value(v)}" for k, v in spec.items() if k != "type")
    return f"{spec['type']}({values})"


def _value(v: Any) -> str:
    if not isinstance(v, Tensor):
        return str(v)
    return f"<{tuple(v.shape)}: {v.min().item():g} to {v.max().item():g}>"
