"""Rules (name globs, module types) -> parameter groups."""

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from holonomic.constraints import Constraint
from holonomic.errors import SettingError

Rule = str | type[nn.Module]
Settings = Constraint | Mapping[str, Any] | None

_WILD = frozenset("*?[")
_NORMS = (
    nn.modules.batchnorm._BatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.LocalResponseNorm,
)


def groups(
    model: nn.Module, rules: Mapping[Rule, Settings], **defaults: Any
) -> list[dict[str, Any]]:
    """Parameter groups for `Langevin` from rules about the model.

    A rule's key is a parameter's name, a glob over names (``"*.weight"``, ``"encoder.*"``) or a module
    type, which stands for the parameters of all modules of that type. Its value is a constraint, or a
    dictionary of settings for the group, or None to take the parameters out of every other rule.
    Parameters that no rule claims form the last group, with ``defaults`` only.

    Biases and the parameters of normalization layers take the other settings of a rule but not its
    constraint, unless they are asked for: by their exact name, biases by a glob that ends in
    ``bias``, norm weights by the type of the norm. Parameters with ``requires_grad=False`` are left
    out.

    Raises `SettingError` if a rule matches nothing, or if two rules claim one parameter. Groups without
    a constraint suit any torch optimizer; one with a constraint raises if it is given to an optimizer that
    would ignore it.

    >>> import torch.nn as nn, holonomic as hm
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    >>> for g in hm.groups(model, {"*.weight": hm.Circle(1.0)}):
    ...     print(g["name"], [name for name, p in g["params"]])
    *.weight ['0.weight', '2.weight']
    rest ['0.bias', '2.bias']
    """
    aliases: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    members: dict[Rule | None, list[tuple[str, Any]]] = {}
    spared: set[int] = set()
    matched: dict[Rule, int] = dict.fromkeys(rules, 0)
    for name, p in model.named_parameters():
        known = aliases[id(p)]
        claims = [r for r in rules if any(matches(r, n, modules) for n in known)]
        for claim in claims:
            matched[claim] += p.requires_grad
        if not p.requires_grad:
            continue
        claims = [r for r in claims if rules[r] is None] or claims
        if len(claims) > 1:
            shown = " and ".join(_shown(r) for r in claims)
            raise SettingError(
                f"the rules {shown} both claim {name!r}; make one of them narrower, so that every "
                f"parameter has one rule."
            )
        owner = claims[0] if claims else None
        members.setdefault(owner, []).append((name, p))
        if not any(_asked(owner, n, modules) for n in known):
            spared.add(id(p))
    for wanted, count in matched.items():
        if not count:
            raise SettingError(
                f"the rule {_shown(wanted)} matches no trainable parameter; the model has "
                f"{_listed([n for n, p in model.named_parameters() if p.requires_grad])}."
            )
    result = []
    for rule in (*rules, None):
        own = {} if rule is None else _settings(rule, rules[rule])
        group = {"name": _label(rule), **defaults, **own}
        result += _split(group, members.get(rule, []), spared)
    return result


def _split(
    group: dict[str, Any], members: list[tuple[str, Any]], spared: set[int]
) -> list[dict[str, Any]]:
    """The group, and if it has a constraint a second one for those it is not meant for."""
    if group.get("constraint") is None:
        return [{"params": members, **group}] if members else []
    free = {**group, "name": f"{group['name']} (biases, norms)", "constraint": None}
    kept = [(name, p) for name, p in members if id(p) not in spared]
    left = [(name, p) for name, p in members if id(p) in spared]
    return [
        kind({"params": members, **settings})
        for kind, members, settings in ((ConstrainedGroup, kept, group), (dict, left, free))
        if members
    ]


class ConstrainedGroup(dict[str, Any]):
    """A group with a constraint. Other optimizers than `Langevin` keep settings they do not know and
    ignore them; what gives them away is that they add settings of their own."""

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self and key in FOREIGN:
            constraint = type(self["constraint"]).__name__
            raise SettingError(
                f"the group {self.get('name')!r} has the constraint {constraint}, which an optimizer with "
                f"the setting {key!r} would ignore; give it to holonomic.Langevin, or take the constraint "
                f"out."
            )
        return super().setdefault(key, default)


#: Settings of torch's optimizers, of which each has at least one that `Langevin` has not.
FOREIGN = frozenset(
    (
        "alpha",
        "amsgrad",
        "beta2_decay",
        "betas",
        "capturable",
        "centered",
        "dampening",
        "eps",
        "etas",
        "history_size",
        "lambd",
        "lr_decay",
        "momentum_decay",
        "nesterov",
        "ns_coefficients",
        "rho",
    )
)


@torch.no_grad()
def place(
    model: nn.Module, rules: Mapping[Rule, Settings], generator: torch.Generator | None = None
) -> None:
    """Put the weights of a model on their manifolds, in place: averages, an EMA, a starting point.

    Rules are those of `groups`; weights go to the nearest point, or are drawn anew where a constraint has
    ``init="orthogonal"`` and a generator is given. All are checked before any is moved.

    >>> import torch.nn as nn, holonomic as hm
    >>> model = nn.Linear(3, 2)
    >>> hm.place(model, {"weight": hm.Sphere(2.0, slack=False)})
    >>> model.weight.norm(dim=1).detach().round(decimals=5)
    tensor([2., 2.])
    """
    parts = [
        (
            group["constraint"],
            [p.detach() for _, p in group["params"]],
            [n for n, _ in group["params"]],
        )
        for group in groups(model, rules)
        if group.get("constraint") is not None
    ]
    for constraint, q, names in parts:
        constraint.check(q, names)
    for constraint, q, names in parts:
        constraint.place_(q, names, generator)


def _settings(rule: Rule, value: Settings) -> dict[str, Any]:
    if value is None or isinstance(value, Constraint):
        return {"constraint": value}
    if isinstance(value, Mapping):
        return dict(value)
    raise SettingError(
        f"the rule {_shown(rule)} has the value {value!r}; give a constraint, a dictionary of "
        f"settings, or None."
    )


def _owner(name: str, modules: dict[str, nn.Module]) -> nn.Module:
    return modules[name.rpartition(".")[0]]


def matches(rule: Rule, name: str, modules: dict[str, nn.Module]) -> bool:
    if isinstance(rule, str):
        return fnmatchcase(name, rule)
    if isinstance(rule, type) and issubclass(rule, nn.Module):
        parts = name.split(".")[:-1]
        above = [".".join(parts[:k]) for k in range(len(parts) + 1)]
        return any(isinstance(modules[m], rule) for m in above)
    raise SettingError(f"{rule!r} is not a rule; write a name, a glob or a module type.")


def _asked(rule: Rule | None, name: str, modules: dict[str, nn.Module]) -> bool:
    """Whether the rule means this parameter in particular, should it be a bias or of a norm."""
    last = name.rpartition(".")[2]
    norm = _is_norm(type(_owner(name, modules)))
    bias = last == "bias" or last.endswith("_bias") or last.startswith("bias_")
    if rule is None or not (bias or norm):
        return not (bias or norm)
    if isinstance(rule, str):
        return not _WILD & set(rule) or (bias and not norm and rule.endswith("bias"))
    return norm and not bias and _is_norm(rule)


def _is_norm(kind: type[nn.Module]) -> bool:
    """Torch's normalization layers, and what others call theirs: LlamaRMSNorm, LayerNorm2d."""
    return issubclass(kind, _NORMS) or re.search(r"Norm(\dd)?$", kind.__name__) is not None


def _label(rule: Rule | None) -> str:
    if rule is None:
        return "rest"
    return rule if isinstance(rule, str) else rule.__name__


def _shown(rule: Rule) -> str:
    return repr(rule) if isinstance(rule, str) else rule.__name__


def _listed(found: list[str]) -> str:
    shown = ", ".join(map(repr, found[:8]))
    return shown + (f" and {len(found) - 8} more" if len(found) > 8 else "")
