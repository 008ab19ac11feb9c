"""Reading and checking parameter groups: every refusal names the thing, its value and the remedy."""

import math
import warnings
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from holonomic import distributed, native
from holonomic.constraints import Constraint, Orthogonal, Sphere
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


def reject_unknown(unknown: Iterable[str], known: Iterable[str]) -> None:
    """Arguments that Langevin does not have."""
    known = [*known, "seed", "generator", "process_group"]
    for key in unknown:
        similar = get_close_matches(key, known, n=1, cutoff=0.7)
        remedy = f"did you mean {similar[0]!r}?" if similar else f"it has {', '.join(known)}."
        raise SettingError(f"Langevin has no setting {key!r}; {remedy}")


def require_parameters(params: object) -> None:
    """Raise with a remedy for what is often given in their place."""
    if isinstance(params, nn.Module) or hasattr(params, "named_parameters"):
        raise SettingError(
            f"Langevin was given a {type(params).__name__}, and takes parameters: pass "
            f"model.named_parameters(), or groups such as hm.groups(model, {{'*.weight': "
            f"hm.Circle(1.0)}}), for replicas replicas.groups({{}})."
        )


def names(group: Group, i: int) -> list[str]:
    """The names of a group's parameters, as well as they are known."""
    given = group.get("param_names")
    return (
        list(given) if given else [f"group {i}, parameter {k}" for k in range(len(group["params"]))]
    )


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
        value = _number(group, key, i)
        if not (math.isfinite(value) and value >= 0):
            raise SettingError(f"group {i}: {key} is {value}; it must be a finite number >= 0.")
    friction, constraint = group["friction"], group["constraint"]
    if isinstance(friction, str | None) or not math.isfinite(
        torch.as_tensor(friction).sum().item()
    ):
        raise SettingError(f"group {i}: friction is {friction!r}; it must be a finite number.")
    if group["thermostat"] == "tensor" and linked(constraint):
        raise SettingError(
            f"group {i}: thermostat='tensor' cannot go with {type(constraint).__name__}, which "
            f"links the tensors of the group; use thermostat='group'."
        )


def moving(group: Group, names: list[str]) -> list[int]:
    """The numbers of the parameters that have a gradient; of all, if one constraint links them."""
    params = group["params"]
    found = [k for k, p in enumerate(params) if p.grad is not None]
    for k in found:
        if params[k].grad.layout is not torch.strided:
            raise SettingError(
                f"the gradient of {names[k]!r} is sparse, which Langevin does not support; use dense "
                f"gradients (nn.Embedding(sparse=False))."
            )
    if found and linked(group["constraint"]):
        check_linked(group, names)
        return list(range(len(params)))
    return found


def linked(constraint: Constraint | None) -> bool:
    """Whether one equation holds over all tensors of a group."""
    return constraint is not None and constraint.grain == "group"


def check_linked(group: Group, names: list[str]) -> None:
    """What one constraint links moves together, or not at all."""
    frozen = [n for p, n in zip(group["params"], names, strict=True) if not p.requires_grad]
    if frozen and len(frozen) < len(names):
        raise SettingError(
            f"{frozen[0]!r} has requires_grad=False, and {type(group['constraint']).__name__} would move "
            f"it together with {next(n for n in names if n not in frozen)!r}; take it out of the group."
        )


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


#: Settings that are checked whole when one of them changes.
_WHOLE = (
    "scheme",
    "coupling",
    "noise",
    "thermostat",
    "batch_dims",
    "maximize",
    "foreach",
    "fused",
    "nonfinite",
)


def signature(group: Group) -> tuple[Any, ...]:
    """What tells whether a group must be checked whole again."""
    hot = bool(group["temperature"])
    return (group["constraint"], hot, bool(group["weight_decay"]), *(group[k] for k in _WHOLE))


def check_group(group: Group, i: int) -> None:
    """Everything that can be wrong with a group; nothing is changed."""
    check_values(group, i)
    constraint = group["constraint"]
    if constraint is not None and not isinstance(constraint, Constraint):
        remedy = (
            "write Circle(...), with its radius" if isinstance(constraint, type) else "use None"
        )
        raise SettingError(
            f"group {i}: constraint is {constraint!r}, which is not a Constraint; {remedy}."
        )
    check_thermostat(group, i)
    _check_choices(group, i)
    known = names(group, i)
    for p, name in zip(group["params"], known, strict=True):
        if not p.is_floating_point():
            raise SettingError(
                f"{name!r} has dtype {p.dtype}; Langevin moves real floating-point parameters only."
            )
    _check_batch_dims(group, i)
    distributed.check_group(group, i, known)
    if linked(constraint):
        check_linked(group, known)


def check_weights(group: Group, i: int) -> None:
    """Whether the weights of a group can be put on its manifold; those that are frozen stay as they are."""
    constraint: Constraint | None = group["constraint"]
    q, known = trainable(group, i)
    if constraint is not None and q:
        with torch.no_grad(), distributed.together(group["params"]):
            constraint.check(q, known)


def trainable(group: Group, i: int) -> tuple[list[Tensor], list[str]]:
    """The weights that may be moved, of distributed tensors this process's part, and their names."""
    chosen = [
        (p, n) for p, n in zip(group["params"], names(group, i), strict=True) if p.requires_grad
    ]
    return [distributed.local(p.detach()) for p, _ in chosen], [n for _, n in chosen]


def _check_choices(group: Group, i: int) -> None:
    if group["nonfinite"] not in NONFINITE:
        raise SettingError(
            f"group {i}: nonfinite is {group['nonfinite']!r}; it must be one of {NONFINITE}."
        )
    for key in ("foreach", "fused"):
        if not isinstance(group[key], bool | None):
            raise SettingError(
                f"group {i}: {key} is {group[key]!r}; it must be True, False or None."
            )
    if not isinstance(group["maximize"], bool):
        raise SettingError(
            f"group {i}: maximize is {group['maximize']!r}; it must be True or False."
        )
    if group["foreach"] and group["fused"]:
        raise SettingError(
            f"group {i}: foreach=True and fused=True were both given; give one of them."
        )
    if group["fused"] and (why := native.reason()) is not None:
        raise SettingError(
            f"group {i}: fused=True asks for the compiled kernels, and there are none: {why}. Leave "
            f"fused out: the numbers are the same, the steps slower."
        )
    constraint = group["constraint"]
    fixed = isinstance(constraint, Orthogonal) or (
        isinstance(constraint, Sphere) and not constraint.slack
    )
    if fixed and group["weight_decay"]:
        warnings.warn(
            f"group {i}: weight_decay={float(group['weight_decay']):g} has no effect, because "
            f"{type(constraint).__name__} fixes the norm of the weights; leave it out.",
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
