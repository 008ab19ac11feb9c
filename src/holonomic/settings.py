"""Reading and checking parameter groups: every refusal names the thing, its value and the remedy."""

import math
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from holonomic import native
from holonomic.constraints import Constraint
from holonomic.errors import SettingError
from holonomic.scheme import parse
from holonomic.thermostat import SCOPES

NONFINITE = ("raise", "skip", "allow")
UNSUPPORTED = ("capturable", "differentiable", "nesterov", "dampening")

Group = dict[str, Any]


def reject(**flags: object) -> None:
    """Flags of other optimizers that this one does not have: never ignored."""
    for flag, value in flags.items():
        if value:
            raise SettingError(f"{flag}={value!r} is not supported by Langevin; leave it out.")


def names(group: Group, i: int) -> list[str]:
    """The names of a group's parameters, as well as they are known."""
    given = group.get("param_names")
    return (
        list(given) if given else [f"group {i}, parameter {k}" for k in range(len(group["params"]))]
    )


def names_of(group: Group, i: int, members: list[Tensor]) -> list[str]:
    """The names of some of a group's parameters, in their order."""
    if len(members) == len(group["params"]):
        return names(group, i)
    chosen = {id(p) for p in members}
    return [n for p, n in zip(group["params"], names(group, i), strict=True) if id(p) in chosen]


def physics(group: Group) -> dict[str, Any]:
    """The numbers the flows need."""
    numbers = {k: float(group[k]) for k in ("lr", "momentum", "temperature", "weight_decay")}
    return {**numbers, "maximize": group["maximize"]}


def check_thermostat(group: Group, i: int) -> None:
    """The settings of adaptive friction, where a scheme uses it."""
    if group["thermostat"] not in SCOPES:
        raise SettingError(
            f"group {i}: thermostat is {group['thermostat']!r}; it must be one of {SCOPES}."
        )
    if not parse(group["scheme"]).adaptive:
        return
    if group["coupling"] is None:
        raise SettingError(
            f"group {i}: scheme {group['scheme']!r} adapts its friction and needs a coupling; pass "
            f"coupling=0.1, say (how fast the friction follows the kinetic temperature)."
        )
    for key in ("coupling", "noise"):
        value = group[key]
        if not (math.isfinite(value) and value >= 0):
            raise SettingError(f"group {i}: {key} is {value}; it must be a finite number >= 0.")
    friction = group["friction"]
    if not (isinstance(friction, Tensor) or math.isfinite(friction)):
        raise SettingError(f"group {i}: friction is {friction}; it must be a finite number.")
    constraint = group["constraint"]
    if group["thermostat"] == "tensor" and constraint is not None and constraint.joint:
        raise SettingError(
            f"group {i}: thermostat='tensor' cannot go with {type(constraint).__name__}, which "
            f"links the tensors of the group; use thermostat='group'."
        )


def moving(group: Group, i: int) -> list[Tensor]:
    """The parameters that have a gradient; all of them, if one constraint links them."""
    params: list[Tensor] = [p for p in group["params"] if p.grad is not None]
    for p in params:
        if p.grad is not None and p.grad.layout is not torch.strided:
            name = names_of(group, i, [p])[0]
            raise SettingError(
                f"the gradient of {name!r} is sparse, which Langevin does not support; use dense "
                f"gradients (nn.Embedding(sparse=False))."
            )
    constraint = group["constraint"]
    return group["params"] if params and constraint is not None and constraint.joint else params


# ---------------------------------------------------------------------- checks
def listed(group: Group, existing: list[Group]) -> Group:
    """The new group with its parameters as a list; raises if it is empty or repeats a parameter."""
    here = len(existing)
    params = group.get("params", [])
    if isinstance(params, set):
        raise SettingError(
            f"parameter group {here} is a set, whose order changes from run to run; give a list."
        )
    params = [params] if isinstance(params, Tensor) else list(params)
    if not params:
        raise SettingError(
            f"parameter group {here} is empty; leave it out, or check the pattern that was to fill it."
        )
    owner = {
        id(p): (name, i)
        for i, g in enumerate(existing)
        for p, name in zip(g["params"], names(g, i), strict=True)
    }
    for k, entry in enumerate(params):
        name, p = entry if isinstance(entry, tuple) else (f"group {here}, parameter {k}", entry)
        if id(p) in owner:
            known, i = owner[id(p)]
            raise SettingError(
                f"{name!r} in group {here} is the same parameter as {known!r} in group {i}; a "
                f"parameter can be in one group only, and once."
            )
        owner[id(p)] = (name, here)
    return {**group, "params": params}


def check_keys(group: Group, i: int, known: Iterable[str]) -> None:
    """Settings that would be ignored in silence: those of other optimizers, and misspelt ones."""
    reject(**{flag: group.get(flag) for flag in UNSUPPORTED})
    for key in ("seed", "generator"):
        if key in group:
            raise SettingError(f"group {i}: {key} is for all groups; give it to Langevin itself.")
    known = [*known, "params"]
    for key in group:
        similar = get_close_matches(key, known, n=1, cutoff=0.85)
        if key not in known and similar:
            raise SettingError(f"group {i} has the unknown setting {key!r}; write {similar[0]!r}.")


def check_group(group: Group, i: int) -> None:
    """Everything that can be wrong with a new group; nothing is changed."""
    check_values(group, i)
    where = f"group {i}"
    check_thermostat(group, i)
    if group["nonfinite"] not in NONFINITE:
        raise SettingError(
            f"{where}: nonfinite is {group['nonfinite']!r}; it must be one of {NONFINITE}."
        )
    _check_fused(group["fused"], i)
    for p, name in zip(group["params"], names(group, i), strict=True):
        if not p.is_floating_point():
            raise SettingError(
                f"{name!r} has dtype {p.dtype}; Langevin moves real floating-point parameters only."
            )
    constraint = group["constraint"]
    _check_batch_dims(group, i)
    if constraint is None:
        return
    if not isinstance(constraint, Constraint):
        remedy = (
            "write Circle(...), with its radius" if isinstance(constraint, type) else "use None"
        )
        raise SettingError(
            f"{where}: constraint is {constraint!r}, which is not a Constraint; {remedy}."
        )
    with torch.no_grad():
        constraint.check([p.detach() for p in group["params"]], names(group, i))


def _check_fused(fused: object, i: int) -> None:
    """Whether the compiled kernels can be had; without a compiler the ordinary way serves as well."""
    if not isinstance(fused, bool | None):
        raise SettingError(f"group {i}: fused is {fused!r}; it must be True, False or None.")
    if fused and (why := native.reason()) is not None:
        warnings.warn(
            f"fused=True has no effect: {why}. The numbers are the same, the steps slower.",
            stacklevel=2,
        )


def _check_batch_dims(group: Group, i: int) -> None:
    """Stacked groups must be stacked alike, and their constraint must know of it."""
    count, constraint = group["batch_dims"], group["constraint"]
    if not isinstance(count, int) or count < 0:
        raise SettingError(f"group {i}: batch_dims is {count!r}; it must be an integer >= 0.")
    if isinstance(constraint, Constraint) and count > constraint.batch_dims:
        raise SettingError(
            f"group {i} is a stack (batch_dims={count}) and its {type(constraint).__name__} has "
            f"batch_dims={constraint.batch_dims}, so it would tie the systems together; give the "
            f"constraint to Replicas.groups, or set its batch_dims."
        )
    shapes = {tuple(p.shape[:count]) for p in group["params"]}
    if len(shapes) > 1:
        raise SettingError(
            f"group {i}: the first batch_dims={count} dimensions of its tensors differ "
            f"({sorted(shapes)}); tensors of one group must be stacked alike."
        )


def check_values(group: Group, i: int) -> None:
    """The numbers of a group, which a schedule may change between steps."""
    lr, mu, tau = (_number(group, key, i) for key in ("lr", "momentum", "temperature"))
    if not (math.isfinite(lr) and lr >= 0):
        raise SettingError(f"group {i}: lr is {lr}; it must be a finite number >= 0.")
    if not 0 <= mu <= 1:
        raise SettingError(
            f"group {i}: momentum is {mu}; it must lie in [0, 1] (1 is motion without friction)."
        )
    if not (math.isfinite(tau) and tau >= 0):
        raise SettingError(
            f"group {i}: temperature is {tau}; it must be a finite number >= 0 (0 is no noise)."
        )
    decay = _number(group, "weight_decay", i)
    if not (math.isfinite(decay) and decay >= 0):
        raise SettingError(f"group {i}: weight_decay is {decay}; it must be a finite number >= 0.")


def _number(group: Group, key: str, i: int) -> float:
    value = group[key]
    if isinstance(value, float):
        return value
    if isinstance(value, str | None) or (isinstance(value, Tensor) and value.numel() != 1):
        raise SettingError(f"group {i}: {key} is {value!r}; it must be one number.")
    return float(value)
